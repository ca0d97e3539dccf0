"""The parent of a program without isolation: when the program ends or must end, everything that it
started ends with it.

    rollout ─► reaper ─► the program ─► its children, in process groups of their own too

A process that leaves its group (a new session, a double fork) becomes a child of the reaper. A
script of the standard library: it reads a request (`slime.agents.programs.run_program`) and writes
the result, both as JSON. The program's variables are only in that request.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import types
from functools import partial
from typing import Any

if __name__ == "__main__":  # slime/__init__.py needs packages that this script does without
    package = types.ModuleType("slime")
    package.__path__ = [os.path.dirname(os.path.dirname(os.path.abspath(__file__)))]
    sys.modules["slime"] = package

from slime.processes import tree
from slime.sandbox import isolation

_MAX_NAMED = 20


def main() -> None:
    signals = {signal.SIGTERM, signal.SIGCHLD}
    signal.pthread_sigmask(signal.SIG_BLOCK, signals)  # they are waited for
    request = json.loads(sys.stdin.buffer.read())
    tree.adopt_orphans()
    isolation.die_with(request["owner"], signal.SIGTERM)
    try:
        program = _start(request)
    except OSError as error:
        print(json.dumps({"refused": [error.errno, error.strerror, error.filename]}))
        return
    ended = False
    while not (ended := tree.has_ended(program.pid)) and signal.sigwait(signals) != signal.SIGTERM:
        pass
    with contextlib.suppress(ProcessLookupError):
        os.killpg(program.pid, signal.SIGKILL)
    left = _named(program.pid)
    status = program.wait() if ended else None
    tree.end_all()
    print(json.dumps({"status": status, "left": left}))


def _start(request: dict[str, Any]) -> subprocess.Popen[bytes]:
    """Start the program in a session of its own.

    Raises:
        OSError: it cannot be started.
    """
    return subprocess.Popen(
        request["command"],
        env=request["environ"],
        cwd=request["cwd"],
        stdin=subprocess.DEVNULL,
        stdout=request["output"],
        stderr=request["output"],
        start_new_session=True,
        preexec_fn=partial(_in_child, os.getpid()),
    )


def _in_child(reaper: int) -> None:
    signal.pthread_sigmask(signal.SIG_SETMASK, ())
    isolation.die_with(reaper)


def _named(group: int) -> list[str]:
    """Name processes that run outside of the program's own group."""
    found = []
    for pid in tree.descendants():
        with contextlib.suppress(OSError), open(f"/proc/{pid}/cmdline", "rb") as line:
            words = line.read().replace(b"\0", b" ").decode(errors="replace").strip()
            if words and os.getpgid(pid) != group:  # an ended process has an empty command line
                found.append(f"{pid} ({words[:80]})")
    return [
        *found[:_MAX_NAMED],
        *([f"{len(found) - _MAX_NAMED} more"] if len(found) > _MAX_NAMED else []),
    ]


if __name__ == "__main__":
    main()
