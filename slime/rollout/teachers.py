"""Teachers in engines score each sample as soon as it is generated, while others still run.

    generated sample ─► prompt that the teacher sees ─► POST /generate, nothing to generate
                                                        ─► teacher_log_probs, teacher_top_tokens

Each answer is checked against the requested tokens. A teacher scores a few fixed tokens (the
canary) at the start of the run and in each rollout: if the log-probs differ, its weights have
changed. The run folder keeps them in ``teachers.json``, the receipt of each teacher, with which the
next launch is compared. In a run with images, requests carry those of the sample, and the canary
has pictures, which must affect the log-probs.
"""

from __future__ import annotations

import asyncio
import json
import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from slime import deadlines
from slime.config.config import Config
from slime.config.teachers import Teacher, engine_teachers, teacher_of
from slime.engines.api import EngineError
from slime.engines.client import RolloutClient
from slime.engines.image_canary import ImageCanary, in_base64, scoring_request
from slime.errors import UserError
from slime.files import read_object, write_atomically
from slime.log import get_logger
from slime.models.vision import VisionSpec, one_placeholder_each, placeholder_runs
from slime.prompts.images import images_of, read_teacher_prompt
from slime.rollout.generate import current_state, encoded_images, is_in_run, prompt_token_ids
from slime.samples.media import IMAGES, media_of, references_of
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
        vision: the tower of the policy, whose placeholders the tokens have; None without images.
    Attributes:
        canary: log-probs of the canary at the first check; None before it.
    """

    def __init__(
        self,
        name: str,
        url: str,
        *,
        concurrency: int,
        request_timeout: float,
        retry_seconds: float,
        vision: VisionSpec | None = None,
    ) -> None:
        self.name = name
        self._vision = vision
        self.url = url.rstrip("/")
        self.client = RolloutClient(
            self.url,
            max_concurrency=concurrency,
            request_timeout=request_timeout,
            retry_seconds=retry_seconds,
        )
        self.canary: list[float] | None = None

    async def log_probs(
        self, tokens: Sequence[int], start: int, top_k: int = 0, images: Sequence[str] = ()
    ) -> tuple[list[float], list[list[tuple[float, int]]]]:
        """Return the log-probs of ``tokens[start:]`` at temperature 1, and the ``top_k`` most
        likely tokens at each position as (log-prob, id). Placeholders of images get 0.

        Args:
            tokens: with all placeholders of the images.
            start: at least 1, because nothing predicts the first token.
            images: in base64.
        Raises:
            EngineError: there is no answer, or it is about other tokens.
        """
        runs = [] if self._vision is None else placeholder_runs(tokens, self._vision)
        if len(runs) != len(images):
            raise EngineError(
                self.url,
                f"teacher {self.name} cannot score {len(images)} images and placeholders of "
                f"{len(runs)}: the policy sampled a placeholder itself",
            )
        given = list(tokens)
        if self._vision is not None and images:
            given = one_placeholder_each(tokens, self._vision)
        # the first entry of an answer has no log-prob; earlier tokens come from the prefix cache
        body = scoring_request(given) | {"logprob_start_len": start - 1}
        if images:
            body["image_data"] = list(images)
        if top_k:
            body["top_logprobs_num"] = top_k
        async with self.client.slots:
            answer = await self.client.post(
                "/generate", body, name="", num_input_tokens=len(tokens)
            )
        assert answer is not None, "nobody aborts a teacher's requests"
        meta = answer.get("meta_info") or {}
        told = meta.get("prompt_tokens")
        if images and told is not None and told != len(tokens):
            raise EngineError(
                self.url,
                f"teacher {self.name} counts {told} tokens with their images, and the sample has "
                f"{len(tokens)}: it prepares images in another way, or sees none",
            )
        # engines may use other ids for placeholders, which are not trained
        unread = {place - start for first, size in runs for place in range(first, first + size)}
        return self._read(meta, list(tokens[start:]), unread, top_k)

    def _read(
        self, meta: dict[str, Any], tokens: list[int], unread: set[int], top_k: int
    ) -> tuple[list[float], list[list[tuple[float, int]]]]:
        """Return log-probs and most likely tokens from an answer, as `log_probs` does.

        Args:
            tokens: those that were asked about.
            unread: the places of placeholders among them.
        """
        count = len(tokens)
        entries = list(meta.get("input_token_logprobs") or [])[-count:]
        named = [
            tokens[place] if place in unread and place < count else entry[1]
            for place, entry in enumerate(entries)
        ]
        if named != tokens:
            place = next(
                (n for n, (its, own) in enumerate(zip(named, tokens)) if its != own),
                min(len(named), count),
            )
            raise EngineError(
                self.url,
                f"teacher {self.name} was asked about {count} tokens and answered about "
                f"{len(named)}; the first difference is at position {place}",
            )
        values = [math.nan if entry[0] is None else float(entry[0]) for entry in entries]
        values = [0.0 if place in unread else value for place, value in enumerate(values)]
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

    async def check(self, tokens: Sequence[int], pictures: ImageCanary | None) -> float:
        """Score the canary; return the mean difference from the first time, in nats.

        Args:
            pictures: in a run with images; None if the context is too short for them.
        Raises:
            UserError: the teacher does not answer, does not see images, or has other weights than
                at the start.
        """
        try:
            found, _ = await self.log_probs(tokens, 1)
            if pictures is not None:
                for picture in pictures.pictures:
                    seen, _ = await self.log_probs(pictures.tokens, 1, images=[in_base64(picture)])
                    found += pictures.chosen(seen)
        except EngineError as error:
            what = "tokens" if pictures is None else "tokens and two pictures"
            fix = "whose model has the policy's vocabulary"
            if pictures is not None:
                fix += " and sees images (embedded ones with --enable-multimodal)"
            raise UserError(
                f"teacher {self.name} does not score tokens: {error}",
                why=f"it is asked for log-probs of {what} before each rollout",
                fix=f"--opd-teacher-urls names engines {fix}; read the engine's log",
            ) from error
        if pictures is not None and pictures.effect(found[len(tokens) - 1 :]) == 0:
            raise UserError(
                f"teacher {self.name} at {self.url} gives the same log-probs behind two different "
                "pictures",
                why="it ignores images: its model sees none, or its vision tower gives zeros",
                fix="use a teacher that sees images",
            )
        if self.canary is None:
            self.canary = found
            return 0.0
        difference = _mean_difference(self.canary, found)
        if _is_another(self.canary, difference):
            raise UserError(
                f"teacher {self.name} at {self.url} has other weights than at the start",
                why=f"its log-probs of the canary differ by {difference:.3g} on average",
                fix="start it again with the model that it had; nothing may push weights to it",
            )
        return difference


def _mean_difference(first: Sequence[float], found: Sequence[float]) -> float:
    return statistics.fmean(abs(a - b) for a, b in zip(first, found))


def _is_another(first: Sequence[float], difference: float) -> bool:
    """Tell whether log-probs that differ so much on average are those of other weights."""
    return difference > max(_CANARY_LEAST, _CANARY_SHARE * statistics.pstdev(first))


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
        self._config = config
        self._images = images_of(config)
        self._canary: tuple[list[int], ImageCanary | None] | None = None
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
                vision=None if self._images is None else self._images.vision,
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
        is_first = self._canary is None
        if self._canary is None:
            tokens = self._canary_tokens(vocab_size or 2 * _CANARY_TOKENS)
            self._canary = (tokens, ImageCanary.of(self._config, tokens))
        canary = self._canary
        differences = await asyncio.gather(*(teacher.check(*canary) for teacher in teachers))
        if is_first:
            self._keep_receipts(canary[0])
        for teacher in teachers:
            teacher.client.busy.take_idle_ratio()
            teacher.client.counters.take()
        return {"rollout/teacher_canary_abs_diff": max(differences)}

    def _keep_receipts(self, tokens: list[int]) -> None:
        """Compare teachers with those of the run's last launch, and write their receipts."""
        observe = self._config.observe
        folder = Path(observe.output_dir) / observe.run_name
        if not folder.is_dir():
            return  # a rollout loop without a run
        path = folder / f"teachers{f'.{observe.stage}' if observe.stage else ''}.json"
        receipts = read_object(path)
        for teacher in self._teachers.values():
            assert teacher.canary is not None
            before = receipts.get(teacher.name) or {}
            old = before.get("log_probs") or []
            if before.get("tokens") == tokens and len(old) == len(teacher.canary):
                difference = _mean_difference(old, teacher.canary)
                if _is_another(old, difference):
                    logger.warning(
                        "teacher %s at %s has other weights than in the last launch of this run, "
                        "at %s: its log-probs of the canary differ by %.3g on average; what was "
                        "learnt from the other one stays in the policy",
                        teacher.name,
                        teacher.url,
                        before.get("url"),
                        difference,
                    )
            receipts[teacher.name] = {
                "url": teacher.url,
                "tokens": tokens,
                "log_probs": teacher.canary,
            }
        write_atomically(path, json.dumps(receipts, indent=1).encode())

    def _canary_tokens(self, vocab_size: int) -> list[int]:
        count = 2 * _CANARY_TOKENS
        tokens = [(2 * n + 1) * vocab_size // count for n in range(_CANARY_TOKENS)]
        begins_image = None if self._images is None else self._images.vision.start_token
        return [token + 1 if token == begins_image else token for token in tokens]

    def metrics(self) -> dict[str, float]:
        """Return ``perf/teacher_idle_ratio``, the share of time in which a teacher had no request,
        and ``rollout/teacher_requests``, both since `begin`."""
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
        images: list[str] = []
        if references := self._references(sample, prompt):
            images = await asyncio.to_thread(encoded_images, references)
        values, tops = await self._teachers[name].log_probs(
            [*prompt, *response], len(prompt), self._top_k, images
        )
        sample.teacher_log_probs = [min(value, 0.0) for value in values]
        sample.teacher_top_tokens = pack_top_tokens(tops) if tops else None
        return sample

    def _references(self, sample: Sample, prompt: list[int]) -> list[str]:
        """Return the references of the images that the teacher sees: those of its prompt, which are
        the first ones of the sample's, and those of the response."""
        if self._images is None:
            return []
        media = media_of(sample.multimodal_inputs, sample.multimodal_train_inputs)
        start = sample.prompt_length
        count = len(placeholder_runs(prompt, self._images.vision))
        of_prompt = [one.reference for one in media if one.span.start < start]
        return [*of_prompt[:count], *(one.reference for one in media if one.span.start >= start)]

    def _prompt_of(self, sample: Sample) -> list[int]:
        given = sample.metadata.get(self._prompt_key) if self._prompt_key else None
        if given is None:
            return sample.tokens[: sample.prompt_length]
        if sample.teacher_prompt_tokens is None:
            templated = is_in_run() and current_state().templated
            seen = sample.multimodal_inputs
            if self._images is not None:
                own = references_of(sample)
                media = media_of(sample.multimodal_inputs, sample.multimodal_train_inputs)
                limit = sum(one.span.start < sample.prompt_length for one in media)
                place = self._images.placeholder(self._tokenizer)
                given, count = read_teacher_prompt(given, place, limit)
                seen = {IMAGES: own[:count]}
                if isinstance(given, str) and not templated:
                    around = self._images.vision.kind.around
                    given = given.replace(place, f"{around}{place}{around}")
            if isinstance(given, str) and templated:
                given = [{"role": "user", "content": given}]
            sample.teacher_prompt_tokens = prompt_token_ids(
                self._tokenizer, replace(sample, prompt=given, multimodal_inputs=seen)
            )
        return sample.teacher_prompt_tokens
