"""`make demo`, or `python -m recipes.demo`: from random weights to a model that adds, in a few
minutes on a laptop CPU.

    build a tiny Qwen3 and its data ─► SFT on sloppy demonstrations ─► GRPO with a reward
                                                                       ─► model/, report.html

Everything a cluster run has is here: Megatron-core trains, an engine generates behind the router,
Ray places.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from pathlib import Path

from recipes import arithmetic
from slime.__main__ import guarded
from slime.processes.host import slime_command

SFT_ROLLOUTS = 15
SFT_STEPS = 20
SFT_BATCH = 256
GRPO_ROLLOUTS = 40


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="python -m recipes.demo", description=__doc__, allow_abbrev=False
    )
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--output-dir", default="outputs")
    parser.add_argument("--run-name", default=time.strftime("demo-%Y%m%d-%H%M%S"))
    options = parser.parse_args()

    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    inputs = Path(options.output_dir) / "demo-inputs" / f"seed-{options.seed}"
    inputs.mkdir(parents=True, exist_ok=True)
    arithmetic.write_data(inputs, options.seed, num_demonstrations=SFT_STEPS * SFT_BATCH)
    arithmetic.write_model(inputs / "model", options.seed)
    run = Path(options.output_dir) / options.run_name

    common = [
        "--output-dir",
        options.output_dir,
        "--run-name",
        options.run_name,
        "--seed",
        str(options.seed),
    ]
    common += ["--rollout-seed", str(options.seed), "--fp32", "--clip-grad", "1.0"]
    common += ["--input-key", "prompt", "--label-key", "label", "--rollout-max-context-len", "64"]
    common += ["--adam-beta2", "0.95", "--weight-decay", "0"]

    from slime.cli import train

    train.main(
        [*common, "--stage", "sft", "--loss-type", "sft_loss"]
        + [
            "--hf-checkpoint",
            str(inputs / "model"),
            "--prompt-data",
            str(inputs / "sft.jsonl"),
            "--rollout-shuffle",
        ]
        + ["--num-rollout", str(SFT_ROLLOUTS), "--rollout-batch-size", str(SFT_STEPS * SFT_BATCH)]
        + ["--num-steps-per-rollout", str(SFT_STEPS), "--lr", "3e-3", "--lr-warmup-iters", "20"]
        + ["--lr-decay-style", "constant", "--save-hf", str(run / "sft-model")]
    )
    train.main(
        [
            *common,
            "--stage",
            "grpo",
            "--colocate",
            "--advantage-estimator",
            "grpo",
            "--n-samples-per-prompt",
            "8",
        ]
        + [
            "--hf-checkpoint",
            str(run / "sft-model"),
            "--prompt-data",
            str(inputs / "train.jsonl"),
            "--rollout-shuffle",
        ]
        + ["--custom-rm-path", "recipes.arithmetic.reward", "--rollout-max-response-len", "4"]
        + [
            "--num-rollout",
            str(GRPO_ROLLOUTS),
            "--rollout-batch-size",
            "32",
            "--num-steps-per-rollout",
            "1",
        ]
        + ["--lr", "1e-3", "--lr-decay-style", "cosine", "--min-lr", "1e-4", "--entropy-coef", "0"]
        + [
            "--eval-prompt-data",
            "arithmetic",
            str(inputs / "test.jsonl"),
            "--eval-interval",
            str(GRPO_ROLLOUTS),
        ]
        + ["--n-samples-per-eval-prompt", "4", "--save", str(run / "checkpoints")]
    )
    _say_what_happened(run)
    return 0


def _say_what_happened(run: Path) -> None:
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    scores = [row["eval/arithmetic"] for row in rows if "eval/arithmetic" in row]
    print(f"held-out accuracy: {scores[0]:.3f} after SFT → {scores[-1]:.3f} after GRPO")
    print(f"what happened, step by step: {run / 'report.html'}")
    print(
        f"the model that it made: {run / 'model' / 'grpo'}; ask it something: {slime_command()} "
        f"chat {run}"
    )
    print(f"next: a real model, {Path(__file__).parent / 'smollm2-arithmetic' / 'README.md'}")


if __name__ == "__main__":
    sys.exit(guarded(main))
