"""Numbers to be written backwards: python -m examples.custom_advantage.data FOLDER

FOLDER gets train.jsonl and test.jsonl, and model/, a tiny model that does so sloppily.
"""

from __future__ import annotations

import random
import sys
from pathlib import Path

from examples import tiny

LENGTH = 6
WRONG = 0.3


def write(folder: Path, seed: int = 0) -> None:
    """Numbers of six digits: 400 for training, 64 others held out."""
    numbers = random.Random(seed).sample(range(10 ** (LENGTH - 1), 10**LENGTH), 464)
    for name, part in (("test", numbers[:64]), ("train", numbers[64:])):
        rows = ({"question": str(number), "answer": str(number)[::-1]} for number in part)
        tiny.write_rows(folder / f"{name}.jsonl", rows)
    tiny.write_model(folder / "model", lesson, seed=seed)


def lesson(rng: random.Random) -> tiny.Chat:
    """A number backwards, in which three digits of ten are any."""
    digits = str(rng.randrange(10 ** (LENGTH - 1), 10**LENGTH))
    written = [
        rng.choice("0123456789") if rng.random() < WRONG else digit for digit in reversed(digits)
    ]
    return tiny.say(digits, "".join(written))


if __name__ == "__main__":
    write(Path(sys.argv[1]))
