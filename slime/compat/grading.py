"""Graders under their earlier names and signatures. Worker processes
(`slime.rollout.rewards.grading_pool`) compare expressions, because sympy may hang.
"""

from __future__ import annotations

import functools
from typing import Any

from slime import deadlines
from slime.compat.calls import shared_loop
from slime.config.flags import all_flags
from slime.rollout.rewards import instructions
from slime.rollout.rewards.grading_pool import GradingPool
from slime.rollout.rewards.remote import RemoteReward
from slime.rollout.rewards.text import (
    ANSWER_LINE,
    f1_of_words,
    final_answer,
    last_boxed,
    normalise_answer,
    normalise_final_answer,
)
from slime.samples.types import Sample

_WORKERS = 2
#: Characters at the end of a response that a strict comparison reads.
_TAIL = 100

# -- boxes -----------------------------------------------------------------------------------------


def extract_answer(passage: str | None) -> str | None:
    r"""Return the content of the last ``\boxed{…}``; None if there is none."""
    return last_boxed(passage or "")


def extract_boxed_answer(solution: str | None) -> str | None:
    """Return the last boxed expression, or None."""
    return last_boxed(solution or "")


def last_boxed_only_string(string: str | None) -> str | None:
    r"""Return the last ``\boxed{…}`` itself; None if there is none."""
    content = last_boxed(string or "")
    return None if content is None else f"\\boxed{{{content}}}"


def remove_boxed(s: str | None) -> str | None:
    r"""Return the content of ``\boxed{…}``; None for None, the result of `last_boxed_only_string`
    without a box."""
    return None if s is None else last_boxed(s)


# -- expressions -----------------------------------------------------------------------------------


@functools.cache
def _graders() -> GradingPool:
    return GradingPool(_WORKERS)


def _is_right(grader: str, response: str, label: Any) -> bool:
    """Tell whether a worker grades a response as correct within `deadlines.POOL_MATH`."""
    return bool(
        shared_loop().run(_graders().grade(grader, response, label, deadlines.POOL_MATH)).score
    )


def grade_answer_verl(solution_str: str, ground_truth: Any) -> bool:
    r"""Tell whether the last ``\boxed{…}`` of the solution equals the ground truth."""
    return (
        bool(ground_truth)
        and last_boxed(solution_str) is not None
        and _is_right("boxed_math", solution_str, ground_truth)
    )


def grade_answer_sympy(given_answer: str | None, ground_truth: Any) -> bool:
    """Tell whether two answers, given without a box, are equal expressions."""
    return given_answer is not None and _is_right(
        "boxed_math", f"\\boxed{{{given_answer}}}", ground_truth
    )


def grade_answer_mathd(given_answer: str | None, ground_truth: Any) -> bool:
    """Do as `grade_answer_sympy`, which also accepts answers that are equal as text."""
    return grade_answer_sympy(given_answer, ground_truth)


def get_deepscaler_rule_based_reward(response: str, label: Any) -> int:
    """Return 1 if the text after the reasoning has the correct answer in a box, else 0."""
    return int(_is_right("deepscaler", response, label))


# -- instructions ----------------------------------------------------------------------------------


@functools.cache
def _instruction_graders() -> GradingPool:
    return GradingPool(_WORKERS, instructions.__name__, instructions.PACKAGE)


def compute_ifbench_reward(
    response: str, label: Any, metadata: dict[str, Any] | None = None
) -> float:
    """Return 1.0 if the response follows all instructions in ``metadata``, else 0.0; ``label`` is
    ignored.

    Raises:
        UserError: ``metadata`` has no instructions, or they cannot be checked here.
    """
    instructions.check_package()
    task = instructions.read_task(metadata, "compute_ifbench_reward")
    grade = _instruction_graders().grade(
        instructions.NAME, str(response or ""), task, deadlines.POOL_MATH
    )
    return shared_loop().run(grade).score


# -- text ------------------------------------------------------------------------------------------


def normalize_answer(s: str | None) -> str:
    """`slime.rollout.rewards.text.normalise_answer`; None counts as ""."""
    return normalise_answer(str(s or ""))


def normalize_final_answer(final_answer: str | None) -> str:
    """`slime.rollout.rewards.text.normalise_final_answer`; None counts as ""."""
    return normalise_final_answer("" if final_answer is None else str(final_answer))


def f1_score(prediction: str | None, ground_truth: Any) -> tuple[float, float, float]:
    """(F1, precision, recall) of the words; zeros if the prediction or the ground truth is
    None."""
    if prediction is None or ground_truth is None:
        return 0.0, 0.0, 0.0
    return f1_of_words(str(prediction), ground_truth)


def is_correct_minerva(
    solution_str: str, gt: str, gt_need_extract: bool = False, answer_pattern: str = ANSWER_LINE
) -> tuple[bool, str]:
    """Return (whether the last match of the pattern equals the ground truth after Minerva's
    normalisation, the match)."""
    return final_answer(solution_str, last_boxed(gt) if gt_need_extract else gt, answer_pattern)


def is_correct_strict_box(
    pred: str, gt: str, pause_tokens_index: list[int] | None = None
) -> tuple[int, str | None]:
    """(1 if the content of the box in the last 100 characters is exactly the ground truth, else -1,
    the content)."""
    end = len(pred) if pause_tokens_index is None else pause_tokens_index[-1]
    boxed = last_boxed(pred[max(0, end - _TAIL) :])
    return (1 if boxed == gt else -1), boxed


def verify(
    solution_str: str,
    answer: str,
    strict_box_verify: bool = False,
    pause_tokens_index: list[int] | None = None,
) -> tuple[bool, str | None]:
    """Return (whether the solution is correct, the answer found in it)."""
    if not strict_box_verify:
        return is_correct_minerva(solution_str, answer)
    score, predicted = is_correct_strict_box(solution_str, answer, pause_tokens_index)
    return score == 1, predicted


def compute_score(
    solution_str: str,
    ground_truth: str,
    strict_box_verify: bool = False,
    pause_tokens_index: list[int] | None = None,
) -> dict[str, Any]:
    """DAPO's score ``{"score": 1.0 | -1.0, "acc": bool, "pred": str}`` of the last 300
    characters."""
    right, predicted = verify(
        solution_str[-300:], ground_truth, strict_box_verify, pause_tokens_index
    )
    return {"score": 1.0 if right else -1.0, "acc": right, "pred": predicted}


async def remote_rm(args: Any, sample: Sample, max_retries: int = 10) -> Any:
    """Return the answer of the reward model at ``args.rm_url``.

    Raises:
        UserError: all tries fail, or the answer is not JSON.
    """
    timeout = getattr(args, "rm_timeout", all_flags()["rm_timeout"].default)
    remote = RemoteReward(args.rm_url, timeout, tries=max_retries)
    try:
        return await remote.score(sample)
    finally:
        await remote.close()
