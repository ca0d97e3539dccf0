"""docs/deadlines.md names every wait of the program, and nothing else."""

from __future__ import annotations

import ast
from functools import cache
from pathlib import Path

from slime.config.flags import all_flags
from tests.support.import_graph import nodes_of, tree_of
from tests.support.waits import CONSTANT, deadline_rows

ROOT = Path(__file__).parents[2]
ROWS = deadline_rows()


@cache
def scanned() -> tuple[dict[str, float], frozenset[str]]:
    """Name in slime/deadlines.py, or file and name elsewhere → its value; of a table of values, the
    first. And all attributes that other files read."""
    found: dict[str, float] = {}
    read: set[str] = set()
    for path in sorted((ROOT / "slime").rglob("*.py")):
        tree = tree_of(path)
        if path.name != "deadlines.py":
            read.update(node.attr for node in nodes_of(path) if isinstance(node, ast.Attribute))
        for node in tree.body:
            if not isinstance(node, ast.Assign) or not isinstance(node.targets[0], ast.Name):
                continue
            name = node.targets[0].id
            numbers = (n.value for n in ast.walk(node.value) if isinstance(n, ast.Constant))
            seconds = next((value for value in numbers if isinstance(value, float)), None)
            if path.name == "deadlines.py":
                assert seconds is not None, name
                found[f"`{name}`"] = seconds
            elif seconds is not None and CONSTANT.fullmatch(name):
                found[f"`{path.relative_to(ROOT / 'slime')}` `{name}`"] = seconds
    return found, frozenset(read)


def constants() -> dict[str, float]:
    return scanned()[0]


def test_only_a_program_that_imports_nothing_has_a_constant_of_its_own() -> None:
    """The sandbox's programs, and what they import, run without the package."""
    files = {name.split("`")[1] for name in constants() if ".py" in name}
    assert files == {"processes/tree.py", "processes/preloaded.py", "sandbox/supervisor.py"}


def test_every_row_gives_what_the_code_says() -> None:
    known, options = constants(), {spec.option for spec in all_flags().values()}
    for row in ROWS:
        where, how_long = row[2], row[3]
        first = how_long.split()[0].rstrip(",")
        if where in known:
            assert float(first) == known[where], row
        elif where.startswith("`--"):
            assert where.strip("`") in options, row
            default = all_flags()[where.strip("`-").replace("-", "_")].default
            assert not isinstance(default, int | float) or float(first) == default, row
        else:  # a wait without a constant of its own
            assert not where.startswith("`") or (ROOT / "slime" / where.strip("`")).is_file(), row


def test_every_constant_is_used() -> None:
    known, read = scanned()
    names = {name.strip("`") for name in known if ".py" not in name}
    assert names and names <= read, names - read


def test_every_constant_has_a_row() -> None:
    without = constants().keys() - {row[2] for row in ROWS}
    assert [name for name in sorted(without) if not name.endswith("_INTERVAL`")] == []
