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
from typing import Any

from recipes import arithmetic
from slime.__main__ import guarded
from slime.config.engine_flags import to_argv
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
    parser.add_argument(
        "--lora-rank", type=int, default=0, help="GRPO trains adapters of this rank"
    )
    options = parser.parse_args()

    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    inputs = Path(options.output_dir) / "demo-inputs" / f"seed-{options.seed}"
    inputs.mkdir(parents=True, exist_ok=True)
    arithmetic.write_data(inputs, options.seed, num_demonstrations=SFT_STEPS * SFT_BATCH)
    arithmetic.write_model(inputs / "model", options.seed)
    run = Path(options.output_dir) / options.run_name

    common: dict[str, Any] = {
        "output_dir": options.output_dir,
        "run_name": options.run_name,
        "seed": options.seed,
        "rollout_seed": options.seed,
        "fp32": True,
        "clip_grad": 1.0,
        "adam_beta2": 0.95,
        "weight_decay": 0,
        "input_key": "prompt",
        "label_key": "label",
        "rollout_shuffle": True,
        "rollout_max_context_len": 64,
    }
    sft = common | {
        "stage": "sft",
        "loss_type": "sft_loss",
        "hf_checkpoint": inputs / "model",
        "prompt_data": inputs / "sft.jsonl",
        "num_rollout": SFT_ROLLOUTS,
        "rollout_batch_size": SFT_STEPS * SFT_BATCH,
        "num_steps_per_rollout": SFT_STEPS,
        "lr": 3e-3,
        "lr_warmup_iters": 20,
        "lr_decay_style": "constant",
        "save_hf": run / "sft-model",
    }
    grpo = common | {
        "stage": "grpo",
        "colocate": True,
        "advantage_estimator": "grpo",
        "n_samples_per_prompt": 8,
        "hf_checkpoint": run / "sft-model",
        "prompt_data": inputs / "train.jsonl",
        "custom_rm_path": "recipes.arithmetic.reward",
        "rollout_max_response_len": 4,
        "num_rollout": GRPO_ROLLOUTS,
        "rollout_batch_size": 32,
        "num_steps_per_rollout": 1,
        "lr": 1e-3,
        "lr_decay_style": "cosine",
        "min_lr": 1e-4,
        "entropy_coef": 0,
        "eval_prompt_data": ("arithmetic", inputs / "test.jsonl"),
        "eval_interval": GRPO_ROLLOUTS,
        "n_samples_per_eval_prompt": 4,
        "save": run / "checkpoints",
    }
    if options.lora_rank:
        grpo |= {"lora_rank": options.lora_rank, "lr": 3e-3, "min_lr": 3e-4}

    from slime.cli import train

    train.main(to_argv(sft))
    train.main(to_argv(grpo))
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
