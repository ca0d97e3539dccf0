"""`make mutation`: what is mutated and what is not, which mutations are drawn, and what counts as
noticed."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.processes import ROOT
from tools import mutation_test
from tools.mutation_test import Cases, Mutation, StaleTable, candidates, draw, read_cases

SOURCE = '''
"""A module."""

LIMIT = 3


def clip(values: list[int], low: int | None = None, most: int = 4) -> int:
    """Doc + string."""
    if len(values) > most:
        raise ValueError(f"{len(values)} > {most + 1}")
    logger.info("%d values", len(values) + 1)
    assert most < 9
    total = 0
    for value in values:
        total += value * 2
    return max(total, 1) if values and low is not None else -1
'''


def changes(source: str) -> set[tuple[str, str]]:
    return {mutation.lines(source) for mutation in candidates("part", "file.py", source)}


def test_what_is_mutated() -> None:
    last = "return max(total, 1) if values and low is not None else -1"
    assert changes(SOURCE) == {
        ("if len(values) > most:", "if (len(values) >= most):"),
        ("total = 0", "total = 1"),
        ("total += value * 2", "pass"),
        ("total += value * 2", "total -= value * 2"),
        ("total += value * 2", "total += (value / 2)"),
        ("total += value * 2", "total += (value)"),
        ("total += value * 2", "total += (2)"),
        ("total += value * 2", "total += value * 3"),
        (last, "return None"),
        (last, "return min(total, 1) if values and low is not None else -1"),
        (last, "return total if values and low is not None else -1"),
        (last, "return max(total, 0) if values and low is not None else -1"),
        (last, "return max(total, 1) if not (values and low is not None) else -1"),
        (last, "return max(total, 1) if ((values) or (low is not None)) else -1"),
        (last, "return max(total, 1) if values and (low is None) else -1"),
        (last, "return max(total, 1) if values and low is not None else 0"),
    }


@pytest.mark.parametrize(
    ("line", "changed"),
    [
        ("x[...] = x.clamp(min=a)", {"pass", "x[...] = x"}),
        ("return torch.exp(-x)", {"return None", "return torch.exp((x))", "return -x"}),
        ("f(a, b)", {"pass", "f(b, a)"}),
        ("g(a, b)", {"pass"}),
        ("x = y.cuda() if y.is_cuda else None", set()),
        ("x = not y", {"x = (y)"}),
        ("x = [v for v in y if v]", {"x = [v for v in y if not (v)]"}),
        ("x: int | None = y", set()),
        ("x = 'a' + y", set()),
        ("x = y is None", {"x = (y is not None)"}),
        (
            "x = y / (z + 1e-8)",
            {"x = (y * (z + 1e-8))", "x = (y)", "x = y / ((z - 1e-8))", "x = y / ((z))"},
        ),
    ],
)
def test_kinds_of_mutations(line: str, changed: set[str]) -> None:
    source = f"def f(a: int, b: int): ...\ndef g(a: int, b: str): ...\ndef h(x):\n    {line}\n"
    found = {after for before, after in changes(source) if before == line}
    assert found == changed


def test_each_mutation_is_a_module_that_differs() -> None:
    for mutation in candidates("part", "file.py", SOURCE):
        changed = mutation.apply(SOURCE)
        compile(changed, "file.py", "exec")
        assert changed != SOURCE


def test_the_table_is_that_of_the_code() -> None:
    cases = read_cases(ROOT)
    assert len({mutation.name for mutation in cases.named}) == len(cases.named) >= 14
    for mutation in cases.named:
        compile(mutation.apply((ROOT / mutation.file).read_text()), mutation.file, "exec")
    assert all(reason for reason in cases.equivalent.values())


def test_enough_is_drawn_everywhere() -> None:
    drawn = draw(ROOT, Cases([], {}), mutation_test.SEED)
    assert len(drawn) >= 100
    for part in mutation_test.PARTS:
        assert sum(mutation.part == part.name for mutation in drawn) == part.budget


# -- a project -------------------------------------------------------------------------------------

PROJECT = {
    "slime/__init__.py": "",
    "slime/run/schedule.py": "import time\n\n\ndef first(x):\n    return x + 1\n\n\n"
    "def second(x):\n    return x * 2\n\n\n"
    "def third(n):\n    while n > 0:\n        time.sleep(0.01)\n        n -= 1\n    return n\n",
    "tests/unit/test_schedule.py": "from slime.run import schedule\n\n\ndef test_fails_anyway():\n"
    "    assert schedule.first(1) == 3\n\n\ndef test_first():\n    assert schedule.first(1) == "
    "2\n\n\n"
    "def test_third():\n    assert schedule.third(2) == 0\n",
}
TABLE = """
[[named]]
name = "first goes back"
file = "slime/run/schedule.py"
before = "x + 1"
after = "x - 1"

[[named]]
name = "second is never called"
file = "slime/run/schedule.py"
before = "x * 2"
after = "x * 3"

[[named]]
name = "third never ends"
file = "slime/run/schedule.py"
before = "n -= 1"
after = "n -= 0"

[[equivalent]]
file = "slime/run/schedule.py"
function = "third"
before = "while n > 0:"
after = "while (n >= 0):"
reason = "none: this is a test"
"""


@pytest.fixture
def project(tmp_path: Path) -> Path:
    for name, text in {**PROJECT, mutation_test.CASES: TABLE, "docs/x.md": ""}.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    for name in ("mutation_test.py", "changed_tests.py"):
        shutil.copy(ROOT / "tools" / name, tmp_path / "tools")
    (tmp_path / ".gitignore").write_text(".cache\n__pycache__\n")
    (tmp_path / "pytest.ini").write_text("[pytest]\nmarkers =\n    slow\n    full\n    gpu\n")
    subprocess.run(["git", "init", "-q"], cwd=tmp_path, check=True)
    return tmp_path


def test_a_table_that_is_out_of_date_is_refused(project: Path) -> None:
    cases = read_cases(project)
    assert [mutation.line for mutation in cases.named] == [5, 9, 15] and len(cases.equivalent) == 1
    path = project / "slime/run/schedule.py"
    path.write_text(path.read_text().replace("x + 1", "1 + x").replace("n > 0", "n >= 1"))
    with pytest.raises(
        StaleTable, match=r"first goes back(.|\n)*has its text 0 times(.|\n)*no such mutation"
    ):
        read_cases(project)


def test_the_draw_leaves_out_what_is_listed_and_does_not_move_with_the_code_around_it(
    project: Path,
) -> None:
    def drawn() -> list[tuple[str, str]]:
        text = (project / "slime/run/schedule.py").read_text()
        return [mutation.lines(text) for mutation in draw(project, read_cases(project), 1)]

    before = drawn()
    assert before and ("while n > 0:", "while (n >= 0):") not in before
    path = project / "slime/run/schedule.py"
    path.write_text("import os\n\n" + path.read_text())
    assert drawn() == before


def outcomes(
    project: Path, only: str, most: float, grace: float
) -> tuple[dict[str, tuple[str, str]], str]:
    """(Name → (outcome, test), what was printed), by a process of its own: it forks."""
    code = (
        "import sys; sys.path.insert(0, '.')\nfrom pathlib import Path\nfrom tools import "
        "mutation_test as tool\n"
        f"tool._LIBRARIES, tool.MOST_SECONDS, tool.GRACE_SECONDS = ('pytest',), {most}, {grace}\n"
        f"sys.exit(tool.main(['--named', '--only', '{only}', '--json', 'results.json'], "
        "Path.cwd().resolve()))\n"
    )
    environment = {**os.environ, "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=project, env=environment, capture_output=True, text=True
    )
    assert (project / "slime/run/schedule.py").read_text() == PROJECT["slime/run/schedule.py"], (
        "the working tree stays as it is"
    )
    rows = json.loads((project / "results.json").read_text())
    assert done.returncode == int(any(row["outcome"] == "survived" for row in rows)), (
        done.stdout + done.stderr
    )
    return {row["name"]: (row["outcome"], row["test"]) for row in rows}, done.stdout


def test_what_is_noticed_and_what_is_not(project: Path) -> None:
    """A test that fails anyway notices nothing, and what was found out is known again."""
    noticed = {"first goes back": ("killed", "tests/unit/test_schedule.py::test_first")}
    found, said = outcomes(project, "[fs][ie]*", 60.0, 60.0)
    assert (
        found == {**noticed, "second is never called": ("survived", "")}
        and "test_fails_anyway" in said
    )
    found, said = outcomes(project, "first*", 60.0, 60.0)
    assert found == noticed and "test_fails_anyway" not in said
    rows = (project / mutation_test.RESULTS).read_text().splitlines()
    assert [json.loads(row)["name"] for row in rows].count("first goes back") == 1


def test_a_test_that_hangs_notices(project: Path) -> None:
    path = project / "tests/unit/test_schedule.py"
    path.write_text(
        "from slime.run import schedule\ndef test_third():\n    assert schedule.third(2) == 0\n"
    )
    found, _ = outcomes(project, "third*", 1.0, 4.0)
    assert found["third never ends"][0] == "timed out"


def test_a_patch_says_where_it_is(project: Path) -> None:
    [first, *_] = read_cases(project).named
    assert isinstance(first, Mutation) and (first.part, first.line) == ("schedule", 5)
