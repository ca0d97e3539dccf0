"""aiohttp applications that a thread of the test's process serves, such as the embedded engine."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Coroutine, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

from aiohttp import web

from slime.embedded.options import EngineOptions
from slime.embedded.server import application, load
from slime.http_access import EngineAccess
from slime.processes.host import bind


@contextmanager
def served(build: Callable[[], Coroutine[Any, Any, web.Application]]) -> Iterator[str]:
    """The URL of an application that a thread serves."""
    loop = asyncio.new_event_loop()
    listener = bind("127.0.0.1", 0)
    runners: list[web.AppRunner] = []

    async def begin() -> None:
        runners.append(
            web.AppRunner(
                await build(), handler_cancellation=True, access_log=None, shutdown_timeout=1.0
            )
        )
        await runners[0].setup()
        await web.SockSite(runners[0], listener).start()

    thread = threading.Thread(target=loop.run_forever, daemon=True)
    thread.start()
    asyncio.run_coroutine_threadsafe(begin(), loop).result(120)
    try:
        yield f"http://127.0.0.1:{listener.getsockname()[1]}"
    finally:
        asyncio.run_coroutine_threadsafe(runners[0].cleanup(), loop).result(30)
        loop.call_soon_threadsafe(loop.stop)
        thread.join(30)


def served_engine(options: EngineOptions) -> AbstractContextManager[str]:
    """The URL of an embedded engine in a thread."""

    async def build() -> web.Application:
        loading = asyncio.create_task(load(options, asyncio.get_running_loop(), asyncio.Event()))
        await loading
        return application(loading, EngineAccess(on_loopback=True))

    return served(build)
