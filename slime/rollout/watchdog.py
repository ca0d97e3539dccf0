"""The rollout's watchdog: when there is no more progress, an error says what is waited for."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterable

from slime import deadlines
from slime.engines.client import RolloutClient
from slime.errors import UserError
from slime.rollout.trajectory import Activity, GroupRun, GroupRunner

_WAITS_FOR = {
    Activity.QUEUED: "a free slot (--sglang-server-concurrency)",
    Activity.GENERATING: "the generate function",
    Activity.HOOKS: "the sample hooks",
    Activity.TEACHER: "the teacher",
    Activity.REWARD: "the reward function",
    Activity.FILTER: "the dynamic filter",
}
_NUM_SHOWN = 5


class RolloutStalled(UserError):
    """Raised if there was no progress for longer than the limit.

    Attributes:
        seconds: time without progress.
    """

    seconds = 0.0


class Watchdog:
    """Finds out that a rollout has stalled: ``limit`` seconds without an answer, a reward or a sign
    of life of an engine.

    Long generations answer late, so silence alone proves nothing: as long as the load that engines
    report changes, they are at work.

    Args:
        limit: seconds.

    Attributes:
        waits_for: what is waited for if there was no progress for half a minute; else "".
    """

    def __init__(self, client: RolloutClient, runner: GroupRunner, limit: float) -> None:
        self._client = client
        self._runner = runner
        self.limit = limit
        self._started = self._engines_moved = self._looked = time.monotonic()
        self._last_loads: dict[str, tuple[int, int]] | None = None
        self.waits_for = ""

    @property
    def interval(self) -> float:
        """Seconds to wait between two calls of `check`."""
        return min(10.0, self.limit / 2)

    async def check(self, groups: Iterable[GroupRun]) -> RolloutStalled | None:
        """Return the error if the rollout has stalled, else None. Call it every `interval` seconds
        while waiting."""
        now = time.monotonic()
        last = self._looked
        self._looked = now
        # either the event loop was blocked and answers are still unread, or groups finished so
        # often that this was not called
        if now - last > 2 * self.interval + deadlines.WATCHDOG_BLOCKED:
            self._started = now
        moved = max(
            self._client.last_progress,
            self._runner.last_progress,
            self._started,
            self._engines_moved,
        )
        self.waits_for = ""
        if time.monotonic() - moved < min(deadlines.WATCHDOG_WORDS, self.limit):
            return None
        loads = await self._client.worker_loads()
        if loads != self._last_loads and any(requests > 0 for requests, _ in loads.values()):
            self._last_loads = loads
            self._engines_moved = time.monotonic()
            return None
        stalled = self.report(groups, loads, time.monotonic() - moved)
        if time.monotonic() - moved >= self.limit:
            stalled.seconds = time.monotonic() - moved
            return stalled
        self.waits_for = "; ".join(line.strip() for line in stalled.why.splitlines())
        return None

    def give_up_hung(self, groups: Iterable[GroupRun], seconds: float) -> int:
        """Fail the trajectories that hang in user code after ``seconds`` without progress; return
        their number.

        A trajectory with a request in flight waits for an engine, and does not hang.
        """
        asked = [request.name for request in self._client.in_flight.values()]
        hung = [
            trajectory
            for group in groups
            for trajectory in group.trajectories
            if trajectory.function and not trajectory.hung_seconds
            if not any(name.startswith(trajectory.prompt.session_id or "?") for name in asked)
        ]
        for trajectory in hung:
            self._runner.give_up(trajectory, seconds)
        self._started = time.monotonic() if hung else self._started
        return len(hung)

    def report(
        self, groups: Iterable[GroupRun], loads: dict[str, tuple[int, int]], seconds: float
    ) -> RolloutStalled:
        """Describe what is waited for: the samples, the oldest requests, and the engines' load."""
        waiting = [
            trajectory
            for group in groups
            for trajectory in group.trajectories
            if trajectory.activity is not Activity.DONE
        ]
        counts = Counter(trajectory.activity for trajectory in waiting)
        parts = [
            f"{count} samples wait for {_WAITS_FOR[activity]}"
            for activity, count in counts.most_common()
        ]
        begun = (one for one in waiting if one.activity is not Activity.QUEUED)
        oldest = sorted(begun, key=lambda one: one.since)[:_NUM_SHOWN]
        now = time.monotonic()
        if oldest:
            shown = ", ".join(
                f"sample {one.prompt.index} ({one.activity.value}, {now - one.since:.0f} s)"
                for one in oldest
            )
            parts.append(f"oldest: {shown}")
        for request in list(self._client.in_flight.values())[:_NUM_SHOWN]:
            parts.append(
                f"request {request.name or '?'}: {request.num_input_tokens} tokens in, "
                f"attempt {request.attempt}, {now - request.started:.0f} s"
            )
        for url, (requests, _) in loads.items():
            parts.append(
                f"engine {url}: " + ("no answer" if requests < 0 else f"{requests} requests")
            )
        return RolloutStalled(
            f"the rollout has stood still for {seconds:.0f} s",
            why="\n       ".join(parts),
            fix="read the logs of what is waited for; give slow tools or rewards a deadline",
        )
