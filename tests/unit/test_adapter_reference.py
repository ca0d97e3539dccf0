"""A PEFT adapter as the reference model: the base with that adapter, without a second model."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from slime.checkpoints.peft_files import write_adapter
from slime.errors import UserError
from slime.models import family_of
from slime.models.adapters import begins_with_zeros
from slime.trainer.megatron.adapters import adapter_tensors
from slime.trainer.megatron.backend import MegatronBackend
from tests.support.peft_directories import adapters_for, random_adapter
from tests.support.tiny_models import save_tiny
from tests.support.trainer_ranks import make_batch
from tests.support.trainers import LOSS, trainer

LORA: dict[str, Any] = {"lora_rank": 3, "lora_alpha": 6.0}
VOCABULARY = {"lora_target_modules": ("q_proj", "embed_tokens", "lm_head")}


def log_probs_of(backend: MegatronBackend, role: str = "policy") -> list[Tensor]:
    found = backend.log_probs(make_batch(), role)
    assert found is not None
    return found


def copied(backend: MegatronBackend) -> list[Tensor]:
    return [tensor.detach().clone() for tensor in adapter_tensors(backend.model_chunks)]


def same(ours: list[Tensor], theirs: list[Tensor]) -> bool:
    return all(torch.equal(a, b) for a, b in zip(ours, theirs, strict=True))


@pytest.mark.parametrize(
    ("family", "flags"), [("qwen3_moe", {}), ("mistral", VOCABULARY)], ids=["experts", "vocabulary"]
)
def test_the_reference_may_be_the_adapter_that_a_run_starts_from(
    family: str, flags: dict[str, Any], tmp_path: Path
) -> None:
    model = tmp_path / "hf"
    start = tmp_path / "start"
    other = tmp_path / "other"
    save_tiny(family, model)
    lora = LORA | flags
    tensors = random_adapter(model, start, **lora)
    changed = {
        name: 2 * tensor if begins_with_zeros(name) else tensor for name, tensor in tensors.items()
    }
    spec = family_of(model).model_spec(model)
    write_adapter(other, changed, adapters_for(model, **lora), spec, base=str(model))
    common: dict[str, Any] = {"hf_checkpoint": str(model), "lr": 0.05, **LOSS, **lora}
    references = {"start": {"ref_load": str(start)}, "other": {"ref_load": str(other)}, "base": {}}
    kl = {}
    scores = {}
    policies = {}
    for name, reference in references.items():
        backend = trainer(**common, lora_adapter_path=str(start), **reference)
        try:
            before = copied(backend)
            scores[name] = log_probs_of(backend, "reference")
            policies[name] = log_probs_of(backend)
            assert same(copied(backend), before)
            assert backend.reference_is_policy == (name == "start")
            kl[name] = backend.train(make_batch())["train/kl_loss"]
            assert not same(copied(backend), before)
            assert same(log_probs_of(backend, "reference"), scores[name])
        finally:
            backend.close()
    assert kl["start"] == 0.0 and same(scores["start"], policies["start"])
    assert min(kl["other"], kl["base"]) > 1e-4 and kl["other"] != kl["base"]
    assert same(policies["start"], policies["base"])
    own = trainer(**common, lora_adapter_path=str(other))
    try:
        assert same(log_probs_of(own), scores["other"])
    finally:
        own.close()


def test_an_adapter_that_nothing_compares_with_is_no_reference(tmp_path: Path) -> None:
    save_tiny("qwen3", tmp_path / "hf")
    random_adapter(tmp_path / "hf", tmp_path / "a", **LORA)
    common: dict[str, Any] = {
        "hf_checkpoint": str(tmp_path / "hf"),
        "ref_load": str(tmp_path / "a"),
    }
    for flags, said in (
        (LORA, "which no KL term uses"),
        (LOSS, "this run trains a whole model"),
        (LORA | LOSS | {"ref_ckpt_step": 3}, "is a PEFT adapter"),
        (LORA | LOSS | {"lora_rank": 4}, "pass --lora-rank 3, or leave --ref-load out"),
    ):
        with pytest.raises(UserError) as caught:
            trainer(**common, **flags).close()
        assert said in str(caught.value)
