"""A model that says one line after another, for tests of generate functions of several turns."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

from slime.engines.api import GenerateResult
from slime.rollout.generate import bind_state
from slime.samples.types import Sample
from tests.support.embedded_models import byte_tokenizer
from tests.support.fake_rollout import FakeClient, hook_args, make_state


class ScriptedModel(FakeClient):
    """What it says ends with a stop string, or with the end of the turn (``<|im_end|>``); tokens
    are bytes.

    Args:
        reason: the finish reason of what is said to its end.
    """

    def __init__(self, *lines: str, reason: str = "stop") -> None:
        super().__init__()
        self.lines, self.reason = list(lines), reason
        self.tokenizer: Any = byte_tokenizer()

    async def _answer(
        self, number: int, input_ids: list[int], params: dict[str, Any]
    ) -> GenerateResult:
        line = self.lines[number]
        tokens = self.tokenizer.encode(line)[: params["max_new_tokens"]]
        text = self.tokenizer.decode(tokens, skip_special_tokens=True)
        reason = self.reason if len(tokens) == len(self.tokenizer.encode(line)) else "length"
        return GenerateResult(
            tokens, [-0.5] * len(tokens), text, reason, {"finish_reason": {"type": reason}}
        )


def play(
    generate: Callable[..., Any],
    model: ScriptedModel,
    sample: Sample,
    room: int = 400,
    **optional: Any,
) -> Any:
    """What a generate function makes of ``sample`` with this model.

    Args:
        room: ``max_new_tokens``.
        optional: keyword arguments of the function.
    """
    state = make_state(model, max_new_tokens=room, args=hook_args(apply_chat_template_kwargs={}))
    state.tokenizer = model.tokenizer
    state.sampling_params["skip_special_tokens"] = True

    async def run() -> Any:
        bind_state(state)
        return await generate(state.args, sample, state.params_for(sample), **optional)

    return asyncio.run(run())


def conversation(sample: Sample) -> str:
    """Prompt and response as the engine reads them."""
    return str(byte_tokenizer().decode(sample.tokens))


def trained(sample: Sample) -> str:
    """What of the response is trained on."""
    response = sample.tokens[sample.prompt_length :]
    return str(byte_tokenizer().decode([t for t, m in zip(response, sample.loss_mask or []) if m]))
