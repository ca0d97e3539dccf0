"""Rewards: built-in graders by ``--rm-type``, users' functions by ``--custom-rm-path``, both behind `RewardPool`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from slime.rollout.rewards.pool import RewardPool

__all__ = ["RewardPool"]


def __getattr__(name: str) -> Any:  # worker processes import this package too and need none of the pool
    if name == "RewardPool":
        from slime.rollout.rewards.pool import RewardPool

        return RewardPool
    raise AttributeError(name)
