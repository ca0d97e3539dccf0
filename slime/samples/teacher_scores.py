"""Teacher data of a sample besides ``teacher_log_probs``: the teacher's prompt and its most likely
tokens.

    Sample.teacher_prompt_tokens   token ids, if the teacher has another prompt
    Sample.teacher_top_tokens      float32 [2, R, k]: ids and log-probs in the place of each of R
                                   response tokens (ids below 2 ** 24 are exact)
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from slime.samples.sample_fields import token_problem


def pack_top_tokens(rows: Sequence[Sequence[tuple[float, int]]]) -> np.ndarray:
    """Return float32 [2, R, k] from (log-prob, id) pairs per response token.

    Example:
        >>> pack_top_tokens([[(-0.5, 7), (-1.0, 3)]]).tolist()
        [[[7.0, 3.0]], [[-0.5, -1.0]]]
    """
    ids = [[token for _, token in row] for row in rows]
    log_probs = [[log_prob for log_prob, _ in row] for row in rows]
    return np.array([ids, log_probs], dtype=np.float32)


def prompt_problem(prompt: Any, num_tokens: int) -> str:
    """Return the problem of a teacher's prompt; "" if there is none, or ``prompt`` is None."""
    if prompt is None:
        return ""
    if not len(prompt):
        return "that are empty"
    problem = token_problem(prompt, None)
    return f"with {problem}" if problem else ""


def top_tokens_problem(values: Any, num_tokens: int) -> str:
    """Return the problem of the most likely tokens of a sample of ``num_tokens``; "" if there is
    none."""
    if values is None:
        return ""
    shape = np.shape(values)
    if len(shape) != 3 or shape[0] != 2 or not 0 < shape[1] <= num_tokens:
        return "that are not an array [2, response tokens, k]"
    found = np.asarray(values)
    if not np.isfinite(found).all():
        return "that are not all finite numbers"
    return "" if found[1].max(initial=0.0) <= 1e-3 else "with a log-prob above 0"
