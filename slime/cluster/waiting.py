"""Waiting for actors with a deadline, an owner's name, and an ear for SIGTERM."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import ray
from ray.exceptions import OutOfMemoryError, RayActorError, RayTaskError

from slime.errors import RunFailed, UserError
from slime.log import get_logger

logger = get_logger(__name__)

_POLL_SECONDS = 0.5
_CAUSE_SECONDS = 3.0


class StopRequested(Exception):
    """The run was asked to stop (SIGTERM) while it waited; what was under way is abandoned."""


class DeadlinePassed(RunFailed):
    """An actor did not answer in time."""


class ActorDied(RunFailed):
    """An actor's process ended."""


def wait_for(
    refs: Sequence[ray.ObjectRef],
    what: str,
    timeout: float,
    should_stop: Callable[[], bool] = lambda: False,
    on_poll: Callable[[], None] | None = None,
    names: Sequence[str] = (),
) -> list[Any]:
    """Results of ``refs`` in order. The first failure of any of them is raised at once, the others are not waited for.

    Args:
        what: "training", "pushing weights"; names the wait in errors.
        timeout: seconds for all of them together.
        should_stop: polled about twice a second; when true, `StopRequested` is raised.
        on_poll: called as often, e.g. to refresh a progress display; what it raises ends the wait.
        names: of the actors behind ``refs``, for errors; they are numbered when there are none.
    Raises:
        UserError: an actor raised one. DeadlinePassed, ActorDied, StopRequested; others as the actor raised them.
    """
    end = time.monotonic() + timeout
    pending = list(refs)
    name_of = dict(zip(refs, names or [f"actor {i}" for i in range(len(refs))]))
    while pending:
        if should_stop():
            raise StopRequested(what)
        left = end - time.monotonic()
        if left <= 0:
            silent = ", ".join(name_of[ref] for ref in pending)
            raise DeadlinePassed(
                f"{what}: no answer within {timeout:.0f} s from {silent}",
                fix="look into its log; py-spy dump --pid <its pid> shows where it hangs",
            )
        done, pending = ray.wait(pending, num_returns=1, timeout=min(_POLL_SECONDS, left))
        for ref in done:
            try:
                _fetch(ref, what, name_of[ref])
            except UserError:
                raise
            except Exception as error:
                _raise_cause(error, pending, what, name_of)
        if on_poll is not None:
            on_poll()
    return [_fetch(ref, what, name_of[ref]) for ref in refs]


def raise_failed(refs: Mapping[str, ray.ObjectRef], what: str) -> None:
    """Raise the error of the first of ``refs`` (by actor name) that has failed by now; never waits."""
    done = set(ray.wait(list(refs.values()), num_returns=len(refs), timeout=0)[0]) if refs else set()
    for name, ref in refs.items():
        if ref in done:
            _fetch(ref, what, name)


class Watch:
    """Keeps one question open with each of several actors, and so notices soon when one of them is gone.

    Args:
        actors: by the name that errors give them.
        question: a method of theirs without arguments that answers quickly when it gets its turn.
        judge: called with name and answer; may raise.
    """

    def __init__(
        self, actors: Mapping[str, Any], question: str, judge: Callable[[str, Any], None] = lambda name, answer: None
    ) -> None:
        self._actors, self._question, self._judge = actors, question, judge
        self._asked: dict[str, ray.ObjectRef] = {}

    def look(self) -> None:
        """Deal with the answers that have come, ask those actors again; never waits.

        Raises:
            ActorDied: one of them is gone. What ``judge`` raises.
        """
        for name, actor in self._actors.items():
            ref = self._asked.get(name)
            if ref is not None:
                done, _ = ray.wait([ref], timeout=0)
                if not done:
                    continue
                self._judge(name, _fetch(ref, "while it was needed", name))
            self._asked[name] = getattr(actor, self._question).remote()


def _raise_cause(error: Exception, pending: list[ray.ObjectRef], what: str, name_of: dict[ray.ObjectRef, str]) -> None:
    """Raise the `UserError` of another actor, should there be one, else ``error``.

    When one rank is killed or refuses, the others see a broken connection, often first.
    """
    late, _ = ray.wait(pending, num_returns=len(pending), timeout=_CAUSE_SECONDS) if pending else ([], [])
    for ref in late:
        try:
            _fetch(ref, what, name_of[ref])
        except UserError as cause:
            raise cause from error
        except Exception as other:
            logger.debug("%s failed too: %s", name_of[ref], other)
    raise error


def _fetch(ref: ray.ObjectRef, what: str, name: str) -> Any:
    """`ray.get` of a finished ref, with the actor's own exception instead of Ray's wrapper."""
    try:
        return ray.get(ref)
    except RayTaskError as error:
        cause = error.cause if isinstance(error.cause, BaseException) else error
        raise cause from error  # the remote traceback stays visible to those who ask for it
    except OutOfMemoryError as error:
        raise ActorDied(
            f"{name} was ended by Ray ({what}): the host's memory was nearly full",
            why=str(error).strip().splitlines()[0] if str(error).strip() else "Ray's memory monitor killed the process",
            fix="lower --max-tokens-per-gpu or --micro-batch-size, put fewer processes on a host, or raise Ray's "
            "threshold (RAY_memory_usage_threshold)",
        ) from error
    except RayActorError as error:
        raise ActorDied(
            f"{name} died ({what})",
            why="its process ended without a word: killed, perhaps by the kernel for lack of memory (see dmesg)",
            fix="look into its log; when memory ran out, lower --max-tokens-per-gpu or --micro-batch-size",
        ) from error
