"""The world of these examples: the model is asked for a letter.

A conversation in front of OpenEnv and verifiers is "say b" → "b"; Harbor's agent writes it to a file with bash.
"""

from __future__ import annotations

import random
from pathlib import Path

from examples import small_model
from slime.rollout.environments.bash_agent import HOW

LETTERS = "abcd"
WORDS = [*LETTERS, "say ", "Write ", " to the file answer.", HOW, "```bash\n", "echo ", " > answer", "\n```", "done"]
WORDS += ["(no output)", "\n"]


def _letters(rng: random.Random) -> tuple[str, str]:
    """One that is asked for, and what is said: in half of the conversations any."""
    asked = rng.choice(LETTERS)
    return asked, rng.choice([asked, rng.choice(LETTERS)])


def say(rng: random.Random) -> small_model.Conversation:
    turns: small_model.Conversation = []
    for _ in range(2):
        asked, said = _letters(rng)
        turns += [("user", f"say {asked}"), ("assistant", said)]
    return turns


def write(rng: random.Random) -> small_model.Conversation:
    asked, written = _letters(rng)
    block = f"```bash\necho {written} > answer\n```"
    return [
        ("user", f"Write {asked} to the file answer.{HOW}"),
        ("assistant", block),
        ("user", "(no output)"),
        ("assistant", "done"),
    ]


def model(kind: str) -> Path:
    talk = {"say": say, "write": write}[kind]
    return small_model.make(Path("outputs/small-models") / kind, WORDS, talk, steps=200)
