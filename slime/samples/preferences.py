"""Checks of samples for preference learning: complete pairs, and labels of both kinds."""

from __future__ import annotations

from collections.abc import Sequence

from slime.config.preferences import PreferenceFacts
from slime.errors import UserError
from slime.samples.batch import CHOSEN, MISMATCHED, REJECTED


def check_preferences(
    trajectory_ids: Sequence[int], rewards: Sequence[float], facts: PreferenceFacts
) -> None:
    """Check by the rewards that each trajectory is a pair, or an answer and its mismatched one.

    Raises:
        UserError: a trajectory is neither, e.g. because it comes from a dump or a user's converter.
    """
    labels = (CHOSEN, REJECTED)
    second = labels if facts.takes_pairs else (MISMATCHED,)
    found: dict[int, list[float]] = {}
    for trajectory, reward in zip(trajectory_ids, rewards, strict=True):
        found.setdefault(trajectory, []).append(reward)
    for trajectory, of_trajectory in found.items():
        is_pair = len(of_trajectory) == 2 == len(set(of_trajectory))
        if not is_pair or of_trajectory[0] not in labels or of_trajectory[1] not in second:
            told = "one of 1 and one of -1"
            if not facts.takes_pairs:
                told = "one of 1 or -1, then one of 0"
            raise UserError(
                f"trajectory {trajectory} of the rollout does not suit --preference-"
                f"loss {facts.name}: its samples have the rewards {of_trajectory}",
                why=f"the rewards are the labels: a trajectory has two samples, {told}",
                fix="load samples that a run with this --preference-loss has written, or leave "
                "--custom-convert-samples-to-train-data-path out",
            )


def mismatched_positions(rewards: Sequence[float]) -> list[int]:
    """Return the positions of the samples that are only scored."""
    return [position for position, reward in enumerate(rewards) if reward == MISMATCHED]
