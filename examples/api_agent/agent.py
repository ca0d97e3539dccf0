"""An agent that knows nothing of training: it answers one question, with a calculator, through
OpenAI's API.

    OPENAI_BASE_URL=http://127.0.0.1:30000/v1 OPENAI_API_KEY=none python agent.py "What is 17 * 23?"

It runs as well against any other server: where the model is, it learns from the environment alone.
"""

from __future__ import annotations

import ast
import json
import operator
import sys
from typing import Any

import openai

MOST_TURNS = 6
SYSTEM = "Use the calculator. End with a last line that is the number alone."
TOOLS: Any = [
    {
        "type": "function",
        "function": {
            "name": "calculate",
            "description": "The value of an arithmetic expression.",
            "parameters": {"type": "object", "properties": {"expression": {"type": "string"}}},
        },
    }
]
OPERATORS: dict[type, Any] = {ast.Add: operator.add, ast.Sub: operator.sub, ast.Mult: operator.mul}


def calculate(arguments: str) -> str:
    """The calculator's answer to the arguments of a call, whatever they are."""

    def value(node: Any) -> int:
        if isinstance(node, ast.BinOp) and type(node.op) in OPERATORS:
            return int(OPERATORS[type(node.op)](value(node.left), value(node.right)))
        if isinstance(node, ast.Constant) and isinstance(node.value, int):
            return node.value
        raise ValueError("only whole numbers, +, - and *")

    try:
        return str(value(ast.parse(json.loads(arguments)["expression"], mode="eval").body))
    except (ValueError, KeyError, TypeError, SyntaxError, RecursionError, MemoryError) as error:
        return f"error: {error}"


def main(question: str) -> None:
    client = openai.OpenAI()
    messages: list[Any] = [
        {"role": "system", "content": SYSTEM},
        {"role": "user", "content": question},
    ]
    for _ in range(MOST_TURNS):
        message = (
            client.chat.completions.create(model="any", messages=messages, tools=TOOLS)
            .choices[0]
            .message
        )
        messages.append(message)
        if not message.tool_calls:
            break
        for call in message.tool_calls:
            result = calculate(call.function.arguments)
            messages.append({"role": "tool", "tool_call_id": call.id, "content": result})
    print(message.content)


if __name__ == "__main__":
    main(sys.argv[1])
