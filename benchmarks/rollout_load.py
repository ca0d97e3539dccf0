"""Samples per second of a rollout's own process: generate, reward, filter, conversion, in front of
an instant engine.

    # rounds of 2,000 samples, all in flight at once
    python -m benchmarks.rollout_load
    # 100,000 samples, and what the process holds after each round
    python -m benchmarks.rollout_load --rounds 50 --memory
    # where the time goes
    python -m benchmarks.rollout_load --profile

Two processes: one is the rollout as a run has it (`RolloutLoop` with its client, rewards, filter
and trace, then `to_train_batches`), the other plays router and engine and answers at once, with
tokens of its own. What a sample costs the rollout's process in CPU time is said beside: other
programs on the machine change it less.
"""

from __future__ import annotations

import argparse
import asyncio
import cProfile
import gc
import multiprocessing
import pstats
import statistics
import time
from multiprocessing.connection import Connection
from typing import Any

import orjson
import psutil

from benchmarks.bpe_tokenizers import bpe_tokenizer
from slime.config import make_config
from slime.config.config import Config
from slime.processes.garbage import freeze_gc
from slime.prompts.tokenizer import load_tokenizer
from slime.rollout.generate import generate
from slime.rollout.loop import RolloutLoop
from slime.samples.batch import TrainLayout
from slime.samples.convert import to_train_batches
from slime.samples.types import Group, Sample
from slime.user_code.hooks import DataSource

ME = "benchmarks.rollout_load."


# -- the other process: an engine ------------------------------------------------------------------


class InstantEngine(asyncio.Protocol):
    """Answers each POST with the same tokens, as soon as it is there; whatever else is asked, with
    404."""

    answer = b""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport
        self._buffer = b""

    def data_received(self, data: bytes) -> None:
        self._buffer += data
        while (end := self._buffer.find(b"\r\n\r\n")) >= 0:
            head = self._buffer[:end].lower()
            length = int(head.partition(b"content-length:")[2].split(b"\r\n")[0] or 0)
            if len(self._buffer) < end + 4 + length:
                return
            self._buffer = self._buffer[end + 4 + length :]
            self._transport.write(self.answer if head.startswith(b"post /generate") else _NOTHING)


_NOTHING = (
    b"HTTP/1.1 404 Not Found\r\nContent-Length: 2\r\nContent-Type: application/json\r\n\r\n{}"
)


def play(pipe: Connection, new_tokens: int, end: int) -> None:
    tokens = [100 + i % 200 for i in range(new_tokens - 1)] + [end]
    meta: dict[str, Any] = {
        "finish_reason": {"type": "stop"},
        "weight_version": "1",
        "completion_tokens": new_tokens,
    }
    meta |= {"prompt_tokens": 100, "cached_tokens": 64, "e2e_latency": 0.01}
    meta["output_token_logprobs"] = [
        [-0.5 - 1e-6 * i, token, None] for i, token in enumerate(tokens)
    ]
    body = orjson.dumps(
        {"text": "The answer is 42. " * (new_tokens // 8), "output_ids": tokens, "meta_info": meta}
    )
    head = (
        f"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
    )
    InstantEngine.answer = head.encode() + body

    async def run() -> None:
        server = await asyncio.get_running_loop().create_server(
            InstantEngine, "127.0.0.1", 0, backlog=8192
        )
        pipe.send(server.sockets[0].getsockname()[1])
        await asyncio.to_thread(pipe.recv)

    asyncio.run(run())


# -- this process: the rollout ---------------------------------------------------------------------


class Prompts(DataSource):
    """Prompts that are tokens already, as those of a data set are once it is read."""

    def __init__(self, group_size: int, prompt_tokens: int) -> None:
        self._group_size = group_size
        self._tokens = list(range(10, 10 + prompt_tokens))
        self._drawn = 0

    def get_samples(self, num_samples: int) -> list[list[Sample]]:
        first = self._drawn
        self._drawn = self._drawn + num_samples
        return [self._group(number) for number in range(first, self._drawn)]

    def _group(self, number: int) -> list[Sample]:
        index = number * self._group_size
        return [
            Sample(
                group_index=number,
                index=index + i,
                tokens=list(self._tokens),
                prompt="What is 6 times 7?",
                label="42",
            )
            for i in range(self._group_size)
        ]

    def add_samples(self, samples: list[list[Sample]]) -> None:
        raise AssertionError("nothing is drawn that is not needed")


async def own_generate(args: Any, sample: Sample, sampling_params: dict[str, Any]) -> Sample:
    return await generate(args, sample, sampling_params)


def sync_reward(args: Any, sample: Sample, **kwargs: Any) -> float:
    assert sample.index is not None
    return float(sample.index % 2)


async def async_reward(args: Any, sample: Sample, **kwargs: Any) -> float:
    return sync_reward(args, sample)


def keep_all(args: Any, samples: list[Sample], **kwargs: Any) -> bool:
    return len({sample.reward for sample in samples}) > 1


def configuration(args: argparse.Namespace) -> Config:
    reward = {"built-in": {"rm_type": "f1"}, "sync": {"custom_rm_path": ME + "sync_reward"}}
    flags: dict[str, Any] = reward.get(args.reward, {"custom_rm_path": ME + "async_reward"})
    flags |= {"custom_generate_function_path": ME + "own_generate"} if args.own_generate else {}
    if args.reward != "built-in":  # which gives all samples the same one
        flags |= {"dynamic_sampling_filter_path": ME + "keep_all"}
    return make_config(
        num_rollout=1,
        rollout_batch_size=args.in_flight // args.group_size,
        n_samples_per_prompt=args.group_size,
        rollout_max_response_len=args.new_tokens,
        sglang_server_concurrency=args.in_flight,
        **flags,
    )


async def one_round(loop: RolloutLoop, number: int) -> tuple[float, float, float]:
    """Seconds, CPU seconds of this process, and those of them until conversion."""
    began = time.perf_counter()
    cpu = time.process_time()
    output = await loop.generate_batch(number)
    generated = time.process_time() - cpu
    groups: list[Group] = output.samples
    batches = to_train_batches(groups, loop.config, TrainLayout(), number)
    assert sum(len(batch.tokens) for batch in batches) == sum(
        len(group.samples) for group in groups
    )
    return time.perf_counter() - began, time.process_time() - cpu, generated


async def measure(args: argparse.Namespace) -> None:
    tokenizer: Any = load_tokenizer(args.model) if args.model else bpe_tokenizer()
    here, there = multiprocessing.Pipe()
    context = multiprocessing.get_context("spawn")
    context.Process(
        target=play, args=(there, args.new_tokens, tokenizer.eos_token_id), daemon=True
    ).start()
    url = f"http://127.0.0.1:{await asyncio.to_thread(here.recv)}"
    config = configuration(args)
    process = psutil.Process()
    rates = []
    costs = []
    loop = RolloutLoop(config, tokenizer, Prompts(args.group_size, args.prompt_tokens), url)
    await loop.start()
    freeze_gc(many_samples=True)
    profile = cProfile.Profile()
    for number in range(args.rounds + 1):
        if args.profile and number == 1:
            profile.enable()
        seconds, cpu, generated = await one_round(loop, number)
        name = "warm-up" if number == 0 else f"round {number}"
        memory = ""
        if args.memory:
            gc.collect()
            memory = f", {process.memory_info().rss / 1e6:.1f} MB"
        said = f"{1e3 * cpu / args.in_flight:.3f} ms CPU time a sample"
        said += f" ({1e3 * generated / args.in_flight:.3f} without conversion)"
        print(f"{name:9} {args.in_flight / seconds:6.0f} samples/s, {said}{memory}", flush=True)
        if number:
            rates.append(args.in_flight / seconds)
            costs.append(1e3 * cpu / args.in_flight)
    profile.disable()
    print(
        f"medians of {args.rounds}: {statistics.median(rates):.0f} samples/s, "
        f"{statistics.median(costs):.3f} ms"
    )
    if args.profile:
        pstats.Stats(profile).sort_stats("tottime").print_stats(45)
    here.send(None)
    await loop.close()


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--model", help="directory of another tokenizer than one of 376 tokens")
    add("--in-flight", type=int, default=2000, help="samples of a round, all at once")
    add("--group-size", type=int, default=8)
    add("--prompt-tokens", type=int, default=100)
    add("--new-tokens", type=int, default=64)
    add("--reward", choices=("built-in", "sync", "async"), default="built-in")
    add("--own-generate", action="store_true", help="a generate function of the user's around ours")
    add("--rounds", type=int, default=5)
    add("--memory", action="store_true")
    add("--profile", action="store_true")
    asyncio.run(measure(parser.parse_args()))


if __name__ == "__main__":
    main()
