"""An HTTP server in a child process: start it, wait until it is ready, read its log and stop it."""

from __future__ import annotations

import contextlib
import functools
import itertools
import os
import re
import signal
import subprocess
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import urlsplit

from slime import deadlines
from slime.engines.api import is_ready
from slime.engines.launch import LaunchSpec
from slime.processes import preloaded
from slime.processes.host import past_proxies
from slime.processes.owner import die_with_parent

_LOG_BYTES = 1 << 18
_TAIL_LINES = 40  # the process survived exceptions above the last lines of its log
#: SGLang's processes fail one after the other; the first failure is the cause.
_FIRST_FAILURE = "Scheduler hit an exception:"
_TRACEBACK = "Traceback (most recent call last):"
_ERROR = "error: "
_NO_CAUSE = re.compile(r"KeyboardInterrupt|SystemExit|(\w+\.)*CancelledError")
_CLASH_MARKS = ("address already in use", "address in use", "errno 98", "addrinuse")


class ServerDied(Exception):
    """A server process ended by itself or was not ready in time; holds the last lines of its
    log."""

    def __init__(self, name: str, what: str, log_tail: str) -> None:
        super().__init__(name, what, log_tail)
        self.name = name
        self.what = what
        self.log_tail = log_tail

    @property
    def is_port_clash(self) -> bool:
        return any(mark in self.log_tail.lower() for mark in _CLASH_MARKS)

    def __str__(self) -> str:
        return f"{self.name} {self.what}; last lines of its log:\n{self.log_tail}"


def exception_line(log: str) -> str:
    """Return the log line with the exception that ended a process, or "".

    For an error that the process reported without a traceback, the line has its reason and remedy.

    Example:
        >>> exception_line(
        ...     "Traceback (most recent call last):\\n  File ...\\n"
        ...     "ValueError: no\\nSIGQUIT received.")
        'ValueError: no'
    """
    _, mark, failure = log.partition(_FIRST_FAILURE)
    lines = (failure if mark else log).splitlines()
    found = []
    inside = False
    for number, line in enumerate(lines):
        if _TRACEBACK in line:
            inside = True
        elif inside and line.strip() and not line[0].isspace():
            inside = False
            if (mark or number >= len(lines) - _TAIL_LINES) and not _NO_CAUSE.match(line):
                found.append(line.strip())
    if found:
        return found[0 if mark else -1]
    return _told_error(lines[-_TAIL_LINES:])


def _told_error(lines: Sequence[str]) -> str:
    """Return the last `UserError` of a log, in one line.

    Example:
        >>> _told_error(["starting", "error: no model", "  why: the folder is empty"])
        'error: no model; why: the folder is empty'
    """
    start = next((n for n in reversed(range(len(lines))) if lines[n].startswith(_ERROR)), None)
    if start is None:
        return ""
    parts = itertools.takewhile(lambda line: line.startswith("  "), lines[start + 1 :])
    return "; ".join(line.strip() for line in (lines[start], *parts))


@dataclass(eq=False)
class ServerProcess:
    """A server process, forked from this process or from the preloaded one.

    It leads its own session, so `stop` also reaches its children. It is killed when this process
    dies.

    Args:
        name: for messages.
        spec: command line, environment, and the path that answers when the server is ready.
        url: base URL at which it will answer.
        log_path: file for stdout and stderr.
        hosts: hosts of the run's other processes, to which it connects without a proxy.
    """

    name: str
    spec: LaunchSpec
    url: str
    log_path: Path
    hosts: Sequence[str] = ()

    def __post_init__(self) -> None:
        self._process: subprocess.Popen[bytes] | preloaded.ForkedProcess | None = None
        self._log_start = 0

    def start(self) -> None:
        self.log_path.parent.mkdir(parents=True, exist_ok=True)
        with open(self.log_path, "ab") as log:
            self._log_start = log.tell()  # earlier servers of this name wrote the log up to here
            hosts = [urlsplit(self.url).hostname or "", *self.hosts]
            environment = {**os.environ, **past_proxies(hosts), **self.spec.env}
            if self.spec.is_preloaded and preloaded.VARIABLE in os.environ:
                with contextlib.suppress(OSError):  # else start it without preloading
                    self._process = preloaded.ForkedProcess(
                        self.spec.argv, environment, log.fileno()
                    )
                    return
            self._process = subprocess.Popen(
                self.spec.argv,
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
                preexec_fn=functools.partial(die_with_parent, os.getpid()),
            )

    @property
    def pid(self) -> int | None:
        return self._process.pid if self._process else None

    def is_alive(self) -> bool:
        return self._process is not None and self._process.poll() is None

    def ends_within(self, seconds: float) -> bool:
        """Return whether the process ends within ``seconds``. A killed process closes its sockets a
        little before it ends."""
        assert self._process is not None
        try:
            self._process.wait(seconds)
        except subprocess.TimeoutExpired:
            return False
        return True

    def how_it_ended(self) -> str:
        """Return "was killed (SIGKILL)" or "ended with exit status 1", for messages."""
        assert self._process is not None and self._process.returncode is not None
        code = self._process.returncode
        if code < 0:
            return f"was killed ({signal.Signals(-code).name})"
        return f"ended with exit status {code}"

    def log_tail(self, num_lines: int = 6) -> str:
        if not self.log_path.exists():
            return "(no log)"
        return "\n".join(self._log(16_384).splitlines()[-num_lines:])

    def exception_line(self) -> str:
        """Return the log line with the exception that ended this process, or ""."""
        return exception_line(self._log(_LOG_BYTES)) if self.log_path.exists() else ""

    def _log(self, num_bytes: int) -> str:
        """Return the end of this process's output."""
        with open(self.log_path, "rb") as log:
            log.seek(max(self._log_start, self.log_path.stat().st_size - num_bytes))
            return log.read().decode(errors="replace")

    def wait_ready(self) -> None:
        """Poll the health path until it answers 200.

        Raises:
            ServerDied: the process ended first, or was not ready within the spec's deadline.
        """
        limit = self.spec.startup_timeout
        end = time.monotonic() + limit
        health_url = self.url + self.spec.health_path
        delay = 0.02
        while time.monotonic() < end:
            if not self.is_alive():
                raise ServerDied(
                    self.name, f"{self.how_it_ended()} before it was ready", self.log_tail()
                )
            if is_ready(health_url, self.spec.health_timeout):
                return
            time.sleep(delay)
            delay = min(delay * 1.3, 0.5)
        self.stop(grace=0)
        raise ServerDied(self.name, f"was not ready within {limit:.0f} s", self.log_tail())

    def stop(self, grace: float = 5.0) -> None:
        """Send SIGTERM to the whole session, SIGKILL after ``grace`` seconds, and wait for its
        end."""
        if self._process is None:
            return
        if self._process.poll() is None and grace > 0:
            self._signal(signal.SIGTERM)
            with contextlib.suppress(subprocess.TimeoutExpired):  # the kill below follows
                self._process.wait(grace)
        self._signal(signal.SIGKILL)  # also for children that outlived the server
        self._process.wait(deadlines.SERVER_PROCESS_KILL)

    def _signal(self, number: signal.Signals) -> None:
        assert self._process is not None
        with contextlib.suppress(ProcessLookupError):  # all have ended already
            os.killpg(self._process.pid, number)
