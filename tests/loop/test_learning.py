"""The loop learns: in lock step, one batch ahead, and from demonstrations; trainer and engine agree
on log-probs."""

from __future__ import annotations

from typing import Any

import pytest

from tests.support.runs import GRPO, Run, RunResult

MISMATCH = "train/train_rollout_logprob_abs_diff"
TOLERANCE = 1e-4  # float32, absolute, per token
KL = ("--use-kl-loss", "--kl-loss-coef", "0.01", "--kl-loss-type", "k3")
# what is learned when differs by the order in which answers end: 12 and 14 were too few once
STEPS, ASYNC_STEPS = 16, 30


@pytest.fixture(scope="module")
def lock_step(run: Run) -> RunResult:
    return run("learn", *GRPO, *KL, "--colocate", "--num-rollout", STEPS)


@pytest.fixture(scope="module")
def one_ahead(run: Run) -> RunResult:
    """In bfloat16, the default precision."""
    return run("learn-async", *GRPO, "--bf16", "--num-rollout", ASYNC_STEPS, driver="train_async")


#: What else must not disturb the agreement, one thing per family.
SAMPLING = {
    "llama": ["--rollout-temperature", "0.7"],
    "qwen2": ["--rollout-top-p", "0.8", "--rollout-top-k", 10],
    "qwen3": ["--num-steps-per-rollout", 2],
    "qwen3_moe": [],
    "glm4": [],
    "glm4_moe": [],
    "deepseek_v3": ["--rollout-temperature", "0.7"],
    "gpt_oss": [],
}


# In `make test` the learning run above shows the same for one family, and tests/unit/test_parity.py
# for each.
@pytest.fixture(
    scope="module", params=[pytest.param(family, marks=pytest.mark.full) for family in SAMPLING]
)
def family(request: pytest.FixtureRequest, run: Run) -> RunResult:
    """Two rollouts of each model family, with the KL to the reference in the loss."""
    flags = ["--colocate", *KL, "--num-rollout", 2]
    flags += ["--custom-rm-path", "tests.support.toy.distinct_share"]
    return run(
        f"family-{request.param}", *GRPO, *flags, *SAMPLING[request.param], model=request.param
    )


def test_reward_rises_in_lock_step(lock_step: RunResult) -> None:
    rewards = lock_step.series("rollout/raw_reward")
    assert len(rewards) == STEPS
    assert sum(rewards[-3:]) / 3 > sum(rewards[:3]) / 3 + 0.3, rewards


def test_reward_rises_one_batch_ahead(one_ahead: RunResult) -> None:
    rewards = one_ahead.series("rollout/raw_reward")
    assert len(rewards) == ASYNC_STEPS
    assert sum(rewards[-3:]) / 3 > sum(rewards[:3]) / 3 + 0.3, rewards


def test_staleness(lock_step: RunResult, one_ahead: RunResult) -> None:
    assert lock_step.series("rollout/staleness/max") == [0.0] * STEPS
    # the first batch has nothing before it; each later one is generated while the one before it is
    # trained on
    assert one_ahead.series("rollout/staleness/mean") == [0.0] + [1.0] * (ASYNC_STEPS - 1)
    assert one_ahead.series("rollout/staleness/max") == [0.0] + [1.0] * (ASYNC_STEPS - 1)


#: Adapters of the output layer too: without them all logits of a random model stay nearly equal.
ADAPTERS = ("--lora-rank", 8, "--lora-target-modules", "all-linear", "lm_head")


@pytest.mark.parametrize(
    ("name", "model", "flags"),
    [
        # whole runs with a critic: test_critic_run.py
        pytest.param("learn-ppo", "qwen3", (), marks=pytest.mark.full),
        pytest.param("learn-ppo-adapters", "llama", ADAPTERS, marks=pytest.mark.full),
    ],
    ids=["all layers", "adapters"],
)
def test_reward_rises_with_a_critic(
    name: str, model: str, flags: tuple[Any, ...], run: Run
) -> None:
    """How much of the returns it explains is in tests/unit/test_critic.py: here they change with
    the policy."""
    result = run(
        name,
        *GRPO,
        *("--colocate", "--advantage-estimator", "ppo", "--critic-lr", "0.002", *flags),
        *("--num-critic-only-steps", 2, "--num-rollout", 16),
        model=model,
    )
    assert len(result.series("train/critic-explained_variance")) == 16
    assert len(result.series("train/loss")) == 14
    rewards = result.series("rollout/raw_reward")
    assert sum(rewards[-3:]) / 3 > sum(rewards[:3]) / 3 + 0.3, rewards


def test_sft_loss_falls(run: Run) -> None:
    flags = [
        "--loss-type", "sft_loss", "--num-rollout", 8, "--rollout-batch-size", 16,
        "--num-steps-per-rollout", 2
    ]  # fmt: skip
    losses = run("sft", *flags, "--colocate").series("train/loss")
    assert len(losses) == 8
    assert losses[-1] < 0.5 * losses[0], losses


def test_trainer_and_engine_agree_on_every_token(family: RunResult) -> None:
    largest, mean = family.series(f"{MISMATCH}_max"), family.series(MISMATCH)
    assert len(largest) == len(mean) == 2
    assert all(0 < m <= worst <= TOLERANCE for m, worst in zip(mean, largest)), (mean, largest)


#: One optimizer step, so that all of it is compared with the weights that generated.
REPLAY = [
    "--use-rollout-routing-replay",
    "--colocate",
    "--num-rollout",
    2,
    *("--custom-rm-path", "tests.support.toy.distinct_share"),
]


@pytest.mark.full
@pytest.mark.parametrize("family", ["qwen3_moe", "deepseek_v3", "gpt_oss"])
def test_they_agree_with_the_engines_experts(run: Run, family: str) -> None:
    """In samples of two turns that end with the answer of a tool, which no engine computed."""
    flags = [*REPLAY, "--custom-generate-function-path", "tests.support.toy.with_a_tool"]
    largest = run(f"replay-{family}", *GRPO, *flags, model=family).series(f"{MISMATCH}_max")
    assert len(largest) == 2 and 0 < max(largest) <= TOLERANCE, largest


@pytest.mark.full
def test_the_experts_that_samples_bring_are_those_that_are_used(run: Run) -> None:
    flags = [*REPLAY, "--custom-generate-function-path", "tests.support.toy.with_other_experts"]
    largest = run("replay-others", *GRPO, *flags, model="qwen3_moe").series(f"{MISMATCH}_max")
    assert min(largest) > TOLERANCE, largest


def test_they_agree_during_the_whole_run(lock_step: RunResult, one_ahead: RunResult) -> None:
    assert 0 < max(lock_step.series(f"{MISMATCH}_max")) <= TOLERANCE
    assert one_ahead.series(MISMATCH)[0] < 0.01, (
        "bfloat16 on both sides, before any sample is stale"
    )


def test_no_kl_to_the_reference_before_the_first_step(lock_step: RunResult) -> None:
    no_kl_at_first(lock_step)


def test_nor_in_any_family(family: RunResult) -> None:
    no_kl_at_first(family)


def no_kl_at_first(result: RunResult) -> None:
    """Of two steps per rollout the metric is the mean, in which the second one counts."""
    first, second = result.series("train/kl_loss")[:2]
    assert second > 0.0
    assert first == 0.0 or result.series("rollout/num_steps")[:2] == [2, 2]
    assert result.series("rollout/log_probs")[0] == result.series("rollout/ref_log_probs")[0]
