"""Reward for GSM8K: the last number of the response against the number behind "####" of the
reference answer."""

from __future__ import annotations

import re
from typing import Any

from slime.samples.types import Sample

_NUMBER = re.compile(r"-?\d[\d,]*(?:\.\d+)?")


def final_number(text: str) -> float | None:
    """The number behind the last "####", else the last number of the text.

    Example:
        >>> (final_number("3 bags of 4: 3 * 4 = 12"), final_number("so #### 1,024"),
        ...  final_number("none"))
        (12.0, 1024.0, None)
    """
    numbers = _NUMBER.findall(text.rpartition("####")[2]) or _NUMBER.findall(text)
    return float(numbers[-1].replace(",", "")) if numbers else None


def reward(args: Any, sample: Sample, **_: Any) -> float:
    """1 when the final numbers agree, else 0."""
    expected = final_number(str(sample.label))
    return float(expected is not None and final_number(sample.response) == expected)
