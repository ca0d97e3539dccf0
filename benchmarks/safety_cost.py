"""What fault tolerance and the journal cost a step: the same toy run without, with one, with both,
in turns.

    python -m benchmarks.safety_cost                     # two idle cores, four minutes

A step of this toy takes a few tenths of a second, of which milliseconds are a percent; so the
milliseconds are what to look at. Real steps take seconds to minutes. Medians over the steps behind
the first three of each run."""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
from pathlib import Path

from recipes import arithmetic

SIDES: dict[str, list[str]] = {
    "neither": ["--no-journal"],
    "journal": [],
    "journal and fault tolerance": [
        "--use-fault-tolerance",
        "--rollout-health-check-interval",
        "2",
    ],
}
_WARM_UP = 3


def step_seconds(folder: Path, name: str, flags: list[str], steps: int) -> list[float]:
    """Of each step behind the warm-up."""
    from slime.cli import train

    words = ["--hf-checkpoint", str(folder / "model"), "--prompt-data", str(folder / "train.jsonl")]
    words += [
        "--input-key", "prompt", "--label-key", "label",
        "--custom-rm-path", "recipes.arithmetic.reward"
    ]  # fmt: skip
    words += [
        "--rollout-batch-size", "16", "--n-samples-per-prompt", "8",
        "--rollout-max-response-len", "6"
    ]  # fmt: skip
    words += [
        "--num-rollout",
        str(steps),
        "--fp32",
        "--colocate",
        "--output-dir",
        str(folder),
        "--run-name",
        name,
    ]
    train.main([*words, *flags])
    rows = [json.loads(line) for line in (folder / name / "metrics.jsonl").read_text().splitlines()]
    return [row["perf/step_time"] for row in rows if "perf/step_time" in row][_WARM_UP:]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--rounds", type=int, default=2, help="each in one order and back")
    options = parser.parse_args()
    found: dict[str, list[list[float]]] = {side: [] for side in SIDES}
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        arithmetic.write_data(folder, seed=0, num_demonstrations=1)
        arithmetic.write_model(folder / "model", seed=0)
        for number in range(options.rounds):
            for side in list(SIDES) if number % 2 == 0 else reversed(SIDES):
                name = f"{side.replace(' ', '-')}-{number}"
                found[side].append(step_seconds(folder, name, SIDES[side], options.steps))
    base = statistics.median(value for run in found["neither"] for value in run)
    print("| side | median of a step | of each run | more than with neither |\n|---|--:|---|--:|")
    for side, runs in found.items():
        middle = statistics.median(value for run in runs for value in run)
        each = ", ".join(f"{1000 * statistics.median(run):.1f}" for run in runs)
        print(
            f"| {side} | {1000 * middle:.1f} ms | {each} | {1000 * (middle - base):+.1f} ms, "
            f"{middle / base - 1:+.1%} |"
        )


if __name__ == "__main__":
    main()
