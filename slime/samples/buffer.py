"""The buffer of groups that were put back: aborted groups to finish, and surplus finished ones."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

from slime.samples.types import Sample
from slime.user_code.loading import FunctionFailed, described, shown

#: (args, rollout_id, buffer, num_samples) → the groups taken; see
#: `slime.user_code.hooks.BufferFilter`.
Select = Callable[[Any, int | None, list[list[Sample]], int], list[list[Sample]]]


def pop_first(
    args: Any, rollout_id: int | None, buffer: list[list[Sample]], num_samples: int
) -> list[list[Sample]]:
    """Take the oldest groups first; the default ``--buffer-filter-path``."""
    taken = buffer[:num_samples]
    del buffer[: len(taken)]
    return taken


def _identity(group: list[Sample]) -> tuple[Any, ...]:
    """Return the indices of a group and of its samples."""
    return (
        *(getattr(sample, "group_index", None) for sample in group[:1]),
        *(getattr(sample, "index", None) for sample in group),
    )


class SampleBuffer:
    """First in, first out, unless a buffer filter chooses otherwise.

    Args:
        args: passed to the filter.
        select: the filter; it must remove the groups that it returns from the buffer.
        name: names the filter in messages.

    Attributes:
        groups: the waiting groups, oldest first.

    Example:
        >>> buffer = SampleBuffer()
        >>> buffer.add([[Sample(index=0)], [Sample(index=1)]])
        >>> [group[0].index for group in buffer.take(1)], len(buffer)
        ([0], 1)
    """

    def __init__(
        self, args: Any = None, select: Select = pop_first, name: str = "the buffer filter"
    ) -> None:
        self._args = args
        self.choose = select
        self._name = name
        self.groups: list[list[Sample]] = []

    def __len__(self) -> int:
        return len(self.groups)

    def add(self, groups: list[list[Sample]]) -> None:
        self.groups.extend(group for group in groups if group)

    def take(self, count: int, rollout_id: int | None = None) -> list[list[Sample]]:
        """Take at most ``count`` groups out of the buffer.

        Raises:
            FunctionFailed: the filter did not return a list of groups, or others than those that
                it removed from the buffer, or more than requested.
        """
        if not self.groups or count <= 0:
            return []
        before = {id(group): _identity(group) for group in self.groups}
        kept = self.groups[:]  # so that no identity is used again
        taken = self.choose(self._args, rollout_id, self.groups, count)
        if not isinstance(taken, list) or not all(isinstance(group, list) for group in taken):
            raise FunctionFailed(
                f"{self._name} returned {described(taken)}", fix="return a list of groups"
            )
        fix = (
            "return at most num_samples groups, and delete each of them, and no other, from the "
            "list it was given"
        )
        left = Counter(map(id, self.groups))
        removed = len(kept) - len(left)
        if len(taken) > count or removed != len(taken):
            raise FunctionFailed(
                f"{self._name} returned {len(taken)} groups of {count} asked for and removed "
                f"{removed} from the buffer",
                why="groups that are removed and not returned would be lost"
                if removed > len(taken)
                else "",
                fix=fix,
            )
        gone = [before[id(group)] for group in kept if id(group) not in left]
        if left.keys() - before.keys() or Counter(map(_identity, taken)) != Counter(gone):
            raise FunctionFailed(
                f"{self._name} returned other groups than those that it removed from the buffer",
                why=f"removed: {shown(gone)}, returned: {shown(list(map(_identity, taken)))} "
                "(group_index, and index of each sample)",
                fix=fix,
            )
        return taken

    @property
    def group_indices(self) -> set[int]:
        """Indices of the waiting groups."""
        return {group[0].group_index for group in self.groups if group[0].group_index is not None}

    def state_dict(self) -> list[list[dict[str, Any]]]:
        return [[sample.to_dict() for sample in group] for group in self.groups]

    def load_state_dict(self, state: list[list[dict[str, Any]]]) -> None:
        self.groups = [[Sample.from_dict(sample) for sample in group] for group in state]
