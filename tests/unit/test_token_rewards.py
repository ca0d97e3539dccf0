"""Reward functions that return a list: rewards of tokens, or of turns."""

from __future__ import annotations

import asyncio
import doctest
import math
from typing import Any

import numpy as np
import pytest
import torch

from slime.config import make_config
from slime.errors import UserError
from slime.rollout.rewards.pool import RewardPool
from slime.samples import token_rewards
from slime.samples.batch import TrainLayout
from slime.samples.convert import to_train_batches
from slime.samples.types import Group, Sample, SampleStatus
from slime.trainer import update
from slime.user_code.loading import FunctionFailed
from tests.support.trainers import trainer

RETURNED: Any = None
MASK = [1, 1, 0, 0, 1]


def rewards(args: Any, sample: Sample, **_: Any) -> Any:
    return RETURNED if sample.index == 0 else 0.25


def answered(index: int) -> Sample:
    return Sample(
        index=index,
        group_index=0,
        prompt="p",
        tokens=[1, 2, 3, 4, 5, 6, 7],
        response="xxxxx",
        response_length=5,
        loss_mask=list(MASK),
        status=SampleStatus.COMPLETED,
    )


def config(**flags: Any) -> Any:
    own = {"custom_rm_path": f"{__name__}.rewards", "rollout_batch_size": 1, "fp32": True}
    return make_config(**{**own, "n_samples_per_prompt": 2, **flags})


def scored(returned: Any, monkeypatch: pytest.MonkeyPatch) -> list[Sample]:
    monkeypatch.setattr(f"{__name__}.RETURNED", returned)
    made = config(advantage_estimator="ppo")
    pool = RewardPool(made, made.flat())
    samples = [answered(index) for index in range(2)]
    for sample in samples:
        sample.reward = asyncio.run(pool.score(sample))
    return samples


def test_worked_examples() -> None:
    assert doctest.testmod(token_rewards).failed == 0


@pytest.mark.parametrize(
    "returned",
    [[0.5, 2.0], (0.5, 2), np.array([0.5, 2.0]), torch.tensor([0.0, 0.5, 0.0, 0.0, 2.0])],
)
def test_turns_and_tokens_become_rewards_of_tokens(
    returned: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    first, second = scored(returned, monkeypatch)
    assert first.reward == 2.5 and first.token_rewards == [0.0, 0.5, 0.0, 0.0, 2.0]
    assert second.reward == 0.25 and second.token_rewards is None
    first.validate("test")


@pytest.mark.parametrize(
    ("returned", "told"),
    [
        ([1.0, 2.0, 3.0], "5 response tokens in 2 turns"),
        ([0.0, 0.0, 1.0, 0.0, 0.0], "token 2 of the response"),
        ([1.0, float("nan")], "a part of the reward"),
        ([1.0, "much"], "a part of the reward"),
    ],
)
def test_lists_that_fit_nothing_are_refused(
    returned: Any, told: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(FunctionFailed) as caught:
        scored(returned, monkeypatch)
    assert told in str(caught.value) and "sample 0" in str(caught.value)


@pytest.mark.parametrize(
    ("given", "told"),
    [
        (None, ""),
        ([1.0, 0, -2.5], ""),
        ((1.0, 0.0, 1.0), "not a list"),
        (1.0, "not a list"),
        ([1.0] * 4, "not a list"),
        ([1.0, math.nan, 0.0], "not all finite"),
        ([1.0, math.inf, 0.0], "not all finite"),
        ([1.0, 1e39, 0.0], "not all finite"),  # infinite in float32
        (["1", 1.0, 0.0], "not all finite"),
    ],
    ids=str,
)
def test_rewards_that_users_set_are_checked(given: Any, told: str) -> None:
    found = token_rewards.token_rewards_problem(given, 3)
    assert told in found and bool(found) == bool(told)


@pytest.mark.parametrize("given", [[0.5], [1.0] * 6, [1.0, 0.0, math.inf, 0.0, 0.0]], ids=str)
def test_rewards_that_users_set_belong_to_the_response(given: list[float]) -> None:
    samples = [answered(index) for index in range(2)]
    for sample in samples:
        sample.reward = 1.0
    samples[1].token_rewards = given
    group = Group(0, [[sample] for sample in samples])
    with pytest.raises(UserError, match="index 1 has token_rewards"):
        to_train_batches([group], config(advantage_estimator="ppo"), TrainLayout(), 0)


def test_each_token_gets_its_own_reward_in_training(monkeypatch: pytest.MonkeyPatch) -> None:
    """γ = λ = 1 and V = 0: the return of a token is what is still to come, for the second sample
    all of its reward."""
    samples = scored([0.5, 2.0], monkeypatch)
    made = config(advantage_estimator="ppo")
    [batch] = to_train_batches([Group(0, [[s] for s in samples])], made, TrainLayout(), 0)
    assert batch.rewards == [2.5, 0.25]
    backend = trainer(advantage_estimator="ppo", rollout_batch_size=2)
    try:
        data = update._initial_tensors(backend, batch)
        data.values = [torch.zeros(5) for _ in samples]
        update.compute_advantages(backend, batch, data)
    finally:
        backend.close()
    assert data.returns is not None
    found = {index: returns.tolist() for index, returns in zip(batch.sample_indices, data.returns)}
    assert found == {0: [2.5, 2.5, 0.0, 0.0, 2.0], 1: [0.25, 0.25, 0.0, 0.0, 0.25]}
