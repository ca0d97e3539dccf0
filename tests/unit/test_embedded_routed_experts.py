"""The experts that the embedded engine reports are those that transformers' routers choose, however
work is batched."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from slime.embedded.scheduler import Scheduler
from slime.embedded.sequence import Sequence, SequenceStatus
from tests.support.embedded_models import (
    bytes_per_token,
    experts_of,
    make_scheduler,
    make_sequence,
    router_choices,
    run,
    save_tiny_model,
)

LONG = list(range(60, 100))
PROMPTS = [[3, 1, 4, 1, 5], LONG, LONG, [*LONG, 7, 7, 8], [250, 2], LONG[:30]]
LENGTHS = [9, 20, 3, 12, 30, 1]


@pytest.fixture(scope="module")
def directories(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("models")
    return {
        shape: save_tiny_model(root / shape, shape)
        for shape in ("qwen3_moe", "glm4_moe", "deepseek_v3")
    }


@pytest.fixture(scope="module")
def directory(directories: dict[str, Path]) -> Path:
    return directories["qwen3_moe"]


def several() -> list[Sequence]:
    """Two are of one prompt, two begin with that prompt or with a part of it."""
    return [
        make_sequence(prompt, rid=str(i), max_new_tokens=length, sampling_seed=i)
        for i, (prompt, length) in enumerate(zip(PROMPTS, LENGTHS))
    ]


def assert_right(directory: Path, sequences: list[Sequence]) -> None:
    for sequence in sequences:
        expected = router_choices(directory, sequence.tokens().tolist())[:-1]
        assert np.array_equal(experts_of(sequence), expected), sequence.rid


@pytest.mark.parametrize("shape", ["qwen3_moe", "glm4_moe", "deepseek_v3"])
def test_a_batch(directories: dict[str, Path], shape: str) -> None:
    sequences = several()
    run(make_scheduler(directories[shape], record_experts=True), sequences)
    assert sequences[2].num_cached == len(LONG) - 1 and sequences[3].num_cached == len(LONG)
    assert_right(directories[shape], sequences)
    if shape == "qwen3_moe":  # its first layer is dense
        assert not experts_of(sequences[0])[:, 0].any() and experts_of(sequences[0])[:, 1].any()


@pytest.mark.parametrize("deterministic", [False, True])
def test_few_slots_and_prompts_in_pieces(directory: Path, deterministic: bool) -> None:
    scheduler = make_scheduler(
        directory, max_slots=2, prefill_tokens=16, deterministic=deterministic, record_experts=True
    )
    sequences = several()
    run(scheduler, sequences)
    assert_right(directory, sequences)


def test_a_prefix_from_the_cache_brings_its_experts(directory: Path) -> None:
    """Of the prompt, and of the first answer's sampled tokens."""
    scheduler = make_scheduler(directory, record_experts=True)
    first = make_sequence(LONG, max_new_tokens=20)
    run(scheduler, [first])
    second = make_sequence([*first.tokens().tolist(), 5, 6], max_new_tokens=4)
    run(scheduler, [second])
    assert second.num_cached == len(LONG) + 19
    assert_right(directory, [first, second])


def steps(scheduler: Scheduler, count: int) -> None:
    for _ in range(count):
        scheduler.step()


def test_retracted_and_pushed_out_by_memory(directory: Path) -> None:
    per_token = bytes_per_token(make_scheduler(directory).cache)
    scheduler = make_scheduler(directory, kv_bytes=per_token * 2 * 64, record_experts=True)
    sequences = [
        make_sequence([i, *LONG], rid=str(i), max_new_tokens=50, sampling_seed=i) for i in range(3)
    ]
    scheduler.submit(sequences)
    steps(scheduler, 5)
    scheduler.retract_all()
    run(scheduler, [])
    assert all(sequence.num_retractions for sequence in sequences[:1])
    assert_right(directory, sequences)


def test_aborts_at_any_time(directory: Path) -> None:
    """While waiting, in the middle of a prefill (its follower goes on alone), and while running."""
    scheduler = make_scheduler(directory, max_slots=3, prefill_tokens=16, record_experts=True)
    leader, follower, running, waiting = (
        make_sequence(prompt, rid=name, max_new_tokens=8)
        for prompt, name in (
            (LONG, "leader"),
            (LONG, "follower"),
            ([1, 2, 3], "running"),
            ([4, 5, 6], "waiting"),
        )
    )
    scheduler.submit([running])
    steps(scheduler, 2)
    scheduler.submit([leader, follower, waiting])
    scheduler.step()
    assert [s.status for s in (leader, waiting)] == [SequenceStatus.PREFILL, SequenceStatus.WAITING]
    scheduler.abort([leader, waiting, running], "enough")
    run(scheduler, [])
    assert_right(directory, [follower, running])
    assert running.output_ids and (experts_of(waiting) == -1).all()
    computed = leader.num_computed
    assert 0 < computed < len(LONG) - 1
    expected = router_choices(directory, LONG)[:-1]
    assert np.array_equal(experts_of(leader)[:computed], expected[:computed])
    assert (experts_of(leader)[computed:] == -1).all()


def test_a_sequence_that_was_sent_back_and_aborted_keeps_what_it_had(directory: Path) -> None:
    scheduler = make_scheduler(directory, record_experts=True)
    sequence = make_sequence(LONG, max_new_tokens=20)
    scheduler.submit([sequence])
    steps(scheduler, 4)
    scheduler.retract_all()
    scheduler.abort([sequence], "enough")
    assert len(sequence.output_ids) == 5
    assert_right(directory, [sequence])


def test_nothing_is_kept_where_nobody_asked(directory: Path) -> None:
    sequences = several()
    scheduler = make_scheduler(directory)
    run(scheduler, sequences)
    assert all(sequence.experts is None for sequence in sequences)
    assert all(slot.experts is None for slot in scheduler.slots._slots)
