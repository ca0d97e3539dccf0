"""The page of `slime watch` in a real Chromium: what a user clicks, and that nothing complains.
Skipped without one."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import orjson
import pytest

from benchmarks.browser import NAMES, Tab, chromium, texts
from benchmarks.watched_runs import make_run, metrics_row, write_lines
from slime.files import read_lines
from slime.observe.run_folder import RunFolder
from slime.page.server import Runs
from tests.support.run_folders import held
from tests.support.watching import browse

pytestmark = pytest.mark.skipif(
    chromium() is None, reason=f"none of {', '.join(NAMES)} is installed"
)
HOSTILE = "</script><script>alert(1)</script><img src=x onerror=alert(1)>\"'&lt;<!--\u2028"


def test_a_user_clicks_through_every_view(tmp_path: Path) -> None:
    one, two = (
        make_run(tmp_path / "one", rollouts=16),
        make_run(tmp_path / "two", rollouts=16, lr=1e-5, seed=1),
    )

    async def what(page: Tab, place: str, runs: Runs) -> None:
        await page.open(place)
        await page.until("document.querySelector('figure[data-title=Reward]')")
        assert await page.run("document.title") == "one · slime watch"
        # curves: several runs over each other, smoothing, one metric by its name
        assert (
            await page.run(
                "document.querySelectorAll('figure[data-title=Reward] path.line:not(.raw)').length"
            )
            == 1
        )
        await page.click("#runs input[aria-label*=two]")
        await page.until(
            "document.querySelectorAll('figure[data-title=Reward] path.line:not(.raw)').length "
            "=== 2"
        )
        before = await page.run(
            "document.querySelector('figure[data-title=Reward] path.line:not(.raw)').outerHTML"
        )
        await page.run(
            "(() => { const e = document.querySelector('input[type=range]'); e.value = 0;"
            " e.dispatchEvent(new Event('input')); })()"
        )
        await page.until("!document.querySelector('path.raw')")
        after = await page.run(
            "document.querySelector('figure[data-title=Reward] path.line:not(.raw)').outerHTML"
        )
        assert before != after
        await page.write("input[type=search]", "engine_load/1")
        await page.until("document.querySelectorAll('figure').length === 1")
        assert (await texts(page, "figure h4 span")) == ["Engine load, 1"]
        await page.write("input[type=search]", "")
        await page.run(
            "document.querySelector('input[type=search]').dispatchEvent(new Event('input'))"
        )
        await page.click("details.fold summary", "perf")
        # the crosshair, by keys
        await page.run("document.querySelector('figure[data-title=Reward] svg').focus()")
        for kind in ("keyDown", "keyUp"):
            await page.send("Input.dispatchKeyEvent", type=kind, key="ArrowLeft", code="ArrowLeft")
        assert await page.until(
            "!document.getElementById('tip').hidden && document.getElementById('tip').innerText"
        )
        await page.run("document.activeElement.blur()")
        # a chart, enlarged by a click
        await page.click("figure[data-title=Reward] svg")
        await page.until("document.querySelector('dialog[open] figure[data-title=Reward]')")
        small, large = await page.run(
            "[...document.querySelectorAll('figure[data-title=Reward] svg')].map((e) => "
            "e.clientWidth)"
        )
        assert large > 2 * small and large > 1000
        marked = await texts(page, "dialog figure .unit")
        assert marked == ["reward", "step"], "both axes are named"
        await page.click("dialog button.close")
        await page.until("!document.querySelector('dialog')")
        # settings that differ
        await page.click("#views a", "Settings")
        await page.until("document.querySelector('table.diff')")
        assert (await texts(page, "table.diff tr:last-child th")) == ["lr"]
        # a timeline, an earlier one, engines
        await page.click("#runs button", "one")
        await page.click("#views a", "Timeline")
        await page.until("document.querySelector('canvas')?.height > 100")
        assert await page.run("document.querySelector('select').value") == "16", (
            "counted as metrics count"
        )
        assert (await texts(page, ".time-axis span"))[:2] == ["0 s", "1 s"], (
            "the driver's bar has an axis"
        )
        await page.click("button", "earlier")
        await page.until("document.querySelector('select').value === '15'")
        await page.click("#views a", "Engines")
        await page.until("document.querySelectorAll('.bars li').length === 2")
        await page.until("document.querySelector('figure[data-title=\"Prefix cache hit rate\"]')")

    browse([one, two], what)


def trained(row: dict[str, Any]) -> dict[str, Any]:
    """What training knew of a sample: a step up, and tokens that the engine held likelier."""
    total = row["prompt_length"] + row["response_length"]
    key = {"index": row["index"], "total_length": total, "response_length": row["response_length"]}
    return {**key, "advantages": 0.7, "log_prob_diffs": [-0.6] * row["response_length"]}


def test_a_user_reads_samples(tmp_path: Path) -> None:
    folder = make_run(tmp_path / "run", rollouts=12, groups=8)
    for path in (folder / "samples").glob("rollout_*.jsonl"):
        write_lines(
            path.with_name(path.name.replace("rollout", "trained")),
            [trained(row) for row in read_lines(path)],
        )

    async def what(page: Tab, place: str, runs: Runs) -> None:
        await page.open(f"{place}#view=samples")
        # groups are folded: a question, its label and rewards each
        await page.until("document.querySelectorAll('.groups > details:not([open])').length === 50")
        shown = (await texts(page, ".groups summary"))[0]
        assert (
            "step 12" in shown
            and "Tell me of " in shown
            and "label" in shown
            and "mean of 4" in shown
        )
        await page.click("button.more")
        await page.until("document.querySelectorAll('.groups > details').length === 96")
        await page.choose("label:nth-of-type(3) select", "spread")
        await page.until("document.querySelectorAll('.groups > details').length === 50")
        await page.click("details.group summary")
        await page.until("document.querySelectorAll('details[open] tbody tr').length === 4")
        rewards = await texts(page, "details[open] tbody b")
        assert rewards == sorted(rewards, reverse=True) and {rewards[0], rewards[-1]} == {"0", "1"}
        await page.click("button", "compare best and worst")
        await page.until("document.querySelectorAll('.columns .response').length === 2")
        await page.click("button", "← samples")
        # a search keeps the groups, and shows in each only what matches
        await page.write("input[type=search]", "antenna")
        await page.until(
            "((lines) => lines.length && lines.every((e) => e.textContent.includes('search:')))"
            "([...document.querySelectorAll('.groups .response-line')])"
        )
        await page.click("details.group summary")
        # the one that searched
        await page.until("document.querySelectorAll('details[open] tbody tr').length === 1")
        await page.click("button.open")
        await page.until("document.querySelector('article.sample .response-text .lp')")
        assert await page.run(
            "document.querySelector('.response-text .lp').title.startsWith('token 0, trained, "
            "log-prob -')"
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
            assert await page.run(f"document.querySelector('.response-text .{kind}') !== null") is (
                kind != "x"
            )
        # its group, and the same prompt in another step
        await page.click("button", "its group")
        await page.until("document.querySelectorAll('details.group[open] tbody tr').length > 0")
        await page.run("history.back()")
        await page.click("button", "this prompt by step")
        await page.until("document.querySelectorAll('.columns .response').length === 2")
        assert await page.run(
            "document.querySelectorAll('del').length && document.querySelectorAll('ins').length"
        )
        assert "Sampled in 6 steps" in await page.run("document.body.textContent")
        before = await page.run("document.querySelector('.columns').innerText")
        await page.click("tbody button", "right")
        assert before != await page.run("document.querySelector('.columns').innerText")

    browse([folder], what)


def test_what_a_model_wrote_never_runs(tmp_path: Path) -> None:
    folder = make_run(tmp_path / "run", rollouts=1)
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
    write_lines(folder / "samples" / "rollout_000000.jsonl", [row, row | chat])
    (folder / "config.json").write_text('{"g": {"x": "<img src=x onerror=alert(1)>"}}')
    write_lines(folder / "metrics.jsonl", [{"step": 1, HOSTILE: 1.0, "nonfinite": [HOSTILE]}])

    async def what(page: Tab, place: str, runs: Runs) -> None:
        for view in ("overview", "timeline", "engines", "settings"):
            await page.open(f"{place}#view={view}")
            await page.until(f"document.querySelector('main')?.dataset.view === '{view}'")
        await page.open(f"{place}#view=samples")
        await page.click("button.group", HOSTILE.split("\u2028")[0])
        shown = await page.until("document.querySelector('.response-text')?.textContent")
        assert shown == HOSTILE
        await page.click("button", "this prompt by step")
        await page.until("document.querySelector('.columns')")
        assert await page.run(
            "document.querySelectorAll('script').length === 1 && !document.querySelector('main "
            "img')"
        )

    browse([folder], what)


def test_a_run_that_goes_on_is_followed_and_a_phone_has_room(tmp_path: Path) -> None:
    folder = make_run(tmp_path / "run", rollouts=3)

    stages = {"": {"state": "running", "started": 1.0, "ended": None}}
    (folder / "run.json").write_bytes(orjson.dumps({"name": "run", "stages": stages}))
    lock = held(RunFolder(folder))

    async def what(page: Tab, place: str, runs: Runs) -> None:
        await page.open(place, width=390, height=800, dark=True)
        await page.until("document.querySelector('figure[data-title=Reward]')")
        state = "document.querySelector('#runs summary .state')"
        assert await page.run(f"{state}.innerText") == "running" and await page.run(
            f"{state}.getClientRects().length"
        )
        for view in ("overview", "timeline", "engines", "samples", "settings"):
            await page.click(f"#views a[href*={view}]" if view != "overview" else "#views a")
            await page.until(
                f"document.querySelector('main')?.dataset.view === '{view}' && "
                "document.querySelector('h3, .group')"
            )
            wide = await page.run("document.documentElement.scrollWidth")
            assert wide <= 390, f"{view} is {wide} wide"
        await page.click("#views a", "Overview")
        await page.until(
            "document.querySelectorAll('figure[data-title=Reward] circle').length === 3"
        )
        row = metrics_row(4, 4, random.Random(0))
        with (folder / "metrics.jsonl").open("ab") as file:
            file.write(orjson.dumps(row) + b"\n")
        # by itself
        await page.until(
            "document.querySelectorAll('figure[data-title=Reward] circle').length === 4"
        )

    browse([folder], what)
    lock.close()


CHARTS = """
import('/charts.js').then(({ figure, ticks }) => {
  let seed = 7;
  const chance = () => { seed = (seed * 16807) % 2147483647; return seed / 2147483647; };
  const kinds = [() => (chance() - 0.5) * 2e12, () => (chance() - 0.5) * 2e-9, () => 0, () => 2.9985 + chance() / 300,
    chance, () => 5e-9 * (1 - 4 * chance())];
  const wrong = [], expect = (is, ...what) => { if (!is) wrong.push(JSON.stringify(what).slice(0, 300)); };
  const number = (element, name) => Number(element.getAttribute(name));

  function tryFigure(round) {
    const kind = kinds[round % kinds.length], stacked = round % 4 === 3, count = 1 + Math.floor(chance() * 80);
    const points = [...Array(count).keys()].map((i) => [i, stacked ? Math.abs(kind()) : kind()]);
    const line = (color) => ({ name: "a", color, points, bad: stacked ? [] : [count] });
    const chart = { title: "a", lines: [line(1), line(2)], stacked, band: round % 5 ? undefined : [points, points] };
    const drawing = figure(chart, round % 3 ? 0.6 : 0).querySelector("svg");
    for (const path of drawing.querySelectorAll("path:not(.bad, .axis)")) {
      for (const [, x, y] of path.getAttribute("d").matchAll(/[ML](-?[\\d.]+) (-?[\\d.]+)/g)) {
        expect(30 <= x && x <= 440 && -1 <= y && y <= 212, "outside", x, y, points);
      }
    }
    expect(!/NaN|Infinity/.test(drawing.outerHTML), "not finite", points);
    const ends = [...drawing.querySelectorAll("text.tick.y")];
    const labels = ends.map((text) => text.textContent), left = number(drawing.querySelector("line.grid"), "x1");
    expect(new Set(labels).size === labels.length && labels.length >= 2, "labels", labels);
    for (const text of ends) {
      const right = number(text, "x");
      expect(right <= left && right - 6.7 * text.textContent.length >= 0, "label", text.textContent);
    }
  }

  function tryTicks() {
    const low = (chance() - 0.5) * 2e9, high = low + chance() * 1e9, marks = ticks(low, high);
    const slack = 1e-6 * Math.max(1, Math.abs(low), high - low), rises = marks.every((m, i) => !i || m > marks[i - 1]);
    expect(marks.length >= 2 && marks.length <= 12 && rises, "marks", low, high, marks);
    expect(marks[0] <= low + slack && marks.at(-1) >= high - slack, "covers", low, high, marks);
  }

  for (let round = 0; round < 600; round++) { tryFigure(round); tryTicks(); }
  return wrong;
})
"""


def test_charts_are_inside_their_frame_and_their_labels_too(tmp_path: Path) -> None:
    """Whatever the values are: tiny, huge, all alike, of one step, NaN; labels as wide as the
    widest common font."""

    async def what(page: Tab, place: str, runs: Runs) -> None:
        await page.open(place)
        await page.until("document.querySelector('figure')")
        assert await page.run(CHARTS) == []

    browse([make_run(tmp_path / "run", rollouts=2)], what)


def test_alarms_name_their_runs_and_the_best_and_worst_samples_are_shown(tmp_path: Path) -> None:
    one, two = (
        make_run(tmp_path / "one", rollouts=3),
        make_run(tmp_path / "two", rollouts=3, seed=1),
    )
    for folder in (one, two):
        with (folder / "metrics.jsonl").open("ab") as file:
            row = {
                "step": 4,
                "train/loss": None,
                "nonfinite": ["train/loss"],
                "train/train_rollout_logprob_abs_diff": 0.5,
            }
            file.write(orjson.dumps(row) + b"\n")

    async def what(page: Tab, place: str, runs: Runs) -> None:
        await page.open(f"{place}#runs={','.join(runs.all())}")
        await page.until("document.querySelectorAll('.alarms li').length === 2")
        assert sorted(await texts(page, ".alarms li > code.run")) == ["one", "two"]
        (picked,) = [key for key, (watch, _) in runs.all().items() if watch.path == one]
        await page.open("about:blank")
        await page.open(f"{place}#runs={picked}")
        await page.until("document.querySelectorAll('.end').length === 2")
        assert await page.run("document.querySelector('.alarms code.run') === null")
        best, worst = await texts(page, ".end")
        assert (
            "Best sample" in best
            and "reward 1" in best
            and "Worst sample" in worst
            and "reward 0" in worst
        )
        assert "Tell me of " in best and "label" in best
        assert "Samples of step 3" in await page.run("document.querySelector('.ends').textContent")
        assert "4" in (await texts(page, ".tile"))[-1]
        await page.click(".end", "Worst")
        await page.until(
            "document.querySelector('article.sample .reward')?.textContent === 'reward 0'"
        )

    browse([one, two], what)
