"""The base class of all transports; `slime.weights.route` chooses one."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from slime import deadlines

if TYPE_CHECKING:  # the launch imports this file and must not load torch
    import torch

NamedTensors = Iterable[tuple[str, "torch.Tensor"]]

#: Called with each sent tensor, in the engine's dtype; the tensor is valid only during the call.
Observer = Callable[[str, "torch.Tensor"], None]

#: The time limit of a transfer step is its floor plus the time for its bytes at this rate, in bytes
#: per second.
SLOWEST_BANDWIDTH = 20e6


@dataclass(frozen=True)
class Transferred:
    num_tensors: int
    nbytes: int


@dataclass(frozen=True)
class EngineSlots:
    """An engine and the slots (GPUs, numbered across the run) of its tensor-parallel ranks, in
    order.

    Attributes:
        slots: () for an external engine, or one that needs none.
        ranks: number of processes that hold weights, for an engine without slots.
        key: the key that it requires (`slime.engines.keys`); "" for none.
    """

    url: str
    slots: tuple[int, ...]
    ranks: int = 1
    key: str = field(default="", repr=False)

    @property
    def num_ranks(self) -> int:
        return len(self.slots) or self.ranks


class Transport:
    """One way to send named tensors to all engines; the side of one trainer rank.

    Attributes:
        name: for messages and metrics.
    """

    name: str

    def send(self, tensors: NamedTensors, version: int, observe: Observer) -> Transferred:
        """Send everything; returns when every engine has loaded it.

        Raises:
            EngineError: an engine refused or did not answer in time.
            UserError: this side cannot send (no room, …).
        """
        raise NotImplementedError

    def follow(self, tensors: NamedTensors) -> None:
        """Take part on a rank that does not send, while another one sends."""

    def close(self) -> None:
        """Release the resources held between pushes."""


def deadline_for(nbytes: int, floor: float | None = None) -> float:
    """Return the seconds that a step moving ``nbytes`` may take.

    Args:
        floor: seconds allowed for any size; None for `deadlines.TRANSPORT_FLOOR`.

    Example:
        >>> deadline_for(2_000_000_000)
        220.0
    """
    return (deadlines.TRANSPORT_FLOOR if floor is None else floor) + nbytes / SLOWEST_BANDWIDTH
