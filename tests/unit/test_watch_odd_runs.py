"""The page of `slime watch` on runs that are not as they should be, in a real Chromium. Skipped
without one."""

from __future__ import annotations

from pathlib import Path
from typing import Any
from urllib.parse import urlencode

import orjson
import pytest

from benchmarks.browser import Tab, chromium
from benchmarks.watched_runs import make_run, write_lines
from slime.observe.run_folder import RunFolder
from slime.page.report import write_report
from slime.page.rows import Query
from slime.page.server import Runs
from tests.support.run_folders import held
from tests.support.watching import browse

pytestmark = pytest.mark.skipif(chromium() is None, reason="no Chromium is installed")
CALL = {"function": {"name": "look_up", "arguments": '{"town": "Paris"}'}}


def sample(**parts: Any) -> dict[str, Any]:
    row = {
        "prompt": "p",
        "response": "abc",
        "reward": 0.5,
        "group": 0,
        "index": 0,
        "status": "completed",
    }
    return row | {"prompt_length": 1, "response_length": 3, "trained_tokens": 3} | parts


def test_samples_of_any_shape_are_shown(tmp_path: Path) -> None:
    folder = make_run(tmp_path / "run", rollouts=1)
    turns = [
        {"role": "assistant", "content": None, "tool_calls": [CALL]},
        {"role": "tool", "content": [{"text": "x"}]},
    ]
    parts = {"text": ["a", "\ufffd", "\ufffd"], "log_probs": [-1.0, None, -1e9]}
    rows = [
        sample(prompt=turns, response="called", reward=None),
        sample(
            response="a\U0001f642",
            tokens=parts,
            token_spans=[[0, 4_000_000_000, 1]],
            loss_mask=[[1, 10**12]],
        ),
        sample(
            prompt=None,
            response=None,
            reward={"a": None},
            status=None,
            group=None,
            label={"a": [1]},
            metadata=None,
        ),
        sample(
            prompt=[],
            response="",
            reward="high",
            response_length=0,
            weight_versions=None,
            token_spans=None,
        ),
        sample(
            response="\0\x07\x1b[31m\u202e",
            reward=1e308,
            group=2**64 - 1,
            response_length=2**64 - 1,
        ),
    ]
    write_lines(folder / "samples" / "rollout_000000.jsonl", rows)
    metrics = [
        {"step": i, "train/grad_norm": value}
        for i, value in enumerate((1e308, -1e308, None, 2**64 - 1))
    ]
    write_lines(folder / "metrics.jsonl", metrics)

    async def what(page: Tab, place: str, runs: Runs) -> None:
        await page.open(f"{place}#view=overview")
        await page.until("document.querySelector('figure')")
        shown = []
        ((watch, _),) = runs.all().values()
        for number in range(len(rows)):
            found = watch.index.find(Query(), number, 1)[0][0]["id"]
            await page.open(f"{place}#view=samples&sample={found}&color=none")
            await page.until(
                f"location.hash.includes('sample={found}&') && "
                "document.querySelector('article.sample')"
            )
            shown.append(await page.until("document.querySelector('main').textContent"))
            await page.choose("label select", "log_prob")
            await page.choose("label select", "version")
            await page.open("about:blank")
        assert (
            "look_up" in shown[0]
            and "Paris" in shown[0]
            and "null" not in shown[0].split("Response")[0]
        )
        assert "a\U0001f642" in shown[1]  # also where tokens are parts of a character

    browse([folder], what)


def test_metrics_of_any_name_are_shown(tmp_path: Path) -> None:
    """By the server and from the file: names with what stands between names, and names that every
    object has."""
    folder = make_run(tmp_path / "run", rollouts=1)
    names = ("eval/sums, of two", "rollout/100%", "constructor", "__proto__", "toString")
    rows: list[dict[str, Any]] = [{"step": i} | dict.fromkeys(names, 0.25 * i) for i in range(1, 4)]
    rows.append({"step": 4, "nonfinite": ["constructor"], "constructor": None})
    write_lines(folder / "metrics.jsonl", rows)
    report = write_report(folder)

    async def what(page: Tab, place: str, runs: Runs) -> None:
        for address in (place, report.as_uri()):
            for name in names:
                await page.open("about:blank")
                await page.open(f"{address}#{urlencode({'view': 'overview', 'metric': name})}")
                figures = (
                    "[...document.querySelectorAll('figure')].map((figure) => figure.textContent)"
                )
                await page.until(
                    f"{figures}.some((text) => text.includes({name!r}) && text.includes('0.75'))"
                )

    browse([folder], what)


def test_a_group_of_an_evaluation_is_of_one_data_set(tmp_path: Path) -> None:
    folder = make_run(tmp_path / "run", rollouts=1)
    rows = [
        sample(dataset=name, response=f"{name} {i}", index=i)
        for name in ("sums", "words")
        for i in range(2)
    ]
    write_lines(folder / "samples" / "eval_000000.jsonl", rows)

    async def what(page: Tab, place: str, runs: Runs) -> None:
        await page.open(f"{place}#view=samples&kind=eval&at=1")
        await page.click("details.group summary", "words")
        await page.until("document.querySelectorAll('details[open] .response-line').length === 2")
        await page.click("button.open", "words 1")
        await page.click("button", "its group")
        await page.until("document.querySelectorAll('details[open] .response-line').length === 2")
        assert await page.run("document.querySelectorAll('.group').length") == 1

    browse([folder], what)


def test_a_view_that_could_not_be_drawn_is_tried_again_and_a_folded_list_stays_so(
    tmp_path: Path,
) -> None:
    folder = make_run(tmp_path / "run", rollouts=1)
    stages = {"": {"state": "running", "started": 1.0, "ended": None}}
    (folder / "run.json").write_bytes(orjson.dumps({"name": "run", "stages": stages}))
    lock = held(RunFolder(folder))

    async def what(page: Tab, place: str, runs: Runs) -> None:
        await page.open(place)
        await page.until("document.querySelector('figure')")
        await page.run("document.querySelector('#runs details').open = false")
        # while the server is away somebody goes to another view
        await page.run(
            "window.real = fetch; window.fetch = () => Promise.reject(new TypeError('failed to "
            "fetch'))"
        )
        await page.click("#views a", "Engines")
        await page.until(
            "document.querySelector('#pulse').textContent.includes('does not respond')"
        )
        write_lines(folder / "metrics.jsonl", [{"step": 5, "rollout/engine_load/0": 1.0}])
        runs.look()
        await page.run("window.fetch = window.real")
        await page.until("document.querySelector('.bars li')")
        assert await page.run(
            "document.querySelector('#runs small').textContent.includes('step 5')"
        )
        assert await page.run("document.querySelector('#runs details').open") is False

    browse([folder], what)
    lock.close()
