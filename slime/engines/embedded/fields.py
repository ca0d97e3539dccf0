"""Fields of request bodies: each kind says what it takes, and reads a value or refuses it by name.

integer(low=1).read("n", 0)    ->  BadRequest: n must be an integer of at least 1, got 0
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

_SHOWN = 200  # characters of a refused value that the message repeats


class BadRequest(ValueError):
    """The request cannot be served as it is; answered with status 400 and this message.

    Attributes:
        field: the name of the field to blame, None when there is no single one.
    """

    def __init__(self, message: str, field: str | None = None) -> None:
        super().__init__(message)
        self.field = field


@dataclass(frozen=True, slots=True)
class Kind:
    """What a field takes.

    Attributes:
        accepts: in words, to follow "must be".
        convert: gives the value; anything that it raises of TypeError, ValueError and OverflowError is a refusal.
    """

    accepts: str
    convert: Callable[[Any], Any]

    def read(self, name: str, value: Any) -> Any:
        """Raises:
        BadRequest: the value is not of this kind; names the field, the value and what is accepted.
        """
        try:
            return self.convert(value)
        except (TypeError, ValueError, OverflowError) as error:
            shown = repr(value)
            shown = shown if len(shown) <= _SHOWN else shown[:_SHOWN] + "…"
            raise BadRequest(f"{name} must be {self.accepts}, got {shown}", name) from error


def integer(low: int | None = None, high: int | None = None, also: int | None = None, words: str = "") -> Kind:
    """An integer from ``low`` to ``high``, or the value ``also``; ``words`` replace the description of the range."""

    def convert(value: Any) -> int:
        whole = int(_instance(value, int))
        below, above = low is not None and whole < low, high is not None and whole > high
        if whole != also and (below or above):
            raise ValueError
        return whole

    return Kind(f"an integer{words or _range(low, high)}", convert)


def number(holds: Callable[[float], bool], words: str) -> Kind:
    """A finite number in the range that ``words`` describe."""

    def convert(value: Any) -> float:
        result = float(_instance(value, int, float))
        if not math.isfinite(result) or not holds(result):
            raise ValueError
        return result

    return Kind(f"a finite number {words}", convert)


def strings() -> Kind:
    """A string or a list of strings, none of them empty; read as a tuple."""

    def convert(value: Any) -> tuple[str, ...]:
        items = (value,) if isinstance(value, str) else tuple(_instance(value, list, tuple))
        if not all(isinstance(item, str) and item for item in items):
            raise ValueError
        return items

    return Kind("a string or a list of strings, none of them empty", convert)


def token(vocab_size: int) -> Kind:
    return integer(0, vocab_size - 1, words=f" from 0 to {vocab_size - 1}, the id of a token")


def tokens(vocab_size: int) -> Kind:
    """A list of token ids, read as a frozenset; None entries are left out, as SGLang does."""
    one = token(vocab_size)

    def convert(value: Any) -> frozenset[int]:
        return frozenset(one.convert(item) for item in _instance(value, list, tuple) if item is not None)

    return Kind(f"a list of token ids from 0 to {vocab_size - 1}", convert)


def biases(vocab_size: int) -> Kind:
    """{"token id": number to add to its logit}, read as pairs."""
    one, finite = token(vocab_size), number(lambda _: True, "")

    def convert(value: Any) -> tuple[tuple[int, float], ...]:
        items = _instance(value, Mapping).items()
        return tuple((one.convert(int(str(key))), finite.convert(bias)) for key, bias in items)

    return Kind(f"an object of token ids from 0 to {vocab_size - 1} and finite numbers", convert)


def one_of(*words: str) -> Kind:
    def convert(value: Any) -> str:
        if value not in words:
            raise ValueError
        return str(value)

    return Kind("one of: " + ", ".join(words), convert)


FLAG = Kind("true or false", lambda value: _instance(value, bool))
TEXT = Kind("a string", lambda value: _instance(value, str))
LIST = Kind("a list", lambda value: _instance(value, list))
OBJECT = Kind("an object", lambda value: _instance(value, Mapping))


def optional(body: Mapping[str, Any], name: str, kind: Kind, default: Any) -> Any:
    """The field of a body, or ``default`` where it is left out or null."""
    value = body.get(name)
    return default if value is None else kind.read(name, value)


def asks_for_nothing(value: Any) -> bool:
    """Whether a field that is not supported may be let through: empty, off, or a list of such values."""
    return value is None or value is False or value in ("", 0) or value == {} or _all_nothing(value)


def _all_nothing(value: Any) -> bool:
    return isinstance(value, list) and all(item is None or item is False for item in value)


def _instance(value: Any, *types: type) -> Any:
    """``value`` if it is of one of the types; true and false are no numbers."""
    if not isinstance(value, types) or (isinstance(value, bool) and bool not in types):
        raise TypeError
    return value


def _range(low: int | None, high: int | None) -> str:
    if low is not None and high is not None:
        return f" from {low} to {high}"
    return "" if low is None else f" of at least {low}"
