"""The parent of a program that has no walls: when that ends, or has to, whatever it started ends
with it.

    rollout ─► minder ─► the program ─► whatever it starts, in process groups of its own too

Who leaves its group (a new session, a double fork) becomes a child of the minder, as in a sandbox
of its keeper. A script of the standard library. It reads a request
(`slime.agents.programs.run_program`) and writes what came of it, JSON both; it has none of the
program's variables, which are in that request.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
from functools import partial
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from slime.processes import tree as process_tree
    from slime.sandbox import isolation as walls
else:
    import isolation as walls  # beside this script

    _PACKAGE = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
    sys.path.append(os.path.join(_PACKAGE, "processes"))
    import tree as process_tree

_MOST_NAMED = 20


def main() -> None:
    signals = {signal.SIGTERM, signal.SIGCHLD}
    signal.pthread_sigmask(signal.SIG_BLOCK, signals)  # they are waited for
    request = json.loads(sys.stdin.buffer.read())
    process_tree.adopt_orphans()
    walls.die_with(request["owner"], signal.SIGTERM)
    try:
        program = _start(request)
    except OSError as error:
        print(json.dumps({"refused": [error.errno, error.strerror, error.filename]}))
        return
    ended = False
    while (
        not (ended := process_tree.has_ended(program.pid))
        and signal.sigwait(signals) != signal.SIGTERM
    ):
        pass
    with contextlib.suppress(ProcessLookupError):
        os.killpg(program.pid, signal.SIGKILL)
    left = _named(program.pid)
    status = program.wait() if ended else None
    process_tree.end_all()
    print(json.dumps({"status": status, "left": left}))


def _start(request: dict[str, Any]) -> subprocess.Popen[bytes]:
    """
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


def _in_child(minder: int) -> None:
    signal.pthread_sigmask(signal.SIG_SETMASK, ())
    walls.die_with(minder)


def _named(group: int) -> list[str]:
    """Name processes that run outside of the program's own group."""
    found = []
    for pid in process_tree.descendants():
        with contextlib.suppress(OSError), open(f"/proc/{pid}/cmdline", "rb") as line:
            words = line.read().replace(b"\0", b" ").decode(errors="replace").strip()
            if words and os.getpgid(pid) != group:  # who has ended has no words
                found.append(f"{pid} ({words[:80]})")
    return [
        *found[:_MOST_NAMED],
        *([f"{len(found) - _MOST_NAMED} more"] if len(found) > _MOST_NAMED else []),
    ]


if __name__ == "__main__":
    main()
