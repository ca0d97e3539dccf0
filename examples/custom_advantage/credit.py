"""An advantage of one's own: a wrong answer is wrong from its first mistake on.

label         6 5 4 3 2 1
response      6 5 4 9 2 1        right until the 9
GRPO          - - - - - -        all of its tokens are pushed down alike
here          . . . - . .        the first mistake is; what is behind it says nothing
"""

from __future__ import annotations

from itertools import zip_longest
from typing import Any

import torch

from slime.samples.types import Sample


def reward(args: Any, sample: Sample, **kwargs: Any) -> float:
    """1 for the right answer. Where the first mistake is goes to the trainer: what is in
    `train_metadata` of a sample is in `rollout_data["metadata"]` there."""
    pairs = zip_longest(sample.response, sample.label)
    first = next((at for at, (said, wanted) in enumerate(pairs) if said != wanted), None)
    sample.train_metadata = {"mistake": first}
    return float(first is None)


def advantages(args: Any, rollout_data: dict[str, Any]) -> None:
    """--custom-advantage-function-path: the normalised reward on all tokens of a right answer, and
    on the first wrong one of a wrong answer. Digits are tokens here; elsewhere the tokenizer says
    which token a mistake is in."""
    found = []
    for advantage, length, about in zip(
        rollout_data["rewards"], rollout_data["response_lengths"], rollout_data["metadata"]
    ):
        tokens = torch.full((length,), float(advantage))
        mistake = (about or {}).get(
            "mistake"
        )  # of a reward that did not come in time nothing is known
        if mistake is not None:
            mistake = min(
                mistake, length - 1
            )  # an answer that ended too early: its end is the mistake
            tokens[:mistake] = 0.0
            tokens[mistake + 1 :] = 0.0
        found.append(tokens)
    rollout_data["advantages"] = found
