"""The page of `slime watch` in a real Chromium, beside its server."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any

from aiohttp import web

from benchmarks.browser import Tab, tab
from slime.page.server import Runs, application
from slime.processes.host import bind

Visit = Callable[[Tab, str, Runs], Coroutine[Any, Any, None]]


def browse(paths: list[Path], what: Visit) -> None:
    """Run ``what`` with a browser and a server of these folders; nothing may complain meanwhile."""

    async def inner() -> None:
        runs = Runs(paths)
        runs.look()
        runner = web.AppRunner(application(runs, None))
        await runner.setup()
        with bind("127.0.0.1", 0) as listener:
            await web.SockSite(runner, listener).start()
            place = f"http://127.0.0.1:{listener.getsockname()[1]}/"
            try:
                async with tab() as page:
                    await what(page, place, runs)
                    assert page.errors == [] and page.dialogs == []
            finally:
                await runner.cleanup()

    asyncio.run(inner())
