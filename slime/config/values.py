"""Values of flags as they are written (a command line, YAML, Python), converted to their type and
checked against their range."""

from __future__ import annotations

import ast
import difflib
import json
import os
import re
from typing import Any

from slime.config.flag import FlagSpec
from slime.errors import UserError

#: A path that begins with a variable: $HOME/x, ${DATA}/x
_VARIABLE = re.compile(r"\$(?:\w+|\{\w+\})/")
_WORDS = {"true": True, "false": False, "1": True, "0": False, "yes": True, "no": False}
_KIND_NAMES = {
    "int": "a whole number",
    "float": "a number",
    "bool": "true or false",
    "json": "JSON",
    "int_or_list": "a whole number or a list of them such as ([0]*3+[1]*58)",
    "str": "text",
}
#: What to write instead of a value of another type.
_HOW = {
    "int": "write it in digits, such as 16",
    "float": "write it with a point, such as 0.5 or 1e-6",
    "bool": "write true or false",
    "json": 'write {"key": value}, in single quotes on a command line',
    "int_or_list": "write such a number or list",
    "str": "write it in quotes",
}


def convert(spec: FlagSpec, value: Any, where: str = "") -> Any:
    """Convert ``value``, which may be text or already typed, to the type of the flag.

    Args:
        where: prefix of messages, e.g. "run.yaml: ".
    Raises:
        UserError: the type is wrong, the value is not among the choices, or a list was given for a
            single value.

    Example:
        >>> from slime.config.flags import own_flags
        >>> convert(own_flags()["lr"], "1e-6")     # PyYAML too reads 1e-6 as text
        1e-06
    """
    if spec.many:
        items = list(value) if isinstance(value, (list, tuple)) else [value]
        values = tuple(_convert_one(spec, item, where) for item in items)
        return values[0] if spec.scalar_or_list and len(values) == 1 else values
    if isinstance(value, (list, tuple)) and spec.kind not in ("json", "int_or_list"):
        raise UserError(
            f"{where}{spec.option} takes one value, not {len(value)}: {_shown(value)}",
            fix="give one of them, without brackets",
        )
    return _convert_one(spec, value, where)


def check_number(spec: FlagSpec, value: Any, where: str = "") -> None:
    """Refuse a number outside the flag's range, also in a list; None is unset.

    Args:
        where: name of the value in messages, if it is not the flag.
    Raises:
        UserError: the number is out of range.

    Example:
        >>> from slime.config.flags import own_flags
        >>> check_number(own_flags()["gamma"], 0.99)
        >>> check_number(own_flags()["gamma"], 2.0)
        Traceback (most recent call last):
        slime.errors.UserError: --gamma is 2
          why: a discount; above 1 returns would grow with the length: it must be at least 0 and at
              most 1
          fix: pass such a number, or leave it out (default: 1.0)
    """
    interval = spec.meta.range
    if interval is None:
        return
    for number in value if isinstance(value, list | tuple) else (value,):
        if number is None or number in interval:
            continue
        default = spec.meta.derived or ("unset" if spec.default is None else spec.default)
        raise UserError(
            f"{where or spec.option} is {number:.10g}",
            why=f"{interval.what}: it must be {interval.words}"
            if interval.what
            else f"it must be {interval.words}",
            fix=f"pass such a number, or leave it out (default: {default})",
        )


def _convert_one(spec: FlagSpec, value: Any, where: str) -> Any:
    try:
        typed = _typed(spec.kind, value)
    except (ValueError, TypeError, SyntaxError, OverflowError) as error:
        if spec.meta.refused:
            return value  # the flag's refusal explains more than an error about the type
        raise _wrong(spec, value, where, str(error) if spec.kind == "json" else "") from error
    if isinstance(typed, str) and _VARIABLE.match(typed):
        raise UserError(
            f"{where}{spec.option} begins with a variable: {_shown(typed)}",
            why="only a shell replaces variables, and not in single quotes or in a file",
            fix="write the path itself",
        )
    if spec.kind == "json" and not spec.sections and not isinstance(typed, dict):
        raise _wrong(spec, value, where, 'it must be an object, {"key": value}')
    if spec.choices and typed not in spec.choices:
        choices = [str(choice) for choice in spec.choices if choice not in spec.meta.refused_values]
        shown = ", ".join(choices)
        near = difflib.get_close_matches(str(typed), choices, n=1, cutoff=0.75)
        fix = f"did you mean {near[0]}?" if near else f"choose one of: {shown}"
        raise UserError(
            f"{where}{spec.option} cannot be {_shown(value)}",
            why=f"the choices are: {shown}",
            fix=fix,
        )
    return typed


def _typed(kind: str, value: Any) -> Any:
    if kind == "bool":
        if isinstance(value, bool):
            return value
        if isinstance(value, str) and value.lower() in _WORDS:
            return _WORDS[value.lower()]
        raise ValueError
    if isinstance(value, bool) and kind != "json":
        raise ValueError
    if kind == "int":
        if isinstance(value, float) and not value.is_integer():
            raise ValueError
        return int(value)
    if kind == "float":
        return float(value)
    if kind == "json":
        return json.loads(value) if isinstance(value, (str, bytes)) else value
    if kind == "int_or_list":
        return _int_or_list(value)
    if isinstance(value, (dict, list, tuple)):
        raise ValueError
    text = os.fspath(value) if isinstance(value, os.PathLike) else str(value)
    # a shell expands neither --save=~/x nor what is in a YAML file
    return os.path.expanduser(text) if text.startswith("~/") else text


def _int_or_list(value: Any) -> int | list[int]:
    """Parse a number, a list, or a list expression of Megatron-LM, which may be in the quotes that
    shell arrays leave.

    Example:
        >>> _int_or_list("'([0]*1+[1]*3)'")
        [0, 1, 1, 1]
    """
    if isinstance(value, str):
        value = _evaluate(ast.parse(value.strip().strip("'\""), mode="eval").body)
    if isinstance(value, list) and all(isinstance(item, int) for item in value):
        return value
    if isinstance(value, int):
        return value
    raise ValueError


def _evaluate(node: ast.expr) -> Any:
    """Evaluate an expression of lists and whole numbers with + and * only."""
    if isinstance(node, ast.Constant) and isinstance(node.value, int):
        return node.value
    if isinstance(node, ast.List):
        return [_evaluate(item) for item in node.elts]
    if isinstance(node, ast.BinOp) and isinstance(node.op, (ast.Add, ast.Mult)):
        left = _evaluate(node.left)
        right = _evaluate(node.right)
        return left + right if isinstance(node.op, ast.Add) else left * right
    raise ValueError


def _wrong(spec: FlagSpec, value: Any, where: str, why: str = "") -> UserError:
    return UserError(
        f"{where}{spec.option} must be {_KIND_NAMES[spec.kind]}, not {_shown(value)}",
        why=why,
        fix=_HOW[spec.kind],
    )


def _shown(value: Any) -> str:
    text = repr(value) if isinstance(value, str) else str(value)
    return text if len(text) <= 80 else text[:77] + "…"
