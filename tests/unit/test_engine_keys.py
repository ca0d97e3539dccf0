"""The key of a run: who is sent it, who is let in with it, and that it does not show itself."""

from __future__ import annotations

import asyncio
import copy
import os
import pickle
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from aiohttp import ClientSession, web
from aiohttp.test_utils import TestServer

from slime.cluster import engine_fit
from slime.engines import keys
from slime.engines.api import EngineClient, EngineError
from slime.engines.keys import NO_KEY, VARIABLE, Key, RunKeys, admits, key_of
from slime.engines.router import list_workers, register_workers, router_flags
from slime.errors import UserError
from slime.weights.transport import EngineSlots
from tests.support.router_server import router_process, wait_healthy
from tests.support.sglang_servers import fake_environment

OWN, EXTERNAL = "http://10.0.0.1:1", "http://10.0.0.2:2"


@pytest.fixture(autouse=True)
def run() -> Iterator[RunKeys]:
    """A run's keys, in this process alone and for this test alone."""
    yield keys.set_run_keys(RunKeys(Key("of-the-run"), Key("of-others")))
    keys.set_run_keys(RunKeys(Key(), Key()))
    keys._key_of.clear()
    keys._external.clear()


def test_each_run_makes_its_own_and_reads_that_of_others(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(VARIABLE, raising=False)
    one, other = RunKeys.new(), RunKeys.new()
    assert one.own != other.own and len(one.own) >= 43 and one.external == ""
    monkeypatch.setenv(VARIABLE, "somebody's")
    assert RunKeys.new().external == "somebody's"


def test_the_key_of_others_is_read_when_it_is_needed(monkeypatch: pytest.MonkeyPatch) -> None:
    """A process that was forked from one that had imported the module has another environment."""
    monkeypatch.setattr(keys, "_run", None)
    monkeypatch.setenv(VARIABLE, "somebody's")
    keys.register_external("http://other:1")
    keys.register_own("http://own:1")
    assert (key_of("http://other:1"), key_of("http://own:1")) == ("somebody's", "")


def test_a_server_takes_it_out_of_its_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(VARIABLE, "abc")
    assert keys.take_from_environment() == "abc" and keys.take_from_environment() == ""


def test_it_does_not_show_itself(run: RunKeys) -> None:
    for holder in (run, EngineSlots(OWN, (), key=run.own), [run.own], {"api_key": run.own}):
        assert "of-the-run" not in repr(holder)
    for again in (pickle.loads(pickle.dumps(run)), copy.deepcopy(run)):
        assert again == run and "of-the-run" not in repr(again)
    assert f"Bearer {run.own}" == "Bearer of-the-run"


def test_a_key_goes_to_the_url_that_it_belongs_to() -> None:
    keys.register_own(f"{OWN}/")
    keys.register_external(EXTERNAL)
    assert (key_of(OWN), key_of(f"{EXTERNAL}/")) == ("of-the-run", "of-others")
    assert key_of("http://10.0.0.1:3") == "", "a judge on the same host"
    assert not keys.is_external(OWN) and keys.is_external(EXTERNAL)
    keys.register_own(EXTERNAL)  # the port is another server's now
    assert key_of(EXTERNAL) == "of-the-run" and not keys.is_external(EXTERNAL)


@pytest.mark.parametrize(
    ("method", "path", "header", "admitted"),
    [
        ("POST", "/generate", "Bearer abc", True),
        ("POST", "/generate", "bearer abc", True),
        ("POST", "/generate", "", False),
        ("POST", "/generate", "abc", False),
        ("POST", "/generate", "Basic abc", False),
        ("POST", "/generate", "Bearer ab", False),
        ("POST", "/generate", "Bearer abcd", False),
        ("POST", "/generate", "Bearer \udce9", False),
        ("POST", "/update_weights_from_tensor", "", False),
        ("GET", "/server_info", "", False),
        ("GET", "/v1/../health", "", False),
        ("GET", "/health", "", True),
        ("GET", "/health_generate", "", True),
        ("GET", "/metrics", "", True),
        ("OPTIONS", "/generate", "", True),
    ],
)
def test_who_is_let_in(method: str, path: str, header: str, admitted: bool) -> None:
    """The routes are those of SGLang with --api-key."""
    assert admits("abc", method, path, header) is admitted
    assert admits("", method, path, header), "a server without a key answers everybody"


class Guarded:
    """A server that wants ``key``, and notes which one each request brought."""

    def __init__(self, key: str = "") -> None:
        self.key = key
        self.brought: list[tuple[str, str]] = []

    async def __aenter__(self) -> Guarded:
        app = web.Application()
        app.router.add_route("*", "/{path:.*}", self._answer)
        self._server = TestServer(app)
        await self._server.start_server()
        self.url = str(self._server.make_url("")).rstrip("/")
        return self

    async def __aexit__(self, *exc: object) -> None:
        await self._server.close()

    async def _answer(self, request: web.Request) -> web.Response:
        header = request.headers.get("Authorization", "")
        self.brought.append((request.path, header))
        if not admits(self.key, request.method, request.path, header):
            return web.json_response({"error": "Unauthorized"}, status=401)
        return web.json_response(
            {"model_path": "m", "served_model_name": "m", "dp_size": 1, "tp_size": 1, "text": ""}
        )

    def keys(self, path: str) -> set[str]:
        return {header for at, header in self.brought if at == path}


def test_the_client_brings_it_and_says_when_it_is_refused() -> None:
    async def ask() -> None:
        async with Guarded("of-the-run") as server, EngineClient(server.url) as client:
            with pytest.raises(
                EngineError, match="asks for a key, and none is known: /generate answered 401"
            ):
                await client.post("/generate")
            keys.register_external(server.url)
            with pytest.raises(
                EngineError, match="refuses the run's key: /generate answered 401"
            ) as caught:
                await client.post("/generate")
            assert caught.value.status == 401
            keys.register_own(server.url)
            await client.post("/generate")
            await client.request(
                "POST", "/health", {}, headers={"Authorization": "Bearer the caller's"}
            )
            assert server.keys("/health") == {"Bearer the caller's"}

    asyncio.run(ask())


def test_an_sglang_server_gets_it_and_does_not_log_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, sglang_stand_in: None
) -> None:
    """Read from the environment; nothing of it is on a command line."""
    script = tmp_path / "sglang_arguments.py"
    script.write_text(
        "import logging, sys\n"
        "from slime.engines.sglang import engine_process\n"
        "def launched(name, **how):\n"
        "    from sglang.srt.server_args import prepare_server_args\n"
        "    found = prepare_server_args(['--model-path', 'm'])\n"
        "    logging.basicConfig(level=logging.INFO, stream=sys.stdout)\n"
        "    logging.info(f'{found=}')\n"
        "    logging.info('%s, %s', found.api_key, 1)\n"
        "    print(type(found.api_key).__name__, found.api_key == 'of-the-run', name)\n"
        "engine_process.runpy.run_module = launched\n"
        "engine_process.main()\n"
    )
    environment = {**os.environ, **fake_environment(tmp_path / "calls"), VARIABLE: "of-the-run"}
    said = subprocess.run(
        [sys.executable, script], env=environment, capture_output=True, text=True, check=True
    ).stdout
    assert said.splitlines()[-1] == "str True sglang.launch_server"
    assert said.count("•••") == 2 and "of-the-run" not in said


def test_an_engine_of_others_that_asks_for_another_key() -> None:
    async def ask() -> None:
        async with Guarded("another") as server:
            keys.register_external(server.url)
            with pytest.raises(
                UserError, match=f"the engine at {server.url} requires another key"
            ) as caught:
                await asyncio.to_thread(engine_fit.fetch_engine_info, server.url)
            assert VARIABLE in caught.value.fix and "of-others" not in str(caught.value)

    asyncio.run(ask())


@pytest.mark.parametrize("external_key", ["of-others", ""])
def test_the_router_brings_each_engine_its_own(run: RunKeys, external_key: str) -> None:
    """And never the run's to an engine that somebody else has started, whether that asks for a key
    or not."""
    keys.set_run_keys(RunKeys(run.own, Key(external_key)))

    async def ask(url: str) -> None:
        async with (
            Guarded("of-the-run") as own,
            Guarded(external_key) as external,
            EngineClient(url) as router,
        ):
            keys.register_own(url, own.url)
            keys.register_external(external.url)
            await wait_healthy(router)
            await register_workers(url, [own.url, external.url], timeout=30)
            for _ in range(4):
                await router.post("/generate", {"text": "x", "sampling_params": {}})
            keys._key_of = {url: run.own}  # as in a process that knows the router alone
            keys._external.clear()
            workers = {worker.url: worker.is_external for worker in await list_workers(router)}
            assert workers == {own.url: False, external.url: True}
            assert (key_of(own.url), key_of(external.url)) == ("of-the-run", external_key)
            assert own.keys("/generate") == {"Bearer of-the-run"}
            assert external.keys("/generate") == {f"Bearer {external_key or NO_KEY}"}
            assert not any("of-the-run" in header for _, header in external.brought)

    with router_process("round_robin", key="of-the-run") as url:
        asyncio.run(ask(url))


def test_a_router_is_started_with_the_runs_own_engines_alone() -> None:
    """Those on its command line get its own key."""
    urls = [OWN, "http://10.0.0.1:2", EXTERNAL]
    keys.register_external(EXTERNAL)
    flags: dict[str, Any] = router_flags("power_of_two", urls)
    assert flags["worker_urls"] == urls[:2]
    assert router_flags("power_of_two", urls[1:]) == {"policy": "round_robin"}


def test_the_router_tells_nobody_without_the_key_what_the_model_is_called(run: RunKeys) -> None:
    """Its ``/v1/models`` is open, whatever it is told: but the name that it has is none of the
    model's."""

    async def ask(url: str) -> None:
        async with Guarded("of-the-run") as own, EngineClient(url) as router:
            keys.register_own(url, own.url)
            await wait_healthy(router)
            await register_workers(url, [own.url], timeout=30)
            async with ClientSession() as stranger, stranger.get(f"{url}/v1/models") as answer:
                assert [
                    model["id"] for model in (await answer.json(content_type=None))["data"]
                ] == ["policy"]
            chat = [{"role": "user", "content": "Hi"}]
            said = await router.post("/v1/chat/completions", {"model": "m", "messages": chat})
            assert said["served_model_name"] == "m", "requests name the model as they like"

    with router_process("round_robin", key="of-the-run") as url:
        asyncio.run(ask(url))
