"""A data source that gets harder as the model gets better.

levels of difficulty ──► get_samples ──► rollout ──► learn(groups): scores of the level
       ▲                                                   │
       └────────────── a level up: scores above 0.8 ◄──────┘
"""

from __future__ import annotations

import random
from typing import Any

from slime.samples.types import Sample
from slime.user_code.hooks import DataSource

LETTERS = "abcdefgh"
LEVELS = 6
#: Mean score of the newest groups of a level, at which it is mastered, and how many of them are
#: looked at.
MASTERED = 0.8
WINDOW = 24


class Curriculum(DataSource):
    """Words to be written backwards: of one letter at level 1, two at level 2, and so on. A quarter
    is of lower levels, so that those are not forgotten. Its state is kept in the checkpoint; words
    that were drawn and not trained on are not drawn again after a resume, since there are always
    others."""

    def __init__(self, args: Any) -> None:
        self.args = args
        self.level = 1
        self.scores: list[float] = []  # of the newest groups of the level
        self.drawn = 0
        self.put_back: list[list[Sample]] = []

    def get_samples(self, num_samples: int) -> list[list[Sample]]:
        groups = self.put_back[:num_samples]
        self.put_back = self.put_back[num_samples:]
        while len(groups) < num_samples:
            groups.append(self.draw())
        return groups

    def draw(self) -> list[Sample]:
        """A group of samples of one word; which one follows from its number, and from the level."""
        number = self.drawn
        size = self.args.n_samples_per_prompt
        self.drawn += 1
        rng = random.Random(f"{self.args.rollout_seed} {number}")
        level = self.level if rng.random() < 0.75 else rng.randint(1, self.level)
        word = "".join(rng.choices(LETTERS, k=level))
        return [
            Sample(
                group_index=number,
                index=number * size + place,
                prompt=[{"role": "user", "content": " ".join(word)}],
                label=" ".join(reversed(word)),
                metadata={"level": level},
            )
            for place in range(size)
        ]

    def add_samples(self, samples: list[list[Sample]]) -> None:
        self.put_back += samples

    def learn(self, groups: list[list[Sample]]) -> None:
        """What the model makes of the level decides on the next one."""
        for group in groups:
            if group[0].metadata["level"] == self.level:
                self.scores.append(sum(sample.reward["score"] for sample in group) / len(group))
        self.scores = self.scores[-WINDOW:]
        if (
            len(self.scores) == WINDOW
            and sum(self.scores) / WINDOW > MASTERED
            and self.level < LEVELS
        ):
            self.level = self.level + 1
            self.scores = []

    def state_dict(self) -> dict[str, Any]:
        return {"level": self.level, "scores": self.scores, "drawn": self.drawn}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.level = state["level"]
        self.scores = state["scores"]
        self.drawn = state["drawn"]


def tell_source(args: Any, all_groups: list[list[Sample]], data_source: Curriculum) -> None:
    """--rollout-all-samples-process-path: the source gets to know how it went."""
    data_source.learn(all_groups)


def reward(args: Any, sample: Sample, **kwargs: Any) -> dict[str, Any]:
    """1 for the word backwards (--reward-key score); the levels are counted (--log-reward-category
    level)."""
    right = sample.response.strip() == sample.label
    return {"score": float(right), "level": f"level-{sample.metadata['level']}"}
