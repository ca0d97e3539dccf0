"""What a reward may be: a number that survives the statistics of its group and the loss."""

from __future__ import annotations

import math
import numbers
from typing import Any

from slime.user_code.loading import FunctionFailed, shown

#: The loss is computed in float32, where the square of a larger number is infinite.
LARGEST_REWARD = 1e18


def reward_number(value: Any, origin: str, role: str, why: str = "") -> float:
    """``value`` as a finite float: Python's, NumPy's and torch's numbers (also an array of one),
    bools, decimals.

    Args:
        origin: the function that returned it, in messages (`slime.user_code.loading.named`).
        role: what it was returned as: "the reward of sample 3".
        why: more about the sample, where the number is not finite.
    Raises:
        FunctionFailed: it is no number, not finite, or beyond 1e18.
    """

    def refused(why: str) -> FunctionFailed:
        fix = (
            "a reward is one finite number between -1e18 and 1e18, or a dict with one under "
            "--reward-key"
        )
        return FunctionFailed(
            f"{origin} returned {shown(value, 100)} ({type(value).__name__}) as {role}", why, fix
        )

    is_complex = isinstance(value, numbers.Complex) and not isinstance(value, numbers.Real)
    if isinstance(value, (str, bytes)) or is_complex:
        raise refused("it is no real number")
    try:
        number = float(value.item() if getattr(value, "shape", None) else value)
    except OverflowError:
        raise refused("it does not fit a floating-point number") from None
    except Exception as error:  # whatever the class of the user's raises
        raise refused(f"{type(error).__name__}: {error}") from error
    if not math.isfinite(number):
        raise refused(why)
    if abs(number) > LARGEST_REWARD:
        raise refused(
            f"its square does not fit float32, in which losses are computed; {why}".rstrip("; ")
        )
    return number


def is_number(value: Any) -> bool:
    """Whether ``value`` is one number of Python, NumPy or torch."""
    return isinstance(value, numbers.Number) or (
        hasattr(value, "item") and getattr(value, "shape", None) == ()
    )


def is_finite(value: Any) -> bool:
    """Whether a number is finite as a float."""
    try:
        return math.isfinite(float(value))
    except (
        OverflowError,
        TypeError,
        ValueError,
        RuntimeError,
    ):  # too large, complex, a signalling NaN
        return False
