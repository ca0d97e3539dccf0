"""The trainer's model: equal to transformers, and indifferent to how samples are packed."""

from __future__ import annotations

import doctest
import importlib
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from slime.trainer.megatron.backend import MegatronBackend
from slime.trainer.megatron.packed import PackingOptions, pack, padded_layout
from slime.trainer.megatron.rotary import Rotate
from tests.support.tiny_models import LLAMA_LIKE, save_tiny
from tests.support.trainer_ranks import make_batch, shard
from tests.support.trainers import gradients, trainer


@pytest.fixture(scope="module")
def random_trainer() -> Iterator[MegatronBackend]:
    backend = trainer(use_kl_loss=True, kl_loss_coef=0.3, kl_loss_type="k3", entropy_coef=0.01)
    yield backend
    backend.close()


@pytest.mark.parametrize("kind", LLAMA_LIKE)
def test_log_probs_equal_transformers(kind: str, tmp_path: Path) -> None:
    model = save_tiny(kind, tmp_path)
    backend = trainer(hf_checkpoint=str(tmp_path), rollout_temperature=0.8)
    try:
        batch = make_batch()
        scores = backend.log_probs(batch)
    finally:
        backend.close()
    assert scores is not None
    for tokens, response, ours in zip(batch.tokens, batch.response_lengths, scores):
        with torch.no_grad():
            logp = (model(tokens[None]).logits[0] / 0.8).log_softmax(-1)
        theirs = logp[:-1].gather(1, tokens[1:, None])[-response:, 0]
        assert torch.allclose(ours, theirs, atol=1e-5, rtol=0)


@given(order=st.permutations(range(6)), size=st.integers(1, 6))
@settings(max_examples=12)
def test_packing_and_order_change_nothing(
    random_trainer: MegatronBackend, order: list[int], size: int
) -> None:
    whole = make_batch([[i] for i in range(6)])
    mixed = shard(whole, order, [list(range(k, min(k + size, 6))) for k in range(0, 6, size)])
    ours, theirs = random_trainer.log_probs(mixed), random_trainer.log_probs(whole)
    assert ours is not None and theirs is not None
    for position, i in enumerate(order):
        assert torch.allclose(ours[position], theirs[i], atol=1e-5, rtol=0)
    reference = gradients(random_trainer, whole)
    for name, gradient in gradients(random_trainer, mixed).items():
        scale = reference[name].abs().max().clamp(min=1e-3)
        assert ((gradient - reference[name]).abs().max() / scale).item() < 1e-5, name


def test_equal_weights_give_equal_bits(random_trainer: MegatronBackend) -> None:
    batch = make_batch()
    policy, reference = (
        random_trainer.log_probs(batch),
        random_trainer.log_probs(batch, "reference"),
    )
    assert policy is not None and reference is not None
    assert all(torch.equal(a, b) for a, b in zip(policy, reference))


def test_same_inputs_same_bits(random_trainer: MegatronBackend) -> None:
    batch = make_batch()
    first, second = gradients(random_trainer, batch), gradients(random_trainer, batch)
    assert all(torch.equal(first[name], second[name]) for name in first)


@given(
    branches=st.lists(st.lists(st.integers(1, 20), min_size=1, max_size=4), min_size=1, max_size=10)
)
@settings(max_examples=60)
def test_padded_layout_is_a_bijection(branches: list[list[int]]) -> None:
    layout = padded_layout(branches)
    total = sum(map(sum, branches))
    assert torch.equal(layout.gather[layout.cells], torch.arange(total))
    assert int((~layout.padding).sum()) == total
    assert (
        sum(block.batch * block.length for block in layout.blocks)
        == layout.gather.numel()
        <= 1.25 * total + 80
    )
    for block in layout.blocks:  # no query sees the future, every query sees itself
        seen = block.bias == 0
        assert not seen.triu(1).any() and seen.diagonal(dim1=-2, dim2=-1).all()


def test_windows_count_positions_not_cells() -> None:
    """Two branches behind a prompt of two tokens: both begin at position 2."""
    [block] = padded_layout([[2, 3, 3]]).blocks
    seen = block.within(2).bias[0, 0] == 0
    assert [row.nonzero()[:, 0].tolist() for row in seen] == [
        [0], [0, 1], [1, 2], [2, 3], [3, 4], [1, 5], [5, 6], [6, 7]
    ]  # fmt: skip
    assert block.within(8) is block


CPU = torch.device("cpu")


def test_pack_marks_the_rows_that_predict_responses() -> None:
    tokens = [torch.arange(10, 15), torch.arange(20, 23)]
    packed = pack([1, 0], tokens, [2, 1], PackingOptions(CPU, multiple=4))
    assert packed.tokens.tolist() == [[20, 21, 10, 11, 12, 13, 0, 0]]
    assert packed.rows.tolist() == [1, 4, 5] and packed.targets.tolist() == [22, 13, 14]
    assert packed.sequences.positions is not None
    assert packed.sequences.positions.tolist() == [0, 1, 0, 1, 2, 3, 0, 1]
    with pytest.raises(ValueError, match="sample 1"):
        pack([1], tokens, [2, 3], PackingOptions(CPU))


def test_pack_lays_siblings_behind_their_prompt() -> None:
    tokens = [torch.tensor([1, 2, 3, 4]), torch.tensor([7, 8]), torch.tensor([1, 2, 5, 6, 9])]
    packed = pack([0, 1, 2], tokens, [2, 1, 3], PackingOptions(CPU, pair_cost=0.0))
    assert packed.tokens.tolist() == [[1, 2, 3, 5, 6, 7]]
    assert packed.rows.tolist() == [1, 2, 5, 1, 3, 4]
    assert packed.targets.tolist() == [3, 4, 8, 5, 6, 9]
    assert packed.sequences.positions is not None
    assert packed.sequences.positions.tolist() == [0, 1, 2, 2, 3, 0]


def test_empty_micro_batch_still_has_something_to_compute() -> None:
    packed = pack([], [], [], PackingOptions(CPU, multiple=4))
    assert packed.tokens.shape == (1, 4) and packed.rows.numel() == 0


@pytest.mark.parametrize("interleaved", [False, True])
def test_rotation_is_differentiated_right(interleaved: bool) -> None:
    x = torch.randn(3, 2, 8, dtype=torch.float64, requires_grad=True)
    angles = torch.randn(3, 1, 3, dtype=torch.float64)  # 6 of 8 dimensions are rotated
    assert torch.autograd.gradcheck(
        lambda x: Rotate.apply(x, angles.cos(), angles.sin(), interleaved), x
    )


@pytest.mark.parametrize(
    "name", ["trainer.megatron.packed", "trainer.megatron.rotary", "models", "models.rotary"]
)
def test_worked_examples_of_the_docstrings(name: str) -> None:
    result = doctest.testmod(importlib.import_module(f"slime.{name}"))
    assert result.attempted >= 1 and result.failed == 0
