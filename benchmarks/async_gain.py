"""What asynchronous training brings where answers have a long tail: steps per hour, age of samples,
time to a reward.

    python -m benchmarks.async_gain                      # CPU, five minutes
    python -m benchmarks.async_gain --lengths docs/measurements/lengths-gsm8k-h200.json \\
        --tokens-per-second 500

The loop, engine, trainer and pushes are real, with a tiny model from random weights and the share
of one digit as its reward. What a large model would take is slept: an answer decodes for so long as
its drawn length says, a training step for --train-seconds. Lengths are log-normal (median 1,000
tokens, so that the longest of 64 is about eight times that) and grow by a half during the run, or
those of a run that was recorded, step by step (--lengths: a JSON list of lists, from whose
beginning it goes on at its end), at --tokens-per-second for each of 64 slots. All runs are of one
process, one after the other, with the same seed; every second ratio is against lock step. The pace
is that while as many rollouts are under way as may be (`benchmarks.pace`).
"""

from __future__ import annotations

import argparse
import asyncio
import json
import math
import os
import random
import statistics
import tempfile
import time
from functools import cache
from pathlib import Path
from typing import Any

from benchmarks.pace import between, num_rollouts
from recipes import arithmetic
from slime.samples.types import Sample

PROMPTS = 16
SAMPLES = 4
_MEDIAN = 1000.0
_SIGMA = 0.9
_LONGEST = 8192
_GROWTH = 0.5
_DIGIT = "7"
#: How they are called → rollouts ahead, whether pushes are in flight.
MODES: dict[str, tuple[int, bool]] = {
    "lock step": (0, False),
    "1 ahead": (1, False),
    "1 ahead, in flight": (1, True),
    "2 ahead, in flight": (2, True),
    "4 ahead, in flight": (4, True),
}


@cache
def recorded() -> list[int]:
    """Of all samples of the recorded run, in order; [] without one."""
    path = os.environ.get("SLIME_BENCH_LENGTHS")
    return (
        [length for step in json.loads(Path(path).read_text()) for length in step] if path else []
    )


def length_of(index: int) -> int:
    """Tokens that the answer of sample ``index`` would have; the same in every run."""
    if known := recorded():
        return known[index % len(known)]
    grown = 1 + _GROWTH * min(1.0, index / (PROMPTS * SAMPLES * 40))
    drawn = random.Random(index).lognormvariate(math.log(_MEDIAN), _SIGMA)
    return int(min(_LONGEST, max(16.0, drawn * grown)))


async def generate_slowly(args: Any, sample: Sample, sampling_params: dict[str, Any]) -> Sample:
    """--custom-generate-function-path: a few real tokens, and the time that many would have
    taken."""
    from slime.rollout.generate import generate

    assert sample.index is not None
    length = length_of(sample.index)
    sample = await generate(args, sample, sampling_params)
    sample.metadata["simulated_length"] = length
    await asyncio.sleep(length / float(os.environ["SLIME_BENCH_RATE"]))
    return sample


def train_slowly(
    args: Any, rollout_id: int, step_id: int, model: Any, optimizer: Any, scheduler: Any
) -> None:
    """--custom-megatron-before-train-step-hook-path."""
    time.sleep(float(os.environ["SLIME_BENCH_TRAIN"]))


def digit_share(args: Any, sample: Sample, **_: Any) -> float:
    """--custom-rm-path."""
    return sample.response.count(_DIGIT) / max(1, len(sample.response))


def run(name: str, folder: Path, steps: int, seed: int) -> list[dict[str, Any]]:
    """Train in one mode; the rows of its metrics, those of rollouts behind ``steps`` included."""
    from slime.cli import train

    ahead, in_flight = MODES[name]
    own = ["--async-buffer-size", str(ahead)] if ahead else []
    own += ["--update-weights-in-flight"] if in_flight else []
    words = ["--hf-checkpoint", str(folder / "model"), "--prompt-data", str(folder / "train.jsonl")]
    words += [
        "--input-key", "prompt", "--label-key", "label", "--rollout-shuffle",
        "--rollout-max-response-len", "6"
    ]  # fmt: skip
    words += [
        "--rollout-batch-size",
        str(PROMPTS),
        "--n-samples-per-prompt",
        str(SAMPLES),
        "--seed",
        str(seed),
    ]
    words += ["--num-steps-per-rollout", "1", "--num-rollout", str(num_rollouts(steps, ahead))]
    words += ["--lr", "3e-3", "--fp32", "--use-tis"]
    words += [
        "--lr-decay-style", "constant", "--no-journal", "--rollout-num-gpus", "1", "--no-colocate"
    ]  # fmt: skip
    words += ["--custom-generate-function-path", "benchmarks.async_gain.generate_slowly"]
    words += ["--custom-megatron-before-train-step-hook-path", "benchmarks.async_gain.train_slowly"]
    words += ["--custom-rm-path", "benchmarks.async_gain.digit_share", "--rollout-seed", str(seed)]
    words += ["--sglang-server-concurrency", str(PROMPTS * SAMPLES)]
    path = folder / name.replace(" ", "-").replace(",", "")
    words += ["--output-dir", str(folder), "--run-name", path.name, *own]
    (train.main_async if ahead else train.main)(words)
    return [json.loads(line) for line in (path / "metrics.jsonl").read_text().splitlines()]


def row_of(
    rows: list[dict[str, Any]],
    num_steps: int,
    ahead: int,
    rate: float,
    train_seconds: float,
    target: float,
) -> dict[str, float]:
    """What came of a mode."""
    steps = [row for row in rows if "rollout/raw_reward" in row]
    measured, seconds = between(steps, num_steps, ahead)
    steps = steps[:num_steps]
    per_step = seconds / len(measured)
    begin = steps[0]["time"] - steps[0]["perf/step_time"]
    rewards = [row["rollout/raw_reward"] for row in steps]
    smooth = [statistics.mean(rewards[max(0, i - 4) : i + 1]) for i in range(len(rewards))]
    reached = next(
        (row["time"] - begin for row, mean in zip(steps, smooth) if mean >= target), math.nan
    )
    answers = PROMPTS * SAMPLES
    drawn = range((measured[0]["step"] - 1) * answers, measured[-1]["step"] * answers)
    decoded = sum(length_of(i) for i in drawn) / rate
    return {
        "steps per hour": 3600 / per_step,
        "seconds to the reward": reached,
        "last reward": smooth[-1],
        "staleness": statistics.mean(row.get("rollout/staleness/mean", 0.0) for row in measured),
        "slots idle": 1 - decoded / (answers * seconds),
        "trainer idle": 1 - train_seconds / per_step,
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--tokens-per-second", type=float, default=2000.0)
    parser.add_argument("--lengths", type=Path, help="of a recorded run")
    parser.add_argument("--train-seconds", type=float, default=0.8)
    parser.add_argument("--reward", type=float, default=0.5)
    parser.add_argument("--modes", nargs="*", default=list(MODES))
    options = parser.parse_args()
    os.environ["SLIME_BENCH_RATE"] = str(options.tokens_per_second)
    os.environ["SLIME_BENCH_TRAIN"] = str(options.train_seconds)
    if options.lengths is not None:
        os.environ["SLIME_BENCH_LENGTHS"] = str(options.lengths.resolve())
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        arithmetic.write_data(folder, options.seed, num_demonstrations=1)
        arithmetic.write_model(folder / "model", options.seed)
        found = {
            mode: row_of(
                run(mode, folder, options.steps, options.seed),
                options.steps,
                MODES[mode][0],
                options.tokens_per_second,
                options.train_seconds,
                options.reward,
            )
            for mode in options.modes
        }
    base = found.get("lock step")
    print(json.dumps(found, indent=1))
    names = list(next(iter(found.values())))
    print("| mode | " + " | ".join(names) + " | pace | to the reward |")
    print("|---|" + "--:|" * (len(names) + 2))
    for mode, row in found.items():
        pace = row["steps per hour"] / base["steps per hour"] if base else math.nan
        faster = base["seconds to the reward"] / row["seconds to the reward"] if base else math.nan
        print(
            f"| {mode} | "
            + " | ".join(f"{row[n]:.3g}" for n in names)
            + f" | {pace:.2f} × | {faster:.2f} × |"
        )


if __name__ == "__main__":
    main()
