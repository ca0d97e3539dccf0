"""Agents in front of the embedded engine: the example as it stands, and a client that vanishes,
behind the router."""

from __future__ import annotations

import asyncio
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from benchmarks.agent_clients import vanish
from examples.api_agent import rollout
from examples.api_agent.agent import calculate
from slime.agents.endpoint import agent_endpoint
from slime.agents.server import close_server
from slime.engines.client import RolloutClient
from slime.engines.router import register_workers
from slime.processes.host import free_port
from slime.rollout.generate import GenerateState, bind_state
from slime.rollout.trajectory import GroupRun, GroupRunner
from slime.samples.types import Sample, SampleStatus
from tests.support.agents import TEMPLATE
from tests.support.contract_servers import Server, embedded_argv, logprobs_of, running
from tests.support.embedded_models import EOS, byte_tokenizer, save_tiny_model
from tests.support.fake_rollout import hook_args, make_state

pytestmark = pytest.mark.slow
CONTEXT = 4096


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = save_tiny_model(tmp_path_factory.mktemp("model"))
    config = json.loads((directory / "config.json").read_text()) | {
        "max_position_embeddings": CONTEXT
    }
    (directory / "config.json").write_text(json.dumps(config))
    tokenizer = byte_tokenizer()
    tokenizer.chat_template = TEMPLATE
    tokenizer.save_pretrained(directory)
    return directory


@pytest.fixture(scope="module")
def engine(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    port, log = free_port(), tmp_path_factory.mktemp("engine") / "log"
    flags = ["--dtype", "float32", "--max-context-len", str(CONTEXT), "--device", "cpu"]
    with running(embedded_argv(model, port, *flags), port, log) as server:
        yield server


def state_of(url: str, model: Path, max_new_tokens: int, **flags: Any) -> GenerateState:
    args = hook_args(apply_chat_template_kwargs={}, **flags)
    args.hf_checkpoint = str(model)
    client = RolloutClient(url, max_concurrency=8)
    state = make_state(client, max_new_tokens=max_new_tokens, args=args)
    state.tokenizer = byte_tokenizer()
    state.tokenizer.chat_template, state.end_tokens = TEMPLATE, frozenset({EOS})
    return state


def test_the_example_gives_samples_of_exactly_what_the_engine_said(
    engine: Server, model: Path
) -> None:
    """A process of the agent, through the rollout's own runner; log-probs are those of
    transformers."""

    async def run() -> list[Sample]:
        state = state_of(
            engine.url,
            model,
            20,
            custom_generate_function_path="examples.api_agent.rollout.generate",
        )
        drawn = Sample(index=0, group_index=0, prompt="What is 17 * 23 + 5?", label="396")
        group = GroupRun.of([drawn])
        async with state.client:
            await GroupRunner(state, None, rollout_id=0).run(group)
            await close_server()
        assert group.failure is None and group.is_scored
        return group.samples

    for sample in asyncio.run(run()):
        sample.validate()
        assert sample.rollout_id == sample.index and sample.reward == 0.0
        assert sample.status in (SampleStatus.COMPLETED, SampleStatus.TRUNCATED)
        expected = logprobs_of(model, sample.tokens)[-sample.response_length :]
        assert sample.loss_mask is not None and sample.rollout_log_probs is not None
        trained = [
            (theirs, ours)
            for theirs, ours, counts in zip(expected, sample.rollout_log_probs, sample.loss_mask)
            if counts
        ]
        assert trained and max(abs(theirs - ours) for theirs, ours in trained) < 1e-3
        assert "What is 17 * 23 + 5?" in byte_tokenizer().decode(
            sample.tokens[: sample.prompt_length]
        )


def test_the_examples_calculator_and_score() -> None:
    assert calculate('{"expression": "17 * 23 + 5"}') == "396"
    assert calculate('{"expression": "__import__"}').startswith("error") and calculate(
        "[]"
    ).startswith("error")
    assert calculate(f'{{"expression": "{"1+" * 5_000}1"}}').startswith("error")
    assert rollout.score("so:\n 396 \n", "396") == 1.0 and rollout.score("", "396") == 0.0


def test_a_client_that_vanishes_ends_its_request_in_the_engine_behind_the_router(
    engine: Server, model: Path, tmp_path: Path
) -> None:
    port = free_port()
    argv = [
        sys.executable,
        "-m",
        "sglang_router.launch_router",
        "--host",
        "127.0.0.1",
        "--port",
        str(port),
    ]

    async def run(url: str) -> None:
        await register_workers(url, [engine.url], timeout=60.0)
        state = state_of(url, model, CONTEXT - 200)
        bind_state(state)
        params = state.params_for(Sample(index=0)) | {"ignore_eos": True}
        async with state.client:
            async with agent_endpoint(state.args, Sample(index=0), params) as endpoint:
                await vanish(endpoint, engine.url)
                assert not endpoint.turns, "it was generated to its end"
            await close_server()

    with running(argv, port, tmp_path / "router.log") as router:
        asyncio.run(run(router.url))
