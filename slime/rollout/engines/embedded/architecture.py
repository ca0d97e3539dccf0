"""What a Hugging Face config says about a decoder: shapes, biases, norms and rotary embedding."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from slime.errors import UserError

#: Families that differ only in the fields of `Architecture`.
FAMILIES = ("llama", "qwen2", "qwen3")


@dataclass(frozen=True)
class Rope:
    """Rotary position embedding.

    Attributes:
        theta: base of the frequencies.
        kind: "default", "linear" or "llama3".
        factor, low_freq_factor, high_freq_factor, original_max_position: of the scaled kinds.
    """

    theta: float
    kind: str = "default"
    factor: float = 1.0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_max_position: int = 8192

    @staticmethod
    def from_config(config: Mapping[str, Any]) -> Rope:
        """Both spellings: ``rope_theta`` with ``rope_scaling``, and transformers 5's ``rope_parameters``.

        Raises:
            UserError: a kind of scaling that is not known here.
        """
        fields = dict(config.get("rope_parameters") or config.get("rope_scaling") or {})
        theta = fields.get("rope_theta") or config.get("rope_theta") or 10000.0
        kind = fields.get("rope_type") or fields.get("type") or "default"
        partial = fields.get("partial_rotary_factor") or config.get("partial_rotary_factor") or 1.0
        if kind not in ("default", "linear", "llama3") or partial != 1.0:
            raise UserError(
                f"the embedded engine does not know rotary embedding of kind '{kind}' (rotary fraction {partial})",
                why="it implements default, linear and llama3 over the whole head",
                fix="use --rollout-engine sglang for this model",
            )
        return Rope(
            theta=float(theta),
            kind=kind,
            factor=float(fields.get("factor", 1.0)),
            low_freq_factor=float(fields.get("low_freq_factor", 1.0)),
            high_freq_factor=float(fields.get("high_freq_factor", 4.0)),
            original_max_position=int(fields.get("original_max_position_embeddings", 8192)),
        )

    def inverse_frequencies(self, head_dim: int) -> torch.Tensor:
        """float32 [head_dim / 2], radians per position.

        llama3 (Llama 3.1 model card): wavelengths above the original context are stretched by ``factor``, short
        ones kept, and those between blended.
        """
        base = 1.0 / self.theta ** (torch.arange(0, head_dim, 2, dtype=torch.float32) / head_dim)
        if self.kind == "default":
            return base
        if self.kind == "linear":
            return base / self.factor
        wavelengths = 2 * math.pi / base
        kept = self.original_max_position / wavelengths
        blend = (kept - self.low_freq_factor) / (self.high_freq_factor - self.low_freq_factor)
        blend = blend.clamp(0.0, 1.0)
        return (1 - blend) * base / self.factor + blend * base

    def tables(self, num_positions: int, head_dim: int, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
        """cos and *signed* sin, each [num_positions, 1, head_dim].

        The sine of the first half is negative, so that rotating is ``x * cos + roll(x, head_dim / 2) * sin``.
        """
        angles = torch.outer(torch.arange(num_positions, dtype=torch.float32), self.inverse_frequencies(head_dim))
        cos, sin = angles.cos(), angles.sin()
        return (
            torch.cat([cos, cos], dim=-1).to(dtype).unsqueeze(1),
            torch.cat([-sin, sin], dim=-1).to(dtype).unsqueeze(1),
        )


@dataclass(frozen=True)
class Architecture:
    """Shapes of one decoder. ``*_bias`` and ``qk_norm`` tell the families apart."""

    model_type: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    rms_norm_eps: float
    rope: Rope
    tie_word_embeddings: bool
    qkv_bias: bool
    output_bias: bool
    mlp_bias: bool
    qk_norm: bool
    max_positions: int
    dtype: str
    eos_token_ids: tuple[int, ...]

    @property
    def group_size(self) -> int:
        """Query heads per key-value head."""
        return self.num_heads // self.num_kv_heads

    @staticmethod
    def from_dir(model_path: str | Path) -> Architecture:
        """Read ``config.json`` (and the stop tokens of ``generation_config.json``).

        Raises:
            UserError: no such file, or a model that this engine does not implement.
        """
        path = Path(model_path) / "config.json"
        if not path.is_file():
            raise UserError(f"{path} does not exist", fix="pass --model-path with a Hugging Face model directory")
        config = json.loads(path.read_text())
        generation_path = path.with_name("generation_config.json")
        generation = json.loads(generation_path.read_text()) if generation_path.is_file() else {}
        return Architecture.from_config(config, generation.get("eos_token_id"))

    @staticmethod
    def from_config(config: Mapping[str, Any], generation_eos: int | list[int] | None = None) -> Architecture:
        """The fields of a parsed ``config.json``.

        Raises:
            UserError: a family, activation or attention that this engine does not implement.
        """
        family = config.get("model_type", "")
        _refuse_unknown(config, family)
        heads = int(config["num_attention_heads"])
        llama_bias = bool(config.get("attention_bias", False))
        return Architecture(
            model_type=family,
            vocab_size=int(config["vocab_size"]),
            hidden_size=int(config["hidden_size"]),
            intermediate_size=int(config["intermediate_size"]),
            num_layers=int(config["num_hidden_layers"]),
            num_heads=heads,
            num_kv_heads=int(config.get("num_key_value_heads") or heads),
            head_dim=int(config.get("head_dim") or config["hidden_size"] // heads),
            rms_norm_eps=float(config.get("rms_norm_eps", 1e-6)),
            rope=Rope.from_config(config),
            tie_word_embeddings=bool(config.get("tie_word_embeddings", False)),
            qkv_bias=True if family == "qwen2" else llama_bias,
            output_bias=False if family == "qwen2" else llama_bias,
            mlp_bias=bool(config.get("mlp_bias", False)),
            qk_norm=family == "qwen3",
            max_positions=int(config.get("max_position_embeddings", 2048)),
            dtype=str(config.get("dtype") or config.get("torch_dtype") or "float32"),
            eos_token_ids=_token_ids(config.get("eos_token_id"), generation_eos),
        )

    def parameter_shapes(self) -> Iterator[tuple[str, tuple[int, ...]]]:
        """(Hugging Face name, shape) of every parameter that a checkpoint of this model has, in its order."""
        hidden, inner = self.hidden_size, self.intermediate_size
        queries, keys = self.num_heads * self.head_dim, self.num_kv_heads * self.head_dim
        yield "model.embed_tokens.weight", (self.vocab_size, hidden)
        for layer in range(self.num_layers):
            prefix = f"model.layers.{layer}."
            for name, rows in (("q", queries), ("k", keys), ("v", keys)):
                yield f"{prefix}self_attn.{name}_proj.weight", (rows, hidden)
                if self.qkv_bias:
                    yield f"{prefix}self_attn.{name}_proj.bias", (rows,)
            yield f"{prefix}self_attn.o_proj.weight", (hidden, queries)
            if self.output_bias:
                yield f"{prefix}self_attn.o_proj.bias", (hidden,)
            if self.qk_norm:
                yield f"{prefix}self_attn.q_norm.weight", (self.head_dim,)
                yield f"{prefix}self_attn.k_norm.weight", (self.head_dim,)
            for name, shape in (("gate", (inner, hidden)), ("up", (inner, hidden)), ("down", (hidden, inner))):
                yield f"{prefix}mlp.{name}_proj.weight", shape
                if self.mlp_bias:
                    yield f"{prefix}mlp.{name}_proj.bias", shape[:1]
            yield f"{prefix}input_layernorm.weight", (hidden,)
            yield f"{prefix}post_attention_layernorm.weight", (hidden,)
        yield "model.norm.weight", (hidden,)
        if not self.tie_word_embeddings:
            yield "lm_head.weight", (self.vocab_size, hidden)


def _refuse_unknown(config: Mapping[str, Any], family: str) -> None:
    if family not in FAMILIES:
        raise UserError(
            f"the embedded engine does not implement the model type '{family}'",
            why=f"it implements: {', '.join(FAMILIES)}",
            fix="use --rollout-engine sglang for this model",
        )
    if config.get("hidden_act", "silu") != "silu":
        raise UserError(f"the embedded engine implements the activation silu, not '{config['hidden_act']}'")
    if config.get("use_sliding_window"):
        raise UserError("the embedded engine does not implement sliding-window attention")


def _token_ids(*sources: int | list[int] | None) -> tuple[int, ...]:
    found: list[int] = []
    for source in sources:
        if source is not None:
            found += [source] if isinstance(source, int) else source
    return tuple(dict.fromkeys(found))
