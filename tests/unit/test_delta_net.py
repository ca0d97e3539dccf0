"""Gated delta nets: the rule against its definition, branches against separate samples, published
checkpoints with a vision tower, and what config.json may say."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
import transformers
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file
from torch import Tensor

from slime.embedded.architecture import Architecture
from slime.embedded.kind import STATE_COPIES
from slime.errors import UserError
from slime.memory.engine import EngineSettings
from slime.models import family_of
from slime.models.delta_rule import (
    CausalConv,
    TokenRuns,
    chunked,
    convolved_step,
    decay_of,
    gated_norm,
    normalised,
    reached,
    recurrent_step,
)
from slime.models.flops import sequence_cost
from slime.models.layouts import DeltaNetSizes, Shard
from slime.models.mixers import GATED_DELTA_NET
from slime.trainer.megatron import delta_net
from slime.trainer.megatron.delta_net import _with_torch
from slime.trainer.megatron.packed import DeltaRuns
from tests.support.embedded_models import bytes_per_token, make_scheduler, make_sequence, run
from tests.support.hf_configs import config_of
from tests.support.tiny_models import DELTA, SHAPE, save_tiny
from tests.support.trainer_ranks import make_batch
from tests.support.trainers import gradients, trainer

Inputs = tuple[Tensor, Tensor, Tensor, Tensor, Tensor]
LENGTHS = st.lists(st.sampled_from([1, 2, 3, 5, 17, 63, 64, 65, 130]), min_size=1, max_size=4)


def inputs(tokens: int, heads: int, repeats: int, dtype: torch.dtype) -> Inputs:
    generator = torch.Generator().manual_seed(tokens)

    def draw(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype)

    query, key = normalised(draw(tokens, heads, 5), draw(tokens, heads, 5))
    value = draw(tokens, heads * repeats, 7)
    decay = -draw(tokens, heads * repeats).abs() * 4
    decay[::3] -= 40.0  # sums whose exponentials overflow if a sign is wrong
    return query, key, value, decay, draw(tokens, heads * repeats).sigmoid()


def one_by_one(arguments: Inputs, state: Tensor) -> tuple[Tensor, Tensor]:
    """Outputs of one run by the definition of the rule, and its final state."""
    rows = []
    for token in range(len(arguments[0])):
        q, k, v, g, b = (x[token, None] for x in arguments)
        row, state = recurrent_step(q, k, v, g, b, state)
        rows.append(row)
    return torch.cat(rows), state


@settings(max_examples=12, deadline=None)
@given(LENGTHS, st.sampled_from([1, 2, 3]), st.sampled_from([None, 16, 64]))
def test_chunks_give_what_one_token_after_the_other_gives(
    lengths: list[int], repeats: int, size: int | None
) -> None:
    arguments = inputs(sum(lengths), 2, repeats, torch.float64)
    initial = torch.randn(len(lengths), 2 * repeats, 5, 7, dtype=torch.float64)
    output, finals = chunked(*arguments, TokenRuns.of(lengths, size=size), initial)
    start = 0
    for number, length in enumerate(lengths):
        run = slice(start, start + length)
        q, k, v, g, b = (x[run] for x in arguments)
        expected, state = one_by_one((q, k, v, g, b), initial[number, None])
        torch.testing.assert_close(output[run], expected, atol=1e-11, rtol=0)
        torch.testing.assert_close(finals[number, None], state, atol=1e-11, rtol=0)
        start += length


def test_float32_is_as_exact_as_float32_can_be() -> None:
    exact = inputs(200, 2, 2, torch.float64)
    expected = chunked(*exact, TokenRuns.of([200]))[0]
    q, k, v, g, b = (x.float() for x in exact)
    ours = chunked(q, k, v, g, b, TokenRuns.of([200]))[0]
    torch.testing.assert_close(ours.double(), expected, atol=1e-5, rtol=0)


@pytest.mark.parametrize("decay", [-1e-6, -8.0, -50.0])
def test_gradients_of_decays_are_as_exact_as_float32_can_be(decay: float) -> None:
    """Where a state fades fast they are small differences of large sums, or 1e-22 beside 1."""
    found = []
    for dtype in (torch.float64, torch.float32):
        q, k, v, g, b = inputs(128, 2, 2, dtype)
        leaf = torch.full_like(g, decay).requires_grad_()
        if dtype == torch.float64:
            output, _ = one_by_one((q, k, v, leaf, b), v.new_zeros(1, 4, 5, 7))
        else:
            output, _ = chunked(q, k, v, leaf, b, TokenRuns.of([128]))
        output.square().sum().backward()
        assert leaf.grad is not None
        found.append(leaf.grad.double())
    exact, ours = found
    assert (ours - exact).abs().max() <= 4e-6 * exact.abs().max()


SIZES = DeltaNetSizes(key_heads=2, per_key=2, key=32, value=24, conv=4)


def layer(leaves: list[Tensor], lengths: list[int], in_chunks: bool) -> Tensor:
    """Everything between the projections of a layer, with the rule in chunks or by definition."""
    mixed, scalars, gate, conv_weight, a_log, dt_bias, norm = leaves
    runs = DeltaRuns.of([[length] for length in lengths], torch.device("cpu"))
    if in_chunks:
        output = _with_torch(mixed, scalars, conv_weight, a_log, dt_bias, runs, SIZES)
        return gated_norm(output, gate, norm, 1e-6)
    convolved = CausalConv.apply(mixed.flatten(1), conv_weight, runs.reads(4))
    query, key, value = delta_net._heads(convolved, 2, SIZES)
    arguments = (*normalised(query, key), value, *delta_net._gates(scalars, a_log, dt_bias, SIZES))
    start = value.new_zeros(1, 4, 32, 24)
    samples = zip(*(x.split(lengths) for x in arguments))
    output = torch.cat([one_by_one(sample, start)[0] for sample in samples])
    return gated_norm(output, gate, norm, 1e-6)


@pytest.mark.parametrize(("dtype", "bound"), [(torch.float32, 2e-6), (torch.bfloat16, 6e-3)])
def test_every_gradient_of_a_layer_is_as_exact_as_its_dtype(
    dtype: torch.dtype, bound: float
) -> None:
    """Packed samples that end within chunks and at their borders; a head whose state fades by e^-50
    per token, a head that forgets nothing, and two between."""
    lengths = [64, 7, 65]
    total = sum(lengths)
    generator = torch.Generator().manual_seed(0)

    def draw(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator)

    given = [
        draw(total, 2, SIZES.mixed // 2),
        draw(total, 2, 4),
        draw(total, 4, 24),
        draw(SIZES.mixed, 4),
        torch.tensor([3.7, -100.0, 0.0, -3.0]),
        torch.tensor([1.0, 1.0, -2.0, 0.0]),
        draw(24),
    ]
    stored = [x if x.ndim == 1 else x.to(dtype) for x in given]
    up = draw(total, 4, 24).double()
    results = []
    for in_chunks in (False, True):
        leaves = [(x if in_chunks else x.double()).detach().requires_grad_() for x in stored]
        output = layer(leaves, lengths, in_chunks)
        results.append([output, *torch.autograd.grad((output.double() * up).sum(), leaves)])
    for exact, ours in zip(*results, strict=True):
        assert ours.isfinite().all()
        assert (ours.double() - exact).abs().max() <= bound * exact.abs().max()


def test_products_of_the_convolution_are_not_rounded_to_bfloat16() -> None:
    generator = torch.Generator().manual_seed(0)
    rows = torch.randn(9, 6, generator=generator).bfloat16()
    weight = torch.randn(6, 4, generator=generator).bfloat16()
    reads = reached([7, 2], [-1, -1], 4)
    found = []
    for dtype in (torch.float32, torch.bfloat16):
        leaves = [x.to(dtype).requires_grad_() for x in (rows, weight)]
        output = CausalConv.apply(*leaves, reads)
        found.append([output, *torch.autograd.grad(output.square().sum(), leaves)])
    (output, *exact), (ours, *gradients) = found
    assert torch.equal(ours, output)
    for one, other in zip(gradients, exact):
        assert torch.equal(one, other.bfloat16())
    window = torch.stack([rows[3:7].t(), rows[1:5].t()])
    steps = convolved_step(window, weight)
    assert torch.equal(steps, output[[6, 4]].detach())


@settings(max_examples=10, deadline=None)
@given(
    st.lists(
        st.tuples(st.sampled_from([1, 2, 3, 20, 64]), st.lists(st.sampled_from([0, 1, 4, 70]))),
        min_size=1,
        max_size=3,
    )
)
def test_branches_are_samples_of_their_own(families: list[tuple[int, list[int]]]) -> None:
    """Outputs and gradients of prompts with their branches are those of separate samples."""
    sizes = DeltaNetSizes(key_heads=2, per_key=2, key=3, value=4, conv=4)
    branches = [[prompt, *others] for prompt, others in families]
    total = sum(map(sum, branches))
    generator = torch.Generator().manual_seed(total)

    def leaf(*shape: int) -> Tensor:
        drawn = torch.randn(shape, generator=generator, dtype=torch.float64)
        return drawn.requires_grad_()

    mixed = leaf(total, 2, sizes.mixed // 2)
    scalars = leaf(total, 2, 4)
    weights = (leaf(sizes.mixed, 4), leaf(4), leaf(4))
    packed = _with_torch(
        mixed, scalars, *weights, DeltaRuns.of(branches, torch.device("cpu")), sizes
    )
    outputs: list[Tensor] = []
    rows: list[Tensor] = []
    start = 0
    for prompt, *others in branches:
        end = start + prompt
        for own in others or [0]:
            index = torch.cat([torch.arange(start, start + prompt), torch.arange(end, end + own)])
            alone = DeltaRuns.of([[len(index)]], torch.device("cpu"))
            outputs.append(_with_torch(mixed[index], scalars[index], *weights, alone, sizes))
            rows.append(index)
            end += own
        start = end
    expected = torch.cat(outputs)
    index = torch.cat(rows)
    torch.testing.assert_close(packed[index], expected, atol=1e-10, rtol=0)
    up = torch.randn(expected.shape, generator=generator, dtype=torch.float64)
    leaves = [mixed, scalars, *weights]
    theirs = torch.autograd.grad((expected * up).sum(), leaves)
    ours = torch.autograd.grad((packed[index] * up).sum(), leaves)
    for one, other in zip(ours, theirs):
        torch.testing.assert_close(one, other, atol=1e-8, rtol=1e-8)


def test_kernels_of_all_layers_are_given_the_same_tensors(monkeypatch: pytest.MonkeyPatch) -> None:
    """flash-linear-attention keeps the chunks of a micro-batch by the identity of their ends."""
    given: list[Tensor] = []

    def convolve(rows: Tensor, *_: Any, cu_seqlens: Tensor, **__: Any) -> tuple[Tensor, None]:
        given.append(cu_seqlens)
        return rows, None

    def rule(*heads: Tensor, cu_seqlens: Tensor, **_: Any) -> tuple[Tensor, None]:
        given.append(cu_seqlens)
        return heads[2], None

    monkeypatch.setattr(delta_net, "_kernels", lambda: (convolve, rule))
    sizes = DeltaNetSizes(key_heads=2, per_key=2, key=3, value=4, conv=4)
    runs = DeltaRuns.of([[5], [2]], torch.device("cpu"))
    weights = (torch.ones(sizes.mixed, 4), torch.ones(4), torch.ones(4))
    for _layer in range(2):
        delta_net._with_kernels(
            torch.ones(7, 2, sizes.mixed // 2), torch.ones(7, 2, 4), *weights, runs, sizes
        )
    assert len(given) == 4
    assert all(ends is given[0] for ends in given)
    assert given[0].tolist() == [0, 5, 7]


def test_the_convolution_is_that_of_torch() -> None:
    generator = torch.Generator().manual_seed(0)
    rows = torch.randn(9, 6, generator=generator, dtype=torch.float64, requires_grad=True)
    weight = torch.randn(6, 4, generator=generator, dtype=torch.float64, requires_grad=True)
    reads = reached([7, 2], [-1, -1], 4)
    ours = CausalConv.apply(rows, weight, reads)
    parts = [
        F.conv1d(F.pad(part.t()[None], (3, 0)), weight[:, None], groups=6)[0].t()
        for part in rows.split([7, 2])
    ]
    torch.testing.assert_close(ours, F.silu(torch.cat(parts)))
    torch.autograd.gradcheck(lambda a, b: CausalConv.apply(a, b, reads), (rows, weight))


def test_the_norm_comes_before_the_gate_and_decays_are_in_float32() -> None:
    output = torch.tensor([[[3.0, 4.0]]])
    gate = torch.tensor([[[0.0, 1.0]]])
    found = gated_norm(output, gate, torch.tensor([5.0, 2.0]), 0.0)
    expected = 4.0 / (12.5**0.5) * 2.0 * torch.tensor(1.0).sigmoid()
    torch.testing.assert_close(found, torch.tensor([[[0.0, float(expected)]]]))
    half = torch.ones(1, 1, dtype=torch.bfloat16)
    assert decay_of(half, half[0], half[0]).dtype == torch.float32


@pytest.mark.parametrize("ranks", [1, 2])
def test_both_forms_of_the_projections_are_one_parameter(ranks: int) -> None:
    """Qwen3-Next's matrices and Qwen3.5's hold the same rows, and come back bit for bit."""
    specs = {}
    loaded = {}
    for name in ("qwen3_next", "qwen3_5_text"):
        config = config_of(name)
        family = family_of(config)
        specs[name] = family.model_spec(config)
        rule = next(r for r in family.rules if r.megatron_names[0].endswith("in_proj.weight"))
        loaded[name] = rule.layout
    spec = specs["qwen3_next"]
    sizes = spec.delta_net
    by_head = torch.randn(sizes.key_heads, sum(sizes.of_key_head), 8)
    q, k, v, z, b, a = by_head.split(list(sizes.of_key_head), dim=1)
    next_form = [torch.cat([q, k, v, z], 1).flatten(0, 1), torch.cat([b, a], 1).flatten(0, 1)]
    flat = [x.flatten(0, 1) for x in (q, k, v, z, b, a)]
    split_form = [torch.cat(flat[:3]), *flat[3:]]
    shards = [Shard(rank, ranks) for rank in range(ranks)]
    for name, form in (("qwen3_next", next_form), ("qwen3_5_text", split_form)):
        pieces = [loaded[name].load(form, shard, specs[name]) for shard in shards]
        assert torch.equal(torch.cat(pieces), by_head.flatten(0, 1))
        for one, other in zip(loaded[name].export(pieces, specs[name]), form):
            assert torch.equal(one, other)
    with pytest.raises(ValueError, match="key heads and their sizes make it"):
        loaded["qwen3_next"].load([next_form[0][1:], next_form[1]], Shard(), spec)


# -- whole models ----------------------------------------------------------------------------------


def log_probs(model: torch.nn.Module, tokens: Tensor) -> Tensor:
    with torch.no_grad():
        logits = model(tokens[None]).logits[0, :-1] / 0.8
    return logits.log_softmax(-1).gather(1, tokens[1:, None])[:, 0]


def test_a_model_as_transformers_draws_it_agrees_to_a_millionth(tmp_path: Path) -> None:
    config = transformers.Qwen3_5TextConfig(**{**SHAPE, **DELTA})
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    model.save_pretrained(tmp_path)
    backend = trainer(hf_checkpoint=str(tmp_path))
    try:
        batch = make_batch()
        scores = backend.log_probs(batch)
    finally:
        backend.close()
    assert scores is not None
    for tokens, response, ours in zip(batch.tokens, batch.response_lengths, scores):
        assert (ours - log_probs(model, tokens)[-response:]).abs().max() <= 1e-6


def with_vision_tower(directory: Path) -> Path:
    """The tiny text model as published models are: inside of one that sees images, in bfloat16 with
    decays and norms of gated delta nets in float32, layers for multi-token prediction beside it."""
    save_tiny("qwen3_5_text", directory)
    tensors = {}
    for name, tensor in load_file(directory / "model.safetensors").items():
        inside = name.replace("model.", "model.language_model.", 1)
        exact = name.endswith(("A_log", "linear_attn.norm.weight"))
        tensors[inside] = tensor if exact else tensor.bfloat16()
    tensors["model.visual.patch_embed.proj.weight"] = torch.randn(4, 3).bfloat16()
    tensors["mtp.layers.0.mlp.experts.0.up_proj.weight"] = torch.randn(4, 3).bfloat16()
    save_file(tensors, directory / "model.safetensors", metadata={"format": "pt"})
    text = json.loads((directory / "config.json").read_text())
    config = {
        "model_type": "qwen3_5",
        "architectures": ["Qwen3_5ForConditionalGeneration"],
        "tie_word_embeddings": text["tie_word_embeddings"],
        "text_config": text | {"attn_output_gate": True, "output_gate_type": "swish"},
        "vision_config": {"model_type": "qwen3_5_vision"},
        "dtype": "bfloat16",
    }
    (directory / "config.json").write_text(json.dumps(config))
    return directory


def test_a_published_checkpoint_comes_back_byte_for_byte(tmp_path: Path) -> None:
    """Names, dtypes and bytes, vision tower and multi-token prediction included; and the embedded
    engine reads the same numbers out of it as the trainer."""
    start = with_vision_tower(tmp_path / "hf")
    backend = trainer(hf_checkpoint=str(start), save_hf=str(tmp_path / "back"), bf16=True)
    try:
        backend.save(0)
        batch = make_batch()
        backend.train(batch)
    finally:
        backend.close()
    before, after = (load_file(path / "model.safetensors") for path in (start, tmp_path / "back"))
    assert {name: tensor.dtype for name, tensor in after.items()} == {
        name: tensor.dtype for name, tensor in before.items()
    }
    assert all(torch.equal(after[name], tensor) for name, tensor in before.items())
    exact = trainer(hf_checkpoint=str(start))
    try:
        scores = exact.log_probs(batch)
    finally:
        exact.close()
    assert scores is not None
    scheduler = make_scheduler(start, max_length=64)
    for tokens, response, ours in zip(batch.tokens, batch.response_lengths, scores):
        sequence = make_sequence(
            tokens.tolist(), max_new_tokens=0, temperature=0.8, logprob_start=0
        )
        run(scheduler, [sequence])
        # the engine's log-probs of a prompt are at temperature 1, the trainer's at 0.8
        assert len(sequence.input_logprobs) == len(tokens) - 1
        assert ours.isfinite().all() and len(ours) == response


@pytest.mark.parametrize(
    "flags",
    [
        {
            "recompute_granularity": "full",
            "recompute_method": "uniform",
            "recompute_num_layers": 1,
        },
        {"recompute_granularity": "selective", "recompute_modules": ("core_attn", "layernorm")},
    ],
    ids=["layers", "modules"],
)
def test_recomputation_changes_no_gradient(flags: dict[str, Any], tmp_path: Path) -> None:
    save_tiny("qwen3_next", tmp_path)
    results = []
    for options in ({}, flags):
        backend = trainer(hf_checkpoint=str(tmp_path), **options)
        try:
            results.append(gradients(backend, make_batch()))
        finally:
            backend.close()
    for name, gradient in results[0].items():
        torch.testing.assert_close(results[1][name], gradient, atol=1e-5, rtol=1e-4)
        assert gradient.abs().max() > 0, name


# -- what config.json says -------------------------------------------------------------------------

PATTERN = ["linear_attention", "full_attention"]


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"layer_types": PATTERN, "full_attention_interval": 4}, "contradicts itself on the kinds"),
        ({"layer_types": ["linear_attention", "mamba"]}, "sets layer_types"),
        ({"linear_num_value_heads": 3}, "value heads are not a multiple"),
        ({"attention_bias": True}, "attention_bias"),
        ({"attn_output_gate": False}, "changes the gates"),
        ({"output_gate_type": "sigmoid"}, "changes the gates"),
    ],
)
def test_what_cannot_be_honoured_is_refused(change: dict[str, Any], said: str) -> None:
    config = config_of("qwen3_5_text", **change)
    with pytest.raises(UserError, match=said):
        family_of(config).model_spec(config)


def test_kinds_of_layers_follow_the_list_or_the_interval() -> None:
    def kinds(**fields: Any) -> list[int]:
        config = config_of("qwen3_5_text", num_hidden_layers=4, **fields)
        return list(family_of(config).model_spec(config).transformer["linear_attention_freq"])

    assert kinds(full_attention_interval=None) == [1, 1, 1, 0]
    assert kinds() == [1, 0, 1, 0]
    assert kinds(full_attention_interval=None, layer_types=PATTERN[::-1] * 2) == [0, 1, 0, 1]


def test_work_grows_linearly_in_gated_delta_nets() -> None:
    config = config_of("qwen3_5_text", full_attention_interval=3)
    cost = sequence_cost(family_of(config), config)
    assert cost.quadratic == 0.0 and cost.linear > 0.0
    spec = family_of(config).model_spec(config)
    assert GATED_DELTA_NET.state is not None
    conv, rule = GATED_DELTA_NET.state(spec, 1)
    sizes = spec.delta_net
    assert conv == sizes.mixed * 3 and rule == sizes.value_heads * sizes.key * sizes.value
    assert Architecture.from_config(config).num_kv_heads == 2


def test_the_memory_plan_counts_what_the_engine_keeps(tmp_path: Path) -> None:
    """Bytes of a sequence's states as the embedded engine allocates them."""
    save_tiny("qwen3_next", tmp_path)
    scheduler = make_scheduler(tmp_path, max_length=64)
    spec = scheduler.cache.arch.spec
    planned = EngineSettings(
        element=4, kv_element=4, spec=spec, longest=64, sequences=8, state_copies=STATE_COPIES
    )
    states = scheduler.cache.states
    assert states is not None
    assert planned.state_per_sequence == (1 + STATE_COPIES) * states.slot_bytes
    assert planned.kv_per_token == bytes_per_token(scheduler.cache)
    assert planned.kv_cache(0.0) == 8 * (64 * planned.kv_per_token + planned.state_per_sequence)
