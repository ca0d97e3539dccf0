"""Start Python processes by forking one process that has imported torch, transformers, Ray and
Megatron, instead of importing them in each.

    guard (tree.py) ─► this file as a script ─► raylet ─► this file as a client, gone at once
                                     └─► forked: Ray's workers, embedded servers

The server is the raylet's parent and ends with it, so that its children belong to the same tree. It
must have one thread only: a fork copies no other thread, but the locks that one holds. A client
falls back to a process of its own when the server refuses or does not answer.

The client imports only the standard library, since it runs without site-packages for each worker.
"""

from __future__ import annotations

import contextlib
import functools
import gc
import importlib
import json
import os
import random
import runpy
import selectors
import signal
import socket
import subprocess
import sys
from collections.abc import Mapping, Sequence
from typing import Any

#: Variable with the path of the server's socket, set for the raylet and all that it starts.
VARIABLE = "SLIME_PRELOADED"
#: Variable with the modules to import, "torch,transformers:AutoTokenizer": an attribute may import
#: when it is read. (On the command line they would make the server look like one of them.)
MODULES = "SLIME_PRELOADED_MODULES"
#: Variables that libraries read once, when they are loaded. A request in which one of them differs
#: from the server's own needs a new process.
_READ_ONCE = (
    "GLIBC_", "GOMP_", "KMP_", "LD_", "MALLOC_", "MKL_", "NVTE_", "OMP_", "OPENBLAS_", "PYTHON",
    "RAY_JOB_ID", "RAY_RAYLET_PID", "TORCH", "PYTORCH_",
)  # fmt: skip
_THREADS = "OMP_NUM_THREADS"
#: The number of threads can be set later; the other one is read where it is used.
_READ_LATER = (_THREADS, "PYTHONBREAKPOINT")
_SETUP_WORKER = "setup_worker.py"
_OOM_SCORE_ADJUSTMENT = "RAY_worker_oom_score_adjustment"
_LANGUAGE = "--language="
_RUNTIME_ENVIRONMENT = "--serialized-runtime-env-context="
_REQUEST_SECONDS = 5.0
_MAX_BYTES = 1 << 20
_REFUSED = -1
_SIGNALS = (signal.SIGTERM, signal.SIGCHLD)


# -- clients ---------------------------------------------------------------------------------------


class ForkedProcess:
    """A process that the server has forked, with the part of `subprocess.Popen` that
    `slime.cluster.server_process` uses. It leads a session of its own, and the server kills it when
    this object's process ends.

    Args:
        argv: command line of a Python script or module.
        env: its whole environment.
        output: descriptor of its stdout and stderr.
    Raises:
        OSError: no server, or one that does not fork this.
    """

    def __init__(self, argv: Sequence[str], env: Mapping[str, str], output: int) -> None:
        self.returncode: int | None = None
        with open(os.devnull, "rb") as nothing:
            stdio = (nothing.fileno(), output, output)
            adjustment = _oom_score_adjustment()
            self._server = _connect(os.environ.get(VARIABLE, ""))
            try:
                self.pid = _request_fork(
                    self._server, argv, env, stdio, adjustment, is_watched=True
                )
            except BaseException:
                self._server.close()
                raise

    def poll(self) -> int | None:
        """Return the exit status, negative for a signal; None while the process lives."""
        return self._wait(0.0)

    def wait(self, timeout: float) -> int:
        status = self._wait(timeout)
        if status is None:
            raise subprocess.TimeoutExpired(str(self.pid), timeout)
        return status

    def _wait(self, timeout: float) -> int | None:
        if self.returncode is None:
            self._server.settimeout(timeout)
            try:
                answer = self._server.recv(64)
            except (BlockingIOError, TimeoutError):
                return None
            except ConnectionError:
                answer = b""
            # without a server, all that it has forked is killed
            self.returncode = int(answer) if answer else -signal.SIGKILL
            self._server.close()
        return self.returncode


def _connect(path: str) -> socket.socket:
    server = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    try:
        server.connect(path)
    except OSError:
        server.close()
        raise
    return server


def _request_fork(
    server: socket.socket,
    argv: Sequence[str],
    env: Mapping[str, str],
    stdio: tuple[int, int, int],
    oom_score_adjustment: int,
    *,
    is_watched: bool,
) -> int:
    """Send a request and return the process id of the fork. It may wait for the server's imports.

    Raises:
        OSError: the server refuses, or has ended.
    """
    umask = os.umask(0o77)
    os.umask(umask)
    request = {
        "argv": list(argv),
        "env": dict(env),
        "cwd": os.getcwd(),
        "umask": umask,
        "mask": sorted(signal.pthread_sigmask(signal.SIG_BLOCK, [])),
        "niceness": os.getpriority(os.PRIO_PROCESS, 0),
        "oom_score_adjustment": oom_score_adjustment,
        "is_watched": is_watched,
    }
    server.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _MAX_BYTES)
    socket.send_fds(server, [json.dumps(request).encode()], stdio)
    answer = server.recv(64)
    if not answer or int(answer) <= 0:
        raise ConnectionRefusedError("it needs a process of its own")
    return int(answer)


def _oom_score_adjustment() -> int:
    with open("/proc/self/oom_score_adj", encoding="ascii") as file:
        return int(file.read())


def _start_worker(path: str, argv: list[str]) -> None:
    """Have the server start a Ray worker, or become it in this process.

    Ray knows a worker by the id on its command line and by the pid that it registers, so nothing
    waits for this process.

    Args:
        argv: what Ray would run: Python, `setup_worker.py`, the worker's script and its arguments.
    """
    has_environment = any(word.startswith(_RUNTIME_ENVIRONMENT) for word in argv)
    if not has_environment:
        # Ray does without this script itself where it is the command's second word
        argv = [
            word
            for word in argv
            if os.path.basename(word) != _SETUP_WORKER and not word.startswith(_LANGUAGE)
        ]
        # Ray writes this into /proc for the process that it started, which is this one
        adjustment = int(os.environ.get(_OOM_SCORE_ADJUSTMENT, 1000))
        try:
            _request_fork(_connect(path), argv, os.environ, (0, 1, 2), adjustment, is_watched=False)
            return
        except (OSError, ValueError):
            pass  # the fallback follows
    os.execv(argv[0], argv)


# -- the server ------------------------------------------------------------------------------------


class _ForkServer:
    """Forks a child per request while ``command``, its first child, lives."""

    def __init__(self, path: str, command: Sequence[str]) -> None:
        from slime.processes.owner import die_with_parent

        self._added: dict[str, str] = {}  # to the environment, by imports
        self._is_loaded = False
        self._clients: dict[int, socket.socket] = {}  # of watched children, by process id
        umask = os.umask(0o177)
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._listener.bind(path)
        os.umask(umask)
        self._listener.listen(64)
        self._selector = selectors.DefaultSelector()
        self._selector.register(self._listener, selectors.EVENT_READ)
        self._command = subprocess.Popen(
            command,
            env={name: value for name, value in os.environ.items() if name != "RAY_JOB_ID"}
            | {VARIABLE: path},
            stdin=subprocess.DEVNULL,
            preexec_fn=functools.partial(die_with_parent, os.getpid()),
        ).pid
        os.environ["RAY_RAYLET_PID"] = str(self._command)  # as Ray does for its workers
        self._environment = dict(os.environ)
        signal.signal(signal.SIGTERM, lambda *_: os.kill(self._command, signal.SIGTERM))
        signal.signal(signal.SIGCHLD, lambda *_: self._reap())
        self._reap()  # it may have ended before the handler was there

    def load(self, modules: Sequence[str]) -> None:
        """Import ``modules``. If one of them starts a thread, every request is refused.

        One that cannot be imported is left to the processes that need it, which report the error: a
        host without a trainer needs no Megatron.
        """
        one_thread = dict.fromkeys({_THREADS, "OPENBLAS_NUM_THREADS"} - os.environ.keys(), "1")
        os.environ.update(one_thread)  # else numpy starts a pool of threads
        gc.disable()  # no garbage yet: collections would take a fifth of the time
        for name in modules:
            module, _, attribute = name.partition(":")
            with contextlib.suppress(ImportError, OSError):
                imported = importlib.import_module(module)
                if attribute:
                    getattr(imported, attribute)  # transformers imports when it is asked
        gc.enable()
        gc.freeze()
        for name in one_thread:
            del os.environ[name]
        self._added = {
            name: value for name, value in os.environ.items() if name not in self._environment
        }
        self._is_loaded = len(os.listdir("/proc/self/task")) == 1

    def serve(self) -> dict[str, Any]:
        """Answer requests; return one in the child that has been forked for it."""
        while True:
            for key, _ in self._selector.select():
                signal.pthread_sigmask(signal.SIG_BLOCK, _SIGNALS)
                if key.fileobj is self._listener:
                    request = self._answer()
                    if request is not None:
                        return request
                elif key.data in self._clients:  # the client has ended, or stopped its watch
                    self._drop_client(key.data)
                    os.kill(key.data, signal.SIGKILL)
                signal.pthread_sigmask(signal.SIG_UNBLOCK, _SIGNALS)

    def _answer(self) -> dict[str, Any] | None:
        client, _ = self._listener.accept()
        client.settimeout(_REQUEST_SECONDS)
        stdio: list[int] = []
        try:
            data, stdio, _, _ = socket.recv_fds(client, _MAX_BYTES, 3)
            request = json.loads(data)
            pid = os.fork() if self._may_fork(request) else _REFUSED
            if pid == 0:
                self._close_in_child(client)
                return request | {"stdio": stdio, "added": self._added}
            if pid > 0 and request["is_watched"]:
                self._clients[pid] = client
                self._selector.register(client, selectors.EVENT_READ, pid)
            client.send(str(pid).encode())
        except (OSError, ValueError):
            pass  # the client has ended; its child, if it has one, is killed as the socket closes
        for descriptor in stdio:
            os.close(descriptor)
        if client not in self._clients.values():
            client.close()
        return None

    def _may_fork(self, request: Mapping[str, Any]) -> bool:
        python, script = request["argv"][:2]
        theirs, ours = (
            {
                name: value
                for name, value in environment.items()
                if name.startswith(_READ_ONCE) and name not in _READ_LATER
            }
            for environment in (self._added | request["env"], self._added | self._environment)
        )
        has_other_options = script.startswith("-") and script not in ("-m", "-Pm")
        return (
            self._is_loaded
            and python == sys.executable
            and not has_other_options
            and theirs == ours
        )

    def _close_in_child(self, client: socket.socket) -> None:
        """Close the server's sockets and selector in a child."""
        self._selector.close()
        for each in (self._listener, client, *self._clients.values()):
            each.close()

    def _drop_client(self, pid: int) -> None:
        client = self._clients.pop(pid)
        self._selector.unregister(client)
        client.close()

    def _reap(self) -> None:
        while True:
            try:
                pid, status = os.waitpid(-1, os.WNOHANG)
            except ChildProcessError:
                return
            if not pid:
                return
            code = os.waitstatus_to_exitcode(status)
            if pid == self._command:
                os._exit(code if code >= 0 else 128 - code)
            if pid in self._clients:
                with contextlib.suppress(OSError):  # the client has just ended
                    self._clients[pid].send(str(code).encode())
                self._drop_client(pid)


def _run(request: Mapping[str, Any]) -> None:
    """Make this fork what a new process would be, and run the command to its end."""
    from slime.processes.owner import die_with_parent

    if request["is_watched"]:
        os.setsid()
        die_with_parent(os.getppid())
    for number, descriptor in enumerate(request["stdio"]):
        os.dup2(descriptor, number)
    os.closerange(3, max(request["stdio"]) + 1)
    os.chdir(request["cwd"])
    os.umask(request["umask"])
    if request["niceness"] != os.getpriority(os.PRIO_PROCESS, 0):
        os.setpriority(os.PRIO_PROCESS, 0, request["niceness"])
    with open("/proc/self/oom_score_adj", "w", encoding="ascii") as file:
        file.write(str(request["oom_score_adjustment"]))
    os.environ.clear()
    os.environ.update(request["added"] | request["env"])
    for number in _SIGNALS:
        signal.signal(number, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_SETMASK, request["mask"])
    _seed()
    _run_script(request["argv"])


def _seed() -> None:
    """Give this fork random numbers and a number of threads of its own. torch's first seed is the
    same in every new process."""
    random.seed()
    if numpy := sys.modules.get("numpy"):
        numpy.random.seed()
    torch = sys.modules.get("torch")
    number = os.environ.get(_THREADS, "")
    if torch and number.isdigit() and int(number) != torch.get_num_threads():
        torch.set_num_threads(int(number))


def _run_script(argv: list[str]) -> None:
    if raylet := sys.modules.get("ray._raylet"):
        raylet.setproctitle(" ".join(argv))
    sys.orig_argv = list(argv)
    if argv[1] in ("-m", "-Pm"):
        if argv[1] == "-m":
            sys.path.insert(0, os.getcwd())
        sys.argv = argv[2:]
        runpy.run_module(argv[2], run_name="__main__", alter_sys=True)
    else:
        sys.path.insert(0, os.path.dirname(argv[1]))
        sys.argv = argv[1:]
        runpy.run_path(argv[1], run_name="__main__")


def main(argv: list[str]) -> None:
    """Be the server (``SOCKET COMMAND``) or its client (``--worker SOCKET COMMAND``)."""
    if argv[0] == "--worker":
        _start_worker(argv[1], argv[2:])
        return
    modules = os.environ.pop(MODULES).split(",")
    server = _ForkServer(argv[0], argv[1:])
    server.load(modules)
    request = server.serve()
    del server
    _run(request)


if __name__ == "__main__":
    if "--worker" not in sys.argv[1:2] and not sys.flags.safe_path:
        del sys.path[0]  # the folder of this file, where `slime` is not
    main(sys.argv[1:])
