"""Adapters pushed to servers: the embedded engine and SGLang's stand-in of two ranks, in the same
words."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from slime.cluster.server_process import ServerProcess
from slime.cluster.weight_push import AdapterVersions
from slime.config import Config, make_config
from slime.embedded.kind import embedded_command
from slime.engines.fleet import EngineFleet
from slime.engines.launch import ONE_GPU, EnginePlace
from slime.errors import UserError
from slime.models import family_of
from slime.models.adapters import AdapterConfig, adapter_family, begins_with_zeros
from slime.processes.host import free_port
from slime.weights import adapter_sync
from slime.weights.adapter_sync import AdapterSync
from slime.weights.receipt import WeightMismatch
from slime.weights.transport import EngineSlots
from tests.support.contract_servers import Background, wait_until
from tests.support.embedded_models import save_tiny_model
from tests.support.megatron_stub import MegatronStub, random_hf
from tests.support.sglang_servers import fake_sglang

pytestmark = pytest.mark.usefixtures("sglang_stand_in", "forked_servers")

TOKENS = list(range(5, 29))


@dataclass
class Pushed:
    """An engine, and a trainer beside it whose adapters tests change.

    Attributes:
        trained: the trainer's tensors.
    """

    url: str
    num_ranks: int
    config: Config
    trained: dict[str, torch.Tensor]
    stub: MegatronStub
    hf_config: dict[str, Any]

    def connected(self) -> AdapterSync:
        adapters = AdapterConfig.of(self.config)
        assert adapters is not None
        sync = AdapterSync(self.config, [self.stub], self.hf_config, adapters)
        sync.connect([EngineSlots(self.url, tuple(range(self.num_ranks)))])
        return sync

    def log_probs(self, adapter: str = "") -> list[float]:
        body: dict[str, Any] = {
            "input_ids": TOKENS,
            "sampling_params": {"max_new_tokens": 0},
            "return_logprob": True,
            "logprob_start_len": 0,
        }
        fleet = EngineFleet([self.url])
        try:
            named = {"lora_path": adapter} if adapter else {}
            [answer] = fleet.post("/generate", body | named, 30)
        finally:
            fleet.close()
        return [entry[0] for entry in answer["meta_info"]["input_token_logprobs"][1:]]

    def learn(self) -> None:
        """Change every adapter, as a step of the optimizer does."""
        with torch.no_grad():
            for name, parameter in self.stub.named_parameters():
                if ".adapter." in name:
                    parameter.add_(torch.randn_like(parameter) * 0.05)


@pytest.fixture(scope="module", params=["embedded", "sglang", "sglang 0.5.23"])
def pushed(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Pushed]:
    engine, _, version = request.param.partition(" ")
    folder = tmp_path_factory.mktemp(engine)
    model = save_tiny_model(folder / "model", "qwen3", tie_word_embeddings=False)
    config = make_config(
        rollout_engine=engine, hf_checkpoint=str(model), fp32=True, lora_rank=4,
        lora_target_modules=(
            "q_proj", "v_proj", "o_proj", "down_proj", "embed_tokens", "lm_head"
        ),
        rollout_batch_size=4, num_rollout=1, lr=1e-4,
    )  # fmt: skip
    hf_config = json.loads((model / "config.json").read_text())
    family = family_of(hf_config)
    spec = family.model_spec(hf_config)
    adapters = AdapterConfig.of(config)
    assert adapters is not None
    table = adapter_family(family, spec, adapters)
    stub = MegatronStub(family, spec, load_file(model / "model.safetensors"))
    trained = {
        name: torch.zeros_like(tensor) if begins_with_zeros(name) else tensor * 0.1
        for name, tensor in random_hf(table, spec, seed=3).items()
    }
    for name, parameter in MegatronStub(table, spec, trained).named_parameters():
        stub._place(name, parameter.detach())
    if engine == "sglang":
        env = {"FAKE_SGLANG_VERSION": version or "0.5.16"}
        with fake_sglang(config, model, folder, EnginePlace(num_gpus=2), **env) as [server]:
            yield Pushed(server.url, 2, config, trained, stub, hf_config)
        return
    port = free_port()
    url = f"http://127.0.0.1:{port}"
    spec_of_server = embedded_command(config, str(model), "127.0.0.1", port, ONE_GPU)
    process = ServerProcess("engine-0", spec_of_server, url, folder / "log")
    process.start()
    try:
        process.wait_ready()
        yield Pushed(url, 1, config, trained, stub, hf_config)
    finally:
        process.stop()


def test_versions_come_and_go_beside_the_base(pushed: Pushed) -> None:
    before = pushed.log_probs()
    sync = pushed.connected()
    first = sync.push()
    assert first.adapter == "policy-1" and first.transport == "shared memory"
    # k_proj is sent as zeros
    assert first.num_tensors > len(pushed.trained) and first.loaded == first.num_tensors
    assert pushed.log_probs("policy-1") == before, "an adapter of zeros is the base, bit for bit"
    pushed.learn()
    second = sync.push(has_learned=True)
    assert second.fingerprints != first.fingerprints
    policy = pushed.log_probs("policy-2")
    assert max(abs(a - b) for a, b in zip(policy, before)) > 1e-3
    assert pushed.log_probs() == before == pushed.log_probs("policy-1")
    fleet = EngineFleet([pushed.url])
    versions = AdapterVersions(lambda version, cut: None, set, cuts=False)
    versions.switch(1)
    versions.switch(2)
    versions.unload_old(fleet)
    fleet.close()
    with pytest.raises(Exception, match="policy-1"):
        pushed.log_probs("policy-1")
    assert pushed.log_probs("policy-2") == policy
    sync.close()


def test_neither_an_engine_that_joins_nor_a_push_waits_for_requests(pushed: Pushed) -> None:
    fleet = EngineFleet([pushed.url])
    sampling = {"max_new_tokens": 300_000, "ignore_eos": True}
    body = {"input_ids": TOKENS, "sampling_params": sampling}
    request = Background(lambda: fleet.post("/generate", body, 120))

    def is_running() -> bool:
        [load] = fleet.get("/v1/loads", 30)
        return bool(load["loads"][0]["num_running_reqs"])

    wait_until(is_running)
    sync = pushed.connected()
    sync.push()
    assert is_running()
    pushed.learn()
    sync.push(has_learned=True)
    fleet.post("/abort_request", {"abort_all": True}, 30)
    [answer] = request.join()
    assert answer["meta_info"]["finish_reason"]["type"] == "abort"
    fleet.close()
    sync.close()


def test_a_run_that_goes_on_has_the_next_number(pushed: Pushed) -> None:
    sync = pushed.connected()
    sync.version = 40
    assert sync.push().adapter == "policy-41"
    sync.close()


def test_tensors_for_engines_of_another_host(
    pushed: Pushed, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(adapter_sync, "is_local", lambda url: False)
    sync = pushed.connected()
    sync.version = 50
    assert sync.push().transport == "HTTP"
    sync.close()


def test_what_arrived_otherwise_is_named(pushed: Pushed, monkeypatch: pytest.MonkeyPatch) -> None:
    real = adapter_sync.AdapterBuffer.payload

    def damaged(self: adapter_sync.AdapterBuffer, readers: int) -> str:
        view = next(
            tensor for name, tensor in self.tensors().items() if "layers.1.self_attn.v_pro" in name
        )
        view.view(-1)[3] += 1
        return real(self, readers)

    monkeypatch.setattr(adapter_sync.AdapterBuffer, "payload", damaged)
    sync = pushed.connected()
    sync.version = 60
    with pytest.raises(WeightMismatch, match=r"layers\.1\.self_attn\.v_proj\.lora_A"):
        sync.push()
    sync.close()


def test_another_base_is_found_before_anything_is_sent(
    pushed: Pushed, monkeypatch: pytest.MonkeyPatch
) -> None:
    weight = dict(pushed.stub.named_parameters())["decoder.layers.1.mlp.linear_fc2.weight"]
    with torch.no_grad():
        weight[0, 0] += 1
    sync = pushed.connected()
    sync.version = 70
    with pytest.raises(UserError, match=r"base are not the trainer's: model\.layers\.1\.mlp\.down"):
        sync.push()
    with torch.no_grad():
        weight[0, 0] -= 1
    sync.close()
