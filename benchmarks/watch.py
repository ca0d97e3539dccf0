"""How quick `slime watch` is with very many samples: building the index, the first paint, searches.

    # the folder is made once and used again
    python benchmarks/watch.py --samples 100000 --folder /tmp/watched

First paint is measured in Chromium where there is one, from the navigation to the first samples
that can be read.
"""

from __future__ import annotations

import argparse
import asyncio
import statistics
import sys
import time
from collections.abc import Callable, Sized
from pathlib import Path

from aiohttp import web

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))

from benchmarks.browser import chromium, tab  # noqa: E402
from benchmarks.watched_runs import make_run, vocabulary  # noqa: E402
from slime.page.report import write_report  # noqa: E402
from slime.page.rows import Query  # noqa: E402
from slime.page.server import Runs, application  # noqa: E402
from slime.processes.host import bind  # noqa: E402

_GROUPS = 32
_SIZE = 8
_ROUNDS = 5


def timed(find: Callable[[], Sized]) -> str:
    """Milliseconds of a page, the median and the longest of some rounds, and how many rows it
    had."""
    took = []
    found = 0
    for _ in range(_ROUNDS):
        began = time.perf_counter()
        rows = find()
        took.append(1000 * (time.perf_counter() - began))
        found = len(rows)
    return f"{statistics.median(took):7.1f} ms  {max(took):7.1f} ms  {found:3d} rows"


async def paints(runs: Runs) -> None:
    """Time until a browser shows the curves, and the samples."""
    runner = web.AppRunner(application(runs, None))
    await runner.setup()
    listener = bind("127.0.0.1", 0)
    try:
        await web.SockSite(runner, listener).start()
        place = f"http://127.0.0.1:{listener.getsockname()[1]}/"
        async with tab() as page:
            for name, shown in (
                ("overview", "figure"),
                ("samples", ".group"),
                ("samples&sort=spread", ".group"),
            ):
                await page.open("about:blank")
                await page.open(f"{place}#view={name}")
                await page.until(f"document.querySelector('{shown}')")
                script = (
                    "performance.getEntriesByType('paint').find((e) => e.name === "
                    "'first-contentful-paint')?.startTime"
                )
                took = await page.run("performance.now()")
                first = await page.run(script)
                print(f"  {name:24} {took:6.0f} ms; first paint {first:.0f} ms")
    finally:
        await runner.cleanup()


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--samples", type=int, default=100_000)
    parser.add_argument("--folder", type=Path, required=True)
    options = parser.parse_args()
    run = options.folder / "run"
    cache = options.folder / "cache"
    if not run.exists():
        make_run(
            run,
            rollouts=-(-options.samples // (_GROUPS * _SIZE)),
            groups=_GROUPS,
            size=_SIZE,
            tokens=False,
        )
    size = sum(path.stat().st_size for path in run.glob("samples/*"))
    began = time.perf_counter()
    runs = Runs([run], cache)
    opened = time.perf_counter()
    runs.look()
    ((watch, _),) = runs.all().values()
    index = watch.index
    print(
        f"{index.progress()['samples']:,} samples, {size / 1e6:.0f} MB; opened in "
        f"{opened - began:.2f} s"
    )
    made = time.perf_counter() - opened
    large = sum(path.stat().st_size for path in cache.iterdir())
    print(f"index brought up to date in {made:.1f} s, {large / 1e6:.0f} MB")
    began = time.perf_counter()
    runs.look()
    print(f"another look, nothing new: {time.perf_counter() - began:.2f} s")
    words = vocabulary()
    long = max(words, key=len)
    for name, query in {
        "newest first": Query(descending=True),
        "by reward": Query(sort="reward", descending=True),
        "by length": Query(sort="length"),
        f"search {long!r}": Query(words=(long,)),
        f"search {words[3]!r} {words[9]!r}, by reward": Query(
            words=(words[3], words[9]), sort="reward"
        ),
        "search a part of a word": Query(words=(long[1:-1],)),
        "search two characters": Query(words=("zu",)),
        "search two characters that none has": Query(words=("qx",)),
        "search one character (1 in 8)": Query(words=("9",), sort="reward"),
        "search what is nowhere": Query(words=("nowhere at all",)),
        "search a sentence (1 in 8)": Query(words=("the", "tower", "was", "finished")),
        "the same, where the shortest have it last": Query(
            words=("the", "tower", "was", "finished"), sort="length"
        ),
    }.items():
        print(f"  {name:46} {timed(lambda query=query: index.find(query)[0])}")  # type: ignore[misc]
    print(
        f"  {'page 1,000, newest first':46} "
        f"{timed(lambda: index.find(Query(descending=True), 50_000)[0])}"
    )
    print(f"  {'groups':46} {timed(lambda: index.groups(Query(descending=True))[0])}")
    print(
        f"  {'groups of what was truncated':46} "
        f"{timed(lambda: index.groups(Query(status='truncated'))[0])}"
    )
    for name in ("first", "again"):
        began = time.perf_counter()
        size = write_report(run, options.folder / "report.html").stat().st_size
        print(f"report.html, {name}: {time.perf_counter() - began:.2f} s, {size / 1e6:.1f} MB")
    if chromium():
        asyncio.run(paints(runs))


if __name__ == "__main__":
    main()
