"""The parity table: every model family at every parallel layout gives the numbers of a single
process.

Compared are per-token log-probs and entropies, the loss, every gradient tensor relative to its
largest entry, and the weights after two plain SGD steps that move them by more than one per cent.
All in float32, over gloo.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import pytest

from slime.models import FAMILIES as TABLES
from tests.support.hf_configs import NESTED
from tests.support.parity import (
    CP2,
    DATA_PARALLEL,
    EP2,
    ETP1,
    MICRO_BATCHES,
    PIPELINED,
    PP2,
    SP,
    TOLERANCE,
    TP2,
    VIRTUAL,
    gradients_in_double,
    parity_job,
    worst,
)
from tests.support.tiny_models import OTHER_FAMILIES, save_tiny
from tests.support.trainer_ranks import Pools, make_batch, shard


@dataclass(frozen=True)
class Layout:
    """Flags, the processes they need, and the data-parallel size that comes out."""

    ranks: int
    data_parallel: int = 1
    flags: dict[str, Any] = field(default_factory=dict)


LAYOUTS = {
    "TP2": Layout(2, flags=TP2),
    "TP2+SP": Layout(2, flags=TP2 | SP),
    "PP2": Layout(2, flags=PP2),
    "PP2 virtual": Layout(2, flags=PP2 | VIRTUAL),
    "DP2": Layout(2, 2),
    "DP2 optimizer not sharded": Layout(2, 2, {"use_distributed_optimizer": False}),
    "CP2": Layout(2, flags=CP2),
    "EP2": Layout(2, 2, EP2 | ETP1),
    "TP2 x PP2": Layout(4, flags=TP2 | PP2),
    "TP2 x CP2": Layout(4, flags=TP2 | CP2),
    "TP2+SP x CP2": Layout(4, flags=TP2 | SP | CP2),
    "PP2 virtual x CP2": Layout(4, flags=PP2 | CP2 | VIRTUAL),
    "DP2 x CP2": Layout(4, 2, CP2),
    "CP4": Layout(4, flags={"context_parallel_size": 4}),
    "DP2 x EP2": Layout(4, 4, EP2 | ETP1),
    "TP2+SP x EP2": Layout(4, 2, TP2 | SP | EP2 | ETP1),
}
#: Families with parts of their own, at the layouts that cut or move these: experts; latent
#: attention; wide norms, and a window and a rotary embedding for each kind of layer; factors on
#: embeddings, residuals and logits; gated delta nets; sinks; queries that grow with the position;
#: norms behind the rotation.
ALWAYS = {
    "qwen3_moe": ("TP2", "PP2 virtual", "DP2", "CP2"),
    "deepseek_v3": ("TP2+SP", "CP2"),
    "olmo3": ("TP2+SP", "PP2", "CP2"),
    "granite": ("PP2",),
    "qwen3_next": ("TP2+SP",),
    "qwen3_5_text": ("PP2",),
    "qwen3_5_moe_text": ("EP2",),
    "gpt_oss": ("TP2+SP", "CP2"),
    "ministral3": ("CP2",),
    "hunyuan_v1_dense": ("TP2+SP",),
}
#: Families made of parts that others have, too, are in the full run.
FAMILIES = [
    *("llama", "mistral", "qwen2", "qwen3"),
    *(name for name in OTHER_FAMILIES if "," not in name),
]
#: Families with experts.
MOE = {table.name for table in TABLES if any(rule.is_expert for rule in table.rules)}
#: Variants with parameters of their own, at the layouts that cut or sum these.
VARIANTS = ["llama, biases"]


def _cases() -> Iterator[Any]:
    """Every pair that is not in ``ALWAYS`` belongs to ``make test-full``."""
    for family in FAMILIES:
        for layout in LAYOUTS:
            if "EP2" not in layout or family in MOE:
                always = layout in ALWAYS.get(family, ())
                yield pytest.param(family, layout, marks=[] if always else [pytest.mark.full])
    for variant in VARIANTS:
        for layout in ("TP2", "TP2+SP"):
            yield pytest.param(variant, layout)


@pytest.fixture(scope="module")
def single_process(
    tmp_path_factory: pytest.TempPathFactory, ranks: Pools
) -> Callable[..., tuple[str, dict[str, Any]]]:
    """By family and number of layers: the directory of its model, and what one process computes."""

    @functools.cache
    def of(family: str, layers: int = 2) -> tuple[str, dict[str, Any]]:
        directory = tmp_path_factory.mktemp("model")
        before = save_tiny(family, directory, layers).state_dict()
        flags = {"hf_checkpoint": str(directory)}
        [single] = ranks.run(1, parity_job, flags, [make_batch(MICRO_BATCHES)])
        after = {name: one for name, one in single["weights"].items() if name in before}
        change = sum((one - before[name]).norm() ** 2 for name, one in after.items())
        total = sum(before[name].norm() ** 2 for name in after)
        assert (change / total) ** 0.5 > 0.01, "the weights move, or the table proves little"
        return str(directory), single

    return of


@pytest.mark.parametrize(("family", "layout"), list(_cases()))
def test_layout_gives_the_numbers_of_one_process(
    family: str, layout: str, ranks: Pools, single_process: Any
) -> None:
    # stages of two ranks, each with two parts
    directory, single = single_process(family, 4 if "virtual" in layout else 2)
    chosen = LAYOUTS[layout]
    batch = make_batch(MICRO_BATCHES)
    plans = DATA_PARALLEL[chosen.data_parallel]
    if "PP2" in layout:
        plans = [(range(6), PIPELINED)]
    batches = [shard(batch, members, plan) for members, plan in plans]
    flags = {**chosen.flags, "hf_checkpoint": directory}
    results = ranks.run(chosen.ranks, parity_job, flags, batches)
    tolerance = TOLERANCE

    assert sum(result["reporting"] for result in results) == 1
    by_sample = dict(zip(single["samples"], zip(single["log_probs"], single["entropies"])))
    seen = set()
    for result in results:
        for kind in ("gradients", "weights"):
            assert result[kind].keys() == single[kind].keys()
            for name, value in single[kind].items():
                assert worst(result[kind][name], value) <= tolerance, (kind, name)
        if not result["log_probs"]:
            continue
        for index, log_probs, entropies in zip(
            result["samples"], result["log_probs"], result["entropies"]
        ):
            seen.add(index)
            assert (log_probs - by_sample[index][0]).abs().max() <= tolerance
            assert (entropies - by_sample[index][1]).abs().max() <= tolerance
        for ours, theirs in zip(result["metrics"], single["metrics"]):
            assert abs(ours["train/loss"] - theirs["train/loss"]) <= tolerance
            for key in theirs:
                assert ours[key] == pytest.approx(theirs[key], rel=2e-5, abs=2e-5), key
    assert seen == set(batch.sample_indices)


@pytest.mark.parametrize(
    "layout", [pytest.param("TP2+SP", marks=pytest.mark.full), "CP2", "TP2 x CP2"]
)
def test_layouts_of_a_hybrid_agree_in_double(
    layout: str, ranks: Pools, single_process: Any
) -> None:
    """What is left is the rounding of the parameters that stay in float32."""
    flags = {"hf_checkpoint": single_process("qwen3_5_text")[0]}
    batches = [make_batch(MICRO_BATCHES)]
    [doubles] = ranks.once(1, gradients_in_double, flags, batches)
    chosen = LAYOUTS[layout]
    for result in ranks.run(chosen.ranks, gradients_in_double, flags | chosen.flags, batches):
        assert result.keys() == doubles.keys()
        for name, value in doubles.items():
            assert worst(result[name], value) <= 1e-6, name


def test_the_table_holds_every_family() -> None:
    # the first is Qwen2, the others are text models under other names
    twins = {"mimo", *NESTED}
    assert ALWAYS.keys() <= {*FAMILIES}
    assert {*FAMILIES, *twins} == {family.name for family in TABLES}
