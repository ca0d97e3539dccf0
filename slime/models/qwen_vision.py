"""The table of the vision tower that Qwen3-VL models share: names as transformers' modules have
them, nothing fused and nothing cut."""

from __future__ import annotations

from collections.abc import Callable

from slime.models.layouts import REPLICATED
from slime.models.rules import VISION_MODEL, Rule, Size
from slime.models.spec import ModelSpec
from slime.models.vision import VisionSpec

_HF = "model.visual."
Repeated = Callable[[ModelSpec], int] | None


def _vision(spec: ModelSpec) -> VisionSpec:
    assert spec.vision is not None
    return spec.vision


def _sees(spec: ModelSpec, layer: int) -> bool:
    return spec.vision is not None


def _rule(
    name: str,
    rows: Size,
    columns: Size | tuple[Size, ...] | None = None,
    repeated: Repeated = None,
) -> Rule:
    return Rule(
        VISION_MODEL + name, _HF + name, REPLICATED, rows, columns, _sees, repeated=repeated
    )


def _with_bias(
    name: str, rows: Size, columns: Size | None, repeated: Repeated = None
) -> tuple[Rule, ...]:
    return (
        _rule(f"{name}.weight", rows, columns, repeated),
        _rule(f"{name}.bias", rows, None, repeated),
    )


def _merger(name: str, norm: Size, repeated: Repeated = None) -> tuple[Rule, ...]:
    return (
        *_with_bias(f"{name}.norm", norm, None, repeated),
        *_with_bias(f"{name}.linear_fc1", "vision merged", "vision merged", repeated),
        *_with_bias(f"{name}.linear_fc2", "hidden", "vision merged", repeated),
    )


def _blocks(spec: ModelSpec) -> int:
    return _vision(spec).depth


def _levels(spec: ModelSpec) -> int:
    return _vision(spec).num_levels


QWEN3_TOWER = (
    _rule(
        "patch_embed.proj.weight",
        "vision hidden",
        ("vision channels", "vision frames", "vision patch", "vision patch"),
    ),
    _rule("patch_embed.proj.bias", "vision hidden"),
    _rule("pos_embed.weight", "vision positions", "vision hidden"),
    *_with_bias("blocks.{block}.norm1", "vision hidden", None, _blocks),
    *_with_bias("blocks.{block}.norm2", "vision hidden", None, _blocks),
    *_with_bias("blocks.{block}.attn.qkv", "vision qkv", "vision hidden", _blocks),
    *_with_bias("blocks.{block}.attn.proj", "vision hidden", "vision hidden", _blocks),
    *_with_bias("blocks.{block}.mlp.linear_fc1", "vision inner", "vision hidden", _blocks),
    *_with_bias("blocks.{block}.mlp.linear_fc2", "vision hidden", "vision inner", _blocks),
    *_merger("merger", "vision hidden"),
    *_merger("deepstack_merger_list.{block}", "vision merged", _levels),
)
