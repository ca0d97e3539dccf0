"""Answers that are cut short and completed: as if nothing had cut them."""

from __future__ import annotations

import asyncio
from typing import Any
from unittest import mock

from hypothesis import given
from hypothesis import strategies as st

from slime.rollout.resumed_requests import MAX_IDLE_CUTS, answered, is_cut, piece
from tests.support.fake_engine import answer

PROMPT = [5, 6]


class Engine:
    """Gives so many tokens per request as ``cuts`` says, then aborts; each time with the next
    weights."""

    def __init__(self, cuts: list[int]) -> None:
        self.cuts, self.bodies = list(cuts), list[dict[str, Any]]()

    async def send(self, body: dict[str, Any]) -> dict[str, Any]:
        self.bodies.append(body)
        tokens, reason = answer(body["input_ids"], 1, body["sampling_params"]["max_new_tokens"])
        if self.cuts and len(tokens) > self.cuts[0]:
            tokens, reason = tokens[: self.cuts[0]], "abort"
        self.cuts = self.cuts[1:]
        meta = {
            "finish_reason": {"type": reason},
            "prompt_tokens": len(body["input_ids"]),
            "completion_tokens": len(tokens),
            "weight_version": str(len(self.bodies)),
            "output_token_logprobs": [[-0.1, token, None] for token in tokens],
            "output_token_sampling_mask": [[token, 1] for token in tokens],
            "output_token_sampling_logprobs": [-token / 100 for token in tokens],
        }
        return {
            "text": "".join(f"<{token}>" for token in tokens),
            "output_ids": tokens,
            "meta_info": meta,
        }


async def _no_sleep(seconds: float) -> None: ...


def ask(engine: Engine, body: dict[str, Any], is_over: bool = False) -> dict[str, Any]:
    with mock.patch.object(asyncio, "sleep", _no_sleep):
        return asyncio.run(answered(engine.send, body, lambda: is_over, lambda: None))


@given(st.lists(st.integers(0, 6), max_size=5), st.integers(1, 20))
def test_however_it_is_cut_the_answer_is_the_same(cuts: list[int], count: int) -> None:
    engine = Engine(cuts)
    got = ask(
        engine, {"input_ids": PROMPT, "rid": "x", "sampling_params": {"max_new_tokens": count}}
    )
    tokens, reason = answer(PROMPT, 1, count)
    meta = got["meta_info"]
    assert got["output_ids"] == [entry[1] for entry in meta["output_token_logprobs"]] == tokens
    assert meta["output_token_sampling_mask"] == [[token, 1] for token in tokens]
    assert meta["output_token_sampling_logprobs"] == [-token / 100 for token in tokens]
    assert got["text"] == "".join(f"<{token}>" for token in tokens)
    assert meta["finish_reason"]["type"] == reason
    assert (meta["prompt_tokens"], meta["completion_tokens"]) == (len(PROMPT), len(tokens))
    assert len({body["rid"] for body in engine.bodies}) == len(engine.bodies)
    starts = {
        len(body["input_ids"]) - len(PROMPT): str(number)
        for number, body in enumerate(engine.bodies, 1)
    }
    versions = meta.get("token_weight_versions", [[0, meta["weight_version"]]])
    assert versions == [
        [start, version] for start, version in starts.items() if start < len(tokens)
    ]


def test_text_is_asked_anew() -> None:
    bodies = []

    async def send(body: dict[str, Any]) -> dict[str, Any]:
        bodies.append(body)
        reason = "abort" if len(bodies) == 1 else "stop"
        return {
            "choices": [{"finish_reason": reason, "message": {"content": "yes"[: len(bodies)]}}]
        }

    got = asyncio.run(answered(send, {"messages": []}, lambda: False, lambda: None))
    assert got["choices"][0]["message"]["content"] == "ye" and bodies == [{"messages": []}] * 2


def test_a_rollout_that_ends_cuts_answers_for_good() -> None:
    engine = Engine([2])
    got = ask(engine, {"input_ids": PROMPT, "sampling_params": {"max_new_tokens": 6}}, is_over=True)
    assert is_cut(got) and len(engine.bodies) == 1


def test_an_engine_that_only_aborts_is_not_asked_for_ever() -> None:
    engine = Engine([0] * 999)
    assert is_cut(ask(engine, {"input_ids": PROMPT, "sampling_params": {"max_new_tokens": 6}}))
    assert len(engine.bodies) == MAX_IDLE_CUTS


def test_a_chat_that_the_end_of_a_rollout_cuts_comes_back_as_it_is() -> None:
    chat = {"choices": [{"finish_reason": "abort", "message": {"content": "ye"}}]}

    async def send(body: dict[str, Any]) -> dict[str, Any]:
        return chat

    assert asyncio.run(answered(send, {"messages": []}, lambda: True, lambda: None)) is chat


def test_several_prompts_in_one_request_are_asked_anew() -> None:
    reasons = iter(["abort", "stop"])

    async def send(body: dict[str, Any]) -> dict[str, Any]:
        return {
            "items": [
                {"meta_info": {"finish_reason": {"type": reason}}}
                for reason in ("stop", next(reasons))
            ]
        }

    got = asyncio.run(
        answered(send, {"input_ids": [[1], [2]]}, lambda: False, lambda: None, most_tokens=4)
    )
    assert not is_cut(got)


def test_requests_without_a_length_have_the_engines_own() -> None:
    engine = Engine([])
    got = ask(engine, {"input_ids": PROMPT, "sampling_params": {"max_new_tokens": 6}})
    again = asyncio.run(
        answered(
            engine.send,
            {"input_ids": PROMPT, "sampling_params": {"max_new_tokens": 6, "top_k": None}},
            lambda: False,
            lambda: None,
            most_tokens=2,
        )
    )
    assert got["output_ids"] == again["output_ids"] and len(engine.bodies) == 4
    assert piece({"max_new_tokens": 0}, 64) == 0
    assert (
        piece({"max_new_tokens": None}, 100) == 100 and piece({"n": 1, "max_new_tokens": 9}, 4) == 4
    )
