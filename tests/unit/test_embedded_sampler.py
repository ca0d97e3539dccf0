"""Sampling: the distribution is the one asked for, and the log-prob is that of the tempered
distribution."""

from __future__ import annotations

import copy
from collections.abc import Callable

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from slime.embedded.sampler import sample, token_logprobs, uniforms
from slime.embedded.sequence import Sequence
from tests.support.embedded_models import VOCAB, make_sequence


def random_logits(rows: int, vocab: int = VOCAB, seed: int = 0, scale: float = 3.0) -> torch.Tensor:
    return torch.randn(rows, vocab, generator=torch.Generator().manual_seed(seed)) * scale


def seeded(rows: int, **params: float) -> list[Sequence]:
    """Sequences that differ in their seeds alone."""
    one = make_sequence([0], **params)
    sequences = [copy.copy(one) for _ in range(rows)]
    for seed, sequence in enumerate(sequences):
        sequence.seed = seed
    return sequences


def kept_tokens(
    logits: torch.Tensor, temperature: float, top_k: int, top_p: float, min_p: float
) -> set[int]:
    """What top-k, top-p and min-p leave, token by token."""
    probs = torch.softmax(logits.double() / temperature, -1)
    order = sorted(range(len(probs)), key=lambda token: -float(probs[token]))
    kept, mass = set(), 0.0
    for rank, token in enumerate(order):
        p = float(probs[token])
        if (top_k > 0 and rank >= top_k) or mass > top_p or p < min_p * float(probs[order[0]]):
            break
        kept.add(token)
        mass += p
    return kept


def test_the_draw_follows_the_distribution() -> None:
    rows = 20_000
    logits = random_logits(1, vocab=64, scale=1.5).expand(rows, -1)
    sequences = seeded(rows, temperature=0.8)
    tokens = np.bincount(sample(logits, sequences).tokens, minlength=64) / rows
    probs = torch.softmax(logits[0] / 0.8, -1).numpy()
    assert np.abs(tokens - probs).sum() < 0.05  # expected about 0.03 by chance


@settings(max_examples=60)
@given(
    st.floats(0.2, 3.0),
    st.sampled_from([-1, 1, 2, 5, 50, 400]),
    st.sampled_from([0.1, 0.5, 0.9, 0.99, 1.0]),
    st.sampled_from([0.0, 0.05, 0.3]),
    st.integers(0, 5),
)
def test_filters_keep_what_they_should(
    temperature: float, top_k: int, top_p: float, min_p: float, logit_seed: int
) -> None:
    rows = 64
    row = random_logits(1, seed=logit_seed)
    params = {"temperature": temperature, "top_k": top_k, "top_p": top_p, "min_p": min_p}
    sampled = sample(row.expand(rows, -1), seeded(rows, **params))
    allowed = kept_tokens(row[0], temperature, top_k, top_p, min_p)
    assert set(sampled.tokens) <= allowed
    plain = torch.log_softmax(row[0].double() / temperature, -1)  # before the filters
    assert sampled.logprobs == pytest.approx(
        [float(plain[token]) for token in sampled.tokens], abs=1e-4
    )


@settings(max_examples=30)
@given(st.integers(1, 12), st.floats(0.1, 1.0), st.floats(0.0, 0.3), st.integers(0, 99))
def test_masks_are_what_the_filters_keep(top_k: int, top_p: float, min_p: float, seed: int) -> None:
    logits = random_logits(1, seed=seed)
    filters = {"top_k": top_k, "top_p": top_p, "min_p": min_p}
    sequence = make_sequence([0], temperature=0.9, **filters)
    sequence.sampling_mask = []
    sampled = sample(logits, [sequence])
    kept = kept_tokens(logits[0], 0.9, **filters)
    assert [set(row) for row in sequence.sampling_mask] == [kept]
    log_p = torch.log_softmax(logits[0].double() / 0.9, -1)
    expected = log_p[sampled.tokens[0]] - torch.logsumexp(log_p[list(kept)], 0)
    assert sequence.sampling_logprobs == pytest.approx([float(expected)], abs=1e-5)
    assert sampled.logprobs == pytest.approx([float(log_p[sampled.tokens[0]])], abs=1e-5)


def test_filters_look_beyond_their_first_candidates() -> None:
    logits = torch.zeros(1, VOCAB)  # flat: top_p 0.9 keeps 346 of 384 tokens
    drawn = {
        sample(logits, [make_sequence([0], sampling_seed=seed, top_p=0.9)]).tokens[0]
        for seed in range(600)
    }
    assert 256 < len(drawn) <= 347


def test_rows_of_all_kinds_share_a_batch_without_touching_each_other() -> None:
    kinds = [
        {"temperature": 0},
        {"temperature": 1.3},
        {"top_k": 3},
        {"top_p": 0.5, "temperature": 0.6},
        {"frequency_penalty": 1.5},
        {"repetition_penalty": 1.7, "min_p": 0.1},
        {"logit_bias": {"7": 50.0}},
    ]

    def sequences() -> list[Sequence]:
        made = [make_sequence([0], sampling_seed=i, **kind) for i, kind in enumerate(kinds)]
        for sequence in made:
            sequence.output_ids += [3, 3, 9]
        return made

    logits = random_logits(len(kinds))
    together = sample(logits, sequences())
    for row, sequence in enumerate(sequences()):
        alone = sample(logits[row : row + 1], [sequence])
        assert alone.tokens == together.tokens[row : row + 1]
        assert alone.logprobs == together.logprobs[row : row + 1]
    assert together.tokens[0] == int(logits[0].argmax()) and together.tokens[6] == 7


def test_greedy_log_prob_counts_as_temperature_one() -> None:
    logits = random_logits(2)
    sampled = sample(
        logits, [make_sequence([0], temperature=0), make_sequence([0], temperature=0.5, top_k=1)]
    )
    assert sampled.tokens == logits.argmax(-1).tolist()
    assert sampled.logprobs[0] == pytest.approx(
        float(torch.log_softmax(logits[0], -1).max()), abs=1e-5
    )
    assert sampled.logprobs[1] == pytest.approx(
        float(torch.log_softmax(logits[1] / 0.5, -1).max()), abs=1e-5
    )


def test_penalties_change_the_logits_as_defined() -> None:
    logits = random_logits(1)
    params = {"frequency_penalty": 0.5, "presence_penalty": 0.25, "repetition_penalty": 1.5}
    sequence = make_sequence([0], temperature=0, **params)
    sequence.output_ids += [4, 4, 11]
    expected = logits[0].clone()
    for token, count in ((4, 2), (11, 1)):
        value = float(expected[token])
        expected[token] = (value * 1.5 if value < 0 else value / 1.5) - 0.5 * count - 0.25
    sampled = sample(logits, [sequence])
    assert sampled.tokens == [int(expected.argmax())]
    assert sampled.logprobs[0] == pytest.approx(
        float(torch.log_softmax(expected, -1).max()), abs=1e-5
    )


@pytest.mark.parametrize(
    ("params", "change"),
    [
        ({"presence_penalty": 0.75}, lambda value, count: value - 0.75),
        ({"presence_penalty": -0.75}, lambda value, count: value + 0.75),
        ({"frequency_penalty": 0.5}, lambda value, count: value - 0.5 * count),
        (
            {"repetition_penalty": 1.5},
            lambda value, count: value * 1.5 if value < 0 else value / 1.5,
        ),
    ],
    ids=["presence", "presence rewarded", "frequency", "repetition"],
)
def test_each_penalty_changes_the_tokens_seen_and_no_other(
    params: dict[str, float], change: Callable[[float, int], float]
) -> None:
    logits = random_logits(1, scale=1.0)
    lowest, highest = int(logits[0].argmin()), int(logits[0].argmax())
    sequence = make_sequence([0], temperature=0, tops=VOCAB, **params)
    sequence.output_ids += [lowest, highest, highest]
    expected = logits[0].double()
    for token, count in ((lowest, 1), (highest, 2)):
        expected[token] = change(float(expected[token]), count)
    sample(logits, [sequence])
    [found] = sequence.top_logprobs
    by_token = {token: value for value, token in found}
    assert [by_token[t] for t in range(VOCAB)] == pytest.approx(
        expected.log_softmax(-1).tolist(), abs=1e-4
    )


def test_top_logprobs_are_the_largest() -> None:
    logits = random_logits(1)
    sequence = make_sequence([0], tops=3)
    sample(logits, [sequence])
    values, tokens = torch.log_softmax(logits[0], -1).topk(3)
    assert [token for _, token in sequence.top_logprobs[0]] == tokens.tolist()
    assert [value for value, _ in sequence.top_logprobs[0]] == pytest.approx(
        values.tolist(), abs=1e-5
    )


@pytest.mark.parametrize("vocab", [7, 384, 1021, 4096])
def test_tokens_of_probability_zero_are_never_drawn(vocab: int) -> None:
    logits = torch.full((200, vocab), -torch.inf)
    logits[:, vocab // 2 :: 3] = 0.0
    sampled = sample(logits, [make_sequence([0], sampling_seed=seed) for seed in range(200)])
    assert all((token - vocab // 2) % 3 == 0 and token >= vocab // 2 for token in sampled.tokens)
    assert len(set(sampled.tokens)) > 1 or vocab == 7


def test_logits_that_are_not_finite_are_reported() -> None:
    logits = random_logits(3)
    logits[1, 5] = torch.nan
    assert sample(logits, [make_sequence([0]) for _ in range(3)]).finite == [True, False, True]


@given(
    st.lists(
        st.tuples(st.integers(-(2**70), 2**70), st.integers(0, 10**6)), min_size=1, max_size=50
    )
)
def test_uniforms_depend_on_seed_and_position_alone(pairs: list[tuple[int, int]]) -> None:
    values = uniforms([seed for seed, _ in pairs], [position for _, position in pairs])
    assert ((values >= 0) & (values < 1)).all()
    assert [uniforms([seed], [position])[0] for seed, position in pairs] == values.tolist()


def test_uniforms_are_the_published_mixer_twice() -> None:
    """splitmix64 (Steele et al., "Fast splittable pseudorandom number generators", 2014) in
    Python's integers: what a seed draws stays the same from release to release."""
    every = (1 << 64) - 1
    golden = 0x9E3779B97F4A7C15

    def mix(x: int) -> int:
        x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & every
        x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & every
        return x ^ (x >> 31)

    pairs = [(0, 0), (7, 10), (2**63 + 5, 3), (-1, 100_000)]
    expected = [
        mix((mix(((seed & every) + golden) & every) + position * golden) & every)
        for seed, position in pairs
    ]
    found = uniforms([seed for seed, _ in pairs], [position for _, position in pairs])
    assert found.tolist() == [(value >> 11) * 2.0**-53 for value in expected]


def test_uniforms_are_uniform_along_positions_and_seeds() -> None:
    for values in (uniforms([3] * 10_000, range(10_000)), uniforms(range(10_000), [3] * 10_000)):
        counts, _ = np.histogram(values, bins=20, range=(0, 1))
        # chi-square, 19 degrees of freedom: p = 0.0007
        assert ((counts - 500) ** 2 / 500).sum() < 45
        assert abs(np.corrcoef(values[:-1], values[1:])[0, 1]) < 0.04


def test_token_logprobs() -> None:
    logits, targets = random_logits(5), torch.tensor([1, 2, 3, 4, 5])
    logprobs = torch.log_softmax(logits, -1)
    values, tops = token_logprobs(logits, targets, num_top=3)
    assert values == pytest.approx(logprobs[torch.arange(5), targets].tolist(), abs=1e-6)
    for row, expected in zip(
        tops, logprobs.sort(descending=True).values[:, :3].tolist(), strict=True
    ):
        assert [value for value, _ in row] == pytest.approx(expected, abs=1e-6)
    assert all(
        logprobs[i, token].item() == pytest.approx(value)
        for i, row in enumerate(tops)
        for value, token in row
    )
    assert token_logprobs(logits, targets)[1] == []
