"""Compare how toy models of each token mixer learn: attention, latent attention, gated delta nets,
sinks with windows.

    python -m benchmarks.mixer_learning outputs/mixers          # 8 runs of 15 steps: minutes

The task and the way of training are those of `benchmarks.quantised_learning`, in bfloat16.
"""

from __future__ import annotations

import argparse
import json
import statistics
from pathlib import Path

from benchmarks.engine import server
from benchmarks.quantised_learning import learn
from benchmarks.toy_models import write_model

#: Token mixer → family of `benchmarks.toy_models`.
MIXERS = {
    "attention (Qwen3)": "qwen3",
    "latent attention (DeepSeek-V3)": "deepseek_v3",
    "gated delta nets (Qwen3.5)": "qwen3_5_text",
    "sinks and windows (gpt-oss)": "gpt_oss",
}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("folder", type=Path)
    parser.add_argument("--seeds", type=int, default=2)
    parser.add_argument("--steps", type=int, default=15)
    options = parser.parse_args()
    options.folder.mkdir(parents=True, exist_ok=True)
    print("| token mixer | first three steps | last three steps | each seed |\n|---|--:|--:|--:|")
    for name, family in MIXERS.items():
        runs = _rewards(options.folder, family, options.seeds, options.steps)
        first = statistics.fmean(statistics.fmean(rewards[:3]) for rewards in runs)
        ends = [statistics.fmean(rewards[-3:]) for rewards in runs]
        each = ", ".join(f"{end:.2f}" for end in ends)
        print(f"| {name} | {first:.2f} | {statistics.fmean(ends):.2f} | {each} |", flush=True)


def _rewards(folder: Path, family: str, seeds: int, steps: int) -> list[list[float]]:
    """Mean reward of each step, by seed. Finished runs are read from their files."""
    models = [folder / f"{family}-{seed}" for seed in range(seeds)]
    for seed, model in enumerate(models):
        if not model.is_dir():
            write_model(model, family, seed)
    found = []
    # one server: each run begins with a push of its own weights
    with server(models[0], "bfloat16", 1, ["--device", "cpu"]) as url:
        for seed, model in enumerate(models):
            file = folder / f"{family}-{seed}.json"
            if not file.is_file():
                rows = learn(url, {"bf16": model}, "bf16", seed, steps, {})
                file.write_text(json.dumps([row["reward"] for row in rows]))
            found.append(json.loads(file.read_text()))
    return found


if __name__ == "__main__":
    main()
