"""The clients that agents use, the packages openai and anthropic, in front of a sample's
endpoint."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import anthropic
import openai

from slime.agents.endpoint import AgentEndpoint
from slime.engines.api import LOADS_PATH, EngineClient
from slime.engines.client import num_requests


@asynccontextmanager
async def openai_of(endpoint: AgentEndpoint, **options: Any) -> AsyncIterator[openai.AsyncOpenAI]:
    given = {"base_url": endpoint.base_url, "api_key": endpoint.api_key} | options
    async with openai.AsyncOpenAI(**given) as client:
        yield client


@asynccontextmanager
async def anthropic_of(
    endpoint: AgentEndpoint, **options: Any
) -> AsyncIterator[anthropic.AsyncAnthropic]:
    given = {"base_url": endpoint.anthropic_base_url, "api_key": endpoint.api_key} | options
    async with anthropic.AsyncAnthropic(**given) as client:
        yield client


async def vanish(endpoint: AgentEndpoint, engine: str) -> float:
    """A client asks, and is gone while the engine at that URL answers; seconds from its end to that
    of its request."""

    async with EngineClient(engine) as asked, openai_of(endpoint, max_retries=0) as client:

        async def num_running() -> int:
            return num_requests(await asked.get(LOADS_PATH))

        asking = asyncio.create_task(client.responses.create(model="m", input="Hi"))
        while not await num_running():
            await asyncio.sleep(0.005)
        await asyncio.sleep(0.1)
        asking.cancel()
        began = time.perf_counter()
        while await num_running():
            await asyncio.sleep(0.005)
        return time.perf_counter() - began
