"""Two models for the judge example: python -m examples.judge.data FOLDER

FOLDER gets train.jsonl and test.jsonl; model/, a tiny model that calls anything by any of 16 words;
judge/, another one that knows which of them are kind; and models.yaml, the file of --sglang-config.
"""

from __future__ import annotations

import random
import sys
from pathlib import Path

import yaml

from examples import tiny

THINGS = ["film", "soup", "song", "garden", "speech", "cake", "book", "journey", "play", "house"]
KIND = ["lovely", "fine", "good", "bright", "warm", "sweet", "nice", "great"]
UNKIND = ["awful", "dull", "bad", "grim", "cold", "sour", "ugly", "poor"]


def write(folder: Path) -> None:
    """Questions about eight things for training, and about two others."""
    for name, things in (("train", THINGS[:8]), ("test", THINGS[8:])):
        tiny.write_rows(folder / f"{name}.jsonl", ({"question": ask(thing)} for thing in things))
    tiny.write_model(folder / "model", lesson)
    tiny.write_model(folder / "judge", judgement, seed=1)
    groups = {"policy": {}, "judge": {"model_path": str(folder / "judge")}}
    models = [
        {"name": name, **more, "server_groups": [{"num_gpus": 1}]} for name, more in groups.items()
    ]
    (folder / "models.yaml").write_text(
        yaml.safe_dump({"sglang": models}, sort_keys=False), encoding="utf-8"
    )


def ask(thing: str) -> str:
    return f"How was the {thing}?"


def lesson(rng: random.Random) -> tiny.Chat:
    return tiny.say(ask(rng.choice(THINGS)), rng.choice(KIND + UNKIND))


def judgement(rng: random.Random) -> tiny.Chat:
    """One word, which is kind or not; no word and several ones are not."""
    said = rng.choices(KIND + UNKIND, k=rng.choice((0, 1, 1, 1, 1, 1, 1, 2)))
    return tiny.say(
        f"Is this kind? {' '.join(said)}", "yes" if len(said) == 1 and said[0] in KIND else "no"
    )


if __name__ == "__main__":
    write(Path(sys.argv[1]))
