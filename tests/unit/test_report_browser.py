"""report.html in a real Chromium, opened from the file system: every view, and nothing that runs or
asks for more."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any

import orjson
import pytest

from benchmarks.browser import NAMES, Tab, chromium, tab, texts
from benchmarks.watched_runs import make_run, write_lines
from slime.observe.run_data import read_run
from slime.observe.run_folder import RunFolder
from slime.page import report_contents as contents
from slime.page.report import write_comparison, write_report
from slime.page.server import Runs
from tests.support.run_folders import held
from tests.support.watching import browse

pytestmark = pytest.mark.skipif(
    chromium() is None, reason=f"none of {', '.join(NAMES)} is installed"
)
HOSTILE = (
    "</script><script>alert(1)</script><img src=x onerror=alert(1)>\"'&lt;<!--\u2028</style>]]>"
)
VIEWS = ("overview", "timeline", "engines", "samples", "settings")


def visit(what: Callable[[Tab], Coroutine[Any, Any, None]]) -> None:
    """Run ``what`` with a browser. Nothing may complain, and nothing may be asked for beside files
    that it opens."""

    async def inner() -> None:
        async with tab() as page:
            await what(page)
            assert page.errors == [] and page.dialogs == []
            assert {address.partition(":")[0] for address in page.requested} <= {
                "file",
                "about",
                "data",
            }
            assert all(
                address.endswith(".html")
                for address in page.requested
                if address.startswith("file:")
            )

    asyncio.run(inner())


async def titles(page: Tab) -> list[str]:
    return await texts(page, "figure h4 span")


async def opened(page: Tab, path: Path, shown: str = "view=overview") -> None:
    """A view of a report, drawn."""
    view = shown.partition("view=")[2].partition("&")[0]
    await page.open("about:blank")
    await page.open(f"{path.as_uri()}#{shown}", dark=view == "samples")
    drawn = "document.getElementById('pulse').textContent.startsWith('as of')"
    await page.until(f"document.querySelector('main')?.dataset.view === '{view}' && {drawn}")


def test_every_view_of_a_run_opens_from_the_file_system(tmp_path: Path) -> None:
    path = write_report(make_run(tmp_path / "run", rollouts=16))

    async def what(page: Tab) -> None:
        await opened(page, path)
        assert await page.run("document.title") == "run · slime report"
        assert {"Reward", "Response length", "KL to the reference", "Time per step"} <= set(
            await titles(page)
        )
        told = await page.run("document.querySelector('main').innerText")
        for part in ("tiny", "median", "16", "All other metrics".upper()):
            assert part in told
        await page.click("details.fold summary", "All metrics in numbers")
        await page.until(
            "[...document.querySelectorAll('table.metrics th')].some((e) => e.textContent === 'KL "
            "losstrain/kl_loss')"
        )
        await page.click("#views a", "Timeline")
        await page.until("document.querySelector('canvas')?.height > 100")
        assert "3 of 16 steps" in await page.run("document.querySelector('main').innerText")
        await page.click("button", "earlier")
        await page.until("document.querySelector('select').value === '9'")
        await page.click("#views a", "Engines")
        await page.until("document.querySelectorAll('.bars li').length === 2")
        await page.click("#views a", "Settings")
        await page.until("document.querySelector('table.config')")
        # a search, groups, best beside worst, a sample with its tokens, its prompt through the
        # steps
        await page.click("#views a", "Samples")
        await page.until("document.querySelectorAll('.groups > details').length === 50")
        await page.click("button.more")
        await page.until("document.querySelectorAll('.groups > details').length === 64")
        await page.write("input[type=search]", "ANTENNA")
        await page.until(
            "[...document.querySelectorAll('.response-line')].length"
            " && [...document.querySelectorAll('.response-line')].every((e) => "
            "e.textContent.includes('search:'))"
        )
        await page.write("input[type=search]", "nowhere at all")
        await page.until(
            "document.querySelector('main .none')?.textContent === 'No sample matches.'"
        )
        await opened(page, path, "view=samples&sort=spread")
        await page.click("details.group summary")
        await page.until("document.querySelectorAll('tbody tr').length === 4")
        await page.click("button", "compare best and worst")
        await page.until("document.querySelectorAll('.columns .response').length === 2")
        assert (await texts(page, ".columns .reward")) == ["reward 1", "reward 0"]
        await page.click("button", "← samples")
        await page.click("details.group summary")
        await page.click("button.open")
        await page.until("document.querySelector('article.sample .response-text .lp')")
        await page.click("button", "this prompt by step")
        await page.until(
            "document.querySelectorAll('del').length && document.querySelectorAll('ins').length"
        )
        assert "Sampled in 8 steps" in await page.run("document.body.textContent")

    visit(what)


def test_the_file_answers_as_the_server_does(tmp_path: Path) -> None:
    """What is in it whole: lists in every order, groups, searches, one sample, metrics,
    settings."""
    one, two = (
        make_run(tmp_path / "one", rollouts=6),
        make_run(tmp_path / "two", rollouts=3, lr=1e-5, seed=1),
    )
    odd = [
        {"group": 9, "response": "Straße ΣΑΣ"},
        {"prompt": ["x"], "reward": 0.25},
        {"label": {"a": 1}, "status": "failed"},
    ]
    write_lines(one / "samples" / "rollout_000006.jsonl", odd)
    write_lines(
        one / "metrics.jsonl",
        [{"step": 3, "train/loss": None}, {"step": 1, "train/loss": 2.5, "eval/a": 1}],
    )
    data = orjson.dumps(
        contents.contents_of([read_run(one), read_run(two)]), option=orjson.OPT_NON_STR_KEYS
    ).decode()
    orders = [
        {"sort": s, "descending": d}
        for s in ("step", "spread", "reward", "advantage", "length", "tools")
        for d in (0, 1)
    ]
    queries = [
        *({**order, "limit": 200} for order in orders),
        *({"search": words} for words in ("antenna", "FOGA and", "strasse", "σας", "1", "x")),
        {"kind": "eval"},
        {"step": 3, "group": 9},
        {"status": "truncated"},
        {"offset": 40, "limit": 7},
        {"dataset": "sums", "kind": "eval", "whole": 1},
    ]

    async def what(page: Tab, place: str, runs: Runs) -> None:
        await page.open(place)
        await page.until("document.querySelector('figure')")
        keys = {stage: key for key, (stage, _) in runs.all().items()}
        served = {watch.path.name: key for watch, key in keys.items()}
        await page.run(
            f"import('/frozen.js').then((m) => {{ const answer = "
            f"m.answering(JSON.parse({json.dumps(data)}));"
            " const texts = (asked) => Object.fromEntries(Object.entries(asked).map(([k, v]) => "
            "[k, String(v)]));"
            " window.inFile = (question, asked) => answer(question, texts(asked)); })"
        )

        async def both(question: str, asked: dict[str, Any], run: str = "one") -> tuple[Any, Any]:
            url = f"/api/{question}?" + "&".join(
                f"{k}={v}" for k, v in {"run": served[run], **asked}.items()
            )
            live = await page.run(f"fetch({json.dumps(url)}).then((a) => a.json())")
            frozen = {"run": "0." if run == "one" else "1.", **asked}
            return live, await page.run(f"inFile({json.dumps(question)}, {json.dumps(frozen)})")

        def plain(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
            return [
                {k: v for k, v in row.items() if k not in ("id", "length", "short")} for row in rows
            ]

        for asked in queries:
            live, frozen = await both("samples", asked)
            assert (
                plain(live["samples"]) == plain(frozen["samples"])
                and live["more"] == frozen["more"]
            ), asked
        for asked in (*queries, {"step": 1, "sort": "spread"}, {"offset": 3, "limit": 2}):
            live, frozen = await both("groups", asked)
            assert live["more"] == frozen["more"], asked
            for group in (*live["groups"], *frozen["groups"]):
                group["rewards"] = sorted(map(float, (group["rewards"] or "").split()))
                del group["id"]
            assert live["groups"] == frozen["groups"], asked
        live, frozen = await both(
            "metrics", {"names": "train/loss,eval/a,nothing", "generation": -1, "since": 0}
        )
        for told in (live, frozen):
            assert told["columns"] == {"train/loss": [2.5, None], "eval/a": [1, None]} and told[
                "steps"
            ] == [1, 3]
            assert told["bad"].get("train/loss") == [3] and not told["bad"].get("eval/a")
        for question in ("phases", "engines", "settings"):
            live, frozen = await both(question, {}, "two")
            assert live == frozen, question
        live, frozen = await both("timeline", {"step": 2}, "two")
        assert live["timeline"] == frozen["timeline"] and live["steps"] == frozen["steps"]
        live, frozen = await both("steps", {})
        for entry in live["steps"]:
            del entry["length"]
        assert live["steps"] == frozen["steps"]
        live = await page.run(
            f"fetch('/api/differences?runs={served['one']},{served['two']}').then((a) => a.json())"
        )
        assert live["flags"] == (await page.run("inFile('differences', {runs: '0.,1.'})"))["flags"]

    browse([one, two], what)


def test_several_runs_are_compared(tmp_path: Path) -> None:
    one, two = (
        make_run(tmp_path / "one", rollouts=16),
        make_run(tmp_path / "two", rollouts=12, lr=1e-5, seed=1),
    )
    ages = [
        {"step": i, "rollout/staleness/max": 2.0, "rollout/staleness/mean": 1.0, "eval/x": 0.5}
        for i in (1, 2)
    ]
    with (one / "metrics.jsonl").open("ab") as file:
        file.write(b"".join(orjson.dumps(row) + b"\n" for row in ages))
    path = write_comparison([one, two])

    async def what(page: Tab) -> None:
        await opened(page, path)
        shown = await titles(page)
        assert {
            "Reward",
            "Time per step",
            "Staleness: mean",
            "Staleness: oldest sample",
            "Evaluation: x",
        } <= set(shown)
        for title in ("Reward", "Time per step"):
            lines = (
                f'document.querySelectorAll(\'figure[data-title="{title}"] '
                "path.line:not(.raw)').length"
            )
            assert await page.run(lines) == 2
        table = await texts(page, "table.metrics tr")
        assert (
            table[1].startswith("one finished16")
            and "x 0.5" in table[1]
            and table[2].startswith("two finished12")
        )
        await page.click("#views a", "Settings")
        await page.until("document.querySelector('table.diff')")
        assert (await texts(page, "table.diff tr:last-child th")) == ["lr"]
        await page.click("#runs input[aria-label*=two]")
        await page.until("!document.querySelector('table.diff')")

    visit(what)


def rows_of(values: dict[str, list[float | None]]) -> list[dict[str, Any]]:
    steps = len(next(iter(values.values())))
    return [
        {"step": i, **{name: column[i] for name, column in values.items()}} for i in range(steps)
    ]


def test_which_charts_there_are(tmp_path: Path) -> None:
    """What is 0 by construction has none, unlike a gradient norm; a supervised stage shows its loss
    and no rewards; NaN is marked, and the longest and the shortest response are a shade."""
    still: dict[str, list[float | None]] = {
        name: [0.0, 0.0]
        for name in (
            "train/ppo_kl",
            "train/pg_clipfrac",
            "rollout/staleness/max",
            "train/grad_norm",
        )
    }
    runs = {
        "still": (still | {"train/loss": [3e-9, 3e-9]}, "policy_loss", {"Gradient norm"}),
        "moving": (
            {name: [*column[:1], 0.1] for name, column in still.items()}
            | {"train/loss": [0.0, 0.1]},
            "policy_loss",
            {"Gradient norm", "Loss", "KL within the step", "Clipped tokens", "Staleness"},
        ),
        "sft": ({"train/loss": [1.0, 0.5], "rollout/raw_reward": [0.0, 0.0]}, "sft_loss", {"Loss"}),
        "nan": (
            {"train/loss": [1.0, None], "rollout/raw_reward": [None, None]},
            "policy_loss",
            {"Loss"},
        ),
        "one": (
            {"perf/step_time": [2.0], "perf/rollout_time": [1.0]},
            "policy_loss",
            {"Time per step"},
        ),
        "shade": (
            {
                f"rollout/response_len/{name}": [at, at + 1]
                for name, at in (("mean", 5.0), ("min", 1.0), ("max", 9.0))
            },
            "policy_loss",
            {"Response length"},
        ),
        "empty": ({"x": []}, "policy_loss", set()),
    }
    for name, (values, loss, _) in runs.items():
        (tmp_path / name).mkdir()
        (tmp_path / name / "config.json").write_text(json.dumps({"g": {"loss_type": loss}}))
        write_lines(tmp_path / name / "metrics.jsonl", rows_of(values))

    async def what(page: Tab) -> None:
        for name, (_, _, wanted) in runs.items():
            await opened(page, write_report(tmp_path / name))
            assert set(await titles(page)) == wanted, name
            assert await page.run("document.querySelectorAll('figure path.bad').length") == (
                name == "nan"
            )
            assert await page.run("document.querySelectorAll('figure path.band').length") == (
                name == "shade"
            )
        await opened(page, tmp_path / "one" / "report.html")
        drawn = await page.run("document.querySelector('path.layer').getBBox().width")
        assert drawn > 100, "a single step is a column"

    visit(what)


def test_what_a_model_wrote_never_runs(tmp_path: Path) -> None:
    run = tmp_path / "run"
    row = {
        "prompt": HOSTILE,
        "response": HOSTILE,
        "label": HOSTILE,
        "reward": 1.0,
        "group": 0,
        "response_length": 1,
    }
    row |= {
        "metadata": {HOSTILE: HOSTILE},
        "status": HOSTILE,
        "tokens": {"text": [HOSTILE], "log_probs": [-1.0]},
    }
    chat = {
        "prompt": [{"role": HOSTILE, "content": HOSTILE}],
        "response": HOSTILE,
        "dataset": HOSTILE,
    }
    write_lines(run / "samples" / "rollout_000000.jsonl", [row, row | chat])
    (run / "config.json").write_text(
        json.dumps({"g": {HOSTILE: HOSTILE, "hf_checkpoint": HOSTILE}})
    )
    write_lines(
        run / "metrics.jsonl",
        [{"step": 1, HOSTILE: 1.0, f"eval/{HOSTILE}": 0.5, "nonfinite": [HOSTILE]}],
    )
    stages = {"": {"state": "failed", "host": HOSTILE, "started": 1.0, "ended": 2.0}}
    (run / "run.json").write_text(json.dumps({"name": HOSTILE, "stages": stages}))
    (run / "crash" / "t").mkdir(parents=True)
    (run / "crash" / "t" / "crash.json").write_text(
        json.dumps({"error": HOSTILE, "message": HOSTILE, "notes": [HOSTILE]})
    )
    path = write_report(run)
    named = write_report(run, tmp_path / "out.html")
    assert path.read_text().count("<script") == named.read_text().count("<script") == 2

    async def what(page: Tab) -> None:
        for view in VIEWS:
            await opened(page, path, f"view={view}")
            assert await page.run(
                "document.querySelectorAll('script').length === 2 && "
                "!document.querySelector('main img')"
            )
        await page.click("#views a", "Samples")
        await page.click("button.group")
        assert await page.until("document.querySelector('.response-text')?.textContent") == HOSTILE
        await opened(page, path)
        assert HOSTILE in await page.run("document.querySelector('.alarms').textContent")
        # what would come in by other ways is refused too
        await page.run(
            "document.body.append(Object.assign(document.createElement('script'), {textContent: "
            "'alert(2)'}))"
        )
        assert (
            any("Content Security Policy" in error for error in page.errors) and page.dialogs == []
        )
        page.errors.clear()

    visit(what)


def test_the_file_of_a_run_that_goes_on_loads_itself_again(tmp_path: Path) -> None:
    """And what is unfolded stays so, where one was reading."""
    run = make_run(tmp_path / "run", rollouts=3)
    (run / "run.json").write_bytes(
        orjson.dumps({"stages": {"": {"state": "running", "started": 1.0, "ended": None}}})
    )
    lock = held(RunFolder(run))
    path = write_report(run)

    async def what(page: Tab) -> None:
        await page.send(
            "Page.addScriptToEvaluateOnNewDocument",
            source="window.setInterval = (f) => { window.again = f; };",
        )
        await opened(page, path)
        await page.click("details.fold summary", "perf")
        await page.until("document.querySelector('details.fold[open] figure')")
        await page.run("scrollTo(0, 300)")
        with (run / "metrics.jsonl").open("ab") as file:
            file.write(orjson.dumps({"step": 4, "rollout/raw_reward": 1.0}) + b"\n")
        write_report(run)
        await page.run("document.activeElement.blur()")
        await page.run("window.again()")
        await page.until(
            "document.querySelectorAll('figure[data-title=Reward] circle').length === 4"
        )
        await page.until("document.querySelector('details.fold[open] figure')")
        assert await page.run("scrollY") == 300

    visit(what)
    lock.close()
    assert "data-live" not in write_report(run).read_text().partition("<style>")[0]


def test_a_browser_that_cannot_unpack_it_says_so_and_how_the_run_stands(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run", rollouts=3)
    with (run / "metrics.jsonl").open("ab") as file:
        file.write(
            orjson.dumps({"step": 9, "train/loss": None, "nonfinite": ["train/loss"]}) + b"\n"
        )
    path = write_report(run)

    async def what(page: Tab) -> None:
        await page.send(
            "Page.addScriptToEvaluateOnNewDocument", source="delete window.DecompressionStream"
        )
        await page.open(path.as_uri())
        shown = "document.querySelector('main')?.innerText"
        told = await page.until(f"{shown}?.includes('cannot read') && {shown}")
        for part in ("one released in 2023 or later can", "Last logged step: 9", "train/loss"):
            assert part in told
        page.errors.clear()
        await page.send("Emulation.setScriptExecutionDisabled", value=True)
        await page.open("about:blank")
        await page.open(path.as_uri())
        await asyncio.sleep(0.3)
        await page.send("Emulation.setScriptExecutionDisabled", value=False)
        told = await page.until(
            "document.body?.innerText.includes('Last logged step: 9') && document.body.innerText"
        )
        assert "needs JavaScript" in told

    visit(what)


ODD = [
    "",
    '{"step": 1, "ti',
    '{"step": 1}\n{"step": 2, "rollout/raw_reward": null, "nonfinite": ["rollout/raw_reward"]}\n',
    '{"step": 1, "perf/step_time": 0.0, "train/loss": 5}\n{"step": 2, "perf/step_time": null}\n',
    '{"no_step": 1}\n[1, 2]\nnull\n{"step": "x"}\n{"step": 3, "train/loss": "text", "rollout/x": '
    "[1]}\n",
    '{"step": 1, "train/loss": 1e308, "__proto__": 1, "constructor": 2}\n{"step": 2, '
    '"train/loss": -1e308}\n',
]


def test_odd_runs_open_all_the_same(tmp_path: Path) -> None:
    odd = [
        {"group": 0},
        {"reward": None},
        {"reward": {"a": "text"}},
        {"response": "\ud83d"},
        {"prompt": None, "tokens": 5},
    ]

    async def what(page: Tab) -> None:
        for number, content in enumerate(ODD):
            run = tmp_path / str(number)
            (run / "samples").mkdir(parents=True)
            (run / "config.json").write_text("{}")
            (run / "metrics.jsonl").write_text(content)
            (run / "samples" / "rollout_000000.jsonl").write_text(
                "".join(json.dumps(row) + "\n" for row in odd)
            )
            path = write_report(run)
            for view in VIEWS:
                await opened(page, path, f"view={view}")
            for sample in (1, 2, 3, 4):
                await opened(page, path, f"view=samples&sample={sample}")
                await page.until("document.querySelector('article.sample')")

    visit(what)
