"""A real Chromium without a window, driven over its debugging protocol: open, look, click, type,
take pictures."""

from __future__ import annotations

import asyncio
import base64
import contextlib
import itertools
import json
import shutil
import subprocess
import tempfile
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import aiohttp

NAMES = ("chromium", "chromium-browser", "google-chrome", "chrome")
_SECONDS = 60.0


def chromium() -> str | None:
    """The browser's path, None where there is none."""
    return next(filter(None, map(shutil.which, NAMES)), None)


class Tab:
    """One page. ``errors`` are what its console and its scripts complained about, requests that
    failed included; ``requested`` are the addresses that it asked for."""

    def __init__(self, socket: aiohttp.ClientWebSocketResponse) -> None:
        self._socket = socket
        self._numbers = itertools.count(1)
        self._answers: dict[int, asyncio.Future[dict[str, Any]]] = {}
        self.errors: list[str] = []
        self.dialogs: list[str] = []
        self.requested: list[str] = []
        self._reader = asyncio.ensure_future(self._read())

    async def _read(self) -> None:
        async for message in self._socket:
            event = json.loads(message.data)
            if "id" in event:
                self._answers.pop(event["id"]).set_result(event)
                continue
            method = event["method"]
            told = event["params"]
            if method == "Runtime.exceptionThrown":
                self.errors.append(json.dumps(told["exceptionDetails"])[:800])
            elif method == "Runtime.consoleAPICalled" and told["type"] in ("error", "assert"):
                self.errors.append(json.dumps(told["args"])[:800])
            elif method == "Network.requestWillBeSent":
                self.requested.append(told["request"]["url"])
            elif method == "Log.entryAdded" and told["entry"]["level"] == "error":
                self.errors.append(f"{told['entry']['text']} {told['entry'].get('url', '')}")
            elif method == "Page.javascriptDialogOpening":
                self.dialogs.append(told["message"])

    async def send(self, method: str, **parameters: Any) -> dict[str, Any]:
        """One command of the protocol; its result."""
        number = next(self._numbers)
        self._answers[number] = asyncio.get_running_loop().create_future()
        await self._socket.send_json({"id": number, "method": method, "params": parameters})
        answer = await asyncio.wait_for(self._answers[number], _SECONDS)
        assert "error" not in answer, answer["error"]
        return dict(answer["result"])

    async def open(
        self, address: str, width: int = 1280, height: int = 900, dark: bool = False
    ) -> None:
        for domain in ("Page", "Runtime", "Log", "Network"):
            await self.send(f"{domain}.enable")
        await self.resize(width, height, dark)
        await self.send("Page.navigate", url=address)

    async def resize(self, width: int, height: int, dark: bool = False) -> None:
        await self.send(
            "Emulation.setDeviceMetricsOverride",
            width=width,
            height=height,
            deviceScaleFactor=1,
            mobile=width < 600,
        )
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        await self.send("Emulation.setEmulatedMedia", features=[scheme])

    async def run(self, script: str) -> Any:
        """The value of an expression in the page."""
        told = await self.send(
            "Runtime.evaluate", expression=script, returnByValue=True, awaitPromise=True
        )
        assert "exceptionDetails" not in told, told["exceptionDetails"]
        return told["result"].get("value")

    async def until(self, script: str) -> Any:
        """The value of an expression, as soon as it is a true one.

        Raises:
            AssertionError: it is none within the time; says what the page shows.
        """
        end = asyncio.get_running_loop().time() + _SECONDS
        while asyncio.get_running_loop().time() < end:
            value = await self.run(f"((value) => value instanceof Node ? true : value)({script})")
            if value:
                return value
            await asyncio.sleep(0.03)
        raise AssertionError(
            f"never: {script}\n{self.errors}\n{await self.run('document.body.innerText')}"
        )

    async def click(self, selector: str, text: str = "") -> None:
        """A click in the middle of the first element that matches, and has ``text`` in it; once
        more where the page drew that element anew between pressing and releasing, or moved it."""
        for _ in range(20):
            place = await self.until(
                f"(() => {{ const found = [...document.querySelectorAll({json.dumps(selector)})]"
                f".find((e) => e.textContent.includes({json.dumps(text)}) && "
                "e.getClientRects().length);"
                " if (!found) return null; found.scrollIntoView({block: 'center'}); "
                "window.notClicked = true;"
                " document.addEventListener('click', (event) => {"
                f" window.notClicked &&= !event.target.closest({json.dumps(selector)}); }}, "
                f"{{capture: true}});"
                " const box = found.getBoundingClientRect();"
                " return {x: box.x + box.width / 2, y: box.y + box.height / 2}; })()"
            )
            for kind in ("mouseMoved", "mousePressed", "mouseReleased"):
                await self.send(
                    "Input.dispatchMouseEvent",
                    type=kind,
                    **place,
                    button="left",
                    buttons=1,
                    clickCount=1,
                )
            if not await self.run("window.notClicked === true"):
                return
        raise AssertionError(f"never clicked: {selector} {text}")

    async def write(self, selector: str, text: str) -> None:
        """What is typed into a field, after what was in it is gone."""
        await self.until(
            f"(() => {{ const e = document.querySelector({json.dumps(selector)});"
            " e?.focus(); e?.select(); return !!e; })()"
        )
        await self.send("Input.insertText", text=text)

    async def choose(self, selector: str, value: str) -> None:
        """One of a list."""
        await self.until(
            f"(() => {{ const e = document.querySelector({json.dumps(selector)}); if (!e) return "
            "false;"
            f" e.value = {json.dumps(value)};"
            " e.dispatchEvent(new Event('change', {bubbles: true})); return true; })()"
        )

    async def picture(self, path: Path) -> None:
        """What the window shows, as PNG."""
        told = await self.send("Page.captureScreenshot", format="png")
        path.write_bytes(base64.b64decode(told["data"]))


@contextlib.asynccontextmanager
async def tab() -> AsyncIterator[Tab]:
    """A page of a browser of its own, which ends with the block."""
    browser = chromium()
    assert browser is not None
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as profile:
        options = [
            "--headless=new",
            "--no-sandbox",
            "--disable-gpu",
            "--hide-scrollbars",
            "--disable-dev-shm-usage",
        ]
        options += ["--no-first-run", "--remote-debugging-port=0", f"--user-data-dir={profile}"]
        process = subprocess.Popen(
            [browser, *options, "about:blank"], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
        )
        try:
            port = await _port(Path(profile) / "DevToolsActivePort", process)
            async with aiohttp.ClientSession() as session:
                async with session.get(f"http://127.0.0.1:{port}/json/list") as answer:
                    pages = [
                        page
                        for page in await answer.json(content_type=None)
                        if page["type"] == "page"
                    ]
                address = pages[0]["webSocketDebuggerUrl"]
                async with session.ws_connect(address, max_msg_size=0) as socket:
                    page = Tab(socket)
                    yield page
                    page._reader.cancel()
        finally:
            process.terminate()
            process.wait(20)


async def _port(file: Path, process: subprocess.Popen[bytes]) -> int:
    end = asyncio.get_running_loop().time() + _SECONDS
    while asyncio.get_running_loop().time() < end:
        assert process.poll() is None, f"the browser ended with {process.returncode}"
        if file.exists() and (lines := file.read_text().splitlines()):
            return int(lines[0])
        await asyncio.sleep(0.05)
    raise AssertionError("the browser does not come up")


async def texts(page: Tab, selector: str) -> list[str]:
    """Of all elements that match."""
    return list(
        await page.run(f"[...document.querySelectorAll({selector!r})].map((e) => e.textContent)")
    )
