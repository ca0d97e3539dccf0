"""Teachers in engines: which samples they score, when, and what they are refused for."""

from __future__ import annotations

import asyncio
import itertools
import json
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from aiohttp import web

from slime.config import make_config
from slime.config.teachers import engine_teachers, read_teachers
from slime.errors import UserError
from slime.prompts.same_vocabulary import check_same_vocabulary
from slime.rollout.loop import RolloutLoop
from slime.rollout.teachers import EngineTeacher, TeacherPool
from slime.samples.batch import TrainLayout
from slime.samples.convert import to_train_batches
from slime.samples.types import Sample
from tests.support.fake_engine import FakeEngine
from tests.support.fake_rollout import FakeSource, FakeTokenizer
from tests.support.prompt_fixtures import make_tokenizer

FLAGS: dict[str, Any] = {
    "num_rollout": 1,
    "rollout_batch_size": 4,
    "n_samples_per_prompt": 2,
    "rollout_max_response_len": 8,
    "use_opd": True,
}


def taste(token: int, before: int) -> float:
    """The teacher's log-prob of a token behind another."""
    return -0.125 * (token % 5) - 0.5 * (before % 3)


class FakeTeacher(FakeEngine):
    """Scores the tokens that it is given.

    Attributes:
        bias: added to each log-prob: other weights.
        shift: positions by which its answer is off.
        scored_at: times of its answers.
    """

    bias = 0.0
    shift = 0

    def __init__(self) -> None:
        super().__init__()
        self._scored = asyncio.Condition()

    async def has_scored(self, count: int) -> None:
        """Wait for so many samples; the canary is none."""
        while len(self.bodies) - 1 < count:
            async with self._scored:
                await self._scored.wait()

    async def _generate(self, request: web.Request) -> web.StreamResponse:
        found = await super()._generate(request)
        async with self._scored:
            self._scored.notify_all()
        return found

    def _body(self, body: dict[str, Any], tokens: list[int], reason: str) -> dict[str, Any]:
        ids = body["input_ids"]
        start = body["logprob_start_len"] - self.shift
        pairs = [
            [taste(own, before) + self.bias, own, None] for before, own in itertools.pairwise(ids)
        ]
        found = super()._body(body, tokens, reason)
        meta = found["meta_info"]
        meta["input_token_logprobs"] = [[None, ids[start], None], *pairs[start:]]
        if k := body.get("top_logprobs_num"):
            rows = [[[-0.5 * rank - 0.7, own + rank, None] for rank in range(k)] for own in ids[1:]]
            meta["input_top_logprobs"] = [None, *rows[start:]]
        return found


def with_teachers(
    test: Callable[[RolloutLoop, FakeEngine, list[FakeTeacher]], Awaitable[Any]],
    *names: str,
    source: Any = None,
    **flags: Any,
) -> Any:
    """A rollout loop with an engine, and a teacher of each name."""

    async def main() -> Any:
        teachers = [FakeTeacher() for _ in names]
        for teacher in teachers:
            await teacher.__aenter__()
        urls = [f"{name}={teacher.url}" for name, teacher in zip(names, teachers)]
        config = make_config(**{**FLAGS, "opd_teacher_urls": urls, **flags})
        async with FakeEngine() as engine:
            used = FakeSource(config.rollout.n_samples_per_prompt) if source is None else source
            loop = RolloutLoop(config, FakeTokenizer(), used, engine.url)
            try:
                return await asyncio.wait_for(test(loop, engine, teachers), timeout=30)
            finally:
                await loop.close()
                for teacher in teachers:
                    await teacher.__aexit__()

    return asyncio.run(main())


def test_every_sample_carries_its_teachers_log_probs_and_no_reward_is_needed() -> None:
    async def test(loop: RolloutLoop, engine: FakeEngine, teachers: list[FakeTeacher]) -> None:
        output = await loop.generate_batch(0)
        samples = [sample for group in output.samples for sample in group.samples]
        assert len(samples) == 8
        for sample in samples:
            start = sample.prompt_length
            pairs = zip(sample.tokens[start:], sample.tokens[start - 1 :])
            assert sample.teacher_log_probs == [taste(*pair) for pair in pairs]
            assert sample.reward == 0.0
        asked = teachers[0].bodies[1:]  # the first is the canary
        assert {body["logprob_start_len"] for body in asked} == {samples[0].prompt_length - 1}
        assert all(body["sampling_params"]["max_new_tokens"] == 0 for body in asked)
        metrics = output.metrics or {}
        assert metrics["rollout/teacher_requests"] == 8
        assert metrics["rollout/teacher_canary_abs_diff"] == 0.0
        (batch,) = to_train_batches(output.samples, loop.config, TrainLayout(), 0)
        assert batch.teacher_log_probs is not None and batch.teachers == []

    with_teachers(test, "default")


def test_a_teacher_scores_while_others_still_generate() -> None:
    """One sample is generated only after the teacher has scored all others."""

    async def test(loop: RolloutLoop, engine: FakeEngine, teachers: list[FakeTeacher]) -> None:
        async def wait(body: dict[str, Any]) -> bool:
            if len(engine.bodies) == 1:
                await teachers[0].has_scored(7)
            return False

        engine._wait = wait  # type: ignore[method-assign]
        output = await loop.generate_batch(0)
        assert len(output.samples) == 4
        assert 0.0 < (output.metrics or {})["perf/teacher_idle_ratio"] < 1.0

    with_teachers(test, "default")


def test_the_most_likely_tokens_reach_the_batch() -> None:
    async def test(loop: RolloutLoop, engine: FakeEngine, teachers: list[FakeTeacher]) -> None:
        output = await loop.generate_batch(0)
        (batch,) = to_train_batches(output.samples, loop.config, TrainLayout(), 0)
        for values, tokens, length in zip(
            batch.payloads["teacher_top"], batch.tokens, batch.response_lengths
        ):
            assert values.shape == (2, length, 3)
            assert values[0, :, 0].tolist() == tokens[-length:].tolist()
            assert np.allclose(values[1], [-0.7, -1.2, -1.7])

    with_teachers(test, "default", opd_loss="forward_kl", opd_top_k=3)


def test_no_more_tokens_are_asked_for_than_the_vocabulary_has() -> None:
    """Engines refuse to; a teacher in the trainer gives all that there are."""

    async def test(loop: RolloutLoop, engine: FakeEngine, teachers: list[FakeTeacher]) -> None:
        pool = TeacherPool(loop.config, FakeTokenizer(), {}, engine.url)
        await pool.begin(5)
        await pool.score(Sample(prompt="p", tokens=[1, 2, 3], response_length=2))
        await pool.close()
        assert [body.get("top_logprobs_num") for body in teachers[0].bodies] == [None, 5]

    with_teachers(test, "default", opd_loss="forward_kl", opd_top_k=8)


class NamedSource(FakeSource):
    """Prompts whose metadata is ``rows``, in turn."""

    rows: tuple[dict[str, Any], ...] = ()

    def get_samples(self, num_samples: int) -> list[list[Sample]]:
        groups = super().get_samples(num_samples)
        for number, group in enumerate(groups):
            for sample in group:
                sample.metadata = dict(self.rows[number % len(self.rows)])
        return groups


def test_each_sample_is_scored_by_the_teacher_that_it_names() -> None:
    source = NamedSource(2)
    source.rows = ({"opd_teacher": "math"}, {"opd_teacher": "code"}, {"opd_teacher": "math"}, {})

    async def test(loop: RolloutLoop, engine: FakeEngine, teachers: list[FakeTeacher]) -> None:
        await loop.generate_batch(0)
        assert [len(teacher.bodies) - 1 for teacher in teachers] == [4, 2, 2]

    with_teachers(test, "math", "code", "default", source=source)


@pytest.mark.parametrize(
    ("row", "said"),
    [
        ({"opd_teacher": "law"}, "names the teacher 'law', but the teachers are: code, math"),
        ({}, "names no teacher, and there are several"),
    ],
)
def test_a_teacher_that_is_not_there_ends_the_run(row: dict[str, Any], said: str) -> None:
    source = NamedSource(2)
    source.rows = (row,)

    async def test(loop: RolloutLoop, engine: FakeEngine, teachers: list[FakeTeacher]) -> None:
        with pytest.raises(UserError, match=said):
            await loop.generate_batch(0)

    with_teachers(test, "math", "code", source=source)


def test_a_teacher_may_see_another_prompt() -> None:
    source = NamedSource(2)
    source.rows = ({"hinted": "abcdef"}, {})

    async def test(loop: RolloutLoop, engine: FakeEngine, teachers: list[FakeTeacher]) -> None:
        output = await loop.generate_batch(0)
        hint = FakeTokenizer().encode("abcdef", add_special_tokens=False)
        for group in output.samples:
            for sample in group.samples:
                own = sample.tokens[: sample.prompt_length]
                seen = hint if "hinted" in sample.metadata else own
                wanted = [*seen, *sample.tokens[sample.prompt_length :]]
                assert wanted in [body["input_ids"] for body in teachers[0].bodies]
                assert sample.teacher_log_probs is not None
                assert sample.teacher_log_probs[0] == taste(wanted[len(seen)], seen[-1])
        (batch,) = to_train_batches(output.samples, loop.config, TrainLayout(), 0)
        found = [prompt.tolist() for prompt in batch.payloads["teacher_prompts"]]
        assert sorted(map(len, found)) == [0] * 4 + [len(hint)] * 4

    with_teachers(test, "default", source=source, opd_teacher_prompt_key="hinted")


def test_an_answer_about_other_tokens_is_no_score() -> None:
    async def test(loop: RolloutLoop, engine: FakeEngine, teachers: list[FakeTeacher]) -> None:
        async def shifted() -> list[float]:
            teacher = EngineTeacher(
                "one", teachers[0].url, concurrency=1, request_timeout=5, retry_seconds=0
            )
            teachers[0].shift = 1
            values, _ = await teacher.log_probs([7, 8, 9, 10], 2)
            await teacher.client.close()
            return values

        # one position more is cut off; an answer of too few is noticed
        assert await shifted() == [taste(9, 8), taste(10, 9)]
        teachers[0].shift = -2
        with pytest.raises(UserError, match=r"does not score tokens.*first difference"):
            await loop.generate_batch(0)

    with_teachers(test, "default")


def test_a_teacher_with_other_weights_than_at_the_start_ends_the_run() -> None:
    async def test(loop: RolloutLoop, engine: FakeEngine, teachers: list[FakeTeacher]) -> None:
        await loop.generate_batch(0)
        teachers[0].bias = -0.4
        with pytest.raises(UserError, match="has other weights than at the start"):
            await loop.generate_batch(1)

    with_teachers(test, "default", num_rollout=2)


def test_a_teacher_with_other_weights_than_in_the_last_launch_is_told(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Its receipt is in the run folder; a number that is only rounded otherwise is no news."""
    (tmp_path / "run").mkdir()
    flags = {"output_dir": str(tmp_path), "run_name": "run"}

    def launch(bias: float) -> list[str]:
        async def test(loop: RolloutLoop, engine: FakeEngine, teachers: list[FakeTeacher]) -> None:
            teachers[0].bias = bias
            await loop.generate_batch(0)
            receipt = json.loads((tmp_path / "run" / "teachers.json").read_text())["default"]
            assert receipt["url"] == teachers[0].url and len(receipt["tokens"]) == 16
            assert len(receipt["log_probs"]) == 15

        caplog.clear()
        with_teachers(test, "default", **flags)
        return [record.getMessage() for record in caplog.records if "last launch" in record.msg]

    assert launch(0.0) == []
    assert launch(1e-4) == []
    [told] = launch(-0.4)
    assert "teacher default" in told and "differ by 0.4 on average" in told
    assert launch(-0.4) == []


# -- names and vocabularies ------------------------------------------------------------------------


def test_teachers_are_urls_or_models() -> None:
    assert [one.source for one in engine_teachers([], ["a", "b"])] == ["a", "b"]
    with pytest.raises(UserError, match="'c' is neither a URL nor a model"):
        engine_teachers(["c"], ["a", "b"])
    with pytest.raises(UserError, match="two teachers have the name 'default'"):
        read_teachers(["a", "b"])
    assert read_teachers(["models/a=b"])[0].name == "default"  # a path with "=" in it


def test_a_teacher_with_another_vocabulary_is_refused(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    folders = [tmp_path / name for name in ("student", "same", "larger", "other", "bare")]
    for folder in folders:
        folder.mkdir()
    for folder in folders[:3]:
        make_tokenizer().save_pretrained(folder)
    larger = make_tokenizer()
    larger.add_tokens(["<more>"])
    larger.save_pretrained(folders[2])
    student, same, more, other, bare = map(str, folders)
    check_same_vocabulary(student, same, "one")
    check_same_vocabulary(student, more, "one")
    with pytest.raises(UserError, match="teacher one has another vocabulary") as caught:
        check_same_vocabulary(more, student, "one")
    assert "'<more>' is" in caught.value.why and "not there" in caught.value.why
    moved = make_tokenizer()
    vocab = moved.backend_tokenizer.to_str()
    (Path(other) / "tokenizer.json").write_text(vocab.replace('"id":0', '"id":0 '))
    check_same_vocabulary(student, bare, "one")
    assert "has no tokenizer" in caplog.text
