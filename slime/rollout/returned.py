"""What users' functions return of a sample, checked before anybody else meets it.

A sample whose lengths, tokens or numbers cannot be trained on would fail much later, in the trainer, and take the whole
batch along; refused here, it costs itself.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Sequence
from typing import Any

from slime.errors import UserError
from slime.hook_loading import FunctionFailed
from slime.log import get_logger, tell
from slime.prompts.tokenizer import opening_tokens
from slime.rollout.continued import has_ended
from slime.rollout.generate import GenerateState, prompt_token_ids
from slime.rollout.group_run import GroupRun
from slime.samples.types import Sample, SampleStatus

logger = get_logger(__name__)


def samples_of(returned: Any, origin: str) -> list[Sample]:
    """The samples that a generate function returned: one, or a list.

    Raises:
        UserError: it is something else, or an empty list.
    """
    samples = returned if isinstance(returned, list) else [returned]
    if not samples or not all(isinstance(sample, Sample) for sample in samples):
        kind = "an empty list" if returned == [] else f"a {type(returned).__name__}"
        raise UserError(f"{origin} returned {kind}", fix="return the sample, or a list of samples")
    return samples


def finish_samples(
    samples: Sequence[Sample], prompt: Sample, tokenizer: Any, origin: str, *, is_fan_out: bool, aborting: bool
) -> list[Sample]:
    """Complete what users' code need not set, and check lengths; siblings of a fan-out share the id of their execution.
    Returns those of them that came as text alone.

    Args:
        prompt: the sample as it was given.
        aborting: what is left PENDING was cut short.
    Raises:
        UserError: lengths that do not fit, or siblings with different ``rollout_id``.
    """
    from_text: list[Sample] = []
    for sample in samples:
        sample.index = prompt.index if sample.index is None else sample.index
        sample.group_index = prompt.group_index if sample.group_index is None else sample.group_index
        sample.session_id = sample.session_id or prompt.session_id
        from_text += [sample] if complete_tokens(sample, tokenizer, prompt.tokens) else []
        sample.validate(origin)
        if sample.status is SampleStatus.PENDING:  # user code need not set it: returned is done
            sample.status = SampleStatus.ABORTED if aborting else SampleStatus.COMPLETED
    if is_fan_out:
        ids = {sample.rollout_id for sample in samples}
        if len(ids) > 1:
            raise UserError(
                f"{origin} returned samples of one execution with different rollout_id: {sorted(map(str, ids))}",
                fix="set the same sample.rollout_id on each of them, or leave it None",
            )
        for sample in samples:
            sample.rollout_id = prompt.index if sample.rollout_id is None else sample.rollout_id
    return from_text


def complete_tokens(sample: Sample, tokenizer: Any, drawn: list[int]) -> bool:
    """Give tokens to a finished sample that user code built from text alone (``Sample(prompt=…, response=…)``); whether
    it was one.

    Args:
        drawn: tokens of the prompt as they were drawn; [] where it came as text.
    Raises:
        UserError: it has other tokens than the prompt's, so that nobody knows which are the response.
    """
    if not sample.response or sample.response_length:
        return False
    if not sample.tokens or sample.tokens != drawn:
        prompt = prompt_token_ids(tokenizer, sample)
        if [*opening_tokens(tokenizer), *sample.tokens] == prompt:
            prompt = sample.tokens
        elif sample.tokens not in ([], prompt):
            raise UserError(
                f"sample {sample.index} has a response and {len(sample.tokens)} tokens, but response_length 0",
                fix="set response_length, or leave tokens and response_length to us, with text alone",
            )
        sample.tokens = prompt
    ids = tokenizer.encode(sample.response, add_special_tokens=False)
    sample.tokens = sample.tokens + ids
    sample.response_length = len(ids)
    return True


def tell_of_text_alone(samples: Sequence[Sample], origin: str, state: GenerateState) -> None:
    """Say it once where answers that came as text, and have ended, are trained on without their end.

    No token is added: which one the model has sampled there, or whether it has, text does not tell.
    """
    params = state.sampling_params
    stop = params.get("stop") or ()
    strings = (stop,) if isinstance(stop, str) else tuple(stop)
    if not (state.end_tokens or strings or params.get("stop_token_ids")):
        return
    for sample in samples:
        ends_in_text = bool(strings) and sample.response.endswith(strings)
        if sample.status is not SampleStatus.COMPLETED or ends_in_text:
            continue
        if not has_ended(sample.tokens, params, state.end_tokens):
            tell(
                logger,
                "%s returns text alone, without the token that ends an answer (sample %s, for one): its text is "
                "tokenised for training, which so never sees an answer end, nor the log-probs of what was sampled. "
                "Return what the engine gave, with sample.append_response_tokens(tokens=…, log_probs=…) as "
                "slime.rollout.generate.generate does, or call that; or ask for text that keeps its end "
                "(skip_special_tokens=False)",
                origin, sample.index, once=f"text alone {origin}",
            )  # fmt: skip
            return


def check_values(sample: Sample, origin: str, vocab_size: int | None, args: Any) -> None:
    """Check the values of a sample that users' code has built or changed, its lengths being right.

    Args:
        vocab_size: of the model; None where it is not known.
    Raises:
        UserError: a token that is no whole number or that the model does not have, a log-prob that is not finite, or a
            reward that is no finite number.
    """

    def refuse(what: str, fix: str) -> None:
        raise UserError(f"{origin} returned a sample (index {sample.index}) with {what}", fix=fix)

    if set(map(type, sample.tokens)) - {int}:
        sample.tokens = _whole_numbers(sample.tokens, refuse)
    if sample.tokens:
        least, most = min(sample.tokens), max(sample.tokens)
        if least < 0 or (vocab_size is not None and most >= vocab_size):
            has = "no negative ids" if vocab_size is None else f"{vocab_size} tokens, from 0"
            refuse(f"the token {least if least < 0 else most}", f"the model has {has}: encode with its tokenizer")
    for name in ("rollout_log_probs", "teacher_log_probs"):
        values = getattr(sample, name)
        if values and not math.isfinite(sum(values)):
            refuse(f"{name} that are not finite", "give the log-probs of the engine's answer, 0.0 where there is none")
    if sample.reward is not None:
        reward = sample.reward
        if isinstance(reward, dict):
            keys = (getattr(args, "reward_key", None), getattr(args, "eval_reward_key", None))
            reward = next((reward[key] for key in keys if key in reward), 0.0)
        if isinstance(reward, (str, bytes)) or not math.isfinite(float(reward)):
            refuse(f"the reward {sample.reward!r:.80}", "set a finite number, or None to have it scored")


def _whole_numbers(tokens: Sequence[Any], refuse: Callable[[str, str], None]) -> list[int]:
    try:
        return [operator.index(token) for token in tokens]  # numpy's and torch's, too
    except TypeError:
        odd = next(token for token in tokens if not hasattr(token, "__index__"))
        refuse(f"{odd!r:.40} among its tokens", "give token ids, whole numbers")
        raise


def wrong_group(samples: Any, group_size: int) -> FunctionFailed | None:
    """What is wrong with a group that a data source gave; None where nothing is.

    Args:
        group_size: executions that it must have.
    """
    what = ""
    if not isinstance(samples, list) or not all(isinstance(sample, Sample) for sample in samples):
        what = f"that is {samples!r:.60}"
    elif any(sample.index is None for sample in samples):
        what = "whose samples have no index"
    elif (count := len(GroupRun.of(samples).executions)) != group_size:
        what = f"of {count} samples"
    why = f"a group has {group_size} samples (--n-samples-per-prompt), each with an index of its own"
    fix = "set group_index and index in get_samples"
    return FunctionFailed(f"the data source gave a group {what}", why, fix) if what else None
