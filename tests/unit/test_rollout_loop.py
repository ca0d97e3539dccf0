"""`RolloutLoop` over HTTP on a fake engine: the whole station, and every hook with exactly its
contract."""

from __future__ import annotations

import asyncio
import contextvars
import gc
import importlib
import logging
import weakref
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest

from slime.config import make_config
from slime.errors import UserError
from slime.rollout.debug_data import load_rollout, load_samples
from slime.rollout.finish import finish_rollout
from slime.rollout.generate import sample_seed
from slime.rollout.loop import RolloutLoop
from slime.samples.types import Group, Sample, SampleStatus
from slime.user_code.hooks import DataSource, RolloutFnTrainOutput
from tests.support import rollout_hooks
from tests.support.fake_engine import FakeEngine, answer
from tests.support.fake_rollout import FakeSource, FakeTokenizer

HOOKS = "tests.support.rollout_hooks."
FLAGS: dict[str, Any] = {
    "num_rollout": 1,
    "rollout_batch_size": 4,
    "n_samples_per_prompt": 2,
    "rollout_max_response_len": 8,
    "rm_type": "random",
    "deterministic_rollout": True,
}


def make(**flags: Any) -> Any:
    """A configuration without a model."""
    return make_config(**{**FLAGS, **flags})


def with_loop(
    test: Callable[[RolloutLoop, FakeEngine], Awaitable[Any]],
    source: DataSource | None = None,
    **flags: Any,
) -> Any:
    async def main() -> Any:
        config = make(**flags)
        async with FakeEngine() as engine:
            used = FakeSource(config.rollout.n_samples_per_prompt) if source is None else source
            loop = RolloutLoop(config, FakeTokenizer(), used, engine.url)
            try:
                return await asyncio.wait_for(test(loop, engine), timeout=30)
            finally:
                await loop.close()

    rollout_hooks.calls.clear()
    return asyncio.run(main())


def generate(rollout_id: int = 0, **flags: Any) -> RolloutFnTrainOutput:
    async def test(loop: RolloutLoop, engine: FakeEngine) -> RolloutFnTrainOutput:
        return await loop.generate_batch(rollout_id)

    return with_loop(test, **flags)


# -- the built-in rollout --------------------------------------------------------------------------


def test_a_batch_is_sorted_scored_and_deterministic() -> None:
    outputs = [generate(), generate()]
    batches = [
        [(s.index, s.tokens, s.reward) for g in output.samples for s in g.samples]
        for output in outputs
    ]
    assert batches[0] == batches[1]
    assert [index for index, _, _ in batches[0]] == list(range(8))
    for index, tokens, reward in batches[0]:
        assert tokens[2:] == answer(tokens[:2], sample_seed(42, index), 8)[0] and reward in (
            0.0,
            1.0,
        )
    assert [group.index for group in outputs[0].samples] == [0, 1, 2, 3]


@pytest.mark.parametrize(
    "flags",
    [
        {},
        {"deterministic_rollout": False, "over_sampling_batch_size": 8, "partial_rollout": True},
        {"custom_generate_function_path": HOOKS + "two_turns"},
        {"custom_generate_function_path": HOOKS + "fan_out"},
        {"eval_prompt_data": True},
    ],
)
def test_samples_are_freed_with_their_rollout_and_need_no_garbage_collector(
    flags: dict[str, Any], tmp_path: Path
) -> None:
    """Samples may hold megabytes each (routes of experts), and the collector counts objects only:
    in a cycle they would stay for dozens of steps."""
    if "eval_prompt_data" in flags:
        data = tmp_path / "eval.jsonl"
        data.write_text('{"prompt": "p", "label": "1"}\n' * 2)
        flags = {"eval_prompt_data": ["held-out", str(data)], "input_key": "prompt"}

    async def test(loop: RolloutLoop, engine: FakeEngine) -> None:
        await loop.start()
        for rollout_id in range(2):
            if flags.get("eval_prompt_data"):
                scored = await loop.evaluate(rollout_id)
                samples = [s for found in scored.data.values() for s in found["samples"]]
                del scored
            else:
                output = await loop.generate_batch(rollout_id)
                samples = [sample for group in output.samples for sample in group.samples]
                del output
            held = [weakref.ref(sample) for sample in samples]
            del samples
            await asyncio.sleep(0.01)  # tasks that are done let go of their results
            assert held and not [sample for sample in held if sample() is not None]

    gc.collect()
    gc.disable()
    try:
        with_loop(test, **flags)
    finally:
        gc.enable()


def test_a_reward_key_for_rewards_that_are_numbers_is_warned_of_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("slime.log._said", set())
    reward = tmp_path / "reward.py"
    reward.write_text("def score(args, sample):\n    return {'score': 1.0}\n")
    keys = {"reward_key": "score", "log_reward_category": "score"}
    generate(**keys, custom_rm_path=f"{reward}:score")
    generate()
    assert "has no effect" not in caplog.text
    for rollout_id in range(2):
        generate(rollout_id, **keys)
    assert caplog.text.count("--reward-key score has no effect") == 1
    assert caplog.text.count("--log-reward-category score has no effect") == 1


def test_metrics_have_the_reference_names() -> None:
    metrics = generate().metrics
    assert metrics is not None
    for name in (
        "rollout/response_len/mean",
        "rollout/response_len/median",
        "rollout/response_len/max",
        "rollout/response_len/min",
        "rollout/truncated_ratio",
        "rollout/repetition_frac",
        "rollout/prefix_cache_hit_rate",
        "rollout/avg_cached_tokens_per_sample",
        "rollout/reward/mean",
        "rollout/retries",
        "perf/rollout_time",
        "perf/tokens_per_gpu_per_sec",
        "perf/effective_tokens_per_gpu_per_sec",
        "perf/longest_sample_tokens_per_sec",
    ):
        assert isinstance(metrics[name], (int, float)), name


def test_concurrency_is_limited_per_engine() -> None:
    async def test(loop: RolloutLoop, engine: FakeEngine) -> None:
        engine.delay = 0.005
        await loop.generate_batch(0)
        assert engine.max_in_flight == 3

    with_loop(test, sglang_server_concurrency=3)


def test_failing_requests_are_repeated_and_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("slime.engines.client._FIRST_BACKOFF", 0.001)

    async def test(loop: RolloutLoop, engine: FakeEngine) -> None:
        engine.failures = 5
        output = await loop.generate_batch(0)
        assert output.metrics is not None
        assert (
            output.metrics["rollout/retries"] == 5
            and output.metrics["rollout/num_failed_groups"] == 0
        )
        again = await loop.generate_batch(1)
        assert again.metrics is not None and again.metrics["rollout/retries"] == 0

    with_loop(test)


def test_an_engine_that_refuses_everything_ends_the_run_with_its_words() -> None:
    async def test(loop: RolloutLoop, engine: FakeEngine) -> None:
        engine.refuse = "top_k must be positive"
        with pytest.raises(UserError, match="groups have failed") as caught:
            await loop.generate_batch(0)
        assert "top_k must be positive" in caught.value.why

    with_loop(test)


def test_sampling_parameters_reach_the_engine() -> None:
    async def test(loop: RolloutLoop, engine: FakeEngine) -> None:
        await loop.generate_batch(0)
        params = engine.bodies[0]["sampling_params"]
        assert params["temperature"] == 0.7 and params["top_p"] == 0.9 and params["stop"] == ["END"]
        assert params["max_new_tokens"] == 4  # 6 tokens of context, 2 of prompt

    with_loop(
        test,
        rollout_temperature=0.7,
        rollout_top_p=0.9,
        use_sampling_mask=False,
        rollout_stop=("END",),
        rollout_max_context_len=6,
    )


@pytest.mark.parametrize("partial", [False, True])
def test_over_sampling_over_http_loses_nothing(partial: bool) -> None:
    source = FakeSource(2)

    async def test(loop: RolloutLoop, engine: FakeEngine) -> None:
        engine.delay = lambda body: (
            0.002 * (body["sampling_params"].get("sampling_seed", body["input_ids"][0]) % 17)
        )
        seen: list[int] = []
        for rollout_id in range(4):
            output = await loop.generate_batch(rollout_id)
            seen += [group.index for group in output.samples]
            assert len(output.samples) == 4
            for group in output.samples:
                assert all(
                    s.reward is not None and s.status is not SampleStatus.ABORTED
                    for s in group.samples
                )
        back = [group[0].group_index for group in source.buffer]
        assert sorted(seen + back) == list(range(source.drawn))
        assert engine.in_flight == 0

    with_loop(
        test,
        source,
        over_sampling_batch_size=6,
        partial_rollout=partial,
        deterministic_rollout=False,
    )


def test_partial_rollouts_cannot_be_deterministic() -> None:
    with pytest.raises(UserError, match="--partial-rollout cannot be combined"):
        generate(partial_rollout=True)


def test_progress_counts_groups_and_tokens() -> None:
    async def test(loop: RolloutLoop, engine: FakeEngine) -> None:
        assert loop.progress() == {}
        engine.hold.clear()
        task = asyncio.create_task(loop.generate_batch(0))
        while engine.in_flight < 8:
            await asyncio.sleep(0.001)
        assert loop.progress() == {"done": 0, "target": 4, "tokens": 0}
        engine.hold.set()
        output = await task
        tokens = sum(s.response_length for group in output.samples for s in group.samples)
        assert loop.progress() == {"done": 4, "target": 4, "tokens": tokens}
        assert 0 <= loop.take_idle()["perf/engines_idle_ratio"] < 1, "they had something to do"

    with_loop(test)


def test_a_rollout_begins_while_the_last_answers_of_another_are_missing() -> None:
    """Sixteen slots, eight samples each: the second rollout does not wait for the first one's slow
    sample."""

    async def test(loop: RolloutLoop, engine: FakeEngine) -> None:
        slow: list[dict[str, Any]] = []

        def delay(body: dict[str, Any]) -> float:
            slow[:] = slow or [body]
            return 30.0 if body is slow[0] else 0.0

        engine.delay = delay
        first, second = (
            asyncio.create_task(loop.generate_batch(rollout_id)) for rollout_id in (0, 1)
        )
        assert len((await second).samples) == 4 and not first.done()
        assert loop.progress()["done"] == 3  # of the oldest rollout
        first.cancel()

    with_loop(test, deterministic_rollout=False, sglang_server_concurrency=16)


@pytest.mark.parametrize(
    ("flags", "requests"),
    [({"deterministic_rollout": True}, 8), ({"rollout_function_path": HOOKS + "async_rollout"}, 1)],
    ids=["seeds", "own"],
)
def test_rollouts_that_must_not_meet_take_turns(flags: dict[str, Any], requests: int) -> None:
    async def test(loop: RolloutLoop, engine: FakeEngine) -> None:
        engine.hold.clear()
        tasks = [asyncio.create_task(loop.generate_batch(rollout_id)) for rollout_id in (0, 1)]
        while engine.in_flight < requests:
            await asyncio.sleep(0.001)
        await asyncio.sleep(0.05)
        assert engine.in_flight == requests
        engine.hold.set()
        await asyncio.gather(*tasks)

    with_loop(test, **flags)


def test_what_a_push_cuts_short_goes_on_with_the_new_weights() -> None:
    async def test(loop: RolloutLoop, engine: FakeEngine) -> None:
        engine.hold.clear()
        task = asyncio.create_task(loop.generate_batch(0))
        while engine.in_flight < 8:
            await asyncio.sleep(0.001)
        for event in list(engine._aborts):  # what a pause does
            event.set()
        while len(engine.bodies) == 8:
            await asyncio.sleep(0.001)
        engine.weight_version = 2
        engine.hold.set()
        output = await task
        samples = [sample for group in output.samples for sample in group.samples]
        cut = [sample for sample in samples if len(sample.token_spans) > 1]
        assert cut and output.metrics["rollout/continued_requests"] == len(cut)
        for sample in samples:
            prompt = sample.tokens[: sample.prompt_length]
            seed = sample_seed(42, sample.index)
            assert sample.tokens[sample.prompt_length :] == answer(prompt, seed, 8)[0]
        for sample in cut:
            assert sample.weight_versions == ["1", "2"]

    with_loop(test)


def test_rollout_and_evaluation_go_on_beside_each_other(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text('{"input": "x"}\n')

    async def test(loop: RolloutLoop, engine: FakeEngine) -> None:
        rollout, evaluation = await asyncio.gather(loop.generate_batch(0), loop.evaluate(0))
        assert len(rollout.samples) == 4 and len(evaluation.data["a"]["rewards"]) == 1

    with_loop(test, eval_prompt_data=("a", str(tmp_path / "a.jsonl")), over_sampling_batch_size=8)


# -- hooks -----------------------------------------------------------------------------------------


def test_filter_sample_filter_and_all_samples_hook_get_what_they_were_promised() -> None:
    source = FakeSource(2)

    async def test(loop: RolloutLoop, engine: FakeEngine) -> RolloutFnTrainOutput:
        return await loop.generate_batch(0)

    output = with_loop(
        test,
        source,
        dynamic_sampling_filter_path=HOOKS + "drop_odd",
        rollout_sample_filter_path=HOOKS + "remove_first",
        rollout_all_samples_process_path=HOOKS + "see_all",
    )
    assert [group.index for group in output.samples] == [0, 2, 4, 6]
    calls = dict(rollout_hooks.calls)
    filtered = sorted(indices for name, indices in rollout_hooks.calls if name == "drop_odd")
    assert filtered[:3] == [[0, 1], [2, 3], [4, 5]]
    assert calls["remove_first"] == [[0, 1], [4, 5], [8, 9], [12, 13]]
    assert (
        output.samples[0].samples[0].remove_sample
        and not output.samples[1].samples[0].remove_sample
    )
    seen, given_source = calls["see_all"]
    assert given_source is source and seen == filtered
    assert output.metrics["rollout/dynamic_filter/drop_unnamed"] == len(source.discarded) >= 3


def test_the_log_function_gets_its_arguments_and_replaces_the_default_log() -> None:
    output = generate(3, custom_rollout_log_function_path=HOOKS + "log_rollout")
    [(name, (rollout_id, num_samples, extra, _))] = rollout_hooks.calls
    assert (name, rollout_id, num_samples) == ("log_rollout", 3, 8) and "rollout/retries" in extra
    assert output.metrics == {}


def test_what_a_plugins_log_function_logs_are_the_rollouts_metrics() -> None:
    """Also without engines, where there is no state of a rollout."""
    own = {
        "mine/reward_mean": 0.5,
        "mine/reward_median": 0.5,
        "mine/reward_max": 1.0,
        "mine/reward_min": 0.0,
    }
    path = HOOKS + "log_as_plugins_do"
    output = generate(3, custom_rollout_log_function_path=path)
    assert output.metrics == own
    config = make_config(custom_rollout_log_function_path=path, num_rollout=1)
    group = Group(0, [[Sample(index=0, reward=1.0)], [Sample(index=1, reward=0.0)]])
    ready = RolloutFnTrainOutput([group], {"rollout/other": 1.0})
    assert asyncio.run(finish_rollout(config, config.flat(), 4, ready, 0.1)).metrics == own


def test_what_a_plugin_logs_while_it_generates_is_added_to_the_metrics() -> None:
    output = generate(3, custom_generate_function_path=HOOKS + "logs_while_it_generates")
    assert (
        output.metrics is not None
        and output.metrics["mine/answers"] == 8
        and "rollout/retries" in output.metrics
    )


def test_metrics_that_are_logged_where_no_rollout_runs_are_warned_of(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(logging.getLogger("slime"), "propagate", True)
    monkeypatch.setattr("slime.rollout.generate._newest", [])
    contextvars.Context().run(
        importlib.import_module("slime.utils.logging_utils").log, None, {"a/b": 1}, "a/step"
    )
    assert "metrics that were logged outside of a rollout are lost: a/b" in caplog.text


def test_a_sync_rollout_function_can_call_the_built_in_one() -> None:
    output = generate(5, rollout_function_path=HOOKS + "sync_rollout")
    assert rollout_hooks.calls == [("sync_rollout", (5, False))]
    assert output.metrics is not None and output.metrics["rollout/from_plugin"] == 1.0
    assert [group.index for group in output.samples] == [0, 1, 2, 3]


@pytest.mark.parametrize("name", ["async_rollout", "rollout_with_metrics"])
def test_async_rollout_functions_and_their_bare_lists_are_grouped_and_sorted(name: str) -> None:
    output = generate(rollout_function_path=HOOKS + name)
    assert [group.index for group in output.samples] == [0, 1, 2, 3]
    assert output.metrics is not None and output.metrics["rollout/reward/mean"] == 1.0
    assert ("rollout/mine" in output.metrics) == (name == "rollout_with_metrics")


def test_the_reference_default_path_means_the_built_in_rollout() -> None:
    output = generate(rollout_function_path="slime.rollout.sglang_rollout.generate_rollout")
    assert output.metrics is not None and "rollout/num_surplus_groups" in output.metrics


def test_hooks_are_checked_before_anything_starts() -> None:
    with pytest.raises(UserError, match="cannot be called as"):
        generate(custom_generate_function_path=HOOKS + "replace_sample")
    with pytest.raises(UserError, match="no module"):
        generate(rollout_function_path="nowhere.to.be_found")


def test_existing_plugins_find_their_imports_and_the_router() -> None:
    class TextSource(FakeSource):
        def get_samples(self, num_samples: int) -> list[list[Sample]]:
            groups = super().get_samples(num_samples)
            for group in groups:
                for sample in group:
                    sample.tokens, sample.prompt = [], "ab"
            return groups

    async def test(loop: RolloutLoop, engine: FakeEngine) -> RolloutFnTrainOutput:
        return await loop.generate_batch(0)

    path = HOOKS + "through_the_old_paths"
    output = with_loop(test, TextSource(2), custom_generate_function_path=path)
    for group in output.samples:
        for sample in group.samples:
            assert sample.tokens == [
                97,
                98,
                *answer([97, 98], sample_seed(42, sample.index or 0), 8)[0],
            ]


def test_the_built_in_rollout_draws_from_the_source_it_is_given_with_the_runs_own_parameters() -> (
    None
):
    output = generate(rollout_function_path=HOOKS + "rollout_after_a_trial")
    assert rollout_hooks.calls == [("params", 8)]
    samples = [sample for group in output.samples for sample in group.samples]
    assert len(samples) == 8 and all(sample.tokens[0] > 1000 for sample in samples)
    assert max(sample.response_length for sample in samples) > 1


def test_plugins_with_a_loop_of_their_own_find_the_old_building_blocks() -> None:
    output = generate(rollout_function_path=HOOKS + "own_loop_on_old_paths")
    assert [group.index for group in output.samples] == [0, 1, 2, 3]
    for group in output.samples:
        assert all(s.reward in (0.0, 1.0) and s.tokens[2:] for s in group.samples)


# -- dumps -----------------------------------------------------------------------------------------


def test_dumps_come_back_as_the_same_groups(tmp_path: Path) -> None:
    pattern = str(tmp_path / "dumps" / "{rollout_id:04d}.pt")
    output = generate(
        3, save_debug_rollout_data=pattern, custom_generate_function_path=HOOKS + "fan_out"
    )
    loaded = load_rollout(make(load_debug_rollout_data=pattern), 3)
    assert (
        loaded == output.samples and loaded[0].num_trajectories == 2 and len(loaded[0].samples) == 4
    )
    half = load_rollout(
        make(load_debug_rollout_data=pattern, load_debug_rollout_data_subsample=0.5), 3
    )
    assert len(half) == 2 and all(group in loaded for group in half)
    assert [path.name for path in (tmp_path / "dumps").iterdir()] == ["0003.pt"]


def test_dumps_that_cannot_be_loaded_are_explained(tmp_path: Path) -> None:
    (tmp_path / "1.pt").write_bytes(b"nonsense")
    with pytest.raises(UserError, match="cannot be read as a rollout dump"):
        load_samples(tmp_path / "1.pt")
    with pytest.raises(UserError, match="no rollout dump") as caught:
        load_rollout(make(load_debug_rollout_data=str(tmp_path / "{rollout_id}.pt")), 2)
    assert "1.pt" in caught.value.why
    with pytest.raises(UserError, match="cannot be filled in"):
        make(load_debug_rollout_data=str(tmp_path / "{step}.pt"))
