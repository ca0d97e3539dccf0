"""Answers of recorded lengths on half of the GPUs, training on the others, against taking turns on
all of them.

    python -m benchmarks.gpu.long_tail --gpus 2 --shape qwen3-4b
    python -m benchmarks.gpu.long_tail --gpus 2 --engine embedded --shape tiny --prompts 2 \\
        --samples 2 --steps 4 --lock-steps 2 --least 4 --most 32 --scale 0.02

Weights are random, so that answers would not end: sample i is asked for as many tokens as the i-th
recorded answer had, times --scale, between --least and --most. Every way generates the same lengths
in the same order, and trains on groups in the order in which they end. The pace is that of the
steps behind those that an asynchronous run begins with, while as many rollouts are under way as may
be (`benchmarks.pace`): it generates --ahead rollouts more than it has --steps.
"""

from __future__ import annotations

import argparse
import functools
import json
import os
import statistics
import sys
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any

from benchmarks.gpu.report import Report, Row, at_least
from benchmarks.gpu.setting import (
    ROOT,
    make_model,
    named_share,
    new_run_parser,
    run_training,
    workspace,
)
from benchmarks.pace import between, num_rollouts
from slime.samples.types import Sample

WAYS = ("turns", "async")
RECORDED = ROOT / "docs" / "measurements" / "lengths-gsm8k-h200.json"
_TOLD = "SLIME_BENCH_LENGTHS"


def parse_args(argv: list[str] | None = None) -> argparse.Namespace:
    parser = new_run_parser(__doc__, prompts=16, samples=8, new_tokens=8192, steps=8)
    parser.add_argument("--ways", nargs="+", choices=WAYS, default=list(WAYS))
    parser.add_argument(
        "--lock-steps", type=int, default=3, help="steps where GPUs are taken in turns (default: 3)"
    )
    add_lengths(parser)
    parser.add_argument("--ahead", type=int, default=2, help="--async-buffer-size (default: 2)")
    args = parser.parse_args(argv)
    if args.ahead < 1 or args.steps < 2 * args.ahead or args.lock_steps < 2:
        parser.error(
            "nothing to measure: --ahead from 1 on, at least twice as many --steps, and 2 "
            "--lock-steps"
        )
    return args


@cache
def _lengths() -> tuple[int, ...]:
    return tuple(json.loads(os.environ[_TOLD]))


async def generate(args: Any, sample: Sample, sampling_params: dict[str, Any]) -> Sample:
    """--custom-generate-function-path: the recorded number of tokens, whatever they are."""
    from slime.rollout.generate import generate as built_in

    assert sample.index is not None
    known = _lengths()
    return await built_in(
        args,
        sample,
        {**sampling_params, "max_new_tokens": known[sample.index % len(known)], "ignore_eos": True},
    )


def add_lengths(parser: argparse.ArgumentParser) -> None:
    """What `lengths_of` asks for."""
    parser.add_argument(
        "--lengths", type=Path, default=RECORDED, help="a JSON list of lists of tokens per answer"
    )
    parser.add_argument("--scale", type=float, default=4.0, help="of recorded lengths (default: 4)")
    parser.add_argument("--least", type=int, default=256)
    parser.add_argument("--most", type=int, default=8192)


def lengths_of(args: argparse.Namespace) -> list[int]:
    """Tokens of each answer, in order."""
    steps = json.loads(args.lengths.read_text())
    return [
        int(min(args.most, max(args.least, length * args.scale)))
        for step in steps
        for length in step
    ]


def main(argv: list[str] | None = None) -> int:
    args = parse_args(argv)
    os.environ[_TOLD] = json.dumps(lengths_of(args))
    args.new_tokens = args.most
    report = Report("long tail", args)
    paces: dict[str, float] = {}
    with workspace() as folder:
        model = make_model(args, folder)
        for way in args.ways:
            report.case(
                f"{way}, {args.gpus} GPUs",
                functools.partial(measure, args, folder / way, model, way, paces),
            )
    return report.finish()


def measure(
    args: argparse.Namespace, folder: Path, model: Path, way: str, paces: dict[str, float]
) -> Row:
    folder.mkdir()
    half = str(args.gpus // 2)
    more = ["--custom-generate-function-path", "benchmarks.gpu.long_tail.generate", "--use-tis"]
    own = argparse.Namespace(**vars(args))
    ahead = 0 if way == "turns" else args.ahead
    steps = args.lock_steps if way == "turns" else args.steps
    own.steps = num_rollouts(steps, ahead)
    if way == "turns":
        more += ["--colocate", "--actor-num-gpus-per-node", str(args.gpus)]
    else:
        more += [
            "--rollout-num-gpus",
            half,
            "--actor-num-gpus-per-node",
            half,
            "--update-weights-in-flight",
        ]
        more += ["--async-buffer-size", str(args.ahead)]
    script = "train.py" if way == "turns" else "train_async.py"
    more += ["--max-tokens-per-gpu", str(args.most + 512), *args.more.split()]
    rows = [
        row
        for row in run_training(script, own, model, folder, more).rows
        if "perf/step_time" in row
    ]
    told = {"shape": str(args.model or args.shape), "ahead": ahead, "raw": rows}
    try:
        found = shares(*between(rows, steps, ahead), args.gpus)
    except (
        ValueError
    ) as error:  # the time of --budget ended it: its rows tell something all the same
        return {"error": str(error), **told}
    paces[way] = found["steps per hour"]
    if len(paces) == len(WAYS):
        found["goals"] = [
            at_least("steps per hour, asynchronous ÷ turns", paces["async"] / paces["turns"], 1.5)
        ]
    return {**found, **told}


def shares(steps: Sequence[dict[str, Any]], seconds: float, gpus: int) -> Row:
    """Pace, and how much of it each side was idle."""
    per_step = seconds / len(steps)
    at_work = sum(row["perf/train_time"] for row in steps)

    def mean(name: str) -> float:
        return statistics.fmean(row.get(name, 0.0) for row in steps)

    return {
        "gpus": gpus,
        "steps": len(steps),
        "seconds per step": per_step,
        "steps per hour": 3600 / per_step,
        "trainer idle": 1 - at_work / seconds,
        "engines idle": mean("perf/engines_idle_ratio"),
        "in phases with a name": named_share(steps),
        "response tokens": mean("rollout/response_len/mean"),
        "response tokens, longest": max(row.get("rollout/response_len/max", 0.0) for row in steps),
        "staleness": mean("rollout/staleness/mean"),
        "difference of log-probs": mean("train/train_rollout_logprob_abs_diff"),
    }


if __name__ == "__main__":
    sys.exit(main())
