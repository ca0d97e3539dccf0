"""Waiting for actors: with a deadline, the name and process of who is waited for, and an ear for
SIGTERM."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import ray
from ray.exceptions import ObjectLostError, OutOfMemoryError, RayActorError, RayTaskError

from slime import deadlines
from slime.cluster import open_waits
from slime.cluster.slow_waits import SlowWaitLogger, own_actors, pid_here, stopped_parts
from slime.errors import RunFailed, UserError
from slime.log import get_logger
from slime.processes import stacks

logger = get_logger(__name__)


class StopRequested(Exception):
    """The run was asked to stop (SIGTERM) while it waited; what was under way is abandoned."""


class ActorLost(RunFailed):
    """Actors are gone, or as good as that.

    Attributes:
        names: of the actors; () where nobody could tell.
    """

    names: tuple[str, ...] = ()

    def of(self, *workers: NamedActor) -> ActorLost:
        self.names = tuple(worker.name for worker in workers)
        return self


class DeadlinePassed(ActorLost):
    """An actor did not answer in time."""


class ActorDied(ActorLost):
    """An actor's process ended."""


class ConnectionBroken(ActorLost):
    """Actors that work together lost each other, and none of them has said why."""


class NoEngineLeft(Exception):
    """No engine is left that what is being generated could wait for, nor anybody who could bring
    one back."""


class Process(NamedTuple):
    """Where an actor lives, as the actor itself says."""

    pid: int
    host: str

    def __str__(self) -> str:
        return f"pid {self.pid} on {self.host}"


def this_process() -> Process:
    """What an actor answers to the question for its `Process`."""
    return Process(os.getpid(), ray.util.get_node_ip_address())


class NamedActor:
    """An actor as messages name it: "trainer-0 (pid 4711 on 10.0.0.3)", as soon as its process has
    said so.

    Args:
        process: the reference to the actor's `this_process`, asked first of all; None where nobody
            was asked.
    """

    def __init__(self, name: str, process: ray.ObjectRef | None = None) -> None:
        self.name = name
        self._process = process
        self._found: Process | None = None

    @property
    def process(self) -> Process | None:
        """None while it has not answered, and when it died before it could."""
        if (
            self._found is not None
            or self._process is None
            or not ray.wait([self._process], timeout=0)[0]
        ):
            return self._found
        try:
            self._found = ray.get(self._process)
        except RayActorError as error:
            logger.debug("%s never said where it is: %s", self.name, error)
        return self._found

    def __str__(self) -> str:
        process = self.process
        return f"{self.name} ({process})" if process is not None else self.name


#: What was asked of whom, the answers to come.
Asked = Mapping[NamedActor, ray.ObjectRef]


def wait_for(
    asked: Asked,
    what: str,
    timeout: float,
    should_stop: Callable[[], bool] = lambda: False,
    on_poll: Callable[[], None] = lambda: None,
    sign: Callable[[], object] = lambda: None,
    words: Callable[[], str] = str,
    *,
    breaks_silence: bool = True,
) -> list[Any]:
    """The answers, in the order of ``asked``. The first failure is raised at once, the others are
    not waited for. While nothing is heard, lines name who is waited for
    (`slime.cluster.slow_waits`).

    Args:
        what: "training", "pushing weights"; names the wait in errors.
        timeout: seconds for all of them together.
        should_stop: asked about twice a second; when true, `StopRequested` is raised.
        on_poll: called as often, e.g. to refresh a progress display; what it raises ends the wait.
        sign: anything that changes while there is progress.
        words: what is known of those who are waited for, besides.
        breaks_silence: false where ``on_poll`` says who is waited for.
    Raises:
        UserError: an actor raised one. DeadlinePassed, ActorDied, StopRequested; others as the
            actor raised them.
    """
    end = time.monotonic() + timeout
    worker_of = {ref: worker for worker, ref in asked.items()}
    pending = list(worker_of)
    silence = SlowWaitLogger(what)
    with open_waits.waiting(what) as wait:
        while pending:
            if should_stop():
                raise StopRequested(what)
            open_waits.look()
            silent = [worker_of[ref] for ref in pending]
            wait.whom = {worker.name: pid_here(worker) or 0 for worker in silent}
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
                open_waits.heard()
            on_poll()
            if breaks_silence:
                silence.look([worker_of[ref] for ref in pending], (len(pending), sign()), words)
    return [_fetch(ref, what, worker) for worker, ref in asked.items()]


@contextmanager
def waiting_for(what: str) -> Iterator[Callable[[Asked], None]]:
    """A wait whose end the caller knows: what it is given waits a moment, for one answer at most,
    and lines say who is waited for while nothing is heard, as in `wait_for`."""
    silence = SlowWaitLogger(what)
    with open_waits.waiting(what) as wait:

        def a_moment(asked: Asked) -> None:
            open_waits.look()
            wait.whom = {worker.name: pid_here(worker) or 0 for worker in asked}
            ray.wait(list(asked.values()), num_returns=1, timeout=deadlines.WAITING_POLL)
            silence.look(list(asked), sorted(worker.name for worker in asked))

        yield a_moment


def all_answered(asked: Asked) -> bool:
    """Well or not; never waits."""
    return len(ray.wait(list(asked.values()), num_returns=len(asked), timeout=0)[0]) == len(asked)


def who_does_not_answer(asked: Asked) -> str:
    """For messages, when what was asked is at hand; "" when all answer."""
    try:
        wait_for(asked, "asking who still answers", deadlines.WAITING_PING)
    except RunFailed as error:
        return error.what
    return ""


def raise_failed(asked: Asked, what: str) -> None:
    """Raise the error of the first that has failed by now; never waits."""
    done = (
        set(ray.wait(list(asked.values()), num_returns=len(asked), timeout=0)[0])
        if asked
        else set()
    )
    for worker, ref in asked.items():
        if ref in done:
            _fetch(ref, what, worker)


class Watch:
    """Keeps one question open with each of several actors, and so notices soon when one of them is
    gone.

    Args:
        questions: by actor; each asks something that is answered quickly when the actor gets its
            turn.
        judge: called with name and answer; may raise.
    """

    def __init__(
        self,
        questions: Mapping[NamedActor, Callable[[], ray.ObjectRef]],
        judge: Callable[[str, Any], None] = lambda name, answer: None,
    ) -> None:
        self._questions = questions
        self._judge = judge
        self._asked: dict[NamedActor, ray.ObjectRef] = {}

    def look(self) -> None:
        """Deal with the answers that have come, ask those actors again; never waits.

        Raises:
            ActorDied: one of them is gone. What ``judge`` raises.
        """
        open_refs = list(self._asked.values())
        done = (
            set(ray.wait(open_refs, num_returns=len(open_refs), timeout=0)[0])
            if open_refs
            else set()
        )
        for worker, ask in self._questions.items():
            ref = self._asked.get(worker)
            if ref is not None:
                if ref not in done:
                    continue
                self._judge(worker.name, _fetch(ref, "while it was needed", worker))
            self._asked[worker] = ask()


class StartupProgress:
    """Names, at growing intervals, those that are still coming up, with the last line of their log:
    an engine loads, compiles and captures graphs for minutes, and a silent wait looks like a hang.

    Args:
        logs: folder of ``<name>.log``; logs that are on another host are left out.
        clock: seconds.
    """

    def __init__(
        self,
        coming_up: Asked,
        logs: Path,
        clock: Callable[[], float] = time.monotonic,
        done: Callable[[ray.ObjectRef], bool] = lambda ref: bool(ray.wait([ref], timeout=0)[0]),
    ) -> None:
        self._coming_up = coming_up
        self._logs = logs
        self._clock = clock
        self._done = done
        self._started = clock()
        self._next = deadlines.WAITING_FIRST_NEWS

    def look(self) -> None:
        """To be called now and then; never waits."""
        waited = self._clock() - self._started
        if waited < self._next:
            return
        self._next = 2 * waited
        for worker, ref in self._coming_up.items():
            if not self._done(ref):
                logger.info(
                    "%s is coming up for %.0f s%s", worker, waited, self._last_words(worker.name)
                )

    def _last_words(self, name: str) -> str:
        path = self._logs / f"{name}.log"
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
    """Everybody is asked for the stacks: who is waited for may wait for another one, which may be
    stopped."""
    process = next((worker.process for worker in silent if worker.process is not None), None)
    dump = (
        f"py-spy dump --pid {process.pid}, on {process.host},"
        if process
        else "py-spy dump --pid <its pid>"
    )
    here = {pid: worker.name for worker in silent if (pid := pid_here(worker)) is not None}
    stopped = stopped_parts()
    asked = stacks.ask({*here, *own_actors()} - stopped.keys(), wait=True)
    logs = [f"{here[pid]}.log" for pid in asked if pid in here]
    logs += ["the logs of the others"] if len(asked) > len(logs) else []
    where = (
        f"the Python stacks of all threads are in {' and '.join(logs)}; "
        if logs
        else "look into its log; "
    )
    return DeadlinePassed(
        f"{what}: no answer within {timeout:.0f} s from {', '.join(map(str, silent))}, waited for "
        "since "
        f"{time.strftime('%H:%M:%S', time.localtime(since))}",
        why=f"{', '.join(stopped.values())} is stopped (SIGSTOP), and so answers nobody"
        if stopped
        else "",
        fix=f"{where}{dump} shows where it hangs",
    ).of(*silent)


def _raise_cause(
    error: Exception,
    pending: list[ray.ObjectRef],
    what: str,
    worker_of: Mapping[ray.ObjectRef, NamedActor],
) -> None:
    """Raise the `UserError` of another actor, should there be one, else ``error``.

    When one rank is killed or refuses, the others see a broken connection, often first.
    """
    late, _ = (
        ray.wait(pending, num_returns=len(pending), timeout=deadlines.WAITING_CAUSE)
        if pending
        else ([], [])
    )
    for ref in late:
        try:
            _fetch(ref, what, worker_of[ref])
        except UserError as cause:
            raise cause from error
        except Exception as other:
            logger.debug("%s failed too: %s", worker_of[ref], other)
    silent = [worker_of[ref] for ref in pending if ref not in late]
    if _is_broken_connection(error):
        others = (
            f"no answer from {', '.join(map(str, silent))}"
            if silent
            else "each of them waited for another one"
        )
        raise ConnectionBroken(
            f"{what}: processes that work together lost each other; {others}",
            why=f"{type(error).__name__}: {str(error).strip().splitlines()[0]}",
            fix="look into the logs of all of them, and at their hosts: memory, network, a "
            "process that was stopped",
        ).of(*silent) from error
    raise error


def _is_broken_connection(error: Exception) -> bool:
    """torch's words for a peer that does not answer, of which only NCCL's have a type of their
    own."""
    text = f"{type(error).__name__} {error}".lower()
    return any(
        word in text for word in ("gloo", "nccl", "distbackenderror", "diststoreerror", "tcpstore")
    )


def _made_by_the_dead(what: str, worker: NamedActor) -> ActorDied:
    """What an actor was given lies with the process that made it: samples with the rollout
    actor."""
    return ActorDied(
        f"{worker} lacks what it was to work on ({what}): the process that had made it is gone",
        why="the rollout actor, which holds the samples, or its node died or was killed, perhaps "
        "for lack of memory",
        fix="look into logs/rollout.log and at dmesg; slime resume goes on from the newest "
        "checkpoint and the journal",
    )


def _fetch(ref: ray.ObjectRef, what: str, worker: NamedActor) -> Any:
    """`ray.get` of a finished ref, with the actor's own exception instead of Ray's wrapper."""
    try:
        return ray.get(ref)
    except ObjectLostError as error:
        raise _made_by_the_dead(what, worker) from error
    except RayTaskError as error:
        cause = error.cause if isinstance(error.cause, BaseException) else error
        if isinstance(cause, ObjectLostError):
            raise _made_by_the_dead(what, worker) from error
        raise cause from error  # the remote traceback stays visible to those who ask for it
    except OutOfMemoryError as error:
        raise ActorDied(
            f"{worker} was ended by Ray ({what}): the host's memory was nearly full",
            why=str(error).strip().splitlines()[0]
            if str(error).strip()
            else "Ray's memory monitor killed the process",
            fix="lower --max-tokens-per-gpu or --micro-batch-size, put fewer processes on a host, "
            "or raise Ray's "
            "threshold (RAY_memory_usage_threshold)",
        ).of(worker) from error
    except RayActorError as error:
        if worker.name == "rollout":  # where rewards, generate functions and filters run
            why = (
                "its process ended without a word: by os._exit or a crash in a function of yours "
                "or a library that it"
            )
            why += " calls, or killed, perhaps by the kernel for lack of memory (see dmesg)"
            fix = "look into logs/rollout.log; slime reward runs a reward on its own"
        else:
            why = (
                "its process ended without a word: killed, perhaps by the kernel for lack of "
                "memory (see dmesg)"
            )
            fix = (
                "look into its log; when memory ran out, lower --max-tokens-per-gpu or "
                "--micro-batch-size"
            )
        raise ActorDied(f"{worker} died ({what})", why=why, fix=fix).of(worker) from error
