"""The receipt of a push: what was sent, how long it took, which fingerprints were compared."""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import torch

from slime.engines.wire.buckets import fingerprint


class WeightMismatch(Exception):
    """An engine does not hold what the trainer sent: it would generate with a wrong policy."""

    def __init__(self, version: int, mismatches: Sequence[str]) -> None:
        super().__init__(version, tuple(mismatches))
        self.version = version
        self.mismatches = tuple(mismatches)

    def __str__(self) -> str:
        shown = "; ".join(self.mismatches[:6])
        more = f" and {len(self.mismatches) - 6} more" if len(self.mismatches) > 6 else ""
        return f"weights of version {self.version} did not arrive: {shown}{more}"


@dataclass(frozen=True)
class Receipt:
    """The record of one push.

    Attributes:
        version: version of the weights that the engines now have.
        num_tensors, nbytes: sent, in the engine's dtype.
        seconds: phase → seconds: "pause", "transfer", "flush", "check", "continue", "total", in
            some pushes "reset", "open", "close".
        transport: name of the transport.
        checked: names whose fingerprints were compared on every engine.
        full: all tensors were compared, and the engines hold no others.
        zeros: in a push of quantised weights, matrices that are all zeros in the trainer.
        loaded: number of tensors that every engine is known to have loaded; None if unknown. It is
            below num_tensors if an engine holds some in an unknown layout; a dropped tensor is an
            error.
        adapter: name of the pushed adapter in the engines; "" in a push of whole weights.
        fingerprints: of an adapter's tensors by name, in the engine's dtype.
    """

    version: int
    num_tensors: int
    nbytes: int
    seconds: Mapping[str, float]
    transport: str
    checked: tuple[str, ...] = ()
    full: bool = False
    zeros: tuple[str, ...] = ()
    loaded: int | None = None
    adapter: str = ""
    fingerprints: Mapping[str, str] = field(default_factory=dict)

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    @staticmethod
    def from_json(record: dict[str, Any]) -> Receipt:
        return Receipt(**record | {name: tuple(record[name]) for name in ("checked", "zeros")})

    def metrics(self) -> dict[str, float]:
        loaded = {}
        if self.loaded is not None:
            loaded["perf/update_weights/sent_tensors"] = float(self.num_tensors)
            loaded["perf/update_weights/loaded_tensors"] = float(self.loaded)
        phases = {
            f"perf/update_weights/{name}_time": value
            for name, value in self.seconds.items()
            if name != "total"
        }
        return {
            "perf/update_weights_time": self.seconds["total"],
            "perf/weight_version": float(self.version),
            "perf/update_weights_wire_bytes": float(self.nbytes),
            "perf/update_weights/checked_tensors": float(len(self.checked)),
            **loaded,
            **phases,
        }

    def __str__(self) -> str:
        rate = self.nbytes / max(self.seconds["transfer"], 1e-9) / 1e9
        sent = f"{self.num_tensors} tensors, {self.nbytes / 1e6:,.0f} MB by {self.transport}"
        speed = f"{self.seconds['total']:.2f} s ({rate:.1f} GB/s)"
        loaded = "" if self.loaded is None else f"{self.loaded} known to be loaded, "
        what = f"adapter {self.adapter}" if self.adapter else f"weights version {self.version}"
        return f"{what}: {sent} in {speed}, {loaded}{len(self.checked)} fingerprints compared"


@dataclass
class Sampler:
    """Chooses which tensors of a push are fingerprinted, within a share of the push's time.

    Every push fingerprints one tensor of each kind (names that differ only in layer or expert) and
    one member of each group that engines fuse, a different one each time. A window that advances
    with every push uses the remaining time, for at least one tensor: enough pushes cover all
    tensors.

    Attributes:
        share: share of the last push's duration that may be spent on fingerprints.
        floor: seconds that may always be spent. Both sides hash; each may use half.
        digest: returns the fingerprint of a tensor, or those of the slices that engines hold.
        always: lists of names; every push takes one of each.
    """

    share: float = 0.1
    floor: float = 0.05
    digest: Callable[[str, torch.Tensor], Any] = lambda name, tensor: fingerprint(tensor)
    always: Sequence[Sequence[str]] = ()
    fingerprints: dict[str, Any] = field(default_factory=dict)
    names: list[str] = field(default_factory=list)
    _cursor: int = 0
    _left: float = 0.0
    _full: bool = False
    _pushes: int = 0
    _chosen: set[str] = field(default_factory=set)
    _chosen_seconds: float = 0.0  # spent on `_chosen` in the last push

    def begin(self, last_push_seconds: float, full: bool) -> None:
        self.fingerprints = {}
        self.names = []
        self._full = full
        self._left = max(self.floor, self.share * last_push_seconds) / 2 - self._chosen_seconds
        self._chosen = {names[self._pushes % len(names)] for names in self.always}
        self._chosen_seconds = 0.0
        self._taken_up_to = self._cursor

    def observe(self, name: str, tensor: torch.Tensor) -> None:
        """Fingerprint the next tensor of the push if it is chosen; an `Observer`."""
        position = len(self.names)
        self.names.append(name)
        started = time.perf_counter()
        due = self._full or (
            position >= self._cursor and (self._left > 0 or position == self._cursor)
        )
        if not due and name not in self._chosen:
            return
        self.fingerprints[name] = self.digest(name, tensor)
        spent = time.perf_counter() - started
        if due:
            self._left -= spent
            self._taken_up_to = position + 1
        else:
            self._chosen_seconds += spent

    def end(self) -> None:
        """Advance the window after a successful push."""
        self._cursor = self._taken_up_to if self._taken_up_to < len(self.names) else 0
        self._pushes += 1


def kinds_of(names: Iterable[str]) -> list[list[str]]:
    """Group names that differ only in their numbers.

    Example:
        >>> kinds_of(
        ...     ["model.norm.weight", "model.layers.0.mlp.weight", "model.layers.1.mlp.weight"])
        [['model.norm.weight'], ['model.layers.0.mlp.weight', 'model.layers.1.mlp.weight']]
    """
    kinds: dict[str, list[str]] = {}
    for name in names:
        kinds.setdefault(re.sub(r"\d+", "#", name), []).append(name)
    return list(kinds.values())


def compare(
    sent: Mapping[str, str],
    answers: Mapping[str, Mapping[str, str]],
    complete: Collection[str] | None = None,
) -> list[str]:
    """Compare fingerprints; return one line per tensor and engine that differs, [] if none does.

    Args:
        sent: name → fingerprint on the trainer's side.
        answers: engine URL → its fingerprints.
        complete: all sent names, for a full check: other tensors in an engine are then errors.
    """
    wrong = []
    for url, there in answers.items():
        for name, expected in sent.items():
            if name not in there:
                wrong.append(f"{name} is not on {url}")
            elif there[name] != expected:
                wrong.append(
                    f"{name} differs on {url} (sent {expected[:8]}…, holds {there[name][:8]}…)"
                )
        if complete is not None:
            wrong += [
                f"{name} on {url} was never sent" for name in sorted(set(there) - set(complete))
            ]
    return wrong
