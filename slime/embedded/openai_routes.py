"""Serve OpenAI's ``/v1/chat/completions``, ``/v1/completions`` and ``/v1/models``, and the
tokenizer's routes."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable
from typing import Any, cast

from aiohttp import web

from slime.embedded.generate_request import Job
from slime.embedded.generate_routes import (
    Answer,
    ServerState,
    check_can_generate,
    final_text,
    json_body,
    json_response,
    refuse_known_rids,
    send_events,
    state_of,
)
from slime.embedded.openai_request import (
    OpenAIRequest,
    parse_chat,
    parse_completion,
    render_chat,
    split_model,
)
from slime.engines import chat_answers
from slime.engines.chat_answers import GOING_ON, call_delta, piece, tool_call
from slime.engines.request_fields import FLAG, BadRequest, optional, token
from slime.engines.tool_calls import Reply

routes = web.RouteTableDef()


# -- models ----------------------------------------------------------------------------------------


def _card(state: ServerState, adapter: str = "") -> dict[str, Any]:
    """Describe the base, or one of its adapters."""
    path = state.engine.options.model_path
    return {
        "id": adapter or state.model_name,
        "object": "model",
        "created": int(time.time()),
        "owned_by": "slime",
        "root": state.engine.adapters.find(adapter, "model").path if adapter else path,
        "parent": state.model_name if adapter else None,
        "max_model_len": state.engine.max_length,
    }


@routes.get("/v1/models")
async def models(request: web.Request) -> web.Response:
    state = state_of(request)
    cards = [_card(state), *(_card(state, name) for name in state.engine.adapters.loaded)]
    return json_response({"object": "list", "data": cards})


@routes.get("/v1/models/{model:.+}")
async def model(request: web.Request) -> web.Response:
    state = state_of(request)
    name = request.match_info["model"]
    adapter = split_model(name, state.limits, state.model_name)[1]
    return _unknown_model(state, name) or json_response(_card(state, adapter))


def _unknown_model(state: ServerState, name: str) -> web.Response | None:
    """Return OpenAI's 404 for an unknown model, else None. "default" is SGLang's name of the model.

    A server without a configured name accepts any name (for engines of a run, because agents use
    arbitrary ones).
    """
    options = state.engine.options
    base, _ = split_model(name, state.limits, state.model_name)
    if options.served_model_name is None or base in (
        state.model_name,
        options.model_path,
        "default",
        "",
    ):
        return None
    said = f"The model '{name}' does not exist; this server has '{state.model_name}'"
    error = {
        "message": said,
        "type": "invalid_request_error",
        "param": "model",
        "code": "model_not_found",
    }
    return json_response({"error": error}, status=404)


# -- completions -----------------------------------------------------------------------------------


@routes.post("/v1/chat/completions")
async def chat_completions(request: web.Request) -> web.StreamResponse:
    state = state_of(request)
    check_can_generate(state)
    given = (state.limits, state.tokenizer, state.model_name, state.tool_format)
    body = await json_body(request)
    if state.limits.images is None:
        asked = parse_chat(body, *given)
    else:  # decoding images here would block other requests
        asked = await asyncio.to_thread(parse_chat, body, *given)
    return _unknown_model(state, asked.model) or await _answer(
        request, asked, _chat_choice, _chat_chunks, "chat.completion", "chat.completion.chunk"
    )


@routes.post("/v1/completions")
async def completions(request: web.Request) -> web.StreamResponse:
    state = state_of(request)
    check_can_generate(state)
    if state.tokenizer is None:
        raise BadRequest("this model directory has no tokenizer; use /generate with input_ids")
    asked = parse_completion(await json_body(request), state.limits, state.model_name)
    return _unknown_model(state, asked.model) or await _answer(
        request, asked, _text_choice, _text_chunks, "text_completion", "text_completion"
    )


async def _answer(
    request: web.Request,
    asked: OpenAIRequest,
    choice: Callable[[int, OpenAIRequest, ServerState], dict[str, Any]],
    chunks: Callable[[OpenAIRequest, ServerState], AsyncIterator[dict[str, Any]]],
    whole: str,
    part: str,
) -> web.StreamResponse:
    """Generate; answer with all choices at once, or with chunks and, if requested, the usage at the
    end."""
    state = state_of(request)
    jobs = asked.generate.jobs
    refuse_known_rids(state, [job.sequence.rid for job in jobs])
    if asked.generate.stream:
        return await send_events(request, _stream(asked, chunks(asked, state), part))
    await state.hub.run(state.engine, [job.sequence for job in jobs])
    body = _envelope(asked, whole)
    body["choices"] = [choice(index, asked, state) for index in range(len(jobs))]
    body["usage"] = _usage(asked)
    body["metadata"] = {"weight_version": jobs[0].sequence.final_version}
    return json_response(body)


async def _stream(
    asked: OpenAIRequest, choices: AsyncIterator[dict[str, Any]], kind: str
) -> AsyncIterator[dict[str, Any]]:
    head = _envelope(asked, kind)
    async for choice in choices:
        yield (
            head
            | {"choices": [choice]}
            | ({"usage": _usage(asked)} if asked.continuous_usage else {})
        )
    if asked.include_usage:
        yield head | {"choices": [], "usage": _usage(asked)}


async def _news(
    asked: OpenAIRequest, state: ServerState
) -> AsyncIterator[tuple[int, str, slice, bool]]:
    """Yield (choice, new text, its tokens, finished) during a stream; the texts of a choice
    concatenate to its whole text."""
    jobs = asked.generate.jobs
    answers = [Answer(job, state.tokenizer) for job in jobs]
    shown = [""] * len(jobs)
    counts = [0] * len(jobs)
    async for index, ended in state.hub.stream(state.engine, [job.sequence for job in jobs]):
        count = len(jobs[index].sequence.output_ids)
        text = (
            final_text(jobs[index], state.tokenizer) if ended else answers[index].text_so_far(count)
        )
        new = text[len(shown[index]) :]
        begin = counts[index]
        if new or ended or asked.logprobs:
            shown[index] = text
            counts[index] = count
            yield index, new, slice(begin, count), ended


# -- chat ------------------------------------------------------------------------------------------


def _chat_choice(index: int, asked: OpenAIRequest, state: ServerState) -> dict[str, Any]:
    job = asked.generate.jobs[index]
    reply = _reply(asked, state, final_text(job, state.tokenizer), ended=True)
    said = chat_answers.message(reply.text, [tool_call(call) for call in reply.calls])
    logprobs = _chat_logprobs(job, state.tokenizer, slice(None)) if asked.logprobs else None
    return chat_answers.choice(index, said, _ending(job, bool(reply.calls)), logprobs)


async def _chat_chunks(asked: OpenAIRequest, state: ServerState) -> AsyncIterator[dict[str, Any]]:
    """Yield the role of every choice, then its text and calls when available, then its end."""
    written = [""] * len(asked.generate.jobs)
    sent = [Reply("")] * len(asked.generate.jobs)
    for index in range(len(asked.generate.jobs)):
        yield piece(index, {"role": "assistant", "content": ""})
    async for index, new, tokens, ended in _news(asked, state):
        job = asked.generate.jobs[index]
        before = sent[index]
        written[index] += new
        reply = sent[index] = _reply(asked, state, written[index], ended=ended)
        text = reply.text[len(before.text) :]
        if text or (asked.logprobs and tokens.stop > tokens.start):
            logprobs = _chat_logprobs(job, state.tokenizer, tokens) if asked.logprobs else None
            yield piece(index, {"content": text}, logprobs=logprobs)
        for number in range(len(before.calls), len(reply.calls)):
            yield piece(index, call_delta(number, tool_call(reply.calls[number])))
        if ended:
            yield piece(index, {}, _ending(job, bool(reply.calls)))


def _reply(asked: OpenAIRequest, state: ServerState, text: str, *, ended: bool) -> Reply:
    if state.tool_format is None or not asked.tools:
        return Reply(text)
    return state.tool_format.read(text, asked.tools, ended=ended)


def _chat_logprobs(job: Job, tokenizer: Any, tokens: slice) -> dict[str, Any]:
    sequence = job.sequence

    def entry(token_id: int, value: float) -> dict[str, Any]:
        text = tokenizer.decode([token_id])
        return {"token": text, "logprob": value, "bytes": list(text.encode()), "token_id": token_id}

    if sequence.top_logprobs:
        tops = sequence.top_logprobs[tokens]
    else:
        tops = [[] for _ in sequence.output_ids[tokens]]
    content = [
        entry(token_id, value)
        | {"top_logprobs": [entry(other, other_value) for other_value, other in row]}
        for token_id, value, row in zip(
            sequence.output_ids[tokens], sequence.output_logprobs[tokens], tops
        )
    ]
    return {"content": content}


# -- text ------------------------------------------------------------------------------------------


def _text_choice(index: int, asked: OpenAIRequest, state: ServerState) -> dict[str, Any]:
    job = asked.generate.jobs[index]
    tokenizer = state.tokenizer
    text = final_text(job, tokenizer)
    if asked.echo:
        text = _prompt_text(job, tokenizer) + text
    logprobs = _text_logprobs(job, tokenizer, slice(None), asked.echo) if asked.logprobs else None
    return {"index": index, "text": text, "logprobs": logprobs} | _ending(job)


async def _text_chunks(asked: OpenAIRequest, state: ServerState) -> AsyncIterator[dict[str, Any]]:
    """Yield the text of every choice when available; the last chunk of a choice contains its
    end."""
    echoed: set[int] = set()
    async for index, new, tokens, ended in _news(asked, state):
        job = asked.generate.jobs[index]
        echo = asked.echo and index not in echoed
        echoed.add(index)
        text = _prompt_text(job, state.tokenizer) + new if echo else new
        logprobs = _text_logprobs(job, state.tokenizer, tokens, echo) if asked.logprobs else None
        ending = _ending(job) if ended else GOING_ON
        yield {"index": index, "text": text, "logprobs": logprobs} | ending


def _prompt_text(job: Job, tokenizer: Any) -> str:
    return tokenizer.decode(
        job.sequence.prompt.tolist(), skip_special_tokens=job.sequence.params.skip_special_tokens
    )


def _text_logprobs(job: Job, tokenizer: Any, tokens: slice, echo: bool) -> dict[str, Any]:
    """Return parallel lists; the prompt's first token has no log-prob. As in SGLang, offsets are
    not computed (-1)."""
    sequence = job.sequence
    ids = sequence.output_ids[tokens]
    values = cast("list[float | None]", sequence.output_logprobs[tokens])
    tops: list[Any] = list(sequence.top_logprobs[tokens])
    if echo:
        # the whole prompt, unless it was aborted during its prefill
        scored = sequence.prompt[: 1 + len(sequence.input_logprobs)]
        ids = scored.tolist() + ids
        values = [None, *sequence.input_logprobs, *values]
        tops = [None, *sequence.input_top_logprobs, *tops] if sequence.num_top_logprobs else []
    texts = [tokenizer.decode([token_id]) for token_id in ids]
    shown = [
        None if row is None else {tokenizer.decode([other]): value for value, other in row}
        for row in tops
    ]
    return {
        "tokens": texts,
        "token_logprobs": values,
        "top_logprobs": shown,
        "text_offset": [-1] * len(ids),
    }


# -- both ------------------------------------------------------------------------------------------


def _ending(job: Job, calls_tools: bool = False) -> dict[str, Any]:
    reason = job.sequence.finish_reason or {}
    return chat_answers.ending(reason.get("type"), reason.get("matched"), calls_tools=calls_tools)


def _envelope(asked: OpenAIRequest, kind: str) -> dict[str, Any]:
    return chat_answers.envelope(asked.id, asked.created, asked.model, kind)


def _usage(asked: OpenAIRequest) -> dict[str, Any]:
    """Count the tokens so far; a prompt counts once, however many samples it has."""
    sequences = [job.sequence for job in asked.generate.jobs]
    firsts = sequences[:: asked.generate.n]
    prompt = sum(len(sequence.prompt) for sequence in firsts)
    completion = sum(len(sequence.output_ids) for sequence in sequences)
    return chat_answers.usage(prompt, completion, sum(sequence.num_cached for sequence in firsts))


# -- the tokenizer ---------------------------------------------------------------------------------


@routes.post("/tokenize")
@routes.post("/v1/tokenize")
async def tokenize(request: web.Request) -> web.Response:
    state = state_of(request)
    body = await json_body(request)
    prompt = body.get("prompt")
    if (prompt is None) == (body.get("messages") is None):
        raise BadRequest("give either prompt or messages")
    if state.tokenizer is None:
        raise BadRequest("this model directory has no tokenizer")
    counts: Any
    if prompt is None:
        ids: Any = render_chat(body, state.tokenizer)
        counts = len(ids)
    else:
        special = optional(body, "add_special_tokens", FLAG, True)
        texts = prompt if isinstance(prompt, list) else [prompt]
        if not all(isinstance(text, str) for text in texts):
            raise BadRequest("prompt must be a string or a list of strings", "prompt")
        ids = [state.tokenizer.encode(text, add_special_tokens=special) for text in texts]
        counts = [len(item) for item in ids]
        if isinstance(prompt, str):
            ids = ids[0]
            counts = counts[0]
    return json_response({"tokens": ids, "count": counts, "max_model_len": state.engine.max_length})


@routes.post("/detokenize")
@routes.post("/v1/detokenize")
async def detokenize(request: web.Request) -> web.Response:
    state = state_of(request)
    body = await json_body(request)
    if state.tokenizer is None:
        raise BadRequest("this model directory has no tokenizer")
    given = body.get("tokens")
    if not isinstance(given, list):
        raise BadRequest(
            f"tokens must be a list of token ids or a list of such lists, got {given!r}", "tokens"
        )
    is_batch = bool(given) and isinstance(given[0], list)
    skip = optional(body, "skip_special_tokens", FLAG, True)
    one = token(state.limits.vocab_size)
    texts = []
    for ids in given if is_batch else [given]:
        checked = [one.read("tokens", item) for item in (ids if isinstance(ids, list) else [ids])]
        texts.append(state.tokenizer.decode(checked, skip_special_tokens=skip))
    return json_response({"text": texts if is_batch else texts[0]})
