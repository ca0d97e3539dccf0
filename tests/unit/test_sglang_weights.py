"""Weights to SGLang engines in SGLang's own words: handles, broadcasts, files; and the proof that
they arrived."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from slime.config import Config, make_config
from slime.embedded.architecture import Architecture
from slime.engines.launch import EnginePlace
from slime.engines.sglang import weight_probe
from slime.engines.wire.buckets import FINGERPRINTS
from slime.engines.wire.process_group import ExternalGroup
from slime.errors import UserError
from slime.models import family_of
from slime.processes.host import free_port
from slime.weights import ipc
from slime.weights.engine_check import SliceDigest, slice_key
from slime.weights.receipt import WeightMismatch
from slime.weights.sync import WeightSync
from slime.weights.transport import EngineSlots
from tests.support import stage_jobs
from tests.support.embedded_models import save_tiny_model
from tests.support.megatron_stub import MegatronStub
from tests.support.sglang_servers import FakeSGLang, fake_sglang
from tests.support.trainer_ranks import Pools

pytestmark = pytest.mark.usefixtures("sglang_stand_in")

#: The stand-in refuses tensors that would reach its draft.
DRAFT = {"speculative_algorithm": "EAGLE3", "speculative_draft_model_path": "draft"}
WORDS = {"rollout_engine": "sglang", "fp32": True, "rollout_batch_size": 4, "num_rollout": 1}


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_model(tmp_path_factory.mktemp("models") / "tiny", "qwen3")


def config_of(model_dir: Path, **flags: object) -> Config:
    return make_config(**WORDS, hf_checkpoint=str(model_dir), **flags)


@pytest.fixture(scope="module")
def servers(
    model_dir: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[list[FakeSGLang]]:
    """One engine of one rank, one of two with a draft model."""
    places = EnginePlace(number=0), EnginePlace(number=1, num_gpus=2, overrides=DRAFT)
    with fake_sglang(
        config_of(model_dir, colocate=True), model_dir, tmp_path_factory.mktemp("log"), *places
    ) as found:
        yield found


def trained(model_dir: Path, seed: int) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    start = load_file(model_dir / "model.safetensors")
    return {name: torch.randn(tensor.shape, generator=generator) for name, tensor in start.items()}


def sync_of(model_dir: Path, tensors: dict[str, torch.Tensor], **flags: object) -> WeightSync:
    hf_config = json.loads((model_dir / "config.json").read_text())
    family = family_of(hf_config)
    stub = MegatronStub(family, family.model_spec(hf_config), tensors)
    return WeightSync(config_of(model_dir, **flags), [stub], hf_config)


SLOTS = {0: (0,), 1: (1, 2)}


def played_by_one_rank(self: ipc.IpcTransport, handle: ipc.Handle) -> list[ipc.Handle]:
    """Handles of three trainer ranks, all from this one; each is good for one reader."""
    return [handle, *(ipc.handle_of(self._buffers._buffers[self._buffers.turn]) for _ in range(2))]


@pytest.mark.parametrize(("kind", "flags"), [
    ("IPC handles", {"colocate": True}),
    ("gloo broadcast", {}),
    ("disk", {"update_weight_transport": "disk"}),
])  # fmt: skip
def test_a_push_arrives_and_is_proved(
    servers: list[FakeSGLang], model_dir: Path, tmp_path: Path, monkeypatch, kind: str, flags: dict
) -> None:
    monkeypatch.setattr(ipc, "_check_sharing", lambda engines, num_ranks: None)
    monkeypatch.setattr(ipc.IpcTransport, "_gather", played_by_one_rank)
    if kind == "disk":
        flags = {**flags, "update_weight_disk_dir": str(tmp_path / "push")}
    new = trained(model_dir, seed=len(kind))
    sync = sync_of(
        model_dir, new, update_weight_buffer_size=20_000, check_weight_update_equal=True, **flags
    )
    sync.connect([EngineSlots(server.url, SLOTS[number]) for number, server in enumerate(servers)])
    for server in servers:
        server.forget()
    receipt = sync.push()
    assert receipt.transport == kind and receipt.full and set(receipt.checked) == set(new)
    assert sync._check.unknown == [] and sync._check._others == [[], []]
    for server in servers:
        paths = [call["path"] for call in server.calls()]
        assert paths[0] == "/pause_generation" and paths[-1] == "/continue_generation"
        assert paths.index("/weights_checker") == 1  # reset: nothing old can pass for new
        assert {c["weight_version"] for c in server.calls() if c.get("weight_version")} == {"1"}
        assert all(
            c["load_format"] != "shared_memory" for c in server.calls() if "load_format" in c
        )
    sync.close()


@pytest.fixture(scope="module")
def newer(model_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[FakeSGLang]:
    """SGLang 0.5.23 with two ranks: sessions, groups instead of numbers of ranks, and a draft that
    takes broadcasts."""
    config = config_of(model_dir, colocate=True)
    folder = tmp_path_factory.mktemp("newer")
    place = EnginePlace(num_gpus=2, overrides=DRAFT)
    with fake_sglang(config, model_dir, folder, place, FAKE_SGLANG_VERSION="0.5.23") as [server]:
        yield server


@pytest.mark.parametrize(
    ("kind", "flags"), [("IPC handles", {"colocate": True}), ("gloo broadcast", {})]
)
def test_newer_versions_take_a_push_in_one_session(
    newer: FakeSGLang, model_dir: Path, monkeypatch, kind: str, flags: dict[str, Any]
) -> None:
    monkeypatch.setattr(ipc, "_check_sharing", lambda engines, num_ranks: None)
    monkeypatch.setattr(ipc.IpcTransport, "_gather", played_by_one_rank)
    new = trained(model_dir, seed=len(kind))
    sync = sync_of(model_dir, new, check_weight_update_equal=True, **flags)
    sync.connect([EngineSlots(newer.url, SLOTS[1])])
    newer.forget()
    receipt = sync.push()
    assert receipt.full and receipt.transport == kind
    begin, end = "/begin_weight_update", "/end_weight_update"
    paths = [call["path"] for call in newer.calls()]
    assert paths[0] == "/pause_generation" and paths[-2:] == [end, "/continue_generation"]
    assert (paths.count(begin), paths.count(end)) == (1, 1)
    # the layout is asked for in a session, which a push that broke off may have left open
    sync._fleet.post(begin, {}, 10)
    sync.connect([EngineSlots(newer.url, SLOTS[1])])
    assert sync.push().full
    sync.close()


def test_stages_push_to_engines_of_one_and_two_ranks(
    servers: list[FakeSGLang], model_dir: Path, ranks: Pools
) -> None:
    for server in servers:
        server.forget()
    # the second one is external
    engines = [EngineSlots(servers[0].url, SLOTS[0]), EngineSlots(servers[1].url, (), 2)]
    flags = {"pipeline_model_parallel_size": 2, "check_weight_update_equal": True}
    first, last = ranks.run(2, stage_jobs.push_twice, model_dir, flags, engines)
    names = set(load_file(model_dir / "model.safetensors"))
    # compared slice by slice in the engines' processes, the two ranks' apart
    for receipt in first["receipts"]:
        assert (
            receipt.transport == "gloo broadcast" and receipt.full and set(receipt.checked) == names
        )
    assert not first["seen"] & last["seen"] and not first["crossing"] and not last["crossing"]
    for server in servers:
        paths = [call["path"] for call in server.calls()]
        assert (
            paths.count("/init_weights_update_group")
            == paths.count("/destroy_weights_update_group")
            == 2
        )
        assert paths.count("/flush_cache") == 2  # once per push


def test_what_did_not_arrive_is_named(
    servers: list[FakeSGLang], model_dir: Path, monkeypatch
) -> None:
    new = trained(model_dir, seed=3)
    sync = sync_of(model_dir, new, check_weight_update_equal=True)
    sync.connect([EngineSlots(servers[1].url, (0, 1))])
    lost = "model.layers.1.self_attn.q_proj.weight"

    def without(tensors, version, observe, send=sync._transport.send):
        def damaged():
            for name, tensor in tensors:
                yield (
                    name,
                    tensor.clone().index_fill_(0, torch.tensor([tensor.shape[0] - 1]), 0)
                    if name == lost
                    else tensor,
                )

        def observe_whole(name, tensor):
            observe(name, new[name] if name == lost else tensor)

        return send(damaged(), version, observe_whole)

    monkeypatch.setattr(sync._transport, "send", without)
    with pytest.raises(WeightMismatch) as caught:
        sync.push()
    [line] = caught.value.mismatches  # the last row is on the second rank
    assert line.startswith(f"{lost} differs on {servers[1].url} (rank 1)")
    monkeypatch.undo()
    sync.push()
    sync.close()


def test_engines_beyond_the_trainers_gpus_are_refused(
    servers: list[FakeSGLang], model_dir: Path
) -> None:
    sync = sync_of(model_dir, trained(model_dir, seed=4), colocate=True)
    with pytest.raises(UserError, match="without a trainer rank"):
        sync.connect([EngineSlots(servers[1].url, (0, 1))])
    sync.close()


# -- the probe -------------------------------------------------------------------------------------


@pytest.fixture
def told() -> Iterator[Callable[..., Any]]:
    """``told(model, **request)``: what `weight_probe.report` says; the request may be changed by
    name."""
    store = ExternalGroup.open_store("127.0.0.1", 1, 10.0)

    def ask(model: torch.nn.Module, **request: Any) -> Any:
        place = {"host": "127.0.0.1", "port": store.port, "key": "k"}
        raw = torch.frombuffer(
            bytearray(json.dumps({**place, **request}).encode()), dtype=torch.uint8
        )
        weight_probe.report(model, [("request", raw)])
        answer = json.loads(store.get("k/0"))
        store.delete_key("k/0")
        return answer

    yield ask


@pytest.mark.parametrize("method", FINGERPRINTS)
@pytest.mark.parametrize("shape", ["qwen3", "qwen3_moe"])
def test_trainer_and_probe_agree_on_slices(shape: str, method: str, tmp_path: Path) -> None:
    from sglang.modules import sharded_model

    sent = load_file(save_tiny_model(tmp_path / shape, shape) / "model.safetensors")
    shapes = {name: list(tensor.shape) for name, tensor in sent.items()}
    arch = Architecture.from_dir(tmp_path / shape)
    for size in (1, 2):
        compared = set()
        for rank in range(size):
            model = sharded_model(sent, arch, rank, size)
            layout = weight_probe._answer(model, {"action": "layout", "tensors": shapes})
            slices = {name: part for name, part in layout["slices"].items() if part is not None}
            request = {"action": "fingerprint", "tensors": shapes, "method": method}
            answer = weight_probe._answer(model, request)["fingerprints"]
            assert answer.keys() == slices.keys()
            digest = SliceDigest({name: [tuple(part)] for name, part in slices.items()}, method)
            for name, held in answer.items():
                assert digest(name, sent[name]) == {slice_key(slices[name]): held}
                changed = sent[name].clone()
                changed.view(-1)[0] += 1  # in the first rank's slice
                moved = digest(name, changed) != {slice_key(slices[name]): held}
                assert moved is (slices[name][1] == 0)
                compared.add(name)
        assert compared == set(sent)


@pytest.mark.parametrize(
    ("request_", "said"),
    [
        (
            {"action": "fingerprint", "method": "md5"},
            "ValueError: unknown fingerprint method 'md5'",
        ),
        ({"action": "fingerprint"}, "KeyError: 'method'"),
        ({"action": "fingerprint", "method": "words", "tensors": 3}, "AttributeError"),
        ({}, "KeyError: 'action'"),
    ],
    ids=["unknown method", "no method", "nonsense", "no action"],
)
def test_the_probe_reports_its_errors(
    request_: dict[str, Any], said: str, told: Callable[..., Any]
) -> None:
    answer = told(torch.nn.Linear(2, 2), **{"tensors": {"weight": [2, 2]}, **request_})
    assert answer["error"].startswith(said) and "Traceback" in answer["traceback"]


def test_the_probe_outlives_a_trainer_that_is_gone(
    monkeypatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("slime.deadlines.WEIGHT_PROBE_STORE", 0.2)
    request = {
        "action": "layout",
        "tensors": {},
        "host": "127.0.0.1",
        "port": free_port(),
        "key": "k",
    }
    for raw in (json.dumps(request).encode(), b"no request"):
        caplog.clear()
        weight_probe.report(
            torch.nn.Linear(2, 2),
            [("request", torch.frombuffer(bytearray(raw), dtype=torch.uint8))],
        )
        assert "the answer about the weights could not be sent" in caplog.text
