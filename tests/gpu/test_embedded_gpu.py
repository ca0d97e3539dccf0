"""The embedded engine on a GPU: same numbers as transformers there, updates, and memory given
back."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from tests.support.embedded_models import (
    SHAPES,
    make_scheduler,
    make_sequence,
    run,
    save_tiny_model,
)

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU"),
]

PROMPTS = [[5, 9, 200, 31, 7], list(range(90)), [5, 9, 200, 31, 7], [1, 2]]


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("deterministic", [False, True])
def test_log_probs_equal_those_of_transformers(
    tmp_path: Path, shape: str, deterministic: bool
) -> None:
    directory = save_tiny_model(tmp_path, shape)
    scheduler = make_scheduler(directory, deterministic=deterministic, device="cuda")
    sequences = [
        make_sequence(
            prompt, rid=str(i), sampling_seed=i, max_new_tokens=80, top_p=0.9 if i == 1 else 1.0
        )
        for i, prompt in enumerate(PROMPTS)
    ]
    run(scheduler, sequences)
    model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32).cuda().eval()
    for sequence in sequences:
        tokens = torch.tensor([sequence.tokens().tolist()], device="cuda")
        with torch.no_grad():
            logprobs = torch.log_softmax(model(tokens).logits[0, :-1], -1)
        expected = (
            logprobs.gather(1, tokens[0, 1:, None]).squeeze(1)[len(sequence.prompt) - 1 :].cpu()
        )
        torch.testing.assert_close(
            torch.tensor(sequence.output_logprobs), expected, atol=1e-3, rtol=0
        )


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_deterministic_mode_is_bit_identical(tmp_path: Path, dtype: str) -> None:
    directory = save_tiny_model(tmp_path, "llama")
    expected = []
    for number, prompt in enumerate(PROMPTS):
        sequence = make_sequence(prompt, sampling_seed=number, max_new_tokens=70)
        run(make_scheduler(directory, deterministic=True, device="cuda", dtype=dtype), [sequence])
        expected.append((sequence.output_ids, sequence.output_logprobs))
    together = [
        make_sequence(p, rid=str(i), sampling_seed=i, max_new_tokens=70)
        for i, p in enumerate(PROMPTS)
    ]
    run(make_scheduler(directory, deterministic=True, device="cuda", dtype=dtype), together[::-1])
    assert [(s.output_ids, s.output_logprobs) for s in together] == expected


def test_weights_move_out_and_back(tmp_path: Path) -> None:
    scheduler = make_scheduler(save_tiny_model(tmp_path, "qwen3"), device="cuda")
    first, second = (make_sequence(PROMPTS[0], temperature=0) for _ in range(2))
    run(scheduler, [first])
    before = torch.cuda.memory_allocated()
    scheduler.store.release()
    scheduler.slots.reset()
    scheduler.cache.release()
    assert torch.cuda.memory_allocated() < before
    assert not any(tensor.is_cuda for tensor in scheduler.store.named.values())
    scheduler.store.resume()
    run(scheduler, [second])
    assert second.output_ids == first.output_ids
