"""Two models for the judge example: python -m examples.judge.data FOLDER

FOLDER gets train.jsonl and test.jsonl; model/, a tiny model that answers with any of 24 words; judge/, another one that
knows which words are colours, animals and fruits; and models.yaml, the file of --sglang-config.
"""

from __future__ import annotations

import random
import sys
from pathlib import Path

import yaml

from examples import tiny

KINDS = {
    "a colour": ["red", "blue", "green", "yellow", "purple", "brown", "black", "white"],
    "an animal": ["cat", "dog", "horse", "mouse", "tiger", "whale", "eagle", "shark"],
    "a fruit": ["apple", "pear", "plum", "cherry", "banana", "mango", "grape", "lemon"],
}
WORDS = [word for words in KINDS.values() for word in words]


def write(folder: Path) -> None:
    """Three questions, again and again: what differs is what the model says."""
    for name, count in (("train", 64), ("test", 8)):
        rows = ({"question": f"Name {kind}.", "kind": kind} for kind in [*KINDS] * count)
        tiny.write_rows(folder / f"{name}.jsonl", rows)
    tiny.write_model(folder / "model", lesson)
    tiny.write_model(folder / "judge", judgement, steps=250, seed=1)
    groups = [{"num_gpus": 1}]
    judge = {"name": "judge", "model_path": str(folder / "judge"), "server_groups": groups}
    models = {"sglang": [{"name": "policy", "server_groups": [dict(group) for group in groups]}, judge]}
    (folder / "models.yaml").write_text(yaml.safe_dump(models, sort_keys=False), encoding="utf-8")


def lesson(rng: random.Random) -> tiny.Chat:
    return tiny.say(f"Name {rng.choice([*KINDS])}.", rng.choice(WORDS))


def judgement(rng: random.Random) -> tiny.Chat:
    """Every other word is of the kind; some answers are no word, or several."""
    kind = rng.choice([*KINDS])
    word = rng.choice(KINDS[kind] if rng.random() < 0.5 else WORDS)
    words = word if rng.random() < 0.9 else " ".join(rng.choices(WORDS, k=rng.choice((0, 2, 3))))
    return tiny.say(f"Is this {kind}? {words}", "yes" if words in KINDS[kind] else "no")


if __name__ == "__main__":
    write(Path(sys.argv[1]))
