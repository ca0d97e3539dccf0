"""Asynchronous training selects nothing by length: answers that take long are trained on like any
others.

The loop, the collector and the ages of samples are the real ones; engine, data and trainer are
fakes on one event loop, where an answer takes the square of its length in turns.
"""

from __future__ import annotations

import asyncio
import statistics
from collections import Counter
from collections.abc import Iterable
from functools import cache
from types import SimpleNamespace
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from slime.config import make_config
from slime.engines.api import GenerateResult
from slime.loop import train_on
from slime.rollout.dynamic_sampling import Collected, DynamicSampler
from slime.rollout.trajectory import GroupRunner
from slime.run.schedule import Schedule, StalenessTracker
from slime.samples.types import VersionWindow
from tests.support.fake_engine import answer
from tests.support.fake_rollout import FakeClient, FakeRewards, FakeSource, make_state

TARGET, GROUP_SIZE, ROLLOUTS, MOST_TOKENS = 4, 2, 6, 24


class SlowWhereLong(FakeClient):
    """An answer takes the square of its length."""

    async def _answer(
        self, number: int, input_ids: list[int], params: dict[str, Any]
    ) -> GenerateResult:
        tokens, _ = answer(input_ids, params.get("sampling_seed", 0), params["max_new_tokens"])
        self.turns = [len(tokens) ** 2]
        return await super()._answer(number, input_ids, params)


class Session:
    """A run of `ROLLOUTS` rollouts in this process.

    Args:
        draw_size: groups drawn at a time; more than `TARGET` is over-sampling.
        train_turns: of the event loop that training takes.
    """

    def __init__(self, *, draw_size: int = TARGET, train_turns: int = 50, **flags: Any) -> None:
        self.config = make_config(rollout_batch_size=TARGET, num_rollout=ROLLOUTS, **flags)
        self.schedule, self.staleness = Schedule(self.config), StalenessTracker(self.config)
        self.schedule.begin(0, 0)
        self.saving = SimpleNamespace(is_due=lambda rollout_id: False)
        self.draw_size, self.train_turns, self.step = draw_size, train_turns, 0
        self.client, self.source = SlowWhereLong(max_concurrency=64), FakeSource(GROUP_SIZE)
        self.trained: list[list[tuple[int, int]]] = []
        """(index, length) of the samples of each rollout."""
        self.too_old = 0  # samples that were counted so
        self.loop = asyncio.new_event_loop()

    def run(self) -> list[list[tuple[int, int]]]:
        try:
            self.update_weights()
            train_on(self)  # type: ignore[arg-type]
        finally:
            self.loop.close()
        return self.trained

    async def _generate(self, rollout_id: int, versions: VersionWindow) -> Collected:
        with self.client.fork() as client:
            state = make_state(client, max_new_tokens=MOST_TOKENS)
            collector = DynamicSampler(
                GroupRunner(state, FakeRewards(), rollout_id=rollout_id),
                self.source,
                target=TARGET,
                draw_size=self.draw_size,
                group_size=GROUP_SIZE,
                versions=versions,
            )
            return await collector.collect()

    def may_start(self, rollout_id: int) -> bool:
        return self.staleness.may_start(rollout_id)

    def start_generating(self, rollout_id: int) -> asyncio.Task[Collected]:
        return self.loop.create_task(
            self._generate(rollout_id, self.staleness.versions(rollout_id))
        )

    def collect(self, generating: asyncio.Task[Collected]) -> Collected:
        return self.loop.run_until_complete(generating)

    def wait_for(self, generating: Iterable[asyncio.Task[Collected]]) -> None:
        for task in list(generating):
            self.loop.run_until_complete(task)

    def train(self, batch: Collected) -> dict[str, float]:
        samples = [sample for run in batch.chosen for sample in run.samples]
        versions = Counter(sample.token_versions() or (0,) for sample in samples)
        behind = [
            self.step - self.staleness.trained_when(min(each)) for each in versions.elements()
        ]
        sync = self.config.sync
        bound = sync.max_staleness if sync.max_staleness is not None else sync.staleness
        told = self.staleness.metrics(versions, self.step).get("rollout/staleness/num_too_old")
        if sync.async_buffer_size or sync.max_staleness is not None:
            assert told == sum(age > bound for age in behind)
            self.too_old += int(told)
        self.trained.append([(sample.index or 0, sample.response_length) for sample in samples])
        self.loop.run_until_complete(_turns(self.train_turns))
        self.step += 1
        return {}

    def update_weights(self) -> dict[str, float]:
        self.client.weight_version = self.staleness.version + 1
        self.staleness.pushed(self.staleness.version + 1, self.step)
        return {}

    def evaluate(self, rollout_id: int) -> dict[str, float]:
        return {}

    def finish_evaluation(self) -> None: ...

    def log(self, metrics: dict[str, float]) -> None: ...

    def stop_if_asked(self) -> None: ...


async def _turns(count: int) -> None:
    for _ in range(count):
        await asyncio.sleep(0)


@cache
def in_lock_step() -> list[list[tuple[int, int]]]:
    return Session(async_buffer_size=0).run()


@settings(max_examples=6)
@given(
    ahead=st.integers(1, 4),
    interval=st.integers(1, 3),
    most=st.none() | st.integers(2, 5),
    train_turns=st.sampled_from([0, 50, 2000]),
)
def test_what_is_trained_on_is_that_of_lock_step(
    ahead: int, interval: int, most: int | None, train_turns: int
) -> None:
    """Rollout by rollout: every sample that was drawn, once, whatever time it took."""
    flags = {"async_buffer_size": ahead, "update_weights_interval": interval, "max_staleness": most}
    session = Session(train_turns=train_turns, **flags)
    trained = session.run()
    assert not session.too_old
    indices = [index for rollout in trained for index, _ in rollout]
    assert indices == list(range(ROLLOUTS * TARGET * GROUP_SIZE))
    assert trained == in_lock_step()


def test_the_fake_has_a_choice_to_offer() -> None:
    """Lengths differ widely, and whoever takes the first to finish takes the short ones."""
    lengths = [length for rollout in in_lock_step() for _, length in rollout]
    assert min(lengths) <= 3 and max(lengths) == MOST_TOKENS
    [first, *_] = Session(async_buffer_size=0, draw_size=3 * TARGET).run()
    assert statistics.mean(length for _, length in first) < 0.7 * statistics.mean(lengths)


@settings(max_examples=5)
@given(
    ahead=st.integers(0, 3),
    draw_size=st.integers(TARGET + 1, 3 * TARGET),
    most=st.none() | st.integers(1, 3),
)
def test_with_over_sampling_the_long_ones_come_later_and_are_not_lost(
    ahead: int, draw_size: int, most: int | None
) -> None:
    session = Session(async_buffer_size=ahead, draw_size=draw_size, max_staleness=most)
    trained = [index for rollout in session.run() for index, _ in rollout]
    left = [sample.index for group in session.source.buffer for sample in group]
    assert sorted([*trained, *left]) == list(range(session.source.drawn * GROUP_SIZE))
    assert most is None or not session.too_old


def test_what_was_put_back_may_be_older_than_the_launch_says_and_is_counted() -> None:
    """Surplus of a rollout is trained on with a later one, and not generated again for that."""
    session = Session(async_buffer_size=1, draw_size=3 * TARGET)
    session.run()
    assert session.too_old > 0 and session.config.sync.staleness == 1
    bounded = Session(async_buffer_size=1, draw_size=3 * TARGET, max_staleness=1)
    bounded.run()
    assert not bounded.too_old and len(bounded.client.calls) > len(session.client.calls)
