"""A model that plays its part, and a generate function around it, for tests of agents' endpoints.

play = Play(["Hello<|im_end|>", "Bye<|im_end|>"])
play.run(agent)    # `agent(endpoint)` talks to the endpoint
play.asked         # prompts that the engine saw
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterable
from functools import cache
from typing import Any

from benchmarks.bpe_tokenizers import bpe_tokenizer
from slime.agents.endpoint import AgentEndpoint, agent_endpoint
from slime.agents.server import close_server
from slime.engines.api import GenerateResult
from slime.rollout.generate import bind_state
from slime.samples.types import Sample
from tests.support.embedded_models import byte_tokenizer
from tests.support.fake_rollout import FakeClient, hook_args, make_state

#: As Qwen3's: tools, answers of tools joined in a user's turn, and reasoning, which past turns
#: lose.
TEMPLATE = """\
{%- if tools %}<|im_start|>system
Tools, to be called as <tool_call>{"name", "arguments"}</tool_call>:{% for tool in tools %}
{{ tool.function.name }}{% endfor %}<|im_end|>
{% endif %}
{%- set ns = namespace(last=-1) %}
{%- for m in messages %}{% if m.role == "user" %}\
{% set ns.last = loop.index0 %}{% endif %}{% endfor %}
{%- for m in messages %}
{%- if m.role == "tool" %}
{%- if loop.first or messages[loop.index0 - 1].role != "tool" %}\
<|im_start|>user{% endif %}{{ "\\n" }}
{{- "<tool_response>" }}
{{ m.content }}
</tool_response>
{%- if loop.last or messages[loop.index0 + 1].role != "tool" %}<|im_end|>
{% endif %}
{%- elif m.role == "assistant" %}<|im_start|>assistant
{% if m.reasoning_content and loop.index0 > ns.last %}<think>
{{ m.reasoning_content }}
</think>

{% endif %}{{ m.content }}
{%- for call in m.tool_calls or [] %}
<tool_call>
{"name": "{{ call.function.name }}", "arguments": {{ call.function.arguments | tojson }}}
</tool_call>
{%- endfor %}<|im_end|>
{% else %}<|im_start|>{{ m.role }}
{{ m.content }}<|im_end|>
{% endif %}
{%- endfor %}
{%- if add_generation_prompt %}<|im_start|>assistant
{% endif %}"""


@cache
def tokenizer(merges: bool = False) -> Any:
    """Of bytes; with merges, so that text has one right way of being written and many others."""
    found = bpe_tokenizer() if merges else byte_tokenizer()
    found.chat_template = TEMPLATE
    return found


class Model(FakeClient):
    """Says one line after another, whatever it is asked; no two tokens have the same log-prob.

    Attributes:
        asked: the prompts, in order.
        said: the tokens that were sampled, in order.
        held: while it is set, nothing is answered.
        tells_masks: each token was drawn from itself and another one.
    """

    def __init__(self, lines: Iterable[str | list[int]], *, merges: bool = False) -> None:
        super().__init__()
        self.tokenizer = tokenizer(merges)
        self._lines = iter(lines)
        self.asked: list[list[int]] = []
        self.said: list[list[int]] = []
        self.held: asyncio.Event | None = None
        self.cancelled = 0
        self.tells_masks = False
        self.prompt_length: Callable[[list[int]], int] = len

    async def _answer(
        self, number: int, input_ids: list[int], params: dict[str, Any]
    ) -> GenerateResult:
        line = next(self._lines)
        self.asked.append(input_ids)
        if self.held is not None:
            try:
                await self.held.wait()
            except asyncio.CancelledError:
                self.cancelled += 1
                raise
        tokens = self.tokenizer.encode(line) if isinstance(line, str) else line
        tokens = tokens[: params["max_new_tokens"]]
        self.said.append(tokens)
        reason = (
            "stop" if tokens[-1] == self.tokenizer.eos_token_id or params.get("stop") else "length"
        )
        meta = {"finish_reason": {"type": reason}, "weight_version": str(number // 2 + 1)}
        meta |= {
            "prompt_tokens": self.prompt_length(input_ids),
            "cached_tokens": len(input_ids) // 2,
            "completion_tokens": len(tokens),
        }
        if self.tells_masks:
            meta["output_token_sampling_mask"] = [[token, token + 1] for token in tokens]
        text = self.tokenizer.decode(tokens, skip_special_tokens=True)
        first = sum(map(len, self.said[:-1]))
        return GenerateResult(
            tokens, [-1.0 - first - i for i in range(len(tokens))], text, reason, meta
        )


Agent = Callable[[AgentEndpoint], Awaitable[Any]]


class Play:
    """A sample, a model with its lines, and an endpoint between them."""

    def __init__(
        self,
        lines: Iterable[str | list[int]],
        *,
        max_new_tokens: int = 400,
        merges: bool = False,
        **state: Any,
    ) -> None:
        self.model = Model(lines, merges=merges)
        args = hook_args(apply_chat_template_kwargs={}, **state.pop("args", {}))
        self.state = make_state(self.model, max_new_tokens=max_new_tokens, args=args, **state)
        self.state.tokenizer = self.model.tokenizer
        self.state.end_tokens = frozenset({self.model.tokenizer.eos_token_id})
        self.sample = Sample(
            index=3, group_index=1, prompt="How high is the Zugspitze?", label="2962"
        )

    def run(self, agent: Agent, **options: Any) -> AgentEndpoint:
        """Let the agent do its work; the endpoint, which is closed then."""

        async def generate() -> AgentEndpoint:
            bind_state(self.state)
            try:
                params = self.state.params_for(self.sample)
                async with agent_endpoint(
                    self.state.args, self.sample, params, **options
                ) as endpoint:
                    await agent(endpoint)
                return endpoint
            finally:
                await close_server()

        return asyncio.run(generate())

    def text(self, tokens: list[int]) -> str:
        return str(self.model.tokenizer.decode(tokens))

    def trained(self, sample: Sample) -> list[int]:
        """The tokens of a sample whose loss counts."""
        response = sample.tokens[sample.prompt_length :]
        return [token for token, counts in zip(response, sample.loss_mask or []) if counts]


async def asks_for_ever(args: Any, sample: Sample, sampling_params: dict[str, Any]) -> list[Sample]:
    """A generate function whose agent is in the midst of a tool when the rollout ends."""
    async with agent_endpoint(args, sample, sampling_params) as endpoint:
        sample.metadata["port"] = endpoint.port
        await asyncio.Event().wait()
    return endpoint.samples()
