"""Evaluation: which sets run with which settings, and what they report; filters of groups."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
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
    pass_at_k_metrics,
)
from slime.rollout.trajectory import GroupRun
from slime.run.preflight import check_flags
from slime.samples.types import Sample
from tests.support import rollout_hooks
from tests.support.fake_engine import FakeEngine
from tests.support.fake_rollout import FakeSource, FakeTokenizer, hook_args
from tests.support.prompt_fixtures import CHATML, make_tokenizer

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


def with_loop(
    test: Callable[[RolloutLoop, FakeEngine], Awaitable[Any]], tokenizer: Any = None, **flags: Any
) -> Any:
    async def main() -> Any:
        async with FakeEngine() as engine:
            config = make_config(**{**FLAGS, **flags})
            loop = RolloutLoop(config, tokenizer or FakeTokenizer(), FakeSource(2), engine.url)
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


@pytest.mark.parametrize("templates_rows", ["true", "false"])
@pytest.mark.parametrize("own", ["{mode: B}", "{}"])
def test_the_template_arguments_of_a_set_hold_for_all_its_turns(
    own: str, templates_rows: str, tmp_path: Path
) -> None:
    tokenizer = make_tokenizer(CHATML + "{% if add_generation_prompt %}{{ mode }}{% endif %}")
    rows = tmp_path / "rows.jsonl"
    rows.write_text(json.dumps({"input": [{"role": "user", "content": "hi"}]}) + "\n")
    file = tmp_path / "sets.yaml"
    settings = f"apply_chat_template: {templates_rows}, apply_chat_template_kwargs: {own}"
    file.write_text(f"datasets: {{a: {{path: {rows}, {settings}}}}}")

    async def test(loop: RolloutLoop, engine: FakeEngine) -> None:
        await loop.evaluate(0)
        begun = "<|im_start|>assistant\n" + ("B" if own == "{mode: B}" else "")
        asked = sorted((body["input_ids"] for body in engine.bodies), key=len)
        assert len(asked) == 2
        assert all(tokenizer.decode(ids).endswith(begun) for ids in asked)

    with_loop(
        test,
        tokenizer,
        eval_config=str(file),
        n_samples_per_eval_prompt=1,
        rollout_max_response_len=100,
        apply_chat_template_kwargs={"mode": "A"},
        custom_generate_function_path="tests.support.rollout_hooks.asked_twice",
    )


@pytest.mark.parametrize(
    "flags, option",
    [
        ({"eval_reward_key": "acc"}, "--eval-reward-key"),
        ({"reward_key": "acc", "num_rollout": 0}, "--reward-key"),
        ({"reward_key": "acc"}, None),
    ],
)
def test_a_key_for_evaluation_rewards_that_are_numbers_is_warned_of(
    flags: dict[str, Any],
    option: str | None,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Training with dicts and evaluation with numbers is fine with one --reward-key."""
    monkeypatch.setattr("slime.log._said", set())
    evaluate(eval_prompt_data=["small", write_rows(tmp_path / "a.jsonl", 1)], **flags)
    assert caplog.text.count("has no effect") == (option is not None)
    assert option is None or f"{option} acc has no effect" in caplog.text


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


@pytest.mark.parametrize("own", [{}, {"rm_type": "math"}])
@pytest.mark.parametrize("named", ["rm_type: gpqa", "metadata_overrides: {rm_type: boxed_gpqa}"])
def test_labels_are_read_for_the_reward_that_the_set_names(
    own: dict[str, str], named: str, tmp_path: Path
) -> None:
    """A position is a number for gpqa alone, which would find no choice called "1"."""
    data = write_rows(tmp_path / "rows.jsonl", 1, answer=1, metadata=own)
    flags = {"rm_type": "math", "label_key": "answer"}
    [dataset] = datasets_of(tmp_path, f"{{datasets: {{a: {{path: {data}, {named}}}}}}}", **flags)
    [prompt] = read_eval_prompts(dataset, make_config(**{**FLAGS, **flags}), make_tokenizer())
    assert prompt.label == 1


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


def test_an_evaluation_fetches_no_experts(tmp_path: Path) -> None:
    data = write_rows(tmp_path / "rows.jsonl", 1)
    _, engine = evaluate(eval_prompt_data=["a", data], use_rollout_routing_replay=True)
    assert engine.bodies and not any("return_routed_experts" in body for body in engine.bodies)


def test_the_mean_reward_counts_a_trajectory_of_several_samples_once() -> None:
    whole = Sample(prompt="p", tokens=[1, 2], response_length=1, reward=1.0, index=0)
    parts = [Sample(prompt="p", tokens=[1, 2], response_length=1, reward=0.0, index=1)] * 3
    run = GroupRun.of([whole, parts[0]])
    run.trajectories[1].samples = parts
    args = make_config(**FLAGS).shared_args
    assert eval_metrics("d", [run], args)["eval/d"] == 0.5


@pytest.mark.parametrize("key", ["input_key", "label_key", "metadata_key", "tool_key"])
def test_a_column_that_a_set_names_and_its_rows_lack_is_refused(tmp_path: Path, key: str) -> None:
    data = write_rows(tmp_path / "rows.jsonl", 1)
    [dataset] = datasets_of(tmp_path, f"{{datasets: {{a: {{path: {data}, {key}: absent}}}}}}")
    with pytest.raises(UserError, match="no key 'absent'") as caught:
        read_eval_prompts(dataset, make_config(**FLAGS), make_tokenizer())
    assert f"--eval-config's {key}" in caught.value.fix


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
        ("{defaults: 5, datasets: [{name: a, path: x}]}", "defaults are an int"),
        ("{datasets: [{name: 1, path: x}, {name: '1', path: y}]}", "given twice"),
    ],
)
def test_mistakes_in_the_file_are_named(tmp_path: Path, text: str, said: str) -> None:
    with pytest.raises(UserError) as caught:
        datasets_of(tmp_path, text)
    assert said in str(caught.value)


@pytest.mark.parametrize(
    ("key", "written", "read"),
    [
        ("apply_chat_template", '"false"', False),
        ("apply_chat_template_kwargs", "'{\"thinking\": true}'", {"thinking": True}),
        ("skip_special_tokens", '"no"', False),
        ("label_key", "2024", "2024"),
        ("label_key", "null", None),
        ("rm_type", "null", None),
        ("stop", "[a, 5]", ("a", "5")),
        ("stop_token_ids", '["7"]', (7,)),
    ],
)
def test_values_of_a_set_have_the_types_of_their_flags(
    key: str, written: str, read: Any, tmp_path: Path
) -> None:
    """Text such as "false" would count as true."""
    [dataset] = datasets_of(tmp_path, f"{{datasets: {{a: {{path: x, {key}: {written}}}}}}}")
    assert getattr(dataset, key) == read


@pytest.mark.parametrize(
    "wrong",
    [
        "apply_chat_template: maybe",
        "apply_chat_template_kwargs: [1]",
        "apply_chat_template_kwargs: null",
        "input_key: [a]",
        "input_key: null",
        "rm_type: [math]",
        "metadata_overrides: [1]",
        "metadata_overrides: null",
        "stop_token_ids: [end]",
        "no_stop_trim: perhaps",
        "repetition_penalty: 3",
    ],
)
def test_values_of_other_types_are_refused_before_the_run(wrong: str, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"^evaluation set a: "):
        datasets_of(tmp_path, f"{{datasets: {{a: {{path: x, {wrong}}}}}}}")


def test_a_k_that_no_set_has_samples_for_is_refused(tmp_path: Path) -> None:
    text = "{defaults: {n_samples_per_eval_prompt: 2}, datasets: {a: {path: x}, b: {path: y}}}"
    with pytest.raises(UserError, match=r"no evaluation set has more than .* 2"):
        datasets_of(tmp_path, text, n_samples_per_eval_prompt=8, eval_pass_k=(1, 4))
    enough = text.replace("{path: y}", "{path: y, n_samples_per_eval_prompt: 4}")
    assert len(datasets_of(tmp_path, enough, eval_pass_k=(1, 4))) == 2


def test_eval_prompt_data_takes_pairs_or_a_single_path() -> None:
    def names(*values: str) -> list[tuple[str, str]]:
        return [
            (d.name, d.path) for d in eval_datasets(make_config(**FLAGS, eval_prompt_data=values))
        ]

    assert names("a", "x", "b", "y") == [("a", "x"), ("b", "y")]
    assert names("x.jsonl") == [("x", "x.jsonl")]
    with pytest.raises(UserError, match="has 3 values"):
        names("a", "x", "b")


# -- filters ---------------------------------------------------------------------------------------


@settings(max_examples=50)
@given(rewards=st.lists(st.sampled_from([0.0, 0.3, 1.0, -1.0]), min_size=1, max_size=6))
def test_nonzero_std_filter_keeps_what_differs(rewards: list[float]) -> None:
    samples = [Sample(index=i, reward=reward) for i, reward in enumerate(rewards)]
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


@pytest.mark.parametrize("key", ["custom_rm_path", "custom_generate_function_path"])
def test_functions_of_a_set_are_checked_before_the_launch(key: str, tmp_path: Path) -> None:
    sets = tmp_path / "sets.yaml"
    sets.write_text(f"datasets: {{a: {{path: a.jsonl, {key}: tests.support.rollout_hooks.nope}}}}")
    flags = {"rm_type": "math", "eval_config": str(sets), "output_dir": str(tmp_path)}
    with pytest.raises(UserError, match="has no 'nope'"):
        check_flags(make_config(**flags))


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
