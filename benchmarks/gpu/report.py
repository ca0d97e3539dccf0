"""What the measurements on GPUs report: one JSON line per case as soon as it is known, at the end a
table with goals.

    report = Report("weight sync", args)                    # args of a parser with `add_arguments`
    goal = at_most("seconds", 0.15, 0.2, "s")
    report.case("colocated", lambda: {"seconds": 0.15, "goals": [goal]})
    sys.exit(report.finish())

A case that fails becomes a line with its error, and the next one is tried; one that would pass
--budget is ended.
"""

from __future__ import annotations

import argparse
import functools
import json
import signal
import subprocess
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from slime.files import json_safe
from slime.processes.host import num_gpus

Row = dict[str, Any]


class BudgetSpent(Exception):
    """The time of --budget is over."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--out", type=Path, help="append results to this file, one JSON object per line"
    )
    parser.add_argument(
        "--budget", type=float, default=3600.0, help="seconds for everything (default: 3600)"
    )


def at_least(what: str, measured: float, goal: float, unit: str = "") -> Row:
    return {
        "what": what,
        "measured": measured,
        "goal": goal,
        "unit": unit,
        "met": measured >= goal,
        "sign": "≥",
    }


def at_most(what: str, measured: float, goal: float, unit: str = "") -> Row:
    return {
        "what": what,
        "measured": measured,
        "goal": goal,
        "unit": unit,
        "met": measured <= goal,
        "sign": "≤",
    }


class Report:
    """Results of one script.

    Attributes:
        rows: those so far; each has "benchmark" and "case", and either what was measured or "error"
            or "skipped".
    """

    def __init__(self, benchmark: str, args: argparse.Namespace) -> None:
        self.benchmark = benchmark
        self.out = args.out
        self.end = time.monotonic() + args.budget
        self.rows: list[Row] = []

    @property
    def seconds_left(self) -> float:
        return self.end - time.monotonic()

    def case(self, name: str, measure: Callable[[], Row | None]) -> None:
        """Add the row that ``measure`` returns (None: it called `add` itself), or say why there is
        none."""
        if self.seconds_left <= 1:
            self.add(name, {"skipped": "the time of --budget is over"})
            return
        try:
            with _alarm(self.seconds_left):
                row = measure()
        except Exception as error:  # the next case may work
            traceback.print_exc()
            row = {"error": f"{type(error).__name__}: {error}".strip()}
        if row is not None and "error" not in row and self.seconds_left <= 0:
            row["cut"] = "the time of --budget was over before its end"
        if row is not None:
            self.add(name, row)

    def add(self, name: str, row: Row) -> None:
        """Print a result and keep it."""
        self.rows.append(
            {"benchmark": self.benchmark, "case": name, "device": device_name(), **row}
        )
        line = json.dumps(json_safe(self.rows[-1]))
        print(line, flush=True)
        if self.out is not None:
            self.out.parent.mkdir(parents=True, exist_ok=True)
            with open(self.out, "a", encoding="utf-8") as file:
                file.write(line + "\n")

    def finish(self) -> int:
        """Print the table; the exit status: 1 when a case failed."""
        print("\n" + table(self.rows), flush=True)
        return int(any("error" in row for row in self.rows))


def table(rows: list[Row]) -> str:
    """Markdown: a line for each goal, and for each case without a number."""
    lines = [
        "| benchmark | case | what | measured | goal | measured ÷ goal |",
        "|---|---|---|--:|--:|--:|",
    ]
    for row in rows:
        head = f"| {row['benchmark']} | {row['case']} |"
        why = "error" if "error" in row else "skipped" if "skipped" in row else None
        if why is not None:
            # of a traceback, what it is about
            said = str(row[why]).splitlines()[-1].replace("|", "/")
            lines.append(f"{head} {why}: {said[:200]} | | | |")
            continue
        for goal in row.get("goals", []) or [{"what": "no goal; see the JSON"}]:
            lines.append(f"{head} {goal['what']} | {_numbers(goal)}")
    return "\n".join(lines)


def _numbers(goal: Row) -> str:
    if "goal" not in goal:
        return "| | |"
    unit = f" {goal['unit']}" if goal["unit"] else ""
    ratio = f"{goal['measured'] / goal['goal']:.2f}" if goal["goal"] else "–"
    verdict = "" if goal["met"] else " (missed)"
    return (
        f"{goal['measured']:.4g}{unit} | {goal['sign']} {goal['goal']:g}{unit} | {ratio}{verdict} |"
    )


@functools.cache
def device_name() -> str:
    """Of the first GPU, asked of its driver: torch would take some of its memory."""
    if not num_gpus():
        return "CPU"
    query = ["nvidia-smi", "--query-gpu=name", "--format=csv,noheader"]
    try:
        return subprocess.run(
            query, capture_output=True, text=True, timeout=20, check=True
        ).stdout.splitlines()[0]
    except (OSError, subprocess.SubprocessError, IndexError):
        return "GPU"


@contextmanager
def _alarm(seconds: float) -> Iterator[None]:
    """`BudgetSpent` is raised in the block (and in what it waits for) after ``seconds``."""

    def ring(*_: object) -> None:
        raise BudgetSpent(f"ended after {seconds:.0f} s, when the time of --budget was over")

    before = signal.signal(signal.SIGALRM, ring)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
