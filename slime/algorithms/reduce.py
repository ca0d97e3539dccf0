"""Reductions from one value per token to one number. The result does not depend on packing,
micro-batch size or parallel layout.

Denominators are known before the step (`slime.samples.packing` counts them over all ranks). A
reduction is therefore a weight per token, and the weighted sums of all micro-batches and ranks add.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


def token_weights(
    loss_masks: Sequence[Tensor],
    mask_sums: Sequence[float],
    global_batch_size: int,
    num_loss_tokens: int | None = None,
) -> Tensor:
    """Return the weight of each response token in the loss and in every averaged metric.

    Default, ``mask / mask_sum / global_batch_size``: trajectories have equal weight, and so have
    the trained tokens of each. With ``num_loss_tokens``, ``mask / num_loss_tokens``: all trained
    tokens have equal weight.

    Args:
        loss_masks: [R_i] per sample of the micro-batch, 0 or 1.
        mask_sums: trained tokens of sample i's whole trajectory, which may span several samples, or
            their mean over the trajectories of its group. 0 counts as 1.
        global_batch_size: trajectories in the optimizer step, over all ranks.
        num_loss_tokens: trained tokens in the optimizer step, over all ranks.
    Returns:
        float32 [sum of R_i].

    Example (a sample of 2 trained tokens and one of 1; the second one's trajectory trained 3 tokens
    in all):
        >>> masks = [torch.tensor([1.0, 0.0, 1.0]), torch.tensor([1.0])]
        >>> [round(w, 3) for w in token_weights(masks, [2.0, 3.0], global_batch_size=2).tolist()]
        [0.25, 0.0, 0.25, 0.167]
        >>> [round(w, 3) for w in token_weights(masks, [2.0, 3.0], 2, num_loss_tokens=5).tolist()]
        [0.2, 0.0, 0.2, 0.2]
    """
    if not loss_masks:
        return torch.zeros(0)
    if num_loss_tokens is not None:
        return torch.cat(list(loss_masks)).float() / max(num_loss_tokens, 1)
    return torch.cat(
        [mask.float() / ((s or 1.0) * global_batch_size) for mask, s in zip(loss_masks, mask_sums)]
    )


def weighted_sum(values: Tensor, weights: Tensor) -> Tensor:
    """Return ``sum(values * weights)`` over tokens of non-zero weight; NaN at other tokens is
    ignored.

    Example:
        >>> weighted_sum(torch.tensor([1.0, float("nan")]), torch.tensor([0.5, 0.0])).item()
        0.5
    """
    return (torch.where(weights != 0, values, 0.0) * weights).sum()


def sequence_mean(values: Tensor, masks: Tensor, lengths: Tensor) -> Tensor:
    """Return the mean of each sample over its trained tokens, repeated for each of its tokens.

    Args:
        values, masks: flat [sum of R_i].
        lengths: int64 [samples], R_i.
    Returns:
        flat [sum of R_i]; 0 for a sample without trained tokens. Differentiable in ``values``.

    Example:
        >>> v, m = torch.tensor([1.0, 3.0, 5.0]), torch.ones(3)
        >>> sequence_mean(v, m, torch.tensor([2, 1])).tolist()
        [2.0, 2.0, 5.0]
    """
    counts = sequence_sum(torch.ones_like(values), masks, lengths)
    return sequence_sum(values, masks, lengths) / counts.clamp(min=1.0)


def sequence_sum(values: Tensor, masks: Tensor, lengths: Tensor) -> Tensor:
    """Return the sum of each sample over its trained tokens, repeated for each of its tokens.

    Args:
        values, masks: flat [sum of R_i].
        lengths: int64 [samples], R_i.
    Returns:
        flat [sum of R_i]; 0 for a sample without trained tokens. Differentiable in ``values``.

    Example:
        >>> v, m = torch.tensor([1.0, 3.0, 5.0]), torch.tensor([1.0, 1.0, 0.0])
        >>> sequence_sum(v, m, torch.tensor([2, 1])).tolist()
        [4.0, 4.0, 0.0]
    """
    if values.numel() == 0:  # repeat_interleave and segment_reduce need at least one segment
        return values * masks
    return torch.repeat_interleave(
        sample_sums(values, masks, lengths), lengths, output_size=values.numel()
    )


def sample_sums(values: Tensor, masks: Tensor, lengths: Tensor) -> Tensor:
    """Return the sum of each sample over its trained tokens, one number per sample.

    Args:
        values, masks: flat [sum of R_i].
        lengths: int64 [samples], R_i.
    Returns:
        [samples]; 0 for a sample without trained tokens. Differentiable in ``values``; NaN at an
        untrained token is ignored.

    Example:
        >>> v, m = torch.tensor([1.0, 3.0, float("nan")]), torch.tensor([1.0, 1.0, 0.0])
        >>> sample_sums(v, m, torch.tensor([2, 1])).tolist()
        [4.0, 0.0]
    """
    if values.numel() == 0:  # segment_reduce needs at least one segment
        return values.new_zeros(lengths.numel())
    return torch.segment_reduce(
        torch.where(masks != 0, values, 0.0),
        "sum",
        lengths=lengths,
        unsafe=values.is_cuda,  # checking the lengths would synchronise with the device
        initial=0.0,
    )
