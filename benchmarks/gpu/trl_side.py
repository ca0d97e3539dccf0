"""TRL's side of `peer_trl`, in a process of its own: python -P trl_side.py SETTINGS

SETTINGS is a JSON file with "config" (arguments of GRPOConfig), "model" (a folder), "prompts"
(texts) and "metrics" (a file, to which each step appends one JSON line: seconds by phase, when it
ended, mean length, GPU memory). With --check it only builds the configuration. This file needs TRL
and nothing of slime, so it runs in an environment without it.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections import defaultdict
from pathlib import Path
from typing import Any

# what TRL calls a part of a step: what it is called here
PHASES = {
    "vLLM.generate": "generate",
    "sync_weights": "push",
    "_get_per_token_logps_and_entropies": "old_log_probs",
    "_calculate_rewards": "rewards",
    "_prepare_inputs": "prepare",
}
# parts of "prepare", in this order
PREPARED = ("push", "generate", "rewards", "old_log_probs")

seconds: dict[str, float] = defaultdict(float)


class Phase:
    """TRL's clock (`ProfilingContext`), which tells only wandb, MLflow and Trackio.

    It waits for the GPU around parts that happen once per step, and leaves out log-probs computed
    for the loss, once per micro-batch: they count as training.
    """

    def __init__(self, name: str, *_: Any, **__: Any) -> None:
        self.name = PHASES.get(name.partition(".")[2], "")

    def __enter__(self) -> None:
        import torch

        if self.name == "old_log_probs" and torch.is_grad_enabled():
            self.name = ""
        if self.name not in ("", "prepare"):
            await_gpu()
        self.start = time.perf_counter()

    def __exit__(self, *_: Any) -> None:
        if self.name not in ("", "prepare"):
            await_gpu()
        if self.name:
            seconds[self.name] += time.perf_counter() - self.start


def await_gpu() -> None:
    import torch

    if torch.cuda.is_available():
        torch.cuda.synchronize()


def phases(found: dict[str, float], step: float) -> dict[str, float]:
    """Seconds of a step by phase; "train" is what is not spent on making its batch, "other" what is
    spent on that beside the named parts."""
    named = {name: found.get(name, 0.0) for name in PREPARED}
    prepare = found.get("prepare", 0.0)
    return {**named, "other": prepare - sum(named.values()), "train": step - prepare, "step": step}


def run(settings: dict[str, Any], check: bool) -> None:
    import torch
    from transformers import AutoTokenizer, TrainerCallback
    from trl import GRPOConfig, GRPOTrainer
    from trl.extras import profiling

    config = GRPOConfig(**settings["config"])
    if check:
        print(config)
        return
    from datasets import Dataset

    vars(profiling)["ProfilingContext"] = Phase
    lengths: list[int] = []

    def reward(completion_ids: list[list[int]], **_: Any) -> list[float | None]:
        lengths.extend(map(len, completion_ids))
        # the same for the same response: random weights have nothing better to be judged by
        return [float(sum(ids) % 2) for ids in completion_ids]

    class Clock(TrainerCallback):
        def on_step_begin(self, *_: Any, **__: Any) -> None:
            seconds.clear()
            lengths.clear()
            self.start = time.perf_counter()

        def on_step_end(self, *_: Any, **__: Any) -> None:
            await_gpu()
            row = {
                "seconds": phases(seconds, time.perf_counter() - self.start),
                "ended": time.monotonic(),
                "length": statistics.mean(lengths),
                "memory_gb": torch.cuda.max_memory_reserved() / 2**30
                if torch.cuda.is_available()
                else 0.0,
            }
            with open(settings["metrics"], "a", encoding="utf-8") as file:
                file.write(json.dumps(row) + "\n")

    GRPOTrainer(
        model=settings["model"],
        reward_funcs=reward,
        args=config,
        train_dataset=Dataset.from_list([{"prompt": text} for text in settings["prompts"]]),
        processing_class=AutoTokenizer.from_pretrained(settings["model"]),
        callbacks=[Clock()],
    ).train()


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("settings", type=Path)
    parser.add_argument("--check", action="store_true")
    given = parser.parse_args()
    run(json.loads(given.settings.read_text()), given.check)
