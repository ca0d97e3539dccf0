"""Conversion of groups to training shards: statistics by group, masks, denominators, what is left
out or refused."""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from slime.algorithms.estimators import ESTIMATORS
from slime.algorithms.reduce import token_weights
from slime.config import make_config
from slime.errors import UserError
from slime.log import untold
from slime.samples.batch import TrainBatch, TrainLayout
from slime.samples.convert import to_batches_of_roles, to_train_batches
from slime.samples.types import Group, Sample, SampleStatus, TokenSpan
from slime.user_code.loading import FunctionFailed, _module_of_file, load_function
from tests.support.hf_configs import config_of


def make_sample(
    index: int, reward: Any = 1.0, prompt: int = 3, response: int = 4, **fields: Any
) -> Sample:
    fields.setdefault("status", SampleStatus.COMPLETED)
    tokens = [100 * index + i for i in range(prompt + response)]
    return Sample(index=index, tokens=tokens, response_length=response, reward=reward, **fields)


def make_groups(*rewards: list[Any]) -> list[Group]:
    """One group per list, one trajectory of one sample per reward."""
    counter = iter(range(1000))
    return [
        Group(g, [[make_sample(next(counter), r)] for r in values])
        for g, values in enumerate(rewards)
    ]


def config_for(groups: list[Group], **flags: Any) -> Any:
    trajectories = sum(group.num_trajectories for group in groups)
    return make_config(
        **{"rollout_batch_size": trajectories, "n_samples_per_prompt": 2, "num_rollout": 1, **flags}
    )


def convert(
    groups: list[Group], layout: TrainLayout | None = None, **flags: Any
) -> list[TrainBatch]:
    return to_train_batches(
        groups, config_for(groups, **flags), layout or TrainLayout(), rollout_id=5
    )


# -- rewards and their groups ----------------------------------------------------------------------


def test_maxrl_refuses_rewards_that_are_no_rates() -> None:
    with pytest.raises(UserError, match="maxrl met a reward of -1"):
        convert(make_groups([1.0, -1.0]), advantage_estimator="maxrl")


@pytest.mark.parametrize(
    ("length", "penalty"), [(1, 0.0), (6, 0.0), (8, -0.25), (10, -0.5), (12, -0.5)]
)
def test_long_answers_lose_a_part_of_their_reward(length: int, penalty: float) -> None:
    """The limit is 10 tokens, the last 4 of which are penalised with up to 0.5."""
    groups = make_groups([1.0, 1.0])
    sample = groups[0].trajectories[0][0]
    sample.tokens = [1] * (length + 2)
    sample.response_length = length
    flags = {"rollout_max_response_len": 10, "overlong_buffer_len": 4}
    batch = convert(
        groups, **flags, overlong_penalty_factor=0.5, disable_rewards_normalization=True
    )[0]
    assert batch.rewards == pytest.approx([1.0 + penalty, 1.0])
    assert batch.raw_rewards == [1.0, 1.0]


@pytest.mark.parametrize(("masks_offpolicy", "penalty"), [(False, 0.0), (True, -0.25)])
def test_the_overlong_penalty_counts_what_the_model_generated(
    masks_offpolicy: bool, penalty: float
) -> None:
    """A tool wrote 4 of 12 tokens, older weights 3; the limit is 10, the last 4 penalised."""
    spans = [TokenSpan(0, 3, 1), TokenSpan(3, 7, None), TokenSpan(7, 12, 2)]
    sample = make_sample(0, response=12, loss_mask=[0] * 7 + [1] * 5, token_spans=spans)
    batch = convert(
        [Group(0, [[sample], [make_sample(1)]])],
        rollout_max_response_len=10,
        overlong_buffer_len=4,
        overlong_penalty_factor=0.5,
        disable_rewards_normalization=True,
        partial_rollout=masks_offpolicy,
        mask_offpolicy_in_partial_rollout=masks_offpolicy,
    )[0]
    assert batch.rewards == pytest.approx([1.0 + penalty, 1.0])


def test_groups_of_different_sizes_are_never_mixed() -> None:
    batch = convert(
        make_groups([1.0, 0.0], [5.0, 5.0, 5.0], [9.0]), disable_grpo_std_normalization=True
    )[0]
    assert dict(zip(batch.sample_indices, batch.rewards)) == {
        0: 0.5,
        1: -0.5,
        2: 0.0,
        3: 0.0,
        4: 0.0,
        5: 0.0,
    }
    assert sorted(batch.raw_rewards) == [0.0, 1.0, 5.0, 5.0, 5.0, 9.0]


def test_an_execution_that_fanned_out_counts_once() -> None:
    siblings = [
        make_sample(1, 1.0, rollout_id=7),
        make_sample(2, 1.0, rollout_id=7),
        make_sample(3, 1.0, rollout_id=7),
    ]
    batch = convert(
        [Group(0, [[make_sample(0, 0.0)], siblings])], disable_grpo_std_normalization=True
    )[0]
    assert dict(zip(batch.sample_indices, batch.rewards)) == {0: -0.5, 1: 0.5, 2: 0.5, 3: 0.5}
    assert batch.steps[0].global_batch_size == 2
    assert dict(zip(batch.sample_indices, batch.rollout_mask_sums)) == {
        0: 4.0,
        1: 12.0,
        2: 12.0,
        3: 12.0,
    }


@given(
    st.lists(st.lists(st.integers(1, 9), min_size=1, max_size=4), min_size=1, max_size=4),
    st.booleans(),
)
def test_cispo_averages_over_the_tokens_of_a_group(
    groups: list[list[int]], masks_one: bool
) -> None:
    """MiniMax-M1 (arXiv:2506.13585), equation 4: 1 / Σ_i |o_i| within a group; groups count by
    their trajectories."""
    counter = iter(range(1000))
    made = [
        Group(
            g, [[make_sample(next(counter), float(g % 2), response=length)] for length in lengths]
        )
        for g, lengths in enumerate(groups)
    ]
    if masks_one and groups[0][0] > 1:
        made[0].trajectories[0][0].loss_mask = [1] * (groups[0][0] - 1) + [0]
    batch = convert(made, advantage_estimator="cispo")[0]
    step = batch.steps[0]
    weights = token_weights(
        batch.loss_masks, batch.rollout_mask_sums, step.global_batch_size
    ).double()
    expected = []
    for mask, group in zip(batch.loss_masks, batch.group_indices):
        members = [m for m, g in zip(batch.loss_masks, batch.group_indices) if g == group]
        share = len(members) / step.global_batch_size
        expected.append(mask.double() * share / sum(m.sum().item() for m in members))
    assert torch.allclose(weights, torch.cat(expected), rtol=1e-6, atol=0)
    assert weights.sum().item() == pytest.approx(1.0, rel=1e-6)
    per_execution = convert(made)[0]
    assert per_execution.rollout_mask_sums == [
        max(mask.sum().item(), 1.0) for mask in per_execution.loss_masks
    ]


@pytest.mark.parametrize(
    ("flags", "expected"),
    [
        ({"disable_rewards_normalization": True}, [3.0, 1.0]),
        ({"advantage_estimator": "reinforce_plus_plus", "normalize_advantages": True}, [3.0, 1.0]),
        (
            {"advantage_estimator": "reinforce_plus_plus_baseline", "normalize_advantages": True},
            [1.0, -1.0],
        ),
        ({"advantage_estimator": "gspo", "disable_grpo_std_normalization": True}, [1.0, -1.0]),
        ({"advantage_estimator": "cispo"}, [2**-0.5, -(2**-0.5)]),
        ({"advantage_estimator": "sapo"}, [2**-0.5, -(2**-0.5)]),
        ({"advantage_estimator": "dr_grpo"}, [1.0, -1.0]),
        ({"advantage_estimator": "rloo"}, [2.0, -2.0]),
        ({"advantage_estimator": "maxrl"}, [0.5, -0.5]),
        ({}, [2**-0.5, -(2**-0.5)]),
    ],
)
def test_switches_and_estimators(flags, expected) -> None:
    assert convert(make_groups([3.0, 1.0]), **flags)[0].rewards == pytest.approx(expected, abs=1e-6)


def best_of_group(rewards: Sequence[float]) -> list[float]:
    return [max(rewards)] * len(rewards)


def test_an_estimator_with_a_baseline_of_its_own_is_a_function_and_a_row(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    row = dataclasses.replace(ESTIMATORS["grpo"], baseline=best_of_group, divisor=None)
    monkeypatch.setitem(ESTIMATORS, "grpo", row)
    assert convert(make_groups([3.0, 1.0, 2.0]))[0].rewards == [0.0, -2.0, -1.0]


def test_dict_rewards_need_their_key() -> None:
    groups = make_groups([{"score": 1.0, "acc": 1}, {"score": -1.0, "acc": 0}])
    assert convert(groups, reward_key="score")[0].raw_rewards == [1.0, -1.0]
    with pytest.raises(UserError, match="dict without the key"):
        convert(groups)


# -- what is kept, what is left out ----------------------------------------------------------------


def test_removed_samples_count_as_executions_and_in_the_statistics_but_train_nothing() -> None:
    groups = make_groups([1.0, 0.0])
    groups[0].trajectories[1][0].remove_sample = True
    batch = convert(groups, disable_grpo_std_normalization=True)[0]
    assert batch.rewards == [0.5, -0.5]
    assert [mask.tolist() for mask in batch.loss_masks] == [[1.0] * 4, [0.0] * 4]
    assert batch.rollout_mask_sums == [4.0, 1.0]
    assert (batch.steps[0].global_batch_size, batch.steps[0].num_loss_tokens) == (2, 4)


def test_failed_aborted_and_empty_samples_are_left_out_and_counted() -> None:
    groups = make_groups([1.0, None, None, 0.0], [1.0, 0.0])
    failed, aborted, empty = (groups[0].trajectories[i][0] for i in (1, 2, 3))
    failed.status, aborted.status = SampleStatus.FAILED, SampleStatus.ABORTED
    empty.tokens, empty.response_length, empty.status = [1, 2, 3], 0, SampleStatus.TRUNCATED
    batch = convert(groups)[0]
    assert sorted(batch.sample_indices) == [0, 4, 5]
    assert {k: v for k, v in batch.global_stats.items() if "dropped" in k} == {
        "rollout/dropped_failed": 1.0,
        "rollout/dropped_aborted": 1.0,
        "rollout/dropped_empty": 1.0,
    }


def test_a_finished_sample_without_reward_is_refused_by_name() -> None:
    with pytest.raises(
        UserError, match=r"1 finished samples of rollout 5 have no reward \(first: index 1\)"
    ):
        convert(make_groups([1.0, None]))


@pytest.mark.parametrize("reward", [math.nan, -math.inf])
def test_a_reward_that_is_not_finite_is_refused_by_name(reward: float) -> None:
    with pytest.raises(UserError, match=rf"returned {reward} \(float\) as the reward of sample 1"):
        convert(make_groups([1.0, reward]))


def test_nothing_left_is_an_error_with_the_reasons() -> None:
    groups = make_groups([None, None])
    for sample in groups[0].samples:
        sample.status = SampleStatus.ABORTED
    with pytest.raises(UserError, match=r"no sample to train on\s+why: 2 aborted"):
        convert(groups)
    for sample in groups[0].samples:  # the prompt filled the context
        sample.status, sample.reward = SampleStatus.TRUNCATED, 0.0
        sample.tokens, sample.response_length, sample.rollout_log_probs = [1, 2], 0, None
        sample.response, sample.loss_mask, sample.token_spans = "", None, []
    with pytest.raises(
        UserError, match=r"2 empty\s+fix: .*--rollout-max-prompt-len leaves them out"
    ):
        convert(groups)


@pytest.mark.parametrize("response", [1, 4])
def test_a_sample_without_a_prompt_is_refused(response: int) -> None:
    """Its first log-prob would be computed from another sample of its micro-batch."""
    groups = [Group(0, [[make_sample(0)], [make_sample(7, 0.0, prompt=0, response=response)]])]
    with pytest.raises(UserError, match="the sample with index 7 has no prompt"):
        convert(groups)


def test_samples_longer_than_seq_length_are_refused() -> None:
    groups = make_groups([1.0, 0.0])
    groups[0].trajectories[1] = [make_sample(1, 0.0, response=20)]
    with pytest.raises(
        UserError, match=r"longer than --seq-length 16 \(longest: index 1, 23 tokens\)"
    ):
        convert(groups, seq_length=16)


# -- optional fields -------------------------------------------------------------------------------


def test_optional_fields_are_decided_by_any_sample() -> None:
    groups = make_groups([1.0, 0.0])
    assert convert(groups)[0].rollout_log_probs is None
    groups[0].trajectories[1][0].rollout_log_probs = [-0.5] * 4
    with pytest.raises(
        UserError, match=r"1 of 2 samples have no rollout_log_probs \(first: index 0\)"
    ):
        convert(groups)
    groups[0].trajectories[0][0].remove_sample = True  # trains nothing, so it needs none
    log_probs = convert(groups)[0].rollout_log_probs
    assert log_probs is not None and [row.tolist() for row in log_probs] == [[0.0] * 4, [-0.5] * 4]


def test_weight_versions_truncation_and_metadata_travel() -> None:
    sample = make_sample(0, 1.0, status=SampleStatus.TRUNCATED, train_metadata={"k": 1})
    sample.token_spans = [TokenSpan(0, 2, 3), TokenSpan(2, 4, 4)]
    batch = convert([Group(8, [[sample], [make_sample(1, 0.0)]])])[0]
    assert (batch.truncated, batch.weight_versions) == ([True, False], [(3, 4), ()])
    assert (batch.metadata, batch.group_indices, batch.rollout_id) == ([{"k": 1}, None], [8, 8], 5)
    assert batch.global_stats["rollout/truncated"] == 0.5


# -- shards ----------------------------------------------------------------------------------------


@given(
    st.lists(st.lists(st.integers(1, 30), min_size=1, max_size=5), min_size=1, max_size=6),
    st.integers(1, 4),
    st.booleans(),
    st.integers(1, 8),
)
@settings(max_examples=50)
def test_every_sample_reaches_exactly_one_rank_with_its_own_data(
    lengths, ranks, dynamic, batch_size
) -> None:
    counter = iter(range(1000))
    groups = [
        Group(g, [[make_sample(next(counter), float(i), response=n)] for i, n in enumerate(row)])
        for g, row in enumerate(lengths)
    ]
    flags: dict[str, Any] = (
        {"use_dynamic_batch_size": True, "max_tokens_per_gpu": 40} if dynamic else {}
    )
    config = make_config(
        rollout_batch_size=batch_size, global_batch_size=batch_size, num_rollout=1, **flags
    )
    shards = to_train_batches(groups, config, TrainLayout(data_parallel_size=ranks), 0)
    assert len(shards) == ranks
    seen = {}
    for shard in shards:
        local = sorted(i for step in shard.steps for batch in step.micro_batches for i in batch)
        assert local == list(range(shard.num_samples))
        for i in range(shard.num_samples):
            seen[shard.sample_indices[i]] = shard.tokens[i].tolist()
            assert shard.loss_masks[i].numel() == shard.response_lengths[i]
        assert shard.global_stats == shards[0].global_stats
        assert [len(s.micro_batches) for s in shard.steps] == [
            len(s.micro_batches) for s in shards[0].steps
        ]
    assert seen == {sample.index: sample.tokens for group in groups for sample in group.samples}
    places = sorted(place for shard in shards for place in shard.positions)
    assert places == list(range(len(seen)))
    assert sum(shard.num_samples for shard in shards) == len(seen)
    executed = sum(step.global_batch_size for step in shards[0].steps)
    assert executed == len(seen), "no rollout is dropped, whatever the batch size"


@pytest.mark.parametrize(("ranks", "sizes"), [(1, [1] * 8), (2, [2] * 4), (4, [4, 4])])
def test_ranks_that_share_a_micro_batch_raise_its_cap(ranks: int, sizes: list[int]) -> None:
    """Eight samples of 7 tokens, and room for 7 on each rank of a context-parallel group."""
    groups = make_groups([1.0, 0.0] * 4)
    layout = TrainLayout(context_parallel_size=ranks)
    [batch] = convert(
        groups, layout, use_dynamic_batch_size=True, max_tokens_per_gpu=7, global_batch_size=8
    )
    assert [len(micro_batch) for step in batch.steps for micro_batch in step.micro_batches] == sizes


# -- hooks -----------------------------------------------------------------------------------------


@pytest.fixture
def hook_module(tmp_path, monkeypatch):
    def write(code: str) -> str:
        (tmp_path / "user_convert_hooks.py").write_text(code)
        monkeypatch.syspath_prepend(str(tmp_path))
        monkeypatch.delitem(__import__("sys").modules, "user_convert_hooks", raising=False)
        load_function.cache_clear()
        _module_of_file.cache_clear()
        return "user_convert_hooks.hook"

    yield write
    load_function.cache_clear()
    _module_of_file.cache_clear()


def test_reward_post_process_hook(hook_module) -> None:
    path = hook_module(
        "def hook(args, samples): return [7.0] * len(samples), [s.index * 2 for s in samples]"
    )
    batch = convert(make_groups([1.0, 0.0]), custom_reward_post_process_path=path)[0]
    assert (batch.raw_rewards, batch.rewards) == ([7.0, 7.0], [0.0, 2.0])


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ("[1.0]", "returned a list"),
        ("([1.0], [1.0])", "1 raw rewards and 1 rewards for 2 samples"),
        (
            "([1, 1], [1.0, float('nan')])",
            r"returned nan \(float\) as the reward of the sample with index 1",
        ),
    ],
)
def test_a_bad_reward_post_process_hook_is_refused(hook_module, body, message) -> None:
    path = hook_module(f"def hook(args, samples): return {body}")
    with pytest.raises(UserError, match=message):
        convert(make_groups([1.0, 0.0]), custom_reward_post_process_path=path)


@pytest.mark.parametrize(
    ("body", "warns"),
    [
        ("[s.reward - 0.5 for s in samples], [s.reward for s in samples]", True),
        ("[s.reward for s in samples], [s.reward - 0.5 for s in samples]", False),
        ("[s.reward for s in samples], [s.reward for s in samples]", False),
    ],
)
def test_rewards_in_the_wrong_order_are_told(hook_module, body: str, warns: bool) -> None:
    untold()
    path = hook_module(f"def hook(args, samples): return {body}")
    convert(make_groups([1.0, 0.0]), custom_reward_post_process_path=path)
    assert any("if they are swapped" in line for line in untold()) == warns


def test_a_custom_converter_needs_only_what_the_loss_needs(hook_module) -> None:
    path = hook_module(
        "def hook(args, samples):\n"
        "    return {'tokens': [s.tokens for s in samples], 'rewards': [0.25] * len(samples),\n"
        "            'response_lengths': [s.response_length for s in samples], 'raw_reward': [1, "
        "2]}"
    )
    batch = convert(make_groups([1.0, 0.0]), custom_convert_samples_to_train_data_path=path)[0]
    assert (batch.rewards, batch.raw_rewards, batch.rollout_mask_sums) == (
        [0.25, 0.25],
        [1, 2],
        [4.0, 4.0],
    )


def test_what_a_custom_converter_leaves_out_is_that_of_the_samples(hook_module) -> None:
    path = hook_module(
        "def hook(args, samples):\n"
        "    return {'tokens': [s.tokens for s in samples], 'rewards': [0.25] * len(samples),\n"
        "            'response_lengths': [s.response_length for s in samples]}"
    )
    groups = make_groups([1.0, 0.0, 0.5])
    removed, masked, cut = groups[0].samples
    removed.remove_sample = True
    masked.loss_mask, masked.index = [1] + [0] * (masked.response_length - 1), None
    cut.status = SampleStatus.TRUNCATED
    with_hook = convert(groups, custom_convert_samples_to_train_data_path=path)[0]
    without = convert(groups)[0]
    for name in ("loss_masks", "sample_indices", "truncated", "rollout_mask_sums", "metadata"):
        assert list(map(str, getattr(with_hook, name))) == list(map(str, getattr(without, name))), (
            name
        )


def test_a_status_that_there_is_not_is_refused_with_those_that_there_are() -> None:
    groups = make_groups([1.0, 0.0])
    groups[0].samples[0].status = "done"
    with pytest.raises(UserError, match=r"status 'done'.*\n.*pending, completed, truncated"):
        convert(groups)


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ("[]", "returned a list"),
        ("{'tokens': []}", "without response_lengths, rewards"),
        (
            "{'tokens': [[1]], 'rewards': [1], 'response_lengths': [1], 'lossmasks': [[1]]}",
            "lossmasks",
        ),
        ("{'tokens': [[1, 2]], 'rewards': [1, 2], 'response_lengths': [1]}", "rewards"),
        (
            "{'tokens': [[1, 2]], 'rewards': [1], 'response_lengths': [3]}",
            "sample 0 has 2 tokens, response_length 3",
        ),
        ("ok | {'weight_versions': [1]}", "weight_versions"),
        ("None", "returned None"),
        ("{'tokens': [], 'rewards': [], 'response_lengths': []}", "returned no samples, of 2"),
        (
            "{'tokens': [[1, 2]], 'rewards': 1.0, 'response_lengths': [1]}",
            "the float 1.0 as 'rewards'",
        ),
        ("ok | {'rewards': [None]}", r"None \(NoneType\) as 'rewards' of sample 0"),
        ("ok | {'rewards': ['1']}", r"'1' \(str\) as 'rewards' of sample 0"),
        ("ok | {'rewards': [float('nan')]}", r"nan \(float\) as 'rewards' of sample 0"),
        ("ok | {'raw_reward': [None]}", r"None \(NoneType\) as 'raw_reward' of sample 0"),
        ("ok | {'response_lengths': [1.0]}", "the float 1.0 as 'response_lengths' of sample 0"),
        ("ok | {'truncated': [None]}", "None as 'truncated' of sample 0"),
        ("ok | {'rollout_ids': [[1]]}", "a list of 1 as 'rollout_ids' of sample 0"),
        ("ok | {'metadata': ['x']}", "the str 'x' as 'metadata' of sample 0"),
        ("ok | {'tokens': ['ab']}", "'tokens' of sample 0 with no list"),
        ("ok | {'tokens': [[1, None]]}", "'tokens' of sample 0 with None among its tokens"),
        ("ok | {'tokens': [[1.0, 2.5]]}", "'tokens' of sample 0 with 1.0 among its tokens"),
        ("ok | {'tokens': [[1, -2]]}", "'tokens' of sample 0 with the token -2, and the model has"),
        (
            "ok | {'loss_masks': [[0.5]]}",
            "for sample 0 a loss_mask with values other than 0 and 1: 0.5",
        ),
        ("ok | {'rollout_log_probs': [[-1.0, -1.0]]}", "and a loss mask of 1, 2 rollout_log_probs"),
        ("ok | {'rollout_log_probs': [-1.0]}", "for sample 0 the float -1.0 as rollout_log_probs"),
        (
            "ok | {'rollout_log_probs': [[float('inf')]]}",
            "rollout_log_probs that are not finite: inf at position 0",
        ),
    ],
)
def test_a_bad_custom_converter_is_refused(hook_module, body, message) -> None:
    ok = "{'tokens': [[1, 2]], 'rewards': [1.0], 'response_lengths': [1]}"
    path = hook_module(f"ok = {ok}\ndef hook(args, samples): return {body}")
    with pytest.raises(FunctionFailed, match=message) as caught:
        convert(make_groups([1.0, 0.0]), custom_convert_samples_to_train_data_path=path)
    assert (
        f"'{path}' (--custom-convert-samples-to-train-data-path)" in caught.value.what
        and caught.value.fix
    )


def test_a_custom_converter_may_return_arrays(hook_module) -> None:
    path = hook_module(
        "import numpy as np, torch\n"
        "def hook(args, samples):\n"
        "    return {'tokens': [np.array(s.tokens) for s in samples], 'rewards': "
        "torch.tensor([0.5, -0.5]),\n"
        "            'response_lengths': np.array([s.response_length for s in samples]),\n"
        "            'loss_masks': [torch.ones(s.response_length) for s in samples],\n"
        "            'truncated': [False, 1]}"
    )
    batch = convert(make_groups([1.0, 0.0]), custom_convert_samples_to_train_data_path=path)[0]
    assert (batch.rewards, batch.rollout_mask_sums, batch.response_lengths) == (
        [0.5, -0.5],
        [4.0, 4.0],
        [4, 4],
    )


def test_tokens_beyond_the_models_vocabulary_are_refused(hook_module, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(config_of("qwen3", vocab_size=97)))
    body = (
        "def hook(args, samples): return {'tokens': [[1, %d]], 'rewards': [1.0], "
        "'response_lengths': [1]}"
    )
    with pytest.raises(FunctionFailed, match="the model has 97 tokens, from 0"):
        beyond = hook_module(body % 97)
        convert(
            make_groups([1.0]),
            custom_convert_samples_to_train_data_path=beyond,
            hf_checkpoint=str(tmp_path),
        )


@pytest.mark.parametrize(
    "field",
    [
        "multimodal_train_input_id",
    ],
)
def test_fields_that_training_would_ignore_are_refused_by_name(field: str) -> None:
    with pytest.raises(
        UserError,
        match=rf"mine.fn returned a sample \(index 3\) with {field}.*\n.*nothing reads it",
    ):
        Sample(index=3, **{field: []}).validate("mine.fn")  # type: ignore[arg-type]


# -- a critic on GPUs of its own -------------------------------------------------------------------


def test_the_critics_steps_have_the_samples_of_the_policys() -> None:
    """At another layout; a sample has the same place in both."""
    groups = [
        Group(
            i,
            [
                [
                    make_sample(
                        2 * i + part, 1.0, response=length, rollout_log_probs=[-1.0] * length
                    )
                    for part, length in enumerate((2 + i, 4))
                ]
            ],
        )
        for i in range(6)
    ]
    flags = {"rollout_batch_size": 6, "global_batch_size": 3, "use_dynamic_batch_size": True}
    config = make_config(num_rollout=1, max_tokens_per_gpu=20, **flags)
    critic = TrainLayout(data_parallel_size=2, context_parallel_size=2)
    policy, of_critic = to_batches_of_roles(groups, config, TrainLayout(3, critic=critic), 5)
    assert (len(policy), len(of_critic)) == (3, 2)

    def steps(shards: list[TrainBatch]) -> list[set[int]]:
        return [
            {
                shard.positions[i]
                for shard in shards
                for samples in shard.steps[number].micro_batches
                for i in samples
            }
            for number in range(len(shards[0].steps))
        ]

    assert len(steps(policy)) > 1 and steps(policy) == steps(of_critic)
    tokens = [
        {place: (own.tolist(), mask.tolist()) for shard in shards for place, own, mask in
         zip(shard.positions, shard.tokens, shard.loss_masks)}
        for shards in (policy, of_critic)
    ]  # fmt: skip
    assert tokens[0] == tokens[1]
    assert all(shard.rollout_log_probs is not None for shard in policy)
    assert all(shard.rollout_log_probs is None and not shard.payloads for shard in of_critic)
    assert to_batches_of_roles(groups, config, TrainLayout(), 5)[1] == []
