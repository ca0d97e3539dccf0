"""Learning curves of every ``--advantage-estimator`` on the sums of `make demo`, from one model.

    python -m benchmarks.estimators --output-dir outputs/estimators     # about ten minutes
    python -m benchmarks.estimators --only rloo ppo --seed 1

SFT makes the model that all begin with; then each estimator trains it for as many steps on the same
prompts. ``curves.svg`` has the mean reward of each rollout, ``results.jsonl`` the held-out accuracy
before and after. A folder that is there already keeps its model and its finished runs.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

from recipes import arithmetic
from slime.algorithms.estimators import ESTIMATORS
from slime.config.engine_flags import to_argv

ROOT = Path(__file__).parents[1]
SFT_STEPS = 300
SFT_BATCH = 256
#: Beside what all have: whitening where an estimator wants it, a critic's own learning rate.
SETTINGS: dict[str, dict[str, Any]] = {
    "ppo": {"critic_lr": 3e-3, "num_critic_only_steps": 2},
}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, allow_abbrev=False)
    parser.add_argument("--output-dir", type=Path, default=Path("outputs/estimators"))
    parser.add_argument("--only", nargs="+", default=list(ESTIMATORS), choices=list(ESTIMATORS))
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    folder = options.output_dir.resolve()
    inputs = folder / f"inputs-{options.seed}"
    common: dict[str, Any] = {
        "output_dir": folder,
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
    start = folder / f"sft-{options.seed}" / "sft-model"
    if not start.exists():
        inputs.mkdir(parents=True, exist_ok=True)
        arithmetic.write_data(inputs, options.seed, num_demonstrations=20 * SFT_BATCH)
        arithmetic.write_model(inputs / "model", options.seed)
        _train(
            common
            | {
                "run_name": f"sft-{options.seed}",
                "loss_type": "sft_loss",
                "hf_checkpoint": inputs / "model",
                "prompt_data": inputs / "sft.jsonl",
                "num_rollout": SFT_STEPS // 20,
                "rollout_batch_size": 20 * SFT_BATCH,
                "num_steps_per_rollout": 20,
                "lr": 3e-3,
                "lr_warmup_iters": 20,
                "lr_decay_style": "constant",
                "save_hf": start,
            }
        )
    curves = []
    for name in options.only:
        run = f"{name}-{options.seed}"
        metrics = folder / run / "metrics.jsonl"
        if not _is_finished(metrics, options.steps):
            _train(
                common
                | {
                    "run_name": run,
                    "colocate": True,
                    "advantage_estimator": name,
                    "normalize_advantages": ESTIMATORS[name].facts.needs_whitening,
                    "n_samples_per_prompt": 8,
                    "hf_checkpoint": start,
                    "prompt_data": inputs / "train.jsonl",
                    "custom_rm_path": "recipes.arithmetic.reward",
                    "rollout_max_response_len": 4,
                    "num_rollout": options.steps,
                    "rollout_batch_size": 32,
                    "num_steps_per_rollout": 2,
                    "lr": 1e-3,
                    "lr_decay_style": "cosine",
                    "min_lr": 1e-4,
                    "eval_prompt_data": ("sums", inputs / "test.jsonl"),
                    "eval_interval": options.steps,
                    "n_samples_per_eval_prompt": 4,
                }
                | SETTINGS.get(name, {})
            )
        scores = _series(metrics, "eval/sums")
        row = {"estimator": name, "seed": options.seed, "before": scores[0], "after": scores[-1]}
        if explained := _series(metrics, "train/critic-explained_variance"):
            row["explained_variance"] = explained[-1]
        print(json.dumps(row), flush=True)
        with (folder / "results.jsonl").open("a") as out:
            out.write(json.dumps(row) + "\n")
        curves.append(f"{name}={metrics}")
    plot = [sys.executable, str(ROOT / "tools" / "plot_runs.py"), "rollout/raw_reward"]
    subprocess.run([*plot, str(folder / "curves.svg"), *curves, "--title", "Reward"], check=True)
    return 0


def _train(flags: dict[str, Any]) -> None:
    subprocess.run(
        [sys.executable, "-m", "slime", "train", *to_argv(flags)],
        check=True,
        cwd=ROOT,
        env={**os.environ, "TOKENIZERS_PARALLELISM": "false"},
        stdout=subprocess.DEVNULL,
    )


def _is_finished(metrics: Path, steps: int) -> bool:
    return metrics.exists() and len(_series(metrics, "rollout/raw_reward")) >= steps


def _series(metrics: Path, name: str) -> list[float]:
    rows = [json.loads(line) for line in metrics.read_text().splitlines()]
    return [row[name] for row in rows if name in row]


if __name__ == "__main__":
    sys.exit(main())
