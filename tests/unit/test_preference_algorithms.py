"""Preference losses against plain Python in float64, from the papers' formulas; their gradients
against finite differences."""

from __future__ import annotations

import math
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from slime.algorithms.preferences import (
    PREFERENCES,
    PreferenceInputs,
    PreferenceLoss,
    SequenceScores,
    sequence_scores,
)
from slime.config.preferences import PREFERENCE_FACTS, preferences_where

#: Masks of the answers of a micro-batch: whole, partly masked, fully masked, of one token, empty.
answers = st.lists(st.lists(st.booleans(), max_size=6), min_size=2, max_size=8)
SETTINGS: dict[str, Any] = {
    "beta": 0.3,
    "simpo_gamma": 0.4,
    "desirable_weight": 1.5,
    "undesirable_weight": 0.7,
    "kl": 0.2,
    "center_coef": 0.05,
}


def randn(n: int, seed: int) -> Tensor:
    return torch.randn(n, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def log_sigmoid(x: float) -> float:
    return -math.log1p(math.exp(-x)) if x > 0 else x - math.log1p(math.exp(x))


def sigmoid(x: float) -> float:
    return math.exp(log_sigmoid(x))


def by_formula(
    name: str, chosen: tuple[float, float, int], rejected: tuple[float, float, int], epsilon: float
) -> list[float]:
    """Losses of a pair (KTO: of its two answers).

    Args:
        chosen, rejected: (Σ log-prob, Σ log-ratio, trained tokens).
    """
    beta = SETTINGS["beta"]
    (sum_c, ratio_c, n_c), (sum_r, ratio_r, n_r) = chosen, rejected

    def logistic(logits: float) -> float:
        return -(1 - epsilon) * log_sigmoid(logits) - epsilon * log_sigmoid(-logits)

    if name == "dpo":
        return [logistic(beta * (ratio_c - ratio_r))]
    if name == "ipo":
        return [(ratio_c / max(n_c, 1) - ratio_r / max(n_r, 1) - 1 / (2 * beta)) ** 2]
    if name == "simpo":
        means = sum_c / max(n_c, 1) - sum_r / max(n_r, 1)
        return [logistic(beta * means - SETTINGS["simpo_gamma"])]
    if name == "kto":
        z = SETTINGS["kl"]
        return [
            SETTINGS["desirable_weight"] * (1 - sigmoid(beta * (ratio_c - z))),
            SETTINGS["undesirable_weight"] * (1 - sigmoid(beta * (z - ratio_r))),
        ]
    assert name == "reward_model"
    return [-log_sigmoid(sum_c - sum_r) + SETTINGS["center_coef"] * (sum_c + sum_r) ** 2]


def losses(
    name: str, values: Tensor, reference: Tensor, masks: list[list[bool]], epsilon: float = 0.0
) -> PreferenceLoss:
    """The loss of answers that stand in turns: chosen, rejected, chosen, …"""
    flat = torch.tensor([float(one) for mask in masks for one in mask], dtype=torch.float64)
    lengths = torch.tensor([len(mask) for mask in masks])
    scores = sequence_scores(values, reference, flat, lengths)
    chosen, rejected = (torch.arange(start, len(masks), 2) for start in (0, 1))
    inputs = PreferenceInputs(
        scores.pick(chosen), scores.pick(rejected), label_smoothing=epsilon, **SETTINGS
    )
    return PREFERENCES[name].loss(inputs)


@pytest.mark.parametrize("name", PREFERENCES)
@given(masks=answers, epsilon=st.sampled_from([0.0, 0.2]), seed=st.integers(0, 99))
@settings(max_examples=40, deadline=None)
def test_losses_are_the_formulas(
    name: str, masks: list[list[bool]], epsilon: float, seed: int
) -> None:
    masks = masks[: len(masks) // 2 * 2]
    total = sum(map(len, masks))
    values, reference = randn(total, seed), randn(total, seed + 1)
    epsilon = epsilon if PREFERENCE_FACTS[name].smooths_labels else 0.0
    found = losses(name, values, reference, masks, epsilon).loss.tolist()

    start = 0
    scored: list[tuple[float, float, int]] = []
    for mask in masks:
        places = [start + t for t, trained in enumerate(mask) if trained]
        start += len(mask)
        own = [values[i].item() for i in places]
        ratios = [values[i].item() - reference[i].item() for i in places]
        scored.append((math.fsum(own), math.fsum(ratios), len(places)))
    pairs = [
        by_formula(name, chosen, rejected, epsilon)
        for chosen, rejected in zip(scored[::2], scored[1::2], strict=True)
    ]
    expected = [pair[i] for i in range(len(pairs[0])) for pair in pairs]
    assert found == pytest.approx(expected, abs=1e-9)


@pytest.mark.parametrize("name", PREFERENCES)
def test_gradients_are_those_of_finite_differences(name: str) -> None:
    masks = [[True, False, True], [True], [False, False], [True, True], [], [True, True, True]]
    total = sum(map(len, masks))
    reference = randn(total, 5)
    epsilon = 0.1 if PREFERENCE_FACTS[name].smooths_labels else 0.0

    def total_loss(values: Tensor) -> Tensor:
        return losses(name, values, reference, masks, epsilon).loss.sum()

    values = randn(total, 4).requires_grad_()
    assert torch.autograd.gradcheck(total_loss, values)
    found = losses(name, values, reference, masks, epsilon)
    assert not found.chosen_rewards.requires_grad and not found.rejected_rewards.requires_grad


def test_a_nan_on_a_token_that_is_not_trained_does_no_harm() -> None:
    values = torch.tensor([-1.0, float("nan"), -2.0], requires_grad=True)
    scores = sequence_scores(
        values, torch.zeros(3), torch.tensor([1.0, 0.0, 1.0]), torch.tensor([2, 1])
    )
    scores.sums.sum().backward()
    assert scores.sums.tolist() == [-1.0, -2.0]
    assert values.grad is not None and values.grad.tolist() == [1.0, 0.0, 1.0]


def test_equal_models_start_at_ln_2_whatever_the_length() -> None:
    """Log-probs of 20,000 tokens, whose sums float32 cannot hold exactly."""
    values = (randn(30_000, 1) - 4.0).float()
    scores = sequence_scores(
        values, values.clone(), torch.ones(30_000), torch.tensor([20_000, 10_000])
    )
    chosen, rejected = (scores.pick(torch.tensor([i])) for i in (0, 1))
    found = PREFERENCES["dpo"].loss(PreferenceInputs(chosen, rejected))
    assert found.loss.item() == pytest.approx(math.log(2.0), abs=1e-7)
    assert found.chosen_rewards.item() == found.rejected_rewards.item() == 0.0


def test_simpo_is_that_of_trl() -> None:
    cpo = pytest.importorskip("trl.experimental.cpo")
    trainer = SimpleNamespace(
        accelerator=SimpleNamespace(device="cpu"),
        loss_type="simpo",
        alpha=0.0,
        beta=2.5,
        simpo_gamma=1.2,
        label_smoothing=0.1,
    )
    chosen, rejected = randn(7, 1), randn(7, 2)
    theirs, *_ = cpo.CPOTrainer.cpo_loss(trainer, chosen, rejected)
    one = torch.ones(7, dtype=torch.float64)
    ours = PREFERENCES["simpo"].loss(
        PreferenceInputs(
            SequenceScores(3 * chosen, one, 3 * one),
            SequenceScores(rejected, one, one),
            beta=2.5,
            simpo_gamma=1.2,
            label_smoothing=0.1,
        )
    )
    assert torch.allclose(ours.loss, theirs, atol=1e-12)


@pytest.mark.parametrize(("name", "wanted"), [("dpo", math.log(3.0) / 0.5), ("ipo", 0.5)])
def test_the_best_policy_of_two_answers_is_the_papers(name: str, wanted: float) -> None:
    """Where three of four labels prefer one answer, DPO's optimum has σ(β Δ) = 3/4, and IPO's is
    Δ = (3/4 − 1/4) / (2 β)."""
    beta = 0.5
    margin = torch.zeros(1, dtype=torch.float64, requires_grad=True)
    one = torch.ones(1, dtype=torch.float64)
    optimizer = torch.optim.LBFGS([margin], max_iter=100, tolerance_grad=1e-10)

    def closure() -> Tensor:
        optimizer.zero_grad()
        first = SequenceScores(margin, margin, one)
        second = SequenceScores(0 * margin, 0 * margin, one)
        likes, dislikes = (
            PREFERENCES[name].loss(PreferenceInputs(a, b, beta=beta)).loss.sum()
            for a, b in ((first, second), (second, first))
        )
        loss: Tensor = 0.75 * likes + 0.25 * dislikes
        loss.backward()
        return loss

    for _ in range(5):
        optimizer.step(closure)
    assert margin.item() == pytest.approx(wanted, abs=1e-5)


def test_every_loss_has_facts_and_a_row() -> None:
    assert set(PREFERENCES) == set(PREFERENCE_FACTS)
    assert all(row.facts is PREFERENCE_FACTS[name] for name, row in PREFERENCES.items())
    assert preferences_where("beta", False) == ("reward_model",)
