"""Weights pushed in the midst of generation (--update-weights-in-flight) against pushes between two
rollouts.

    python -m benchmarks.gpu.in_flight --steps 8 --new-tokens 1024
    python -m benchmarks.gpu.in_flight --engine embedded --shape tiny --prompts 4 --samples 2 \\
        --new-tokens 16 --steps 4

One GPU for the trainer, one for the engine, two rollouts ahead. Lengths get their tail from stop
tokens: random weights draw each token about as often, so that a response ends at each token with
about the same chance.
"""

from __future__ import annotations

import argparse
import functools
import json
import random
import statistics
import sys
from pathlib import Path

from benchmarks.gpu.report import Report, Row
from benchmarks.gpu.setting import make_model, new_run_parser, run_training, workspace

MODES = {"between rollouts": [], "in flight": ["--update-weights-in-flight"]}
_MEANS = (
    *("perf/step_time", "perf/train_wait_time", "perf/generation_wait_time", "perf/train_time"),
    *("perf/update_weights_time", "rollout/continued_requests", "rollout/response_len/mean"),
    *("rollout/staleness/mean", "rollout/staleness/max", "train/train_rollout_logprob_abs_diff"),
)
_WARM_UP = 2


def parse_args(argv: list[str] | None = None) -> argparse.Namespace:
    parser = new_run_parser(__doc__, prompts=32, samples=8, new_tokens=1024, steps=8)
    parser.add_argument(
        "--tail", type=float, default=600, help="mean length without the limit, in tokens"
    )
    return parser.parse_args(argv)


def main(argv: list[str] | None = None) -> int:
    args = parse_args(argv)
    report = Report("in flight", args)
    with workspace() as folder:
        model = make_model(args, folder)
        size = json.loads((model / "config.json").read_text())["vocab_size"]
        stops = random.Random(0).sample(range(size), max(1, round(size / args.tail)))
        for mode, flags in MODES.items():
            more = [
                "--rollout-num-gpus",
                str(args.gpus),
                "--actor-num-gpus-per-node",
                str(args.gpus),
                *flags,
            ]
            more += [
                "--async-buffer-size",
                "2",
                "--rollout-stop-token-ids",
                *map(str, stops),
                *args.more.split(),
            ]
            report.case(mode, functools.partial(measure, args, folder / mode, model, more))
    return report.finish()


def measure(args: argparse.Namespace, folder: Path, model: Path, more: list[str]) -> Row:
    folder.mkdir()
    rows = [
        row
        for row in run_training("train_async.py", args, model, folder, more).rows
        if "perf/step_time" in row
    ]
    measured = rows[_WARM_UP:]
    seconds = rows[-1]["time"] - rows[_WARM_UP - 1]["time"]
    found: Row = {"steps": len(measured), "seconds per step": seconds / len(measured)}
    for name in _MEANS:
        found[name] = statistics.fmean(row.get(name, 0.0) for row in measured)
    return found


if __name__ == "__main__":
    sys.exit(main())
