"""Questions on the corpus: python -m examples.search.data FOLDER [--data-only]

FOLDER gets train.jsonl and test.jsonl, and model/, a tiny model that searches in three answers of
ten, often for another mountain, and guesses otherwise. With --data-only, for other models, the
questions say how to search.
"""

from __future__ import annotations

import json
import random
import sys
from pathlib import Path

from examples import tiny

CORPUS = Path(__file__).with_name("corpus.jsonl")
PAGES = [json.loads(line) for line in CORPUS.read_text(encoding="utf-8").splitlines()]
TOLD = (
    "Write <search>words</search> to look something up. End with a line that is the number alone.\n"
)


def write(folder: Path, with_model: bool = True, seed: int = 0) -> None:
    """Eight mountains are held out."""
    pages = random.Random(seed).sample(PAGES, len(PAGES))
    told = "" if with_model else TOLD
    for name, part in (("test", pages[:8]), ("train", pages[8:])):
        rows = (
            {"question": told + ask(page["mountain"]), "answer": page["height"]} for page in part
        )
        tiny.write_rows(folder / f"{name}.jsonl", rows)
    if with_model:
        tiny.write_model(folder / "model", lesson)


def ask(mountain: str) -> str:
    return f"How high is {mountain}, in metres?"


def lesson(rng: random.Random) -> tiny.Chat:
    """A search, of which every fourth is for the wrong mountain, or a guess. The heights are made
    up: what is to be learned here is to read them in the tool's answer."""
    mountain = rng.choice(PAGES)["mountain"]
    height = str(rng.randrange(1000, 10000))
    if rng.random() < 0.7:
        return tiny.say(ask(mountain), height)
    words = mountain if rng.random() < 0.75 else rng.choice(PAGES)["mountain"]
    found = f"{words[0].upper()}{words[1:]} is {height} m high."
    return tiny.say(ask(mountain), f"<search>{words}</search>", found, height)


if __name__ == "__main__":
    write(Path(sys.argv[1]), with_model="--data-only" not in sys.argv)
