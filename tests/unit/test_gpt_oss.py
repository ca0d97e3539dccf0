"""gpt-oss: sinks out of a kernel's log-sum-exp, and gradients of every parameter as those of
transformers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from slime.config import make_config
from slime.embedded.attention import softmax_with_sinks
from slime.errors import UserError
from slime.models import family_of
from slime.models.model_flags import check_model_flags, merge_transformer
from slime.trainer.megatron.flash import BlockKernel
from slime.trainer.megatron.packed import padded_layout
from slime.trainer.megatron.sinks import attend_with_sinks
from slime.weights.source import ModelSource
from tests.support.hf_configs import PUBLISHED, config_of
from tests.support.tiny_models import save_tiny
from tests.support.trainer_ranks import make_batch
from tests.support.trainers import trainer


def softmax_with_a_column(scores: torch.Tensor, sinks: torch.Tensor) -> torch.Tensor:
    """The definition: a further score that no token has."""
    column = sinks.expand(*scores.shape[:-1])[..., None]
    return torch.softmax(torch.cat([scores, column], dim=-1), dim=-1)[..., :-1]


@settings(max_examples=25, deadline=None)
@given(
    branches=st.lists(st.lists(st.integers(1, 7), min_size=1, max_size=3), min_size=1, max_size=3),
    window=st.sampled_from([None, 1, 3]),
    heads=st.integers(1, 3),
    strength=st.sampled_from([0.1, 1.0, 8.0]),
    seed=st.integers(0, 99),
)
def test_sinks_out_of_the_log_sum_exp_are_a_column_of_the_softmax(
    branches: list[list[int]], window: int | None, heads: int, strength: float, seed: int
) -> None:
    """In float64, forward and backward, behind shared prompts, in windows, with sinks that take
    nearly all and nearly nothing."""
    generator = torch.Generator().manual_seed(seed)
    for block in padded_layout(branches).blocks:
        seen = block.within(window)
        shape = (block.batch, heads, block.length, 4)
        inputs = [
            torch.randn(shape, dtype=torch.float64, generator=generator).requires_grad_()
            for _ in range(3)
        ]
        sinks = strength * torch.randn(heads, dtype=torch.float64, generator=generator)
        sinks.requires_grad_()
        outer = torch.randn(shape, dtype=torch.float64, generator=generator)
        kernel = BlockKernel(seen, 0.7, torch.float64)
        out = attend_with_sinks(*inputs, sinks[:, None], kernel)

        query, key, value = inputs
        scores = query @ key.transpose(-1, -2) * 0.7 + seen.bias.double()
        expected = softmax_with_a_column(scores, sinks[:, None]) @ value
        assert (out - expected).abs().max() < 1e-13
        found, wanted = (
            torch.autograd.grad((one * outer).sum(), [*inputs, sinks]) for one in (out, expected)
        )
        for one, other in zip(found, wanted, strict=True):
            assert (one - other).abs().max() < 1e-12


@given(st.integers(1, 6), st.floats(-30, 30), st.integers(0, 99))
def test_the_engines_softmax_has_the_same_column(keys: int, sink: float, seed: int) -> None:
    scores = 3 * torch.randn(2, 3, keys, generator=torch.Generator().manual_seed(seed))
    scores[0, 0, 1:] = -torch.inf
    sinks = torch.full((2, 3), sink)
    expected = softmax_with_a_column(scores.double(), sinks.double())
    assert (softmax_with_sinks(scores, sinks) - expected).abs().max() < 1e-6


@pytest.mark.parametrize("kind", ["gpt_oss", "gpt_oss, whole"])
def test_gradients_of_every_parameter_equal_transformers(kind: str, tmp_path: Path) -> None:
    model = save_tiny(kind, tmp_path)
    batch = make_batch()
    for tokens, response in zip(batch.tokens, batch.response_lengths):
        logp = model(tokens[None]).logits[0].log_softmax(-1)
        logp[:-1].gather(1, tokens[1:, None])[-response:].sum().backward()
    expected = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    backend = trainer(hf_checkpoint=str(tmp_path))
    try:
        (chunk,) = backend.model_chunks
        chunk.train()
        chunk.zero_grad_buffer()
        for micro_batch in backend._pack(batch, batch.steps[0].micro_batches):
            chunk(micro_batch, temperature=1.0).log_probs.sum().backward()
        with torch.no_grad():
            for parameter in chunk.parameters():
                parameter.copy_(parameter.main_grad)
        source = ModelSource(backend.model_chunks, backend.hf_config)
        found = {name: tensor.clone() for name, tensor in source.tensors()}
    finally:
        backend.close()
    assert found.keys() == expected.keys()
    for name, gradient in expected.items():
        assert gradient.abs().max() > 0, name
        difference = (found[name] - gradient).abs().max() / gradient.abs().max()
        assert difference < 1e-5, name


def test_another_slope_of_the_gate_is_refused() -> None:
    config = config_of("gpt_oss", swiglu_alpha=1.5)
    with pytest.raises(UserError, match="swiglu_alpha"):
        family_of(config).model_spec(config)


FLAGS: dict[str, Any] = {
    "softmax_type": "learnable",
    "window_size": (127, 0),
    "window_attn_skip_freq": 2,
    "activation_func_clamp_value": 7.0,
    "glu_linear_offset": 1.0,
}


@pytest.mark.parametrize("name", FLAGS)
def test_flags_of_launch_scripts_are_compared_with_the_model(name: str) -> None:
    """Those that describe gpt-oss agree with it, and contradict a model without such layers."""
    for model, is_right in (("openai/gpt-oss-20b", True), ("Qwen/Qwen3-4B", False)):
        spec = family_of(PUBLISHED[model]["config"]).model_spec(PUBLISHED[model]["config"])
        flags = make_config(hf_checkpoint="m", **{name: FLAGS[name]}).megatron
        if is_right:
            check_model_flags(flags, spec)
            assert merge_transformer(spec.transformer, flags.transformer)["num_layers"] == 24
        else:
            with pytest.raises(UserError, match=name.replace("_", "-")):
                check_model_flags(flags, spec)
    wrong = make_config(hf_checkpoint="m", window_size=(128, 0), window_attn_skip_freq=3).megatron
    spec = family_of(PUBLISHED["openai/gpt-oss-20b"]["config"]).model_spec(
        PUBLISHED["openai/gpt-oss-20b"]["config"]
    )
    with pytest.raises(UserError, match="2 flags contradict"):
        check_model_flags(wrong, spec)
