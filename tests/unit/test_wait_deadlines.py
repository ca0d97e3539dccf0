"""No call waits for another process without an end: each leads to a row of docs/deadlines.md, or
stands in its list."""

from __future__ import annotations

import ast
from functools import cache
from pathlib import Path

import pytest

from slime.config.flags import all_flags
from tests.support.waits import (
    KEYWORDS,
    Wait,
    deadline_rows,
    unnamed_rows,
    waits_in,
    waits_of,
)

PACKAGE = Path(__file__).parents[2] / "slime"
FILES = {str(path.relative_to(PACKAGE)): path for path in sorted(PACKAGE.rglob("*.py"))}
ROWS = deadline_rows()
#: Those that have a row.
FLAGS = frozenset(
    name for name in all_flags() if f"`--{name.replace('_', '-')}`" in {row[2] for row in ROWS}
)


@cache
def scanned() -> tuple[dict[str, list[Wait]], list[str]]:
    """The waits of each file, and where a deadline is a bare number. Each file is parsed once."""
    waits: dict[str, list[Wait]] = {}
    numbers: list[str] = []
    for file, path in FILES.items():
        tree = ast.parse(path.read_text())
        waits[file] = list(waits_of(tree, FLAGS))
        numbers += _bare_numbers(file, tree)
    return waits, numbers


def _bare_numbers(file: str, tree: ast.AST) -> list[str]:
    found: list[str] = []
    for node in ast.walk(tree):
        given: list[tuple[str | None, ast.expr | None]] = []
        if isinstance(node, ast.Call):
            given = [(word.arg, word.value) for word in node.keywords]
        elif isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            given = [
                (a.arg, d) for a, d in zip(node.args.kwonlyargs, node.args.kw_defaults, strict=True)
            ]
            defaults = node.args.defaults
            given += [
                (a.arg, d) for a, d in zip(node.args.args[-len(defaults) :], defaults) if defaults
            ]
        found += [
            f"slime/{file}:{value.lineno} {name}={value.value}"
            for name, value in given
            if name in KEYWORDS[:2]
            and isinstance(value, ast.Constant)
            and isinstance(value.value, float | int)
            if value.value and not isinstance(value.value, bool)
        ]
    return found


def test_every_call_that_waits_has_a_deadline_or_says_what_ends_it() -> None:
    listed = unnamed_rows()
    found = [
        f"slime/{file}:{wait.line} {wait.call} in {wait.function}: name a constant or flag of "
        "docs/deadlines.md, or "
        "say there what ends it"
        for file, waits in scanned()[0].items()
        for wait in waits
        if not wait.deadline and (file, wait.function) not in listed
    ]
    assert found == []


def test_the_list_of_calls_that_name_no_deadline_has_no_other() -> None:
    without = {
        (file, wait.function)
        for file, waits in scanned()[0].items()
        for wait in waits
        if not wait.deadline
    }
    assert sorted(unnamed_rows().keys() - without) == []
    assert all(unnamed_rows().values())


def test_every_deadline_that_a_wait_names_has_a_row() -> None:
    """A constant in a function's default, of another file or of the same: some row has its name."""
    names = {name for row in ROWS for name in row[2].replace("`", "").split()}
    found = {wait.deadline for waits in scanned()[0].values() for wait in waits}
    assert sorted(found - names - {"", "at once", "handed in", "its group"}) == []


def test_no_deadline_is_a_bare_number() -> None:
    """Neither where a call gives it, nor as a parameter's default: a number without a name has no
    row."""
    assert scanned()[1] == []


@pytest.mark.parametrize(
    ("code", "deadline"),
    [
        ("ray.get(ref)", ""),
        ("ray.get(ref, timeout=_ASK_SECONDS)", "_ASK_SECONDS"),
        ("ray.get(ref, timeout=deadlines.ENGINES_ANSWER)", "ENGINES_ANSWER"),
        ("thread.join(deadlines.ENGINES_ANSWER)", "ENGINES_ANSWER"),
        ("ray.get(actor.ask.remote(_ASK_SECONDS))", ""),
        ("def f(timeout: float): ray.get(actor.ask.remote(timeout))", ""),
        ("ray.wait([ref], timeout=0)", "at once"),
        ("process.wait()", ""),
        ("thread.join()", ""),
        ("thread.join(_END_SECONDS)", "_END_SECONDS"),
        ("future.result()", ""),
        ("queue.get()", ""),
        ("fcntl.flock(file, fcntl.LOCK_EX)", ""),
        ("fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)", "at once"),
        ("dist.all_reduce(x)", "its group"),
        ("dist.new_group(backend='gloo')", ""),
        ("subprocess.run(command)", ""),
        ("subprocess.run([program, str(_ASK_SECONDS)])", ""),
        ("def f(timeout: float): event.wait(timeout)", "handed in"),
        ("def f(timeout: float | None): event.wait(timeout)", ""),
        (
            "def f(config):\n left = config.cluster.placement_timeout\n group.wait(left)",
            "--placement-timeout",
        ),
        (
            "class A:\n def a(self, c): self.s = c.rm_timeout\n def b(self): e.wait(self.s)",
            "--rm-timeout",
        ),
        ("while not done(): time.sleep(_LOOK_SECONDS)", ""),
        (
            "def f(seconds):\n end = monotonic() + seconds\n while monotonic() < end: "
            "time.sleep(1)",
            "handed in",
        ),
        (
            "async def f():\n async with asyncio.timeout(_ASK_SECONDS): await event.wait()",
            "_ASK_SECONDS",
        ),
        ("async def f(): await future", ""),
    ],
)
def test_what_ends_a_wait(code: str, deadline: str) -> None:
    assert [wait.deadline for wait in waits_in(code, FLAGS)] == [deadline]


@pytest.mark.parametrize(
    "code", ["', '.join(words)", "table.get('key')", "logger.exception('x')", "time.sleep(1)"]
)
def test_what_is_no_wait(code: str) -> None:
    assert list(waits_in(code, FLAGS)) == []
