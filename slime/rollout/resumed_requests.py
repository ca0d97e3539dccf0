"""Answers that take several requests, as one answer.

    request ─► answer, aborted ─► request for the rest ─► answer
               └──── joined: as if nothing had cut it ────┘
                     with the weight version of every token

Engines abort their requests before they take new weights, and when another rollout ends. An engine
that dies loses its requests, so a long answer may be asked for in pieces
(--rollout-request-tokens). A request without token ids to continue from (text, chats, several
prompts) is sent again from its start, and never in pieces.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

Body = dict[str, Any]
#: Give up after this many aborts in a row without a new token.
MAX_IDLE_CUTS = 64
#: SGLang's default for ``max_new_tokens``.
_DEFAULT_NEW_TOKENS = 128
#: Sampling parameters that allow an answer to be generated in pieces without a difference; seeded
#: sampling depends only on the seed and the position.
_DIVISIBLE = frozenset((
    "temperature", "top_p", "top_k", "min_p", "max_new_tokens", "stop_token_ids", "ignore_eos",
    "sampling_seed", "skip_special_tokens", "spaces_between_special_tokens", "no_stop_trim",
))  # fmt: skip
_NEUTRAL = {"n": 1, "repetition_penalty": 1.0}
#: Lists of an answer's ``meta_info`` with an entry per generated token.
_PER_TOKEN = (
    "output_token_logprobs", "output_top_logprobs", "output_token_ids_logprobs",
    "output_token_sampling_mask", "output_token_sampling_logprobs",
)  # fmt: skip


async def answered(
    send: Callable[[Body], Awaitable[Any]],
    body: Body,
    is_over: Callable[[], bool],
    on_cut: Callable[[], object],
    *,
    tokenizer: Any = None,
    most_tokens: int | None = None,
    end_tokens: frozenset[int] = frozenset(),
) -> Any:
    """Return the complete answer of the policy to a request, however often engines abort it.

    Args:
        send: sends a request to an engine; returns None if the rollout ends and nothing was sent.
        is_over: whether the rollout ends; an abort is then final.
        on_cut: called for every abort.
        tokenizer: decodes the tokens of a joined answer; without one its texts are concatenated,
            and a character split between two of them is lost.
        most_tokens: most new tokens of one request; end_tokens: tokens that end an answer unless
            ``ignore_eos`` is set.
    Returns:
        The answer of ``send``, or several joined; incomplete if ``is_over`` or if repeated requests
        bring no token.
    """
    whole: Any = None
    request = _first_piece(body, most_tokens)
    idle = 0
    number = 0
    while True:
        answer = await send(request)
        whole = joined(whole, answer, tokenizer, body)
        is_piece = answer is not None and _is_piece(answer, request, body, whole)
        if answer is None or not (is_piece or is_cut(answer)):
            return whole
        if has_ended(_tokens(answer), _params(body), end_tokens):
            whole["meta_info"]["finish_reason"] = {"type": "stop", "matched": _tokens(answer)[-1]}
            return whole
        if is_over():
            if is_piece:
                whole["meta_info"]["finish_reason"] = {"type": "abort"}
            return whole
        if not is_piece:
            on_cut()
        idle = 0 if _tokens(answer) else idle + 1
        if idle == MAX_IDLE_CUTS:
            return whole
        rest = rest_of(body, whole)
        if rest is None:
            whole = None
            rest = dict(body)
        rest = _first_piece(rest, most_tokens)
        if _params(rest).get("max_new_tokens") == 0:
            whole["meta_info"]["finish_reason"] = {"type": "length", "length": len(_tokens(whole))}
            return whole
        number += 1
        if isinstance(body.get("rid"), str):
            rest["rid"] = f"{body['rid']}-c{number}"  # the engine may still know the first one
        request = rest
        await asyncio.sleep(min(idle, 10) * 0.05)


def piece(params: Body, most_tokens: int | None) -> int:
    """Return how many tokens to ask for in the next request: what ``params`` asks for, but at most
    ``most_tokens`` if pieces give the same answer. They do not with stop strings, which may span
    two pieces, or with penalties and grammars, which count from the first token.

    Example:
        >>> piece({"max_new_tokens": 900}, 512), piece({"max_new_tokens": 900, "stop": ["."]}, 512)
        (512, 900)
    """
    wanted = _wanted(params)
    divides = most_tokens is not None and all(
        name in _DIVISIBLE or not value or value == _NEUTRAL.get(name)
        for name, value in params.items()
    )
    return min(wanted, most_tokens) if divides and most_tokens else wanted


def _first_piece(body: Body, most_tokens: int | None) -> Body:
    params = _params(body)
    if most_tokens is None or body.get("stream") or not _is_ids(body.get("input_ids")):
        return body
    count = piece(params, most_tokens)
    if count == _wanted(params):
        return body
    return {**body, "sampling_params": {**params, "max_new_tokens": count}}


def _is_piece(answer: Any, request: Body, body: Body, whole: Any) -> bool:
    """Tell whether the request ended because it asked for a piece, while the answer goes on."""
    if request is body or not isinstance(answer, dict):
        return False
    if not isinstance(answer.get("meta_info"), dict) or _reason(answer) != "length":
        return False
    is_whole = len(_tokens(answer)) == _wanted(_params(request))
    return is_whole and len(_tokens(whole)) < _wanted(_params(body))


def has_ended(tokens: list[int], params: Body, end_tokens: frozenset[int]) -> bool:
    """Tell whether an aborted answer was in fact complete: engines check the number of tokens and
    aborts before they check for an end token."""
    stops = params.get("stop_token_ids") or ()
    return bool(tokens) and (
        tokens[-1] in stops or (tokens[-1] in end_tokens and not params.get("ignore_eos"))
    )


def completed_stop(
    tokenizer: Any, before: list[int], new: list[int], stop: str | list[str] | None
) -> int | None:
    """Return how many of the new tokens complete a stop string that begins in the tokens before
    them; 0 if those have a whole one, None if there is none. An engine looks for stop strings only
    in the tokens of one request, and not at all in those of an aborted one.

    Example (one token per character):
        >>> completed_stop(tokenizer, ids("a</"), ids("s> b"), ["</s>"])  # doctest: +SKIP
        2
    """
    stops = [stop] if isinstance(stop, str) else list(stop or ())
    longest = max((len(one.encode()) for one in stops), default=0)
    tail = before[-longest:] if longest else []
    for count in range(min(longest, len(new) + 1) if tail else 0):
        text = tokenizer.decode(
            [*tail, *new[:count]], skip_special_tokens=False, spaces_between_special_tokens=False
        )
        if any(one in text for one in stops):
            return count
    return None


def first_tokens(meta: Body, count: int) -> Body:
    """Return the ``meta_info`` of an answer that ended after ``count`` tokens."""
    found = meta | {name: meta[name][:count] for name in _PER_TOKEN if meta.get(name)}
    if "completion_tokens" in meta:
        found["completion_tokens"] = count
    if runs := meta.get("token_weight_versions"):
        found["token_weight_versions"] = [run for run in runs if run[0] < count]
    return found | {"finish_reason": {"type": "stop"}}


def _params(body: Body) -> Body:
    params = body.get("sampling_params")
    return params if isinstance(params, dict) else {}


def _wanted(params: Body) -> int:
    wanted = params.get("max_new_tokens")
    return _DEFAULT_NEW_TOKENS if wanted is None else int(wanted)


def _reason(answer: Body) -> Any:
    reason = (answer.get("meta_info") or {}).get("finish_reason") or {}
    return reason.get("type") if isinstance(reason, dict) else reason


def _is_ids(ids: Any) -> bool:
    return isinstance(ids, list) and all(isinstance(token, int) for token in ids)


def is_cut(answer: Any) -> bool:
    """Tell whether an answer of ``/generate`` or of the OpenAI endpoints, or any one in a list, was
    aborted."""
    # answers to several prompts, or several samples
    if isinstance(answer, dict) and isinstance(answer.get("items"), list):
        answer = answer["items"]
    if isinstance(answer, list):
        return any(is_cut(one) for one in answer)
    if not isinstance(answer, dict):
        return False
    choices = [one for one in answer.get("choices") or () if isinstance(one, dict)]
    return "abort" in (_reason(answer), *(one.get("finish_reason") for one in choices))


def rest_of(body: Body, answer: Any) -> Body | None:
    """Return the request for the rest of an answer; None if it must start over."""
    ids = body.get("input_ids")
    tokens = _tokens(answer)
    if not tokens or not isinstance(ids, list) or not _is_ids(ids):
        return None
    params = dict(_params(body))
    params["max_new_tokens"] = max(0, _wanted(params) - len(tokens))
    if params.get("min_new_tokens"):
        params["min_new_tokens"] = max(0, params["min_new_tokens"] - len(tokens))
    return {**body, "input_ids": [*ids, *tokens], "sampling_params": params}


def joined(first: Any, rest: Any, tokenizer: Any = None, body: Body | None = None) -> Any:
    """Join an answer and its continuation.

    Args:
        tokenizer, body: decode the joined tokens, with the sampling parameters of the request; by
            default the texts are concatenated.

    Example:
        >>> first = {"text": "a", "output_ids": [7],
        ...          "meta_info": {"completion_tokens": 1, "weight_version": "3"}}
        >>> rest = {"text": "b", "output_ids": [8],
        ...         "meta_info": {"completion_tokens": 1, "weight_version": "4"}}
        >>> joined(first, rest)["meta_info"]["token_weight_versions"]
        [[0, '3'], [1, '4']]
    """
    if first is None or rest is None:
        return rest if first is None else first
    before = first["meta_info"]
    after = rest["meta_info"]
    of_prompt = ("prompt_", "input_", "cached_")
    meta = after | {name: before[name] for name in before if name.startswith(of_prompt)}
    for name in _PER_TOKEN:
        if name in before or name in after:
            meta[name] = [*(before.get(name) or ()), *(after.get(name) or ())]
    for name in ("completion_tokens", "e2e_latency"):
        if name in before and name in after:
            meta[name] = before[name] + after[name]
    count = len(_tokens(first))
    tokens = [*_tokens(first), *_tokens(rest)]
    meta["token_weight_versions"] = _versions(before)
    if len(tokens) > count:
        meta["token_weight_versions"] = [
            *_versions(before),
            *([start + count, version] for start, version in _versions(after)),
        ]
    params = _params(body or {})
    if tokenizer is not None and keeps_text(params):
        text = text_of(tokenizer, tokens, params)
    else:
        text = first.get("text", "") + rest.get("text", "")
    return {**rest, "text": text, "output_ids": tokens, "meta_info": meta}


def keeps_text(params: Body) -> bool:
    """Tell whether an answer's text keeps the stop string or token that ended it."""
    ends = (
        params.get("stop")
        or params.get("stop_token_ids")
        or not params.get("skip_special_tokens", True)
    )
    return bool(params.get("no_stop_trim")) or not ends


def text_of(tokenizer: Any, tokens: list[int], params: Body) -> str:
    """Decode sampled tokens as an engine would for a request with these sampling parameters."""
    names = ("skip_special_tokens", "spaces_between_special_tokens")
    return str(tokenizer.decode(tokens, **{name: bool(params.get(name, True)) for name in names}))


def _versions(meta: Body) -> list[list[Any]]:
    return meta.get("token_weight_versions") or [[0, meta.get("weight_version")]]


def _tokens(answer: Any) -> list[int]:
    return list(answer.get("output_ids") or ()) if isinstance(answer, dict) else []
