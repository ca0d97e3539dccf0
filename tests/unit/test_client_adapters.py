"""Requests name the adapter of the policy, and answers the version that the name stands for."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

import pytest

from slime.engines import client as client_module
from slime.engines.adapters import adapter_name, with_version
from slime.engines.api import EngineClient, EngineError
from slime.engines.client import RolloutClient
from slime.engines.router import register_workers
from tests.support.fake_engine import FakeEngine
from tests.support.router_server import router_process, wait_healthy

PARAMS = {"max_new_tokens": 6, "sampling_seed": 3}


def run(test: Callable[[FakeEngine, RolloutClient], Awaitable[Any]]) -> Any:
    async def main() -> Any:
        async with FakeEngine() as engine, RolloutClient(engine.url, max_concurrency=8) as client:
            return await asyncio.wait_for(test(engine, client), timeout=30)

    return asyncio.run(main())


@pytest.fixture(autouse=True)
def quick_retries(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(client_module, "_FIRST_BACKOFF", 0.001)


async def held(engine: FakeEngine, count: int) -> None:
    while engine.in_flight < count:
        await asyncio.sleep(0.005)


def names(engine: FakeEngine) -> list[Any]:
    return [body.get("lora_path", "none") for body in engine.bodies]


def test_the_policy_alone_is_asked_by_name() -> None:
    async def test(engine: FakeEngine, client: RolloutClient) -> None:
        body = {"input_ids": [5], "sampling_params": PARAMS}
        await client.post("/generate", body)
        await client.use_adapter(adapter_name(4), cut=False)
        await client.generate([5], PARAMS)
        with client.fork() as fork:
            await fork.generate([5], PARAMS)
        # a judge that is the base, and an adapter of the user's own
        await client.post("/generate", {**body, "lora_path": None})
        await client.post("/generate", {**body, "lora_path": "mine"})
        assert names(engine) == ["none", "policy-4", "policy-4", None, "mine"]
        async with FakeEngine() as judge:
            await client.post("/generate", body, url=judge.url)
            assert names(judge) == ["none"]

    run(test)


def test_an_answer_has_the_version_of_its_name() -> None:
    """The engine's own word is what was loaded last."""

    async def test(engine: FakeEngine, client: RolloutClient) -> None:
        await client.use_adapter(adapter_name(6), cut=False)
        engine.hold.clear()
        asked = asyncio.create_task(client.generate([5], PARAMS))
        await held(engine, 1)
        engine.weight_version = 7
        await client.use_adapter(adapter_name(7), cut=False)
        assert client.adapters_in_use() == {"policy-6"}
        later = asyncio.create_task(client.generate([5], PARAMS))
        await held(engine, 2)
        assert client.adapters_in_use() == {"policy-6", "policy-7"}
        engine.hold.set()
        before, after = await asked, await later
        assert (before.finish_reason, after.finish_reason) == ("length", "length")
        assert before.meta_info["weight_version"] == "6"
        assert after.meta_info["weight_version"] == "7"
        assert not engine.num_aborts and not client.adapters_in_use()

    run(test)


def test_requests_that_are_cut_keep_the_version_of_what_they_have() -> None:
    async def test(engine: FakeEngine, client: RolloutClient) -> None:
        await client.use_adapter(adapter_name(6), cut=True)
        assert not engine.num_aborts, "nothing is under way"
        engine.hold.clear()
        asked = asyncio.create_task(client.generate([5], PARAMS))
        await held(engine, 1)
        engine.weight_version = 7
        await client.use_adapter(adapter_name(7), cut=True)
        part = await asked
        assert (part.finish_reason, part.meta_info["weight_version"]) == ("abort", "6")
        engine.hold.set()
        rest = await client.generate([5, *part.token_ids], PARAMS)
        assert rest.meta_info["weight_version"] == "7"
        assert names(engine) == ["policy-6", "policy-7"]

    run(test)


@pytest.mark.parametrize("status", [400, 503])
def test_a_retry_asks_for_the_newest(status: int) -> None:
    """An engine that was started again has no older one."""

    async def test(engine: FakeEngine, client: RolloutClient) -> None:
        await client.use_adapter(adapter_name(6), cut=False)
        real = EngineClient.request

        async def fails_once(self: EngineClient, *args: Any, **kwargs: Any) -> Any:
            if "lora_path" in (args[2] or {}) and args[2]["lora_path"] == "policy-6":
                await client.use_adapter(adapter_name(7), cut=False)
                raise EngineError(self.url, "adapter policy-6 has never been loaded", status)
            return await real(self, *args, **kwargs)

        EngineClient.request = fails_once
        try:
            result = await client.generate([5], PARAMS)
        finally:
            EngineClient.request = real
        assert result.meta_info["weight_version"] == "7" and names(engine) == ["policy-7"]

    run(test)


def test_answers_of_every_kind_are_marked() -> None:
    several = {"items": [{"meta_info": {"token_weight_versions": [[0, 1]], "id": "a"}}]}
    assert with_version(several, "policy-3") == {
        "items": [{"meta_info": {"id": "a", "weight_version": "3"}}]
    }
    chat = {"choices": [], "metadata": {"weight_version": "9"}}
    assert with_version(chat, "policy-3")["metadata"] == {"weight_version": "3"}
    assert with_version(chat, "mine") is chat


def test_the_real_router_forwards_the_name() -> None:
    async def main(url: str) -> None:
        async with FakeEngine() as engine, EngineClient(url) as api:
            await wait_healthy(api)
            await register_workers(url, [engine.url], timeout=20)
            async with RolloutClient(url, max_concurrency=8) as client:
                await client.use_adapter(adapter_name(2), cut=False)
                result = await client.generate([5], PARAMS)
                assert result.meta_info["weight_version"] == "2"
                assert names(engine) == ["policy-2"]

    with router_process("round_robin") as url:
        asyncio.run(asyncio.wait_for(main(url), timeout=60))
