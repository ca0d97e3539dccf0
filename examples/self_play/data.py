"""Games of Nim: python -m examples.self_play.data FOLDER

FOLDER gets train.jsonl and test.jsonl, a pile of stones in each row, and model/, a tiny model that
knows the form of a move and takes one to four stones by chance.
"""

from __future__ import annotations

import random
import sys
from pathlib import Path

from examples import tiny

LARGEST = 15


def write(folder: Path, seed: int = 0) -> None:
    """All piles for training. Held out is not a pile but the opponent: whoever begins can win these
    against anybody."""
    tiny.write_rows(
        folder / "train.jsonl", ({"stones": str(stones)} for stones in range(2, LARGEST + 1))
    )
    tiny.write_rows(
        folder / "test.jsonl",
        ({"stones": str(stones)} for stones in range(5, LARGEST + 1) if stones % 4),
    )
    tiny.write_model(folder / "model", lesson, seed=seed)


def lesson(rng: random.Random) -> tiny.Chat:
    return tiny.say(f"{rng.randint(1, LARGEST)} stones", str(rng.randint(1, 4)))


if __name__ == "__main__":
    write(Path(sys.argv[1]))
