"""Command lines of the reference system's scripts, examples and tests: each parses, and its
engines' command lines and memory plan can be built; or it is refused by the name of what is
missing.
"""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest
import yaml

from slime.config import Config, make_config, parse_args
from slime.config.make import judge_args
from slime.engines.launch import EnginePlace
from slime.engines.model_groups import served_models
from slime.engines.sglang.command import GROUP_RULES, check_sglang, sglang_options
from slime.errors import UserError
from slime.memory.plan import MemoryPlan
from slime.models import family_of
from slime.models.layout_rules import check_layout
from slime.models.model_flags import check_model_flags
from tests.support.hf_configs import PUBLISHED
from tests.support.reference_lines import (
    CONTRADICTIONS,
    GROUPS,
    LINES,
    MISSING,
    REFUSED,
    WITH_MASKED_DRAFTS,
    config_json,
    with_files,
)


@pytest.fixture(autouse=True)
def eight_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SLIME_NUM_GPUS", "8")


def engines_of(config: Config, folder: Path) -> list[dict[str, Any]]:
    """The SGLang options of one engine of each group of servers."""
    gpus = config.cluster.rollout_num_gpus
    if config.engine.sglang_config is not None:
        groups = yaml.safe_load(yaml.safe_dump(GROUPS))
        groups["sglang"][0]["server_groups"][0]["num_gpus"] = gpus
        (folder / "groups.yaml").write_text(yaml.safe_dump(groups))
        engine = dataclasses.replace(config.engine, sglang_config=str(folder / "groups.yaml"))
        config = dataclasses.replace(config, engine=engine)
    places = [
        EnginePlace(num_gpus=group.num_gpus_per_engine, overrides=group.overrides)
        for model in served_models(config, GROUP_RULES)
        for group in model.groups
    ]
    return [sglang_options(config, str(folder), "127.0.0.1", 30000, place) for place in places]


@pytest.mark.parametrize("line", [pytest.param(line, id=line["name"]) for line in LINES])
def test_a_line_launches_or_is_refused_by_name(line: dict[str, Any], tmp_path: Path) -> None:
    argv = with_files(line, tmp_path)
    if line["name"] in REFUSED:
        _, errors = judge_args(argv, line["entry"])
        missing = [error.what for error in errors if error.what.endswith("in this version")]
        assert [next(name for name in MISSING if name in what) for what in missing] == [
            *REFUSED[line["name"]]
        ]
        assert [error.what for error in errors if error.what not in missing] == CONTRADICTIONS.get(
            line["name"], []
        )
        return
    model = config_json(argv, tmp_path)
    config = parse_args(
        [*argv, "--hf-checkpoint", str(model), "--rollout-engine", "sglang"], entry=line["entry"]
    )
    spec = family_of(str(model), None).model_spec(str(model))
    check_model_flags(config.megatron, spec)
    check_layout(spec.padded(config.megatron.tensor_model_parallel_size), config)
    plan = MemoryPlan.of(config)
    assert plan.limit > 0 and (plan.peak.total > 0 or config.debug.debug_rollout_only)
    if line["name"] in WITH_MASKED_DRAFTS:
        with pytest.raises(UserError, match="EAGLE does not go with --use-sampling-mask"):
            check_sglang(config)
        return
    check_sglang(config)
    for options in engines_of(config, model):
        assert options["model_path"] == str(model) and options["tp_size"] >= 1


def test_refusals_name_only_lines_that_are_there() -> None:
    assert set(REFUSED) <= {line["name"] for line in LINES}
    assert {name for names in REFUSED.values() for name in names} == set(MISSING)


# -- what the lines do not show --------------------------------------------------------------------


@pytest.mark.parametrize(
    ("module", "named"),
    [
        ("slime_plugins.models.gemma4", "Gemma"),
        ("slime_plugins.models.glm5.glm5", "GLM-5"),
        ("slime_plugins.models.something_new", "slime_plugins.models.something_new"),
    ],
)
def test_a_spec_of_a_missing_family_is_refused_by_its_name(module: str, named: str) -> None:
    with pytest.raises(UserError, match="in this version") as caught:
        make_config(spec=[module, "get_spec"], attention_output_gate=True, apply_layernorm_1p=True)
    assert named in caught.value.what and "; " not in caught.value.what


@pytest.mark.parametrize(
    ("flag", "said"),
    [
        ({"attention_output_gate": True}, "--attention-output-gate, but it has none"),
        ({"linear_num_key_heads": 8}, "--linear-num-key-heads 8, but it has none"),
        ({"use_gated_attention": True}, "--use-gated-attention, but it is False"),
    ],
)
def test_flags_of_a_hybrid_contradict_other_models(flag: dict[str, Any], said: str) -> None:
    config = PUBLISHED["Qwen/Qwen3-4B"]["config"]
    with pytest.raises(UserError, match=said):
        check_model_flags(make_config(**flag).megatron, family_of(config).model_spec(config))


@pytest.mark.parametrize(
    ("module", "family"),
    [
        ("slime_plugins.models.gemma3", "Gemma 3"),
        ("slime_plugins.models.glm4", "GLM-4"),
        ("slime_plugins.models.gpt_oss", "gpt-oss"),
        ("slime_plugins.models.minimax_m2", "MiniMax-M2"),
        ("slime_plugins.models.qwen3_5", "Qwen3.5"),
        ("slime_plugins.models.qwen3_next", "Qwen3-Next"),
    ],
)
def test_the_spec_of_a_family_that_is_built_in_stands_for_its_table(
    module: str, family: str
) -> None:
    config = make_config(spec=[module, "get_spec"])
    assert config.train.spec == () and any(
        f"slime builds the layers of {family}" in warning for warning in config.warnings
    )


def test_a_spec_is_a_module_and_a_name() -> None:
    with pytest.raises(UserError, match="takes a module and a name"):
        make_config(spec=["my.layers"])


def test_everything_that_is_missing_is_told_at_once() -> None:
    words = (
        "--teacher-port 1 --teacher-warmup-port 2 --update-weight-mode delta --sglang-port 1 "
        "--num-rollout 1"
    )
    _, errors = judge_args(words.split())
    told = [error.what for error in errors]
    assert (
        sum(text.endswith("in this version") for text in told) == 2
        and "--sglang-port cannot be set" in told
    )
    assert any("--teacher-port, --teacher-warmup-port" in error.why for error in errors)


def test_prefill_servers_become_two_groups() -> None:
    flags: dict[str, Any] = {"rollout_engine": "sglang", "rollout_num_gpus_per_engine": 2}
    config = make_config(**flags, rollout_num_gpus=8, prefill_num_servers=1)
    (model,) = served_models(config, GROUP_RULES)
    assert [(group.worker_type, group.num_engines) for group in model.groups] == [
        ("prefill", 1),
        ("decode", 3),
    ]
    with pytest.raises(UserError, match="leaves no engine that decodes"):
        make_config(**flags, rollout_num_gpus=4, prefill_num_servers=2)


@pytest.mark.parametrize(
    "flag", ["n_samples_per_eval_prompt", "eval_max_response_len", "eval_top_k"]
)
def test_settings_of_an_evaluation_that_is_not_there_are_warned_of(flag: str) -> None:
    warnings = make_config(**{flag: 4}).warnings
    assert any(
        f"--{flag.replace('_', '-')} has no effect without" in warning for warning in warnings
    )
