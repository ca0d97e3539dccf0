"""What the journal and fault tolerance cost a step on GPUs: the same run without and with both,
forth and back.

    python -m benchmarks.gpu.safety_cost --shape qwen3-0.6b
    python -m benchmarks.gpu.safety_cost --engine embedded --shape tiny --prompts 2 --samples 2 \\
        --new-tokens 8 --steps 4

Random weights answer until the limit, so that every step has the same work. Runs go A B B A, for a
host that slows down or speeds up; the cost is the ratio of the medians over the steps behind the
first three of each run.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any

from benchmarks.gpu.report import Report, Row, at_least, at_most
from benchmarks.gpu.setting import (
    make_model,
    median,
    named_share,
    new_run_parser,
    run_training,
    workspace,
)
from benchmarks.safety_cost import SIDES

ORDER = ("neither", "journal and fault tolerance", "journal and fault tolerance", "neither")
_WARM_UP = 3


def main(argv: list[str] | None = None) -> int:
    args = new_run_parser(__doc__, prompts=32, samples=8, new_tokens=128, steps=16).parse_args(argv)
    report = Report("safety cost", args)
    steps: dict[str, list[Row]] = {side: [] for side in ORDER}
    with workspace() as folder:
        model = make_model(args, folder)
        for number, side in enumerate(ORDER):
            report.case(
                f"{side}, run {number + 1}",
                lambda side=side, number=number: measure(
                    args, folder / str(number), model, side, steps[side]
                ),  # type: ignore[misc]
            )
        report.case("cost", lambda: compared(steps))
    return report.finish()


def measure(
    args: argparse.Namespace, folder: Path, model: Path, side: str, steps: list[Row]
) -> Row:
    folder.mkdir()
    more = [
        "--colocate",
        "--actor-num-gpus-per-node",
        str(args.gpus),
        *SIDES[side],
        *args.more.split(),
    ]
    rows = [
        row
        for row in run_training("train.py", args, model, folder, more).rows
        if "perf/step_time" in row
    ]
    steps += rows[_WARM_UP:]
    return {
        "shape": str(args.model or args.shape),
        "seconds per step": seconds(rows[_WARM_UP:]),
        "raw": rows,
    }


def seconds(steps: list[dict[str, Any]]) -> float:
    return median([row["perf/step_time"] for row in steps])


def compared(steps: dict[str, list[Row]]) -> Row:
    """Medians of both sides, their ratio, and the share of the safer side's steps that is in phases
    with a name."""
    plain, safe = (steps[side] for side in ORDER[:2])
    return {
        "steps": {side: len(rows) for side, rows in steps.items()},
        "seconds per step": {side: seconds(rows) for side, rows in steps.items()},
        "goals": [
            at_most(
                "a step with journal and fault tolerance ÷ with neither",
                seconds(safe) / seconds(plain),
                1.02,
            ),
            at_least("of its step in phases with a name", named_share(safe), 0.97),
        ],
    }


if __name__ == "__main__":
    sys.exit(main())
