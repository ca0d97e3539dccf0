"""The models that a trainer holds: one `Role` each.

    role        learns                   is_pushed   is_saved
    policy      with the --loss-type     yes         yes
    reference   no                       no          once it differs from --ref-load
    critic      with the value loss      no          yes
    teacher …   no                       no          no

A critic on GPUs of its own is held by other processes (`slime.trainer.megatron.critic_process`).

A model that only scores and has the policy's architecture is one more row here, a
`slime.trainer.update.Scorer` and a field of `RolloutTensors` for its column: frozen models are
weights swapped into the policy's chunks. A model with another head or one that learns also needs
model chunks and an optimizer of its own, as the critic has (`slime.trainer.megatron.critic`).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

from slime.checkpoints.load_plan import LoadPlan, resolve_reference, resolve_teacher
from slime.config.config import Config
from slime.config.teachers import BASE, SELF
from slime.trainer.loss import LOSS_TYPES, VALUE_LOSS, LossType

POLICY = "policy"
REFERENCE = "reference"
CRITIC = "critic"


@dataclass(frozen=True, kw_only=True)
class Role:
    """One model that the trainer holds.

    Attributes:
        name: its key in all tables by role.
        loss: the loss with which it is trained; None if it only scores.
        is_pushed: whether engines generate with its weights.
        is_saved: whether checkpoints hold its weights. A frozen model is omitted while it has the
            weights with which the run was started.
        source: finds a frozen model's weights if no checkpoint of the run holds them; None if the
            model learns.
    """

    name: str
    loss: LossType | None
    is_pushed: bool
    is_saved: bool
    source: Callable[[Config], LoadPlan] | None = None

    @property
    def learns(self) -> bool:
        """Tell whether the model has gradients and an optimizer."""
        return self.loss is not None


def roles_of(config: Config) -> dict[str, Role]:
    """Return the models that the policy's ranks hold with these flags, by name, starting with the
    policy."""
    held = [Role(name=POLICY, loss=policy_loss(config), is_pushed=True, is_saved=True)]
    if config.algorithm.needs_reference:
        held.append(
            Role(
                name=REFERENCE, loss=None, is_pushed=False, is_saved=True, source=resolve_reference
            )
        )
    if config.algorithm.needs_critic and not config.critic.has_own_gpus:
        held.append(Role(name=CRITIC, loss=VALUE_LOSS, is_pushed=False, is_saved=True))
    held += [
        Role(
            name=teacher_role(teacher.name),
            loss=None,
            is_pushed=False,
            is_saved=False,
            source=partial(resolve_teacher, teacher=teacher),
        )
        for teacher in config.distillation.teachers
        if teacher.source not in (SELF, BASE)
    ]
    return {role.name: role for role in held}


def teacher_role(name: str) -> str:
    """Return the role name of a teacher that has its own weights."""
    return f"teacher {name}"


def policy_loss(config: Config) -> LossType:
    """Return the loss with which the policy is trained."""
    return LOSS_TYPES[config.algorithm.loss_type]
