"""What a loss costs: parts of a run with a real engine are killed or frozen, one after the other,
at random moments.

    python -m benchmarks.gpu.losses --gpus 1 --ways async colocated --minutes 9
    python -m benchmarks.gpu.losses --engine embedded --shape tiny --prompts 4 --samples 2 \\
        --new-tokens 16 --ways async

Each run has --use-fault-tolerance and --max-restarts; a point is PART:kill or PART:freeze. A run
that ends of one is taken up again with `slime resume`. A point is survived when two more steps are
done. In the end each step must be there once, and no group may have been generated twice: its
rewards are counted, also where --budget ends before all points.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import signal
import subprocess
import sys
import time
from collections import Counter, defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil

from benchmarks.gpu.report import BudgetSpent, Report, Row, at_least, at_most
from benchmarks.gpu.setting import ROOT, engine_flags, make_model, new_run_parser, workspace
from slime.samples.types import Sample

#: Part → what its command line has.
PARTS = {
    "engine": ("slime.engines.sglang.engine_process", "slime.embedded"),
    "router": ("sglang::router", "sglang_router"),
    "trainer": ("ray::TrainerActor",),
    "rollout": ("ray::RolloutActor",),
    "raylet": ("raylet/raylet",),
}
POINTS = {
    "async": "engine:kill router:kill engine:freeze router:freeze trainer:kill engine:kill "
    "rollout:kill driver:kill",
    "colocated": "engine:kill engine:freeze router:kill trainer:kill engine:kill driver:kill "
    "raylet:kill",
}
_SCRIPT = {"async": "train-async", "colocated": "train"}
_LAUNCH_SECONDS = 300.0
_STEP_SECONDS = 200.0
#: Between a kill and the end of what dies with it, or between a group's last reward and its record
#: in the journal.
_DYING_SECONDS = 1.5


def reward(args: Any, sample: Sample) -> float:
    """A coin, and a line that says which sample got it when."""
    with open(Path(args.output_dir) / "scored", "ab", buffering=0) as file:
        file.write(f"{sample.index} {os.getpid()} {time.time()}\n".encode())
    return float(sum(sample.tokens) % 2)


def parse_args(argv: list[str] | None = None) -> argparse.Namespace:
    parser = new_run_parser(__doc__, prompts=16, samples=8, new_tokens=1024, steps=1_000_000)
    parser.add_argument(
        "--ways",
        nargs="+",
        choices=list(POINTS),
        default=list(POINTS),
        help="async needs another GPU",
    )
    parser.add_argument(
        "--points", nargs="+", help="PART:kill or PART:freeze; a list for each way by default"
    )
    parser.add_argument("--seed", type=int, default=0, help="of the moments")
    return parser.parse_args(argv)


def main(argv: list[str] | None = None) -> int:
    args = parse_args(argv)
    report = Report("losses", args)
    with workspace() as folder:
        for way in args.ways:
            (folder / way).mkdir()
            report.case(way, lambda way=way: measure(args, folder, way, report))  # type: ignore[misc]
    return report.finish()


class Run:
    """One run, over all its launches.

    Attributes:
        kills: when parts were killed.
        path: of the run folder.
    """

    def __init__(self, folder: Path, flags: list[str]) -> None:
        self.folder = folder
        self.path = folder / "run"
        self.kills = list[float]()
        self._driver: subprocess.Popen[bytes] | None = None
        self.start([*flags, "--output-dir", str(folder), "--run-name", "run"])

    def start(self, words: list[str]) -> None:
        with open(self.folder / "log", "ab") as log:
            command = [sys.executable, "-m", "slime", *words]
            self._driver = subprocess.Popen(command, cwd=ROOT, stdout=log, stderr=log)

    @property
    def driver(self) -> subprocess.Popen[bytes]:
        assert self._driver is not None
        return self._driver

    def rows(self) -> list[Row]:
        path = self.path / "metrics.jsonl"
        lines = path.read_text().splitlines() if path.exists() else []
        return [row for line in lines if "rollout/raw_reward" in (row := json.loads(line))]

    def steps_done(self) -> int:
        """0 also where the run goes on from the start: it takes the rows of what is trained again
        out."""
        return max((row["step"] for row in self.rows()), default=0)

    def processes(self, part: str) -> list[psutil.Process]:
        """Of this part, children included, the part's own first."""
        if part == "driver":
            return [psutil.Process(self.driver.pid)]
        for process in psutil.Process(self.driver.pid).children(recursive=True):
            try:
                words = " ".join(process.cmdline())
                if any(word in words for word in PARTS[part]):
                    return [process, *process.children(recursive=True)]
            except psutil.NoSuchProcess:
                continue
        raise RuntimeError(f"the run has no {part}")

    def strike(self, part: str, how: str) -> None:
        for process in self.processes(part)[: 1 if how == "kill" else None]:
            process.send_signal(signal.SIGKILL if how == "kill" else signal.SIGSTOP)
        self.kills.append(time.time())

    def wait(self, is_done: Callable[[], bool], seconds: float) -> bool:
        """Whether it came before the driver's end.

        Raises:
            TimeoutError: neither came.
        """
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            if is_done():
                return True
            if self.driver.poll() is not None:
                return False
            time.sleep(0.1)
        raise TimeoutError(f"nothing for {seconds:.0f} s; the log ends with\n{self.log(12)}")

    def log(self, lines: int) -> str:
        return "\n".join((self.folder / "log").read_text(errors="replace").splitlines()[-lines:])

    def end(self) -> None:
        if self._driver is None or self._driver.poll() is not None:
            return
        self._driver.terminate()
        try:
            self._driver.wait(30)
        finally:
            self._driver.kill()

    def generated_twice(self, group_size: int) -> list[int]:
        """Groups that were finished in two lives of the run, neither of them right when something
        died."""
        scores: dict[int, dict[str, list[float]]] = defaultdict(lambda: defaultdict(list))
        for line in (self.folder / "scored").read_text().splitlines():
            index, pid, at = line.split()
            scores[int(index) // group_size][pid].append(float(at))
        twice = []
        for group, by_pid in scores.items():
            count = Counter(len(times) // group_size for times in by_pid.values())
            ends = [max(times) for times in by_pid.values() if len(times) >= group_size]
            late = sum(any(abs(kill - end) < _DYING_SECONDS for kill in self.kills) for end in ends)
            if sum(number * times for number, times in count.items()) - late > 1:
                twice.append(group)
        return twice


def measure(args: argparse.Namespace, folder: Path, way: str, report: Report) -> Row:
    points = args.points or POINTS[way].split()
    draw = random.Random(args.seed)
    run = Run(folder / way, [_SCRIPT[way], *_flags(args, folder, way)])
    survived = 0
    try:
        began = time.monotonic()
        if not run.wait(lambda: len(run.rows()) >= 2, _LAUNCH_SECONDS):
            raise RuntimeError(f"the run ended:\n{run.log(30)}")
        report.add(f"{way}: launch and two steps", {"seconds": time.monotonic() - began})
        for point in points:
            part, how = point.split(":")
            report.add(f"{way}: {point}", hit(run, part, how, draw))
            survived += 1
    except BudgetSpent:
        if not survived:
            raise
    finally:
        run.end()
        print(run.log(60), flush=True)
    steps = Counter(row["step"] for row in run.rows())
    missing = [step for step in range(1, run.steps_done() + 1) if step not in steps]
    twice = run.generated_twice(args.samples)
    return {
        "steps": run.steps_done(),
        "missing steps": missing,
        "groups generated twice": twice,
        "goals": [
            at_least("points survived", survived, len(points)),
            at_most("steps that are missing", len(missing), 0),
            at_most("groups generated twice", len(twice), 0),
        ],
    }


def hit(run: Run, part: str, how: str, draw: random.Random) -> Row:
    """Kill or freeze a part at a random moment of a step; what came of it."""
    rows = run.rows()
    delay = draw.random() * min(20.0, rows[-1]["perf/step_time"])
    time.sleep(delay)
    steps = run.steps_done()
    began = time.monotonic()
    run.strike(part, how)

    def went_on(count: int) -> bool:
        done = run.steps_done()
        if done > steps:  # a step may still be done of what was ready, before the run ends
            found.setdefault("first new step after", time.monotonic() - began)
        return done >= steps + count

    found: Row = {"after": delay}
    if not run.wait(lambda: went_on(2), 2 * _STEP_SECONDS):
        found |= {"ended after": time.monotonic() - began, "status": run.driver.poll()}
        time.sleep(_DYING_SECONDS)  # what is left of it goes now
        steps = run.steps_done()
        again = time.monotonic()
        run.start(["resume", str(run.path)])
        if not run.wait(lambda: went_on(1), _LAUNCH_SECONDS):
            raise RuntimeError(f"it could not be taken up again:\n{run.log(30)}")
        found["resumed, first new step after"] = time.monotonic() - again
        if not run.wait(lambda: went_on(2), _STEP_SECONDS):
            raise RuntimeError(f"it ended a step later:\n{run.log(30)}")
    last = run.rows()[-2:]
    found["restored groups"] = sum(row.get("rollout/num_restored_groups", 0) for row in last)
    found["steps took"] = [row["perf/step_time"] for row in last]
    return found


def _flags(args: argparse.Namespace, folder: Path, way: str) -> list[str]:
    data = folder / "prompts.jsonl"
    rows = (
        {"prompt": f"Tell me about the number {i:06d}. " * 4, "label": ""}
        for i in range(64 * args.prompts)
    )
    data.write_text("".join(json.dumps(row) + "\n" for row in rows))
    given = {
        "--hf-checkpoint": make_model(args, folder),
        "--prompt-data": data,
        "--input-key": "prompt",
        "--label-key": "label",
        "--rollout-engine": args.engine,
        "--rollout-batch-size": args.prompts,
        "--n-samples-per-prompt": args.samples,
        "--num-rollout": args.steps,
        "--rollout-max-response-len": args.new_tokens,
        "--rollout-max-context-len": args.new_tokens + 256,
        "--rollout-request-tokens": max(1, args.new_tokens // 4),
        "--max-tokens-per-gpu": 8 * (args.new_tokens + 256),
        "--custom-rm-path": "benchmarks.gpu.losses.reward",
        "--lr": "1e-6",
        "--save": folder / way / "checkpoints",
        "--save-interval": 3,
        "--rollout-health-check-interval": 2,
        "--rollout-health-check-timeout": 6,
        "--max-restarts": 9,
        "--actor-num-gpus-per-node": args.gpus,
    }
    if way == "colocated":
        own = ["--colocate"]
    else:
        own = ["--rollout-num-gpus", str(args.gpus), "--update-weights-in-flight"]
    words = [str(word) for pair in given.items() for word in pair]
    return [
        "--use-dynamic-batch-size",
        "--use-fault-tolerance",
        *words,
        *own,
        *engine_flags(args),
        *args.more.split(),
    ]


if __name__ == "__main__":
    sys.exit(main())
