"""The GPU benchmarks in one call, the most telling first, within a fixed time.

    python -m benchmarks.gpu.run_all --gpus 1 --out-dir results --minutes 9.5 \\
        --engine-flags "--attention-backend fa3 --sampling-backend pytorch --grammar-backend none"
    python -m benchmarks.gpu.run_all --gpus 1 --list
    python -m benchmarks.gpu.run_all --gpus 1 --only generation-0.6b long-run-0.6b
    # tiny shapes on a CPU, the same way
    python -m benchmarks.gpu.run_all --dry --out-dir results

Each case is a process of its own, with a limit of its own, whose output is streamed (and kept in
OUT_DIR/log.txt); results are lines of OUT_DIR/results.jsonl, and OUT_DIR/table.md sums them up. A
case that fails or passes its limit is ended with all that it started, and the next one begins. A
case whose least time is not left is skipped; the names of those that were not run come last, ready
to be given to --only.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from dataclasses import dataclass
from pathlib import Path

from benchmarks.gpu.long_run import gpu_memory
from benchmarks.gpu.report import Row, table

ROOT = Path(__file__).parents[2]
_GRACE_SECONDS = 15.0
_FREE_MB = 2000.0  # a process that was killed takes a while to give its memory back
_FREE_SECONDS = 20.0


@dataclass(frozen=True)
class Case:
    """One script with its arguments.

    Attributes:
        least, limit: seconds that it surely takes, and that it may take.
        words, tiny: on a GPU; on a CPU.
        engine_flags: SGLang's, beside --engine-flags; None for scripts without engines.
    """

    name: str
    gpus: int
    least: float
    limit: float
    words: str
    tiny: str
    engine_flags: str | None = None


_TINY = "tiny --tokens 512 --length 64 --steps 2"
_TINY_RUN = "--shape tiny --prompts 2 --samples 2 --new-tokens 8"
_LAYOUTS = (
    "--layout tensor_model_parallel_size=2 sequence_parallel=true --layout context_parallel_size=2"
)
# SGLang starts sooner, where no speed of generation is measured
_FEW_GRAPHS = "--cuda-graph-max-bs-decode 8"

CASES = [
    Case("trainer-0.6b", 1, 40, 180, "trainer qwen3-0.6b --max-tokens 8192 --peer --profile",
         f"trainer {_TINY} --peer --profile"),
    Case("trainer-4b", 1, 40, 120, "trainer qwen3-4b --max-tokens 4096", f"trainer {_TINY}"),
    Case("trainer-moe", 1, 40, 120, "trainer qwen3-moe-4b",
         f"trainer {_TINY.replace('tiny', 'tiny-moe')}"),
    Case("sleep-wake-4b", 1, 60, 180, "sleep_wake --shape qwen3-4b",
         "sleep_wake --shape tiny --rounds 2", ""),
    Case("streamed-optimizer-4b", 1, 120, 420, "streamed_optimizer",
         f"streamed_optimizer --equal tiny --shape {_TINY} --max-tokens 256"),
    Case("generation-0.6b", 1, 120, 360, "generation --shape qwen3-0.6b --rounds 3",
         "generation --shape tiny --in-flight 4 --new-tokens 8 --rounds 1", ""),
    Case("weight-sync-4b", 1, 90, 240, "weight_sync --shape qwen3-4b",
         "weight_sync --shape tiny --rounds 2", _FEW_GRAPHS),
    Case("fused-pairs", 1, 120, 420, "fused_pairs",
         "fused_pairs --shape tiny-deepseek --buffer-bytes 8000000 30000 60000",
         "--mem-fraction-static 0.3"),
    Case("colocated-step-4b", 1, 240, 540, "colocated_step --shape qwen3-4b --steps 3",
         f"colocated_step {_TINY_RUN} --steps 2", ""),
    Case("images-2b", 1, 240, 540, "images",
         'images --size tiny --prompts 2 --samples 2 --new-tokens 8 --steps 2 --side 128',
         "--mem-fraction-static 0.35"),
    Case("long-run-0.6b", 1, 240, 540, "long_run --shape qwen3-0.6b --ways colocated",
         f"long_run {_TINY_RUN} --steps 4 --settle 1 --ways colocated",
         "--cuda-graph-max-bs-decode 128"),
    Case("safety-cost-0.6b", 1, 400, 560, "safety_cost --shape qwen3-0.6b",
         f"safety_cost {_TINY_RUN} --steps 4", "--cuda-graph-max-bs-decode 256"),
    Case("align-0.6b", 1, 180, 400, "align --shape qwen3-0.6b",
         "align --shape tiny --prompts 2 --new-tokens 16",
         "--disable-cuda-graph --mem-fraction-static 0.1"),
    Case("trainer-4b-2-gpus", 2, 90, 300,
         f"trainer qwen3-4b --gpus 2 --tokens 32768 --max-tokens 8192 {_LAYOUTS}",
         f"trainer {_TINY} --gpus 2 {_LAYOUTS}"),
    Case("weight-sync-4b-1-to-1", 2, 90, 240, "weight_sync --shape qwen3-4b --way apart",
         "weight_sync --shape tiny --way apart --rounds 2", _FEW_GRAPHS),
    Case("weight-sync-4b-fp8-1-to-1", 2, 90, 240,
         "weight_sync --shape qwen3-4b --way apart --served fp8-block --verify",
         "weight_sync --shape tiny --way apart --rounds 2 --served fp8-block --verify",
         _FEW_GRAPHS),
    Case("long-tail-4b", 2, 480, 570,
         "long_tail --gpus 2 --shape qwen3-4b --prompts 8 --samples 4 --steps 6 --lock-steps 2 "
         "--ahead 3",
         "long_tail --gpus 2 --shape tiny --prompts 2 --samples 2 --steps 4 --lock-steps 2 "
         "--least 4 --most 32 --scale 0.02",
         "--cuda-graph-max-bs-decode 192"),
    Case("long-run-0.6b-async", 2, 240, 540, "long_run --shape qwen3-0.6b --ways async",
         f"long_run {_TINY_RUN} --steps 4 --settle 1 --ways async",
         "--cuda-graph-max-bs-decode 128"),
    Case("weight-sync-4b-2-to-2", 4, 90, 240, "weight_sync --shape qwen3-4b --way apart --tp 2",
         "weight_sync --shape tiny --way apart --tp 2 --rounds 2", _FEW_GRAPHS),
    Case("weight-sync-moe", 4, 120, 300,
         "weight_sync --shape qwen3-30b-a3b-12-layers --tp 4 --ep 4",
         "weight_sync --shape tiny-moe --tp 2 --ep 2 --rounds 2",
         f"{_FEW_GRAPHS} --enforce-disable-flashinfer-allreduce-fusion"),
]  # fmt: skip


def parse_args(argv: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--gpus", type=int, default=1, help="GPUs of this host; cases for exactly so many are run")
    add("--only", nargs="+", metavar="CASE", choices=[case.name for case in CASES])
    add("--list", action="store_true", help="print the cases and their limits")
    add("--minutes", type=float, default=9.5, help="for everything (default: 9.5)")
    add("--out-dir", type=Path, default=Path("results"))
    add("--models", type=Path, help="folder for random weights, kept for a later call")
    add("--engine-flags", default="", help="of SGLang's servers, in one word")
    add("--dry", action="store_true", help="tiny shapes and the embedded engine")
    return parser.parse_args(argv)


def main(argv: list[str] | None = None) -> int:
    args = parse_args(argv)
    cases = [
        case for case in CASES if (case.name in args.only if args.only else case.gpus == args.gpus)
    ]
    if args.list:
        for case in cases:
            words = " ".join(command(case, args)[2:])
            print(f"{case.name:24} {case.least:4.0f} to {case.limit:4.0f} s   {words}")
        return 0
    args.out_dir.mkdir(parents=True, exist_ok=True)
    end = time.monotonic() + 60 * args.minutes
    left_over = []
    for case in cases:
        left = end - time.monotonic() - _GRACE_SECONDS
        if left < (5 if args.dry else case.least):
            left_over.append(case.name)
            continue
        run(case, args, min(left, case.limit))
    rows = results(args)
    (args.out_dir / "table.md").write_text(table(rows) + "\n", encoding="utf-8")
    print("\n" + table(rows))
    if left_over:
        print("not run: --only " + " ".join(left_over))
    return int(any("error" in row for row in rows))


def results(args: argparse.Namespace) -> list[Row]:
    file = args.out_dir / "results.jsonl"
    return [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []


def command(case: Case, args: argparse.Namespace) -> list[str]:
    script, *words = (case.tiny if args.dry else case.words).split()
    words += ["--out", str(args.out_dir / "results.jsonl")]
    if case.engine_flags is not None:
        words += [
            "--models",
            str(args.models or Path(tempfile.gettempdir()) / "slime-benchmark-models"),
        ]
        flags = f"{args.engine_flags} {case.engine_flags}".strip()
        words += ["--engine", "embedded"] if args.dry else [f"--engine-flags={flags}"]
    return [sys.executable, "-m", f"benchmarks.gpu.{script}", *words]


def run(case: Case, args: argparse.Namespace, seconds: float) -> None:
    """Its output goes to stdout and into a file; after ``seconds`` (and a little grace) everything
    of it is ended."""
    words = [*command(case, args), "--budget", f"{seconds - _GRACE_SECONDS / 2:.0f}"]
    print(f"\n== {case.name}, at most {seconds:.0f} s: {' '.join(words[1:])}", flush=True)
    started = time.monotonic()
    process = subprocess.Popen(
        words,
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
        start_new_session=True,
        env={**os.environ, "PYTHONUNBUFFERED": "1"},
    )
    alarm = threading.Timer(seconds + _GRACE_SECONDS / 2, _end, (process,))
    alarm.start()
    before = len(results(args))
    assert process.stdout is not None
    with open(args.out_dir / "log.txt", "a", encoding="utf-8") as log:
        for line in process.stdout:
            log.write(line)
            print(line[:400].rstrip(), flush=True)
    status = process.wait()
    alarm.cancel()
    _end(process)  # children that outlived it
    if status and len(results(args)) == before:
        row = {
            "benchmark": words[2],
            "case": case.name,
            "error": f"exit status {status}, without a result",
        }
        with open(args.out_dir / "results.jsonl", "a", encoding="utf-8") as file:
            file.write(json.dumps(row) + "\n")
    print(
        f"== {case.name}: exit status {status} after {time.monotonic() - started:.0f} s", flush=True
    )
    _wait_for_free_gpus()


def _wait_for_free_gpus() -> None:
    end = time.monotonic() + _FREE_SECONDS
    while time.monotonic() < end and sum(gpu_memory().values()) / 1e6 > _FREE_MB:
        time.sleep(0.5)


def _end(process: subprocess.Popen[str]) -> None:
    """The case and all of its session; servers of their own sessions die with their parents."""
    try:
        os.killpg(process.pid, signal.SIGKILL)
    except ProcessLookupError:
        return


if __name__ == "__main__":
    sys.exit(main())
