"""Flags of on-policy distillation: what follows from them, and which contradict each other."""

from __future__ import annotations

from typing import Any

import pytest

from slime.config import make_config
from slime.errors import UserError
from slime.prompts.row_format import check_label_key
from slime.rollout.rewards.row_checks import RewardJudge

URL = {"opd_teacher_urls": ["http://teacher:30000"]}
DIR = {"opd_teacher_load": ["teacher"]}


def test_where_teachers_run_follows_from_what_names_them() -> None:
    assert make_config().distillation.opd_type is None
    assert make_config(use_opd=True, **DIR).distillation.opd_type == "megatron"
    assert make_config(use_opd=True, **URL).distillation.opd_type == "sglang"


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        ({}, "--use-opd has no teacher"),
        ({"opd_type": "megatron"}, "needs --opd-teacher-load"),
        ({**DIR, "opd_type": "sglang"}, "--opd-teacher-load has no effect with --opd-type sglang"),
        ({**URL, "rollout_temperature": 0.8}, "needs --rollout-temperature 1, not 0.8"),
        ({**URL, "rollout_top_p": 0.9}, "--opd-type sglang and --use-sampling-mask exclude"),
        ({**URL, "opd_loss": "jsd"}, "over the whole vocabulary needs --opd-teacher-load"),
        ({"custom_rm_path": "a.b", "opd_loss": "jsd", "opd_top_k": 4}, "needs a teacher"),
        ({"opd_teacher_load": ["base"]}, "--opd-teacher-load base needs --lora-rank"),
        ({"opd_teacher_load": ["a=x", "a=y"]}, "two teachers have the name 'a'"),
        ({**DIR, "dynamic_sampling_filter_path": "a.b"}, "and no reward function"),
        (
            {**DIR, "loss_type": "custom_loss", "custom_loss_function_path": "a.b"}
            | {"disable_compute_advantages_and_returns": True},
            "exclude each other",
        ),
        (
            {**DIR, "opd_loss": "jsd", "lora_rank": 4, "lora_target_modules": ["lm_head"]},
            "an adapter of the output layer exclude each other",
        ),
        ({**DIR, "opd_jsd_beta": 1.0, "opd_loss": "jsd"}, "--opd-jsd-beta is 1"),
        (
            {"opd_teacher_load": ["self"], "opd_teacher_ckpt_step": 3},
            "--opd-teacher-ckpt-step 3 has no effect",
        ),
    ],
)
def test_contradictions_are_refused(flags: dict[str, Any], said: str) -> None:
    with pytest.raises(UserError) as caught:
        make_config(**{"use_opd": True, **flags})
    assert said in caught.value.what


def test_a_teacher_in_the_trainer_is_scaled_and_masked_as_the_policy() -> None:
    config = make_config(use_opd=True, rollout_temperature=0.8, rollout_top_p=0.9, **DIR)
    assert config.distillation.in_advantage and not config.warnings


def test_a_function_that_scores_at_another_temperature_is_warned_of() -> None:
    config = make_config(use_opd=True, custom_rm_path="a.b", rollout_temperature=0.8)
    assert any("learns the teacher at temperature 1" in warning for warning in config.warnings)


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (DIR, ["--opd-teacher-key judge has no effect: there is one teacher, default, and"]),
        (
            {"opd_teacher_urls": ["math=http://a:1"]},
            ["--opd-teacher-key judge has no effect: there is one teacher, math, and"],
        ),
        ({"custom_rm_path": "a.b"}, ["--opd-teacher-key judge chooses no teacher"]),
        ({"opd_teacher_load": ["math=x", "code=y"]}, []),
        ({"sglang_config": "models.yaml"}, []),  # its models are counted before the launch
    ],
)
def test_a_key_that_chooses_among_fewer_than_two_teachers_is_warned_of(
    flags: dict[str, Any], said: list[str]
) -> None:
    config = make_config(use_opd=True, opd_teacher_key="judge", **flags)
    found = [warning for warning in config.warnings if "--opd-teacher-key" in warning]
    assert [warning[: len(text)] for warning, text in zip(found, said, strict=True)] == said


def test_a_teacher_teaches_without_the_labels_of_a_grader() -> None:
    graded: dict[str, Any] = {"rm_type": "math", "prompt_data": "rows.jsonl"}
    config = make_config(use_opd=True, **DIR, **graded)
    check_label_key(config)
    judge = RewardJudge.of_training(config)
    assert judge is not None and judge.rm_type is None
    every_group_is_left_out = {"dynamic_sampling_filter_path": "filters.keep"}
    for flags in ({}, {"use_opd": True, **DIR, **every_group_is_left_out}):
        with pytest.raises(UserError, match="compares responses with labels, and there are none"):
            check_label_key(make_config(**graded, **flags))
