"""Teachers in engines score each sample as soon as it is generated, while others still run.

    generated sample ─► prompt that the teacher sees ─► POST /generate, nothing to generate
                                                        ─► teacher_log_probs, teacher_top_tokens

Each answer is checked against the requested tokens. A teacher scores a few fixed tokens (the
canary) at the start of the run and in each rollout: if the log-probs differ, its weights have
changed.
"""

from __future__ import annotations

import asyncio
import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from slime import deadlines
from slime.config.config import Config
from slime.config.teachers import Teacher, engine_teachers, teacher_of
from slime.engines.api import EngineError
from slime.engines.client import RolloutClient
from slime.errors import UserError
from slime.log import get_logger
from slime.rollout.generate import current_state, is_in_run, prompt_token_ids
from slime.samples.teacher_scores import pack_top_tokens
from slime.samples.types import Sample

logger = get_logger(__name__)

_CANARY_TOKENS = 16
#: A canary may differ by this share of the standard deviation of its log-probs (in 16 bits,
#: batching alone moves them by a few per cent), or by this many nats if all tokens are equally
#: likely.
_CANARY_SHARE = 0.1
_CANARY_LEAST = 0.01


class EngineTeacher:
    """One teacher behind the ``/generate`` of an engine or a router.

    Args:
        url: its base URL.
        concurrency: requests at once.
        retry_seconds: see `RolloutClient`.
    """

    def __init__(
        self, name: str, url: str, *, concurrency: int, request_timeout: float, retry_seconds: float
    ) -> None:
        self.name = name
        self.url = url.rstrip("/")
        self.client = RolloutClient(
            self.url,
            max_concurrency=concurrency,
            request_timeout=request_timeout,
            retry_seconds=retry_seconds,
        )
        self._canary: tuple[list[int], list[float]] | None = None

    async def log_probs(
        self, tokens: Sequence[int], start: int, top_k: int = 0
    ) -> tuple[list[float], list[list[tuple[float, int]]]]:
        """Return the log-probs of ``tokens[start:]`` at temperature 1, and the ``top_k`` most
        likely tokens at each position as (log-prob, id).

        Args:
            start: at least 1, because nothing predicts the first token.
        Raises:
            EngineError: there is no answer, or it is about other tokens.
        """
        # the first entry of an answer has no log-prob; earlier tokens come from the prefix cache
        body: dict[str, Any] = {
            "input_ids": list(tokens),
            "sampling_params": {"temperature": 1.0, "max_new_tokens": 0},
            "return_logprob": True,
            "logprob_start_len": start - 1,
        }
        if top_k:
            body["top_logprobs_num"] = top_k
        async with self.client.slots:
            answer = await self.client.post(
                "/generate", body, name="", num_input_tokens=len(tokens)
            )
        assert answer is not None, "nobody aborts a teacher's requests"
        meta = answer.get("meta_info") or {}
        count = len(tokens) - start
        entries = list(meta.get("input_token_logprobs") or [])[-count:]
        self._check_alignment([entry[1] for entry in entries], list(tokens[start:]))
        values = [math.nan if entry[0] is None else float(entry[0]) for entry in entries]
        if not all(map(math.isfinite, values)):
            raise EngineError(self.url, "answered with log-probs that are not finite")
        if not top_k:
            return values, []
        rows = list(meta.get("input_top_logprobs") or [])[-count:]
        if len(rows) != count or not all(row and len(row) == len(rows[0]) for row in rows):
            raise EngineError(
                self.url, f"answered with most likely tokens for {len(rows)} of {count} tokens"
            )
        return values, [[(float(entry[0]), int(entry[1])) for entry in row] for row in rows]

    def _check_alignment(self, told: list[int], asked: list[int]) -> None:
        if told == asked:
            return
        place = next(
            (n for n, (its, own) in enumerate(zip(told, asked)) if its != own),
            min(len(told), len(asked)),
        )
        raise EngineError(
            self.url,
            f"teacher {self.name} was asked about {len(asked)} tokens and answered about "
            f"{len(told)}; the first difference is at position {place}",
        )

    async def check(self, vocab_size: int | None) -> float:
        """Score the canary; return the mean difference from the first time, in nats.

        Raises:
            UserError: the teacher does not answer, or has other weights than at the start.
        """
        size = vocab_size or 2 * _CANARY_TOKENS
        tokens = [(2 * n + 1) * size // (2 * _CANARY_TOKENS) for n in range(_CANARY_TOKENS)]
        try:
            found, _ = await self.log_probs(tokens, 1)
        except EngineError as error:
            raise UserError(
                f"teacher {self.name} does not score tokens: {error}",
                why="it is asked for log-probs of 16 tokens before each rollout",
                fix="--opd-teacher-urls names engines whose model has the policy's vocabulary; "
                "read the engine's log",
            ) from error
        if self._canary is None:
            self._canary = (tokens, found)
            return 0.0
        first = self._canary[1]
        apart = statistics.fmean(abs(a - b) for a, b in zip(first, found))
        if apart > max(_CANARY_LEAST, _CANARY_SHARE * statistics.pstdev(first)):
            raise UserError(
                f"teacher {self.name} at {self.url} has other weights than at the start",
                why=f"its log-probs of the canary differ by {apart:.3g} on average",
                fix="start it again with the model that it had; nothing may push weights to it",
            )
        return apart


class TeacherPool:
    """Sets the teacher's scores and the teacher's prompt of samples.

    Args:
        model_urls: router URL of each model of --sglang-config, by name.
        policy_url: the policy's URL among them.
    """

    def __init__(
        self, config: Config, tokenizer: Any, model_urls: Mapping[str, str], policy_url: str
    ) -> None:
        flags = config.distillation
        self._tokenizer = tokenizer
        self._key = flags.opd_teacher_key
        self._prompt_key = flags.opd_teacher_prompt_key
        self._top_k = flags.opd_top_k if flags.in_loss else 0
        others = {name: url for name, url in model_urls.items() if url.rstrip("/") != policy_url}
        found: tuple[Teacher, ...] = ()
        if not flags.in_trainer:
            found = engine_teachers(flags.opd_teacher_urls, others.keys())
        limit = config.engine.sglang_router_request_timeout_secs
        self._teachers = {
            teacher.name: EngineTeacher(
                teacher.name,
                others.get(teacher.source, teacher.source),
                concurrency=config.engine.sglang_server_concurrency,
                request_timeout=limit,
                retry_seconds=deadlines.LOOP_RETRY[config.fault_tolerance.use_fault_tolerance],
            )
            for teacher in found
        }

    async def begin(self, vocab_size: int | None) -> dict[str, float]:
        """Check every teacher before a rollout, and start measuring idle time.

        Returns:
            ``rollout/teacher_canary_abs_diff`` of the teacher that differs most.
        Raises:
            UserError: see `EngineTeacher.check`.
        """
        teachers = self._teachers.values()
        if not teachers:
            return {}
        # engines refuse to name more tokens than there are
        self._top_k = min(self._top_k, vocab_size or self._top_k)
        apart = await asyncio.gather(*(teacher.check(vocab_size) for teacher in teachers))
        for teacher in teachers:
            teacher.client.busy.take_idle_ratio()
            teacher.client.counters.take()
        return {"rollout/teacher_canary_abs_diff": max(apart)}

    def metrics(self) -> dict[str, float]:
        """``perf/teacher_idle_ratio``, the share of time in which a teacher had no request, and
        ``rollout/teacher_requests``, both since `begin`."""
        teachers = self._teachers.values()
        if not teachers:
            return {}
        return {
            "perf/teacher_idle_ratio": statistics.fmean(
                teacher.client.busy.take_idle_ratio() for teacher in teachers
            ),
            "rollout/teacher_requests": float(
                sum(teacher.client.counters.take()["requests"] for teacher in teachers)
            ),
        }

    async def close(self) -> None:
        for teacher in self._teachers.values():
            await teacher.client.close()

    async def score(self, sample: Sample) -> Sample:
        """Set ``teacher_prompt_tokens`` if teachers see other prompts, and the scores of the
        sample's teacher if it runs in an engine. Scores that user code has set are kept. Return the
        sample.

        Raises:
            UserError: the sample names an unknown teacher.
            EngineError: the teacher does not answer, or answers about other tokens.
        """
        if not sample.response_length:
            return sample
        prompt = self._prompt_of(sample)
        if not self._teachers or sample.teacher_log_probs is not None:
            return sample
        where = f"sample {sample.index}"
        name = teacher_of(sample.metadata, self._key, self._teachers.keys(), where)
        response = sample.tokens[sample.prompt_length :]
        values, tops = await self._teachers[name].log_probs(
            [*prompt, *response], len(prompt), self._top_k
        )
        sample.teacher_log_probs = [min(value, 0.0) for value in values]
        sample.teacher_top_tokens = pack_top_tokens(tops) if tops else None
        return sample

    def _prompt_of(self, sample: Sample) -> list[int]:
        given = sample.metadata.get(self._prompt_key) if self._prompt_key else None
        if given is None:
            return sample.tokens[: sample.prompt_length]
        if sample.teacher_prompt_tokens is None:
            templated = is_in_run() and current_state().templated
            if isinstance(given, str) and templated:
                given = [{"role": "user", "content": given}]
            sample.teacher_prompt_tokens = prompt_token_ids(
                self._tokenizer, replace(sample, prompt=given)
            )
        return sample.teacher_prompt_tokens
