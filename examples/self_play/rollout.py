"""Two agents, one model: it plays Nim against itself, and both sides of a game are trained on.

    user         9 stones    the first player's conversation
    assistant    1           sampled, trained on
    user         5 stones    the second player took 3: sampled, and trained on in its conversation
    assistant    1           …

A move takes one, two or three stones; whoever takes the last one wins.
"""

from __future__ import annotations

import random
from collections import defaultdict
from typing import Any

from slime.rollout.generate import append_message
from slime.rollout.generate import generate as one_turn
from slime.samples.types import Sample

#: Tokens of a move: a number and the end of the turn.
MOST_TOKENS = 3


async def generate(
    args: Any, sample: Sample, sampling_params: dict[str, Any], evaluation: bool = False
) -> Sample | list[Sample]:
    """One game. In training a sample for each side that has moved, siblings of one trajectory; in
    an evaluation the first player's alone, whose opponent moves by chance."""
    stones = int(sample.prompt)
    sides = [
        Sample(index=sample.index, group_index=sample.group_index, metadata={"seat": seat})
        for seat in (0, 1)
    ]
    chance = random.Random(sample.index)
    turn = 0
    while stones:
        seat = turn % 2
        if evaluation and seat == 1:
            taken = chance.randint(1, min(3, stones))
        else:
            taken = await move(args, sides[seat], sampling_params, stones)
            if sides[seat].status is Sample.Status.ABORTED:
                sample.status = Sample.Status.ABORTED  # as it was drawn: the game begins anew
                return sample
        if not 1 <= taken <= min(3, stones):
            return finish(sides, seat, "broke the rules", evaluation)
        stones -= taken
        turn += 1
    return finish(sides, turn % 2, "lost", evaluation)


async def move(args: Any, side: Sample, sampling_params: dict[str, Any], stones: int) -> int:
    """How many stones this side takes; 0 for anything but a number."""
    message = {"role": "user", "content": f"{stones} stones"}
    if side.response_length:
        append_message(side, message)
    else:
        side.prompt = [message]
    words = len(side.response)
    most = min(sampling_params["max_new_tokens"], side.response_length + MOST_TOKENS)
    await one_turn(args, side, {**sampling_params, "max_new_tokens": most})
    said = side.response[words:].strip()
    return int(said) if said.isascii() and said.isdigit() else 0


def finish(sides: list[Sample], loser: int, how: str, evaluation: bool) -> Sample | list[Sample]:
    """With rewards: 1 for who won and -1 for who lost (--reward-key score), in evaluations 1 and
    0."""
    for seat, side in enumerate(sides):
        lost = seat == loser
        side.reward = {
            "score": 1.0 if not lost else 0.0 if evaluation else -1.0,
            "how": how if lost else "won",
        }
    return sides[0] if evaluation else [side for side in sides if side.response_length]


def compare(args: Any, samples: list[Sample]) -> tuple[list[float], list[float]]:
    """(rewards, advantages): a side is compared with those who sat in the same seat of the same
    game. The two rewards of a game add up to 0, so that the mean over both seats would say
    nothing."""
    rewards = [sample.reward["score"] for sample in samples]
    seats: dict[Any, list[float]] = defaultdict(list)
    for sample, reward in zip(samples, rewards):
        seats[sample.group_index, sample.metadata["seat"]].append(reward)
    means = {seat: sum(values) / len(values) for seat, values in seats.items()}
    return rewards, [r - means[s.group_index, s.metadata["seat"]] for s, r in zip(samples, rewards)]
