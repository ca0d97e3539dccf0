"""Checks of the samples that users' functions return, made before anything else reads them.

A sample with invalid lengths, tokens or numbers would fail much later, in the trainer, and with it
the whole batch. Refused here, only the sample is lost.
"""

from __future__ import annotations

import operator
from collections import Counter
from collections.abc import Sequence
from typing import Any

from slime.errors import UserError, a_type, name_and_text
from slime.log import get_logger, tell
from slime.prompts.tokenizer import opening_tokens
from slime.rollout.generate import GenerateState, prompt_token_ids
from slime.rollout.resumed_requests import has_ended
from slime.samples.payloads import PAYLOADS
from slime.samples.sample_fields import (
    PER_TOKEN,
    kind_problem,
    number_problem,
    packed_ids,
    reward_number,
    tell_of_other_names,
    token_problem,
)
from slime.samples.token_rewards import is_reward_list, note_token_rewards
from slime.samples.types import Group, Sample, SampleStatus
from slime.user_code.loading import FunctionFailed, shown

logger = get_logger(__name__)

#: Number of tokens that are hardly all sampled with a probability that rounds to 1.
_CERTAIN = 16


def samples_of(returned: Any, origin: str) -> list[Sample]:
    """Return the samples that a generate function returned: one, or a list.

    Raises:
        UserError: ``returned`` is something else, or an empty list.
    """
    samples = returned if isinstance(returned, list) else [returned]
    if not samples or not all(isinstance(sample, Sample) for sample in samples):
        kind = "an empty list" if returned == [] else a_type(returned)
        raise UserError(f"{origin} returned {kind}", fix="return the sample, or a list of samples")
    return samples


def finish_samples(
    samples: Sequence[Sample],
    prompt: Sample,
    tokenizer: Any,
    origin: str,
    *,
    is_fan_out: bool,
    aborting: bool,
) -> list[Sample]:
    """Set what user code need not set, and check lengths; siblings of a fan-out share the id of
    their trajectory. Returns the samples that came as text only.

    Args:
        prompt: the sample that the function was given.
        aborting: a PENDING sample was cut short.
    Raises:
        UserError: lengths do not match, one sample is there twice, or siblings differ in
            ``rollout_id``.
    """
    from_text: list[Sample] = []
    if len(set(map(id, samples))) < len(samples):
        raise UserError(
            f"{origin} returned the same sample twice", fix="return copies: copy.deepcopy(sample)"
        )
    for sample in samples:
        if (problem := kind_problem(sample)) is not None:
            raise UserError(
                f"{origin} returned a sample (index {prompt.index}) with {problem[0]}",
                fix=problem[1],
            )
        keep_identity(sample, prompt, origin)
        sample.session_id = sample.session_id or prompt.session_id
        from_text += [sample] if _completed(sample, tokenizer, prompt.tokens, origin) else []
        sample.validate(origin)
        if sample.status is SampleStatus.PENDING:  # user code need not set the status
            sample.status = SampleStatus.ABORTED if aborting else SampleStatus.COMPLETED
    if is_fan_out:
        ids = {sample.rollout_id for sample in samples}
        if len(ids) > 1:
            raise UserError(
                f"{origin} returned samples of one trajectory with different rollout_id: "
                f"{sorted(map(str, ids))}",
                fix="set the same sample.rollout_id on each of them, or leave it None",
            )
    for sample in samples:
        sample.rollout_id = prompt.index if is_fan_out else prompt.rollout_id
    return from_text


def _completed(sample: Sample, tokenizer: Any, drawn: list[int], origin: str) -> bool:
    """`complete_tokens`, with errors that name the function."""
    try:
        return complete_tokens(sample, tokenizer, drawn)
    except UserError as error:
        raise UserError(
            f"{origin} returned an odd sample: {error.what}", error.why, error.fix
        ) from error
    except Exception as error:  # the tokenizer or the chat template may raise anything
        what = f"{origin} returned a sample (index {sample.index}) whose text cannot be tokenised"
        raise UserError(what, why=name_and_text(error), fix="return tokens as well") from error


def complete_tokens(sample: Sample, tokenizer: Any, drawn: list[int]) -> bool:
    """Tokenise a finished sample that user code built from text only (``Sample(prompt=…,
    response=…)``); return whether it was one.

    Args:
        drawn: tokens of the drawn prompt; [] if it is text.
    Raises:
        UserError: the sample has other tokens than the prompt's, so the response cannot be told
            apart.
    """
    if not sample.response or sample.response_length:
        return False
    if not sample.tokens or sample.tokens != drawn:
        prompt = prompt_token_ids(tokenizer, sample)
        if [*opening_tokens(tokenizer), *sample.tokens] == prompt:
            prompt = sample.tokens
        elif sample.tokens not in ([], prompt):
            raise UserError(
                f"sample {sample.index} has a response and {len(sample.tokens)} tokens, but "
                "response_length 0",
                fix="set response_length, or leave tokens and response_length to us, with text "
                "alone",
            )
        sample.tokens = prompt
    ids = tokenizer.encode(sample.response, add_special_tokens=False)
    sample.tokens = sample.tokens + ids
    sample.response_length = len(ids)
    return True


def warn_of_missing_end_token(samples: Sequence[Sample], origin: str, state: GenerateState) -> None:
    """Warn once if answers that came as text only are trained without an end token.

    None is added, because text does not tell which end token the model sampled, if any.
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
                "%s returns text alone, without the token that ends an answer (sample %s, for "
                "one): its text is tokenised for training, which so never sees an answer end, nor "
                "the log-probs of what was sampled. Return what the engine gave, with "
                "sample.append_response_tokens(tokens=…, log_probs=…) as "
                "slime.rollout.generate.generate does, or call that; or ask for text that keeps "
                "its end (skip_special_tokens=False)",
                origin,
                sample.index,
                once=f"text alone {origin}",
            )
            return


def check_values(sample: Sample, origin: str, vocab_size: int | None, args: Any) -> None:
    """Check the values of a sample that user code has built or changed; types and lengths are
    already checked.

    Args:
        vocab_size: the model's; None if unknown.
    Raises:
        UserError: a token is not an integer or not in the vocabulary, there is no token before the
            response, a log-prob is not finite or above 0, spans or experts do not match, or the
            reward is not a finite number.
    """

    def refuse(what: str, fix: str) -> None:
        raise UserError(f"{origin} returned a sample (index {sample.index}) with {what}", fix=fix)

    tell_of_other_names([sample], origin)
    ids = packed_ids(sample.tokens)
    if problem := token_problem(sample.tokens if ids is None else ids, vocab_size):
        refuse(problem, "encode with the model's tokenizer")
    if ids is None:
        # also integers of NumPy and torch
        sample.tokens = [operator.index(token) for token in sample.tokens]
    if sample.response_length and not sample.prompt_length:
        refuse(
            f"{len(sample.tokens)} tokens, all of them of the response",
            "put the prompt's tokens before them: sample.tokens = prompt_ids + response_ids, with "
            "response_length = len(response_ids); or append with sample.append_response_tokens",
        )
    for name in PER_TOKEN:
        if problem := number_problem(name, getattr(sample, name)):
            refuse(
                problem,
                "give the numbers of the engine's answer, 0.0 where the model did not sample the "
                "token",
            )
    tell_of_zeros(sample, origin)
    bounds = [
        0,
        *(bound for span in sample.token_spans for bound in (span.start, span.end)),
        sample.response_length,
    ]
    if bounds != sorted(bounds):
        refuse(
            f"token_spans {shown(sample.token_spans)}",
            "leave them to sample.append_response_tokens",
        )
    for payload in PAYLOADS.values():
        if problem := payload.problem(getattr(sample, payload.field), len(sample.tokens)):
            refuse(f"{payload.field} {problem}", "leave them to sample.append_response_tokens")
    check_reward(sample, origin, args)


def tell_of_zeros(sample: Sample, origin: str) -> None:
    """Warn once if the log-probs of all trained tokens are 0, as if each had been certain."""
    masks = sample.loss_mask or [1] * sample.response_length
    log_probs = sample.rollout_log_probs or []
    sampled = [value for value, mask in zip(log_probs, masks) if mask]
    if len(sampled) >= _CERTAIN and not any(sampled) and sample.rollout_top_p_token_ids is None:
        tell(
            logger,
            "%s returns log-probs of 0 for all %d trained tokens (sample %s, for one), as if each "
            "had been certain; give those of the engine's answer, or None if there are none",
            origin,
            len(sampled),
            sample.index,
            once=f"zeros {origin}",
        )


def check_reward(sample: Sample, origin: str, args: Any) -> None:
    """Check a reward that user code has set.

    Raises:
        FunctionFailed: the reward is neither a finite number nor a dict with one.
    """
    role = f"the reward of sample {sample.index}"
    if isinstance(sample.reward, dict):
        for key in (getattr(args, "reward_key", None), getattr(args, "eval_reward_key", None)):
            if key in sample.reward:
                sample.reward[key] = reward_number(sample.reward[key], origin, f"{key!r} in {role}")
    elif is_reward_list(sample.reward):
        sample.reward = note_token_rewards(sample, sample.reward, origin)
    elif sample.reward is not None:
        sample.reward = reward_number(sample.reward, origin, role)


def keep_identity(sample: Sample, prompt: Sample, origin: str) -> None:
    """Restore the indices that a sample was drawn with: order, seeds and group statistics depend on
    them."""
    for name in ("index", "group_index"):
        drawn = getattr(prompt, name)
        own = getattr(sample, name)
        if own not in (None, drawn):
            tell(
                logger,
                "%s returns samples with an %s of its own (%s for %s, for one): they keep that of "
                "the prompt; sample.metadata has room for numbers of yours",
                origin,
                name,
                own,
                drawn,
                once=f"{name} {origin}",
            )
        setattr(sample, name, drawn)


def warn_of_other_prompt(sample: Sample, prompt: Sample, origin: str) -> None:
    """Warn once if a function returns other prompt tokens than it was given, and has not changed
    ``sample.prompt``."""
    drawn = prompt.tokens[: prompt.prompt_length]
    own = sample.tokens[: sample.prompt_length]
    if sample.prompt == prompt.prompt and drawn and own[: len(drawn)] != drawn:
        tell(
            logger,
            "%s returns tokens that do not begin with those of the prompt that it was given "
            "(sample %s, for one: %d tokens, %d given). Where it renders the prompt itself, set "
            "sample.prompt to what it renders; otherwise put sample.tokens, as they were given, "
            "before the response",
            origin,
            prompt.index,
            len(own),
            len(drawn),
            once=f"other prompt {origin}",
        )


def check_distinct(groups: Sequence[Group], origin: str) -> None:
    """Check that groups and trajectories of a rollout are distinct.

    Raises:
        FunctionFailed: two groups share a group_index, so their rewards would be compared; or two
            trajectories share an index, or a sample is there twice.
    """
    fix = "give each group a group_index, and each sample an index, of its own; or leave them None"
    for name, values in (
        ("group_index", [next((s.group_index for s in group.samples), None) for group in groups]),
        ("index", [trajectory[0].index for group in groups for trajectory in group.trajectories]),
    ):
        most_common = Counter(value for value in values if value is not None).most_common(1)
        if most_common and most_common[0][1] > 1:
            value, count = most_common[0]
            things = "groups" if name == "group_index" else "samples"
            raise FunctionFailed(f"{origin} returned {count} {things} with {name} {value}", fix=fix)
    ids = Counter(id(sample) for group in groups for sample in group.samples)
    if len(ids) != ids.total():
        raise FunctionFailed(
            f"{origin} returned the same sample twice", fix="return copies: copy.deepcopy(sample)"
        )
