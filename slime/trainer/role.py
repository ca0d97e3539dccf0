"""The models that a trainer holds: one `Role` each.

    role        head        learns                   is_pushed   is_saved
    policy      log_probs   with the --loss-type     yes         yes
    reference   log_probs   no                       no          once it differs from --ref-load

A further model (critic, teacher, reward model) is one more row here, a loss if it learns, and a
`slime.trainer.update.Scorer` for the column that it adds to a rollout.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from slime.config.config import Config
from slime.trainer.loss import LOSS_TYPES, LossType

POLICY = "policy"
REFERENCE = "reference"


@dataclass(frozen=True, kw_only=True)
class Role:
    """One model that the trainer holds.

    Attributes:
        name: its key wherever models are kept by role.
        head: what its last layer says of each response token.
        loss: what it is trained with; None if it only scores.
        is_pushed: engines generate with its weights.
        is_saved: checkpoints hold its weights. Those of a model that does not learn are left out
            as long as they are the ones that the run was started with.
    """

    name: str
    head: Literal["log_probs"]
    loss: LossType | None
    is_pushed: bool
    is_saved: bool

    @property
    def learns(self) -> bool:
        """Whether the model has gradients and an optimizer."""
        return self.loss is not None


def roles_of(config: Config) -> dict[str, Role]:
    """Return the models that a run with these flags needs, by name; the policy comes first."""
    policy = Role(
        name=POLICY,
        head="log_probs",
        loss=LOSS_TYPES[config.algorithm.loss_type],
        is_pushed=True,
        is_saved=True,
    )
    reference = Role(name=REFERENCE, head="log_probs", loss=None, is_pushed=False, is_saved=True)
    held = [policy, reference] if config.algorithm.needs_reference else [policy]
    return {role.name: role for role in held}


def policy_loss(config: Config) -> LossType:
    """Return the loss that the policy is trained with."""
    loss = roles_of(config)[POLICY].loss
    assert loss is not None
    return loss
