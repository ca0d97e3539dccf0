"""Answers that were cut short, by a push of weights or another rollout's end, and their rest, as one answer.

    request ─► answer, aborted ─► request for the rest ─► answer      joined: as if nothing had cut it, with the
                                                                      weight version of every token

Engines abort what they are at before they take new weights. What has no token ids to go on from (text, chats, several
prompts in one request) is asked anew.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

from slime.rollout.generate import MOST_IDLE_CUTS

Body = dict[str, Any]
#: What SGLang gives when a request names none.
_DEFAULT_NEW_TOKENS = 128
#: Lists of an answer's ``meta_info`` with an entry per generated token.
_PER_TOKEN = ("output_token_logprobs", "output_top_logprobs", "output_token_ids_logprobs")


async def answered(
    send: Callable[[Body], Awaitable[Any]], body: Body, is_over: Callable[[], bool], on_cut: Callable[[], object]
) -> Any:
    """The whole answer to a request for the policy, however often it is cut short.

    Args:
        send: asks an engine; None when it was not asked, since the rollout ends.
        is_over: whether the rollout itself ends, which cuts answers short for good.
        on_cut: called for every cut.
    Returns:
        What ``send`` gave, or several such joined; cut short if ``is_over`` or nothing comes of asking again.
    """
    whole: Any = None
    request, idle, number = body, 0, 0
    while True:
        answer = await send(request)
        whole = joined(whole, answer)
        if answer is None or not is_cut(answer) or is_over():
            return whole
        on_cut()
        idle = 0 if _tokens(answer) else idle + 1
        if idle == MOST_IDLE_CUTS:
            return whole
        rest = rest_of(body, whole)
        if rest is None:
            whole, rest = None, dict(body)
        if not rest.get("sampling_params", {}).get("max_new_tokens", 1):
            whole["meta_info"]["finish_reason"] = {"type": "length", "length": len(_tokens(whole))}
            return whole
        number += 1
        if isinstance(body.get("rid"), str):
            rest["rid"] = f"{body['rid']}-c{number}"  # the engine may still know the first one
        request = rest
        await asyncio.sleep(min(idle, 10) * 0.05)


def is_cut(answer: Any) -> bool:
    """Whether an answer of ``/generate`` or of the OpenAI endpoints, or one of several, was aborted."""
    if isinstance(answer, list):
        return any(is_cut(one) for one in answer)
    if not isinstance(answer, dict):
        return False
    reason = (answer.get("meta_info") or {}).get("finish_reason") or {}
    reasons = [reason.get("type") if isinstance(reason, dict) else reason]
    reasons += [choice.get("finish_reason") for choice in answer.get("choices") or () if isinstance(choice, dict)]
    return "abort" in reasons


def rest_of(body: Body, answer: Any) -> Body | None:
    """The request for what an answer lacks; None where it can only be asked anew."""
    ids, tokens = body.get("input_ids"), _tokens(answer)
    if not tokens or not isinstance(ids, list) or not all(isinstance(token, int) for token in ids):
        return None
    params = dict(body.get("sampling_params") or {})
    params["max_new_tokens"] = max(0, params.get("max_new_tokens", _DEFAULT_NEW_TOKENS) - len(tokens))
    if params.get("min_new_tokens"):
        params["min_new_tokens"] = max(0, params["min_new_tokens"] - len(tokens))
    return {**body, "input_ids": [*ids, *tokens], "sampling_params": params}


def joined(first: Any, rest: Any) -> Any:
    """An answer with what was asked for afterwards.

    Example:
        >>> first = {"text": "a", "output_ids": [7], "meta_info": {"completion_tokens": 1, "weight_version": "3"}}
        >>> rest = {"text": "b", "output_ids": [8], "meta_info": {"completion_tokens": 1, "weight_version": "4"}}
        >>> joined(first, rest)["meta_info"]["token_weight_versions"]
        [[0, '3'], [1, '4']]
    """
    if first is None or rest is None:
        return rest if first is None else first
    before, after = first["meta_info"], rest["meta_info"]
    meta = {**after, **{name: before[name] for name in before if name.startswith(("prompt_", "input_", "cached_"))}}
    for name in _PER_TOKEN:
        if name in before or name in after:
            meta[name] = [*(before.get(name) or ()), *(after.get(name) or ())]
    for name in ("completion_tokens", "e2e_latency"):
        if name in before and name in after:
            meta[name] = before[name] + after[name]
    count = len(_tokens(first))
    later = [[start + count, version] for start, version in _versions(after)] if _tokens(rest) else []
    meta["token_weight_versions"] = [*_versions(before), *later]
    return {
        **rest,
        "text": first.get("text", "") + rest.get("text", ""),
        "output_ids": [*_tokens(first), *_tokens(rest)],
        "meta_info": meta,
    }


def _versions(meta: Body) -> list[list[Any]]:
    return meta.get("token_weight_versions") or [[0, meta.get("weight_version")]]


def _tokens(answer: Any) -> list[int]:
    return list(answer.get("output_ids") or ()) if isinstance(answer, dict) else []
