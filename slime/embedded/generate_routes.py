"""Serve ``/generate`` and the health routes; has helpers for all request handlers.

Answers have SGLang's ``meta_info`` with its field names and shapes, and beyond it
``token_weight_versions`` [[first output token, version], …], which tells tokens before and after a
push apart, and ``prefill_time`` and ``decode_time`` in seconds.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import orjson
from aiohttp import web

from slime import deadlines
from slime.embedded.engine import Engine, EngineDead, Hub
from slime.embedded.generate_request import (
    GenerateRequest,
    Job,
    RequestLimits,
    make_sequence,
    parse_generate,
)
from slime.embedded.sequence import Sequence, TextStream, Tokenizer, hold_back, trim_stop
from slime.embedded.weight_update import WeightUpdater
from slime.engines.chat_answers import DONE, EVENT_HEADERS, event
from slime.engines.request_fields import BadRequest, SamplingParams, json_object
from slime.engines.tool_calls import ToolFormat
from slime.observe.torch_profile import TorchProfile

routes = web.RouteTableDef()


# -- shared by all routes --------------------------------------------------------------------------


class Unavailable(Exception):
    """The server cannot do this now; answered with status 503."""


@dataclass
class ServerState:
    """A loaded server.

    Attributes:
        tokenizer: a Hugging Face tokenizer with its chat template, or None.
        tool_format: the model's format of tool calls; None if unknown.
        updates: one thread each for updates that may wait for each other's collectives.
        profile: the running profiler of the engine thread, or None.
    """

    engine: Engine
    hub: Hub
    updater: WeightUpdater
    limits: RequestLimits
    tokenizer: Any
    model_name: str
    tool_format: ToolFormat | None
    architectures: list[str]
    updates: ThreadPoolExecutor
    profile: TorchProfile | None = None


#: A task that returns the state after loading the model.
STATE: web.AppKey[asyncio.Task[ServerState]] = web.AppKey("state")


def state_of(request: web.Request) -> ServerState:
    """Return the state of a server that has loaded its model.

    Raises:
        Unavailable: the model is not loaded yet, or loading failed.
    """
    task = request.app[STATE]
    if not task.done():
        raise Unavailable("the model is being loaded")
    if task.cancelled() or task.exception() is not None:
        raise Unavailable("the model could not be loaded")
    return task.result()


async def json_body(request: web.Request) -> dict[str, Any]:
    """Parse the body as an object; {} if there is none.

    Raises:
        BadRequest: not JSON, or not an object.
    """
    raw = await request.read()
    return json_object(raw) if raw.strip() else {}


def json_response(body: Any, status: int = 200) -> web.Response:
    return web.Response(body=orjson.dumps(body), status=status, content_type="application/json")


def check_can_generate(state: ServerState) -> None:
    """Check that the engine can generate now.

    Raises:
        EngineDead: the engine thread has ended.
        Unavailable: memory was released, or the weights are not one consistent version.
    """
    engine = state.engine
    engine.check_alive()
    released = engine.released & {"weights", "kv_cache"}
    if released:
        raise Unavailable(
            f"memory is released ({', '.join(sorted(released))}); "
            "call /resume_memory_occupation first"
        )
    if engine.store.broken:
        raise Unavailable(f"the weights are not usable: {engine.store.broken}; update them again")


@routes.post("/generate")
@routes.put("/generate")
async def generate(request: web.Request) -> web.StreamResponse:
    state = state_of(request)
    check_can_generate(state)
    body = await json_body(request)
    if body.get("image_data"):  # decoding images here would block other requests
        parsed = await asyncio.to_thread(parse_generate, body, state.limits)
    else:
        parsed = parse_generate(body, state.limits)
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
        body = (
            answers[index].final() if ended else answers[index].partial(state.engine.store.version)
        )
        if not parsed.is_single:
            body["index"] = index
        yield body


async def send_events(request: web.Request, events: AsyncIterator[Any]) -> web.StreamResponse:
    """Send server-sent events, one JSON object each, and "[DONE]" at the end.

    The status is sent before the first event: later errors are events, as in SGLang.
    """
    response = web.StreamResponse(headers=EVENT_HEADERS)
    await response.prepare(request)
    try:
        async with contextlib.aclosing(events) as stream:  # type: ignore[type-var]
            async for body in stream:
                await response.write(event(body))
    except EngineDead as error:
        await response.write(
            event({"error": {"message": str(error), "type": "unavailable", "code": 503}})
        )
    except ConnectionResetError:  # by the client; the stream aborts its sequences
        return response
    await response.write(DONE)
    await response.write_eof()
    return response


def refuse_known_rids(state: ServerState, rids: list[str]) -> None:
    """Reject request ids that are in use.

    Raises:
        BadRequest: a request with the same id is running.
    """
    known = {sequence.rid for sequence in state.hub.in_flight}
    for rid in rids:
        if rid in known:
            raise BadRequest(f"a request with rid '{rid}' is under way", "rid")


@routes.get("/health")
@routes.get("/ping")
async def health(request: web.Request) -> web.Response:
    """Answer 200 while the model is loaded and the engine thread is alive."""
    state_of(request).engine.check_alive()
    return web.Response()


@routes.get("/health_generate")
async def health_generate(request: web.Request) -> web.Response:
    """Answer 200 if the engine can generate a token now; a paused engine is not tested."""
    state = state_of(request)
    check_can_generate(state)
    if state.engine.paused:
        return web.Response()
    params = SamplingParams(max_new_tokens=1, temperature=0.0)
    sequence = make_sequence(f"health-{id(request)}", [0], params, state.limits)
    try:
        await asyncio.wait_for(
            state.hub.run(state.engine, [sequence]), deadlines.GENERATE_ROUTES_HEALTH
        )
    except TimeoutError as error:
        raise Unavailable(f"no token within {deadlines.GENERATE_ROUTES_HEALTH:.0f} s") from error
    reason = sequence.finish_reason or {}
    if reason.get("type") == "abort" and "not finite" in reason.get("message", ""):
        return json_response({"error": {"message": reason["message"]}}, status=503)
    return web.Response()


# -- answers ---------------------------------------------------------------------------------------


class Answer:
    """Builds the answers of one sample: cumulative ones while it streams, and the final one.

    Args:
        tokenizer: None omits ``text``.
    """

    def __init__(self, job: Job, tokenizer: Tokenizer | None) -> None:
        self.job = job
        self.sequence = job.sequence
        self._tokenizer = tokenizer
        self._stream_text: TextStream | None = None
        self._streamed = 0

    def partial(self, version: str) -> dict[str, Any]:
        """Return text and tokens so far; ``version`` is the current one of the base's weights.

        The text omits an incomplete character, and the beginning of a possible stop string: it only
        grows.
        """
        count = len(self.sequence.output_ids)
        body: dict[str, Any] = {"output_ids": self.sequence.output_ids[:count]}
        if self._tokenizer is not None:
            body["text"] = self.text_so_far(count)
        own_version = self.sequence.version_of_weights(version)
        body["meta_info"] = meta_info(self.job, self._tokenizer, count, own_version)
        return body

    def final(self) -> dict[str, Any]:
        sequence = self.sequence
        count = len(sequence.output_ids)
        body: dict[str, Any] = {"output_ids": list(sequence.output_ids)}
        if self._tokenizer is not None:
            body["text"] = final_text(self.job, self._tokenizer)
        body["meta_info"] = meta_info(self.job, self._tokenizer, count, sequence.final_version)
        if sequence.sampling_mask is not None:
            body["meta_info"]["output_token_sampling_mask"] = sequence.sampling_mask[:count]
            body["meta_info"]["output_token_sampling_logprobs"] = sequence.sampling_logprobs[:count]
        if self.job.experts_start is not None:
            assert sequence.experts is not None
            start = self.job.experts_start
            # the model has not processed the last token
            body["meta_info"]["routed_experts"] = sequence.experts.encoded(
                start, sequence.length - 1
            )
            body["meta_info"]["routed_experts_start_len"] = start
        return body

    def text_so_far(self, count: int) -> str:
        """Return the text of the first ``count`` tokens, see `partial`. The last may be a stop
        token before the engine thread has reported the end."""
        assert self._tokenizer is not None
        if count and self.sequence.output_ids[count - 1] in self.sequence.stop_ids:
            count -= 1
        if self._stream_text is None:
            params = self.sequence.params
            self._stream_text = TextStream(
                self._tokenizer, params.skip_special_tokens, params.spaces_between_special_tokens
            )
        self._stream_text.extend(self.sequence.output_ids[self._streamed : count])
        self._streamed = count
        return hold_back(self._stream_text.text, self.sequence.params.stop)


def final_text(job: Job, tokenizer: Tokenizer) -> str:
    """Decode the output, without the stop string or token unless ``no_stop_trim``."""
    sequence = job.sequence
    params = sequence.params
    matched = (sequence.finish_reason or {}).get("matched")
    ids = sequence.output_ids
    if isinstance(matched, int) and not params.no_stop_trim:
        ids = ids[:-1]
    text = tokenizer.decode(
        ids,
        skip_special_tokens=params.skip_special_tokens,
        spaces_between_special_tokens=params.spaces_between_special_tokens,
    )
    return trim_stop(text, matched, params.no_stop_trim)


def meta_info(job: Job, tokenizer: Tokenizer | None, count: int, version: str) -> dict[str, Any]:
    """Make SGLang's ``meta_info`` for the first ``count`` output tokens."""
    sequence = job.sequence
    info: dict[str, Any] = {
        "id": sequence.rid,
        "finish_reason": sequence.finish_reason,
        "prompt_tokens": len(sequence.prompt),
        "completion_tokens": count,
        "cached_tokens": sequence.num_cached,
        "weight_version": version,
        "token_weight_versions": [[start, spanned] for start, spanned in sequence.versions],
        "num_retractions": sequence.num_retractions,
    }
    if job.return_logprob:
        info |= _logprobs(job, tokenizer, count)
    if sequence.finish_reason is not None:
        info |= _times(sequence, count)
    return info


def _logprobs(job: Job, tokenizer: Tokenizer | None, count: int) -> dict[str, Any]:
    sequence = job.sequence
    shown = tokenizer if job.text_in_logprobs else None
    output = _triples(sequence.output_logprobs[:count], sequence.output_ids[:count], shown)
    info: dict[str, Any] = {
        "input_token_logprobs": [],
        "output_token_logprobs": output,
        "output_token_logprobs_length": len(output),
    }
    if sequence.logprob_start is not None:
        ids = sequence.prompt[sequence.logprob_start :].tolist()
        info["input_token_logprobs"] = _triples([None, *sequence.input_logprobs], ids, shown)
    if sequence.num_top_logprobs:
        info["output_top_logprobs"] = [_top(row, shown) for row in sequence.top_logprobs[:count]]
        # nothing predicts the first position
        starts = [] if sequence.logprob_start is None else [None]
        info["input_top_logprobs"] = [
            *starts,
            *(_top(row, shown) for row in sequence.input_top_logprobs),
        ]
    return info


def _top(row: list[tuple[float, int]], tokenizer: Tokenizer | None) -> list[list[Any]]:
    return _triples([value for value, _ in row], [token for _, token in row], tokenizer)


def _triples(values: list[Any], ids: list[int], tokenizer: Tokenizer | None) -> list[list[Any]]:
    """Return [[log-prob, token id, text or None], …]"""
    if tokenizer is None:
        return [[value, token, None] for value, token in zip(values, ids)]
    return [[value, token, tokenizer.decode([token])] for value, token in zip(values, ids)]


def _times(sequence: Sequence, count: int) -> dict[str, Any]:
    times = sequence.times
    decode = times.finished - times.first_token if times.first_token else 0.0
    info = {
        "e2e_latency": times.finished - times.received,
        "queue_time": (times.started or times.finished) - times.received,
        "prefill_time": times.prefill,
        "decode_time": decode,
    }
    if count > 1 and decode > 0:
        info["decode_throughput"] = (count - 1) / decode
    return info
