"""Read the decoder of a Hugging Face directory: its family's table and spec, and facts for
engines."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from slime.errors import UserError
from slime.models import family_of
from slime.models.context import context_length
from slime.models.mixers import mixers_of
from slime.models.nested import decoder_config
from slime.models.quantised import is_mxfp4
from slime.models.rotary import layer_frequencies
from slime.models.spec import ModelSpec, RotaryKind, named_dtype
from slime.models.table import ModelFamily
from slime.models.vision import seeing
from slime.prompts.tokenizer import generation_config_of


@dataclass(frozen=True)
class Rope:
    """Rotary position embedding of the first dimensions of each head.

    Attributes:
        kind: selects one of the model's embeddings.
        interleaved: a pair is two adjacent dimensions, not two that are half of the rotated part
            apart.
    """

    spec: ModelSpec
    kind: RotaryKind = "main"

    @property
    def interleaved(self) -> bool:
        return self.spec.rotary_interleaved

    def tables(self, num_positions: int, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
        """Return cos and *signed* sin, each [num_positions, 1, rotated dimensions of a head].

        The first of each pair has the negative sine: rotating is ``x * cos + (x, pairs swapped) *
        sin``.
        """
        inverse, factor = layer_frequencies(self.spec, self.kind)
        angles = torch.outer(torch.arange(num_positions, dtype=torch.float32), inverse)
        cos = angles.cos() * factor
        sin = angles.sin() * factor
        pairs = torch.stack([cos, cos], dim=-1), torch.stack([-sin, sin], dim=-1)
        whole = [x.flatten(1) if self.interleaved else x.transpose(1, 2).flatten(1) for x in pairs]
        return whole[0].to(dtype).unsqueeze(1), whole[1].to(dtype).unsqueeze(1)

    def rotate(self, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
        """Rotate the first dimensions of x [tokens, heads, dim] by rows of `tables`."""
        size = cos.shape[-1]
        part = x[..., :size] if size < x.shape[-1] else x
        if self.interleaved:
            swapped = part.unflatten(-1, (-1, 2)).flip(-1).flatten(-2)
        else:
            swapped = part.roll(size // 2, -1)
        rotated = torch.addcmul(part * cos, swapped, sin)
        return torch.cat([rotated, x[..., size:]], dim=-1) if size < x.shape[-1] else rotated


@dataclass(frozen=True)
class ExpertLayers:
    """Layers of experts.

    Attributes:
        in_layer: by layer, whether it has experts.
        score: "softmax" over all experts, or "sigmoid" of each.
        normalised: the chosen scores are divided by their sum.
        groups, chosen_groups: experts are chosen from the best groups; 1 and 1: no limit.
    """

    count: int
    chosen: int
    in_layer: tuple[bool, ...]
    score: str
    normalised: bool
    scale: float = 1.0
    groups: int = 1
    chosen_groups: int = 1

    @staticmethod
    def of(spec: ModelSpec) -> ExpertLayers:
        facts = spec.transformer
        return ExpertLayers(
            spec.num_experts,
            int(facts["moe_router_topk"]),
            tuple(spec.is_moe_layer(layer) for layer in range(spec.num_layers)),
            str(facts["moe_router_score_function"]),
            spec.normalised_scores,
            scale=float(facts.get("moe_router_topk_scaling_factor", 1.0)),
            groups=int(facts.get("moe_router_num_groups", 1)),
            chosen_groups=int(facts.get("moe_router_group_topk", 1)),
        )


@dataclass(frozen=True)
class Architecture:
    """One decoder: its `ModelSpec`, and facts that only an engine needs.

    Attributes:
        family: its table, with names and shapes of the weights.
        model_type: as in config.json.
        num_kv_heads, head_dim: number of key and value heads in the cache, and their width
            (`slime.models.mixers`).
        rope: the model's rotary embedding; `Decoder` has those of all layers.
        experts: mixture of experts; None: dense layers only.
        dtype: of the weights in the checkpoint.
        context_length: most tokens of prompt and response.
    """

    family: ModelFamily
    spec: ModelSpec
    model_type: str
    num_kv_heads: int
    head_dim: int
    rope: Rope
    dtype: str
    eos_token_ids: tuple[int, ...]
    context_length: int
    experts: ExpertLayers | None = None

    @property
    def rms_norm_eps(self) -> float:
        return float(self.spec.transformer["layernorm_epsilon"])

    @property
    def zero_centred(self) -> bool:
        """Whether norms multiply by 1 + weight."""
        return bool(self.spec.transformer.get("layernorm_zero_centered_gamma"))

    @staticmethod
    def from_dir(model_path: str | Path, sees_images: bool = False) -> Architecture:
        """Read ``config.json`` (and the stop tokens of ``generation_config.json``).

        Args:
            sees_images: include the vision tower.
        Raises:
            UserError: there is no such file, or the engine does not implement the model.
        """
        path = Path(model_path) / "config.json"
        if not path.is_file():
            raise UserError(
                f"{path} does not exist",
                fix="pass --model-path with a Hugging Face model directory",
            )
        config = json.loads(path.read_text())
        if sees_images:
            config = seeing(config)
        generation = generation_config_of(str(model_path))
        return Architecture.from_config(config, generation.get("eos_token_id"))

    @staticmethod
    def from_config(
        config: Mapping[str, Any], generation_eos: int | list[int] | None = None
    ) -> Architecture:
        """Read a parsed ``config.json``.

        Raises:
            UserError: an unknown family, or an unsupported setting.
        """
        family = family_of(config)
        spec = family.describe(config)
        kept = [mixer.kept_heads for mixer in mixers_of(spec.transformer)]
        heads_of = next((heads for heads in kept if heads is not None), None)
        no_heads = (spec.num_query_groups, spec.head_dim)
        kv_heads, head_dim = no_heads if heads_of is None else heads_of(spec)
        return Architecture(
            family=family,
            spec=spec,
            model_type=str(config.get("model_type", family.name)),
            num_kv_heads=kv_heads,
            head_dim=head_dim,
            rope=Rope(spec),
            dtype=named_dtype(config) or ("bfloat16" if is_mxfp4(config) else "float32"),
            eos_token_ids=_token_ids(config.get("eos_token_id"), generation_eos)
            or _token_ids(decoder_config(config).get("eos_token_id")),
            context_length=spec.longest_sequence
            or context_length(config)
            or spec.max_position_embeddings,
            experts=ExpertLayers.of(spec) if spec.num_experts else None,
        )


def _token_ids(*sources: int | list[int] | None) -> tuple[int, ...]:
    found: list[int] = []
    for source in sources:
        if source is not None:
            found += [source] if isinstance(source, int) else source
    return tuple(dict.fromkeys(found))
