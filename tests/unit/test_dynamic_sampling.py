"""The collector: no group lost or duplicated in any order of events, and no influence of that order
in deterministic mode."""

from __future__ import annotations

import asyncio
import dataclasses
from collections import Counter
from dataclasses import dataclass, field
from typing import Any
from unittest.mock import ANY

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from slime.errors import UserError
from slime.rollout import dynamic_sampling as collect
from slime.rollout.dynamic_sampling import Collected, DynamicSampler
from slime.rollout.generate import sample_seed
from slime.rollout.trajectory import Activity, GroupRun, GroupRunner, too_many_failed
from slime.rollout.watchdog import RolloutStalled, Watchdog
from slime.samples.types import Sample, SampleStatus, VersionWindow
from slime.user_code.hooks import DynamicFilterOutput
from slime.user_code.loading import FunctionFailed
from tests.support import rollout_hooks
from tests.support.fake_engine import answer
from tests.support.fake_rollout import FakeClient, FakeRewards, FakeSource, hook_args, make_state

MAX_NEW_TOKENS = 8


@dataclass
class Setup:
    """A loop of several rollouts on fakes."""

    target: int = 3
    draw_size: int = 3
    group_size: int = 2
    turns: list[int] = field(default_factory=lambda: [0])
    reward_turns: list[int] = field(default_factory=lambda: [0])
    fail: set[int] = field(default_factory=set)
    max_concurrency: int = 4
    deterministic: bool = False
    partial_rollout: bool = False
    group_rm: bool = False
    drop_every: int = 0
    max_failed_fraction: float = 100.0
    max_age: int | None = None
    """In rollouts; the weights of rollout k have the version k + 1."""
    stale_samples: str = "requeue"

    def make(self) -> tuple[FakeClient, FakeSource, FakeRewards]:
        client = FakeClient(self.turns, self.fail, self.max_concurrency)
        return client, FakeSource(self.group_size), FakeRewards(self.reward_turns)

    def drop(self, args: Any, samples: list[Sample], **kwargs: Any) -> DynamicFilterOutput:
        assert all(sample.reward is not None for sample in samples)
        # a verdict depends on the weights, and so on the rollout in which a group was generated
        version = int(samples[0].token_spans[0].weight_version or 0)
        number = (samples[0].group_index or 0) + version
        keep = not self.drop_every or number % self.drop_every != 0
        return DynamicFilterOutput(keep, reason="multiple")

    async def rollouts(
        self, client: FakeClient, source: FakeSource, rewards: Any, count: int
    ) -> list[Collected]:
        state = make_state(client, max_new_tokens=MAX_NEW_TOKENS)
        results = []
        for rollout_id in range(count):
            if self.max_age is not None:
                client.weight_version = rollout_id + 1
            runner = GroupRunner(state, rewards, rollout_id=rollout_id, group_rm=self.group_rm)
            collector = DynamicSampler(
                runner,
                source,
                target=self.target,
                draw_size=self.draw_size,
                group_size=self.group_size,
                dynamic_filter=self.drop if self.drop_every else None,
                deterministic=self.deterministic,
                partial_rollout=self.partial_rollout,
                max_failed_fraction=self.max_failed_fraction,
                versions=VersionWindow(
                    0 if self.max_age is None else rollout_id + 1 - self.max_age
                ),
                stale_samples=self.stale_samples,
            )
            results.append(await collector.collect())
        return results


def run(
    setup: Setup, count: int = 3
) -> tuple[list[Collected], FakeClient, FakeSource, FakeRewards]:
    async def main() -> tuple[list[Collected], FakeClient, FakeSource, FakeRewards]:
        client, source, rewards = setup.make()
        before = len(asyncio.all_tasks())
        results = await asyncio.wait_for(setup.rollouts(client, source, rewards, count), timeout=30)
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        assert len(asyncio.all_tasks()) <= before + 1, "tasks are left behind"
        return results, client, source, rewards

    return asyncio.run(main())


setups = st.builds(
    Setup,
    target=st.integers(1, 4),
    draw_size=st.integers(4, 6),
    group_size=st.integers(1, 3),
    turns=st.lists(st.integers(0, 9) | st.integers(10, 60), min_size=1, max_size=7),
    reward_turns=st.lists(st.integers(0, 9) | st.integers(10, 60), min_size=1, max_size=5),
    fail=st.sets(st.integers(0, 20), max_size=4),
    max_concurrency=st.integers(1, 8),
    partial_rollout=st.booleans(),
    group_rm=st.booleans(),
    drop_every=st.sampled_from([0, 2, 3]),
    max_age=st.sampled_from([None, 0, 1]),
    stale_samples=st.sampled_from(["correct", "requeue", "drop"]),
)


@settings(max_examples=60)
@given(setup=setups, deterministic=st.booleans())
def test_no_sample_is_lost_or_duplicated(setup: Setup, deterministic: bool) -> None:
    setup.deterministic = deterministic
    results, client, source, _ = run(setup)
    chosen = [run.index for result in results for run in result.chosen]
    back = [group[0].group_index for group in source.buffer]
    fates = Counter(chosen + back + source.discarded)
    assert fates == Counter(range(source.drawn))
    assert client.max_running <= setup.max_concurrency
    for rollout_id, result in enumerate(results):
        versions = [min(run.to_group().weight_versions(), default=0) for run in result.chosen]
        taken_as_they_are = setup.max_age is None or setup.stale_samples == "correct"
        assert taken_as_they_are or min(versions) >= rollout_id + 1 - (setup.max_age or 0)
        assert len(result.chosen) == setup.target
        assert [s.index for r in result.chosen for s in r.samples] == sorted(
            s.index for r in result.chosen for s in r.samples
        )
        for group_run in result.chosen:
            assert group_run.is_scored and len(group_run.samples) == setup.group_size
            for sample in group_run.samples:
                sample.validate()
                seed = sample_seed(42, sample.index or 0)
                assert sample.tokens[2:] == answer(sample.tokens[:2], seed, MAX_NEW_TOKENS)[0]
                assert sample.token_spans[-1].end == sample.response_length
    for group in source.buffer:
        statuses = {sample.status for sample in group}
        assert SampleStatus.FAILED not in statuses
        if not setup.partial_rollout or deterministic:  # whole groups or bare prompts
            finished = statuses <= {SampleStatus.COMPLETED, SampleStatus.TRUNCATED}
            assert (finished and not deterministic) or all(not s.response_length for s in group)


@settings(max_examples=25)
@given(setup=setups, other=setups)
def test_deterministic_rollouts_do_not_depend_on_the_order_of_events(
    setup: Setup, other: Setup
) -> None:
    setup.deterministic, setup.fail = True, set()
    setup.max_age, setup.drop_every = 100, max(setup.drop_every, 2)
    outcomes = []
    for twin in (setup, other):
        setup.turns, setup.reward_turns, setup.max_concurrency = (
            twin.turns,
            twin.reward_turns,
            twin.max_concurrency,
        )
        results, _, _, _ = run(setup)
        outcomes.append(
            [
                [(s.index, s.tokens, s.reward) for group in result.chosen for s in group.samples]
                for result in results
            ]
        )
    assert outcomes[0] == outcomes[1]


def test_deterministic_rollouts_take_the_first_groups() -> None:
    slow_first = [9, 9, 0, 0, 0, 0]
    results, *_ = run(Setup(target=2, draw_size=3, turns=slow_first, deterministic=True), count=2)
    assert [[run.index for run in result.chosen] for result in results] == [[0, 1], [2, 3]]


def test_surplus_groups_are_trained_on_next_without_new_requests() -> None:
    setup = Setup(target=1, draw_size=3, group_size=1, turns=[0])
    results, client, _, rewards = run(setup, count=3)
    assert [result.chosen[0].index for result in results] == [0, 1, 2]
    requests = Counter(call["input_ids"][0] - 1 for call in client.calls)
    assert [requests[index] for index in range(3)] == [1, 1, 1]
    assert [rewards.scored.count(index) for index in range(3)] == [1, 1, 1]
    assert results[0].num_surplus == 2


def test_partial_rollout_keeps_tokens_and_marks_where_they_began() -> None:
    setup = Setup(target=1, draw_size=2, group_size=1, turns=[3, 30, 0, 0], partial_rollout=True)
    _, client, source, _ = run(setup, count=1)
    [[left]] = source.buffer
    assert left.status is SampleStatus.ABORTED and left.response_length > 0
    assert left.metadata["start_rollout_id"] == 0

    async def resume() -> None:
        client.weight_version = 2
        client._aborting = asyncio.Event()
        client.slots = asyncio.Semaphore(4)
        [again] = await setup.rollouts(client, source, FakeRewards(), 1)
        sample = again.chosen[0].samples[0]
        assert sample is left
        assert [(span.end, span.weight_version) for span in sample.token_spans] == [
            (sample.token_spans[0].end, 1),
            (sample.response_length, 2),
        ]

    asyncio.run(resume())


def test_what_is_too_old_is_generated_anew() -> None:
    """Surplus of the first rollout, which would be trained on in the second one without a
    request."""
    setup = Setup(target=2, draw_size=4, turns=[1], max_age=0)
    [first, second], *_ = run(setup, count=2)
    name = "rollout/num_stale_requeued"
    assert first.stale[name] == 0 and second.stale[name] == first.num_surplus > 0
    assert {min(run.to_group().weight_versions()) for run in second.chosen} == {2}


def test_what_is_generated_anew_begins_with_the_sample_that_was_drawn() -> None:
    """Not with what the generate function made of it in the rollout that had finished it."""
    client, source = FakeClient([1]), FakeSource(1)
    source.add_samples = lambda groups: source.buffer.extend(groups)  # type: ignore[method-assign]
    args = hook_args(custom_generate_function_path="tests.support.rollout_hooks.plans_first")

    async def main() -> None:
        await collect_with(client, source, args=args, target=1, draw_size=2)
        assert [[sample.tokens[:3] for sample in group] for group in source.buffer] == [
            [[42, 43, 44], [2, 7, ANY]]
        ]
        client.weight_version = 9
        rollout_hooks.calls.clear()
        again = await collect_with(
            client, source, args=args, target=1, draw_size=1, versions=VersionWindow(oldest=5)
        )
        assert again.stale["rollout/num_stale_requeued"] == 1 and [
            run.index for run in again.chosen
        ] == [1]

    asyncio.run(main())
    assert rollout_hooks.calls == [("drawn", ([2, 7], {}, False, None))]


def test_what_is_too_old_is_trained_on() -> None:
    setup = Setup(target=2, draw_size=4, turns=[1], max_age=0, stale_samples="correct")
    [first, second], *_ = run(setup, count=2)
    assert +second.stale == {"rollout/num_stale_corrected": first.num_surplus}
    assert [run.index for run in second.chosen] == [2, 3]
    assert {min(run.to_group().weight_versions()) for run in second.chosen} == {1}


def test_what_is_too_old_is_dropped() -> None:
    """Others are drawn in its place, and it does not come again."""
    setup = Setup(target=2, draw_size=4, turns=[1], max_age=0, stale_samples="drop")
    [first, second], _, source, _ = run(setup, count=2)
    assert +second.stale == {"rollout/num_stale_dropped": first.num_surplus}
    assert source.discarded == [2, 3] and [run.index for run in second.chosen] == [4, 5]
    assert {min(run.to_group().weight_versions()) for run in second.chosen} == {2}


@pytest.mark.parametrize(
    ("choice", "became", "chosen", "discarded", "back"),
    [
        ("correct", "corrected", [0, 1], [], []),
        ("requeue", "requeued", [1, 2], [], [0]),
        ("drop", "dropped", [1, 2], [0], []),
    ],
)
def test_a_generate_function_that_brings_older_tokens(
    monkeypatch: pytest.MonkeyPatch,
    choice: str,
    became: str,
    chosen: list[int],
    discarded: list[int],
    back: list[int],
) -> None:
    """Group 0 comes with tokens of weights 1, where 2 are asked for."""
    setup = Setup(target=2, draw_size=2, turns=[1], max_age=0, stale_samples=choice)
    client, source, rewards = setup.make()
    generate = GroupRunner.run

    async def brings(runner: GroupRunner, run: Any) -> None:
        await generate(runner, run)
        for sample in run.samples if run.index == 0 else ():
            sample.token_spans = [
                dataclasses.replace(span, weight_version=0) for span in sample.token_spans
            ]

    monkeypatch.setattr(GroupRunner, "run", brings)
    [result] = asyncio.run(asyncio.wait_for(setup.rollouts(client, source, rewards, 1), timeout=30))
    assert +result.stale == {f"rollout/num_stale_{became}": 1}
    assert [run.index for run in result.chosen] == chosen and source.discarded == discarded
    assert [
        group[0].group_index for group in source.buffer if group[0].group_index in (0, 1)
    ] == back
    assert all(
        not sample.response_length
        for group in source.buffer
        for sample in group
        if sample.group_index == 0
    )


def test_a_generate_function_that_brings_nothing_else(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(collect, "_MAX_DROPS", 30)
    generate = GroupRunner.run

    async def brings(runner: GroupRunner, run: Any) -> None:
        await generate(runner, run)
        for sample in run.samples:
            sample.token_spans = [
                dataclasses.replace(span, weight_version=0) for span in sample.token_spans
            ]

    monkeypatch.setattr(GroupRunner, "run", brings)
    with pytest.raises(
        UserError, match="30 groups in a row were generated with tokens older than --max-staleness"
    ):
        run(Setup(target=2, draw_size=2, turns=[1], max_age=0), count=1)


def test_without_partial_rollout_aborted_groups_start_again_from_the_prompt() -> None:
    _, _, source, _ = run(Setup(target=1, draw_size=2, group_size=1, turns=[3, 30]), count=1)
    [[left]] = source.buffer
    assert (left.status, left.response_length, left.tokens) == (SampleStatus.PENDING, 0, [2, 7])


def test_a_slow_judge_does_not_hold_up_the_end() -> None:
    async def main() -> None:
        setup = Setup(target=1, draw_size=2, group_size=1)
        client, source, _ = setup.make()
        rewards = JudgeThatSleeps(slow={1})
        [result] = await asyncio.wait_for(setup.rollouts(client, source, rewards, 1), timeout=10)
        assert result.chosen[0].index == 0
        [[left]] = source.buffer
        assert (
            left.status in (SampleStatus.COMPLETED, SampleStatus.TRUNCATED) and left.reward is None
        )
        assert rewards.cancelled == {1} and client.num_aborts == 0  # nothing was generating
        calls = len(client.calls)
        rewards.slow.clear()
        [result] = await asyncio.wait_for(setup.rollouts(client, source, rewards, 1), timeout=10)
        assert result.chosen[0].index == 1 and left.reward is not None
        assert len(client.calls) == calls + 1  # only for the group drawn along with it

    asyncio.run(main())


class JudgeThatSleeps(FakeRewards):
    def __init__(self, slow: set[int]) -> None:
        super().__init__()
        self.slow, self.cancelled = slow, set[int | None]()

    async def score(self, sample: Sample) -> float:
        try:
            if sample.index in self.slow:
                await asyncio.sleep(3600)
        except asyncio.CancelledError:
            self.cancelled.add(sample.index)
            raise
        return await super().score(sample)


def test_failing_groups_are_replaced_and_too_many_stop_the_run() -> None:
    results, _, source, _ = run(Setup(fail={0}, max_failed_fraction=0.0), count=1)
    assert results[0].num_failed == 1 and source.discarded == [0]
    assert [r.index for r in results[0].chosen] == [1, 2, 3]
    with pytest.raises(UserError, match="2 groups have failed in this rollout of 3") as caught:
        run(Setup(fail={0, 2}, max_failed_fraction=0.0), count=1)
    assert "engine is down" in caught.value.why and "sample" in caught.value.why
    assert "samples/failed_*.jsonl" in caught.value.why and caught.value.fix


@pytest.mark.parametrize(
    ("cause", "fix"),
    [
        (
            FunctionFailed("the reward failed", "KeyError: 'x'", "try slime reward"),
            "try slime reward",
        ),
        (FunctionFailed("the reward failed"), "fix what the cause names"),
        (OSError("no engine"), "fix what the cause names"),
    ],
)
def test_what_stops_the_run_tells_the_remedy_of_what_failed(cause: Exception, fix: str) -> None:
    run = GroupRun.of([Sample(index=3)])
    run.trajectories[0].failure = cause
    error = too_many_failed("2 groups have failed", "the last one", run, "failed_*.jsonl")
    assert (
        error.fix == fix
        and "the last one: sample 3 while " in error.why
        and str(cause.args[0]) in error.why
    )


def test_what_stops_the_run_points_to_the_users_line() -> None:
    run = GroupRun.of([Sample(index=3)])
    try:
        raise OSError("the sandbox is gone")
    except OSError as error:
        run.trajectories[0].failure = error
    error = too_many_failed("2 groups have failed", "the last one", run, "failed_*.jsonl")
    assert (
        error.fix == "mend it at the line below"
        and "in test_what_stops_the_run_points" in error.__notes__[0]
    )


def test_an_exhausted_source_is_named() -> None:
    async def main() -> None:
        setup = Setup(drop_every=2)
        client, _, rewards = setup.make()
        with pytest.raises(UserError, match="gave no more prompts after 4 groups") as caught:
            await setup.rollouts(client, FakeSource(2, size=4), rewards, 1)
        assert "dropped 2" in caught.value.why

    asyncio.run(main())


def test_groups_of_the_wrong_size_are_refused() -> None:
    async def main() -> None:
        setup = Setup()
        client, _, rewards = setup.make()
        with pytest.raises(UserError, match="a group of 5 samples"):
            await setup.rollouts(client, FakeSource(5), rewards, 1)

    asyncio.run(main())


def test_keep_when_insufficient_keeps_rather_than_draws() -> None:
    async def main() -> None:
        setup = Setup(target=2, draw_size=3, group_size=1)
        client, source, rewards = setup.make()
        setup.drop = lambda args, samples, **kw: DynamicFilterOutput(
            False, "all", keep_when_insufficient=True
        )  # type: ignore[method-assign]
        setup.drop_every = 1
        [result] = await setup.rollouts(client, source, rewards, 1)
        assert source.drawn == 3 and len(result.chosen) == 2 and result.drops == {"all": 1}

    asyncio.run(main())


def test_watchdog_names_who_waits_for_whom() -> None:
    async def main() -> None:
        client, source = FakeClient([10**9], max_concurrency=1), FakeSource(2)
        state = make_state(client)
        runner = GroupRunner(state, FakeRewards(), rollout_id=0)
        collector = DynamicSampler(
            runner, source, target=1, draw_size=1, group_size=2, stall_timeout=0.05
        )
        with pytest.raises(RolloutStalled) as caught:
            await asyncio.wait_for(collector.collect(), timeout=20)
        said = str(caught.value)
        assert "stood still" in said and "1 samples wait for the generate function" in said
        assert "1 samples wait for a free slot" in said and "sample 0 (generating" in said
        assert "http://engine-0: 1 requests" in said

    asyncio.run(main())


@pytest.mark.parametrize("activity", [one for one in Activity if one is not Activity.DONE])
def test_watchdog_says_what_is_waited_for_in_each_stage(activity: Activity) -> None:
    client, run = FakeClient(), GroupRun.of([Sample(index=0)])
    run.trajectories[0].enter(activity)
    watchdog = Watchdog(client, GroupRunner(make_state(client), None, rollout_id=0), limit=1.0)  # type: ignore[arg-type]
    assert "1 samples wait for " in watchdog.report([run], {}, 60.0).why


def test_watchdog_is_patient_while_engines_move() -> None:
    async def main() -> None:
        class Moving(FakeClient):
            held = 0

            async def worker_loads(self) -> dict[str, tuple[int, int]]:
                self.held += 1
                return {"http://engine-0": (1, self.held)}

        client = Moving()
        watchdog = Watchdog(client, GroupRunner(make_state(client), None, rollout_id=0), limit=0.0)  # type: ignore[arg-type]
        for _ in range(5):
            await watchdog.check([])
        assert client.held == 5

    asyncio.run(main())


def test_mistakes_in_user_code_stop_the_rollout_and_leave_no_task() -> None:
    async def main() -> None:
        client, source = FakeClient([50]), FakeSource(2)

        class Wrong(FakeRewards):
            async def score(self, sample: Sample) -> float:
                raise UserError("the reward of sample is no number")

        state = make_state(client, args=hook_args())
        collector = DynamicSampler(
            GroupRunner(state, Wrong(), rollout_id=0), source, target=2, draw_size=2, group_size=2
        )
        with pytest.raises(UserError, match="no number"):
            await collector.collect()
        await asyncio.sleep(0)
        assert len(asyncio.all_tasks()) == 1 and client.running == 0

    asyncio.run(main())


async def collect_with(
    client: FakeClient, source: FakeSource, verdict: Any = None, **options: Any
) -> Collected:
    state = make_state(client, args=options.pop("args", None))
    runner = GroupRunner(state, FakeRewards(), rollout_id=0)
    options = {"target": 2, "draw_size": 2, "group_size": source.group_size, **options}
    collector = DynamicSampler(runner, source, dynamic_filter=verdict, **options)
    return await asyncio.wait_for(collector.collect(), timeout=20)


def test_a_filter_that_drops_everything_ends_the_rollout(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(collect, "_MAX_DROPS", 25)
    source = FakeSource(1)
    drop_all = lambda args, samples: DynamicFilterOutput(False, reason="zero_std_0.0")  # noqa: E731
    with pytest.raises(UserError, match="dropped 25 groups in a row") as caught:
        asyncio.run(collect_with(FakeClient(), source, drop_all))
    assert "zero_std_0.0 (25)" in caught.value.why and source.drawn < 30
    keep_some = lambda args, samples: samples[0].group_index % 20 == 19  # noqa: E731
    result = asyncio.run(collect_with(FakeClient(), FakeSource(1), keep_some))
    assert [run.index for run in result.chosen] == [19, 39]


def test_a_filter_without_a_verdict_is_refused() -> None:
    with pytest.raises(UserError, match="dynamic-sampling-filter-path returned None"):
        asyncio.run(collect_with(FakeClient(), FakeSource(1), lambda args, samples: None))


def test_a_generate_function_that_ignores_its_cancellation_is_left_behind_and_named(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    source = FakeSource(1)

    async def main() -> None:
        args = hook_args(
            custom_generate_function_path="tests.support.rollout_hooks.first_sample_only"
        )
        try:
            client = FakeClient()
            result = await collect_with(client, source, args=args, target=1, abort_timeout=0.05)
            assert [run.index for run in result.chosen] == [
                0
            ] and client.slots._value == client.slots.size
        finally:
            rollout_hooks.let_go.set()
            await asyncio.sleep(0.01)

    monkeypatch.setattr("slime.deadlines.USER_CALLS_CANCEL", 0.05)
    rollout_hooks.let_go.clear()
    asyncio.run(main())
    [[left]] = source.buffer
    assert (left.index, left.tokens, left.status) == (1, [2, 7], SampleStatus.PENDING), (
        "what it does is not seen"
    )
    assert (
        "first_sample_only' (--custom-generate-function-path) on sample 1 goes on after it was "
        "cancelled" in caplog.text
    )
    assert "await asyncio.sleep(0.001)" in caplog.text, "its stack"
