"""`slime serve`: who is answered, on which routes, what it prints, and what it leaves behind."""

from __future__ import annotations

import asyncio
import http.client
import json
import os
import re
import signal
import sys
import tempfile
from argparse import Namespace
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from slime.cli.serve import _key, remove_logs_of_the_dead
from slime.engines.keys import VARIABLE
from slime.errors import UserError
from slime.http_access import AsgiGuard, EngineAccess, foreign, is_inference
from slime.processes import preloaded
from tests.support.embedded_models import save_tiny_model
from tests.support.forks import fork_or_start, socket_of_forks
from tests.support.processes import wait_until
from tests.support.sglang_servers import fake_environment

_DEADLINE = 120.0
CONTROL = [
    *(
        "/release_memory_occupation",
        "/pause_generation",
        "/abort_request",
        "/update_weight_version",
        "/flush_cache",
    ),
    *(
        "/update_weights_from_disk",
        "/init_weights_update_group",
        "/update_weights_from_tensor",
        "/weights_checker",
    ),
    *("/get_weights_by_name", "/resume_memory_occupation", "/set_internal_state", "/no_such_route"),
]


class Serving:
    """`slime serve` behind a pipe."""

    def __init__(self, model: Path, folder: Path, *flags: str, **environ: str) -> None:
        command = [sys.executable, "-m", "slime", "serve", str(model), "--port", "0", *flags]
        env = {**os.environ, "TMPDIR": str(folder), preloaded.VARIABLE: socket_of_forks()}
        env.pop(VARIABLE, None)
        reader, writer = os.pipe()
        with open(os.devnull) as nothing:
            stdio = nothing.fileno(), writer, writer
            self.process = fork_or_start(command, stdio, env | environ)
        os.close(writer)
        self.output = os.fdopen(reader)
        self.first = self.output.readline()
        self.text = self.first
        while "print(answer" not in self.text:
            line = self.output.readline()
            assert line, self.text
            self.text += line
        found = re.search(r"http://127\.0\.0\.1:(\d+)", self.first)
        assert found is not None, self.text
        self.port = int(found[1])
        self.key = self.text.partition(f"export {VARIABLE}=")[2].split("\n")[0]

    def ask(self, path: str, body: Any = None, **headers: str) -> int:
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=60)
        sent = {
            "Content-Type": "application/json",
            **{k.replace("_", "-"): v for k, v in headers.items()},
        }
        try:
            connection.request(
                "GET" if body is None else "POST", path, body and json.dumps(body), sent
            )
            return connection.getresponse().status
        finally:
            connection.close()

    def end(self, number: int) -> int:
        self.process.send_signal(number)
        status = self.process.wait(_DEADLINE)
        self.output.close()
        return status


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_model(tmp_path_factory.mktemp("models") / "tiny", "qwen3")


@pytest.fixture(params=["embedded", "sglang"])
def server(request: pytest.FixtureRequest, model: Path, tmp_path: Path) -> Iterator[Serving]:
    environ = fake_environment(tmp_path / "calls") if request.param == "sglang" else {}
    serving = Serving(model, tmp_path, "--engine", request.param, **environ)
    yield serving
    if serving.process.poll() is None:
        serving.end(signal.SIGTERM)


ASK = {"input_ids": [1, 2], "sampling_params": {"max_new_tokens": 1}}


def test_it_is_closed_but_for_generation_with_the_key(
    server: Serving, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its address comes through a pipe before the model is loaded; a kill leaves a folder, until
    the next start."""
    assert (
        server.first.startswith("loading tiny")
        and server.text.count(server.key) == 1
        and len(server.key) > 30
    )
    bearer = {"Authorization": f"Bearer {server.key}"}
    assert (
        server.ask("/generate", ASK, **bearer) == 200 and server.ask("/v1/models", **bearer) == 200
    )
    for path in ("/generate", "/v1/models", "/v1/chat/completions", "/server_info"):
        assert server.ask(path, ASK) == 401 == server.ask(path, ASK, Authorization="Bearer wrong")
    assert [
        path for path in CONTROL if server.ask(path, {"model_path": "x"}, **bearer) != 403
    ] == []
    assert server.ask("/flush_cache", **bearer) == 403, "by GET as well"
    assert server.ask("/health") == 200
    for headers in (
        {"Host": "evil.example"},
        {"Origin": "https://evil.example"},
        {"Origin": "null"},
    ):
        assert server.ask("/generate", ASK, **bearer, **headers) == 403
    assert (
        server.ask("/generate", ASK, **bearer, Host="localhost:1", Origin="http://localhost:3000")
        == 200
    )
    assert server.end(signal.SIGKILL) == -signal.SIGKILL
    left = list(tmp_path.glob("slime-serve-*"))
    assert len(left) == 1
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))

    def is_removed() -> bool:
        remove_logs_of_the_dead()
        return not left[0].exists()

    wait_until(is_removed, "its engine ends with it, and its folder is removed")


def test_what_is_asked_for_is_open(model: Path, tmp_path: Path) -> None:
    serving = Serving(model, tmp_path, "--engine", "embedded", "--no-api-key", "--control-routes")
    try:
        assert serving.key == "" and "Authorization" not in serving.text
        assert serving.ask("/generate", ASK) == 200 == serving.ask("/flush_cache", {})
        assert serving.ask("/flush_cache", {}, Origin="https://evil.example") == 403
        assert serving.ask("/flush_cache", Sec_Fetch_Site="cross-site") == 403
        assert serving.ask("/flush_cache", {}, Host="evil.example") == 403
    finally:
        assert serving.end(signal.SIGTERM) == 0 and not list(tmp_path.glob("slime-serve-*"))


def flags(**given: Any) -> Namespace:
    return Namespace(**{"api_key": None, "no_api_key": False, "host": "127.0.0.1", **given})


def test_which_key(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(VARIABLE, raising=False)
    assert _key(flags()) != _key(flags()) and _key(flags()).startswith("sk-slime-")
    assert _key(flags(no_api_key=True)) == _key(flags(no_api_key=True, host="::1")) == ""
    with pytest.raises(UserError, match=r"--no-api-key does not go with --host 0\.0\.0\.0"):
        _key(flags(no_api_key=True, host="0.0.0.0"))
    for wrong in ("", "short", "has a blank", "nön-ascii-key"):
        with pytest.raises(UserError, match="--api-key is no key"):
            _key(flags(api_key=wrong))
    monkeypatch.setenv(VARIABLE, "of-the-environment")
    assert (
        _key(flags()) == "of-the-environment"
        and _key(flags(api_key="of-the-flag")) == "of-the-flag"
    )


@pytest.mark.parametrize(
    ("headers", "on_loopback", "refused"),
    [
        ({"Host": "127.0.0.1:1"}, True, False),
        ({"Host": "[::1]:1", "Origin": "http://[::1]:1"}, True, False),
        ({"Host": "evil.example"}, True, True),
        ({}, True, True),
        ({"Host": "gpu7:1"}, False, False),
        ({"Host": "gpu7:1", "Origin": "http://gpu7:1"}, False, False),
        ({"Host": "gpu7:1", "Origin": "http://gpu7:2"}, False, True),
        ({"Host": "127.0.0.1:1", "Origin": "null"}, True, True),
        ({"Host": "127.0.0.1:1", "Origin": "http://[broken"}, True, True),
        ({"Host": "127.0.0.1:1", "Origin": "http://127.0.0.1.evil.example"}, True, True),
        (
            {"Host": "127.0.0.1:1", "Sec-Fetch-Site": "cross-site", "Sec-Fetch-Mode": "no-cors"},
            True,
            True,
        ),
        (
            {"Host": "127.0.0.1:1", "Sec-Fetch-Site": "cross-site", "Sec-Fetch-Mode": "navigate"},
            True,
            False,
        ),
        ({"Host": "127.0.0.1:1", "Sec-Fetch-Site": "same-origin"}, True, False),
    ],
)
def test_pages_of_elsewhere(headers: dict[str, str], on_loopback: bool, refused: bool) -> None:
    assert bool(foreign(headers, on_loopback=on_loopback)) == refused


def test_the_guard_of_sglang() -> None:
    """Before any ASGI application; what is no request passes."""
    passed: list[str] = []
    sent: list[dict[str, Any]] = []

    async def app(scope: dict[str, Any], receive: Any, send: Any) -> None:
        passed.append(scope.get("path", scope["type"]))

    async def send(message: dict[str, Any]) -> None:
        sent.append(message)

    guard = AsgiGuard(app, EngineAccess(on_loopback=True, inference_only=True))

    def ask(path: str, *headers: tuple[bytes, bytes], kind: str = "http") -> None:
        scope = {"type": kind, "path": path, "headers": [(b"host", b"127.0.0.1:1"), *headers]}
        asyncio.run(guard(scope, None, send))

    ask("/generate")
    ask("/flush_cache")
    ask("/generate", (b"origin", b"https://evil.example"))
    ask("/generate", (b"origin", b"https://evil.example"), kind="websocket")
    asyncio.run(guard({"type": "lifespan"}, None, send))
    assert passed == ["/generate", "lifespan"]
    assert [message.get("status", message.get("code")) for message in sent] == [
        403,
        None,
        403,
        None,
        1008,
    ]
    assert b"slime serve --control-routes" in sent[1]["body"]


def test_no_route_that_changes_something_counts_as_inference() -> None:
    assert not any(is_inference(path) for path in CONTROL)
    assert not is_inference("/v1/models_reload") and not is_inference("/generate/../flush_cache")


def test_logs_of_live_servers_stay(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    import fcntl

    live, dead = tmp_path / "slime-serve-live", tmp_path / "slime-serve-dead"
    live.mkdir()
    dead.mkdir()
    lock = os.open(live, os.O_RDONLY)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX)
        remove_logs_of_the_dead()
        assert live.exists() and not dead.exists()
    finally:
        os.close(lock)
