"""The group about the critic, the model that PPO trains beside the policy."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from slime.config.estimators import estimators_where
from slime.config.flag import FRACTION, NONE_OR_SOME, Interval, Part, derived, finite, flag, on

_CRITIC = on(
    "advantage_estimator",
    *estimators_where("needs_critic"),
    why="the other estimators have no critic",
)


@dataclass(frozen=True, kw_only=True)
class CriticConfig:
    """The critic of --advantage-estimator ppo: the policy's architecture with one output per token
    in place of the vocabulary. Policy and critic take turns in the trainer's processes, at the same
    layout, and are saved in the same checkpoints."""

    READ_BY: ClassVar[tuple[Part, ...]] = ("training",)

    critic_load: str | None = flag(None, needs=_CRITIC, read_by="trainer")
    """Weights that the critic starts from, in place of those that the policy starts from: a Hugging
    Face directory, or a checkpoint directory, whose critic is taken if it has one. A run that goes
    on takes the critic of its own checkpoint."""
    critic_lr: float = derived("lr", range=finite(0), needs=_CRITIC)
    """Learning rate of the critic; about ten times that of the policy is usual. The value loss has
    no factor of ½."""
    critic_lr_warmup_iters: int = derived("lr_warmup_iters", range=NONE_OR_SOME, needs=_CRITIC)
    """Optimizer steps of linear warm-up of the critic's learning rate."""
    num_critic_only_steps: int = flag(0, range=NONE_OR_SOME, needs=_CRITIC)
    """Train the critic alone on the run's first so many rollouts; the policy stays as it is."""
    lambd: float = flag(1.0, range=FRACTION, needs=_CRITIC)
    """Lambda of generalised advantage estimation, per trained token. At 0.95 a reward hardly
    reaches what was written 100 tokens before it."""
    critic_lambd: float = derived("lambd", range=FRACTION, needs=_CRITIC)
    """Lambda of the returns that the critic learns; 1 has no bias (VC-PPO, arXiv:2503.01491)."""
    value_clip: float = flag(
        0.2,
        range=Interval(0, above=True, what="a distance from the value before the update"),
        needs=_CRITIC,
    )
    """Clip range of the value loss, in the unit of the rewards; with --normalize-values in standard
    deviations of the returns."""
    normalize_values: bool = flag(False, needs=_CRITIC)
    """Let the critic learn returns of mean 0 and deviation 1, by running statistics that its
    checkpoints hold: for rewards that are not of size 1."""
