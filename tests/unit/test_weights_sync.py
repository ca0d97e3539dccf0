"""Weight sync against engines that hold tensors: every transport delivers every byte, every fault
is named."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from slime.config import make_config
from slime.embedded.weight_update import ABILITIES as EMBEDDED
from slime.engines.wire.abilities import SGLANG
from slime.engines.wire.shared_memory import SHM_DIR
from slime.errors import UserError
from slime.models import family_of
from slime.weights import route
from slime.weights.receipt import Receipt, Sampler, WeightMismatch
from slime.weights.route import choose_route
from slime.weights.sync import WeightSync
from tests.support.fake_weight_engine import FakeWeightEngine
from tests.support.hf_configs import config_of
from tests.support.megatron_stub import MegatronStub, random_hf

HF_CONFIG = config_of("qwen2")
FAMILY = family_of(HF_CONFIG)
SPEC = FAMILY.model_spec(HF_CONFIG)
START = random_hf(FAMILY, SPEC, seed=1)
TRAINED = random_hf(FAMILY, SPEC, seed=2)
ORDER = ["/pause_generation", "/flush_cache", "/weights_checker", "/continue_generation"]


def trainer(tensors: dict[str, torch.Tensor] = TRAINED) -> MegatronStub:
    return MegatronStub(FAMILY, SPEC, tensors)


@pytest.fixture
def hf_dir(tmp_path: Path) -> Path:
    path = tmp_path / "hf"
    path.mkdir()
    (path / "config.json").write_text(json.dumps(HF_CONFIG))
    return path


@pytest.fixture
def engines() -> Iterator[list[FakeWeightEngine]]:
    with ExitStack() as stack:
        yield [stack.enter_context(FakeWeightEngine(START)) for _ in range(2)]


def connected(
    engines: list[FakeWeightEngine], model: MegatronStub | None = None, **flags: object
) -> WeightSync:
    sync = WeightSync(make_config(**flags), [model or trainer()], HF_CONFIG)
    sync.connect([engine.url for engine in engines])
    return sync


def segments() -> set[str]:
    """Of this process: other tests of the machine have theirs."""
    opened = {os.path.realpath(path) for path in Path("/proc/self/fd").iterdir()}
    return opened & {str(path) for path in SHM_DIR.glob("slime-weights-*")}


def assert_holds(engine: FakeWeightEngine, tensors: dict[str, torch.Tensor]) -> None:
    for name, tensor in tensors.items():
        assert torch.equal(engine.tensors[name], tensor.to(engine.dtype)), name


@pytest.mark.parametrize("buffer_size", [300, 1 << 20])
def test_shared_memory(engines: list[FakeWeightEngine], buffer_size: int) -> None:
    sync = connected(engines, update_weight_buffer_size=buffer_size)
    receipt = sync.push()
    for engine in engines:
        assert_holds(engine, TRAINED)
        assert set(engine.versions) == {"1"} and not engine.paused
        assert [path for path in engine.calls if "update" not in path] == ORDER
    assert (receipt.version, sync.version, receipt.num_tensors) == (1, 1, len(TRAINED))
    assert receipt.nbytes == sum(t.numel() * 4 for t in TRAINED.values())
    assert receipt.transport == "shared memory" and receipt.checked
    sync.push()
    assert engines[0].versions[-1] == "2" and 1 <= len(segments()) <= 2
    sync.close()
    assert not segments()


@pytest.mark.parametrize("why", ["another host", "no shared memory"])
def test_broadcast(
    engines: list[FakeWeightEngine], monkeypatch: pytest.MonkeyPatch, why: str
) -> None:
    if why == "another host":
        monkeypatch.setattr(route, "is_local", lambda url: False)
    else:
        monkeypatch.setattr(route, "choose_route", lambda *args, **kinds: "broadcast")
    sync = connected(engines, update_weight_buffer_size=300)
    buffers = []
    for version in ("1", "2"):
        sync.push()
        buffers.append([buffer.data_ptr() for buffer in sync._transport._buffers._buffers])
        for engine in engines:
            assert_holds(engine, TRAINED)
            assert engine.versions[-1] == version
    assert buffers[0] == buffers[1]
    sync.close()
    assert engines[0].calls[-1] == "/destroy_weights_update_group"


def test_a_broadcast_waits_as_long_as_the_flag_says_and_the_next_push_mends_the_group(
    engines: list[FakeWeightEngine], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(route, "is_local", lambda url: False)
    sync = connected(engines, distributed_timeout_minutes=0.01)
    engines[1].delay["/update_weights_from_distributed"] = 2
    with pytest.raises(UserError, match="gave no answer within 1 s"):
        sync.push()
    engines[1].delay.clear()
    sync._transport._timeout = 60
    assert sync.push().version == 1
    for engine in engines:
        assert_holds(engine, TRAINED)
        assert engine.calls.count("/init_weights_update_group") == 2 and len(engine._groups) == 1
    sync.close()


def test_an_engine_that_refuses_a_broadcast_ends_it_for_those_that_wait(
    engines: list[FakeWeightEngine], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(route, "is_local", lambda url: False)
    monkeypatch.setattr("slime.deadlines.DISTRIBUTED_GRACE", 0.1)
    sync = connected(engines)
    engines[0].delay["/update_weights_from_distributed"] = 60
    engines[1].refuse_from = "pp_0"
    with pytest.raises(UserError, match="refused") as caught:
        sync.push()
    assert engines[1].url in str(caught.value) and not engines[0].senders  # it is still waiting
    sync.close()


def test_disk(engines: list[FakeWeightEngine], hf_dir: Path, tmp_path: Path) -> None:
    flags = {"update_weight_transport": "disk", "update_weight_disk_dir": str(tmp_path / "push")}
    sync = connected(engines, hf_checkpoint=str(hf_dir), **flags)
    for number in (1, 2):
        sync.push()
        assert [path.name for path in (tmp_path / "push").iterdir()] == [f"weight_v{number:06d}"]
    assert_holds(engines[1], TRAINED)
    sync.close()


def test_weights_are_cast_to_the_engines_dtype() -> None:
    with FakeWeightEngine(START, torch.bfloat16) as engine:
        sync = connected([engine], check_weight_update_equal=True)
        receipt = sync.push()
        assert receipt.nbytes == sum(t.numel() * 2 for t in TRAINED.values())
        assert_holds(engine, TRAINED)
        sync.close()


def test_engines_of_different_dtypes_are_refused() -> None:
    with (
        FakeWeightEngine(START) as one,
        FakeWeightEngine(START, torch.bfloat16) as other,
        pytest.raises(UserError, match="different dtypes"),
    ):
        connected([one, other])


def test_auto_dtype_is_the_configs(
    engines: list[FakeWeightEngine], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tests.support.fake_weight_engine.dtype_name", lambda dtype: "auto")
    for dtype, expected in (("bfloat16", torch.bfloat16), ("float16", torch.float16)):
        with FakeWeightEngine(START, expected) as engine:
            sync = WeightSync(make_config(), [trainer()], {**HF_CONFIG, "dtype": dtype})
            sync.connect([engine.url])
            sync.push()
            assert_holds(engine, TRAINED)
            sync.close()
    with pytest.raises(UserError, match="--sglang-dtype"):
        connected(engines)


@pytest.mark.parametrize("gpu", [False, True])
def test_the_way_of_the_weights(gpu: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: gpu)
    apart, shared = make_config(), make_config(colocate=True)
    assert choose_route(shared, EMBEDDED.transports, local=True) == "shm"
    assert choose_route(shared, SGLANG.transports, local=True) == "ipc"
    assert choose_route(apart, SGLANG.transports, local=True) == "broadcast"
    assert choose_route(apart, EMBEDDED.transports, local=True) == ("broadcast" if gpu else "shm")
    assert choose_route(apart, EMBEDDED.transports, local=False) == "broadcast"
    assert choose_route(apart, EMBEDDED.transports, local=True, on_cpu=True) == "shm"
    disk = make_config(update_weight_transport="disk", update_weight_disk_dir="d", colocate=True)
    assert choose_route(disk, SGLANG.transports, local=True) == "disk"
    with pytest.raises(UserError, match=r"disk does not reach the engines(.|\n)*by broadcast"):
        choose_route(disk, ("broadcast",), local=True)


def test_engines_that_cannot_be_pushed_to_are_named(
    engines: list[FakeWeightEngine], monkeypatch: pytest.MonkeyPatch
) -> None:
    engines[1].abilities = SGLANG
    with pytest.raises(
        UserError, match=f"{engines[0].url} is embedded and engine {engines[1].url} is SGLang"
    ):
        connected(engines)
    engines[1].abilities = engines[0].abilities
    monkeypatch.setattr(route, "is_local", lambda url: False)
    monkeypatch.setattr(route, "without_gpu", lambda infos: list(infos)[1:])
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    with pytest.raises(UserError, match=f"weights cannot get to engine {engines[1].url}") as caught:
        connected(engines)
    assert "--update-weight-transport disk" in caught.value.fix


def test_a_resumed_run_counts_on(engines: list[FakeWeightEngine]) -> None:
    sync = WeightSync(make_config(), [trainer()], HF_CONFIG, start_version=41)
    sync.connect([engines[0].url])
    assert sync.push().version == 42 and engines[0].versions[-1] == "42"
    sync.close()


def test_trained_weights_are_what_is_sent(engines: list[FakeWeightEngine]) -> None:
    model = trainer()
    sync = connected(engines[:1], model)
    sync.push()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(2)
    sync.push()
    assert_holds(engines[0], {name: tensor * 2 for name, tensor in TRAINED.items()})
    sync.close()


NAMES = sorted(TRAINED)


@pytest.fixture(scope="module")
def checked_sync() -> Iterator[tuple[WeightSync, FakeWeightEngine]]:
    with FakeWeightEngine(START) as engine:
        sync = connected([engine], check_weight_update_equal=True)
        yield sync, engine
        sync.close()


@settings(max_examples=40)
@given(
    name=st.sampled_from(NAMES),
    fault=st.sampled_from(["stale", "zeroed", "bit", "swapped"]),
    data=st.data(),
)
def test_any_single_fault_is_found_and_named(
    checked_sync, name: str, fault: str, data: st.DataObject
) -> None:
    sync, engine = checked_sync
    twins = [n for n in NAMES if n != name and TRAINED[n].shape == TRAINED[name].shape]

    other = data.draw(st.sampled_from(twins)) if fault == "swapped" and twins else None
    byte = data.draw(st.integers(0, TRAINED[name].numel() * 4 - 1))
    bit = data.draw(st.integers(0, 7))

    def corrupt(tensors: dict[str, torch.Tensor]) -> None:
        if fault == "stale":
            tensors[name].copy_(START[name])
        elif fault == "bit":
            tensors[name].view(torch.uint8).view(-1)[byte] ^= 1 << bit
        elif other is not None:
            kept = tensors[name].clone()
            tensors[name].copy_(tensors[other])
            tensors[other].copy_(kept)
        else:
            tensors[name].zero_()

    version, engine.corrupt = sync.version, corrupt
    with pytest.raises(WeightMismatch) as caught:
        sync.push()
    assert {text.split()[0] for text in caught.value.mismatches} == {name} | (
        {other} if other else set()
    )
    assert engine.paused and sync.version == version
    engine.corrupt = None
    sync.push()  # a new push sends everything again
    assert sync.version == version + 1 and not engine.paused


def test_tensors_that_were_never_sent_are_found() -> None:
    with FakeWeightEngine({**START, "model.extra.weight": torch.ones(2)}) as engine:
        sync = connected([engine], check_weight_update_equal=True)
        with pytest.raises(WeightMismatch, match=r"model\.extra\.weight on .* was never sent"):
            sync.push()
        # reset before the first push, compare after it
        assert engine.calls.count("/weights_checker") == 2
        sync.close()


@settings(max_examples=60)
@given(
    costs=st.lists(st.integers(1, 200).map(lambda n: n / 1024), min_size=1, max_size=20),
    budget=st.integers(5, 150).map(lambda n: n / 512),
)
def test_sampling_gives_every_tensor_its_turn_within_the_budget(
    costs: list[float], budget: float
) -> None:
    names = [f"t{number}" for number in range(len(costs))]
    seen: set[str] = set()
    sampler = Sampler(floor=budget)
    clock = [0.0]
    cost_of = dict(zip(names, costs, strict=True))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("slime.weights.receipt.time.perf_counter", lambda: clock[0])

        def spend(tensor: str) -> str:
            clock[0] += cost_of[tensor]
            return "f"

        patch.setattr("slime.weights.receipt.fingerprint", spend)
        for _ in names:
            sampler.begin(last_push_seconds=0.0, full=False)
            for name in names:
                sampler.observe(name, name)  # type: ignore[arg-type]
            sampler.end()
            taken = list(sampler.fingerprints)
            assert taken and sum(cost_of[name] for name in taken[:-1]) < budget / 2
            seen |= set(taken)
    assert seen == set(names)


@pytest.mark.parametrize(
    ("path", "phase", "state"),
    [
        ("/pause_generation", "pause", "they go on with the weights they have"),
        ("/update_weights_from_tensor", "transfer", "stay paused"),
        ("/flush_cache", "flush", "stay paused"),
        ("/weights_checker", "check", "stay paused"),
        ("/continue_generation", "continue", "some may still be paused"),
    ],
)
def test_a_failing_phase_says_who_and_what_state(
    engines: list[FakeWeightEngine], path: str, phase: str, state: str
) -> None:
    sync = connected(engines)
    engines[1].fail[path] = "broken on purpose"
    with pytest.raises(UserError) as caught:
        sync.push()
    text = str(caught.value)
    assert (
        f"phase '{phase}'" in text
        and engines[1].url in text
        and "broken on purpose" in text
        and state in text
    )
    assert "--update-weights-interval" in text and sync.version == 0
    assert engines[0].paused == (phase not in ("pause", "continue"))
    engines[1].fail.clear()
    assert sync.push().version == 1
    assert not engines[0].paused and not engines[1].paused
    sync.close()


def test_engines_of_a_push_that_broke_off_stay_paused_when_the_next_one_cannot_pause(
    engines: list[FakeWeightEngine],
) -> None:
    """They may hold a mix, and layers that are open; the others have not been told to go on
    either."""
    sync = connected(engines)
    engines[1].fail["/update_weights_from_tensor"] = "broken on purpose"
    with pytest.raises(UserError, match="phase 'transfer'"):
        sync.push()
    engines[1].fail = {"/pause_generation": "broken on purpose"}
    with pytest.raises(UserError, match=r"phase 'pause'(.|\n)*a mix of old and new weights"):
        sync.push()
    assert engines[0].paused
    engines[1].fail = {}
    sync.push()
    assert not engines[0].paused
    engines[1].fail = {"/pause_generation": "broken on purpose"}
    with pytest.raises(UserError, match="they go on with the weights they have"):
        sync.push()
    assert not engines[0].paused
    sync.close()


def test_a_silent_engine_runs_into_the_deadline(engines, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("slime.deadlines.TRANSPORT_FLOOR", 0.2)
    sync = connected(engines)
    engines[0].delay["/update_weights_from_tensor"] = 5
    with pytest.raises(UserError, match="gave no answer within"):
        sync.push()
    sync.close()


def test_a_cache_that_cannot_be_flushed_yet_is_asked_again(engines: list[FakeWeightEngine]) -> None:
    engines[0].flush_refusals = 2
    sync = connected(engines)
    sync.push()
    assert engines[0].calls.count("/flush_cache") == 3
    sync.close()


def test_an_engine_that_is_not_there() -> None:
    with FakeWeightEngine(START) as engine:
        url = engine.url
    sync = WeightSync(make_config(), [trainer()], HF_CONFIG)
    with pytest.raises(UserError, match=r"cannot be reached(.|\n)*/server_info failed"):
        sync.connect([url])
    sync.close()


def test_metrics_of_a_receipt() -> None:
    receipt = Receipt(3, 2, 1000, {"pause": 0.1, "transfer": 0.2, "total": 0.4}, "disk", ("a",))
    assert receipt.metrics() == {
        "perf/update_weights_time": 0.4,
        "perf/weight_version": 3.0,
        "perf/update_weights_wire_bytes": 1000.0,
        "perf/update_weights/checked_tensors": 1.0,
        "perf/update_weights/pause_time": 0.1,
        "perf/update_weights/transfer_time": 0.2,
    }
    assert "version 3" in str(receipt)
