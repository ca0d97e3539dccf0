"""Agents' endpoints in front of a real engine: exact tokens, requests that end with their client,
and what it costs.

    python -m benchmarks.gpu.agents --model models/smollm2 --engine-flags "--attention-backend fa3"
    # dry
    python -m benchmarks.gpu.agents --engine embedded --shape tiny --turns 4 --agents 2 \\
        --new-tokens 8

The clients are the packages openai and anthropic as they are; the way is a run's: endpoint, router,
engine. What the endpoint asked the engine and what came back is written down beside; the samples
must hold exactly that, and the engine, asked again for the whole of a sample, must find the
log-probs that were kept.
"""

from __future__ import annotations

import argparse
import asyncio
import statistics
import sys
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from benchmarks.agent_clients import anthropic_of, openai_of, vanish
from benchmarks.gpu.generation import empty_cache
from benchmarks.gpu.report import Report, Row, at_least, at_most
from benchmarks.gpu.setting import engine, make_model, new_parser, router, workspace
from slime.agents.endpoint import AgentEndpoint, agent_endpoint
from slime.agents.server import close_server
from slime.config import make_config
from slime.engines.api import EngineClient, GenerateResult
from slime.engines.client import RolloutClient
from slime.prompts.tokenizer import end_token_ids, load_tokenizer
from slime.rollout.generate import GenerateState, bind_state, sampling_params
from slime.samples.types import Sample

_TEMPLATE = (
    "{% for m in messages %}<|{{ m.role }}|>{{ m.content }}\n{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
#: One client turn: history in, the answer as it goes back out.
Ask = Callable[[AgentEndpoint, list[Any], int], Awaitable[Any]]


def main(argv: list[str] | None = None) -> int:
    parser = new_parser(__doc__)
    parser.add_argument(
        "--turns", type=int, default=100, help="of an agent whose tokens are compared"
    )
    parser.add_argument("--agents", type=int, default=64, help="at once, for the speed")
    parser.add_argument("--new-tokens", type=int, default=48)
    parser.add_argument("--context", type=int, default=8192)
    args = parser.parse_args(argv)
    report = Report("agents", args)
    with workspace() as folder:
        model = make_model(args, folder)
        config = make_config(
            hf_checkpoint=str(model),
            rollout_engine=args.engine,
            actor_num_gpus_per_node=1,
            colocate=True,
            rollout_batch_size=1,
            num_rollout=1,
            rollout_max_context_len=args.context,
        )
        with engine(args, config, model, folder) as direct, router(config, folder, direct) as url:
            Bench(args, report, model, url, direct).cases()
    return report.finish()


# -- clients ---------------------------------------------------------------------------------------


async def chat(endpoint: AgentEndpoint, history: list[Any], limit: int) -> Any:
    async with openai_of(endpoint) as client:
        answer = await client.chat.completions.create(model="m", messages=history, max_tokens=limit)
        return said(answer.choices[0].message.content or "")


async def chat_streamed(endpoint: AgentEndpoint, history: list[Any], limit: int) -> Any:
    async with openai_of(endpoint) as client:
        pieces = []
        stream = await client.chat.completions.create(
            model="m", messages=history, max_tokens=limit, stream=True
        )
        async for event in stream:
            pieces += [choice.delta.content or "" for choice in event.choices]
        return said("".join(pieces))


async def responses(endpoint: AgentEndpoint, history: list[Any], limit: int) -> Any:
    async with openai_of(endpoint) as client:
        answer = await client.responses.create(model="m", input=history, max_output_tokens=limit)
        return said(answer.output_text)


async def messages(endpoint: AgentEndpoint, history: list[Any], limit: int) -> Any:
    async with anthropic_of(endpoint) as client:
        async with client.messages.stream(model="m", messages=history, max_tokens=limit) as stream:
            answer: Any = await stream.get_final_message()
        return said("".join(block.text for block in answer.content))


def said(text: str) -> dict[str, str]:
    return {"role": "assistant", "content": text}


CLIENTS: dict[str, Ask] = {
    "openai, chat": chat,
    "openai, chat, streamed": chat_streamed,
    "openai, responses": responses,
    "anthropic, streamed": messages,
}


async def talk(endpoint: AgentEndpoint, ask: Ask, turns: int, limit: int) -> None:
    """One agent, which sends its whole history each turn."""
    history: list[Any] = [
        {"role": "user", "content": "Tell me a tale of the sea, a piece at a time."}
    ]
    for turn in range(turns):
        answer = await ask(endpoint, history, limit)
        history += [
            answer,
            {"role": "user", "content": f"Go on with piece {turn + 2}: what came next?"},
        ]


Tape = list[tuple[list[int], GenerateResult]]


class Taped(RolloutClient):
    """Writes down what was asked and answered.

    Attributes:
        tape: by session, prompt and result of each turn.
    """

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.tape: dict[str, Tape] = {}

    async def generate(
        self, input_ids: list[int], *args: Any, routing_key: str = "", **options: Any
    ) -> GenerateResult:
        result = await super().generate(input_ids, *args, routing_key=routing_key, **options)
        self.tape.setdefault(routing_key, []).append((list(input_ids), result))
        return result


class Bench:
    def __init__(
        self, args: argparse.Namespace, report: Report, model: Path, url: str, direct: str
    ) -> None:
        self.args = args
        self.report = report
        self.model = model
        self.url = url
        self.direct = direct
        self.tokenizer: Any = load_tokenizer(str(model))
        if not self.tokenizer.chat_template:
            self.tokenizer.chat_template = _TEMPLATE

    def cases(self) -> None:
        """Each on a loop of its own, with the endpoints' server of it."""
        for name, ask in CLIENTS.items():
            self._case(f"{name}: tokens", self.compare(ask))
        self._case("a client that vanishes", self.vanish())
        self._case("speed", self.speed())

    def _case(self, name: str, measured: Coroutine[Any, Any, Row]) -> None:
        async def served() -> Row:
            try:
                return await measured
            finally:
                await close_server()

        self.report.case(name, lambda: asyncio.run(served()))

    @asynccontextmanager
    async def _state(self) -> AsyncIterator[tuple[GenerateState, Taped]]:
        flags: dict[str, Any] = {"agent_host": None, "agent_port": 0, "listen_on_network": False}
        flags |= {"apply_chat_template_kwargs": {}, "hf_checkpoint": str(self.model)}
        ends = end_token_ids(self.tokenizer, str(self.model))
        client = Taped(self.url, max_concurrency=2 * self.args.agents)
        async with client:
            given = sampling_params(temperature=1.0, max_new_tokens=self.args.new_tokens)
            state = GenerateState(
                argparse.Namespace(**flags), self.tokenizer, client, given, end_tokens=ends
            )
            bind_state(state)
            yield state, client

    async def compare(self, ask: Ask) -> Row:
        """One conversation: samples against the tape, and against the engine's own reading of
        them."""
        async with self._state() as (state, client):
            began = time.perf_counter()
            asked = Sample(index=0, session_id="the only one")
            async with agent_endpoint(state.args, asked, state.params_for(asked)) as endpoint:
                await talk(endpoint, ask, self.args.turns, self.args.new_tokens)
            seconds = time.perf_counter() - began
            samples = endpoint.samples()
            [sample] = samples
            sample.validate()
            [tape] = client.tape.values()
            row = against_tape(sample, tape)
            row |= await self._read_again(sample)
        row |= {"turns": len(tape), "seconds": seconds, "samples": len(samples)}
        row["goals"] = [
            at_most("tokens that differ from the engine's", row["wrong_tokens"], 0),
            at_most("log-probs that differ from the engine's", row["wrong_log_probs"], 0),
            at_most("turns whose prompt was tokenised anew", row["prompts_not_continued"], 0),
            at_most("mean difference when read again, nats", row["read_again_mean"], 0.05),
        ]
        return row

    async def _read_again(self, sample: Sample) -> Row:
        """Log-probs of a sample's trained tokens when the engine reads all of it at once."""
        async with EngineClient(self.direct) as asked:
            answer = await asked.post("/generate", {
                "input_ids": sample.tokens, "return_logprob": True, "logprob_start_len": 0,
                "sampling_params": {"temperature": 1.0, "max_new_tokens": 1},
            }, timeout=300.0)  # fmt: skip
        read = [entry[0] for entry in answer["meta_info"]["input_token_logprobs"]][
            -sample.response_length :
        ]
        assert sample.rollout_log_probs is not None and sample.loss_mask is not None
        apart = [
            abs(ours - theirs)
            for ours, theirs, counts in zip(
                sample.rollout_log_probs, read, sample.loss_mask, strict=True
            )
            if counts
        ]
        return {"read_again_mean": statistics.fmean(apart), "read_again_most": max(apart)}

    async def vanish(self) -> Row:
        """Seconds from a client's end to that of its request in the engine."""
        async with self._state() as (state, _):
            params = state.params_for(Sample(index=0)) | {
                "ignore_eos": True,
                "max_new_tokens": self.args.context - 300,
            }
            async with agent_endpoint(state.args, Sample(index=0), params) as endpoint:
                seconds = await vanish(endpoint, self.direct)
                turns = len(endpoint.turns)
        return {
            "seconds": seconds,
            "goals": [at_most("answers that were generated to their end", turns, 0)],
        }

    async def speed(self) -> Row:
        """Many agents through endpoints, and the same prompts straight to the router, each after
        the other alike."""
        import aiohttp

        turns = max(2, self.args.turns // 10)
        connector = aiohttp.TCPConnector(limit=0)
        async with (
            self._state() as (state, client),
            aiohttp.ClientSession(connector=connector) as http,
        ):
            seconds: dict[str, list[float]] = {"agents": [], "direct": []}
            for _ in range(3):  # the first one warms up
                client.tape.clear()
                await empty_cache(http, self.direct)
                began = time.perf_counter()
                await asyncio.gather(
                    *(self._one_agent(state, http, turns, n) for n in range(self.args.agents))
                )
                seconds["agents"].append(time.perf_counter() - began)
                tapes = list(client.tape.values())
                await empty_cache(http, self.direct)
                began = time.perf_counter()
                await asyncio.gather(*(self._replay(client, tape) for tape in tapes))
                seconds["direct"].append(time.perf_counter() - began)
        asked = sum(len(tape) for tape in tapes)
        tokens = sum(len(result.token_ids) for tape in tapes for _, result in tape)
        through, straight = (min(seconds[name][1:]) for name in ("agents", "direct"))
        return {
            "agents": self.args.agents,
            "turns": turns,
            "raw": seconds,
            "turns_per_second": asked / through,
            "tokens_per_second": tokens / through,
            "goals": [
                at_least("speed, ÷ the same prompts without endpoints", straight / through, 0.9)
            ],
        }

    async def _one_agent(self, state: GenerateState, http: Any, turns: int, number: int) -> None:
        """With a bare client: a hundred of OpenAI's in the process of the endpoints would be what
        is measured."""

        async def ask(endpoint: AgentEndpoint, history: list[Any], limit: int) -> Any:
            body = {"model": "m", "messages": history, "max_tokens": limit}
            headers = {"Authorization": f"Bearer {endpoint.api_key}"}
            async with http.post(
                f"{endpoint.base_url}/chat/completions", json=body, headers=headers
            ) as answer:
                return (await answer.json())["choices"][0]["message"]

        sample = Sample(index=number, session_id=f"agent {number}")
        params = state.params_for(sample) | {"ignore_eos": True}
        async with agent_endpoint(state.args, sample, params) as endpoint:
            await talk(endpoint, ask, turns, self.args.new_tokens)

    async def _replay(self, client: Taped, tape: Tape) -> None:
        for prompt, result in tape:
            await client.generate(prompt, {
                "temperature": 1.0, "max_new_tokens": len(result.token_ids), "ignore_eos": True,
            })  # fmt: skip


def against_tape(sample: Sample, tape: Tape) -> Row:
    """A sample of one conversation holds each turn's prompt as it was asked, and its answer as it
    came."""
    wrong = kept = continued = 0
    at = sample.prompt_length
    assert sample.rollout_log_probs is not None and sample.loss_mask is not None
    trained = list(zip(sample.tokens[at:], sample.rollout_log_probs, sample.loss_mask, strict=True))
    covered = 0
    for prompt, result in tape:
        continued += sample.tokens[: len(prompt)] == prompt
        place = slice(len(prompt) - at, len(prompt) - at + len(result.token_ids))
        covered += len(result.token_ids)
        for (token, log_prob, counts), theirs, said in zip(
            trained[place], result.token_ids, result.log_probs, strict=True
        ):
            wrong += token != theirs or not counts
            kept += log_prob == said
    trains = sum(sample.loss_mask)
    return {
        "tokens": covered,
        "wrong_tokens": wrong + abs(trains - covered),
        "wrong_log_probs": covered - kept,
        "prompts_not_continued": len(tape) - continued,
    }


if __name__ == "__main__":
    sys.exit(main())
