"""Adapters of models that see images: trainer, PEFT and embedded engine give the same numbers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AutoModelForImageTextToText

from slime.checkpoints.merging import merge_adapter
from slime.checkpoints.peft_files import read_adapter, rewrite_adapter
from slime.embedded.adapters import AdapterTable
from slime.embedded.sequence import Sequence
from slime.models import family_of
from slime.models.adapters import with_module
from slime.models.images import ImageReader
from slime.trainer.megatron.backend import MegatronBackend
from slime.weights.source import ModelSource
from tests.support.embedded_models import make_scheduler, run
from tests.support.images import CLOSE, IMAGES, save_seeing
from tests.support.parity import worst
from tests.support.peft_directories import random_adapter
from tests.support.seeing_samples import SAMPLES, batch_of, own_log_probs, their_log_probs
from tests.support.seeing_sequences import sequence_of
from tests.support.trainers import trainer, whole_gradients

LORA: dict[str, Any] = {"lora_rank": 3, "lora_alpha": 6.0}
LOSS: dict[str, Any] = {"kl_loss_coef": 0.0, "eps_clip": 1e9, "rollout_temperature": 1.0}


def adapted(model: Path, adapter: Path) -> MegatronBackend:
    return trainer(
        hf_checkpoint=str(model), lora_adapter_path=str(adapter), **LORA, **IMAGES, **LOSS
    )


@pytest.mark.parametrize("kind", ["qwen3_5", "gemma3"])
def test_log_probs_and_gradients_are_those_of_peft(kind: str, tmp_path: Path) -> None:
    import peft

    model = save_seeing(tmp_path / "hf", kind)
    reader = ImageReader(tmp_path / "hf")
    batch = batch_of(reader, [[0, 1, 2], [3, 4, 5]])
    given = random_adapter(tmp_path / "hf", tmp_path / "adapter", **LORA)
    backend = adapted(tmp_path / "hf", tmp_path / "adapter")
    try:
        with torch.no_grad():
            ours = own_log_probs(backend, batch)

        def named() -> dict[str, Tensor]:
            chunks = backend.model_chunks
            source = ModelSource(chunks, backend.hf_config, adapters=backend.adapters)
            return {name: tensor.clone() for name, tensor in source.tensors()}

        gradients = whole_gradients(backend, batch, named)
        tower = backend.model_chunks[0].module.vision_model
        assert not any(parameter.requires_grad for parameter in tower.parameters())
    finally:
        backend.close()
    wrapped = peft.PeftModel.from_pretrained(model, tmp_path / "adapter", is_trainable=True)
    theirs = their_log_probs(model, reader, batch)
    far = max((a - b).abs().max().item() for a, b in zip(ours, theirs))
    assert far <= CLOSE.get(kind, 5e-6)
    losses = [-reward * one.mean() for reward, one in zip(batch.rewards, theirs)]
    torch.stack(losses).mean().backward()
    expected = {
        name.replace(".default", ""): parameter.grad
        for name, parameter in wrapped.named_parameters()
        if parameter.requires_grad
    }
    assert given.keys() == gradients.keys()
    of_modules = {
        with_module(name, family_of(tmp_path / "hf").modules.module): gradient
        for name, gradient in gradients.items()
    }
    assert of_modules.keys() == expected.keys()
    for name, gradient in of_modules.items():
        assert worst(gradient, expected[name]) <= max(1e-5, CLOSE.get(kind, 0.0)), name


@pytest.mark.parametrize("kind", ["qwen3_vl_moe", "qwen2_5_vl", "qwen3_5"])
def test_the_engine_applies_them_to_prompts_with_images(kind: str, tmp_path: Path) -> None:
    """In one batch with requests for the base, which stays what it is."""
    save_seeing(tmp_path / "hf", kind)
    reader = ImageReader(tmp_path / "hf")
    random_adapter(tmp_path / "hf", tmp_path / "adapter", **LORA)
    batch = batch_of(reader, [[i] for i in range(len(SAMPLES))])
    found = {}
    backend = adapted(tmp_path / "hf", tmp_path / "adapter")
    try:
        with torch.no_grad():
            found["policy"] = backend.log_probs(batch, "policy")
            found["reference"] = backend.log_probs(batch, "reference")
    finally:
        backend.close()
    scheduler = make_scheduler(tmp_path / "hf", sees_images=True)
    spec = family_of(tmp_path / "hf").model_spec(tmp_path / "hf")
    rewrite_adapter(
        tmp_path / "plain", tmp_path / "adapter", "per-expert", spec, base=str(tmp_path / "hf")
    )
    adapter = AdapterTable(scheduler.store).load_directory("one", str(tmp_path / "plain"))
    sequences: dict[str, list[Sequence]] = {"policy": [], "reference": []}
    for role, own in sequences.items():
        for i, (prompt, response) in enumerate(SAMPLES):
            options = {"rid": f"{role}{i}", "max_new_tokens": 0, "logprob_start": 0}
            sequence, _ = sequence_of(scheduler, reader, [*prompt, *response], **options)
            sequence.adapter = adapter if role == "policy" else None
            own.append(sequence)
    run(scheduler, [sequence for own in sequences.values() for sequence in own])
    for role, own in sequences.items():
        for i, sequence in enumerate(own):
            said = torch.tensor(sequence.input_logprobs)[-batch.response_lengths[i] :]
            assert (said - found[role][i]).abs().max() <= CLOSE.get(kind, 5e-6), (role, i)


@pytest.mark.parametrize("kind", ["qwen3_vl", "qwen3_5_moe", "gemma3"])
def test_a_merged_model_is_what_was_trained(kind: str, tmp_path: Path) -> None:
    save_seeing(tmp_path / "hf", kind)
    reader = ImageReader(tmp_path / "hf")
    random_adapter(tmp_path / "hf", tmp_path / "adapter", **LORA)
    batch = batch_of(reader, [[0, 1, 2], [3, 4, 5]])
    backend = adapted(tmp_path / "hf", tmp_path / "adapter")
    try:
        with torch.no_grad():
            ours = backend.log_probs(batch)
    finally:
        backend.close()
    adapter = read_adapter(tmp_path / "adapter", family_of(tmp_path / "hf"))
    merge_adapter(tmp_path / "hf", adapter, tmp_path / "merged")
    model = AutoModelForImageTextToText.from_pretrained(tmp_path / "merged", dtype=torch.float32)
    with torch.no_grad():
        theirs = their_log_probs(model.eval(), reader, batch)
    far = max((a - b).abs().max().item() for a, b in zip(ours, theirs, strict=True))
    assert far <= CLOSE.get(kind, 5e-6)
