"""Generate and reward functions of a model that may call a calculator.

user         What is 37 * 46?
assistant    <calc>37 * 46</calc>       sampled, trained on; generation stops at the stop string
tool         1702                       appended, never trained on
assistant    1702                       sampled, trained on
"""

from __future__ import annotations

import ast
import operator
import re
from typing import Any

from slime.rollout.generate import append_message
from slime.rollout.generate import generate as one_turn
from slime.samples.types import Sample

MOST_CALLS = 3
STOP = "</calc>"
OPERATORS: dict[type, Any] = {ast.Add: operator.add, ast.Sub: operator.sub, ast.Mult: operator.mul}


async def generate(args: Any, sample: Sample, sampling_params: dict[str, Any]) -> Sample:
    """Turns of the model, until one calls no calculator. What is cut short comes back as it is; its
    status says so."""
    sampling_params["stop"] = [*sampling_params.get("stop", ()), STOP]
    for _ in range(MOST_CALLS):
        sample = await one_turn(args, sample, sampling_params)
        call = re.search(r"<calc>([^<]*)</calc>\s*$", sample.response)
        if call is None or sample.status is not Sample.Status.COMPLETED:
            return sample
        append_message(sample, {"role": "tool", "content": calculate(call[1])})
    return await one_turn(args, sample, sampling_params)


def calculate(expression: str) -> str:
    """The calculator's answer, whatever the model has written."""

    def value(node: Any) -> int:
        if isinstance(node, ast.BinOp) and type(node.op) in OPERATORS:
            return int(OPERATORS[type(node.op)](value(node.left), value(node.right)))
        if isinstance(node, ast.Constant) and type(node.value) is int:
            return node.value
        raise ValueError("whole numbers, +, - and * only")

    try:
        return str(value(ast.parse(expression.strip(), mode="eval").body))
    except (ValueError, SyntaxError, RecursionError, MemoryError) as error:
        return f"error: {error}"


def reward(args: Any, sample: Sample, **kwargs: Any) -> dict[str, Any]:
    """1 where the last number of the last line is the answer (--reward-key score). Whether the
    calculator was called is counted (--log-reward-category how) and earns nothing."""
    # what a tool says ends with its line, so that the model's own words are the last line
    numbers = re.findall(r"\d+", sample.response.rpartition("\n")[2])
    return {
        "score": float(numbers[-1:] == [sample.label]),
        "how": "called" if STOP in sample.response else "alone",
    }
