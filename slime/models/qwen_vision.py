"""Tables of the vision towers of Qwen models: parameters have the names of transformers' modules,
and are neither fused nor sharded."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from slime.models.layouts import REPLICATED
from slime.models.nested import ModuleNames
from slime.models.rules import VISION_MODEL, Rule, Size, has_vision, vision_of
from slime.models.spec import ModelSpec
from slime.models.vision import VisionKind

_HF = "model.visual."
QWEN_MODULES = ModuleNames(beside_decoder=r"model\.visual\..*")
Repeated = Callable[[ModelSpec], int] | None


def _rule(
    name: str, rows: Size, columns: Size | tuple[Size, ...] | None = None, repeated: Repeated = None
) -> Rule:
    return Rule(
        VISION_MODEL + name, _HF + name, REPLICATED, rows, columns, has_vision, repeated=repeated
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
    return vision_of(spec).depth


def _levels(spec: ModelSpec) -> int:
    return vision_of(spec).num_levels


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

_MODULE = "transformers.models.{0}.modeling_{0}:{1}"
QWEN3_VL_VISION = VisionKind(
    _MODULE.format("qwen3_vl", "Qwen3VLVisionModel"), (24, 20, 20), has_levels=True
)
QWEN3_5_VISION = VisionKind(_MODULE.format("qwen3_5", "Qwen3_5VisionModel"), (11, 11, 10))


def _qwen2_5(rule: Rule) -> Rule:
    return replace(rule, hf=tuple(name.removeprefix("model.") for name in rule.hf_names))


#: Norms have no biases, the MLP is gated, and there is no position embedding.
QWEN2_5_TOWER = tuple(
    map(
        _qwen2_5,
        (
            _rule(
                "patch_embed.proj.weight",
                "vision hidden",
                ("vision channels", "vision frames", "vision patch", "vision patch"),
            ),
            _rule("blocks.{block}.norm1.weight", "vision hidden", None, _blocks),
            _rule("blocks.{block}.norm2.weight", "vision hidden", None, _blocks),
            *_with_bias("blocks.{block}.attn.qkv", "vision qkv", "vision hidden", _blocks),
            *_with_bias("blocks.{block}.attn.proj", "vision hidden", "vision hidden", _blocks),
            *_with_bias("blocks.{block}.mlp.gate_proj", "vision inner", "vision hidden", _blocks),
            *_with_bias("blocks.{block}.mlp.up_proj", "vision inner", "vision hidden", _blocks),
            *_with_bias("blocks.{block}.mlp.down_proj", "vision hidden", "vision inner", _blocks),
            _rule("merger.ln_q.weight", "vision hidden"),
            *_with_bias("merger.mlp.0", "vision merged", "vision merged"),
            *_with_bias("merger.mlp.2", "hidden", "vision merged"),
        ),
    )
)
QWEN2_5_VISION = VisionKind(
    _MODULE.format("qwen2_5_vl", "Qwen2_5_VisionTransformerPretrainedModel"),
    (16, 24, 24),
    names=r"visual\..*",
    interleaved=False,
    kept=(15, 4),
)
