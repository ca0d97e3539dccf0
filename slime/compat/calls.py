"""Helpers that plugins of earlier versions import: coroutines in sync code, filters and rollout
functions, ports, singletons."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import inspect
import itertools
import socket
import subprocess
import threading
from collections.abc import Callable, Coroutine, Iterator
from typing import Any, ClassVar, TypeVar

from slime.errors import UserError
from slime.log import get_logger
from slime.observe.trace import Span, span
from slime.processes.host import PortReservation, reserve_port
from slime.rollout import loop
from slime.rollout.filters import verdict_of
from slime.rollout.generate import current_state, is_in_run
from slime.rollout.user_rollouts import wrapped
from slime.samples.types import Sample
from slime.user_code.hooks import DynamicFilterOutput
from slime.user_code.loading import failures_of

logger = get_logger(__name__)

T = TypeVar("T")

# -- coroutines ------------------------------------------------------------------------------------


class AsyncLoopThread:
    """An event loop in a daemon thread."""

    def __init__(self) -> None:
        self.loop = asyncio.new_event_loop()
        threading.Thread(
            target=self.loop.run_forever, name="slime-plugin-loop", daemon=True
        ).start()

    def run(self, coro: Coroutine[Any, Any, T]) -> T:
        """Return the coroutine's result; deadlocks if called on the loop itself."""
        future = asyncio.run_coroutine_threadsafe(coro, self.loop)
        return future.result()  # no timeout


class _RunsLoop:
    """Runs coroutines on the event loop of the run."""

    @property
    def loop(self) -> asyncio.AbstractEventLoop | None:
        return current_state().loop

    def run(self, coro: Coroutine[Any, Any, T]) -> T:
        return loop.run(coro)


@functools.cache
def shared_loop() -> AsyncLoopThread:
    """Return the event loop of a process without a run; in a run, a second loop for sync functions
    that need one."""
    return AsyncLoopThread()


def get_async_loop() -> AsyncLoopThread | _RunsLoop:
    """Return the run's event loop; without a run, `shared_loop`."""
    return _RunsLoop() if is_in_run() else shared_loop()


def run(coro: Coroutine[Any, Any, T]) -> T:
    """Run a coroutine from sync code and return its result: on the run's event loop, or without a
    run on `shared_loop`.

    Raises:
        UserError: called on the run's event loop itself, which would deadlock.
    """
    return get_async_loop().run(coro)


# -- functions of users ----------------------------------------------------------------------------


def call_dynamic_filter(fn: Any, *args: Any, **kwargs: Any) -> DynamicFilterOutput:
    """Return the verdict of a sync filter ``fn(args, samples)``; None keeps everything, a bare bool
    is wrapped."""
    if fn is None:
        return DynamicFilterOutput(keep=True)
    with failures_of("the dynamic filter"):
        return verdict_of(fn(*args, **kwargs))


def call_rollout_fn(fn: Any, *args: Any, evaluation: bool, **kwargs: Any) -> Any:
    """Call a rollout function, sync or async; wrap its result if it is a bare list (training) or
    dict (evaluation)."""
    output = fn(*args, **kwargs, evaluation=evaluation)
    return wrapped(run(output) if inspect.iscoroutine(output) else output, evaluation)


class SingletonMeta(type):
    """Metaclass of classes with one instance per process; later arguments are ignored."""

    _instances: ClassVar[dict[type, Any]] = {}

    def __call__(cls, *args: Any, **kwargs: Any) -> Any:
        if cls not in cls._instances:
            cls._instances[cls] = super().__call__(*args, **kwargs)
        return cls._instances[cls]


# -- hosts -----------------------------------------------------------------------------------------

#: An address that no host has (RFC 5737).
_ELSEWHERE = ("192.0.2.1", 9)
#: Ports reserved for this process until it ends.
_held: list[PortReservation] = []


def init_http_client(args: Any) -> None:
    """Do nothing: `post` and `get` use the run's client, or make one without a run."""


def is_port_available(port: int) -> bool:
    """Tell whether a port of this host is neither in use nor reserved
    (`slime.processes.host.reserve_port`)."""
    try:
        reserve_port(port=port).release()
    except UserError:
        return False
    return True


def find_available_port(base_port: int) -> int:
    """Reserve a random free port of this host until this process ends. ``base_port`` is
    ignored."""
    _held.append(reserve_port())
    return _held[-1].port


def get_free_port(start_port: int = 10000, consecutive: int = 1) -> int:
    """Return the first of ``consecutive`` free ports, from ``start_port`` on."""
    starts = itertools.count(start_port)
    return next(
        start for start in starts if all(is_port_available(start + i) for i in range(consecutive))
    )


def get_current_node_ip() -> str:
    """Return this host's address for outgoing connections, without sending a packet; the loopback
    address if there is no route."""
    with contextlib.suppress(OSError), socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as asked:
        asked.connect(_ELSEWHERE)
        return str(asked.getsockname()[0])
    return "127.0.0.1"


def get_host_info() -> tuple[str, str]:
    """This host's name and address."""
    return socket.gethostname(), get_current_node_ip()


def exec_command(cmd: str, capture_output: bool = False) -> str | None:
    """Run a line of bash without a timeout; return its output if ``capture_output``, else None.

    Raises:
        subprocess.CalledProcessError: the command failed.
    """
    logger.info("runs: %s", cmd)
    done = subprocess.run(["bash", "-c", cmd], check=True, text=True, capture_output=capture_output)
    return done.stdout if capture_output else None


# -- traces ----------------------------------------------------------------------------------------


@contextlib.contextmanager
def trace_span(
    target: Sample | list[Sample], name: str, attrs: dict[str, Any] | None = None
) -> Iterator[Span]:
    """`slime.observe.trace.span`."""
    with span(target, name, **(attrs or {})) as opened:
        yield opened


def trace_function(
    name: str,
    *,
    target: str | Callable[..., Any] = "sample",
    attrs_getter: Callable[..., dict[str, Any]] | None = None,
) -> Callable[[Any], Any]:
    """Record each call of an async function as a span of its argument ``target``."""

    def decorate(fn: Any) -> Any:
        signature = inspect.signature(fn)

        @functools.wraps(fn)
        async def call(*args: Any, **kwargs: Any) -> Any:
            given = signature.bind(*args, **kwargs).arguments
            traced = target(*args, **kwargs) if callable(target) else given[target]
            with span(traced, name, **(attrs_getter(*args, **kwargs) if attrs_getter else {})):
                return await fn(*args, **kwargs)

        return call

    return decorate
