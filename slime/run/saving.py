"""When a run writes checkpoints and models, and what happens to them at its end."""

from __future__ import annotations

import time
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from slime import deadlines
from slime.checkpoints.critic_part import discard_all_parts
from slime.checkpoints.directory import discard_partial, is_saved, iteration_name, newest_whole
from slime.checkpoints.run_models import newest_model
from slime.config.config import Config
from slime.errors import UserError
from slime.log import get_logger
from slime.observe.run_folder import RunFolder
from slime.observe.sinks import Sinks
from slime.paths import fill
from slime.processes.host import slime_command
from slime.run.schedule import Schedule
from slime.run.stopping import StopSignals

if TYPE_CHECKING:
    from slime.cluster.run_cluster import Cluster

logger = get_logger(__name__)


class Saving:
    """Writes the checkpoints and models of one run.

    Attributes:
        last: the newest saved rollout; with --async-save, writing may not have finished.
        model: the newest Hugging Face directory of this launch.
    """

    def __init__(
        self, config: Config, run: RunFolder, sinks: Sinks, cluster: Cluster, schedule: Schedule
    ) -> None:
        self._flags = config.checkpoint
        self._run = run
        self._sinks = sinks
        self._cluster = cluster
        self._schedule = schedule
        self._begun: int | None = None
        self._is_overdue = False
        self._at = time.monotonic()
        self.last: int | None = None
        self.model: Path | None = None

    @property
    def keeps(self) -> bool:
        """Whether checkpoints or models of this run are written."""
        return self._cluster.has_trainers and bool(self._flags.save or self._flags.save_hf)

    # -- when --------------------------------------------------------------------------------------

    def begin(self) -> None:
        """Start counting time, after the launch or a restart of the trainer."""
        self._at = time.monotonic()
        self._begun = None
        self.last = None
        self._is_overdue = False
        if self._flags.save and self._cluster.has_trainers and self._schedule.num_rollout:
            logger.info("checkpoints: %s", self._when())

    @property
    def _is_timed(self) -> bool:
        return self._flags.save is not None and self._flags.save_interval is None

    def _when(self) -> str:
        flags = self._flags
        interval = self._schedule.save_interval
        often = "after every rollout" if interval == 1 else f"every {interval} rollouts"
        if self._is_timed and interval != 1:
            often += f" or {deadlines.RUN_SAVING_EVERY / 60:.0f} minutes"
        if least := flags.save_min_seconds:
            often += f", at least {least:g} s apart"
        kept = f"the newest {flags.save_retain} are kept" if flags.save_retain else "all are kept"
        return f"{often}, in {flags.save}; {kept}"

    def is_due(self, rollout_id: int) -> bool:
        if not self.keeps or self.last == rollout_id:
            return False
        interval = self._schedule.save_interval
        if rollout_id + 1 == self._schedule.num_rollout:
            return True
        passed = time.monotonic() - self._at
        self._is_overdue |= interval is not None and self._schedule.is_due(rollout_id, interval)
        self._is_overdue |= self._is_timed and passed > deadlines.RUN_SAVING_EVERY
        return self._is_overdue and passed >= self._flags.save_min_seconds

    # -- saving ------------------------------------------------------------------------------------

    def save(
        self, rollout_id: int, pushed: Mapping[str, Any], metrics: Mapping[str, float]
    ) -> None:
        """Write a checkpoint after training on a rollout, or with --async-save start writing it.

        Args:
            pushed: "pushes" (`StalenessTracker.recent_pushes`) and "lineages"
                (`PushLog.recent_ancestries`).
        """
        self._begun = rollout_id
        with self._sinks.phase("save_model"):
            self._cluster.save(rollout_id, pushed, metrics)
        self.last = rollout_id
        self._at = time.monotonic()
        self._is_overdue = False
        if self._flags.save_hf:
            self.model = fill(self._flags.save_hf, rollout_id)

    def finish(self) -> None:
        """Wait for the last checkpoint, and export the model unless --save-hf has done so."""
        flags = self._flags
        if self.last is not None and flags.async_save:
            with self._sinks.phase("save_model"):
                self._cluster.finish_saving()
        if self.last is None:
            self._export_missing_model()
        elif flags.save and flags.export_model and not flags.save_hf:
            self._export(self._run.model)

    def _export_missing_model(self) -> None:
        """Export the loaded weights if the last launch was killed between checkpoint and model."""
        done = self._schedule.start_rollout_id - 1
        newest = self.newest() if self._cluster.has_trainers and done >= 0 else None
        if newest is None or newest.name != iteration_name(done):
            return
        left = newest_model(self._run.path)
        if left.is_exported:
            self.model = left.path
        elif named := self._flags.save_hf:
            self._export(fill(named, done))
        elif self._flags.export_model:
            self._export(self._run.model)

    def _export(self, path: Path) -> None:
        with self._sinks.phase("save_model"):
            self._cluster.export(path)
        self.model = path

    # -- a run that ends early ---------------------------------------------------------------------

    def unsaved_work(self, trained: int | None) -> str:
        """Name the work that is not on disk ("rollout 12"); "" if there is none.

        Args:
            trained: the rollout that was trained on last, if any.
        """
        if trained is None or not self.keeps:
            return ""
        root = self._flags.save
        on_disk = self.last == trained and (root is None or is_saved(Path(root), trained))
        return "" if on_disk else f"rollout {trained}"

    def wait_for_async_save(self, signals: StopSignals | None = None) -> None:
        """Wait for the checkpoint that --async-save is writing.

        Args:
            signals: for a run that ends, so the signal that ended it does not end this wait; None
                for a run that continues.
        """
        flags = self._flags
        rollout_id = self.last
        if not flags.async_save or not flags.save or rollout_id is None:
            return
        root = Path(flags.save)
        if is_saved(root, rollout_id):
            return
        logger.warning(
            "the checkpoint of rollout %d is still being written: waiting for it, %.0f s at most; "
            "Ctrl-C gives it up",
            rollout_id,
            deadlines.RUN_SAVING_ASYNC_SAVE,
        )
        if signals is not None:
            signals.acknowledge()
        try:
            self._cluster.wait_for_async_save(
                lambda: is_saved(root, rollout_id), deadlines.RUN_SAVING_ASYNC_SAVE
            )
        except KeyboardInterrupt:
            logger.warning("the checkpoint of rollout %d is given up", rollout_id)
        except UserError as problem:
            logger.error("the checkpoint of rollout %d is lost: %s", rollout_id, problem)

    def discard_unfinished(self) -> None:
        """Remove a partial checkpoint whose writers have ended."""
        if self._flags.save is not None and self._begun is not None:
            discard_all_parts(Path(self._flags.save))
            final = Path(self._flags.save) / iteration_name(self._begun)
            if discard_partial(final):
                logger.warning("%s was not finished, and is removed", final)

    # -- what to resume from -----------------------------------------------------------------------

    def newest(self) -> Path | None:
        """Return the newest complete checkpoint, also of an earlier launch; None if there is none,
        or its folder has become unreadable."""
        try:
            return newest_whole(Path(self._flags.save)) if self._flags.save else None
        except UserError as problem:  # must not replace the error that ends the run
            logger.error("%s", problem.in_brief)
            return None

    def resume_hint(self) -> str:
        """Say how to resume a failed run; "" if it saves no checkpoints."""
        root = self._flags.save
        newest = self.newest()
        if root is None or not self._cluster.has_trainers:
            return ""
        if newest is None:
            return f"there is no whole checkpoint in {root}"
        return (
            f"newest whole checkpoint: {newest}; to go on from it: {slime_command()} resume "
            f"{self._run.path}"
        )
