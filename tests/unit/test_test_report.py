"""`make test-full`: failures, crashes and hangs cost their own file alone; a run goes on where it
was ended."""

from __future__ import annotations

import re
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from tests.support.processes import wait_until
from tools import test_report as tool

GOOD = "def test_a(): pass\ndef test_b(): pass\n"
BAD = "def test_a(): pass\ndef test_b(): assert False\n"
SKIPS = "import pytest\n@pytest.mark.skip(reason='no such kernel')\ndef test_a(): pass\n"
NEEDS_A_GPU = "import pytest\n@pytest.mark.gpu\ndef test_a(): pass\n"
DIES = "import os\ndef test_a(): pass\ndef test_b(): os._exit(9)\n"
HANGS = "import threading\ndef test_a(): pass\ndef test_b(): threading.Event().wait()\n"


@pytest.fixture
def project(tmp_path: Path) -> Path:
    """A repository with one test file of each kind."""
    files = {
        "unit/test_good": GOOD,
        "unit/test_bad": BAD,
        "unit/test_skips": SKIPS,
        "gpu/test_gpu": NEEDS_A_GPU,
    }
    files |= {"loop/test_dies": DIES, "loop/test_hangs": HANGS}
    for name, text in files.items():
        (tmp_path / "tests" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "tests" / f"{name}.py").write_text(text)
    (tmp_path / "docs").mkdir()
    (tmp_path / ".gitignore").write_text(".cache/\n__pycache__/\n.pytest_cache/\n")
    (tmp_path / "pytest.ini").write_text("[pytest]\nmarkers =\n  gpu: needs one\n")
    who = ["-c", "user.name=A", "-c", "user.email=a@b.c", "-c", "commit.gpgsign=false"]
    for words in (["init"], ["add", "."], [*who, "commit", "-m", "first"]):
        subprocess.run(["git", *words], cwd=tmp_path, check=True, capture_output=True)
    return tmp_path


def report(project: Path, *words: str) -> tuple[int, str]:
    status = tool.main(list(words), root=project)
    return status, (project / tool.REPORT).read_text()


def without_minutes(text: str) -> list[str]:
    """The lines, in any order: files that ended early are run again, take another while, and so
    another place."""
    return sorted(re.sub(r"\d+\.\d( minutes| \|)", r"_\1", text).splitlines())


def test_every_kind_of_end_is_told(project: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ("tests/unit", "tests/gpu", "tests/loop/test_dies.py")
    status, text = report(project, *words, "--jobs", "3")
    assert status == 1 and "**4 passed, 1 failed, 1 skipped.**" in text
    assert "| tests/gpu | 0 | 0 | 0 |" in text and "| tests/unit | 3 | 1 | 1 |" in text
    assert "- `tests/unit/test_bad.py::test_b`" in text and "tests/unit: 1 × no such kernel" in text
    assert "`tests/loop/test_dies.py`: pytest ended with status 9, after 1 tests" in text

    capsys.readouterr()
    again = report(project, *words)
    assert (again[0], without_minutes(again[1])) == (status, without_minutes(text))
    assert "5 of 5 files had been run before" in capsys.readouterr().out


def test_a_file_that_hangs_is_ended(project: Path) -> None:
    status, text = report(project, "tests/loop/test_hangs.py", "--minutes", "0.05")
    assert status == 1 and "- `tests/loop/test_hangs.py`: did not end within 0.05 minutes" in text


def test_who_ends_it_ends_the_files_under_way(project: Path) -> None:
    (project / "tools").mkdir()
    shutil.copy(tool.__file__, project / "tools")
    command = [sys.executable, "tools/test_report.py", "tests/loop/test_hangs.py"]
    process = subprocess.Popen(command, cwd=project)
    wait_until(lambda: list(project.glob(".cache/**/*.jsonl")), "the first outcome", 60)
    (pytest_of_it,) = psutil.Process(process.pid).children()
    process.terminate()
    assert process.wait(60) == 128 + signal.SIGTERM and not pytest_of_it.is_running()


def test_a_run_goes_on_and_other_sources_begin_anew(
    project: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    good = "tests/unit/test_good.py"
    assert report(project, good)[0] == 0
    report(project, good, "tests/unit/test_skips.py")
    assert "1 of 2 files had been run before" in capsys.readouterr().out
    report(project, good, "--again")
    assert "0 of 1 files had been run before" in capsys.readouterr().out
    (project / good).write_text(GOOD + "def test_c(): pass\n")
    status, text = report(project, good)
    assert status == 0 and "3 passed" in text and "with uncommitted changes" in text


def test_what_was_not_reached_is_named() -> None:
    done = tool.FileResult("tests/unit/a.py", "2030-01-01", 60.0, "", {"a": "passed"})
    text = tool.page("abc", ["tests/unit/a.py", "tests/loop/b.py"], [done])
    assert (
        "## Not run yet\n\n- `tests/loop/b.py`" in text
        and "| tests/loop | 0 | 0 | 0 | 0.0 |" in text
    )
    assert "| tests/unit | 1 | 0 | 0 | 1.0 |" in text
