"""Metrics of samples: rewards, lengths, groups without a signal, pass@k, throughput, load."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from slime.rollout.evaluate import eval_metrics
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
from slime.samples.types import Group, Sample, SampleStatus, TokenSpan
from tests.support.fake_rollout import hook_args


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
