"""A colocated GRPO step of TRL with vLLM against one of this loop: one GPU, the same work.

    # in an environment of its own; without flash-attn-4 there, --attention sdpa
    pip install "trl[vllm]==1.16.0" "vllm==0.25.1"
    python -m benchmarks.gpu.peer_trl --trl-python ENV/bin/python --models MODELS --steps 5 \\
        --out peer.jsonl \\
        --engine-flags "--attention-backend fa3 --sampling-backend pytorch --grammar-backend none"
    # without a GPU: write TRL's settings, and check them where TRL is installed
    python -m benchmarks.gpu.peer_trl --shape tiny --prepare FOLDER

The work: random weights of --shape, --prompts × --samples responses of exactly --new-tokens tokens
(both engines ignore the end token), the same prompts, all of one length, temperature 1, a reward by
lot, no KL, no reference, one optimizer step per rollout, no gradient checkpointing, attention by
flash-attn-4 in both trainers. TRL runs as its documentation has it for speed on one GPU: vLLM in
the trainer's process, which sleeps while the trainer trains (the cache is dropped, weights are
pushed again). --trl-memory leaves vLLM a cache for all responses at once.

In the case "trl" TRL computes log-probs of the responses in a pass of its own, to correct for what
vLLM's differ by, as is its default; "trl-uncorrected" saves that pass. Ours takes those of the
training pass. The ratio is against the faster of TRL's cases.

What differs: TRL keeps weights in float32 and casts them for each product (autocast); between
layers its activations are float32. Ours trains bfloat16 weights with float32 masters in the
optimizer. `--trl-dtype bfloat16` is TRL without float32 anywhere, its optimizer included: faster,
but not the same training. GRPOTrainer has no packing and no padding-free batches, and micro-batches
of a number of samples (--trl-samples); with prompts and responses of one length nothing is padded.
vLLM does not turn tokens into text: TRL does not read it.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.gpu.peer_verl import PROMPT_TOKENS, run_cases, run_peer, speed
from benchmarks.gpu.report import Row
from benchmarks.gpu.setting import (
    made_up_prompts,
    make_model,
    median,
    new_run_parser,
)

SIDE = Path(__file__).with_name("trl_side.py")
CASES = ("slime", "trl", "trl-uncorrected")


def configuration(args: argparse.Namespace, folder: Path, correct: bool) -> dict[str, Any]:
    """Arguments of TRL's GRPOConfig.

    Raises:
        ValueError: the samples of a step are no multiple of those of a micro-batch.
    """
    samples = args.prompts * args.samples
    if samples % args.trl_samples:
        raise ValueError(
            f"a step has {args.prompts} × {args.samples} = {samples} samples, which are no "
            f"multiple of --trl-samples {args.trl_samples}; choose one that divides them"
        )
    given: dict[str, Any] = {
        "output_dir": str(folder / "trainer"),
        "model_init_kwargs": {
            "dtype": args.trl_dtype,
            "attn_implementation": args.attention,
        },
        "bf16": args.trl_dtype == "float32",  # autocast
        "gradient_checkpointing": False,
        "use_vllm": True,
        "vllm_mode": "colocate",
        "vllm_enable_sleep_mode": True,
        "vllm_gpu_memory_utilization": args.trl_memory,
        "vllm_max_model_length": PROMPT_TOKENS + args.new_tokens + 8,
        "vllm_importance_sampling_correction": correct,
        "per_device_train_batch_size": args.trl_samples,
        "gradient_accumulation_steps": samples // args.trl_samples,
        "num_generations": args.samples,
        "max_completion_length": args.new_tokens,
        "generation_kwargs": {"ignore_eos": True, "detokenize": False},
        "temperature": 1.0,
        "beta": 0.0,
        "num_iterations": 1,
        "learning_rate": 1e-6,
        "lr_scheduler_type": "constant",
        "max_steps": args.steps,
        "logging_steps": 1,
        "report_to": [],
        "save_strategy": "no",
        "disable_tqdm": True,
        "seed": 0,
    }
    return {**given, **json.loads(args.trl_more)}


def write_settings(args: argparse.Namespace, model: Path, folder: Path, correct: bool) -> Path:
    """Write what `trl_side` reads."""
    settings = {
        "model": str(model),
        "prompts": made_up_prompts(4 * args.prompts),
        "metrics": str(folder / "metrics.jsonl"),
        "config": configuration(args, folder, correct),
    }
    path = folder / "settings.json"
    path.write_text(json.dumps(settings, indent=1))
    return path


def environment() -> dict[str, str]:
    """vLLM's and TRL's variables: no network, and no kernels that would have to be downloaded."""
    known = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    return {
        **known,
        "HF_HUB_OFFLINE": "1",
        "VLLM_NO_USAGE_STATS": "1",
        # it is asked only for top-k and top-p, which nobody wants here
        "VLLM_USE_FLASHINFER_SAMPLER": "0",
        # compiled kernels of attention serve the next process too, as on our side
        "FLASH_ATTENTION_CUTE_DSL_CACHE_ENABLED": "1",
    }


def measure_trl(args: argparse.Namespace, model: Path, folder: Path, case: str) -> Row:
    """Run TRL and return its seconds by phase.

    Raises:
        RuntimeError: it failed; its last lines are on stderr.
    """
    folder.mkdir(parents=True, exist_ok=True)
    metrics = folder / "metrics.jsonl"
    metrics.unlink(missing_ok=True)  # of an earlier run, with --keep
    settings = write_settings(args, model, folder, correct=case == "trl")
    started = time.monotonic()
    run_peer(
        [args.trl_python, "-P", str(SIDE), str(settings)],
        folder,
        environment(),
        lambda: len(read_steps(metrics)) >= args.warm_up + 2,
    )
    rows = read_steps(metrics)
    return {**trl_row(args, rows), "start_seconds": rows[0]["ended"] - started}


def read_steps(metrics: Path) -> list[Row]:
    if not metrics.exists():
        return []
    return [json.loads(line) for line in metrics.read_text().splitlines()]


def trl_row(args: argparse.Namespace, rows: Sequence[Row]) -> Row:
    """Medians behind the warm-up."""
    steady = list(rows[args.warm_up :] or rows)
    seconds = {
        name: median([row["seconds"][name] for row in steady]) for name in rows[0]["seconds"]
    }
    found: Row = {
        **speed(args, seconds["step"], median([row["length"] for row in steady])),
        "seconds": seconds,
        "memory_gb": max(row["memory_gb"] for row in rows),
        "raw": list(rows),
    }
    between = [b["ended"] - a["ended"] for a, b in itertools.pairwise(rows)]
    # from the end of one step to that of the next, what TRL does between them included
    if walls := between[max(args.warm_up - 1, 0) :]:
        found["wall_seconds"] = median(walls)
    return found


def prepare(args: argparse.Namespace, folder: Path) -> None:
    """Write model and settings; let TRL check them, where it is installed."""
    folder.mkdir(parents=True, exist_ok=True)
    model = make_model(args, folder).resolve()
    settings = write_settings(args, model, folder, correct=True)
    print(f"written: {settings}")
    known = subprocess.run(
        [args.trl_python, "-P", "-c", "import trl"], env=environment(), capture_output=True
    )
    if known.returncode:
        print(f"not checked: {args.trl_python} has no TRL")
        return
    command = [args.trl_python, "-P", str(SIDE), str(settings), "--check"]
    done = subprocess.run(command, env=environment(), capture_output=True, text=True)
    (folder / "config.txt").write_text(done.stdout)
    print(done.stderr[-2000:] if done.returncode else f"checked: {folder / 'config.txt'}")
    done.check_returncode()


def parse_args(argv: list[str] | None) -> argparse.Namespace:
    parser = new_run_parser(__doc__, prompts=64, samples=8, new_tokens=1024, steps=5)
    add = parser.add_argument
    add("--cases", nargs="+", choices=CASES, default=list(CASES))
    add("--warm-up", type=int, default=2, help="steps that do not count")
    add("--attention", default="flash_attention_4", help="TRL's: transformers' name of it")
    add(
        "--trl-python",
        default=sys.executable,
        help="the Python of TRL's environment (default: this one)",
    )
    add(
        "--trl-samples",
        type=int,
        default=32,
        help="of a micro-batch of TRL (default: 32: at Qwen3-0.6B's shape and 1,156 tokens each, "
        "about 80 GB of activations beside 10 GB of states; 64 would not fit)",
    )
    add("--trl-memory", type=float, default=0.7, help="share of the GPU for TRL's vLLM")
    add(
        "--trl-dtype",
        choices=["float32", "bfloat16"],
        default="float32",
        help="of TRL's weights, and so of its optimizer",
    )
    add("--trl-more", default="{}", help="more arguments of GRPOConfig, as a JSON object")
    add("--slime-tokens", type=int, help="of a micro-batch of ours (default: the memory plan's)")
    add("--keep", type=Path, help="keep logs and metrics in this folder")
    add("--prepare", type=Path, metavar="FOLDER", help="run nothing")
    return parser.parse_args(argv)


def main(argv: list[str] | None = None) -> int:
    args = parse_args(argv)
    if args.prepare is not None:
        prepare(args, args.prepare.resolve())
        return 0
    return run_cases(args, "trl", measure_trl, "TRL")


if __name__ == "__main__":
    sys.exit(main())
