"""Divergences from a teacher: an independent float64 computation, finite differences, and what
holds at any blocking."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

import slime.algorithms.logprobs as blocks
from slime.algorithms.distillation import (
    DISTILLATION_LOSSES,
    distilled_advantages,
    sampled_reverse_kl,
)
from slime.algorithms.divergence import (
    DIVERGENCES,
    DivergenceKind,
    OutputRows,
    divergence,
    log_probs_at,
    top_divergence,
    top_tokens,
)
from slime.algorithms.logprobs import KeptTokens, VocabShard, linear_log_probs
from slime.config.flags import own_flags
from tests.support.trainer_ranks import Pools

KINDS = pytest.mark.parametrize("kind", DIVERGENCES)


def test_every_loss_of_the_flag_has_a_record() -> None:
    assert tuple(DISTILLATION_LOSSES) == own_flags()["opd_loss"].choices
    assert tuple(DISTILLATION_LOSSES) == ("sampled", *DIVERGENCES)


def problem(n: int, vocab: int, seed: int) -> tuple[OutputRows, OutputRows]:
    """Student and teacher with hidden states of different widths, in float64."""
    g = torch.Generator().manual_seed(seed)

    def draw(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=g, dtype=torch.float64)

    student = OutputRows(draw(n, 5).requires_grad_(), draw(vocab, 5).requires_grad_(), 0.7)
    return student, OutputRows(draw(n, 3), draw(vocab, 3), 1.3)


def probabilities(rows: OutputRows, vocab: int) -> np.ndarray:
    logits = rows.hidden.detach().numpy() @ rows.weight.detach().numpy()[:vocab].T
    weights = np.exp(logits / rows.temperature - logits.max(initial=-1e9) / rows.temperature)
    return np.asarray(weights / weights.sum(axis=1, keepdims=True))


def by_sums(s: np.ndarray, p: np.ndarray, kind: DivergenceKind, beta: float) -> list[float]:
    """The definitions, outcome by outcome."""
    found = []
    for student, teacher in zip(s, p):
        total = 0.0
        for a, b in zip(student.tolist(), teacher.tolist()):
            m = beta * b + (1 - beta) * a
            total += {
                "reverse_kl": lambda a=a, b=b: a * math.log(a / b),
                "forward_kl": lambda a=a, b=b: b * math.log(b / a),
                "jsd": lambda a=a, b=b, m=m: (
                    beta * b * math.log(b / m) + (1 - beta) * a * math.log(a / m)
                ),
            }[kind]()
        found.append(total)
    return found


@KINDS
@given(
    n=st.integers(0, 6),
    vocab=st.integers(2, 30),
    padding=st.integers(0, 4),
    chunk=st.sampled_from([-1, 1, 4]),
    beta=st.floats(0.1, 0.9),
    seed=st.integers(0, 99),
)
@settings(max_examples=25, deadline=None)
def test_whole_vocabulary_equals_the_definition(
    kind: DivergenceKind, n: int, vocab: int, padding: int, chunk: int, beta: float, seed: int
) -> None:
    student, teacher = problem(n, vocab + padding, seed)
    with pytest.MonkeyPatch.context() as patch:  # blocks of 7 columns, so that there are several
        patch.setattr(blocks, "_MIN_COLUMNS", 7)
        patch.setattr(blocks, "_BLOCK_ELEMENTS", {"cpu": 1})
        found = divergence(
            student, teacher, kind, beta=beta, shard=VocabShard(0, vocab), chunk_size=chunk
        )
    wanted = by_sums(probabilities(student, vocab), probabilities(teacher, vocab), kind, beta)
    assert found.tolist() == pytest.approx(wanted, abs=1e-10)
    assert all(value >= -1e-12 for value in found.tolist())


@KINDS
def test_gradients_are_those_of_finite_differences(
    kind: DivergenceKind, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(blocks, "_MIN_COLUMNS", 4)
    monkeypatch.setattr(blocks, "_BLOCK_ELEMENTS", {"cpu": 1})
    student, teacher = problem(3, 11, seed=1)
    ids = torch.tensor([[0, 3, 10], [9, 2, 4], [5, 6, 1]])
    of_teacher = log_probs_at(teacher, ids)

    def whole(hidden: Tensor, weight: Tensor) -> Tensor:
        return divergence(OutputRows(hidden, weight, 0.7), teacher, kind, beta=0.3, chunk_size=2)

    def of_top(hidden: Tensor, weight: Tensor) -> Tensor:
        own = log_probs_at(OutputRows(hidden, weight, 0.7), ids, chunk_size=2)
        return top_divergence(own, of_teacher, kind, beta=0.3)

    for function in (whole, of_top):
        assert torch.autograd.gradcheck(function, (student.hidden, student.weight))


@KINDS
def test_equal_distributions_have_no_divergence_and_no_gradient(kind: DivergenceKind) -> None:
    student, _ = problem(4, 12, seed=2)
    teacher = OutputRows(student.hidden.detach(), student.weight.detach(), student.temperature)
    found = divergence(student, teacher, kind)
    found.sum().backward()
    assert student.hidden.grad is not None
    assert found.abs().max() < 1e-12 and student.hidden.grad.abs().max() < 1e-12


@KINDS
def test_top_k_tends_to_the_whole_vocabulary_from_below(kind: DivergenceKind) -> None:
    student, teacher = problem(5, 20, seed=3)
    whole = divergence(student, teacher, kind)
    last = torch.zeros_like(whole)
    for k in (1, 4, 12, 19):
        top = top_tokens(teacher, k)
        found = top_divergence(log_probs_at(student, top.ids), top.log_probs, kind)
        assert bool((found >= last - 1e-9).all()) and bool((found <= whole + 1e-9).all())
        last = found
    assert torch.allclose(last, whole, atol=1e-9)  # of 20 tokens 19 leave a rest of one


def test_top_tokens_are_those_of_a_sort(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(blocks, "_MIN_COLUMNS", 7)
    monkeypatch.setattr(blocks, "_BLOCK_ELEMENTS", {"cpu": 1})
    _, teacher = problem(4, 30, seed=4)
    log_probs = torch.log(torch.from_numpy(probabilities(teacher, 25)))
    values, ids = log_probs.sort(dim=1, descending=True)
    found = top_tokens(teacher, 9, shard=VocabShard(0, 25))
    assert torch.equal(found.ids, ids[:, :9]) and torch.allclose(found.log_probs, values[:, :9])
    every = top_tokens(teacher, 25, shard=VocabShard(0, 25))
    assert torch.equal(every.ids, ids)


#: For each token, what was kept when it was sampled: tokens of both halves of the vocabulary, of
#: one, of the other; the last row has the whole vocabulary.
KEPT = [[1, 8, 17], [2, 3], [14, 15, 16]]


def everything(shard: VocabShard | None, own: slice) -> dict[str, Tensor]:
    """Each function of the vocabulary, and the gradients of all of them together, from these rows
    of the output layers."""
    student, teacher = problem(4, 18, seed=7)
    weight = student.weight.detach()[own].requires_grad_()
    student = OutputRows(student.hidden, weight, student.temperature)
    teacher = OutputRows(teacher.hidden, teacher.weight[own], teacher.temperature)
    top = top_tokens(teacher, 11, shard=shard)
    kept = KeptTokens(
        ids=torch.tensor([token for row in KEPT for token in row]),
        rows=torch.tensor([0, 0, 0, 1, 1, 2, 2, 2]),
        bounds=[0, 3, 5, 8, 8],
        whole=torch.tensor([[False], [False], [False], [True]]),
    )
    log_probs, entropy = linear_log_probs(
        student.hidden,
        weight,
        torch.tensor([8, 3, 14, 9]),
        temperature=0.7,
        with_entropy=True,
        shard=shard,
        kept=kept,
    )
    assert entropy is not None
    found: dict[str, Tensor] = {
        **{kind: divergence(student, teacher, kind, beta=0.3, shard=shard) for kind in DIVERGENCES},
        "top log-probs": top.log_probs,
        "log-probs of the top": log_probs_at(student, top.ids, shard=shard),
        "log-probs": log_probs,
        "entropy": entropy,
    }
    total = sum(values.square().sum() for values in found.values())
    of_hidden, of_weight = torch.autograd.grad(total, (student.hidden, weight))
    found |= {"top ids": top.ids, "of hidden": of_hidden, "of weight": of_weight}
    return {name: values.detach() for name, values in found.items()}


def sharded_job(info: Any, ends: list[int]) -> dict[str, Tensor]:
    """The rank's part of a vocabulary of 18; rank r has the rows up to ``ends[r]``."""
    address = f"tcp://{info.master_addr}:{info.master_port}"
    torch.distributed.init_process_group(
        "gloo", init_method=address, rank=info.rank, world_size=info.world_size
    )
    start = [0, *ends][info.rank]
    group = torch.distributed.group.WORLD
    own = VocabShard(start, ends[info.rank] - start, group)
    return everything(own, slice(start, ends[info.rank]))


@pytest.mark.parametrize("ends", [[9, 18], [14, 18], [18, 18]], ids=str)
def test_ranks_that_share_the_vocabulary_give_what_one_gives(ranks: Pools, ends: list[int]) -> None:
    """In the last layout one rank has padding alone. Gradients of hidden states are parts of a
    sum."""
    wanted = everything(None, slice(0, 18))
    found = ranks.run(2, sharded_job, ends)
    summed = found[0].pop("of hidden") + found[1].pop("of hidden")
    assert torch.allclose(summed, wanted.pop("of hidden"), atol=1e-10)
    parts = torch.cat([rank.pop("of weight") for rank in found])
    assert torch.allclose(parts, wanted.pop("of weight"), atol=1e-10)
    for rank in found:
        for name, values in wanted.items():
            assert torch.allclose(rank[name], values, atol=1e-10), name


def test_mass_that_leaves_the_top_tokens_does_not_lower_the_reverse_kl() -> None:
    """The sum over the tokens alone falls below 0 there, which is how such training collapses."""
    teacher = torch.tensor([[0.5, 0.4]]).log()
    kept, left = (torch.tensor([row]).log() for row in ([0.5, 0.4], [0.01, 0.01]))
    alone = (left.exp() * (left - teacher)).sum()
    assert alone < 0
    assert top_divergence(left, teacher, "reverse_kl") > 1.0
    assert top_divergence(kept, teacher, "reverse_kl").abs() < 1e-6


def test_a_certain_student_has_finite_gradients() -> None:
    own = torch.tensor([[0.0, -40.0]], requires_grad=True)
    top_divergence(own, torch.tensor([[-0.1, -3.0]]), "reverse_kl").sum().backward()
    assert own.grad is not None and bool(own.grad.isfinite().all())


def test_gradients_of_the_weight_go_where_they_are_wanted() -> None:
    student, teacher = problem(3, 9, seed=5)
    ids = torch.tensor([[1, 2], [3, 4], [0, 8]])
    for function in (
        lambda sink: divergence(student, teacher, "jsd", grad_accumulator=sink),
        lambda sink: log_probs_at(student, ids, grad_accumulator=sink),
    ):
        (wanted,) = torch.autograd.grad(function(None).sum(), student.weight)
        sink = torch.ones_like(wanted)
        function(sink).sum().backward()
        assert torch.allclose(sink, 1.0 + wanted) and student.weight.grad is None


def test_the_sampled_reverse_kl_is_unbiased() -> None:
    """Its mean over the student's own tokens is the reverse KL, and the policy gradient with
    A = -d is the gradient of that."""
    student, teacher = problem(1, 6, seed=6)
    s = probabilities(student, 6)[0]
    p = probabilities(teacher, 6)[0]
    every = torch.arange(6)
    own = log_probs_at(student, every[None])[0]
    (d,) = sampled_reverse_kl([own], [torch.log(torch.from_numpy(p))])
    assert not d.requires_grad
    whole = divergence(student, teacher, "reverse_kl")
    assert float((torch.from_numpy(s) * d).sum()) == pytest.approx(whole.item())
    (advantages,) = distilled_advantages([torch.zeros(6)], [d], [torch.ones(6)], 1.0)
    expected_loss = -(torch.from_numpy(s) * advantages * own).sum()
    ours = torch.autograd.grad(expected_loss, student.hidden)[0]
    assert torch.allclose(ours, torch.autograd.grad(whole.sum(), student.hidden)[0])


def test_tokens_of_others_keep_their_advantage() -> None:
    (found,) = distilled_advantages(
        [torch.tensor([1.0, 1.0])], [torch.tensor([2.0, math.nan])], [torch.tensor([1.0, 0.0])], 0.5
    )
    assert found.tolist() == [0.0, 1.0]
