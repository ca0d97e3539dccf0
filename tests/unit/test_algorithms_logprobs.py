"""The fused linear → log-prob equals the plain computation, in value and gradient, at any
blocking."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

import slime.algorithms.logprobs as module
from slime.algorithms.logprobs import (
    LowRankLogits,
    VocabShard,
    linear_log_probs,
    log_sums,
)


def problem(
    n: int, vocab: int, hidden: int, seed: int, dtype: torch.dtype
) -> tuple[Tensor, Tensor, Tensor]:
    g = torch.Generator().manual_seed(seed)
    h = torch.randn(n, hidden, generator=g, dtype=torch.float64).to(dtype).requires_grad_()
    w = torch.randn(vocab, hidden, generator=g, dtype=torch.float64).to(dtype).requires_grad_()
    return h, w, torch.randint(0, vocab, (n,), generator=g)


def plain(h: Tensor, w: Tensor, t: Tensor, temperature: float, real: int) -> tuple[Tensor, Tensor]:
    logp = ((h @ w.t())[:, :real] / temperature).log_softmax(-1)
    return logp.gather(1, t[:, None])[:, 0], -(logp.exp() * logp).sum(-1)


@given(
    n=st.integers(0, 9),
    vocab=st.integers(3, 40),
    padding=st.integers(0, 5),
    start=st.sampled_from([0, 13]),
    chunk=st.sampled_from([-1, 1, 4]),
    temperature=st.floats(0.3, 2.0),
    seed=st.integers(0, 99),
)
@settings(max_examples=60)
def test_equals_the_plain_formula(
    n: int, vocab: int, padding: int, start: int, chunk: int, temperature: float, seed: int
) -> None:
    h, w, _ = problem(n, vocab + padding, 5, seed, torch.float64)
    t = torch.randint(0, vocab, (n,), generator=torch.Generator().manual_seed(seed))
    with pytest.MonkeyPatch.context() as patch:  # blocks of 7 columns, so that there are several
        patch.setattr(module, "_MIN_COLUMNS", 7)
        patch.setattr(module, "_BLOCK_ELEMENTS", {"cpu": 1})
        lp, entropy = linear_log_probs(
            h,
            w,
            t + start,
            temperature=temperature,
            with_entropy=True,
            shard=VocabShard(start, vocab),
            chunk_size=chunk,
        )
        assert entropy is not None
        up = torch.randn(2, n, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))
        grads = torch.autograd.grad((lp * up[0] + entropy * up[1]).sum(), (h, w))
    lp2, entropy2 = plain(h, w, t, temperature, vocab)
    grads2 = torch.autograd.grad((lp2 * up[0] + entropy2 * up[1]).sum(), (h, w))
    for ours, theirs in zip((lp, entropy, *grads), (lp2, entropy2, *grads2), strict=True):
        assert torch.allclose(ours, theirs, atol=1e-10)


def test_gradcheck() -> None:
    h, w, t = problem(4, 11, 3, 0, torch.float64)

    def both(h: Tensor, w: Tensor) -> tuple[Tensor, Tensor]:
        lp, entropy = linear_log_probs(h, w, t, temperature=0.7, with_entropy=True, chunk_size=3)
        assert entropy is not None
        return lp, entropy

    assert torch.autograd.gradcheck(both, (h, w))


@pytest.mark.parametrize("chunk", [-1, 2])
def test_an_adapter_adds_to_the_logits(chunk: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_MIN_COLUMNS", 4)
    monkeypatch.setattr(module, "_BLOCK_ELEMENTS", {"cpu": 1})
    h, w, t = problem(5, 11, 3, 6, torch.float64)
    low, up, _ = problem(5, 11, 2, 7, torch.float64)
    doubled: list[Tensor] = []

    def on_up_grad(grad: Tensor) -> Tensor:
        doubled.append(2 * grad)
        return doubled[0]

    ours = linear_log_probs(
        h,
        w,
        t,
        temperature=0.7,
        with_entropy=True,
        chunk_size=chunk,
        low_rank=LowRankLogits(low, up, on_up_grad),
    )
    joined = torch.cat([h, low], dim=1), torch.cat([w, up], dim=1)
    theirs = plain(*joined, t, 0.7, 11)
    found = []
    for log_probs, entropy in (ours, theirs):
        assert entropy is not None
        total = (log_probs * entropy).sum()
        found.append([log_probs, entropy, *torch.autograd.grad(total, (h, w, low, up))])
    found[1][-1] = 2 * found[1][-1]
    for mine, other in zip(*found, strict=True):
        assert torch.allclose(mine, other, atol=1e-10)
    assert found[0][-1] is doubled[0]


def test_gradient_goes_into_the_accumulator_and_nowhere_else() -> None:
    h, w, t = problem(6, 20, 4, 1, torch.float32)
    (wanted,) = torch.autograd.grad(linear_log_probs(h, w, t)[0].sum(), w)
    sink = torch.ones(20, 4)
    linear_log_probs(h, w, t, grad_accumulator=sink)[0].sum().backward()
    assert w.grad is None
    assert torch.allclose(sink - 1, wanted, atol=1e-6)


def test_entropy_without_gradient_costs_none(monkeypatch: pytest.MonkeyPatch) -> None:
    h, w, t = problem(3, 8, 4, 2, torch.float32)
    logit_grad = module._logit_grad
    arguments: list[int] = []

    def counted(*given: Any) -> Tensor:
        arguments.append(len(given))
        return logit_grad(*given)

    monkeypatch.setattr(module, "_logit_grad", counted)
    lp, entropy = linear_log_probs(h, w, t, with_entropy=True)
    assert entropy is not None
    (with_entropy,) = torch.autograd.grad(lp.sum(), h, retain_graph=True)
    (without,) = torch.autograd.grad(linear_log_probs(h, w, t)[0].sum(), h)
    assert torch.equal(with_entropy, without)
    assert set(arguments) == {4}
    torch.autograd.grad(entropy.sum(), h)
    assert set(arguments) == {4, 5}


def test_bfloat16_softmax_is_float32() -> None:
    h, w, t = problem(16, 300, 32, 3, torch.bfloat16)
    lp, entropy = linear_log_probs(h, w, t, with_entropy=True)
    assert entropy is not None and lp.dtype == entropy.dtype == torch.float32
    logp = (h @ w.t()).float().log_softmax(-1)
    assert torch.allclose(lp, logp.gather(1, t[:, None])[:, 0], atol=1e-4)
    assert torch.isfinite(lp).all()


def test_same_bits_with_and_without_gradient() -> None:
    h, w, t = problem(33, 500, 16, 4, torch.float32)
    with torch.no_grad():
        reference = linear_log_probs(h, w, t)[0]
    assert torch.equal(linear_log_probs(h, w, t, with_entropy=True)[0].detach(), reference)


@pytest.mark.parametrize("rows", [1, 4, 100])
def test_log_sums_equal_the_plain_formula(rows: int) -> None:
    hidden, weight, _ = problem(9, 600, 5, 0, torch.float64)
    with torch.no_grad():
        found = log_sums(hidden, weight, 0.7, VocabShard(0, 590), rows)
        plainly = ((hidden @ weight.t())[:, :590] / 0.7).logsumexp(-1)
    assert torch.allclose(found, plainly, rtol=1e-12, atol=0)
