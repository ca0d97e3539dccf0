"""One sample being generated: its tokens, where it stands, and when it is done."""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from enum import Enum, auto
from typing import Any

import numpy as np

from slime.engines.embedded.routed_experts import RoutedExperts
from slime.engines.embedded.sampling_params import Params
from slime.engines.embedded.text import TextStream, find_stop


class Phase(Enum):
    """WAITING has no slot; PREFILL has one and is not complete; RUNNING decodes; FINISHED is out of the scheduler."""

    WAITING = auto()
    PREFILL = auto()
    RUNNING = auto()
    FINISHED = auto()


@dataclass(slots=True)
class Times:
    """`time.monotonic` of the steps of a sequence; 0 where it has not come to them."""

    received: float = field(default_factory=time.monotonic)
    started: float = 0.0
    first_token: float = 0.0
    finished: float = 0.0
    prefill: float = 0.0
    """Seconds of forward passes that computed prompt tokens of this sequence."""


class Sequence:
    """The scheduler's unit. Written to by the engine thread only; others may read `output_ids` up to a length they
    were told, since it only grows.

    Args:
        rid: request id, unique among sequences that are not finished.
        prompt_ids: int64 [prompt tokens].
        max_new_tokens: already capped by the context.
        stop_ids: tokens that end it (empty with ``ignore_eos``).
        seed: of its sampling noise; with the token's position it decides the draw.
        text: decodes the output, when stop strings are to be found in it.
        logprob_start: first prompt position whose log-prob is wanted; None for none.
    """

    def __init__(
        self,
        rid: str,
        prompt_ids: list[int],
        params: Params,
        max_new_tokens: int,
        stop_ids: frozenset[int],
        seed: int,
        text: TextStream | None = None,
        logprob_start: int | None = None,
        num_top_logprobs: int = 0,
        stream: bool = False,
    ) -> None:
        self.rid, self.params, self.stop_ids, self.seed = rid, params, stop_ids, seed
        self.prompt = np.asarray(prompt_ids, dtype=np.int64)
        self.max_new_tokens = max_new_tokens
        self.logprob_start, self.num_top_logprobs, self.stream = logprob_start, num_top_logprobs, stream
        self.times = Times()
        self.phase = Phase.WAITING
        self.output_ids: list[int] = []
        self.output_logprobs: list[float] = []
        self.top_logprobs: list[list[tuple[float, int]]] = []
        self.input_logprobs: list[float] = []
        self.input_top_logprobs: list[list[tuple[float, int]]] = []
        self.versions: list[tuple[int, str]] = []
        self.finish_reason: dict[str, Any] | None = None
        self.final_version = ""
        self.experts: RoutedExperts | None = None  # given by a scheduler that records them
        self.num_cached = 0
        self.num_computed = 0
        self.num_retractions = 0
        self.deferred = False
        self._text = text
        self._searched = 0

    @property
    def length(self) -> int:
        return len(self.prompt) + len(self.output_ids)

    @property
    def num_to_compute(self) -> int:
        """Tokens whose keys and values a prefill still has to compute before this sequence can decode."""
        return self.length - self.num_computed

    def tokens(self) -> np.ndarray:
        """int64 [length]: prompt and output."""
        if not self.output_ids:
            return self.prompt
        return np.concatenate([self.prompt, np.asarray(self.output_ids, dtype=np.int64)])

    def append(self, token: int, logprob: float, version: str) -> None:
        """Take a sampled token, and see whether it was the last.

        Order of the checks as in SGLang: length, stop strings, stop tokens.
        """
        if not self.output_ids:
            self.times.first_token = time.monotonic()
        if not self.versions or self.versions[-1][1] != version:
            self.versions.append((len(self.output_ids), version))
        self.output_logprobs.append(logprob)  # first: who sees the token finds its log-prob
        self.output_ids.append(token)
        if len(self.output_ids) >= self.max_new_tokens:
            self.finish({"type": "length", "length": self.max_new_tokens})
            return
        stop = self._find_stop_string(token)
        if stop is not None:
            self.finish({"type": "stop", "matched": stop})
        elif token in self.stop_ids:
            self.finish({"type": "stop", "matched": token})

    def finish(self, reason: dict[str, Any]) -> None:
        self.finish_reason = reason
        self.phase = Phase.FINISHED
        self.times.finished = time.monotonic()

    def abort(self, message: str) -> None:
        self.finish({"type": "abort", "message": message, "status_code": None, "err_type": None})

    def _find_stop_string(self, token: int) -> str | None:
        if self._text is None:
            return None
        self._text.extend([token])
        found = find_stop(self._text.text, self.params.stop, self._searched)
        longest = max(len(stop) for stop in self.params.stop)
        self._searched = max(0, len(self._text.text) - longest + 1)
        return found[1] if found else None
