"""Causes outside the model: other tokens, another context, or another way from logits to
log-probs."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial

import torch
from torch import Tensor

from slime.diagnosis.align.case import Discrepancy, Side, Tried, Untested
from slime.diagnosis.align.evidence import Scored, explained, size
from slime.diagnosis.align.reference import Reference, Sampling
from slime.errors import UserError
from slime.prompts.chat_template import render_messages, render_prompt

_SHIFTS = (1, -1, 2, -2)
#: Range and number of temperatures that are tried in addition to the plausible ones.
_LOWEST = 0.1
_HIGHEST = 4.0
_SEARCHES = 24
#: Minimum gain in share of another temperature over the best plausible one.
_BETTER = 0.05


# -- tokens ----------------------------------------------------------------------------------------


def other_tokens(case: Discrepancy) -> Iterator[Tried]:
    """Test whether the two sides scored different token ids."""
    if any(sample.sent is not None for sample in case.samples):
        yield _two_dumps(case)
    if case.tokenizer is None:
        raise Untested("the model's tokenizer is not available")
    again = "the prompt's text was tokenised again"
    yield from _contexts(case, {again: lambda sample: _encoded(case, _text(case, sample))})


def _two_dumps(case: Discrepancy) -> Tried:
    model = case.model()
    count = 0
    first = ""
    variant = []
    for sample, base in zip(case.samples, case.base, strict=True):
        sent = sample.tokens if sample.sent is None else sample.sent
        if len(sent) == len(sample.tokens) and torch.equal(sent, sample.tokens):
            variant.append(base)
            continue
        length = min(len(sent), len(sample.tokens))
        unequal = (sent[:length] != sample.tokens[:length]).nonzero()
        count += len(unequal) + abs(len(sent) - len(sample.tokens))
        place = int(unequal[0]) if len(unequal) else length
        first = first or f"first: {sample.name}, position {place}"
        variant.append(model.log_probs(replace(sample, tokens=sent)))
    what = f"scored {count} other token ids than the other side"
    remedies = (
        "keep the ids that the engine returned: sample.append_response_tokens(tokens=…); never "
        "tokenise text",
    )
    return case.tried(what, variant, details=(first,) if first else (), remedies=remedies)


# -- shift -----------------------------------------------------------------------------------------


def shift(case: Discrepancy) -> Iterator[Tried]:
    """Test whether one side's log-probs belong to neighbouring tokens."""
    whole = case.differences.values
    at_fault: Side = ""
    if case.from_reference:
        at_fault = "trainer"
        if case.from_reference["engine"] > case.from_reference["trainer"]:
            at_fault = "engine"
    for by in _SHIFTS:
        shifted = [_shifted(sample.engine, by) for sample in case.samples]
        # hypothesis: the trainer's log-prob of a token is the engine's of a neighbour
        predicted = torch.cat(
            [(s - e.engine)[e.counted] for s, e in zip(shifted, case.samples, strict=True)]
        )
        known = predicted.isfinite()
        if int(known.sum()) * 2 < len(known):
            raise Untested("responses of one or two tokens have no neighbours")
        share = explained(whole[known], predicted[known])
        is_later = (by < 0) != (at_fault == "trainer")
        what = f"log-probs are those of the token {abs(by)} {'later' if is_later else 'earlier'}"
        left = size(whole[known] - predicted[known])
        remedy = (
            "position p of the logits predicts token p + 1: look at custom generate, conversion "
            "and loss functions"
        )
        yield Tried(what, at_fault, share, left, remedies=(remedy,))


def _shifted(values: Tensor, by: int) -> Tensor:
    """Return ``values[t + by]`` for each t; NaN outside of the range."""
    moved = torch.full_like(values, float("nan"))
    if abs(by) < len(values):
        inside = values[max(0, by) : len(values) + min(0, by)]
        moved[max(0, -by) : len(values) - max(0, by)] = inside
    return moved


# -- the context -----------------------------------------------------------------------------------


def template(case: Discrepancy) -> Iterator[Tried]:
    """Test whether one side scored the response after another prompt: chat template, generation
    prompt or BOS token differ."""
    tokenizer = case.tokenizer
    if tokenizer is None:
        raise Untested("the model's tokenizer is not available")
    makers: dict[str, Callable[[Scored], list[int] | None]] = {
        "the prompt lacks its first token": lambda sample: _prompt(sample)[1:],
        "the prompt lacks its last token": lambda sample: _prompt(sample)[:-1],
    }
    if tokenizer.bos_token_id is not None:
        makers[f"the prompt begins with {tokenizer.bos_token}"] = lambda sample: (
            None
            if _prompt(sample)[:1] == [tokenizer.bos_token_id]
            else [tokenizer.bos_token_id, *_prompt(sample)]
        )
    if tokenizer.chat_template:
        makers |= {
            "the prompt is in the chat template (once more)": partial(_templated, case),
            "the prompt is without the chat template": partial(_bare, case),
            "the prompt lacks the generation prompt": partial(_without_generation_prompt, case),
            "the prompt has the generation prompt twice": lambda sample: [
                *_prompt(sample),
                *_generation_prompt(case),
            ],
        }
    remedies = (
        f"--apply-chat-template is {'on' if case.facts.get('apply_chat_template') else 'off'}: "
        "both sides must get the same ids; let custom generate functions send sample.tokens as "
        "input_ids, not text",
    )
    yield from _contexts(case, makers, remedies)


def _contexts(
    case: Discrepancy,
    makers: dict[str, Callable[[Scored], list[int] | None]],
    remedies: tuple[str, ...] = (),
) -> Iterator[Tried]:
    model = case.model()
    for what, make in makers.items():
        made = [make(sample) for sample in case.samples]
        changed = [
            tokens if tokens and tokens != _prompt(s) and _has_images(model, s, tokens) else None
            for tokens, s in zip(made, case.samples)
        ]
        if not any(changed):
            continue
        yield case.tried(
            what,
            [
                base if tokens is None else model.log_probs(sample, context=torch.tensor(tokens))
                for sample, tokens, base in zip(case.samples, changed, case.base, strict=True)
            ],
            remedies=remedies,
        )


def _has_images(model: Reference, sample: Scored, context: list[int]) -> bool:
    return model.media_behind(sample, torch.tensor(context)) is not None


def _prompt(sample: Scored) -> list[int]:
    return [int(token) for token in sample.tokens[: sample.prompt_length]]


def _text(case: Discrepancy, sample: Scored) -> str:
    return str(case.tokenizer.decode(_prompt(sample), skip_special_tokens=False))


def _encoded(case: Discrepancy, text: str) -> list[int]:
    return list(case.tokenizer.encode(text, add_special_tokens=False))


def _templated(case: Discrepancy, sample: Scored) -> list[int] | None:
    try:
        return _encoded(case, render_prompt(case.tokenizer, _text(case, sample)))
    except UserError:
        return None


def _bare(case: Discrepancy, sample: Scored) -> list[int] | None:
    """Return the prompt without the chat template around the user's turn."""
    mark = "the user's words"
    try:
        around = render_prompt(case.tokenizer, mark)
    except UserError:
        return None
    head, _, end = around.partition(mark)
    text = _text(case, sample)
    if not (head or end) or not text.startswith(head) or not text.endswith(end):
        return None
    return _encoded(case, text[len(head) : len(text) - len(end)])


def _generation_prompt(case: Discrepancy) -> list[int]:
    """Return the tokens that the chat template adds before an assistant's answer."""
    messages = [{"role": "user", "content": "hello"}]
    try:
        whole = render_messages(case.tokenizer, messages)
        without = render_messages(case.tokenizer, messages, add_generation_prompt=False)
    except UserError:
        return []
    return _encoded(case, whole[len(without) :]) if whole.startswith(without) else []


def _without_generation_prompt(case: Discrepancy, sample: Scored) -> list[int] | None:
    head = _generation_prompt(case)
    prompt = _prompt(sample)
    return prompt[: -len(head)] if head and prompt[-len(head) :] == head else None


# -- from logits to log-probs ----------------------------------------------------------------------


def temperature(case: Discrepancy) -> Iterator[Tried]:
    """Test whether one side divides logits by another temperature."""
    model = case.model()
    now = case.sampling.temperature
    reasons = {1.0: "(none)", now**2: "(divided twice)", 1 / now: "(multiplied instead of divided)"}
    steps = [_LOWEST * (_HIGHEST / _LOWEST) ** (i / (_SEARCHES - 1)) for i in range(_SEARCHES)]
    asked = [t for t in reasons if t != now] + steps
    samplings = [replace(model.setting.sampling, temperature=t) for t in asked]
    tries = dict(
        zip(
            asked,
            _from_logits(case, samplings, [_temperature_words(t, now) for t in asked]),
            strict=True,
        )
    )
    named = [replace(tries[t], what=f"{tries[t].what} {reasons[t]}") for t in reasons if t != now]
    yield from named
    nearest = max(steps, key=lambda t: tries[t].share)
    if tries[nearest].share > max((tried.share for tried in named), default=0.0) + _BETTER:
        yield _narrowed(case, nearest, steps[1] / steps[0])


def _temperature_words(value: float, now: float) -> str:
    return f"log-probs are at temperature {value:.3g} instead of --rollout-temperature {now:g}"


def _narrowed(case: Discrepancy, near: float, ratio: float) -> Tried:
    """Refine the best temperature around ``near`` in three rounds."""
    now = case.sampling.temperature
    best = None
    for _ in range(3):
        asked = [near * ratio ** (i / 4) for i in range(-4, 5)]
        samplings = [replace(case.model().setting.sampling, temperature=t) for t in asked]
        tries = list(_from_logits(case, samplings, [_temperature_words(t, now) for t in asked]))
        best = max(tries, key=lambda tried: tried.share)
        near = asked[tries.index(best)]
        ratio = ratio**0.25
    assert best is not None
    return best


def filters(case: Discrepancy) -> Iterator[Tried]:
    """Test whether one side's log-probs are renormalised over top-p, top-k or min-p, or include a
    repetition penalty."""
    now = case.sampling
    asked: dict[str, Sampling] = {}
    flags = {"top_p": (now.top_p, 1.0), "top_k": (now.top_k, -1), "min_p": (now.min_p, 0.0)}
    mine = {name: value for name, (value, off) in flags.items() if value != off}
    if mine:
        words = ", ".join(
            f"--rollout-{name.replace('_', '-')} {value:g}" for name, value in mine.items()
        )
        asked[f"log-probs are renormalised over the tokens that {words} kept"] = replace(
            now, renormalised=True
        )
    theirs = dict(case.facts.get("generation_config") or {})
    neutral = {"top_p": 1.0, "top_k": -1, "repetition_penalty": 1.0}
    kept = {
        name: theirs[name]
        for name, off in neutral.items()
        if theirs.get(name) not in (None, off, 0)
    }
    penalty = kept.pop("repetition_penalty", None)
    for name, value in kept.items():
        plain = replace(now, top_p=1.0, top_k=-1, min_p=0.0, renormalised=True)
        asked[_default(name, value)] = replace(plain, **{name: value})
    if len(kept) > 1:
        asked[" and ".join(f"{name} {value:g}" for name, value in kept.items()) + _DEFAULTS] = (
            replace(now, renormalised=True, **kept)
        )
    if penalty is not None:
        asked[_default("repetition_penalty", penalty)] = replace(
            now, repetition_penalty=float(penalty)
        )
    if not asked:
        raise Untested(
            "nothing is filtered: neither the flags nor generation_config.json set top-p, top-k, "
            "min-p or a repetition penalty"
        )
    remedies = (
        "both sides must take log-probs over the whole vocabulary, an engine before its filters; "
        "with SGLang, --sglang-sampling-defaults openai ignores generation_config.json",
    )
    yield from _from_logits(case, list(asked.values()), list(asked), remedies)


_DEFAULTS = " of generation_config.json are applied"


def _default(name: str, value: float) -> str:
    return f"{name} {value:g} of generation_config.json is applied"


def _from_logits(
    case: Discrepancy,
    samplings: Sequence[Sampling],
    labels: Sequence[str],
    remedies: tuple[str, ...] = (),
) -> Iterator[Tried]:
    model = case.model()
    by_sample = [model.by_sampling(sample, samplings) for sample in case.samples]
    for number, what in enumerate(labels):
        yield case.tried(what, [found[number] for found in by_sample], remedies=remedies)
