"""Which experts each position of a sequence was sent to, for the trainer to replay them.

Recorded only by an engine that was started with ``--enable-return-routed-experts``. The newest computation counts: a
position that is prefilled again (after a retraction, or when a client resumes) has the experts of that prefill, which
are those that its keys and values come from.
"""

from __future__ import annotations

import base64

import numpy as np
import torch

from slime.engines.embedded.architecture_parts import Experts

#: In place of an expert's number, where a position was never computed.
UNKNOWN = -1
_DTYPE = np.int16


class RoutedExperts:
    """The rows of one sequence, by position: int16 [positions, layers with experts, experts per token].

    Example (one of two layers has experts, each token goes to two of them):
        >>> facts = Experts(4, 2, (False, True), "softmax", True)
        >>> routed = RoutedExperts(facts)
        >>> routed.write(1, np.array([[[3, 0]]]))
        >>> routed.first(2).tolist()
        [[[-1, -1]], [[3, 0]]]
        >>> np.frombuffer(base64.b64decode(routed.encoded(0, 2)), np.int32).reshape(2, 2, 2).tolist()
        [[[-1, -1], [-1, -1]], [[0, 0], [3, 0]]]
    """

    def __init__(self, facts: Experts) -> None:
        self.facts = facts
        self._rows = np.empty((0, sum(facts.in_layer), facts.chosen), _DTYPE)

    def write(self, start: int, rows: np.ndarray) -> None:
        """Take the rows of positions ``start`` …, in place of what is there."""
        end = start + len(rows)
        if end > len(self._rows):
            more = max(end, 2 * len(self._rows)) - len(self._rows)
            self._rows = np.concatenate([self._rows, np.full((more, *self._rows.shape[1:]), UNKNOWN, _DTYPE)])
        self._rows[start:end] = rows

    def first(self, count: int) -> np.ndarray:
        """A copy of the rows of positions 0 … ``count - 1``."""
        known = self._rows[:count]
        missing = np.full((count - len(known), *known.shape[1:]), UNKNOWN, _DTYPE)
        return np.concatenate([known, missing])

    def encoded(self, start: int, end: int) -> str:
        """SGLang's form: base64 of int32 [end - start, layers, experts per token], with zeros in dense layers.

        A row whose entries are all -1 is of a position that was never computed.
        """
        rows = self.first(max(start, end))[start:]
        whole = np.zeros((len(rows), len(self.facts.in_layer), self.facts.chosen), np.int32)
        whole[:, list(self.facts.in_layer)] = rows
        whole[(rows == UNKNOWN).all(axis=(1, 2))] = UNKNOWN
        return base64.b64encode(whole.tobytes()).decode("ascii")


def rows_of(choices: list[torch.Tensor]) -> np.ndarray:
    """One forward's choices, [tokens, k] of each layer with experts, as int16 [tokens, layers, k] in host memory."""
    return torch.stack(choices, dim=1).to(torch.int16).cpu().numpy()
