"""An engine is its record: a third one is placed, started, registered and planned for without a
line elsewhere."""

from __future__ import annotations

import dataclasses
import json
import sys
from pathlib import Path
from typing import Any, get_args, get_type_hints

import pytest
import torch
from sglang_router.launch_router import parse_router_args

from slime.cluster.placement import GpuSlot, GpuSlots, engine_parts
from slime.cluster.rank_group import trainer_environment
from slime.cluster.server_process import ServerProcess
from slime.config import Config, make_config
from slime.config.engine_flags import ENGINE_OPTIONS, EngineFlags
from slime.config.groups_rollout import EngineConfig
from slime.diagnosis.remedies import REMEDIES
from slime.engines.health import HealthChecks
from slime.engines.kinds import EngineKind, engine_kind, engine_of
from slime.engines.launch import EngineFootprint, EnginePlace, LaunchSpec
from slime.engines.router import router_command
from slime.engines.wire.abilities import SGLANG, Abilities
from slime.errors import UserError
from slime.memory.engine import EngineSettings
from slime.models import family_of
from slime.placement import PlacementPlan
from slime.processes.host import reserve_port
from slime.run.preflight import check_engine, check_engine_flags
from slime.weights.route import choose_route, common_abilities, flag_dtype, takes_runs

PUBLISHED = Path(__file__).parents[1] / "support" / "model_configs.json"
_SERVER = """
import http.server, sys
class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200 if self.path == "/ready" else 404)
        self.end_headers()
http.server.HTTPServer((sys.argv[1], int(sys.argv[2])), Handler).serve_forever()
"""


def third_command(
    config: Config, model_path: str, host: str, port: int, place: EnginePlace
) -> LaunchSpec:
    argv = [sys.executable, "-c", _SERVER, host, str(port), model_path, str(place.number)]
    return LaunchSpec(argv, health_path="/ready", startup_timeout=60.0)


def third_footprint(config: Config) -> EngineFootprint:
    return EngineFootprint(
        tensor=config.cluster.rollout_num_gpus_per_engine,
        attention=config.cluster.rollout_num_gpus_per_engine,
        element=2,
        kv_element=2,
        automatic_fraction=lambda nbytes: 0.9,
        fraction_option="--third-fraction",
    )


def refuse_seven(config: Config) -> None:
    if config.rollout.rollout_seed == 7:
        raise UserError("--rollout-seed 7 is not for the third engine")


KIND = EngineKind(
    third_command,
    third_footprint,
    startup_seconds=60.0,
    weights_dtype=lambda config: "float32",
    if_killed=("a smaller --rollout-batch-size",),
    health_path="/ready",
    check_flags=refuse_seven,
    trainer_environment={"THIRD_NEEDS": "1"},
)


@pytest.fixture
def third(monkeypatch: pytest.MonkeyPatch) -> EngineKind:
    monkeypatch.setitem(ENGINE_OPTIONS, "third", EngineFlags(__name__))
    return KIND


def config_of(**flags: Any) -> Config:
    config = make_config(rollout_batch_size=4, num_rollout=1, hf_checkpoint="m", **flags)
    return dataclasses.replace(
        config, engine=dataclasses.replace(config.engine, rollout_engine="third")
    )


def test_a_third_engine_is_placed_and_its_flags_are_checked(third: EngineKind) -> None:
    config = config_of(rollout_num_gpus=4, rollout_num_gpus_per_engine=2)
    slots = GpuSlots(
        None, [GpuSlot(gpu, "10.0.0.1", "node", str(gpu)) for gpu in range(5)], on_gpu=True
    )  # type: ignore[arg-type]
    parts = engine_parts(config, PlacementPlan.of(config), slots)
    assert [(part.name, part.slots, part.place.gpus) for part in parts] == [
        ("engine-0", (1, 2), ("1", "2")),
        ("engine-1", (3, 4), ("3", "4")),
    ]
    check_engine(config)
    check_engine_flags(config)
    with pytest.raises(UserError, match="--rollout-seed 7 is not for the third engine"):
        check_engine_flags(config_of(rollout_seed=7))


def test_a_third_engine_is_started_and_asked_whether_it_lives(
    third: EngineKind, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config, port = config_of(), reserve_port("127.0.0.1")
    spec = engine_of(config).command(config, "m", "127.0.0.1", port.port, EnginePlace(number=1))
    process = ServerProcess(
        "engine-1", spec, f"http://127.0.0.1:{port.port}", tmp_path / "engine.log"
    )
    # none may catch traffic between our own processes
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:1")
    process.start()
    try:
        process.wait_ready()
        assert process.is_alive()
    finally:
        process.stop()
        port.release()
    assert HealthChecks.of(config).path == "/ready"
    assert trainer_environment(config, 1, on_gpu=True)["THIRD_NEEDS"] == "1"


def test_the_router_in_front_of_a_third_engine_is_the_router_of_every_engine(
    third: EngineKind,
) -> None:
    urls = ["http://10.0.0.1:31001", "http://10.0.0.1:31002"]
    config = config_of(router_policy="power_of_two")
    args = parse_router_args(router_command(config, "127.0.0.1", 30125, urls).argv[3:])
    assert (args.policy, args.worker_urls) == ("power_of_two", urls)


def test_the_memory_plan_is_made_of_what_the_record_says(third: EngineKind) -> None:
    model = json.loads(PUBLISHED.read_text())["Qwen/Qwen3-4B"]["config"]
    spec = family_of(model).model_spec(model)
    sizes = {"rollout_num_gpus_per_engine": 1}, {"rollout_num_gpus_per_engine": 2}
    one, two = (
        EngineSettings.of(config_of(rollout_num_gpus=2, **size), spec, 4096) for size in sizes
    )
    assert one.kv_per_token == 2 * two.kv_per_token == 2 * 8 * 128 * 36 * 2
    assert one.kv_cache(80e9) == pytest.approx(0.9 * 80e9 - one.weights)
    assert one.weights == pytest.approx(8.04e9, rel=0.01)


def test_what_a_third_engine_holds_and_needs_is_not_taken_for_another_ones(
    third: EngineKind,
) -> None:
    assert flag_dtype(config_of(), {"torch_dtype": "bfloat16"}) is torch.float32
    flags = {"rollout_engine": "third", "rollout_batch_size": 8, "use_fault_tolerance": True}
    assert REMEDIES["engine-died"](flags) == ["a smaller --rollout-batch-size (now 8)"]


def test_the_flag_takes_every_engine_that_has_a_record() -> None:
    assert {"auto", *ENGINE_OPTIONS} == set(
        get_args(get_type_hints(EngineConfig)["rollout_engine"])
    )


@pytest.mark.parametrize("name", ["embedded", "sglang"])
def test_the_record_is_that_of_the_flag(name: str) -> None:
    config = make_config(
        rollout_batch_size=4, num_rollout=1, hf_checkpoint="m", rollout_engine=name
    )
    assert engine_of(config) is engine_kind(name)
    [model] = engine_of(config).served_models(config)
    assert model.is_policy and [group.num_engines for group in model.groups] == [
        config.cluster.rollout_num_gpus
    ]


def test_a_third_engine_states_its_abilities() -> None:
    third = Abilities("third", ("broadcast",), "tensors", takes_expert_runs=True)
    told = json.loads(json.dumps({"version": "1", "abilities": third.to_json()}))
    assert Abilities.read(told) == third
    assert Abilities.read({"version": "0.5.16", "tp_size": 2}) == dataclasses.replace(
        SGLANG, num_ranks=2, sees_in_hybrids=False
    )
    shared = make_config(colocate=True)
    assert choose_route(shared, third.transports, local=True) == "broadcast"
    assert takes_runs("ipc", [third]) and not takes_runs("broadcast", [third])
    assert common_abilities({"a": third, "b": third}) == third
    with pytest.raises(UserError, match="engine a is third and engine b is SGLang"):
        common_abilities({"a": third, "b": SGLANG})
    with pytest.raises(UserError, match=r"cannot be pushed to engine a \(third\)"):
        common_abilities({"a": dataclasses.replace(third, can_pause=False)})


def test_newer_versions_of_sglang_load_weights_in_sessions() -> None:
    old, last, new = (
        Abilities.read({"version": version, "enable_lora": True})
        for version in ("0.5.16", "0.5.20", "0.5.21.post1")
    )
    assert [one.update_sessions for one in (old, last, new)] == [False, False, True]
    assert [one.adapters_by_rank for one in (old, last, new)] == [False, True, True]
    with pytest.raises(UserError, match=r"different ways: b only(.|\n)*engines of one version"):
        common_abilities({"a": last, "b": new})
    quantises = Abilities.read({"version": "0.5.21", "quantization": "fp8"})
    with pytest.raises(UserError, match=r"engine a, which quantises(.|\n)*not tried"):
        common_abilities({"a": quantises})
