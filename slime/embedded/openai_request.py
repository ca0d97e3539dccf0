"""Check the bodies of OpenAI's requests and turn them into ``/generate`` requests."""

from __future__ import annotations

import contextlib
import time
import uuid
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from jinja2 import TemplateError

from slime.embedded.generate_request import (
    UNSUPPORTED,
    WITHOUT_EFFECT,
    GenerateRequest,
    RequestLimits,
    parse_generate,
    refuse_unknown,
)
from slime.engines.chat_messages import read_messages, read_tools, refuse_constraints, shows_tools
from slime.engines.request_fields import (
    FLAG,
    OBJECT,
    SAMPLING_NAMES,
    TEXT,
    BadRequest,
    integer,
    number,
    optional,
)
from slime.engines.tool_calls import ToolFormat, Tools, tool_schemas
from slime.prompts.chat_template import template_form
from slime.prompts.conversation import ImageParts

#: OpenAI's words for sampling parameters that have another name here.
_RENAMED = {
    "max_tokens": "max_new_tokens",
    "max_completion_tokens": "max_new_tokens",
    "min_tokens": "min_new_tokens",
    "seed": "sampling_seed",
}
#: Field of an OpenAI request → name of the sampling parameter.
_SAMPLING = _RENAMED | {
    name: name
    for name in SAMPLING_NAMES
    if name not in (*_RENAMED.values(), "spaces_between_special_tokens")
}
_HOTTEST = 2  # OpenAI's highest temperature
_SHARED = (
    "model", "stream", "stream_options", "logprobs", "response_format", "rid", "lora_path",
)  # fmt: skip
_CHAT = (
    "messages", "top_logprobs", "tools", "tool_choice", "chat_template_kwargs",
    "continue_final_message",
)  # fmt: skip
_COMPLETION = ("prompt", "echo", "best_of")
#: Accepted but without effect here.
_WITHOUT_EFFECT = (
    *WITHOUT_EFFECT, "user", "store", "metadata", "service_tier", "safety_identifier",
    "prompt_cache_key", "parallel_tool_calls", "separate_reasoning", "stream_reasoning",
    "cache_salt", "routed_experts_start_len",
)  # fmt: skip
#: Known to OpenAI or SGLang but not supported here; allowed if they ask for nothing.
_UNSUPPORTED = (
    *UNSUPPORTED, "regex", "ebnf", "json_schema", "stop_regex", "suffix", "functions",
    "function_call", "modalities", "audio", "input_ids", "reasoning", "reasoning_effort", "task",
    "custom_params", "return_routed_experts", "return_cached_tokens_details", "return_meta_info",
)  # fmt: skip


@dataclass
class OpenAIRequest:
    """A parsed request; its jobs are the choices.

    Attributes:
        include_usage, continuous_usage: whether a stream ends with the usage, and whether every
            chunk contains it.
        logprobs: whether the answer contains log-probs.
        echo: whether the text of a completion begins with its prompt.
        tools: that the model may call, if its calls can be parsed.
    """

    id: str
    created: int
    model: str
    generate: GenerateRequest
    include_usage: bool
    continuous_usage: bool
    logprobs: bool
    echo: bool = False
    tools: Tools = field(default_factory=dict)


def parse_chat(
    body: dict[str, Any],
    limits: RequestLimits,
    tokenizer: Any,
    model: str,
    calls: ToolFormat | None = None,
) -> OpenAIRequest:
    """Check a ``/v1/chat/completions`` body.

    Args:
        calls: the model's format of tool calls; None: they remain text.
    Raises:
        BadRequest: the request cannot be served.
    """
    refuse_unknown(body, (*_SAMPLING, *_SHARED, *_CHAT), _WITHOUT_EFFECT, _UNSUPPORTED)
    _check_temperature(body)
    wants = optional(body, "logprobs", FLAG, False)
    images = None
    if limits.images is not None and tokenizer is not None:
        images = ImageParts(limits.images.vision.placeholder(tokenizer))
    asked = {
        "input_ids": render_chat(body, tokenizer, images),
        "return_logprob": wants,
        "top_logprobs_num": optional(body, "top_logprobs", integer(0, limits.vocab_size), 0)
        if wants
        else 0,
    }
    if images is not None and images.sources:
        asked["image_data"] = images.sources
    defaults: dict[str, Any] = {"max_new_tokens": None}
    tools = tool_schemas(read_tools(body) or []) if calls is not None else {}
    if tools and calls is not None and calls.special_marks:
        defaults["skip_special_tokens"] = False
    request = _finish(body, asked, defaults, limits, "chatcmpl", model, wants)
    request.tools = tools
    return request


def parse_completion(body: dict[str, Any], limits: RequestLimits, model: str) -> OpenAIRequest:
    """Check a ``/v1/completions`` body.

    Raises:
        BadRequest: the request cannot be served.
    """
    refuse_unknown(body, (*_SAMPLING, *_SHARED, *_COMPLETION), _WITHOUT_EFFECT, _UNSUPPORTED)
    _check_temperature(body)
    prompt = body.get("prompt")
    first = prompt[0] if isinstance(prompt, list) and prompt else prompt
    if not isinstance(first, str | int | list):
        raise BadRequest(
            "prompt must be a string, a list of strings, token ids, or a list of lists of them",
            "prompt",
        )
    tops = optional(body, "logprobs", integer(0, limits.vocab_size), None)
    echo = optional(body, "echo", FLAG, False)
    if body.get("best_of") not in (None, body.get("n") or 1):
        raise BadRequest(
            "best_of must be left out or equal n: the embedded engine does not rank samples",
            "best_of",
        )
    asked = {
        "text" if isinstance(first, str) else "input_ids": prompt,
        "return_logprob": tops is not None,
        "top_logprobs_num": tops or 0,
        "logprob_start_len": 0 if echo and tops is not None else -1,
    }
    request = _finish(body, asked, {"max_new_tokens": 16}, limits, "cmpl", model, tops is not None)
    request.echo = echo
    return request


def render_chat(
    body: Mapping[str, Any], tokenizer: Any, images: ImageParts | None = None
) -> list[int]:
    """Apply the model's chat template to ``messages``; returns token ids.

    Args:
        images: collects images; None: images are rejected.
    Raises:
        BadRequest: the template or a text model does not accept the messages.
    """
    if tokenizer is None or not tokenizer.chat_template:
        raise BadRequest("this model has no chat template; use /generate or /v1/completions")
    messages = read_messages(body, images)
    tools = read_tools(body)
    if tools and not shows_tools(tokenizer):
        raise BadRequest(
            "this model's chat template has no place for tools: it would not see them", "tools"
        )
    continues = optional(body, "continue_final_message", FLAG, False)
    if continues and messages[-1]["role"] != "assistant":
        raise BadRequest(
            "continue_final_message needs a last message of the assistant", "continue_final_message"
        )
    options = optional(body, "chat_template_kwargs", OBJECT, {})
    form = template_form(tokenizer, **options)
    flat = [form.shown(message) for message in form.merged(messages)]
    try:
        ids = tokenizer.apply_chat_template(
            flat,
            tools=tools,
            add_generation_prompt=not continues,
            continue_final_message=continues,
            tokenize=True,
            return_dict=False,
            **options,
        )
    except (TemplateError, ValueError, TypeError) as error:
        raise BadRequest(f"the chat template refused the messages: {error}", "messages") from error
    return list(ids)


def _finish(
    body: dict[str, Any],
    asked: dict[str, Any],
    defaults: dict[str, Any],
    limits: RequestLimits,
    prefix: str,
    model: str,
    logprobs: bool,
) -> OpenAIRequest:
    """Read the fields that both kinds of request share."""
    refuse_constraints(body)
    used = {name: ours for name, ours in _SAMPLING.items() if body.get(name) is not None}
    params = defaults | {ours: body[name] for name, ours in used.items()}
    options = optional(body, "stream_options", OBJECT, {})
    own_id = optional(body, "rid", TEXT, "") or f"{prefix}-{uuid.uuid4().hex}"
    asked |= {
        "sampling_params": params,
        "return_text_in_logprobs": True,
        "stream": body.get("stream"),
        "rid": own_id,
        "lora_path": _adapter_of(body, limits, model),
    }
    with _their_names(used | {"prompt": "input_ids"}):
        generate = parse_generate(asked, limits)
    return OpenAIRequest(
        id=own_id,
        created=int(time.time()),
        model=optional(body, "model", TEXT, model),
        generate=generate,
        include_usage=optional(options, "include_usage", FLAG, False),
        continuous_usage=optional(options, "continuous_usage_stats", FLAG, False),
        logprobs=logprobs,
    )


def split_model(name: str, limits: RequestLimits, model: str) -> tuple[str, str]:
    """Split "base:adapter" or an adapter's name into base and adapter ("" for none).

    Without adapters a colon has no meaning.
    """
    if not limits.adapters.enabled or name == model:
        return name, ""
    if name in limits.adapters.loaded:
        return model, name
    base, _, adapter = name.partition(":")
    return base.strip(), adapter.strip()


def _adapter_of(body: Mapping[str, Any], limits: RequestLimits, model: str) -> Any:
    """Return ``lora_path`` of a ``/generate`` request, from the model's name or the field
    itself."""
    named = split_model(optional(body, "model", TEXT, model), limits, model)[1]
    given = body.get("lora_path")
    if not named:
        return given
    if given not in (None, "", named):
        raise BadRequest(f"model names the adapter '{named}', lora_path {given!r}", "lora_path")
    return named


@contextlib.contextmanager
def _their_names(used: Mapping[str, str]) -> Iterator[None]:
    """Rename fields in errors of the block to the caller's names."""
    theirs = {ours: name for name, ours in used.items()}
    try:
        yield
    except BadRequest as error:
        name = theirs.get(error.field or "")
        if name is None:
            raise
        raise BadRequest(str(error).replace(error.field or "", name, 1), name) from error


def _check_temperature(body: Mapping[str, Any]) -> None:
    """Check OpenAI's range of temperatures; ``/generate`` accepts any that is not negative."""
    optional(
        body, "temperature", number(lambda x: 0 <= x <= _HOTTEST, f"from 0 to {_HOTTEST}"), None
    )
