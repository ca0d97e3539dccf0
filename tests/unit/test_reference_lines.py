"""Command lines of the reference system's scripts, examples and tests: each parses, and its
engines' command lines and memory plan can be built; or it is refused by the name of what is
missing.
"""

from __future__ import annotations

import dataclasses
import json
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

LINES: list[dict[str, Any]] = [
    json.loads(line)
    for line in (Path(__file__).parents[1] / "support/reference_lines.jsonl")
    .read_text()
    .splitlines()
]
#: What is not in this version; a line that asks for it is refused by this name.
MISSING = (
    "GLM-5",
    *(
        "training of multi-token-prediction layers",
        "ending trainer processes",
        "the rollout buffer service",
    ),
    "a lagged copy of the policy",
)
#: Lines by name → what they are refused for.
REFUSED = {
    "release_train_0": ("ending trainer processes",),
    "run-glm5-744B-A40B": ("GLM-5",),
    "run-glm5.2-744B-A40B": ("GLM-5",),
    "mimo_7B_mtp_only_grad_0": ("training of multi-token-prediction layers",),
    "run-mimo-7B-rl-eagle": ("training of multi-token-prediction layers",),
    "run-glm4.7-30B-A3B": ("training of multi-token-prediction layers",),
    "slime_plugins_rollout_buffer_rollout_buffer_example": (
        *("the rollout buffer service", "a lagged copy of the policy"),
    ),
}
#: What is wrong with a line beside: two of its pipeline stages and eight ranks of experts need 16
#: GPUs.
CONTRADICTIONS = {"run-glm4.7-30B-A3B": ["8 trainer GPUs cannot be divided by 16"]}
#: Lines whose engines draft with weights, which no push would update: refused as soon as engines
#: are asked.
WITH_DRAFTS = {
    "glm4.7_30B_A3B_pd_mooncake_0",
    "qwen3.6_35B_A3B_pd_mooncake_0",
    "run-deepseek-r1",
}
#: Beginning of a model's name → the published model whose config.json it has, and what differs.
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "Qwen3-30B-A3B": ("Qwen/Qwen3-30B-A3B", {}),
    "Qwen3-235B-A22B": (
        "Qwen/Qwen3-30B-A3B",
        {
            "hidden_size": 4096,
            "intermediate_size": 12288,
            "moe_intermediate_size": 1536,
            "num_attention_heads": 64,
            "num_hidden_layers": 94,
        },
    ),
    "Qwen3-4B-Instruct-2507": (
        "Qwen/Qwen3-4B",
        {"rope_theta": 5000000, "max_position_embeddings": 262144},
    ),
    "qwen3-4b-sft": ("Qwen/Qwen3-4B", {"rope_theta": 5000000, "max_position_embeddings": 262144}),
    "Qwen3-4B": ("Qwen/Qwen3-4B", {}),
    "Qwen3-8B": (
        "Qwen/Qwen3-4B",
        {"hidden_size": 4096, "intermediate_size": 12288, "tie_word_embeddings": False},
    ),
    "Qwen3-0.6B": ("Qwen/Qwen3-0.6B", {}),
    "Qwen2.5-0.5B": (
        "Qwen/Qwen2.5-7B",
        {
            "hidden_size": 896,
            "intermediate_size": 4864,
            "num_attention_heads": 14,
            "num_key_value_heads": 2,
            "num_hidden_layers": 24,
            "tie_word_embeddings": True,
            "vocab_size": 151936,
        },
    ),
    "Qwen3.5-9B": ("Qwen/Qwen3.5-9B", {}),
    "Qwen3.5-0.8B": (
        "Qwen/Qwen3.5-9B",
        {
            "hidden_size": 1024,
            "intermediate_size": 3584,
            "layer_types": None,
            "linear_num_value_heads": 16,
            "num_attention_heads": 8,
            "num_hidden_layers": 24,
            "num_key_value_heads": 2,
            "tie_word_embeddings": True,
        },
    ),
    **dict.fromkeys(("Qwen3.5-35B-A3B", "Qwen3.6-35B-A3B"), ("Qwen/Qwen3.5-35B-A3B", {})),
    "GLM-Z1-9B": ("zai-org/GLM-4-9B-0414", {}),
    "GLM-4.7-Flash": ("zai-org/GLM-4.7-Flash", {}),
    "DeepSeek-R1": ("deepseek-ai/DeepSeek-V3", {}),
    "Moonlight": ("moonshotai/Moonlight-16B-A3B", {}),
    "Kimi-K2": (
        "deepseek-ai/DeepSeek-V3",
        {
            "model_type": "kimi_k2",
            "first_k_dense_replace": 1,
            "n_group": 1,
            "topk_group": 1,
            "n_routed_experts": 384,
            "num_attention_heads": 64,
            "num_key_value_heads": 64,
            "num_nextn_predict_layers": 0,
            "rms_norm_eps": 1e-5,
            "routed_scaling_factor": 2.827,
            "rope_theta": 50000.0,
            "vocab_size": 163840,
            "rope_scaling": {
                "type": "yarn",
                "factor": 64.0,
                "beta_fast": 32.0,
                "beta_slow": 1.0,
                "mscale": 1.0,
                "mscale_all_dim": 1.0,
                "original_max_position_embeddings": 4096,
            },
        },
    ),
}
#: Published models of these text models also see images: what their config.json has outside.
OUTER: dict[str, dict[str, Any]] = {
    text: {"model_type": outer, "architectures": [f"{name}ForConditionalGeneration"]}
    for text, outer, name in (
        ("qwen3_5_text", "qwen3_5", "Qwen3_5"),
        ("qwen3_5_moe_text", "qwen3_5_moe", "Qwen3_5Moe"),
    )
}
#: Server groups of a policy on its own, for lines whose YAML is not here.
GROUPS = {"sglang": [{"name": "policy", "server_groups": [{"worker_type": "regular"}]}]}
#: Settings per role, for lines whose YAML is not here.
ROLES = {
    "megatron": [
        {"name": "default", "role": "actor", "overrides": {"lr": 1e-6}},
        {"name": "default", "role": "critic", "overrides": {"lr": 1e-5, "save": "critic"}},
    ]
}


def values_of(argv: list[str], flag: str) -> list[str]:
    return [argv[i + 1] for i, word in enumerate(argv[:-1]) if word == flag]


def with_files(line: dict[str, Any], folder: Path) -> list[str]:
    """The words of a line, with files in the place of those that it names and that are not here."""
    argv = list(line["argv"])
    if path := values_of(argv, "--custom-config-path"):
        custom = folder / "custom.yaml"
        custom.write_text("use_tis: true\n")
        argv[argv.index(path[0])] = str(custom)
    if path := values_of(argv, "--megatron-config-path"):
        roles = folder / "roles.yaml"
        roles.write_text(yaml.safe_dump(ROLES))
        argv[argv.index(path[0])] = str(roles)
    return argv


def config_json(argv: list[str], folder: Path) -> Path:
    """A directory with the config.json of the line's model."""
    name = Path(values_of(argv, "--hf-checkpoint")[-1]).name
    published, changes = next(found for start, found in MODELS.items() if name.startswith(start))
    config = {**PUBLISHED[published]["config"], **changes}
    if outer := OUTER.get(config["model_type"]):
        config = {
            **outer,
            "text_config": config,
            "tie_word_embeddings": config["tie_word_embeddings"],
        }
    (folder / "config.json").write_text(json.dumps(config))
    return folder


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
    if line["name"] in WITH_DRAFTS:
        with pytest.raises(UserError, match=r"EAGLE(, which)? cannot follow the weights"):
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
        f"{family} are built in" in warning for warning in config.warnings
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
