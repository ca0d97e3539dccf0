"""What the ways of moving weights have in common, and which one a run uses."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:  # the launch describes engines with this file, before anything needs torch
    import torch

NamedTensors = Iterable[tuple[str, "torch.Tensor"]]

Observer = Callable[[str, "torch.Tensor"], None]
"""Called with each tensor as it is sent, in the engine's dtype; the tensor is only valid during the call."""

#: A transfer is given up on when it is slower than this, in bytes per second, plus `FLOOR_SECONDS`.
SLOWEST_BANDWIDTH = 20e6
FLOOR_SECONDS = 120.0


@dataclass(frozen=True)
class Transferred:
    num_tensors: int
    nbytes: int


@dataclass(frozen=True)
class EngineSlots:
    """An engine and the slots (GPUs, numbered through the run) of its tensor-parallel ranks, in their order."""

    url: str
    slots: tuple[int, ...]


class Transport(Protocol):
    """One way to bring named tensors to all engines.

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

    def close(self) -> None: ...


def deadline_for(nbytes: int, floor: float | None = None) -> float:
    """Seconds that a step moving ``nbytes`` may take.

    Args:
        floor: seconds that it may take whatever its size; `FLOOR_SECONDS` when None.

    Example:
        >>> deadline_for(2_000_000_000)
        220.0
    """
    return (FLOOR_SECONDS if floor is None else floor) + nbytes / SLOWEST_BANDWIDTH
