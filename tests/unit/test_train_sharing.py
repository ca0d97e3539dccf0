"""Samples of one prompt computed behind one copy of it give the numbers of separate sequences."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from slime.samples.batch import TrainBatch
from slime.trainer.megatron.backend import MegatronBackend
from slime.trainer.megatron.packed import branches_per_prompt
from tests.support.trainer_ranks import VOCAB, make_batch
from tests.support.trainers import gradients, trainer


@pytest.fixture
def backend(request: pytest.FixtureRequest) -> Iterator[MegatronBackend]:
    made = trainer(
        use_kl_loss=True, kl_loss_coef=0.3, kl_loss_type="k3", **getattr(request, "param", {})
    )
    yield made
    made.close()


def siblings(*, seed: int = 0) -> TrainBatch:
    """Two prompts of three samples each, in mixed order."""
    batch = make_batch([[0, 1, 2, 3, 4, 5]], seed=seed)
    generator = torch.Generator().manual_seed(seed)
    prompts = [torch.randint(0, VOCAB, (n,), generator=generator) for n in (9, 5)]
    batch.tokens = [
        torch.cat([prompts[i % 2], torch.randint(0, VOCAB, (r,), generator=generator)])
        for i, r in enumerate(batch.response_lengths)
    ]
    return batch


@pytest.mark.parametrize("seed", range(3))
def test_sharing_a_prompt_changes_nothing(backend: MegatronBackend, seed: int) -> None:
    batch = siblings(seed=seed)
    results = []
    with pytest.MonkeyPatch.context() as patch:
        for pair_cost in (0.0, None):
            patch.setattr(backend, "_pair_cost", lambda cost=pair_cost: cost)
            packed = backend._pack(batch, batch.steps[0].micro_batches)[0]
            scores = backend.log_probs(batch)
            assert scores is not None
            results.append((packed.num_tokens, scores, gradients(backend, batch)))
    (tokens, scores, grads), (plain_tokens, plain_scores, plain_grads) = results
    assert tokens == plain_tokens - 2 * 9 - 2 * 5
    assert all(torch.allclose(a, b, atol=1e-5, rtol=0) for a, b in zip(scores, plain_scores))
    for name, gradient in grads.items():
        scale = plain_grads[name].abs().max().clamp(min=1e-3)
        assert ((gradient - plain_grads[name]).abs().max() / scale).item() < 1e-5, name


@pytest.mark.parametrize(
    "backend", [{}, {"bf16": True}], ids=["float32", "bfloat16"], indirect=True
)
def test_a_branch_does_not_see_its_siblings(backend: MegatronBackend) -> None:
    """Changing one response leaves the log-probs of the others as they are, to the bit."""
    backend._pair_cost = lambda: 0.0  # type: ignore[method-assign]
    batch = siblings()
    before = backend.log_probs(batch)
    changed = max(range(6), key=lambda i: batch.response_lengths[i])
    response = batch.response_lengths[changed]
    assert response >= 4
    tokens = batch.tokens[changed].clone()
    tokens[-response:] = (tokens[-response:] + 1) % VOCAB
    batch.tokens[changed] = tokens
    after = backend.log_probs(batch)
    assert before is not None and after is not None
    assert not torch.equal(before[changed], after[changed])
    assert all(torch.equal(before[i], after[i]) for i in range(6) if i != changed)


@given(prompt=st.integers(1, 2000), response=st.integers(1, 2000), n=st.integers(1, 32))
@settings(max_examples=60)
def test_sharing_never_costs_more_than_not_sharing(prompt: int, response: int, n: int) -> None:
    m = branches_per_prompt(prompt, response, n, 1 / 900)
    assert 1 <= m <= n

    def cost(m: int) -> float:
        tokens = prompt + m * response
        return -(-n // m) * (tokens + tokens * tokens / 900)

    assert cost(m) <= cost(1)
