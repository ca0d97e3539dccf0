"""Equations between the flags of on-policy distillation and the others."""

from __future__ import annotations

from typing import Any

from slime.config.draft import Draft
from slime.config.flag import option_of
from slime.config.teachers import BASE, read_teachers
from slime.errors import UserError

#: Functions of the user's that may set ``teacher_log_probs`` of samples.
_MAY_SCORE = (
    "custom_rm_path",
    "custom_reward_post_process_path",
    "custom_generate_function_path",
    "rollout_function_path",
    "rollout_sample_hook_path",
    "custom_convert_samples_to_train_data_path",
)
#: Functions of the user's that may set rewards.
_MAY_REWARD = (*_MAY_SCORE, "rm_type")


def distillation(draft: Draft) -> None:
    """Check --use-opd."""
    if not draft["use_opd"]:
        return
    if draft["opd_type"] == "megatron":
        _trainer_teachers(draft)
    else:
        _engine_teachers(draft)
    if draft["disable_compute_advantages_and_returns"] and draft["opd_loss"] == "sampled":
        raise UserError(
            "--use-opd and --disable-compute-advantages-and-returns exclude each other",
            why="the teacher acts through the advantages",
            fix="leave one out, or pass another --opd-loss",
        )
    if draft["opd_loss"] != "sampled" and any(
        "lm_head" in name for name in draft["lora_target_modules"]
    ):
        raise UserError(
            f"--opd-loss {draft['opd_loss']} and an adapter of the output layer exclude each other",
            why="distributions are computed blockwise from the output layer alone",
            fix="leave it out of --lora-target-modules, or pass --opd-loss sampled",
        )
    if draft["dynamic_sampling_filter_path"] and not any(draft[dest] for dest in _MAY_REWARD):
        raise UserError(
            "--dynamic-sampling-filter-path with --use-opd and no reward function",
            why="every reward is 0 then, and a filter of groups without contrast keeps none",
            fix="leave it out, or pass --rm-type",
        )


def may_score(args: Any) -> bool:
    """Whether a function of the user's may set ``teacher_log_probs``.

    Args:
        args: the flat view of the configuration.
    """
    return any(getattr(args, dest) for dest in _MAY_SCORE)


def _trainer_teachers(draft: Draft) -> None:
    teachers = read_teachers(draft["opd_teacher_load"])
    if not teachers:
        raise UserError(
            "--opd-type megatron needs --opd-teacher-load",
            fix="pass a directory, NAME=DIR for each of several teachers, or `self`",
        )
    if any(teacher.source == BASE for teacher in teachers) and not draft["lora_rank"]:
        raise UserError(
            f"--opd-teacher-load {BASE} needs --lora-rank",
            why="it is the model without adapters, and this run trains none",
            fix="pass the directory of the model",
        )


def _engine_teachers(draft: Draft) -> None:
    read_teachers(draft["opd_teacher_urls"])
    own = [option_of(dest) for dest in _MAY_SCORE if draft[dest]]
    scores_itself = bool(draft["opd_teacher_urls"] or draft["sglang_config"])
    if not scores_itself and not own:
        raise UserError(
            "--use-opd has no teacher",
            why="none of --opd-teacher-load, --opd-teacher-urls and --sglang-config names one, and "
            "no function of yours may set teacher_log_probs",
            fix="pass --opd-teacher-load DIR for a teacher in the trainer, or --opd-teacher-urls",
        )
    if draft["opd_loss"] != "sampled" and not draft["opd_top_k"]:
        raise UserError(
            f"--opd-loss {draft['opd_loss']} over the whole vocabulary needs --opd-teacher-load",
            why="an engine answers with its most likely tokens, not with all of them",
            fix="pass --opd-top-k 64, or put the teacher into the trainer",
        )
    if draft["opd_loss"] != "sampled" and not scores_itself:
        raise UserError(
            f"--opd-loss {draft['opd_loss']} needs a teacher",
            why="a function of yours can set the log-probs of the sampled tokens alone",
            fix="pass --opd-teacher-urls or --opd-teacher-load, or --opd-loss sampled",
        )
    if scores_itself and draft["use_sampling_mask"] and draft["opd_loss"] == "sampled":
        raise UserError(
            "--opd-type sglang with --use-sampling-mask",
            why=f"with {' and '.join(draft.truncations())} the policy's log-probs are over the "
            "tokens that were left to be sampled from, and an engine's teacher gives those of the "
            "whole vocabulary",
            fix="sample from the whole vocabulary, pass --no-use-sampling-mask, or "
            "--opd-teacher-load for a teacher in the trainer, which computes as the policy does",
        )
    temperature = draft["rollout_temperature"]
    if temperature == 1.0:
        return
    if scores_itself:
        raise UserError(
            f"--opd-type sglang with --rollout-temperature {temperature:g}",
            why="engines give the log-probs of a prompt at temperature 1, whatever they are asked "
            "for, and the policy's are those at which it sampled",
            fix="pass --rollout-temperature 1, or --opd-teacher-load for a teacher in the trainer, "
            "which is scaled as the policy is",
        )
    draft.warnings.append(
        f"--use-opd with --rollout-temperature {temperature:g}: engines give a teacher's log-probs "
        f"at temperature 1, so that the policy, as sampled at {temperature:g}, learns the teacher "
        f"as it is at 1 ({' or '.join(own)} sets them)"
    )
