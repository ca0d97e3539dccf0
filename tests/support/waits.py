"""Calls in the code that wait for somebody, read from its syntax, and what ends each of them.

A deadline counts where it can be followed from the call: through local names and attributes that
the same file sets, to a constant or a flag of docs/deadlines.md, or to a parameter with a name of
`HANDED_IN`, which the callers must give. Calls that only put others together (`asyncio.gather`,
`async for`) are none: what they wait for waits by itself.
"""

from __future__ import annotations

import ast
import functools
import re
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

#: Functions and methods that return when somebody else has done something, whatever they are called
#: on.
WAITING = re.compile(
    "wait|wait_for|wait_procs|waitpid|communicate|result|exception|select|accept|recv|recv_bytes|getresponse|readline|"
    "acquire|flock|lockf|urlopen|request|snapshot_download|hf_hub_download|load_dataset|as_completed|"
    "TCPStore|new_group|init_process_group|initialize_model_parallel|check_call|check_output"
)
#: Only on these: `ray.get` waits, `config.get` does not.
OF_MODULES = {
    "ray": {"get", "init", "shutdown"},
    "subprocess": {"run", "call"},
    "sqlite3": {"connect"},
}
#: Of ``dist``: each has the deadline of its process group, which whoever makes the group must give
#: (`WAITING`).
COLLECTIVES = re.compile(
    "all_reduce|broadcast(_object_list)?|all_gather(_object|_into_tensor)?|gather(_object)?|scatter(_object_list)?|"
    "reduce(_scatter_tensor)?|all_to_all_single|barrier|send|recv"
)
#: Keywords that hold a deadline; without one of them it is the last argument, with these functions
#: that number.
KEYWORDS = ("timeout", "seconds", "limit", "distributed_timeout_minutes")
#: Take it as a keyword alone: what stands last in their brackets is what they wait for, or what
#: they are sent.
_BY_KEYWORD = re.compile(
    r"ray\.\w+|asyncio\.wait|(.+\.)?as_completed|subprocess\.\w+|.+\.communicate"
)
_CLOCKS = frozenset({"monotonic", "time", "perf_counter"})
#: Parameters by which a caller hands a deadline in.
HANDED_IN = frozenset({"timeout", "seconds", "limit", "deadline", "grace"})
CONSTANT = re.compile(r"_?([A-Z]+_)*(SECONDS|DEADLINE|TIMEOUT)")


_TABLES = (Path(__file__).parents[2] / "docs" / "deadlines.md").read_text(encoding="utf-8")
_UNNAMED = "## Calls that name no deadline"


def deadline_rows() -> list[list[str]]:
    """The cells of docs/deadlines.md: who, for whom, where, how long, then."""
    return _rows(_TABLES.split(_UNNAMED)[0], ("| who |", "| who waits |"))


def unnamed_rows() -> dict[tuple[str, str], str]:
    """(file, function) → what ends its waits, which name no deadline."""
    found = {}
    for where, ends in _rows(_TABLES.split(_UNNAMED)[1], ("| where |",)):
        file, *functions = where.replace("`", "").split()
        found.update({(file, function): ends for function in functions})
    return found


def _rows(text: str, heads: tuple[str, ...]) -> list[list[str]]:
    lines = (
        line
        for line in text.splitlines()
        if line.startswith("|") and not line.startswith(("|---", *heads))
    )
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]


class Wait(NamedTuple):
    """One call that waits.

    Attributes:
        function: the innermost one: "wait_for".
        call: what is called: "ray.wait".
        deadline: what ends it: a constant or flag that it leads to, "handed in", "its group", "at
            once"; "" where none is found.
    """

    function: str
    call: str
    line: int
    deadline: str


def waits_in(source: str, flags: frozenset[str] = frozenset()) -> Iterator[Wait]:
    """The waits of a file.

    Args:
        flags: names of all flags: "rm_timeout".
    """
    return waits_of(ast.parse(source), flags)


def waits_of(tree: ast.AST, flags: frozenset[str]) -> Iterator[Wait]:
    """`waits_in` of a file's tree."""
    return _Walk(flags, tree).visit(tree, _At((), None, []))


class _At(NamedTuple):
    """What a call stands in: functions from the outside, a loop, and deadlines of ``async with
    asyncio.timeout(…)``."""

    functions: tuple[ast.AST, ...]
    loop: ast.While | None
    within: list[ast.expr]


class _Walk:
    def __init__(self, flags: frozenset[str], tree: ast.AST) -> None:
        self._flags, self._tree = flags, tree

    @functools.cached_property
    def _attributes(self) -> dict[str, list[ast.expr]]:
        return _attributes(self._tree)

    def visit(self, node: ast.AST, at: _At) -> Iterator[Wait]:
        for child in ast.iter_child_nodes(node):
            inside = at
            if isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef):
                inside = _At((*at.functions, child), None, [])
            elif isinstance(child, ast.While):
                inside = at._replace(loop=child)
            elif isinstance(child, ast.AsyncWith):
                inside = at._replace(within=[*at.within, *_timeouts(child)])
            function = getattr(at.functions[-1], "name", "") if at.functions else ""
            if isinstance(child, ast.Call) and _waits(child, at.loop):
                call = ast.unparse(child.func).splitlines()[0]
                yield Wait(function, call, child.lineno, self._deadline(child, at))
            elif isinstance(child, ast.Await) and not isinstance(child.value, ast.Call):
                yield Wait(function, f"await {ast.unparse(child.value)}", child.lineno, "")
            yield from self.visit(child, inside)

    def _deadline(self, call: ast.Call, at: _At) -> str:
        if _owner(call) == "dist" and COLLECTIVES.fullmatch(_name(call)):
            return "its group"
        if any(isinstance(n, ast.Attribute) and n.attr == "LOCK_NB" for n in ast.walk(call)):
            return "at once"
        if _name(call) == "sleep" and at.loop is not None:
            given = _looks_at_the_clock(at.loop)
        else:
            given = _given(call)
        given += at.within
        if any(isinstance(e, ast.Constant) and e.value == 0 for e in given):
            return "at once"
        locals_ = _locals(at.functions)
        parameters = {name for function in at.functions for name in _parameters(function)}
        seen: set[str] = set()
        while given:
            for node in ast.walk(given.pop(0)):
                name = (
                    node.id
                    if isinstance(node, ast.Name)
                    else node.attr
                    if isinstance(node, ast.Attribute)
                    else ""
                )
                if CONSTANT.fullmatch(name) or _is_of_table(node):
                    return name
                if isinstance(node, ast.Attribute) and name in self._flags:
                    return f"--{name.replace('_', '-')}"
                if isinstance(node, ast.Name) and name in HANDED_IN & parameters:
                    return "handed in"
                if name and name not in seen:
                    seen.add(name)
                    given += (locals_ if isinstance(node, ast.Name) else self._attributes).get(
                        name
                    ) or []
        return ""


def _is_of_table(node: ast.AST) -> bool:
    """``deadlines.ENGINES_ANSWER``."""
    return isinstance(node, ast.Attribute) and ast.unparse(node.value) == "deadlines"


def _given(call: ast.Call) -> list[ast.expr]:
    """The expression that holds the deadline of a call."""
    words: list[ast.expr] = [word.value for word in call.keywords if word.arg in KEYWORDS]
    if words or _BY_KEYWORD.fullmatch(ast.unparse(call.func)):
        return words
    # slime.cluster.waiting
    is_ours = isinstance(call.func, ast.Name) and call.func.id == "wait_for"
    return call.args[2 if is_ours else -1 :][:1]


def _timeouts(block: ast.AsyncWith) -> list[ast.expr]:
    calls = (item.context_expr for item in block.items)
    return [
        call.args[0]
        for call in calls
        if isinstance(call, ast.Call) and ast.unparse(call.func) == "asyncio.timeout"
    ]


def _looks_at_the_clock(loop: ast.While) -> list[ast.expr]:
    """Comparisons with a clock, in a loop that sleeps."""
    found: list[ast.expr] = []
    for node in ast.walk(loop):
        if isinstance(node, ast.Compare):
            calls = (n for n in ast.walk(node) if isinstance(n, ast.Call))
            found += [node] if any(_name(call) in _CLOCKS for call in calls) else []
    return found


def _waits(call: ast.Call, loop: ast.While | None) -> bool:
    name, owner = _name(call), _owner(call)
    if name in OF_MODULES.get(owner, ()) or (owner == "dist" and COLLECTIVES.fullmatch(name)):
        return True
    if name == "sleep":
        return loop is not None
    if name == "exception":
        return not owner.endswith("logger")
    if (
        name == "join"
    ):  # of threads and processes; those of strings have an argument, which is no number of seconds
        return not call.args or any(
            CONSTANT.fullmatch(n.id) or n.id in HANDED_IN | {"deadlines"}
            for n in _names(call.args[0])
        )
    if name == "get":  # of queues; a context variable's get has a name that says so
        words = {word.arg for word in call.keywords}
        return "timeout" in words or (
            not call.args and not words and not owner.isupper() and owner != "_current"
        )
    return WAITING.fullmatch(name) is not None


def _name(call: ast.Call) -> str:
    return call.func.attr if isinstance(call.func, ast.Attribute) else getattr(call.func, "id", "")


def _owner(call: ast.Call) -> str:
    return ast.unparse(call.func.value) if isinstance(call.func, ast.Attribute) else ""


def _names(node: ast.AST) -> Iterator[ast.Name]:
    return (n for n in ast.walk(node) if isinstance(n, ast.Name))


def _parameters(function: ast.AST) -> Iterator[str]:
    """A deadline that may be None is none."""
    if isinstance(function, ast.FunctionDef | ast.AsyncFunctionDef):
        for argument in (
            *function.args.posonlyargs,
            *function.args.args,
            *function.args.kwonlyargs,
        ):
            if argument.annotation is None or "None" not in ast.unparse(argument.annotation):
                yield argument.arg


def _locals(functions: tuple[ast.AST, ...]) -> dict[str, list[ast.expr]]:
    found: dict[str, list[ast.expr]] = {}
    for function in functions:
        for node in ast.walk(function):
            for target, value in _assigned(node):
                for name in _names(target):
                    found.setdefault(name.id, []).append(value)
    return found


def _attributes(tree: ast.AST) -> dict[str, list[ast.expr]]:
    """What is assigned to ``self.…`` anywhere in a file, by name, with what goes into it in that
    function."""
    found: dict[str, list[ast.expr]] = {}
    for function in ast.walk(tree):
        if not isinstance(function, ast.FunctionDef | ast.AsyncFunctionDef):
            continue
        locals_ = _locals((function,))
        for target, value in (pair for node in ast.walk(function) for pair in _assigned(node)):
            for part in target.elts if isinstance(target, ast.Tuple) else [target]:
                if isinstance(part, ast.Attribute):
                    more = (source for name in _names(value) for source in locals_.get(name.id, []))
                    found.setdefault(part.attr, []).extend([value, *more])
    return found


def _assigned(node: ast.AST) -> Iterator[tuple[ast.expr, ast.expr]]:
    if isinstance(node, ast.Assign):
        yield from ((target, node.value) for target in node.targets)
    elif isinstance(node, ast.AnnAssign | ast.NamedExpr) and node.value is not None:
        yield node.target, node.value
