"""Generation through the router and our client, against the same SGLang server driven directly with
the same payload.

    python -m benchmarks.gpu.generation --in-flight 256 1024 --new-tokens 512 --out generation.json
    # dry
    python -m benchmarks.gpu.generation --engine embedded --shape tiny --in-flight 4 \\
        --new-tokens 8 --rounds 1

Both sides send ``input_ids`` with ``return_logprob`` and keep ``--in-flight`` requests open, twice
that many in all; they take turns, so that a slow minute of the host meets both. Tokens per second:
those of the answers over wall time.
"""

from __future__ import annotations

import argparse
import asyncio
import random
import sys
import time
from collections.abc import Awaitable, Callable
from contextlib import ExitStack
from functools import partial
from typing import Any

import aiohttp

from benchmarks.gpu.report import Report, Row, at_least
from benchmarks.gpu.setting import engine, make_model, median, new_parser, router, workspace
from slime.config import make_config

Send = Callable[[list[int]], Awaitable[int]]


def parse_args(argv: list[str] | None = None) -> argparse.Namespace:
    parser = new_parser(__doc__)
    parser.add_argument("--in-flight", type=int, nargs="+", default=[256, 1024])
    parser.add_argument("--prompt-tokens", type=int, default=128)
    parser.add_argument("--new-tokens", type=int, default=512)
    return parser.parse_args(argv)


def main(argv: list[str] | None = None) -> int:
    args = parse_args(argv)
    report = Report("generation", args)
    with workspace() as folder, ExitStack() as stack:
        servers: list[str] = []

        def start() -> None:
            model = make_model(args, folder)
            flags: dict[str, Any] = {
                "rollout_engine": args.engine,
                "hf_checkpoint": str(model),
                "rollout_batch_size": 1,
            }
            if args.engine == "embedded":
                flags["embedded_max_slots"] = max(args.in_flight)
            config = make_config(**flags, num_rollout=1)
            servers.append(stack.enter_context(engine(args, config, model, folder)))
            servers.append(stack.enter_context(router(config, folder, servers[0])))

        report.case("start", start)
        for in_flight in args.in_flight if len(servers) == 2 else []:
            report.case(
                f"{in_flight} in flight", partial(run, args, servers[0], servers[1], in_flight)
            )
    return report.finish()


def run(args: argparse.Namespace, engine_url: str, front: str, in_flight: int) -> Row:
    return asyncio.run(measure(args, engine_url, front, in_flight))


async def measure(args: argparse.Namespace, engine_url: str, front: str, in_flight: int) -> Row:
    from slime.engines.client import RolloutClient

    generator = random.Random(0)
    prompts = [
        [generator.randrange(256) for _ in range(args.prompt_tokens)] for _ in range(2 * in_flight)
    ]
    params = {"temperature": 1.0, "max_new_tokens": args.new_tokens, "ignore_eos": True}
    connector = aiohttp.TCPConnector(limit=0)
    async with (
        aiohttp.ClientSession(connector=connector, timeout=aiohttp.ClientTimeout(3600)) as session,
        RolloutClient(front, max_concurrency=in_flight) as client,
    ):
        directly = straight(session, engine_url, params)

        async def through_us(prompt: list[int]) -> int:
            return len((await client.generate(prompt, params)).token_ids)

        speeds: dict[str, list[float]] = {"direct": [], "slime": []}
        await speed_of(directly, prompts[:in_flight], in_flight)  # warm-up
        for number in range(args.rounds):
            sides = [("direct", directly), ("slime", through_us)]
            for name, send in sides if number % 2 == 0 else reversed(sides):
                await empty_cache(session, engine_url)
                speeds[name].append(await speed_of(send, prompts, in_flight))
    ratio = median(speeds["slime"]) / median(speeds["direct"])
    return {
        "in_flight": in_flight,
        "new_tokens": args.new_tokens,
        "prompt_tokens": args.prompt_tokens,
        "direct_tokens_per_second": median(speeds["direct"]),
        "slime_tokens_per_second": median(speeds["slime"]),
        "raw": speeds,
        "goals": [at_least("tokens/s, slime ÷ direct", ratio, 0.97)],
    }


def straight(
    session: aiohttp.ClientSession, engine_url: str, params: dict[str, Any], **fields: Any
) -> Send:
    """Asks an engine itself, by nothing of ours; how many tokens came back.

    Args:
        fields: more of the request's.
    """

    async def send(prompt: list[int]) -> int:
        body = {"input_ids": prompt, "sampling_params": params, "return_logprob": True, **fields}
        async with session.post(f"{engine_url}/generate", json=body) as answer:
            meta: Any = (await answer.json())["meta_info"]
        return len(meta["output_token_logprobs"])

    return send


async def empty_cache(session: aiohttp.ClientSession, engine_url: str) -> None:
    """The prefix cache would answer prompts that the other side has sent; an engine that ends
    requests says no."""
    for _ in range(50):
        async with session.post(f"{engine_url}/flush_cache") as answer:
            if answer.status == 200:
                return
        await asyncio.sleep(0.2)
    raise RuntimeError("the engine does not empty its cache")


async def speed_of(send: Send, prompts: list[list[int]], in_flight: int) -> float:
    """Tokens per second with ``in_flight`` requests open."""
    gate = asyncio.Semaphore(in_flight)

    async def one(prompt: list[int]) -> int:
        async with gate:
            return await send(prompt)

    started = time.perf_counter()
    counts = await asyncio.gather(*(one(prompt) for prompt in prompts))
    return sum(counts) / (time.perf_counter() - started)


if __name__ == "__main__":
    sys.exit(main())
