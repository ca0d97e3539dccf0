"""Write the tables of other programs' flags in slime/config/data/ from their source. It is parsed,
not imported.

python tools/make_flag_tables.py                    megatron_core.json and sglang_router.json, from
                                                    the installed packages
python tools/make_flag_tables.py 0.5.15 0.5.16      also sglang.json, from these releases (the
                                                    newest last), whose wheels are downloaded
"""

from __future__ import annotations

import argparse
import ast
import importlib.metadata
import json
import subprocess
import sys
import tempfile
import zipfile
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from slime.config.engine_flags import ForeignArg
from slime.config.flag import docs_of_class

DATA = Path(__file__).resolve().parents[1] / "slime" / "config" / "data"


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("versions", nargs="*", help="versions of SGLang on PyPI, the newest last")
    parser.add_argument("--wheels", type=Path, help="folder of wheels that are already here")
    options = parser.parse_args()
    _write("megatron_core.json", megatron_table(), "fields")
    _write("sglang_router.json", router_table(), "arguments")
    if options.versions:
        with tempfile.TemporaryDirectory() as folder:
            wheels = options.wheels or Path(folder)
            sources = {version: _source(version, wheels) for version in options.versions}
        _write("sglang.json", sglang_table(sources), "arguments")


def _write(name: str, table: dict[str, Any], key: str) -> None:
    """Write a table with a line for each row."""
    rows = ",\n".join("    " + json.dumps(row, ensure_ascii=False) for row in table[key])
    others = {other: value for other, value in table.items() if other != key}
    head = json.dumps(others, ensure_ascii=False)[1:-1]
    text = f'{{\n  {head},\n  "{key}": [\n{rows}\n  ]\n}}\n'
    (DATA / name).write_text(text, encoding="utf-8")
    print(f"{len(table[key])} {key} → {DATA / name}")


def _source(version: str, wheels: Path) -> str:
    """The text of SGLang's files that declare arguments. From 0.5.20 on, most are fields of classes
    in a folder of their own."""
    if not list(wheels.glob(f"sglang-{version}-*.whl")):
        pip = [sys.executable, "-m", "pip", "download", "--no-deps", "--dest", str(wheels)]
        subprocess.run([*pip, f"sglang=={version}"], check=True, timeout=600)
    wheel = zipfile.ZipFile(next(wheels.glob(f"sglang-{version}-*.whl")))
    constants = "sglang/srt/arg_groups/choices.py"
    folder = "sglang/srt/arg_groups/fields/"
    files = [
        *(name for name in wheel.namelist() if name == constants),
        *sorted(name for name in wheel.namelist() if name.startswith(folder)),
        "sglang/srt/server_args.py",
    ]
    texts = [wheel.read(name).decode("utf-8") for name in files if name.endswith(".py")]
    return "\n".join(text.replace("from __future__ import annotations", "") for text in texts)


# -- SGLang and its router


def sglang_table(sources: dict[str, str]) -> dict[str, Any]:
    """The arguments of the last version, and how those of the others differ from them. Help texts
    are left out: SGLang's own `--help` has them."""
    tables = {version: _rows(source) for version, source in sources.items()}
    newest = next(reversed(tables))
    rows = tables[newest]
    others = {
        version: {
            "without": [name for name in rows if name not in table],
            "arguments": [row for name, row in table.items() if rows.get(name) != row],
        }
        for version, table in tables.items()
        if version != newest
    }
    return {"version": newest, "other_versions": others, "arguments": list(rows.values())}


def _rows(source: str) -> dict[str, dict[str, Any]]:
    return {arg.name: _row(replace(arg, help="")) for arg in sglang_arguments(source)}


def _row(arg: ForeignArg) -> dict[str, Any]:
    """An argument for JSON, without what is at its default."""
    empty = asdict(ForeignArg(""))
    return {key: value for key, value in asdict(arg).items() if value != empty[key]}


def sglang_arguments(source: str) -> list[ForeignArg]:
    """What ``python -m sglang.launch_server`` accepts, from the text of `_source`."""
    reader = SourceReader(source)
    found: dict[str, ForeignArg] = {}
    for arg in (*reader.annotated_fields(), *reader.added_arguments()):
        found.setdefault(arg.name, arg)
    return list(found.values())


def router_table() -> dict[str, Any]:
    """What the installed sglang-router accepts."""
    distribution = importlib.metadata.distribution("sglang-router")
    path = Path(str(distribution.locate_file("sglang_router/router_args.py")))
    reader = SourceReader(path.read_text(encoding="utf-8"))
    arguments = reader.added_arguments(reader.class_defaults("RouterArgs"))
    return {"version": distribution.version, "arguments": [_row(arg) for arg in arguments]}


_KINDS = {"int": "int", "float": "float", "str": "str", "bool": "bool"}
_JSON_TYPES = frozenset({"json.loads", "json_list_type"})


class SourceReader:
    """Reads the arguments that one source file defines.

    Two spellings are understood: ``parser.add_argument("--name", type=int, …)`` and the annotated
    fields of SGLang's `ServerArgs` (``name: A[int, Arg(help=…, aliases=[…])] = 1``). What only
    running the program could tell (choices computed at import, say) is left open: the program
    itself checks it.
    """

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

    # -- add_argument ------------------------------------------------------------------------------

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
                    if defaults is not None and (arg.default is None or "default" not in keywords):
                        arg = replace(arg, default=defaults.get(arg.name))
                    found.append(arg)
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

    # -- annotated dataclass fields ----------------------------------------------------------------

    def annotated_fields(self) -> list[ForeignArg]:
        """Every field ``name: A[type, "help"]`` or ``A[type, Arg(…)]`` of a class that has a
        command-line form."""
        found = []
        nodes = (node for node in self._tree.body if isinstance(node, ast.ClassDef))
        for statement in (statement for node in nodes for statement in node.body):
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

    # -- values ------------------------------------------------------------------------------------

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


# -- Megatron


#: (file below megatron/core, class, dict of `MegatronConfig`); later classes add fields, never
#: change one.
_SOURCES = (
    ("model_parallel_config.py", "ModelParallelConfig", "transformer"),
    ("transformer/transformer_config.py", "TransformerConfig", "transformer"),
    ("transformer/transformer_config.py", "MLATransformerConfig", "model"),
    ("optimizer/optimizer_config.py", "OptimizerConfig", "optimizer"),
    ("distributed/distributed_data_parallel_config.py", "DistributedDataParallelConfig", "ddp"),
)

_SCALARS: dict[str, str] = {"bool": "bool", "int": "int", "float": "float", "str": "str"}


def megatron_table() -> dict[str, Any]:
    """The scalar fields of the config classes of the installed megatron-core."""
    distribution = importlib.metadata.distribution("megatron-core")
    found: dict[tuple[str, str], dict[str, Any]] = {}
    for file, class_name, section in _SOURCES:
        path = Path(str(distribution.locate_file("megatron/core/" + file)))
        tree = ast.parse(path.read_text(encoding="utf-8"))
        node = next(n for n in tree.body if isinstance(n, ast.ClassDef) and n.name == class_name)
        docs = docs_of_class(node)
        for statement in node.body:
            if isinstance(statement, ast.AnnAssign) and isinstance(statement.target, ast.Name):
                name = statement.target.id
                row = _field(statement, name, section, docs.get(name, ""))
                if row is not None:
                    found.setdefault((section, name), row)
    return {"version": distribution.version, "fields": list(found.values())}


def _field(statement: ast.AnnAssign, name: str, section: str, help: str) -> dict[str, Any] | None:
    shape = _shape_of(statement.annotation)
    if shape is None or name.startswith("_"):
        return None
    default, meta = _default_of(statement.value)
    more = {"arg_names": list(meta.get("arg_names", ())), "help": help}
    row = {"section": section, "name": name, "default": default, **shape}
    return row | {key: value for key, value in more.items() if value}


def _shape_of(node: ast.expr) -> dict[str, Any] | None:
    """kind, many, … of an annotation; None for types that no command line can give (callables,
    objects).

    Example:
        >>> _shape_of(ast.parse("Optional[Literal['a', 'b']]").body[0].value)
        {'kind': 'str', 'choices': ('a', 'b'), 'optional': True}
    """
    if isinstance(node, ast.Name):
        return {"kind": _SCALARS[node.id]} if node.id in _SCALARS else None
    if isinstance(node, ast.Attribute):
        if node.attr == "dtype":
            return {"kind": "str", "choices": ("fp32", "bf16", "fp16", "fp8")}
        return None
    if not isinstance(node, ast.Subscript) or not isinstance(node.value, ast.Name):
        return None
    outer = node.value.id
    inner = node.slice.elts if isinstance(node.slice, ast.Tuple) else [node.slice]
    if outer == "Literal":
        return {"kind": "str", "choices": tuple(ast.literal_eval(item) for item in inner)}
    if outer == "Optional":
        shape = _shape_of(inner[0])
        return shape and {**shape, "optional": True}
    if outer in ("List", "list", "Tuple", "tuple"):
        shape = _shape_of(inner[0])
        return shape and {**shape, "many": True}
    if outer == "Union":
        shape = _shape_of(inner[0])
        # a frequency or one entry per layer: an expression such as ([0]*3+[1]*58)
        if shape == {"kind": "int"}:
            return {"kind": "int_or_list"}
        return shape and {**shape, "many": True, "scalar_or_list": True}
    return None


def _default_of(node: ast.expr | None) -> tuple[Any, dict[str, Any]]:
    """(default, argparse_meta) of the right-hand side; what only evaluation could tell is None."""
    if node is None:
        return None, {}
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "field":
        keywords = {keyword.arg: keyword.value for keyword in node.keywords}
        if "metadata" in keywords:
            meta = ast.literal_eval(keywords["metadata"]).get("argparse_meta", {})
        else:
            meta = {}
        # what Megatron's command line has, where the class needs another value
        if "default" in meta:
            return meta["default"], meta
        return (_default_of(keywords["default"])[0] if "default" in keywords else None), meta
    if isinstance(node, ast.BinOp):  # 1024 * 1024, 2**32
        left = _default_of(node.left)[0]
        right = _default_of(node.right)[0]
        return (left**right if isinstance(node.op, ast.Pow) else left * right), {}
    if isinstance(node, ast.Attribute):  # torch.float32
        return {"float32": "fp32", "bfloat16": "bf16", "float16": "fp16"}.get(node.attr), {}
    try:
        return ast.literal_eval(node), {}
    except ValueError:
        return None, {}


if __name__ == "__main__":
    main()
