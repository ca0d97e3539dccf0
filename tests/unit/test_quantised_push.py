"""Pushes to an embedded engine of quantised weights: what it holds is what an offline conversion
makes, to the bit."""

from __future__ import annotations

import json
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks.gpu.quantised_models import in_runs
from slime.checkpoints.quantised_files import quantise_directory
from slime.config import make_config
from slime.engines.wire.abilities import SGLANG
from slime.engines.wire.buckets import fingerprint
from slime.engines.wire.expert_runs import ExpertRun
from slime.errors import UserError
from slime.models import family_of, read_hf_config
from slime.models.quantised import Fp8, Int4, Quantisation
from slime.processes.host import free_port
from slime.weights import route
from slime.weights.receipt import WeightMismatch
from slime.weights.source import ModelSource, QuantisedSource
from slime.weights.sync import WeightSync
from tests.support.contract_servers import Server, embedded_argv, running
from tests.support.megatron_stub import MegatronStub
from tests.support.quantised_models import INT4, make_plain, same_bits, tensors_of

pytest.importorskip("compressed_tensors", reason="the quantised extra is not installed")
pytestmark = pytest.mark.slow

KINDS = {
    "int4": Quantisation("compressed-tensors", Int4(8, False), INT4.ignore),
    "fp8": Quantisation("fp8", Fp8((16, 16)), ("lm_head",)),
}
FAMILY = "qwen3_moe"


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """What engines start with, and what the trainer has by now."""
    folder = tmp_path_factory.mktemp("plain")
    return {
        name: make_plain(folder / name, FAMILY, seed=seed)
        for seed, name in enumerate(("start", "trained"))
    }


@pytest.fixture(scope="module", params=KINDS)
def engine(
    request: pytest.FixtureRequest, plain: dict[str, Path], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[tuple[Server, Path, dict[str, torch.Tensor]]]:
    """A server, the directory that it serves, and an offline conversion of what the trainer has."""
    folder, port = tmp_path_factory.mktemp("quantised"), free_port()
    for name, directory in plain.items():
        quantise_directory(directory, folder / name, KINDS[request.param])
    with running(
        embedded_argv(folder / "start", port, "--device", "cpu"), port, folder / "log"
    ) as server:
        yield server, folder / "start", tensors_of(folder / "trained")


def trainer(directory: Path, dtype: torch.dtype = torch.bfloat16) -> MegatronStub:
    # which bfloat16 rounds away
    family, more = (family_of(directory), 1 + 2**-11 * (dtype == torch.float32))
    tensors = {name: tensor.to(dtype) * more for name, tensor in tensors_of(directory).items()}
    return MegatronStub(family, family.model_spec(directory), tensors)


def connected(server: Server, served: Path, model: MegatronStub, **flags: Any) -> WeightSync:
    config = make_config(hf_checkpoint=str(served), check_weight_update_equal=True, **flags)
    sync = WeightSync(config, [model], read_hf_config(served))
    sync.connect([server.url])
    return sync


def held(server: Server) -> dict[str, str]:
    request = urllib.request.Request(
        f"{server.url}/weights_checker",
        b'{"action": "fingerprint"}',
        {"Content-Type": "application/json"},
    )
    return json.loads(urllib.request.urlopen(request, timeout=60).read())["fingerprints"]


@pytest.mark.parametrize(
    ("dtype", "way"),
    [
        (torch.bfloat16, "shared memory"),
        (torch.bfloat16, "gloo broadcast"),
        (torch.float32, "disk"),
        pytest.param(torch.bfloat16, "disk", marks=pytest.mark.full),
        pytest.param(torch.float32, "shared memory", marks=pytest.mark.full),
        pytest.param(torch.float32, "gloo broadcast", marks=pytest.mark.full),
    ],
)
def test_a_push_is_the_offline_conversion(
    engine: tuple[Server, Path, dict[str, torch.Tensor]],
    plain: dict[str, Path],
    way: str,
    dtype: torch.dtype,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    server, served, offline = engine
    flags: dict[str, Any] = {"update_weight_buffer_size": 5000}
    if way == "disk":
        flags |= {
            "update_weight_transport": "disk",
            "update_weight_disk_dir": str(tmp_path / "pushes"),
        }
    if way == "gloo broadcast":
        monkeypatch.setattr(route, "is_local", lambda url: False)
    sync = connected(server, served, trainer(plain["trained"], dtype), **flags)
    receipt = sync.push()
    sync.close()
    assert receipt.transport == way and receipt.full and receipt.num_tensors == len(offline)
    assert set(receipt.checked) == set(offline) and receipt.zeros == ()
    assert receipt.nbytes == sum(
        tensor.numel() * tensor.element_size() for tensor in offline.values()
    )
    assert held(server) == {name: fingerprint(tensor) for name, tensor in offline.items()}
    if way == "disk":
        [pushed] = (tmp_path / "pushes").iterdir()
        assert read_hf_config(pushed) == read_hf_config(served)


def test_matrices_of_zeros_are_named(
    engine: tuple[Server, Path, dict[str, torch.Tensor]],
    plain: dict[str, Path],
    caplog: pytest.LogCaptureFixture,
) -> None:
    server, served, _ = engine
    model = trainer(plain["trained"])
    lost = ("decoder.layers.0.mlp.router.weight", "decoder.layers.1.mlp.experts.linear_fc2.weight1")
    with torch.no_grad():
        for name in lost:
            model.get_parameter(name).zero_()
    sync = connected(server, served, model)
    receipt = sync.push()
    sync.close()
    assert receipt.zeros == (
        "model.layers.0.mlp.gate.weight",
        "model.layers.1.mlp.experts.1.down_proj.weight",
    )
    assert "matrices of zeros alone: model.layers.0.mlp.gate.weight" in caplog.text


def test_a_scale_that_was_not_sent_is_named_and_the_next_push_mends_it(
    engine: tuple[Server, Path, dict[str, torch.Tensor]],
    plain: dict[str, Path],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    server, served, offline = engine
    sync = connected(server, served, trainer(plain["trained"]))
    tensors = sync._source.tensors  # type: ignore[union-attr]

    def without_one() -> Iterator[tuple[str, torch.Tensor]]:
        return (
            pair
            for pair in tensors()
            if "layers.1.mlp.experts.2.up_proj.weight_scale" not in pair[0]
        )

    monkeypatch.setattr(sync._source, "tensors", without_one)
    with pytest.raises(
        WeightMismatch, match=r"layers.1.mlp.experts.2.up_proj.weight_scale\w* was not sent"
    ):
        sync.push()
    monkeypatch.undo()
    assert sync.push().version == 1
    sync.close()
    assert held(server) == {name: fingerprint(tensor) for name, tensor in offline.items()}


def test_an_ignore_list_that_does_not_fit_is_refused_before_a_push(
    engine: tuple[Server, Path, dict[str, torch.Tensor]], plain: dict[str, Path], tmp_path: Path
) -> None:
    server, served, _ = engine
    config = read_hf_config(served)
    told = config["quantization_config"]
    told["ignore" if "ignore" in told else "modules_to_not_convert"] = [
        "model.layers.0.self_attn.q_proj",
        "lm_head",
    ]
    sync = WeightSync(make_config(hf_checkpoint=str(served)), [trainer(plain["trained"])], config)
    with pytest.raises(UserError, match=r"qkv_proj(.|\n)*only a part of it is ignored"):
        sync.connect([server.url])
    sync.close()


def test_sglang_is_refused(
    engine: tuple[Server, Path, dict[str, torch.Tensor]],
    plain: dict[str, Path],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    server, served, _ = engine
    monkeypatch.setattr(route, "common_abilities", lambda abilities: SGLANG)
    sync = WeightSync(
        make_config(hf_checkpoint=str(served)), [trainer(plain["trained"])], read_hf_config(served)
    )
    with pytest.raises(
        UserError, match=r"not tried(.|\n)*other versions(.|\n)*--rollout-engine embedded"
    ):
        sync.connect([server.url])
    sync.close()


@pytest.mark.parametrize("kind", KINDS)
def test_experts_in_runs_bring_what_single_ones_do(kind: str, plain: dict[str, Path]) -> None:
    model, config = trainer(plain["trained"]), read_hf_config(plain["trained"])
    with torch.no_grad():
        model.get_parameter("decoder.layers.1.mlp.experts.linear_fc2.weight1").zero_()
    single = QuantisedSource(ModelSource([model], config), KINDS[kind], torch.bfloat16)
    tensors = {name: tensor.clone() for name, tensor in single.tensors()}
    together = QuantisedSource(InRuns(ModelSource([model], config)), KINDS[kind], torch.bfloat16)
    sent = {name: tensor.clone() for name, tensor in together.tensors()}
    runs = {name: run for name in sent if (run := ExpertRun.parse(name)) is not None}
    assert len(runs) > 4 and sorted(together.names()) == sorted(sent)
    apart = {name: tensor for name, tensor in sent.items() if name not in runs}
    apart |= {one: part for name, run in runs.items() for one, part in run.split(sent[name])}
    assert apart.keys() == tensors.keys() and all(
        same_bits(apart[name], part) for name, part in tensors.items()
    )
    assert single.zeros == ["model.layers.1.mlp.experts.1.down_proj.weight"]
    assert [told for name in together.zeros if (told := ExpertRun.parse(name))] == [
        ExpertRun("model.layers.1.mlp.experts", 0, 3, "down")
    ]
    assert together.nbytes() >= sum(
        tensor.numel() * tensor.element_size() for tensor in sent.values()
    )


class InRuns:
    """A source whose experts come as one run for each projection of a layer."""

    def __init__(self, exporter: Any) -> None:
        self._exporter = exporter
        self.parameters = exporter.parameters
        self.nbytes = exporter.nbytes
        self.zeros: list[str] = []

    def tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        return in_runs({name: tensor.clone() for name, tensor in self._exporter.tensors()})

    def names(self) -> list[str]:
        return [name for name, _ in self.tensors()]


def test_names_are_known_before_anything_is_converted(plain: dict[str, Path]) -> None:
    exporter = ModelSource([trainer(plain["trained"])], read_hf_config(plain["trained"]))
    export = QuantisedSource(exporter, INT4, torch.bfloat16)
    sent = dict(export.tensors())
    assert sorted(export.names()) == sorted(sent) == sorted(export.parameters.served)
    assert exporter.parameters.served.keys() == exporter.parameters.trained.keys()
    assert export.nbytes() >= sum(
        tensor.numel() * tensor.element_size() for tensor in sent.values()
    )
    follower = QuantisedSource(exporter, INT4, torch.bfloat16, converts=False)
    assert [name for name, _ in follower.tensors()] == exporter.names()
