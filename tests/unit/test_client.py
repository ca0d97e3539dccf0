"""The rollout client against a fake engine: retries, refusals, deadlines, abort, concurrency."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

import pytest
from aiohttp import web
from hypothesis import given, settings
from hypothesis import strategies as st

from slime.engines import client as client_module
from slime.engines.api import EngineClient, EngineError, GenerateResult
from slime.engines.client import (
    BusyClock,
    InFlight,
    RequestRefused,
    RequestSlots,
    RolloutClient,
    num_requests,
)
from slime.engines.router import (
    RouterWorker,
    list_workers,
    register_workers,
    remove_worker,
    router_policy,
    wants_routing_key,
)
from slime.errors import UserError
from slime.rollout.generate import bind_state
from slime.rollout.plugin_api import post
from tests.support.fake_engine import FakeEngine, answer
from tests.support.fake_rollout import make_state
from tests.support.router_server import router_process, wait_healthy

PARAMS = {"max_new_tokens": 6, "sampling_seed": 3}


def run(test: Callable[[FakeEngine, RolloutClient], Awaitable[Any]], **kwargs: Any) -> Any:
    async def main() -> Any:
        async with (
            FakeEngine() as engine,
            RolloutClient(engine.url, **{"max_concurrency": 8, **kwargs}) as client,
        ):
            return await asyncio.wait_for(test(engine, client), timeout=30)

    return asyncio.run(main())


@pytest.fixture(autouse=True)
def quick_retries(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(client_module, "_FIRST_BACKOFF", 0.001)


def test_tokens_and_log_probs_come_from_the_engine() -> None:
    async def test(engine: FakeEngine, client: RolloutClient) -> None:
        result = await client.generate([5, 6], PARAMS, rid="a")
        assert result.token_ids == answer([5, 6], 3, 6)[0]
        assert result.log_probs == [-0.01 * token for token in result.token_ids]
        assert engine.bodies[0]["return_logprob"] is True and engine.bodies[0]["rid"] == "a"

    run(test)


@pytest.mark.parametrize("status", [429, 500, 502, 503, 0])
def test_a_failing_engine_is_asked_again_and_the_answer_is_the_same(status: int) -> None:
    async def test(engine: FakeEngine, client: RolloutClient) -> None:
        expected = (await client.generate([5, 6], PARAMS)).token_ids
        engine.failures, engine.failure_status = 3, status
        assert (await client.generate([5, 6], PARAMS, rid="a")).token_ids == expected
        assert client.counters.retries == 3
        assert [body.get("rid") for body in engine.bodies[1:]] == ["a", "a-r1", "a-r2", "a-r3"]
        assert not client.in_flight

    run(test)


def test_retries_end_and_say_how_many_there_were() -> None:
    async def test(engine: FakeEngine, client: RolloutClient) -> None:
        engine.failures = 10**6
        with pytest.raises(
            EngineError, match=r"engine is down.*given up after \d+ attempts"
        ) as caught:
            await client.generate([5], PARAMS)
        assert caught.value.status == 503 and client.counters.retries >= 1

    run(test, retry_seconds=0.05)


def test_a_refusal_is_not_repeated_and_carries_the_engines_words() -> None:
    async def test(engine: FakeEngine, client: RolloutClient) -> None:
        engine.refuse = "temperature must be positive"
        with pytest.raises(RequestRefused, match="temperature must be positive"):
            await client.generate([5], PARAMS)
        assert len(engine.bodies) == 1 and client.counters.take() == {"requests": 1, "retries": 0}
        assert client.counters.take() == {"requests": 0, "retries": 0}

    run(test)


def test_the_deadline_covers_all_tries() -> None:
    async def test(engine: FakeEngine, client: RolloutClient) -> None:
        engine.hold.clear()
        with pytest.raises(EngineError, match="gave no answer within"):
            await client.generate([5], PARAMS)
        assert len(engine.bodies) == 1

    run(test, request_timeout=0.1)


def test_abort_brings_back_partial_answers_and_sends_nothing_new() -> None:
    async def test(engine: FakeEngine, client: RolloutClient) -> None:
        engine.hold.clear()
        tasks = [asyncio.create_task(client.generate([first], PARAMS)) for first in range(20, 24)]
        while engine.in_flight < 4:
            await asyncio.sleep(0.001)
        with client.abort_scope():
            late = asyncio.create_task(client.generate([30], PARAMS))
            await client.abort_all(timeout=5)
            results = await asyncio.gather(*tasks)
            assert all(len(r.token_ids) == 2 for r in results if r.finish_reason == "abort")
            assert any(r.finish_reason == "abort" for r in results)
            assert (await late).finish_reason == "abort" and (await late).token_ids == []
        assert len(engine.bodies) == 4 and engine.in_flight == 0
        engine.hold.set()
        assert (await client.generate([30], PARAMS)).finish_reason != "abort"

    run(test)


def test_an_abort_leaves_other_servers_alone() -> None:
    """A judge that is asked while a rollout ends answers as ever, holds up no abort, and is tried
    again."""

    async def test(engine: FakeEngine, client: RolloutClient) -> None:
        async with FakeEngine() as judge:
            judge.hold.clear()
            body = {"input_ids": [5], "sampling_params": PARAMS, "return_logprob": True}
            early = asyncio.create_task(client.post("/generate", body, url=judge.url))
            while judge.in_flight == 0:
                await asyncio.sleep(0.001)
            with client.abort_scope():
                judge.failures = 1
                late = asyncio.create_task(client.post("/generate", body, url=judge.url))
                await client.abort_all(timeout=5)
                assert await client.post("/generate", body, url=engine.url) is None
                judge.hold.set()
                for answer in (await early, await late):
                    assert (
                        answer is not None
                        and answer["meta_info"]["finish_reason"]["type"] != "abort"
                    )
        assert judge.num_aborts == 0 and client.counters.retries == 1

    run(test)


def test_an_abort_beside_another_rollout_waits_for_its_own_requests_alone() -> None:
    async def test(engine: FakeEngine, base: RolloutClient) -> None:
        with base.fork() as client, base.fork(own_slots=True) as other:
            assert client.slots is base.slots and other.slots is not base.slots
            engine.hold.clear()
            mine = asyncio.create_task(client.generate([20], PARAMS))
            while engine.in_flight < 1:
                await asyncio.sleep(0.001)

            async def sent_again() -> GenerateResult:
                while (result := await other.generate([21], PARAMS)).finish_reason == "abort":
                    assert not other.aborting
                return result

            theirs = asyncio.create_task(sent_again())
            while engine.in_flight < 2:
                await asyncio.sleep(0.001)
            with client.abort_scope():
                await client.abort_all(timeout=5)
                assert (await mine).finish_reason == "abort" and not theirs.done()
            engine.hold.set()
            assert (await theirs).finish_reason != "abort"
            assert client.counters.take()["requests"] == 1 and other.counters.requests > 1

    run(test)


def test_the_time_without_a_request_is_that_of_all_clients_together() -> None:
    """Some are there from 1 s to 4 s and from 5 s to 6 s, of 10 s; then a judge, no engine, has
    one."""
    now = 0.0

    async def test(engine: FakeEngine, base: RolloutClient) -> None:
        nonlocal now
        base.busy = BusyClock(clock=lambda: now)
        with base.fork() as client, base.fork() as other:
            now = 1.0
            with client._tracked(InFlight("a", 0.0)):
                now = 3.0
                with other._tracked(InFlight("b", 0.0)):
                    now = 4.0
            now = 5.0
            with client._tracked(InFlight("c", 0.0)):
                now = 6.0
            now = 10.0
            assert client.busy.take_idle_ratio() == pytest.approx(0.6)
            with client._tracked(InFlight("judge", 0.0, ends_with_rollout=False)):
                now = 20.0
            assert other.busy.take_idle_ratio() == 1.0 and other.busy.take_idle_ratio() == 0.0

    run(test)


class DyingEngine:
    """Two engines behind a router, as a client's clock sees them: one is dead, and taken out after
    so many seconds.

    Args:
        others: engines that serve.
    """

    def __init__(self, client: RolloutClient, taken_out_after: float, others: int) -> None:
        self.client, self.after, self.others = client, taken_out_after, others
        self.slept, self.now = [0.0], 0.0
        client._sleep_unless_aborting = self.sleep  # type: ignore[method-assign]
        client.engine = self.connect  # type: ignore[method-assign, assignment]

    async def sleep(self, seconds: float) -> None:
        self.slept.append(seconds)
        self.now += seconds

    async def connect(self, url: str = "") -> DyingEngine:
        return self

    async def request(self, *_: Any, **__: Any) -> dict[str, Any]:
        if self.now < self.after:
            raise EngineError("http://router", "connection refused", 502)
        return {"text": "", "output_ids": [], "meta_info": {"finish_reason": {"type": "stop"}}}

    async def get(self, path: str, timeout: float) -> dict[str, Any]:
        dead = [] if self.now else [{"id": "0", "url": "http://dead", "is_healthy": True}]
        there = [
            {"id": str(n), "url": f"http://{n}", "is_healthy": True}
            for n in range(1, self.others + 1)
        ]
        return {"workers": dead + there}

    url = "http://router"


@pytest.mark.parametrize("taken_out_after", [0.05, 0.5, 1.1, 1.5, 1.8])
def test_what_a_dead_engine_has_lost_waits_three_seconds_at_most_for_another(
    monkeypatch: pytest.MonkeyPatch, taken_out_after: float
) -> None:
    """By the longest sleeps that the client may ask for, where the router has lost the dead one
    within 1.8 s."""
    monkeypatch.setattr(client_module, "_FIRST_BACKOFF", 0.1)
    monkeypatch.setattr(client_module.random, "uniform", lambda least, most: most)

    async def test(engine: FakeEngine, client: RolloutClient) -> None:
        dying = DyingEngine(client, taken_out_after, others=1)
        await client.generate([5], PARAMS)
        assert sum(dying.slept) <= 3.0 and max(dying.slept) <= 1.2

    run(test, request_timeout=1e6, retry_seconds=1e6)


def test_without_an_engine_requests_come_back_less_often(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(client_module, "_FIRST_BACKOFF", 0.1)

    async def test(engine: FakeEngine, client: RolloutClient) -> None:
        dying = DyingEngine(client, 74.0, others=0)
        await client.generate([5], PARAMS)
        assert 4.0 <= max(dying.slept) <= 6.0 and len(dying.slept) < 30

    run(test, request_timeout=1e6, retry_seconds=1e6)


def test_abort_ends_the_wait_between_tries() -> None:
    async def test(engine: FakeEngine, client: RolloutClient) -> None:
        client_module._FIRST_BACKOFF = 20.0
        engine.failures = 1
        task = asyncio.create_task(client.generate([5], PARAMS))
        while client.counters.retries == 0:
            await asyncio.sleep(0.001)
        with client.abort_scope():
            await client.abort_all(timeout=5)
            assert (await task).finish_reason == "abort"

    run(test)


def test_an_engine_that_does_not_stop_is_named() -> None:
    async def test(engine: FakeEngine, client: RolloutClient) -> None:
        engine.in_flight = 3  # claims load for ever
        with (
            client.abort_scope(),
            pytest.raises(EngineError, match=r"abort is not finished.*has 3 requests"),
        ):
            await client.abort_all(timeout=0.05)

    run(test)


def test_a_dead_engine_does_not_hold_up_an_abort_unless_requests_wait_for_it() -> None:
    async def test(engine: FakeEngine, client: RolloutClient) -> None:
        async def workers(_router: EngineClient) -> list[RouterWorker]:
            return [
                RouterWorker("0", engine.url, True),
                RouterWorker("1", "http://127.0.0.1:9", True),
            ]

        with pytest.MonkeyPatch.context() as patch, client.abort_scope():
            patch.setattr(client_module, "list_workers", workers)
            await client.abort_all(timeout=5)
            with (
                client._tracked(InFlight("lost", 0.0)),
                pytest.raises(EngineError, match=r"127\.0\.0\.1:9 /abort_request failed"),
            ):
                await client.abort_all(timeout=0.05)

    run(test)


def test_a_router_that_does_not_answer_holds_up_no_abort(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("slime.deadlines.WORKERS_LIST", 0.05)

    async def never(request: web.Request) -> web.Response:
        await asyncio.sleep(3600)
        return web.Response()

    async def main() -> None:
        app = web.Application()
        app.router.add_get("/workers", never)
        runner = web.AppRunner(app, shutdown_timeout=0.1)
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        url = f"http://127.0.0.1:{runner.addresses[0][1]}"
        async with RolloutClient(url, max_concurrency=1) as client:
            with client.abort_scope(), pytest.raises(EngineError, match="/workers gave no answer"):
                await asyncio.wait_for(client.abort_all(timeout=60), timeout=10)
        await runner.cleanup()

    asyncio.run(main())


def test_loads_are_those_of_the_engines_of_a_dead_router() -> None:
    """The watchdog asks for them where nothing moves, which a router that is started again must not
    make worse."""

    async def main() -> dict[str, tuple[int, int]]:
        async with RolloutClient(
            "http://127.0.0.1:9", max_concurrency=1, engine_urls=["http://127.0.0.1:8"]
        ) as client:
            return await client.worker_loads()

    assert asyncio.run(main()) == {"http://127.0.0.1:8": (-1, -1)}


def test_an_abort_reaches_the_engines_of_a_dead_router() -> None:
    aborted: list[str] = []

    async def abort(request: web.Request) -> web.Response:
        aborted.append(request.path)
        return web.json_response({})

    async def loads(request: web.Request) -> web.Response:
        return web.json_response({"loads": []})

    async def main() -> None:
        app = web.Application()
        app.router.add_post("/abort_request", abort)
        app.router.add_get("/v1/loads", loads)
        runner = web.AppRunner(app)
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        engine = f"http://127.0.0.1:{runner.addresses[0][1]}"
        async with RolloutClient(
            "http://127.0.0.1:9", max_concurrency=1, engine_urls=[engine]
        ) as client:
            with client.abort_scope():
                await client.abort_all(timeout=60)
        await runner.cleanup()

    asyncio.run(main())
    assert aborted == ["/abort_request"]


@pytest.mark.parametrize(
    ("answer", "said"),
    [
        (
            {"output_ids": [5, 6, 7], "meta_info": {"output_token_logprobs": [[-0.1, 5, None]]}},
            "1 log-probs for 3",
        ),
        (
            {"output_ids": [5], "meta_info": {"output_token_logprobs": [[None, 5, None]]}},
            "0 log-probs for 1",
        ),
        ({"text": "<html>"}, "no meta_info"),
    ],
)
def test_answers_without_a_log_prob_for_each_token_are_refused(
    answer: dict[str, Any], said: str
) -> None:
    with pytest.raises(EngineError, match=said):
        GenerateResult.from_json(answer)


def test_routing_key_is_sent_only_where_the_policy_reads_it() -> None:
    async def test(engine: FakeEngine, client: RolloutClient) -> None:
        await client.generate([5], PARAMS, routing_key="session")
        assert engine.headers[0].get("X-SMG-Routing-Key") == (
            "session" if client.send_routing_key else None
        )

    run(test, send_routing_key=True)
    run(test, send_routing_key=False)


def test_policy_names() -> None:
    assert router_policy("consistent_hashing") == "manual" and wants_routing_key(
        "consistent_hashing"
    )
    assert router_policy("round_robin") == "round_robin" and not wants_routing_key("round_robin")
    with pytest.raises(UserError, match="no such policy") as caught:
        router_policy("best")
    assert "cache_aware" in caught.value.fix


def test_num_requests_counts_all_data_parallel_ranks() -> None:
    rank = {"num_running_reqs": 2, "num_waiting_reqs": 3}
    assert num_requests({"loads": [rank, rank]}) == 10


# -- the real router -------------------------------------------------------------------------------


def test_real_router_registers_routes_aborts_and_removes() -> None:
    async def main(url: str) -> None:
        async with FakeEngine() as a, FakeEngine() as b, EngineClient(url) as api:
            await wait_healthy(api)
            await register_workers(url, [a.url, b.url], timeout=20)
            await register_workers(url, [a.url, b.url], timeout=20)  # a second time changes nothing
            assert {worker.url for worker in await list_workers(api)} == {a.url, b.url}
            async with RolloutClient(url, max_concurrency=8) as client:
                results = await asyncio.gather(
                    *(client.generate([20 + i], PARAMS) for i in range(8))
                )
                assert [r.token_ids for r in results] == [
                    answer([20 + i], 3, 6)[0] for i in range(8)
                ]
                assert (len(a.bodies), len(b.bodies)) == (4, 4)  # round robin
                a.failures = 1  # our client retries, the router does not
                await asyncio.gather(*(client.generate([20], PARAMS) for _ in range(2)))
                assert client.counters.retries == 1 and len(a.bodies) + len(b.bodies) == 11
                assert client.slots.size == 8
                await client.worker_loads()
                assert client.slots.size == 16, "eight for each engine that the router has"
                a.hold.clear()
                b.hold.clear()
                tasks = [asyncio.create_task(client.generate([40 + i], PARAMS)) for i in range(4)]
                while a.in_flight + b.in_flight < 4:
                    await asyncio.sleep(0.01)
                assert {url: load[0] for url, load in (await client.worker_loads()).items()} == {
                    a.url: 2,
                    b.url: 2,
                }
                with client.abort_scope():
                    await client.abort_all(timeout=10)
                    await asyncio.gather(*tasks)
                a.hold.set()
                b.hold.set()
                await remove_worker(url, a.url, timeout=10)
                await remove_worker(url, a.url, timeout=10)  # gone is gone
                before = len(a.bodies)
                await asyncio.gather(*(client.generate([5], PARAMS) for _ in range(3)))
                assert len(a.bodies) == before
            with pytest.raises(
                EngineError, match=r"not healthy behind the router .*127\.0\.0\.1:9"
            ):
                await register_workers(url, ["http://127.0.0.1:9"], timeout=0.5)

    with router_process("round_robin") as url:
        asyncio.run(asyncio.wait_for(main(url), timeout=60))


def test_sampling_parameters_that_the_real_router_drops_reach_the_engine() -> None:
    async def main(url: str) -> None:
        async with FakeEngine() as engine, EngineClient(url) as api:
            await wait_healthy(api)
            await register_workers(url, [engine.url], timeout=20)
            async with RolloutClient(url, max_concurrency=8) as client:
                forwarded = {
                    "stop_token_ids": [3],
                    "sampling_seed": 1,
                    "no_stop_trim": True,
                    "ignore_eos": True,
                    "min_p": 0.1,
                }
                # and one that no engine knows, who says so
                own = {"logit_bias": {"3": -100.0}, "temperatur": 1.0}
                params = {**PARAMS, **forwarded, **own}
                await client.post("/generate", {"input_ids": [5], "sampling_params": params})
                sent = engine.bodies[-1]["sampling_params"]
                assert not own.keys() & sent.keys(), "the way past it is no longer needed"
                assert forwarded.items() <= sent.items()
                await client.generate([5], params)
                assert engine.bodies[-1]["sampling_params"] == params

    with router_process("round_robin") as url:
        asyncio.run(asyncio.wait_for(main(url), timeout=60))


def test_what_generate_functions_post_reaches_engines_whole() -> None:
    """``return_sampling_mask`` is what a function of the user's has to ask for."""

    async def main(url: str) -> None:
        async with FakeEngine() as engine, EngineClient(url) as api:
            await wait_healthy(api)
            await register_workers(url, [engine.url], timeout=20)
            async with RolloutClient(url, max_concurrency=8) as client:
                bind_state(make_state(client))
                body = {"input_ids": [5], "sampling_params": PARAMS, "return_sampling_mask": True}
                await post(f"{url}/generate", body)
                assert engine.bodies[-1]["return_sampling_mask"] is True

    with router_process("round_robin") as url:
        asyncio.run(asyncio.wait_for(main(url), timeout=60))


def test_requests_for_experts_go_past_the_real_router_which_drops_the_field() -> None:
    async def main(url: str) -> None:
        async with FakeEngine() as a, FakeEngine() as b, EngineClient(url) as api:
            await wait_healthy(api)
            await register_workers(url, [a.url, b.url], timeout=20)
            async with RolloutClient(url, max_concurrency=8) as client:
                body = {"input_ids": [5], "sampling_params": PARAMS, "return_routed_experts": True}
                await client.post("/generate", body)
                assert "return_routed_experts" not in (a.bodies + b.bodies)[0], (
                    "the way past it is no longer needed"
                )
                a.hold.clear()
                b.hold.clear()
                tasks = [
                    asyncio.create_task(client.generate([i], PARAMS, return_routed_experts=True))
                    for i in range(6)
                ]
                while a.in_flight + b.in_flight < 6:
                    await asyncio.sleep(0.01)
                assert (a.in_flight, b.in_flight) == (3, 3)
                assert all(
                    body["return_routed_experts"]
                    for engine in (a, b)
                    for body in engine.bodies[-3:]
                )
                with client.abort_scope():
                    await client.abort_all(timeout=10)
                    await asyncio.gather(*tasks)
                a.hold.set()
                b.hold.set()
                a.failures, b.failures = 1, 1
                await client.generate([7], PARAMS, return_routed_experts=True)
                assert client.counters.retries >= 1

    with router_process("round_robin") as url:
        asyncio.run(asyncio.wait_for(main(url), timeout=60))


def test_real_router_keeps_a_session_on_one_engine_under_the_manual_policy() -> None:
    async def main(url: str) -> None:
        async with FakeEngine() as a, FakeEngine() as b, EngineClient(url) as api:
            await wait_healthy(api)
            await register_workers(url, [a.url, b.url], timeout=20)
            async with RolloutClient(url, max_concurrency=8, send_routing_key=True) as client:
                for i in range(48):
                    await client.generate([50 + i % 12], PARAMS, routing_key=f"session-{i % 12}")
            seen = [{body["input_ids"][0] for body in engine.bodies} for engine in (a, b)]
            assert not seen[0] & seen[1] and len(seen[0] | seen[1]) == 12

    with router_process("consistent_hashing") as url:
        asyncio.run(asyncio.wait_for(main(url), timeout=60))


def test_real_router_sends_requests_where_fewer_tokens_are_under_power_of_two() -> None:
    async def main() -> None:
        async with FakeEngine() as a, FakeEngine() as b:
            a.num_tokens, b.num_tokens = 1000, 10
            with router_process("power_of_two", [a.url, b.url]) as url:
                async with EngineClient(url) as api:
                    await wait_healthy(api)
                await register_workers(url, [a.url, b.url], timeout=20, policy="power_of_two")
                # the first ones have been taken in
                while min(a.num_load_reports, b.num_load_reports) < 2:
                    await asyncio.sleep(0.05)
                async with RolloutClient(url, max_concurrency=8) as client:
                    for i in range(12):
                        await client.generate([20 + i], PARAMS)
            assert (len(a.bodies), len(b.bodies)) == (0, 12)

    asyncio.run(asyncio.wait_for(main(), timeout=60))


@settings(max_examples=100)
@given(st.lists(st.one_of(st.just("take"), st.just("give"), st.integers(1, 6)), max_size=40))
def test_slots_follow_the_engines(orders: list[str | int]) -> None:
    """However many slots there are to be, and whoever holds some then: what is free is what there
    are without those."""

    async def main() -> None:
        slots, held = RequestSlots(3), 0
        for order in orders:
            if order == "take" and not slots.locked():
                await slots.acquire()
                held += 1
            elif order == "give" and held:
                slots.release()
                held -= 1
            elif isinstance(order, int):
                await asyncio.wait_for(slots.resize(order), 1)
            free = 0
            while not slots.locked():
                await slots.acquire()
                free += 1
            for _ in range(free):
                slots.release()
            assert free == max(0, slots.size - held)

    asyncio.run(main())


def test_who_waits_for_a_slot_gets_one_of_an_engine_that_joined() -> None:
    async def main() -> None:
        slots = RequestSlots(1)
        await slots.acquire()
        waiting = asyncio.create_task(slots.acquire())
        await asyncio.sleep(0)
        await slots.resize(2)
        assert await asyncio.wait_for(waiting, 10)

    asyncio.run(main())
