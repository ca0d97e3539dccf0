"""Run folders as runs leave them, of any size, without a run: what `slime watch` is tried with."""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import orjson

_SYLLABLES = [a + b for a in "bdfgklmnprstvz" for b in "aeiou"]
_TOOL = (
    "search: the tower was finished in 1889 and is 330 m high, after an antenna was put on its "
    "top in 2022. " * 3
)


def vocabulary(count: int = 600) -> list[str]:
    """Words, the same in every call."""
    chance = random.Random(0)
    return ["".join(chance.choices(_SYLLABLES, k=chance.randint(1, 4))) for _ in range(count)]


def write_lines(path: Path, rows: Sequence[dict[str, Any]]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(b"".join(orjson.dumps(row) + b"\n" for row in rows))


def metrics_row(step: int, steps: int, chance: random.Random) -> dict[str, Any]:
    share = step / steps
    noise = chance.uniform(-0.04, 0.04)
    rollout = 2.1 - share / 2 + 4 * noise
    train = 1.2 + noise
    push = 0.15
    return {
        "step": step,
        "time": 1.7e9 + 4 * step,
        "rollout/raw_reward": 0.2 + 0.6 * (1 - math.exp(-3 * share)) + noise,
        "rollout/response_len/mean": 80 + 90 * share + 60 * noise,
        "rollout/truncated_ratio": max(0.0, 0.06 + noise),
        "rollout/zero_std/ratio": 0.3 - 0.2 * share + noise,
        "rollout/prefix_cache_hit_rate": 0.7 + noise,
        "rollout/avg_cached_tokens_per_sample": 40 + 30 * noise,
        "rollout/engine_load/0": 30 + 40 * noise,
        "rollout/engine_load/1": 28 - 40 * noise,
        "train/entropy_loss": 1.1 - 0.6 * share + noise,
        "train/kl_loss": 0.02 * share + abs(noise) / 50,
        "train/grad_norm": 0.6 + 3 * abs(noise),
        "train/train_rollout_logprob_abs_diff": 0.004 + abs(noise) / 50,
        "train/loss": 0.0,
        "perf/rollout_time": rollout,
        "perf/actor_train_time": train,
        "perf/update_weights_time": push,
        "perf/step_time": rollout + train + push + 0.05,
        "perf/tokens_per_gpu_per_sec": 2100 + 900 * noise,
        "perf/engines_idle_ratio": 0.1 + noise,
    }


def sample_row(
    place: tuple[int, int, int],
    prompt: Any,
    words: Sequence[str],
    chance: random.Random,
    *,
    tokens: bool,
    tool: bool,
) -> dict[str, Any]:
    """A line of a samples file; ``place`` is (rollout, group, index)."""
    rollout, group, index = place
    said = [f" {word}" for word in chance.choices(words, k=chance.randint(12, 40))]
    told = [f" {word}" for word in _TOOL.split()] if tool else []
    text = [*said[:8], *told, *said[8:]]
    half = len(told)
    mask = [[1, 8], [0, half], [1, len(said) - 8]] if tool else [[1, len(said)]]
    log_probs = [round(-chance.expovariate(1.6), 3) for _ in text]
    row = {
        "rollout_id": rollout,
        "group": group,
        "index": index,
        "status": "completed" if chance.random() < 0.93 else "truncated",
        "reward": float(chance.random() < 0.5),
        "prompt": prompt,
        "response": "".join(text),
        "label": words[group % len(words)],
        "prompt_length": 24,
        "response_length": len(text),
        "trained_tokens": len(said),
        "loss_mask": mask,
        "log_probs": {"mean": sum(log_probs) / len(log_probs), "min": min(log_probs)},
        "weight_versions": [str(rollout)],
        "token_spans": [[0, len(text), rollout]],
        "cached_tokens": 16,
        "non_generation_time": 0.4 if tool else 0.0,
        "remove_sample": False,
        "metadata": {"row": group},
    }
    if tool:
        parts = [text[:8], told, text[8 + half :]]
        row["segments"] = [
            {"text": "".join(p), "trained": trained, "version": rollout}
            for p, trained in zip(parts, (True, False, True))
        ]
    return row | ({"tokens": {"text": text, "log_probs": log_probs}} if tokens else {})


def trace_events(samples: int, chance: random.Random) -> list[dict[str, Any]]:
    """A rollout's timeline in Chrome's format."""
    events: list[dict[str, Any]] = [
        {
            "ph": "X",
            "name": name,
            "pid": 1,
            "tid": 1,
            "ts": 1e15 + start * 1e6,
            "dur": length * 1e6,
            "args": {},
        }
        for name, start, length in (
            ("rollout", 0, 2),
            ("train", 2, 1.2),
            ("update_weights", 3.2, 0.15),
        )
    ]
    for i in range(samples):
        start = chance.uniform(0, 0.2)
        queue = chance.uniform(0.01, 0.2)
        decode = chance.uniform(0.3, 1.4)
        events.append(
            {
                "ph": "M",
                "name": "thread_name",
                "pid": 3,
                "tid": i,
                "ts": 0,
                "args": {"name": f"sample {i}"},
            }
        )
        whole = queue + decode
        spans = (
            ("generate_and_rm", 0, whole + 0.1),
            ("generate", 0, whole),
            ("queue", 0, queue),
            ("decode", queue, decode),
            ("reward_model", whole, 0.1),
        )
        for name, at, length in spans:
            ts = 1e15 + (start + at) * 1e6
            events.append(
                {
                    "ph": "X",
                    "name": name,
                    "pid": 3,
                    "tid": i,
                    "ts": ts,
                    "dur": length * 1e6,
                    "args": {},
                }
            )
        counts = {"queue": samples - i, "prefill": 0, "decode": i}
        events.append(
            {
                "ph": "C",
                "name": "requests",
                "pid": 2,
                "tid": 0,
                "ts": 1e15 + 2e6 * i / samples,
                "args": counts,
            }
        )
    return events


def make_run(
    folder: Path,
    rollouts: int = 4,
    groups: int = 4,
    size: int = 4,
    *,
    lr: float = 1e-6,
    tokens: bool = True,
    seed: int = 0,
) -> Path:
    """Write a finished run: metrics, settings, an evaluation, and ``rollouts`` files of ``groups``
    × ``size`` samples. Prompts come back every second rollout; the first sample of each group has
    called a tool.
    """
    chance = random.Random(seed)
    words = vocabulary()
    write_lines(
        folder / "metrics.jsonl",
        [metrics_row(step, rollouts, chance) for step in range(1, rollouts + 1)],
    )
    settings = {
        "optimizer": {"lr": lr},
        "model": {"hf_checkpoint": "models/tiny"},
        "origins": {"lr": "flag"},
    }
    (folder / "config.json").write_bytes(orjson.dumps(settings))
    state = {"state": "finished", "started": 1.7e9, "ended": 1.7e9 + 4 * rollouts}
    (folder / "run.json").write_bytes(orjson.dumps({"name": folder.name, "stages": {"": state}}))
    for rollout in range(rollouts):
        rows = []
        for group in range(groups):
            about = random.Random((rollout % 2) * groups + group)
            prompt = [
                {
                    "role": "user",
                    "content": f"Tell me of {' and '.join(about.choices(words, k=4))}.",
                }
            ]
            for i in range(size):
                place = (rollout, rollout * groups + group, (rollout * groups + group) * size + i)
                rows.append(sample_row(place, prompt, words, chance, tokens=tokens, tool=i == 0))
        write_lines(folder / "samples" / f"rollout_{rollout:06d}.jsonl", rows)
        (folder / "trace").mkdir(exist_ok=True)
        if rollout < 50:
            events = {"traceEvents": trace_events(min(64, groups * size), chance)}
            (folder / "trace" / f"rollout_{rollout:06d}.json").write_bytes(orjson.dumps(events))
    held_out = [
        sample_row((0, 0, i), "What is 2 + 2?", words, chance, tokens=False, tool=False)
        | {"dataset": "sums"}
        for i in range(3)
    ]
    write_lines(folder / "samples" / "eval_start.jsonl", held_out)
    return folder
