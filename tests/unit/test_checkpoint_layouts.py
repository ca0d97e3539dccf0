"""Saved at each layout, loaded at each other: the next training step is that of a run that was
never interrupted.

Compared are the step's metrics (loss and gradient norm among them) and every weight after it, with
an unbroken run in a single process: Adam's moments and step count, master weights and the schedule
must all have come along. float32, gloo.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.support import megatron_jobs as jobs
from tests.support.megatron_jobs import everything
from tests.support.tiny_models import save_tiny
from tests.support.trainer_ranks import Pools, make_batch, shard

TOLERANCE = 1e-5
#: The second step's gradients meet moments of the first; eps keeps rounding in tiny gradients from
#: being blown up.
TRAINING: dict[str, Any] = {
    "adam_eps": 1e-3,
    "lr": 1e-2,
    "lr_decay_style": "linear",
    "lr_warmup_init": 3e-3,
    "lr_warmup_iters": 3,
    "weight_decay": 0.1,
    "clip_grad": 0.5,
    "entropy_coef": 0.01,
    "rollout_batch_size": 12,
}


@dataclass(frozen=True)
class Layout:
    ranks: int
    data_parallel: int = 1
    flags: dict[str, Any] = field(default_factory=dict)


TP2: dict[str, Any] = {"tensor_model_parallel_size": 2}
SP: dict[str, Any] = {"sequence_parallel": True}
PP2: dict[str, Any] = {"pipeline_model_parallel_size": 2}
VIRTUAL: dict[str, Any] = {**PP2, "num_virtual_stages_per_pipeline_rank": 2}
CP2: dict[str, Any] = {"context_parallel_size": 2}
EP2: dict[str, Any] = {"expert_model_parallel_size": 2, "expert_tensor_parallel_size": 1}
LAYOUTS = {
    "one rank": Layout(1),
    "DP2": Layout(2, 2),
    "TP2": Layout(2, 1, TP2),
    "TP2+SP": Layout(2, 1, TP2 | SP),
    "PP2": Layout(2, 1, PP2),
    "PP2 virtual": Layout(2, 1, VIRTUAL),
    "CP2": Layout(2, 1, CP2),
    "EP2": Layout(2, 2, EP2),
    "DP4": Layout(4, 4),
    "TP2 x PP2": Layout(4, 1, TP2 | PP2),
    "DP2 x TP2": Layout(4, 2, TP2),
    "DP2 x PP2 virtual": Layout(4, 2, VIRTUAL),
    "TP2+SP x CP2": Layout(4, 1, TP2 | SP | CP2),
    "DP2 x EP2": Layout(4, 4, EP2),
    "TP2+SP x EP2": Layout(4, 2, TP2 | SP | EP2),
    "PP2 x EP2": Layout(4, 2, PP2 | EP2),
}
EXPERTS = {"qwen3_moe", "glm4_moe", "glm4_moe_lite", "deepseek_v3", "gpt_oss"}
#: The first has tied embeddings and a vocabulary of 97 rows, which two tensor-parallel ranks pad to
#: 98.
FAMILIES = ["qwen3", "llama", "qwen2", "glm4", "olmo3", "qwen3_5_text", *sorted(EXPERTS)]
#: What `make test` tries, in this order: few saves, every kind of resharding.
ALWAYS = {
    "qwen3": [("DP2", "TP2+SP"), ("PP2 virtual", "CP2")],
    # tensor parallelism cuts its norms of queries and keys, which it leaves whole elsewhere
    "olmo3": [("TP2", "PP2")],
    # and key heads of gated delta nets
    "qwen3_5_text": [("TP2", "PP2")],
    "qwen3_moe": [("EP2", "TP2")],
    # sinks are cut by heads, biases of experts with their rows or not at all
    "gpt_oss": [("TP2", "EP2")],
}
MICRO_BATCHES = [[0, 1, 2], [3, 4, 5]]
SHARDS = {
    1: [(range(6), MICRO_BATCHES)],
    2: [([4, 0], [[0], [1]]), ([1, 3, 5, 2], [[0, 1], [2, 3]])],
    4: [([4, 0], [[0], [1]]), ([1], [[0], []]), ([3, 5], [[0, 1], []]), ([2], [[], [0]])],
}


def _pairs() -> Iterator[Any]:
    for family in FAMILIES:
        mine = [name for name in LAYOUTS if "EP" not in name or family in EXPERTS]
        always = ALWAYS.get(family, [])
        others = [(a, b) for a in mine for b in mine if (a, b) not in always]
        yield from (pytest.param(family, *pair) for pair in always)
        yield from (pytest.param(family, *pair, marks=pytest.mark.full) for pair in others)


def batches_of(layout: str, first_rollout: int = 0, rollouts: int = 2) -> jobs.Batches:
    """For each data-parallel rank a batch for every rollout."""
    plans = SHARDS[LAYOUTS[layout].data_parallel]
    whole = [
        replace(make_batch(MICRO_BATCHES, seed=i), rollout_id=first_rollout + i)
        for i in range(rollouts)
    ]
    return [[shard(batch, members, plan) for batch in whole] for members, plan in plans]


class Runs:
    """What was run so far in this module: models, unbroken runs and saves by name."""

    def __init__(self, folder: Path, ranks: Pools) -> None:
        self.folder, self.ranks = folder, ranks
        self.models: dict[tuple[str, int], Path] = {}
        self.unbroken: dict[Path, Any] = {}
        self.saved: dict[tuple[Path, str], Path] = {}

    def model(self, family: str, layers: int) -> Path:
        if (family, layers) not in self.models:
            self.models[family, layers] = self.folder / f"{family} {layers}"
            save_tiny(family, self.models[family, layers], layers)
        return self.models[family, layers]

    def single(self, model: Path) -> dict[str, Any]:
        """The run that is never interrupted."""
        if model not in self.unbroken:
            arguments = (model, TRAINING, batches_of("one rank"), None)
            [self.unbroken[model], _] = self.ranks.run(
                2, jobs.alone, jobs.train_and_save, *arguments
            )
        return self.unbroken[model]

    def checkpoint(self, model: Path, layout: str) -> Path:
        """Saved after one step at this layout."""
        if (model, layout) not in self.saved:
            root = self.folder / f"{model.name} {layout}"
            flags = {**TRAINING, **LAYOUTS[layout].flags}
            arguments = (model, flags, batches_of(layout), root)
            self.ranks.run(LAYOUTS[layout].ranks, jobs.train_and_save, *arguments)
            self.saved[model, layout] = root
        return self.saved[model, layout]


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory, ranks: Pools) -> Runs:
    return Runs(tmp_path_factory.mktemp("layouts"), ranks)


def worst(ours: torch.Tensor, theirs: torch.Tensor) -> float:
    """Largest difference, relative to the largest entry."""
    return ((ours - theirs).abs().max() / theirs.abs().max().clamp(min=1e-12)).item()


@pytest.mark.slow
@pytest.mark.parametrize(("family", "source", "target"), list(_pairs()))
def test_the_next_step_is_that_of_an_unbroken_run(
    family: str, source: str, target: str, runs: Runs
) -> None:
    model = runs.model(family, 4 if "virtual" in source + target else 2)
    expected = runs.single(model)
    root = runs.checkpoint(model, source)
    flags = {**TRAINING, **LAYOUTS[target].flags, "load": str(root)}
    results = runs.ranks.run(
        LAYOUTS[target].ranks, jobs.last_step, model, flags, batches_of(target)
    )
    [metrics] = [result["metrics"] for result in results if result["reporting"]]
    assert {"train/loss", "train/grad_norm"} <= expected["metrics"].keys()
    for name, value in expected["metrics"].items():
        assert metrics[name] == pytest.approx(value, rel=TOLERANCE, abs=TOLERANCE), name
    for name, weight in expected["weights"].items():
        assert worst(results[0]["weights"][name], weight) <= TOLERANCE, name
    moved = max(
        worst(weight, expected["before"][name]) for name, weight in expected["weights"].items()
    )
    assert moved > 1e-3, "or the comparison proves little"


@pytest.mark.slow
def test_the_updated_reference_model_goes_on_at_another_layout(runs: Runs, tmp_path: Path) -> None:
    """Taken after rollout 1, it is neither the policy nor --ref-load when rollout 3 is trained
    on."""
    flags = {
        **TRAINING,
        "use_kl_loss": True,
        "kl_loss_coef": 0.3,
        "kl_loss_type": "k3",
        "ref_update_interval": 2,
    }
    model, source, target = runs.model("qwen3", 4), "TP2+SP", "PP2 virtual"

    def batches(layout: str) -> jobs.Batches:
        return batches_of(layout, first_rollout=1, rollouts=3)

    [expected, _] = runs.ranks.run(
        2, jobs.alone, jobs.train_and_save, model, flags, batches("one rank"), None
    )
    runs.ranks.run(
        2, jobs.train_and_save, model, flags | LAYOUTS[source].flags, batches(source), tmp_path
    )
    resuming = flags | LAYOUTS[target].flags | {"load": str(tmp_path)}
    results = runs.ranks.run(2, jobs.last_step, model, resuming, batches(target))
    [metrics] = [result["metrics"] for result in results if result["reporting"]]
    assert expected["metrics"]["train/kl_loss"] > 1e-4
    for name, value in expected["metrics"].items():
        assert metrics[name] == pytest.approx(value, rel=TOLERANCE, abs=TOLERANCE), name
    for name, weight in expected["weights"].items():
        assert worst(results[0]["weights"][name], weight) <= TOLERANCE, name


@pytest.mark.slow
def test_master_weights_of_bfloat16_training_go_on_bit_for_bit(runs: Runs, tmp_path: Path) -> None:
    flags = {**TRAINING, "bf16": True}
    first, again = tmp_path / "first", tmp_path / "again"
    model, layouts = runs.model("qwen3", 4), ("TP2+SP", "PP2 virtual")
    saved_at, loaded_at = ({**flags, **LAYOUTS[name].flags} for name in layouts)
    runs.ranks.run(2, jobs.train_and_save, model, saved_at, batches_of(layouts[0]), first)
    runs.ranks.run(2, jobs.load_and_save, model, loaded_at, first, again)
    before = everything(first / "iter_0000000", tmp_path)
    after = everything(again / "iter_0000004", tmp_path)
    assert before.keys() == after.keys()
    masters = [name for name in before if name.startswith("optimizer.state.param.")]
    assert len(masters) >= 10
    for name in before:
        assert torch.equal(before[name], after[name]), name
    for name in masters:
        half = before[name.removeprefix("optimizer.state.param.")]
        assert half.dtype == torch.bfloat16 and torch.equal(before[name].bfloat16(), half)
        assert not torch.equal(before[name], half.float()), "they are finer than the weights"
