"""A tiny model that writes words backwards, sloppily: python -m examples.curriculum.data FOLDER"""

from __future__ import annotations

import random
import sys
from pathlib import Path

from examples import tiny
from examples.curriculum.source import LETTERS, LEVELS

WRONG = 0.25


def write(folder: Path) -> None:
    tiny.write_model(folder / "model", lesson, steps=200)


def lesson(rng: random.Random) -> tiny.Chat:
    """A word backwards, in which every fourth letter is any."""
    word = rng.choices(LETTERS, k=rng.randint(1, LEVELS))
    written = [rng.choice(LETTERS) if rng.random() < WRONG else letter for letter in reversed(word)]
    return tiny.say(" ".join(word), " ".join(written))


if __name__ == "__main__":
    write(Path(sys.argv[1]))
