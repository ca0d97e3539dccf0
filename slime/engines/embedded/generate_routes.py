"""``/generate`` and the health routes."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from typing import Any

import orjson
from aiohttp import web

from slime.engines.embedded.engine import EngineDead
from slime.engines.embedded.fields import BadRequest
from slime.engines.embedded.generate_request import GenerateRequest, make_sequence, parse_generate
from slime.engines.embedded.responses import Answer
from slime.engines.embedded.sampling_params import Params
from slime.engines.embedded.state import (
    ServerState,
    Unavailable,
    json_body,
    json_response,
    state_of,
)

_HEALTH_DEADLINE = 20.0

routes = web.RouteTableDef()


def ready_to_generate(state: ServerState) -> None:
    """Raises:
    Unavailable: memory was released, or the weights are not one consistent version.
    """
    engine = state.engine
    if engine.death is not None:
        raise Unavailable(f"the engine stopped: {type(engine.death).__name__}: {engine.death}")
    gone = engine.released & {"weights", "kv_cache"}
    if gone:
        raise Unavailable(f"memory is released ({', '.join(sorted(gone))}); call /resume_memory_occupation first")
    if engine.store.broken:
        raise Unavailable(f"the weights are not usable: {engine.store.broken}; update them again")


@routes.post("/generate")
@routes.put("/generate")
async def generate(request: web.Request) -> web.StreamResponse:
    state = state_of(request)
    ready_to_generate(state)
    parsed = parse_generate(await json_body(request), state.limits)
    sequences = [job.sequence for job in parsed.jobs]
    refuse_known_rids(state, [sequence.rid for sequence in sequences])
    if parsed.stream:
        return await send_events(request, _events(state, parsed))
    await state.hub.run(state.engine, sequences)
    answers = [Answer(job, state.tokenizer).final() for job in parsed.jobs]
    return json_response(answers[0] if parsed.is_single else answers)


async def _events(state: ServerState, parsed: GenerateRequest) -> AsyncIterator[Any]:
    answers = [Answer(job, state.tokenizer) for job in parsed.jobs]
    sequences = [job.sequence for job in parsed.jobs]
    async for index, ended in state.hub.stream(state.engine, sequences):
        body = answers[index].final() if ended else answers[index].partial(state.engine.store.version)
        if not parsed.is_single:
            body["index"] = index
        yield body


async def send_events(request: web.Request, events: AsyncIterator[Any]) -> web.StreamResponse:
    """Server-sent events, one JSON object each, "[DONE]" at the end.

    The status is sent before the first event: an error after that is an event of its own, as in SGLang.
    """
    response = web.StreamResponse(
        headers={"Content-Type": "text/event-stream", "Cache-Control": "no-cache", "X-Accel-Buffering": "no"}
    )
    await response.prepare(request)
    try:
        async with contextlib.aclosing(events) as stream:  # type: ignore[type-var]
            async for body in stream:
                await response.write(_event(body))
    except EngineDead as error:
        await response.write(_event({"error": {"message": str(error), "type": "unavailable", "code": 503}}))
    except ConnectionResetError:  # the client is gone, and its sequences were given up with the stream
        return response
    await response.write(b"data: [DONE]\n\n")
    await response.write_eof()
    return response


def _event(body: Any) -> bytes:
    return b"data: " + orjson.dumps(body) + b"\n\n"


def refuse_known_rids(state: ServerState, rids: list[str]) -> None:
    """Raises:
    BadRequest: a request of that id is under way.
    """
    known = {sequence.rid for sequence in state.hub.in_flight}
    for rid in rids:
        if rid in known:
            raise BadRequest(f"a request with rid '{rid}' is under way", "rid")


@routes.get("/health")
@routes.get("/ping")
async def health(request: web.Request) -> web.Response:
    """200 as soon as the model is loaded and for as long as the engine thread lives."""
    state = state_of(request)
    if state.engine.death is not None:
        raise Unavailable(f"the engine stopped: {type(state.engine.death).__name__}: {state.engine.death}")
    return web.Response()


@routes.get("/health_generate")
async def health_generate(request: web.Request) -> web.Response:
    """200 when a token can be generated now. A busy engine proves that by its steps, a paused one by being there."""
    state = state_of(request)
    ready_to_generate(state)
    if state.engine.paused:
        return web.Response()
    params = Params(max_new_tokens=1, temperature=0.0)
    sequence = make_sequence(f"health-{id(request)}", [0], params, state.limits)
    try:
        await asyncio.wait_for(state.hub.run(state.engine, [sequence]), _HEALTH_DEADLINE)
    except TimeoutError as error:
        raise Unavailable(f"no token within {_HEALTH_DEADLINE:.0f} s") from error
    reason = sequence.finish_reason or {}
    if reason.get("type") == "abort" and "not finite" in reason.get("message", ""):
        return json_response({"error": {"message": reason["message"]}}, status=503)
    return web.Response()
