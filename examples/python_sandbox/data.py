"""Questions for the sandbox example: python -m examples.python_sandbox.data FOLDER [--data-only]

FOLDER gets train.jsonl and test.jsonl, and model/, a tiny model that answers with a program, half
of the time with any operator. With --data-only, for other models, the questions say how a program
is run.
"""

from __future__ import annotations

import random
import sys
from pathlib import Path

from examples import tiny

SIGNS = {"plus": "+", "minus": "-", "times": "*"}
TOLD = (
    "Write <python>…</python> to see what a program prints. End with a line that is the answer "
    "alone.\n"
)


def write(folder: Path, with_model: bool = True, seed: int = 0) -> None:
    """With numbers from 10 to 99, where no two operators give the same: 300 for training, 32 others
    held out."""
    questions = [(a, word, b) for a in range(10, 100) for word in SIGNS for b in range(10, 100)]
    random.Random(seed).shuffle(questions)
    told = "" if with_model else TOLD
    for name, part in (("test", questions[:32]), ("train", questions[32:332])):
        rows = (
            {"question": told + ask(a, word, b), "answer": result(a, SIGNS[word], b)}
            for a, word, b in part
        )
        tiny.write_rows(folder / f"{name}.jsonl", rows)
    if with_model:
        tiny.write_model(folder / "model", lesson, steps=200)


def ask(a: int, word: str, b: int) -> str:
    return f"What is {a} {word} {b}?"


def result(a: int, sign: str, b: int) -> int:
    return {"+": a + b, "-": a - b, "*": a * b}[sign]


def lesson(rng: random.Random) -> tiny.Chat:
    """A program, half of the time with any operator, and what comes of it."""
    a = rng.randrange(10, 100)
    word = rng.choice(list(SIGNS))
    b = rng.randrange(10, 100)
    sign = SIGNS[word] if rng.random() < 0.5 else rng.choice(list(SIGNS.values()))
    printed = str(result(a, sign, b))
    return tiny.say(ask(a, word, b), f"<python>print({a}{sign}{b})</python>", printed, printed)


if __name__ == "__main__":
    write(Path(sys.argv[1]), with_model="--data-only" not in sys.argv)
