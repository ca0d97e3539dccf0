"""The clients that agents use, the packages openai and anthropic, in front of a sample's endpoint."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import anthropic
import openai

from slime.rollout.agents.endpoint import AgentEndpoint


@asynccontextmanager
async def openai_of(endpoint: AgentEndpoint, **options: Any) -> AsyncIterator[openai.AsyncOpenAI]:
    given = {"base_url": endpoint.base_url, "api_key": endpoint.api_key} | options
    async with openai.AsyncOpenAI(**given) as client:
        yield client


@asynccontextmanager
async def anthropic_of(endpoint: AgentEndpoint, **options: Any) -> AsyncIterator[anthropic.AsyncAnthropic]:
    given = {"base_url": endpoint.anthropic_base_url, "api_key": endpoint.api_key} | options
    async with anthropic.AsyncAnthropic(**given) as client:
        yield client
