"""The scalar fields of Megatron's config classes, read from the installed source.

The source is parsed with `ast`, never imported: importing any megatron module imports torch
(seconds), and `--help` must not. `megatron_flags` makes flags of them.

    TransformerConfig (and parents)   →  config.megatron.transformer["moe_router_topk"]
    MLATransformerConfig              →  config.megatron.model["q_lora_rank"]
    OptimizerConfig                   →  config.megatron.optimizer["loss_scale"]
    DistributedDataParallelConfig     →  config.megatron.ddp["bucket_size"]
"""

from __future__ import annotations

import ast
import functools
import importlib.metadata
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from slime.config.flag import Kind, docs_of_class

#: (file below megatron/core, class, dict of `MegatronConfig`); later classes add fields, never
#: change one.
_SOURCES = (
    ("model_parallel_config.py", "ModelParallelConfig", "transformer"),
    ("transformer/transformer_config.py", "TransformerConfig", "transformer"),
    ("transformer/transformer_config.py", "MLATransformerConfig", "model"),
    ("optimizer/optimizer_config.py", "OptimizerConfig", "optimizer"),
    ("distributed/distributed_data_parallel_config.py", "DistributedDataParallelConfig", "ddp"),
)

_SCALARS: dict[str, Kind] = {"bool": "bool", "int": "int", "float": "float", "str": "str"}


@dataclass(frozen=True)
class NativeField:
    """One field of a Megatron config class, as its source spells it."""

    name: str
    section: str
    kind: Kind
    default: Any
    many: bool = False
    scalar_or_list: bool = False
    optional: bool = False
    choices: tuple[str, ...] = ()
    arg_names: tuple[str, ...] = ()
    help: str = ""


@functools.lru_cache(maxsize=1)
def megatron_version() -> str:
    return importlib.metadata.version("megatron-core")


@functools.lru_cache(maxsize=1)
def native_fields() -> dict[tuple[str, str], NativeField]:
    """All scalar fields of the installed megatron-core by (section, name)."""
    distribution = importlib.metadata.distribution("megatron-core")
    found: dict[tuple[str, str], NativeField] = {}
    trees: dict[str, ast.Module] = {}
    for file, class_name, section in _SOURCES:
        if file not in trees:
            path = Path(str(distribution.locate_file("megatron/core/" + file)))
            trees[file] = ast.parse(path.read_text(encoding="utf-8"))
        node = next(
            n for n in trees[file].body if isinstance(n, ast.ClassDef) and n.name == class_name
        )
        docs = docs_of_class(node)
        for statement in node.body:
            if isinstance(statement, ast.AnnAssign) and isinstance(statement.target, ast.Name):
                native = _read_field(statement, statement.target.id, section, docs)
                if native is not None:
                    found.setdefault((section, native.name), native)
    return found


def _read_field(
    statement: ast.AnnAssign, name: str, section: str, docs: dict[str, str]
) -> NativeField | None:
    shape = _shape_of(statement.annotation)
    if shape is None or name.startswith("_"):
        return None
    default, meta = _default_of(statement.value)
    names = tuple(str(arg) for arg in meta.get("arg_names", ()))
    return NativeField(
        name, section, default=default, arg_names=names, help=docs.get(name, ""), **shape
    )


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
        return (
            {"kind": "str", "choices": ("fp32", "bf16", "fp16", "fp8")}
            if node.attr == "dtype"
            else None
        )
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
        if shape == {
            "kind": "int"
        }:  # a frequency or one entry per layer: an expression such as ([0]*3+[1]*58)
            return {"kind": "int_or_list"}
        return shape and {**shape, "many": True, "scalar_or_list": True}
    return None


def _default_of(node: ast.expr | None) -> tuple[Any, dict[str, Any]]:
    """(default, argparse_meta) of the right-hand side; what only evaluation could tell is None."""
    if node is None:
        return None, {}
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "field":
        keywords = {keyword.arg: keyword.value for keyword in node.keywords}
        meta = (
            ast.literal_eval(keywords["metadata"]).get("argparse_meta", {})
            if "metadata" in keywords
            else {}
        )
        if (
            "default" in meta
        ):  # what Megatron's command line has, where the class needs another value
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
