"""The process that forks what would otherwise import everything again."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest

from slime.processes import preloaded
from tests.support.processes import wait_until

_SAYS = """
import json, os, random, signal, sys
print(json.dumps({
    "argv": sys.argv, "path": sys.path[0], "cwd": os.getcwd(), "mark": os.environ.get("MARK"),
    "main": __name__, "session": os.getsid(0) == os.getpid(), "random": random.random(),
    "mask": sorted(signal.pthread_sigmask(signal.SIG_BLOCK, [])),
    "term": signal.getsignal(signal.SIGTERM) is signal.SIG_DFL,
    "loaded": "decimal" in sys.modules, "open": sorted(map(int, os.listdir("/proc/self/fd")))[:-1],
}))
print("an error", file=sys.stderr)
sys.exit(int(os.environ.get("STATUS", 0)))
"""
_WAITS = "import time\nprint('here', flush=True)\ntime.sleep(600)\n"
Serve = Callable[..., subprocess.Popen[bytes]]


@pytest.fixture
def serve(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Serve]:
    """``serve(modules, command)``: a server; this process then asks it."""
    started: list[subprocess.Popen[bytes]] = []
    path = tmp_path / "fork"

    def start(
        modules: str = "decimal", command: tuple[str, ...] = ("sleep", "600")
    ) -> subprocess.Popen[bytes]:
        script = [sys.executable, preloaded.__file__, str(path), *command]
        environment = {**os.environ, preloaded.MODULES: modules}
        started.append(subprocess.Popen(script, env=environment))
        wait_until(path.exists, "the server listens")
        monkeypatch.setenv(preloaded.VARIABLE, str(path))
        # what the server has without being asked
        monkeypatch.setenv("RAY_RAYLET_PID", str(child_of(started[-1]).pid))
        return started[-1]

    yield start
    for process in started:
        process.kill()
        process.wait()


def child_of(server: subprocess.Popen[bytes]) -> psutil.Process:
    wait_until(lambda: bool(psutil.Process(server.pid).children()), "its command runs")
    return psutil.Process(server.pid).children()[0]


def fork(
    tmp_path: Path, code: str, *argv: str, **environment: str
) -> tuple[preloaded.ForkedProcess, Path]:
    script = tmp_path / "script.py"
    script.write_text(code)
    output = tmp_path / "output"
    with open(output, "ab") as file:
        command = [sys.executable, str(script), *argv]
        return (
            preloaded.ForkedProcess(command, {**os.environ, **environment}, file.fileno()),
            output,
        )


def test_a_fork_is_as_a_new_process(
    serve: Serve, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    serve()
    monkeypatch.chdir(tmp_path)
    process, output = fork(tmp_path, _SAYS, "a word", MARK="mine", STATUS="3")
    assert process.wait(30) == process.poll() == process.returncode == 3
    first, error = output.read_text().splitlines()
    said = json.loads(first)
    drawn = said.pop("random")
    assert said == {
        "argv": [str(tmp_path / "script.py"), "a word"],
        "path": str(tmp_path),
        "cwd": str(tmp_path),
        "mark": "mine",
        "main": "__main__",
        "session": True,
        "mask": [],
        "term": True,
        "loaded": True,
        "open": [0, 1, 2],
    }
    assert error == "an error"
    process, _ = fork(tmp_path, _SAYS)
    assert process.wait(30) == 0
    assert json.loads(output.read_text().splitlines()[2])["random"] != drawn


def test_a_fork_is_waited_for_and_killed_as_a_child(serve: Serve, tmp_path: Path) -> None:
    serve()
    process, output = fork(tmp_path, _WAITS)
    wait_until(lambda: output.read_text() == "here\n", "it runs")
    assert process.poll() is None
    with pytest.raises(subprocess.TimeoutExpired):
        process.wait(0.01)
    os.killpg(process.pid, signal.SIGTERM)
    assert process.wait(30) == -signal.SIGTERM


def test_a_fork_ends_with_whoever_asked_for_it(serve: Serve, tmp_path: Path) -> None:
    server = serve()
    process, output = fork(tmp_path, _WAITS)
    wait_until(lambda: output.read_text() == "here\n", "it runs")
    process._server.close()  # as the kernel does when this process ends
    wait_until(lambda: not psutil.pid_exists(process.pid), "it is killed")
    assert server.poll() is None


def test_without_the_server_everything_ends(serve: Serve, tmp_path: Path) -> None:
    server = serve()
    command = child_of(server)
    process, output = fork(tmp_path, _WAITS)
    wait_until(lambda: output.read_text() == "here\n", "it runs")
    server.kill()
    assert process.wait(30) == -signal.SIGKILL
    wait_until(
        lambda: not any(psutil.pid_exists(pid) for pid in (process.pid, command.pid)), "both end"
    )
    with pytest.raises(OSError):
        fork(tmp_path, _SAYS)


@pytest.mark.parametrize(
    ("code", "status"), [("exit 5", 5), ("kill -9 $$", 128 + signal.SIGKILL)], ids=["exit", "kill"]
)
def test_the_server_ends_with_its_command(serve: Serve, code: str, status: int) -> None:
    assert serve(command=("sh", "-c", f"sleep 0.5; {code}")).wait(30) == status


def test_the_command_gets_sigterm(serve: Serve) -> None:
    server = serve()
    server.terminate()
    assert server.wait(30) == 128 + signal.SIGTERM


@pytest.mark.parametrize("variable", ["LD_PRELOAD", "PYTHONHASHSEED", "RAY_JOB_ID"])
def test_a_variable_that_is_read_once_needs_a_new_process(
    variable: str, serve: Serve, tmp_path: Path
) -> None:
    serve()
    with pytest.raises(OSError):
        fork(tmp_path, _SAYS, **{variable: "7"})


@pytest.mark.parametrize("error", ["ImportError('not here')", "OSError('libnccl.so')"])
def test_a_module_that_cannot_be_imported_is_left_to_those_who_need_it(
    serve: Serve, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: str
) -> None:
    (tmp_path / "absent.py").write_text(f"raise {error}\n")
    monkeypatch.setenv("PYTHONPATH", f"{os.environ.get('PYTHONPATH', '')}:{tmp_path}")
    serve("absent,decimal")
    process, output = fork(tmp_path, _SAYS)
    assert process.wait(30) == 0
    assert json.loads(output.read_text().splitlines()[0])["loaded"]


def test_a_server_with_two_threads_forks_nothing(
    serve: Serve, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "threaded.py").write_text(
        "import threading\nthreading.Thread(target=threading.Event().wait, daemon=True).start()\n"
    )
    monkeypatch.setenv("PYTHONPATH", f"{os.environ.get('PYTHONPATH', '')}:{tmp_path}")
    serve("threaded")
    with pytest.raises(OSError):
        fork(tmp_path, _SAYS)


@pytest.mark.parametrize("is_served", [True, False])
def test_a_worker_of_ray_starts_with_and_without_a_server(
    is_served: bool, serve: Serve, tmp_path: Path
) -> None:
    """The client leaves out what Ray's own script would, or runs that script."""
    path = tmp_path / ("fork" if is_served else "nothing")
    if is_served:
        serve()
    setup = tmp_path / "setup_worker.py"
    setup.write_text("import runpy, sys\ndel sys.argv[0]\nrunpy.run_path(sys.argv[0])\n")
    worker = tmp_path / "worker.py"
    worker.write_text("import sys\nprint(sys.argv[1:], 'decimal' in sys.modules)\n")
    client = [sys.executable, "-S", "-E", preloaded.__file__, "--worker", str(path)]
    command = [sys.executable, str(setup), str(worker), "--id=1", "--language=PYTHON"]
    with open(tmp_path / "said", "wb") as said:
        subprocess.run([*client, *command], stdout=said, check=True, timeout=30)
    wait_until(lambda: bool((tmp_path / "said").read_text()), "it has run")
    assert (tmp_path / "said").read_text() == f"['--id=1'] {is_served}\n"


def test_the_socket_is_for_its_owner_alone(serve: Serve, tmp_path: Path) -> None:
    serve()
    assert (tmp_path / "fork").stat().st_mode & 0o777 == 0o600


def test_a_client_that_says_nonsense_leaves_the_server_alone(serve: Serve, tmp_path: Path) -> None:
    serve()
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as client:
        client.connect(str(tmp_path / "fork"))
        client.send(b"nonsense")
        assert client.recv(64) == b""
    process, _ = fork(tmp_path, _SAYS)
    assert process.wait(30) == 0
