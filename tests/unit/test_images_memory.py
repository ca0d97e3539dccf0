"""What a block of a vision tower keeps for its backward pass, which the memory plan counts."""

from __future__ import annotations

import pkgutil
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks

from slime.models.qwen_vision import QWEN2_5_VISION, QWEN3_5_VISION, QWEN3_VL_VISION
from slime.models.siglip import GEMMA3_VISION, SiglipSpec
from slime.models.tower import build_tower, see
from slime.models.vision import VisionKind, VisionSpec

#: Patches of an image, in each direction.
SIDE = 16
SIZES = {"out_hidden_size": 512, "num_heads": 8}
QWEN3 = {"hidden_size": 512, "intermediate_size": 2048, "deepstack_visual_indexes": []}
KINDS = [
    (QWEN3_VL_VISION, QWEN3),
    (QWEN3_5_VISION, QWEN3),
    (QWEN2_5_VISION, {"hidden_size": 512, "intermediate_size": 1368}),
    (GEMMA3_VISION, {"hidden_size": 512, "intermediate_size": 2048}),
]


def kept_by(kind: VisionKind, sizes: dict[str, Any], depth: int, recompute: bool) -> int:
    """Bytes that are kept of an image, the tower's parameters aside."""
    config = {**sizes, **SIZES, "depth": depth}
    side: int = pkgutil.resolve_name(kind.module).config_class().patch_size
    pixels = torch.randn(SIDE * SIDE, 3 * 2 * side * side)
    vision = VisionSpec(kind, config, 9, 1, 2, kind.sections)
    if kind is GEMMA3_VISION:
        config = {
            **sizes,
            "num_attention_heads": 8,
            "num_hidden_layers": depth,
            "image_size": SIDE * side,
            "patch_size": side,
            "vision_use_head": False,
        }
        vision = SiglipSpec(kind, config, 9, 1, 2, (), SIDE // 4, 512)
        pixels = torch.randn(1, 3, SIDE * side, SIDE * side)
    tower = build_tower(vision, torch.bfloat16, recompute).train()
    parameters = {p.untyped_storage().data_ptr() for p in tower.parameters()}
    kept: dict[int, Tensor] = {}

    def keep(tensor: Tensor) -> Tensor:
        place = tensor.untyped_storage().data_ptr()
        if place not in parameters:
            kept[place] = tensor
        return tensor

    with saved_tensors_hooks(keep, lambda tensor: tensor):
        see(tower, pixels, torch.tensor([[1, SIDE, SIDE]]))
    return sum(tensor.untyped_storage().nbytes() for tensor in kept.values())


@pytest.mark.parametrize(("kind", "sizes"), KINDS)
def test_what_a_block_keeps(kind: VisionKind, sizes: dict[str, Any]) -> None:
    for recompute in (False, True):
        of_two, of_four = (kept_by(kind, sizes, depth, recompute) for depth in (2, 4))
        numbers = (of_four - of_two) / 2 / SIDE**2 / 2
        wide, within = kind.kept
        planned = wide * sizes["hidden_size"] + within * sizes["intermediate_size"]
        expected = sizes["hidden_size"] if recompute else planned
        assert numbers == pytest.approx(expected, rel=0.05)
