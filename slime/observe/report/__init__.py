"""``report.html``: a run on one page. `slime report RUN_DIR` writes it at any time, also while the run goes on.

The file needs no network and no server: open it from the file system, send it by mail, attach it to an issue.
"""

from __future__ import annotations

from pathlib import Path

from slime.files import write_atomically
from slime.observe.report.data import read_run
from slime.observe.report.page import render

__all__ = ["write_report"]


def write_report(run_dir: str | Path, output: str | Path | None = None) -> Path:
    """Write the report of a run folder and return its path (``<run_dir>/report.html`` unless `output` is given).

    Raises:
        UserError: `run_dir` is no run folder.
        OSError: the file cannot be written.
    """
    run = read_run(Path(run_dir))
    path = Path(output) if output is not None else run.path / "report.html"
    write_atomically(path, render(run).encode("utf-8", "replace"))
    return path
