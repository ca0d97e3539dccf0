"""Where the engine thread's results meet the requests that wait for them on the event loop."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

from slime.engines.embedded.engine import Engine
from slime.engines.embedded.scheduler import StepOutput
from slime.engines.embedded.sequence import Sequence


class Hub:
    """Sequences in flight and who waits for them. Lives on the event loop; `deliver` is called by the engine thread.

    One wake-up of the loop per engine step, however many sequences it ended.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._finished: dict[Sequence, asyncio.Future[None]] = {}
        self._progress: dict[Sequence, asyncio.Event] = {}

    def deliver(self, output: StepOutput) -> None:
        """Engine thread: pass a step's results to the loop."""
        self._loop.call_soon_threadsafe(self._take, output)

    def _take(self, output: StepOutput) -> None:
        for sequence in output.progressed:
            if sequence in self._progress:
                self._progress[sequence].set()
        for sequence in output.finished:
            future = self._finished.get(sequence)
            if future is not None and not future.done():
                future.set_result(None)
            if sequence in self._progress:
                self._progress[sequence].set()

    @property
    def in_flight(self) -> list[Sequence]:
        return list(self._finished)

    async def run(self, engine: Engine, sequences: list[Sequence]) -> None:
        """Submit sequences and wait until all are finished; when the waiting task is cancelled they are aborted."""
        futures = self._submit(engine, sequences)
        try:
            await asyncio.gather(*futures)
        except asyncio.CancelledError:
            self._abandon(engine, sequences)
            raise
        finally:
            self._forget(sequences)

    async def stream(self, engine: Engine, sequences: list[Sequence]) -> AsyncIterator[tuple[int, bool]]:
        """(index, finished) whenever a sequence has new tokens or has ended; several tokens may have come at once."""
        wake = asyncio.Event()
        for sequence in sequences:
            self._progress[sequence] = wake
        futures = self._submit(engine, sequences)
        shown = [0] * len(sequences)
        open_ones = set(range(len(sequences)))
        try:
            while open_ones:
                await wake.wait()
                wake.clear()
                for index in sorted(open_ones):
                    ended = futures[index].done()
                    count = len(sequences[index].output_ids)
                    if ended or count > shown[index]:
                        shown[index] = count
                        if ended:
                            open_ones.discard(index)
                        yield index, ended
        finally:
            if open_ones:
                self._abandon(engine, [sequences[index] for index in open_ones])
            self._forget(sequences)

    def _submit(self, engine: Engine, sequences: list[Sequence]) -> list[asyncio.Future[None]]:
        futures = []
        for sequence in sequences:
            self._finished[sequence] = self._loop.create_future()
            futures.append(self._finished[sequence])
        engine.submit(sequences)
        return futures

    def _abandon(self, engine: Engine, sequences: list[Sequence]) -> None:
        chosen = set(sequences)
        engine.abort(lambda sequence: sequence in chosen, "the client went away")

    def _forget(self, sequences: list[Sequence]) -> None:
        for sequence in sequences:
            self._finished.pop(sequence, None)
            self._progress.pop(sequence, None)
