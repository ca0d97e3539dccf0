"""The simplest agent: it runs the bash code that the model writes, and shows the model its
output."""

from __future__ import annotations

import re
from collections.abc import Awaitable, Callable, Sequence
from typing import Any, Protocol

import aiohttp

from slime.agents.endpoint import AgentEndpoint, AgentError
from slime.sandbox.sandbox import Ran

HOW = (
    "\nWrite one block of ```bash at a time; you are shown its output. When you are done, write "
    "no block."
)
#: Error codes that end a conversation without a failure: the context or the turns are used up.
_NO_MORE = ("context_length_exceeded", "max_turns")
_BLOCK = re.compile(r"```(?:bash|sh)\n(.*?)```", re.DOTALL)


class Workplace(Protocol):
    """A folder in which commands are run, and the task to be done there."""

    instruction: str

    async def run(self, command: Sequence[str]) -> Ran: ...


#: Solves the task of a `Workplace` with the endpoint's model.
Agent = Callable[[AgentEndpoint, Any], Awaitable[None]]


async def bash_agent(endpoint: AgentEndpoint, box: Workplace) -> None:
    """Run the blocks of bash in the model's answers one by one, until an answer has none."""
    messages: list[dict[str, Any]] = [{"role": "user", "content": box.instruction + HOW}]
    headers = {"Authorization": f"Bearer {endpoint.api_key}"}
    async with aiohttp.ClientSession(
        headers=headers, timeout=aiohttp.ClientTimeout(total=None)
    ) as session:
        while True:
            body = {"model": "policy", "messages": messages}
            async with session.post(f"{endpoint.base_url}/chat/completions", json=body) as response:
                said = await response.json()
            if response.status == 503 or (
                response.status != 200 and said["error"]["code"] in _NO_MORE
            ):
                # the work so far is scored; after a 503, `AgentEndpoint.samples` raises the cause
                return
            if response.status != 200:
                raise AgentError(f"the model was not asked: {said['error']['message']}")
            message = said["choices"][0]["message"]
            block = _BLOCK.search(message["content"] or "")
            if block is None:
                return
            ran = await box.run(["bash", "-c", block[1]])
            messages += [message, {"role": "user", "content": ran.text or "(no output)"}]
