"""Agents that are programs: their output, their deadline, and that nothing of them is left."""

from __future__ import annotations

import asyncio
import logging
import sys
import time
from pathlib import Path

import psutil
import pytest

from slime.agents import programs
from slime.agents.programs import Finished, run_program
from slime.engines.keys import VARIABLE

CHILD = (
    "import subprocess, sys; subprocess.Popen([sys.executable, '-c', 'import time; "
    "time.sleep(600)', sys.argv[1]])"
)


def left(mark: str) -> list[int]:
    """Processes with this word in their command line."""
    found = psutil.process_iter(["cmdline", "status"])
    return [
        p.pid
        for p in found
        if mark in (p.info["cmdline"] or ()) and p.info["status"] != psutil.STATUS_ZOMBIE
    ]


def ended(mark: str) -> bool:
    psutil.wait_procs(
        [psutil.Process(pid) for pid in left(mark) if psutil.pid_exists(pid)], timeout=10
    )
    return not left(mark)


def test_it_gets_its_variables_and_its_output_and_status_come_back(tmp_path: Path) -> None:
    code = "import os, sys; print(os.environ['OPENAI_API_KEY'], os.getcwd()); sys.exit('no')"
    done = asyncio.run(
        run_program([sys.executable, "-c", code], {"OPENAI_API_KEY": "k"}, cwd=tmp_path, timeout=60)
    )
    assert done == Finished(1, f"k {tmp_path}\nno\n")


def test_of_what_it_writes_without_end_the_end_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(programs, "_MAX_OUTPUT", 10)
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
    assert asyncio.run(run_program([sys.executable, "-c", code, mark], {})) == Finished(
        0, "started\n"
    )
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


DETACHED = {
    "a session of its own": f"{CHILD[:-1]}, start_new_session=True)",
    "a double fork": """
import os, sys
if os.fork() == 0:
    os.setsid()
    if os.fork() == 0:
        os.execv(sys.executable, [sys.executable, "-c", "import time; time.sleep(600)", \
sys.argv[1]])
    os._exit(0)
os.wait()
""",
}
#: What its child ends up with as arguments, before the mark.
SLEEPS = "import time; time.sleep(600)"
#: Until its child is what it is to become.
SEES_IT = f"""
import psutil, sys, time
while not any(["-c", {SLEEPS!r}, sys.argv[1]] == (p.info["cmdline"] or [])[1:] \
for p in psutil.process_iter(["cmdline"])): time.sleep(0.01)
print("started", flush=True)
"""


def sleepers(mark: str) -> list[int]:
    """Children that have become what they are to be."""
    arguments = ["-c", SLEEPS, mark]
    found = psutil.process_iter(["cmdline"])
    return [p.pid for p in found if (p.info["cmdline"] or [])[1:] == arguments]


@pytest.mark.parametrize("way", DETACHED)
@pytest.mark.parametrize("how", ["by itself", "when it is cancelled"])
def test_what_has_left_its_process_group_ends_with_it_and_is_named(
    tmp_path: Path,
    way: str,
    how: str,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(logging.getLogger("slime"), "propagate", True)
    monkeypatch.setattr(programs, "_leaves_behind", set())
    mark = str(tmp_path / "detached")
    code = DETACHED[way] + SEES_IT + ("" if how == "by itself" else "time.sleep(600)")

    async def run() -> None:
        running = asyncio.create_task(run_program([sys.executable, "-c", code, mark], {}))
        if how == "by itself":
            assert await running == Finished(0, "started\n")
            return
        while not sleepers(mark):
            await asyncio.sleep(0.01)
        running.cancel()
        with pytest.raises(asyncio.CancelledError):
            await running

    asyncio.run(run())
    assert ended(mark)
    assert f"ended with {sys.executable}, which had left them behind" in caplog.text
    assert "time.sleep(600)" in caplog.text


def test_what_has_left_its_process_group_ends_with_the_rollout(tmp_path: Path) -> None:
    mark = str(tmp_path / "detached")
    code = f"{DETACHED['a session of its own']}; import time; time.sleep(600)"
    run = "from slime.agents.programs import run_program; import asyncio, sys\n"
    run += f"asyncio.run(run_program([sys.executable, '-c', {code!r}, {mark!r}], {{}}))"
    rollout = psutil.Popen([sys.executable, "-c", run])
    while len(left(mark)) < 2:
        assert rollout.poll() is None
        time.sleep(0.01)
    rollout.kill()
    assert ended(mark)
    rollout.wait()


def test_what_cannot_be_started_says_so(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match="no-such-program"):
        asyncio.run(run_program(["no-such-program"], {}))
    with pytest.raises(PermissionError):
        asyncio.run(run_program([tmp_path], {}))
