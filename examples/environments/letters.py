"""The world of these examples: the model is asked for a letter.

A conversation in front of OpenEnv and verifiers is "say x" → "x"; Harbor's agent writes it to a
file with bash.
"""

from __future__ import annotations

import random
from pathlib import Path

from examples import tiny
from slime.environments.bash_agent import HOW

#: No word of `HOW`: the letter that is asked for stands in the prompt once.
LETTERS = "wxyz"


def _letters(rng: random.Random) -> tuple[str, str]:
    """One that is asked for, and what is said: in half of the conversations any."""
    asked = rng.choice(LETTERS)
    return asked, asked if rng.random() < 0.5 else rng.choice(LETTERS)


def say(rng: random.Random) -> tiny.Chat:
    """One question, or two; `tiny` teaches the answer to the last."""
    chat: tiny.Chat = []
    for _ in range(rng.choice((1, 2))):
        asked, said = _letters(rng)
        chat += tiny.say(f"say {asked}", said)
    return chat


def write(rng: random.Random) -> tiny.Chat:
    asked, written = _letters(rng)
    begun = tiny.say(
        f"Write {asked} to the file answer.{HOW}", f"```bash\necho {written} > answer\n```"
    )
    return begun if rng.random() < 0.8 else [*begun, *tiny.say("(no output)", "done")]


def model(kind: str) -> Path:
    """The folder of a model that has seen these conversations; made once."""
    folder = Path("outputs/environments") / f"model-{kind}"
    if not (folder / "tokenizer.json").exists():  # it is written last
        tiny.write_model(folder, {"say": say, "write": write}[kind], steps=100)
    return folder
