"""Check the body of ``/generate`` (one or more prompts, as text or tokens) and make sequences from
it."""

from __future__ import annotations

import difflib
import random
import uuid
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from slime.embedded.adapters import AdapterTable
from slime.embedded.images import ImageRequests, SequenceImages
from slime.embedded.sequence import Sequence, TextStream, Tokenizer
from slime.engines.request_fields import (
    FLAG,
    OBJECT,
    TEXT,
    BadRequest,
    FieldKind,
    SamplingParams,
    asks_for_nothing,
    integer,
    optional,
    parse_params,
    token,
)

_FIELDS = (
    "rid", "text", "input_ids", "sampling_params", "return_logprob", "logprob_start_len",
    "top_logprobs_num", "return_text_in_logprobs", "return_routed_experts",
    "routed_experts_start_len", "return_sampling_mask", "stream", "lora_path", "image_data",
)  # fmt: skip
#: SGLang's fields for all kinds of requests that have no effect here; below, also those of
#: ``/generate``.
WITHOUT_EFFECT = (
    "session_id", "priority", "extra_key", "custom_labels", "data_parallel_rank", "routed_dp_rank",
    "disagg_prefill_dp_rank", "use_audio_in_video",
)  # fmt: skip
_WITHOUT_EFFECT = (
    *WITHOUT_EFFECT, "model", "log_metrics", "routing_key", "conversation_id", "no_logs",
    "received_time", "external_trace_header", "background", "modalities",
)  # fmt: skip
#: SGLang's fields for all kinds of requests that this engine does not support, allowed if they ask
#: for nothing; below, also those of ``/generate``.
UNSUPPORTED = (
    "images_config", "max_dynamic_patch", "min_dynamic_patch", "return_hidden_states",
    "return_prompt_token_ids", "session_params", "custom_logit_processor",
    "bootstrap_host", "bootstrap_port", "bootstrap_room",
)  # fmt: skip
_UNSUPPORTED = (
    *UNSUPPORTED, "input_embeds", "positional_embed_overrides", "video_data", "audio_data",
    "mm_hashes", "token_ids_logprob", "multi_item_delimiter_indices",
    "return_indexer_topk", "return_entropy", "return_bytes",
    "require_reasoning", "lora_id", "bootstrap_pair_key", "decode_tp_size",
)  # fmt: skip

_ANY = FieldKind("anything", lambda value: value)


@dataclass(frozen=True)
class RequestLimits:
    """Limits for checking requests, and objects for parsing them.

    Attributes:
        eos_token_ids: of the model and its tokenizer.
        context_length: most tokens of prompt plus response.
        noise: source of seeds for requests without one.
        records_experts: answers can contain the chosen experts.
        adapters: that requests may name.
        images: reads the images of requests; None: only text is served.
    """

    vocab_size: int
    context_length: int
    eos_token_ids: frozenset[int]
    tokenizer: Tokenizer | None
    noise: random.Random
    adapters: AdapterTable
    records_experts: bool = False
    images: ImageRequests | None = None


@dataclass
class Job:
    """One sample of a request.

    Attributes:
        sequence: what the engine works on.
        return_logprob, text_in_logprobs: whether the answer contains them.
        experts_start: first token whose experts the answer contains; None for none.
    """

    sequence: Sequence
    return_logprob: bool
    text_in_logprobs: bool
    experts_start: int | None = None


@dataclass
class GenerateRequest:
    """A parsed body.

    Attributes:
        jobs: the samples of the first prompt, those of the second, …
        is_single: the answer is one object, not a list.
        n: samples of each prompt.
    """

    jobs: list[Job]
    is_single: bool
    stream: bool
    n: int


def parse_generate(raw: Any, limits: RequestLimits) -> GenerateRequest:
    """Check a ``/generate`` body.

    Raises:
        BadRequest: the body is invalid; says how to correct it.
    """
    body = OBJECT.read("the body", raw)
    refuse_unknown(body, _FIELDS, _WITHOUT_EFFECT, _UNSUPPORTED)
    prompts, is_batch = _prompts(body, limits)
    count = len(prompts)
    prompts, images = _with_images(body.get("image_data"), prompts, is_batch, limits)

    def each(name: str, default: Any, kind: FieldKind = _ANY) -> list[Any]:
        """Return one value per prompt, from one for all or a list."""
        value = body.get(name)
        if isinstance(value, list) and (not is_batch or len(value) != count):
            raise BadRequest(
                f"{name} has {len(value)} entries for {count} prompt{'s' if count > 1 else ''}",
                name,
            )
        values = value if isinstance(value, list) else [value] * count
        return [default if item is None else kind.read(name, item) for item in values]

    params = [parse_params(item, limits.vocab_size) for item in each("sampling_params", {})]
    n = params[0].n
    if any(other.n != n for other in params):
        raise BadRequest("n must be the same for all prompts of one request", "n")
    stream = optional(body, "stream", FLAG, False)
    with_text = optional(body, "return_text_in_logprobs", FLAG, False)
    return_logprob = each("return_logprob", False, FLAG)
    starts = each(
        "logprob_start_len", -1, integer(-1, words=": -1 (none) or a position of the prompt")
    )
    tops = each("top_logprobs_num", 0, integer(0, limits.vocab_size))
    return_experts = each("return_routed_experts", False, FLAG)
    if any(return_experts) and not limits.records_experts:
        raise BadRequest(
            "return_routed_experts needs an engine that was started with "
            "--enable-return-routed-experts",
            "return_routed_experts",
        )
    masks = each("return_sampling_mask", False, FLAG)
    if any(mask and not (item.filters or item.greedy) for mask, item in zip(masks, params)):
        raise BadRequest(
            "return_sampling_mask needs top_k, top_p or min_p: every token is sampled from the "
            "whole vocabulary",
            "return_sampling_mask",
        )
    expert_starts = each("routed_experts_start_len", 0, integer(0))
    names = each("lora_path", None, TEXT)
    adapters = [limits.adapters.find(name) if name else None for name in names]
    rids = _rids(body.get("rid"), count, n, is_batch)
    jobs = []
    for index, prompt in enumerate(prompts):
        wants = return_logprob[index]
        logprob_start = None
        experts_start = None
        if return_experts[index]:
            experts_start = expert_starts[index]
            _check_start("routed_experts_start_len", experts_start, len(prompt))
        if wants:
            _check_start("logprob_start_len", starts[index], len(prompt))
            if starts[index] not in (-1, len(prompt)):  # else no prompt token is scored
                logprob_start = starts[index]
        for copy in range(n):
            rid = rids[index * n + copy]
            sequence = make_sequence(rid, prompt, params[index], limits, copy)
            sequence.logprob_start = logprob_start
            sequence.num_top_logprobs = tops[index] if wants else 0
            sequence.stream = stream
            sequence.adapter = adapters[index]
            sequence.sampling_mask = [] if masks[index] else None
            sequence.images = images[index]
            jobs.append(Job(sequence, wants, with_text, experts_start))
    return GenerateRequest(jobs, is_single=not is_batch and n == 1, stream=stream, n=n)


def make_sequence(
    rid: str, prompt: list[int], params: SamplingParams, limits: RequestLimits, copy: int = 0
) -> Sequence:
    """Make a sequence whose ``max_new_tokens`` fits the context.

    Args:
        copy: its number among the samples of its prompt.
    Raises:
        BadRequest: the prompt leaves no room, or there are stop strings but no tokenizer.
    """
    length = len(prompt)
    context = limits.context_length
    if length >= context:
        raise BadRequest(
            f"the prompt has {length} tokens, the context holds {context} with at least 1 new token"
        )
    room = context - length
    wanted = params.max_new_tokens if params.max_new_tokens is not None else room
    text = None
    if params.stop:
        if limits.tokenizer is None:
            raise BadRequest(
                "stop strings need a tokenizer, and this model directory has none; use "
                "stop_token_ids"
            )
        # as SGLang: a stop string may be a special token, whether the answer's text shows it or not
        text = TextStream(limits.tokenizer, False, params.spaces_between_special_tokens)
    seed = params.sampling_seed
    return Sequence(
        rid,
        prompt,
        params,
        min(wanted, room),
        frozenset() if params.ignore_eos else limits.eos_token_ids | params.stop_token_ids,
        limits.noise.getrandbits(63) if seed is None else seed + copy,
        text=text,
    )


def refuse_unknown(
    body: Mapping[str, Any],
    known: Iterable[str],
    without_effect: Iterable[str],
    unsupported: Iterable[str],
) -> None:
    """Reject fields that the engine does not support.

    Raises:
        BadRequest: a field is unknown, or unsupported and not empty.
    """
    for name, value in body.items():
        if name in known or name in without_effect or value is None:
            continue
        if name not in unsupported:
            near = difflib.get_close_matches(name, list(known), n=1)
            raise BadRequest(
                f"unknown field '{name}'" + (f"; nearest: '{near[0]}'" if near else ""), name
            )
        if not asks_for_nothing(value):
            raise BadRequest(f"the embedded engine does not support the field '{name}'", name)


def _prompts(body: Mapping[str, Any], limits: RequestLimits) -> tuple[list[list[int]], bool]:
    """Read the token ids of every prompt, and whether the request is a batch."""
    text = body.get("text")
    ids = body.get("input_ids")
    if (text is None) == (ids is None):
        raise BadRequest("give either text or input_ids")
    if text is not None:
        texts = [text] if isinstance(text, str) else text
        if (
            not isinstance(texts, list)
            or not texts
            or not all(isinstance(item, str) for item in texts)
        ):
            raise BadRequest("text must be a string or a list of strings")
        if limits.tokenizer is None:
            raise BadRequest("this model directory has no tokenizer; send input_ids")
        prompts = [limits.tokenizer.encode(item) for item in texts]
        is_batch = not isinstance(text, str)
    else:
        if not isinstance(ids, list) or not ids:
            raise BadRequest(
                "input_ids must be a list of token ids that is not empty, or a list of such lists"
            )
        is_batch = isinstance(ids[0], list)
        prompts = ids if is_batch else [ids]
        for prompt in prompts:
            _check_ids(prompt, limits.vocab_size)
    if any(not prompt for prompt in prompts):
        raise BadRequest("a prompt is empty")
    return prompts, is_batch


def _with_images(
    given: Any, prompts: list[list[int]], is_batch: bool, limits: RequestLimits
) -> tuple[list[list[int]], list[SequenceImages | None]]:
    """Return the prompts with all placeholders of their images, and the images of each prompt."""
    if limits.images is None:
        if not asks_for_nothing(given):
            raise BadRequest(
                "this engine serves text alone; a model that sees images is served with "
                "--enable-multimodal",
                "image_data",
            )
        return prompts, [None] * len(prompts)
    each = given if is_batch else [given]
    if each is None:
        each = [None] * len(prompts)
    if not isinstance(each, list) or len(each) != len(prompts):
        raise BadRequest(
            f"image_data must be a list with the images of each of the {len(prompts)} prompts",
            "image_data",
        )
    read = [limits.images.read(prompt, own) for prompt, own in zip(prompts, each)]
    return [prompt for prompt, _ in read], [images for _, images in read]


def _check_ids(prompt: Any, vocab_size: int) -> None:
    if not isinstance(prompt, list):
        raise BadRequest("input_ids mixes token ids and lists of them")
    valid = all(type(item) is int and 0 <= item < vocab_size for item in prompt)
    if not valid:
        for item in prompt:
            token(vocab_size).read("input_ids", item)


def _rids(rid: Any, count: int, n: int, is_batch: bool) -> list[str]:
    total = count * n
    if rid is None:
        return [uuid.uuid4().hex for _ in range(total)]
    if isinstance(rid, str):
        return [rid] if total == 1 and not is_batch else [f"{rid}_{i}" for i in range(total)]
    if (
        not isinstance(rid, list)
        or len(rid) != count
        or not all(isinstance(item, str) for item in rid)
    ):
        raise BadRequest("rid must be a string, or a list of one string per prompt")
    if len(set(rid)) != count:
        raise BadRequest("rid holds the same id twice")
    return rid if n == 1 else [f"{item}_{i}" for item in rid for i in range(n)]


def _check_start(name: str, start: int, prompt_length: int) -> None:
    if start > prompt_length:
        raise BadRequest(f"{name} is {start}, the prompt has {prompt_length} tokens", name)
