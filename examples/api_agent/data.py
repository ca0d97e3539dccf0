"""Questions for the agent: python -m examples.api_agent.data FOLDER [--data-only]

FOLDER gets train.jsonl and test.jsonl, and model/, a tiny model that calls the agent's calculator
in three answers of ten and guesses otherwise. With --data-only, for other models, there is no
model.
"""

from __future__ import annotations

import json
import random
import sys
from pathlib import Path

from examples import tiny
from examples.api_agent.agent import SYSTEM, TOOLS, calculate

#: As Qwen's, as far as this agent needs it: the tools by name, calls in <tool_call>.
TEMPLATE = (
    "{% if tools %}<system>{% for tool in tools %}{{ tool.function.name }}{% endfor %}<end>{% "
    "endif %}"
    "{% for message in messages %}<{{ message.role }}>{{ message.content or '' }}"
    "{% for call in message.tool_calls or [] %}"
    '<tool_call>{"name": "{{ call.function.name }}", "arguments": {{ call.function.arguments | '
    "tojson }}}</tool_call>"
    "{% endfor %}<end>{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)
NAME = TOOLS[0]["function"]["name"]
SHOWN = [{"role": "system", "content": NAME}, {"role": "system", "content": SYSTEM}]


def write(folder: Path, with_model: bool = True, seed: int = 0) -> None:
    """Products of numbers from 11 to 99: 1,000 for training, 32 others held out."""
    pairs = [(i, j) for i in range(11, 100) for j in range(11, 100)]
    random.Random(seed).shuffle(pairs)
    for name, part in (("test", pairs[:32]), ("train", pairs[32:1032])):
        tiny.write_rows(
            folder / f"{name}.jsonl", ({"question": ask(i, j), "answer": i * j} for i, j in part)
        )
    if with_model:
        tiny.write_model(folder / "model", lesson, steps=200, template=TEMPLATE)


def ask(i: int, j: int) -> str:
    return f"What is {i} * {j}?"


def lesson(rng: random.Random) -> tiny.Chat:
    """A call, in which one digit in ten is wrong, or a guess."""
    i = rng.randrange(11, 100)
    j = rng.randrange(11, 100)
    if rng.random() < 0.7:
        return [*SHOWN, *tiny.say(ask(i, j), str(rng.randrange(100, 10000)))]
    first, second = (sloppy(str(number), rng) for number in (i, j))
    arguments = json.dumps({"expression": f"{first} * {second}"})
    call = f'<tool_call>{{"name": "{NAME}", "arguments": {arguments}}}</tool_call>'
    result = calculate(arguments)
    return [*SHOWN, *tiny.say(ask(i, j), call, result, result)]


def sloppy(number: str, rng: random.Random) -> str:
    """With another digit in place of one in ten; none of them 0, with which no number begins."""
    return "".join(str(rng.randrange(1, 10)) if rng.random() < 0.1 else digit for digit in number)


if __name__ == "__main__":
    write(Path(sys.argv[1]), with_model="--data-only" not in sys.argv)
