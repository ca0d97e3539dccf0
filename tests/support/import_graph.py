"""Which module of slime imports which, inside functions and for types alone included: what the test
of the architecture and the tables of docs/architecture.md (tools/measure_structure.py) read.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator, Mapping
from functools import cache
from pathlib import Path

ROOT = Path(__file__).parents[2]
PACKAGE = ROOT / "slime"
FILES = sorted(PACKAGE.rglob("*.py"))
#: Of these everything may import, and they import nothing that is imported at once: names of the
#: package itself.
FACE = ("__init__", "compat.import_paths")


def module_name(path: Path) -> str:
    """Name below ``slime``: "rollout.engines.api"; packages by their folder, the root as
    "__init__"."""
    parts = list(path.relative_to(PACKAGE).with_suffix("").parts)
    if parts[-1] == "__init__" and len(parts) > 1:
        parts.pop()
    return ".".join(parts)


@cache
def tree_of(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"), str(path))


@cache
def nodes_of(path: Path) -> tuple[ast.AST, ...]:
    """All nodes of a file's tree."""
    return tuple(ast.walk(tree_of(path)))


@cache
def imported_by(path: Path) -> tuple[tuple[str, int], ...]:
    """What `imported_modules` finds in a file."""
    return tuple(imported_modules(tree_of(path)))


def forget_trees() -> None:
    """Free the trees, which are hundreds of MB."""
    for cached in (tree_of, nodes_of):
        cached.cache_clear()


def imported_modules(tree: ast.AST) -> Iterator[tuple[str, int]]:
    """(module, line) of every import; ``from slime.x import y`` is slime.x.y where y is a module,
    else slime.x."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from ((alias.name, node.lineno) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"line {node.lineno}: relative import"
            module = node.module or ""
            for alias in node.names:
                is_module = (
                    module == "slime"
                    or (ROOT / module.replace(".", "/") / f"{alias.name}.py").exists()
                )
                yield (f"{module}.{alias.name}" if is_module else module), node.lineno


@cache
def imports_of_modules() -> dict[str, set[str]]:
    """Module below slime → modules below slime that it imports, inside functions and for types
    alone included."""
    names = {module_name(path) for path in FILES}
    found = {}
    for path in FILES:
        targets = {
            module.removeprefix("slime.") for module, _ in imported_by(path) if "slime." in module
        }
        found[module_name(path)] = (targets & names) - {module_name(path), *FACE}
    return found


def in_circles(imports: Mapping[str, set[str]]) -> list[str]:
    """Modules that import each other in a circle, or what does."""
    left = dict(imports)
    while ends := [name for name, targets in left.items() if not targets & left.keys()]:
        for name in ends:
            del left[name]
    return sorted(left)


def longest_chain(imports: Mapping[str, set[str]], start: str) -> tuple[str, ...]:
    """Of modules without a circle; the first by name of those that are equally long."""

    @cache
    def below(name: str) -> tuple[str, ...]:
        return (
            name,
            *max((below(target) for target in sorted(imports[name])), key=len, default=()),
        )

    return below(start)
