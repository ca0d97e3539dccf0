"""What quantised rollouts cost a toy in learning, and what mends it: seeds × formats × corrections, on the CPU.

    python -m benchmarks.quantised_learning outputs/quantised             # 30 runs of 15 steps, some ten minutes
    python -m benchmarks.quantised_learning outputs/quantised --picture docs/images/quantised-learning.svg

The task is the tests' (`tests.support.toy`): from random weights a Llama of 70 thousand parameters learns a digit.
All of its Linear layers are quantised, the output layer too, which is the one that learns: harder than any recommended
list. A run that is there already is not made again, so that a call that was ended goes on; --at-most ends it.
"""

from __future__ import annotations

import argparse
import json
import shutil
import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any

#: Format → how the toy is stored; None: plain weights.
FORMATS = ("bf16", "FP8", "INT4")
#: Correction → its flags.
CORRECTIONS: dict[str, list[str]] = {
    "none": [],
    "TIS": ["--use-tis", "--tis-clip", "2"],
    "IcePop": ["--use-tis", "--tis-mode", "icepop", "--tis-clip-low", "0.5", "--tis-clip", "5"],
    "fake-quantised": ["--fake-quantisation", "linears"],
}
_REWARD, _APART = "rollout/raw_reward", "train/train_rollout_logprob_abs_diff"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=15)
    parser.add_argument("--at-most", type=int, default=1 << 30, help="runs to make in this call")
    parser.add_argument("--picture", type=Path)
    options = parser.parse_args()
    options.folder.mkdir(parents=True, exist_ok=True)
    left = options.at_most
    found: dict[tuple[str, str], list[list[dict[str, Any]]]] = {}
    inputs = _inputs(options.folder / "inputs")
    for seed in range(options.seeds):
        for kind in FORMATS:
            for name in CORRECTIONS:
                if kind == "bf16" and name == "fake-quantised":
                    continue
                rows = _rows(options.folder, kind, name, seed)
                if len(_series(rows, _REWARD)) < options.steps and left > 0:
                    left -= 1
                    _run(options.folder, inputs, kind, name, seed, options.steps)
                    rows = _rows(options.folder, kind, name, seed)
                if rows:
                    found.setdefault((kind, name), []).append(rows)
    print(table(found))
    if options.picture is not None:
        options.picture.write_text(_picture(found), encoding="utf-8")


def table(found: dict[tuple[str, str], list[list[dict[str, Any]]]]) -> str:
    """A row for each format and correction, over the seeds."""
    lines = [
        "| engines | correction | reward, last 3 steps | least of a seed | trainer − engine |",
        "|---|---|--:|--:|--:|",
    ]
    for (kind, name), runs in found.items():
        ends = [statistics.fmean(_series(rows, _REWARD)[-3:]) for rows in runs]
        apart = statistics.fmean(statistics.fmean(_series(rows, _APART)) for rows in runs)
        lines.append(f"| {kind} | {name} | {statistics.fmean(ends):.2f} | {min(ends):.2f} | {apart:.4f} |")
    return "\n".join(lines)


def _series(rows: Sequence[dict[str, Any]], name: str) -> list[float]:
    return [row[name] for row in rows if row.get(name) is not None]


def _inputs(folder: Path) -> dict[str, Path]:
    """Plain and quantised toys, and prompts."""
    from slime.checkpoints.quantised_files import quantise_directory
    from slime.models.quantised import Fp8, Int4, Quantisation
    from tests.support import toy

    places = {name: folder / name for name in (*FORMATS, "sums.jsonl")}
    if not folder.is_dir():
        folder.mkdir()
        toy.write_data(places["sums.jsonl"])
        toy.write_model(places["bf16"], "llama")
    for kind, quantisation in {
        "FP8": Quantisation("fp8", Fp8((16, 16))),
        "INT4": Quantisation("compressed-tensors", Int4(16), ("model.embed_tokens.weight",)),
    }.items():
        if not places[kind].is_dir():
            quantise_directory(places["bf16"], places[kind], quantisation)
    return places


def _called(kind: str, name: str, seed: int) -> str:
    return f"{kind}-{name}-{seed}".lower()


def _rows(folder: Path, kind: str, name: str, seed: int) -> list[dict[str, Any]]:
    """Metrics of a run that was made; [] of another."""
    metrics = folder / _called(kind, name, seed) / "metrics.jsonl"
    return [json.loads(line) for line in metrics.read_text().splitlines()] if metrics.is_file() else []


def _run(folder: Path, inputs: dict[str, Path], kind: str, name: str, seed: int, steps: int) -> None:
    from slime.cli import train
    from slime.cluster.ray_session import start_ray
    from slime.config import make_config
    from tests.support.runs import GRPO

    start_ray(make_config(), num_local_slots=4)  # once for all runs, which find it
    called = _called(kind, name, seed)
    shutil.rmtree(folder / called, ignore_errors=True)
    plain = [] if kind == "bf16" else ["--ref-load", inputs["bf16"]]
    words: list[Any] = [*GRPO, "--hf-checkpoint", inputs[kind], *plain, "--prompt-data", inputs["sums.jsonl"]]
    words += ["--input-key", "prompt", "--label-key", "label", "--bf16", "--seed", seed, "--rollout-seed", seed]
    words += ["--lr", "1e-2", "--lr-decay-style", "constant", "--weight-decay", 0, "--rollout-max-context-len", 32]
    words += ["--use-dynamic-batch-size", "--max-tokens-per-gpu", 1024, "--colocate", "--num-rollout", steps]
    words += ["--output-dir", folder, "--run-name", called, *CORRECTIONS[name]]
    train.main([str(word) for word in words])


def _picture(found: dict[tuple[str, str], list[list[dict[str, Any]]]]) -> str:
    """The mean reward of the seeds by step: bf16, and INT4 with each correction."""
    from tools.plot_runs import picture

    curves = []
    for (kind, name), runs in found.items():
        if kind == "INT4" or name == "none":
            steps = zip(*(_series(rows, _REWARD) for rows in runs))
            points = [(float(number + 1), statistics.fmean(values)) for number, values in enumerate(steps)]
            curves.append((kind if name == "none" else f"{kind}, {name}", points))
    return picture(curves, _REWARD, "Reward by step, mean of the seeds")


if __name__ == "__main__":
    main()
