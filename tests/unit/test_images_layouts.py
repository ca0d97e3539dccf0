"""Models that see images at every layout of the trainer, against one process."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch

from slime.config import make_config
from slime.errors import UserError
from slime.models import family_of, read_hf_config
from slime.models.images import ImageReader
from slime.models.layout_rules import check_layout
from slime.models.qwen_vision import QWEN3_VL_VISION
from slime.models.vision import seeing
from slime.trainer.megatron.packed import PackingOptions, pack
from tests.support.images import IMAGES, save_seeing
from tests.support.parity import (
    CP2,
    EP2,
    ETP1,
    PP2,
    RECOMPUTE,
    SP,
    TOLERANCE,
    TP2,
    parity_job,
    worst,
)
from tests.support.seeing_samples import batch_of
from tests.support.trainer_ranks import Pools, shard, trainer_config

#: Samples and micro-batches of two data-parallel ranks; the second one has a micro-batch of text
#: alone.
HALVES: list[Any] = [([1, 2], [[0], [1]]), ([0, 3, 4, 5], [[0], [1, 2, 3]])]
#: Flags, and the batches of data-parallel ranks.
LAYOUTS: dict[str, tuple[dict[str, Any], list[Any]]] = {
    "TP2": (TP2, []),
    "TP2+SP": (TP2 | SP, []),
    "CP2": (CP2, []),
    "PP2": (PP2, []),
    "DP2": ({}, HALVES),
    "EP2": (EP2 | ETP1, HALVES),
    "TP2+SP, recompute": (TP2 | SP | RECOMPUTE, []),
}
#: The softmax of attention cancels what a bias of the keys adds: its gradient is rounding.
ROUNDING = "attn.k_proj.bias"
#: Prefixes of a tower's tensors.
TOWER = ("visual.", "model.visual.", "vision_tower.")
#: What shows each way of cutting or moving what images bring; the others are in the full run.
ALWAYS = {
    "qwen3_vl": ("CP2", "PP2", "TP2+SP, recompute"),
    "qwen3_vl_moe": ("EP2",),
    "qwen2_5_vl": ("TP2+SP",),
    "qwen3_5": ("TP2+SP",),
    "qwen3_5_moe": (),
    "gemma3": ("TP2+SP", "CP2"),
}
CASES = [
    pytest.param(kind, name, marks=[] if name in always else [pytest.mark.full])
    for kind, always in ALWAYS.items()
    for name in LAYOUTS
    if name != "EP2" or "moe" in kind
]


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory, ranks: Pools) -> Callable[..., Any]:
    """By family and number of layers: the flags, the whole batch, and what one process computes on
    it."""

    @functools.cache
    def of(kind: str, layers: int = 4) -> Any:
        directory = tmp_path_factory.mktemp(kind)
        save_seeing(directory, kind, layers=layers)
        batch = batch_of(ImageReader(directory), [[0, 1, 2], [3, 4, 5]])
        flags = {"hf_checkpoint": str(directory), **IMAGES}
        [found] = ranks.run(1, parity_job, flags, [batch])
        return flags, batch, found

    return of


@pytest.mark.parametrize(("kind", "name"), CASES)
def test_a_layout_computes_what_one_process_does(
    kind: str, name: str, alone: Callable[..., Any], ranks: Pools
) -> None:
    # of Qwen3-VL the first two layers add features, and a first stage has them
    deep = name == "PP2" or kind == "qwen3_vl"
    flags, batch, expected = alone(kind, 4 if deep else 2)
    tolerance = TOLERANCE
    own, shards = LAYOUTS[name]
    batches = [shard(batch, *one) for one in shards] or [batch]
    places = {index: place for place, index in enumerate(expected["samples"])}
    for rank in ranks.run(2, parity_job, flags | own, batches):
        for part in ("log_probs", "entropies"):
            for index, values in zip(rank["samples"], rank[part]):
                assert torch.allclose(values, expected[part][places[index]], atol=tolerance)
        for part in ("gradients", "weights"):
            assert rank[part].keys() == expected[part].keys()
            differences = {
                n: worst(one, expected[part][n])
                for n, one in rank[part].items()
                if (part, kind) != ("gradients", "gemma3") or not n.endswith(ROUNDING)
            }
            farthest = max(differences, key=differences.__getitem__)
            assert differences[farthest] <= tolerance, farthest
    assert any(name.startswith(TOWER) for name in expected["gradients"])


def pixels_of_a_stage(info: Any, flags: dict[str, Any], batches: list[Any]) -> list[int]:
    """How many numbers of pixels each micro-batch brings to a rank."""
    from slime.trainer.megatron.backend import MegatronBackend

    config = trainer_config(**flags, actor_num_gpus_per_node=info.world_size)
    backend = MegatronBackend(config, info)
    backend.setup()
    packed = backend._pack(batches[0], batches[0].steps[0].micro_batches)
    assert all(one.sequences.rotary_positions is not None for one in packed)
    return [0 if (own := one.sequences.images) is None else own.pixels.numel() for one in packed]


def test_later_stages_prepare_no_images(alone: Callable[..., Any], ranks: Pools) -> None:
    flags, batch, _ = alone("qwen3_vl")
    first, last = ranks.run(2, pixels_of_a_stage, flags | PP2, [batch])
    assert all(first) and not any(last)


def test_pixels_stay_in_host_memory_until_the_tower_reads_them(alone: Callable[..., Any]) -> None:
    """All micro-batches of a step are packed at once."""
    flags, batch, _ = alone("qwen3_vl")
    read = ImageReader(flags["hf_checkpoint"]).read
    options = PackingOptions(torch.device("meta"), read_image=read, vision=QWEN3_VL_VISION)
    responses = batch.response_lengths
    packed = pack([1], batch.tokens, responses, options, media=batch.media, images=batch.images)
    images = packed.sequences.images
    assert images is not None and images.rows.is_meta and not images.pixels.is_meta


def test_features_behind_layers_of_another_stage_are_refused(alone: Callable[..., Any]) -> None:
    flags, *_ = alone("qwen3_vl")
    config = seeing(read_hf_config(flags["hf_checkpoint"]))
    spec = family_of(config).model_spec(config)
    layout = {"pipeline_model_parallel_size": 4, "actor_num_gpus_per_node": 4}
    with pytest.raises(UserError, match="its first 2 layers, but the first stage has only 1"):
        check_layout(spec, make_config(**flags, **layout))
