"""A long run: does memory grow, and does the difference of trainer's and engine's log-probs?

    # colocated, then async
    python -m benchmarks.gpu.long_run --steps 40
    python -m benchmarks.gpu.long_run --engine embedded --shape tiny --prompts 4 --samples 2 \\
        --new-tokens 16 --interval 0.2

`train.py --colocate` and `train_async.py` as users run them. Memory is read every --interval: of
the host what processes hold for themselves (RssAnon), by their kind, and what lies in /dev/shm; of
the GPUs what is in use. A step's number is the largest between its end and that of the step before.
Slopes are least-squares fits over the steps behind the first --settle ones, with twice their
standard error; growth is what is above 0 beyond it.
"""

from __future__ import annotations

import argparse
import math
import os
import re
import shutil
import statistics
import subprocess
import sys
import threading
import time
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path

import psutil

from benchmarks.gpu.report import Report, Row, at_least, at_most
from benchmarks.gpu.setting import make_model, new_run_parser, run_training, workspace
from slime.observe.run_data import Stage
from slime.processes.host import num_gpus

MEAN = "train/train_rollout_logprob_abs_diff"
LARGEST = "train/train_rollout_logprob_abs_diff_max"
WAYS = {"colocated": "train.py", "async": "train_async.py"}
_KINDS = {
    "ray::TrainerActor": "trainer",
    "ray::RolloutActor": "rollout",
    "sglang": "engine",
    "embedded": "engine",
    "spawn_main": "rewards",
    "train.py": "driver",
    "train_async.py": "driver",
}
_MOST_GROWTH_MB = 1.0
_MOST_DRIFT = 1.25


def parse_args(argv: list[str] | None = None) -> argparse.Namespace:
    parser = new_run_parser(__doc__, prompts=16, samples=8, new_tokens=256, steps=40)
    add = parser.add_argument
    add("--ways", nargs="+", choices=list(WAYS), default=list(WAYS), help="async needs another GPU")
    add("--interval", type=float, default=1.0, help="seconds between looks at memory")
    add("--settle", type=int, default=10, help="steps before the fits begin")
    return parser.parse_args(argv)


def main(argv: list[str] | None = None) -> int:
    args = parse_args(argv)
    report = Report("long run", args)
    with workspace() as folder:
        for way in args.ways:
            (folder / way).mkdir()
            report.case(f"{way}, {args.steps} steps", lambda way=way: measure(args, folder, way))  # type: ignore[misc]
    return report.finish()


def measure(args: argparse.Namespace, folder: Path, way: str) -> Row:
    more = ["--actor-num-gpus-per-node", str(args.gpus), *args.more.split()]
    more += ["--colocate"] if way == "colocated" else ["--rollout-num-gpus", str(args.gpus)]
    model = make_model(args, folder)
    with Sampler(args.interval) as sampler:
        stage = run_training(WAYS[way], args, model, folder / way, more)
    return evaluate(stage, sampler.samples, args.settle) | {
        "shape": str(args.model or args.shape),
        "way": way,
    }


def evaluate(stage: Stage, samples: Sequence[tuple[float, Row]], settle: int) -> Row:
    """Slopes, drift, goals and everything by step."""
    rows = [row for row in stage.rows if MEAN in row]
    by_step: dict[str, list[float]] = memory_by_step([row["time"] for row in rows], samples)
    peaks = [
        key for key in dict.fromkeys(key for row in rows for key in row) if key.endswith("_gb")
    ]
    by_step |= {f"{key} (MB)": [1000 * row.get(key, math.nan) for row in rows] for key in peaks}
    slopes = {name: slope(values[settle:]) for name, values in by_step.items()}
    goals = [at_least("steps", len(rows), 30)]
    # not "in all" of the host: Ray starts a process per core in advance, and ends them while
    # nothing is asked of them
    own = {f"host: {kind}" for kind in _KINDS.values()} | {
        name for name in by_step if name.startswith("GPU")
    }
    for name in [name for name in by_step if name in own and math.isfinite(slopes[name][1])]:
        growth, doubt = slopes[name]
        goals.append(
            at_most(f"{name}: growth beyond doubt, per step", growth - doubt, _MOST_GROWTH_MB, "MB")
        )
    means = [row[MEAN] for row in rows][settle:]
    if len(means) >= 10 and statistics.fmean(means[: len(means) // 2]):
        drift = statistics.fmean(means[len(means) // 2 :]) / statistics.fmean(
            means[: len(means) // 2]
        )
        goals.append(at_most("log-prob difference, second half ÷ first half", drift, _MOST_DRIFT))
    return {
        "steps": len(rows),
        "settle": settle,
        "goals": goals,
        "slopes_mb_per_step": {
            name: {"slope": a, "two_standard_errors": b} for name, (a, b) in slopes.items()
        },
        "logprob_difference": {
            "mean": [row[MEAN] for row in rows],
            "max": [row.get(LARGEST) for row in rows],
            "slope_per_step": slope(means),
            "slope_of_max_per_step": slope([row[LARGEST] for row in rows[settle:]]),
        },
        "mb_by_step": by_step,
        "step_seconds": [row.get("perf/step_time") for row in rows],
    }


def slope(values: Sequence[float]) -> tuple[float, float]:
    """Least-squares slope per element, and twice its standard error; infinite for less than three
    elements.

    Example:
        >>> slope([1.0, 3.0, 5.0, 7.0])
        (2.0, 0.0)
    """
    pairs = [(x, y) for x, y in enumerate(values) if math.isfinite(y)]
    if len(pairs) < 3:
        return 0.0, math.inf
    xs = [x for x, _ in pairs]
    ys = [y for _, y in pairs]
    fit = statistics.linear_regression(xs, ys)
    spread = sum((x - statistics.fmean(xs)) ** 2 for x in xs)
    rest = sum((y - fit.intercept - fit.slope * x) ** 2 for x, y in pairs)
    return fit.slope, 2 * math.sqrt(rest / (len(pairs) - 2) / spread)


def memory_by_step(
    ends: Sequence[float], samples: Sequence[tuple[float, Row]]
) -> dict[str, list[float]]:
    """The largest sample of each kind within each step, in MB; NaN where none was taken."""
    kinds = list(dict.fromkeys(kind for _, sample in samples for kind in sample))
    found: dict[str, list[float]] = {kind: [] for kind in kinds}
    for start, end in zip([0.0, *ends], ends):
        within = [sample for at, sample in samples if start < at <= end]
        for kind in kinds:
            found[kind].append(
                max((sample.get(kind, 0.0) for sample in within), default=math.nan) / 1e6
            )
    return found


class Sampler:
    """Memory of this process's descendants and of the GPUs, again and again while the block runs.

    Attributes:
        samples: (time, {kind: bytes}).
    """

    def __init__(self, interval: float) -> None:
        self.samples: list[tuple[float, Row]] = []
        self._interval = interval
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)

    def __enter__(self) -> Sampler:
        self._thread.start()
        return self

    def __exit__(self, *unused: object) -> None:
        self._over.set()
        self._thread.join(timeout=30)

    def _run(self) -> None:
        while not self._over.wait(self._interval):
            self.samples.append((time.time(), {**host_memory(), **gpu_memory()}))


def host_memory() -> dict[str, float]:
    """Bytes by kind of process below this one, of all of them, and in /dev/shm."""
    found: dict[str, float] = defaultdict(float)
    for process in psutil.Process().children(recursive=True):
        try:
            words = " ".join(process.cmdline())
            status = Path(f"/proc/{process.pid}/status").read_text()
        except (psutil.Error, OSError):  # it has ended
            continue
        own = re.search(r"^RssAnon:\s+(\d+) kB", status, re.MULTILINE)
        kind = next((kind for mark, kind in _KINDS.items() if mark in words), "Ray and others")
        found[f"host: {kind}"] += int(own.group(1)) * 1024 if own else 0
    found["host: in all"] = sum(found.values())
    found["host: /dev/shm"] = shutil.disk_usage("/dev/shm").used
    return dict(found)


def gpu_memory() -> dict[str, float]:
    """Bytes in use by GPU that this process may use, as the driver says; {} where it cannot be
    asked."""
    if not num_gpus():
        return {}
    query = ["nvidia-smi", "--query-gpu=memory.used", "--format=csv,noheader,nounits"]
    mine = os.environ.get("CUDA_VISIBLE_DEVICES")
    query += ["-i", mine] if mine else []
    try:
        said = subprocess.run(query, capture_output=True, text=True, timeout=20).stdout.split()
    except (OSError, subprocess.SubprocessError):  # the run's own metrics are left
        return {}
    return {
        f"GPU {i} in all": float(used) * (1 << 20) for i, used in enumerate(said) if used.isdigit()
    }


if __name__ == "__main__":
    sys.exit(main())
