"""SGLang's stand-in takes adapters as SGLang 0.5.16 does: tests of pushes rely on its faults."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from slime.config import make_config
from slime.engines.launch import EnginePlace
from tests.support.adapters import checksums, load_body, random_adapter
from tests.support.contract_servers import (
    PROMPT,
    Background,
    Server,
    long_generation,
    num_running,
    wait_until,
)
from tests.support.embedded_models import save_tiny_model
from tests.support.sglang_servers import fake_sglang

pytestmark = pytest.mark.usefixtures("sglang_stand_in")

LOAD = "/load_lora_adapter_from_tensors"
Q0 = "base_model.model.model.layers.0.self_attn.q_proj.lora_A.weight"

O0 = Q0.replace("q_proj", "o_proj")


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_model(tmp_path_factory.mktemp("model") / "tiny", "qwen3_moe")


@contextmanager
def server_of(model: Path, folder: Path) -> Iterator[Server]:
    config = make_config(
        rollout_batch_size=4,
        num_rollout=1,
        hf_checkpoint=str(model),
        rollout_engine="sglang",
        colocate=True,
        fp32=True,
        sglang_enable_lora=True,
        sglang_max_lora_rank=8,
        sglang_lora_target_modules=["all"],
        sglang_max_loras_per_batch=3,
    )
    with fake_sglang(config, model, folder, EnginePlace()) as [engine]:
        process = engine.process._process
        assert process is not None
        yield Server(engine.url, process, folder / "0.log")


@pytest.fixture(scope="module")
def server(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    with server_of(model, tmp_path_factory.mktemp("log")) as running:
        yield running


def log_probs(engine: Server, adapter: str | None) -> list[float]:
    body = {"input_ids": PROMPT, "sampling_params": {"max_new_tokens": 1}, "return_logprob": True}
    meta = engine.ok("/generate", body | {"logprob_start_len": 0, "lora_path": adapter})
    return [entry[0] for entry in meta["meta_info"]["input_token_logprobs"][1:]]


def test_one_side_of_the_experts_is_loaded_and_never_applied(server: Server, model: Path) -> None:
    config, tensors = random_adapter(model)
    chosen = {name: one for name, one in tensors.items() if ".experts." in name}
    back = {name: one for name, one in chosen.items() if ".down_proj." in name}
    for name, some in (("both", chosen), ("back", back)):
        assert server.ok(LOAD, load_body(name, config, some))["success"]
    base = log_probs(server, None)
    assert log_probs(server, "back") == pytest.approx(base, abs=1e-6)
    assert log_probs(server, "both") != pytest.approx(base, abs=1e-3)


def test_queries_without_values_are_refused(server: Server, model: Path) -> None:
    config, tensors = random_adapter(model, targets=["q_proj"])
    answer = server.post(LOAD, load_body("q", config, tensors))
    assert answer.status == 400 and "v_proj" in answer.json["error_message"]


def test_the_factor_is_alpha_over_rank_whatever_the_config_says(
    server: Server, model: Path
) -> None:
    config, tensors = random_adapter(model)
    server.ok(LOAD, load_body("plain", config, tensors))
    server.ok(LOAD, load_body("rs", config | {"use_rslora": True}, tensors))
    assert log_probs(server, "rs") == pytest.approx(log_probs(server, "plain"), abs=1e-6)


def test_an_unload_waits_for_requests_and_holds_the_lock(server: Server, model: Path) -> None:
    config, tensors = random_adapter(model)
    server.ok(LOAD, load_body("busy", config, tensors, weight_version="5"))
    request = long_generation(server, "busy", lora_path="busy")
    wait_until(lambda: num_running(server) == 1)
    server.ok("/pause_generation", {"mode": "in_place"})
    done = threading.Event()

    def unload() -> None:
        server.ok("/unload_lora_adapter", {"lora_name": "busy"})
        done.set()

    waiting = Background(unload)
    # the name goes once the lock is held
    wait_until(lambda: b"busy" not in server.get("/v1/models").raw)
    load = Background(lambda: server.ok(LOAD, load_body("next", config, tensors)))
    assert not done.wait(0.5) and load.is_alive
    server.ok("/continue_generation")
    waiting.join()
    load.join()
    assert request.join()["meta_info"]["weight_version"] == "0"  # not a field of SGLang's loads
    info = server.get("/server_info").json
    assert "adapters" not in info and info["enable_lora"]


@pytest.mark.parametrize(
    "fault",
    ["stray", *(pytest.param(one, marks=pytest.mark.full) for one in ("shape", "checksum"))],
)
def test_faults_that_end_the_server(model: Path, tmp_path: Path, fault: str) -> None:
    config, tensors = random_adapter(model)
    extra = {}
    if fault == "stray":
        tensors["base_model.model.model.layers.0.mlp.gate.lora_A.weight"] = tensors[Q0]
    elif fault == "shape":
        tensors[O0] = tensors[O0][:, 1:].contiguous()
    else:
        extra = {"expected_checksums": checksums(tensors) | {Q0: "0"}}
    with server_of(model, tmp_path) as engine:
        with pytest.raises(OSError, match=r"reset|closed|refused|Remote end"):
            answer = engine.ok(LOAD, load_body("a", config, tensors, **extra))
            assert answer["success"]
            assert log_probs(engine, None)
            log_probs(engine, "a")
        assert fault == "checksum" or "ValueError" in (tmp_path / "0.log").read_text()
