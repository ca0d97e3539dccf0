"""`slime engines`: the engines of a running run, and letting one join or leave.

slime engines outputs/sums                            its engines, what they are at, their requests
slime engines add outputs/sums 10.0.0.7:30000         one that you have started joins: slime serve DIR, SGLang, …
slime engines remove outputs/sums 10.0.0.7:30000      it leaves; also engine-1, of the run's own, which is ended then

An engine that joins gets weights with the run's next push, and requests after it. Its weights are replaced with every
push for as long as it takes part.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from pathlib import Path

from slime.cli.arguments import Arguments
from slime.cluster.orders import give_order
from slime.engines.api import LOADS_PATH, EngineClient, EngineError
from slime.engines.client import num_requests

_LOAD_SECONDS = 5.0
_VERBS = ("add", "remove")


def main(argv: list[str]) -> None:
    """Print the engines of a run, or what became of an order.

    Raises:
        UserError: the run does not run, or refuses.
    """
    verb = argv[0] if argv[:1] and argv[0] in _VERBS else ""
    parser = Arguments(f"slime engines {verb}".rstrip(), __doc__)
    parser.add_argument("run_dir", help="the folder of a running run, outputs/<run>")
    if verb:
        parser.add_argument("engine", help="HOST:PORT of the engine" + (", or its name" if verb == "remove" else ""))
        asked = parser.parse_args(argv[1:])
        print(give_order(Path(asked.run_dir), verb, asked.engine)["said"])
        return
    asked = parser.parse_args(argv)
    rows = give_order(Path(asked.run_dir), "list")["engines"]
    print("\n".join(_table(rows, asyncio.run(_requests([row["url"] for row in rows])))))


async def _requests(urls: Sequence[str]) -> list[str]:
    """Of each engine: how many it has, as text; asked from here, so that the run is not held up."""

    async def of(url: str) -> str:
        if not url:
            return "-"
        async with EngineClient(url, timeout=_LOAD_SECONDS) as engine:
            try:
                return str(num_requests(await engine.get(LOADS_PATH)))
            except EngineError:
                return "no answer"

    return list(await asyncio.gather(*map(of, urls)))


def _table(rows: Sequence[Mapping[str, str]], requests: Sequence[str]) -> list[str]:
    lines = [("engine", "state", "requests", "url")]
    for row, count in zip(rows, requests, strict=True):
        lines.append((row["name"] or row["kind"], row["state"], count, row["url"]))
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    return ["  ".join(word.ljust(width) for word, width in zip(line, widths, strict=True)).rstrip() for line in lines]
