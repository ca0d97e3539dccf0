"""Waiting for actors with a deadline, an owner's name, and an ear for SIGTERM."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any

import ray
from ray.exceptions import RayActorError, RayTaskError

from slime.errors import UserError

_POLL_SECONDS = 0.5


class StopRequested(Exception):
    """The run was asked to stop (SIGTERM) while it waited; what was under way is abandoned."""


class DeadlinePassed(Exception):
    """An actor did not answer in time."""


class ActorDied(Exception):
    """An actor's process ended."""


def wait_for(
    refs: Sequence[ray.ObjectRef],
    what: str,
    timeout: float,
    should_stop: Callable[[], bool] = lambda: False,
    on_poll: Callable[[], None] | None = None,
) -> list[Any]:
    """Results of ``refs`` in order. The first failure of any of them is raised at once, the others are not waited for.

    Args:
        what: "rank {} training" style text; names the wait in errors.
        timeout: seconds for all of them together.
        should_stop: polled about twice a second; when true, `StopRequested` is raised.
        on_poll: called as often, e.g. to refresh a progress display.
    Raises:
        UserError: an actor raised one. DeadlinePassed, ActorDied, StopRequested; others as the actor raised them.
    """
    end = time.monotonic() + timeout
    pending = list(refs)
    while pending:
        if should_stop():
            raise StopRequested(what)
        left = end - time.monotonic()
        if left <= 0:
            waiting = [list(refs).index(ref) for ref in pending]
            raise DeadlinePassed(
                f"{what}: no answer within {timeout:.0f} s from {len(waiting)} of {len(refs)} (numbers {waiting})"
            )
        done, pending = ray.wait(pending, num_returns=1, timeout=min(_POLL_SECONDS, left))
        if done:
            fetch(done, what)  # raises for a failed one
        if on_poll is not None:
            on_poll()
    return fetch(list(refs), what)


def fetch(refs: list[ray.ObjectRef], what: str) -> list[Any]:
    """`ray.get` of finished refs, with the actor's own exception instead of Ray's wrapper."""
    try:
        return ray.get(refs)
    except RayTaskError as error:
        cause = error.cause if isinstance(error.cause, BaseException) else error
        if isinstance(cause, UserError):
            raise cause from None
        raise cause from error
    except RayActorError as error:
        raise ActorDied(f"{what}: {error}") from error
