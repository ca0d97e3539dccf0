"""Models that see images at every layout of the trainer, against one process."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from slime.models.images import ImageReader
from tests.support.images import IMAGES, save_seeing
from tests.support.parity import CP2, PP2, RECOMPUTE, SP, TOLERANCE, TP2, parity_job, worst
from tests.support.seeing_samples import batch_of
from tests.support.trainer_ranks import Pools, shard

#: (flags, ranks, samples and micro-batches of each data-parallel rank); of DP2 the second rank has
#: a micro-batch of text alone.
LAYOUTS: dict[str, tuple[dict[str, Any], int, list[Any]]] = {
    "TP2": (TP2, 2, []),
    "TP2+SP": (TP2 | SP, 2, []),
    "CP2": (CP2, 2, []),
    "PP2": (PP2, 2, []),
    "DP2": ({}, 2, [([1, 2], [[0], [1]]), ([0, 3, 4, 5], [[0], [1, 2, 3]])]),
    "TP2+SP, recompute": (TP2 | SP | RECOMPUTE, 2, []),
}


@pytest.fixture(scope="module")
def pools() -> Iterator[Pools]:
    made = Pools()
    yield made
    made.close()


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory, pools: Pools) -> Any:
    """The directory, the whole batch, and what one process computes on it."""
    directory = tmp_path_factory.mktemp("seeing")
    save_seeing(directory)
    batch = batch_of(ImageReader(directory), [[0, 1], [2, 3], [4, 5]])
    flags = {"hf_checkpoint": str(directory), **IMAGES}
    [found] = pools.run(1, parity_job, flags, [batch])
    return flags, batch, found


@pytest.mark.parametrize("name", LAYOUTS)
def test_a_layout_computes_what_one_process_does(name: str, alone: Any, pools: Pools) -> None:
    flags, batch, expected = alone
    own, ranks, shards = LAYOUTS[name]
    batches = [shard(batch, *one) for one in shards] or [batch]
    found = pools.run(ranks, parity_job, flags | own, batches)
    for rank in found:
        places = {index: place for place, index in enumerate(expected["samples"])}
        for kind in ("log_probs", "entropies"):
            for index, values in zip(rank["samples"], rank[kind]):
                assert torch.allclose(values, expected[kind][places[index]], atol=TOLERANCE)
        for kind in ("gradients", "weights"):
            assert rank[kind].keys() == expected[kind].keys()
            differences = {n: worst(one, expected[kind][n]) for n, one in rank[kind].items()}
            assert max(differences.values()) <= TOLERANCE, max(
                differences, key=differences.__getitem__
            )
    assert any(name.startswith("model.visual.") for name in expected["gradients"])


def test_features_behind_layers_of_another_stage_are_refused(alone: Any, tmp_path: Path) -> None:
    from slime.config import make_config
    from slime.errors import UserError
    from slime.models import family_of, read_hf_config
    from slime.models.layout_rules import check_layout
    from slime.models.vision import seeing

    flags, *_ = alone
    config = seeing(read_hf_config(flags["hf_checkpoint"]))
    spec = family_of(config).model_spec(config)
    layout = {"pipeline_model_parallel_size": 4, "actor_num_gpus_per_node": 4}
    with pytest.raises(UserError, match="behind its first 2 layers, and the first stage has 1"):
        check_layout(spec, make_config(**flags, **layout))
