"""Check the imports of slime in a plugin's source before launch.

An import inside a function fails only when the function is called, perhaps an hour into a run. The
check covers all imports of the file, and of the plugin's other files that it imports.
"""

from __future__ import annotations

import ast
import importlib.util
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from slime.compat.import_paths import NO_COUNTERPART, OLD_MODULES
from slime.documentation import doc_url
from slime.errors import UserError

_MISSING = (ImportError, AttributeError, ValueError)
_GUARDS = ("ImportError", "ModuleNotFoundError", "Exception", "BaseException")


@dataclass(frozen=True)
class MissingImport:
    """An import that will fail: its place, the imported name, and what to use instead."""

    file: Path
    line: int
    name: str
    reason: str


def check_plugin_imports(files: list[Path]) -> None:
    """Refuse plugins whose imports of slime would fail.

    Raises:
        UserError: names every such import with its file and line.
    """
    found = [missing for file in files for missing in missing_imports(file)]
    if found:
        first = found[0]
        raise UserError(
            f"{first.file}:{first.line} imports {first.name}, which has no counterpart in this "
            "version",
            why="; ".join(
                dict.fromkeys(f"line {one.line}: {one.name}: {one.reason}" for one in found)
            ),
            fix=f"replace the import; the paths that there are: {doc_url('import-paths.md')}",
        )


def missing_imports(file: Path) -> list[MissingImport]:
    """Return the failing imports of slime in a Python file, and in the files that it imports from
    its folder."""
    found: list[MissingImport] = []
    waiting = [file.resolve()]
    seen = set[Path]()
    while waiting:
        current = waiting.pop()
        if current in seen or not current.is_file():
            continue
        seen.add(current)
        for node in _imports(ast.parse(current.read_bytes())):
            found += [
                MissingImport(current, node.lineno, name, why) for name, why in _unavailable(node)
            ]
            waiting += [
                path for path in _files_of(node, current) if file.resolve().parent in path.parents
            ]
    return found


def _imports(tree: ast.AST) -> Iterator[ast.Import | ast.ImportFrom]:
    """Import statements that are not guarded by ``except ImportError`` or ``if TYPE_CHECKING``."""
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, (ast.Import, ast.ImportFrom)):
            yield node
        elif isinstance(node, ast.Try) and any(
            _catches_imports(handler) for handler in node.handlers
        ):
            for part in (*node.handlers, *node.orelse, *node.finalbody):
                yield from _imports(part)
        elif isinstance(node, ast.If) and ast.unparse(node.test).endswith("TYPE_CHECKING"):
            for part in node.orelse:
                yield from _imports(part)
        else:
            yield from _imports(node)


def _catches_imports(handler: ast.ExceptHandler) -> bool:
    caught = "" if handler.type is None else ast.unparse(handler.type)
    return handler.type is None or any(name in caught for name in _GUARDS)


def _unavailable(node: ast.Import | ast.ImportFrom) -> Iterator[tuple[str, str]]:
    """Yield (import path, reason) for each name of slime that the statement cannot import."""
    if isinstance(node, ast.Import):
        for alias in node.names:
            if alias.name.split(".")[0] == "slime" and (reason := _why_no_module(alias.name)):
                yield alias.name, reason
        return
    module = node.module or ""
    if node.level or module.split(".")[0] != "slime":
        return
    if reason := _why_no_module(module):
        yield module, reason
        return
    for alias in node.names:
        path = f"{module}.{alias.name}"
        known = OLD_MODULES.get(module)
        refused = NO_COUNTERPART.get(f"{module}:{alias.name}") or NO_COUNTERPART.get(path)
        if refused:
            yield path, refused
        elif known is not None and alias.name not in (*known, "*") and path not in OLD_MODULES:
            yield path, f"of {module} there are {', '.join(sorted(known)) or 'no names'}"


def _why_no_module(name: str) -> str:
    if name in NO_COUNTERPART:
        return NO_COUNTERPART[name]
    try:
        return "" if importlib.util.find_spec(name) is not None else "there is no such module"
    except _MISSING as error:
        return str(error)


def _files_of(node: ast.Import | ast.ImportFrom, importer: Path) -> Iterator[Path]:
    """Yield the source files of the modules that a statement in ``importer`` imports, except
    slime's own."""
    names = [alias.name for alias in node.names]
    if isinstance(node, ast.ImportFrom):
        if node.level or not node.module:
            folder = importer.parents[max(0, node.level - 1)].joinpath(
                *(node.module or "").split(".")
            )
            yield folder.with_suffix(".py")
            yield from (folder / f"{name}.py" for name in names)
            return
        names = [node.module, *(f"{node.module}.{name}" for name in names)]
    for name in names:
        if name.split(".")[0] == "slime":
            continue
        try:
            spec: Any = importlib.util.find_spec(name)
        except _MISSING:
            continue
        if spec is not None and spec.origin and spec.origin.endswith(".py"):
            yield Path(spec.origin).resolve()
