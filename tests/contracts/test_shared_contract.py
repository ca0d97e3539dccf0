"""What rollout and weight sync rely on, of every engine: the embedded one, SGLang's stand-in, and a
real SGLang.

    # both that run on a CPU
    pytest tests/contracts/test_shared_contract.py
    # a real one, on a GPU
    pytest tests/contracts --engine sglang --model DIR
    pytest tests/contracts --engine sglang --model DIR --engine-flags "--mem-fraction-static 0.5"

Only this file's tests are run against another engine than the embedded one; comparisons leave room
for its precision.
"""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from slime.config import make_config
from slime.config.flags import all_flags
from slime.engines.api import GenerateResult
from slime.engines.launch import EnginePlace
from slime.engines.sglang.command import sglang_command
from slime.engines.wire.abilities import Abilities
from slime.errors import UserError
from slime.models import family_of
from slime.processes.host import reserve_port
from slime.weights.sync import WeightSync
from slime.weights.transport import EngineSlots
from tests.support.adapters import (
    checksums,
    load_body,
    random_adapter,
    save_adapter,
    stacked_experts,
    with_shared_sides,
)
from tests.support.cluster_processes import running_server
from tests.support.contract_servers import Server, num_running, start_embedded, wait_until
from tests.support.contract_servers import long_generation as long_request
from tests.support.embedded_models import save_tiny_model
from tests.support.megatron_stub import MegatronStub
from tests.support.sglang_servers import FAKE, fake_sglang

pytestmark = pytest.mark.usefixtures("sglang_stand_in")

#: SGLang's flags for adapters.
ADAPTERS: dict[str, Any] = {
    "sglang_enable_lora": True,
    "sglang_max_lora_rank": 8,
    "sglang_lora_target_modules": ["all"],
    "sglang_max_loras_per_batch": 4,
}
PROMPT = [72, 101, 108, 108, 111, 32, 119, 111]
NUM_TOKENS = 6


@contextmanager
def embedded(model: Path, folder: Path, *, adapters: bool = False) -> Iterator[Server]:
    flags = ["--enable-lora"] if adapters else []
    with start_embedded(model, folder / "log", *flags) as server:
        yield server


@contextmanager
def stand_in(model: Path, folder: Path, *, adapters: bool = False) -> Iterator[Server]:
    config = sglang_config(model, fp32=True, **(ADAPTERS if adapters else {}))
    with fake_sglang(config, model, folder, EnginePlace()) as [engine]:
        yield Server(engine.url, engine.process._process, folder / "0.log")


@contextmanager
def sglang(
    model: Path, folder: Path, flags: str = "", *, adapters: bool = False
) -> Iterator[Server]:
    held = [reserve_port("127.0.0.1"), reserve_port("127.0.0.1")]
    port = held[0].port
    config = sglang_config(model, **(ADAPTERS if adapters else {}))
    spec = sglang_command(
        config, str(model), "127.0.0.1", port, EnginePlace(nccl_port=held[1].port)
    )
    spec.argv.extend(flags.split())
    with running_server(spec, f"http://127.0.0.1:{port}", folder / "sglang.log") as process:
        yield Server(f"http://127.0.0.1:{port}", process, folder / "sglang.log")


def sglang_config(model: Path, **flags: Any) -> Any:
    more = {
        "rollout_batch_size": 4,
        "num_rollout": 1,
        "hf_checkpoint": str(model),
        "rollout_engine": "sglang",
    }
    return make_config(**more, colocate=True, **flags)


@pytest.fixture(scope="module", params=["embedded", "stand-in"])
def kind(request: pytest.FixtureRequest) -> str:
    """Which engine; ``--engine`` on the command line leaves the first of these, and puts that one
    in its place."""
    chosen = request.config.getoption("--engine", default=None)
    if chosen is None:
        return str(request.param)
    if request.param != "embedded":
        pytest.skip("--engine names one engine")
    return str(chosen)


@pytest.fixture(scope="module")
def model(
    request: pytest.FixtureRequest, kind: str, tmp_path_factory: pytest.TempPathFactory
) -> Path:
    given = request.config.getoption("--model", default=None)
    if given is not None:
        return Path(given)
    return save_tiny_model(tmp_path_factory.mktemp("model") / "tiny", "qwen3")


@pytest.fixture(scope="module")
def server(
    request: pytest.FixtureRequest, kind: str, model: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Server]:
    with start(request, kind, model, tmp_path_factory.mktemp("server")) as running:
        yield running


@pytest.fixture(scope="module")
def adapting(
    request: pytest.FixtureRequest, kind: str, model: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Server]:
    """An engine that serves adapters."""
    folder = tmp_path_factory.mktemp("adapting")
    with start(request, kind, model, folder, adapters=True) as running:
        yield running


def start(
    request: pytest.FixtureRequest, kind: str, model: Path, folder: Path, *, adapters: bool = False
) -> Any:
    if kind == "sglang":
        flags = request.config.getoption("--engine-flags", default="") or ""
        return sglang(model, folder, flags, adapters=adapters)
    return {"embedded": embedded, "stand-in": stand_in}[kind](model, folder, adapters=adapters)


@pytest.fixture
def engine(server: Server) -> Server:
    server.ok("/continue_generation")
    server.ok("/flush_cache")
    return server


def log_probs(engine: Server, tokens: list[int]) -> list[float]:
    body = {"input_ids": tokens, "sampling_params": {"max_new_tokens": 1}, "return_logprob": True}
    meta = engine.ok("/generate", body | {"logprob_start_len": 0})["meta_info"]
    return [entry[0] for entry in meta["input_token_logprobs"][1:]]


def is_close(one: list[float], other: list[float], engine: Server) -> bool:
    """Within what bfloat16 and another batch size do to log-probs."""
    room = 1e-4 if engine.get("/server_info").json["dtype"] == "float32" else 0.15
    return all(abs(a - b) < room for a, b in zip(one, other, strict=True))


# -- generation ------------------------------------------------------------------------------------


def test_it_says_what_it_is(engine: Server, model: Path) -> None:
    info = engine.get("/server_info").json
    assert {"version", "dtype", "tp_size", "random_seed"} <= info.keys()
    assert engine.get("/model_info").json["model_path"] == str(model)
    assert engine.get("/health").status == 200


def test_tokens_in_tokens_and_log_probs_out(engine: Server) -> None:
    answer = engine.generate(PROMPT, max_new_tokens=NUM_TOKENS, temperature=1.0)
    result = GenerateResult.from_json(answer)
    assert (
        len(result.token_ids) == len(result.log_probs) == NUM_TOKENS
        and result.finish_reason == "length"
    )
    assert all(math.isfinite(p) and p <= 0 for p in result.log_probs)
    assert answer["output_ids"] == result.token_ids
    meta = result.meta_info
    assert meta["prompt_tokens"] == len(PROMPT) and meta["completion_tokens"] == NUM_TOKENS
    assert isinstance(meta["weight_version"], str) and meta["cached_tokens"] >= 0
    scored = log_probs(engine, PROMPT + result.token_ids)[len(PROMPT) - 1 :]
    assert is_close(result.log_probs, scored, engine)


def test_temperature_scales_what_is_reported(engine: Server) -> None:
    """Training divides logits by the temperature; the engine's log-probs must mean the same."""
    sampling = {"max_new_tokens": 1, "temperature": 1.0, "ignore_eos": True}
    body = {"input_ids": PROMPT, "return_logprob": True, "top_logprobs_num": 20}
    found = []
    for temperature in (1.0, 2.0):
        answer = engine.ok(
            "/generate", {**body, "sampling_params": {**sampling, "temperature": temperature}}
        )
        found.append(
            {token: value for value, token, _ in answer["meta_info"]["output_top_logprobs"][0]}
        )
    plain, tempered = found
    one, other = [token for token in plain if token in tempered][:2]
    assert tempered[one] - tempered[other] == pytest.approx(
        (plain[one] - plain[other]) / 2, abs=0.1
    )


def test_it_tells_what_each_token_was_sampled_from(engine: Server) -> None:
    """Training takes log-probs over these tokens."""
    body = {
        "input_ids": PROMPT,
        "return_logprob": True,
        "return_sampling_mask": True,
        "sampling_params": {"max_new_tokens": 6, "top_k": 5, "top_p": 0.9, "ignore_eos": True},
    }
    meta = engine.ok("/generate", body)["meta_info"]
    masks = meta["output_token_sampling_mask"]
    inner = meta["output_token_sampling_logprobs"]
    outer = meta["output_token_logprobs"]
    assert len(masks) == len(inner) == len(outer) == 6
    for mask, within, (whole, token, _) in zip(masks, inner, outer, strict=True):
        assert token in mask and len(set(mask)) == len(mask) <= 5
        # what is left has less than the whole probability, and at least that of the token
        assert whole - 0.01 <= within <= 0.01


def test_a_stop_token_ends_it_and_is_returned(engine: Server) -> None:
    free = engine.generate(PROMPT, max_new_tokens=12, temperature=0.0)["output_ids"]
    stop = free[4]
    ends = {"stop_token_ids": [stop], "no_stop_trim": True, "ignore_eos": False}
    answer = engine.generate(PROMPT, max_new_tokens=12, temperature=0.0, **ends)
    assert answer["output_ids"] == free[: free.index(stop) + 1]
    assert answer["meta_info"]["finish_reason"]["type"] == "stop"


def test_an_aborted_request_returns_what_it_has(engine: Server) -> None:
    request = long_request(engine, "abort-me")
    wait_until(lambda: num_running(engine) == 1)
    engine.ok("/abort_request", {"abort_all": True})
    answer = request.join()
    assert answer["meta_info"]["finish_reason"]["type"] == "abort"
    wait_until(lambda: num_running(engine) == 0)


def test_a_pause_aborts_and_holds_new_requests(engine: Server) -> None:
    running = long_request(engine, "under-way")
    wait_until(lambda: num_running(engine) == 1)
    engine.ok("/pause_generation", {"mode": "abort"})
    assert running.join()["meta_info"]["finish_reason"]["type"] == "abort"
    held = long_request(engine, "held", count=4)
    engine.ok("/flush_cache")
    assert held.is_alive
    engine.ok("/continue_generation")
    assert held.join()["meta_info"]["finish_reason"]["type"] == "length"


# -- weights ---------------------------------------------------------------------------------------


def stub_of(model: Path, scale: float) -> tuple[MegatronStub, dict[str, Any]]:
    """A trainer with the model's weights, its last norm scaled: another model whose log-probs are
    known."""
    tensors: dict[str, torch.Tensor] = {}
    for file in sorted(model.glob("*.safetensors")):
        tensors |= load_file(file)
    tensors["model.norm.weight"] = tensors["model.norm.weight"] * scale
    hf_config = json.loads((model / "config.json").read_text())
    family = family_of(hf_config)
    return MegatronStub(family, family.model_spec(hf_config), tensors), hf_config


#: (--update-weight-transport, --colocate) of each way to push: "nccl" is a broadcast without
#: --colocate, and handles or shared memory with it.
WAYS = [
    ("nccl", False),
    *((name, True) for name in all_flags()["update_weight_transport"].choices),
]


@pytest.mark.parametrize(("way", "colocate"), WAYS)
def test_pushed_weights_are_the_ones_that_answer(
    engine: Server, kind: str, model: Path, way: str, colocate: bool, tmp_path: Path
) -> None:
    if way == "nccl" and not colocate and torch.cuda.device_count() == 1:
        pytest.skip("NCCL refuses two processes on one GPU")
    flags = {"update_weight_transport": way, "colocate": colocate}
    if way == "disk":
        flags["update_weight_disk_dir"] = str(tmp_path)
    before = log_probs(engine, PROMPT)
    for scale in (0.5, 1.0):
        stub, hf_config = stub_of(model, scale)
        config = make_config(hf_checkpoint=str(model), rollout_batch_size=1, num_rollout=1, **flags)
        sync = WeightSync(config, [stub], hf_config, start_version=int(10 * scale))
        if way not in ("nccl", *Abilities.read(engine.get("/server_info").json).transports):
            with pytest.raises(UserError, match=f"{way} does not reach the engines"):
                sync.connect([EngineSlots(engine.url, (0,))])
            sync.close()
            return
        sync.connect([EngineSlots(engine.url, (0,))])
        try:
            receipt = sync.push()
        finally:
            sync.close()
        assert receipt.checked and receipt.version == int(10 * scale) + 1
        answer = engine.generate(PROMPT, max_new_tokens=1)
        assert answer["meta_info"]["weight_version"] == str(receipt.version)
        assert is_close(log_probs(engine, PROMPT), before, engine) is (scale == 1.0)


def test_every_weight_is_verified(engine: Server, model: Path) -> None:
    stub, hf_config = stub_of(model, 1.0)
    config = make_config(
        hf_checkpoint=str(model),
        check_weight_update_equal=True,
        colocate=True,
        rollout_batch_size=1,
        num_rollout=1,
    )
    before = log_probs(engine, PROMPT)
    sync = WeightSync(config, [stub], hf_config)
    sync.connect([EngineSlots(engine.url, (0,))])
    receipt = sync.push()  # resets the engine's weights to noise beforehand
    sync.close()
    assert receipt.full and len(receipt.checked) == receipt.num_tensors
    assert is_close(log_probs(engine, PROMPT), before, engine)


def test_memory_goes_and_comes_by_tags(engine: Server, model: Path) -> None:
    before = log_probs(engine, PROMPT)
    engine.ok("/release_memory_occupation", {"tags": ["kv_cache", "weights", "cuda_graph"]})
    engine.ok("/resume_memory_occupation", {"tags": ["weights"]})
    stub, hf_config = stub_of(model, 1.0)  # what comes back may be anything, until it is pushed
    config = make_config(
        hf_checkpoint=str(model), colocate=True, rollout_batch_size=1, num_rollout=1
    )
    sync = WeightSync(config, [stub], hf_config)
    sync.connect([EngineSlots(engine.url, (0,))])
    sync.push()
    sync.close()
    engine.ok("/resume_memory_occupation", {"tags": ["kv_cache", "cuda_graph"]})
    assert is_close(log_probs(engine, PROMPT), before, engine)


# -- adapters --------------------------------------------------------------------------------------


def adapted_log_probs(engine: Server, adapter: str | None) -> list[float]:
    body = {"input_ids": PROMPT, "sampling_params": {"max_new_tokens": 1}, "return_logprob": True}
    asked = body | {"logprob_start_len": 0, "lora_path": adapter}
    meta = engine.ok("/generate", asked)["meta_info"]
    return [entry[0] for entry in meta["input_token_logprobs"][1:]]


def test_adapters_come_and_go_by_name(adapting: Server, model: Path, tmp_path: Path) -> None:
    adapters = [random_adapter(model, seed=seed) for seed in range(2)]
    base = adapted_log_probs(adapting, None)
    config, tensors = adapters[0]
    body = load_body("policy-1", config, tensors, expected_checksums=checksums(tensors))
    answer = adapting.ok("/load_lora_adapter_from_tensors", body)
    assert answer["success"] and answer["loaded_adapters"] == {"policy-1": "__tensor__"}
    path = str(save_adapter(tmp_path / "second", *adapters[1]))
    answer = adapting.ok("/load_lora_adapter", {"lora_name": "policy-2", "lora_path": path})
    assert answer["loaded_adapters"] == {"policy-1": "__tensor__", "policy-2": path}
    ids = [card["id"] for card in adapting.get("/v1/models").json["data"]]
    assert ids[1:] == ["policy-1", "policy-2"]
    found = [adapted_log_probs(adapting, name) for name in ("policy-1", "policy-2", None)]
    assert is_close(found[2], base, adapting)
    assert not any(is_close(one, base, adapting) for one in found[:2])
    assert not is_close(found[0], found[1], adapting)
    # one request for several
    names = ["policy-2", None, "policy-1"]
    body = {"input_ids": [PROMPT] * 3, "sampling_params": {"max_new_tokens": 1}}
    asked = body | {"return_logprob": True, "logprob_start_len": 0, "lora_path": names}
    mixed = [
        [entry[0] for entry in one["meta_info"]["input_token_logprobs"][1:]]
        for one in adapting.ok("/generate", asked)
    ]
    for one, other in zip(mixed, [found[1], base, found[0]], strict=True):
        assert is_close(one, other, adapting)
    for name in ("policy-1", "policy-2"):
        assert adapting.ok("/unload_lora_adapter", {"lora_name": name})["success"]
    refused = adapting.post("/generate", body | {"lora_path": "policy-1"})
    assert refused.status == 400 and b"policy-1" in refused.raw


def test_adapters_that_are_refused(adapting: Server, model: Path) -> None:
    config, tensors = random_adapter(model)
    load = "/load_lora_adapter_from_tensors"
    adapting.ok(load, load_body("taken", config, tensors))
    wrong = {
        "already loaded": load_body("taken", config, tensors),
        "DoRA": load_body("dora", config | {"use_dora": True}, tensors),
        "9": load_body("large", *random_adapter(model, rank=9)),
    }
    if adapting.get("/server_info").json.get("abilities"):  # the embedded engine has no limit
        wrong.pop("9")
    for said, body in wrong.items():
        answer = adapting.post(load, body)
        assert answer.status == 400 and not answer.json["success"], said
        assert said in answer.json["error_message"]
    adapting.ok("/unload_lora_adapter", {"lora_name": "taken"})
    assert adapting.post("/unload_lora_adapter", {"lora_name": "taken"}).status == 400


def test_openai_routes_take_the_adapter_behind_the_model(adapting: Server, model: Path) -> None:
    config, tensors = random_adapter(model)
    adapting.ok("/load_lora_adapter_from_tensors", load_body("third", config, tensors))
    served = adapting.get("/v1/models").json["data"][0]["id"]

    def completion(name: str) -> str:
        body = {"model": name, "prompt": PROMPT, "max_tokens": 8, "temperature": 0}
        return str(adapting.ok("/v1/completions", body)["choices"][0]["text"])

    asked = {"input_ids": PROMPT, "sampling_params": {"max_new_tokens": 8, "temperature": 0}}
    texts = [adapting.ok("/generate", asked | {"lora_path": n})["text"] for n in ("third", None)]
    assert [completion(f"{served}:third"), completion(served)] == texts
    adapting.ok("/unload_lora_adapter", {"lora_name": "third"})


def test_an_engine_without_adapters_says_so(engine: Server, model: Path) -> None:
    answer = engine.post("/load_lora_adapter_from_tensors", load_body("a", *random_adapter(model)))
    assert answer.status == 400 and "--enable-lora" in answer.json["error_message"]
    asked = {"input_ids": PROMPT, "lora_path": "a", "sampling_params": {"max_new_tokens": 1}}
    assert engine.post("/generate", asked).status == 400


@pytest.mark.parametrize("shares", [False, True])
def test_adapters_of_experts(
    request: pytest.FixtureRequest, kind: str, tmp_path: Path, shares: bool
) -> None:
    if kind == "sglang":
        pytest.skip("the form of its experts' adapters is chosen when it starts")
    model = save_tiny_model(tmp_path / "model", "qwen3_moe")
    config, tensors = random_adapter(model)
    if shares:
        tensors = with_shared_sides(tensors)
    with start(request, kind, model, tmp_path, adapters=True) as engine:
        load = "/load_lora_adapter_from_tensors"
        engine.ok(load, load_body("single", config, tensors))
        engine.ok(load, load_body("stacked", config, stacked_experts(tensors, shares=shares)))
        single, stacked, base = (adapted_log_probs(engine, n) for n in ("single", "stacked", None))
        assert is_close(single, stacked, engine) and not is_close(single, base, engine)


def test_a_bad_flag_ends_the_server_with_its_name(kind: str, model: Path) -> None:
    if kind == "embedded":
        argv = [sys.executable, "-m", "slime.embedded", "--model-path", str(model)]
    else:
        argv = sglang_command(sglang_config(model), str(model), "127.0.0.1", 30000).argv
    stand_in = [str(FAKE)] if kind == "stand-in" else []
    path = os.pathsep.join([*stand_in, os.environ.get("PYTHONPATH", "")])
    env = {**os.environ, "PYTHONPATH": path}
    ended = subprocess.run(
        [*argv, "--no-such-flag"], capture_output=True, text=True, timeout=300, env=env, check=False
    )
    assert ended.returncode != 0 and "--no-such-flag" in ended.stderr
