"""Facts about each ``--advantage-estimator``, from which conditions, checks and defaults of other
flags follow. `slime.algorithms.estimators` has the computation of each.
"""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from typing import Literal

#: Values of ``--advantage-estimator``.
EstimatorName = Literal[
    "grpo",
    "dr_grpo",
    "gspo",
    "cispo",
    "sapo",
    "rloo",
    "maxrl",
    "reinforce_plus_plus",
    "reinforce_plus_plus_baseline",
    "ppo",
]


@dataclass(frozen=True, kw_only=True)
class EstimatorFacts:
    """Which flags affect an estimator, and what it needs. No fact has a default.

    Attributes:
        group_relative: a reward counts relative to the other samples of its prompt.
        std_normalized: centred rewards are divided by the standard deviation of their group.
        reuses_train_logprobs: with one optimizer step per rollout, the training pass's log-probs
            may serve as the old policy's, which saves a forward pass.
        takes_token_kl: ``--kl-coef`` acts: the KL to the reference is part of each token's reward.
        discounts: ``--gamma`` acts.
        needs_whitening: advantages have to be normalised over the batch
            (``--normalize-advantages``).
        clips_ratio: ``--eps-clip`` and ``--eps-clip-high`` act.
        dual_clip: ``--eps-clip-c`` acts.
        clips_weight: ``--eps-clip`` bounds the importance weight instead of the loss (only from
            above in the paper).
        averages_group: the loss is a mean over groups of means over their trained tokens, instead
            of a mean over trajectories of means over theirs. ``--calculate-per-token-loss``
            overrides both.
        sums_tokens: a trajectory's summed token losses are divided by
            ``--rollout-max-response-len`` instead of by the trajectory's length.
        needs_critic: advantages are computed from the values of a critic, a second trained model.
    """

    name: EstimatorName
    group_relative: bool
    std_normalized: bool
    reuses_train_logprobs: bool
    takes_token_kl: bool
    discounts: bool
    needs_whitening: bool
    clips_ratio: bool
    dual_clip: bool
    clips_weight: bool
    averages_group: bool
    sums_tokens: bool
    needs_critic: bool


_GRPO = EstimatorFacts(
    name="grpo",
    group_relative=True,
    std_normalized=True,
    reuses_train_logprobs=True,
    takes_token_kl=False,
    discounts=False,
    needs_whitening=False,
    clips_ratio=True,
    dual_clip=True,
    clips_weight=False,
    averages_group=False,
    sums_tokens=False,
    needs_critic=False,
)
_REINFORCE_PLUS_PLUS = replace(
    _GRPO,
    name="reinforce_plus_plus",
    group_relative=False,
    std_normalized=False,
    takes_token_kl=True,
    discounts=True,
    needs_whitening=True,
)

#: Estimator → its facts, many of them as differences from another estimator.
FACTS: dict[str, EstimatorFacts] = {
    facts.name: facts
    for facts in (
        _GRPO,
        replace(_GRPO, name="dr_grpo", std_normalized=False, sums_tokens=True),
        replace(_GRPO, name="gspo", reuses_train_logprobs=False),
        replace(_GRPO, name="cispo", dual_clip=False, clips_weight=True, averages_group=True),
        replace(_GRPO, name="sapo", clips_ratio=False, dual_clip=False),
        replace(_GRPO, name="rloo", std_normalized=False),
        replace(_GRPO, name="maxrl", std_normalized=False),
        _REINFORCE_PLUS_PLUS,
        replace(
            _REINFORCE_PLUS_PLUS,
            name="reinforce_plus_plus_baseline",
            group_relative=True,
            discounts=False,
        ),
        replace(_REINFORCE_PLUS_PLUS, name="ppo", needs_whitening=False, needs_critic=True),
    )
}


def estimators_where(fact: str, is_so: bool = True) -> tuple[str, ...]:
    """Return the names of the estimators whose ``fact`` equals ``is_so``.

    Example:
        >>> estimators_where("discounts")
        ('reinforce_plus_plus', 'ppo')
    """
    assert fact in {field.name for field in fields(EstimatorFacts)}, fact
    return tuple(name for name, facts in FACTS.items() if getattr(facts, fact) is is_so)
