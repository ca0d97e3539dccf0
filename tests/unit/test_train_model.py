"""The trainer's model: equal to transformers, and indifferent to how samples are packed."""

from __future__ import annotations

import doctest
import importlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from slime.samples.batch import TrainBatch
from slime.train.megatron.backend import MegatronBackend
from slime.train.megatron.packed import PackingOptions, pack
from slime.train.megatron.padded import padded_layout
from slime.train.megatron.parallel import RankInfo
from slime.train.megatron.rotary import Rotate
from tests.support.trainer_ranks import VOCAB, free_port, make_batch, shard, tiny_spec, trainer_config

SMALL: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
}
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 1000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 16,
}
YARN = {"rope_type": "yarn", "rope_theta": 1000.0, "factor": 4.0, "original_max_position_embeddings": 32}
MODELS: dict[str, tuple[type, dict[str, Any]]] = {
    "llama": (transformers.LlamaConfig, {"tie_word_embeddings": True}),
    "llama3 rope": (transformers.LlamaConfig, {"rope_parameters": LLAMA3}),
    "yarn rope": (transformers.LlamaConfig, {"rope_parameters": YARN}),
    "linear rope": (
        transformers.LlamaConfig,
        {"rope_parameters": {"rope_type": "linear", "rope_theta": 1000.0, "factor": 4.0}},
    ),
    "mistral": (transformers.MistralConfig, {"head_dim": 12, "sliding_window": None}),
    "qwen2": (transformers.Qwen2Config, {}),
    "qwen3": (transformers.Qwen3Config, {"head_dim": 16, "tie_word_embeddings": True}),
}


def save_tiny(kind: str, directory: Path) -> torch.nn.Module:
    """A random transformers model whose every parameter matters, saved to ``directory``."""
    config_class, extra = MODELS[kind]
    torch.manual_seed(1)
    model = transformers.AutoModelForCausalLM.from_config(config_class(**SMALL, **extra)).float().eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(5) if parameter.dim() > 1 else parameter.add_(0.3 * torch.randn_like(parameter))
    model.save_pretrained(directory)
    return model


def trainer(**flags: Any) -> MegatronBackend:
    backend = MegatronBackend(trainer_config(**flags), RankInfo(0, 1, 0, "127.0.0.1", free_port()))
    try:
        backend.setup(**({} if "hf_checkpoint" in flags else {"spec": tiny_spec(), "initialise": True}))
    except BaseException:
        backend.close()
        raise
    return backend


@pytest.fixture(scope="module")
def random_trainer() -> Iterator[MegatronBackend]:
    backend = trainer(use_kl_loss=True, kl_loss_coef=0.3, kl_loss_type="k3", entropy_coef=0.01)
    yield backend
    backend.close()


@pytest.mark.parametrize("kind", MODELS)
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


def gradients(backend: MegatronBackend, batch: TrainBatch) -> dict[str, Tensor]:
    """Of the whole step, by parameter name; what the optimizer would get before clipping. Frozen ones have none."""
    from slime.train import update as module

    data = module._initial_tensors(backend, batch)
    data.ref_log_probs = backend.log_probs(batch, reference=True)
    module.compute_advantages(backend, batch, data)
    step = batch.steps[0]
    backend.forward_backward(batch, 0, lambda samples: module._loss_inputs(backend, batch, data, step, samples))
    return {
        name: parameter.main_grad.clone()
        for chunk in backend.model_chunks
        for name, parameter in chunk.named_parameters()
        if parameter.requires_grad
    }


@given(order=st.permutations(range(6)), size=st.integers(1, 6))
@settings(deadline=None, max_examples=12)
def test_packing_and_order_change_nothing(random_trainer: MegatronBackend, order: list[int], size: int) -> None:
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
    policy, reference = random_trainer.log_probs(batch), random_trainer.log_probs(batch, reference=True)
    assert policy is not None and reference is not None
    assert all(torch.equal(a, b) for a, b in zip(policy, reference))


def test_same_inputs_same_bits(random_trainer: MegatronBackend) -> None:
    batch = make_batch()
    first, second = gradients(random_trainer, batch), gradients(random_trainer, batch)
    assert all(torch.equal(first[name], second[name]) for name in first)


@given(branches=st.lists(st.lists(st.integers(1, 20), min_size=1, max_size=4), min_size=1, max_size=10))
@settings(deadline=None, max_examples=60)
def test_padded_layout_is_a_bijection(branches: list[list[int]]) -> None:
    layout = padded_layout(branches)
    total = sum(map(sum, branches))
    assert torch.equal(layout.gather[layout.cells], torch.arange(total))
    assert int((~layout.padding).sum()) == total
    assert sum(block.batch * block.length for block in layout.blocks) == layout.gather.numel() <= 1.25 * total + 80
    for block in layout.blocks:  # no query sees the future, every query sees itself
        assert not block.allowed.triu(1).any() and block.allowed.diagonal(dim1=-2, dim2=-1).all()


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
    assert torch.autograd.gradcheck(lambda x: Rotate.apply(x, angles.cos(), angles.sin(), interleaved), x)


@pytest.mark.parametrize(
    "name", ["train.megatron.packed", "train.megatron.padded", "train.megatron.rotary", "models", "models.rotary"]
)
def test_worked_examples_of_the_docstrings(name: str) -> None:
    result = doctest.testmod(importlib.import_module(f"slime.{name}"))
    assert result.attempted >= 1 and result.failed == 0
