"""Output in notebooks: the cell of a run has a single output, which is updated in place."""

from __future__ import annotations

import os
import sys
import time
from collections import deque
from collections.abc import Callable, Mapping
from typing import Any, TextIO

_SHOWN_LINES = 25
_SECONDS_BETWEEN_UPDATES = 0.5


def can_move_cursor(stream: TextIO, environ: Mapping[str, str] = os.environ) -> bool:
    """Tell whether ``stream`` is a terminal on which a table can be redrawn.

    FORCE_COLOR does not make a pipe count. The terminal of a notebook's ``!command`` does not count
    either: the cell would append each state of the table. Kernels set TERM and GIT_PAGER for it.
    """
    is_of_notebook = environ.get("TERM") == "xterm-color" and environ.get("GIT_PAGER") == "cat"
    return stream.isatty() and not is_of_notebook


class LinePrinter:
    """Prints the lines of a run one by one, or shows the last ones in one output of a notebook.

    Create it in the thread that runs the cell; the methods may be called in another thread.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._lines: deque[str] = deque(maxlen=_SHOWN_LINES)
        self._is_changed = False
        self._updated = clock()
        self._output = _new_output()

    def add(self, line: str) -> None:
        """Show one more line, which ends with a newline."""
        if self._output is None:
            print(line, end="", flush=True)
            return
        self._lines.append(line)
        self._is_changed = True

    def refresh(self, at_once: bool = False) -> None:
        """Show new lines in the notebook's output, at most twice a second unless ``at_once``."""
        now = self._clock()
        is_due = at_once or now - self._updated >= _SECONDS_BETWEEN_UPDATES
        if self._output is not None and self._is_changed and is_due:
            self._output.update({"text/plain": "".join(self._lines)}, raw=True)
            self._is_changed = False
            self._updated = now


def _new_output() -> Any:
    """Create an updatable IPython display; None outside of a kernel."""
    ipython = sys.modules.get("IPython")
    if ipython is None or getattr(ipython.get_ipython(), "kernel", None) is None:
        return None
    return ipython.display.display({"text/plain": "starting …"}, raw=True, display_id=True)
