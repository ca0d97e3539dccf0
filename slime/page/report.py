"""Write ``report.html``: the page of `slime watch` with the data of a run, in one file.
A running run rewrites it; `slime report RUN_DIR` writes it at any time.

The file needs no network and no server: open it from the file system, send it by mail, attach it to
an issue.
"""

from __future__ import annotations

import html
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

from slime import deadlines
from slime.files import write_atomically
from slime.log import get_logger
from slime.observe.run_data import RunData, read_run
from slime.observe.run_folder import RunFolder
from slime.page.page_files import one_file
from slime.page.report_contents import contents_of, packed

logger = get_logger(__name__)

_SHARE = 0.01


def write_report(run_dir: str | Path, output: str | Path | None = None) -> Path:
    """Write the report of a run folder and return its path (``<run_dir>/report.html`` unless
    `output` is given).

    Raises:
        UserError: `run_dir` is not a run folder.
        OSError: the file cannot be written.
    """
    run = read_run(Path(run_dir))
    path = Path(output) if output is not None else run.path / "report.html"
    write_atomically(path, _page([run]))
    return path


def try_to_write_report(run: RunFolder) -> None:
    """Write the report of a run; a failure is logged, so that it never ends the run."""
    try:
        write_report(run.path)
    except Exception as problem:
        logger.error("could not write %s: %s: %s", run.report_path, type(problem).__name__, problem)


def write_comparison(run_dirs: Sequence[str | Path], output: str | Path | None = None) -> Path:
    """Write several runs on one page and return its path (``comparison.html`` beside the first, by
    default).

    Raises:
        UserError: one of them is not a run folder.
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
    return one_file(title, _words_html(data["runs"]["runs"]), packed(data), is_live=is_live).encode(
        "utf-8", "replace"
    )


def _words_html(runs: Iterable[dict[str, Any]]) -> str:
    """Return state, crash and alarms of each run as plain HTML, shown if the script does not run.

    Args:
        runs: results of `stages.describe`.
    """
    needs = (
        "This page needs JavaScript and a browser released in 2023 or later. The run folder holds "
        "the same data:"
    )
    needs += " metrics in metrics.jsonl, samples in samples/."
    parts = [f'<p class="none">{needs}</p>']
    for run in runs:
        state = f'<span class="state">{_text(run["state"])}</span>' if run["state"] else ""
        parts.append(
            f"<h2>{_text(run['name'])} {state}</h2><p>{_text(' · '.join(run['facts']))}</p>"
        )
        if run["crash"]:
            said = "\n".join(
                str(line) for line in (run["crash"]["message"], *(run["crash"]["notes"] or ()))
            )
            parts.append(
                f"<p><b>{_text(run['crash']['error'] or 'The run failed')}:</b></p>"
                f"<pre>{_text(said)}</pre>"
            )
        alarms = [
            f"<li><b>{_text(a['title'])}.</b> {_text(a['detail'])}</li>" for a in run["alarms"]
        ]
        parts.append(f'<ul class="alarms">{"".join(alarms)}</ul>' if alarms else "")
        if run["step"] is not None:
            parts.append(f"<p>Last logged step: {_text(run['step'])}.</p>")
    return "".join(parts)


def _text(value: Any) -> str:
    return html.escape(str(value), quote=True)


class ReportSink:
    """Rewrites the report of a run after a step, in a thread, beside the next step: rarely enough
    to take less than 1 % of the time. The page reloads itself.

    Args:
        clock: returns the time in seconds.
    """

    def __init__(self, run: RunFolder, clock: Callable[[], float] = time.monotonic) -> None:
        self._run = run
        self._clock = clock
        self._next = clock()
        self._writing: threading.Thread | None = None

    def log(self, step: int, metrics: dict[str, float]) -> None:
        if self._clock() < self._next or (self._writing is not None and self._writing.is_alive()):
            return
        self._writing = threading.Thread(target=self._write, name="report", daemon=True)
        self._writing.start()

    def _write(self) -> None:
        started = self._clock()
        try_to_write_report(self._run)
        ended = self._clock()
        self._next = ended + max(deadlines.REPORT_INTERVAL, (ended - started) / _SHARE)

    def rewind(self, next_step: int) -> None:
        """Do nothing: the next report shows the remaining steps."""

    def close(self) -> None:
        """Wait for a report that is being written; the code that ends the run writes the last."""
        if self._writing is not None:
            self._writing.join(deadlines.REPORT_INTERVAL)
