"""However a tree of processes ends, all of it ends: no new session, double fork or empty
environment hides one."""

from __future__ import annotations

import json
import os
import select
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from slime.processes import tree as process_tree
from tests.support.moments import DAEMON
from tests.support.processes import PATIENCE, wait_until

#: Starts the holder, and waits.
_OWNER = """
import json, os, subprocess, sys, time
holder = subprocess.Popen([sys.executable, "-S", "-E", sys.argv[1]], stdin=subprocess.PIPE)
holder.stdin.write(json.dumps({"owner": os.getpid(), **json.loads(sys.argv[2])}).encode())
holder.stdin.close()
print(holder.pid, flush=True)
time.sleep(600)
"""
#: Starts a daemon that says who it is, then does what is asked.
_COMMAND = """
import os, signal, subprocess, sys, time
subprocess.run([sys.executable, "-S", "-c", sys.argv[1], sys.argv[2]], check=True)
if sys.argv[3] == "deaf":
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
elif sys.argv[3] == "polite":
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(7))
while not os.path.exists(sys.argv[2]):
    time.sleep(0.01)
open(sys.argv[2] + ".ready", "w").close()
if sys.argv[3] == "ends":
    while not os.path.exists(sys.argv[2] + ".watched"):
        time.sleep(0.01)
    sys.exit(5)
time.sleep(600)
"""


class Tree:
    """A holder with a daemon in its tree."""

    def __init__(self, folder: Path, how: str, owner: bool) -> None:
        self.told = folder / "daemon"
        self.last = folder / "last"
        command = [sys.executable, "-S", "-c", _COMMAND, DAEMON, str(self.told), how]
        last = ["touch", str(self.last)]
        request = {"command": command, "last_command": last}
        if owner:
            words = [sys.executable, "-S", "-c", _OWNER, process_tree.__file__, json.dumps(request)]
            self.process = subprocess.Popen(words, stdout=subprocess.PIPE)
            assert self.process.stdout is not None
            self.holder = int(self.process.stdout.readline())
        else:
            words = [sys.executable, "-S", "-E", process_tree.__file__]
            self.process = subprocess.Popen(words, stdin=subprocess.PIPE)
            assert self.process.stdin is not None
            with self.process.stdin as pipe:
                pipe.write(json.dumps({"owner": os.getpid(), **request}).encode())
            self.holder = self.process.pid
        wait_until((folder / "daemon.ready").exists, "the daemon runs")
        self.daemon = os.pidfd_open(int(self.told.read_text()))
        (folder / "daemon.watched").touch()

    def daemon_ended(self) -> bool:
        poller = select.poll()
        poller.register(self.daemon, select.POLLIN)
        return bool(poller.poll(PATIENCE * 1000))


Begin = Callable[..., Tree]


@pytest.fixture
def begin(tmp_path: Path) -> Iterator[Begin]:
    trees: list[Tree] = []

    def start(how: str, *, owner: bool = False) -> Tree:
        trees.append(Tree(tmp_path, how, owner))
        return trees[-1]

    yield start
    for tree in trees:
        tree.process.kill()
        tree.process.communicate()
        os.close(tree.daemon)


def test_the_owner_is_killed(begin: Begin) -> None:
    tree = begin("waits", owner=True)
    tree.process.kill()
    assert tree.daemon_ended()
    wait_until(tree.last.exists, "what is left besides processes is removed")


def test_the_command_ends(begin: Begin) -> None:
    tree = begin("ends")
    assert tree.process.wait(PATIENCE) == 5 and tree.daemon_ended() and not tree.last.exists()


@pytest.mark.parametrize(("how", "status"), [("polite", 7), ("deaf", 1)])
def test_the_holder_is_told_to_end(begin: Begin, how: str, status: int) -> None:
    tree = begin(how)
    tree.process.send_signal(signal.SIGTERM)
    assert tree.process.wait(PATIENCE) == status and tree.daemon_ended() and not tree.last.exists()


@pytest.mark.parametrize("which", ["outer", "inner"])
def test_one_of_the_two_holders_is_killed(begin: Begin, which: str) -> None:
    tree = begin("waits", owner=True)
    [inner] = process_tree._children_of(tree.holder)
    os.kill(inner if which == "inner" else tree.holder, signal.SIGKILL)
    assert tree.daemon_ended()


def test_a_holder_whose_owner_is_gone_begins_nothing(tmp_path: Path) -> None:
    request = {
        "owner": 1 << 22,
        "command": ["touch", str(tmp_path / "begun")],
        "last_command": ["true"],
    }
    words = [sys.executable, "-S", "-E", process_tree.__file__]
    done = subprocess.run(words, input=json.dumps(request).encode(), timeout=PATIENCE, check=False)
    assert done.returncode == 1 and not (tmp_path / "begun").exists()
