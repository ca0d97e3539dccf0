"""Labels as they are written in the data.

A reward function compares a label with a response, which is text. So numbers become the text in the
data, digit by digit: ``5.10`` is "5.10" and not "5.1", and integers keep all digits.
"""

from __future__ import annotations

import datetime
import json
import math
from decimal import Decimal
from typing import Any

from slime.config.groups_rollout import REWARD_TYPES
from slime.errors import a_type
from slime.prompts.problems import RowProblem, missing_key

#: Built-in rewards that read a number as the position of a choice.
_POSITIONS = frozenset({"gpqa"})
_DATES = (datetime.date, datetime.time, datetime.timedelta)


class NumberAsWritten(float):
    """A JSON number that prints as written (``5.10``, ``1e5``); in arithmetic it is the nearest
    float.

    Example:
        >>> NumberAsWritten("5.10"), NumberAsWritten("5.10") == 5.1
        (5.10, True)
    """

    __slots__ = ("_text",)
    _text: str

    def __new__(cls, text: str) -> NumberAsWritten:
        number = super().__new__(cls, text)
        number._text = text
        return number

    def __repr__(self) -> str:
        return self._text

    __str__ = __repr__

    def __reduce__(self) -> tuple[Any, ...]:
        return NumberAsWritten, (self._text,)


class JsonRow(dict[str, Any]):
    """A JSON object with plain values; `written` reads a value with the digits of the JSON text."""

    __slots__ = ("_text",)

    def __init__(self, values: dict[str, Any], text: str) -> None:
        super().__init__(values)
        self._text = text

    def written(self, key: str) -> Any:
        """Return the value of a key; a number in it is an int or `NumberAsWritten`."""
        value = self[key]
        if value is None or isinstance(value, (str, bool)) or (type(value) is int and value):
            return value
        return json.loads(self._text, parse_float=NumberAsWritten, parse_int=written_integer)[key]


def written_integer(text: str) -> int | NumberAsWritten:
    """Return a JSON integer as an int if that has the same digits, which "-0" and integers too long
    for `int` have not."""
    try:
        return NumberAsWritten(text) if text == "-0" else int(text)
    except ValueError:  # sys.get_int_max_str_digits()
        return NumberAsWritten(text)


def compares_labels(rm_type: str | None) -> bool:
    """Tell whether this built-in reward compares the response with the label."""
    reward = REWARD_TYPES.get((rm_type or "").removeprefix("boxed_"))
    return reward is not None and reward.compares_label


def read_label(row: dict[str, Any], key: str, flag: str, *, raw: bool, rm_type: str) -> Any:
    """Return the label of a row, as `label_text` spells it.

    Args:
        flag: the flag that names the column, for messages.
        raw: numbers stay Python numbers (--label-type raw).
        rm_type: the built-in reward of this row; "" for none. If it compares, the label must be
            text, a number, a boolean or a date.
    Raises:
        RowProblem: there is no such column, or the label cannot be compared.
    """
    column, *inner = label_path(row, key)
    if column not in row:
        raise missing_key(key, flag, row)
    label = _inside(row[column], inner, key, flag)
    if compares_labels(rm_type):
        _check_comparable(label, key, flag)
    if rm_type.removeprefix("boxed_") in _POSITIONS and _is_position(label):
        return int(label)
    if raw:
        if isinstance(label, NumberAsWritten):
            raise RowProblem(
                f"have a label (key '{key}') that no Python number holds",
                f"found {label!s:.40}",
                "leave --label-type raw out, which keeps it as text",
            )
        return label
    return label_text(_inside(written(row, column), inner, key, flag))


def label_path(row: dict[str, Any], key: str) -> list[str]:
    """Return where a row's label is: a column, and the keys inside it that follow dots, unless the
    column itself is called so.

    Example:
        >>> label_path({"reward_model": {"ground_truth": "72"}}, "reward_model.ground_truth")
        ['reward_model', 'ground_truth']
    """
    column, dot, _ = key.partition(".")
    return key.split(".") if dot and key not in row and column in row else [key]


def _inside(value: Any, keys: list[str], key: str, flag: str) -> Any:
    for name in keys:
        if not isinstance(value, dict) or name not in value:
            has = f"has {', '.join(map(str, value))}" if isinstance(value, dict) else "has no keys"
            raise RowProblem(
                f"have no '{name}' inside '{key.partition('.')[0]}'",
                f"what is there {has}",
                f"pass {flag} with keys that each row has",
            )
        value = value[name]
    return value


def written(row: dict[str, Any], key: str) -> Any:
    """Return the value of a column, with numbers as written in the data."""
    return row.written(key) if isinstance(row, JsonRow) else row[key]


def label_text(label: Any) -> Any:
    """Convert a label that is a number, boolean, decimal, date or time to text.

    JSON numbers keep their text and decimals their scale; floats of columnar files become the
    shortest text of the same float; booleans are spelled as in JSON. NaN, a missing value in
    columnar files, becomes None. Text and None stay, and so do lists and dicts, except for decimals
    and dates in them.

    Example:
        >>> tuple(map(label_text, (22, True, 0.5, Decimal("5.10"), [1, 2])))
        ('22', 'true', '0.5', '5.10', [1, 2])
    """
    if isinstance(label, bool):
        return json.dumps(label)
    if isinstance(label, int):
        return str(label)
    if isinstance(label, float):
        return None if math.isnan(label) else repr(label)
    return _holdable(label)


def _holdable(value: Any) -> Any:
    """Convert a value to one that JSON can hold; numbers stay."""
    if isinstance(value, Decimal):
        return format(value, "f") if value.is_finite() else str(value)
    if isinstance(value, _DATES):
        return str(value)
    if isinstance(value, list):
        return [_holdable(item) for item in value]
    if isinstance(value, dict):
        return {name: _holdable(item) for name, item in value.items()}
    return value


def _is_number(label: Any) -> bool:
    """Tell whether a label is a finite number; a JSON number that overflows a float counts as
    one."""
    if isinstance(label, (float, Decimal)) and not isinstance(label, NumberAsWritten):
        return math.isfinite(label)
    return isinstance(label, (int, float)) and not isinstance(label, bool)


def _is_position(label: Any) -> bool:
    return _is_number(label) and not isinstance(label, NumberAsWritten) and label == int(label)


def _check_comparable(label: Any, key: str, flag: str) -> None:
    if isinstance(label, (float, Decimal)) and not _is_number(label):
        raise RowProblem(
            f"have a label (key '{key}') that is not a number",
            f"found {label}; the reward function compares it with the response",
            "remove these rows, or write the right answer as text",
        )
    if not (_is_number(label) or isinstance(label, (str, bool, *_DATES))):
        found = "None" if label is None else a_type(label)
        if isinstance(label, dict):
            found += f" with the keys {', '.join(map(str, label))}"
        raise RowProblem(
            f"have a label (key '{key}') that is neither text nor a number",
            f"found {found}; the reward function compares it with the response",
            f"check {flag}: the right answer is the whole value of a column of its own; or write a "
            "reward function of your own (--custom-rm-path)",
        )
    if isinstance(label, str) and not label.strip():
        raise RowProblem(f"have an empty label (key '{key}')", fix="remove these rows")
