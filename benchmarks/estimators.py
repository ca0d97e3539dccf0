"""Learning curves of every algorithm on the sums of `make demo`, from one model.

    python -m benchmarks.estimators --output-dir outputs/estimators     # about fifteen minutes
    python -m benchmarks.estimators --only rloo ppo dpo --seed 1

SFT makes the model that all begin with. Each ``--advantage-estimator`` trains it on rewards; each
``--opd-loss`` on the GRPO run's model as its only teacher; each ``--preference-loss`` on pairs of a
right and a wrong sum. ``curves.svg`` has a panel for each of the three. ``results.jsonl`` has a
score before and after: held-out accuracy, divergence from the teacher, accuracy on held-out pairs.
A folder that is there already keeps its model and its finished runs.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import subprocess
import sys
from pathlib import Path
from typing import Any

from recipes import arithmetic
from slime.algorithms.estimators import ESTIMATORS
from slime.config.engine_flags import to_argv
from slime.config.preferences import PREFERENCE_FACTS
from tools.plot_runs import HEIGHT, WIDTH, picture, read_points

ROOT = Path(__file__).parents[1]
SFT_STEPS = 300
SFT_BATCH = 256
#: ``--opd-loss`` of each run of distillation.
TEACHINGS = {f"opd_{loss}": loss for loss in ("sampled", "reverse_kl", "forward_kl", "jsd")}
#: Beside what all of a kind have: learning rates of heads that begin with zeros.
SETTINGS: dict[str, dict[str, Any]] = {
    "ppo": {"critic_lr": 3e-3, "num_critic_only_steps": 2},
    "reward_model": {"lr": 3e-3},
}
#: Title of a panel, its metric, and the runs that it shows.
PANELS = (
    ("Mean reward of a rollout", "rollout/raw_reward", list(ESTIMATORS)),
    ("Reverse KL to the teacher", "rollout/opd_reverse_kl", list(TEACHINGS)),
    ("Share of a batch whose reward is on the right side", "train/reward_accuracy",
     list(PREFERENCE_FACTS)),
)  # fmt: skip
#: What tells a run's success, before its first step and after its last one.
SCORES = {
    **dict.fromkeys(ESTIMATORS, "eval/sums"),
    **dict.fromkeys(TEACHINGS, "rollout/opd_reverse_kl"),
    **dict.fromkeys(PREFERENCE_FACTS, "eval/preferences/reward_accuracy"),
}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, allow_abbrev=False)
    parser.add_argument("--output-dir", type=Path, default=Path("outputs/estimators"))
    parser.add_argument("--only", nargs="+", default=list(SCORES), choices=list(SCORES))
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
    preferences = inputs / "pairs.jsonl"
    if not preferences.exists():
        write_preferences(inputs, options.seed)
    rollouts = {
        "colocate": True,
        "n_samples_per_prompt": 8,
        "hf_checkpoint": start,
        "prompt_data": inputs / "train.jsonl",
        "rollout_max_response_len": 4,
        "num_rollout": options.steps,
        "rollout_batch_size": 32,
        "num_steps_per_rollout": 2,
        "lr": 1e-3,
        "lr_decay_style": "cosine",
        "min_lr": 1e-4,
    }
    teacher = folder / f"grpo-{options.seed}" / "model"
    for name in options.only:
        run = f"{name}-{options.seed}"
        metrics = folder / run / "metrics.jsonl"
        if name in ESTIMATORS:
            flags = rollouts | {
                "advantage_estimator": name,
                "normalize_advantages": ESTIMATORS[name].facts.needs_whitening,
                "custom_rm_path": "recipes.arithmetic.reward",
                "save_hf": folder / run / "model",
                "eval_prompt_data": ("sums", inputs / "test.jsonl"),
                "eval_interval": options.steps,
                "n_samples_per_eval_prompt": 4,
            }
        elif name in TEACHINGS:
            flags = rollouts | {
                "use_opd": True,
                "opd_loss": TEACHINGS[name],
                "opd_teacher_load": (teacher,),
            }
        else:
            kind = "pairs" if PREFERENCE_FACTS[name].takes_pairs else "labels"
            flags = {
                "loss_type": "preference_loss",
                "preference_loss": name,
                "hf_checkpoint": start,
                "prompt_data": inputs / f"{kind}.jsonl",
                "num_rollout": options.steps,
                "rollout_batch_size": 64,
                "lr": 3e-4,
                "eval_preference_data": inputs / f"held-out-{kind}.jsonl",
                "eval_interval": options.steps,
            }
        if not _is_finished(metrics, options.steps):
            _train(common | {"run_name": run} | flags | SETTINGS.get(name, {}))
        scores = _series(metrics, SCORES[name])
        row = {"run": name, "seed": options.seed, "before": scores[0], "after": scores[-1]}
        if explained := _series(metrics, "train/critic-explained_variance"):
            row["explained_variance"] = explained[-1]
        print(json.dumps(row), flush=True)
        with (folder / "results.jsonl").open("a") as out:
            out.write(json.dumps(row) + "\n")
    (folder / "curves.svg").write_text(_figure(folder, options.seed, options.only))
    return 0


def write_preferences(folder: Path, seed: int) -> None:
    """Write right and wrong sums: pairs of two, and labelled ones; both also of held-out sums."""
    rng = random.Random(seed + 2)
    for part, problems in zip(("", "held-out-"), arithmetic.problems(seed)):
        rows = [(f"{a:02d}+{b}=", f"{a + b:02d}", _wrong(a + b, rng)) for a, b in problems]
        with (folder / f"{part}pairs.jsonl").open("w") as out:
            for prompt, right, wrong in rows:
                pair = {"prompt": prompt, "chosen": right, "rejected": wrong}
                out.write(json.dumps(pair) + "\n")
        with (folder / f"{part}labels.jsonl").open("w") as out:
            for number, (prompt, *answers) in enumerate(rows):
                row = {"prompt": prompt, "completion": answers[number % 2]}
                out.write(json.dumps(row | {"label": number % 2 == 0}) + "\n")


def _wrong(total: int, rng: random.Random) -> str:
    """One digit of the sum replaced by another one."""
    digits = list(f"{total:02d}")
    place = rng.randrange(2)
    digits[place] = rng.choice([d for d in arithmetic.CHARACTERS[:10] if d != digits[place]])
    return "".join(digits)


def _figure(folder: Path, seed: int, names: list[str]) -> str:
    """Return one panel below the other, without those of no run."""
    panels: list[str] = []
    for title, metric, members in PANELS:
        runs = [
            (name, read_points(folder / f"{name}-{seed}" / "metrics.jsonl", metric))
            for name in members
            if name in names
        ]
        if runs:
            panel = picture(runs, metric, title)
            panels.append(panel.replace("<svg ", f'<svg y="{len(panels) * HEIGHT}" ', 1))
    height = len(panels) * HEIGHT
    size = f'viewBox="0 0 {WIDTH} {height}" width="{WIDTH}" height="{height}"'
    return f'<svg xmlns="http://www.w3.org/2000/svg" {size}>\n{"".join(panels)}</svg>\n'


def _train(flags: dict[str, Any]) -> None:
    subprocess.run(
        [sys.executable, "-m", "slime", "train", *to_argv(flags)],
        check=True,
        cwd=ROOT,
        env={**os.environ, "TOKENIZERS_PARALLELISM": "false"},
        stdout=subprocess.DEVNULL,
    )


def _is_finished(metrics: Path, steps: int) -> bool:
    return metrics.exists() and max(_series(metrics, "step"), default=0) >= steps - 1


def _series(metrics: Path, name: str) -> list[float]:
    rows = [json.loads(line) for line in metrics.read_text().splitlines()]
    return [row[name] for row in rows if name in row]


if __name__ == "__main__":
    sys.exit(main())
