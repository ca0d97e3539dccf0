"""The base class of all transports; `slime.weights.route` chooses one."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from slime import deadlines

if TYPE_CHECKING:  # the launch imports this file, and must not wait for torch
    import torch

NamedTensors = Iterable[tuple[str, "torch.Tensor"]]

#: Called with each tensor as it is sent, in the engine's dtype; the tensor is only valid during the
#: call.
Observer = Callable[[str, "torch.Tensor"], None]

#: A step of a transfer is given up on after its floor and the time that its bytes take at this
#: rate, per second.
SLOWEST_BANDWIDTH = 20e6


@dataclass(frozen=True)
class Transferred:
    num_tensors: int
    nbytes: int


@dataclass(frozen=True)
class EngineSlots:
    """An engine and the slots (GPUs, numbered through the run) of its tensor-parallel ranks, in
    their order.

    Attributes:
        slots: () of an external engine, or of one that needs none.
        ranks: number of processes that hold weights; of an engine without slots.
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
    """One way to bring named tensors to all engines, on a trainer rank that takes part in it.

    Attributes:
        name: for messages and metrics.
    """

    name: str

    def send(self, tensors: NamedTensors, version: int, observe: Observer) -> Transferred:
        """Send everything; returns when every engine has loaded it.

        Raises:
            EngineError: an engine refused or did not answer in time.
            UserError: this side cannot (no room, …).
        """
        raise NotImplementedError

    def follow(self, tensors: NamedTensors) -> None:
        """Do the part of a rank that does not send, while another one sends."""

    def close(self) -> None:
        """Release what is held between pushes."""


def deadline_for(nbytes: int, floor: float | None = None) -> float:
    """Return the seconds that a step moving ``nbytes`` may take.

    Args:
        floor: seconds that it may take whatever its size; `deadlines.TRANSPORT_FLOOR` when None.

    Example:
        >>> deadline_for(2_000_000_000)
        220.0
    """
    return (deadlines.TRANSPORT_FLOOR if floor is None else floor) + nbytes / SLOWEST_BANDWIDTH
