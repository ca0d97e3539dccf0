"""Python processes as forks of one that has imported what a run needs: a driver costs two CPU
seconds less, an engine's server as well. Launches in another folder or environment stay new
processes, which shows that their own imports suffice."""

from __future__ import annotations

import atexit
import contextlib
import functools
import importlib
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from slime.processes import preloaded
from slime.processes.host import environment_variable
from slime.processes.owner import die_with_parent
from tests.support.forked_raylet import ForkServer, add_to_path, fork_guard, preload_stand_in

#: What drivers, engines and Ray's workers import, without Ray.
_MODULES = (
    "torch", "torch._dynamo", "transformers:AutoTokenizer", "numpy.random",
    "starlette.datastructures", "slime.trainer.megatron.backend", "slime.weights.sync",
    "slime.rollout.loop", "slime.rollout.rewards.row_checks", "slime.embedded.server",
    "slime.cli.resume", "slime.cli.train", "slime.diagnosis.doctor", "slime.page.report",
    "slime.run.ancestry", "slime.run.changed_inputs", "slime.run.preflight", "slime.run.stopping",
)  # fmt: skip
#: Commands, or scripts, whose process starts a Ray.
_DRIVERS = {"train", "train-async", "resume", "train.py", "train_async.py"}
_PATH = "PYTHONPATH"
#: Variables that are read where they are used, or set after the import by `start_ray`. Libraries
#: read others while they are imported.
_READ_LATER = (
    "SLIME_",
    "PYTEST_",
    "FAKE_SGLANG_",
    "WANDB_",
    "NETRC",
    "http_proxy",
    "HTTP_PROXY",
    "https_proxy",
    "HTTPS_PROXY",
    "all_proxy",
    "ALL_PROXY",
    "no_proxy",
    "NO_PROXY",
    "TMPDIR",
    _PATH,  # `add_to_path`
    "RAY_",  # Ray is imported in the fork
    "PYTHONBREAKPOINT",
)
#: As the processes that tests start have it.
_ENVIRONMENT = {"OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false"}


class Fork(preloaded.ForkedProcess):
    """A fork in the place of `subprocess.Popen`, for several threads.

    Args:
        argv: Python, a script or -m and a module, and its arguments.
        stdio: descriptors of its stdin, stdout and stderr.
        env: its whole environment.
        cwd: its working directory.
    Raises:
        OSError: this needs a process of its own.
    """

    def __init__(
        self,
        argv: Sequence[str],
        stdio: tuple[int, int, int],
        env: Mapping[str, str],
        cwd: str | Path = ".",
    ) -> None:
        path, known = _server(os.getpid())
        if _read_early(env) != known:
            raise OSError("libraries would have read another environment")
        self.returncode: int | None = None
        self._lock = threading.Lock()
        self._server = preloaded._connect(path)
        try:
            score = preloaded._oom_score_adjustment()
            with contextlib.chdir(cwd):
                self.pid = preloaded._request_fork(
                    self._server, argv, env, stdio, score, is_watched=True
                )
        except BaseException:
            self._server.close()
            raise

    def poll(self) -> int | None:
        with self._lock:
            return super().poll()

    def wait(self, timeout: float) -> int:
        end = time.monotonic() + timeout
        while (status := self.poll()) is None:
            if time.monotonic() > end:
                raise subprocess.TimeoutExpired(str(self.pid), timeout)
            time.sleep(0.02)
        return status

    def send_signal(self, number: int) -> None:
        if self.poll() is None:
            os.kill(self.pid, number)

    def terminate(self) -> None:
        self.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)


def fork_or_start(
    argv: Sequence[str], stdio: tuple[int, int, int], env: Mapping[str, str], cwd: str | Path = "."
) -> Fork | subprocess.Popen[bytes]:
    """A `Fork`, or where that is refused a new process; either leads a session of its own."""
    env = {**env, **_ENVIRONMENT}
    try:
        return Fork(argv, stdio, env, cwd)
    except OSError:
        stdin, stdout, stderr = stdio
        return subprocess.Popen(
            argv,
            stdin=stdin,
            stdout=stdout,
            stderr=stderr,
            env=env,
            cwd=cwd,
            start_new_session=True,
        )


def run_fork(
    argv: Sequence[str], env: Mapping[str, str], said: bytes = b"", timeout: float = 180.0
) -> subprocess.CompletedProcess[bytes]:
    """`fork_or_start` with ``said`` as its input, and wait for its end.

    Raises:
        subprocess.TimeoutExpired: it did not end; it is killed.
    """
    with (
        tempfile.TemporaryFile() as stdin,
        tempfile.TemporaryFile() as stdout,
        tempfile.TemporaryFile() as stderr,
    ):
        stdin.write(said)
        stdin.seek(0)
        process = fork_or_start(argv, (stdin.fileno(), stdout.fileno(), stderr.fileno()), env)
        try:
            status = process.wait(timeout)
        finally:
            process.kill()
        for file in (stdout, stderr):
            file.seek(0)
        return subprocess.CompletedProcess(argv, status, stdout.read(), stderr.read())


def socket_of_forks() -> str:
    """`preloaded.VARIABLE` of a process whose servers are to be forks, too."""
    return _server(os.getpid())[0]


@contextlib.contextmanager
def servers_as_forks() -> Iterator[None]:
    """Servers that this process starts within the block are forks, where their record allows it."""
    with environment_variable(preloaded.VARIABLE, socket_of_forks()):
        yield


def _read_early(env: Mapping[str, str]) -> dict[str, str]:
    return {name: value for name, value in env.items() if not name.startswith(_READ_LATER)}


def _begin_server(owner: int) -> None:
    die_with_parent(owner)
    # a shell's background job, and one under nohup, ignore them; no fork may
    for number in (signal.SIGINT, signal.SIGHUP):
        signal.signal(number, signal.SIG_DFL)


@functools.cache
def _server(owner: int) -> tuple[str, dict[str, str]]:
    """Start the process that others are forks of; it ends with this process, ``owner``.

    Returns:
        Its socket, and the environment in which it has imported.
    """
    folder = tempfile.TemporaryDirectory(prefix="slime-forks-")
    atexit.register(folder.cleanup)
    path = Path(folder.name) / "fork"
    environment = {**os.environ, **_ENVIRONMENT}
    process = subprocess.Popen(
        # the command line is where the titles of all forks must have room
        [sys.executable, "-m", __name__, str(path), " " * 4000],
        env=environment,
        cwd=Path(__file__).parents[2],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        preexec_fn=functools.partial(_begin_server, owner),
    )
    atexit.register(process.terminate)
    while not path.exists() and process.poll() is None:
        time.sleep(0.02)
    return str(path), _read_early(environment)


class _Server(ForkServer):
    def _may_fork(self, request: Mapping[str, Any]) -> bool:
        env = {name: request["env"][name] for name in request["env"] if name != _PATH}
        own = {_PATH: os.environ[_PATH]} if _PATH in os.environ else {}
        return super()._may_fork({**request, "env": env | own})


def _serve(path: str) -> None:
    server = _Server(path, ["sleep", "infinity"])
    # a new process has neither
    del sys.path[0], os.environ["RAY_RAYLET_PID"], server._environment["RAY_RAYLET_PID"]
    server.load(_MODULES)
    assert "ray" not in sys.modules
    request = server.serve()
    del server
    tempfile.tempdir = None  # of the environment that follows
    run_script = preloaded._run_script

    def run_driver(argv: list[str]) -> None:
        preloaded._run_script = run_script  # for the forks of the preloaded process
        add_to_path(os.environ.get(_PATH, ""))
        if "SLIME_TEST_READS" in os.environ:  # `tests/support/recorded_reads`
            sys.modules.pop("sitecustomize", None)
            importlib.import_module("sitecustomize")
        name = argv[3:4] if argv[1] in ("-m", "-Pm") else [os.path.basename(argv[1])]
        if _DRIVERS.intersection(name):
            fork_guard()
        elif "serve" in name and "FAKE_SGLANG_CALLS" in os.environ:
            preload_stand_in()
        run_script(argv)

    preloaded._run_script = run_driver
    preloaded._run(request)


if __name__ == "__main__":
    _serve(sys.argv[1])
