"""The samples under comparison, with the log-probs of trainer and engine for the same tokens."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from slime.samples.media import Media


@dataclass
class Scored:
    """One sample of L tokens, with the log-probs of each side for the R tokens of its response.

    Attributes:
        name: display name: "sample 3".
        tokens: int64 [L].
        engine: float64 [R], as the engine reported them when it sampled.
        trainer: float64 [R]; None if they were not kept.
        counted: bool [R]: tokens that the engine sampled, with finite log-probs on both sides.
        prompt: the rendered prompt; None if the dump has none.
        experts: int64 [rows, layers, k], the engine's choices from the first token on; None if not
            recorded.
        versions: version of the weights that sampled each token, [R]; None if unknown.
        sent: int64, the engine's tokens if they differ from ``tokens``, perhaps of another length;
            else None.
        media: images of the sample.
    """

    name: str
    tokens: Tensor
    engine: Tensor
    trainer: Tensor | None
    counted: Tensor
    prompt: Any = None
    experts: Tensor | None = None
    versions: list[int | None] | None = None
    sent: Tensor | None = None
    media: list[Media] = field(default_factory=list)

    @property
    def response_length(self) -> int:
        return int(self.engine.numel())

    @property
    def prompt_length(self) -> int:
        return int(self.tokens.numel()) - self.response_length

    @cached_property
    def turns(self) -> Tensor:
        """int64 [R]: index of each token's sampled turn, from 0; -1 for tokens that no engine
        sampled."""
        begins = self.counted.clone()
        begins[1:] &= ~self.counted[:-1]
        return torch.where(self.counted, begins.cumsum(0) - 1, torch.tensor(-1))


@dataclass(frozen=True)
class Differences:
    """Trainer minus engine for all N counted tokens, in nats, with the place of each token.

    Attributes:
        values: float64 [N], the differences.
        position: int64 [N], counted from the sample's first token.
        depth: int64 [N], counted from the first token of the response.
        since: int64 [N], counted from the first token of the turn.
        sample, turn: int64 [N], indices.
        version: int64 [N], version of the weights that sampled the token; -1 if unknown.
        tokens: int64 [N], token ids.
    """

    values: Tensor
    position: Tensor
    depth: Tensor
    since: Tensor
    sample: Tensor
    turn: Tensor
    version: Tensor
    tokens: Tensor
    names: tuple[str, ...] = field(default=())

    @staticmethod
    def of(samples: Sequence[Scored], trainer: Sequence[Tensor]) -> Differences:
        """Compare the engine's log-probs in ``samples`` with the trainer's, [R] per sample."""
        columns: defaultdict[str, list[Tensor]] = defaultdict(list)
        for number, (sample, scores) in enumerate(zip(samples, trainer, strict=True)):
            kept = sample.counted
            count = sample.response_length
            depth = torch.arange(count)
            begins = (
                torch.where(kept & (torch.cat([torch.tensor([True]), ~kept[:-1]])), depth, 0)
                .cummax(0)
                .values
            )
            columns["values"].append((scores - sample.engine)[kept])
            columns["position"].append((depth + sample.prompt_length)[kept])
            columns["depth"].append(depth[kept])
            columns["since"].append((depth - begins)[kept])
            columns["sample"].append(torch.full((int(kept.sum()),), number))
            columns["turn"].append(sample.turns[kept])
            versions = [
                -1 if version is None else version for version in sample.versions or [None] * count
            ]
            columns["version"].append(torch.tensor(versions, dtype=torch.long)[kept])
            columns["tokens"].append(sample.tokens[sample.prompt_length :][kept])
        joined = {key: torch.cat(parts) for key, parts in columns.items()}
        return Differences(**joined, names=tuple(sample.name for sample in samples))

    @property
    def mean(self) -> float:
        """Mean of the absolute differences."""
        return size(self.values)

    @property
    def largest(self) -> float:
        return float(self.values.abs().max()) if self.values.numel() else 0.0

    def growth(self) -> float | None:
        """Return the mean absolute difference in the last quarter of positions divided by that in
        the first; None for too few tokens, or if the first is 0."""
        if self.values.numel() < _FEWEST_TO_TELL:
            return None
        order = self.values.abs()[self.position.argsort(stable=True)]
        quarter = len(order) // 4
        first = float(order[:quarter].mean())
        return float(order[-quarter:].mean()) / first if first > 0 else None

    def where(self) -> dict[str, float]:
        """Return label → mean absolute difference: for the first tokens of turns, for other tokens,
        and per turn and per version of the weights if there are several."""
        at_start = self.since == 0
        by = {}
        for name, chosen in {"first of a turn": at_start, "other": ~at_start}.items():
            if chosen.any():
                by[name] = size(self.values[chosen])
        if int(self.turn.max()) > 0:
            for turn in range(min(int(self.turn.max()) + 1, _MAX_TURNS)):
                if (chosen := self.turn == turn).any():
                    by[f"turn {turn + 1}"] = size(self.values[chosen])
        versions = self.version.unique().tolist()
        for version in versions[-_MAX_TURNS:] if len(versions) > 1 else ():
            by[f"weights {version}" if version >= 0 else "weights unknown"] = size(
                self.values[self.version == version]
            )
        return by

    def worst(self, count: int = 5) -> list[dict[str, Any]]:
        """Return the ``count`` tokens that differ most, with sample, position, token id and
        difference."""
        chosen = self.values.abs().topk(min(count, self.values.numel())).indices.tolist()
        return [
            {
                "sample": self.names[int(self.sample[i])],
                "position": int(self.position[i]),
                "token": int(self.tokens[i]),
                "difference": float(self.values[i]),
            }
            for i in chosen
        ]


_FEWEST_TO_TELL = 16
_MAX_TURNS = 6


def size(differences: Tensor) -> float:
    """Return the mean of the absolute values, in nats per token; 0 if there are none."""
    return float(differences.abs().mean()) if differences.numel() else 0.0


def explained(differences: Tensor, predicted: Tensor) -> float:
    """Return the share of ``differences`` that subtracting ``predicted`` removes: 1 is all, 0 is
    none or an increase.

    Example:
        >>> explained(torch.tensor([1.0, -1.0]), torch.tensor([1.0, -0.5]))
        0.75
    """
    whole = size(differences)
    left = size(differences - predicted)
    return max(0.0, 1.0 - left / whole) if whole > 0 and left == left else 0.0
