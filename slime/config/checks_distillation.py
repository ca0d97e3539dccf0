"""Contradictions between the flags of on-policy distillation and other flags."""

from __future__ import annotations

from typing import Any

from slime.config.draft import Draft
from slime.config.flag import option_of
from slime.config.teachers import BASE, SELF, read_teachers
from slime.errors import UserError

#: Flags of user functions that can set ``teacher_log_probs`` of samples.
_MAY_SCORE = (
    "custom_rm_path",
    "custom_reward_post_process_path",
    "custom_generate_function_path",
    "rollout_function_path",
    "rollout_sample_hook_path",
    "custom_convert_samples_to_train_data_path",
)
#: Flags that can set rewards.
_MAY_REWARD = (*_MAY_SCORE, "rm_type")


def distillation(draft: Draft) -> None:
    """Check --use-opd."""
    if not draft["use_opd"]:
        return
    if draft["opd_type"] == "megatron":
        _trainer_teachers(draft)
    else:
        _engine_teachers(draft)
    _idle_key(draft)
    if draft["opd_kl_coef"] == 0:
        draft.warnings.append(
            "--use-opd with --opd-kl-coef 0 only measures the distance to the teacher "
            "(rollout/opd_reverse_kl, train/opd_loss): nothing is learned from it"
        )
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
            why="distributions are computed in blocks from the output layer's weight, without "
            "adapters",
            fix="leave it out of --lora-target-modules, or pass --opd-loss sampled",
        )
    if draft["dynamic_sampling_filter_path"] and not any(draft[dest] for dest in _MAY_REWARD):
        raise UserError(
            "--dynamic-sampling-filter-path with --use-opd and no reward function",
            why="every reward is then 0, and a filter that drops groups of equal rewards drops all",
            fix="leave it out, or pass --rm-type",
        )


def may_score(args: Any) -> bool:
    """Tell whether a user function may set ``teacher_log_probs``.

    Args:
        args: the flat view of the configuration.
    """
    return any(getattr(args, dest) for dest in _MAY_SCORE)


def only_teacher(key: str, name: str) -> str:
    """Return a warning that --opd-teacher-key ``key`` chooses among one teacher."""
    return (
        f"--opd-teacher-key {key} has no effect: there is one teacher, {name}, and rows need not "
        "name it"
    )


def _idle_key(draft: Draft) -> None:
    """Warn of --opd-teacher-key where there is nothing to choose. `slime.run.preflight` does so
    for the models of --sglang-config."""
    if not draft.differs("opd_teacher_key"):
        return
    key = draft["opd_teacher_key"]
    in_trainer = draft["opd_type"] == "megatron"
    teachers = read_teachers(draft["opd_teacher_load" if in_trainer else "opd_teacher_urls"])
    if len(teachers) == 1:
        draft.warnings.append(only_teacher(key, teachers[0].name))
    elif not teachers and not draft["sglang_config"]:
        draft.warnings.append(
            f"--opd-teacher-key {key} chooses no teacher: your functions score, and they alone "
            "could read it"
        )


def _trainer_teachers(draft: Draft) -> None:
    teachers = read_teachers(draft["opd_teacher_load"])
    if not teachers:
        raise UserError(
            "--opd-type megatron needs --opd-teacher-load",
            fix="pass a directory, NAME=DIR for each of several teachers, or `self`",
        )
    step = draft["opd_teacher_ckpt_step"]
    if step is not None and all(teacher.source in (SELF, BASE) for teacher in teachers):
        raise UserError(
            f"--opd-teacher-ckpt-step {step} has no effect",
            why="no teacher is loaded from a checkpoint",
            fix="leave it out, or pass the directory of a checkpoint with --opd-teacher-load",
        )
    if any(teacher.source == BASE for teacher in teachers) and not draft["lora_rank"]:
        raise UserError(
            f"--opd-teacher-load {BASE} needs --lora-rank",
            why=f"{BASE} is the model without its adapters, and this run trains no adapters",
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
            "there is no user function that could set teacher_log_probs",
            fix="pass --opd-teacher-load DIR for a teacher in the trainer, or --opd-teacher-urls",
        )
    if draft["opd_loss"] != "sampled" and not draft["opd_top_k"]:
        raise UserError(
            f"--opd-loss {draft['opd_loss']} over the whole vocabulary needs --opd-teacher-load",
            why="an engine returns the log-probs of its most likely tokens only",
            fix="pass --opd-top-k 64, or run the teacher in the trainer",
        )
    if draft["opd_loss"] != "sampled" and not scores_itself:
        raise UserError(
            f"--opd-loss {draft['opd_loss']} needs a teacher",
            why="a user function can set the log-probs of sampled tokens only",
            fix="pass --opd-teacher-urls or --opd-teacher-load, or --opd-loss sampled",
        )
    if scores_itself and draft["use_sampling_mask"] and draft["opd_loss"] == "sampled":
        raise UserError(
            "--opd-type sglang and --use-sampling-mask exclude each other",
            why=f"with {' and '.join(draft.truncations())} the policy's log-probs are normalised "
            "over the tokens that could be sampled, but a teacher in an engine returns log-probs "
            "over the whole vocabulary",
            fix="sample from the whole vocabulary, pass --no-use-sampling-mask, or pass "
            "--opd-teacher-load for a teacher in the trainer, which uses the policy's mask",
        )
    temperature = draft["rollout_temperature"]
    if temperature == 1.0:
        return
    if scores_itself:
        raise UserError(
            f"--opd-type sglang needs --rollout-temperature 1, not {temperature:g}",
            why="engines return log-probs of a prompt at temperature 1, whatever the request says, "
            "but the policy's log-probs are at its sampling temperature",
            fix="pass --rollout-temperature 1, or --opd-teacher-load for a teacher in the trainer, "
            "which uses the policy's temperature",
        )
    draft.warnings.append(
        f"--use-opd with --rollout-temperature {temperature:g}: log-probs that {' or '.join(own)} "
        "gets from an engine are at temperature 1; the policy sampled at "
        f"{temperature:g} then learns the teacher at temperature 1"
    )
