"""Options of engines and router that act only beside another one: the table, and the warnings that
follow from it."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import pytest
import yaml

from slime.config import Config, make_config
from slime.config.data import read_table
from slime.config.engine_flags import (
    ROUTER_RESERVED,
    SGLANG_RESERVED,
    ForeignArg,
    router_flags,
    sglang_args_of,
    sglang_versions,
    with_prefix,
)
from slime.config.flag import FlagSpec
from slime.config.flags import all_flags
from slime.engines.kinds import engine_of
from slime.engines.model_groups import idle_options
from slime.run.preflight import check_engine_flags
from tests.support.embedded_models import save_tiny_model

TABLE = read_table("engine_needs.toml")


@pytest.fixture(autouse=True)
def cpu_host(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SLIME_NUM_GPUS", "0")


def specs_of_versions() -> dict[str, list[FlagSpec]]:
    """Every flag by dest, once for each supported release that has it."""
    found: dict[str, list[FlagSpec]] = {}
    tables = [with_prefix("sglang", sglang_args_of(v)[1], {}, v) for v in sglang_versions()]
    for flags in (*tables, router_flags(), all_flags()):
        for dest, spec in flags.items():
            found.setdefault(dest, []).append(spec)
    return found


def test_the_table_names_options_and_values_that_there_are() -> None:
    known = specs_of_versions()
    reserved = {"sglang": SGLANG_RESERVED, "router": ROUTER_RESERVED}
    for prefix, rows in TABLE.items():
        for row in rows:
            for option in row["options"]:
                assert f"{prefix}_{option}" in known and option not in reserved[prefix], option
            for dest, values in {**row.get("with", {}), **row.get("without", {})}.items():
                choices = {choice for spec in known[dest] for choice in spec.choices}
                assert not choices or set(values) <= choices, (dest, values)
                assert dest not in {f"{prefix}_{option}" for option in row["options"]}


def test_an_option_never_acts_or_needs_others_but_not_both() -> None:
    for prefix, rows in TABLE.items():
        never = [o for row in rows if not {"with", "without"} & set(row) for o in row["options"]]
        others = {o for row in rows if {"with", "without"} & set(row) for o in row["options"]}
        assert len(never) == len(set(never)) and not set(never) & others, prefix


def test_conditions_are_those_of_the_version() -> None:
    arguments = [ForeignArg("deepep_mode"), ForeignArg("moe_a2a_backend", choices=("none", "mori"))]
    flags = with_prefix("sglang", arguments, {}, "a version")
    (need,) = flags["sglang_deepep_mode"].meta.needs
    assert need.words() == "without --sglang-moe-a2a-backend mori"
    flags = with_prefix("sglang", [ForeignArg("deepep_mode")], {}, "another version")
    assert flags["sglang_deepep_mode"].meta.needs == ()


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        ({"sglang_speculative_num_steps": 3}, "without --sglang-speculative-algorithm: nothing is"),
        ({"sglang_hicache_ratio": 3.0, "sglang_hicache_size": 8, "sglang_enable_hierarchical_cache":
          True}, "with --sglang-hicache-size: a size in gigabytes replaces the ratio"),
        ({"sglang_max_lora_chunk_size": 32, "lora_rank": 8},
         "with --lora-rank and without --sglang-lora-backend csgmv: triton"),
        ({"sglang_enable_weights_cpu_backup": True}, "without --offload-rollout: engines keep"),
        ({"router_cache_threshold": 0.5, "router_policy": "manual"}, "with --router-policy manual"),
        ({"router_cb_failure_threshold": 3}, ": the router's circuit breaker is always off"),
    ],
)  # fmt: skip
def test_an_option_that_does_nothing_is_warned_of(flags: dict[str, Any], said: str) -> None:
    option = "--" + next(iter(flags)).replace("_", "-")
    warnings = make_config(rollout_engine="sglang", **flags).warnings
    assert len([w for w in warnings if w.startswith(f"{option} has no effect") and said in w]) == 1


@pytest.mark.parametrize(
    "flags",
    [
        {"sglang_speculative_num_draft_tokens": 3, "sglang_speculative_algorithm": "NGRAM"},
        {"sglang_max_loras_per_batch": 3, "lora_rank": 8, "lr": 1e-4},
        {"sglang_enable_weights_cpu_backup": True, "offload_rollout": True, "colocate": True},
        {"router_cache_threshold": 0.5},
        {"router_max_idle_secs": 7, "router_policy": "consistent_hashing"},
        {"sglang_hicache_ratio": 2.0, "sglang_eplb_algorithm": "auto"},  # the defaults
    ],
)
def test_an_option_that_acts_is_not_warned_of(flags: dict[str, Any]) -> None:
    assert make_config(rollout_engine="sglang", **flags).warnings == ()


@pytest.mark.parametrize(
    "without_sglang",
    [
        {"rollout_engine": "embedded"},
        {"rollout_engine": "sglang", "rollout_external_engine_addrs": ("host:7",)},
    ],
)
def test_options_of_engines_that_are_not_started_are_named_once(
    without_sglang: dict[str, Any],
) -> None:
    (warning,) = make_config(sglang_hicache_ratio=3.0, **without_sglang).warnings
    assert warning.endswith("left out: --sglang-hicache-ratio")


# -- server groups ---------------------------------------------------------------------------------


def config_of(tmp_path: Path, models: list[dict[str, Any]], **flags: Any) -> Config:
    file = tmp_path / "groups.yaml"
    file.write_text(yaml.safe_dump({"sglang": models}))
    gpus = sum(group["num_gpus"] for model in models for group in model["server_groups"])
    flags = {"hf_checkpoint": "m", "sglang_config": str(file), "rollout_num_gpus": gpus, **flags}
    return make_config(rollout_engine="sglang", **flags)


def warnings_of(tmp_path: Path, models: list[dict[str, Any]], **flags: Any) -> list[str]:
    config = config_of(tmp_path, models, **flags)
    assert not [w for w in config.warnings if "has no effect" in w]
    return [
        w.removeprefix(f"{config.engine.sglang_config}: ")
        for w in idle_options(config, engine_of(config).served_models(config))
    ]


def test_an_option_acts_if_it_acts_in_one_group(tmp_path: Path) -> None:
    groups = [{"num_gpus": 1}, {"num_gpus": 1, "overrides": {"enable_hierarchical_cache": True}}]
    flags = {"sglang_hicache_ratio": 3.0, "sglang_deepep_mode": "normal"}
    (warning,) = warnings_of(tmp_path, [{"server_groups": groups}], **flags)
    assert warning.startswith("--sglang-deepep-mode has no effect without --sglang-moe-a2a-backend")


def test_an_override_that_does_nothing_is_named_with_its_group(tmp_path: Path) -> None:
    groups = [
        {"num_gpus": 1, "overrides": {"hicache-ratio": 3.0, "log_requests_level": 2}},
        {"num_gpus": 1, "overrides": {"collect_tokens_histogram": True}},
        {"num_gpus": 1, "worker_type": "placeholder", "overrides": {"hicache_ratio": 3.0}},
    ]
    assert warnings_of(tmp_path, [{"server_groups": groups}]) == [
        "hicache_ratio of server group 0 of policy has no effect without "
        "--sglang-enable-hierarchical-cache or --prefill-num-servers: it describes the cache on "
        "the host",
        "collect_tokens_histogram of server group 1 of policy has no effect: SGLang does not read "
        "it any more",
    ]


@pytest.mark.usefixtures("sglang_stand_in")
def test_a_launch_tells_of_an_override(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    groups = [{"num_gpus": 1, "overrides": {"hicache_ratio": 3.0}}]
    with caplog.at_level(logging.WARNING):
        check_engine_flags(config_of(tmp_path, [{"server_groups": groups}]))
    assert "hicache_ratio of server group 0 of policy has no effect without" in caplog.text


def test_prefill_and_decode_are_what_the_groups_are(tmp_path: Path) -> None:
    flags = {"sglang_disaggregation_transfer_backend": "nixl"}
    pair = [{"num_gpus": 1, "worker_type": kind} for kind in ("prefill", "decode")]
    assert warnings_of(tmp_path, [{"server_groups": pair}], **flags) == []
    (warning,) = warnings_of(tmp_path, [{"server_groups": [{"num_gpus": 1}]}], **flags)
    assert warning.endswith("without --prefill-num-servers: servers do both, prefill and decode")


def test_the_command_lines_draft_is_the_policys(tmp_path: Path) -> None:
    flags = {"sglang_speculative_algorithm": "NGRAM", "sglang_speculative_num_draft_tokens": 3}
    draft = {"num_gpus": 1, "overrides": {"speculative_num_draft_tokens": 3}}
    judge = {"name": "judge", "model_path": "j", "server_groups": [draft]}
    (warning,) = warnings_of(tmp_path, [{"server_groups": [{"num_gpus": 1}]}, judge], **flags)
    assert warning.startswith("speculative_num_draft_tokens of server group 0 of judge has no")
    del flags["sglang_speculative_algorithm"]
    (warning,) = warnings_of(tmp_path, [{"server_groups": [{"num_gpus": 1}]}], **flags)
    assert warning.startswith("--sglang-speculative-num-draft-tokens has no effect without")


def test_trained_adapters_are_the_policys(tmp_path: Path) -> None:
    judge = {"name": "judge", "model_path": "j", "server_groups": [
        {"num_gpus": 1, "overrides": {"max_loras_per_batch": 2}}]}  # fmt: skip
    policy = {"server_groups": [{"num_gpus": 1, "overrides": {"max_loras_per_batch": 2}}]}
    flags = {"lora_rank": 8, "hf_checkpoint": str(save_tiny_model(tmp_path / "m"))}
    (warning,) = warnings_of(tmp_path, [policy, judge], **flags)
    assert warning.startswith("max_loras_per_batch of server group 0 of judge has no effect")
