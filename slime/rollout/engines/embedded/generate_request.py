"""The body of ``/generate``: one prompt or several, as text or tokens, checked and turned into sequences."""

from __future__ import annotations

import difflib
import random
import uuid
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from slime.rollout.engines.embedded.sampling_params import BadRequest, Params, parse_params, token_id
from slime.rollout.engines.embedded.sequence import Sequence
from slime.rollout.engines.embedded.text import TextStream, Tokenizer

_FIELDS = (
    "rid",
    "text",
    "input_ids",
    "sampling_params",
    "return_logprob",
    "logprob_start_len",
    "top_logprobs_num",
    "return_text_in_logprobs",
    "stream",
)
#: Known to SGLang, without effect on what is generated.
_WITHOUT_EFFECT = (
    "log_metrics",
    "session_id",
    "routing_key",
    "conversation_id",
    "priority",
    "extra_key",
    "no_logs",
    "custom_labels",
    "received_time",
    "background",
    "modalities",
    "data_parallel_rank",
    "routed_dp_rank",
    "routed_experts_start_len",
    "use_audio_in_video",
)


@dataclass(frozen=True)
class Limits:
    """What requests are checked against, and the pieces they are built with.

    Attributes:
        eos_token_ids: of the model and its tokenizer.
        context_length: most tokens of prompt plus response.
        noise: source of seeds for requests that bring none.
    """

    vocab_size: int
    context_length: int
    eos_token_ids: frozenset[int]
    tokenizer: Tokenizer | None
    noise: random.Random


@dataclass
class Job:
    """One sample of a request.

    Attributes:
        sequence: what the engine works on.
        params: how it is sampled and shown.
        return_logprob, text_in_logprobs: what the answer carries.
    """

    sequence: Sequence
    params: Params
    return_logprob: bool
    text_in_logprobs: bool


@dataclass
class GenerateRequest:
    """A parsed body. ``is_single``: the answer is one object, not a list."""

    jobs: list[Job]
    is_single: bool
    stream: bool


def parse_generate(body: Any, limits: Limits) -> GenerateRequest:
    """Check a ``/generate`` body.

    Raises:
        BadRequest: anything that cannot be served, said so that the caller can mend it.
    """
    if not isinstance(body, Mapping):
        raise BadRequest(f"the body must be a JSON object, got {type(body).__name__}")
    _refuse_unknown(body)
    prompts, is_batch = _prompts(body, limits)
    count = len(prompts)
    raw_params = _per_prompt(body.get("sampling_params"), "sampling_params", count, is_batch, {})
    params = [parse_params(raw, limits.vocab_size) for raw in raw_params]
    if len({p.n for p in params}) > 1:
        raise BadRequest("n must be the same for all prompts of one request")
    n = params[0].n
    stream = bool(body.get("stream"))
    return_logprob = _per_prompt(body.get("return_logprob"), "return_logprob", count, is_batch, False)
    starts = _per_prompt(body.get("logprob_start_len"), "logprob_start_len", count, is_batch, -1)
    tops = _per_prompt(body.get("top_logprobs_num"), "top_logprobs_num", count, is_batch, 0)
    rids = _rids(body.get("rid"), count, n, is_batch)
    jobs = []
    for number, prompt in enumerate(prompts):
        wants = bool(return_logprob[number])
        for copy in range(n):
            sequence = make_sequence(
                rids[number * n + copy],
                prompt,
                params[number],
                limits,
                copy=copy,
                logprob_start=_logprob_start(starts[number], len(prompt)) if wants else None,
                num_top_logprobs=int(tops[number] or 0) if wants else 0,
                stream=stream,
            )
            jobs.append(Job(sequence, params[number], wants, bool(body.get("return_text_in_logprobs"))))
    return GenerateRequest(jobs, is_single=not is_batch and n == 1, stream=stream)


def make_sequence(
    rid: str,
    prompt: list[int],
    params: Params,
    limits: Limits,
    *,
    copy: int = 0,
    logprob_start: int | None = None,
    num_top_logprobs: int = 0,
    stream: bool = False,
) -> Sequence:
    """A sequence whose ``max_new_tokens`` fits the context.

    Raises:
        BadRequest: the prompt leaves no room, or stop strings without a tokenizer.
    """
    length, context = len(prompt), limits.context_length
    if length >= context:
        raise BadRequest(f"the prompt has {length} tokens, the context holds {context} with at least 1 new token")
    room = context - length
    wanted = params.max_new_tokens if params.max_new_tokens is not None else room
    text = None
    if params.stop:
        if limits.tokenizer is None:
            raise BadRequest("stop strings need a tokenizer, and this model directory has none; use stop_token_ids")
        text = TextStream(limits.tokenizer, params.skip_special_tokens, params.spaces_between_special_tokens)
    seed = params.sampling_seed
    return Sequence(
        rid,
        prompt,
        params,
        min(wanted, room),
        frozenset() if params.ignore_eos else limits.eos_token_ids | params.stop_token_ids,
        limits.noise.getrandbits(63) if seed is None else seed + copy,
        text=text,
        logprob_start=logprob_start,
        num_top_logprobs=num_top_logprobs,
        stream=stream,
    )


def _refuse_unknown(body: Mapping[str, Any]) -> None:
    for name, value in body.items():
        if name in _FIELDS or name in _WITHOUT_EFFECT or value is None or value is False or value == []:
            continue
        near = difflib.get_close_matches(name, _FIELDS, n=1)
        hint = f"; nearest: '{near[0]}'" if near else ""
        raise BadRequest(f"the embedded engine does not support the field '{name}'{hint}")


def _prompts(body: Mapping[str, Any], limits: Limits) -> tuple[list[list[int]], bool]:
    """Token ids of every prompt, and whether the request is a batch."""
    text, ids = body.get("text"), body.get("input_ids")
    if (text is None) == (ids is None):
        raise BadRequest("give either text or input_ids")
    if text is not None:
        texts = [text] if isinstance(text, str) else text
        if not isinstance(texts, list) or not texts or not all(isinstance(item, str) for item in texts):
            raise BadRequest("text must be a string or a list of strings")
        if limits.tokenizer is None:
            raise BadRequest("this model directory has no tokenizer; send input_ids")
        prompts = [limits.tokenizer.encode(item) for item in texts]
        is_batch = not isinstance(text, str)
    else:
        if not isinstance(ids, list) or not ids:
            raise BadRequest("input_ids must be a list of token ids that is not empty, or a list of such lists")
        is_batch = isinstance(ids[0], list)
        prompts = ids if is_batch else [ids]
        for prompt in prompts:
            _check_ids(prompt, limits.vocab_size)
    if any(not prompt for prompt in prompts):
        raise BadRequest("a prompt is empty")
    return prompts, is_batch


def _check_ids(prompt: Any, vocab_size: int) -> None:
    if not isinstance(prompt, list):
        raise BadRequest("input_ids mixes token ids and lists of them")
    valid = all(type(item) is int and 0 <= item < vocab_size for item in prompt)
    if not valid:
        for item in prompt:
            token_id(item, "input_ids", vocab_size)


def _per_prompt(value: Any, name: str, count: int, is_batch: bool, default: Any) -> list[Any]:
    """One value per prompt, from one for all or a list."""
    if value is None:
        return [default] * count
    if not isinstance(value, list):
        return [value] * count
    if not is_batch or len(value) != count:
        raise BadRequest(f"{name} has {len(value)} entries for {count} prompt{'s' if count > 1 else ''}")
    return [default if item is None else item for item in value]


def _rids(rid: Any, count: int, n: int, is_batch: bool) -> list[str]:
    total = count * n
    if rid is None:
        return [uuid.uuid4().hex for _ in range(total)]
    if isinstance(rid, str):
        return [rid] if total == 1 and not is_batch else [f"{rid}_{i}" for i in range(total)]
    if not isinstance(rid, list) or len(rid) != count or not all(isinstance(item, str) for item in rid):
        raise BadRequest("rid must be a string, or a list of one string per prompt")
    if len(set(rid)) != count:
        raise BadRequest("rid holds the same id twice")
    return rid if n == 1 else [f"{item}_{i}" for item in rid for i in range(n)]


def _logprob_start(value: Any, prompt_length: int) -> int | None:
    """First prompt position of ``logprob_start_len``; -1 means none."""
    if isinstance(value, bool) or not isinstance(value, int) or value < -1:
        raise BadRequest(f"logprob_start_len must be -1 (none) or a position of the prompt, got {value!r}")
    if value > prompt_length:
        raise BadRequest(f"logprob_start_len is {value}, the prompt has {prompt_length} tokens")
    return None if value == -1 or value == prompt_length else value
