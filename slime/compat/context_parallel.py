"""Context parallelism under the reference system's names.

In the reference system a user's function sees a rank's part of each sample, and gathers and slices
it. Here log-probs are gathered before the function is called. It sees whole samples on every rank,
so gathering and slicing return their input.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from slime.errors import UserError


def all_gather_with_cp(tensor: Tensor, total_length: int, response_length: int) -> Tensor:
    """Return the values of a whole response, [response_length, …]: ``tensor`` itself.

    Raises:
        UserError: the length is not ``response_length``.
    """
    _check_whole(tensor, response_length)
    return tensor


def slice_log_prob_with_cp(
    log_prob: Any,
    total_length: int,
    response_length: int,
    qkv_format: str = "thd",
    max_token_len: int | None = None,
) -> Any:
    """This rank's part of a response's values, a list or tensor: all of them.

    Raises:
        UserError: the length is not ``response_length``.
    """
    _check_whole(log_prob, response_length)
    return log_prob


def get_sum_of_sample_mean(
    total_lengths: list[int],
    response_lengths: list[int],
    loss_masks: list[Tensor],
    calculate_per_token_loss: bool = False,
    qkv_format: str = "thd",
    max_seq_lens: list[int] | None = None,
) -> Callable[[Tensor], Tensor]:
    """Return a reduction of values [sum of ``response_lengths``], one per response token, to the
    sum over samples of the mean over trained tokens, or with ``calculate_per_token_loss`` to the
    sum over trained tokens."""

    def total(values: Tensor) -> Tensor:
        parts = values.split(response_lengths, dim=0)
        sums = [(part * mask).sum() for part, mask in zip(parts, loss_masks, strict=True)]
        if not calculate_per_token_loss:
            sums = [
                one / mask.sum().clamp_min(1) for one, mask in zip(sums, loss_masks, strict=True)
            ]
        return torch.stack(sums).sum()

    return total


def _check_whole(values: Sequence[Any] | Tensor, response_length: int) -> None:
    if len(values) != response_length:
        raise UserError(
            f"{len(values)} values were given for a response of {response_length} tokens",
            why="functions see whole responses here, under context parallelism too",
            fix="pass the values of all response tokens",
        )
