"""docs/deadlines.md names every wait of the program, and nothing else."""

from __future__ import annotations

import ast
from pathlib import Path

from slime.config.flags import all_flags
from tests.support.waits import CONSTANT, deadline_rows

ROOT = Path(__file__).parents[2]
ROWS = deadline_rows()


def constants() -> dict[str, float]:
    """ "`weights/sync.py` `_CONTROL_SECONDS`" → its value; of a table of values, the first."""
    found = {}
    for path in sorted((ROOT / "slime").rglob("*.py")):
        for node in ast.parse(path.read_text()).body:
            if not isinstance(node, ast.Assign):
                continue
            target, value = node.targets[0], node.value
            pairs: list[tuple[ast.expr, ast.expr]] = [(target, value)]
            if isinstance(target, ast.Tuple) and isinstance(value, ast.Tuple):
                pairs = list(zip(target.elts, value.elts, strict=True))
            for name, given in pairs:
                if isinstance(name, ast.Name) and CONSTANT.fullmatch(name.id):
                    constants = (n.value for n in ast.walk(given) if isinstance(n, ast.Constant))
                    seconds = next((value for value in constants if isinstance(value, float)), None)
                    if seconds is not None:
                        found[f"`{path.relative_to(ROOT / 'slime')}` `{name.id}`"] = seconds
    return found


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


def test_every_constant_has_a_row() -> None:
    assert sorted(constants().keys() - {row[2] for row in ROWS}) == []
