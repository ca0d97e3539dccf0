"""Algorithms: worked examples, invariants, and agreement with plain formulas."""

from __future__ import annotations

import dataclasses
import doctest
import importlib
import math
import random
import statistics
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from slime.algorithms.advantages import (
    AdvantageInputs,
    discounted_returns,
    reinforce_plus_plus,
    whiten,
)
from slime.algorithms.baseline import (
    group_deviation,
    group_mean,
    leave_one_out_mean,
    mean_reward,
    normalise_rewards,
)
from slime.algorithms.estimators import ESTIMATORS, Estimator
from slime.algorithms.kl import KL_KINDS, kl_estimate
from slime.algorithms.losses import (
    Level,
    PolicyInputs,
    gspo_loss,
    importance_ratio,
    off_policy_sequence_mask,
    ppo_clip_loss,
    rejection_mask,
    truncated_importance_sampling,
)
from slime.algorithms.reduce import sequence_mean, token_weights, weighted_sum
from slime.config.estimators import FACTS, EstimatorFacts
from slime.config.flags import own_flags
from slime.errors import UserError
from slime.trainer.loss import LOSS_TYPES
from tests.support.trainer_ranks import trainer_config

MODULES = ("advantages", "baseline", "kl", "logprobs", "losses", "reduce", "values")
lists_of_lengths = st.lists(st.integers(1, 9), min_size=1, max_size=6)


def randn(n: int, seed: int, scale: float = 1.0) -> Tensor:
    return scale * torch.randn(
        n, generator=torch.Generator().manual_seed(seed), dtype=torch.float64
    )


@pytest.mark.parametrize("name", MODULES)
def test_worked_examples_of_the_docstrings(name: str) -> None:
    result = doctest.testmod(importlib.import_module(f"slime.algorithms.{name}"))
    assert result.attempted > 1 and result.failed == 0


# -- baselines and divisors ------------------------------------------------------------------------


@st.composite
def rewards_of_groups(draw: st.DrawFn) -> list[tuple[float, int, int]]:
    rows, trajectory = [], 0
    for group in range(draw(st.integers(1, 4))):
        for _ in range(draw(st.integers(1, 5))):
            for _ in range(draw(st.integers(1, 3))):
                rows.append((draw(st.floats(-100, 100)), group, trajectory))
            trajectory += 1
    return rows


@given(
    rewards_of_groups(),
    st.sampled_from([group_mean, leave_one_out_mean]),
    st.sampled_from([None, group_deviation]),
)
def test_advantages_of_a_group_sum_to_zero_over_trajectories(rows, baseline, divisor) -> None:
    advantages = normalise_rewards(*map(list, zip(*rows)), baseline=baseline, divisor=divisor)
    for group in {row[1] for row in rows}:
        by_trajectory: dict[int, list[float]] = {}
        for advantage, (_, g, trajectory) in zip(advantages, rows):
            if g == group:
                by_trajectory.setdefault(trajectory, []).append(advantage)
        means = [math.fsum(values) / len(values) for values in by_trajectory.values()]
        # rounding of a mean near 100 is divided by the deviation, which is at least 1e-6
        assert abs(math.fsum(means)) < 1e-6 * max(1.0, max(map(abs, means)))


@given(rewards_of_groups(), st.randoms(use_true_random=False))
def test_advantages_do_not_depend_on_the_order_of_samples(rows, rng: random.Random) -> None:
    expected = {}
    for row, advantage in zip(rows, normalise_rewards(*map(list, zip(*rows)))):
        expected.setdefault(row, advantage)
    shuffled = rng.sample(rows, len(rows))
    for row, advantage in zip(shuffled, normalise_rewards(*map(list, zip(*shuffled)))):
        assert advantage == expected[row]


@given(st.lists(st.floats(-10, 10), min_size=2, max_size=8))
def test_matches_the_formula_for_one_plain_group(rewards) -> None:
    values = torch.tensor(rewards, dtype=torch.float64)
    expected = (values - values.mean()) / (values.std() + 1e-6)
    got = normalise_rewards(rewards, [0] * len(rewards), list(range(len(rewards))))
    assert torch.allclose(torch.tensor(got, dtype=torch.float64), expected, atol=1e-6, rtol=1e-6)


@given(st.lists(st.floats(-10, 10), min_size=1, max_size=8))
def test_the_leave_one_out_baseline_knows_the_other_rewards_alone(rewards) -> None:
    baseline = leave_one_out_mean(rewards)
    for i, subtracted in enumerate(baseline):
        others = rewards[:i] + rewards[i + 1 :]
        expected = sum(others) / len(others) if others else rewards[i]
        assert subtracted == pytest.approx(expected, abs=1e-9)


@given(st.integers(0, 8), st.integers(1, 8))
def test_maxrl_weighs_a_success_by_one_over_the_success_rate(right: int, wrong: int) -> None:
    rewards = [1.0] * right + [0.0] * wrong
    ids = list(range(len(rewards)))
    got = normalise_rewards(rewards, [0] * len(ids), ids, divisor=mean_reward)
    rate = right / len(rewards)
    expected = [(reward - rate) / rate if right else 0.0 for reward in rewards]
    assert got == pytest.approx(expected, rel=1e-4)


def test_two_players_whose_rewards_add_up_to_zero_are_not_divided_by_nothing() -> None:
    assert normalise_rewards([1, -1, -1, 1], [0] * 4, [0, 0, 1, 1]) == [1.0, -1.0, -1.0, 1.0]


# -- KL --------------------------------------------------------------------------------------------


@given(kind=st.sampled_from(sorted(KL_KINDS)), seed=st.integers(0, 99))
@settings(max_examples=40)
def test_kl_is_zero_for_equal_bits_and_k3_never_negative(kind: str, seed: int) -> None:
    lp, base = randn(20, seed), randn(20, seed + 1)
    assert torch.equal(kl_estimate(lp, lp.clone(), kind), torch.zeros(20, dtype=torch.float64))
    if kind in ("k3", "low_var_kl"):
        assert (kl_estimate(lp, base, kind) >= 0).all()


def test_kl_of_two_categoricals_is_the_mean_of_the_estimators() -> None:
    p, q = torch.tensor([0.7, 0.2, 0.1]), torch.tensor([0.4, 0.4, 0.2])
    exact = (p * (p / q).log()).sum()
    for kind in ("k1", "k3"):
        estimates = kl_estimate(p.log(), q.log(), kind)
        assert torch.isclose((p * estimates).sum(), exact)
    behaviour = torch.tensor([0.2, 0.3, 0.5])  # off-policy: the ratio makes it unbiased again
    weighted = kl_estimate(p.log(), q.log(), "k3", p.log() - behaviour.log())
    assert torch.isclose((behaviour * weighted).sum(), exact)


@pytest.mark.parametrize(
    ("kind", "weighted", "pulls"),
    [
        ("k1", False, False),
        ("k1", True, True),
        ("k2", False, True),
        ("k3", False, True),
        ("low_var_kl", False, True),
    ],
)
def test_which_kl_loss_pulls_on_policy(kind: str, weighted: bool, pulls: bool) -> None:
    """The expectation over the policy's own samples of the estimate's gradient by the logits."""
    logits = torch.tensor([0.7, 0.2, 0.1], dtype=torch.float64).log().requires_grad_()
    base = torch.tensor([0.4, 0.4, 0.2], dtype=torch.float64).log()
    lp = logits.log_softmax(0)
    ratio = lp - lp.detach() if weighted else None
    (lp.detach().exp() * kl_estimate(lp, base, kind, ratio)).sum().backward()
    assert logits.grad is not None
    assert bool(logits.grad.abs().max() > 0.1) == pulls
    if pulls:  # towards the base: the first token, which is too likely, loses
        assert logits.grad[0] > 0 > logits.grad[1]
    else:
        assert torch.allclose(logits.grad, torch.zeros(3, dtype=torch.float64), atol=1e-12)


def test_low_var_kl_is_clamped_after_the_ratio() -> None:
    lp, base = torch.tensor([-9.0]), torch.tensor([-1.0])
    assert kl_estimate(lp, base, "low_var_kl").item() == 10.0
    assert kl_estimate(lp, base, "k3").item() > 1000


@given(length=st.integers(1, 300), gamma=st.floats(0.5, 1.0))
@settings(max_examples=30)
def test_discounted_returns_follow_the_recurrence(length: int, gamma: float) -> None:
    rewards = randn(length, length)
    returns = discounted_returns(rewards, gamma)
    expected, following = torch.empty_like(rewards), 0.0
    for t in reversed(range(length)):
        following = float(rewards[t]) + gamma * following
        expected[t] = following
    assert torch.allclose(returns, expected, rtol=1e-9, atol=1e-9)


@given(
    mask=st.lists(st.booleans(), min_size=1, max_size=40),
    gamma=st.floats(0.0, 1.0),
    seed=st.integers(0, 99),
)
@settings(max_examples=60)
def test_nothing_is_discounted_across_tokens_that_are_not_trained(
    mask: list[bool], gamma: float, seed: int
) -> None:
    """As if the sample had its trained tokens alone: the recurrence over these, zeros in
    between."""
    kl = randn(len(mask), seed)
    masks = torch.tensor(mask, dtype=torch.float64)
    [advantages], [returns] = reinforce_plus_plus(
        AdvantageInputs([2.0], [kl], [masks], kl_coef=0.3, gamma=gamma)
    )
    expected, following, is_last = [0.0] * len(mask), 0.0, True
    for t in reversed(range(len(mask))):
        if mask[t]:
            following = -0.3 * kl[t].item() + (2.0 if is_last else 0.0) + gamma * following
            expected[t], is_last = following, False
    assert advantages.tolist() == pytest.approx(expected, rel=1e-9, abs=1e-9) == returns.tolist()


def test_reinforce_plus_plus_of_a_sample_that_is_not_trained_is_zero() -> None:
    kl, masks = [torch.ones(2), torch.ones(2)], [torch.zeros(2), torch.ones(2)]
    advantages, returns = reinforce_plus_plus(AdvantageInputs([1.0, 1.0], kl, masks))
    assert advantages[0].tolist() == returns[0].tolist() == [0.0, 0.0]
    assert advantages[1].tolist() == [1.0, 1.0]


def test_whitening_is_by_the_mean_and_deviation_of_trained_tokens() -> None:
    values = [torch.tensor([1.0, 4.0, 90.0]), torch.tensor([-2.0, 7.0, 3.0])]
    masks = [torch.tensor([1.0, 1.0, 0.0]), torch.tensor([1.0, 1.0, 1.0])]
    trained = [1.0, 4.0, -2.0, 7.0, 3.0]
    mean, deviation = statistics.mean(trained), statistics.stdev(trained)
    for found, given_values in zip(whiten(values, masks), values):
        assert found.tolist() == pytest.approx(
            [(v - mean) / deviation for v in given_values.tolist()], rel=1e-5
        )


@given(lengths=lists_of_lengths, cut=st.integers(0, 6), seed=st.integers(0, 50))
@settings(max_examples=30)
def test_whitening_over_two_ranks_equals_one(lengths: list[int], cut: int, seed: int) -> None:
    """Each rank sees its part; the sums of both are what `all_reduce` would give. One of them may
    be empty."""
    values = [randn(n, seed + i) for i, n in enumerate(lengths)]
    masks = [torch.ones(n) for n in lengths]
    whole = whiten(values, masks)
    parts = (values[:cut], values[cut:])
    mask_parts = (masks[:cut], masks[cut:])
    seen: list[list[Tensor]] = [[], []]

    def record(rank: int, replies: list[Tensor]) -> list[Tensor]:
        def all_reduce(tensor: Tensor) -> Tensor:
            seen[rank].append(tensor)
            return replies[len(seen[rank]) - 1] if len(seen[rank]) <= len(replies) else tensor

        seen[rank] = []
        return whiten(parts[rank], mask_parts[rank], all_reduce)

    replies: list[Tensor] = []
    for _ in range(2):  # first reply, then the second, which depends on it
        for rank in (0, 1):
            record(rank, replies)
        replies.append(seen[0][len(replies)] + seen[1][len(replies)])
    joined = record(0, replies) + record(1, replies)
    for a, b in zip(joined, whole, strict=True):
        assert torch.allclose(a.double(), b, atol=1e-5)


def inputs_of(seed: int, lengths: list[int], spread: float = 0.5, **kwargs: float) -> PolicyInputs:
    n = sum(lengths)
    return PolicyInputs(
        log_probs=randn(n, seed, spread).requires_grad_(),
        old_log_probs=randn(n, seed + 1, spread),
        advantages=randn(n, seed + 2),
        masks=torch.ones(n, dtype=torch.float64),
        lengths=torch.tensor(lengths),
        **kwargs,  # type: ignore[arg-type]
    )


@given(seed=st.integers(0, 200), lengths=lists_of_lengths)
@settings(max_examples=40)
def test_ppo_clip_equals_the_case_by_case_formula(seed: int, lengths: list[int]) -> None:
    inputs = inputs_of(seed, lengths, eps_clip=0.2, eps_clip_high=0.3, eps_clip_c=2.0)
    out = ppo_clip_loss(inputs)
    for t in range(sum(lengths)):
        ratio = torch.exp(inputs.log_probs[t] - inputs.old_log_probs[t]).item()
        a = inputs.advantages[t].item()
        clipped = min(max(ratio, 0.8), 1.3)
        loss = max(-ratio * a, -clipped * a)
        loss = min(loss, -2.0 * a) if a < 0 else loss
        assert out.loss[t].item() == pytest.approx(loss, abs=1e-9)
        assert out.clipped[t].item() == float(-clipped * a > -ratio * a)


@given(seed=st.integers(0, 200), lengths=lists_of_lengths)
@settings(max_examples=30)
def test_gspo_and_cispo_equal_their_formulas_token_by_token(seed: int, lengths: list[int]) -> None:
    """With masked tokens, whose log-probs must not move a sequence's ratio, and ratios beyond both
    bounds."""
    inputs = inputs_of(seed, lengths, spread=0.4, eps_clip=0.15, eps_clip_high=0.3)
    masks = (randn(sum(lengths), seed + 3) > -0.5).double()
    inputs = dataclasses.replace(inputs, masks=masks)
    log_ratios = (inputs.log_probs - inputs.old_log_probs).tolist()
    gspo, cispo = ESTIMATORS["gspo"].loss(inputs), ESTIMATORS["cispo"].loss(inputs)
    start = 0
    for length in lengths:
        tokens = range(start, start + length)
        trained = [t for t in tokens if masks[t]]
        mean = sum(log_ratios[t] for t in trained) / max(len(trained), 1)
        for t in trained:
            a = inputs.advantages[t].item()
            of_sequence = math.exp(mean)
            clipped = min(max(of_sequence, 0.85), 1.3)
            assert gspo.loss[t].item() == pytest.approx(
                max(-of_sequence * a, -clipped * a), abs=1e-9
            )
            ratio = math.exp(log_ratios[t])
            weight = min(max(ratio, 0.85), 1.3)
            assert cispo.loss[t].item() == pytest.approx(
                -weight * a * inputs.log_probs[t].item(), abs=1e-9
            )
            assert cispo.clipped[t].item() == float(weight != ratio)
        start += length


@given(seed=st.integers(0, 200), lengths=lists_of_lengths)
@settings(max_examples=30)
def test_sapo_equals_its_formula_and_pulls_by_its_derivative(seed: int, lengths: list[int]) -> None:
    inputs = inputs_of(seed, lengths, sapo_tau_pos=0.8, sapo_tau_neg=1.7)
    out = ESTIMATORS["sapo"].loss(inputs)
    out.loss.sum().backward()
    assert inputs.log_probs.grad is not None
    for t in range(sum(lengths)):
        ratio = math.exp((inputs.log_probs[t] - inputs.old_log_probs[t]).item())
        a = inputs.advantages[t].item()
        tau = 0.8 if a > 0 else 1.7
        gate = 1 / (1 + math.exp(-tau * (ratio - 1)))
        assert out.loss[t].item() == pytest.approx(-gate * 4 / tau * a, abs=1e-9)
        pull = -4 * gate * (1 - gate) * ratio * a
        assert inputs.log_probs.grad[t].item() == pytest.approx(pull, abs=1e-9)
    assert not out.clipped.any()


LEVELS: tuple[Level, ...] = ("token", "sequence", "geometric")


@given(
    seed=st.integers(0, 200),
    lengths=lists_of_lengths,
    level=st.sampled_from(LEVELS),
    veto=st.sampled_from([None, 0.5]),
)
@settings(max_examples=60)
def test_rejection_follows_its_definition(
    seed: int, lengths: list[int], level: Level, veto: float | None
) -> None:
    n = sum(lengths)
    log_ratio = randn(n, seed, 0.5)
    masks = (randn(n, seed + 1) > -0.5).double()
    log_ratio[masks == 0] = -math.inf  # what is not trained may be anything
    found = rejection_mask(log_ratio, masks, torch.tensor(lengths), level, 0.8, 1.3, veto)
    start = 0
    for length in lengths:
        trained = [t for t in range(start, start + length) if masks[t]]
        total = sum(log_ratio[t].item() for t in trained)
        vetoed = veto is not None and any(log_ratio[t] < math.log(veto) for t in trained)
        for t in trained:
            at_level = {
                "token": log_ratio[t].item(),
                "sequence": total,
                "geometric": total / len(trained),
            }[level]
            kept = math.log(0.8) <= at_level <= math.log(1.3) and not vetoed
            assert found.keep[t].item() == float(kept)
        start += length


@pytest.mark.parametrize("name", sorted(ESTIMATORS))
def test_on_policy_every_loss_has_the_reinforce_gradient(name: str) -> None:
    """At ratio 1 the gradient is -A (for GSPO: of its sample's mean), which is what makes them
    policy gradients."""
    inputs = inputs_of(3, [4, 2])
    same = PolicyInputs(
        inputs.log_probs,
        inputs.log_probs.detach(),
        inputs.advantages,
        inputs.masks,
        inputs.lengths,
        eps_clip=1.0,
    )
    ESTIMATORS[name].loss(same).loss.sum().backward()
    expected = -inputs.advantages
    if name == "gspo":
        expected = sequence_mean(expected, inputs.masks, inputs.lengths)
    assert inputs.log_probs.grad is not None
    assert torch.allclose(inputs.log_probs.grad, expected)


@pytest.mark.parametrize("name", sorted(ESTIMATORS))
@pytest.mark.parametrize("far", [-300.0, 300.0, -float("inf")])
def test_no_ratio_is_too_large_for_finite_gradients(name: str, far: float) -> None:
    """A token that is not trained has a gradient of 0 whatever its ratio; one that is, a finite
    one."""
    log_probs = torch.tensor([-1.0, -1.0, -1.0]).requires_grad_()
    old = torch.tensor([-1.0, far, far])
    masks = torch.tensor([1.0, 0.0, 1.0])
    lengths = torch.tensor([2, 1])
    if name == "gspo" and far == -float("inf"):
        # its mean over a sample knows no token without a probability
        masks = torch.tensor([1.0, 1.0, 1.0])
    out = ESTIMATORS[name].loss(
        PolicyInputs(log_probs, old, torch.tensor([1.0, -1.0, -1.0]), masks, lengths)
    )
    loss = weighted_sum(out.loss, masks)
    loss.backward()
    assert (
        torch.isfinite(loss) and log_probs.grad is not None and torch.isfinite(log_probs.grad).all()
    )
    if masks[1] == 0:
        assert log_probs.grad[1] == 0


@pytest.mark.parametrize("kind", sorted(KL_KINDS))
@pytest.mark.parametrize("weighted", [False, True])
def test_no_kl_is_too_large_for_finite_gradients(kind: str, weighted: bool) -> None:
    log_probs = torch.tensor([-300.0, -1.0]).requires_grad_()
    base = torch.tensor([-1.0, -300.0])
    ratio = log_probs - torch.tensor([-1.0, -300.0]) if weighted else None
    loss = kl_estimate(log_probs, base, kind, ratio).sum()
    loss.backward()
    assert (
        torch.isfinite(loss) and log_probs.grad is not None and torch.isfinite(log_probs.grad).all()
    )


@given(x=st.floats(-20, 20))
def test_the_clamp_of_ratios_changes_nothing_within(x: float) -> None:
    log_ratio = torch.tensor(x, dtype=torch.float64)
    assert importance_ratio(log_ratio) == log_ratio.exp()


def test_losses_are_differentiated_right() -> None:
    inputs = inputs_of(5, [3, 2], spread=0.05)

    def of(loss: object) -> object:
        return lambda lp: (
            loss(  # type: ignore[operator]
                PolicyInputs(
                    lp, inputs.old_log_probs, inputs.advantages, inputs.masks, inputs.lengths
                )
            ).loss
        )

    assert torch.autograd.gradcheck(of(ppo_clip_loss), inputs.log_probs)
    assert torch.autograd.gradcheck(of(gspo_loss), inputs.log_probs)


@given(lengths=lists_of_lengths, seed=st.integers(0, 99), per_token=st.booleans())
@settings(max_examples=40)
def test_weighted_sums_add_up_over_any_split(
    lengths: list[int], seed: int, per_token: bool
) -> None:
    masks = [(randn(n, seed + i) > -0.5).float() for i, n in enumerate(lengths)]
    values = [randn(n, seed + 50 + i).float() for i, n in enumerate(lengths)]
    sums = [float(m.sum()) for m in masks]
    tokens = int(sum(sums)) if per_token else None

    def part(members: range) -> Tensor:
        weights = token_weights(
            [masks[i] for i in members], [sums[i] for i in members], len(lengths), tokens
        )
        flat = torch.cat([values[i] for i in members]) if len(members) else torch.zeros(0)
        return weighted_sum(flat, weights)

    whole = part(range(len(lengths)))
    split = part(range(1)) + part(range(1, len(lengths)))
    assert torch.isclose(whole, split, atol=1e-6)
    if not per_token:
        means = [float((v * m).sum() / max(float(m.sum()), 1.0)) for v, m in zip(values, masks)]
        assert whole.item() == pytest.approx(sum(means) / len(lengths), abs=1e-5)


def test_sequence_mean_without_samples_is_empty_and_has_a_gradient() -> None:
    values = torch.zeros(0, requires_grad=True)
    mean = sequence_mean(values, torch.zeros(0), torch.zeros(0, dtype=torch.long))
    assert mean.shape == (0,) and mean.requires_grad


def test_a_rank_without_samples_whitens_where_the_others_do() -> None:
    seen: list[torch.Tensor] = []

    def all_reduce(values: torch.Tensor) -> torch.Tensor:
        seen.append(values)
        return values

    assert whiten([], [], all_reduce, torch.device("meta")) == []
    assert len(seen) == 2 and all(values.device.type == "meta" for values in seen)


def test_sequence_mean_of_an_untrained_sample_is_zero() -> None:
    mean = sequence_mean(
        torch.tensor([1.0, 2.0, 5.0]), torch.tensor([0.0, 0.0, 1.0]), torch.tensor([2, 1])
    )
    assert mean.tolist() == [0.0, 0.0, 5.0]


def test_importance_weights_are_the_ratio_inside_the_band() -> None:
    log_ratio = torch.linspace(-2, 2, 41)
    weights = truncated_importance_sampling(log_ratio, 0.5, 2.0).weights
    inside = (log_ratio.exp() >= 0.5) & (log_ratio.exp() <= 2.0)
    assert torch.equal(weights[inside], log_ratio.exp()[inside])
    assert weights.max() == 2.0 and weights.min() == 0.5


def test_sequence_mask_spares_positive_advantages() -> None:
    old, new = torch.zeros(2), torch.full((2,), -1.0)
    keep = off_policy_sequence_mask(
        new, old, torch.tensor([-1.0, 1.0]), torch.ones(2), torch.tensor([1, 1]), 0.1
    )
    assert keep.tolist() == [0.0, 1.0]


# -- the table of estimators -----------------------------------------------------------------------


@pytest.mark.parametrize("fact", [field.name for field in dataclasses.fields(Estimator)])
def test_a_row_that_leaves_a_fact_out_cannot_be_made(fact: str) -> None:
    told = {name: value for name, value in vars(ESTIMATORS["grpo"]).items() if name != fact}
    with pytest.raises(TypeError, match=fact):
        Estimator(**told)


@pytest.mark.parametrize("fact", [field.name for field in dataclasses.fields(EstimatorFacts)])
def test_a_record_that_leaves_a_fact_out_cannot_be_made(fact: str) -> None:
    told = {name: value for name, value in vars(FACTS["grpo"]).items() if name != fact}
    with pytest.raises(TypeError, match=fact):
        EstimatorFacts(**told)


def test_every_name_that_the_flags_take_has_its_row() -> None:
    estimator, kl, loss = (
        own_flags()[name] for name in ("advantage_estimator", "kl_loss_type", "loss_type")
    )
    assert estimator.choices is not None
    assert (
        set(estimator.choices) - set(estimator.meta.refused_values) == set(ESTIMATORS) == set(FACTS)
    )
    assert (set(kl.choices or ()), set(loss.choices or ())) == (set(KL_KINDS), set(LOSS_TYPES))
    assert all(row.facts is FACTS[name] for name, row in ESTIMATORS.items())


def accepts(estimator: str, **flags: Any) -> bool:
    row = ESTIMATORS[estimator]
    try:
        trainer_config(
            **{
                "advantage_estimator": estimator,
                "normalize_advantages": row.facts.needs_whitening,
                **flags,
            }
        )
    except UserError as error:
        assert "advantage-estimator" in str(error), error
        return False
    return True


@pytest.mark.parametrize("name", sorted(ESTIMATORS))
def test_flags_are_refused_exactly_where_they_would_do_nothing(name: str) -> None:
    row = ESTIMATORS[name]
    assert accepts(name)
    assert accepts(name, normalize_advantages=False) is not row.facts.needs_whitening
    assert accepts(name, kl_coef=0.1) is row.facts.takes_token_kl
    assert accepts(name, gamma=0.9) is row.facts.discounts
    assert accepts(name, eps_clip=0.1) is row.facts.clips_ratio
    assert accepts(name, eps_clip_c=3.0) is row.facts.dual_clip
    assert accepts(name, calculate_per_token_loss=True) is not row.facts.sums_tokens
    assert accepts(name, disable_grpo_std_normalization=True) is row.facts.std_normalized
    assert accepts(name, sapo_tau_pos=2.0) is (name == "sapo")


@pytest.mark.parametrize("name", sorted(ESTIMATORS))
def test_what_a_row_says_of_its_functions_is_so(name: str) -> None:
    row, masks = ESTIMATORS[name], [torch.ones(3)]
    assert (row.baseline is not None) is row.facts.group_relative
    assert (row.divisor is group_deviation) is row.facts.std_normalized

    def advantages(**changes: Any) -> list[float]:
        changes = {"values": [torch.tensor([0.3, 0.6, 0.4])], **changes}
        return row.advantages(
            AdvantageInputs([1.0], [torch.tensor([0.5, 0.1, 0.2])], masks, **changes)
        )[0][0].tolist()

    assert (advantages() != advantages(kl_coef=0.1)) is row.facts.takes_token_kl
    assert (advantages() != advantages(gamma=0.5)) is row.facts.discounts
    assert (advantages() != advantages(values=[torch.zeros(3)])) is row.facts.needs_critic

    def loss(sign: float = -1.0, **changes: float) -> list[float]:
        far = torch.tensor([3.0, 0.0])
        return row.loss(
            PolicyInputs(far, -far, sign * far, torch.ones(2), torch.tensor([2]), **changes)
        ).loss.tolist()

    assert (loss(1.0) != loss(1.0, eps_clip_high=0.7)) is row.facts.clips_ratio
    assert (loss() != loss(eps_clip_c=1.5)) is row.facts.dual_clip
