"""Where a colocated step's time goes: ``train.py`` as users run it, and the shares of its phases.

    python -m benchmarks.gpu.colocated_step --shape qwen3-4b --prompts 64 --samples 8 \\
        --new-tokens 1024 --steps 5
    python -m benchmarks.gpu.colocated_step --engine embedded --shape tiny --prompts 2 \\
        --samples 2 --new-tokens 8

Random weights answer with noise until the limit, so that every sample has the full length; the
reward is drawn by lot. The goal is generation, log-probs and training at 90 % of the step or more;
the rest is printed by name.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any

from benchmarks.gpu.report import Report, Row, at_least
from benchmarks.gpu.setting import (
    make_model,
    median,
    named_share,
    new_run_parser,
    run_training,
    workspace,
)

USEFUL = ("rollout_time", "log_probs_time", "ref_log_probs_time", "actor_train_time")


def main(argv: list[str] | None = None) -> int:
    args = new_run_parser(__doc__, prompts=64, samples=8, new_tokens=1024, steps=5).parse_args(argv)
    report = Report("colocated step", args)
    with workspace() as folder:
        report.case(
            f"{args.prompts} × {args.samples} × {args.new_tokens}", lambda: measure(args, folder)
        )
    return report.finish()


def measure(args: argparse.Namespace, folder: Path) -> Row:
    more = ["--colocate", "--actor-num-gpus-per-node", str(args.gpus), *args.more.split()]
    stage = run_training("train.py", args, make_model(args, folder), folder, more)
    steps = [row for row in stage.rows if "perf/step_time" in row and "perf/rollout_time" in row]
    found = breakdown(steps[1:] or steps)  # the first one warms up
    samples = args.prompts * args.samples / found["seconds"]["step_time"]
    return {
        "shape": str(args.model or args.shape),
        "gpus": args.gpus,
        **found,
        "samples_per_second": samples,
        "raw": steps,
        "goals": [
            at_least(
                "generation, log-probs and training, share of the step", found["useful_share"], 0.9
            )
        ],
    }


def breakdown(steps: list[dict[str, Any]]) -> Row:
    """Median seconds by phase, the median share of the useful ones, and the share of all that have
    a name."""
    names = sorted(
        {
            name
            for row in steps
            for name in row
            if name.startswith("perf/") and name.endswith("_time")
        }
    )
    seconds = {
        name.removeprefix("perf/"): median([row.get(name, 0.0) for row in steps]) for name in names
    }
    shares = [
        sum(row.get(f"perf/{name}", 0.0) for name in USEFUL) / row["perf/step_time"]
        for row in steps
    ]
    return {"useful_share": median(shares), "named_share": named_share(steps), "seconds": seconds}


if __name__ == "__main__":
    sys.exit(main())
