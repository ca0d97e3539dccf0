"""Next tokens and their log-probs from logits, for all rows of a step at once.

The draw inverts the cumulative distribution at one uniform number per row, u = hash(seed,
position). It needs one pass over the vocabulary, without noise for every entry, and the same seed
gives the same token in every batch.

As in SGLang, the reported log-prob is that of the temperature-scaled distribution before top-k,
top-p and min-p, but after penalties and biases, which change the logits. Greedy rows have
temperature 1.
"""

from __future__ import annotations

from collections.abc import Sequence as Rows
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
import torch

from slime.embedded.sequence import Sequence

_FIRST_CANDIDATES = 256
_LARGEST_BLOCK = 1024
_GOLDEN = np.uint64(0x9E3779B97F4A7C15)


@dataclass
class Sampled:
    """Results with one entry per row. If ``finite`` is False, the logits were not finite and the
    token is undefined."""

    tokens: list[int]
    logprobs: list[float]
    finite: list[bool]


def sample(logits: torch.Tensor, sequences: Rows[Sequence]) -> Sampled:
    """Sample one token per row; row i of logits [rows, vocab] belongs to ``sequences[i]``.

    Fills ``top_logprobs``, ``sampling_mask`` and ``sampling_logprobs`` of sequences that request
    them.
    """
    probs = _probabilities(logits, sequences)
    targets = torch.from_numpy(
        uniforms([s.seed for s in sequences], [s.length for s in sequences])
    ).to(probs.device)
    tokens, totals = _draw(probs, targets)
    greedy = [row for row, s in enumerate(sequences) if s.params.greedy]
    if greedy:
        tokens[greedy] = probs[greedy].argmax(dim=-1)
    for row, sequence in enumerate(sequences):
        if sequence.params.filters:
            tokens[row], kept = _draw_filtered(probs[row], sequence, float(targets[row]))
            if sequence.sampling_mask is not None:
                mass = probs[row, kept].sum()
                sequence.sampling_mask.append(kept.tolist())
                sequence.sampling_logprobs.append(float((probs[row, tokens[row]] / mass).log()))
        elif sequence.sampling_mask is not None:  # greedy
            sequence.sampling_mask.append([int(tokens[row])])
            sequence.sampling_logprobs.append(0.0)
    logprobs = probs.gather(1, tokens[:, None]).squeeze(1).log()
    for row, sequence in enumerate(sequences):
        if sequence.num_top_logprobs:
            values, indices = probs[row].topk(min(sequence.num_top_logprobs, probs.shape[1]))
            sequence.top_logprobs.append(list(zip(values.log().tolist(), indices.tolist())))
    return Sampled(tokens.tolist(), logprobs.tolist(), torch.isfinite(totals).tolist())


def uniforms(seeds: Rows[int], positions: Rows[int]) -> np.ndarray:
    """Return float64 numbers in [0, 1) that depend only on (seed, position), with two rounds of
    splitmix64's mixer.

    Example:
        >>> a, b = uniforms([7, 7], [10, 11]); a != b and a == uniforms([7], [10])[0]
        True
    """
    mask = (1 << 64) - 1
    state = np.array([seed & mask for seed in seeds], dtype=np.uint64)
    with np.errstate(over="ignore"):
        state = _mix(state + _GOLDEN)
        state = _mix(state + np.asarray(positions, dtype=np.uint64) * _GOLDEN)
    return (state >> np.uint64(11)).astype(np.float64) * 2.0**-53


def token_logprobs(
    logits: torch.Tensor, targets: torch.Tensor, num_top: int = 0
) -> tuple[list[float], list[list[tuple[float, int]]]]:
    """Return the log-prob of ``targets`` [rows] under the plain softmax of logits [rows, vocab], in
    float32.

    Also the ``num_top`` largest of each row, as (log-prob, token); no rows when none are asked for.
    """
    logprobs = torch.log_softmax(logits.float(), dim=-1)
    chosen = logprobs.gather(1, targets[:, None]).squeeze(1).tolist()
    if not num_top:
        return chosen, []
    values, indices = logprobs.topk(min(num_top, logprobs.shape[1]))
    return chosen, [list(zip(*row)) for row in zip(values.tolist(), indices.tolist())]


def _mix(x: np.ndarray) -> np.ndarray:
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))


def _probabilities(logits: torch.Tensor, sequences: Rows[Sequence]) -> torch.Tensor:
    """Return float32 [rows, vocab], after penalties and temperature."""
    temperatures = [s.params.scale for s in sequences]
    changed = [row for row, s in enumerate(sequences) if s.params.changes_logits]
    if not changed and all(t == 1.0 for t in temperatures):
        return torch.softmax(logits, dim=-1, dtype=torch.float32)
    logits = logits.to(torch.float32, copy=True)
    for row in changed:
        _change_logits(logits[row], sequences[row])
    logits /= torch.tensor(temperatures, device=logits.device)[:, None]
    return torch.softmax(logits, dim=-1)


def _change_logits(row: torch.Tensor, sequence: Sequence) -> None:
    """Apply penalties for sampled tokens and biases, and forbid stop tokens before
    ``min_new_tokens``, in place."""
    params = sequence.params
    if sequence.output_ids:
        seen, counts = torch.tensor(sequence.output_ids, device=row.device).unique(
            return_counts=True
        )
        values = row[seen]
        values = torch.where(
            values < 0, values * params.repetition_penalty, values / params.repetition_penalty
        )
        row[seen] = values - counts * params.frequency_penalty - params.presence_penalty
    for token, bias in params.logit_bias:
        row[token] += bias
    if len(sequence.output_ids) < params.min_new_tokens and sequence.stop_ids:
        row[list(sequence.stop_ids)] = -torch.inf


def _draw(probs: torch.Tensor, targets: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Invert the cumulative distribution at ``targets`` [rows]; return tokens and row sums.

    It searches the block and then the entry in the block, so that no cumulative sum is over the
    whole vocabulary. Sums are float64. The target is kept below the last sum, so that only tokens
    of positive probability are found.
    """
    rows, vocab = probs.shape
    width = _block_width(vocab)
    blocks = probs.view(rows, vocab // width, width)
    ends = blocks.sum(dim=-1).double().cumsum(dim=-1)
    totals = ends[:, -1:]
    goal = targets[:, None] * totals
    block = torch.searchsorted(ends, goal, right=True).clamp_(max=ends.shape[1] - 1)
    starts = torch.where(
        block > 0, ends.gather(1, (block - 1).clamp_(min=0)), torch.zeros_like(goal)
    )
    inner = (
        blocks[torch.arange(rows, device=probs.device), block.squeeze(1)].double().cumsum(dim=-1)
    )
    rest = torch.minimum(goal - starts, inner[:, -1:] * (1 - 1e-15))
    within = torch.searchsorted(inner, rest, right=True).clamp_(max=width - 1)
    return (block * width + within).squeeze(1), totals.squeeze(1)


def _draw_filtered(
    probs: torch.Tensor, sequence: Sequence, target: float
) -> tuple[int, torch.Tensor]:
    """Draw from probs [vocab] after top-k, top-p and min-p; return the token and all kept tokens.

    As in SGLang, top-p keeps a token if the more likely ones have at most probability top_p in sum,
    without renormalising after top-k. Only as many of the largest entries are sorted as needed.
    """
    params = sequence.params
    vocab = probs.shape[0]
    limit = min(params.top_k, vocab) if params.top_k > 0 else vocab
    candidates = min(limit, _FIRST_CANDIDATES)
    while True:
        values, tokens = probs.topk(candidates)
        values = values.double()
        sums = values.cumsum(dim=0)
        last = float(values[-1])
        mass = float(sums[-1])
        if candidates == limit or mass > params.top_p or last < params.min_p * float(values[0]):
            break
        candidates = min(limit, candidates * 8)
    kept = (sums - values <= params.top_p) & (values >= params.min_p * values[0])
    sums = (values * kept).cumsum(dim=0)
    goal = min(target * float(sums[-1]), float(sums[-1]) * (1 - 1e-15))
    index = int(torch.searchsorted(sums, goal, right=True))
    return int(tokens[min(index, candidates - 1)]), tokens[kept]


@lru_cache
def _block_width(vocab: int) -> int:
    """Return the largest divisor of ``vocab`` from 32 to 1024; ``vocab`` if there is none."""
    for width in range(min(vocab, _LARGEST_BLOCK), 31, -1):
        if vocab % width == 0:
            return width
    return vocab
