"""An engine client, a data source and rewards that live in the test's own event loop.

Time is counted in turns of the event loop, so hypothesis can choose any order in which things
finish, and a test is over in milliseconds.
"""

from __future__ import annotations

import argparse
import asyncio
import time
from collections.abc import Iterable, Sequence
from typing import Any, ClassVar

from slime.engines.api import EngineError, GenerateResult
from slime.engines.client import RolloutClient
from slime.rollout.generate import GenerateState, sampling_params
from slime.samples.types import Sample
from slime.user_code.hooks import DataSource
from tests.support.fake_engine import answer


class FakeTokenizer:
    """One token per character; what `prompt_token_ids` and `complete_tokens` need."""

    eos_token_id: int | None = None
    bos_token_id: int | None = None
    eos_token: str | None = None
    chat_template: str | None = None
    name_or_path = "fake"
    added_tokens_decoder: ClassVar[dict[int, Any]] = {}
    all_special_ids: tuple[int, ...] = ()
    all_special_tokens: tuple[str, ...] = ()

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        bos = [self.bos_token_id] if add_special_tokens and self.bos_token_id is not None else []
        return [*bos, *(ord(character) for character in text)]

    def decode(self, tokens: list[int], **kwargs: Any) -> str:
        """As the fake client words its answers."""
        return "".join(chr(97 + token % 26) for token in tokens)

    def apply_chat_template(self, messages: list[dict[str, Any]], **kwargs: Any) -> str:
        assert not kwargs["tokenize"]
        return "".join(f"{m['role']}:{m['content']};" for m in messages)


class FakeClient(RolloutClient):
    """Answers the i-th request after ``turns[i % len(turns)]`` turns of the event loop, or fails
    it.

    The tokens come evenly over these turns; an abort cuts a request where it stands.
    """

    def __init__(
        self, turns: Sequence[int] = (0,), fail: Iterable[int] = (), max_concurrency: int = 64
    ) -> None:
        super().__init__("http://fake", max_concurrency=max_concurrency)
        self.turns, self.fail = list(turns), set(fail)
        self.calls: list[dict[str, Any]] = []
        self.running = self.max_running = self.num_aborts = 0
        self.weight_version = 1

    async def abort_all(self, timeout: float = 60.0) -> None:
        assert self.aborting
        self.num_aborts += 1
        while self.running:
            await asyncio.sleep(0)

    async def worker_loads(self) -> dict[str, tuple[int, int]]:
        return {"http://engine-0": (self.running, 0)}

    async def generate(  # type: ignore[override]
        self, input_ids: list[int], params: dict[str, Any], **kwargs: Any
    ) -> GenerateResult:
        number = len(self.calls)
        self.calls.append({"input_ids": list(input_ids), "params": dict(params), **kwargs})
        self.running += 1
        self.max_running = max(self.max_running, self.running)
        try:
            return await self._answer(number, list(input_ids), params)
        finally:
            self.running -= 1
            self.last_progress = time.monotonic()

    async def _answer(
        self, number: int, input_ids: list[int], params: dict[str, Any]
    ) -> GenerateResult:
        tokens, reason = answer(input_ids, params.get("sampling_seed", 0), params["max_new_tokens"])
        turns = self.turns[number % len(self.turns)]
        for turn in range(turns):
            await asyncio.sleep(0)
            if self.aborting:
                tokens, reason = tokens[: turn * len(tokens) // turns], "abort"
                break
        if number in self.fail and reason != "abort":
            raise EngineError("http://engine-0", "engine is down", 503)
        meta = {"finish_reason": {"type": reason}, "weight_version": str(self.weight_version)}
        meta |= {
            "prompt_tokens": len(input_ids),
            "cached_tokens": 1,
            "completion_tokens": len(tokens),
        }
        text = FakeTokenizer().decode(tokens)
        return GenerateResult(tokens, [-0.5] * len(tokens), text, reason, meta)


class FakeSource(DataSource):
    """Group i has the prompt [i + 1, 7]; groups that are put back come out first."""

    def __init__(self, group_size: int, size: int = 10**6) -> None:
        self.group_size, self.size, self.drawn = group_size, size, 0
        self.buffer: list[list[Any]] = []
        self.discarded: list[int] = []

    def get_samples(self, num_samples: int) -> list[list[Sample]]:
        groups, self.buffer = self.buffer[:num_samples], self.buffer[num_samples:]
        while len(groups) < num_samples and self.drawn < self.size:
            first, self.drawn = self.drawn * self.group_size, self.drawn + 1
            groups.append(
                [
                    Sample(
                        group_index=self.drawn - 1,
                        index=first + j,
                        tokens=[self.drawn, 7],
                        prompt="p",
                    )
                    for j in range(self.group_size)
                ]
            )
        return groups

    def add_samples(self, samples: list[list[Sample]]) -> None:
        assert all(len(group) == self.group_size for group in samples)
        self.buffer += samples

    def mark_discarded(self, group_indices: Iterable[int]) -> None:
        self.discarded += group_indices


class FakeRewards:
    """Reward 1 for an even number of response tokens, after ``turns[i]`` turns of the event
    loop."""

    def __init__(self, turns: Sequence[int] = (0,)) -> None:
        self.turns = list(turns)
        self.scored: list[int | None] = []
        self.groups: list[list[int | None]] = []

    async def score(self, sample: Sample) -> float:
        for _ in range(self.turns[len(self.scored) % len(self.turns)]):
            await asyncio.sleep(0)
        self.scored.append(sample.index)
        return float(sample.response_length % 2 == 0)

    async def score_group(self, samples: list[Sample]) -> list[float]:
        self.groups.append([sample.index for sample in samples])
        return [float(sample.response_length % 2 == 0) for sample in samples]


def hook_args(**flags: Any) -> argparse.Namespace:
    """``args`` with the flags that the loop's inner parts read."""
    defaults: dict[str, Any] = {
        "custom_generate_function_path": None,
        "rollout_sample_hook_path": [],
        "reward_key": None,
        "eval_reward_key": None,
        "eval_pass_k": [],
        "log_multi_turn": False,
        "log_passrate": False,
        "log_reward_category": None,
        "log_correct_samples": False,
        "hf_checkpoint": None,
        "agent_host": None,
        "agent_port": 0,
        "listen_on_network": False,
    }
    return argparse.Namespace(**{**defaults, **flags})


def make_state(
    client: Any, *, max_new_tokens: int = 8, deterministic: bool = True, **kwargs: Any
) -> GenerateState:
    return GenerateState(
        args=kwargs.pop("args", None) or hook_args(),
        tokenizer=kwargs.pop("tokenizer", None) or FakeTokenizer(),
        client=client,
        sampling_params=sampling_params(temperature=1.0, max_new_tokens=max_new_tokens),
        deterministic=deterministic,
        rollout_seed=42,
        **kwargs,
    )
