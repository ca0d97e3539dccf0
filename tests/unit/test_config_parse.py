"""Command lines and YAML files: what is accepted, what is refused, and how the refusal reads."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from slime.config import make_config, parse_args
from slime.config.draft import UserFlags
from slime.config.flags import all_flags, own_flags, spellings
from slime.config.make import judge_args
from slime.config.parse import read_argv, read_config_file, read_custom_config
from slime.errors import UserError

#: What a complete command line needs besides the flag under test.
BASE = [
    "--rollout-batch-size", "4", "--num-rollout", "1", "--hf-checkpoint", "model",
    "--prompt-data", "p.jsonl"
]  # fmt: skip


def values(*words: str) -> dict:
    return read_argv(list(words)).values


def test_values_are_typed() -> None:
    got = values(
        "--lr",
        "1e-6",
        "--rollout-batch-size",
        "32",
        "--colocate",
        "--rollout-stop",
        "a",
        "b",
        "--save=x=y",
    )
    assert got == {
        "lr": 1e-6,
        "rollout_batch_size": 32,
        "colocate": True,
        "rollout_stop": ("a", "b"),
        "save": "x=y",
    }


def test_negative_numbers_and_values_with_dashes() -> None:
    assert values("--rollout-top-k", "-1")["rollout_top_k"] == -1
    assert values("--log-probs-chunk-size", "-1", "--seed", "3") == {
        "log_probs_chunk_size": -1,
        "seed": 3,
    }
    assert values("--rollout-stop", "---", "-- x", "-")["rollout_stop"] == ("---", "-- x", "-")
    assert values("--rollout-stop=--END")["rollout_stop"] == ("--END",)
    assert values("--rollout-stop=--END", "--rollout-stop=--STOP")["rollout_stop"] == (
        "--END",
        "--STOP",
    )
    assert values("--rollout-stop=")["rollout_stop"] == ("",)
    assert values("--rollout-stop=a\nb")["rollout_stop"] == ("a\nb",)


def test_scalar_given_twice_keeps_the_last_and_append_collects() -> None:
    assert values("--lr", "1e-6", "--lr", "2e-6")["lr"] == 2e-6
    hooks = values("--rollout-sample-hook-path", "a.b", "--rollout-sample-hook-path", "c.d")
    assert hooks["rollout_sample_hook_path"] == ("a.b", "c.d")
    assert values("--rollout-stop", "a", "--rollout-stop", "b", "c")["rollout_stop"] == ("b", "c")


def test_switches() -> None:
    assert values("--offload-train")["offload_train"] is True
    assert values("--no-offload-train")["offload_train"] is False
    assert values("--colocate=false")["colocate"] is False
    assert values("--disable-rollout-global-dataset")["rollout_global_dataset"] is False
    assert values("--no-check-for-nan-in-loss-and-grad")["check_for_nan_in_loss_and_grad"] is False
    assert values("--no-save-optim")["no_save_optim"] is True
    assert "no-no-save-optim" not in spellings()


def test_json_and_list_expressions() -> None:
    assert values("--train-env-vars", '{"A": "1"}')["train_env_vars"] == {"A": "1"}
    assert values("--moe-layer-freq", "([0]*3+[1]*2)")["moe_layer_freq"] == [0, 0, 0, 1, 1]
    assert values("--moe-layer-freq", "1")["moe_layer_freq"] == 1
    assert values("--moe-aux-loss-coeff", "0.1")["moe_aux_loss_coeff"] == 0.1
    assert values("--moe-aux-loss-coeff", "0.1", "0.2")["moe_aux_loss_coeff"] == (0.1, 0.2)


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (["--rollout-batch-sise", "4"], "did you mean --rollout-batch-size?"),
        (["--rollout-batch", "4"], "did you mean --rollout-batch-size?"),
        (["--hf-check", "x"], "did you mean --hf-checkpoint?"),
        (["--rollout_batch_size", "4"], "write --rollout-batch-size, with dashes"),
        (["--sglang-mem-fraction-statik", "0.8"], "did you mean --sglang-mem-fraction-static?"),
        (["--moe-permute-fuson"], "did you mean --moe-permute-fusion?"),
        (["--sglang-model-path", "x"], "it is --hf-checkpoint"),
        (["--sglang-tensor-parallel-size", "2"], "--rollout-num-gpus-per-engine"),
        (["--sglang-config-x", "y"], "did you mean --sglang-config?"),
        (["--lr"], "--lr needs a value"),
        (["--lr", "--seed", "1"], "--lr needs a value"),
        (["--rollout-stop", "--END"], "--rollout-stop=--value"),
        (["--lr", "1", "2"], "takes one value, but 2 were given: 1 2"),
        (["--colocate", "4"], "takes no value"),
        (["4"], "'4' belongs to no flag"),
        (["-lr", "4"], "two dashes"),
        (["--lr", "fast"], "--lr must be a number, not 'fast'"),
        (["--seed", "1.5"], "--seed must be a whole number, not '1.5'"),
        (["--train-env-vars", "{"], "--train-env-vars must be JSON"),
        (["--train-env-vars", "[1]"], "it must be an object"),
        (["--moe-layer-freq", "__import__('os')"], "must be a whole number or a list"),
        (["--kl-loss-type", "low_var"], "did you mean low_var_kl?"),
        (["--loss-type", "ppo"], "the choices are: policy_loss, sft_loss, preference_loss"),
        (["--rollout-stop-token-ids", "1", "x"], "must be a whole number, not 'x'"),
        (
            ["--rollout-stop-token-ids", "1,2"],
            "blanks between values: --rollout-stop-token-ids 1 2",
        ),
        (["--loss-type", "sft"], "did you mean sft_loss?"),
        (["--colocate=maybe"], "must be true or false"),
    ],
)
def test_refusals_name_what_is_wrong(words: list[str], expected: str) -> None:
    with pytest.raises(UserError) as caught:
        parse_args([*BASE, *words] if words[0].startswith("--") else words)
    assert expected in str(caught.value)


def test_no_prefix_of_a_flag_is_accepted() -> None:
    known = set(spellings())
    for spec in own_flags().values():
        prefix = spec.option[2:-1]
        if prefix not in known:
            with pytest.raises(UserError, match="there is no flag"):
                read_argv([f"--{prefix}", "1"])


def test_an_abbreviation_is_answered_with_what_it_begins() -> None:
    with pytest.raises(
        UserError, match="did you mean --n-samples-per-prompt or --n-samples-per-eval-prompt"
    ):
        read_argv(["--n-samples", "1"])
    with pytest.raises(UserError, match=r"names start so(.|\n)*did you mean --recompute-"):
        read_argv(["--recompute", "1"])


def test_yaml_sets_the_same_names_and_flags_win(tmp_path: Path) -> None:
    path = tmp_path / "run.yaml"
    path.write_text(
        "rollout_batch_size: 8\nlr: 1e-5\ncolocate: true\nrollout-stop: [a, b]\nnum-rollout: 3\n"
    )
    config = parse_args([*BASE, "--config", str(path), "--no-colocate"])
    assert config.rollout.rollout_batch_size == 4 and config.origins["rollout_batch_size"] == "flag"
    # PyYAML reads 1e-5 as text
    assert config.megatron.lr == 1e-5 and config.origins["lr"] == f"yaml {path}"
    assert config.cluster.colocate is False
    assert config.rollout.rollout_stop == ("a", "b")


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("rollout_batch_sise: 4", "did you mean --rollout-batch-size?"),
        ("lr: fast", "run.yaml: --lr must be a number"),
        ("colocate: 3", "run.yaml: --colocate must be true or false"),
        ("seed: [1, 2]", "run.yaml: --seed takes one value, not 2"),
        ("seed: true", "run.yaml: --seed must be a whole number, not True"),
        ("rollout_stop_token_ids: 1,2,x", "write a list: [1, 2, x]"),
        ("- a", "must be a mapping"),
        ("a: [", "is not valid YAML"),
        ("num-rollout: 1\nnum_rollout: 2", "the key num_rollout comes twice"),
        ("teacher_port: 1", "the Megatron teacher server is not in this version"),
        ("config: other.yaml", "run.yaml: config cannot be set in this file"),
    ],
)
def test_yaml_refusals(tmp_path: Path, text: str, expected: str) -> None:
    path = tmp_path / "run.yaml"
    path.write_text(text)
    with pytest.raises(UserError) as caught:
        make_config(config=str(path))
    assert expected in str(caught.value) and "run.yaml" in str(caught.value)


def test_yaml_that_is_not_there() -> None:
    with pytest.raises(UserError, match="No such file"):
        make_config(config="/nowhere/run.yaml")


def test_yaml_shorthands_and_off_spellings(tmp_path: Path) -> None:
    path = tmp_path / "run.yaml"
    path.write_text(
        "disable_rollout_global_dataset: true\nno-rope-fusion: true\ntrace: false\nsave: null\n"
    )
    given = read_config_file(str(path))
    assert given.values == {
        "rollout_global_dataset": False,
        "apply_rope_fusion": False,
        "trace": False,
    }


def test_custom_config_is_applied_before_derivation_and_wins(tmp_path: Path) -> None:
    path = tmp_path / "custom.yaml"
    path.write_text("global_batch_size: 8\nmy_plugin_depth: 3\n")
    config = make_config(
        rollout_batch_size=4,
        n_samples_per_prompt=4,
        num_steps_per_rollout=None,
        custom_config_path=str(path),
    )
    assert config.train.num_steps_per_rollout == 2  # derived from the custom value
    assert config.origins["global_batch_size"] == f"yaml {path}"
    assert config.extra == {"my_plugin_depth": 3} and config.flat().my_plugin_depth == 3


def test_a_flag_that_a_file_replaces_is_told(tmp_path: Path) -> None:
    path = tmp_path / "custom.yaml"
    path.write_text("lr: 1e-6\nrollout_batch_size: 4")
    config = make_config(lr=1e-5, rollout_batch_size=4, custom_config_path=str(path))
    assert config.megatron.lr == 1e-6
    assert [line for line in config.warnings if "--lr 1e-05 has no effect" in line]
    assert not [line for line in config.warnings if "rollout-batch-size" in line]


def test_custom_config_with_a_misspelt_flag(tmp_path: Path) -> None:
    path = tmp_path / "custom.yaml"
    path.write_text("globl_batch_size: 8\n")
    with pytest.raises(UserError, match="did you mean global-batch-size"):
        read_custom_config(str(path))


ROLES = """
megatron:
- {name: default, role: actor, num_nodes: 2, overrides: {lr: 1.0e-6, weight-decay: 0.5}}
- name: default
  role: critic
  num_gpus_per_node: 2
  args:
    {lr: 1.0e-5, lr_warmup_iters: 3, load: there, save: here, tensor_model_parallel_size: 2}
"""


def test_a_file_of_roles_says_whether_the_critic_has_adapters(tmp_path: Path) -> None:
    path = tmp_path / "roles.yaml"
    path.write_text("megatron: [{role: critic, overrides: {lora_rank: 0}}]")
    flags = {"advantage_estimator": "ppo", "lora_rank": 4}
    assert make_config(**flags).critic.critic_lora_rank == 4
    assert make_config(**flags, megatron_config_path=str(path)).critic.critic_lora_rank == 0


def test_a_file_of_roles_wins_over_flags(tmp_path: Path) -> None:
    path = tmp_path / "roles.yaml"
    path.write_text(ROLES)
    config = make_config(advantage_estimator="ppo", megatron_config_path=str(path), lr=1.0)
    assert (config.megatron.lr, config.megatron.weight_decay) == (1e-6, 0.5)
    critic = config.critic
    assert (critic.critic_lr, critic.critic_lr_warmup_iters) == (1e-5, 3)
    assert critic.critic_load == "there" and config.origins["critic_lr"] == f"yaml {path}"
    assert (config.cluster.actor_num_nodes, critic.critic_num_nodes, critic.num_gpus) == (2, 2, 4)
    assert critic.critic_tensor_model_parallel_size == 2
    idle = [warning for warning in config.warnings if "has no effect" in warning]
    assert len(idle) == 2 and "save of the critic" in idle[1]
    assert f"--lr 1.0 has no effect: {path} sets it to 1e-06" in idle[0]


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("lr: 1.0", "must hold a list of roles"),
        ("megatron: [{role: judge}]", "the roles are judge"),
        ("megatron: [{role: actor}, {role: actor}]", "at most one entry"),
        ("megatron: [{role: critic, overrides: {weight_decay: 0}}]", "cannot have a weight_decay"),
        ("megatron: [{role: actor, overrides: {weight_dekay: 0}}]", "weight-dekay"),
        ("megatron: [{role: actor, overides: {lr: 1}}]", "'overides' of the actor is unknown"),
        ("megatron: [{role: actor, overrides: {config: x}}]", "do not include each other"),
        ("megatron: [{role: critic, overrides: {lr: 1}}]", "advantage-estimator ppo"),
    ],
)
def test_a_file_of_roles_that_is_wrong(text: str, said: str, tmp_path: Path) -> None:
    path = tmp_path / "roles.yaml"
    path.write_text(text)
    with pytest.raises(UserError, match=said):
        make_config(megatron_config_path=str(path))


def test_what_is_refused_is_refused_by_name() -> None:
    """Every flag that this version does not support stops the run when it asks for something else
    than nothing."""
    for dest, spec in all_flags().items():
        if not spec.meta.refused:
            continue
        value = {
            "bool": spec.default is not True,
            "int": 987,
            "float": 0.987,
            "json": {"a": 1},
            "int_or_list": 9,
        }.get(spec.kind, "x")
        if spec.choices:
            taken = spec.default if isinstance(spec.default, tuple) else (spec.default,)
            value = next(choice for choice in spec.choices if choice not in taken)
        with pytest.raises(UserError) as caught:
            make_config(**{dest: value})
        is_missing = "in this version" in spec.meta.refused
        reason = f"{caught.value.what}; {caught.value.fix}" if is_missing else caught.value.why
        is_family = "model-families.md" in caught.value.fix
        assert spec.option in str(caught.value) and (
            is_family or reason.startswith(spec.meta.refused)
        )


def test_refused_values() -> None:
    with pytest.raises(UserError, match="not in this version"):
        make_config(update_weight_mode="delta")


def test_aliases_set_one_flag() -> None:
    for name in ("--router-policy", "--sglang-router-strategy", "--sglang-router-policy"):
        assert values(name, "round_robin") == {"router_policy": "round_robin"}
    assert values("--num-experts", "8") == values("--num-moe-experts", "8") == {"num_experts": 8}
    assert values("--norm-epsilon", "1e-6") == values("--layernorm-epsilon", "1e-6")
    assert values("--disable-bias-linear") == {"add_bias_linear": False}
    assert values("--no-rope-fusion") == {"apply_rope_fusion": False}


def test_every_spelling_leads_somewhere() -> None:
    """No spelling is claimed by two flags, and each flag can be reached."""
    seen: dict[str, str] = {}
    for dest, spec in all_flags().items():
        for option in (*spec.options, *((spec.off,) if spec.off else ())):
            assert seen.setdefault(option, dest) == dest, f"{option}: {dest} and {seen[option]}"


def test_read_argv_of_nothing() -> None:
    assert read_argv([]) == UserFlags()


@pytest.mark.parametrize(
    ("words", "fix"),
    [
        (["--lr", "abc"], "such as 0.5 or 1e-6"),
        (["--seed", "1e3"], "in digits"),
        (["--colocate", "False"], "--colocate=false"),
        (["--colocate=maybe"], "true or false"),
        (["--rm-type", "math", "-lr", "1"], "write --lr"),
        (["--rm-type", "math", "\u2014lr", "1"], "write --lr"),
        (["-h"], "write --help"),
        (["--LR", "1"], "write --lr"),
        (["--save", "$HOME/x"], "write the path itself"),
        (["--save=${DATA}/x"], "write the path itself"),
        (["--lr=1", "2"], "remove '2'"),
        (["--train-env-vars", "A=1"], "single quotes"),
        (["train"], "remove it"),
    ],
)
def test_every_refusal_says_what_to_do(words: list[str], fix: str) -> None:
    with pytest.raises(UserError) as caught:
        read_argv(words)
    assert fix in caught.value.fix


@pytest.mark.parametrize("text", ["- lr", "lr 1", "lr: 1\nlr: 2", "\tlr: 1", "lr: [1]", "lr: x"])
def test_a_yaml_file_that_cannot_be_read_says_what_to_do(text: str, tmp_path: Path) -> None:
    (tmp_path / "run.yaml").write_text(text)
    with pytest.raises(UserError) as caught:
        read_config_file(str(tmp_path / "run.yaml"))
    assert caught.value.fix


def test_a_number_that_no_float_holds_is_refused(tmp_path: Path) -> None:
    (tmp_path / "run.yaml").write_text("lr: 1" + "0" * 400)
    with pytest.raises(UserError, match="--lr must be a number"):
        read_config_file(str(tmp_path / "run.yaml"))


def test_the_home_folder_is_found_where_no_shell_replaces_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / "run.yaml").write_text("output_dir: ~/runs\nsave: a~/b")
    given = read_config_file(str(tmp_path / "run.yaml")).values
    assert given == {"output_dir": f"{tmp_path}/runs", "save": "a~/b"}
    assert values("--save=~/x", "--rollout-stop", "~") == {
        "save": f"{tmp_path}/x",
        "rollout_stop": ("~",),
    }


def test_a_flag_out_of_range_is_not_also_missing() -> None:
    _, errors = judge_args([*BASE[:2], *BASE[4:], "--num-rollout", "-3"])
    assert [error.what for error in errors] == ["--num-rollout is -3"]


#: A line of a --config file → what it sets, or a part of the refusal.
YAML_AS_MEANT: dict[str, Any] = {
    "seed: 017": {"seed": 17},
    "seed: 0x1F": {"seed": 31},
    "seed: 1_000": {"seed": 1000},
    "seed: 1.0e+3": {"seed": 1000},
    "seed: 12:30": "must be a whole number, not '12:30'",
    "seed: 2024-01-01": "must be a whole number, not '2024-01-01'",
    "seed: null": {},
    "seed:": "seed has no value",
    "colocate:": "write colocate: true",
    "seed: ${SEED}": "only a shell replaces variables",
    "lr: 1e-6": {"lr": 1e-6},
    "lr: 12:30.5": "must be a number, not '12:30.5'",
    "colocate: off": {"colocate": False},
    'colocate: "on"': {"colocate": True},
    "colocate: 1": {"colocate": True},
    "colocate: true\nno-colocate: true": "contradicts another line",
    "no_save: true": {"save": ""},
    "no_save: false": {},
    "no_save: 2": "no_save takes true or false",
    "save: 12:30": {"save": "12:30"},
    "save: 1.10": {"save": "1.10"},
    "save: 017": {"save": "017"},
    "save: no": {"save": "no"},
    "save: none": "would be taken as a name",
    "save: ${oc.env:HOME}/x": "has a variable in it",
    "save: a/$RUN/b": "has a variable in it",
    'save: "C:\\new"': "control character '\\n'",
    "save: \"'a'\"": "quotes around it",
    "label_key: None": "would be taken as a name",
    "rollout_stop: [no, 1.10, $, ~x]": {"rollout_stop": ("no", "1.10", "$", "~x")},
    "rollout_stop: [null]": "must be text, not None",
    "rollout_stop_token_ids: [010]": {"rollout_stop_token_ids": (10,)},
    "apply_chat_template_kwargs: {think: off, day: 2024-01-01, no: 017, rate: 1e-3}": {
        "apply_chat_template_kwargs": {
            "think": False,
            "day": "2024-01-01",
            "no": "017",
            "rate": 0.001,
        }
    },
    "train_env_vars: {A: on}": "sets A to True",
    "train_env_vars: {A: 1.10}": "write it in quotes",
    "advantage_estimator: GRPO": "did you mean grpo",
    "--lr: 1": "there is no flag --lr",
}


@pytest.mark.parametrize("text", YAML_AS_MEANT)
def test_yaml_is_read_as_it_is_meant(text: str, tmp_path: Path) -> None:
    (tmp_path / "run.yaml").write_text(text)
    expected = YAML_AS_MEANT[text]
    if isinstance(expected, dict):
        assert read_config_file(str(tmp_path / "run.yaml")).values == expected
        return
    with pytest.raises(UserError) as caught:
        make_config(config=str(tmp_path / "run.yaml"))
    assert expected in str(caught.value) and caught.value.fix


def test_numbers_of_a_file_for_hooks_are_numbers(tmp_path: Path) -> None:
    (tmp_path / "own.yaml").write_text("rate: 1e-3\nzip: 01234\nat: 12:30\nuses_tools: on")
    extra = read_custom_config(str(tmp_path / "own.yaml")).extra
    assert extra == {"rate": 1e-3, "zip": "01234", "at": "12:30", "uses_tools": True}


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--rollout-stop", "a", "--rollout-stop", "b"], "--rollout-stop is given more than once"),
        (["--label-key", ""], "--label-key is empty"),
        (["--rollout-stop=a", "--rollout-stop=b", "--lr", "1", "--lr", "2"], ""),
    ],
)
def test_values_that_are_lost_are_told(words: list[str], said: str) -> None:
    assert [one[: len(said)] for one in read_argv(words).warnings] == ([said] if said else [])


def test_one_configuration_file_is_read() -> None:
    with pytest.raises(UserError, match=r"--config is given twice: a\.yaml and b\.yaml"):
        read_argv(["--config", "a.yaml", "--config", "b.yaml"])
    with pytest.raises(UserError, match="'a' comes twice"):
        read_argv(["--apply-chat-template-kwargs", '{"a": 1, "a": 2}'])
