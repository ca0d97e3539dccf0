"""`make check`: which tests a change concerns, in which order, and what happens when their time is
over."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.processes import ROOT
from tools import changed_tests

FILES = {
    "slime/__init__.py": "",
    "slime/errors.py": "",
    "slime/packing.py": "from slime.errors import UserError\n",
    "slime/engine.py": "def f():\n    import slime.packing\n",
    "slime/table.py": "FILE = 'rows.json'\n",
    "slime/rows.json": "{}",
    "tests/support/batches.py": "from slime import packing\n",
    "tests/unit/test_architecture.py": "def test_rules(): pass\n",
    "tests/unit/test_docs.py": "def test_pages(): pass\n",
    "tests/unit/test_packing.py": "import slime.packing\ndef test_packs(): pass\n",
    "tests/unit/test_engine.py": "import slime.engine\nimport slime.table\n"
    "def test_serves(): pass\n",
    "tests/unit/test_batches.py": "from tests.support.batches import make\n",
    "tests/unit/test_patches.py": "def test_it(monkeypatch): "
    "monkeypatch.setattr('slime.packing.pack.limit', 1)\n",
    "tests/loop/test_run.py": "import slime.packing\n",
}


@pytest.fixture
def project(tmp_path: Path) -> Path:
    for name, text in FILES.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    return tmp_path


def names(files: list[str]) -> list[str]:
    return [Path(file).stem.removeprefix("test_") for file in files]


@pytest.mark.parametrize(
    ("changed", "concerned"),
    [
        # of equals the one with fewer imports
        (["slime/packing.py"], ["packing", "patches", "batches", "engine"]),
        (["slime/engine.py"], ["engine"]),
        (["slime/errors.py"], ["packing", "patches", "batches", "engine"]),
        (["slime/rows.json"], ["engine"]),
        (["tests/unit/test_batches.py", "slime/table.py"], ["batches", "engine"]),
        (["tests/loop/test_run.py", "README.md"], []),
    ],
)
def test_the_nearest_come_first(project: Path, changed: list[str], concerned: list[str]) -> None:
    assert names(changed_tests.nearest(project, changed)) == concerned


def test_what_imports_a_deleted_module_is_concerned(project: Path) -> None:
    (project / "slime/engine.py").unlink()
    assert names(changed_tests.nearest(project, ["slime/engine.py"])) == ["engine"]


def git(folder: Path, *words: str) -> None:
    who = ["-c", "user.name=A", "-c", "user.email=a@b.c", "-c", "commit.gpgsign=false"]
    subprocess.run(["git", *who, *words], cwd=folder, check=True, capture_output=True)


@pytest.fixture
def branch(project: Path) -> Path:
    """A repository whose branch has left main."""
    git(project, "init", "-b", "main")
    git(project, "add", ".")
    git(project, "commit", "-m", "first")
    git(project, "checkout", "-b", "mine")
    return project


def test_committed_uncommitted_new_and_deleted_files_are_changed(branch: Path) -> None:
    assert changed_tests.changed_files(branch, "main") == []
    (branch / "slime/packing.py").write_text("LIMIT = 1\n")
    git(branch, "commit", "-am", "second")
    (branch / "slime/errors.py").write_text("text = 1\n")
    (branch / "slime/new.py").write_text("")
    (branch / "slime/table.py").unlink()
    found = changed_tests.changed_files(branch, "main")
    assert found == ["slime/errors.py", "slime/new.py", "slime/packing.py", "slime/table.py"]
    with pytest.raises(SystemExit, match="no-such-branch"):
        changed_tests.changed_files(branch, "no-such-branch")


def check(branch: Path, seconds: int) -> subprocess.CompletedProcess[str]:
    (branch / "tools").mkdir(exist_ok=True)
    shutil.copy(ROOT / "tools" / "changed_tests.py", branch / "tools")
    command = [sys.executable, "tools/changed_tests.py", "--seconds", str(seconds)]
    environment = {**os.environ, "PYTHONPATH": str(branch)}
    return subprocess.run(
        command, cwd=branch, env=environment, capture_output=True, text=True, timeout=120
    )


def test_tests_are_run_until_the_time_is_over(branch: Path) -> None:
    (branch / "slime/engine.py").write_text("LIMIT = 1\n")
    (branch / "tests/loop/test_run.py").write_text("")
    done = check(branch, 100)
    assert done.returncode == 0 and "3 passed" in done.stdout, done.stdout + done.stderr
    assert "left to make test: tests/loop/test_run.py" in done.stdout

    (branch / "tests/unit/test_architecture.py").write_text("def test_rules(): assert False\n")
    done = check(branch, 0)  # the first is run, and fails
    assert done.returncode == 1 and "tests were not reached in 0 s" in done.stdout
    assert done.stdout.splitlines()[-2:] == ["tests/unit/test_docs.py", "tests/unit/test_engine.py"]
