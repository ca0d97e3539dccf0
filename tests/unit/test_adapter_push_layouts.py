"""Adapters reach engines and files whole from trainers of every layout."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from slime.models import family_of
from slime.models.parameters import ModelParameters
from slime.weights.adapter_layout import AdapterLayout
from tests.support.fake_adapter_engine import FakeAdapterEngine
from tests.support.parity import EP2, ETP1, PP2, SP, TP2
from tests.support.peft_directories import adapters_for, random_adapter
from tests.support.tiny_models import save_tiny
from tests.support.trainer_ranks import Pools, trainer_config

VOCABULARY = {"lora_target_modules": ("q_proj", "embed_tokens", "lm_head")}
ETP2 = {"expert_tensor_parallel_size": 2}
FOLDERS = ("adapter", "saved")
SHARED = {"lora_experts": "shared-outer"}


def push_job(info: Any, flags: dict[str, Any], url: str, saved: str) -> dict[str, Any]:
    from slime.trainer.megatron.backend import MegatronBackend
    from slime.weights.adapter_sync import AdapterSync

    config = trainer_config(**flags, actor_num_gpus_per_node=info.world_size)
    backend = MegatronBackend(config, info)
    backend.setup()
    assert backend.adapters is not None and backend.hf_config is not None
    sync = AdapterSync(
        config,
        backend.model_chunks,
        backend.hf_config,
        backend.adapters,
        rank=info.rank,
        world_size=info.world_size,
    )
    sync.connect([url])
    receipt = sync.push(has_learned=True)
    sync.close()
    backend.export(saved)
    return receipt.to_json()


@pytest.mark.parametrize(
    ("family", "size", "layout", "lora"),
    [
        pytest.param("qwen3_moe", 2, PP2, {}, id="PP2"),
        pytest.param("qwen3_moe", 2, EP2 | ETP1, SHARED, id="EP2"),
        pytest.param("gpt_oss", 2, EP2 | ETP1, {}, id="EP2, stacks"),
        pytest.param("qwen3_moe", 2, TP2 | ETP2, {"lora_rank_by_topk": True}, id="TP2 x ETP2"),
        pytest.param(
            "qwen3_moe", 4, TP2 | PP2 | EP2 | ETP1, {}, id="TP2 x PP2 x EP2", marks=pytest.mark.full
        ),
        pytest.param(
            "mistral", 4, TP2 | SP | PP2, VOCABULARY, id="TP2+SP x PP2", marks=pytest.mark.full
        ),
    ],
)
def test_engines_and_files_get_the_adapter_whole(
    family: str,
    size: int,
    layout: dict[str, Any],
    lora: dict[str, Any],
    tmp_path: Path,
    ranks: Pools,
) -> None:
    model = tmp_path / "hf"
    save_tiny(family, model)
    lora = {"lora_rank": 4, "lora_alpha": 8.0, **lora}
    given = random_adapter(model, tmp_path / "adapter", **lora)
    table = family_of(model)
    spec = table.model_spec(model)
    flags = {
        "hf_checkpoint": str(model), "lora_adapter_path": str(tmp_path / "adapter"),
        **lora, **layout,
    }  # fmt: skip
    parameters = ModelParameters(table, spec, adapters=adapters_for(model, **lora))
    sent = AdapterLayout.of(parameters)
    expected = {name: torch.zeros(shape) for name, shape in sent.sent.items()}
    for name, tensor in given.items():
        sent.place(name, tensor, expected)
    stored = load_file(model / "model.safetensors")
    with FakeAdapterEngine({name: stored[name] for name in parameters.stored}) as engine:
        receipts = ranks.run(size, push_job, flags, engine.url, str(tmp_path / "saved"))
        assert engine.base_checks, "the base was compared"
        held = engine.adapters["policy-1"]
    assert held.keys() == expected.keys()
    for name, tensor in expected.items():
        assert torch.equal(held[name], tensor), name
    assert all(receipt == receipts[0] for receipt in receipts)
    read, saved = (load_file(tmp_path / one / "adapter_model.safetensors") for one in FOLDERS)
    assert saved.keys() == read.keys()
    assert all(torch.equal(saved[name], tensor) for name, tensor in read.items())
