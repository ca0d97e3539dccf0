"""A model that may look something up: several turns with a tool between them, as one training sample.

    user         How high is the Zugspitze?
    assistant    <search>Zugspitze</search>          sampled, trained on; generation stops at the stop string
    tool         The Zugspitze is 2962 m high.       appended, never trained on
    assistant    2962                                sampled, trained on

slime train --hf-checkpoint path/to/model --prompt-data questions.jsonl --input-key question --label-key answer \\
    --apply-chat-template --custom-generate-function-path examples/search_tool.py:generate \\
    --custom-rm-path examples/search_tool.py:reward --num-rollout 200 --rollout-max-response-len 512

A row of questions.jsonl: {"question": "How high is the Zugspitze, in metres? …", "answer": 2962}. Tell the model in
the question (or in a system message) that it may write <search>…</search> and that its last line is to be the answer
alone.
"""

from __future__ import annotations

import re
from typing import Any

from slime.rollout.generate import append_message
from slime.rollout.generate import generate as one_turn
from slime.samples.types import Sample

MOST_SEARCHES = 3
STOP = "</search>"
PAGES = {
    "zugspitze": "The Zugspitze is 2962 m high.",
    "mont blanc": "Mont Blanc is 4806 m high.",
    "ben nevis": "Ben Nevis is 1345 m high.",
}


def search(query: str) -> str:
    """What the tool answers; put your own in its place (`await` it where it is slow)."""
    return next((text for title, text in PAGES.items() if title in query.lower()), "Nothing was found.")


async def generate(args: Any, sample: Sample, sampling_params: dict[str, Any]) -> Sample:
    """Turns of the model, until one asks for no search. What is cut short comes back as it is; its status says so."""
    sampling_params["stop"] = [*sampling_params.get("stop", ()), STOP]
    for _ in range(MOST_SEARCHES):
        sample = await one_turn(args, sample, sampling_params)
        asked = re.search(r"<search>([^<]*)</search>\s*$", sample.response)
        if asked is None or sample.status is not Sample.Status.COMPLETED:
            return sample
        append_message(sample, {"role": "tool", "content": search(asked[1])})
    return await one_turn(args, sample, sampling_params)


def reward(args: Any, sample: Sample, **kwargs: Any) -> float:
    """1 where the last line is the answer."""
    lines = sample.response.strip().splitlines()
    return float(bool(lines) and lines[-1].strip() == sample.label)
