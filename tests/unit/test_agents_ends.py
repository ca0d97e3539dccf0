"""How agents and their requests end, and where their endpoints listen."""

from __future__ import annotations

import asyncio
import copy
import socket
from collections.abc import Callable
from typing import Any

import aiohttp
import anthropic
import openai
import psutil
import pytest

from benchmarks.agent_clients import anthropic_of, openai_of
from slime.agents.endpoint import AgentEndpoint, RolloutEnds, agent_endpoint
from slime.agents.server import close_server
from slime.engines.api import EngineError, GenerateResult
from slime.errors import UserError
from slime.rollout.generate import bind_state
from slime.rollout.trajectory import GroupRun, GroupRunner
from slime.samples.types import Sample, SampleStatus
from tests.support.agents import Model, Play


@pytest.mark.parametrize("stream", [False, True])
def test_a_client_that_vanishes_ends_its_request(stream: bool) -> None:
    play = Play(["a<|im_end|>", "b<|im_end|>"])

    async def talk(endpoint: AgentEndpoint) -> None:
        play.model.held = asyncio.Event()
        async with openai_of(endpoint, max_retries=0) as client:
            asking = asyncio.create_task(
                client.responses.create(model="m", input="Hi", stream=stream)
            )
            while not play.model.asked:
                await asyncio.sleep(0)
            asking.cancel()
            while not play.model.cancelled:
                await asyncio.sleep(0.001)
            play.model.held = None
            await client.responses.create(model="m", input="Hi again")

    (sample,) = play.run(talk).samples()
    assert play.text(play.trained(sample)) == "b<|im_end|>"


def test_a_stream_pings_until_there_is_an_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("slime.deadlines.ENDPOINT_STREAM_PING", 0.01)
    play = Play(["a<|im_end|>", "b<|im_end|>", "c<|im_end|>"])

    async def talk(endpoint: AgentEndpoint) -> None:
        held = play.model.held = asyncio.Event()
        headers = {"x-api-key": endpoint.api_key}
        hi = [{"role": "user", "content": "Hi"}]
        async with aiohttp.ClientSession(base_url=endpoint.base_url + "/", headers=headers) as http:
            for path, ping in (
                ("chat/completions", b": ping"),
                ("responses", b": ping"),
                ("messages", b"event: ping"),
            ):
                held.clear()
                async with http.post(
                    path, json={"messages": hi, "input": "Hi", "stream": True}
                ) as answer:
                    assert (await answer.content.readline()).strip() == ping
                    held.set()
                    assert b"data: " in await answer.read()

    play.run(talk)


class Broken(Model):
    """Fails as nobody has foreseen."""

    async def _answer(
        self, number: int, input_ids: list[int], params: dict[str, Any]
    ) -> GenerateResult:
        if self.held is not None:
            await self.held.wait()
        raise RuntimeError("as nobody has foreseen")


def test_a_failure_behind_the_status_is_an_event_of_the_stream(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("slime.deadlines.ENDPOINT_STREAM_PING", 0.01)
    play = Play([])
    play.state.client = play.model = Broken([])

    async def talk(endpoint: AgentEndpoint) -> None:
        held = play.model.held = asyncio.Event()
        hi: Any = [{"role": "user", "content": "Hi"}]
        async with openai_of(endpoint) as client, anthropic_of(endpoint) as other:
            asks: list[Callable[[], Any]] = [
                lambda: client.chat.completions.create(model="m", messages=hi, stream=True),
                lambda: client.responses.create(model="m", input=hi, stream=True),
                lambda: other.messages.create(model="m", max_tokens=9, messages=hi, stream=True),
            ]
            for ask in asks:
                held.clear()
                stream = await ask()
                held.set()
                with pytest.raises(
                    (openai.APIError, anthropic.APIError), match="as nobody has foreseen"
                ):
                    async for _ in stream:
                        pass

    play.run(talk)


def test_the_log_does_not_tell_a_key(caplog: pytest.LogCaptureFixture) -> None:
    """Not even of a client that brings it in its URL."""
    play = Play([])
    play.state.client = play.model = Broken([])

    async def talk(endpoint: AgentEndpoint) -> None:
        async with openai_of(endpoint, base_url=endpoint.keyed_base_url, api_key="none") as client:
            with pytest.raises(openai.InternalServerError, match="as nobody has foreseen"):
                await client.responses.create(model="m", input="Hi")
            with pytest.raises(openai.BadRequestError):
                await client.responses.create(model="m", input=[])
        assert "/key/{key}/v1/responses" in caplog.text and endpoint.api_key not in caplog.text

    play.run(talk)


def test_a_body_that_comes_when_the_sample_is_done_begins_nothing() -> None:
    play = Play(["a<|im_end|>"])

    async def run() -> None:
        bind_state(play.state)
        params = play.state.params_for(play.sample)
        body = b'{"model": "m", "input": "Hi"}'
        async with agent_endpoint(play.state.args, play.sample, params) as endpoint:
            reader, writer = await asyncio.open_connection("127.0.0.1", endpoint.port)
            head = f"POST /v1/responses HTTP/1.1\r\nHost: x\r\nx-api-key: {endpoint.api_key}\r\n"
            writer.write(
                f"{head}Expect: 100-continue\r\nContent-Length: {len(body)}\r\n\r\n".encode()
            )
            assert b" 100 " in await reader.readline(), "it is waited for"
        writer.write(body)
        await reader.readline()
        assert b" 401 " in await reader.readline()
        writer.close()
        await close_server()

    asyncio.run(run())
    assert not play.model.asked


class DeadEngines(Model):
    async def _answer(
        self, number: int, input_ids: list[int], params: dict[str, Any]
    ) -> GenerateResult:
        raise EngineError("http://engine-0", "is down", 503)


@pytest.mark.parametrize("first", ["openai", "anthropic"])
def test_an_engine_that_is_lost_fails_the_sample_even_if_the_agent_goes_on(first: str) -> None:
    play = Play([])
    play.state.client = play.model = DeadEngines([])
    hi: Any = [{"role": "user", "content": "Hi"}]

    async def talk(endpoint: AgentEndpoint) -> None:
        async with openai_of(endpoint) as client, anthropic_of(endpoint) as other:
            if first == "openai":
                with pytest.raises(openai.InternalServerError, match="is down"):
                    await client.responses.create(model="m", input=hi)
            else:
                with pytest.raises(anthropic.APIStatusError, match="overloaded_error"):
                    await other.messages.create(model="m", max_tokens=9, messages=hi)
            with pytest.raises(openai.BadRequestError, match=r"has failed.*is down"):
                await client.responses.create(model="m", input=hi)
            with pytest.raises(anthropic.BadRequestError, match=r"has failed.*is down"):
                await other.messages.create(model="m", max_tokens=9, messages=hi)

    endpoint = play.run(talk)
    assert len(play.model.calls) == 1, "nothing is tried again that would not help, whoever asks"
    with pytest.raises(EngineError):
        endpoint.samples()


@pytest.mark.parametrize("where", ["in a request", "in a tool"])
def test_the_end_of_the_rollout_ends_the_agent(where: str) -> None:
    play = Play(["a<|im_end|>"])
    told: list[str] = []

    async def talk(endpoint: AgentEndpoint) -> None:
        try:
            if where == "in a request":
                play.model.held = asyncio.Event()
                async with openai_of(endpoint) as client:
                    await client.responses.create(model="m", input="Hi")
            else:
                await asyncio.Event().wait()
        finally:
            told.append("ended")

    async def run() -> None:
        bind_state(play.state)
        params = play.state.params_for(play.sample)

        async def generate() -> list[Sample]:
            async with agent_endpoint(play.state.args, play.sample, params) as endpoint:
                await talk(endpoint)
            return endpoint.samples()

        generating = asyncio.create_task(generate())
        while where == "in a request" and not play.model.asked:
            await asyncio.sleep(0)
        await asyncio.sleep(0)
        with play.model.abort_scope(), pytest.raises(RolloutEnds):
            await generating
        assert not generating.cancelled()
        await close_server()

    asyncio.run(run())
    assert told == ["ended"]


def test_the_port_is_given_back_with_the_server() -> None:
    async def talk(endpoint: AgentEndpoint) -> None:
        ports.append(endpoint.port)

    ports: list[int] = []
    Play([]).run(talk)
    Play([], args={"agent_port": ports[0], "agent_host": "127.0.0.1"}).run(talk)
    assert ports[0] == ports[1]


def test_the_end_of_the_rollout_puts_the_sample_back_as_it_was() -> None:
    play = Play([])
    play.state.args.custom_generate_function_path = "tests.support.agents.asks_for_ever"
    group = GroupRun.of([play.sample])

    async def run() -> None:
        running = asyncio.create_task(GroupRunner(play.state, None, rollout_id=0).run(group))
        while "port" not in play.sample.metadata:
            await asyncio.sleep(0)
        await asyncio.sleep(0)
        with play.model.abort_scope():
            await running
        await close_server()

    asyncio.run(run())
    assert group.failure is None and not group.is_generated
    (sample,) = group.samples
    assert (
        sample.status is SampleStatus.ABORTED
        and "port" not in sample.metadata
        and not sample.tokens
    )


def test_a_taken_port_and_a_model_without_template_are_the_users_to_mend() -> None:
    async def nothing(endpoint: AgentEndpoint) -> None: ...

    with socket.create_server(("127.0.0.1", 0)) as taken:
        with pytest.raises(UserError, match="cannot listen") as refused:
            Play([], args={"agent_port": taken.getsockname()[1]}).run(nothing)
        assert "--agent-port" in refused.value.fix
    play = Play([])
    play.state.tokenizer = copy.copy(play.state.tokenizer)
    play.state.tokenizer.chat_template = None
    with pytest.raises(UserError, match="no chat template"):
        play.run(nothing)


def test_it_listens_on_loopback_unless_told_otherwise() -> None:
    async def look(endpoint: AgentEndpoint) -> None:
        assert endpoint.environ["ANTHROPIC_BASE_URL"] == f"http://127.0.0.1:{endpoint.port}"
        assert endpoint.environ_for("host.docker.internal")["OPENAI_BASE_URL"].startswith(
            "http://host.docker.internal:"
        )
        assert (
            endpoint.environ_for("fd00::1")["ANTHROPIC_BASE_URL"]
            == f"http://[fd00::1]:{endpoint.port}"
        )
        hosts.update(
            c.laddr.ip for c in psutil.Process().net_connections() if c.laddr.port == endpoint.port
        )

    hosts: set[str] = set()
    Play([]).run(look)
    assert hosts == {"127.0.0.1"}
    Play([], args={"agent_host": "0.0.0.0"}).run(look)
    assert hosts == {"127.0.0.1", "0.0.0.0"}
