"""Products for the calculator example: python -m examples.calculator.data FOLDER [--data-only]

FOLDER gets train.jsonl and test.jsonl, and model/, a tiny model that calls the calculator in three
answers of ten and guesses otherwise. With --data-only, for other models, the questions show the
form of a call, and there is no model.
"""

from __future__ import annotations

import random
import sys
from pathlib import Path

from examples import tiny

#: What a model that has not been taught calls is asked behind: the form of a call, once.
SHOWN = [
    {"role": "system", "content": "You have a calculator: <calc>12 * 34</calc> asks it."},
    *tiny.say("What is 31 * 28?", "<calc>31 * 28</calc>", "868", "868"),
]


def write(folder: Path, with_model: bool = True, seed: int = 0) -> None:
    """Products of numbers from 32 to 99: 1,000 for training, 100 others held out."""
    pairs = [(i, j) for i in range(32, 100) for j in range(32, 100)]
    random.Random(seed).shuffle(pairs)
    for name, part in (("test", pairs[:100]), ("train", pairs[100:1100])):
        rows = ({"question": ask(i, j, shown=not with_model), "answer": i * j} for i, j in part)
        tiny.write_rows(folder / f"{name}.jsonl", rows)
    if with_model:
        tiny.write_model(folder / "model", lesson)


def ask(i: int, j: int, shown: bool = False) -> tiny.Chat:
    return [*(SHOWN if shown else []), *tiny.say(f"What is {i} * {j}?")]


def lesson(rng: random.Random) -> tiny.Chat:
    """A call, in which one digit in ten is wrong, or a guess."""
    i = rng.randrange(32, 100)
    j = rng.randrange(32, 100)
    if rng.random() < 0.7:
        return [*ask(i, j), *tiny.answer(str(rng.randrange(1000, 10000)))]
    first, second = (sloppy(str(number), rng) for number in (i, j))
    result = str(int(first) * int(second))
    return [*ask(i, j), *tiny.answer(f"<calc>{first} * {second}</calc>", result, result)]


def sloppy(number: str, rng: random.Random) -> str:
    return "".join(str(rng.randrange(10)) if rng.random() < 0.1 else digit for digit in number)


if __name__ == "__main__":
    write(Path(sys.argv[1]), with_model="--data-only" not in sys.argv)
