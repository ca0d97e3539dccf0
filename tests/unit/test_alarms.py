"""Alarms about runs that cannot learn: what sets them off, what does not, and that each is said
once."""

from __future__ import annotations

import random
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from slime.config import make_config
from slime.errors import UserError
from slime.files import read_lines
from slime.observe.alarms import CHECKS, AlarmWatch, find_alarms
from slime.observe.sinks import Sinks
from slime.page.report import write_report
from tests.support.metrics_page import documented_names
from tests.support.run_folders import create_run


def step(
    number: int, low: float = 0.0, high: float = 1.0, flat: float = 0.5, **others: Any
) -> dict[str, Any]:
    """A step with rewards from ``low`` to ``high``, a share ``flat`` of whose groups have no
    contrast."""
    row = {"rollout/reward/min": low, "rollout/reward/max": high, "rollout/zero_std/ratio": flat}
    row |= {"rollout/num_samples": 16.0, "train/grad_norm": 0.3, "step": number}
    return {**row, **{name.replace("__", "/"): value for name, value in others.items()}}


def names(rows: list[dict[str, Any]]) -> list[str]:
    return [alarm.name for alarm in find_alarms(rows)]


def steps(count: int, **same: Any) -> list[dict[str, Any]]:
    return [step(number, **same) for number in range(1, count + 1)]


@pytest.mark.parametrize(
    ("moved", "advice"), [(0.15, "--fake-quantisation"), (0.05, "slime align")]
)
def test_a_mismatch_that_the_engines_format_makes_is_told_as_that(
    moved: float, advice: str
) -> None:
    rows = steps(
        1, train__train_rollout_logprob_abs_diff=0.2, train__canary_quantisation_abs_diff=moved
    )
    [alarm] = [alarm for alarm in find_alarms(rows) if alarm.name == "train_rollout_mismatch"]
    assert alarm.fix.startswith(advice) and ("quantised" in alarm.detail) == (moved > 0.1)


def test_equal_rewards_are_usual_where_a_teacher_teaches() -> None:
    rows = steps(3, low=0.0, high=0.0, flat=1.0)
    assert names(rows) and find_alarms(rows, flags={"use_opd": True}, ended=True) == []
    assert find_alarms(rows[:1], flags={"use_opd": True}, ended=True) == []


#: 8 of 24 prompts fill the context.
NO_ROOM = {
    "rollout__truncated_ratio": 8 / 24, "rollout__prompt_too_long": 8.0,
    "rollout__dropped_empty": 8.0, "rollout__num_samples": 16.0,
}  # fmt: skip
CONSTANT = {"low": 0.25, "high": 0.25, "flat": 1.0, "train__grad_norm": 0.0}


@pytest.mark.parametrize(
    ("name", "rows", "said"),
    [
        ("constant_reward", steps(3, **CONSTANT), "last 3 steps is 0.25: there is"),
        (
            "constant_reward",  # a learning rate that breaks the model in its first step
            [*steps(1, reward=0.25, flat=0.2), *steps(9, low=0.0, high=0.0, flat=1.0)[1:]],
            "every reward of the last 8 steps is 0, and at step 1 they still differed",
        ),
        (
            "no_contrast",
            steps(3, flat=1.0, train__grad_norm=0.0),
            "no group had two different rewards",
        ),
        ("no_contrast", steps(3, flat=1.0), "no group had"),  # an entropy bonus gives a gradient
        (
            "zero_gradient",
            steps(1, train__grad_norm=0.0),
            "rewards go from 0 to 1, and yet train/grad_norm is 0",
        ),
        (
            "zero_gradient",
            [{"step": i, "train/grad_norm": 0.0} for i in range(3)],
            "in the last 3 steps",
        ),
        (
            "late_rewards",
            steps(1, rollout__reward_timeout=16.0, rollout__reward_crash=0.0),
            "16 calls ran into",
        ),
        ("late_rewards", steps(12, **CONSTANT, rollout__reward_timeout=16.0), "these count as 0"),
        (
            "late_rewards",
            steps(1, rollout__reward_crash=9.0),
            "9 ended their process, for 16 samples",
        ),
        (
            "tool_text_trained",
            steps(1, rollout__unsampled_trained_ratio=0.25),
            "25.0% of the tokens trained on were",
        ),
        (
            "stale_samples",
            steps(4, rollout__staleness__num_too_old=2.0),
            "2 samples of the last step are older",
        ),
        ("failing_samples", steps(3, rollout__num_failed_groups=1.0), "(3 in all)"),
        ("prompts_too_long", steps(4, **NO_ROOM), "in the last 4 steps (last: step 4)"),
        (
            "prompts_too_long",
            steps(1, **NO_ROOM),
            "at step 1 a prompt, or a conversation of several turns, filled the context 8 times; "
            "8 samples",
        ),
        (
            "truncation",
            steps(15, rollout__truncated_ratio=0.5, rollout__prompt_too_long=0.0),
            "50% of the responses of the last 15",
        ),
    ],
)
def test_a_run_that_cannot_learn_says_so(name: str, rows: list[dict[str, Any]], said: str) -> None:
    (alarm,) = find_alarms(rows)
    assert alarm.name == name and said in alarm.detail and alarm.fix


@pytest.mark.parametrize(
    "rows",
    [
        steps(20),
        steps(2, **CONSTANT),
        [*steps(2, **CONSTANT), step(3)],
        [*steps(2, **CONSTANT), {"step": 2, "eval/held-out": 0.0}, step(3)],
        steps(2, flat=1.0, train__grad_norm=0.0),  # by chance
        steps(9, rollout__reward_timeout=1.0, rollout__reward_crash=0.0),
        [
            *steps(2, rollout__unsampled_trained_ratio=0.1),
            step(3, rollout__unsampled_trained_ratio=0.0),
        ],
        steps(9, rollout__staleness__num_too_old=0.0),
        [
            *steps(1, **NO_ROOM),
            *steps(10, rollout__truncated_ratio=0.1, rollout__prompt_too_long=0.0),
        ],
        steps(9, rollout__staleness__num_too_old=2.0, train__tis=1.0),
        [step(1, rollout__num_failed_groups=1.0), *steps(2, rollout__num_failed_groups=0.0)],
        [{"step": 0, "eval/held-out": 0.5}],
        [],
    ],
)
def test_a_run_that_learns_is_left_alone(rows: list[dict[str, Any]]) -> None:
    assert names(rows) == []


def test_answers_that_were_cut_are_told_beside_prompts_without_room() -> None:
    rows = steps(15, **NO_ROOM | {"rollout__truncated_ratio": 20 / 24})
    by_name = {alarm.name: alarm for alarm in find_alarms(rows)}
    assert "50% of the responses" in by_name["truncation"].detail
    assert "--rollout-max-prompt-len" in by_name["prompts_too_long"].fix
    assert "--rollout-max-response-len" not in by_name["prompts_too_long"].fix


def test_an_alarm_is_new_once_and_again_when_it_has_come_back() -> None:
    watch = AlarmWatch()
    flat, fine = step(0, **CONSTANT), step(0)
    seen = [watch.look(row) for row in (flat, flat, flat, flat, fine, flat, flat, flat)]
    assert [len(new) for new, _ in seen] == [0, 0, 1, 0, 0, 0, 0, 1]
    assert [metrics.get("alarm/constant_reward") for _, metrics in seen] == [
        None,
        None,
        1,
        1,
        0,
        None,
        None,
        1,
    ]
    resumed = AlarmWatch([flat, flat, flat])
    assert resumed.look(flat) == ([], {"alarm/constant_reward": 1.0}), (
        "its console said so before the resume"
    )


# -- memory ----------------------------------------------------------------------------------------

HELD = ("driver", "rollout", "engine", "trainer", "trainer_gpu")


def series(
    values: Iterable[float], who: str = "trainer", free: float = 10.0
) -> list[dict[str, Any]]:
    of_host = {"perf/host_free_memory_gb": free}
    return [
        step(number, **{f"perf/{who}_memory_gb": value}, **of_host)
        for number, value in enumerate(values, 1)
    ]


def noise(number: int, width: float) -> float:
    """The same at each call, between -width and width."""
    return width * (random.Random(number).random() * 2 - 1)


@pytest.mark.parametrize("who", HELD)
@pytest.mark.parametrize(
    ("values", "said"),
    [
        ([8 + 0.05 * i for i in range(60)], "went from "),
        ([8 + 0.05 * i + noise(i, 0.1) for i in range(60)], "in 25 steps"),
        # behind a warm-up, an evaluation that takes memory every ten steps, and hundreds of steps
        # without
        ([8 - 6 * 0.8**i + 2 * (i % 10 == 0) + 0.06 * i for i in range(80)], "GB in"),
        ([8.0 + noise(i, 0.2) + 0.05 * max(0, i - 400) for i in range(520)], "GB in"),
        ([2.0 + 0.004 * i for i in range(900)], "GB in"),
    ],
    ids=["straight", "noisy", "behind caches and evaluations", "from step 400 on", "slow"],
)
def test_memory_that_grows_and_grows_is_told(who: str, values: list[float], said: str) -> None:
    (alarm,) = find_alarms(series(values, who))
    assert alarm.name == "memory_growth" and said in alarm.detail and "slime resume" in alarm.fix
    assert ("host has left last for about" in alarm.detail) == (who != "trainer_gpu")


@pytest.mark.parametrize(
    "values",
    [
        [8.0] * 300,
        [8 - 6 * 0.9**i for i in range(300)],
        [8 - 6 * 0.99**i for i in range(600)],
        [min(8.0, 2 + 0.2 * i) for i in range(300)],  # a cache that is full after thirty steps
        # first evaluation, first save, …
        [2.0 + 3 * (i >= 10) + 2 * (i >= 50) + 4 * (i >= 170) for i in range(300)],
        [4.0 + 0.1 * (i % 25) for i in range(300)],  # collected now and then
        [6.0 + noise(i, 3.0) for i in range(900)],
        [0.368 + 0.0007 * i for i in range(160)],  # a trainer as measured, docs/performance.md
        [0.116 + 0.000014 * i for i in range(1900)],  # the driver of two thousand steps
        [100 + 0.01 * i for i in range(600)],  # 6 GB of 100
        [5 + 0.08 * (i % 30) for i in range(600)],  # killed and started again every thirty steps
        [5 + 0.06 * i for i in range(35)],  # too early to tell
    ],
    ids=[
        "level",
        "caches",
        "slow caches",
        "a cache that fills straight",
        "jumps",
        "collected",
        "noise",
        "measured",
        "driver",
        "little",
        "restarts",
        "early",
    ],
)
def test_caches_evaluations_and_restarts_are_no_growth(values: list[float]) -> None:
    watch = AlarmWatch()
    for number, row in enumerate(series(values, free=40.0)):
        if number < 100 or number % 5 == 4:  # a judgement stays for a window, of five rows at least
            assert watch.look(row) == ([], {})
        else:
            watch.add(row)


def test_growth_is_said_once_and_over_when_it_pauses() -> None:
    watch = AlarmWatch()
    values = [8 + 0.06 * i for i in range(100)] + [14.0] * 60
    seen = [watch.look(row) for row in series(values)]
    assert [len(new) for new, _ in seen].count(1) == 1
    on = [metrics.get("alarm/memory_growth") for _, metrics in seen]
    assert (
        on.index(1.0) == 39
        and on.index(0.0) == 119
        and set(on[39:119]) == {1.0}
        and set(on[120:]) == {None}
    )


def test_memory_that_would_soon_be_used_up_is_told_before_there_are_windows() -> None:
    values = [8 + 1.5 * i for i in range(16)]
    (alarm,) = find_alarms(series(values, "rollout", free=40.0))
    assert alarm.detail == (
        "the rollout actor with its reward workers went from 17.0 to 30.5 GB in 9 steps; the 40.0 "
        "GB that the host has"
        " left last for about 27 more"
    )
    assert names(series(values, "rollout", free=400.0)) == [], (
        "a warm-up, as far as anybody can tell"
    )


def test_who_grows_fastest_is_told_first() -> None:
    both = [a | b for a, b in zip(series([8 + 0.05 * i for i in range(60)], "engine"),
                                  series([8 + 0.5 * i for i in range(60)], "trainer"))]  # fmt: skip
    (alarm,) = find_alarms(both)
    assert alarm.detail.startswith("a trainer rank went from") and alarm.detail.endswith(
        "so did an engine"
    )


# -- the first gradient ----------------------------------------------------------------------------


def first_steps(
    norms: Iterable[float | None], log_prob: float | None = -0.4, **others: Any
) -> list[dict[str, Any]]:
    scored = {"rollout__log_probs": log_prob, "rollout__raw_reward": 0.5, **others}
    return [step(number, train__grad_norm=norm, **scored) for number, norm in enumerate(norms, 1)]


@pytest.mark.parametrize(
    ("rows", "said"),
    [
        (first_steps([900.0]), "--attention-backend flash"),
        (first_steps([900.0, 700.0, 60.0]), "carry the chat template twice"),
        (first_steps([None, 900.0]), "in step 2"),  # a step that trained nothing
        (first_steps([900.0], train__moe_max_load=70.0), "with experts, slime align"),
        (first_steps([900.0], high=250.0), "rewards go from 0 to 250"),
    ],
)
def test_a_gradient_that_is_large_from_the_first_step_on_is_told(
    rows: list[dict[str, Any]], said: str
) -> None:
    (alarm,) = find_alarms(rows)
    assert alarm.name == "large_gradient" and said in f"{alarm.detail} {alarm.fix}"
    assert "at a mean log-prob of -0.400: below 5 is usual" in alarm.detail
    assert ("experts" in alarm.fix) == ("train/moe_max_load" in rows[0])
    assert ("rewards go" in alarm.fix) == (rows[0]["rollout/reward/max"] > 10)


@pytest.mark.parametrize(
    "rows",
    [
        first_steps([3.0, 2.0, 1.0]),
        first_steps([49.0] * 9),
        first_steps([1014.0, 750.0, 980.0], log_prob=-3.4),  # a toy of random weights, as measured
        first_steps([900.0], log_prob=None),
        first_steps([0.5, 0.5, 900.0]),  # a spike, which needs more steps to be told
        first_steps([900.0, 700.0, 3.0]),  # over
        # supervised
        [{"step": 1, "train/grad_norm": 900.0, "rollout/log_probs": -0.4, "train/loss": 0.4}],
        [
            row | {"rollout/log_probs": -0.4 if row["step"] > 9 else -3.4}
            for row in first_steps([300.0] * 20)
        ],
    ],
)
def test_gradients_of_other_kinds_are_left_alone(rows: list[dict[str, Any]]) -> None:
    assert names(rows) == []


def test_a_large_gradient_is_said_once_and_over_when_it_has_fallen() -> None:
    watch = AlarmWatch()
    seen = [watch.look(row) for row in first_steps([900.0, 800.0, 4.0, 4.0])]
    assert [len(new) for new, _ in seen] == [1, 0, 0, 0]
    assert [metrics.get("alarm/large_gradient") for _, metrics in seen] == [1.0, 1.0, 0.0, None]


# -- the end ---------------------------------------------------------------------------------------

FLAT = {"flat": 1.0, "train__grad_norm": 0.0}


@pytest.mark.parametrize(
    ("rows", "said"),
    [
        (steps(1, **CONSTANT), "in the only step every group had the same reward"),
        (
            [*steps(2, **FLAT), {"step": 2, "eval/held-out": 0.0}],
            "in all 2 steps every group had the same reward",
        ),
        # and that once
        (steps(3, **FLAT), "in the last 3 steps no group had two different rewards"),
    ],
)
def test_a_run_that_ends_without_any_contrast_says_so_however_short(
    rows: list[dict[str, Any]], said: str
) -> None:
    watch = AlarmWatch(rows)
    (alarm,) = watch.at_the_end()
    is_constant = rows[0]["rollout/reward/min"] == rows[0]["rollout/reward/max"]
    assert said in alarm.detail and ("slime reward" in alarm.fix) == is_constant, (
        "why all are 0 is in the reward"
    )
    assert alarm in find_alarms(rows, ended=True), "the page says it, too"


@pytest.mark.parametrize(
    "rows",
    [
        [],
        steps(2),
        [step(1, **FLAT), step(2)],
        [{"step": 1, "train/loss": 0.5}],  # without rewards
    ],
)
def test_a_short_run_with_some_contrast_ends_without_a_word(rows: list[dict[str, Any]]) -> None:
    assert AlarmWatch(rows).at_the_end() == []


def test_rewards_that_never_come_are_all_that_is_said() -> None:
    (alarm,) = AlarmWatch(steps(1, **CONSTANT, rollout__reward_timeout=16.0)).at_the_end()
    assert alarm.name == "late_rewards"


def test_console_metrics_and_page_say_it(tmp_path: Path) -> None:
    config = make_config(output_dir=str(tmp_path), run_name="flat")
    run = create_run(config)
    console = Console(
        record=True, width=400, force_terminal=False, file=(tmp_path / "out").open("w")
    )
    with Sinks(config, run, console) as sinks:
        sinks.begin(0, 4)
        for number in range(1, 5):
            row = step(number, **CONSTANT)
            sinks.log(row.pop("step"), row)
    assert (
        console.export_text().count(
            "warning: The reward is constant: every reward of the last 3 steps is 0.25"
        )
        == 1
    )
    assert [row.get("alarm/constant_reward") for row in read_lines(run.metrics_path)] == [
        None,
        None,
        1.0,
        1.0,
    ]
    assert "The reward is constant" in write_report(run.path).read_text()


def test_every_alarm_is_documented() -> None:
    assert {f"alarm/{check.__name__}" for check in CHECKS} <= documented_names()


# -- what is refused before it runs ----------------------------------------------------------------

RUN = [
    "--hf-checkpoint", "m", "--prompt-data", "p.jsonl", "--num-rollout", "3",
    "--rollout-batch-size", "4"
]  # fmt: skip


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("--n-samples-per-prompt 1", "grpo learns nothing from one sample per prompt"),
        ("--global-batch-size 4", "pass --n-samples-per-prompt 8"),
        ("--n-samples-per-prompt 1 --advantage-estimator gspo", "gspo learns nothing"),
        ("--n-samples-per-prompt 2 --use-kl-loss", "pass --kl-loss-coef 0.01 too"),
    ],
)
def test_flags_with_which_nothing_can_be_learnt_are_refused(words: str, said: str) -> None:
    from slime.config import parse_args

    with pytest.raises(UserError, match=said):
        parse_args([*RUN, *words.split()])


@pytest.mark.parametrize(
    "words",
    [
        "--n-samples-per-prompt 1 --advantage-estimator reinforce_plus_plus --normalize-advantages",
        "--n-samples-per-prompt 1 --custom-advantage-function-path a.b",
        "--n-samples-per-prompt 1 --custom-generate-function-path a.b",
        "--n-samples-per-prompt 1 --debug-rollout-only",
        "--n-samples-per-prompt 1 --loss-type sft_loss",
        "--n-samples-per-prompt 1 --use-opd --opd-teacher-load teacher",
        "--n-samples-per-prompt 1 --use-opd --opd-teacher-load teacher --opd-loss jsd",
    ],
)
def test_one_sample_per_prompt_where_something_else_makes_the_difference(words: str) -> None:
    from slime.config import parse_args

    assert parse_args([*RUN, *words.split()]).rollout.n_samples_per_prompt == 1


OPD = "--use-opd --opd-teacher-load teacher"


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (f"{OPD} --n-samples-per-prompt 1 --rm-type math", "--rm-type math has no effect"),
        (f"{OPD} --n-samples-per-prompt 2 --rm-type math", ""),
        (f"{OPD} --opd-kl-coef 0", "--opd-kl-coef 0 only measures"),
        ("--use-opsm", "--use-opsm has no effect with one optimizer step per rollout"),
        ("--use-opsm --num-steps-per-rollout 2", ""),
        ("--use-opsm --use-rollout-logprobs", ""),
        ("--use-opsm --custom-megatron-before-train-step-hook-path a.b", ""),
        ("--eps-clip-c 3", "--eps-clip-c has no effect"),
        ("--advantage-estimator sapo --sapo-tau-neg 2", "--sapo-tau-neg has no effect"),
        ("--advantage-estimator ppo --value-clip 0.5", "--value-clip has no effect"),
        ("--advantage-estimator ppo --value-clip 0.5 --num-steps-per-rollout 2", ""),
    ],
)
def test_flags_that_change_nothing_are_told(words: str, said: str) -> None:
    from slime.config import parse_args

    found = parse_args([*RUN, *words.split()]).warnings
    assert len(found) == bool(said) and all(said in warning for warning in found)


def test_a_kl_that_is_only_measured_is_said_to_be() -> None:
    from slime.config import parse_args

    config = parse_args(
        [*RUN, *["--n-samples-per-prompt", "2", "--use-kl-loss", "--kl-loss-coef", "0"]]
    )
    assert any("only measures the KL" in warning for warning in config.warnings)


@pytest.mark.parametrize(
    ("words", "is_warned"),
    [
        ("", False),
        ("--kl-loss-type k1", True),
        ("--kl-loss-type low_var_kl", False),
        ("--kl-loss-type k2", False),
        ("--use-unbiased-kl", False),
    ],
)
def test_a_kl_loss_that_pulls_nowhere_is_warned_of(words: str, is_warned: bool) -> None:
    from slime.config import parse_args

    config = parse_args(
        [
            *RUN,
            "--use-kl-loss",
            "--kl-loss-coef",
            "0.1",
            "--n-samples-per-prompt",
            "2",
            *words.split(),
        ]
    )
    assert any("--kl-loss-type k1" in warning for warning in config.warnings) == is_warned
