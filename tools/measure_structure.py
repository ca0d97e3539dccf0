"""Count how the code is built: the generated table of docs/architecture.md.

python tools/measure_structure.py                                 print the numbers of slime/
python tools/measure_structure.py path/to/other/slime             of another tree
python tools/measure_structure.py --write docs/architecture.md    write them, as the column "now"
"""

from __future__ import annotations

import argparse
import ast
import io
import re
import sys
import tokenize
from collections import Counter, defaultdict, deque
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
BEGIN = "<!-- begin of the table by tools/measure_structure.py -->"
END = "<!-- end of the table by tools/measure_structure.py -->"

#: Where a value enters: package, function and parameter, followed by `way_of`.
WAYS = {
    "way of a group through the rollout": ("rollout", "GroupRunner.run", "group"),
    "way of a batch through the trainer": ("trainer", "update", "batch"),
}
OPENING_WORDS = re.compile(r"(Of|Those|To be|Who|By)\b")
TIME_CONSTANT = re.compile(r"_?[A-Z_]*(_SECONDS|_DEADLINE|_TIMEOUT)")
NOT_CODE = (
    tokenize.COMMENT,
    tokenize.NL,
    tokenize.NEWLINE,
    tokenize.INDENT,
    tokenize.DEDENT,
    tokenize.ENDMARKER,
)
Function = ast.FunctionDef | ast.AsyncFunctionDef


@dataclass(frozen=True)
class SourceFile:
    """One Python file with its syntax tree; ``name`` is its path below the package."""

    name: str
    text: str
    tree: ast.Module

    @property
    def module(self) -> str:
        return self.name.removesuffix(".py").replace("/", ".").removesuffix(".__init__")

    @property
    def package(self) -> str:
        return f"`{self.name.split('/')[0]}`" if "/" in self.name else "files beside the packages"


def read_package(root: Path) -> list[SourceFile]:
    files = []
    for path in sorted(root.rglob("*.py")):
        text = path.read_text(encoding="utf-8")
        files.append(SourceFile(path.relative_to(root).as_posix(), text, ast.parse(text)))
    return files


def docstrings_of(tree: ast.Module) -> Iterator[ast.Constant]:
    for node in ast.walk(tree):
        if isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)):
            first = node.body[0] if node.body else None
            value = first.value if isinstance(first, ast.Expr) else None
            if isinstance(value, ast.Constant) and isinstance(value.value, str):
                yield value


def code_lines(text: str, tree: ast.Module) -> int:
    """Count the lines that hold code: no blank lines, comments or docstrings.

    >>> source = "'''Say what f does.'''\\n\\n# why\\nf = (1 +\\n     2)\\n"
    >>> code_lines(source, ast.parse(source))
    2
    """
    lines: set[int] = set()
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type not in NOT_CODE:
            lines.update(range(token.start[0], token.end[0] + 1))
    for docstring in docstrings_of(tree):
        lines.difference_update(range(docstring.lineno, (docstring.end_lineno or 0) + 1))
    return len(lines)


def is_unrelated_tuple(node: ast.AST) -> bool:
    """Tell whether a statement packs several assignments: ``a, b = c, d``, but no swap.

    >>> [is_unrelated_tuple(ast.parse(code).body[0])
    ...  for code in ("a, b = 0, x.y", "a, b = b, a + b", "a, b = f()", "a = 1, 2")]
    [True, False, False, False]
    """
    if not isinstance(node, ast.Assign) or not isinstance(node.value, ast.Tuple):
        return False
    target = node.targets[0]
    if not isinstance(target, ast.Tuple):
        return False
    if any(isinstance(part, ast.Starred) for part in (*target.elts, *node.value.elts)):
        return False
    read = {ast.unparse(part) for part in ast.walk(node.value) if isinstance(part, ast.expr)}
    return not read & {ast.unparse(part) for part in target.elts}


def time_constants(tree: ast.Module) -> Iterator[str]:
    """Names of module-level waits: ``_POLL_SECONDS = 0.5``."""
    for node in tree.body:
        if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name):
            name = node.targets[0].id
            parts = ast.walk(node.value)
            has_float = any(isinstance(p, ast.Constant) and type(p.value) is float for p in parts)
            if has_float and TIME_CONSTANT.fullmatch(name):
                yield name


def imports_of(files: list[SourceFile], top: str) -> dict[str, set[str]]:
    """Map each module to the modules of the package that it imports, also inside functions."""
    modules = {file.module for file in files}
    found: dict[str, set[str]] = {}
    for file in files:
        names: set[str] = set()
        for node in ast.walk(file.tree):
            if isinstance(node, ast.Import):
                names |= {alias.name for alias in node.names}
            elif isinstance(node, ast.ImportFrom) and node.level == 0:
                for alias in node.names:
                    inner = f"{node.module}.{alias.name}"
                    is_module = inner.removeprefix(f"{top}.") in modules
                    names.add(inner if is_module else str(node.module))
        inside = {n.removeprefix(f"{top}.") for n in names if n.startswith(f"{top}.")}
        found[file.module] = (inside & modules) - {file.module}
    return found


class CallGraph:
    """Functions of a package, and a static guess at which of them a call reaches."""

    def __init__(self, files: list[SourceFile], top: str) -> None:
        self._functions: dict[tuple[str, str], Function] = {}
        self._by_method: dict[str, list[tuple[str, str]]] = defaultdict(list)
        self._imported: dict[str, dict[str, tuple[str, str]]] = defaultdict(dict)
        by_module = {f"{top}.{file.module}": file.name for file in files}
        for file in files:
            for node in file.tree.body:
                if isinstance(node, Function):
                    self._functions[file.name, node.name] = node
                elif isinstance(node, ast.ClassDef):
                    for method in node.body:
                        if isinstance(method, Function):
                            key = (file.name, f"{node.name}.{method.name}")
                            self._functions[key] = method
                            self._by_method[method.name].append(key)
            for node in ast.walk(file.tree):
                if isinstance(node, ast.ImportFrom):
                    for alias in node.names:
                        known = self._imported[file.name]
                        if (inner := f"{node.module}.{alias.name}") in by_module:
                            known[alias.asname or alias.name] = (by_module[inner], "")
                        elif str(node.module) in by_module:
                            place = (by_module[str(node.module)], alias.name)
                            known[alias.asname or alias.name] = place

    def find(self, package: str, function: str) -> tuple[str, str] | None:
        """The function of that name in one of the package's files."""
        keys = (key for key in self._functions if key[0].startswith(f"{package}/"))
        return next((key for key in keys if key[1] == function), None)

    def __getitem__(self, key: tuple[str, str]) -> Function:
        return self._functions[key]

    def callee(self, call: ast.Call, caller: tuple[str, str]) -> tuple[str, str] | None:
        """Find the function that is called: by its name, its module, or a method's unique name."""
        file = caller[0]
        owner = caller[1].rpartition(".")[0]
        imported = self._imported[file]
        candidates: list[tuple[str, str]] = []
        if isinstance(call.func, ast.Name):
            name = call.func.id
            at, inner = imported.get(name, (file, name))
            candidates = [(at, inner), (at, f"{inner}.__init__")]
        elif isinstance(call.func, ast.Attribute):
            name = call.func.attr
            if isinstance(call.func.value, ast.Name):
                base = call.func.value.id
                if base == "self":
                    candidates = [(file, f"{owner}.{name}")]
                elif base in imported:
                    candidates = [(imported[base][0], name)]
            if len(self._by_method[name]) == 1:
                candidates += self._by_method[name]
        return next((key for key in candidates if key in self._functions), None)


def way_of(graph: CallGraph, start: tuple[str, str], parameter: str) -> tuple[int, int]:
    """Follow a value through the calls that pass it, or a part of it, on: (calls, files).

    Follows assignments and loops in each function and finds callees by name, so that both numbers
    are estimates, which compare two trees.
    """
    queue = deque([(start, parameter)])
    seen = {(start, parameter)}
    while queue:
        caller, parameter = queue.popleft()
        names = derived_names(graph[caller], parameter)
        for node in ast.walk(graph[caller]):
            if isinstance(node, ast.Call) and (key := graph.callee(node, caller)):
                for passed in parameters_of(node, names, graph[key]):
                    if (key, passed) not in seen:
                        seen.add((key, passed))
                        queue.append((key, passed))
    return len({key for key, _ in seen}) - 1, len({key[0] for key, _ in seen})


def derived_names(function: Function, parameter: str) -> set[str]:
    """Variables that are assigned from the parameter or a part of it, or loop over it.

    >>> code = "def f(group):\\n  for sample in group.samples:\\n    text = sample.text"
    >>> sorted(derived_names(ast.parse(code).body[0], "group"))
    ['group', 'sample', 'text']
    """
    names = {parameter}
    bindings: list[tuple[ast.expr, ast.expr]] = []
    for node in ast.walk(function):
        if isinstance(node, ast.Assign):
            bindings += [(target, node.value) for target in node.targets]
        elif isinstance(node, (ast.For, ast.AsyncFor, ast.comprehension)):
            bindings.append((node.target, node.iter))
    for _ in range(3):  # a chain of three assignments is long
        for target, value in bindings:
            if is_part(value, names):
                names |= {part.id for part in ast.walk(target) if isinstance(part, ast.Name)}
    return names


def is_part(value: ast.expr, names: set[str]) -> bool:
    """Tell whether an expression is one of the variables, or an attribute or item of one."""
    while isinstance(value, (ast.Attribute, ast.Subscript)):
        value = value.value
    return isinstance(value, ast.Name) and value.id in names


def parameters_of(call: ast.Call, names: set[str], function: Function) -> Iterator[str]:
    """Parameters of ``function`` that receive one of the variables, or a part of one."""
    parameters = [argument.arg for argument in function.args.args]
    if parameters[:1] in (["self"], ["cls"]):
        parameters = parameters[1:]
    for parameter, argument in zip(parameters, call.args):
        if is_part(argument, names):
            yield parameter
    for keyword in call.keywords:
        if keyword.arg and is_part(keyword.value, names):
            yield keyword.arg


def measure(root: Path) -> dict[str, str]:
    """Name of each number → how it is shown, for the package in the folder ``root``."""
    files = read_package(root)
    top = root.name
    code = {file.name: code_lines(file.text, file.tree) for file in files}
    total = sum(len(file.text.splitlines()) for file in files)
    nodes = [(file, node) for file in files for node in ast.walk(file.tree)]
    docstrings = [str(doc.value) for file in files for doc in docstrings_of(file.tree)]
    classes: dict[str, set[str]] = defaultdict(set)
    for file, node in nodes:
        if isinstance(node, ast.ClassDef):
            classes[node.name].add(file.name)
    importers = Counter(t for targets in imports_of(files, top).values() for t in targets)
    tuples = sum(is_unrelated_tuple(node) for _, node in nodes)
    tests = [path.read_text(encoding="utf-8") for path in (root.parent / "tests").rglob("*.py")]
    statements = sum(isinstance(node, ast.stmt) for _, node in nodes) - len(docstrings)
    found = {
        "code lines": f"{sum(code.values()):,}",
        "statements": f"{statements:,}",
        "files": f"{len(files):,}",
        "lines, with docstrings and comments": f"{total:,}",
        "lines of tests": f"{sum(len(t.splitlines()) for t in tests):,}" if tests else "",
        "`a, b = c, d` of unrelated things, per 1k lines": f"{1000 * tuples / total:.1f}",
        "docstrings that begin with Of, Those, To be, Who, By": str(
            sum(bool(OPENING_WORDS.match(text.strip())) for text in docstrings)
        ),
        "class names that stand in two files": str(sum(len(c) > 1 for c in classes.values())),
        "lines over 100 columns": str(
            sum(len(line) > 100 for file in files for line in file.text.splitlines())
        ),
        "time constants outside `deadlines.py`": str(
            sum(len([*time_constants(f.tree)]) for f in files if f.name != "deadlines.py")
        ),
        "files that exactly one other imports": str(sum(n == 1 for n in importers.values())),
    }
    graph = CallGraph(files, top)
    for label, (package, function, parameter) in WAYS.items():
        if start := graph.find(package, function):
            calls, visited = way_of(graph, start, parameter)
            found[f"{label}: calls, files"] = f"{calls}, {visited}"
    packages: Counter[str] = Counter()
    for file in files:
        packages[file.package] += code[file.name]
    for package, lines in sorted(packages.items()):
        found[f"code lines: {package}"] = f"{lines:,}"
    return found


def with_column(page: str, column: str, numbers: dict[str, str]) -> str:
    """Set one column of the table between the markers; other columns and their numbers stay."""
    before, rest = page.split(BEGIN)
    table, after = rest.split(END)
    rows = [[cell.strip() for cell in line.split("|")[1:-1]] for line in table.strip().splitlines()]
    header = rows[0] if rows else ["", column]
    if column not in header:
        header.append(column)
    known = {row[0]: dict(zip(header[1:], row[1:])) for row in rows[2:]}
    for cells in known.values():
        cells.pop(column, None)
    for label, number in numbers.items():
        known.setdefault(label, {})[column] = number
    lines = [header, ["---", *["--:"] * (len(header) - 1)]]
    lines += [[label, *(cells.get(c, "") for c in header[1:])] for label, cells in known.items()]
    text = "\n".join("| " + " | ".join(line) + " |" for line in lines)
    return f"{before}{BEGIN}\n{text}\n{END}{after}"


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("package", type=Path, nargs="?", default=ROOT / "slime")
    parser.add_argument("--write", type=Path, metavar="PAGE", help="page with the markers")
    parser.add_argument("--column", default="now", help="column of that page's table")
    arguments = parser.parse_args(argv)
    numbers = measure(arguments.package.resolve())
    if arguments.write is None:
        print("\n".join(f"{number:>12}  {label}" for label, number in numbers.items()))
        return
    page = arguments.write.read_text(encoding="utf-8")
    arguments.write.write_text(with_column(page, arguments.column, numbers), encoding="utf-8")


if __name__ == "__main__":
    sys.exit(main())
