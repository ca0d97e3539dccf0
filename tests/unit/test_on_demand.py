"""A server that is started by its first client, which it then answers."""

from __future__ import annotations

import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from slime.processes import on_demand
from slime.processes.host import reserve_port
from tests.support.processes import PATIENCE, is_running, wait_until

#: Says that it runs, takes one client on the port that it is told, and answers another one beside.
_SERVER = """
import pathlib, socket, sys
pathlib.Path(sys.argv[2]).touch()
other = socket.socket()
other.bind(("127.0.0.1", 0))
own = socket.socket()
own.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
own.bind(("127.0.0.1", int(sys.argv[1])))
own.listen()
own.accept()[0].sendall(f"{other.getsockname()[1] != own.getsockname()[1]} {sys.argv[1:]}".encode())
"""


@pytest.fixture
def waiting(tmp_path: Path) -> Iterator[tuple[subprocess.Popen[bytes], int, Path]]:
    """A process that waits for its client; its port; the file that the server makes."""
    (tmp_path / "server.py").write_text(_SERVER)
    marker = tmp_path / "runs"
    reserved = reserve_port("127.0.0.1")
    server = [sys.executable, "-u", str(tmp_path / "server.py"), str(reserved.port), str(marker)]
    place = [on_demand.__file__, "127.0.0.1", str(reserved.port), "0.1"]
    process = subprocess.Popen([sys.executable, "-S", "-E", *place, *server])
    yield process, reserved.port, marker
    process.kill()
    process.wait()


def connect(port: int) -> socket.socket | None:
    client = socket.socket()
    client.settimeout(PATIENCE)
    if client.connect_ex(("127.0.0.1", port)) == 0:
        return client
    client.close()
    return None


def test_the_first_client_is_answered_by_the_server(
    waiting: tuple[subprocess.Popen[bytes], int, Path],
) -> None:
    process, port, marker = waiting
    client = wait_until(lambda: connect(port), "it listens")
    assert client.recv(1000).decode() == f"True {[str(port), str(marker)]}"
    assert process.wait(PATIENCE) == 0 and marker.exists()


def test_without_one_it_ends_with_its_parent(tmp_path: Path) -> None:
    reserved, marker = reserve_port("127.0.0.1"), tmp_path / "runs"
    (tmp_path / "server.py").write_text(_SERVER)
    words = [on_demand.__file__, "127.0.0.1", str(reserved.port), "0.1"]
    code = (
        "import subprocess, sys; words = [sys.executable, *sys.argv[1:]];"
        "print(subprocess.Popen(words, stdout=2).pid, flush=True); sys.stdin.read()"
    )
    command = [sys.executable, "-S", "-c", code, "-S", "-E", *words, sys.executable, "server.py"]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    with subprocess.Popen(command, cwd=tmp_path, text=True, **pipes) as parent:
        assert parent.stdout is not None
        waiting = psutil.Process(int(parent.stdout.readline()))
        wait_until(lambda: waiting.net_connections("inet"), "it listens", 60)
    wait_until(lambda: not is_running(waiting), "it has ended", 60)
    assert not marker.exists()
