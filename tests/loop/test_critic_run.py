"""PPO with a critic on GPUs or with a layout of its own, as whole runs."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from slime.cluster.waiting import ActorDied
from slime.errors import UserError
from tests.support.runs import GRPO, Run, RunResult

pytestmark = pytest.mark.slow

PPO = (
    *("--colocate", "--advantage-estimator", "ppo", "--critic-lr", "0.002", "--kl-coef", "0.05"),
    *("--num-rollout", 4, "--save-interval", 1),
)
APART = ("--critic-num-gpus-per-node", 1)
_DIES = ("--custom-megatron-init-path", "tests.support.hold.critic_dies_once")


@pytest.mark.parametrize(
    "more", [(), pytest.param(("--lora-rank", 4), marks=pytest.mark.full)], ids=["all", "adapters"]
)
def test_a_critic_of_its_own_that_dies_changes_no_number(
    more: tuple[Any, ...], run: Run, deterministic: Any, outputs: Path
) -> None:
    """At the policy's layout, bit for bit; the trainer restarts as it does for the policy's
    ranks. A critic with its own layout on the policy's GPUs trains alike on the same samples."""
    kind = "adapters" if more else "all"
    shared = run(f"critic-shared-{kind}", *deterministic(f"critic-shared-{kind}"), *PPO, *more)
    sign = outputs / "die-critic-2"
    sign.touch()
    name = f"critic-apart-{kind}"
    saved = outputs / f"critic-ckpt-{kind}"
    flags = [*deterministic(name), *PPO, *more, *APART, "--save", saved]
    apart = run(name, *flags, *_DIES, "--max-restarts", 1)
    assert not sign.exists() and not (saved / ".critic").exists()
    for rollout_id in range(4):
        assert apart.tokens(rollout_id) == shared.tokens(rollout_id)
    for ours, theirs in zip(apart.steps().values(), shared.steps().values(), strict=True):
        assert ours["train/critic-value_loss"] > 0
        for metric, value in theirs.items():
            if metric.startswith(("train/", "rollout/")) and "version" not in metric:
                assert ours[metric] == value, metric
    if not more:
        dumps = outputs / f"critic-shared-{kind}" / "dumps" / "{rollout_id}.pt"
        _trains_alike_with_its_own_layout(run, shared, dumps)


def _trains_alike_with_its_own_layout(run: Run, shared: RunResult, dumps: Path) -> None:
    """Let a critic that is not divided, on the GPUs of a policy that is, train on the samples of
    another run; both must give the same numbers."""
    replay = ("--load-debug-rollout-data", dumps, "--actor-num-gpus-per-node", 2)
    layout = ("--tensor-model-parallel-size", 2, "--critic-tensor-model-parallel-size", 1)
    saved = ("--save", dumps.parents[2] / "critic-divided-ckpt")
    divided = run("critic-divided", *GRPO, *PPO, *replay, *layout, *saved)
    for step, theirs in shared.steps().items():
        ours = divided.steps()[step]
        for metric, value in theirs.items():
            if metric.startswith("train/critic-") and "skipped" not in metric:
                assert ours[metric] == pytest.approx(value, rel=1e-3, abs=1e-5), metric


@pytest.mark.full
def test_without_restarts_the_error_names_it(run: Run, deterministic: Any, outputs: Path) -> None:
    (outputs / "die-critic-1").touch()
    with pytest.raises(ActorDied, match=r"critic-0 \(pid \d+ on [^)]*\) died \(training\)"):
        save = ("--save", outputs / "dies-ckpt")
        run("critic-dies", *deterministic("critic-dies"), *PPO, *APART, *save, *_DIES)


def test_what_does_not_fit_is_refused_at_once(run: Run, deterministic: Any) -> None:
    flags = [*deterministic("refused"), *PPO, "--critic-num-gpus-per-node", 3]
    with pytest.raises(UserError, match="3 critic GPUs cannot be divided by 2"):
        run("refused", *flags, "--critic-tensor-model-parallel-size", 2)
    with pytest.raises(UserError, match="--critic-tensor-model-parallel-size 3 does not fit"):
        run("refused", *flags, "--critic-tensor-model-parallel-size", 3)
