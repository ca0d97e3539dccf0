"""Evaluation: which sets with which settings, their numbers, and the metrics of samples in
general."""

from __future__ import annotations

import asyncio
import itertools
import json
from collections.abc import Awaitable, Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from slime.config import make_config
from slime.errors import UserError
from slime.rollout.debug_data import load_samples
from slime.rollout.eval_datasets import eval_datasets
from slime.rollout.evaluate import eval_metrics, read_eval_prompts
from slime.rollout.filters import (
    MetricGatherer,
    check_reward_nonzero_std,
    check_reward_nonzero_std_with_fallback,
    should_drop_dynamic_filter_output,
)
from slime.rollout.loop import RolloutLoop
from slime.rollout.metrics import (
    distribution,
    is_repetitive,
    load_metrics,
    pass_at_k,
    pass_at_k_metrics,
    powers_of_two,
    reward_parts,
    rollout_metrics,
    throughput_metrics,
    unsampled_trained_ratio,
)
from slime.rollout.trajectory import GroupRun
from slime.run.preflight import check_flags
from slime.samples.types import Group, Sample, SampleStatus, TokenSpan
from tests.support import rollout_hooks
from tests.support.fake_engine import FakeEngine
from tests.support.fake_rollout import FakeSource, FakeTokenizer, hook_args
from tests.support.prompt_fixtures import make_tokenizer

FLAGS: dict[str, Any] = {
    "num_rollout": 1,
    "rollout_batch_size": 1,
    "n_samples_per_prompt": 2,
    "rollout_max_response_len": 8,
    "rm_type": "random",
    "deterministic_rollout": True,
}


def write_rows(path: Path, count: int, **extra: Any) -> str:
    path.write_text(
        "".join(
            json.dumps({"input": f"{chr(97 + i)} prompt", **extra}) + "\n" for i in range(count)
        )
    )
    return str(path)


def with_loop(test: Callable[[RolloutLoop, FakeEngine], Awaitable[Any]], **flags: Any) -> Any:
    async def main() -> Any:
        async with FakeEngine() as engine:
            loop = RolloutLoop(
                make_config(**{**FLAGS, **flags}), FakeTokenizer(), FakeSource(2), engine.url
            )
            try:
                return await asyncio.wait_for(test(loop, engine), timeout=30)
            finally:
                await loop.close()

    rollout_hooks.calls.clear()
    return asyncio.run(main())


def evaluate(**flags: Any) -> Any:
    async def test(loop: RolloutLoop, engine: FakeEngine) -> Any:
        return await loop.evaluate(3), engine

    return with_loop(test, **flags)


# -- running ---------------------------------------------------------------------------------------


def test_sets_run_with_their_own_settings_and_report_under_their_names(tmp_path: Path) -> None:
    config = tmp_path / "eval.yaml"
    config.write_text(
        f"""
eval:
  defaults: {{n_samples_per_eval_prompt: 4, temperature: 0.5, metadata_overrides: {{level: 1}}}}
  datasets:
    - {{name: small, path: {write_rows(tmp_path / "a.jsonl", 3)}, max_response_len: 5, stop: END}}
    - {{name: other, path: {write_rows(tmp_path / "b.jsonl", 2)}, \
n_samples_per_eval_prompt: 1, temperature: 0,
        min_new_tokens: 2, repetition_penalty: 1.1}}
"""
    )
    output, engine = evaluate(eval_config=str(config), eval_max_response_len=6)
    assert {name: len(values["rewards"]) for name, values in output.data.items()} == {
        "small": 12,
        "other": 2,
    }
    assert [s.index for s in output.data["small"]["samples"]] == list(range(12))
    assert output.data["small"]["samples"][0].metadata["level"] == 1
    params = {
        body["sampling_params"]["temperature"]: body["sampling_params"] for body in engine.bodies
    }
    assert params[0.5]["max_new_tokens"] == 5 and params[0.5]["stop"] == ["END"]
    assert params[0]["max_new_tokens"] == 6 and "stop" not in params[0]
    assert params[0]["min_new_tokens"] == 2 and params[0]["repetition_penalty"] == 1.1
    rewards = output.data["small"]["rewards"]
    metrics = output.metrics
    assert metrics["eval/small"] == sum(rewards) / 12
    by_prompt = [rewards[i : i + 4] for i in range(0, 12, 4)]
    for k in (1, 2, 4):
        assert metrics[f"eval/small-pass@{k}"] == pytest.approx(
            pass_at_k_metrics(by_prompt)[f"pass@{k}"]
        )
    assert "eval/small-pass@8" not in metrics and "eval/other-pass@1" not in metrics
    assert metrics["eval/small-truncated_ratio"] == sum(output.data["small"]["truncated"]) / 12
    assert metrics["eval/small/response_len/max"] <= 5 and metrics["eval/small/num_failed"] == 0


def test_evaluations_are_deterministic_and_do_not_change_the_prompts(tmp_path: Path) -> None:
    async def test(loop: RolloutLoop, engine: FakeEngine) -> None:
        outputs = [await loop.evaluate(0), await loop.evaluate(1)]
        tokens = [[sample.tokens for sample in output.data["a"]["samples"]] for output in outputs]
        assert tokens[0] == tokens[1] and all(len(ids) > len("x prompt") for ids in tokens[0])

    rows = write_rows(tmp_path / "a.jsonl", 3)
    with_loop(test, eval_prompt_data=("a", rows), n_samples_per_eval_prompt=2)


def test_progress_of_an_evaluation_counts_its_own_prompts_not_the_last_rollouts(
    tmp_path: Path,
) -> None:
    async def test(loop: RolloutLoop, engine: FakeEngine) -> None:
        await loop.generate_batch(0)
        engine.hold.clear()
        served = len(engine.bodies)
        task = asyncio.create_task(loop.evaluate(0))
        while engine.in_flight < 6:
            await asyncio.sleep(0.001)
        assert loop.progress() == {"done": 0, "target": 3, "tokens": 0} and served == 2
        engine.hold.set()
        output = await task
        tokens = sum(sample.response_length for sample in output.data["a"]["samples"])
        assert loop.progress() == {"done": 3, "target": 3, "tokens": tokens}

    with_loop(
        test,
        eval_prompt_data=("a", write_rows(tmp_path / "a.jsonl", 3)),
        n_samples_per_eval_prompt=2,
    )


def test_generate_functions_learn_that_it_is_an_evaluation_and_share_no_parameters(
    tmp_path: Path,
) -> None:
    rows = write_rows(tmp_path / "a.jsonl", 2)
    path = "tests.support.rollout_hooks.with_evaluation"
    evaluate(eval_prompt_data=("a", rows), custom_generate_function_path=path)
    assert sorted((index, evaluation) for _, (index, evaluation, _) in rollout_hooks.calls) == [
        (0, True),
        (1, True),
    ]
    _, engine = evaluate(
        eval_prompt_data=("a", rows),
        custom_generate_function_path="tests.support.rollout_hooks.two_turns",
    )
    first_turns = [
        b["sampling_params"]["max_new_tokens"] for b in engine.bodies if len(b["input_ids"]) == 8
    ]
    assert first_turns == [8, 8]  # though two_turns writes 14 into its parameters


def test_failures_are_left_out_and_counted_or_stop_the_run(tmp_path: Path) -> None:
    yaml = tmp_path / "eval.yaml"
    path = "tests.support.rollout_hooks.raises"
    rows = write_rows(tmp_path / "a.jsonl", 3)
    yaml.write_text(f"datasets: {{a: {{path: {rows}, custom_generate_function_path: {path}}}}}")
    with pytest.raises(UserError, match="3 of 3 prompts of evaluation set 'a' failed") as caught:
        evaluate(eval_config=str(yaml))
    assert "the sandbox is gone" in caught.value.why


def test_a_custom_evaluation_and_its_log_function(tmp_path: Path) -> None:
    data = {"eval_prompt_data": ("own", write_rows(tmp_path / "own.jsonl", 1))}
    output, _ = evaluate(
        **data,
        eval_function_path="tests.support.rollout_hooks.async_rollout",
        custom_eval_rollout_log_function_path="tests.support.rollout_hooks.log_eval",
    )
    assert output.data["own"]["rewards"] == [0.5, 1.0] and output.metrics == {}
    assert rollout_hooks.calls == [("log_eval", (3, ["own"]))]
    output, _ = evaluate(**data, eval_function_path="tests.support.rollout_hooks.async_rollout")
    assert output.metrics["eval/own"] == 0.75
    path = "tests.support.rollout_hooks.log_eval_as_plugins_do"
    output, _ = evaluate(**data, custom_eval_rollout_log_function_path=path)
    assert (
        output.metrics["eval/mine"] == 0.5
        and "eval/own" in output.metrics
        and "eval/step" not in output.metrics
    )


def test_a_custom_evaluation_needs_rewards_and_no_samples(tmp_path: Path) -> None:
    data = {"eval_prompt_data": ("own", write_rows(tmp_path / "own.jsonl", 1))}
    with pytest.raises(
        UserError,
        match=r"evaluation_without_rewards.*returned no list of rewards for data set 'own'",
    ):
        evaluate(
            **data, eval_function_path="tests.support.rollout_hooks.evaluation_without_rewards"
        )
    pattern, path = (
        str(tmp_path / "{rollout_id}.pt"),
        "tests.support.rollout_hooks.evaluation_without_samples",
    )
    output, _ = evaluate(**data, eval_function_path=path, save_debug_rollout_data=pattern)
    assert output.metrics["eval/own"] == 0.5 and load_samples(tmp_path / "eval_3.pt") == []


def test_evaluations_are_dumped_under_their_own_id(tmp_path: Path) -> None:
    pattern = str(tmp_path / "{rollout_id:04d}.pt")
    evaluate(
        eval_prompt_data=("a", write_rows(tmp_path / "a.jsonl", 2)), save_debug_rollout_data=pattern
    )
    assert len(load_samples(tmp_path / "eval_0003.pt")) == 2


def test_nothing_to_evaluate_is_said() -> None:
    with pytest.raises(UserError, match="nothing to evaluate"):
        evaluate()


def test_labels_that_the_reward_cannot_compare_are_refused_as_in_training(tmp_path: Path) -> None:
    data = write_rows(tmp_path / "rows.jsonl", 3, answer=None)
    flags = {**FLAGS, "eval_prompt_data": ("sums", data), "eval_label_key": "answer"}
    for rm_type, is_refused in (("math", True), ("random", False)):
        config = make_config(**{**flags, "rm_type": rm_type, "label_key": "answer"})
        [dataset] = eval_datasets(config)
        with (
            pytest.raises(UserError, match="neither text nor a number")
            if is_refused
            else nullcontext()
        ):
            read_eval_prompts(dataset, config, make_tokenizer())


def test_bad_evaluation_data_is_refused_at_the_start(tmp_path: Path) -> None:
    async def start(loop: RolloutLoop, engine: FakeEngine) -> None:
        await loop.start()

    rows = write_rows(tmp_path / "a.jsonl", 2)
    with pytest.raises(UserError, match="no data file"):
        with_loop(start, eval_prompt_data=("a", str(tmp_path / "absent.jsonl")))
    with pytest.raises(UserError, match="no key 'question'") as caught:
        with_loop(start, eval_prompt_data=("a", rows), eval_input_key="question")
    assert "--eval-input-key" in caught.value.fix
    config = make_config(**FLAGS, eval_prompt_data=("a", rows), eval_max_prompt_len=1)
    with pytest.raises(UserError, match=r"every prompt of .* is longer than 1 tokens") as caught:
        read_eval_prompts(eval_datasets(config)[0], config, make_tokenizer())
    assert "--eval-max-prompt-len" in caught.value.fix


# -- settings --------------------------------------------------------------------------------------


def datasets_of(tmp_path: Path, text: str, **flags: Any) -> Any:
    path = tmp_path / "eval.yaml"
    path.write_text(text)
    return eval_datasets(make_config(**{**FLAGS, **flags}, eval_config=str(path)))


def test_precedence_is_set_then_defaults_then_eval_flag_then_rollout_flag(tmp_path: Path) -> None:
    text = "{defaults: {top_p: 0.8, top_k: 5}, datasets: [{name: a, path: a.jsonl, top_k: 7}]}"
    [dataset] = datasets_of(tmp_path, text, rollout_temperature=0.9, eval_max_response_len=32)
    assert (dataset.top_k, dataset.top_p) == (7, 0.8)
    assert (dataset.max_response_len, dataset.temperature) == (32, 0.9)


@pytest.mark.parametrize(
    "text", ["{datasets: {a: {path: x}}}", "{eval: {datasets: [{name: a, path: x}]}}"]
)
def test_both_forms_of_the_file(tmp_path: Path, text: str) -> None:
    [dataset] = datasets_of(tmp_path, text)
    assert (dataset.name, dataset.path) == ("a", "x")


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("{datasets: [{name: a, path: x, temprature: 1}]}", "did you mean 'temperature'"),
        ("{defaults: {path: x}, datasets: [{name: a, path: x}]}", "unknown key 'path'"),
        ("{dataset: []}", "has no datasets"),
        ("{datasets: [gsm8k]}", "has no datasets"),
        ("{datasets: {gsm8k: }}", "has no datasets"),
        ("{datasets: [{name: a}]}", "it has no path"),
        ("{datasets: [{path: a}]}", "it has no name"),
        ("{datasets: [{name: a, path: x}, {name: a, path: y}]}", "given twice"),
        ("{datasets: [{name: a, path: x, app_service: z}]}", "agent services"),
        (
            "{defaults: {multimodal_keys: {image: i}}, datasets: [{name: a, path: x}]}",
            "has multimodal_keys, and the run reads no images",
        ),
        ("{datasets: [", "not valid YAML"),
    ],
)
def test_mistakes_in_the_file_are_named(tmp_path: Path, text: str, said: str) -> None:
    with pytest.raises(UserError) as caught:
        datasets_of(tmp_path, text)
    assert said in str(caught.value)


def test_eval_prompt_data_takes_pairs_or_a_single_path() -> None:
    def names(*values: str) -> list[tuple[str, str]]:
        return [
            (d.name, d.path) for d in eval_datasets(make_config(**FLAGS, eval_prompt_data=values))
        ]

    assert names("a", "x", "b", "y") == [("a", "x"), ("b", "y")]
    assert names("x.jsonl") == [("x", "x.jsonl")]
    with pytest.raises(UserError, match="has 3 values"):
        names("a", "x", "b")


# -- numbers ---------------------------------------------------------------------------------------


@settings(max_examples=80)
@given(st.data())
def test_pass_at_k_equals_counting_all_subsets(data: st.DataObject) -> None:
    n = data.draw(st.integers(1, 8))
    correct, k = data.draw(st.integers(0, n)), data.draw(st.integers(1, n))
    subsets = list(itertools.combinations(range(n), k))
    hits = sum(any(i < correct for i in subset) for subset in subsets)
    assert pass_at_k(n, correct, k) == pytest.approx(hits / len(subsets))


def test_pass_at_k_takes_each_prompts_own_count() -> None:
    assert pass_at_k_metrics([[1, 0, 0, 0], [1, 1]]) == {
        "pass@1": 0.625,
        "pass@2": 0.75,
        "pass@4": 1.0,
    }
    assert pass_at_k_metrics([[1, 0, 0]], ks=(3,)) == {"pass@3": 1.0}
    assert powers_of_two(6) == [1, 2, 4] and pass_at_k_metrics([]) == {}


def sample(index: int, reward: Any, length: int = 4, **fields: Any) -> Sample:
    return Sample(
        index=index, tokens=[1] * (2 + length), response_length=length, reward=reward, **fields
    )


def test_rollout_metrics_count_groups_without_signal_and_versions() -> None:
    spans = [TokenSpan(0, 2, 3), TokenSpan(2, 4, 5)]
    groups = [
        Group(
            0,
            [[sample(0, 1.0, token_spans=spans)], [sample(1, 1.0, status=SampleStatus.TRUNCATED)]],
        ),
        Group(1, [[sample(2, 0.0, length=8)], [sample(3, 1.0)]]),
    ]
    metrics = rollout_metrics(groups, hook_args())
    assert metrics["rollout/zero_std/count_1.0"] == 1 and metrics["rollout/zero_std/ratio"] == 0.5
    assert metrics["rollout/truncated_ratio"] == 0.25 and metrics["rollout/reward/mean"] == 0.75
    assert metrics["rollout/response_len/mean"] == 5 and metrics["rollout/response_len/max"] == 8
    assert metrics["rollout/weight_version/min"] == 3
    for other in (
        {"advantage_estimator": "reinforce_plus_plus"},
        {"custom_advantage_function_path": "mine.advantages"},
    ):
        assert "rollout/zero_std/ratio" not in rollout_metrics(groups, hook_args(**other)), (
            "equal rewards do teach there"
        )


def test_optional_metrics_follow_their_flags() -> None:
    def rewarded(index: int, acc: float, kind: str) -> Sample:
        return sample(index, {"acc": acc, "kind": kind}, metadata={"round_number": index})

    groups = [Group(0, [[rewarded(0, 1.0, "ok")], [rewarded(1, 0.0, "format")]])]
    flags = {
        "log_multi_turn": True,
        "log_passrate": True,
        "log_reward_category": "kind",
        "log_correct_samples": True,
    }
    metrics = rollout_metrics(groups, hook_args(reward_key="acc", **flags))
    assert metrics["rollout/error_cat/format"] == 0.5 and metrics["passrate/pass@2"] == 1.0
    assert (
        metrics["multi_turn/round_number/max"] == 1
        and metrics["rollout/correct_response_len/mean"] == 4
    )
    assert not any(
        name.startswith(("passrate", "multi_turn"))
        for name in rollout_metrics(groups, hook_args(reward_key="acc"))
    )


def test_numbers_beside_the_reward_are_metrics_where_they_are() -> None:
    first = {
        "score": 1.0,
        "right": True,
        "length": np.float32(3),
        "said": "4",
        "more": {"a": 1},
        "none": None,
    }
    rewards = [first, {"score": 0.0, "right": np.bool_(False), 7: torch.tensor(2)}, 0.5]
    samples = [sample(index, reward) for index, reward in enumerate(rewards)]
    found = reward_parts(samples, "rollout", hook_args(reward_key="score"))
    assert found == {
        "rollout/reward_part/7": 2.0,
        "rollout/reward_part/length": 3.0,
        "rollout/reward_part/right": 0.5,
    }
    group = Group(0, [[samples[0]], [samples[1]]])
    assert found.items() <= rollout_metrics([group], hook_args(reward_key="score")).items()
    assert not any(
        "reward_part" in name for name in rollout_metrics([Group(0, [[samples[2]]])], hook_args())
    )


def test_numbers_beside_the_reward_of_an_evaluation_are_metrics() -> None:
    run = GroupRun.of(
        [sample(0, {"score": 1.0, "acc": 0.0}), sample(1, {"score": 0.0, "acc": 1.0})]
    )
    metrics = eval_metrics("a", [run], hook_args(reward_key="acc", eval_pass_k=[]))
    assert metrics["eval/a"] == 0.5 == metrics["eval/a/reward_part/score"]
    assert "eval/a/reward_part/acc" not in metrics


def test_pass_at_k_counts_executions_not_what_they_fanned_out_into() -> None:
    groups = [Group(0, [[sample(0, 0.0), sample(0, 1.0), sample(0, 0.0)], [sample(1, 0.0)]])]
    metrics = rollout_metrics(groups, hook_args(log_passrate=True))
    assert {name: metrics[name] for name in metrics if name.startswith("passrate")} == {
        "passrate/pass@1": 0.5,
        "passrate/pass@2": 1.0,
    }


def test_distribution() -> None:
    assert distribution("rollout/response_len", [1, 2, 6]) == {
        "rollout/response_len/mean": 3,
        "rollout/response_len/median": 2,
        "rollout/response_len/max": 6,
        "rollout/response_len/min": 1,
    }
    assert distribution("x", []) == {}


def test_throughput_counts_tokens_per_gpu_and_leaves_tools_out() -> None:
    samples = [
        sample(0, 1.0, length=30, non_generation_time=1.0),
        sample(1, 1.0, length=10, loss_mask=[0] * 10),
    ]
    metrics = throughput_metrics(samples, seconds=2.0, num_gpus=4, from_journal={})
    assert metrics["perf/tokens_per_gpu_per_sec"] == 5.0
    assert metrics["perf/effective_tokens_per_gpu_per_sec"] == 3.75
    assert metrics["perf/longest_sample_tokens_per_sec"] == 15.0
    assert metrics["perf/longest_sample_tokens_per_sec_without_non_generation"] == 30.0
    assert metrics["perf/non_generation_time/max"] == 1.0


def test_throughput_leaves_out_what_came_out_of_the_journal() -> None:
    masks = [[1] * 30, [0] * 4 + [1] * 6, [0] * 15 + [1] * 5]
    samples = [sample(i, 1.0, length=len(mask), loss_mask=mask) for i, mask in enumerate(masks)]
    metrics = throughput_metrics(samples, seconds=2.0, num_gpus=1, from_journal={0: 30, 2: 15})
    assert metrics["perf/tokens_per_gpu_per_sec"] == (10 + 5) / 2
    assert metrics["perf/effective_tokens_per_gpu_per_sec"] == (6 + 5) / 2
    assert metrics["perf/longest_sample_tokens_per_sec"] == 5.0, (
        "that which was generated as a whole"
    )
    all_known = throughput_metrics(
        samples, seconds=0.1, num_gpus=1, from_journal={0: 30, 1: 10, 2: 20}
    )
    assert all_known == {
        "perf/rollout_time": 0.1,
        "perf/tokens_per_gpu_per_sec": 0.0,
        "perf/effective_tokens_per_gpu_per_sec": 0.0,
    }


def test_engine_load_and_repetition() -> None:
    assert load_metrics([]) == {} and load_metrics([{"a": 0}]) == {}
    loads = load_metrics([{"a": 8, "b": 0}, {"a": 4, "b": 4}])
    assert loads["rollout/engine_load/0"] == 6 and loads["rollout/engine_load/max_over_mean"] == 1.5
    assert loads["rollout/engine_load/idle_ratio"] == 0.25
    assert is_repetitive("ha " * 1000) and not is_repetitive("ha ha ha")


def test_groups_are_flat_by_the_rewards_that_the_estimator_compares() -> None:
    """A penalty makes equal rewards differ, and different ones equal."""
    groups = [
        Group(0, [[sample(0, 1.0)], [sample(1, 1.0, length=10)]]),
        Group(1, [[sample(2, 0.0)], [sample(3, 1.0, length=10)]]),
        Group(2, [[sample(4, 0.0)], [sample(5, 1.0)]]),
    ]
    args = hook_args(
        rollout_max_response_len=10,
        overlong_buffer_len=5,
        overlong_penalty_factor=1.0,
        mask_offpolicy_in_partial_rollout=False,
    )
    metrics = rollout_metrics(groups, args)
    assert metrics["rollout/zero_std/count_0.0"] == 1 and metrics["rollout/reward/mean"] == 4 / 6
    assert metrics["rollout/zero_std/ratio"] == pytest.approx(1 / 3)
    assert rollout_metrics(groups, hook_args())["rollout/zero_std/count_1.0"] == 1


# -- filters ---------------------------------------------------------------------------------------


@settings(max_examples=50)
@given(rewards=st.lists(st.sampled_from([0.0, 0.3, 1.0, -1.0]), min_size=1, max_size=6))
def test_nonzero_std_filter_keeps_what_differs(rewards: list[float]) -> None:
    samples = [sample(i, reward) for i, reward in enumerate(rewards)]
    verdict = check_reward_nonzero_std(hook_args(), samples)
    assert verdict.keep == (len(set(rewards)) > 1)
    assert verdict.keep or verdict.reason == f"zero_std_{round(rewards[0], 1)}"
    fallback = check_reward_nonzero_std_with_fallback(hook_args(), samples)
    for remaining, drops in ((9, not verdict.keep), (8, False)):
        sizes = {"remaining_batch_size": remaining, "target_data_size": 8}
        assert should_drop_dynamic_filter_output(fallback, **sizes) == drops


def test_metric_gatherer_counts_reasons() -> None:
    gatherer = MetricGatherer()
    for reason in ("a", None, "a"):
        gatherer.on_dynamic_filter_drop(reason)
    assert gatherer.collect() == {"rollout/dynamic_filter/drop_a": 2}


# -- rewards of evaluation sets, as a launch checks them -------------------------------------------


def set_with_rewards_of(folder: Path, rm_type: str) -> str:
    file = folder / "sets.yaml"
    file.write_text(f"datasets:\n  - {{name: judged, path: judged.jsonl, rm_type: {rm_type}}}\n")
    return str(file)


@pytest.mark.parametrize("rm_type", ["remote_rm", "boxed_remote_rm"])
def test_a_set_that_asks_a_reward_model_needs_its_address(rm_type: str, tmp_path: Path) -> None:
    flags = {
        "rm_type": "math",
        "eval_config": set_with_rewards_of(tmp_path, rm_type),
        "output_dir": str(tmp_path),
    }
    with pytest.raises(UserError, match="needs an address"):
        check_flags(make_config(**flags))
    check_flags(make_config(**flags, rm_url="http://judge:1"))


def test_a_set_whose_rm_type_does_nothing_is_warned_of(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    judge = tmp_path / "judge.py"
    judge.write_text("def reward(args, sample):\n    return 0.0\n")
    sets = set_with_rewards_of(tmp_path, "math")
    check_flags(
        make_config(eval_config=sets, custom_rm_path=f"{judge}:reward", output_dir=str(tmp_path))
    )
    assert "evaluation set judged: its rm_type math has no effect" in caplog.text


def test_what_no_engine_sampled_and_is_trained_on_is_counted() -> None:
    def sample(**changes: Any) -> Sample:
        sample = Sample(tokens=[1, 2], index=0)
        sample.append(tokens=[3, 4, 5], log_probs=[-0.5] * 3, meta_info={"weight_version": "3"})
        sample.append(tokens=[6, 7], trainable=False)  # what a tool answered
        sample.append(tokens=[8], log_probs=[-0.5], meta_info={"weight_version": "4"})
        for name, value in changes.items():
            setattr(sample, name, value)
        return sample

    unmasked, all_trained = sample(loss_mask=[1] * 6), sample(loss_mask=None)
    assert unsampled_trained_ratio([sample()]) == unsampled_trained_ratio([]) == 0.0
    assert (
        unsampled_trained_ratio([unmasked])
        == unsampled_trained_ratio([all_trained])
        == pytest.approx(2 / 6)
    )
    assert unsampled_trained_ratio([sample(), all_trained]) == pytest.approx(2 / 10)
    assert unsampled_trained_ratio([sample(loss_mask=[1, 0, 0, 0, 0, 1])]) == 0.0
    assert unsampled_trained_ratio([sample(token_spans=[])]) == 0.0, (
        "nobody has said whose tokens these are"
    )
