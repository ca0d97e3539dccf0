"""One launch that is hit by a signal at some moment, and what is left of it.

As a script it is the process that adopts whatever loses its parent: nothing that a launch has
started can hide from it.

    python -m tests.support.moments '{"seconds": 3.2, "signal": "SIGKILL", "flags": […], …}'
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import psutil

from slime.processes.tree import adopt_orphans, end_all
from tests.support.processes import ROOT, is_running

#: A script that leaves a daemon: in a session of its own, without a parent or an environment. Given
#: a file, it writes the daemon's process id there.
DAEMON = """
import os, sys
if os.fork(): os._exit(0)
os.setsid()
if os.fork(): os._exit(0)
if sys.argv[1:]:
    with open(sys.argv[1] + ".new", "w") as file: file.write(str(os.getpid()))
    os.rename(sys.argv[1] + ".new", sys.argv[1])
os.execve("/bin/sleep", ["sleep", "600"], {})
"""
#: From the driver's end: nothing may be left then.
LIMIT_SECONDS = 5.0


def reward_with_daemons(args: Any, sample: Any, **_: Any) -> float:
    """A reward that leaves processes behind."""
    leave_daemons()
    return float(len(sample.response))


def leave_daemons() -> None:
    """Leave a child behind, and a daemon."""
    subprocess.Popen(["sleep", "600"], start_new_session=True)
    subprocess.run([sys.executable, "-S", "-c", DAEMON], check=True)


def hit(
    seconds: float, number: signal.Signals, flags: Sequence[str], folder: Path
) -> dict[str, Any]:
    """Run `hit_here` in a process of its own.

    Args:
        seconds: from the start of the driver; one that has ended before is not hit.
        folder: the run folder.
    Returns:
        "status" of the driver, "survivors" (command lines) ``LIMIT_SECONDS`` after its end,
        "gone_after" seconds, "lasted" seconds in all, "took" seconds from the signal to the
        driver's end, "was_hit", "alive" (command lines) then, "phase" (the last line that it had
        written), "state" in run.json, and "stderr".
    """
    request = {
        "seconds": seconds,
        "signal": number.name,
        "flags": list(flags),
        "folder": str(folder),
    }
    command = [sys.executable, "-m", "tests.support.moments", json.dumps(request)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    found: dict[str, Any] = json.loads(done.stdout)
    return found


def hit_here(request: dict[str, Any]) -> dict[str, Any]:
    adopt_orphans()
    folder = Path(request["folder"])
    folder.parent.mkdir(parents=True, exist_ok=True)
    output = folder.parent / f"{folder.name}.stderr"
    environment = {
        **os.environ,
        "OMP_NUM_THREADS": "1",
        "TOKENIZERS_PARALLELISM": "false",
        "SLIME_DEBUG": "0",
    }
    for number in (signal.SIGINT, signal.SIGQUIT):  # which a background job of a shell ignores
        signal.signal(number, signal.SIG_DFL)
    with open(output, "w") as stderr:
        driver = subprocess.Popen(
            [sys.executable, "-m", "slime", "train", *request["flags"]],
            stdout=subprocess.DEVNULL,
            stderr=stderr,
            env=environment,
            start_new_session=True,
        )
    alive: list[str] = []
    started = time.monotonic()
    try:
        driver.wait(request["seconds"])
        was_hit = False
    except subprocess.TimeoutExpired:
        alive = running_below()
        driver.send_signal(signal.Signals[request["signal"]])
        was_hit = True
    began = time.monotonic()
    phase = _phase(output)
    status = driver.wait(120)
    ended = time.monotonic()
    while (left := running_below()) and time.monotonic() - ended < LIMIT_SECONDS:
        time.sleep(0.05)
    gone_after = time.monotonic() - ended
    end_all()
    summary = folder / "run.json"
    stages = json.loads(summary.read_text())["stages"] if summary.exists() else {}
    return {
        "status": status,
        "was_hit": was_hit,
        "phase": phase,
        "alive": alive,
        "lasted": round(ended - started, 2),
        "took": round(ended - began, 2),
        "survivors": left,
        "gone_after": round(gone_after, 2),
        "state": stages.get("", {}).get("state"),
        "stderr": output.read_text(errors="replace")[-3000:],
    }


def _phase(output: Path) -> str:
    """The last line that the driver had written."""
    lines = output.read_text(errors="replace").splitlines()
    return lines[-1][:100] if lines else ""


def running_below() -> list[str]:
    """Command lines of this process's descendants that have not ended."""
    found = []
    for process in psutil.Process().children(recursive=True):
        try:
            if is_running(process):
                found.append(" ".join(process.cmdline())[:150] or process.name())
        except psutil.NoSuchProcess:
            continue
    return found


if __name__ == "__main__":
    print(json.dumps(hit_here(json.loads(sys.argv[1]))))
