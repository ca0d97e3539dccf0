"""Undo what users' functions change of the process that everything in it shares.

    working directory       relative paths of the run's own files would lead elsewhere
    signal handlers         those of the run stop it cleanly; an alarm that is set would kill it
    resource limits         those set to guard one call would hit all that the process does next
    umask                   others, or this user, could not read the run's files
    stdout and stderr       contextlib.redirect_stdout in overlapping calls leaves the wrong one
    logging.disable         the run's own warnings would be missing
    torch's defaults        dtype, device, gradients: training would compute otherwise
    torch's random numbers  a seed set at each call would repeat the same dropout

A function may change them while it runs. What is left when it returns is set back, with one warning
that names it. Functions may overlap: things are set back when none runs. Variables of the
environment that are changed stay so, as libraries set theirs; a warning names those that were there
before.
"""

from __future__ import annotations

import contextlib
import logging
import os
import resource
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from slime.log import get_logger, tell

logger = get_logger(__name__)

_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGCHLD, signal.SIGHUP)


def _set_directory(path: str) -> None:
    with contextlib.suppress(OSError):  # it was removed
        os.chdir(path)


def _directory() -> str:
    try:
        return os.getcwd()
    except OSError:  # it was removed
        return ""


def _handlers() -> tuple[Any, ...]:
    # no other thread can set them
    is_main = threading.current_thread() is threading.main_thread()
    return tuple(map(signal.getsignal, _SIGNALS)) if is_main else ()


def _set_handlers(handlers: tuple[Any, ...]) -> None:
    for number, handler in zip(_SIGNALS, handlers):
        if handler is not None:  # None: not set by Python
            signal.signal(number, handler)


def _set_alarm(is_set: bool) -> None:
    if not is_set:
        signal.setitimer(signal.ITIMER_REAL, 0)


_LIMITS = (
    resource.RLIMIT_AS,
    resource.RLIMIT_CPU,
    resource.RLIMIT_DATA,
    resource.RLIMIT_FSIZE,
    resource.RLIMIT_NOFILE,
    resource.RLIMIT_NPROC,
    resource.RLIMIT_STACK,
)


def _set_limits(limits: tuple[tuple[int, int], ...]) -> None:
    for number, (soft, hard) in zip(_LIMITS, limits):
        if resource.getrlimit(number) != (soft, hard):
            try:
                resource.setrlimit(number, (soft, hard))
            except ValueError:  # only root may raise a hard limit
                most = resource.getrlimit(number)[1]
                resource.setrlimit(number, (most, most))


def _umask() -> int | None:
    """Return the mask without setting it, as `os.umask` would; None if it cannot be read."""
    try:
        status = Path("/proc/self/status").read_bytes()
    except OSError:  # no file can be opened
        return None
    return int(status.partition(b"Umask:")[2].split(maxsplit=1)[0], 8)


def _set_umask(mask: int) -> None:
    os.umask(mask)


#: Standard output and error before the first function of users' in this process.
_usual_streams: list[tuple[Any, Any]] = []


def _streams() -> tuple[Any, Any] | None:
    """Return the usual streams; None while a call that nobody waits for has replaced them."""
    now = (sys.stdout, sys.stderr)
    if not _usual_streams:
        _usual_streams.append(now)
    return now if now == _usual_streams[0] else None


def _set_streams(streams: tuple[Any, Any]) -> None:
    sys.stdout, sys.stderr = streams


def _environment() -> dict[bytes, bytes]:
    """Return the environment's variables undecoded: copying `os.environ` would decode each one."""
    return dict(vars(os.environ)["_data"])


def _torch() -> Any:
    return sys.modules.get("torch")


@dataclass(frozen=True)
class SharedPart:
    """One thing that a process shares.

    Attributes:
        what: completes "a function has changed …".
        instead: what the function should do.
        read, write: get and set it; None is not set back.
        is_local: each thread has its own.
        is_often_borrowed: functions change it for a moment, so it is compared when none runs.
    """

    what: str
    instead: str
    read: Callable[[], Any]
    write: Callable[[Any], None]
    is_local: bool = False
    is_often_borrowed: bool = False


_PARTS = (
    SharedPart(
        "the working directory",
        "pass cwd= to a subprocess, and use absolute paths",
        _directory,
        _set_directory,
    ),
    SharedPart(
        "a signal handler",
        "run what needs one in a subprocess",
        _handlers,
        _set_handlers,
        is_local=True,
    ),
    SharedPart(
        "an alarm, which would kill it",
        "leave signal.alarm out, and give what may hang a deadline",
        lambda: signal.getitimer(signal.ITIMER_REAL)[0] > 0,
        _set_alarm,
    ),
    SharedPart(
        "a resource limit",
        "run what needs one in a subprocess",
        lambda: tuple(map(resource.getrlimit, _LIMITS)),
        _set_limits,
        is_often_borrowed=True,
    ),
    SharedPart("the umask", "use os.chmod", _umask, _set_umask, is_often_borrowed=True),
    SharedPart(
        "sys.stdout or sys.stderr",
        "leave contextlib.redirect_stdout out: calls overlap",
        _streams,
        _set_streams,
        is_often_borrowed=True,
    ),
    SharedPart(
        "logging.disable",
        "set the level of a logger",
        lambda: logging.root.manager.disable,
        logging.disable,
        is_often_borrowed=True,
    ),
)
_TORCH_PARTS = (
    SharedPart(
        "torch's default dtype",
        "give tensors their dtype",
        lambda: _torch().get_default_dtype(),
        lambda value: _torch().set_default_dtype(value),
    ),
    SharedPart(
        "torch's default device",
        "give tensors their device, or use `with torch.device(…)`",
        lambda: _torch().get_default_device(),
        lambda value: _torch().set_default_device(None if value.type == "cpu" else value),
        is_local=True,
    ),
    SharedPart(
        "whether torch computes gradients",
        "use `with torch.no_grad()`",
        lambda: _torch().is_grad_enabled(),
        lambda value: _torch().set_grad_enabled(value),
        is_local=True,
    ),
    SharedPart(
        "torch's precision of matrix products",
        "leave it as it is",
        lambda: _torch().get_float32_matmul_precision(),
        lambda value: _torch().set_float32_matmul_precision(value),
    ),
    SharedPart(
        "torch's deterministic algorithms",
        "pass --deterministic-mode, or leave it as it is",
        lambda: _torch().are_deterministic_algorithms_enabled(),
        lambda value: _torch().use_deterministic_algorithms(value),
    ),
)


def _random_states() -> tuple[int, Any, Any]:
    """Return the seed of torch's default generators, and their states on the CPU and on the GPU."""
    torch = _torch()
    on_gpu = torch.cuda.get_rng_state() if torch.cuda.is_initialized() else None
    return torch.initial_seed(), torch.get_rng_state(), on_gpu


class _Snapshot:
    """The state of the process."""

    def __init__(self, *, in_training: bool) -> None:
        self._thread = threading.get_ident()
        self._parts: tuple[SharedPart, ...] = _PARTS
        if _torch() is not None:
            self._parts += tuple(one for one in _TORCH_PARTS if in_training or not one.is_local)
        self._values = [part.read() for part in self._parts]
        self._environment = _environment()
        self._random = _random_states() if in_training and _torch() is not None else None

    def changes(self, *, undo: bool) -> list[tuple[str, str]]:
        """Return what has changed since this snapshot, and what the function should do instead.

        Args:
            undo: set it back.
        """
        found = []
        for part, before in zip(self._parts, self._values):
            if part.is_local and threading.get_ident() != self._thread:
                continue
            if before is None or (part.is_often_borrowed and not undo):
                continue
            if part.read() != before:
                found.append((part.what, part.instead))
                if undo:
                    with contextlib.suppress(ValueError):  # handlers, outside the main thread
                        part.write(before)
        now = _environment()
        if now != self._environment:
            items = self._environment.items()
            odd = [os.fsdecode(name) for name, value in items if now.get(name) != value]
            found += [
                (f"the variable {name} of the environment", "pass env= to a subprocess")
                for name in odd
            ]
            self._environment = now
        if undo and self._random is not None and _torch().initial_seed() != self._random[0]:
            torch = _torch()
            found.append(("torch's seed", "use a torch.Generator of your own"))
            torch.manual_seed(self._random[0])
            torch.set_rng_state(self._random[1])
            if self._random[2] is not None:
                torch.cuda.set_rng_state(self._random[2])
        return found


_lock = threading.Lock()
_running: list[str] = []
_before: list[_Snapshot] = []
"""The state before the first of the functions that run; at most one."""
_since: dict[str, None] = {}
"""The functions that have run since."""
_told: dict[str, set[str]] = {}
"""What has changed → the functions that a warning has named."""


@contextlib.contextmanager
def kept(origin: str, *, in_training: bool = False) -> Iterator[None]:
    """Set back what a user's function, which runs in this block, changes of the process.

    Args:
        origin: names the function in messages.
        in_training: the function runs where training does: torch's generators and the defaults of
            this thread matter.
    """
    with _lock:
        if not _running:
            _before[:] = [_Snapshot(in_training=in_training)]
            _since.clear()
        _running.append(origin)
        _since[origin] = None
    try:
        yield
    finally:
        with _lock:
            _running.remove(origin)
            names = list(_since)
            changes = _before[0].changes(undo=not _running)
        for what, instead in changes:
            told = _told.setdefault(what, set())
            if told.isdisjoint(names):  # else one of them may have done it again
                tell(
                    logger,
                    "%s has changed %s, which the whole process shares%s: %s",
                    " or ".join(names),
                    what,
                    "" if "environment" in what else "; it is set back",
                    instead,
                )
            told.update(names)
