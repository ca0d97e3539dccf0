"""Values of flags as they are written (a command line, YAML, Python), converted to their type and
checked against their range."""

from __future__ import annotations

import ast
import difflib
import json
import os
import re
from typing import Any

from slime.config.estimators import FACTS
from slime.config.flag import FlagSpec
from slime.config.preferences import PREFERENCE_FACTS
from slime.errors import UserError
from slime.files import repeated_key

#: A variable of a shell or of OmegaConf, alone or as a part of a path: $HOME/x, a/$RUN/b, ${X}.
_VARIABLE = re.compile(r"(?:^|(?<=/))\$[A-Za-z_]\w*(?=/|$)|\$\{[^}]*\}|\{\{.*\}\}")
#: Home folders: ~, ~/x, ~name/x
_HOME = re.compile(r"~\w*(?=/|$)")
_WORDS = {
    **dict.fromkeys(("true", "1", "yes", "on"), True),
    **dict.fromkeys(("false", "0", "no", "off"), False),
}
#: Words of Python, YAML and other systems for an unset value.
_UNSET = ("none", "null", "nil")
_CONTROL = re.compile(r"[\x00-\x1f\x7f]")
#: Flags whose values are any text: strings that end an answer, regular expressions, and names of
#: keys in the user's data.
_ANY_TEXT = re.compile(r"(?:rollout|eval)_stop|\w+_params_name_list|(?!wandb)\w+_key")
_SIGNED_BASE = re.compile(r"[-+]?0[xXoObB]\w+")
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
    if spec.kind == "str" and isinstance(value, float) and not spec.sections:
        raise _wrong(spec, value, where, "a number may have been written otherwise, as 1.10")
    try:
        typed = _typed(spec.kind, value)
    except (ValueError, TypeError, SyntaxError, OverflowError) as error:
        if spec.meta.refused:
            return value  # the flag's refusal explains more than an error about the type
        raise _wrong(spec, value, where, str(error) if spec.kind == "json" else "") from error
    if isinstance(typed, str) and not spec.choices and typed:
        _check_text(spec, typed, where)
        if _HOME.match(typed) and not _ANY_TEXT.fullmatch(spec.dest):
            typed = os.path.expanduser(typed)  # neither --save=~/x nor a file does
    if spec.kind == "json" and not spec.sections and not isinstance(typed, dict):
        raise _wrong(spec, value, where, 'it must be an object, {"key": value}')
    if spec.choices and typed not in spec.choices:
        choices = [str(choice) for choice in spec.choices if choice not in spec.meta.refused_values]
        shown = ", ".join(choices)
        written = str(typed).lower()
        near = difflib.get_close_matches(written, choices, n=1, cutoff=0.75)
        near = near or [choice for choice in choices if choice.startswith(f"{written}_")]
        fix = f"did you mean {near[0]}?" if near else f"choose one of: {shown}"
        if spec.dest == "loss_type" and written in PREFERENCE_FACTS:
            fix = f"pass --loss-type preference_loss --preference-loss {written}"
        elif spec.dest == "loss_type" and written in FACTS:
            fix = f"pass --advantage-estimator {written}, and leave --loss-type out"
        raise UserError(
            f"{where}{spec.option} cannot be {_shown(value)}",
            why=f"the choices are: {shown}",
            fix=fix,
        )
    return typed


def _check_text(spec: FlagSpec, text: str, where: str) -> None:
    """Check a path, a name or an address.

    Raises:
        UserError: it is a word for an unset value, has a variable that nothing replaces, a control
            character, or quotes or blanks around it.
    """
    if spec.optional and not spec.sections and text.strip().lower() in _UNSET:
        raise UserError(
            f"{where}{spec.option} is {_shown(text)}, which would be taken as a name",
            fix="leave it out, which leaves it unset",
        )
    if _ANY_TEXT.fullmatch(spec.dest):
        return
    if _VARIABLE.search(text):
        raise UserError(
            f"{where}{spec.option} has a variable in it: {_shown(text)}",
            why="only a shell replaces variables, and not in single quotes or in a file",
            fix="write the path itself" if "/" in text else "write the value itself",
        )
    if spec.sections:  # other programs' flags may take any text
        return
    if odd := _CONTROL.search(text):
        raise UserError(
            f"{where}{spec.option} has the control character {odd[0]!r} in it: {_shown(text)}",
            why="in double quotes, YAML and shells read \\n, \\t and others as such characters",
            fix="write it in single quotes",
        )
    if text != text.strip() or (len(text) > 1 and text[0] == text[-1] and text[0] in "'\""):
        raise UserError(
            f"{where}{spec.option} has blanks or quotes around it: {_shown(text)}",
            why="they would be a part of the name",
            fix=f"write {bare}" if (bare := text.strip(" \t'\"")) else "write the name itself",
        )


def _typed(kind: str, value: Any) -> Any:
    if kind == "bool":
        word = value.lower() if isinstance(value, str) else str(value).lower()
        if isinstance(value, (bool, int, str)) and word in _WORDS:
            return _WORDS[word]
        raise ValueError
    if value is None or (isinstance(value, bool) and kind != "json"):
        raise ValueError
    if kind == "int":
        if isinstance(value, float) and not value.is_integer():
            raise ValueError
        if isinstance(value, str) and _SIGNED_BASE.fullmatch(value.strip()):
            return int(value, 0)
        return int(value)
    if kind == "float":
        return float(value)
    if kind == "json":
        is_text = isinstance(value, (str, bytes))
        return json.loads(value, object_pairs_hook=_distinct) if is_text else value
    if kind == "int_or_list":
        return _int_or_list(value)
    if isinstance(value, (dict, list, tuple)):
        raise ValueError
    return os.fspath(value) if isinstance(value, os.PathLike) else str(value)


def _distinct(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Return the object of JSON with these pairs; a key that comes twice is an error, and not its
    last."""
    found = dict(pairs)
    if len(found) < len(pairs):
        raise ValueError(f"the key {repeated_key(pairs)!r} comes twice")
    return found


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
    if isinstance(value, str) and _VARIABLE.search(value):
        why = "only a shell replaces variables, and not in single quotes or in a file"
    fix = _HOW[spec.kind]
    if spec.many and isinstance(value, str) and "," in value:
        items = value.replace(",", " ").split()
        fix = f"put blanks between values: {spec.option} {' '.join(items)}"
        if where:  # a file
            fix = f"write a list: [{', '.join(items)}]"
    return UserError(
        f"{where}{spec.option} must be {_KIND_NAMES[spec.kind]}, not {_shown(value)}",
        why=why,
        fix=fix,
    )


def _shown(value: Any) -> str:
    text = repr(value) if isinstance(value, str) else str(value)
    return text if len(text) <= 80 else text[:77] + "…"
