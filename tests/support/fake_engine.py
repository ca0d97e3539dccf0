"""An engine that speaks the protocol of `slime.engines.api` without a model, for tests of its
clients.

Its tokens are a function of (sampling_seed, first prompt token, absolute position) alone, so that
any scheduling, any retry and any resume of a partial response gives the same tokens, as an engine
in deterministic mode does.

    async with FakeEngine() as engine:
        result = await client.generate([5, 6], {"max_new_tokens": 8, "sampling_seed": 1})
        assert result.token_ids == answer([5, 6], seed=1, max_new_tokens=8)[0]
"""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import Awaitable, Callable
from typing import Any

from aiohttp import web

EOS = 2
VOCAB = range(3, 100)


def next_token(seed: int, first: int, position: int) -> int:
    digest = hashlib.blake2b(f"{seed},{first},{position}".encode(), digest_size=4).digest()
    number = int.from_bytes(digest, "little")
    return EOS if number % 12 == 0 else VOCAB[number // 12 % len(VOCAB)]


def answer(input_ids: list[int], seed: int, max_new_tokens: int) -> tuple[list[int], str]:
    """The whole response to a prompt and why it ends; going on from a part of it gives the rest."""
    tokens: list[int] = []
    while len(tokens) < max_new_tokens:
        tokens.append(next_token(seed, input_ids[0], len(input_ids) + len(tokens)))
        if tokens[-1] == EOS:
            return tokens, "stop"
    return tokens, "length"


class FakeEngine:
    """One engine on a free port. Knobs may be turned while it runs.

    Attributes:
        delay: seconds per answered request, or a function of the request body.
        failures: the next so many /generate requests answer ``failure_status`` (0: drop the
            connection).
        refuse: when set, /generate answers 400 with this message.
        hold: while set, requests wait (and can be aborted) instead of being answered.
        num_tokens: what it reports as its load to a router, ``num_load_reports`` times so far.
        bodies, headers: every /generate request seen; max_in_flight: the most at once.
    """

    def __init__(self, *, weight_version: int = 1, context_length: int = 4096) -> None:
        self.weight_version = weight_version
        self.context_length = context_length
        self.delay: float | Callable[[dict[str, Any]], float] = 0.0
        self.failures, self.failure_status = 0, 503
        self.refuse = ""
        self.hold = asyncio.Event()
        self.hold.set()  # set means: answers flow
        self.partial_tokens = 2
        self.bodies: list[dict[str, Any]] = []
        self.headers: list[dict[str, str]] = []
        self.in_flight = self.max_in_flight = self.num_aborts = 0
        self.num_tokens = self.num_load_reports = 0
        self._aborts: set[asyncio.Event] = set()
        self.url = ""

    async def __aenter__(self) -> FakeEngine:
        app = web.Application()
        app.router.add_post("/generate", self._generate)
        app.router.add_post("/abort_request", self._abort)
        app.router.add_get("/v1/loads", self._loads)
        app.router.add_get("/get_load", self._former_load)
        info = {
            "model_path": "fake",
            "tokenizer_path": "fake",
            "is_generation": True,
            "weight_version": "1",
        }
        server = {
            **info,
            "dp_size": 1,
            "tp_size": 1,
            "context_length": self.context_length,
            "served_model_name": "fake",
        }
        for path, body in {
            "/health": {},
            "/health_generate": {},
            "/model_info": info,
            "/get_model_info": info,
            "/server_info": server,
            "/get_server_info": server,
        }.items():
            app.router.add_get(path, _answering(body))
        self._runner = web.AppRunner(app, handler_cancellation=True, shutdown_timeout=0.2)
        await self._runner.setup()
        site = web.TCPSite(self._runner, "127.0.0.1", 0)
        await site.start()
        self.url = f"http://127.0.0.1:{self._runner.addresses[0][1]}"
        return self

    async def __aexit__(self, *exc: object) -> None:
        await self._runner.cleanup()

    async def _generate(self, request: web.Request) -> web.StreamResponse:
        body = await request.json()
        self.bodies.append(body)
        self.headers.append(dict(request.headers))
        if self.failures:
            self.failures -= 1
            if self.failure_status == 0:
                assert request.transport is not None
                request.transport.abort()
            return web.json_response(
                {"error": {"message": "engine is down"}}, status=self.failure_status or 500
            )
        if self.refuse:
            return web.json_response({"error": {"message": self.refuse}}, status=400)
        self.in_flight += 1
        self.max_in_flight = max(self.max_in_flight, self.in_flight)
        try:
            aborted = await self._wait(body)
        finally:
            self.in_flight -= 1
        params = body["sampling_params"]
        seed = params.get("sampling_seed", 0)
        tokens, reason = answer(body["input_ids"], seed, params["max_new_tokens"])
        if aborted and len(tokens) > self.partial_tokens:
            tokens, reason = tokens[: self.partial_tokens], "abort"
        return web.json_response(self._body(body, tokens, reason))

    def _body(self, body: dict[str, Any], tokens: list[int], reason: str) -> dict[str, Any]:
        return {
            "text": "".join(f"<{token}>" for token in tokens),
            "output_ids": tokens,
            "meta_info": {
                "id": body.get("rid"),
                "finish_reason": {"type": reason},
                "prompt_tokens": len(body["input_ids"]),
                "cached_tokens": len(body["input_ids"]) // 2,
                "completion_tokens": len(tokens),
                "weight_version": str(self.weight_version),
                "output_token_logprobs": [[-0.01 * token, token, None] for token in tokens],
                "e2e_latency": 0.01,
            },
        }

    async def _wait(self, body: dict[str, Any]) -> bool:
        """Until the answer is due; True when the request was aborted before."""
        abort = asyncio.Event()
        self._aborts.add(abort)

        async def due() -> None:
            await asyncio.sleep(self.delay(body) if callable(self.delay) else self.delay)
            await self.hold.wait()

        answering, aborting = asyncio.ensure_future(due()), asyncio.ensure_future(abort.wait())
        try:
            done, _ = await asyncio.wait({answering, aborting}, return_when=asyncio.FIRST_COMPLETED)
            return answering not in done
        finally:
            answering.cancel()
            aborting.cancel()
            self._aborts.discard(abort)

    async def _abort(self, request: web.Request) -> web.Response:
        assert (await request.json()).get("abort_all")
        self.num_aborts += 1
        for event in self._aborts:
            event.set()
        return web.Response()

    async def _loads(self, _request: web.Request) -> web.Response:
        load = {
            "dp_rank": 0,
            "num_running_reqs": self.in_flight,
            "num_waiting_reqs": 0,
            "num_used_tokens": 0,
        }
        return web.json_response({"loads": [load]})

    async def _former_load(self, _request: web.Request) -> web.Response:
        self.num_load_reports += 1
        return web.json_response(
            [{"dp_rank": 0, "num_reqs": 0, "num_waiting_reqs": 0, "num_tokens": self.num_tokens}]
        )


def _answering(body: dict[str, Any]) -> Callable[[web.Request], Awaitable[web.Response]]:
    async def answer(_request: web.Request) -> web.Response:
        return web.json_response(body)

    return answer
