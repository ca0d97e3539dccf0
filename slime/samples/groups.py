"""From what users' rollout functions return to `Group`s."""

from __future__ import annotations

from typing import Any

from slime.errors import UserError
from slime.samples.sample_fields import kind_problem
from slime.samples.types import Group, Sample
from slime.user_code.loading import FunctionFailed, described


def groups_from_nested(nested: list[Any], origin: str = "the rollout function") -> list[Group]:
    """Groups from ``list[group][Sample]`` or, with fan-out, ``list[group][trajectory][Sample]``
    (Groups pass through).

    Samples of one group that share a ``rollout_id`` are one trajectory; in the three-level form
    they must have one.

    Example:
        >>> a, b, c = Sample(index=0), Sample(index=1, rollout_id=7), Sample(index=1, rollout_id=7)
        >>> groups_from_nested([[a, b, c]])[0].num_trajectories
        2

    Raises:
        UserError: an entry that is neither, or siblings of one trajectory without a common
            ``rollout_id``.
    """
    if not isinstance(nested, (list, tuple)):
        raise FunctionFailed(
            f"{origin} returned {described(nested)} as its samples", fix="return list[list[Sample]]"
        )
    groups = []
    for position, entry in enumerate(nested):
        if isinstance(entry, Group):
            groups.append(entry)
            continue
        trajectories: dict[Any, list[Sample]] = {}
        for item in entry if isinstance(entry, list) else [entry]:
            samples = item if isinstance(item, list) else [item]
            if not all(isinstance(sample, Sample) for sample in samples):
                raise UserError(
                    f"{origin} returned something other than samples",
                    fix="return list[list[Sample]]",
                )
            for sample in samples:
                if (problem := kind_problem(sample)) is not None:
                    what = f"{origin} returned a sample (index {sample.index}) with {problem[0]}"
                    raise FunctionFailed(what, fix=problem[1])
            ids = {sample.rollout_id for sample in samples}
            if isinstance(item, list) and (None in ids or len(ids) > 1):
                given = ", ".join(sorted(map(str, ids)))
                raise UserError(
                    f"{origin} returned a trajectory of {len(samples)} samples with rollout_id "
                    f"{given}",
                    why="samples that one trajectory fanned out into are counted and averaged "
                    "together",
                    fix="set the same sample.rollout_id on each of them",
                )
            for sample in samples:
                key = id(sample) if sample.rollout_id is None else ("rollout_id", sample.rollout_id)
                trajectories.setdefault(key, []).append(sample)
        first = next(
            (sample for trajectory in trajectories.values() for sample in trajectory), None
        )
        if first is not None:
            index = position if first.group_index is None else first.group_index
            groups.append(Group(index, list(trajectories.values())))
    return groups
