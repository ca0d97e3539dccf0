"""The reward of a judge: another model, with an engine and a router of its own, which never
changes."""

from __future__ import annotations

from typing import Any

from slime.rollout.plugin_api import get_model_url, post
from slime.samples.types import Sample


async def reward(args: Any, sample: Sample, **kwargs: Any) -> float:
    """1 where the judge says yes. It is asked in OpenAI's words, so that nobody needs its tokenizer
    here."""
    question = f"Is this kind? {sample.response.strip()}"
    body = {
        "model": "judge",
        "messages": [{"role": "user", "content": question}],
        "temperature": 0,
        "max_tokens": 4,
    }
    answer = await post(get_model_url(args, "judge", "/v1/chat/completions"), body)
    return float(answer["choices"][0]["message"]["content"].strip().lower().startswith("yes"))
