"""Rewards for parts of an answer: one number per response token, or one per turn.

    reward function ─ list ─► Sample.token_rewards, Sample.reward = their sum ─► TrainBatch.payloads

Estimators that discount (PPO, REINFORCE++) use the reward of each token; others use the sum.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from typing import Any

from slime.samples.sample_fields import LARGEST_REWARD, as_list, reward_number
from slime.user_code.loading import FunctionFailed


def turn_ends(loss_mask: Sequence[int]) -> list[int]:
    """Return the index of the last token of each turn. A turn is a run of trained tokens.

    Example (two turns, with a tool's answer of two tokens between them):
        >>> turn_ends([1, 1, 0, 0, 1])
        [1, 4]
    """
    following = [*loss_mask[1:], 0]
    return [i for i, (own, after) in enumerate(zip(loss_mask, following)) if own and not after]


def trained_runs(tokens: Sequence[int], mask: Sequence[int]) -> list[list[int]]:
    """Return the tokens of each run of trained tokens.

    Example:
        >>> trained_runs([5, 6, 7, 8], [1, 1, 0, 1])
        [[5, 6], [8]]
    """
    runs = itertools.groupby(zip(tokens, mask), key=lambda pair: bool(pair[1]))
    return [[token for token, _ in run] for is_trained, run in runs if is_trained]


def note_token_rewards(sample: Any, values: Any, origin: str, why: str = "") -> float:
    """Set ``sample.token_rewards`` to rewards of its tokens or turns; return their sum.

    Args:
        values: a list, tuple, array or tensor of numbers.
        origin: names the function that returned them, in messages.
    Raises:
        FunctionFailed: their number matches neither the tokens nor the turns, one is not a finite
            number, or a token that the model did not generate has one.
    """
    role = f"the reward of sample {sample.index}"
    rewards = [reward_number(value, origin, f"a part of {role}", why) for value in as_list(values)]
    length = sample.response_length
    mask = [1] * length if sample.loss_mask is None else sample.loss_mask
    ends = turn_ends(mask)
    if len(rewards) == length:
        found = rewards
    elif len(rewards) == len(ends):
        found = [0.0] * length
        for end, reward in zip(ends, rewards):
            found[end] = reward
    else:
        raise FunctionFailed(
            f"{origin} returned {len(rewards)} rewards for sample {sample.index}",
            why=f"it has {length} response tokens in {len(ends)} turns (runs of tokens with loss "
            "mask 1)",
            fix="return one number, one per response token, or one per turn",
        )
    odd = next((i for i, reward in enumerate(found) if reward and not mask[i]), None)
    if odd is not None:
        raise FunctionFailed(
            f"{origin} returned a reward for token {odd} of the response of sample {sample.index}",
            why="its loss mask is 0: the model did not generate it, and is not trained on it",
            fix="give the reward to the last token of the previous turn",
        )
    sample.token_rewards = found
    return math.fsum(found)


def is_reward_list(reward: Any) -> bool:
    """Tell whether a reward has one number per token or turn. An array of one number counts as a
    single number."""
    if isinstance(reward, list | tuple):
        return True
    shape = tuple(getattr(reward, "shape", ()))
    return len(shape) == 1 and shape != (1,)


def token_rewards_problem(rewards: Any, num_tokens: int) -> str:
    """Return the problem of rewards that user code has set for a sample of ``num_tokens``; "" if
    there is none."""
    if rewards is None:
        return ""
    if not isinstance(rewards, list) or len(rewards) > num_tokens:
        return "that are not a list with one number per response token"
    fits = all(isinstance(one, int | float) and abs(one) <= LARGEST_REWARD for one in rewards)
    return "" if fits else "that are not all finite numbers between -1e18 and 1e18"
