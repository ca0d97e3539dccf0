"""Where a colocated step's time goes: ``train.py`` as users run it, and the shares of its phases.

    python -m benchmarks.gpu.colocated_step --shape qwen3-4b --prompts 64 --samples 8 --new-tokens 1024 --steps 5
    python -m benchmarks.gpu.colocated_step --engine embedded --shape tiny --prompts 2 --samples 2 --new-tokens 8

Random weights answer with noise until the limit, so that every sample has the full length; the reward is drawn by
lot. The goal is generation, log-probs and training at 90 % of the step or more; the rest is printed by name.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

from benchmarks.gpu.setting import add_arguments, make_model, median, publish, workspace
from slime.samples.types import Sample

ROOT = Path(__file__).parents[2]
USEFUL = ("perf/rollout_time", "perf/train_time")


def parse_args(argv: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_arguments(parser)
    parser.add_argument("--gpus", type=int, default=1)
    parser.add_argument("--prompts", type=int, default=64)
    parser.add_argument("--samples", type=int, default=8)
    parser.add_argument("--new-tokens", type=int, default=1024)
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--more", default="", help="more flags for train.py, in one word")
    return parser.parse_args(argv)


def reward(args: Any, sample: Sample) -> float:
    """A coin, the same for the same response."""
    return float(sum(sample.tokens) % 2)


def main(argv: list[str] | None = None) -> None:
    args = parse_args(argv)
    with workspace() as folder:
        model = make_model(args, folder)
        data = folder / "prompts.jsonl"
        rows = ({"prompt": f"Tell me about the number {i:06d}. " * 4, "label": ""} for i in range(4 * args.prompts))
        data.write_text("".join(json.dumps(row) + "\n" for row in rows))
        command = [sys.executable, str(ROOT / "train.py"), *flags(args, model, data, folder), *args.more.split()]
        subprocess.run(command, check=True, cwd=ROOT)
        metrics = [json.loads(line) for line in (folder / "run" / "metrics.jsonl").read_text().splitlines()]
    steps = [row for row in metrics if "perf/step_time" in row and "perf/rollout_time" in row]
    publish(args, {"what": "colocated step", **breakdown(steps[1:] or steps), "raw": steps})


def flags(args: argparse.Namespace, model: Path, data: Path, folder: Path) -> list[str]:
    given = {
        "--hf-checkpoint": model, "--prompt-data": data, "--input-key": "prompt", "--label-key": "label",
        "--rollout-engine": args.engine, "--actor-num-gpus-per-node": args.gpus,
        "--rollout-batch-size": args.prompts, "--n-samples-per-prompt": args.samples, "--num-rollout": args.steps,
        "--rollout-max-response-len": args.new_tokens, "--max-tokens-per-gpu": 8 * (args.new_tokens + 256),
        "--custom-rm-path": "benchmarks.gpu.colocated_step.reward", "--lr": "1e-6",
        "--output-dir": folder, "--run-name": "run",
    }  # fmt: skip
    words = ["--colocate", "--use-dynamic-batch-size"]
    for flag, value in given.items():
        words += [flag, str(value)]
    return words


def breakdown(steps: list[dict[str, float]]) -> dict[str, Any]:
    """Median seconds by phase, and the share of the useful ones."""
    names = sorted({name for row in steps for name in row if name.startswith("perf/") and name.endswith("_time")})
    seconds = {name.removeprefix("perf/"): median([row.get(name, 0.0) for row in steps]) for name in names}
    total = seconds["step_time"]
    useful = sum(seconds.get(name.removeprefix("perf/"), 0.0) for name in USEFUL)
    return {"useful_share": useful / total if total else 0.0, "seconds": seconds}


if __name__ == "__main__":
    main()
