"""Each pipeline stage pushes its own layers: all bytes arrive, none crosses the pipeline, a lost
stage is named."""

from __future__ import annotations

import pickle
import socket
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from safetensors.torch import load_file

from slime import deadlines
from slime.engines.wire.process_group import listening_store
from slime.weights import distributed
from slime.weights.transport import EngineSlots
from tests.support import megatron_jobs, stage_jobs
from tests.support.fake_weight_engine import FakeWeightEngine
from tests.support.processes import wait_until
from tests.support.tiny_models import save_moe
from tests.support.trainer_ranks import Pools, RankPool

PP2 = {"pipeline_model_parallel_size": 2}
LAYOUTS: dict[str, tuple[int, dict[str, Any]]] = {
    "PP2": (2, PP2),
    "PP2 virtual": (2, PP2 | {"num_virtual_stages_per_pipeline_rank": 2}),
    "PP2 x TP2": (4, PP2 | {"tensor_model_parallel_size": 2}),
    "PP2 x EP2": (4, PP2 | {"expert_model_parallel_size": 2, "expert_tensor_parallel_size": 1}),
}


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("models")
    return {
        "dense": megatron_jobs.make_model(
            folder / "dense", "qwen3", tie_word_embeddings=True, num_hidden_layers=4
        ),
        "moe": save_moe(folder / "moe"),
    }


@pytest.fixture
def engines(models: dict[str, Path]) -> Iterator[list[FakeWeightEngine]]:
    with ExitStack() as stack:
        start = load_file(models["dense"] / "model.safetensors")
        yield [stack.enter_context(FakeWeightEngine(start)) for _ in range(2)]


def slots(engines: list[FakeWeightEngine]) -> list[EngineSlots]:
    return [EngineSlots(engine.url, ()) for engine in engines]


@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_stage_sends_its_own(ranks: Pools, models: dict[str, Path], layout: str) -> None:
    size, flags = LAYOUTS[layout]
    model = models["moe" if "EP2" in layout else "dense"]
    start = load_file(model / "model.safetensors")
    with FakeWeightEngine(start) as one, FakeWeightEngine(start) as other:
        flags = {**flags, "check_weight_update_equal": True}
        found = ranks.run(size, stage_jobs.push_twice, model, flags, slots([one, other]))
        for engine in (one, other):
            for name, tensor in start.items():
                assert torch.equal(engine.tensors[name], 2 * tensor), name
            senders = engine.senders
            assert sorted(set(senders)) == ["pp_0", "pp_1"] and not engine.paused
            half = len(senders) // 2
            assert senders[:half] == senders[half:] == sorted(senders[:half])  # in turn
            assert engine.versions == ["1"] * half + ["2"] * half
            for path in ("/pause_generation", "/flush_cache", "/continue_generation"):
                assert engine.calls.count(path) == 2  # once per push
            assert len(engine._groups) == 0
    receipts = {str(rank["receipts"]) for rank in found}
    assert len(receipts) == 1
    assert [receipt.num_tensors for receipt in found[0]["receipts"]] == [len(start)] * 2
    assert set(found[0]["receipts"][1].checked) == set(start)
    assert [rank["crossing"] for rank in found] == [0] * size
    assert sorted(rank["stage"] for rank in found if rank["stage"] is not None) == [0, 1]
    first, last = found[: size // 2], found[size // 2 :]
    layers_first, layers_last = (
        set().union(*(_layers(rank["seen"]) for rank in part)) for part in (first, last)
    )
    assert not layers_first & layers_last and layers_first | layers_last == {0, 1, 2, 3}
    assert not any(
        name.startswith(("decoder.final", "output_layer"))
        for rank in first
        for name in rank["seen"]
    )


def _layers(names: set[str]) -> set[int]:
    return {int(name.split(".")[2]) for name in names if ".layers." in name}


def test_a_stage_that_fails_is_every_ranks_error(
    ranks: Pools, models: dict[str, Path], engines: list[FakeWeightEngine]
) -> None:
    said = ranks.run(2, stage_jobs.push_with_a_fault, models["dense"], PP2, slots(engines), "error")
    assert said[1][0] == "the GPU fell off the bus"
    assert "pipeline stage 1 (trainer rank 1): the GPU fell off the bus" in said[0][0]
    assert "stay paused" in said[0][0]
    # a new push sends everything again
    assert all(text[1].startswith("weights version 1:") for text in said)
    assert not any(engine.paused for engine in engines)


def test_an_engine_that_refuses_a_later_stage_is_named_by_all(
    ranks: Pools, models: dict[str, Path], engines: list[FakeWeightEngine]
) -> None:
    engines[1].refuse_from = "pp_1"
    said = ranks.run(2, stage_jobs.push_with_a_fault, models["dense"], PP2, slots(engines), "")
    for first, second in said:
        assert (
            "pipeline stage 1 (trainer rank 1)" in first
            and engines[1].url in first
            and "refused" in first
        )
        assert second.startswith("weights version 1:")


def test_a_stage_that_is_silent_is_waited_for_no_longer_than_the_limit(
    ranks: Pools, models: dict[str, Path], engines: list[FakeWeightEngine]
) -> None:
    [[said], _] = ranks.run(
        2, stage_jobs.push_with_a_fault, models["dense"], PP2, slots(engines), "silent"
    )
    assert (
        "waited for pipeline stage 1 (trainer rank 1)" in said
        and "'transfer'" in said
        and "s for its word" in said
    )


def test_every_process_group_waits_as_long_as_the_flag_says(ranks: Pools) -> None:
    for at_start, of_pushes in ranks.run(2, stage_jobs.time_outs_of_groups, 2.5):
        assert at_start == {150.0}
        assert of_pushes > 150.0 + deadlines.TRANSPORT_FLOOR  # rank 0 waits for engines meanwhile


def test_a_rank_that_is_rounds_behind_finds_every_word(ranks: Pools) -> None:
    """Rank 0 goes on without the others where nothing is gathered; on a busy host it was two rounds
    ahead."""
    said = ranks.run(2, stage_jobs.hear_late, 5)
    assert [heard for heard, _ in said] == [[0, 1, 2, 3, 4]] * 2
    assert len(said[0][1]) == 1  # the last round's; those that all have heard are gone


def test_what_a_stranger_puts_into_the_store_is_an_error_and_never_runs(
    ranks: Pools, tmp_path: Path
) -> None:
    trace = tmp_path / "trace"
    said = ranks.run(2, stage_jobs.hear_a_stranger, trace)
    assert said[0] == "nothing" and "no trainer rank wrote what the trainer's store has" in said[1]
    assert not trace.exists()
    pickle.loads(pickle.dumps(stage_jobs.Touch(trace)))
    assert trace.exists()  # that is what it would have done


def test_a_store_is_reached_through_its_own_address_only() -> None:
    def listening() -> set[tuple[str, int]]:
        return {
            tuple(c.laddr)
            for c in psutil.Process().net_connections("tcp")
            if c.status == psutil.CONN_LISTEN
        }

    before = listening()  # an engine of another test may have the same port at another address
    store = listening_store("127.0.0.2", 0, 1, 10)
    socket.create_connection(("127.0.0.2", store.port), timeout=10).close()
    assert listening() - before == {("127.0.0.2", store.port)}
    with pytest.raises(OSError, match="in use"):
        listening_store("127.0.0.2", store.port, 1, 10)
    assert listening_store("localhost", 0, 1, 10).port > 0  # a name: torch's own way


@pytest.mark.full
def test_a_stage_that_dies_is_named(
    models: dict[str, Path], engines: list[FakeWeightEngine], tmp_path: Path
) -> None:
    pool, note = RankPool(2), tmp_path / "said"
    with pytest.raises(EOFError):
        pool.run(stage_jobs.push_and_die, models["dense"], PP2, slots(engines), note)
    wait_until(note.exists, "the other stage says so")
    pool.kill()
    said = note.read_text()
    assert (
        "waited for pipeline stage 1 (trainer rank 1)" in said and "the engines stay paused" in said
    )


def test_the_address_for_engines_is_the_one_towards_those_elsewhere(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(distributed, "address_towards", lambda host: f"towards {host}")
    here = "http://127.0.0.1:30000"
    assert distributed.own_address((here, here)) == "127.0.0.1"
    assert distributed.own_address((here, "http://192.0.2.1:30000")) == "towards 192.0.2.1"


def test_engines_are_told_an_address_that_those_elsewhere_reach(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(distributed, "is_local", lambda url: "//here" in url)
    monkeypatch.setattr(distributed, "address_towards", lambda host: f"the way to {host}")
    assert distributed.own_address(("http://here:1", "http://here:2")) == "127.0.0.1"
    assert distributed.own_address(("http://here:1", "http://there:2")) == "the way to there"
