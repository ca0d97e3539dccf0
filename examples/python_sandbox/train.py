"""python -m examples.python_sandbox.train [steps]: a small model learns which program answers a question."""

from __future__ import annotations

import random
import sys
from pathlib import Path
from typing import Any

import slime
from examples import small_model

FOLDER = Path(__file__).parent
SIGNS = {"plus": "+", "minus": "-", "times": "*"}
WORDS = [*"0123456789+-*()", "print", "<python>", "</python>", "What is ", " plus ", " minus ", " times ", "?", "\n"]


def question(a: int, word: str, b: int) -> str:
    return f"What is {a} {word} {b}?"


def talk(rng: random.Random) -> small_model.Conversation:
    """It writes a program, with any operator, and says what came of it."""
    a, b, sign = rng.randint(2, 9), rng.randint(2, 9), rng.choice("+-*")
    program = f"{a}{sign}{b}"
    result = str(eval(program))
    asked = question(a, rng.choice(list(SIGNS)), b)
    answer = ("assistant", f"<python>print({program})</python>")
    return [("user", asked), answer, ("tool", result), ("assistant", result)]


def rows() -> list[dict[str, Any]]:
    """Every question whose answer tells the operators apart."""
    found = []
    for a in range(3, 10):
        for b in range(2, 10):
            for word, sign in SIGNS.items():
                found.append({"prompt": question(a, word, b), "label": str(eval(f"{a}{sign}{b}"))})
    random.Random(0).shuffle(found)
    return found


if __name__ == "__main__":
    model = small_model.make(Path("outputs/small-models/python"), WORDS, talk)
    run = slime.train(
        model, rows(), f"{FOLDER}/rollout.py:reward", custom_generate_function_path=f"{FOLDER}/rollout.py:generate",
        num_rollout=int((sys.argv[1:] or ["25"])[0]), rollout_batch_size=8, n_samples_per_prompt=8,
        rollout_max_response_len=40, apply_chat_template=True, lr=4e-4, fp32=True, colocate=True,
    )  # fmt: skip
    print("score, step by step:", [round(value, 2) for value in run.series("rollout/raw_reward")])
    print("one of the last answers:", run.samples(-1)[0]["response"])
