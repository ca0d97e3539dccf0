"""Turns per second of agents' endpoints: many agents at once, in front of an engine that answers at
once.

    python -m benchmarks.agents                          # chat completions
    python -m benchmarks.agents --api messages --stream --agents 128

Two processes: one has the endpoints, as a rollout actor has them, with tokenizer, chat template and
the rollout's client; the other plays the engine (tokens of its own, no model) and the agents, which
send their whole history each turn, as agents do. What a turn costs the rollout's process in CPU
time is said beside: other programs on the machine change it less. Each agent's sample is checked at
the end.
"""

from __future__ import annotations

import argparse
import asyncio
import multiprocessing
import random
import time
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import aiohttp
import orjson
from aiohttp import web

from benchmarks.bpe_tokenizers import bpe_tokenizer
from slime.agents.endpoint import AgentEndpoint, agent_endpoint
from slime.engines.client import RolloutClient
from slime.prompts.tokenizer import end_token_ids, load_tokenizer
from slime.rollout.generate import GenerateState, bind_state, sampling_params
from slime.samples.types import Sample

PATHS = {"chat": "/chat/completions", "responses": "/responses", "messages": "/messages"}


# -- the other process: engine and agents ----------------------------------------------------------


async def start_engine(new_tokens: int, vocabulary: int, end: int) -> str:
    """An engine that answers at once; its address."""
    tokens = [random.Random(0).randrange(vocabulary // 2) for _ in range(new_tokens - 1)] + [end]
    meta: dict[str, Any] = {
        "finish_reason": {"type": "stop"},
        "weight_version": "1",
        "completion_tokens": new_tokens,
    }
    meta["output_token_logprobs"] = [[-0.5, token, None] for token in tokens]
    answer = orjson.dumps({"text": "", "output_ids": tokens, "meta_info": meta})

    async def generate(request: web.Request) -> web.Response:
        await request.read()
        return web.Response(body=answer, content_type="application/json")

    app = web.Application(client_max_size=1 << 30)
    app.router.add_post("/generate", generate)
    runner = web.AppRunner(app, access_log=None)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    return f"http://127.0.0.1:{runner.addresses[0][1]}"


async def agent(http: aiohttp.ClientSession, url: str, key: str, args: argparse.Namespace) -> None:
    history: list[dict[str, Any]] = [{"role": "user", "content": "What is to be done? " * 20}]
    for turn in range(args.turns):
        body: dict[str, Any] = {"model": "m", "stream": args.stream, "max_tokens": 4096}
        body["input" if args.api == "responses" else "messages"] = history
        headers = {"Authorization": f"Bearer {key}", "Content-Type": "application/json"}
        async with http.post(
            url + PATHS[args.api], data=orjson.dumps(body), headers=headers
        ) as response:
            raw = await response.read()
            assert response.status == 200, raw[:500]
        history = [
            *history,
            *said(raw, args),
            {"role": "user", "content": f"{turn}: that is done, what next? " * 5},
        ]


def said(raw: bytes, args: argparse.Namespace) -> list[dict[str, Any]]:
    """The answer, as it goes back."""
    if not args.stream:
        body = orjson.loads(raw)
    else:
        events = [
            orjson.loads(line[6:]) for line in raw.splitlines() if line.startswith(b"data: {")
        ]
        if args.api == "responses":
            body = events[-1]["response"]
        elif args.api == "messages":
            text = "".join(
                event["delta"].get("text", "")
                for event in events
                if event["type"] == "content_block_delta"
            )
            return [{"role": "assistant", "content": text}]
        else:
            deltas = [choice["delta"] for event in events for choice in event["choices"]]
            return [
                {
                    "role": "assistant",
                    "content": "".join(delta.get("content") or "" for delta in deltas),
                }
            ]
    if args.api == "chat":
        return [body["choices"][0]["message"]]
    if args.api == "responses":
        return body["output"]
    return [{"role": "assistant", "content": body["content"]}]


def play(pipe: Connection, args: argparse.Namespace, vocabulary: int, end: int) -> None:
    async def run() -> None:
        pipe.send(await start_engine(args.new_tokens, vocabulary, end))
        while given := await asyncio.to_thread(pipe.recv):
            async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)) as http:
                began = time.perf_counter()
                cpu = time.process_time()
                await asyncio.gather(*(agent(http, url, key, args) for url, key in given))
                pipe.send((time.perf_counter() - began, time.process_time() - cpu))

    asyncio.run(run())


# -- this process: the endpoints -------------------------------------------------------------------


async def one_round(
    state: GenerateState, pipe: Connection, args: argparse.Namespace
) -> tuple[float, float, float]:
    """Seconds, and CPU seconds of this process and of the other one."""
    params = state.params_for(Sample())
    drawn = [Sample(index=index, session_id=f"s{index}") for index in range(args.agents)]
    endpoints = [agent_endpoint(state.args, sample, params) for sample in drawn]
    for endpoint in endpoints:
        await endpoint.__aenter__()
    cpu = time.process_time()
    pipe.send([(endpoint.base_url, endpoint.api_key) for endpoint in endpoints])
    seconds, others = await asyncio.to_thread(pipe.recv)
    cpu = time.process_time() - cpu
    for endpoint in endpoints:
        await endpoint.__aexit__(None, None, None)
        check(endpoint, args)
    return seconds, cpu, others


def check(endpoint: AgentEndpoint, args: argparse.Namespace) -> None:
    (sample,) = endpoint.samples()
    sample.validate()
    assert sum(sample.loss_mask or []) == args.turns * args.new_tokens, (
        "each sampled token is trained once"
    )


async def measure(args: argparse.Namespace) -> None:
    tokenizer: Any = load_tokenizer(str(args.model)) if args.model else bpe_tokenizer()
    ends = end_token_ids(tokenizer, str(args.model or ""))
    here, there = multiprocessing.Pipe()
    context = multiprocessing.get_context("spawn")
    other = context.Process(
        target=play, args=(there, args, len(tokenizer), tokenizer.eos_token_id), daemon=True
    )
    other.start()
    url = await asyncio.to_thread(here.recv)
    flags: dict[str, Any] = {"agent_host": None, "agent_port": 0, "listen_on_network": False}
    flags |= {"apply_chat_template_kwargs": {}, "hf_checkpoint": args.model and str(args.model)}
    async with RolloutClient(url, max_concurrency=args.agents) as client:
        given = sampling_params(temperature=1.0, max_new_tokens=4096)
        state = GenerateState(
            argparse.Namespace(**flags), tokenizer, client, given, end_tokens=ends
        )
        bind_state(state)
        turns = args.agents * args.turns
        for number in range(args.repeats + 1):
            seconds, cpu, others = await one_round(state, here, args)
            print(
                f"{'warm-up' if number == 0 else f'round {number}':8} {turns / seconds:6.0f} "
                f"turns/s, CPU time a turn: {1000 * cpu / turns:.2f} ms in the rollout's process, "
                f"{1000 * others / turns:.2f} ms in the engine's and the agents'",
                flush=True,
            )
        here.send([])


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--model", type=Path, help="directory of another tokenizer than one of 376 tokens"
    )
    parser.add_argument("--api", choices=tuple(PATHS), default="chat")
    parser.add_argument("--stream", action="store_true")
    parser.add_argument("--agents", type=int, default=64)
    parser.add_argument("--turns", type=int, default=20)
    parser.add_argument("--new-tokens", type=int, default=64)
    parser.add_argument("--repeats", type=int, default=3)
    asyncio.run(measure(parser.parse_args()))


if __name__ == "__main__":
    main()
