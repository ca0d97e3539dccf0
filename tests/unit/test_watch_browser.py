"""The page of `slime watch` in a real Chromium: what a user clicks, and that nothing complains. Skipped without one."""

from __future__ import annotations

import asyncio
import os
import random
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any

import orjson
import pytest
from aiohttp import web

from slime.files import read_lines
from slime.host import bind
from slime.observe.run_folder import RunFolder
from slime.observe.watch.server import Runs, application
from tests.support.browser import NAMES, Tab, chromium, tab
from tests.support.watched_runs import make_run, metrics_row, write_lines

pytestmark = pytest.mark.skipif(chromium() is None, reason=f"none of {', '.join(NAMES)} is installed")
HOSTILE = "</script><script>alert(1)</script><img src=x onerror=alert(1)>\"'&lt;<!--\u2028"
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


async def texts(page: Tab, selector: str) -> list[str]:
    return list(await page.run(f"[...document.querySelectorAll({selector!r})].map((e) => e.textContent)"))


def test_a_user_clicks_through_every_view(tmp_path: Path) -> None:
    one, two = make_run(tmp_path / "one", rollouts=16), make_run(tmp_path / "two", rollouts=16, lr=1e-5, seed=1)

    async def what(page: Tab, place: str, runs: Runs) -> None:
        await page.open(place)
        await page.until("document.querySelector('figure[data-title=Reward]')")
        assert await page.run("document.title") == "one · slime watch"
        # curves: several runs over each other, smoothing, one metric by its name
        assert await page.run("document.querySelectorAll('figure[data-title=Reward] path.line:not(.raw)').length") == 1
        await page.click("#runs input[aria-label*=two]")
        await page.until("document.querySelectorAll('figure[data-title=Reward] path.line:not(.raw)').length === 2")
        before = await page.run("document.querySelector('figure[data-title=Reward] path.line:not(.raw)').outerHTML")
        await page.run(
            "(() => { const e = document.querySelector('input[type=range]'); e.value = 0;"
            " e.dispatchEvent(new Event('input')); })()"
        )
        await page.until("!document.querySelector('path.raw')")
        after = await page.run("document.querySelector('figure[data-title=Reward] path.line:not(.raw)').outerHTML")
        assert before != after
        await page.write("input[type=search]", "engine_load/1")
        await page.until("document.querySelectorAll('figure').length === 1")
        assert (await texts(page, "figure h4 span")) == ["rollout/engine_load/1"]
        await page.write("input[type=search]", "")
        await page.run("document.querySelector('input[type=search]').dispatchEvent(new Event('input'))")
        await page.click("details.fold summary", "perf")
        # the crosshair, by keys
        await page.run("document.querySelector('figure[data-title=Reward] svg').focus()")
        for kind in ("keyDown", "keyUp"):
            await page.send("Input.dispatchKeyEvent", type=kind, key="ArrowLeft", code="ArrowLeft")
        assert await page.until("!document.getElementById('tip').hidden && document.getElementById('tip').innerText")
        await page.run("document.activeElement.blur()")
        # settings that differ
        await page.click("#views a", "Settings")
        await page.until("document.querySelector('table.diff')")
        assert (await texts(page, "table.diff tr:last-child th")) == ["lr"]
        # a timeline, an earlier one, engines
        await page.click("#runs button", "one")
        await page.click("#views a", "Timeline")
        await page.until("document.querySelector('canvas')?.height > 100")
        await page.click("button", "earlier")
        await page.until("document.querySelector('select').value === '14'")
        await page.click("#views a", "Engines")
        await page.until("document.querySelectorAll('.bars li').length === 2")
        await page.until("document.querySelector('figure[data-title=\"Prefix cache\"]')")

    browse([one, two], what)


def trained(row: dict[str, Any]) -> dict[str, Any]:
    """What training knew of a sample: a step up, and tokens that the engine held likelier."""
    total = row["prompt_length"] + row["response_length"]
    key = {"index": row["index"], "total_length": total, "response_length": row["response_length"]}
    return {**key, "advantages": 0.7, "log_prob_diffs": [-0.6] * row["response_length"]}


def test_a_user_reads_samples(tmp_path: Path) -> None:
    folder = make_run(tmp_path / "run", rollouts=12, groups=8)
    for path in (folder / "samples").glob("rollout_*.jsonl"):
        write_lines(path.with_name(path.name.replace("rollout", "trained")), [trained(row) for row in read_lines(path)])

    async def what(page: Tab, place: str, runs: Runs) -> None:
        await page.open(f"{place}#view=samples")
        await page.until("document.querySelectorAll('tbody tr').length === 50")
        await page.click("button.more")
        await page.until("document.querySelectorAll('tbody tr').length === 100")
        await page.choose("label:nth-of-type(4) select", "reward")
        await page.until("[...document.querySelectorAll('tbody b')].every((e) => e.textContent === '1')")
        await page.write("input[type=search]", "antenna")
        await page.until(
            "[...document.querySelectorAll('.response-line')].every((e) => e.textContent.includes('search:'))"
        )
        assert await page.run("document.querySelectorAll('tbody tr').length") > 0
        # groups, one of them, one sample
        await page.choose("label:nth-of-type(3) select", "groups")
        await page.until("document.querySelector('.rewards')")
        await page.click("button.open")
        await page.until("document.querySelectorAll('tbody tr').length === 1")  # the one that searched
        await page.click("button.open")
        await page.until("document.querySelector('article.sample .response-text .lp')")
        assert await page.run(
            "document.querySelector('.response-text .lp').title.startsWith('token 0, trained on, log-prob -')"
        )
        # what the tool said is folded, and there
        assert await page.run("document.querySelector('details.tool').open") is False
        await page.click("details.tool summary")
        assert "1889" in await page.until("document.querySelector('details.tool[open]')?.innerText")
        for coloring, kind in (
            ("mask", "untrained"),
            ("advantage", "untrained"),
            ("version", "version"),
            ("token_advantage", "up.tone3"),
            ("difference", "down.tone4"),
            ("none", "x"),
        ):
            await page.choose("label select", coloring)
            assert await page.run(f"document.querySelector('.response-text .{kind}') !== null") is (kind != "x")
        # its group, and the same prompt in another step
        await page.click("button", "its group")
        await page.until("document.querySelector('table.samples')")
        await page.run("history.back()")
        await page.click("button", "this prompt through the steps")
        await page.until("document.querySelectorAll('.columns .response').length === 2")
        assert await page.run("document.querySelectorAll('del').length && document.querySelectorAll('ins').length")
        assert "Drawn in 6 steps" in await page.run("document.body.textContent")
        before = await page.run("document.querySelector('.columns').innerText")
        await page.click("tbody button", "right")
        assert before != await page.run("document.querySelector('.columns').innerText")

    browse([folder], what)


def test_what_a_model_wrote_never_runs(tmp_path: Path) -> None:
    folder = make_run(tmp_path / "run", rollouts=1)
    row = {"prompt": HOSTILE, "response": HOSTILE, "label": HOSTILE, "reward": 1.0, "group": 0, "response_length": 1}
    row |= {"metadata": {HOSTILE: HOSTILE}, "status": HOSTILE, "tokens": {"text": [HOSTILE], "log_probs": [-1.0]}}
    chat = {"prompt": [{"role": HOSTILE, "content": HOSTILE}], "response": HOSTILE, "dataset": HOSTILE}
    write_lines(folder / "samples" / "rollout_000000.jsonl", [row, row | chat])
    (folder / "config.json").write_text('{"g": {"x": "<img src=x onerror=alert(1)>"}}')
    write_lines(folder / "metrics.jsonl", [{"step": 1, HOSTILE: 1.0, "nonfinite": [HOSTILE]}])

    async def what(page: Tab, place: str, runs: Runs) -> None:
        for view in ("overview", "timeline", "engines", "settings"):
            await page.open(f"{place}#view={view}")
            await page.until(f"document.querySelector('main')?.dataset.view === '{view}'")
        await page.open(f"{place}#view=samples&list=groups")
        await page.until("document.querySelector('.rewards')")
        await page.open(f"{place}#view=samples")
        await page.click("button.open", HOSTILE.split("\u2028")[0])
        shown = await page.until("document.querySelector('.response-text')?.textContent")
        assert shown == HOSTILE
        await page.click("button", "this prompt through the steps")
        await page.until("document.querySelector('.columns')")
        assert await page.run("document.querySelectorAll('script').length === 1 && !document.querySelector('main img')")

    browse([folder], what)


def test_a_run_that_goes_on_is_followed_and_a_phone_has_room(tmp_path: Path) -> None:
    folder = make_run(tmp_path / "run", rollouts=3)

    stages = {"": {"state": "running", "started": 1.0, "ended": None}}
    (folder / "run.json").write_bytes(orjson.dumps({"name": "run", "stages": stages}))
    lock = RunFolder(folder).lock()

    async def what(page: Tab, place: str, runs: Runs) -> None:
        await page.open(place, width=390, height=800, dark=True)
        await page.until("document.querySelector('figure[data-title=Reward]')")
        for view in ("overview", "timeline", "engines", "samples", "settings"):
            await page.click(f"#views a[href*={view}]" if view != "overview" else "#views a")
            await page.until(
                f"document.querySelector('main')?.dataset.view === '{view}' && document.querySelector('h3, table')"
            )
            wide = await page.run("document.documentElement.scrollWidth")
            assert wide <= 390, f"{view} is {wide} wide"
        await page.click("#views a", "Overview")
        await page.until("document.querySelectorAll('figure[data-title=Reward] circle').length === 3")
        row = metrics_row(4, 4, random.Random(0))
        with (folder / "metrics.jsonl").open("ab") as file:
            file.write(orjson.dumps(row) + b"\n")
        await page.until("document.querySelectorAll('figure[data-title=Reward] circle').length === 4")  # by itself

    browse([folder], what)
    os.close(lock)
