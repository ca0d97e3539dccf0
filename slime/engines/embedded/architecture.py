"""What a Hugging Face config says about a decoder: shapes, biases, norms and rotary embedding."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from slime.engines.embedded.architecture_parts import Experts, Latent, yarn_mscale
from slime.errors import UserError

#: Families that differ only in the fields of `Architecture`.
FAMILIES = ("llama", "qwen2", "qwen3", "qwen3_moe", "glm4", "glm4_moe", "deepseek_v3")
_GLM = ("glm4", "glm4_moe")


@dataclass(frozen=True)
class Rope:
    """Rotary position embedding.

    Attributes:
        theta: base of the frequencies.
        kind: "default", "linear", "llama3" or "yarn".
        factor, low_freq_factor, high_freq_factor, original_max_position: of the scaled kinds.
        partial: share of each head that is rotated.
        interleaved: a pair is two neighbours, not two dimensions half of the rotated part apart.
        beta_fast, beta_slow, truncate: of yarn: rotations over the original context between which it blends.
        attention_factor: on cos and sin (yarn).
    """

    theta: float
    kind: str = "default"
    factor: float = 1.0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_max_position: int = 8192
    partial: float = 1.0
    interleaved: bool = False
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    truncate: bool = True
    attention_factor: float = 1.0

    @staticmethod
    def from_config(config: Mapping[str, Any]) -> Rope:
        """Both spellings: ``rope_theta`` with ``rope_scaling``, and transformers 5's ``rope_parameters``.

        Raises:
            UserError: a kind of scaling that is not known here.
        """
        fields = dict(config.get("rope_parameters") or config.get("rope_scaling") or {})
        theta = fields.get("rope_theta") or config.get("rope_theta") or 10000.0
        kind = fields.get("rope_type") or fields.get("type") or "default"
        family = config.get("model_type", "")
        partial = fields.get("partial_rotary_factor") or config.get("partial_rotary_factor")
        if kind not in ("default", "linear", "llama3", "yarn"):
            raise UserError(
                f"the embedded engine does not know rotary embedding of kind '{kind}'",
                why="it implements default, linear, llama3 and yarn",
                fix="use --rollout-engine sglang for this model",
            )
        longest = config.get("max_position_embeddings", 8192) if kind == "yarn" else 8192
        return Rope(
            theta=float(theta),
            kind=kind,
            factor=float(fields.get("factor", 1.0)),
            low_freq_factor=float(fields.get("low_freq_factor", 1.0)),
            high_freq_factor=float(fields.get("high_freq_factor", 4.0)),
            original_max_position=int(fields.get("original_max_position_embeddings") or longest),
            partial=float(partial or (0.5 if family in _GLM else 1.0)),
            interleaved=family in ("glm4", "deepseek_v3"),
            beta_fast=float(fields.get("beta_fast") or 32),
            beta_slow=float(fields.get("beta_slow") or 1),
            truncate=bool(fields.get("truncate", True)),
            attention_factor=_attention_factor(fields) if kind == "yarn" else 1.0,
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
        if self.kind == "yarn":
            return self._yarn(base, head_dim)
        wavelengths = 2 * math.pi / base
        kept = self.original_max_position / wavelengths
        blend = (kept - self.low_freq_factor) / (self.high_freq_factor - self.low_freq_factor)
        blend = blend.clamp(0.0, 1.0)
        return (1 - blend) * base / self.factor + blend * base

    def _yarn(self, base: torch.Tensor, dim: int) -> torch.Tensor:
        """Peng et al. (arXiv:2309.00071): dimensions that turn often in the original context keep their frequency,
        those that turn little are stretched by ``factor``, those between are blended."""

        def dimension_of(rotations: float) -> float:
            turns = self.original_max_position / (rotations * 2 * math.pi)
            return dim * math.log(turns) / (2 * math.log(self.theta))

        low, high = dimension_of(self.beta_fast), dimension_of(self.beta_slow)
        if self.truncate:
            low, high = math.floor(low), math.ceil(high)
        low, high = max(low, 0), min(high, dim - 1)
        stretched = ((torch.arange(dim // 2) - low) / max(high - low, 0.001)).clamp(0, 1)
        return base / self.factor * stretched + base * (1 - stretched)

    def tables(self, num_positions: int, head_dim: int, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
        """cos and *signed* sin, each [num_positions, 1, rotated dimensions of head_dim].

        Of each pair the first has the negative sine, so that rotating is ``x * cos + (x, pairs swapped) * sin``.
        """
        inverse = self.inverse_frequencies(int(head_dim * self.partial))
        angles = torch.outer(torch.arange(num_positions, dtype=torch.float32), inverse)
        cos, sin = angles.cos() * self.attention_factor, angles.sin() * self.attention_factor
        pairs = torch.stack([cos, cos], dim=-1), torch.stack([-sin, sin], dim=-1)
        whole = [x.flatten(1) if self.interleaved else x.transpose(1, 2).flatten(1) for x in pairs]
        return whole[0].to(dtype).unsqueeze(1), whole[1].to(dtype).unsqueeze(1)

    def rotate(self, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
        """x [tokens, heads, dim], of which the first dimensions are rotated by rows of `tables`."""
        size = cos.shape[-1]
        part = x[..., :size] if size < x.shape[-1] else x
        swapped = part.unflatten(-1, (-1, 2)).flip(-1).flatten(-2) if self.interleaved else part.roll(size // 2, -1)
        rotated = torch.addcmul(part * cos, swapped, sin)
        return torch.cat([rotated, x[..., size:]], dim=-1) if size < x.shape[-1] else rotated


def _attention_factor(fields: Mapping[str, Any]) -> float:
    """Of yarn, as transformers computes it."""
    if fields.get("attention_factor") is not None:
        return float(fields["attention_factor"])
    factor, mscale, over_all = float(fields["factor"]), fields.get("mscale"), fields.get("mscale_all_dim")
    if mscale and over_all:
        return yarn_mscale(factor, mscale) / yarn_mscale(factor, over_all)
    return yarn_mscale(factor, 1.0)


@dataclass(frozen=True)
class Architecture:
    """Shapes of one decoder. ``*_bias``, the norms and the parts tell the families apart.

    Attributes:
        head_dim: of a query or key; with a latent, of the longer of key and value, which is what the cache holds.
        post_norms: attention and MLP outputs are normalised before they are added (GLM-4).
        stacked_gate_up: gate and up projection are one tensor in checkpoints (GLM-4).
        latent: multi-latent attention; None: grouped queries.
        experts: mixture of experts; None: dense layers only.
        mtp_layers: layers for multi-token prediction that follow the decoder's in a checkpoint, and are not used.
    """

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
    post_norms: bool = False
    stacked_gate_up: bool = False
    latent: Latent | None = None
    experts: Experts | None = None
    mtp_layers: int = 0

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
        llama_bias = bool(config.get("attention_bias", family == "glm4"))
        latent = Latent.from_config(config) if family == "deepseek_v3" else None
        head_dim = int(config.get("head_dim") or config["hidden_size"] // heads)
        return Architecture(
            model_type=family,
            vocab_size=int(config["vocab_size"]),
            hidden_size=int(config["hidden_size"]),
            intermediate_size=int(config["intermediate_size"]),
            num_layers=int(config["num_hidden_layers"]),
            num_heads=heads,
            num_kv_heads=heads if latent else int(config.get("num_key_value_heads") or heads),
            head_dim=latent.cached_dim if latent else head_dim,
            rms_norm_eps=float(config.get("rms_norm_eps", 1e-6)),
            rope=Rope.from_config(config),
            tie_word_embeddings=bool(config.get("tie_word_embeddings", False)),
            qkv_bias=True if family == "qwen2" else llama_bias,
            output_bias=False if family in ("qwen2", *_GLM) else llama_bias,
            mlp_bias=bool(config.get("mlp_bias", False)),
            qk_norm=family in ("qwen3", "qwen3_moe") or bool(config.get("use_qk_norm")),
            max_positions=int(config.get("max_position_embeddings", 2048)),
            dtype=str(config.get("dtype") or config.get("torch_dtype") or "float32"),
            eos_token_ids=_token_ids(config.get("eos_token_id"), generation_eos),
            post_norms=family == "glm4",
            stacked_gate_up=family == "glm4",
            latent=latent,
            experts=Experts.from_config(config) if family.endswith("_moe") or latent else None,
            mtp_layers=_mtp_layers(config) if family in ("glm4_moe", "deepseek_v3") else 0,
        )

    def parameter_shapes(self) -> Iterator[tuple[str, tuple[int, ...]]]:
        """(Hugging Face name, shape) of every parameter that a checkpoint of this model has, in its order."""
        yield "model.embed_tokens.weight", (self.vocab_size, self.hidden_size)
        for layer in range(self.num_layers):
            prefix = f"model.layers.{layer}."
            if self.latent is not None:
                yield from self.latent.shapes(f"{prefix}self_attn.", self.hidden_size, self.num_heads)
            else:
                yield from self._attention_shapes(f"{prefix}self_attn.")
            if self.experts is not None and self.experts.in_layer[layer]:
                yield from self.experts.shapes(f"{prefix}mlp.", self.hidden_size)
            else:
                yield from self._mlp_shapes(f"{prefix}mlp.")
            norms = ["input_layernorm", "post_attention_layernorm"]
            norms += ["post_self_attn_layernorm", "post_mlp_layernorm"] if self.post_norms else []
            for name in norms:
                yield f"{prefix}{name}.weight", (self.hidden_size,)
        yield "model.norm.weight", (self.hidden_size,)
        if not self.tie_word_embeddings:
            yield "lm_head.weight", (self.vocab_size, self.hidden_size)

    def _attention_shapes(self, prefix: str) -> Iterator[tuple[str, tuple[int, ...]]]:
        queries, keys = self.num_heads * self.head_dim, self.num_kv_heads * self.head_dim
        for name, rows in (("q", queries), ("k", keys), ("v", keys)):
            yield f"{prefix}{name}_proj.weight", (rows, self.hidden_size)
            if self.qkv_bias:
                yield f"{prefix}{name}_proj.bias", (rows,)
        yield f"{prefix}o_proj.weight", (self.hidden_size, queries)
        if self.output_bias:
            yield f"{prefix}o_proj.bias", (self.hidden_size,)
        if self.qk_norm:
            yield f"{prefix}q_norm.weight", (self.head_dim,)
            yield f"{prefix}k_norm.weight", (self.head_dim,)

    def _mlp_shapes(self, prefix: str) -> Iterator[tuple[str, tuple[int, ...]]]:
        hidden, inner = self.hidden_size, self.intermediate_size
        first: tuple[tuple[str, tuple[int, ...]], ...] = (("gate", (inner, hidden)), ("up", (inner, hidden)))
        if self.stacked_gate_up:
            first = (("gate_up", (2 * inner, hidden)),)
        for name, shape in (*first, ("down", (hidden, inner))):
            yield f"{prefix}{name}_proj.weight", shape
            if self.mlp_bias:
                yield f"{prefix}{name}_proj.bias", shape[:1]


def _mtp_layers(config: Mapping[str, Any]) -> int:
    names = ("num_nextn_predict_layers", "num_mtp_layers")
    return next((int(config[name]) for name in names if config.get(name) is not None), 1)


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
