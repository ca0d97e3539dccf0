"""One RL step of SmolLM2-135M-Instruct: this loop against TRL's GRPOTrainer, on the same work.

    pip install --no-deps "trl==1.16.*" accelerate
    # CPU
    python -m benchmarks.loop_vs_trl --model MODEL_DIR --steps 8
    # a GPU
    python -m benchmarks.loop_vs_trl --model MODEL_DIR --steps 12 --prompts 16 --new-tokens 512 \\
        --dtypes bfloat16 --slime-flags "--rollout-engine sglang --sglang-attention-backend fa3"

The work: --prompts × 8 samples a step, "What is i + j? Answer with just the number." for i, j < 10,
at most 64 new tokens (with --new-tokens more, and then "Explain step by step …"), temperature 1, no
KL, no gradient checkpointing, AdamW, one optimizer step per rollout. Each side runs in each dtype,
in a process of its own, one after the other; the first two steps of each are warm-up and the median
of the others counts. Both see the same prompts in an order of their own; response lengths are
reported, since they decide how much work a step is. On a GPU TRL generates in both ways that it has
without another engine: `generate` of transformers and its continuous batching. The ratio is best
against best.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from functools import partial
from pathlib import Path

from benchmarks.gpu.report import Report, Row, add_arguments, at_least
from slime.processes.host import num_gpus

WARM_UP_STEPS = 2
SAMPLES = 8
_CONTINUOUS = "trl-continuous"
_SHORT = 64


def questions(new_tokens: int) -> list[tuple[str, str]]:
    """(question, answer); those with room for it ask for a long one."""
    short = "What is {} + {}? Answer with just the number."
    long = "Explain step by step, in detail, what {} + {} is."
    text = short if new_tokens <= _SHORT else long
    return [(text.format(i, j), str(i + j)) for i in range(10) for j in range(10)]


# -- TRL -------------------------------------------------------------------------------------------


def run_trl(options: argparse.Namespace) -> None:
    import time
    from typing import Any

    import torch
    from datasets import Dataset
    from transformers import TrainerCallback
    from trl import GRPOConfig, GRPOTrainer

    asked = questions(options.new_tokens)
    rows = [
        {"prompt": [{"role": "user", "content": text}], "answer": answer} for text, answer in asked
    ]
    seconds: list[float] = []
    lengths: list[float] = []

    def reward(
        completions: list[Any], answer: list[str], completion_ids: list[list[int]], **_: Any
    ) -> Any:
        lengths.append(statistics.mean(len(ids) for ids in completion_ids))
        return [float(c[0]["content"].strip() == a) for c, a in zip(completions, answer)]

    class Clock(TrainerCallback):
        def on_step_begin(self, *_: Any, **__: Any) -> None:
            self.start = time.perf_counter()

        def on_step_end(self, *_: Any, **__: Any) -> None:
            seconds.append(time.perf_counter() - self.start)

    torch.set_num_threads(len(os.sched_getaffinity(0)))
    config = GRPOConfig(
        output_dir=tempfile.mkdtemp(),
        use_cpu=not num_gpus(),
        # bfloat16 means weights in bfloat16: faster here than autocast, which converts them each
        # time
        bf16=False,
        model_init_kwargs={"dtype": options.dtype},
        use_transformers_continuous_batching=options.side == _CONTINUOUS,
        per_device_train_batch_size=options.prompts * SAMPLES,
        num_generations=SAMPLES,
        max_completion_length=options.new_tokens,
        temperature=1.0,
        beta=0.0,
        gradient_checkpointing=False,
        learning_rate=1e-6,
        max_steps=options.steps,
        report_to=[],
        save_strategy="no",
        logging_steps=1,
        seed=0,
    )
    trainer = GRPOTrainer(
        model=options.model,
        reward_funcs=reward,
        args=config,
        train_dataset=Dataset.from_list(rows),
        callbacks=[Clock()],
    )
    trainer.train()
    Path(options.answer).write_text(json.dumps({"seconds": seconds, "lengths": lengths}))


# -- slime -----------------------------------------------------------------------------------------


def run_slime(options: argparse.Namespace) -> None:
    from slime.cli import train

    folder = Path(tempfile.mkdtemp(prefix="loop_vs_trl-"))
    data = folder / "questions.jsonl"
    with open(data, "w") as file:
        for text, answer in questions(options.new_tokens):
            file.write(
                json.dumps({"prompt": [{"role": "user", "content": text}], "label": answer}) + "\n"
            )
    precision = [
        "--bf16" if options.dtype == "bfloat16" else "--fp32",
        "--embedded-dtype",
        options.dtype,
    ]
    train.main(
        [
            "--hf-checkpoint",
            options.model,
            "--prompt-data",
            str(data),
            "--input-key",
            "prompt",
            "--label-key",
            "label",
        ]
        + ["--apply-chat-template", "--rollout-shuffle", "--colocate", *precision]
        + ["--custom-rm-path", "benchmarks.loop_vs_trl.exact_match"]
        + ["--rollout-batch-size", str(options.prompts), "--n-samples-per-prompt", str(SAMPLES)]
        + ["--num-steps-per-rollout", "1"]
        + ["--rollout-max-response-len", str(options.new_tokens), "--rollout-temperature", "1.0"]
        + ["--rollout-max-context-len", str(options.new_tokens + 192)]
        + [
            "--num-rollout",
            str(options.steps),
            "--lr",
            "1e-6",
            "--lr-decay-style",
            "constant",
            "--clip-grad",
            "1.0",
        ]
        + ["--use-dynamic-batch-size", "--max-tokens-per-gpu", "8192"]
        + ["--output-dir", str(folder), "--run-name", "run", *options.slime_flags.split()]
    )
    rows = [
        json.loads(line) for line in (folder / "run" / "metrics.jsonl").read_text().splitlines()
    ]
    steps_done = [row for row in rows if "perf/step_time" in row]
    phases = ("rollout_time", "log_probs_time", "actor_train_time")
    Path(options.answer).write_text(
        json.dumps(
            {
                "seconds": [row["perf/step_time"] for row in steps_done],
                "lengths": [row["rollout/response_len/mean"] for row in steps_done],
                "phases": {
                    name: [row.get(f"perf/{name}", 0.0) for row in steps_done] for name in phases
                },
                "rows": steps_done,
            }
        )
    )


def exact_match(args: object, sample: object, **_: object) -> float:
    return float(sample.response.strip() == sample.label)  # type: ignore[attr-defined]


# -- both ------------------------------------------------------------------------------------------


def measure(side: str, dtype: str, options: argparse.Namespace) -> Row:
    """Seconds of a side's steps.

    Raises:
        RuntimeError: it failed; carries the end of what it said.
    """
    with tempfile.NamedTemporaryFile(suffix=".json") as result:
        command = [
            sys.executable,
            "-m",
            "benchmarks.loop_vs_trl",
            "--model",
            options.model,
            "--side",
            side,
        ]
        command += [
            "--dtype",
            dtype,
            "--steps",
            str(options.steps),
            "--prompts",
            str(options.prompts),
        ]
        command += ["--new-tokens", str(options.new_tokens)]
        command += [f"--slime-flags={options.slime_flags}", "--answer", result.name]
        here = Path(__file__).resolve().parents[1]
        log = subprocess.run(
            command, cwd=here, capture_output=True, text=True, timeout=options.timeout
        )
        if log.returncode:
            raise RuntimeError(f"{log.stdout[-2000:]}\n{log.stderr[-4000:]}")
        data: Row = json.loads(Path(result.name).read_text())
    steady = data["seconds"][WARM_UP_STEPS:]
    data["median"] = statistics.median(steady)
    data["range"] = [min(steady), max(steady)]
    data["samples_per_second"] = options.prompts * SAMPLES / data["median"]
    data["mean_length"] = statistics.mean(data["lengths"][WARM_UP_STEPS:])
    if "phases" in data:
        inside = [
            sum(values[i] for values in data["phases"].values())
            for i in range(len(data["seconds"]))
        ]
        shares = [1 - a / b for a, b in zip(inside, data["seconds"])][WARM_UP_STEPS:]
        data["share_outside_phases"] = statistics.median(shares)
    return data


def compare(rows: list[Row], goal: float) -> Row:
    """Best against best."""
    speeds = {
        side: [
            row["samples_per_second"]
            for row in rows
            if row["case"].startswith(side) and "median" in row
        ]
        for side in ("trl", "slime")
    }
    missing = [side for side, found in speeds.items() if not found]
    if missing:
        return {"skipped": f"no result of {' and '.join(missing)}"}
    best = {side: max(found) for side, found in speeds.items()}
    ratio = best["slime"] / best["trl"]
    return {**best, "goals": [at_least("samples/s, slime ÷ TRL, best against best", ratio, goal)]}


def parse_args(argv: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--model", required=True, help="Hugging Face directory of SmolLM2-135M-Instruct"
    )
    parser.add_argument("--steps", type=int, default=8)
    parser.add_argument("--prompts", type=int, default=4, help="a step; 8 samples each")
    parser.add_argument("--new-tokens", type=int, default=_SHORT, help="of a sample at most")
    parser.add_argument("--dtypes", nargs="+", default=["float32", "bfloat16"])
    parser.add_argument("--sides", nargs="+", choices=["trl", _CONTINUOUS, "slime"])
    parser.add_argument("--slime-flags", default="", help="more flags for our side, in one word")
    parser.add_argument("--timeout", type=float, default=1800, help="seconds for one side")
    add_arguments(parser)
    parser.add_argument("--side", help=argparse.SUPPRESS)
    parser.add_argument("--dtype", help=argparse.SUPPRESS)
    parser.add_argument("--answer", help=argparse.SUPPRESS)
    options = parser.parse_args(argv)
    options.model = os.path.abspath(options.model)
    return options


def main(argv: list[str] | None = None) -> int:
    options = parse_args(argv)
    if options.side:
        (run_slime if options.side == "slime" else run_trl)(options)
        return 0
    report = Report("one RL step", options)
    for dtype in options.dtypes:
        for side in options.sides or ["slime", "trl", *([_CONTINUOUS] if num_gpus() else [])]:
            report.case(f"{side} {dtype}", partial(measure, side, dtype, options))
    report.case("ratio", lambda: compare(report.rows, 3.0 if num_gpus() else 4.0))
    return report.finish()


if __name__ == "__main__":
    sys.exit(main())
