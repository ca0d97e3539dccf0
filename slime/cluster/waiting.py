"""Waits for actors: deadlines, messages that name actors and their processes, and SIGTERM."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import ray
from ray.exceptions import (
    ActorUnavailableError,
    ObjectLostError,
    OutOfMemoryError,
    RayActorError,
    RayTaskError,
)

from slime import deadlines
from slime.cluster import open_waits
from slime.cluster.slow_waits import SlowWaitLogger, own_actors, pid_here, stopped_parts
from slime.errors import RunFailed, UserError
from slime.log import get_logger
from slime.memory.remedies import ON_HOST
from slime.processes import stacks
from slime.processes.children import compiles
from slime.processes.host import num_gpus

logger = get_logger(__name__)


class StopRequested(Exception):
    """The run was asked to stop (SIGTERM) while it waited; its current work is abandoned."""


class ActorLost(RunFailed):
    """Actors died or do not answer.

    Attributes:
        names: names of the actors; () if not known.
    """

    names: tuple[str, ...] = ()

    def naming(self, *workers: NamedActor) -> ActorLost:
        """Set ``names`` and return the error itself."""
        self.names = tuple(worker.name for worker in workers)
        return self


class DeadlinePassed(ActorLost):
    """An actor did not answer in time."""


class ActorDied(ActorLost):
    """An actor's process ended."""


class ActorUnreachable(ActorDied):
    """The connection to an actor broke during a call; its process may still live."""


class ConnectionBroken(ActorLost):
    """Actors lost their connections to each other, for an unknown reason."""


class NoEngineLeft(Exception):
    """No engine is left for the running rollout, and none can return."""


class Process(NamedTuple):
    """Process id and host of an actor, as reported by the actor."""

    pid: int
    host: str

    def __str__(self) -> str:
        return f"pid {self.pid} on {self.host}"


def this_process() -> Process:
    """Return the `Process` of this actor."""
    return Process(os.getpid(), ray.util.get_node_ip_address())


class NamedActor:
    """An actor as messages name it: "trainer-0 (pid 4711 on 10.0.0.3)", once its process is known.

    Args:
        process: reference to the actor's `this_process`; None if it is not requested.
    """

    def __init__(self, name: str, process: ray.ObjectRef | None = None) -> None:
        self.name = name
        self._process = process
        self._found: Process | None = None

    @property
    def process(self) -> Process | None:
        """The actor's process; None until it has answered, or if it died before."""
        if (
            self._found is not None
            or self._process is None
            or not ray.wait([self._process], timeout=0)[0]
        ):
            return self._found
        try:
            self._found = ray.get(self._process)
        except RayActorError as error:
            logger.debug("%s never reported its process: %s", self.name, error)
        return self._found

    def __str__(self) -> str:
        process = self.process
        return f"{self.name} ({process})" if process is not None else self.name


#: In Ray's error if the head has given up the actor's node.
_NODE_DIED = "its node has died"

#: Actor → reference to its answer.
Asked = Mapping[NamedActor, ray.ObjectRef]


def wait_for(
    asked: Asked,
    what: str,
    timeout: float,
    should_stop: Callable[[], bool] = lambda: False,
    on_poll: Callable[[], None] = lambda: None,
    progress: Callable[[], object] = lambda: None,
    details: Callable[[], str] = str,
    *,
    logs_slow_waits: bool = True,
) -> list[Any]:
    """Wait for all answers and return them in the order of ``asked``.

    The first failure is raised at once, without waiting for the others. While there is no progress,
    log lines name the actors that are waited for (`slime.cluster.slow_waits`).

    Args:
        what: "training", "pushing weights"; names the wait in errors.
        timeout: seconds for all answers together.
        should_stop: polled about twice a second; if true, `StopRequested` is raised.
        on_poll: called as often; what it raises ends the wait.
        progress: returns any value that changes with progress.
        details: returns more about the actors, for log lines.
        logs_slow_waits: false if ``on_poll`` logs the wait.
    Raises:
        UserError: an actor raised it. DeadlinePassed, ActorDied, StopRequested; other errors of the
            actor unchanged.
    """
    end = time.monotonic() + timeout
    worker_of = {ref: worker for worker, ref in asked.items()}
    pending = list(worker_of)
    slow_wait = SlowWaitLogger(what)
    with open_waits.waiting(what) as wait:
        while pending:
            if should_stop():
                raise StopRequested(what)
            open_waits.raise_interrupt()
            silent = [worker_of[ref] for ref in pending]
            wait.pending = {worker.name: pid_here(worker) or 0 for worker in silent}
            left = end - time.monotonic()
            if left <= 0:
                raise _deadline_passed(silent, what, timeout, wait.since)
            done, pending = ray.wait(
                pending, num_returns=1, timeout=min(deadlines.WAITING_POLL, left)
            )
            for ref in done:
                try:
                    _fetch(ref, what, worker_of[ref])
                except UserError:
                    raise
                except Exception as error:
                    _raise_cause(error, pending, what, worker_of)
            if done:
                open_waits.note_progress()
            on_poll()
            if logs_slow_waits:
                state = len(pending), progress()
                slow_wait.poll([worker_of[ref] for ref in pending], state, details)
    return [_fetch(ref, what, worker) for worker, ref in asked.items()]


@contextmanager
def waiting_for(what: str) -> Iterator[Callable[[Asked], None]]:
    """Yield a function that waits a moment, for at most one answer; the caller decides when to end.

    Log lines are written as in `wait_for`.
    """
    slow_wait = SlowWaitLogger(what)
    with open_waits.waiting(what) as wait:

        def a_moment(asked: Asked) -> None:
            open_waits.raise_interrupt()
            wait.pending = {worker.name: pid_here(worker) or 0 for worker in asked}
            ray.wait(list(asked.values()), num_returns=1, timeout=deadlines.WAITING_POLL)
            slow_wait.poll(list(asked), sorted(worker.name for worker in asked))

        yield a_moment


def _finished(asked: Asked) -> set[ray.ObjectRef]:
    """Return the refs that have an answer or a failure by now, without waiting."""
    refs = list(asked.values())
    return set(ray.wait(refs, num_returns=len(refs), timeout=0)[0]) if refs else set()


def all_answered(asked: Asked) -> bool:
    """Return whether all have answered or failed, without waiting."""
    return len(_finished(asked)) == len(asked)


def describe_unanswered(asked: Asked) -> str:
    """Wait shortly and name the actors that do not answer; "" if all do."""
    try:
        wait_for(asked, "asking who still answers", deadlines.WAITING_PING)
    except RunFailed as error:
        return error.what
    return ""


def raise_failed(asked: Asked, what: str) -> None:
    """Raise the error of the first actor that has failed by now, without waiting."""
    done = _finished(asked)
    for worker, ref in asked.items():
        if ref in done:
            _fetch(ref, what, worker)


class Watch:
    """Keeps one call open with each of several actors, to notice soon when one of them dies.

    Args:
        questions: actor → a function that starts a call; the actor must answer it quickly.
        on_answer: called with name and answer; may raise.
    """

    def __init__(
        self,
        questions: Mapping[NamedActor, Callable[[], ray.ObjectRef]],
        on_answer: Callable[[str, Any], None] = lambda name, answer: None,
    ) -> None:
        self._questions = questions
        self._on_answer = on_answer
        self._asked: dict[NamedActor, ray.ObjectRef] = {}

    def poll(self) -> None:
        """Handle the answers that have come and ask those actors again, without waiting.

        Raises:
            ActorDied: one of them has died. Also what ``on_answer`` raises.
        """
        done = _finished(self._asked)
        for worker, ask in self._questions.items():
            ref = self._asked.get(worker)
            if ref is not None:
                if ref not in done:
                    continue
                try:
                    self._on_answer(worker.name, _fetch(ref, "while it was needed", worker))
                except ActorUnreachable as error:  # Ray connects again, or finds it dead
                    logger.warning("%s", error.what)
            self._asked[worker] = ask()


@dataclass(eq=False)
class StartupProgress:
    """Logs, at growing intervals, which actors are still starting, with the last line of their log.

    An engine loads, compiles and captures graphs for minutes, and a silent wait looks like a hang.

    Args:
        logs: folder of ``<name>.log``; logs on another host are left out.
        clock: seconds.
    """

    coming_up: Asked
    logs: Path
    clock: Callable[[], float] = time.monotonic
    done: Callable[[ray.ObjectRef], bool] = lambda ref: bool(ray.wait([ref], timeout=0)[0])

    def __post_init__(self) -> None:
        self._started = self.clock()
        self._next = deadlines.WAITING_FIRST_LINE

    def poll(self) -> None:
        """Log the lines that are due, without waiting."""
        waited = self.clock() - self._started
        if waited < self._next:
            return
        self._next = 2 * waited
        for worker, ref in self.coming_up.items():
            if not self.done(ref):
                pid = pid_here(worker)
                logger.info(
                    "%s is coming up for %.0f s%s%s",
                    worker,
                    waited,
                    ", and compiles kernels now, as first launches do"
                    if pid is not None and compiles(pid)
                    else "",
                    self._last_words(worker.name),
                )

    def _last_words(self, name: str) -> str:
        path = self.logs / f"{name}.log"
        if not path.exists():
            return ""
        with open(path, "rb") as log:
            log.seek(max(0, path.stat().st_size - 4096))
            lines = [
                line.strip()
                for line in log.read().decode(errors="replace").splitlines()
                if line.strip()
            ]
        return f"; {path}: {lines[-1][:160]}" if lines else ""


def _deadline_passed(
    silent: list[NamedActor], what: str, timeout: float, since: float
) -> ActorLost:
    # all actors write their stacks: one of ``silent`` may wait for another one
    process = next((worker.process for worker in silent if worker.process is not None), None)
    dump = "py-spy dump --pid <its pid>"
    if process:
        dump = f"py-spy dump --pid {process.pid}, on {process.host},"
    here = {pid: worker.name for worker in silent if (pid := pid_here(worker)) is not None}
    stopped = stopped_parts()
    asked = stacks.ask({*here, *own_actors()} - stopped.keys(), wait=True)
    logs = [f"{here[pid]}.log" for pid in asked if pid in here]
    logs += ["the logs of the others"] if len(asked) > len(logs) else []
    where = "read its log; "
    if logs:
        where = f"the Python stacks of all threads are in {' and '.join(logs)}; "
    return DeadlinePassed(
        f"{what}: no answer within {timeout:.0f} s from {', '.join(map(str, silent))}, waited for "
        f"since {time.strftime('%H:%M:%S', time.localtime(since))}",
        why=f"{', '.join(stopped.values())} is stopped (SIGSTOP) and does not answer"
        if stopped
        else "",
        fix=f"{where}{dump} shows where it hangs",
    ).naming(*silent)


def _raise_cause(
    error: Exception,
    pending: list[ray.ObjectRef],
    what: str,
    worker_of: Mapping[ray.ObjectRef, NamedActor],
) -> None:
    """Raise the `UserError` of another actor if there is one, else ``error``.

    If one rank is killed or refuses, the others often report a broken connection first.
    """
    late: list[ray.ObjectRef] = []
    if pending:
        late, _ = ray.wait(pending, num_returns=len(pending), timeout=deadlines.WAITING_CAUSE)
    for ref in late:
        try:
            _fetch(ref, what, worker_of[ref])
        except UserError as cause:
            raise cause from error
        except Exception as other:
            logger.debug("%s failed too: %s", worker_of[ref], other)
    silent = [worker_of[ref] for ref in pending if ref not in late]
    if _is_broken_connection(error):
        others = "each of them waited for another one"
        if silent:
            others = f"no answer from {', '.join(map(str, silent))}"
        happened = f"processes that work together lost each other; {others}"
        fix = "read their logs, and check their hosts: memory, network, a stopped process"
        if "unhandled cuda error" in str(error).lower():
            happened = "a GPU failed, or one of its kernels; NCCL noticed it first"
            fix = (
                "CUDA_LAUNCH_BLOCKING=1 in the environment of the run shows the call that failed; "
                "dmesg and nvidia-smi -q tell of a defective GPU"
            )
        raise ConnectionBroken(
            f"{what}: {happened}",
            why=f"{type(error).__name__}: {str(error).strip().splitlines()[0]}",
            fix=fix,
        ).naming(*silent) from error
    raise error


def _is_broken_connection(error: Exception) -> bool:
    # torch raises plain RuntimeErrors for most lost peers; only NCCL's have their own type
    text = f"{type(error).__name__} {error}".lower()
    return any(
        word in text for word in ("gloo", "nccl", "distbackenderror", "diststoreerror", "tcpstore")
    )


def _object_lost(what: str, worker: NamedActor) -> ActorDied:
    # an object in Ray's store dies with the process that made it: samples with the rollout actor
    return ActorDied(
        f"{worker} lacks what it was to work on ({what}): the process that had made it is gone",
        why="the rollout actor, which holds the samples, or its node died or was killed, perhaps "
        "for lack of memory",
        fix="read logs/rollout.log and dmesg; slime resume continues from the newest "
        "checkpoint and the journal",
    )


def _host_lost(what: str, worker: NamedActor, said: str) -> ActorLost:
    process = worker.process
    host = f"host {process.host}" if process is not None else "a host"
    after = said[said.index(_NODE_DIED) :].splitlines()
    reason = after[min(1, len(after) - 1)].strip()
    return ActorDied(
        f"{host} is lost, and {worker} with it ({what})",
        why=f"Ray's head gets no answer from its node any more: {reason}. The network to it is "
        "cut, or the host or its Ray is down",
        fix="ping it from the head's host, and see what its dmesg and Ray's logs there say. Ray "
        "does not take the node back by itself, even if only the network was cut: ray start on "
        "that host joins again; then slime resume continues",
    ).naming(worker)


def _less_host_memory() -> Sequence[str]:
    """Return the ways to use less host memory. Without GPUs, everything is computed there."""
    if num_gpus():
        return ON_HOST
    return ("lower --max-tokens-per-gpu or --micro-batch-size", "fewer processes on a host")


def _fetch(ref: ray.ObjectRef, what: str, worker: NamedActor) -> Any:
    """Return the value of a finished ref, or raise the actor's own exception, not Ray's wrapper."""
    try:
        return ray.get(ref)
    except ObjectLostError as error:
        raise _object_lost(what, worker) from error
    except RayTaskError as error:
        cause = error.cause if isinstance(error.cause, BaseException) else error
        if isinstance(cause, ObjectLostError):
            raise _object_lost(what, worker) from error
        raise cause from error  # the remote traceback stays visible to those who ask for it
    except OutOfMemoryError as error:
        raise ActorDied(
            f"{worker} was ended by Ray ({what}): the host's memory was nearly full",
            why=str(error).strip().splitlines()[0]
            if str(error).strip()
            else "Ray's memory monitor killed the process",
            fix="\n       ".join(
                [*_less_host_memory(), "or raise Ray's threshold (RAY_memory_usage_threshold)"]
            ),
        ).naming(worker) from error
    except ActorUnavailableError as error:
        raise ActorUnreachable(
            f"{worker}: the connection to it broke ({what})",
            why=f"the network to its host failed for a while: {str(error).strip().splitlines()[0]}",
            fix="check that network; slime resume continues from the newest checkpoint and the "
            "journal",
        ).naming(worker) from error
    except RayActorError as error:
        if _NODE_DIED in str(error):
            raise _host_lost(what, worker, str(error)) from error
        if worker.name == "rollout":  # where rewards, generate functions and filters run
            why = (
                "its process ended without a word: by os._exit or a crash in a function of yours "
                "or a library that it calls, or killed, perhaps by the kernel for lack of memory "
                "(see dmesg)"
            )
            fix = "look into logs/rollout.log; slime reward runs a reward on its own"
        else:
            why = (
                "its process ended without a word: killed, perhaps by the kernel for lack of "
                "memory (see dmesg)"
            )
            ways = "\n       ".join(_less_host_memory())
            fix = f"read its log; when the host's memory ran out:\n       {ways}"
        raise ActorDied(f"{worker} died ({what})", why=why, fix=fix).naming(worker) from error
