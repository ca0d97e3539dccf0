"""States of gated delta nets in the embedded engine: chunks, moves, prefixes and retractions change
no number."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from slime.embedded.kind import STATE_COPIES
from slime.embedded.scheduler import Scheduler
from slime.embedded.sequence import Sequence
from slime.models.delta_rule import CHUNK
from tests.support.embedded_models import make_scheduler, make_sequence, run, save_tiny_model

#: Per token; layers behind the norm of a gated delta net make more of rounding than others.
TOLERANCE = 1e-4


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    kinds = ["linear_attention", "full_attention", "linear_attention"]
    return save_tiny_model(
        tmp_path_factory.mktemp("model"), "qwen3_5_text", num_hidden_layers=3, layer_types=kinds
    )


@pytest.fixture(scope="module")
def reference(directory: Path) -> torch.nn.Module:
    return AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32).eval()


def check(reference: torch.nn.Module, sequence: Sequence) -> None:
    tokens = [*sequence.prompt.tolist(), *sequence.output_ids]
    with torch.no_grad():
        logits = reference(torch.tensor([tokens])).logits[0]
    expected = torch.log_softmax(logits[:-1], -1).gather(1, torch.tensor(tokens[1:])[:, None])[:, 0]
    given = torch.tensor(sequence.input_logprobs)  # an aborted sequence has some of them
    torch.testing.assert_close(given, expected[: len(given)], atol=TOLERANCE, rtol=0)
    ours = torch.tensor(sequence.output_logprobs)
    first = len(sequence.prompt) - 1
    torch.testing.assert_close(ours, expected[first:], atol=TOLERANCE, rtol=0)


def prompt_of(length: int, seed: int) -> list[int]:
    draw = random.Random(seed)
    return [draw.randrange(250) for _ in range(length)]


@pytest.mark.parametrize("prefill_tokens", [3, 64, 100])
def test_chunked_prefill_carries_the_states(
    directory: Path, reference: torch.nn.Module, prefill_tokens: int
) -> None:
    scheduler = make_scheduler(directory, prefill_tokens=prefill_tokens, max_length=400)
    sequences = [
        make_sequence(prompt_of(length, length), rid=str(length), max_new_tokens=6, logprob_start=0)
        for length in (1, 2, 3, 63, 65, 200)
    ]
    run(scheduler, sequences)
    for sequence in sequences:
        check(reference, sequence)


def cached(sequences: list[Sequence]) -> list[int]:
    return [sequence.num_cached for sequence in sequences]


def test_a_prompt_continues_from_where_a_state_was_kept(
    directory: Path, reference: torch.nn.Module
) -> None:
    scheduler = make_scheduler(directory, max_length=400)
    first = make_sequence(prompt_of(150, 0), max_new_tokens=10)
    run(scheduler, [first])
    turn = [*first.prompt.tolist(), *first.output_ids, 3, 1, 4]
    again = make_sequence(prompt_of(150, 0), max_new_tokens=4)
    run(scheduler, [again])
    longer = make_sequence(turn, max_new_tokens=4)
    run(scheduler, [longer])
    short = make_sequence(prompt_of(150, 0)[:100], max_new_tokens=4)
    run(scheduler, [short])
    # the copy near the end of the prompt; the live state behind all tokens but the last; no state
    # within the first 100 tokens
    assert cached([again, longer, short]) == [2 * CHUNK, 159, 0]
    for sequence in (first, again, longer, short):
        check(reference, sequence)


@pytest.mark.parametrize("deterministic", [False, True])
def test_a_state_is_kept_where_a_prefill_was_split_near_its_end(
    directory: Path, reference: torch.nn.Module, deterministic: bool
) -> None:
    scheduler = make_scheduler(
        directory, prefill_tokens=2 * CHUNK, max_length=400, deterministic=deterministic
    )
    prompts = [prompt_of(150, 0), prompt_of(150, 0)[:140] + prompt_of(30, 1)]
    sequences = [make_sequence(prompt, max_new_tokens=2) for prompt in prompts]
    for sequence in sequences:
        run(scheduler, [sequence])
        check(reference, sequence)
    assert cached(sequences) == [0, 2 * CHUNK]


def test_prompts_that_wait_together_share_what_they_have_in_common(
    directory: Path, reference: torch.nn.Module
) -> None:
    scheduler = make_scheduler(directory, max_length=400)
    system = prompt_of(100, 1)
    sequences = [
        make_sequence(system + prompt_of(40, 2 + i // 2), rid=str(i), max_new_tokens=5)
        for i in range(6)
    ]
    run(scheduler, sequences)
    # the first computes everything, its twin copies that; the others begin at the last border of
    # chunks within the system prompt
    assert sorted(cached(sequences)) == [0, CHUNK, CHUNK, 139, 139, 139]
    for sequence in sequences:
        check(reference, sequence)


def test_any_traffic_gives_the_numbers_of_transformers(
    directory: Path, reference: torch.nn.Module
) -> None:
    """Sequences of few slots end, move, are retracted and aborted, and share prefixes."""
    draw = random.Random(0)
    scheduler = make_scheduler(
        directory, max_slots=3, max_length=400, prefill_tokens=draw.choice([20, 70, 2048])
    )
    stems = [prompt_of(draw.choice([70, 130, 190]), 50 + i) for i in range(2)]
    sequences = []
    for number in range(12):
        stem = draw.choice(stems)
        prompt = stem[: draw.choice([len(stem), 66, 30])] + prompt_of(draw.randrange(1, 9), number)
        start = draw.choice([None, None, 0])
        count = draw.randrange(1, 12)
        sequences.append(
            make_sequence(prompt, rid=str(number), max_new_tokens=count, logprob_start=start)
        )
    finished: list[Sequence] = []
    waiting = list(sequences)
    while waiting or scheduler.has_work:
        scheduler.submit([waiting.pop() for _ in range(min(len(waiting), draw.randrange(3)))])
        if draw.random() < 0.1:
            scheduler.retract_all()
        if draw.random() < 0.1 and scheduler.everything():
            scheduler.abort([draw.choice(scheduler.everything())], "enough")
        finished += scheduler.step().finished
    assert len(finished) == len(sequences)
    for sequence in sequences:
        check(reference, sequence)


def bits(scheduler: Scheduler, prompts: list[list[int]]) -> list[list[float]]:
    sequences = [
        make_sequence(prompt, rid=str(i), max_new_tokens=8) for i, prompt in enumerate(prompts)
    ]
    run(scheduler, sequences)
    return [sequence.output_logprobs for sequence in sequences]


def test_deterministic_mode_gives_the_same_bits_in_every_batch(directory: Path) -> None:
    prompts = [prompt_of(length, length) for length in (30, 64, 150, 90)]
    alone = [
        bits(make_scheduler(directory, deterministic=True, max_length=400), [prompt])[0]
        for prompt in prompts
    ]
    scheduler = make_scheduler(
        directory, deterministic=True, prefill_tokens=70, max_slots=3, max_length=400
    )
    assert bits(scheduler, prompts) == alone
    assert bits(scheduler, prompts[::-1]) == alone[::-1]


def test_storage_counts_states_and_copies(directory: Path) -> None:
    scheduler = make_scheduler(directory)
    run(scheduler, [make_sequence(prompt_of(70, 0), max_new_tokens=2)])
    cache = scheduler.cache
    assert cache.states is not None
    per_layer = (2 * 2 * 8 + 4 * 12) * 3 * 4 + 4 * 8 * 12 * 4
    assert cache.states.slot_bytes == 2 * per_layer
    keys_and_values = cache.capacity * 2 * 2 * 16 * 4
    copies = (1 + STATE_COPIES) * cache.states.slot_bytes
    assert cache.nbytes == cache.num_slots * (keys_and_values + copies)
    cache.release()
    assert cache.nbytes == 0 and cache.states.rule.numel() == 0
