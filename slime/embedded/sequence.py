"""One sample being generated: its tokens, their text and experts, its status, and its end."""

from __future__ import annotations

import base64
import time
from dataclasses import InitVar, dataclass, field
from enum import Enum, auto
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
import torch

from slime.engines.request_fields import SamplingParams

if TYPE_CHECKING:
    from slime.embedded.adapters import Adapter
    from slime.embedded.images import SequenceImages

#: A decoded tail that ends in this has a character whose bytes are incomplete.
_INCOMPLETE = "\ufffd"
#: Replaces expert numbers at positions that were never computed.
UNKNOWN = -1
_EXPERT_DTYPE = np.int16


class SequenceStatus(Enum):
    """WAITING has no slot; PREFILL has one and is not complete; RUNNING decodes; FINISHED is out of
    the scheduler."""

    WAITING = auto()
    PREFILL = auto()
    RUNNING = auto()
    FINISHED = auto()


@dataclass(slots=True)
class Times:
    """`time.monotonic` at which a sequence reached each stage; 0 for stages not yet reached."""

    received: float = field(default_factory=time.monotonic)
    started: float = 0.0
    first_token: float = 0.0
    finished: float = 0.0
    prefill: float = 0.0
    """Seconds of forward passes that computed prompt tokens of this sequence."""


@dataclass(eq=False, repr=False)
class Sequence:
    """One sample that the scheduler processes. Only the engine thread writes to it. Other threads
    may read `output_ids` up to a length that they were given: the list only grows.

    Args:
        rid: request id, unique among unfinished sequences.
        prompt_ids: int64 [prompt tokens].
        max_new_tokens: already limited by the context length.
        stop_ids: tokens that end the sequence (empty with ``ignore_eos``).
        seed: sampling seed; seed and position of a token determine the draw.
        text: decodes the output if it must be searched for stop strings.
        logprob_start: first prompt position whose log-prob is requested; None for none.
        adapter: used for all tokens, even if it is unloaded meanwhile; None for only the base.
        images: images in the prompt.

    Attributes:
        sampling_mask: for each output token the tokens from which it was drawn; None if not
            requested.
        experts: set by a scheduler that records experts.
        versions: (index of the first output token, weight version) of each run of tokens.
    """

    rid: str
    prompt_ids: InitVar[list[int]]
    params: SamplingParams
    max_new_tokens: int
    stop_ids: frozenset[int]
    seed: int
    text: TextStream | None = None
    logprob_start: int | None = None
    num_top_logprobs: int = 0
    stream: bool = False
    adapter: Adapter | None = None
    images: SequenceImages | None = None
    prompt: np.ndarray = field(init=False)
    times: Times = field(default_factory=Times)
    status: SequenceStatus = SequenceStatus.WAITING
    output_ids: list[int] = field(default_factory=list)
    output_logprobs: list[float] = field(default_factory=list)
    top_logprobs: list[list[tuple[float, int]]] = field(default_factory=list)
    sampling_mask: list[list[int]] | None = None
    sampling_logprobs: list[float] = field(default_factory=list)
    input_logprobs: list[float] = field(default_factory=list)
    input_top_logprobs: list[list[tuple[float, int]]] = field(default_factory=list)
    versions: list[tuple[int, str]] = field(default_factory=list)
    finish_reason: dict[str, Any] | None = None
    final_version: str = ""
    experts: RoutedExperts | None = None
    num_cached: int = 0
    num_computed: int = 0
    num_retractions: int = 0
    deferred: bool = False
    _searched: int = 0

    def __post_init__(self, prompt_ids: list[int]) -> None:
        self.prompt = np.asarray(prompt_ids, dtype=np.int64)

    @property
    def length(self) -> int:
        return len(self.prompt) + len(self.output_ids)

    @property
    def adapter_key(self) -> int:
        """Return the key of the adapter; 0 for only the base."""
        return 0 if self.adapter is None else self.adapter.key

    @property
    def num_to_compute(self) -> int:
        """The number of tokens whose keys and values must be prefilled before decoding."""
        return self.length - self.num_computed

    def tokens(self) -> np.ndarray:
        """Return int64 [length]: prompt and output."""
        if not self.output_ids:
            return self.prompt
        return np.concatenate([self.prompt, np.asarray(self.output_ids, dtype=np.int64)])

    def distinct_tokens(self) -> np.ndarray:
        """Return `tokens` [length] in which placeholders of different images differ, so that equal
        tokens have equal keys and values."""
        return self.tokens() if self.images is None else self.images.distinct(self.tokens())

    def axis_positions(self, start: int, count: int) -> np.ndarray:
        """Return int64 [3, count]: rotary positions in time, row and column."""
        if self.images is not None:
            return self.images.axis_positions(start, count)
        return np.broadcast_to(np.arange(start, start + count), (3, count))

    def version_of_weights(self, base: str) -> str:
        """Return the weights' version: the adapter's if it states one, or ``base``."""
        stated = None if self.adapter is None else self.adapter.version
        return base if stated is None else stated

    def append(self, token: int, logprob: float, version: str) -> None:
        """Append a sampled token, and finish the sequence if it was the last.

        The checks have SGLang's order: length, stop strings, stop tokens.
        """
        if not self.output_ids:
            self.times.first_token = time.monotonic()
        if not self.versions or self.versions[-1][1] != version:
            self.versions.append((len(self.output_ids), version))
        self.output_logprobs.append(logprob)  # first, so that readers of the token find it
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
        self.status = SequenceStatus.FINISHED
        self.times.finished = time.monotonic()

    def abort(self, message: str) -> None:
        self.finish({"type": "abort", "message": message, "status_code": None, "err_type": None})

    def _find_stop_string(self, token: int) -> str | None:
        if self.text is None:
            return None
        self.text.extend([token])
        found = find_stop(self.text.text, self.params.stop, self._searched)
        longest = max(len(stop) for stop in self.params.stop)
        self._searched = max(0, len(self.text.text) - longest + 1)
        return found[1] if found else None


# -- text ------------------------------------------------------------------------------------------


class Tokenizer(Protocol):
    """The methods of a Hugging Face tokenizer that the engine calls."""

    eos_token_id: int | None

    def encode(self, text: str, add_special_tokens: bool = ...) -> list[int]: ...

    def decode(self, token_ids: list[int], **options: bool) -> str: ...


class TextStream:
    """Decodes a growing list of tokens incrementally.

    Text is added only when it cannot change any more. A tail of a few tokens is decoded twice, with
    and without the new ones, because a token's text may depend on its neighbours (spaces, bytes of
    one character).

    Example:
        >>> stream = TextStream(
        ...     tokenizer, skip_special_tokens=True, spaces_between_special_tokens=True)
        >>> stream.extend([4093, 198]); stream.text
        'user\\n'
    """

    def __init__(
        self, tokenizer: Tokenizer, skip_special_tokens: bool, spaces_between_special_tokens: bool
    ) -> None:
        self._tokenizer = tokenizer
        self._options = {
            "skip_special_tokens": skip_special_tokens,
            "spaces_between_special_tokens": spaces_between_special_tokens,
        }
        self._tokens: list[int] = []
        self._context_start = self._read = 0
        self.text = ""

    def extend(self, tokens: list[int]) -> str:
        """Add tokens; return the text that they complete."""
        self._tokens += tokens
        before = self._decode(self._context_start, self._read)
        after = self._decode(self._context_start, len(self._tokens))
        if after.endswith(_INCOMPLETE) or len(after) <= len(before):
            return ""
        new = after[len(before) :]
        self._context_start = self._read
        self._read = len(self._tokens)
        self.text += new
        return new

    def finish(self) -> str:
        """Add the text that was held back, and return it."""
        before = self._decode(self._context_start, self._read)
        rest = self._decode(self._context_start, len(self._tokens))[len(before) :]
        self._context_start = self._read = len(self._tokens)
        self.text += rest
        return rest

    def _decode(self, start: int, end: int) -> str:
        return (
            self._tokenizer.decode(self._tokens[start:end], **self._options) if end > start else ""
        )


def find_stop(text: str, stops: tuple[str, ...], start: int) -> tuple[int, str] | None:
    """Find (position, stop string) of the first stop string that begins at ``start`` or later.

    Example:
        >>> find_stop("a</answer>b", ("</answer>", "b"), 0)
        (1, '</answer>')
    """
    found = [(position, stop) for stop in stops if (position := text.find(stop, start)) >= 0]
    return min(found) if found else None


def hold_back(text: str, stops: tuple[str, ...]) -> str:
    """Return the text before its first stop string, without a suffix that may be the beginning of a
    stop string.

    Example:
        >>> hold_back("the answer</ans", ("</answer>", "END"))
        'the answer'
    """
    found = find_stop(text, stops, 0)
    text = text[: found[0]] if found else text
    longest = max((len(stop) for stop in stops), default=1) - 1
    for length in range(min(longest, len(text)), 0, -1):
        if any(len(stop) > length and stop.startswith(text[-length:]) for stop in stops):
            return text[:-length]
    return text


def trim_stop(text: str, matched: object, keep: bool) -> str:
    """Return the text before the stop string ``matched``, including it with ``keep``. Return other
    text unchanged."""
    if not isinstance(matched, str):
        return text
    position = text.find(matched)
    if position < 0:
        return text
    return text[: position + len(matched)] if keep else text[:position]


# -- experts ---------------------------------------------------------------------------------------


class RoutedExperts:
    """The experts of each position of a sequence, which the trainer can replay.

    Only an engine with ``--enable-return-routed-experts`` records them. A position that is
    prefilled again (after a retraction, or when a client resumes) gets the experts of that prefill,
    which computed its current keys and values.

    Rows by position: int16 [positions, layers with experts, experts per token].

    Args:
        in_layer: for each layer, whether it has experts.
        chosen: experts per token.

    Example (one of two layers has experts, each token goes to two of them):
        >>> routed = RoutedExperts((False, True), 2)
        >>> routed.write(1, np.array([[[3, 0]]]))
        >>> routed.first(2).tolist()
        [[[-1, -1]], [[3, 0]]]
        >>> encoded = base64.b64decode(routed.encoded(0, 2))
        >>> np.frombuffer(encoded, np.int32).reshape(2, 2, 2).tolist()
        [[[-1, -1], [-1, -1]], [[0, 0], [3, 0]]]
    """

    def __init__(self, in_layer: tuple[bool, ...], chosen: int) -> None:
        self.in_layer = in_layer
        self.chosen = chosen
        self._rows = np.empty((0, sum(in_layer), chosen), _EXPERT_DTYPE)

    def write(self, start: int, rows: np.ndarray) -> None:
        """Set the rows of the positions from ``start`` on."""
        end = start + len(rows)
        if end > len(self._rows):
            more = max(end, 2 * len(self._rows)) - len(self._rows)
            self._rows = np.concatenate(
                [self._rows, np.full((more, *self._rows.shape[1:]), UNKNOWN, _EXPERT_DTYPE)]
            )
        self._rows[start:end] = rows

    def first(self, count: int) -> np.ndarray:
        """Return a copy of the rows of positions 0 … ``count - 1``."""
        known = self._rows[:count]
        missing = np.full((count - len(known), *known.shape[1:]), UNKNOWN, _EXPERT_DTYPE)
        return np.concatenate([known, missing])

    def encoded(self, start: int, end: int) -> str:
        """Return SGLang's format: base64 of int32 [end - start, layers, experts per token], with
        zeros in dense layers.

        A row of -1 belongs to a position that was never computed.
        """
        rows = self.first(max(start, end))[start:]
        whole = np.zeros((len(rows), len(self.in_layer), self.chosen), np.int32)
        whole[:, list(self.in_layer)] = rows
        whole[(rows == UNKNOWN).all(axis=(1, 2))] = UNKNOWN
        return base64.b64encode(whole.tobytes()).decode("ascii")


def rows_of(choices: list[torch.Tensor]) -> np.ndarray:
    """Return one forward's choices, [tokens, k] of each layer with experts, as int16 [tokens,
    layers, k] in host memory."""
    return torch.stack(choices, dim=1).to(torch.int16).cpu().numpy()
