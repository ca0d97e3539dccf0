"""The buffer of groups that were put back: aborted groups to finish, and surplus finished ones."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from slime.samples.types import Sample
from slime.user_code.loading import FunctionFailed, described

#: (args, rollout_id, buffer, num_samples) → the groups taken; see
#: `slime.user_code.hooks.BufferFilter`.
Select = Callable[[Any, int | None, list[list[Sample]], int], list[list[Sample]]]


def pop_first(
    args: Any, rollout_id: int | None, buffer: list[list[Sample]], num_samples: int
) -> list[list[Sample]]:
    """The default ``--buffer-filter-path``: the oldest groups first."""
    taken = buffer[:num_samples]
    del buffer[: len(taken)]
    return taken


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
            FunctionFailed: the filter returned no list of groups or more than requested, or left
                returned groups in the buffer.
        """
        if not self.groups or count <= 0:
            return []
        before = len(self.groups)
        taken = self.choose(self._args, rollout_id, self.groups, count)
        if not isinstance(taken, list) or not all(isinstance(group, list) for group in taken):
            raise FunctionFailed(
                f"{self._name} returned {described(taken)}", fix="return a list of groups"
            )
        if len(taken) > count or before - len(self.groups) < len(taken):
            raise FunctionFailed(
                f"{self._name} returned {len(taken)} groups of {count} asked for and removed "
                f"{before - len(self.groups)} from the buffer",
                fix="return at most num_samples groups and delete each of them from the list it "
                "was given",
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
