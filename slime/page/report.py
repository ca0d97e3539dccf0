"""``report.html``: the page of `slime watch` with a run frozen into it, one file. The run writes it
while it goes on, `slime report RUN_DIR` at any time.

The file needs no network and no server: open it from the file system, send it by mail, attach it to
an issue.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from pathlib import Path

from slime import deadlines
from slime.files import write_atomically
from slime.log import get_logger
from slime.observe.run_data import RunData, read_run
from slime.observe.run_folder import RunFolder
from slime.page.page_files import one_file
from slime.page.report_contents import contents_of, packed
from slime.page.report_words import words_html

__all__ = ["ReportSink", "try_to_write_report", "write_comparison", "write_report"]

logger = get_logger(__name__)

_SHARE = 0.01


def write_report(run_dir: str | Path, output: str | Path | None = None) -> Path:
    """Write the report of a run folder and return its path (``<run_dir>/report.html`` unless
    `output` is given).

    Raises:
        UserError: `run_dir` is no run folder.
        OSError: the file cannot be written.
    """
    run = read_run(Path(run_dir))
    path = Path(output) if output is not None else run.path / "report.html"
    write_atomically(path, _page([run]))
    return path


def try_to_write_report(run: RunFolder) -> None:
    """`write_report` for a run, which is worth more than its page: whatever goes wrong is
    logged."""
    try:
        write_report(run.path)
    except Exception as problem:
        logger.error("could not write %s: %s: %s", run.report_path, type(problem).__name__, problem)


def write_comparison(run_dirs: Sequence[str | Path], output: str | Path | None = None) -> Path:
    """Write several runs on one page and return its path (``comparison.html`` beside the first, by
    default).

    Raises:
        UserError: one of them is no run folder.
        OSError: the file cannot be written.
    """
    runs = [read_run(Path(run_dir)) for run_dir in run_dirs]
    path = Path(output) if output is not None else runs[0].path.parent / "comparison.html"
    write_atomically(path, _page(runs))
    return path


def _page(runs: Sequence[RunData]) -> bytes:
    is_live = len(runs) == 1 and runs[0].stages[-1].summary.get("state") == "running"
    data = contents_of(runs, is_passing=is_live)
    title = " vs ".join(run.name for run in runs)
    return one_file(title, words_html(data["runs"]["runs"]), packed(data), is_live=is_live).encode(
        "utf-8", "replace"
    )


class ReportSink:
    """Keeps the report of a run that goes on: written behind a step, but so seldom that it costs
    less than 1 % of the time, however long the run is. The page loads itself anew.

    Args:
        clock: seconds.
    """

    def __init__(self, run: RunFolder, clock: Callable[[], float] = time.monotonic) -> None:
        self._run = run
        self._clock = clock
        self._next = clock()

    def log(self, step: int, metrics: dict[str, float]) -> None:
        started = self._clock()
        if started < self._next:
            return
        try_to_write_report(self._run)
        ended = self._clock()
        self._next = ended + max(deadlines.REPORT_INTERVAL, (ended - started) / _SHARE)

    def rewind(self, next_step: int) -> None:
        """Nothing to take back: the next report shows what there is."""

    def close(self) -> None:
        """The last report is that of a run that has ended: whoever ends it writes it."""
