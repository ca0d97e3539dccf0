"""Pushes of quantised weights to SGLang: its layers are opened, compared with what was sent, and
closed."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from slime.checkpoints.quantised_files import quantise_directory
from slime.config import Config, make_config
from slime.engines.api import WEIGHT_LOADER, WEIGHT_PROBE
from slime.engines.launch import EnginePlace
from slime.engines.sglang import quantised_routes
from slime.engines.sglang.quantised_routes import QuantisedRoute, form_of
from slime.errors import UserError
from slime.models import family_of, read_hf_config
from slime.models.quantised import Fp8, Quantisation
from slime.weights import ipc
from slime.weights.engine_check import SliceCheck, SliceDigest
from slime.weights.sync import WeightSync
from slime.weights.transport import EngineSlots
from tests.support import stage_jobs
from tests.support.megatron_stub import MegatronStub
from tests.support.quantised_models import make_plain, tensors_of
from tests.support.sglang_servers import FakeSGLang, fake_sglang
from tests.support.trainer_ranks import Pools

pytestmark = pytest.mark.usefixtures("sglang_stand_in")

FORMAT = Quantisation("fp8", Fp8((0, 0), "weight_scale"), ("lm_head",))


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Plain weights of a start and of a trainer, and both quantised."""
    folder = tmp_path_factory.mktemp("models")
    for seed, name in enumerate(("start", "trained")):
        make_plain(folder / name, "qwen3", seed=seed)
        quantise_directory(folder / name, folder / f"{name}-fp8", FORMAT)
    return {path.name: path for path in folder.iterdir()}


def config_of(served: Path, **flags: object) -> Config:
    words = {
        "rollout_engine": "sglang",
        "rollout_batch_size": 4,
        "num_rollout": 1,
        "colocate": True,
    }
    return make_config(
        **{**words, "sglang_fp8_gemm_backend": "triton", "hf_checkpoint": str(served), **flags}
    )


@pytest.fixture(scope="module")
def server(
    folders: dict[str, Path], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[FakeSGLang]:
    served = folders["start-fp8"]
    with fake_sglang(
        config_of(served), served, tmp_path_factory.mktemp("log"), EnginePlace(number=0)
    ) as [found]:
        yield found


@pytest.fixture
def sync(
    server: FakeSGLang, folders: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> Iterator[WeightSync]:
    monkeypatch.setattr(ipc, "_check_sharing", lambda engines, num_ranks: None)
    plain, served = folders["trained"], folders["start-fp8"]
    family = family_of(plain)
    stub = MegatronStub(family, family.model_spec(plain), tensors_of(plain))
    config = config_of(served, check_weight_update_equal=True, update_weight_buffer_size=5000)
    sync = WeightSync(config, [stub], read_hf_config(served))
    sync.connect([EngineSlots(server.url, (0,))])
    server.forget()
    yield sync
    sync.close()


def test_layers_are_opened_before_the_transfer_and_closed_after_the_comparison(
    sync: WeightSync, server: FakeSGLang, folders: dict[str, Path]
) -> None:
    receipt, offline = sync.push(), tensors_of(folders["trained-fp8"])
    assert (
        receipt.transport == "IPC handles" and receipt.full and set(receipt.checked) == set(offline)
    )
    assert receipt.nbytes == sum(
        tensor.numel() * tensor.element_size() for tensor in offline.values()
    )
    assert list(receipt.seconds) == [
        "pause", "reset", "open", "transfer", "flush", "check", "close", "continue", "total"
    ]  # fmt: skip
    calls = [str(call.get("load_format", call["path"])) for call in server.calls()]
    asked = [number for number, call in enumerate(calls) if call == WEIGHT_PROBE]
    sent = [number for number, call in enumerate(calls) if call == WEIGHT_LOADER]
    assert (
        calls[:2] == ["/pause_generation", "/weights_checker"]
        and calls[-1] == "/continue_generation"
    )
    assert len(sent) > 1 and asked == [2, len(calls) - 3, len(calls) - 2]  # open; compare, close
    assert sent == list(range(3, 3 + len(sent))) and calls.index("/flush_cache") == sent[-1] + 1


@pytest.mark.parametrize(("flags", "by"), [
    ({}, "gloo broadcast"),
    ({"update_weight_transport": "disk"}, "disk"),
])  # fmt: skip
def test_engines_on_gpus_of_their_own_are_opened_too(
    folders: dict[str, Path],
    tmp_path: Path,
    flags: dict[str, object],
    by: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Whatever real engines were seen to take so far: this is the order of a push."""
    anything = QuantisedRoute(opens=True, needs={"broadcast": {}, "disk": {}})
    monkeypatch.setattr(quantised_routes, "ROUTES", {"0.5.16": {form_of(FORMAT): anything}})
    plain, served = folders["trained"], folders["start-fp8"]
    family = family_of(plain)
    if "update_weight_transport" in flags:
        flags = {**flags, "update_weight_disk_dir": str(tmp_path / "weights")}
    flags = {
        **flags,
        "colocate": False,
        "check_weight_update_equal": True,
        "update_weight_buffer_size": 5000,
    }
    config = config_of(served, **flags)
    with fake_sglang(config, served, tmp_path, EnginePlace(number=0)) as [server]:
        sync = WeightSync(
            config,
            [MegatronStub(family, family.model_spec(plain), tensors_of(plain))],
            read_hf_config(served),
        )
        sync.connect([EngineSlots(server.url, ())])
        try:
            receipt = sync.push()
            assert receipt.transport == by and receipt.full
            assert set(receipt.checked) == set(tensors_of(folders["trained-fp8"]))
            assert "open" in receipt.seconds and "close" in receipt.seconds
            sync._opens_layers = False
            with pytest.raises(UserError, match=r"phase 'transfer'(.|\n)*weight_loader"):
                sync.push()
        finally:
            sync.close()


def test_a_receipt_does_not_count_what_no_engine_was_asked_for(
    sync: WeightSync, folders: dict[str, Path]
) -> None:
    check, name = sync._check, "model.norm.weight"
    assert isinstance(check, SliceCheck) and isinstance(check.digest, SliceDigest)
    for rank in (rank for ranks in check._slices for rank in ranks):
        rank[name] = None
    sync._sampler.digest = replace(check.digest, slices={**check.digest.slices, name: []})
    assert set(sync.push().checked) == set(tensors_of(folders["trained-fp8"])) - {name}


def test_a_push_that_broke_off_in_the_transfer_is_begun_again(
    sync: WeightSync, server: FakeSGLang
) -> None:
    sync._opens_layers = False
    with pytest.raises(UserError, match=r"phase 'transfer'(.|\n)*weight_loader"):
        sync.push()
    sync._opens_layers = True
    assert sync.push().version == 1 and server.process.is_alive()


def test_every_rank_packs_quantised_weights_for_the_engine_on_its_gpu(
    folders: dict[str, Path], tmp_path: Path, ranks: Pools
) -> None:
    served, places = folders["start-fp8"], (EnginePlace(number=0), EnginePlace(number=1))
    with fake_sglang(config_of(served), served, tmp_path, *places) as servers:
        engines = [EngineSlots(server.url, (number,)) for number, server in enumerate(servers)]
        for said, receipt in ranks.run(
            2, stage_jobs.push_quantised, served, folders["trained"], engines
        ):
            assert (
                "phase 'open'" in said
                and "no memory for another layer" in said
                and "stay paused" in said
            )
            assert receipt.full and set(receipt.checked) == set(tensors_of(served))
