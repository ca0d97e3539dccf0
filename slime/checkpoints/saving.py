"""Saves Megatron checkpoints, in the foreground or in the background of training.

    save()  plan ─► snapshot in host memory ─► return            next save() or wait()
    thread            └─► write own file ─► all have ─► contents, manifest, rename, tracker

    root/.iter_0000010.partial/ ─► root/iter_0000010/ ─► latest_checkpointed_iteration.txt

A save writes into a hidden directory, lists every file with its size and fingerprint, renames it,
and only then moves the tracker: a crash or a full disk at any point leaves the previous checkpoint
loadable.

Both ways write the same files; --async-save adds the snapshot and the thread. The threads of all
ranks communicate over their own gloo group, because two threads must not share one. The tracker
moves when every rank's file is on the disk. The next call raises a failure of the background save.
"""

from __future__ import annotations

import logging
import shutil
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch.distributed as dist

from slime import deadlines
from slime.checkpoints.critic_part import critic_records
from slime.checkpoints.directory import (
    EXTRA_STATE,
    FileRecord,
    file_record,
    iteration_name,
    partial_dir,
    partial_path,
    publish,
    retain,
    set_latest,
    write_manifest,
)
from slime.checkpoints.sharded_store import (
    WRITE_ERRORS,
    ShardedWrite,
    first_lines,
    pickled,
    plain_results,
    results_of,
)
from slime.checkpoints.trainer_state import TrainerState
from slime.errors import RunFailed, UserError
from slime.files import json_safe
from slime.processes.json_collectives import all_gather, broadcast, gather
from slime.processes.pinned_memory import HostMemory

logger = logging.getLogger(__name__)


class CheckpointWriter:
    """Saves one rank's part of a run's checkpoints; all ranks call the same methods in the same
    order.

    Args:
        in_background: `save` returns once the state is copied to host memory.
    """

    def __init__(self, *, in_background: bool = False) -> None:
        self.in_background = in_background
        self._memory = HostMemory()
        self._group: Any = None
        self._thread: threading.Thread | None = None
        self._failure: BaseException | None = None

    def save(
        self,
        root: str | Path,
        iteration: int | str,
        state: TrainerState,
        *,
        extra_state: dict[str, Any] | None = None,
        save_optimizer: bool = True,
        save_rng: bool = True,
        keep: int | None = None,
        beside: Callable[[Path], object] | None = None,
    ) -> Path:
        """Save a checkpoint after training rollout ``iteration`` and make it the latest. Waits for
        the previous save. Collective.

        Args:
            root: the --save directory.
            iteration: rollout id; "release" for converted weights, which no rollout has trained.
            extra_state: small state of the run (data position, weight version, …), which `load`
                returns.
            save_optimizer: whether to save optimizer and schedule (not with --no-save-optim).
            keep: number of newest checkpoints to keep (--save-retain); None keeps all.
            beside: called on rank 0 with the directory, to write further files into it; in the
                background if the save is.
        Returns:
            The checkpoint's directory; a background save creates it later.
        Raises:
            UserError: on every rank, if any rank could not write; nothing visible has changed then.
                In the background: the previous save failed.
        """
        self.wait()
        if self._group is None:
            self._group = dist.new_group(
                backend="gloo", timeout=timedelta(seconds=deadlines.CHECKPOINT_WRITE)
            )
        final = Path(root) / iteration_name(iteration)
        with _agreed(f"preparing {final}"):
            if dist.get_rank() == 0:
                partial_dir(final)
        planned = ShardedWrite(
            state.everything(iteration, save_optimizer=save_optimizer, save_rng=save_rng)
        )
        job = _RankSave(
            final, iteration, planned, pickled(extra_state or {}), keep, beside, self._group
        )
        if not self.in_background:
            job.run()
            return final
        job.snapshot(self._memory)
        self._thread = threading.Thread(
            target=self._run, args=(job,), name=f"save {final.name}", daemon=True
        )
        self._thread.start()
        return final

    def wait(self) -> None:
        """Wait until the last save is complete on all ranks.

        Raises:
            UserError: the save failed.
        """
        if self._thread is not None:
            self._thread.join(deadlines.CHECKPOINT_WRITE + deadlines.CHECKPOINT_GRACE)
            if self._thread.is_alive():
                raise RunFailed(
                    f"the checkpoint writer ({self._thread.name}) does not finish",
                    why=f"it has been writing for {deadlines.CHECKPOINT_WRITE / 3600:.0f} hours",
                    fix="look at the file system of --save; the previous checkpoint is untouched",
                )
            self._thread = None
        self.raise_failure()

    def raise_failure(self) -> None:
        """Raise the failure of a background save since the last call, if any; never waits."""
        failure = self._failure
        self._failure = None
        if failure is not None:
            raise failure

    def close(self) -> None:
        """Wait for the last save and release the host memory."""
        try:
            self.wait()
        finally:
            self._memory.release()

    def _run(self, job: _RankSave) -> None:
        try:
            job.run()
        except BaseException as error:  # `raise_failure` raises it in the caller's thread
            self._failure = error


@dataclass
class _RankSave:
    """One rank's part of a save, planned and ready to be written."""

    final: Path
    iteration: int | str
    planned: ShardedWrite
    extra_state: bytes
    keep: int | None
    beside: Callable[[Path], object] | None
    group: Any

    def __post_init__(self) -> None:
        self.rank = dist.get_rank()
        self.started = time.perf_counter()
        self.partial = partial_path(self.final)

    def snapshot(self, memory: HostMemory) -> None:
        nbytes = self.planned.snapshot(memory)
        seconds = time.perf_counter() - self.started
        logger.info(
            "copied %.2f GB for %s in %.1f s; writing it behind training",
            nbytes / 1e9,
            self.final,
            seconds,
        )

    def run(self) -> None:
        """Write, and when all ranks have written, publish. Collective over ``group``.

        Raises:
            UserError: the same on every rank.
        """
        written: tuple[list[Any], list[FileRecord]] = ([], [])
        failure: str | None = None
        try:
            written = self.planned.write(self.partial)
        except WRITE_ERRORS as error:
            failure = (
                f"writing {self.partial} failed on trainer rank "
                f"{self.rank}\0{json_safe(self._reason(error))}"
            )
        verdict = self._verdict(failure, written)
        if verdict is not None:
            what, _, why = verdict.partition("\0")
            raise _write_error(what, why)

    def _verdict(
        self, failure: str | None, written: tuple[list[Any], list[FileRecord]]
    ) -> str | None:
        """Return the failure of any rank as "what\\0why"; None if the checkpoint is published."""
        verdict: str | None = None
        try:
            reports = gather((failure, plain_results(written[0]), written[1]), self.group)
            if reports is not None:
                verdict = next(
                    (failed for failed, _, _ in reports if failed is not None), None
                ) or self._finish(reports)
                if verdict is not None:
                    shutil.rmtree(self.partial, ignore_errors=True)
            verdict = broadcast(verdict, self.group)
        except RuntimeError as error:  # a broken connection: the verdict does not reach the others
            return (
                f"saving {self.final} was cut short\0another trainer rank is gone "
                f"({first_lines(error)})"
            )
        return verdict

    def _finish(self, reports: list[Any]) -> str | None:
        """Publish the checkpoint, on rank 0, when every rank's file is on the disk; returns a
        failure."""
        try:
            records = [FileRecord(**record) for _, _, files in reports for record in files]
            self.planned.finish(self.partial, [results_of(results) for _, results, _ in reports])
            (self.partial / EXTRA_STATE).write_bytes(self.extra_state)
            if self.beside is not None:
                self.beside(self.partial)
            records += critic_records(self.partial)
            listed = {self.partial / record.path for record in records}
            records += [
                file_record(path, self.partial)
                for path in sorted(self.partial.rglob("*"))
                if path.is_file() and path not in listed
            ]
            write_manifest(self.partial, sorted(records, key=lambda record: record.path))
            publish(self.partial, self.final)
            set_latest(self.final.parent, self.iteration)
        except (*WRITE_ERRORS, UserError) as error:
            return f"publishing {self.final} failed\0{json_safe(self._reason(error))}"
        removed = retain(self.final.parent, self.keep)
        if removed:
            logger.info(
                "removed checkpoints %s (--save-retain %s)", ", ".join(map(str, removed)), self.keep
            )
        nbytes = sum(record.nbytes for record in records)
        seconds = time.perf_counter() - self.started
        logger.info("saved %s (%.2f GB) in %.1f s", self.final, nbytes / 1e9, seconds)
        return None

    def _reason(self, error: BaseException) -> str:
        return first_lines(error) + _free_space(self.partial)


# -- errors ----------------------------------------------------------------------------------------


@contextmanager
def _agreed(what: str) -> Iterator[None]:
    """Make every rank leave the block in the same way: if one fails to write, all raise its error.
    Collective."""
    failure: BaseException | None = None
    try:
        yield
    except WRITE_ERRORS as error:
        failure = error
    failures: list[str | None] = all_gather(
        None if failure is None else json_safe(first_lines(failure))
    )
    first = next(((rank, text) for rank, text in enumerate(failures) if text is not None), None)
    if first is not None:
        raise _write_error(f"{what} failed on trainer rank {first[0]}", first[1]) from failure


def _write_error(what: str, why: str) -> UserError:
    return UserError(
        what,
        why=why,
        fix="free space (--save-retain N keeps only the last N checkpoints), or pass another "
        "--save, on a file system that all trainer ranks share; the previous checkpoint is "
        "untouched",
    )


def _free_space(directory: Path) -> str:
    """Report the free space, because torch's zip writer reports a full disk as "unexpected pos"."""
    if not directory.is_dir():
        return f" ({directory} is not there)"
    return f" ({shutil.disk_usage(directory).free / 1e6:,.1f} MB are free on this disk)"
