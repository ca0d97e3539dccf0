"""Every declaration of a flag keeps its word: whom it serves reads it, and where it would do
nothing it is refused."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import pytest

from slime.config import Config, make_config
from slime.config.engine_flags import to_argv
from slime.config.flag import FlagSpec, Part, Requirement, option_of
from slime.config.flags import all_flags, own_flags
from slime.config.parse import given_by_name
from slime.config.parts import left_out
from slime.config.resolve import PARALLEL_SIZES, resolve
from slime.engines.launch import ONE_GPU
from slime.engines.router import router_command
from slime.engines.sglang.command import sglang_options
from slime.errors import UserError
from tests.support.declarations import (
    ALL_WORKING,
    WORKING,
    acts_for,
    files_that_read,
    names_of,
    not_taken,
    other_than_default,
    parts_of,
    readers,
    values_of,
    worked_into_others,
)


@pytest.fixture(autouse=True)
def cpu_host(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SLIME_NUM_GPUS", "0")


# -- who reads a flag ------------------------------------------------------------------------------


def unread(specs: Iterable[FlagSpec]) -> list[str]:
    """ "flag: part" for each part that a flag claims to serve and that does not read it."""
    found = []
    for spec in specs:
        if "config" in spec.meta.read_by:  # what follows from it may serve the others
            found += [] if names_of(spec) & worked_into_others() else [f"{spec.dest}: config"]
            continue
        files = files_that_read(spec)
        found += [
            f"{spec.dest}: {part}"
            for part in spec.meta.read_by
            if not any(acts_for(file, part) for file in files)
        ]
    return found


def undeclared(specs: Iterable[FlagSpec]) -> list[str]:
    """ "flag: file" for each file that reads a flag for none of those whom it claims to serve."""
    return [
        f"{spec.dest}: {file}"
        for spec in specs
        for file in sorted(readers().get((spec.group, spec.attribute), set()))
        if not set(spec.meta.read_by) & set(parts_of(file) or spec.meta.read_by)
    ]


def test_a_flag_is_read_by_whom_it_serves_and_by_nobody_else() -> None:
    assert unread(WORKING.values()) == []
    assert undeclared(WORKING.values()) == []


def test_a_flag_that_nobody_reads_is_found() -> None:
    read = own_flags()["use_wandb"]
    nobody = FlagSpec("brand_new", "observe", "brand_new", "bool", False, meta=read.meta)
    # config.train.seed is another one
    elsewhere = FlagSpec("seed", "observe", "seed", "int", 0, meta=read.meta)
    assert unread([read, nobody, elsewhere]) == ["brand_new: driver", "seed: driver"]


def test_a_reader_that_a_flag_does_not_name_is_found() -> None:
    learning_rate = own_flags()["lr"]
    told = dataclasses.replace(
        learning_rate, meta=dataclasses.replace(learning_rate.meta, read_by=("engine",))
    )
    assert undeclared([learning_rate, told]) == ["lr: trainer/megatron/optimizer.py"]


# -- where a flag does nothing ---------------------------------------------------------------------

WITH_NEEDS = {dest: spec for dest, spec in ALL_WORKING.items() if spec.meta.needs}

#: What a setting asks for beside itself, by cross-checks that no declaration tells.
COMPANIONS: dict[tuple[str, Any], dict[str, Any]] = {
    ("profile_ranks", (7,)): {"actor_num_gpus_per_node": 8},
    ("loss_type", "custom_loss"): {"custom_loss_function_path": "a.b"},
    ("advantage_estimator", "reinforce_plus_plus"): {"normalize_advantages": True},
    ("use_sampling_mask", True): {"rollout_top_k": 7},
    ("get_mismatch_metrics", True): {"custom_tis_function_path": "a.b"},
    ("update_weight_transport", "disk"): {"update_weight_disk_dir": "d"},
    ("lr_decay_style", "WSD"): {"lr_wsd_decay_iters": 5},
    ("use_dynamic_batch_size", True): {"max_tokens_per_gpu": 64},
    ("num_virtual_stages_per_pipeline_rank", 2): {
        "pipeline_model_parallel_size": 2, "actor_num_gpus_per_node": 2, "global_batch_size": 2,
    },
    ("fp16", True): {"bf16": False},
    ("min_lr", 1.5): {"lr": 7.0},
    ("lr_warmup_init", 1.5): {"lr": 7.0},
    ("eval_pass_k", (7,)): {"n_samples_per_eval_prompt": 7},
    ("prefill_num_servers", 1): {"rollout_num_gpus": 2},
    ("use_opd", True): {"custom_rm_path": "a.b"},
    ("opd_type", "megatron"): {"opd_teacher_load": ("x",)},
    ("opd_loss", "reverse_kl"): {"opd_teacher_load": ("x",)},
    ("opd_loss", "jsd"): {"opd_teacher_load": ("x",)},
    ("preference_loss", "kto"): {"rollout_batch_size": 2},
    **{
        (f"critic_{size}_parallel_size", 7): {"actor_num_gpus_per_node": 7}
        for size in PARALLEL_SIZES
    },
}  # fmt: skip


def its_engine(spec: FlagSpec) -> dict[str, Any]:
    """The engine that has the option; the one that is taken by default has none."""
    return {"rollout_engine": "sglang"} if "sglang" in spec.sections else {}


def options(need: Requirement) -> Iterator[tuple[str, Any]]:
    """(flag, value) of the ways in which a need can be met."""
    for setting in need.conditions:
        spec = all_flags()[setting.dest]
        if not setting.negated:
            yield setting.dest, setting.values[0] if setting.values else given_value(setting.dest)
        elif setting.values:
            allowed = [
                c
                for c in spec.choices
                if c not in (*setting.values, *not_taken(spec), spec.default)
            ]
            yield from ((setting.dest, choice) for choice in allowed)
        else:
            yield setting.dest, False


def given_value(dest: str) -> Any:
    if dest == "num_virtual_stages_per_pipeline_rank":
        return 2
    if dest == "lora_rank":
        return 9  # other than the value given to critic_lora_rank, which is derived from it
    return ("a", "a.jsonl") if dest == "eval_prompt_data" else other_than_default(all_flags()[dest])


def completed(settings: dict[str, Any], except_for: Requirement | None = None) -> dict[str, Any]:
    """The settings and, over and over, what they need: all but one need, which is kept from
    holding."""
    fixed = set(settings)
    while True:
        more: dict[str, Any] = {}
        for dest, value in settings.items():
            if value == all_flags()[dest].default:
                continue
            more |= {} if isinstance(value, dict) else COMPANIONS.get((dest, value), {})
            for need in all_flags()[dest].meta.needs:
                if need is not except_for and not need.holds(values_of({**more, **settings})):
                    dest_of, wanted = next(o for o in options(need) if o[0] not in fixed)
                    more[dest_of] = wanted
        if all(settings.get(dest) == value or dest in fixed for dest, value in more.items()):
            return settings
        settings = {
            **settings,
            **{dest: value for dest, value in more.items() if dest not in fixed},
        }


def against(need: Requirement) -> dict[str, Any]:
    """Settings that keep each alternative of a need from holding."""
    settings = {}
    for setting in need.conditions:
        if setting.negated:
            settings[setting.dest] = (
                setting.values[0] if setting.values else given_value(setting.dest)
            )
        elif setting.holds(values_of({})):
            choices = [
                c for c in all_flags()[setting.dest].choices if c not in (*setting.values, "auto")
            ]
            settings[setting.dest] = choices[0] if choices else False
        elif all_flags()[setting.dest].meta.derived and all_flags()[setting.dest].kind == "bool":
            settings[setting.dest] = False
    return settings


# A test that goes over hundreds of flags costs less than hundreds of tests.


def test_where_it_does_nothing_it_is_refused_or_warned_of() -> None:
    for spec in WITH_NEEDS.values():
        for need in spec.meta.needs:
            check_need(spec, need)


def check_need(spec: FlagSpec, need: Requirement) -> None:
    settings = completed(
        {**its_engine(spec), spec.dest: other_than_default(spec), **against(need)}, except_for=need
    )
    said = f"{spec.option} has no effect {need.words(values_of(settings))}"
    if need.warns:
        assert any(warning.startswith(said) for warning in make_config(**settings).warnings), said
        return
    try:
        make_config(**settings)
    except UserError as error:
        assert error.what == said and "leave" in error.fix
    else:
        pytest.fail(f"accepted: {said}")
    make_config(
        **{dest: value for dest, value in settings.items() if not goes_with(dest, spec, need)}
    )


def goes_with(dest: str, spec: FlagSpec, need: Requirement) -> bool:
    """The flag, one that has the same need, or one that needs the flag: without them the settings
    are in order."""
    needs = all_flags()[dest].meta.needs
    return (
        dest == spec.dest
        or need in needs
        or any(spec.dest == s.dest for other in needs for s in other.conditions)
    )


def test_where_its_needs_hold_it_is_accepted() -> None:
    for dest, spec in WITH_NEEDS.items():
        given = completed({**its_engine(spec), dest: other_than_default(spec)})
        config: Config = make_config(**given)
        assert config.origins[dest] == "flag", dest
        useless = f"{spec.option} has no effect"
        assert not [warning for warning in config.warnings if warning.startswith(useless)]


def test_needs_name_flags_that_there_are() -> None:
    for spec in all_flags().values():
        for need in spec.meta.needs:
            for setting in need.conditions:
                needed = all_flags()[setting.dest]
                assert (
                    not setting.values
                    or not needed.choices
                    or set(setting.values) <= set(needed.choices)
                )


def test_a_value_that_would_be_derived_anyway_is_no_request() -> None:
    assert make_config(eval_top_p=1.0, offload_train=False).warnings == ()
    assert make_config(eval_top_p=0.9).warnings[0].startswith("--eval-top-p has no effect")


# -- where a run lacks the part that reads a flag --------------------------------------------------

_EVALUATION = ("eval_prompt_data", "eval_config")
_ENGINES: set[Part] = {"generation", "engine", "router", "push"}
#: Runs that are not whole: what makes them so, and the parts that they lack.
HALVES: dict[str, tuple[dict[str, Any], set[Part]]] = {
    "rollout alone": ({"debug_rollout_only": True}, {"trainer", "training", "push"}),
    "samples loaded": ({"load_debug_rollout_data": "{rollout_id}.pt"}, {*_ENGINES, "collection"}),
    "training alone": ({"debug_train_only": True, "loss_type": "sft_loss"}, _ENGINES),
    "answers of the data": ({"loss_type": "sft_loss"}, _ENGINES),
    "evaluation alone": (
        {"num_rollout": 0, "eval_prompt_data": ("a", "a.jsonl")},
        {"training", "collection", "samples"},
    ),
}


def completed_within(mode: Mapping[str, Any], settings: dict[str, Any]) -> dict[str, Any]:
    """The settings with what they need, or alone where that would make another kind of run of
    it."""
    try:
        whole = completed(settings)
    except StopIteration:  # the need is against what makes the run such a one
        return settings
    return settings if set(_EVALUATION) & set(whole) - set(mode) else whole


def acts_through_another(config: Config, dest: str, lacking: set[Part]) -> bool:
    """A flag that a part reads which is there was derived from this one."""
    return any(
        set(all_flags()[other].meta.read_by) - lacking - {"config"}
        for other, origin in config.origins.items()
        if origin.startswith("derived: ") and re.search(rf"\b{dest}\b", origin)
    )


def left_out_of(config: Config) -> set[str]:
    """The options that warnings say do nothing."""
    words = [
        w.split("; left out: ")[-1] if "; left out: " in w else w.split(" has no effect")[0]
        for w in config.warnings
    ]
    return {option for said in words for option in said.split(", ")}


def test_a_flag_that_no_part_of_the_run_reads_is_refused_or_warned_of() -> None:
    for dest, spec in WORKING.items():
        check_halves(dest, spec)


def check_halves(dest: str, spec: FlagSpec) -> None:
    if spec.meta.derived and other_than_default(spec) is False:
        return  # a derived switch that is off asks for nothing there
    readers_of_it = set(spec.meta.read_by) - {"config"}
    for half, (mode, lacking) in HALVES.items():
        if dest in mode or (dest in _EVALUATION and "answers" in half):
            continue  # of another kind
        try:
            config = make_config(**completed_within(mode, {**mode, dest: other_than_default(spec)}))
        except UserError:
            continue
        if (
            readers_of_it
            and readers_of_it <= lacking
            and not acts_through_another(config, dest, lacking)
        ):
            assert spec.option in left_out_of(config), (dest, half, config.warnings)
        elif readers_of_it and not spec.meta.needs:
            assert not any(spec.option in w for w in config.warnings if "; left out: " in w), (
                dest,
                half,
            )


@pytest.mark.parametrize(
    ("half", "part"), [("rollout alone", "trainer"), ("samples loaded", "engine")]
)
def test_what_megatron_and_sglang_declare_is_warned_of_too(half: str, part: Part) -> None:
    mode, _ = HALVES[half]
    switches = {
        dest: not spec.default
        for dest, spec in ALL_WORKING.items()
        if spec.sections
        and part in spec.meta.read_by
        and spec.kind == "bool"
        and not spec.meta.needs
    }
    assert len(switches) > 20
    draft = resolve(given_by_name({**mode, **switches}), all_flags())
    (warning,) = left_out(draft)
    assert {all_flags()[dest].option for dest in switches} <= set(
        warning.split("; left out: ")[1].split(", ")
    )


def test_flags_of_a_whole_run_are_told_in_one_warning() -> None:
    (warning,) = make_config(
        debug_rollout_only=True, save="checkpoints", lr=1e-4, use_tis=True
    ).warnings
    assert (
        warning == "no trainer is started (--debug-rollout-only); left out: --lr, --save, --use-tis"
    )
    mode = {"num_rollout": 0, "eval_prompt_data": ("a", "a.jsonl")}
    (warning,) = make_config(**mode, save="checkpoints", lr=1e-4, use_tis=True).warnings
    assert warning == "nothing is trained (--num-rollout 0); left out: --lr, --save, --use-tis"
    (warning,) = make_config(
        load_debug_rollout_data="{rollout_id}.pt", rollout_top_p=0.5, rm_type="f1"
    ).warnings
    assert warning.endswith("(--load-debug-rollout-data); left out: --rm-type, --rollout-top-p")
    pushed = {
        "update_weight_transport": "disk",
        "update_weight_disk_dir": "d",
        "update_weight_buffer_size": 7,
    }
    (warning,) = make_config(loss_type="sft_loss", **pushed, check_canary=False).warnings
    assert all(option_of(dest) in warning for dest in (*pushed, "check_canary"))


def test_what_acts_on_samples_is_not_left_out_where_they_are_loaded() -> None:
    """The trainer tempers its log-probs as the samples were, and a reward that is a dict is looked
    up."""
    settings = {"rollout_temperature": 0.5, "reward_key": "score"}
    assert make_config(load_debug_rollout_data="{rollout_id}.pt", **settings).warnings == ()


def test_what_acts_through_another_flag_is_not_left_out() -> None:
    """The engines have the trainer's GPUs, evaluations the column of the labels."""
    assert (
        make_config(debug_rollout_only=True, colocate=True, actor_num_gpus_per_node=2).warnings
        == ()
    )
    mode = {"num_rollout": 0, "eval_prompt_data": ("a", "a.jsonl")}
    assert make_config(**mode, label_key="answer").warnings == ()
    assert (
        "--label-key" in make_config(**mode, label_key="answer", eval_label_key="label").warnings[0]
    )


# -- what is passed on to engines and router -------------------------------------------------------


def passed_on(prefix: str) -> dict[str, Any]:
    """A value other than the default of every option that can be set."""
    specs = [spec for spec in ALL_WORKING.values() if spec.sections == (prefix,)]
    return {spec.dest: other_than_default(spec) for spec in specs if not spec.value_optional}


def test_every_option_of_sglang_is_on_the_engines_command_line() -> None:
    given = passed_on("sglang")
    assert len(given) > 400
    config = make_config(rollout_engine="sglang", **given)
    options = sglang_options(config, "model", "127.0.0.1", 30000, ONE_GPU)
    argv = to_argv(options)
    for dest, value in given.items():
        name = all_flags()[dest].attribute
        found = options[name] if isinstance(options[name], tuple) else (options[name],)
        assert all(item in found for item in (value if isinstance(value, tuple) else (value,))), (
            name
        )
        assert {"--" + name.replace("_", "-"), "--no-" + name.replace("_", "-")} & set(argv), name


def test_every_option_of_the_router_is_on_its_command_line() -> None:
    given = passed_on("router") | {"router_policy": "random"}
    argv = router_command(make_config(**given), "127.0.0.1", 30000).argv
    missing = [
        dest for dest in given if "--" + all_flags()[dest].attribute.replace("_", "-") not in argv
    ]
    assert missing == []


@pytest.mark.parametrize(
    "flag", ["sglang_port", "sglang_host", "router_port", "sglang_trust_remote_code"]
)
def test_what_this_system_sets_itself_is_refused_at_its_default_too(flag: str) -> None:
    spec = all_flags()[flag]
    with pytest.raises(UserError, match=f"{spec.option} cannot be set"):
        make_config(**{flag: spec.default})


@pytest.mark.parametrize(
    "flag",
    [
        "router_api_key",
        "sglang_api_key",
        "sglang_ssl_keyfile",
        "router_tls_cert_path",
        "router_jwt_issuer",
    ],
)
def test_keys_that_each_run_makes_and_encryption_that_no_client_speaks_are_refused(
    flag: str,
) -> None:
    with pytest.raises(UserError, match=r"its own key|plain HTTP"):
        make_config(**{flag: "x"})


def test_data_that_is_not_drawn_from_is_warned_of() -> None:
    flags: dict[str, Any] = {"prompt_data": "a.jsonl", "rollout_batch_size": 1}
    (warning,) = make_config(**flags, rollout_global_dataset=False).warnings
    assert warning.startswith("--prompt-data with --disable-rollout-global-dataset")
    own = {"data_source_path": "mine.Source", "rollout_global_dataset": False}
    assert not any("--disable-rollout" in text for text in make_config(**flags, **own).warnings)
    assert make_config(**flags).warnings == make_config(rollout_batch_size=1).warnings


def test_a_level_that_a_function_of_importance_weights_replaces_is_warned_of() -> None:
    flags: dict[str, Any] = {"use_tis": True, "tis_level": "sequence", "rollout_batch_size": 1}
    assert not any("--tis-level" in warning for warning in make_config(**flags).warnings)
    (warning,) = make_config(**flags, custom_tis_function_path="mine.weigh").warnings
    assert "--tis-level has no effect with --custom-tis-function-path" in warning


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (
            {"disable_rewards_normalization": True, "disable_grpo_std_normalization": True},
            "--disable-grpo-std-normalization has no effect with --disable-rewards-normalization",
        ),
        (
            {"lora_rank": 4, "update_weight_transport": "disk", "update_weight_disk_dir": "x"},
            "--update-weight-transport has no effect with --lora-rank",
        ),
    ],
)
def test_flags_of_what_another_flag_leaves_out_are_warned_of(
    flags: dict[str, Any], said: str
) -> None:
    warnings = make_config(rollout_batch_size=1, hf_checkpoint="x", **flags).warnings
    assert any(warning.startswith(said) for warning in warnings)
