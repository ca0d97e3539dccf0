"""On-policy distillation: a teacher's log-probs of the tokens that the student sampled.

``--custom-rm-path slime.rollout.on_policy_distillation.reward_func`` with ``--rm-url`` fills
``teacher_log_probs`` of each sample, which ``--use-opd`` reads. New runs use ``--opd-teacher-urls``
instead, without a reward function.
"""

from __future__ import annotations

from typing import Any

from slime.errors import UserError
from slime.rollout.plugin_api import post
from slime.samples.types import Sample


async def reward_func(args: Any, sample: Sample, **kwargs: Any) -> float:
    """Have the teacher at ``args.rm_url`` (``…/generate`` of an engine) score the sample's tokens;
    return 0.

    Raises:
        UserError: the teacher's answer has no log-prob for each token.
        EngineError: the teacher does not answer.
    """
    params = {"temperature": 0, "max_new_tokens": 0, "skip_special_tokens": False}
    body = {
        "input_ids": sample.tokens,
        "sampling_params": params,
        "return_logprob": True,
        "logprob_start_len": 0,
    }
    answer = await post(args.rm_url, body)
    logprobs = answer.get("meta_info", {}).get("input_token_logprobs") or []
    if len(logprobs) != len(sample.tokens):
        raise UserError(
            f"the teacher at {args.rm_url} gave {len(logprobs)} log-probs for {len(sample.tokens)} "
            "tokens",
            fix="--rm-url is to be the /generate of an engine whose model has the same vocabulary",
        )
    first = len(sample.tokens) - sample.response_length
    sample.teacher_log_probs = [float(entry[0]) for entry in logprobs[first:]]
    return 0.0


def post_process_rewards(
    args: Any, samples: list[Sample], **kwargs: Any
) -> tuple[list[float], list[float]]:
    """Return rewards of 0: the training signal is the teacher's log-probs, which `reward_func`
    has stored."""
    zeros = [0.0] * len(samples)
    return zeros, list(zeros)
