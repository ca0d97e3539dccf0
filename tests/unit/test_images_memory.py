"""What the memory plan counts of models that see images: what a block of a vision tower keeps for
its backward pass, and attention with masks."""

from __future__ import annotations

import contextlib
import gc
import pkgutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks
from torch.nn.attention import SDPBackend, sdpa_kernel

from slime.config import make_config
from slime.memory.activations import Recompute, saved_by_layer
from slime.memory.trainer import StageMemory, TrainerSettings
from slime.models import family_of
from slime.models.images import ImageReader
from slime.models.layouts import Layout
from slime.models.mixers import Kernels
from slime.models.qwen_vision import QWEN2_5_VISION, QWEN3_5_VISION, QWEN3_VL_VISION
from slime.models.siglip import GEMMA3_VISION, SiglipSpec
from slime.models.tower import build_tower, see
from slime.models.vision import VisionKind, VisionSpec, seeing
from slime.trainer.megatron import forward
from tests.support.images import IMAGES, read_config, save_seeing
from tests.support.seeing_samples import batch_of
from tests.support.trainers import trainer

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


@contextlib.contextmanager
def without_random_numbers() -> Iterator[None]:
    """Parameters are only as large as they are; drawing them takes most of the time."""

    def same(self: Tensor, *_: Any, **__: Any) -> Tensor:
        return self.fill_(0.01)

    with patch.object(Tensor, "uniform_", same), patch.object(Tensor, "normal_", same):
        yield


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
    with without_random_numbers():
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


# -- attention with masks --------------------------------------------------------------------------

#: Tokens of the longest sequence. Its last one predicts nothing and is no input.
LONGEST = 200


def is_of_pairs(tensor: Tensor) -> bool:
    return tensor.dim() > 2 and tensor.shape[-2:] == (LONGEST - 1, LONGEST - 1)


def tensors_of_pairs() -> list[Tensor]:
    """All that exist."""
    return [one for one in gc.get_objects() if isinstance(one, Tensor) and is_of_pairs(one)]


def bytes_of_pairs(tensors: list[Tensor]) -> int:
    """Bytes of the tensors that have an entry for each pair of tokens, each storage once."""
    sizes = {
        tensor.untyped_storage()._cdata: tensor.untyped_storage().nbytes()
        for tensor in tensors
        if is_of_pairs(tensor)
    }
    return sum(sizes.values())


@pytest.mark.parametrize(
    ("kind", "flags", "masks"),
    [
        ("gemma3", IMAGES, 2 * 3),  # for each of three sequences, with a window and without
        ("gemma3", {}, 1),  # that of the window, for all sequences
        ("qwen3_vl", IMAGES, 0),
    ],
)
def test_masks_are_planned(kind: str, flags: dict[str, Any], masks: int, tmp_path: Path) -> None:
    """All layers share them, and only one micro-batch of a step has its own."""
    save_seeing(tmp_path, kind)
    piece: Any = "square" if flags else [3] * 11
    prompt = [[1, 2], piece, [3]]
    _, *others = batch_of(reader := ImageReader(tmp_path), [[0]], [(prompt, [[4]])]).tokens[0]
    sample = (prompt, [[5] * (LONGEST - len(others))])
    batch = batch_of(reader, [[0, 1, 2], [3, 4, 5]], [sample] * 6)
    assert {tokens.numel() for tokens in batch.tokens} == {LONGEST}
    more = {"use_dynamic_batch_size": False, "micro_batch_size": 3}
    backend = trainer(hf_checkpoint=str(tmp_path), rollout_max_context_len=LONGEST, **flags, **more)
    kept: list[Tensor] = []

    def keep(tensor: Tensor) -> Tensor:
        kept.append(tensor)
        return tensor

    try:
        settings = TrainerSettings.of(backend.config, backend.spec, on_gpu=False)
        packed = backend._pack(batch, batch.steps[0].micro_batches)
        # else the samples of one prompt are one sequence
        assert packed[0].sequences.lengths == [LONGEST - 1] * 3
        before = bytes_of_pairs(tensors_of_pairs())
        forward.score(backend.model_chunks, packed, temperature=1.0)
        in_scoring = bytes_of_pairs(tensors_of_pairs()) - before
        [chunk] = backend.model_chunks
        chunk.train()
        with saved_tensors_hooks(keep, lambda tensor: tensor):
            chunk(packed[0], temperature=1.0)
        in_training = bytes_of_pairs(kept)
    finally:
        backend.close()
    assert in_training == in_scoring == 4 * masks * (LONGEST - 1) ** 2
    [stage] = settings.stages
    for planned in (stage.training(), stage.scoring()):
        expected = pytest.approx(in_training, rel=0.02)
        assert planned.get("attention masks", 0.0) == expected


def test_gpus_have_masks_and_scores_in_float32_alone(tmp_path: Path) -> None:
    save_seeing(tmp_path, "gemma3")
    hf_config = seeing(read_config(tmp_path))
    spec = family_of(hf_config).model_spec(hf_config)

    def stage(**flags: Any) -> StageMemory:
        config = make_config(
            hf_checkpoint="m", rollout_max_context_len=LONGEST, micro_batch_size=2, **flags
        )
        return TrainerSettings.of(config, spec, on_gpu=True).stages[0]

    in_bf16 = stage(bf16=True)
    in_float32 = stage(fp32=True)
    assert "attention masks" not in in_bf16.training() | in_bf16.scoring()
    assert in_float32.training()["attention masks"] == 4 * 2 * in_float32.settings.tokens * LONGEST
    scores = spec.num_layers * spec.num_heads * LONGEST * 4
    assert in_float32.saved.kept > scores > in_bf16.saved.kept


@pytest.mark.parametrize("masked", [True, False])
def test_scores_are_planned(masked: bool, tmp_path: Path) -> None:
    """As torch computes attention on GPUs in float32, which it does on a CPU if told to."""
    save_seeing(tmp_path, "gemma3")
    hf_config = seeing(read_config(tmp_path))
    spec = family_of(hf_config).model_spec(hf_config)
    length = LONGEST - 1
    query = torch.randn(2, spec.num_heads, length, spec.head_dim, requires_grad=True)
    key = torch.randn(2, spec.num_query_groups, length, spec.head_dim, requires_grad=True)
    mask: dict[str, Any] = {"is_causal": True}
    if masked:
        mask = {"attn_mask": torch.zeros(2, 1, length, length)}
    kept: list[Tensor] = []

    def keep(tensor: Tensor) -> Tensor:
        kept.append(tensor)
        return tensor

    hooks = saved_tensors_hooks(keep, lambda tensor: tensor)
    with hooks, sdpa_kernel(SDPBackend.MATH):
        F.scaled_dot_product_attention(query, key, key, enable_gqa=True, **mask)
    with_scores, without = (
        saved_by_layer(
            spec, Layout(), 0, Kernels(4, fused=True, score_length=count), Recompute()
        ).total
        for count in (length, 0)
    )
    assert bytes_of_pairs(kept) == (with_scores - without) * 2 * length
