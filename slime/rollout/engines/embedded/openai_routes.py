"""``/v1/chat/completions`` and ``/v1/models`` as OpenAI's clients call them."""

from __future__ import annotations

import time
import uuid
from collections.abc import AsyncIterator
from dataclasses import dataclass
from typing import Any

from aiohttp import web
from jinja2 import TemplateError

from slime.rollout.engines.embedded.generate_request import Job, make_sequence
from slime.rollout.engines.embedded.generate_routes import ready_to_generate, send_events
from slime.rollout.engines.embedded.responses import Answer, final_text
from slime.rollout.engines.embedded.sampling_params import BadRequest, parse_params
from slime.rollout.engines.embedded.state import ServerState, json_body, json_response, state_of

routes = web.RouteTableDef()

#: Field of the chat request → our name of the sampling parameter.
_SAMPLING = {
    "temperature": "temperature",
    "top_p": "top_p",
    "top_k": "top_k",
    "min_p": "min_p",
    "max_tokens": "max_new_tokens",
    "max_completion_tokens": "max_new_tokens",
    "min_tokens": "min_new_tokens",
    "n": "n",
    "stop": "stop",
    "stop_token_ids": "stop_token_ids",
    "seed": "sampling_seed",
    "frequency_penalty": "frequency_penalty",
    "presence_penalty": "presence_penalty",
    "repetition_penalty": "repetition_penalty",
    "ignore_eos": "ignore_eos",
    "skip_special_tokens": "skip_special_tokens",
    "no_stop_trim": "no_stop_trim",
    "logit_bias": "logit_bias",
}
_OTHERS = (
    "model",
    "messages",
    "stream",
    "stream_options",
    "logprobs",
    "top_logprobs",
    "tools",
    "chat_template_kwargs",
    "rid",
)
#: Accepted and without meaning here.
_WITHOUT_EFFECT = ("user", "store", "metadata", "service_tier", "parallel_tool_calls", "tool_choice")


@dataclass
class Chat:
    """A parsed chat request; its jobs are the choices."""

    id: str
    created: int
    model: str
    jobs: list[Job]
    stream: bool
    include_usage: bool
    logprobs: bool


@routes.get("/v1/models")
async def models(request: web.Request) -> web.Response:
    state = state_of(request)
    card = {
        "id": state.model_name,
        "object": "model",
        "created": int(time.time()),
        "owned_by": "slime",
        "root": state.engine.options.model_path,
        "max_model_len": state.engine.max_length,
    }
    return json_response({"object": "list", "data": [card]})


@routes.post("/v1/chat/completions")
async def chat_completions(request: web.Request) -> web.StreamResponse:
    state = state_of(request)
    ready_to_generate(state)
    chat = _parse(await json_body(request), state)
    if chat.stream:
        return await send_events(request, _chunks(chat, state))
    await state.hub.run(state.engine, [job.sequence for job in chat.jobs])
    choices = []
    for index, job in enumerate(chat.jobs):
        message = {"role": "assistant", "content": final_text(job, state.tokenizer), "tool_calls": None}
        choices.append({"index": index, "message": message, **_ending(job, chat, state)})
    body = _envelope(chat, "chat.completion") | {"choices": choices, "usage": _usage(chat)}
    body["metadata"] = {"weight_version": chat.jobs[0].sequence.final_version}
    return json_response(body)


def _parse(body: dict[str, Any], state: ServerState) -> Chat:
    if state.tokenizer is None or not state.tokenizer.chat_template:
        raise BadRequest("this model has no chat template; use /generate")
    params: dict[str, Any] = {"max_new_tokens": None}
    for name, value in body.items():
        if name in _SAMPLING:
            if value is not None:
                params[_SAMPLING[name]] = value
        elif name not in _OTHERS and name not in _WITHOUT_EFFECT and value not in (None, False, [], {}):
            raise BadRequest(f"the embedded engine does not support the field '{name}'")
    parsed = parse_params(params, state.limits.vocab_size)
    prompt = _render(body, state)
    wants_logprobs = bool(body.get("logprobs"))
    tops = int(body.get("top_logprobs") or 0) if wants_logprobs else 0
    stream = bool(body.get("stream"))
    rid = str(body.get("rid") or f"chatcmpl-{uuid.uuid4().hex}")
    jobs = []
    for copy in range(parsed.n):
        sequence = make_sequence(
            f"{rid}_{copy}", prompt, parsed, state.limits, copy=copy, num_top_logprobs=tops, stream=stream
        )
        jobs.append(Job(sequence, parsed, wants_logprobs, text_in_logprobs=True))
    return Chat(
        id=rid,
        created=int(time.time()),
        model=str(body.get("model") or state.model_name),
        jobs=jobs,
        stream=stream,
        include_usage=bool((body.get("stream_options") or {}).get("include_usage")),
        logprobs=wants_logprobs,
    )


def _render(body: dict[str, Any], state: ServerState) -> list[int]:
    messages = body.get("messages")
    if not isinstance(messages, list) or not messages:
        raise BadRequest("messages must be a list that is not empty")
    if not all(isinstance(message, dict) and isinstance(message.get("role"), str) for message in messages):
        raise BadRequest("every message must be an object with a role and content")
    flat = [message | {"content": _as_text(message.get("content"))} for message in messages]
    continues = flat[-1]["role"] == "assistant"
    try:
        ids = state.tokenizer.apply_chat_template(
            flat,
            tools=body.get("tools"),
            add_generation_prompt=not continues,
            continue_final_message=continues,
            tokenize=True,
            return_dict=False,
            **(body.get("chat_template_kwargs") or {}),
        )
    except (TemplateError, ValueError, TypeError) as error:
        raise BadRequest(f"the chat template refused the messages: {error}") from error
    return list(ids)


def _as_text(content: Any) -> str:
    """Content as a string; parts of type text are joined."""
    if content is None or isinstance(content, str):
        return content or ""
    if isinstance(content, list) and all(isinstance(part, dict) and part.get("type") == "text" for part in content):
        return "".join(str(part.get("text", "")) for part in content)
    raise BadRequest("content must be a string or a list of text parts; this engine takes text only")


async def _chunks(chat: Chat, state: ServerState) -> AsyncIterator[Any]:
    """One chunk with the role, then one per new text of a choice, one with its end, and the usage if asked for."""
    answers = [Answer(job, state.tokenizer) for job in chat.jobs]
    shown = [""] * len(answers)
    head = _envelope(chat, "chat.completion.chunk")
    for index in range(len(answers)):
        yield head | {"choices": [_delta(index, {"role": "assistant", "content": ""})]}
    async for index, ended in state.hub.stream(state.engine, [job.sequence for job in chat.jobs]):
        answer = answers[index].final() if ended else answers[index].partial(state.engine.store.version)
        new, shown[index] = answer["text"][len(shown[index]) :], answer["text"]
        if new:
            yield head | {"choices": [_delta(index, {"content": new})]}
        if ended:
            yield head | {"choices": [_delta(index, {}) | _ending(chat.jobs[index], chat, state)]}
    if chat.include_usage:
        yield head | {"choices": [], "usage": _usage(chat)}


def _delta(index: int, delta: dict[str, Any]) -> dict[str, Any]:
    return {"index": index, "delta": delta, "logprobs": None, "finish_reason": None}


def _ending(job: Job, chat: Chat, state: ServerState) -> dict[str, Any]:
    reason = job.sequence.finish_reason or {}
    matched = reason.get("matched")
    logprobs = _logprobs(job, state) if chat.logprobs else None
    return {"finish_reason": reason.get("type"), "matched_stop": matched, "logprobs": logprobs}


def _logprobs(job: Job, state: ServerState) -> dict[str, Any]:
    sequence = job.sequence

    def entry(token: int, value: float) -> dict[str, Any]:
        text = state.tokenizer.decode([token])
        return {"token": text, "logprob": value, "bytes": list(text.encode()), "token_id": token}

    content = []
    for position, (token, value) in enumerate(zip(sequence.output_ids, sequence.output_logprobs)):
        tops = sequence.top_logprobs[position] if sequence.top_logprobs else []
        content.append(entry(token, value) | {"top_logprobs": [entry(other, top) for top, other in tops]})
    return {"content": content}


def _envelope(chat: Chat, kind: str) -> dict[str, Any]:
    return {"id": chat.id, "object": kind, "created": chat.created, "model": chat.model}


def _usage(chat: Chat) -> dict[str, Any]:
    prompt = len(chat.jobs[0].sequence.prompt)
    completion = sum(len(job.sequence.output_ids) for job in chat.jobs)
    cached = max(job.sequence.num_cached for job in chat.jobs)
    return {
        "prompt_tokens": prompt,
        "completion_tokens": completion,
        "total_tokens": prompt + completion,
        "prompt_tokens_details": {"cached_tokens": cached},
    }
