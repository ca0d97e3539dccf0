"""SGLang's command line and groups of servers: what goes through, what is set here, what is refused
and how."""

from __future__ import annotations

import dataclasses
import importlib
import json
import os
import socket
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st

from slime.cluster.engine_fit import EngineInfo
from slime.cluster.placement import GpuSlot, GpuSlots, engine_parts
from slime.cluster.server_process import ServerDied
from slime.config import make_config
from slime.config.engine_flags import sglang_args_of, stored_sglang_args
from slime.config.flags import unknown_name
from slime.engines.api import WEIGHT_LOADER, WEIGHT_PROBE
from slime.engines.kinds import engine_of
from slime.engines.launch import ONE_GPU, EnginePlace, ServedModel
from slime.engines.router import disaggregated_router_command
from slime.engines.sglang import command, versions
from slime.engines.sglang.command import sglang_command, sglang_footprint, sglang_options
from slime.errors import UserError
from slime.placement import PlacementPlan
from slime.rollout.plugin_api import get_model_url
from slime.run import preflight
from slime.run.preflight import check_teachers
from tests.support.embedded_models import save_tiny_model
from tests.support.hf_configs import config_of as hf_config_of
from tests.support.sglang_servers import process_of, run_config

pytestmark = pytest.mark.usefixtures("sglang_stand_in")


def parse_args(argv: list[str]) -> Any:
    """With the stand-in's parser: SGLang's own table of flags."""
    return importlib.import_module("sglang.srt.server_args").prepare_server_args(argv)


def served_models(config: Any) -> list[ServedModel]:
    return engine_of(config).served_models(config)


def parsed(place: EnginePlace = ONE_GPU, **flags: Any) -> Any:
    return parse_args(
        sglang_command(run_config(**flags), "/models/m", "10.0.0.1", 31000, place).argv[3:]
    )


@pytest.mark.parametrize(
    ("flags", "nbytes"),
    [
        ({}, 2),
        ({"fp32": True}, 4),
        ({"sglang_dtype": "float"}, 4),
        ({"fp32": True, "sglang_dtype": "half"}, 2),
    ],
)
def test_the_memory_plan_counts_weights_as_the_server_is_told_to_hold_them(
    flags: dict[str, Any], nbytes: int
) -> None:
    assert sglang_footprint(run_config(**flags)).element == nbytes


def test_what_is_set_here() -> None:
    place = EnginePlace(number=3, gpus=("4", "5"), num_gpus=2, nccl_port=20001)
    args = parsed(place, rollout_num_gpus=8, rollout_num_gpus_per_engine=2, rollout_seed=7)
    assert (args.model_path, args.host, args.port, args.nccl_port) == (
        "/models/m",
        "10.0.0.1",
        31000,
        20001,
    )
    assert (args.tp_size, args.random_seed, args.dtype, args.weight_version) == (
        2,
        10,
        "bfloat16",
        "0",
    )
    assert (
        args.skip_server_warmup
        and not args.trust_remote_code
        and args.custom_weight_loader == [WEIGHT_PROBE, WEIGHT_LOADER]
    )
    assert not args.enable_memory_saver and not args.enable_deterministic_inference
    spec = sglang_command(run_config(), "m", "h", 1, place)
    assert spec.env["CUDA_VISIBLE_DEVICES"] == "4,5" and spec.health_path == "/health_generate"
    assert spec.startup_timeout >= 600 and spec.health_timeout >= 10


def test_what_follows_from_the_run() -> None:
    args = parsed(
        colocate=True, deterministic_rollout=True, fp32=True, distributed_timeout_minutes=3
    )
    assert (
        args.enable_memory_saver and args.enable_deterministic_inference and args.dtype == "float32"
    )
    assert args.dist_timeout == 180 and not args.enable_weights_cpu_backup
    assert parsed(colocate=True, update_weights_interval=2).enable_weights_cpu_backup
    several = EnginePlace(num_gpus=16, num_nodes=2, node_rank=1, dist_init_addr="10.0.0.1:25000")
    args = parsed(several, rollout_num_gpus_per_engine=16, rollout_num_gpus=16)
    assert (args.nnodes, args.node_rank, args.dist_init_addr, args.tp_size) == (
        2,
        1,
        "10.0.0.1:25000",
        16,
    )
    assert sglang_command(run_config(), "m", "h", 1, several).health_path == "/health"


def test_the_users_options_go_through_by_name_and_type_and_ours_win() -> None:
    args = parsed(
        sglang_mem_fraction_static=0.7,
        sglang_disable_cuda_graph=True,
        sglang_cuda_graph_bs=(1, 2, 4),
        sglang_dtype="float16",
        sglang_custom_weight_loader=("a.b",),
    )
    assert (
        args.mem_fraction_static == 0.7
        and args.disable_cuda_graph
        and args.cuda_graph_bs == [1, 2, 4]
    )
    assert args.dtype == "float16" and args.host == "10.0.0.1"
    assert args.custom_weight_loader == ["a.b", WEIGHT_PROBE, WEIGHT_LOADER]


_PLAIN = [
    a
    for a in sglang_args_of("0.5.16")[1]
    if a.kind in ("int", "float") and not (a.choices or a.many)
]


@settings(max_examples=30)
@given(st.sampled_from(_PLAIN), st.integers(1, 64))
def test_any_override_of_a_group_reaches_the_server(argument: Any, value: int) -> None:
    if argument.name in ("tp_size", "port", "random_seed", "pp_size"):
        return
    args = parsed(EnginePlace(overrides={argument.name: value}))
    assert getattr(args, argument.name) == value


ON_DISK = {"update_weight_transport": "disk", "update_weight_disk_dir": "weights"}


@pytest.mark.parametrize(
    ("flags", "expected"),
    [
        ({"sglang_speculative_algorithm": "DFLASH"}, "DFLASH was not tried"),
        ({"sglang_pp_size": 2, "rollout_num_gpus_per_engine": 2}, "--sglang-pp-size 2"),
        ({"sglang_dp_size": 2}, r"--sglang-dp-size 2 cannot take .* without DP attention"),
        ({"sglang_disaggregation_mode": "prefill"}, "--sglang-disaggregation-mode prefill"),
    ],
)
def test_what_cannot_work_is_refused_by_name(flags: dict[str, Any], expected: str) -> None:
    with pytest.raises(UserError, match=expected):
        sglang_command(run_config(**flags), "m", "h", 1)


def test_versions_that_ran_on_no_gpu_are_told_once(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("slime.log._said", set())
    for version in ("0.5.16", "0.5.16.post1", "0.5.23", "0.5.23"):
        monkeypatch.setattr(versions, "installed_version", lambda version=version: version)
        versions.check_installed()
    assert [("0.5.23 has not run" in line) for line in caplog.messages] == [True]


@pytest.mark.parametrize(("version", "is_refused"), [("0.5.20", False), ("0.5.21", True)])
def test_a_router_that_compares_loads_needs_their_route(
    monkeypatch: pytest.MonkeyPatch, version: str, is_refused: bool
) -> None:
    monkeypatch.setattr(command, "installed_version", lambda: version)
    config = run_config(router_policy="power_of_two")
    refused = pytest.raises(UserError, match="/get_load") if is_refused else nullcontext()
    with refused:
        command.check_sglang(config)


@pytest.mark.parametrize(("version", "is_refused"), [("0.5.15", True), ("0.5.16", False)])
def test_sampling_masks_need_a_version_that_tells_them(
    monkeypatch: pytest.MonkeyPatch, version: str, is_refused: bool
) -> None:
    monkeypatch.setattr(command, "installed_version", lambda: version)
    config = run_config(rollout_top_p=0.9)
    assert config.algorithm.use_sampling_mask
    refused = pytest.raises(UserError, match="use-sampling-mask") if is_refused else nullcontext()
    with refused:
        command.check_sglang(config)


@pytest.mark.parametrize(
    ("version", "said"),
    [
        (None, "pip install 'slime-rl"),
        ("0.5.11", "0.5.12 is the first"),
        ("0.5.24", "0.5.12 to 0.5.23 are"),
    ],
)
def test_versions(monkeypatch: pytest.MonkeyPatch, version: str | None, said: str) -> None:
    monkeypatch.setattr(command, "installed_version", lambda: version)
    with pytest.raises(UserError) as caught:
        sglang_command(run_config(), "m", "h", 1)
    assert said in str(caught.value)
    assert versions.check_version("0.5.12.post1") == "0.5.12.post1"


def test_auto_is_sglang_where_a_gpu_and_sglang_are(monkeypatch: pytest.MonkeyPatch) -> None:
    flags = {"rollout_batch_size": 4, "num_rollout": 1, "hf_checkpoint": "m"}
    assert make_config(**flags).engine.rollout_engine == "embedded"
    monkeypatch.setenv("SLIME_NUM_GPUS", "1")
    config = make_config(**flags)
    assert (
        config.engine.rollout_engine == "sglang"
        and "SGLang are there" in config.origins["rollout_engine"]
    )
    assert make_config(**flags, rollout_engine="auto").engine.rollout_engine == "sglang"
    monkeypatch.setattr("slime.config.resolve.importlib.util.find_spec", lambda name: None)
    assert make_config(**flags).engine.rollout_engine == "embedded"


# -- server groups ---------------------------------------------------------------------------------


def groups_file(folder: Path, *groups: dict[str, Any], **model: Any) -> str:
    path = folder / "groups.yaml"
    path.write_text(
        yaml.safe_dump({"sglang": [{"name": "policy", **model, "server_groups": list(groups)}]})
    )
    return str(path)


def test_groups_become_engines(tmp_path: Path) -> None:
    path = groups_file(
        tmp_path,
        {"worker_type": "regular", "num_gpus": 2, "overrides": {"mem-fraction-static": 0.6}},
        {"worker_type": "placeholder", "num_gpus": 1},
        {"worker_type": "regular", "num_gpus": 4, "num_gpus_per_engine": 2},
    )
    config = run_config(sglang_config=path, rollout_num_gpus=7)
    [model] = served_models(config)
    assert model.is_policy and [group.num_engines for group in model.groups] == [2, 0, 2]
    parts = engine_parts(config, PlacementPlan.of(config), slots_on(8))
    assert [part.slots for part in parts] == [(1,), (2,), (4, 5), (6, 7)]
    assert [part.name for part in parts] == [f"engine-{i}" for i in range(4)]
    assert parts[0].place.overrides == {"mem_fraction_static": 0.6} and parts[2].place.gpus == (
        "4",
        "5",
    )


def slots_on(*gpus_per_node: int) -> GpuSlots:
    places = [
        GpuSlot(sum(gpus_per_node[:node]) + gpu, f"10.0.0.{node}", f"node{node}", str(gpu))
        for node, count in enumerate(gpus_per_node)
        for gpu in range(count)
    ]
    return GpuSlots(None, places, on_gpu=True)  # type: ignore[arg-type]


def test_no_engine_reads_model_code_that_another_one_is_copying(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """transformers copies a model's own Python files to one place of all processes that share a
    home."""

    def place(number: int) -> str:
        environment = sglang_command(
            make_config(), "model", "10.0.0.1", 1, EnginePlace(number=number)
        ).env
        return environment["HF_MODULES_CACHE"]

    assert len({place(0), place(1), os.environ.get("HF_MODULES_CACHE")}) == 3
    monkeypatch.setenv("HF_MODULES_CACHE", "/somewhere")
    assert place(0).startswith("/somewhere/") and socket.gethostname() in place(0)


def test_an_engine_over_two_nodes_has_a_part_on_each() -> None:
    config = run_config(
        rollout_num_gpus=16,
        rollout_num_gpus_per_engine=16,
        num_gpus_per_node=8,
        actor_num_gpus_per_node=8,
        rollout_batch_size=8,
    )
    plan = PlacementPlan.of(config)
    parts = engine_parts(config, plan, slots_on(8, 8, 8))
    assert [(p.name, p.slot, p.place.node_rank, p.place.num_nodes) for p in parts] == [
        ("engine-0", 8, 0, 2),
        ("engine-0-node-1", 16, 1, 2),
    ]
    with pytest.raises(UserError, match=r"4 on 10\.0\.0\.0, 8 on 10\.0\.0\.1"):
        engine_parts(config, plan, slots_on(12, 8, 4))


@pytest.mark.parametrize(
    ("groups", "model", "expected"),
    [
        ([{"num_gpus": 3}], {}, "have 3 GPUs, --rollout-num-gpus is 2"),
        ([{"num_gpus": 2, "kind": "x"}], {}, "unknown key 'kind'"),
        ([{"num_gpus": 2, "overrides": {"port": 1}}], {}, "cannot override port"),
        ([{"num_gpus": 2, "overrides": {"no_such": 1}}], {}, "SGLang 0.5.16 does not have"),
        (
            [{"num_gpus": 2, "overrides": {"speculative-algorithm": "EAGLE3"}}],
            {},
            "group 0 .* EAGLE3, which needs a draft model",
        ),
        (
            [{"num_gpus": 2, "overrides": {"pp_size": 2}}],
            {},
            "has pp_size 2, which cannot take weight pushes",
        ),
        (
            [{"num_gpus": 2, "overrides": {"dp_size": 2}}],
            {},
            "has dp_size 2, which cannot .* without DP attention",
        ),
        ([{"num_gpus": 2, "worker_type": "encoder"}], {}, "worker_type encoder"),
        ([{"num_gpus": 2, "worker_type": "prefill"}], {}, "no decode group"),
        ([{"num_gpus": 2, "worker_type": "placeholder"}], {}, "has no servers"),
        ([{"num_gpus": 2}], {"model_path": "other"}, "no model that gets the policy's weights"),
        ([{"num_gpus": 2}], {"update_weights": False}, "no model that gets the policy's weights"),
        (
            [{"num_gpus": 2}],
            {"model_path": "other", "update_weights": True},
            "is not --hf-checkpoint",
        ),
        ([{"num_gpus": 2}], {"name": "a/b"}, "with the name 'a/b'"),
    ],
)
def test_wrong_groups_are_refused_by_name(
    tmp_path: Path, groups: list, model: dict, expected: str
) -> None:
    with pytest.raises(UserError, match=expected):
        served_models(
            run_config(sglang_config=groups_file(tmp_path, *groups, **model), rollout_num_gpus=2)
        )


def models_file(folder: Path, *models: dict[str, Any]) -> str:
    path = folder / "models.yaml"
    path.write_text(
        yaml.safe_dump(
            {"sglang": [{"server_groups": [{"num_gpus": 1}], **model} for model in models]}
        )
    )
    return str(path)


def test_a_policy_alone_is_no_teacher(tmp_path: Path) -> None:
    path = models_file(tmp_path, {"name": "actor"})
    flags = {"sglang_config": path, "rollout_num_gpus": 1, "use_opd": True}
    with pytest.raises(UserError, match="--use-opd has no teacher"):
        check_teachers(run_config(**flags))
    check_teachers(run_config(**flags, custom_rm_path="a.b"))  # it may score


def test_a_key_that_chooses_the_only_model_is_warned_of(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    kept = {"model_path": "m", "update_weights": False}
    models = [{"name": "actor"}, {"name": "judge"} | kept, {"name": "other"} | kept]
    flags = {"rollout_num_gpus": 3, "use_opd": True, "opd_teacher_key": "by"}
    check_teachers(run_config(sglang_config=models_file(tmp_path, *models), **flags))
    assert "--opd-teacher-key" not in caplog.text
    flags["rollout_num_gpus"] = 2
    check_teachers(run_config(sglang_config=models_file(tmp_path, *models[:2]), **flags))
    assert "--opd-teacher-key by has no effect: there is one teacher, judge" in caplog.text


def test_a_teacher_whose_vocabulary_cannot_be_compared_is_warned_of(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Its engine is on another host, whose directory is not here."""
    info = EngineInfo({"model_path": "/elsewhere/big"}, {"version": "0.5.16"})
    monkeypatch.setattr(preflight, "fetch_engine_info", lambda url: info)
    check_teachers(run_config(use_opd=True, opd_teacher_urls=["big=http://other:30000"]))
    [told] = [record.getMessage() for record in caplog.records]
    assert "teacher big: its vocabulary could not be compared" in told
    assert "serves /elsewhere/big, which is not on this host" in told


def test_every_model_has_engines_of_its_own(tmp_path: Path) -> None:
    judge = {
        "name": "judge",
        "model_path": "models/judge",
        "num_gpus_per_engine": 2,
        "server_groups": [{"num_gpus": 2}],
    }
    first = {"name": "first", "update_weights": False}
    config = run_config(
        sglang_config=models_file(tmp_path, judge, {"name": "actor"}, first),
        rollout_num_gpus=4,
        hf_checkpoint="m",
        colocate=True,
        offload_rollout=True,
    )
    assert [(model.name, model.path, model.is_policy) for model in served_models(config)] == [
        ("judge", "models/judge", False), ("actor", "m", True), ("first", "m", False),
    ]  # fmt: skip
    parts = engine_parts(config, PlacementPlan.of(config), slots_on(8))
    assert [(part.model.name, part.slots, part.place.model_path) for part in parts] == [
        ("judge", (0, 1), "models/judge"), ("actor", (2,), None), ("first", (3,), "m"),
    ]  # fmt: skip
    options = [sglang_options(config, "m", "h", 1, part.place) for part in parts]
    assert [one["model_path"] for one in options] == ["models/judge", "m", "m"]
    assert [one.get("enable_weights_cpu_backup") for one in options] == [True, None, True], (
        "no push brings them back"
    )
    assert [one["dtype"] for one in options] == ["auto", "bfloat16", "auto"]


@pytest.mark.parametrize(
    ("models", "expected"),
    [
        ([{"name": "a"}, {"name": "b"}], "2 models of --hf-checkpoint: a, b"),
        ([{"name": "a"}, {"name": "a", "model_path": "other"}], "2 model.s. with the name 'a'"),
        (
            [{"name": "a"}, {"name": "b", "model_path": "o", "server_groups": []}],
            "model b must have a list",
        ),
    ],
)
def test_models_that_cannot_be_told_apart_are_refused(
    tmp_path: Path, models: list, expected: str
) -> None:
    with pytest.raises(UserError, match=expected):
        served_models(run_config(sglang_config=models_file(tmp_path, *models), rollout_num_gpus=2))


def test_embedded_engines_serve_several_models_too(tmp_path: Path) -> None:
    judge = {"name": "judge", "model_path": "models/judge"}
    path = models_file(tmp_path, {"name": "actor"}, judge)
    flags = {"fp32": True, "rollout_max_context_len": 99}
    config = run_config(rollout_engine="embedded", sglang_config=path, rollout_num_gpus=2, **flags)
    parts = engine_parts(config, PlacementPlan.of(config), slots_on(3))
    argvs = [engine_of(config).command(config, "m", "h", 1, part.place).argv for part in parts]
    model, dtype = (
        [argv[argv.index(option) + 1] for argv in argvs] for option in ("--model-path", "--dtype")
    )
    assert (model, dtype) == (["m", "models/judge"], ["float32", "auto"])
    assert ["--max-context-len" in argv for argv in argvs] == [True, False], (
        "the limit is the policy's"
    )


@pytest.mark.parametrize(
    ("group", "expected"),
    [
        ({"num_gpus": 2, "worker_type": "prefill"}, "worker_type prefill"),
        ({"num_gpus": 2, "overrides": {"max_slots": 4}}, "group 0 of policy overrides max_slots"),
    ],
)
def test_what_embedded_engines_cannot_do_is_refused(
    tmp_path: Path, group: dict, expected: str
) -> None:
    path = groups_file(tmp_path, group)
    with pytest.raises(UserError, match=expected):
        served_models(run_config(rollout_engine="embedded", sglang_config=path, rollout_num_gpus=2))


def test_functions_find_a_model_by_its_name() -> None:
    args = SimpleNamespace(
        sglang_model_routers={"policy": ("10.0.0.1", 3000), "judge": ("10.0.0.2", 4000)}
    )
    assert get_model_url(args, "judge", "/v1/score") == "http://10.0.0.2:4000/v1/score"
    with pytest.raises(UserError, match="no model 'jugde'"):
        get_model_url(args, "jugde")


def test_pairs_of_servers_are_named_to_the_router() -> None:
    from sglang_router.launch_router import parse_router_args

    spec = disaggregated_router_command(
        run_config(), "h", 1, [("http://a:1", 9), ("http://b:1", 8)], ["http://c:1"]
    )
    args = parse_router_args(spec.argv[3:])
    assert args.pd_disaggregation and args.prefill_urls == [("http://a:1", 9), ("http://b:1", 8)]
    assert args.decode_urls == ["http://c:1"]


# -- what goes wrong at the start ------------------------------------------------------------------


@pytest.mark.parametrize(
    ("flags", "env", "said"),
    [
        (
            {},
            {"FAKE_SGLANG_CRASH": "torch.OutOfMemoryError: CUDA out of memory"},
            "CUDA out of memory",
        ),
        (
            {"sglang_chunked_prefill_size": 3},
            {"FAKE_SGLANG_CRASH": "[Errno 98] address already in use"},
            "Errno 98",
        ),
    ],
)
def test_a_server_that_does_not_come_up_shows_its_last_words(
    tmp_path: Path, flags: dict[str, Any], env: dict[str, str], said: str
) -> None:
    model = save_tiny_model(tmp_path / "tiny", "qwen3")
    server = process_of(run_config(**flags), model, tmp_path, ONE_GPU, **env)
    server.process.start()
    with pytest.raises(ServerDied, match="ended with exit status 1 before it was ready") as caught:
        server.process.wait_ready()
    assert said in caught.value.log_tail and caught.value.is_port_clash is ("98" in said)
    server.process.stop()


def test_a_flag_of_another_version_names_that_version(monkeypatch: pytest.MonkeyPatch) -> None:
    version, arguments = stored_sglang_args()
    newer = dataclasses.replace(arguments[0], name="no_such")
    monkeypatch.setattr("slime.config.engine_flags.sglang_args", lambda: ("0.5.12", arguments))
    monkeypatch.setattr(
        "slime.config.engine_flags.stored_sglang_args", lambda: (version, [*arguments, newer])
    )
    error = unknown_name("sglang-no-such", "")
    assert "SGLang 0.5.12 does not have" in str(error) and f"SGLang {version} has it" in str(error)
    assert "did you mean --sglang-dtype" in str(unknown_name("sglang-dtipe", ""))


# -- adapters --------------------------------------------------------------------------------------


HEAD = {"lora_target_modules": ("lm_head",)}


def lora(tmp_path: Path, model: str = "qwen3", **flags: Any) -> dict[str, Any]:
    (tmp_path / "config.json").write_text(json.dumps(hf_config_of(model)))
    return {"hf_checkpoint": str(tmp_path), "lora_rank": 8, **flags}


def test_engines_have_room_for_the_base_and_two_versions_of_the_adapter(tmp_path: Path) -> None:
    flags = lora(tmp_path, lora_target_modules=("q_proj", "down_proj"))
    args = parsed(**flags)
    assert args.enable_lora and args.max_lora_rank == 8 and args.max_loras_per_batch == 3
    assert args.lora_target_modules == ["down_proj", "k_proj", "q_proj", "v_proj"]
    assert (args.lora_backend, args.experts_shared_outer_loras) == ("triton", None)
    more = parsed(**flags, sglang_max_lora_rank=16, sglang_lora_target_modules=("o_proj",))
    assert more.max_lora_rank == 16 and "o_proj" in more.lora_target_modules
    assert not parsed().enable_lora
    of_judge = EnginePlace(model_path="/models/judge")
    assert not parsed(of_judge, **flags).enable_lora
    # gate and up of an expert have the A's of both there, but not of a layer without experts
    assert parsed(**lora(tmp_path, "gpt_oss")).max_lora_rank == 16
    alone = lora(tmp_path, "gpt_oss", lora_target_modules=("q_proj", "o_proj"))
    assert parsed(**alone).max_lora_rank == 8


def test_adapters_of_experts_take_the_kernels_that_compute_them(tmp_path: Path) -> None:
    args = parsed(**lora(tmp_path, "qwen3_moe", lora_experts="shared-outer"))
    assert args.experts_shared_outer_loras
    assert (args.lora_backend, args.moe_runner_backend) == ("triton", "triton")
    with pytest.raises(UserError, match="flashinfer_cutlass does not go with adapters of experts"):
        parsed(**lora(tmp_path, "qwen3_moe"), sglang_moe_runner_backend="flashinfer_cutlass")


def test_the_base_is_kept_while_engines_sleep_as_no_push_brings_it(tmp_path: Path) -> None:
    assert parsed(**lora(tmp_path), colocate=True).enable_weights_cpu_backup
    kept = parsed(**lora(tmp_path), colocate=True, offload_rollout_weights=False)
    assert kept.enable_memory_saver and not kept.enable_weights_cpu_backup
    assert not parsed(colocate=True).enable_weights_cpu_backup


@pytest.mark.parametrize(
    ("flags", "expected"),
    [
        ({"sglang_dp_size": 2, "sglang_enable_dp_attention": True}, "one replica only"),
        ({"sglang_max_loaded_loras": 3}, "--sglang-max-loaded-loras 3 does not go"),
        ({"sglang_max_loras_per_batch": 1}, "counts the base as one"),
        ({**HEAD, "sglang_lora_backend": "torch_native"}, "pass csgmv or triton"),
        ({**HEAD, "sglang_enable_fp32_lm_head": True}, "ignores it"),
        (
            {
                "lora_target_modules": ("embed_tokens",),
                "sglang_enable_attn_tp_input_scattered": True,
            },
            "adapters of embed_tokens for inputs that are whole",
        ),
        ({"model": "qwen3_next"}, "adapters of gated delta nets are not served by SGLang"),
        ({"model": "mixtral"}, "--lora-exclude-modules w1 w2 w3, or --rollout-engine embedded"),
        ({"model": "minimax_m2", "lora_experts": "shared-outer"}, "experts with Mixtral's names"),
    ],
)
def test_what_adapters_cannot_have_is_refused(
    tmp_path: Path, flags: dict[str, Any], expected: str
) -> None:
    with pytest.raises(UserError, match=expected):
        sglang_command(run_config(**lora(tmp_path, **flags)), "m", "h", 1)


@pytest.mark.parametrize(
    ("flags", "warns"),
    [
        ({"sglang_cuda_graph_max_bs": 64}, True),
        ({"sglang_cuda_graph_bs": [8, 127]}, True),
        ({"sglang_cuda_graph_max_bs": 128}, False),
        ({"sglang_cuda_graph_max_bs": 64, "rollout_num_gpus": 2}, False),
        ({"sglang_cuda_graph_max_bs": 64, "sglang_server_concurrency": 64}, False),
        ({"sglang_cuda_graph_max_bs": 64, "sglang_disable_cuda_graph": True}, False),
        ({}, False),
    ],
)
def test_batches_without_cuda_graphs_are_told(
    flags: dict[str, Any], warns: bool, caplog: pytest.LogCaptureFixture
) -> None:
    config = run_config(rollout_batch_size=16, n_samples_per_prompt=8, hf_checkpoint="m", **flags)
    preflight.warn_of_small_graphs(config)
    assert [("to 128 requests at once" in line) for line in caplog.messages] == [True] * warns
