"""The parity table: every model family at every parallel layout gives the numbers of a single
process.

Compared are per-token log-probs and entropies, the loss, every gradient tensor relative to its
largest entry, and the weights after two plain SGD steps that move them by more than one per cent.
All in float32, over gloo.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch

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
    TEMPERATURE,
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
    """Flags, the processes they need, and the data-parallel size that comes out; ``rare`` ones are
    in the full run."""

    ranks: int
    data_parallel: int = 1
    flags: dict[str, Any] = field(default_factory=dict)
    rare: bool = False


LAYOUTS = {
    "TP2": Layout(2, flags=TP2),
    "TP2+SP": Layout(2, flags=TP2 | SP),
    "PP2": Layout(2, flags=PP2),
    "PP2 virtual": Layout(2, flags=PP2 | VIRTUAL),
    "DP2": Layout(2, 2),
    "DP2 optimizer not sharded": Layout(2, 2, {"use_distributed_optimizer": False}, rare=True),
    "CP2": Layout(2, flags=CP2),
    "EP2": Layout(2, 2, EP2 | ETP1),
    "TP2 x PP2": Layout(4, flags=TP2 | PP2),
    "TP2 x CP2": Layout(4, flags=TP2 | CP2),
    "TP2+SP x CP2": Layout(4, flags=TP2 | SP | CP2, rare=True),
    "PP2 virtual x CP2": Layout(4, flags=PP2 | CP2 | VIRTUAL, rare=True),
    "DP2 x CP2": Layout(4, 2, CP2, rare=True),
    "CP4": Layout(4, flags={"context_parallel_size": 4}, rare=True),
    "DP2 x EP2": Layout(4, 4, EP2 | ETP1),
    "TP2+SP x EP2": Layout(4, 2, TP2 | SP | EP2 | ETP1, rare=True),
}
DENSE = ["llama", "mistral", "qwen2", "qwen3"]
FAMILIES = [*DENSE, "qwen3_moe", "glm4", "glm4_moe", "glm4_moe_lite", "deepseek_v3"]
#: Families with parts of their own, at the layouts that cut or move these: a gate of shared
#: experts; wide norms, and a window and a rotary embedding for each kind of layer; factors on
#: embeddings, residuals and logits; queries that grow with the position; norms behind the rotation;
#: a softmax router with a bias.
OF_NEW_PARTS = {
    "qwen2_moe": ("TP2+SP",),
    "olmo3": ("TP2", "TP2+SP", "PP2", "CP2"),
    "granite": ("TP2+SP", "PP2"),
    "qwen3_next": ("TP2+SP", "CP2"),
    "qwen3_5_text": ("TP2", "PP2"),
    "qwen3_5_moe_text": ("EP2",),
    "gpt_oss": ("TP2+SP", "CP2", "EP2"),
    "ministral3": ("CP2",),
    "hunyuan_v1_dense": ("TP2", "TP2+SP"),
    "ernie4_5_moe": ("TP2+SP", "EP2"),
    "minimax_m2": ("TP2+SP",),
}
#: Families made of parts that others have, too.
OF_KNOWN_PARTS = [
    name for name in OTHER_FAMILIES if "," not in name and name not in {*FAMILIES, *OF_NEW_PARTS}
]
#: Families with experts.
MOE = {table.name for table in TABLES if any(rule.is_expert for rule in table.rules)}
#: How far random weights may lie apart from transformers: the norm behind a gated delta net divides
#: by what is 1e-4 here, and with it the rounding before it.
HYBRIDS = {"qwen3_next": 5e-4, "qwen3_5_text": 5e-4, "qwen3_5_moe_text": 5e-4}
#: Variants with parameters of their own, at the layouts that cut or sum these.
VARIANTS = ["llama, biases"]


def _cases() -> Iterator[Any]:
    """One family at all layouts, all families at one, and latent attention at context parallelism
    besides; the other pairs belong to ``make test-full``."""
    for family in FAMILIES:
        for layout in LAYOUTS:
            if "EP2" in layout and family not in MOE:
                continue
            everything = family == "qwen3_moe" and not LAYOUTS[layout].rare
            always = layout == "TP2+SP" or (layout, family) == ("CP2", "deepseek_v3") or everything
            yield pytest.param(family, layout, marks=[] if always else [pytest.mark.full])
    for family in [*OF_KNOWN_PARTS, *OF_NEW_PARTS]:
        for layout in LAYOUTS:
            if "EP2" not in layout or family in MOE:
                always = layout in OF_NEW_PARTS.get(family, ())
                yield pytest.param(family, layout, marks=[] if always else [pytest.mark.full])
    for variant in VARIANTS:
        for layout in ("TP2", "TP2+SP", "PP2"):
            yield pytest.param(variant, layout)


@pytest.fixture(scope="module")
def checkpoints(
    tmp_path_factory: pytest.TempPathFactory,
) -> dict[str, tuple[Path, torch.nn.Module]]:
    made = {}
    for family in [*FAMILIES, *OF_KNOWN_PARTS, *OF_NEW_PARTS, *VARIANTS]:
        directory = tmp_path_factory.mktemp("model")
        made[family] = (directory, save_tiny(family, directory))
    return made


@pytest.fixture(scope="module")
def singles() -> dict[str, dict[str, Any]]:
    """Results of the single process by family, filled on demand."""
    return {}


@pytest.fixture(scope="module")
def doubles() -> dict[str, Any]:
    """Gradients of the hybrid in float64, filled on demand."""
    return {}


def single_process(
    family: str, singles: dict[str, Any], ranks: Pools, checkpoints: dict[str, Any]
) -> dict[str, Any]:
    if family not in singles:
        flags = {"hf_checkpoint": str(checkpoints[family][0])}
        singles[family] = ranks.run(1, parity_job, flags, [make_batch(MICRO_BATCHES)])[0]
    result: dict[str, Any] = singles[family]
    return result


@pytest.mark.parametrize(("family", "layout"), list(_cases()))
def test_layout_gives_the_numbers_of_one_process(
    family: str, layout: str, ranks: Pools, checkpoints: dict[str, Any], singles: dict[str, Any]
) -> None:
    single = single_process(family, singles, ranks, checkpoints)
    chosen = LAYOUTS[layout]
    batch = make_batch(MICRO_BATCHES)
    plans = DATA_PARALLEL[chosen.data_parallel]
    if "PP2" in layout:
        plans = [(range(6), PIPELINED)]
    batches = [shard(batch, members, plan) for members, plan in plans]
    flags = {**chosen.flags, "hf_checkpoint": str(checkpoints[family][0])}
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


@pytest.mark.parametrize("layout", ["TP2+SP", "CP2", "TP2 x CP2"])
def test_layouts_of_a_hybrid_agree_in_double(
    layout: str, ranks: Pools, checkpoints: dict[str, Any], doubles: dict[str, Any]
) -> None:
    """What is left is the rounding of the parameters that stay in float32."""
    flags = {"hf_checkpoint": str(checkpoints["qwen3_5_text"][0])}
    batches = [make_batch(MICRO_BATCHES)]
    if not doubles:
        doubles |= ranks.run(1, gradients_in_double, flags, batches)[0]
    chosen = LAYOUTS[layout]
    for result in ranks.run(chosen.ranks, gradients_in_double, flags | chosen.flags, batches):
        assert result.keys() == doubles.keys()
        for name, value in doubles.items():
            assert worst(result[name], value) <= 1e-6, name


@pytest.mark.parametrize("family", [*FAMILIES, *HYBRIDS])
def test_one_process_gives_the_log_probs_of_transformers(
    family: str, ranks: Pools, checkpoints: dict[str, Any], singles: dict[str, Any]
) -> None:
    single = single_process(family, singles, ranks, checkpoints)
    model, batch = checkpoints[family][1], make_batch(MICRO_BATCHES)
    for tokens, response, log_probs in zip(
        batch.tokens, batch.response_lengths, single["log_probs"]
    ):
        with torch.no_grad():
            logits = model(tokens[None]).logits[0, :-1].float() / TEMPERATURE
        expected = logits.log_softmax(-1).gather(1, tokens[1:, None])[:, 0][-response:]
        tolerance = HYBRIDS.get(family, TOLERANCE)
        assert (log_probs - expected).abs().max() <= tolerance


@pytest.mark.parametrize("family", [*FAMILIES, *OF_NEW_PARTS])
def test_the_weights_moved(
    family: str, ranks: Pools, checkpoints: dict[str, Any], singles: dict[str, Any]
) -> None:
    """Otherwise the table would prove little."""
    single = single_process(family, singles, ranks, checkpoints)
    before = checkpoints[family][1].state_dict()
    change = sum(
        ((single["weights"][n] - before[n]).norm() ** 2) for n in single["weights"] if n in before
    )
    total = sum(before[n].norm() ** 2 for n in single["weights"] if n in before)
    assert (change / total) ** 0.5 > 0.01


def test_the_table_holds_every_family() -> None:
    # the first is Qwen2, the others are text models under other names
    twins = {"mimo", *NESTED}
    known = {*FAMILIES, *OF_KNOWN_PARTS, *OF_NEW_PARTS, *twins}
    assert known == {family.name for family in TABLES}
