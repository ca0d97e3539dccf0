"""The simplest agent that works in a box: bash that the model writes is run, and it is shown what came of it."""

from __future__ import annotations

import re
from collections.abc import Awaitable, Callable, Sequence
from typing import Any, Protocol

import aiohttp

from slime.rollout.agents.endpoint import AgentEndpoint
from slime.rollout.sandbox.sandbox import Ran

HOW = "\nWrite one block of ```bash at a time; you are shown its output. When you are done, write no block."
_BLOCK = re.compile(r"```(?:bash|sh)\n(.*?)```", re.DOTALL)


class Workplace(Protocol):
    """Where commands are run, and what is to be done there."""

    instruction: str

    async def run(self, command: Sequence[str]) -> Ran: ...


#: Works with the model of the endpoint until it is done.
Agent = Callable[[AgentEndpoint, Any], Awaitable[None]]


async def bash_agent(endpoint: AgentEndpoint, box: Workplace) -> None:
    """Blocks of bash in the model's answers are run one by one, until an answer has none."""
    messages: list[dict[str, Any]] = [{"role": "user", "content": box.instruction + HOW}]
    headers = {"Authorization": f"Bearer {endpoint.api_key}"}
    async with aiohttp.ClientSession(headers=headers, timeout=aiohttp.ClientTimeout(total=None)) as session:
        while True:
            body = {"model": "policy", "messages": messages}
            async with session.post(f"{endpoint.base_url}/chat/completions", json=body) as response:
                if response.status != 200:  # out of room, or of turns: what there is, is scored
                    return
                message = (await response.json())["choices"][0]["message"]
            block = _BLOCK.search(message["content"] or "")
            if block is None:
                return
            ran = await box.run(["bash", "-c", block[1]])
            messages += [message, {"role": "user", "content": ran.text or "(no output)"}]
