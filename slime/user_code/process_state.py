"""Undo what users' functions change of the process that everything in it shares.

    working directory       relative paths of the run's own files would lead elsewhere
    signal handlers         those of the run stop it cleanly; an alarm that is set would kill it
    torch's defaults        dtype, device, gradients: training would compute otherwise
    torch's random numbers  a seed set at each call would repeat the same dropout

A function may change them while it runs. What is left when it returns is set back, with one warning
that names it. Functions may overlap: things are set back when none runs. Variables of the
environment that are changed stay so, as libraries set theirs; a warning names those that were there
before.
"""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
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


def _set_handlers(handlers: tuple[Any, ...]) -> None:
    for number, handler in zip(_SIGNALS, handlers):
        if handler is not None:  # None: not set by Python
            signal.signal(number, handler)


def _set_alarm(is_set: bool) -> None:
    if not is_set:
        signal.setitimer(signal.ITIMER_REAL, 0)


def _torch() -> Any:
    return sys.modules.get("torch")


@dataclass(frozen=True)
class SharedPart:
    """One thing that a process shares.

    Attributes:
        what: completes "a function has changed …".
        instead: what the function should do.
        read, write: get and set it.
        is_local: each thread has its own.
    """

    what: str
    instead: str
    read: Callable[[], Any]
    write: Callable[[Any], None]
    is_local: bool = False


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
        lambda: tuple(map(signal.getsignal, _SIGNALS)),
        _set_handlers,
    ),
    SharedPart(
        "an alarm, which would kill it",
        "leave signal.alarm out, and give what may hang a deadline",
        lambda: signal.getitimer(signal.ITIMER_REAL)[0] > 0,
        _set_alarm,
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
    """(seed, state on the CPU, state on the GPU) of torch's default generators."""
    torch = _torch()
    on_gpu = torch.cuda.get_rng_state() if torch.cuda.is_initialized() else None
    return torch.initial_seed(), torch.get_rng_state(), on_gpu


class _Snapshot:
    """The state of the process."""

    def __init__(self, *, with_seeds: bool) -> None:
        self._thread = threading.get_ident()
        self._parts = _PARTS + (_TORCH_PARTS if _torch() is not None else ())
        self._values = [part.read() for part in self._parts]
        self._environment = dict(os.environ)
        self._random = _random_states() if with_seeds and _torch() is not None else None

    def changes(self, *, undo: bool) -> list[tuple[str, str]]:
        """What has changed since, and what to do instead.

        Args:
            undo: set it back.
        """
        found = []
        for part, before in zip(self._parts, self._values):
            if part.is_local and threading.get_ident() != self._thread:
                continue
            if part.read() != before:
                found.append((part.what, part.instead))
                if undo:
                    with contextlib.suppress(ValueError):  # handlers, outside the main thread
                        part.write(before)
        now = os.environ
        odd = [name for name, value in self._environment.items() if now.get(name) != value]
        if odd:
            found.append((f"the variable {odd[0]} of the environment", "pass env= to a subprocess"))
            self._environment = dict(now)
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
def kept(origin: str, *, with_seeds: bool = False) -> Iterator[None]:
    """Guard the state of the process while a user's function runs in this block.

    Costs about 50 µs.

    Args:
        origin: names the function in messages.
        with_seeds: torch's generators belong to training.
    """
    with _lock:
        if not _running:
            _before[:] = [_Snapshot(with_seeds=with_seeds)]
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
