"""Lengths of responses: from a distribution, a file, or the samples of a run."""

from __future__ import annotations

import json
import math
import random
from collections.abc import Sequence
from pathlib import Path

from slime.errors import UserError
from slime.files import read_lines

#: Assumed standard deviation of the logarithm of lengths, and their assumed mean as a fraction of
#: the longest response that the flags allow.
SIGMA = 0.9
MEAN_SHARE = 0.25
_DRAWN = 1 << 14
_WANTED = "pass a run folder with samples, or a JSON file such as [[310, 1200], [77, 4096]]"


def log_normal(mean: float, longest: int, sigma: float = SIGMA) -> list[int]:
    """Draw log-normal lengths, capped at ``longest``, whose mean after the cap is about ``mean``.
    Every call gives the same lengths."""
    drawn = random.Random(0)
    normal = [drawn.gauss(0.0, sigma) for _ in range(_DRAWN)]

    def capped(median: float) -> list[int]:
        return [min(longest, max(1, round(median * math.exp(one)))) for one in normal]

    low = 0.0
    high = float(longest)
    for _ in range(30):
        middle = (low + high) / 2
        if sum(capped(middle)) < mean * _DRAWN:
            low = middle
        else:
            high = middle
    return capped(high)


def read_lengths(path: Path) -> list[int]:
    """Read lengths of responses in tokens, in the order of the samples.

    Args:
        path: a run folder, or a JSON file with a list of lengths or of lists of lengths.
    Raises:
        UserError: the path cannot be read or contains no lengths.
    """
    try:
        if path.is_dir():
            files = sorted(path.glob("samples/**/rollout_*.jsonl"))
            rows = [row for file in files for row in read_lines(file)]
            found: Sequence[object] = [row.get("response_length") for row in rows]
        else:
            found = _flat(json.loads(path.read_text()))
    except (OSError, ValueError) as error:
        raise UserError(f"--lengths {path} cannot be read", why=str(error), fix=_WANTED) from None
    lengths = list[int]()
    for one in found:
        if not isinstance(one, int) or one < 0:
            raise UserError(f"--lengths {path}: {one!r} is no number of tokens", fix=_WANTED)
        if one:
            lengths.append(one)
    if not lengths:
        raise UserError(f"--lengths {path} holds no lengths", fix=_WANTED)
    return lengths


def _flat(value: object) -> Sequence[object]:
    if not isinstance(value, list):
        return [value]
    return [one for part in value for one in _flat(part)]
