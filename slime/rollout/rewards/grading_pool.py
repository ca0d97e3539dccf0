"""The pool of grading processes. One that hangs or dies is replaced. A sample gets no score only if
it made the process hang or die; if the process was killed or stopped from outside, another one
grades the sample."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

import orjson
import psutil

import slime
from slime import deadlines
from slime.errors import UserError
from slime.log import get_logger

logger = get_logger(__name__)

#: Seconds that the pool waits beyond a worker's own alarm before giving it up.
_GRACE = 5.0
#: Longest answer line; requests have no limit.
_LINE_LIMIT = 1 << 20


@dataclass(frozen=True)
class Grade:
    """Score of one request; 0.0 with ``failure`` "timeout" or "crash" when there is none."""

    score: float
    failure: str = ""


@dataclass(eq=False)
class GradingPool:
    """A pool of up to ``num_workers`` processes, started when first needed. Use from one event
    loop.

    Args:
        module: what the processes run (`slime.rollout.rewards.grading_worker.serve`).
        package: the package that ``module`` needs, for errors.

    Example:
        >>> pool = GradingPool(num_workers=2)                          # doctest: +SKIP
        >>> await pool.grade("math", r"\\boxed{2}", "2", deadline=10)  # doctest: +SKIP
        Grade(score=1.0, failure='')
    """

    num_workers: int
    module: str = "slime.rollout.rewards.math_grading"
    package: str = "math_verify"

    def __post_init__(self) -> None:
        self._limit = asyncio.Semaphore(self.num_workers)
        self._idle: list[_GradingWorker] = []
        self._all: set[_GradingWorker] = set()

    async def grade(self, grader: str, response: str, label: Any, deadline: float) -> Grade:
        """Grade one response. No content of a response makes it raise.

        Raises:
            UserError: worker processes cannot be started at all, or the grader refuses the label.
        """
        request = {"grader": grader, "response": response, "label": label, "deadline": deadline}
        async with self._limit:
            worker = self._idle.pop() if self._idle else await self._start()
            grade = await self._ask(worker, request, deadline)
            if grade.failure in ("crash", "stopped"):
                logger.warning(
                    "a reward worker was lost (%s): another one grades its sample", grade.failure
                )
                grade = await self._ask(await self._start(), request, deadline)
            return Grade(grade.score, "timeout") if grade.failure == "stopped" else grade

    async def _ask(self, worker: _GradingWorker, request: dict[str, Any], deadline: float) -> Grade:
        """Return the grade by this worker; the failure is "stopped" if a signal has stopped it."""
        try:
            answer = await worker.ask(request, deadline + _GRACE)
        except (asyncio.CancelledError, Exception):
            # a late answer must not be taken for the answer to the next request
            await self._discard(worker)
            raise
        if answer is not None:
            self._idle.append(worker)
            if "refused" in answer:
                raise UserError(*answer["refused"])
            return Grade(answer["score"])
        stopped = worker.is_stopped
        failure = await self._discard(worker)
        return Grade(0.0, "stopped" if stopped else failure)

    async def close(self) -> None:
        """End all processes."""
        for worker in list(self._all):
            await self._discard(worker)
        self._idle.clear()

    @property
    def pids(self) -> list[int]:
        return [worker.process.pid for worker in self._all]

    async def _start(self) -> _GradingWorker:
        try:
            worker = await _GradingWorker.start(self.module, self.package)
        except UserError as error:  # perhaps it was killed while it started
            logger.warning("%s; starting another one", error)
            worker = await _GradingWorker.start(self.module, self.package)
        self._all.add(worker)
        return worker

    async def _discard(self, worker: _GradingWorker) -> str:
        """End a worker; return why it had failed (`_GradingWorker.end`)."""
        self._all.discard(worker)
        return await asyncio.shield(worker.end())


@dataclass(eq=False)
class _GradingWorker:
    process: asyncio.subprocess.Process
    errors: IO[bytes]

    @staticmethod
    async def start(module: str, package: str) -> _GradingWorker:
        places = [str(Path(slime.__file__).parent.parent), os.getenv("PYTHONPATH")]
        env = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, places))}
        errors = tempfile.TemporaryFile()  # noqa: SIM115  (closed by end)
        process = await asyncio.create_subprocess_exec(
            sys.executable, "-P", "-m", module, str(os.getpid()),
            stdin=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.PIPE, stderr=errors, env=env,
            limit=_LINE_LIMIT,
        )  # fmt: skip
        worker = _GradingWorker(process, errors)
        if await worker._read(deadlines.GRADING_POOL_START) is None:
            said = worker.last_error()
            await worker.end()
            raise UserError(
                "a reward worker process does not start",
                why=said or f"it printed nothing within {deadlines.GRADING_POOL_START:.0f} s",
                fix=f"check that {package.replace('_', '-')} is installed: python -c 'import "
                f"{package}'",
            )
        return worker

    async def ask(self, request: dict[str, Any], timeout: float) -> dict[str, Any] | None:
        """Return the answer; None when the process ended or gave none in time."""
        assert self.process.stdin is not None
        try:
            self.process.stdin.write(orjson.dumps(request, option=orjson.OPT_NON_STR_KEYS) + b"\n")
            # wait_for would swallow a cancellation here (Python 3.11)
            async with asyncio.timeout(timeout):
                await self.process.stdin.drain()
        except (ConnectionError, TimeoutError):
            return None
        return await self._read(timeout)

    async def _read(self, timeout: float) -> dict[str, Any] | None:
        assert self.process.stdout is not None
        try:
            async with asyncio.timeout(timeout):
                line = await self.process.stdout.readline()
        except TimeoutError:
            return None
        return orjson.loads(line) if line.endswith(b"\n") else None

    @property
    def is_stopped(self) -> bool:
        """Whether a signal (SIGSTOP) has suspended the process."""
        try:
            return psutil.Process(self.process.pid).status() == psutil.STATUS_STOPPED
        except psutil.NoSuchProcess:
            return False

    def last_error(self) -> str:
        self.errors.seek(0)
        lines = self.errors.read()[-4000:].decode(errors="replace").strip().splitlines()
        return lines[-1] if lines else ""

    async def end(self) -> str:
        """Kill (if need be), reap, and say why the process had ended: "timeout" (its alarm, or
        ours) or "crash"."""
        hung = self.process.returncode is None
        if hung:
            # closed output means that it is exiting: wait for its exit status
            closed = self.process.stdout is not None and self.process.stdout.at_eof()
            try:
                async with asyncio.timeout(deadlines.GRADING_POOL_EXIT if closed else 0.0):
                    await self.process.wait()
                hung = False
            except TimeoutError:
                self.process.kill()
                # the kernel may take longer, and nothing depends on it
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(deadlines.GRADING_POOL_KILL):
                        await self.process.wait()
        self.errors.close()
        return "timeout" if hung or self.process.returncode == -signal.SIGALRM else "crash"
