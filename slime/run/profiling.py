"""Profile some steps of a run (--profile-steps): trainer ranks, engines, and the run's timelines in
one file."""

from __future__ import annotations

from pathlib import Path

from slime.cluster.run_cluster import Cluster
from slime.config.config import Config
from slime.log import get_logger
from slime.observe.run_folder import RunFolder
from slime.observe.torch_profile import TRACE_SUFFIX, merge_traces

logger = get_logger(__name__)


class Profiling:
    """Starts the profilers before the first step of the window and writes the file after its last.

    Errors do not end the run.
    """

    def __init__(self, config: Config, run: RunFolder, cluster: Cluster) -> None:
        self._steps = config.debug.profiled
        self._run = run
        self._cluster = cluster
        self._folder: Path | None = None  # while the profilers run

    def step_begins(self, step: int, *, is_over: bool = False) -> None:
        """Begin or end the profile; ``step`` is trained next, and the previous one is logged.

        Args:
            is_over: no step follows.
        """
        wanted = step in self._steps and not is_over
        if self._folder is None and wanted:
            self._folder = self._run.path / "profile" / f"steps-{step}-{self._steps[-1]}"
            self._cluster.start_profile(self._folder)
        elif self._folder is not None and not wanted:
            self._write(self._folder, step)
            self._folder = None

    def _write(self, folder: Path, step: int) -> None:
        """End the profilers and write the file; ``step`` follows the last profiled step."""
        self._cluster.stop_profile()
        found = {_name(file, folder): file for file in sorted(folder.rglob(f"*{TRACE_SUFFIX}"))}
        for number in range(self._steps[0], step):
            timeline = self._run.trace / f"rollout_{number:06d}.json"
            if timeline.exists():
                found[f"rollout {number}"] = timeline
        target = folder.with_suffix(".json.gz")
        try:
            count = merge_traces(found, target)
        except (OSError, ValueError, KeyError) as error:
            logger.warning("the profiles in %s could not be merged: %s", folder, error)
            return
        logger.info(
            "profile of %s, %d events: %s (https://ui.perfetto.dev opens it)",
            ", ".join(found) or "nothing",
            count,
            target,
        )


def _name(file: Path, folder: Path) -> str:
    """Return what a trace file belongs to: "trainer rank 0", "engine 1 TP-0"."""
    within = file.relative_to(folder)
    name = within.name.removesuffix(TRACE_SUFFIX)
    if len(within.parts) == 1:
        return name.replace("-", " ")
    return f"{within.parts[0].replace('-', ' ')} {name.partition('-')[2]}".strip()
