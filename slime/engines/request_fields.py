"""Check fields of requests to engines. `SamplingParams` is the table of sampling parameters.

integer(low=1).read("n", 0)    ->  BadRequest: n must be an integer of at least 1, got 0
"""

from __future__ import annotations

import difflib
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields
from functools import lru_cache
from typing import Any

import orjson

_SHOWN = 200  # characters of a refused value that the message repeats


class BadRequest(ValueError):
    """The request is invalid; answered with status 400 and this message.

    Attributes:
        field: the name of the invalid field; None if there is no single one.
    """

    def __init__(self, message: str, field: str | None = None) -> None:
        super().__init__(message)
        self.field = field


def json_object(raw: bytes) -> dict[str, Any]:
    """Parse the body of a request; raise `BadRequest` unless it is a JSON object."""
    try:
        body = orjson.loads(raw)
    except orjson.JSONDecodeError as error:
        raise BadRequest(f"the body is not valid JSON: {error}") from error
    if not isinstance(body, dict):
        raise BadRequest(f"the body must be a JSON object, got {type(body).__name__}")
    return body


@dataclass(frozen=True, slots=True)
class FieldKind:
    """The values that a field accepts.

    Attributes:
        accepts: a description that follows "must be".
        convert: converts a value; refuses it with TypeError, ValueError or OverflowError.
    """

    accepts: str
    convert: Callable[[Any], Any]

    def read(self, name: str, value: Any) -> Any:
        """Convert a value.

        Raises:
            BadRequest: the value is not accepted; names field, value and accepted values.
        """
        try:
            return self.convert(value)
        except (TypeError, ValueError, OverflowError) as error:
            shown = repr(value)
            shown = shown if len(shown) <= _SHOWN else shown[:_SHOWN] + "…"
            raise BadRequest(f"{name} must be {self.accepts}, got {shown}", name) from error


def integer(
    low: int | None = None, high: int | None = None, also: int | None = None, words: str = ""
) -> FieldKind:
    """Accept an integer from ``low`` to ``high``, or the value ``also``; ``words`` replace the
    description of the range."""

    def convert(value: Any) -> int:
        whole = int(_instance(value, int))
        below = low is not None and whole < low
        above = high is not None and whole > high
        if whole != also and (below or above):
            raise ValueError
        return whole

    return FieldKind(f"an integer{words or _range(low, high)}", convert)


def number(holds: Callable[[float], bool], words: str) -> FieldKind:
    """Accept a finite number in the range that ``words`` describe."""

    def convert(value: Any) -> float:
        result = float(_instance(value, int, float))
        if not math.isfinite(result) or not holds(result):
            raise ValueError
        return result

    return FieldKind(f"a finite number {words}", convert)


def strings() -> FieldKind:
    """Accept a string or a list of strings, none of them empty; read as a tuple."""

    def convert(value: Any) -> tuple[str, ...]:
        items = (value,) if isinstance(value, str) else tuple(_instance(value, list, tuple))
        if not all(isinstance(item, str) and item for item in items):
            raise ValueError
        return items

    return FieldKind("a string or a list of strings, none of them empty", convert)


def token(vocab_size: int) -> FieldKind:
    return integer(0, vocab_size - 1, words=f" from 0 to {vocab_size - 1}, the id of a token")


def tokens(vocab_size: int) -> FieldKind:
    """Accept a list of token ids, read as a frozenset; None entries are left out, as SGLang
    does."""
    one = token(vocab_size)

    def convert(value: Any) -> frozenset[int]:
        return frozenset(
            one.convert(item) for item in _instance(value, list, tuple) if item is not None
        )

    return FieldKind(f"a list of token ids from 0 to {vocab_size - 1}", convert)


def biases(vocab_size: int) -> FieldKind:
    """Accept {"token id": number to add to its logit}, read as pairs."""
    one = token(vocab_size)
    finite = number(lambda _: True, "")

    def convert(value: Any) -> tuple[tuple[int, float], ...]:
        items = _instance(value, Mapping).items()
        return tuple((one.convert(int(str(key))), finite.convert(bias)) for key, bias in items)

    return FieldKind(
        f"an object of token ids from 0 to {vocab_size - 1} and finite numbers", convert
    )


def one_of(*words: str) -> FieldKind:
    def convert(value: Any) -> str:
        if value not in words:
            raise ValueError
        return str(value)

    return FieldKind("one of: " + ", ".join(words), convert)


FLAG = FieldKind("true or false", lambda value: _instance(value, bool))
TEXT = FieldKind("a string", lambda value: _instance(value, str))
LIST = FieldKind("a list", lambda value: _instance(value, list))
OBJECT = FieldKind("an object", lambda value: _instance(value, Mapping))


def optional(body: Mapping[str, Any], name: str, kind: FieldKind, default: Any) -> Any:
    """Return a field of a body, or ``default`` if it is missing or null."""
    value = body.get(name)
    return default if value is None else kind.read(name, value)


def required(body: Mapping[str, Any], name: str, kind: FieldKind) -> Any:
    """Return a required field of a body."""
    return kind.read(name, body.get(name))


def asks_for_nothing(value: Any) -> bool:
    """Return whether an unsupported field has no effect: it is empty, off, or a list of such
    values."""
    if isinstance(value, list):
        return all(item is None or item is False for item in value)
    return value is None or value is False or value in ("", 0) or value == {}


def _instance(value: Any, *types: type) -> Any:
    """Return ``value`` if it has one of the types; booleans do not count as numbers."""
    if not isinstance(value, types) or (isinstance(value, bool) and bool not in types):
        raise TypeError
    return value


def _range(low: int | None, high: int | None) -> str:
    if low is not None and high is not None:
        return f" from {low} to {high}"
    return "" if low is None else f" of at least {low}"


# -- sampling parameters ---------------------------------------------------------------------------

#: Below this a temperature means greedy, as in SGLang.
GREEDY_BELOW = 1e-6
#: Parameters of SGLang that the embedded engine does not support; allowed if they have no effect.
_UNSUPPORTED = (
    "json_schema", "regex", "ebnf", "structural_tag", "stop_regex", "custom_params",
    "stream_interval",
)  # fmt: skip
_MAX_SAMPLES = 4096  # per prompt: more is likely a mistake, and all would be queued at once
_ANY_VOCABULARY = 1 << 31


def _row(default: Any, kind: FieldKind | Callable[[int], FieldKind]) -> Any:
    """Return a parameter's default and accepted values, which may depend on the vocabulary size."""
    return field(default=default, metadata={"kind": kind})


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """How to sample: every parameter of a request with SGLang's name, range and default.

    ``temperature`` 0 is greedy, ``top_k`` -1 the whole vocabulary, ``max_new_tokens`` None all
    room. ``sampling_seed`` makes the sampled tokens a function of seed, prompt and weights; sample
    i of ``n`` uses ``sampling_seed + i``.
    """

    max_new_tokens: int | None = _row(128, integer(0))
    min_new_tokens: int = _row(0, integer(0))
    temperature: float = _row(1.0, number(lambda x: x >= 0, "of 0 (greedy) or more"))
    top_p: float = _row(1.0, number(lambda x: 0 < x <= 1, "above 0 and at most 1"))
    top_k: int = _row(-1, integer(1, also=-1, words=": -1 (all) or at least 1"))
    min_p: float = _row(0.0, number(lambda x: 0 <= x <= 1, "from 0 to 1"))
    frequency_penalty: float = _row(0.0, number(lambda x: -2 <= x <= 2, "from -2 to 2"))
    presence_penalty: float = _row(0.0, number(lambda x: -2 <= x <= 2, "from -2 to 2"))
    repetition_penalty: float = _row(1.0, number(lambda x: 0 < x <= 2, "above 0 and at most 2"))
    stop: tuple[str, ...] = _row((), strings())
    stop_token_ids: frozenset[int] = _row(frozenset(), tokens)
    ignore_eos: bool = _row(False, FLAG)
    skip_special_tokens: bool = _row(True, FLAG)
    spaces_between_special_tokens: bool = _row(True, FLAG)
    no_stop_trim: bool = _row(False, FLAG)
    n: int = _row(1, integer(1, _MAX_SAMPLES))
    sampling_seed: int | None = _row(None, integer())
    logit_bias: tuple[tuple[int, float], ...] = _row((), biases)

    @property
    def greedy(self) -> bool:
        return self.temperature < GREEDY_BELOW or self.top_k == 1

    @property
    def scale(self) -> float:
        """Return the divisor of the logits; greedy counts as 1, as in SGLang."""
        return 1.0 if self.temperature < GREEDY_BELOW else self.temperature

    @property
    def filters(self) -> bool:
        """Return whether some tokens are excluded from sampling."""
        return not self.greedy and (self.top_p < 1.0 or self.top_k > 0 or self.min_p > 0.0)

    @property
    def changes_logits(self) -> bool:
        penalised = (
            self.frequency_penalty != 0
            or self.presence_penalty != 0
            or self.repetition_penalty != 1
        )
        return penalised or bool(self.logit_bias) or self.min_new_tokens > 0


#: The names of all sampling parameters.
SAMPLING_NAMES = tuple(row.name for row in fields(SamplingParams))


@lru_cache
def _kinds(vocab_size: int) -> dict[str, FieldKind]:
    kinds = ((row.name, row.metadata["kind"]) for row in fields(SamplingParams))
    return {name: kind if isinstance(kind, FieldKind) else kind(vocab_size) for name, kind in kinds}


def parse_params(raw: Any, vocab_size: int = _ANY_VOCABULARY) -> SamplingParams:
    """Check ``sampling_params``; None values mean the default.

    Raises:
        BadRequest: a name is unknown, a type is wrong, a value is out of range, or a feature is
            unsupported.
    """
    values: dict[str, Any] = {}
    for name, value in OBJECT.read("sampling_params", {} if raw is None else raw).items():
        if name in _UNSUPPORTED:
            if not asks_for_nothing(value):
                raise BadRequest(
                    f"sampling_params.{name} is not supported by the embedded engine", name
                )
            continue
        name = "sampling_seed" if name == "seed" else name  # OpenAI's word
        if name not in SAMPLING_NAMES:
            near = difflib.get_close_matches(name, SAMPLING_NAMES, n=1)
            raise BadRequest(
                f"unknown sampling parameter '{name}'"
                + (f"; nearest: '{near[0]}'" if near else ""),
                name,
            )
        if value is None:
            values |= {"max_new_tokens": None} if name == "max_new_tokens" else {}
        else:
            values[name] = _kinds(vocab_size)[name].read(name, value)
    params = SamplingParams(**values)
    if params.max_new_tokens is not None and params.min_new_tokens > params.max_new_tokens:
        said = (
            f"min_new_tokens must be at most max_new_tokens ({params.max_new_tokens}), got "
            f"{params.min_new_tokens}"
        )
        raise BadRequest(said, "min_new_tokens")
    return params
