"""The embedded engine's decoder gives the log-probs that transformers gives, however the work is
cut."""

from __future__ import annotations

import functools
import json
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM
from transformers.models.llama import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from slime.embedded import kv_cache
from slime.embedded.architecture import Architecture
from slime.embedded.layers import Linear
from slime.errors import UserError
from tests.support.embedded_models import (
    SHAPES,
    bytes_per_token,
    make_scheduler,
    make_sequence,
    run,
    save_tiny_model,
)

PROMPT = [5, 9, 200, 31, 7, 7, 64, 12, 300, 2, 18]


@pytest.fixture(scope="module")
def directories(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("models")
    return {shape: save_tiny_model(root / shape, shape) for shape in SHAPES}


@functools.lru_cache(maxsize=1)
def reference_model(directory: Path) -> torch.nn.Module:
    return AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32).eval()


def reference_logprobs(
    directory: Path, tokens: list[int], temperature: float = 1.0
) -> torch.Tensor:
    """Log-prob of each token after the first, in float32 by transformers."""
    with torch.no_grad():
        logits = reference_model(directory)(torch.tensor([tokens])).logits[0] / temperature
    return (
        torch.log_softmax(logits[:-1], -1).gather(1, torch.tensor(tokens[1:])[:, None]).squeeze(1)
    )


@pytest.mark.parametrize(
    ("shape", "deterministic"),
    [
        *((shape, False) for shape in SHAPES),
        *((shape, True) for shape in ("qwen3_moe", "deepseek_v3")),
    ],
)
def test_log_probs_equal_those_of_transformers(
    directories: dict[str, Path], shape: str, deterministic: bool
) -> None:
    directory = directories[shape]
    scheduler = make_scheduler(directory, deterministic=deterministic)
    sequence = make_sequence(PROMPT, max_new_tokens=70, temperature=0.7, logprob_start=0)
    run(scheduler, [sequence])
    tokens = PROMPT + sequence.output_ids
    output = reference_logprobs(directory, tokens, temperature=0.7)[len(PROMPT) - 1 :]
    prompt = reference_logprobs(directory, PROMPT)
    torch.testing.assert_close(torch.tensor(sequence.output_logprobs), output, atol=1e-4, rtol=0)
    torch.testing.assert_close(torch.tensor(sequence.input_logprobs), prompt, atol=1e-4, rtol=0)


@pytest.mark.parametrize("shape", ["qwen3", "gemma3_text", "gpt_oss"])
def test_prefill_in_chunks_gives_the_same_numbers(directories: dict[str, Path], shape: str) -> None:
    prompt = [i % 250 for i in range(90)]
    whole, chunked = (
        make_sequence(prompt, max_new_tokens=5, temperature=0, logprob_start=0) for _ in range(2)
    )
    run(make_scheduler(directories[shape]), [whole])
    run(make_scheduler(directories[shape], prefill_tokens=17), [chunked])
    assert whole.output_ids == chunked.output_ids
    torch.testing.assert_close(
        torch.tensor(whole.input_logprobs), torch.tensor(chunked.input_logprobs), atol=1e-4, rtol=0
    )


@pytest.mark.parametrize(
    ("shape", "deterministic"), [("gemma3_text", True), ("mistral", False), ("gpt_oss", False)]
)
def test_layers_with_a_window_keep_a_window(
    shape: str, deterministic: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rings of 64 positions come round: in prompts cut into chunks, in neighbours of other lengths
    that move when one ends, in prefixes that are still there, and in one that is lost."""
    monkeypatch.setattr(kv_cache, "SPARE", 16)
    directory = save_tiny_model(tmp_path, shape, sliding_window=9)
    scheduler = make_scheduler(
        directory, deterministic=deterministic, prefill_tokens=40, max_slots=3
    )
    long = [i * 7 % 250 for i in range(130)]
    waves = [
        [(long, 90), (PROMPT, 20), (long[:100], 60)],
        [(long[:70], 8), (PROMPT + [4, 8], 70), (long + [3, 1], 5)],
    ]
    for start, wave in zip((0, None), waves):  # log-probs of the prompt exclude prefixes
        sequences = [
            make_sequence(prompt, rid=str(i), max_new_tokens=count, logprob_start=start)
            for i, (prompt, count) in enumerate(wave)
        ]
        run(scheduler, sequences)
        for sequence, (prompt, _) in zip(sequences, wave):
            expected = reference_logprobs(directory, prompt + sequence.output_ids)
            ours = torch.tensor([*sequence.input_logprobs, *sequence.output_logprobs])
            torch.testing.assert_close(ours, expected[-len(ours) :], atol=1e-4, rtol=0)
    cache = scheduler.cache
    assert cache.ring is not None and cache.ring.size == cache.ring_size == 64
    assert cache.capacity >= 220
    assert cache.nbytes < cache.num_slots * cache.capacity * bytes_per_token(cache)


def test_a_copied_slot_has_lost_what_its_source_has_lost(tmp_path: Path) -> None:
    """The window's keys of a short prefix, if the source has once held a longer text."""
    directory = save_tiny_model(tmp_path, "gemma3_text", sliding_window=9)
    text = [i * 7 % 250 for i in range(700)]
    used = make_scheduler(directory, max_length=900)
    run(used, [make_sequence(text, max_new_tokens=2)])
    twins = [make_sequence(text[:400] + [1, 2, 3], rid=str(i), max_new_tokens=2) for i in (0, 1)]
    run(used, twins)
    found = []
    for scheduler in (used, make_scheduler(directory, max_length=900)):
        sequence = make_sequence(text[:200] + [9, 8, 7], max_new_tokens=4, temperature=0.0)
        run(scheduler, [sequence])
        found.append(sequence.output_logprobs)
    assert found[0] == pytest.approx(found[1], abs=1e-5)


def test_bfloat16_stays_close_to_float32(directories: dict[str, Path]) -> None:
    exact, rough = (make_sequence(PROMPT, max_new_tokens=0, logprob_start=0) for _ in range(2))
    run(make_scheduler(directories["qwen3"]), [exact])
    run(make_scheduler(directories["qwen3"], dtype="bfloat16"), [rough])
    difference = torch.tensor(exact.input_logprobs) - torch.tensor(rough.input_logprobs)
    assert difference.abs().max() < 0.2 and difference.abs().max() > 0


@pytest.mark.parametrize("old_spelling", [False, True])
def test_both_spellings_of_the_rotary_settings(
    directories: dict[str, Path], old_spelling: bool
) -> None:
    config = json.loads((directories["llama_scaled"] / "config.json").read_text())
    fields = config.pop("rope_parameters")
    if old_spelling:
        config["rope_theta"] = fields.pop("rope_theta")
        config["rope_scaling"] = fields
    else:
        config["rope_parameters"] = fields
    cos, sin = Architecture.from_config(config).rope.tables(2, torch.float32)
    theirs = LlamaRotaryEmbedding(LlamaConfig.from_pretrained(directories["llama_scaled"])).inv_freq
    torch.testing.assert_close(cos[1, 0], theirs.cos().repeat(2))
    torch.testing.assert_close(sin[1, 0], torch.cat([-theirs.sin(), theirs.sin()]))


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"model_type": "mamba", "architectures": None}, "model_type 'mamba'"),
        ({"hidden_act": "gelu_10"}, "gelu_10"),
        ({"rope_parameters": {"rope_type": "longrope"}}, "longrope"),
    ],
)
def test_what_is_not_implemented_is_refused_by_name(
    directories: dict[str, Path], change: dict[str, object], said: str
) -> None:
    config = json.loads((directories["qwen2"] / "config.json").read_text())
    with pytest.raises(UserError, match=said):
        Architecture.from_config(config | change)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("fixed_rows", [False, True])
@pytest.mark.parametrize("has_bias", [False, True])
def test_linear_multiplies_and_notices_new_weights(
    dtype: torch.dtype, fixed_rows: bool, has_bias: bool
) -> None:
    torch.manual_seed(0)
    weight, x = torch.randn(40, 24).to(dtype), torch.randn(37, 24).to(dtype)
    bias = torch.randn(40).to(dtype) if has_bias else None
    linear = Linear(weight, bias, fixed_rows)
    for _ in range(2):
        exact = x.double() @ weight.double().T + (0 if bias is None else bias.double())
        tolerance = 1e-4 if dtype == torch.float32 else 0.15
        torch.testing.assert_close(linear(x).double(), exact, atol=tolerance, rtol=0)
        weight.copy_(torch.randn(40, 24))
        linear.invalidate()
