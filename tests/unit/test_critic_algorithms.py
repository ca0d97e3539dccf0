"""PPO's advantages, returns and value loss against plain sums in float64, from the papers."""

from __future__ import annotations

import statistics

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from slime.algorithms.advantages import AdvantageInputs, ppo
from slime.algorithms.values import ReturnScale, clipped_value_loss, return_statistics

masks_of_samples = st.lists(
    st.lists(st.booleans(), min_size=1, max_size=12), min_size=1, max_size=4
)


def randn(n: int, seed: int) -> Tensor:
    return torch.randn(n, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def by_definition(
    rewards: list[float], values: list[float], gamma: float, lambd: float
) -> list[float]:
    """The exponentially weighted mean of k-step advantages (arXiv:1506.02438, eq. 11 to 16), over
    the steps of an episode that ends."""
    n = len(rewards)

    def k_step(t: int, k: int) -> float:
        seen = sum(gamma**i * rewards[t + i] for i in range(k) if t + i < n)
        return seen + (gamma**k * values[t + k] if t + k < n else 0.0) - values[t]

    found = []
    for t in range(n):
        left = n - t  # k-step advantages beyond the end are all equal: their weights add up
        weighted = sum((1 - lambd) * lambd ** (k - 1) * k_step(t, k) for k in range(1, left))
        found.append(weighted + lambd ** (left - 1) * k_step(t, left))
    return found


@given(
    masks=masks_of_samples,
    gamma=st.floats(0.0, 1.0),
    lambdas=st.tuples(st.floats(0.0, 1.0), st.floats(0.0, 1.0)),
    kl_coef=st.sampled_from([0.0, 0.3]),
    per_token=st.booleans(),
    seed=st.integers(0, 99),
)
@settings(max_examples=80)
def test_advantages_and_returns_are_those_of_the_trained_tokens_alone(
    masks: list[list[bool]],
    gamma: float,
    lambdas: tuple[float, float],
    kl_coef: float,
    per_token: bool,
    seed: int,
) -> None:
    lengths = [len(mask) for mask in masks]
    values = [randn(n, seed + i) for i, n in enumerate(lengths)]
    kl = [randn(n, seed + 50 + i) for i, n in enumerate(lengths)]
    given_rewards = [randn(n, seed + 80 + i) for i, n in enumerate(lengths)]
    rewards = [1.5 - i for i in range(len(masks))]
    found = ppo(
        AdvantageInputs(
            rewards,
            kl,
            [torch.tensor(mask, dtype=torch.float64) for mask in masks],
            kl_coef,
            gamma,
            values,
            *lambdas,
            token_rewards=given_rewards if per_token else None,
        )
    )
    for i, mask in enumerate(masks):
        steps = [t for t, trained in enumerate(mask) if trained]
        own = [given_rewards[i][t].item() if per_token else 0.0 for t in steps]
        r = [reward - kl_coef * kl[i][t].item() for reward, t in zip(own, steps)]
        if steps:
            r[-1] += rewards[i] - sum(own)
        v = [values[i][t].item() for t in steps]
        advantages = dict(zip(steps, by_definition(r, v, gamma, lambdas[0])))
        returns = dict(zip(steps, by_definition(r, v, gamma, lambdas[1])))
        for t in range(len(mask)):
            value = values[i][t].item()
            assert found[0][i][t].item() == pytest.approx(advantages.get(t, 0.0), abs=1e-8)
            assert found[1][i][t].item() == pytest.approx(returns.get(t, 0.0) + value, abs=1e-8)


def test_exact_values_leave_the_advantages_of_reinforce_with_a_baseline() -> None:
    """λ = γ = 1: A_t = R - V_t, whatever stands in between."""
    values = randn(300, 1)
    [advantages], [returns] = ppo(
        AdvantageInputs(
            [2.0], [torch.zeros(300, dtype=torch.float64)], [torch.ones(300)], values=[values]
        )
    )
    assert torch.allclose(advantages, 2.0 - values, atol=1e-9)
    assert torch.allclose(returns, torch.full_like(returns, 2.0), atol=1e-9)


def reference_value_loss(value: float, old: float, target: float, clip: float) -> float:
    limited = min(max(value, old - clip), old + clip)
    return max((value - target) ** 2, (limited - target) ** 2)


@given(seed=st.integers(0, 200), clip=st.floats(0.01, 2.0))
@settings(max_examples=60)
def test_value_loss_and_its_gradient_are_the_formulas(seed: int, clip: float) -> None:
    values, old, targets = (randn(9, seed + k) for k in range(3))
    values.requires_grad_()
    found = clipped_value_loss(values, old, targets, clip)
    found.loss.sum().backward()
    assert values.grad is not None
    for i in range(9):
        value, start, target = values[i].item(), old[i].item(), targets[i].item()
        plain = (value - target) ** 2
        expected = reference_value_loss(value, start, target, clip)
        assert found.loss[i].item() == pytest.approx(expected, abs=1e-12)
        assert bool(found.clipped[i].item()) is (expected > plain)
        h = 1e-6
        if min(abs(abs(value - start) - clip), abs(expected - plain) or 1.0) < 1e-4:
            continue  # beside a kink, where there are two slopes
        above, below = (reference_value_loss(value + s * h, start, target, clip) for s in (1, -1))
        assert values.grad[i].item() == pytest.approx((above - below) / (2 * h), abs=1e-5)


@given(masks=masks_of_samples, cut=st.integers(0, 4), seed=st.integers(0, 50))
@settings(max_examples=40)
def test_statistics_of_returns_over_two_ranks(masks: list[list[bool]], cut: int, seed: int) -> None:
    values = [randn(len(mask), seed + i) for i, mask in enumerate(masks)]
    returns = [randn(len(mask), seed + 90 + i) + 3 for i, mask in enumerate(masks)]
    tensors = [torch.tensor(mask, dtype=torch.float64) for mask in masks]
    seen: list[Tensor] = []
    parts = [(values[s], returns[s], tensors[s]) for s in (slice(cut, None), slice(None, cut))]

    def first(tensor: Tensor) -> Tensor:
        seen.append(tensor)
        return tensor

    # the other rank's second sums depend on the means, which the first ones give
    return_statistics(*parts[0], first)
    firsts = seen[0]
    seen.clear()

    def other(tensor: Tensor) -> Tensor:
        seen.append(tensor.clone())
        return tensor + firsts if len(seen) == 1 else tensor

    return_statistics(*parts[1], other)
    theirs = list(seen)
    calls: list[int] = []

    def both(tensor: Tensor) -> Tensor:
        calls.append(1)
        return tensor + theirs[len(calls) - 1]

    found = return_statistics(*parts[0], both)
    v = [x.item() for values_, mask in zip(values, masks) for x, m in zip(values_, mask) if m]
    g = [x.item() for values_, mask in zip(returns, masks) for x, m in zip(values_, mask) if m]
    if len(g) < 2:
        assert found["explained_variance"] == 0.0 or not g
        return
    errors = [a - b for a, b in zip(g, v)]
    expected = 1 - statistics.pvariance(errors) / statistics.pvariance(g)
    assert found["explained_variance"] == pytest.approx(expected, rel=1e-6)
    assert found["mean"] == pytest.approx(statistics.mean(g), rel=1e-9)
    assert found["square"] == pytest.approx(statistics.mean(x * x for x in g), rel=1e-9)


def test_equal_returns_are_no_variance_to_explain() -> None:
    found = return_statistics([torch.zeros(2)], [torch.ones(2)], [torch.ones(2)])
    assert found == {"tokens": 2.0, "mean": 1.0, "square": 1.0, "explained_variance": 0.0}
    assert return_statistics([], [], [])["explained_variance"] == 0.0


def test_the_scale_of_returns_follows_them_from_the_first_rollout_on() -> None:
    assert ReturnScale().normalised(torch.tensor([3.0])).item() == 3.0
    scale = ReturnScale()
    for rollout in range(300):
        mean = 5.0 if rollout < 150 else -1.0
        scale = scale.updated(mean=mean, square=mean**2 + 4.0)
        if rollout in (0, 149):
            assert scale.shift == pytest.approx(5.0)
            assert scale.factor == pytest.approx(2.0)
    assert -1.0 < scale.shift < 1.0
    outputs = torch.tensor([-2.0, 0.5])
    assert torch.allclose(scale.normalised(scale.restored(outputs)), outputs)
    flat = ReturnScale().updated(mean=1.0, square=1.0)
    assert flat.factor == pytest.approx(0.1)  # equal rewards are not divided by 0
