"""Plugins written for the reference system in a rollout over HTTP on a fake engine: what they
replace is called, what they import works with an ``args`` of a few attributes, in threads of their
own and outside of a run."""

from __future__ import annotations

import asyncio
import contextvars
import importlib
import json
import threading
from argparse import Namespace
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest

from slime.config import make_config
from slime.errors import UserError
from slime.rollout.loop import RolloutLoop
from slime.samples.types import Sample
from tests.support.fake_engine import FakeEngine
from tests.support.fake_rollout import FakeSource, FakeTokenizer

FLAGS: dict[str, Any] = {
    "num_rollout": 1,
    "rollout_batch_size": 3,
    "n_samples_per_prompt": 2,
    "rollout_max_response_len": 6,
    "rm_type": "random",
    "deterministic_rollout": True,
}


def old(module: str) -> Any:
    return importlib.import_module(f"slime.{module}")


def in_a_loop(test: Callable[[RolloutLoop, FakeEngine], Awaitable[Any]], **flags: Any) -> Any:
    async def main() -> Any:
        config = make_config(**{**FLAGS, **flags})
        async with FakeEngine() as engine:
            loop = RolloutLoop(
                config, FakeTokenizer(), FakeSource(config.rollout.n_samples_per_prompt), engine.url
            )
            try:
                return await asyncio.wait_for(test(loop, engine), timeout=120)
            finally:
                await loop.close()

    return asyncio.run(main())


def batch(**flags: Any) -> list[Sample]:
    async def test(loop: RolloutLoop, engine: FakeEngine) -> list[Sample]:
        return [
            sample for group in (await loop.generate_batch(0)).samples for sample in group.samples
        ]

    return in_a_loop(test, **flags)


#: What the functions below have seen.
seen: list[Any] = []


@pytest.fixture(autouse=True)
def nothing_seen() -> None:
    seen.clear()


# -- names that plugins replace --------------------------------------------------------------------


async def answers_seven(args: Any, sample: Sample, sampling_params: dict[str, Any]) -> Sample:
    seen.append(sample.index)
    sample.append_response_tokens(tokens=[7], log_probs=[-1.0], text="7")
    return sample


def wrapping(name: str, note: Callable[[Any], None]) -> Callable[..., Any]:
    """Ours, with a look at what it returned."""
    ours = getattr(old("rollout.sglang_rollout"), name)

    async def call(args: Any, what: Any, *more: Any, **kwargs: Any) -> Any:
        result = await ours(args, what, *more, **kwargs)
        note(result)
        return result

    return call


def test_generate(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("slime.rollout.sglang_rollout.generate", answers_seven)
    assert [sample.tokens[-1] for sample in batch()] == [7] * 6 and sorted(seen) == list(range(6))


@pytest.mark.parametrize("name", ["generate_and_rm", "generate_and_rm_group"])
@pytest.mark.parametrize("group_rm", [False, True])
def test_what_wraps_the_whole_way_of_a_sample_or_group(
    monkeypatch: pytest.MonkeyPatch, name: str, group_rm: bool
) -> None:
    """It calls ours, which does not call it again; ours calls what replaces its parts."""
    flags = {"group_rm": True, "custom_rm_path": f"{__name__}:rewards_of_group"} if group_rm else {}
    monkeypatch.setattr("slime.rollout.sglang_rollout.generate", answers_seven)
    monkeypatch.setattr(
        f"slime.rollout.sglang_rollout.{name}", wrapping(name, lambda result: seen.append(name))
    )
    samples = batch(**flags)
    assert seen.count(name) == (6 if name == "generate_and_rm" else 3)
    assert all(sample.tokens[-1] == 7 and sample.reward is not None for sample in samples)


def rewards_of_group(args: Any, samples: list[Sample], **kwargs: Any) -> list[float]:
    return [float(len(samples))] * len(samples)


@pytest.mark.parametrize("module", ["rollout.rm_hub", "rollout.sglang_rollout"])
def test_async_rm(monkeypatch: pytest.MonkeyPatch, module: str) -> None:
    ours = old(module).async_rm

    async def shifted(args: Any, sample: Sample, **kwargs: Any) -> float:
        return 10.0 + await ours(args, sample)

    monkeypatch.setattr(old(module), "async_rm", shifted)
    assert {sample.reward for sample in batch()} <= {10.0, 11.0}


def test_batched_async_rm(monkeypatch: pytest.MonkeyPatch) -> None:
    async def all_at_once(args: Any, samples: list[Sample], **kwargs: Any) -> list[float]:
        return [float(len(samples)) for _ in samples]

    monkeypatch.setattr("slime.rollout.rm_hub.batched_async_rm", all_at_once)
    flags = {"group_rm": True, "custom_rm_path": f"{__name__}:never_called"}
    assert [sample.reward for sample in batch(**flags)] == [2.0] * 6


def never_called(args: Any, samples: list[Sample], **kwargs: Any) -> list[float]:
    raise AssertionError("another is in its place")


@pytest.mark.parametrize(
    ("rm_type", "name"),
    [
        ("math", "grade_answer_verl"),
        ("deepscaler", "get_deepscaler_rule_based_reward"),
        ("f1", "f1_score"),
        ("gpqa", "compute_gpqa_reward"),
        ("dapo", "compute_score_dapo"),
        ("remote_rm", "remote_rm"),
    ],
)
def test_graders(monkeypatch: pytest.MonkeyPatch, rm_type: str, name: str) -> None:
    def grader(response: str, label: Any, metadata: Any = None) -> Any:
        return (3.0, 0.0, 0.0) if rm_type == "f1" else 3.0

    async def remote(args: Any, sample: Sample) -> float:
        return 3.0

    monkeypatch.setattr(
        f"slime.rollout.rm_hub.{name}", remote if rm_type == "remote_rm" else grader
    )
    flags = {"rm_url": "http://nobody", "rm_type": rm_type}
    assert [sample.reward for sample in batch(**flags)] == [3.0] * 6


@pytest.mark.parametrize(
    ("rm_type", "name"),
    [("remote_rm", "rm_hub.remote_rm"), ("dapo", "rm_hub.async_rm"), ("f1", "rm_hub.f1_score")],
)
def test_a_grader_that_hangs_scores_zero_in_time(
    monkeypatch: pytest.MonkeyPatch, rm_type: str, name: str
) -> None:
    async def hangs(*args: Any) -> float:
        return await asyncio.Future()

    monkeypatch.setattr(f"slime.rollout.{name}", hangs)
    flags = {"rm_url": "http://nobody", "rm_type": rm_type, "rm_timeout": 0.1}
    assert [sample.reward for sample in batch(**flags)] == [0.0] * 6


def test_a_group_of_which_one_hangs_in_its_reward_is_replaced(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """It is accepted by then and has not failed itself; those behind it have not come so far."""

    async def unscored(
        args: Any, group: list[Sample], params: dict[str, Any], **kwargs: Any
    ) -> list[Sample]:
        return [await answers_seven(args, sample, params) for sample in group]

    monkeypatch.setattr("slime.rollout.sglang_rollout.generate_and_rm_group", unscored)
    flags = {"rollout_stall_timeout": 0.3, "rollout_max_failed_fraction": 1.0, "rm_timeout": 60.0}

    async def test(loop: RolloutLoop, engine: FakeEngine) -> Any:
        return await loop.generate_batch(0)

    output = in_a_loop(test, custom_rm_path=f"{__name__}:hangs_on_group_1", **flags)
    assert [group.index for group in output.samples] == [0, 2, 3]
    assert output.metrics["rollout/num_hung_samples"] == 1


async def hangs_on_group_1(args: Any, sample: Sample, **kwargs: Any) -> float:
    return await asyncio.Future() if sample.group_index == 1 else 1.0


def test_generate_rollout_and_eval_rollout(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    ours = old("rollout.sglang_rollout").generate_rollout

    def with_a_metric(
        args: Any, rollout_id: int, data_source: Any, evaluation: bool = False
    ) -> Any:
        output = ours(args, rollout_id, data_source, evaluation)
        output.metrics["rollout/seen"] = float(rollout_id)
        return output

    async def evaluation(args: Any, rollout_id: int) -> Any:
        seen.append([dataset.name for dataset in args.eval_datasets])
        return {"mine": {"rewards": [0.25]}}, []

    (tmp_path / "set.jsonl").write_text(json.dumps({"input": "a", "label": "b"}) + "\n")

    async def test(loop: RolloutLoop, engine: FakeEngine) -> None:
        output = await loop.generate_batch(4)
        assert output.metrics is not None and output.metrics["rollout/seen"] == 4.0
        with monkeypatch.context() as patch:
            patch.setattr("slime.rollout.sglang_rollout.generate_rollout", ours)
            patch.setattr("slime.rollout.sglang_rollout.eval_rollout", evaluation)
            metrics = (await loop.evaluate(0)).metrics
        assert metrics is not None and metrics["eval/mine"] == 0.25 and seen == [["set"]]

    monkeypatch.setattr("slime.rollout.sglang_rollout.generate_rollout", with_a_metric)
    in_a_loop(test, eval_prompt_data=["set", str(tmp_path / "set.jsonl")])


def test_post(monkeypatch: pytest.MonkeyPatch) -> None:
    ours = old("utils.http_utils").post

    async def noting(url: str, payload: dict[str, Any], **kwargs: Any) -> Any:
        seen.append(payload["sampling_params"]["max_new_tokens"])
        return await ours(url, payload, **kwargs)

    expected = [sample.tokens for sample in batch()]
    monkeypatch.setattr("slime.utils.http_utils.post", noting)
    assert [sample.tokens for sample in batch()] == expected and seen == [6] * 6


def test_pop_first(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def pop_last(args: Any, rollout_id: Any, buffer: list[Any], num_samples: int) -> list[Any]:
        return [buffer.pop() for _ in range(min(num_samples, len(buffer)))]

    build = old("rollout.data_source").RolloutDataSourceWithBuffer
    # in which no run has built one
    source = contextvars.Context().run(build, Namespace(rollout_global_dataset=False))
    source.add_samples([[Sample(index=0)], [Sample(index=1)]])
    monkeypatch.setattr("slime.rollout.data_source.pop_first", pop_last)
    assert source.get_samples(1)[0][0].index == 1


# -- in a run --------------------------------------------------------------------------------------


def own_rollout(args: Any, rollout_id: int, data_source: Any, evaluation: bool = False) -> Any:
    """A rollout function as the reference's examples write them: tasks of the shared state, filter,
    abort."""
    return old("utils.async_utils").run(own_rollout_async(args, rollout_id, data_source))


def own_rollout_elsewhere(
    args: Any, rollout_id: int, data_source: Any, evaluation: bool = False
) -> Any:
    """The same on an event loop of the plugin's own."""
    return asyncio.run(own_rollout_async(args, rollout_id, data_source))


async def own_rollout_async(args: Any, rollout_id: int, data_source: Any) -> Any:
    hub, base = old("rollout.sglang_rollout"), old("rollout.filter_hub.base_types")
    state, gatherer = hub.GenerateState(args), base.MetricGatherer()
    kept: list[Any] = []
    while len(kept) < args.rollout_batch_size:
        while state.remaining_batch_size < args.rollout_batch_size:
            state.submit_generate_tasks(data_source.get_samples(args.rollout_batch_size))
        done, state.pendings = await asyncio.wait(
            state.pendings, return_when=asyncio.FIRST_COMPLETED
        )
        for task in done:
            group = task.result()
            verdict = base.call_dynamic_filter(odd_groups_only, args, group)
            if base.should_drop_dynamic_filter_output(
                verdict,
                remaining_batch_size=state.remaining_batch_size,
                target_data_size=args.rollout_batch_size,
            ):
                gatherer.on_dynamic_filter_drop(verdict.reason)
                state.remaining_batch_size -= 1
            elif len(kept) < args.rollout_batch_size:
                kept.append(group)
    aborted = await hub.abort(args, rollout_id)
    state.reset()
    args.rollouts_so_far = getattr(args, "rollouts_so_far", 0) + 1
    seen.append((len(aborted), gatherer.collect(), args.rollouts_so_far))
    return old("rollout.base_types").RolloutFnTrainOutput(samples=kept, metrics=gatherer.collect())


def odd_groups_only(args: Any, samples: list[Sample], **kwargs: Any) -> Any:
    output = old("rollout.filter_hub.base_types").DynamicFilterOutput
    return output(keep=bool((samples[0].group_index or 0) % 2), reason="even")


@pytest.mark.parametrize("function", ["own_rollout", "own_rollout_elsewhere"])
def test_a_rollout_loop_of_the_plugins_own(function: str) -> None:
    async def test(loop: RolloutLoop, engine: FakeEngine) -> None:
        for rollout_id in range(2):
            output = await loop.generate_batch(rollout_id)
            assert [group.index % 2 for group in output.samples] == [1, 1, 1]
            assert (
                output.metrics is not None
                and output.metrics["rollout/dynamic_filter/drop_even"] >= 2
            )
        assert [entry[2] for entry in seen] == [1, 2] and loop.args.rollouts_so_far == 2

    in_a_loop(test, rollout_function_path=f"{__name__}:{function}")


async def drawn_by_a_function(
    args: Any, rollout_id: int, data_source: Any, evaluation: bool = False
) -> Any:
    hub = old("rollout.sglang_rollout")
    hub.GenerateState(args).sampling_params["max_new_tokens"] = 3
    output, aborted = await hub.generate_rollout_async(args, rollout_id, data_source.get_samples)
    data_source.add_samples(aborted)
    return output


def test_the_built_in_rollout_with_a_function_that_draws() -> None:
    samples = batch(rollout_function_path=f"{__name__}:drawn_by_a_function")
    assert len(samples) == 6 and all(sample.response_length <= 3 for sample in samples)


def from_a_thread(args: Any, rollout_id: int, data_source: Any, evaluation: bool = False) -> Any:
    """As fully asynchronous workers do: a thread with an event loop of its own, which knows
    ``args`` alone."""
    groups: list[Any] = []

    async def work() -> None:
        hub = old("rollout.sglang_rollout")
        params = hub.GenerateState(args).sampling_params.copy()
        for group in data_source.get_samples(args.rollout_batch_size):
            groups.append(
                await hub.generate_and_rm_group(
                    args, group, sampling_params=params, evaluation=False
                )
            )

    thread = threading.Thread(target=lambda: asyncio.run(work()))
    thread.start()
    thread.join(60)
    return groups


def test_groups_can_be_generated_in_a_thread_of_the_plugins_own() -> None:
    ours, theirs = batch(), batch(rollout_function_path=f"{__name__}:from_a_thread")
    assert [sample.tokens for sample in theirs] == [sample.tokens for sample in ours]


async def few_attributes(args: Any, sample: Sample, sampling_params: dict[str, Any]) -> Sample:
    hub, few = old("rollout.sglang_rollout"), Namespace(reward_key="score")
    sample = await hub.generate(few, sample, sampling_params)
    sample.response, sample.label = "Answer: 4", "4"
    seen.append(
        await old("rollout.rm_hub").async_rm(Namespace(rm_type="dapo", reward_key="score"), sample)
    )
    trial = Sample(index=100, tokens=[3, 7])
    trial = await hub.generate_and_rm(few, trial, {**sampling_params, "max_new_tokens": 2})
    assert trial.response_length <= 2 and trial.reward in (0.0, 1.0)  # the run's --rm-type
    return sample


def test_args_with_a_few_attributes() -> None:
    batch(custom_generate_function_path=f"{__name__}:few_attributes")
    assert seen == [{"score": 1.0, "acc": True, "pred": "4"}] * 6


@pytest.mark.parametrize(
    "path",
    [
        "slime.rollout.sglang_rollout.generate_rollout",
        "slime.rollout.fully_async_rollout.generate_rollout_fully_async",
    ],
)
def test_the_reference_systems_rollouts_as_flag_values(path: str) -> None:
    assert [sample.tokens for sample in batch(rollout_function_path=path)] == [
        sample.tokens for sample in batch()
    ]


def test_one_evaluation_set(tmp_path: Path) -> None:
    async def test(loop: RolloutLoop, engine: FakeEngine) -> None:
        await loop.generate_batch(0)  # binds a state
        hub = old("rollout.sglang_rollout")
        both, nothing = await hub.eval_rollout(loop.args, 0)
        assert sorted(both.data) == ["a", "b"] and nothing == []
        second = loop.args.eval_datasets[1]
        assert second.inject_metadata({"x": 1}) == {"x": 1} and second.cache_key[0] == "b"
        one = await hub.eval_rollout_single_dataset(loop.args, 0, second)
        assert list(one) == ["b"] and sorted(one["b"]) == ["rewards", "samples", "truncated"]

    for name in "ab":
        (tmp_path / f"{name}.jsonl").write_text(json.dumps({"input": "a", "label": "b"}) + "\n")
    pairs = [word for name in "ab" for word in (name, str(tmp_path / f"{name}.jsonl"))]
    in_a_loop(test, eval_prompt_data=pairs)


# -- outside of a run ------------------------------------------------------------------------------


def test_rewards_outside_of_a_run() -> None:
    hub = old("rollout.rm_hub")
    sample = Sample(response="Answer: 4", label="4")
    args = Namespace(custom_rm_path=None, rm_type="dapo", reward_key="score")
    assert asyncio.run(hub.async_rm(args, sample))["score"] == 1.0
    args = Namespace(custom_rm_path=f"{__name__}:rewards_of_group")
    assert asyncio.run(hub.batched_async_rm(args, [sample, sample])) == [2.0, 2.0]
    math = old("rollout.rm_hub.math_utils")
    assert math.grade_answer_verl(r"so \boxed{\frac12}", "0.5") and not math.grade_answer_verl(
        "1/2", "0.5"
    )
    assert math.grade_answer_sympy("2x", "x+x") and not math.grade_answer_sympy(None, "x")
    assert (
        old("rollout.rm_hub.deepscaler").get_deepscaler_rule_based_reward(r"</think> \boxed{4}", 4)
        == 1
    )


def test_text_graders() -> None:
    dapo, f1 = old("rollout.rm_hub.math_dapo_utils"), old("rollout.rm_hub.f1")
    assert dapo.compute_score("Answer: 4", "4") == {"score": 1.0, "acc": True, "pred": "4"}
    assert dapo.compute_score(r"\boxed{4}", "4", strict_box_verify=True)["acc"]
    assert dapo.is_correct_minerva("So: 5", "5", answer_pattern=r"So: (\d)") == (True, "5")
    assert dapo.is_correct_strict_box(r"\boxed{4} and more", "4", [0, 1, 2, 9]) == (1, "4")
    assert dapo.last_boxed_only_string(r"a \boxed{\frac{1}{2}}.") == r"\boxed{\frac{1}{2}}"
    assert f1.f1_score("The big red dog", "red dog") == pytest.approx((0.8, 2 / 3, 1.0))


def test_http_and_coroutines_outside_of_a_run() -> None:
    async def test() -> None:
        async with FakeEngine() as engine:
            http = old("utils.http_utils")
            http.init_http_client(Namespace())
            body = {
                "input_ids": [1, 2],
                "sampling_params": {"max_new_tokens": 2},
                "return_logprob": True,
            }
            answer = await http.post(f"{engine.url}/generate", body, max_retries=1)
            assert len(answer["meta_info"]["output_token_logprobs"]) <= 2

    old("utils.async_utils").run(test())
    assert old("rollout.sglang_rollout").GenerateState(Namespace()).tokenizer is None, (
        "no model is named"
    )


def test_singletons_and_ports() -> None:
    misc, http = old("utils.misc"), old("utils.http_utils")

    class Counter(metaclass=misc.SingletonMeta):
        def __init__(self, start: int) -> None:
            self.value = start

    assert Counter(3) is Counter(4) and Counter(5).value == 3
    port = http.find_available_port(20000)
    assert not http.is_port_available(port)
    assert misc.get_free_port(port) > port


def test_the_fully_asynchronous_rollout_needs_one_that_is() -> None:
    path = "slime.rollout.fully_async_rollout.generate_rollout_fully_async"
    warnings = make_config(**FLAGS, rollout_function_path=path).warnings
    assert ["--rollout-function-path asks for generation" in warning for warning in warnings] == [
        True
    ]
    assert not make_config(
        **FLAGS, rollout_function_path=path, entry="train_async", rollout_num_gpus=1
    ).warnings


def test_a_teachers_log_probs(monkeypatch: pytest.MonkeyPatch) -> None:
    module = importlib.import_module("slime.rollout.on_policy_distillation")
    sample = Sample(tokens=[5, 6, 7, 8], response_length=2)

    async def post(url: str, payload: dict[str, Any]) -> dict[str, Any]:
        seen.append((url, payload["input_ids"], payload["sampling_params"]["max_new_tokens"]))
        return {
            "meta_info": {
                "input_token_logprobs": [[None, 5], [-1.0, 6], [-2.0, 7], [-3.0, 8]][:answered]
            }
        }

    monkeypatch.setattr("slime.compat.distillation.post", post)
    args, answered = Namespace(rm_url="http://teacher/generate"), 4
    assert asyncio.run(module.reward_func(args, sample)) == 0.0
    assert sample.teacher_log_probs == [-2.0, -3.0] and seen == [
        ("http://teacher/generate", [5, 6, 7, 8], 0)
    ]
    assert module.post_process_rewards(args, [sample]) == ([0.0], [0.0])
    answered = 3
    with pytest.raises(UserError, match="gave 3 log-probs for 4 tokens"):
        asyncio.run(module.reward_func(args, sample))


def count_up(args: Any, sample: Sample, *, rollout_id: int | None = None) -> None:
    sample.metadata["seen"] = sample.metadata.get("seen", 0) + (rollout_id or 0)


def test_sample_hooks_and_traces() -> None:
    apply = old("rollout.sample_hooks").apply_rollout_sample_hooks
    nested = [[Sample(), Sample()], Sample()]
    args = Namespace(rollout_sample_hook_path=[f"{__name__}:count_up"] * 2)
    result = asyncio.run(apply(args, nested, rollout_id=3, evaluation=False))
    assert [s.metadata["seen"] for s in (*result[0], result[1])] == [6, 6, 6]
    trace = old("utils.trace_utils")

    @trace.trace_function("tool", target="sample", attrs_getter=lambda args, sample: {"size": 2})
    async def tool(args: Any, sample: Sample) -> int:
        with trace.trace_span(sample, "inner", attrs={"deep": True}):
            return 4

    sample = Sample()
    assert asyncio.run(tool(None, sample)) == 4
    names = [event["name"] for event in (sample.trace or {}).get("events", [])]
    assert names == ["tool", "inner", "inner", "tool"]
