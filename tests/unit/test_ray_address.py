"""An address at which no Ray answers is refused in one message, before anything starts."""

from __future__ import annotations

import http.server
import socket
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress

import grpc
import pytest

from slime.config import make_config
from slime.errors import UserError
from slime.run import preflight

Answer = Callable[[socket.socket], None]


@contextmanager
def listener(answer: Answer) -> Iterator[str]:
    """The address of somebody who takes every connection and answers it."""
    with socket.create_server(("127.0.0.1", 0)) as server:

        def serve() -> None:
            while True:
                connection, _ = server.accept()
                with connection:
                    if (first := connection.recv(1024)) == b"the end":
                        return
                    if first:  # the first connection only asks whether somebody is there
                        answer(connection)

        thread = threading.Thread(target=serve)
        thread.start()
        yield f"127.0.0.1:{server.getsockname()[1]}"
        with socket.create_connection(server.getsockname()) as connection:
            connection.sendall(b"the end")
        thread.join()


def silent(connection: socket.socket) -> None:
    # gRPC has had enough after half a second, and keeps the connection for twenty
    connection.settimeout(2.0)
    with suppress(TimeoutError):
        while connection.recv(1024):
            pass


def gateway(connection: socket.socket) -> None:
    """Speaks HTTP/2, and has nobody behind it: its settings, and no more."""
    connection.sendall(bytes.fromhex("000006 04 00 00000000 0003 00000064".replace(" ", "")))
    silent(connection)


@contextmanager
def grpc_server(answer: Callable[[bytes, grpc.ServicerContext], bytes] | None) -> Iterator[str]:
    """The address of a server that gives this answer to what Ray's health check asks; None: it is
    another one."""
    server = grpc.server(ThreadPoolExecutor(1))
    if answer is not None:
        handlers = {"CheckAlive": grpc.unary_unary_rpc_method_handler(answer)}
        server.add_generic_rpc_handlers(
            [grpc.method_handlers_generic_handler("ray.rpc.NodeInfoGcsService", handlers)]
        )
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    yield f"127.0.0.1:{port}"
    server.stop(None).wait()


def refused(address: str) -> UserError:
    with pytest.raises(UserError, match="no Ray cluster answers at") as caught:
        preflight.check_slots(make_config(ray_address=address))
    return caught.value


@pytest.mark.parametrize("answer", [silent, gateway])
def test_somebody_who_says_nothing_of_rays(answer: Answer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("slime.deadlines.PREFLIGHT_CONNECT", 0.5)
    with listener(answer) as address:
        assert "somebody listens there" in refused(address).why


def test_rays_dashboard_is_not_its_gcs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("slime.deadlines.PREFLIGHT_CONNECT", 0.5)
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


def _wants_token(request: bytes, context: grpc.ServicerContext) -> bytes:
    context.abort(grpc.StatusCode.UNAUTHENTICATED, "no token")


@pytest.mark.parametrize("answer", [lambda request, context: b"", _wants_token])
def test_ray_without_its_proxy(
    answer: Callable[..., bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:9")
    with grpc_server(answer) as address:
        preflight.check_slots(make_config(ray_address=address))


def test_a_grpc_server_of_something_else() -> None:
    with grpc_server(None) as address:
        assert "dashboard" in refused(address).fix
