"""Agents that are programs: their output, their deadline, and that nothing of them is left."""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path

import psutil
import pytest

from slime.engines.keys import VARIABLE
from slime.rollout.agents import programs
from slime.rollout.agents.programs import Finished, run_program

CHILD = "import subprocess, sys; subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(600)', sys.argv[1]])"


def left(mark: str) -> list[int]:
    """Processes with this word in their command line."""
    found = psutil.process_iter(["cmdline", "status"])
    return [p.pid for p in found if mark in (p.info["cmdline"] or ()) and p.info["status"] != psutil.STATUS_ZOMBIE]


def ended(mark: str) -> bool:
    psutil.wait_procs([psutil.Process(pid) for pid in left(mark) if psutil.pid_exists(pid)], timeout=10)
    return not left(mark)


def test_it_gets_its_variables_and_its_output_and_status_come_back(tmp_path: Path) -> None:
    code = "import os, sys; print(os.environ['OPENAI_API_KEY'], os.getcwd()); sys.exit('no')"
    done = asyncio.run(run_program([sys.executable, "-c", code], {"OPENAI_API_KEY": "k"}, cwd=tmp_path, timeout=60))
    assert done == Finished(1, f"k {tmp_path}\nno\n")


def test_of_what_it_writes_without_end_the_end_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(programs, "_MOST_OUTPUT", 10)
    code = "print('x' * 100_000); print('the end')"
    assert asyncio.run(run_program([sys.executable, "-c", code], {})).output == "x\nthe end\n"


def test_it_gets_no_key_of_the_run(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(VARIABLE, "secret")
    monkeypatch.setenv("MINE", "seen")
    code = f"import os; print(os.environ.get('{VARIABLE}'), os.environ['MINE'])"
    assert asyncio.run(run_program([sys.executable, "-c", code], {})).output == "None seen\n"


def test_what_it_has_started_ends_with_it(tmp_path: Path) -> None:
    mark = str(tmp_path / "child")
    code = f"{CHILD}; print('started')"
    assert asyncio.run(run_program([sys.executable, "-c", code, mark], {})) == Finished(0, "started\n")
    assert ended(mark)


def test_a_deadline_ends_it(tmp_path: Path) -> None:
    mark = str(tmp_path / "slow")
    code = "import time; print('begun', flush=True); time.sleep(600)"
    done = asyncio.run(run_program([sys.executable, "-c", code, mark], {}, timeout=1.0))
    assert done.status is None and ended(mark)


def test_who_is_cancelled_leaves_nothing(tmp_path: Path) -> None:
    mark = str(tmp_path / "cancelled")

    async def run() -> None:
        code = "import time; time.sleep(600)"
        running = asyncio.create_task(run_program([sys.executable, "-c", code, mark], {}))
        while not left(mark):
            await asyncio.sleep(0.01)
        running.cancel()
        with pytest.raises(asyncio.CancelledError):
            await running

    asyncio.run(run())
    assert ended(mark)
