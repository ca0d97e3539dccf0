"""Whether the tokens of a response say its text, in samples that users' functions return.

The reward reads ``sample.response``; training learns ``sample.tokens``. A function that changes one
of them alone trains the model on something that was never scored. Decoding differs harmlessly in
many ways, so the comparison ignores white space, special tokens and incomplete characters, and lets
the text leave out parts of what the tokens say.
"""

from __future__ import annotations

import functools
import unicodedata
from typing import Any

from slime.log import get_logger, tell
from slime.samples.token_rewards import trained_runs
from slime.samples.types import Sample, SampleStatus
from slime.user_code.loading import shown

logger = get_logger(__name__)

#: Most tokens that are decoded in one rollout, about 0.1 s.
_MAX_TOKENS = 64_000
#: Least number of characters of a part of the text that the tokens also say. Shorter parts are
#: found in any long text.
_MIN_PART = 6
#: Most parts that a text is taken apart into; one of more parts is not judged.
_MAX_PARTS = 64
#: Characters that a message shows of each text.
_SHOWN = 60


class TextCheck:
    """Compares the first samples of a rollout, and warns once per run of the first that differs."""

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        self._tokens_left = _MAX_TOKENS

    def __call__(self, sample: Sample, origin: str) -> None:
        is_final = sample.status in (SampleStatus.COMPLETED, SampleStatus.TRUNCATED)
        if not (is_final and sample.response and sample.response_length) or sample.remove_sample:
            return
        if self._tokens_left <= 0:
            return
        self._tokens_left -= sample.response_length
        try:
            said = other_text(sample, self._tokenizer)
        except Exception as error:  # the tokenizer may raise anything
            logger.debug("the tokens of sample %s cannot be decoded: %r", sample.index, error)
            return
        if said is None:
            return
        self._tokens_left = 0
        text, tokens = _around_difference(sample.response, said)
        tell(
            logger,
            "%s returns samples whose tokens do not say their text (sample %s, for one): the "
            "response is %s, and its tokens say %s. The reward reads sample.response, training "
            "learns sample.tokens: change both, with response_length, loss_mask and "
            "rollout_log_probs, or keep other text in sample.metadata",
            origin,
            sample.index,
            text,
            tokens,
            once="tokens of another text",
        )


def other_text(sample: Sample, tokenizer: Any) -> str | None:
    """Return the text of the response's tokens if ``sample.response`` is certainly another one;
    else None.

    It is another one if a part of it is in neither prompt nor response, and it lacks a trained part
    of the response. Text that only leaves out parts of the response (thinking, what follows a stop
    string, tools' output) is not.
    """
    tokens = list(sample.tokens)
    response = tokens[-sample.response_length :]
    said = _decode(tokenizer, response)
    if said == sample.response:
        return None
    marks = _marks(tokenizer)
    text = _bare(sample.response, marks)
    if text in _bare(said, marks):
        return None
    # the template may begin the answer, and the function may add that to the text
    whole = _bare(_decode(tokenizer, tokens), marks)
    if _is_made_of(text, whole):
        return None
    encoded = tokenizer.encode(sample.response, add_special_tokens=False)
    if _is_made_of(_bare(_decode(tokenizer, encoded), marks), whole):
        return None  # tokens cannot say all characters of this text
    if sample.loss_mask is not None and 0 in sample.loss_mask:
        trained = trained_runs(response, sample.loss_mask)
        if all(_bare(_decode(tokenizer, run), marks) in text for run in trained):
            return None  # only what tools and environment said differs
    return said


def _decode(tokenizer: Any, tokens: list[int]) -> str:
    return str(
        tokenizer.decode(tokens, skip_special_tokens=True, clean_up_tokenization_spaces=False)
    )


@functools.lru_cache(maxsize=8)
def _marks(tokenizer: Any) -> list[str]:
    """Return the texts of special tokens, the longest first."""
    added = [str(one) for one in tokenizer.added_tokens_decoder.values() if one.special]
    marks = {*added, *map(str, tokenizer.all_special_tokens)} - {""}
    return sorted(marks, key=len, reverse=True)


def _bare(text: str, marks: list[str]) -> str:
    """Return ``text`` without special tokens, white space and incomplete characters."""
    for mark in marks:
        if mark in text:
            text = text.replace(mark, "")
    normal = unicodedata.normalize("NFKC", text.replace("\ufffd", ""))
    return "".join(normal.split())


def _is_made_of(text: str, whole: str) -> bool:
    """Return whether ``text`` is a sequence of parts of ``whole``, each as long as possible.

    Example:
        >>> _is_made_of("Let me see.The answer is 4.", "Let me see.<think>2+2</think>The answer "
        ...             "is 4.")
        True
        >>> _is_made_of("The answer is 5.", "The answer is 4.")
        False
    """
    start = 0
    for _ in range(_MAX_PARTS):
        left = len(text) - start
        if not left:
            return True
        low = min(_MIN_PART, len(text))
        if left < low or text[start : start + low] not in whole:
            return False
        high = left
        while low < high:
            middle = (low + high + 1) // 2
            if text[start : start + middle] in whole:
                low = middle
            else:
                high = middle - 1
        start += low
    return True


def _around_difference(text: str, other: str) -> tuple[str, str]:
    """Show both texts where they begin to differ."""
    pairs = enumerate(zip(text, other))
    at = next((at for at, (one, two) in pairs if one != two), min(len(text), len(other)))
    start = max(0, at - _SHOWN // 3)
    dots = "…" if start else ""
    return (
        dots + shown(text[start : start + _SHOWN], _SHOWN + 2),
        dots + shown(other[start : start + _SHOWN], _SHOWN + 2),
    )
