"""tools/measure_structure.py: the numbers of a small package, and the table that it writes."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from tests.support.processes import ROOT

sys.path.insert(0, str(ROOT / "tools"))

import measure_structure

FILES = {
    "rollout/run.py": '''
        """Run groups."""
        from pkg.rollout import score as scoring
        from pkg.names import Name

        _POLL_SECONDS = 0.5

        class GroupRunner:
            def run(self, group):
                """Of a group, all of it."""
                first, second = 1, Name()  # two things
                first, second = second, first
                scoring.score(1, group)
                return self._finish(group=group)

            def _finish(self, group):
                return group
        ''',
    "rollout/score.py": '''
        """Score groups."""
        from pkg.names import Name

        class Name2(Name): ...

        def score(weight, scored):
            return scored
        ''',
    "names.py": '"""Names."""\nclass Name: ...\n',
    "deadlines.py": "POLL_SECONDS = 0.5\nclass Name: ...\n",
}


@pytest.fixture
def package(tmp_path: Path) -> Path:
    for name, text in FILES.items():
        path = tmp_path / "pkg" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("\n".join(line.removeprefix(" " * 8) for line in text.splitlines()))
    (tmp_path / "tests").mkdir()
    (tmp_path / "tests" / "test_a.py").write_text("def test():\n    assert True\n")
    return tmp_path / "pkg"


def test_numbers_of_a_package(package: Path) -> None:
    numbers = measure_structure.measure(package)
    assert numbers["code lines"] == "18"
    assert numbers["files"] == "4"
    assert numbers["lines of tests"] == "2"
    assert numbers["docstrings that begin with Of, Those, To be, Who, By"] == "1"
    assert numbers["class names that stand in two files"] == "1"
    assert numbers["time constants outside `deadlines.py`"] == "1"
    assert numbers["files that exactly one other imports"] == "1"  # names has two, score one
    # run → score.score and run → _finish, in two files
    assert numbers["way of a group through the rollout: calls, files"] == "2, 2"
    assert numbers["code lines: `rollout`"] == "15"
    assert numbers["code lines: files beside the packages"] == "3"


def test_swaps_are_no_packed_assignments(package: Path) -> None:
    (file,) = (f for f in measure_structure.read_package(package) if f.name == "rollout/run.py")
    packed = [
        measure_structure.ast.unparse(node)
        for node in measure_structure.ast.walk(file.tree)
        if measure_structure.is_unrelated_tuple(node)
    ]
    assert packed == ["first, second = (1, Name())"]


def test_a_column_is_replaced_and_the_others_stay() -> None:
    page = f"# Page\n{measure_structure.BEGIN}\n{measure_structure.END}\nthe rest\n"
    page = measure_structure.with_column(page, "before", {"files": "3", "old": "1"})
    page = measure_structure.with_column(page, "now", {"files": "4"})
    page = measure_structure.with_column(page, "now", {"files": "5", "new": "2"})
    assert page.splitlines()[2:-2] == [
        "|  | before | now |",
        "| --- | --: | --: |",
        "| files | 3 | 5 |",
        "| old | 1 |  |",
        "| new |  | 2 |",
    ]
    assert page.startswith("# Page\n") and page.endswith("\nthe rest\n")


def test_the_page_has_the_table() -> None:
    page = (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8")
    table = page.split(measure_structure.BEGIN)[1].split(measure_structure.END)[0]
    assert "| code lines |" in table and "goal" in table
