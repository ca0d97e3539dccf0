"""Carry messages between trainer ranks during a push: turns, reports of the stages, the outcome.

    stage 0 (rank 0)   sends ── report ─┐                          reads all reports ─► outcome
    stage 1            packs ◄──────────┴─ sends ── report ─┐      (to every rank)
    stage 2            packs ◄──────────────────────────────┴─ sends ── report

Engines load one update at a time, so pipeline stages send in order. A stage waits only for earlier
stages, and rank 0 for all, so no deadlock can occur. Messages use a store, because a collective
with a dead rank hangs or ends the process. Every wait has a limit, and its error names the awaited
rank.

torch's store has no authentication and lists its keys to any client. So a message is JSON, signed
with a key that the ranks share: a foreign message is an error and never runs code.
"""

from __future__ import annotations

import hmac
import secrets
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import orjson
import torch.distributed as dist
from torch.distributed.distributed_c10d import _get_default_store

from slime.engines.api import EngineError
from slime.errors import UserError
from slime.files import json_safe
from slime.processes.json_collectives import broadcast

_SEAL = "sha256"
_SEAL_BYTES = 32
_NUM_READERS = "heard"  # key of the number of ranks that have read a round's outcome


class StageError(Exception):
    """A pipeline stage failed in its part of a push, or did not report.

    Attributes:
        where: the stage and the rank that sends for it.
    """

    def __init__(self, stage: int, rank: int, what: str) -> None:
        super().__init__(stage, rank, what)
        self.where = f"pipeline stage {stage} (trainer rank {rank})"
        self.what = what

    def __str__(self) -> str:
        return f"{self.where}: {self.what}"


@dataclass
class RoundOutcome:
    """The outcome of a round as JSON: rank 0 sets it in the block, every rank has it afterwards."""

    value: Any = None


class TrainerRanks:
    """One rank's connection to the others. Creating it is collective; all ranks take part in the
    same rounds.

    Attributes:
        sources: the sending rank of each pipeline stage; only rank 0 if it sends everything.
    """

    def __init__(self, rank: int, world_size: int) -> None:
        self.rank = rank
        self.sources: Sequence[int] = (0,)
        self._store: Any = None  # torch's stubs know neither its bytes nor clone()
        self._others = world_size - 1
        if world_size > 1:
            name, key = broadcast([secrets.token_hex(4), secrets.token_hex(32)])
            self._key = bytes.fromhex(key)
            # a separate connection: waiting on the shared one would block its other users
            default: Any = _get_default_store()
            self._store = dist.PrefixStore(f"weight-sync-{name}", default.clone())
        self._round = 0
        self._unread_rounds: list[int] = []  # rounds with messages in the store; rank 0
        self._own_report: Any = None
        self._reported = False

    @property
    def stage(self) -> int | None:
        """Return the stage for which this rank sends, if any."""
        return self.sources.index(self.rank) if self.rank in self.sources else None

    @contextmanager
    def round(self, what: str, limit: float) -> Iterator[RoundOutcome]:
        """Run a block on all ranks, and give every rank rank 0's value or error.

        Args:
            what: for messages ("pushing weights version 7").
            limit: seconds that the other ranks wait for rank 0 after their own part.
        Raises:
            UserError: on other ranks if rank 0 failed; has the text of its error.
            StageError: rank 0 sent no outcome within ``limit``.
        """
        self._round = self._round + 1
        self._reported = False
        outcome = RoundOutcome()
        failure = None
        self._delete_read_messages()
        try:
            yield outcome
        except Exception as error:
            if self.stage is not None and not self._reported:
                self._send_report(str(error), None)
            if self.rank == 0:
                self._send("outcome", str(error))
            if self.rank == 0 or not isinstance(error, EngineError | StageError):
                raise
            failure = error  # rank 0 has it from the report, and raises it with more context
        if self.rank == 0:
            self._send("outcome", None, outcome.value)
            return
        said, outcome.value = self._receive("outcome", 0, limit)
        with suppress(dist.DistError):  # the next operation reports the lost store
            self._store.add(f"{self._round}/{_NUM_READERS}", 1)
        if said is not None:
            raise UserError(f"{what} failed on trainer rank 0", why=said) from failure
        if failure is not None:
            raise failure

    def await_turn(self, limit: float) -> None:
        """Return when all earlier stages have sent their part.

        Raises:
            StageError: one of them failed, or ``limit`` seconds have passed.
        """
        assert self.stage is not None
        end = time.monotonic() + limit
        for stage in range(self.stage):
            self._report_of(stage, max(0.1, end - time.monotonic()))

    def report(self, value: Any) -> None:
        """Report that this stage has sent its tensors, so the next may start; ``value`` is JSON."""
        self._own_report = value
        self._send_report(None, value)

    def reports(self, limits: Sequence[float]) -> list[Any]:
        """Return the reports of all stages, by stage; for rank 0, after its own report.

        Args:
            limits: seconds for each stage after the one before has finished.
        Raises:
            StageError: a stage failed, or did not report in time.
        """
        later = [self._report_of(stage, limits[stage]) for stage in range(1, len(self.sources))]
        return [self._own_report, *later]

    @contextmanager
    def in_order(self, limit: float) -> Iterator[None]:
        """Run a block stage by stage; failures of other stages do not prevent it.

        Used to leave groups: engines that left them in different orders would deadlock.

        Args:
            limit: seconds to wait for each earlier stage.
        """
        stage = self.stage
        if stage is None:
            yield
            return
        for earlier in range(stage):
            with suppress(StageError):
                self._receive(f"left-{earlier}", earlier, limit)
        try:
            yield
        finally:
            with suppress(dist.DistError):
                self._send(f"left-{stage}")

    # -- inside ------------------------------------------------------------------------------------

    def _report_of(self, stage: int, limit: float) -> Any:
        failure, value = self._receive(f"report-{stage}", stage, limit)
        if failure is not None:
            raise StageError(stage, self.sources[stage], failure)
        return value

    def _send_report(self, failure: str | None, value: Any) -> None:
        self._reported = True
        self._send(f"report-{self.stage}", failure, value)

    def _send(self, key: str, failure: str | None = None, value: Any = None) -> None:
        if self._store is not None:
            name = f"{self._round}/{key}"
            word = orjson.dumps([json_safe(failure), value])
            self._store.set(name, self._seal(name, word) + word)

    def _receive(self, key: str, stage: int, limit: float) -> tuple[str | None, Any]:
        """Wait for a message; return its failure and its value.

        Raises:
            StageError: no message came within ``limit`` seconds, or its signature is wrong.
        """
        assert self._store is not None
        name = f"{self._round}/{key}"
        try:
            self._store.wait([name], timedelta(seconds=limit))
            sealed: bytes = self._store.get(name)
        except dist.DistError as error:
            what = f"trainer rank {self.rank} waited {limit:.0f} s for its word"
            raise StageError(stage, self.sources[stage], what) from error
        seal = sealed[:_SEAL_BYTES]
        word = sealed[_SEAL_BYTES:]
        if not hmac.compare_digest(seal, self._seal(name, word)):
            what = (
                "no trainer rank wrote what the trainer's store has as its word: others reach the "
                "store's port"
            )
            raise StageError(stage, self.sources[stage], what)
        failure, value = orjson.loads(word)
        return failure, value

    def _seal(self, name: str, word: bytes) -> bytes:
        """Sign a message for this name; the signature is invalid for other names."""
        return hmac.digest(self._key, name.encode() + b"\0" + word, _SEAL)

    def _delete_read_messages(self) -> None:
        """Remove, on rank 0, the messages of rounds whose outcome every rank has read.

        Rank 0 may be rounds ahead of another rank: not every round waits for all.
        """
        if self._store is None or self.rank != 0:
            return
        for number in self._unread_rounds[:]:
            if self._store.add(f"{number}/{_NUM_READERS}", 0) < self._others:
                continue
            self._unread_rounds.remove(number)
            for key in (
                _NUM_READERS,
                "outcome",
                *(f"report-{stage}" for stage in range(len(self.sources))),
            ):
                self._store.delete_key(f"{number}/{key}")
        self._unread_rounds.append(self._round)
