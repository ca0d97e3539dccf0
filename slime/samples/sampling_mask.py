"""Sampling masks: the tokens that top-k, top-p and min-p left to sample from, from an engine's
answer to the trainer.

    meta_info["output_token_sampling_mask"] ─► Sample.rollout_top_p_token_ids, …_offsets ─► payloads

Response token t was sampled from the tokens ``ids[offsets[t] : offsets[t + 1]]``. A token that was
not sampled (a tool's answer) has none; the trainer computes its log-prob over the whole vocabulary.

With masks, log-probs of engine and trainer are those of the distribution that was sampled. Without
them, importance ratios compare different distributions, and training drifts away from the samples.

Source: DeepSeek-V3.2 report (arXiv:2512.02556), section 3.1, "Keep Sampling Mask".
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import numpy as np

from slime.errors import UserError

#: The fix if tokens of an answer and its ``meta_info`` have different lengths.
_APPEND_ALL = (
    "append all tokens of an answer with its meta_info, and give those that are not to be trained "
    "on a loss_mask of 0"
)


def extended_mask(
    ids: Any, offsets: Any, length: int, kept: Sequence[Sequence[int]] | None, count: int
) -> tuple[np.ndarray, np.ndarray]:
    """Extend the mask of the first ``length`` response tokens by the next ``count``.

    Args:
        ids, offsets: int32 [n] and [length + 1]; None if no token has been sampled yet.
        kept: the engine's mask of each new token; None for tokens that were not sampled.
    Returns:
        (ids, offsets), int32.
    Raises:
        UserError: there is not one list per token.

    Example (a sampled token after two tokens of a tool):
        >>> ids, offsets = extended_mask(None, None, 2, [[5, 9]], 1)
        >>> ids.tolist(), offsets.tolist()
        ([5, 9], [0, 0, 0, 2])
    """
    if kept is not None and len(kept) != count:
        raise UserError(
            f"{count} tokens were appended with the sampling masks of {len(kept)}", fix=_APPEND_ALL
        )
    if offsets is None:
        ids = np.zeros(0, dtype=np.int32)
        offsets = np.zeros(length + 1, dtype=np.int32)
    sizes = [len(row) for row in kept] if kept is not None else [0] * count
    added = [token for row in kept for token in row] if kept is not None else []
    ends = offsets[-1] + np.cumsum(sizes, dtype=np.int64)
    return (
        np.concatenate([ids, np.asarray(added, dtype=np.int32)]),
        np.concatenate([offsets, ends.astype(np.int32)]),
    )


def sampling_log_probs(within: Sequence[float | None], count: int) -> list[float]:
    """Return the log-probs of the ``count`` tokens of an answer over their sampling masks.

    Raises:
        UserError: there is not one number per token.
    """
    found = [float(value) for value in within if value is not None]
    if len(found) != len(within) or len(found) != count:
        raise UserError(
            f"{count} tokens were appended with {len(found)} output_token_sampling_logprobs",
            fix=_APPEND_ALL,
        )
    return found


def mask_rows(ids: Any, offsets: Any) -> list[list[int]] | None:
    """Return a mask in the engine's form: a list for each token; None without a mask.

    Example:
        >>> import numpy as np
        >>> mask_rows(np.array([5, 9, 7]), np.array([0, 2, 3]))
        [[5, 9], [7]]
    """
    if offsets is None:
        return None
    return [ids[begin:end].tolist() for begin, end in pairwise(offsets)]


def foreign_token(ids: Any, offsets: Any, response: Sequence[int]) -> int | None:
    """Return the position of the first response token that is not in its own sampling mask; None if
    there is none.

    Args:
        ids, offsets: a mask without `mask_problem`.

    Example (token 8 was not among 5 and 9):
        >>> foreign_token([5, 9, 5, 9], [0, 0, 2, 4], [3, 9, 8])
        2
    """
    sizes = np.diff(np.asarray(offsets))
    rows = np.repeat(np.arange(len(response)), sizes)
    is_target = np.asarray(ids) == np.asarray(response)[rows]
    found = np.bincount(rows[is_target], minlength=len(response))
    without = np.flatnonzero((sizes > 0) & (found == 0))
    return int(without[0]) if without.size else None


def mask_ids_problem(ids: Any, num_tokens: int) -> str:
    """Return the problem of token ids that user code has set; "" if there is none."""
    if ids is None:
        return ""
    try:
        found = np.asarray(ids)
    except (TypeError, ValueError, RuntimeError) as error:
        return f"that are not an array ({error})"
    if found.ndim != 1 or (found.size and (found.dtype.kind not in "iu" or found.min() < 0)):
        return f"of {found.dtype} and shape {list(found.shape)}, not whole numbers from 0 on"
    return ""


def mask_offsets_problem(offsets: Any, num_tokens: int) -> str:
    """Return the problem of offsets for a sample of ``num_tokens``; "" if there is none."""
    if problem := mask_ids_problem(offsets, num_tokens):
        return problem
    values = np.asarray([] if offsets is None else offsets)
    if values.size and (values[0] != 0 or (np.diff(values) < 0).any()):
        return "that do not begin at 0, or decrease"
    if values.size > max(num_tokens, 1):
        return f"for {values.size - 1} of {num_tokens - 1} tokens"
    return ""


def mask_problem(ids: Any, offsets: Any, response_length: int) -> str:
    """Return the problem of a sample's mask as a whole; "" if there is none."""
    if ids is None and offsets is None:
        return ""
    if ids is None or offsets is None:
        return "only one of rollout_top_p_token_ids and rollout_top_p_token_offsets"
    for name, problem in (
        ("ids", mask_ids_problem(ids, 0)),
        ("offsets", mask_offsets_problem(offsets, response_length + 1)),
    ):
        if problem:
            return f"rollout_top_p_token_{name} {problem}"
    if len(offsets) != response_length + 1:
        return f"{len(offsets)} rollout_top_p_token_offsets for {response_length} response tokens"
    if int(offsets[-1]) != len(ids):
        return f"{len(ids)} rollout_top_p_token_ids, but the offsets end at {int(offsets[-1])}"
    return ""
