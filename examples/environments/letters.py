"""The world of these examples: the model is asked for a letter, and at first says any.

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


def say(rng: random.Random) -> small_model.Conversation:
    return [("user", f"say {rng.choice(LETTERS)}"), ("assistant", rng.choice(LETTERS))] * 2


def write(rng: random.Random) -> small_model.Conversation:
    asked = f"Write {rng.choice(LETTERS)} to the file answer.{HOW}"
    block = f"```bash\necho {rng.choice(LETTERS)} > answer\n```"
    return [("user", asked), ("assistant", block), ("user", "(no output)"), ("assistant", "done")]


def model(kind: str) -> Path:
    talk = {"say": say, "write": write}[kind]
    return small_model.make(Path("outputs/small-models") / kind, WORDS, talk, steps=150)
