"""Payloads: values of a sample that only the trainer reads.

    Sample.<field> ─► Columns.payloads ─► TrainBatch.payloads ─► micro-batch, by index of the sample

Conversion, packing, journal and dumps carry a payload without knowing its meaning. A new kind needs
a field of `Sample` (with its row in `slime.samples.sample_fields.FIELDS`), a row here, code that
sets the field, and code in the trainer that reads the column.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from slime.samples.routed_experts import experts_problem
from slime.samples.sampling_mask import mask_ids_problem, mask_offsets_problem
from slime.samples.teacher_scores import prompt_problem, top_tokens_problem
from slime.samples.token_rewards import token_rewards_problem


@dataclass(frozen=True)
class Payload:
    """One kind of payload.

    Attributes:
        field: the field of `Sample` that holds it; also its name in a converter's dict.
        problem: (value, number of tokens) → a description of the problem; "" if there is none.
    """

    field: str
    problem: Callable[[Any, int], str]


#: Name of the column → payload. A sample that trains no token may lack it; its entry is empty.
PAYLOADS = {
    "routed_experts": Payload("rollout_routed_experts", experts_problem),
    "sampling_mask_ids": Payload("rollout_top_p_token_ids", mask_ids_problem),
    "sampling_mask_offsets": Payload("rollout_top_p_token_offsets", mask_offsets_problem),
    "token_rewards": Payload("token_rewards", token_rewards_problem),
    "teacher_prompts": Payload("teacher_prompt_tokens", prompt_problem),
    "teacher_top": Payload("teacher_top_tokens", top_tokens_problem),
}
