"""Send the same request to all engines of a run at once, with one deadline; used by weight sync.

Requests run on an event loop in a separate thread, so answers to one bucket arrive while the
calling thread packs the next.
"""

from __future__ import annotations

import asyncio
import ipaddress
import socket
import threading
from collections.abc import Callable, Collection, Coroutine, Iterable, Mapping, Sequence
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeout
from typing import Any, TypeVar
from urllib.parse import urlsplit

from slime import deadlines
from slime.engines.api import LOADS_PATH, EngineClient, EngineError, is_silent
from slime.processes.host import own_addresses

Body = dict[str, Any]
T = TypeVar("T")


class EngineFleet:
    """Connections to ``urls``. Use `close` when done.

    Args:
        patience: seconds after which `post_to` and `flush_cache` ask a silent engine for its load,
            and seconds for that answer. Without an answer the engine counts as failed. None: wait
            until the deadline.
    """

    def __init__(self, urls: Sequence[str], patience: float | None = None) -> None:
        assert urls, "a fleet without engines"
        self._patience = patience
        self.urls = tuple(url.rstrip("/") for url in urls)
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(
            target=self._loop.run_forever, name="weight-sync-http", daemon=True
        )
        self._thread.start()
        self._clients = [EngineClient(url) for url in self.urls]
        self._run(self._enter(), deadlines.FLEET_LOOP)

    async def _enter(self) -> None:
        for client in self._clients:
            await client.__aenter__()

    def start(
        self,
        path: str,
        body: Body | Callable[[int], Body] | None,
        timeout: float,
        grace: float | None = None,
    ) -> Future[list[Body]]:
        """Post to all engines; the future holds their answers in order.

        Args:
            body: one body for all, or a function of the engine's number.
            timeout: seconds until an engine that has not answered is an error.
            grace: after one engine has failed, seconds to wait for the others, if they cannot
                continue without it; None waits for all.
        """
        bodies = [
            body(number) if callable(body) else (body or {}) for number in range(len(self.urls))
        ]
        return asyncio.run_coroutine_threadsafe(
            self._post_all(path, bodies, timeout, grace), self._loop
        )

    def post(
        self, path: str, body: Body | Callable[[int], Body] | None, timeout: float
    ) -> list[Body]:
        """Post to all engines and wait for every answer.

        Raises:
            EngineError: names all engines that failed.
        """
        return self.wait(self.start(path, body, timeout), timeout)

    def post_to(
        self, path: str, bodies: Mapping[str, Body], timeout: float
    ) -> dict[str, Body | EngineError]:
        """Post to some of the engines, by URL, and return each one's answer or error."""
        clients = dict(zip(self.urls, self._clients, strict=True))

        async def post_all() -> list[Any]:
            posts = [
                self._while_it_lives(clients[url], clients[url].post(path, body, timeout))
                for url, body in bodies.items()
            ]
            return await asyncio.gather(*posts, return_exceptions=True)

        outcomes = self._run(post_all(), timeout)
        for outcome in outcomes:
            if isinstance(outcome, BaseException) and not isinstance(outcome, EngineError):
                raise outcome
        return dict(zip(bodies, outcomes, strict=True))

    async def _while_it_lives(self, client: EngineClient, answer: Coroutine[Any, Any, T]) -> T:
        call = asyncio.ensure_future(answer)
        while not (await asyncio.wait([call], timeout=self._patience))[0]:
            try:
                await client.get(LOADS_PATH, self._patience)
            except EngineError as error:
                if is_silent(error) and not call.done():
                    call.cancel()
                    raise EngineError(
                        client.url, f"gave no sign of life for {2 * (self._patience or 0.0):.0f} s"
                    ) from error
        return call.result()

    def get(self, path: str, timeout: float) -> list[Body]:
        return self._run(
            _all_answers(client.get(path, timeout) for client in self._clients), timeout
        )

    def start_get(self, url: str, path: str, timeout: float) -> Future[Body]:
        """Ask one of the engines; the future holds its answer or raises its EngineError."""
        client = self._clients[self.urls.index(url.rstrip("/"))]
        return asyncio.run_coroutine_threadsafe(client.get(path, timeout), self._loop)

    def flush_cache(self, timeout: float, urls: Collection[str] | None = None) -> None:
        """Empty every engine's prefix cache; retry while an engine refuses because requests are
        still ending.

        Args:
            urls: the engines to ask; by default all.
        Raises:
            EngineError: an engine still refused when ``timeout`` seconds had passed.
        """

        async def flush(client: EngineClient) -> None:
            end = self._loop.time() + timeout
            pause = 0.02
            while True:
                try:
                    await client.post("/flush_cache", {}, timeout=max(0.1, end - self._loop.time()))
                    return
                except EngineError as error:
                    if error.status != 400 or self._loop.time() + pause > end:
                        raise
                await asyncio.sleep(pause)
                pause = min(2 * pause, 0.2)

        asked = (
            self._while_it_lives(client, flush(client))
            for client in self._clients
            if urls is None or client.url in urls
        )
        self._run(_all_answers(asked), timeout)

    def wait(self, future: Future[list[Body]], timeout: float) -> list[Body]:
        """Return the answers of `start`.

        The requests' own deadline comes first; this one covers an event loop that hangs.
        """
        return future.result(timeout + deadlines.FLEET_LOOP)

    def close(self) -> None:
        if self._loop.is_closed():
            return

        async def leave() -> None:
            unanswered = asyncio.all_tasks() - {asyncio.current_task()}
            # nothing waits for these, and without connections they would fail
            for task in unanswered:
                task.cancel()
            await asyncio.gather(*unanswered, return_exceptions=True)
            for client in self._clients:
                await client.close()

        try:
            self._run(leave(), deadlines.FLEET_LOOP)
        finally:
            self._loop.call_soon_threadsafe(self._loop.stop)
            self._thread.join(timeout=deadlines.FLEET_LOOP)
            if not self._thread.is_alive():
                self._loop.close()

    async def _post_all(
        self, path: str, bodies: list[Body], timeout: float, grace: float | None
    ) -> list[Body]:
        posts = zip(self._clients, bodies, strict=True)
        calls = [asyncio.ensure_future(client.post(path, body, timeout)) for client, body in posts]
        if grace is not None:
            _, waiting = await asyncio.wait(calls, return_when=asyncio.FIRST_EXCEPTION)
            if waiting:
                _, late = await asyncio.wait(waiting, timeout=grace)
                for call in late:
                    call.cancel()
        results = await asyncio.gather(*calls, return_exceptions=True)
        return checked_answers(
            [result for result in results if not isinstance(result, asyncio.CancelledError)]
        )

    def _run(self, work: Coroutine[Any, Any, Any], timeout: float) -> Any:
        future = asyncio.run_coroutine_threadsafe(work, self._loop)
        try:
            return future.result(timeout + deadlines.FLEET_LOOP)
        except FutureTimeout:
            future.cancel()
            raise


class Fleets:
    """One fleet per group of engines. Its connections stay open as long as the group exists.

    Args:
        patience: see `EngineFleet`.
        groups: returns the current groups; fleets of other groups are closed when one is added.
    """

    def __init__(
        self, patience: float | None, groups: Callable[[], Iterable[Sequence[str]]]
    ) -> None:
        self._patience = patience
        self._groups = groups
        self._fleets: dict[tuple[str, ...], EngineFleet] = {}

    def of(self, urls: Sequence[str]) -> EngineFleet:
        if tuple(urls) not in self._fleets:
            self.keep(self._groups())
            self._fleets[tuple(urls)] = EngineFleet(urls, self._patience)
        return self._fleets[tuple(urls)]

    def keep(self, groups: Iterable[Sequence[str]]) -> None:
        """Close the fleets of all other groups."""
        kept = [tuple(urls) for urls in groups]
        for urls in [urls for urls in self._fleets if urls not in kept]:
            self._fleets.pop(urls).close()


async def _all_answers(calls: Iterable[Coroutine[Any, Any, Any]]) -> list[Any]:
    return checked_answers(await asyncio.gather(*calls, return_exceptions=True))


def checked_answers(results: Sequence[Any]) -> list[Any]:
    """Return the results, or raise one EngineError that names all engines that failed."""
    failed = [result for result in results if isinstance(result, EngineError)]
    for result in results:
        if isinstance(result, BaseException) and not isinstance(result, EngineError):
            raise result
    if len(failed) == 1:
        raise failed[0]
    if failed:
        raise EngineError(
            failed[0].url,
            f"{failed[0].what}; also " + "; ".join(map(str, failed[1:])),
            failed[0].status,
        )
    return list(results)


def is_local(url: str) -> bool:
    """Return whether the URL leads to this host, so that memory can be shared."""
    host = urlsplit(url).hostname or ""
    try:
        addresses = {info[4][0] for info in socket.getaddrinfo(host, None)}
    except OSError:
        return False
    own = own_addresses()
    return all(ipaddress.ip_address(a).is_loopback or a in own for a in addresses)
