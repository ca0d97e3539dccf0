"""The experts to which the engine routed each token, from its answer to the trainer.

There is one row per token except the last. A row of -1 means that the engine did not compute the
token. Rows may end before the sample does, if user code appended tokens after the engine's answer.
The trainer routes such tokens itself. Rows of an earlier answer are kept: they tell how the next
token was sampled. A later answer only tells how the token was prefilled, perhaps with other
weights.
"""

from __future__ import annotations

import base64
import binascii
from typing import Any

import numpy as np

from slime.errors import UserError

#: Stands for an expert if the engine did not compute the token.
UNKNOWN = -1


def experts_problem(experts: Any, num_tokens: int) -> str:
    """Name the problem of experts that user code has set for a sample of ``num_tokens``; "" if
    there is none."""
    if experts is None:
        return ""
    try:
        found = np.asarray(experts)
    except (TypeError, ValueError, RuntimeError) as error:
        return f"that are not an array ({error})"
    if found.size and (found.dtype.kind not in "iu" or found.ndim not in (2, 3)):
        return (
            f"of {found.dtype} and shape {list(found.shape)}, not whole numbers [tokens - 1, "
            "layers, experts]"
        )
    is_longer = found.ndim and len(found) >= max(num_tokens, 1)
    return f"for {len(found)} of {num_tokens - 1} tokens" if is_longer else ""


def decode_routed_experts(
    payload: str,
    num_tokens: int,
    *,
    start: int = 0,
    before: Any = None,
    shape: tuple[int, int] | None = None,
) -> np.ndarray:
    """Decode ``meta_info["routed_experts"]`` of SGLang: base64 of int32, row after row.

    Args:
        num_tokens: tokens of prompt and response. The last one is never computed, so it has no row.
        start: first token that the payload covers (``routed_experts_start_len``); ``before`` has
            the rows before it.
        before: the sample's rows from an earlier call.
        shape: (layers, experts per token); if None, rows stay flat.
    Returns:
        int32 [num_tokens - 1, layers, experts per token], or [num_tokens - 1, layers · experts per
        token].
    Raises:
        UserError: the payload is malformed, or has another number of tokens.

    Example (two tokens have a row, one layer, two experts each):
        >>> import numpy as np
        >>> payload = base64.b64encode(np.array([3, 0, 2, 1], dtype=np.int32).tobytes()).decode()
        >>> decode_routed_experts(payload, 3, shape=(1, 2)).tolist()
        [[[3, 0]], [[2, 1]]]
    """
    try:
        values = np.frombuffer(base64.b64decode(payload, validate=True), dtype=np.int32)
    except (binascii.Error, ValueError) as error:
        raise UserError(
            "the engine's routed experts cannot be read",
            why=str(error),
            fix="use an SGLang version that is supported",
        ) from error
    rows = num_tokens - 1 - start
    is_of_shape = shape is None or values.size == rows * shape[0] * shape[1]
    if rows <= 0 or values.size % rows or not is_of_shape:
        raise UserError(
            f"the engine returned {values.size} routed experts for {max(rows, 0)} tokens",
            why=f"the sample has {num_tokens} tokens, the answer covers them from token {start} on"
            + (f", with {shape[1]} experts in each of {shape[0]} layers" if shape else ""),
            fix="let the engine serve the model that is trained",
        )
    found = values.reshape(rows, *(shape or (-1,)))
    if start == 0:
        found = found.copy()  # a writable copy
        if before is not None:
            told = np.asarray(before).reshape(len(before), *found.shape[1:])[:rows]
            known = np.flatnonzero((told != UNKNOWN).any(axis=tuple(range(1, told.ndim))))
            found[known] = told[known]
        return found
    if before is None or len(before) < start:
        raise UserError(
            f"the engine returned routed experts from token {start} on, and the sample has none "
            "of earlier tokens",
            fix="ask for all of them in the sample's first call",
        )
    return np.concatenate([np.asarray(before)[:start].reshape(start, *found.shape[1:]), found])
