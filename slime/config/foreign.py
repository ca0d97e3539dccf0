"""Reading other programs' command lines from their source, without importing them.

Two spellings of an argument are understood: ``parser.add_argument("--name", type=int, ...)`` and
the annotated dataclass fields of SGLang's `ServerArgs` (``name: A[int, Arg(help=...,
aliases=[...])] = 1``). What only running the program could tell (choices computed at import, say)
is left open: the program itself checks it.
"""

from __future__ import annotations

import ast
import json
from dataclasses import asdict, dataclass, replace
from typing import Any

_KINDS = {"int": "int", "float": "float", "str": "str", "bool": "bool"}
_JSON_TYPES = frozenset({"json.loads", "json_list_type"})


@dataclass(frozen=True)
class ForeignArg:
    """One argument of another program's command line.

    Attributes:
        name: its first long option without dashes, with underscores.
        kind: "bool" (no value), "int", "float", "str" or "json".
        many: takes one or more values.
        value_optional: may be given without a value.
        negatable: has a ``--no-`` form.
        choices: allowed values, empty when open.
    """

    name: str
    kind: str = "str"
    default: Any = None
    many: bool = False
    value_optional: bool = False
    negatable: bool = False
    choices: tuple[Any, ...] = ()
    aliases: tuple[str, ...] = ()
    help: str = ""

    def to_json(self) -> dict[str, Any]:
        """Without what is at its default, to keep stored tables small."""
        empty = asdict(ForeignArg(""))
        return {key: value for key, value in asdict(self).items() if value != empty[key]}

    @staticmethod
    def from_json(data: dict[str, Any]) -> ForeignArg:
        data = dict(data)
        for key in ("choices", "aliases"):
            data[key] = tuple(data.get(key, ()))
        return ForeignArg(**data)


class SourceReader:
    """The arguments that one source file defines."""

    def __init__(self, source: str) -> None:
        self._tree = ast.parse(source)
        self._constants: dict[str, Any] = {}
        for node in self._tree.body:
            if (
                isinstance(node, ast.Assign)
                and len(node.targets) == 1
                and isinstance(node.targets[0], ast.Name)
            ):
                value = self._value(node.value)
                if value is not None:
                    self._constants[node.targets[0].id] = value

    # -- add_argument
    # --------------------------------------------------------------------------------------

    def added_arguments(self, defaults: dict[str, Any] | None = None) -> list[ForeignArg]:
        """Every ``….add_argument("--…")`` of the file."""
        found = []
        for node in ast.walk(self._tree):
            if (
                isinstance(node, ast.Call)
                and isinstance(node.func, ast.Attribute)
                and node.func.attr == "add_argument"
            ):
                options = [self._option(argument) for argument in node.args]
                names = [
                    option.removeprefix("--").replace("-", "_")
                    for option in options
                    if option.startswith("--")
                ]
                if names:
                    keywords = {
                        keyword.arg: keyword.value for keyword in node.keywords if keyword.arg
                    }
                    arg = self._from_keywords(
                        ForeignArg(names[0], aliases=tuple(names[1:])), keywords
                    )
                    stated = arg.default if "default" in keywords else None
                    found.append(
                        replace(
                            arg,
                            default=(defaults or {}).get(arg.name) if stated is None else stated,
                        )
                    )
        return found

    def _option(self, node: ast.expr) -> str:
        """``"--x"``, or ``f"--{prefix}x"`` without the prefix."""
        if isinstance(node, ast.JoinedStr):
            return "".join(
                str(part.value) for part in node.values if isinstance(part, ast.Constant)
            )
        return str(node.value) if isinstance(node, ast.Constant) else ""

    def _from_keywords(self, arg: ForeignArg, keywords: dict[str, ast.expr]) -> ForeignArg:
        action = ast.unparse(keywords["action"]).strip("'\"") if "action" in keywords else ""
        kind = "str"
        many = False
        if "type" in keywords:
            kind = self._kind_of_parser(ast.unparse(keywords["type"]))
        nargs = self._value(keywords["nargs"]) if "nargs" in keywords else None
        if action == "store_true" or action.endswith(
            ("StoreTrueAction", "StoreConstAction", "DeprecatedAction")
        ):
            kind = "bool"
        elif nargs in ("+", "*") or isinstance(nargs, int):
            many = True
        return replace(
            arg,
            kind=kind,
            many=many,
            value_optional=nargs == "?",
            choices=self._choices(keywords.get("choices")),
            default=False if kind == "bool" else self._value(keywords.get("default")),
            help=self._help(keywords.get("help")),
        )

    def _kind_of_parser(self, text: str) -> str:
        return "json" if text in _JSON_TYPES else _KINDS.get(text, "str")

    # -- annotated dataclass fields
    # ------------------------------------------------------------------------

    def annotated_fields(self, class_name: str) -> list[ForeignArg]:
        """Every field ``name: A[type, "help"]`` or ``A[type, Arg(…)]`` of a class that has a
        command-line form."""
        node = next(
            n for n in self._tree.body if isinstance(n, ast.ClassDef) and n.name == class_name
        )
        found = []
        for statement in node.body:
            if not isinstance(statement, ast.AnnAssign) or not isinstance(
                statement.target, ast.Name
            ):
                continue
            annotation = statement.annotation
            if not isinstance(annotation, ast.Subscript) or not isinstance(
                annotation.slice, ast.Tuple
            ):
                continue
            if ast.unparse(annotation.value) not in ("A", "Annotated"):
                continue
            type_node = annotation.slice.elts[0]
            meta = annotation.slice.elts[1]
            arg = self._annotated(statement.target.id, type_node, meta, statement.value)
            if arg is not None:
                found.append(arg)
        return found

    def _annotated(
        self, field_name: str, type_node: ast.expr, meta: ast.expr, default: ast.expr | None
    ) -> ForeignArg | None:
        keywords: dict[str, ast.expr] = {}
        if isinstance(meta, ast.Call):
            keywords = {keyword.arg: keyword.value for keyword in meta.keywords if keyword.arg}
        if self._value(keywords.get("no_cli")):
            return None
        name = (
            str(self._value(keywords.get("cli_name")) or field_name)
            .removeprefix("--")
            .replace("-", "_")
        )
        aliases = [str(alias) for alias in self._value(keywords.get("aliases")) or ()]
        arg = ForeignArg(
            name,
            default=self._value(default),
            aliases=tuple(
                alias.removeprefix("--").replace("-", "_")
                for alias in aliases
                if alias.startswith("--")
            ),
            help=self._help(
                meta if not keywords and not isinstance(meta, ast.Call) else keywords.get("help")
            ),
        )
        return self._typed(arg, type_node, keywords)

    def _typed(
        self, arg: ForeignArg, type_node: ast.expr, keywords: dict[str, ast.expr]
    ) -> ForeignArg:
        if "action" in keywords:
            if "BooleanOptional" in ast.unparse(keywords["action"]):
                return replace(arg, kind="bool", negatable=True)
            return replace(arg, many=True)
        choices = self._choices(keywords.get("choices"))
        while isinstance(type_node, ast.Subscript) and ast.unparse(type_node.value) == "Optional":
            type_node = type_node.slice
        text = ast.unparse(type_node)
        if "type_parser" in keywords:
            return replace(
                arg,
                kind=self._kind_of_parser(ast.unparse(keywords["type_parser"])),
                choices=choices,
            )
        if text.startswith("Literal["):
            values = choices or self._choices(type_node.slice)  # type: ignore[attr-defined]
            return replace(arg, choices=values, kind=type(values[0]).__name__)
        many = text.startswith(("List[", "list["))
        element = text[5:-1] if many else text
        nargs = self._value(keywords.get("nargs"))
        kind = _KINDS.get(element, "str")
        many = many or nargs in ("+", "*")
        return replace(arg, kind=kind, many=many, value_optional=nargs == "?", choices=choices)

    def class_defaults(self, class_name: str) -> dict[str, Any]:
        """Constant defaults of a plain dataclass, by field."""
        node = next(
            n for n in self._tree.body if isinstance(n, ast.ClassDef) and n.name == class_name
        )
        fields = [
            s for s in node.body if isinstance(s, ast.AnnAssign) and isinstance(s.target, ast.Name)
        ]
        return {ast.unparse(field.target): self._value(field.value) for field in fields}

    # -- values
    # --------------------------------------------------------------------------------------------

    def _choices(self, node: ast.expr | None) -> tuple[Any, ...]:
        value = self._value(node)
        if isinstance(value, str):
            return (value,)
        return tuple(sorted(value, key=str) if isinstance(value, (set, frozenset)) else value or ())

    def _help(self, node: ast.expr | None) -> str:
        value = self._value(node)
        return " ".join(value.split()) if isinstance(value, str) and value != "==SUPPRESS==" else ""

    def _value(self, node: ast.expr | None) -> Any:
        """The constant that an expression stands for, or None when only running the file could
        tell."""
        if node is None:
            return None
        if isinstance(node, ast.Name):
            return self._constants.get(node.id)
        if isinstance(node, ast.JoinedStr):
            parts = [
                str(part.value) if isinstance(part, ast.Constant) else "…" for part in node.values
            ]
            return "".join(parts)
        if isinstance(node, ast.BinOp):
            left = self._value(node.left)
            right = self._value(node.right)
            if left is None or right is None:
                return None
            if isinstance(node.op, ast.Add):
                return left + right if type(left) is type(right) else None
            operators = {ast.Mult: left.__mul__, ast.Pow: left.__pow__}
            return operators[type(node.op)](right) if type(node.op) in operators else None
        try:
            return ast.literal_eval(node)
        except (ValueError, TypeError):
            return None


def to_argv(settings: dict[str, Any]) -> list[str]:
    """The command line of another program for settings as `Config.engine.sglang` and `.router` hold
    them.

    Example:
        >>> to_argv({
        ...     "mem_fraction_static": 0.8, "disable_cuda_graph": True, "cuda_graph_bs": (1, 2)})
        ['--mem-fraction-static', '0.8', '--disable-cuda-graph', '--cuda-graph-bs', '1', '2']
    """
    argv: list[str] = []
    for name, value in settings.items():
        option = "--" + name.replace("_", "-")
        if value is True:
            argv.append(option)
        elif value is False:
            argv.append("--no-" + option[2:])
        elif isinstance(value, (tuple, list)):
            argv += [
                option,
                *(json.dumps(item) if isinstance(item, dict) else str(item) for item in value),
            ]
        elif isinstance(value, dict):
            argv += [option, json.dumps(value)]
        else:
            argv.append(
                option
                if value is None
                else f"{option}={value}"
                if str(value).startswith("-")
                else option
            )
            if value is not None and not str(value).startswith("-"):
                argv.append(str(value))
    return argv
