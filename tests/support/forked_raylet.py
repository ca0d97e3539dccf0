"""The guards of a driver's Ray, and its preloaded process, as forks of that driver.

They are forked before the driver imports Ray, whose C++ code reads the environment as it is
imported. The preloaded process then imports Ray alone, which costs three CPU seconds less, and all
processes keep the parents, sessions, environments and titles that they have otherwise.
"""

from __future__ import annotations

import ctypes
import dataclasses
import inspect
import json
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Mapping
from typing import Any, NoReturn

from slime.engines.launch import LaunchSpec
from slime.processes import preloaded
from slime.processes import tree as process_tree

_START = subprocess.Popen._execute_child  # type: ignore[attr-defined]
#: What `_START` is called with, by name.
_Given = dict[str, Any]
_CUDA_ALLOCATOR = "PYTORCH_CUDA_ALLOC_CONF"
_TITLE = "\0".join([sys.executable, "-S", "-E", process_tree.__file__])
_has_title = False


def fork_guard() -> None:
    """Fork a process that becomes the guard of this process's first raylet, and ends with this
    process if it starts none."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    pid = os.fork()
    if pid == 0:
        os.setsid()  # signals for the driver's group do not reach it
        ours.close()
        _become_guard(theirs)
    theirs.close()

    def start_guard(process: subprocess.Popen[bytes], given: _Given) -> int | None:
        if given["args"][-1] != process_tree.__file__:
            return None
        subprocess.Popen._execute_child = _START  # type: ignore[attr-defined]
        request = {"env": dict(given["env"]), "cwd": os.getcwd()}
        socket.send_fds(ours, [json.dumps(request).encode()], _stdio(given))
        ours.close()
        return pid

    _replace_start(start_guard)


def _replace_start(start: Callable[[subprocess.Popen[bytes], _Given], int | None]) -> None:
    """Have `subprocess.Popen` ask ``start`` for the id of a process, and begin one only without."""

    def execute_child(process: subprocess.Popen[bytes], *values: Any) -> None:
        given = inspect.signature(_START).bind(process, *values).arguments
        pid = start(process, given)
        if pid is None:
            _START(process, *values)
            return
        process.pid = pid
        process._child_created = True  # type: ignore[attr-defined]
        pipes = ("p2cread", "p2cwrite", "c2pread", "c2pwrite", "errread", "errwrite")
        process._close_pipe_fds(*(given[name] for name in pipes))  # type: ignore[attr-defined]

    subprocess.Popen._execute_child = execute_child  # type: ignore[attr-defined]


def _stdio(given: _Given) -> list[int]:
    wanted = given["p2cread"], given["c2pwrite"], given["errwrite"]
    return [own if own >= 0 else number for number, own in enumerate(wanted)]


def _become_guard(driver: socket.socket) -> NoReturn:
    data, stdio, _, _ = socket.recv_fds(driver, preloaded._MAX_BYTES, 3)
    if not data:
        os._exit(0)
    request = json.loads(data)
    for number, descriptor in enumerate(stdio):
        os.dup2(descriptor, number)
    os.closerange(3, max(*stdio, driver.detach()) + 1)
    os.chdir(request["cwd"])
    os.environ.clear()
    os.environ.update(request["env"])
    signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGINT])  # as Ray's daemons have it
    os.register_at_fork(after_in_parent=_show_title)
    _replace_start(_start_preloaded)
    with open(0, closefd=False) as stdin:
        os._exit(process_tree.hold(**json.load(stdin)))


def _show_title() -> None:
    """Name a guard once its child exists: Ray names that one and its forks, and looks for the words
    that Python was started with."""
    global _has_title
    if _has_title:
        return
    _has_title = True
    with open("/proc/self/stat") as file:
        start, end = map(int, file.read().rpartition(")")[2].split()[45:47])
    title = _TITLE.encode()[: end - start - 1]
    ctypes.memmove(start, title.ljust(end - start, b"\0"), end - start)


def _start_preloaded(process: subprocess.Popen[bytes], given: _Given) -> int | None:
    words = list(given["args"])
    if preloaded.__file__ not in words:
        return None
    stdio = _stdio(given)
    if pid := os.fork():
        return pid
    global _has_title
    _has_title = True
    subprocess.Popen._execute_child = _START  # type: ignore[attr-defined]
    given["preexec_fn"]()
    for number, descriptor in enumerate(stdio):
        os.dup2(descriptor, number)
    os.closerange(3, max(stdio) + 64)
    _be_preloaded(words)


def add_to_path(value: str) -> None:
    """Put folders of PYTHONPATH first on the import path, as Python does when it starts."""
    added = [folder for folder in value.split(os.pathsep) if folder and folder not in sys.path]
    sys.path[:0] = added


class ForkServer(preloaded._ForkServer):
    """One that also forks servers of engines that sleep: their setting of CUDA's allocator is read
    where there is a GPU."""

    def _may_fork(self, request: Mapping[str, Any]) -> bool:
        env = {name: request["env"][name] for name in request["env"] if name != _CUDA_ALLOCATOR}
        return super()._may_fork({**request, "env": env})


def preload_stand_in() -> None:
    """Have engine actors start SGLang's stand-in as a fork, which the real one is not."""
    from slime.engines.sglang.kind import KIND

    command = KIND.command

    def preloaded_command(*given: Any) -> LaunchSpec:
        return dataclasses.replace(command(*given), is_preloaded=True)

    object.__setattr__(KIND, "command", preloaded_command)


def _be_preloaded(words: list[str]) -> NoReturn:
    """What ``env WORDS python preloaded.py SOCKET COMMAND`` does."""
    script = words.index(preloaded.__file__)
    for word in words[1 : script - 1]:
        name, _, value = word.partition("=")
        if name == "--unset":
            os.environ.pop(value, None)
        else:
            os.environ[name] = value
    add_to_path(os.environ["PYTHONPATH"])
    sys.orig_argv = words[script - 1 :]
    sys.argv = words[script:]
    modules = os.environ.pop(preloaded.MODULES).split(",")
    server = ForkServer(sys.argv[1], sys.argv[2:])
    server.load(modules)
    if "FAKE_SGLANG_CALLS" in os.environ:
        preload_stand_in()
    sys.modules["ray._raylet"].setproctitle(" ".join(sys.orig_argv[:3]))
    request = server.serve()
    del server
    preloaded._run(request)
    sys.exit()
