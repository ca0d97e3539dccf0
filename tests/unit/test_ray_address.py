"""An address at which no Ray answers is refused in one message, before anything starts."""

from __future__ import annotations

import http.server
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest

from slime import preflight
from slime.config import make_config
from slime.errors import UserError

Answer = Callable[[socket.socket], None]


@contextmanager
def listener(answer: Answer) -> Iterator[str]:
    """The address of somebody who takes one connection and answers it."""
    with socket.create_server(("127.0.0.1", 0)) as server:

        def serve() -> None:
            connection, _ = server.accept()
            with connection:
                answer(connection)

        thread = threading.Thread(target=serve)
        thread.start()
        yield f"127.0.0.1:{server.getsockname()[1]}"
        thread.join()


def silent(connection: socket.socket) -> None:
    assert connection.recv(1024).startswith(b"PRI * HTTP/2.0")
    assert connection.recv(1024) == b""  # until the other side has had enough


def grpc(connection: socket.socket) -> None:
    connection.recv(1024)
    connection.sendall(bytes.fromhex("000006 04 00 00000000 0003 00000064".replace(" ", "")))


def refused(address: str) -> UserError:
    with pytest.raises(UserError, match="no Ray cluster answers at") as caught:
        preflight.check_slots(make_config(ray_address=address))
    return caught.value


def test_somebody_who_says_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(preflight, "_CONNECT_SECONDS", 0.2)
    with listener(silent) as address:
        assert "somebody listens there" in refused(address).why


def test_rays_dashboard_is_not_its_gcs() -> None:
    with http.server.HTTPServer(("127.0.0.1", 0), http.server.BaseHTTPRequestHandler) as server:
        thread = threading.Thread(target=server.handle_request)
        thread.start()
        error = refused(f"127.0.0.1:{server.server_port}")
        thread.join()
    assert "dashboard" in error.fix


def test_nobody() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    assert "Connection refused" in refused(f"127.0.0.1:{port}").why


def test_a_grpc_server_may_be_ray(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:9")
    with listener(grpc) as address:
        preflight.check_slots(make_config(ray_address=address))
