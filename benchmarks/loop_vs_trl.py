"""One RL step of SmolLM2-135M-Instruct on CPU: this loop against TRL's GRPOTrainer, on the same work.

    pip install --no-deps "trl==1.16.*" accelerate
    python benchmarks/loop_vs_trl.py --model MODEL_DIR --steps 8

The work: 4 prompts × 8 samples a step, "What is i + j? Answer with just the number." for i, j < 10, at most 64 new
tokens, temperature 1, no KL, no gradient checkpointing, AdamW, one optimizer step per rollout. Each side runs in
float32 and in bfloat16, in a process of its own, one after the other; the first two steps of each are warm-up and
the median of the others counts. Both see the same prompts in an order of their own; response lengths are reported,
since they decide how much work a step is. Prints a table and JSON; the ratio is best against best.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

WARM_UP_STEPS = 2


def questions() -> list[tuple[str, str]]:
    return [(f"What is {i} + {j}? Answer with just the number.", str(i + j)) for i in range(10) for j in range(10)]


# -- TRL -------------------------------------------------------------------------------------------------


def run_trl(model: str, dtype: str, steps: int, out: str) -> None:
    import time
    from typing import Any

    import torch
    from datasets import Dataset
    from transformers import TrainerCallback
    from trl import GRPOConfig, GRPOTrainer

    rows = [{"prompt": [{"role": "user", "content": text}], "answer": answer} for text, answer in questions()]
    seconds: list[float] = []
    lengths: list[float] = []

    def reward(completions: list[Any], answer: list[str], completion_ids: list[list[int]], **_: Any) -> list[float]:
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
        use_cpu=True,
        bf16=False,  # bfloat16 means weights in bfloat16: faster here than autocast, which converts them each time
        model_init_kwargs={"dtype": dtype},
        per_device_train_batch_size=32,
        num_generations=8,
        max_completion_length=64,
        temperature=1.0,
        beta=0.0,
        gradient_checkpointing=False,
        learning_rate=1e-6,
        max_steps=steps,
        report_to=[],
        save_strategy="no",
        logging_steps=1,
        seed=0,
    )
    trainer = GRPOTrainer(
        model=model, reward_funcs=reward, args=config, train_dataset=Dataset.from_list(rows), callbacks=[Clock()]
    )
    trainer.train()
    Path(out).write_text(json.dumps({"seconds": seconds, "lengths": lengths}))


# -- slime -----------------------------------------------------------------------------------------------


def run_slime(model: str, dtype: str, steps: int, out: str, extra: list[str]) -> None:
    from slime.drivers import train

    folder = Path(tempfile.mkdtemp(prefix="loop_vs_trl-"))
    data = folder / "questions.jsonl"
    with open(data, "w") as file:
        for text, answer in questions():
            file.write(json.dumps({"prompt": [{"role": "user", "content": text}], "label": answer}) + "\n")
    precision = (
        ["--bf16", "--embedded-dtype", "bfloat16"] if dtype == "bfloat16" else ["--fp32", "--embedded-dtype", "float32"]
    )
    train.main(
        ["--hf-checkpoint", model, "--prompt-data", str(data), "--input-key", "prompt", "--label-key", "label"]
        + ["--apply-chat-template", "--rollout-shuffle", "--colocate", *precision]
        + ["--custom-rm-path", "benchmarks.loop_vs_trl.exact_match"]
        + ["--rollout-batch-size", "4", "--n-samples-per-prompt", "8", "--num-steps-per-rollout", "1"]
        + ["--rollout-max-response-len", "64", "--rollout-max-context-len", "256", "--rollout-temperature", "1.0"]
        + ["--rollout-skip-special-tokens"]
        + ["--num-rollout", str(steps), "--lr", "1e-6", "--lr-decay-style", "constant", "--clip-grad", "1.0"]
        + ["--use-dynamic-batch-size", "--max-tokens-per-gpu", "8192"]
        + ["--output-dir", str(folder), "--run-name", "run", *extra]
    )
    rows = [json.loads(line) for line in (folder / "run" / "metrics.jsonl").read_text().splitlines()]
    steps_done = [row for row in rows if "perf/step_time" in row]
    phases = ("rollout_time", "log_probs_time", "actor_train_time")
    Path(out).write_text(
        json.dumps(
            {
                "seconds": [row["perf/step_time"] for row in steps_done],
                "lengths": [row["rollout/response_len/mean"] for row in steps_done],
                "phases": {name: [row.get(f"perf/{name}", 0.0) for row in steps_done] for name in phases},
                "rows": steps_done,
            }
        )
    )


def exact_match(args: object, sample: object, **_: object) -> float:
    return float(sample.response.strip() == sample.label)  # type: ignore[attr-defined]


# -- both ------------------------------------------------------------------------------------------------


def measure(side: str, dtype: str, options: argparse.Namespace) -> dict[str, object]:
    with tempfile.NamedTemporaryFile(suffix=".json") as result:
        command = [sys.executable, "-m", "benchmarks.loop_vs_trl", "--model", options.model, "--side", side]
        command += ["--dtype", dtype, "--steps", str(options.steps), "--out", result.name]
        here = Path(__file__).resolve().parents[1]
        log = subprocess.run(command, cwd=here, capture_output=True, text=True, timeout=options.timeout)
        if log.returncode:
            sys.exit(f"{side} {dtype} failed:\n{log.stdout[-2000:]}\n{log.stderr[-4000:]}")
        data = json.loads(Path(result.name).read_text())
    steady = data["seconds"][WARM_UP_STEPS:]
    data["median"] = statistics.median(steady)
    data["mean_length"] = statistics.mean(data["lengths"][WARM_UP_STEPS:])
    print(
        f"{side:6} {dtype:9} median {data['median']:7.2f} s a step over {len(steady)} steps"
        f" ({min(steady):.2f} to {max(steady):.2f}), mean response {data['mean_length']:.1f} tokens",
        flush=True,
    )
    return data


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True, help="Hugging Face directory of SmolLM2-135M-Instruct")
    parser.add_argument("--steps", type=int, default=8)
    parser.add_argument("--dtypes", nargs="+", default=["float32", "bfloat16"])
    parser.add_argument("--timeout", type=float, default=1800)
    parser.add_argument("--json", help="write all numbers there")
    parser.add_argument("--side", choices=["trl", "slime"], help=argparse.SUPPRESS)
    parser.add_argument("--dtype", help=argparse.SUPPRESS)
    parser.add_argument("--out", help=argparse.SUPPRESS)
    options, extra = parser.parse_known_args()
    options.model = os.path.abspath(options.model)
    if options.side == "trl":
        run_trl(options.model, options.dtype, options.steps, options.out)
        return
    if options.side == "slime":
        run_slime(options.model, options.dtype, options.steps, options.out, extra)
        return
    results = {
        f"{side} {dtype}": measure(side, dtype, options) for dtype in options.dtypes for side in ("trl", "slime")
    }
    best = {
        side: min(float(r["median"]) for k, r in results.items() if k.startswith(side)) for side in ("trl", "slime")
    }  # type: ignore[arg-type]
    ratio = best["trl"] / best["slime"]
    print(f"best against best: {best['trl']:.2f} s / {best['slime']:.2f} s = {ratio:.2f} times faster")
    for key, data in results.items():
        if "phases" in data:
            inside = [sum(values[i] for values in data["phases"].values()) for i in range(len(data["seconds"]))]  # type: ignore[attr-defined,arg-type]
            share = [1 - a / b for a, b in zip(inside, data["seconds"])][WARM_UP_STEPS:]  # type: ignore[call-overload]
            print(f"{key}: outside generation, log-probs and training: median {statistics.median(share):.1%} of a step")
    if options.json:
        Path(options.json).write_text(json.dumps(results, indent=1))


if __name__ == "__main__":
    main()
