"""Hugging Face weights in the real Megatron model: same log-probs as transformers, and back out
unchanged."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from slime.engines.api import EngineClient, GenerateResult
from slime.errors import UserError
from slime.models.spec import read_hf_config
from slime.processes.host import free_port
from slime.weights import route
from slime.weights.canary import canary_tokens
from slime.weights.sync import WeightSync
from slime.weights.transport import EngineSlots
from tests.support import megatron_jobs as jobs
from tests.support import stage_jobs
from tests.support.contract_servers import embedded_argv, running
from tests.support.embedded_models import save_tiny_model
from tests.support.fake_weight_engine import FakeWeightEngine
from tests.support.megatron_jobs import single
from tests.support.trainer_ranks import RankPool

FAMILIES = ("llama", "qwen2", "qwen3")


@pytest.fixture(scope="module")
def pool() -> Iterator[RankPool]:
    ranks = RankPool(2)
    yield ranks
    ranks.close()


def transformers_log_probs(directory: Path, tokens: torch.Tensor) -> torch.Tensor:
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(
        directory, dtype=torch.float32, attn_implementation="eager"
    )
    with torch.no_grad():
        logits = model(tokens[None]).logits[0]
    return torch.log_softmax(logits, -1)[:-1].gather(1, tokens[1:, None])[:, 0]


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize(
    "changes",
    [
        {"tie_word_embeddings": True},
        {"tie_word_embeddings": False},
        {"rope_scaling": {"rope_type": "linear", "factor": 4.0}},
        {"rope_theta": None, "rope_parameters": {"rope_theta": 77.0, "rope_type": "default"}},
    ],
    ids=["tied", "untied", "scaled-rope", "rope-parameters"],
)
def test_log_probs_equal_transformers(tmp_path: Path, family: str, changes: dict) -> None:
    model = jobs.make_model(tmp_path / "model", family, **changes)
    batch = jobs.batch()
    with single(model, rollout_temperature=1.0) as backend:
        ours = backend.log_probs(batch)
        out = jobs.exported(backend)
    for tokens, length, log_probs in zip(batch.tokens, batch.response_lengths, ours, strict=True):
        theirs = transformers_log_probs(model, tokens)[-length:]
        assert torch.allclose(log_probs, theirs, atol=1e-5), (log_probs - theirs).abs().max()
    original = load_file(model / "model.safetensors")
    assert out.keys() == original.keys()
    assert all(torch.equal(out[name], original[name]) for name in original)


def test_a_tensor_of_another_shape(tmp_path: Path) -> None:
    model = jobs.make_model(tmp_path / "model", "llama")
    tensors = load_file(model / "model.safetensors")
    name = "model.layers.1.mlp.down_proj.weight"
    tensors[name] = tensors[name][:, :40].contiguous()
    save_file(tensors, model / "model.safetensors")
    with pytest.raises(UserError) as caught, single(model):
        pass
    assert (
        name in str(caught.value)
        and "[32, 40]" in str(caught.value)
        and "[32, 48]" in str(caught.value)
    )


def _layers(layout: str) -> dict[str, Any]:
    return jobs.FOUR_LAYERS if "vpp" in layout else {}


@pytest.mark.slow
@pytest.mark.parametrize("layout", jobs.LAYOUTS)
@pytest.mark.parametrize("tied", [True, False])
def test_every_layout_loads_and_exports_the_same(
    pool: RankPool, tmp_path: Path, layout: str, tied: bool
) -> None:
    model = jobs.make_model(
        tmp_path / "model", "qwen2", **_layers(layout), tie_word_embeddings=tied
    )
    original = load_file(model / "model.safetensors")
    for there in pool.run(jobs.load_and_export, model, layout):
        assert list(there) == list(pool_order(there))
        assert there.keys() == original.keys()
        assert all(torch.equal(there[name], original[name]) for name in original)
    pool.run(jobs.export_directory, model, layout, tmp_path / "out")
    assert all(
        torch.equal(t, original[n])
        for n, t in load_file(tmp_path / "out" / "model.safetensors").items()
    )
    assert read_hf_config(tmp_path / "out")["dtype"] == "float32"


def pool_order(tensors: dict[str, torch.Tensor]) -> list[str]:
    """Embedding, layers by number, the rest."""

    def place(name: str) -> int:
        parts = name.split(".")
        return int(parts[2]) if "layers" in parts else -1 if "embed_tokens" in name else 99

    return sorted(tensors, key=place)


@pytest.mark.slow
@pytest.mark.parametrize("layout", ["tp2", "pp2+vpp2"])
def test_pushing_from_several_ranks(pool: RankPool, tmp_path: Path, layout: str) -> None:
    model = jobs.make_model(tmp_path / "model", "qwen2", **_layers(layout))
    original = load_file(model / "model.safetensors")
    with FakeWeightEngine(
        {name: torch.zeros_like(tensor) for name, tensor in original.items()}
    ) as engine:
        assert pool.run(jobs.push, model, layout, engine.url) == [(1, len(original))] * 2
        assert all(torch.equal(engine.tensors[name], tensor) for name, tensor in original.items())


@pytest.mark.parametrize("layout", [*jobs.LAYOUTS, "cp2", "ep2"])
def test_every_layout_scores_the_canary_alike(pool: RankPool, tmp_path: Path, layout: str) -> None:
    family = "qwen3_moe" if layout == "ep2" else "qwen3"
    model = jobs.make_model(tmp_path / "model", family, **_layers(layout))
    more = {"cp2": {"context_parallel_size": 2}, "ep2": {"expert_model_parallel_size": 2}}
    tokens = canary_tokens(97)
    expected = transformers_log_probs(model, torch.tensor(tokens))
    said = pool.run(jobs.canary, model, (jobs.LAYOUTS | more)[layout], tokens)
    assert [log_probs is None for log_probs in said] == [layout.startswith("pp2"), False]
    for log_probs in said:
        assert log_probs is None or torch.allclose(torch.tensor(log_probs), expected, atol=1e-5)


@pytest.mark.slow
def test_a_failed_push_is_every_ranks_error(pool: RankPool, tmp_path: Path) -> None:
    model = jobs.make_model(tmp_path / "model", "llama")
    original = load_file(model / "model.safetensors")
    with FakeWeightEngine(original) as engine:
        engine.fail["/update_weights_from_tensor"] = "no such tensor"
        said = pool.run(jobs.failing_push, model, engine.url)
    assert all("no such tensor" in text for text in said)


# -- the real engine -------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def engine_url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """An embedded engine process that serves other weights than the trainer will have."""
    model = save_tiny_model(tmp_path_factory.mktemp("engine") / "model", "qwen3", seed=0)
    port = free_port()
    argv = embedded_argv(model, port, "--dtype", "float32")
    with running(argv, port, model.parent / "log") as server:
        yield server.url


@pytest.mark.slow
@pytest.mark.parametrize("transport", ["shared memory", "gloo broadcast", "disk"])
def test_pushing_to_the_embedded_engine(
    engine_url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, transport: str
) -> None:
    model = save_tiny_model(tmp_path / "model", "qwen3", seed=len(transport))
    flags = {"check_weight_update_equal": True, "update_weight_buffer_size": 30000}
    if transport == "disk":
        flags |= {
            "update_weight_transport": "disk",
            "update_weight_disk_dir": str(tmp_path / "push"),
        }
    if transport == "gloo broadcast":
        monkeypatch.setattr(route, "is_local", lambda url: False)
    prompt = list(range(20))

    async def log_probs() -> tuple[list[float], str]:
        async with EngineClient(engine_url) as client:
            body = {
                "input_ids": prompt,
                "sampling_params": {"max_new_tokens": 1},
                "return_logprob": True,
                "logprob_start_len": 0,
            }
            result = GenerateResult.from_json(await client.post("/generate", body))
            given = [entry[0] for entry in result.meta_info["input_token_logprobs"][1:]]
            return given, result.meta_info["weight_version"]

    with single(model, **flags) as backend:
        sync = WeightSync(backend.config, backend.model_chunks, backend.hf_config, start_version=6)
        sync.connect([engine_url])
        receipt = sync.push()
        sync.close()
    assert receipt.transport == transport and receipt.version == 7 and receipt.full
    served, version = asyncio.run(log_probs())
    assert version == "7"
    assert torch.allclose(
        torch.tensor(served), transformers_log_probs(model, torch.tensor(prompt)), atol=1e-4
    )


@pytest.mark.slow
def test_stages_push_to_the_embedded_engine(
    pool: RankPool, engine_url: str, tmp_path: Path
) -> None:
    model = save_tiny_model(tmp_path / "model", "qwen3", seed=3)
    flags = {"pipeline_model_parallel_size": 2, "check_weight_update_equal": True}
    first, last = pool.run(stage_jobs.push_twice, model, flags, [EngineSlots(engine_url, ())])
    for receipt in first["receipts"]:  # all fingerprints equal
        assert receipt.transport == "gloo broadcast" and set(receipt.checked) == set(
            load_file(model / "model.safetensors")
        )
    assert not first["seen"] & last["seen"]
