"""Rows of preferences: a prompt and its answers, in any of these columns.

{"prompt": …, "chosen": …, "rejected": …}        text, or messages
{"chosen": [prompt + answer], "rejected": […]}   the messages that both begin with are the prompt
{"prompt": …, "completion": …, "label": true}    one answer, desirable or not
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

from slime.config.preferences import PREFERENCE_FACTS
from slime.prompts.conversation import Messages
from slime.prompts.problems import RowProblem, remark

T = TypeVar("T")

#: Columns of rows with one answer and its label, and of rows with a pair.
_SINGLE = {"completion", "label"}
_PAIR = {"chosen", "rejected"}
#: Column of the prompt if --input-key is not given and its default is not a column.
_USUAL_PROMPT = "prompt"
#: What data sets call the score of an answer, beside the name of its column.
_SCORES = ("score", "rating", "reward", "quality")
#: What the label of an answer may be, as text.
_VERDICTS = {
    "true": True, "1": True, "1.0": True, "false": False, "0": False, "0.0": False
}  # fmt: skip


@dataclass(frozen=True)
class PreferenceColumns:
    """The columns of a row of preferences.

    Attributes:
        answers: name of an answer ("chosen") → its column.
        label: the column of the label of a single answer; None for pairs.
        prompt_required: a flag names the column of the prompt.
    """

    answers: Mapping[str, str]
    label: str | None = None
    prompt_required: bool = False

    @property
    def required(self) -> dict[str, str]:
        """Flag → the column that it names, of all that a row must have."""
        columns = {f"--{name}-key": column for name, column in self.answers.items()}
        return columns if self.label is None else {**columns, "--label-key": self.label}

    def other_form(self, row: Mapping[str, Any]) -> RowProblem | None:
        """Return the problem of a row of preferences in the other form: one answer with a label
        where pairs are read, or a pair where single answers are. None if it is neither."""
        if self.label is None and row.keys() >= _SINGLE and not _PAIR & row.keys():
            return RowProblem(
                "are answers with a label, and the loss learns from pairs",
                f"the keys are: {', '.join(map(str, row))}",
                "pass --preference-loss kto, which learns from single answers; or name the "
                "columns of a pair (--chosen-key, --rejected-key)",
            )
        if self.label is not None and row.keys() >= _PAIR and not row.keys() >= _SINGLE:
            losses = [name for name, facts in PREFERENCE_FACTS.items() if facts.takes_pairs]
            return RowProblem(
                "are pairs of answers, and kto learns from single answers with a label",
                f"the keys are: {', '.join(map(str, row))}",
                f"pass --preference-loss with one of {', '.join(losses)}, which learn from pairs; "
                "or make two rows of each, the chosen answer with the label true, the rejected "
                "one with false",
            )
        return None

    def prompt_column(self, row: Mapping[str, Any], input_key: str) -> str | None:
        """Return the column that holds the prompt; None if the answers begin with the prompt."""
        if input_key in row:
            return input_key
        return _USUAL_PROMPT if _USUAL_PROMPT in row else None

    def values(self, row: Mapping[str, Any]) -> dict[str, Any]:
        """Return the answers as the row has them, by name."""
        return {name: row[column] for name, column in self.answers.items()}

    def read_label(self, row: Mapping[str, Any]) -> bool:
        """Tell whether the answer is desirable."""
        assert self.label is not None
        value = row[self.label]
        # a column with gaps is one of floats, and each field of a CSV file is text
        verdict = _VERDICTS.get(str(value).strip().lower())
        if verdict is None:
            raise RowProblem(
                f"have a label (key '{self.label}') that is neither true nor false",
                f"found {value!r:.40}",
                "kto takes answers that are desirable (true) or undesirable (false)",
            )
        return verdict

    @property
    def names(self) -> tuple[str, ...]:
        """All columns except the prompt's."""
        return (*self.answers.values(), *([self.label] if self.label else []))


def with_prompt(
    prompt: str | Messages | None, answers: Mapping[str, str | Messages]
) -> tuple[str | Messages, dict[str, str | Messages]]:
    """Return the prompt, and what each answer adds to it: both text, or both messages.

    Args:
        prompt: from its own column. If answers are whole conversations, they must begin with its
            messages; text is ignored then.
    Raises:
        RowProblem: there is no prompt, or the answers have different ones.

    Example:
        >>> hi = {"role": "user", "content": "Hi"}
        >>> said = {name: [hi, {"role": "assistant", "content": name}] for name in ("a", "b")}
        >>> with_prompt("Hi", said)[0], with_prompt("Hi", said)[1]["b"]
        ([{'role': 'user', 'content': 'Hi'}], [{'role': 'assistant', 'content': 'b'}])
    """
    talks = [answer for answer in answers.values() if isinstance(answer, list)]
    if talks and len(talks) < len(answers):
        raise RowProblem("have one answer that is text and one that is messages")
    if talks and all(talk[0]["role"] != "assistant" for talk in talks):
        shared = _shared_beginning(talks)
        if isinstance(prompt, list) and any(talk[: len(prompt)] != prompt for talk in talks):
            raise RowProblem(
                "have a prompt that their answers, which are whole conversations, do not begin "
                "with",
                f"the prompt's first message is {prompt[0]}, the answers' {talks[0][0]}"[:200],
                "give the answers alone, behind the prompt, or the same prompt in both",
            )
        return talks[0][:shared], {name: answer[shared:] for name, answer in answers.items()}
    if prompt is None:
        raise RowProblem(
            "have answers without a prompt",
            f"there is no column '{_USUAL_PROMPT}', and the answers are not whole conversations",
            "pass --input-key with the column of the prompt; text that both answers begin with "
            "needs a column of its own",
        )
    if talks:
        asked = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt
        return asked, dict(answers)
    if isinstance(prompt, str):
        return prompt, dict(answers)
    return prompt, {
        name: [{"role": "assistant", "content": answer}] for name, answer in answers.items()
    }


def odd_pair(
    row: Mapping[str, Any], columns: PreferenceColumns, answers: Mapping[str, str | Messages]
) -> Iterator[RowProblem]:
    """Remark on a pair whose scores contradict it, or whose answers differ only in blanks."""
    if columns.label is not None:
        return
    scores = _scores(row, columns)
    if scores is not None and scores[0] < scores[1]:
        yield remark(
            "have a rejected answer with a higher score than the chosen one",
            f"the first: {scores[0]:g} for the chosen one, {scores[1]:g} for the rejected one",
            "check --chosen-key and --rejected-key",
        )
    chosen, rejected = (_without_blanks(answers[name]) for name in ("chosen", "rejected"))
    if chosen == rejected and answers["chosen"] != answers["rejected"]:
        yield remark(
            "have answers that differ only in blanks",
            f"the first: {answers['chosen']!r:.120}",
            "remove these rows, if blanks are not what is to be learned",
        )


def _scores(row: Mapping[str, Any], columns: PreferenceColumns) -> tuple[float, float] | None:
    """Return the scores of the chosen and the rejected answer, in columns such as
    ``score_chosen``."""
    for word in _SCORES:
        for form in ("{0}_{1}", "{1}_{0}", "{1}-{0}"):
            names = [form.format(word, columns.answers[name]) for name in ("chosen", "rejected")]
            values = [row.get(name) for name in names]
            if all(isinstance(one, int | float) and not isinstance(one, bool) for one in values):
                return float(values[0]), float(values[1])  # type: ignore[arg-type]
    return None


def _without_blanks(answer: str | Messages) -> str:
    if isinstance(answer, str):
        return "".join(answer.split())
    return repr([{**one, "content": "".join(one["content"].split())} for one in answer])


def count_images(text: str | Messages, placeholder: str) -> int:
    """Return the number of images in a prompt or an answer, in which each is a placeholder."""
    return str(text).count(placeholder)


def images_of_answers(
    prompt: str | Messages, answers: Mapping[str, str | Messages], images: Sequence[T], place: str
) -> dict[str, list[T]]:
    """Return the images that each answer is read with: the prompt's, and its own.

    Args:
        images: of a row: those of the prompt, then those of each answer.
        place: the placeholder of an image.

    Example:
        >>> images_of_answers("<i>", {"chosen": "a<i>", "rejected": "b"}, ["x", "y"], "<i>")
        {'chosen': ['x', 'y'], 'rejected': ['x']}
    """
    start = count_images(prompt, place)
    shared = list(images[:start])
    found = {}
    for name, answer in answers.items():
        end = start + count_images(answer, place)
        found[name] = [*shared, *images[start:end]]
        start = end
    return found


def holds_text(prompt: str | Messages, text: str) -> bool:
    """Tell whether a text is the prompt, or in one of its messages."""
    if isinstance(prompt, str):
        return text == prompt
    return any(text.strip() in message["content"] for message in prompt)


def _shared_beginning(talks: Sequence[Messages]) -> int:
    """Count the messages of the prompt: the beginning that all conversations share, or all but the
    last message of a single conversation."""
    longest = min(map(len, talks)) - 1
    alike = itertools.takewhile(
        lambda messages: all(message == messages[0] for message in messages),
        zip(*(talk[:longest] for talk in talks), strict=False),
    )
    shared = sum(1 for _ in alike)
    if not shared:
        raise RowProblem(
            "have answers that share no prompt",
            f"the first messages are {talks[0][0]} and {talks[-1][0]}"[:200],
            "both answers of a pair belong to one prompt",
        )
    behind = [talk[shared] for talk in talks]
    if len(talks) > 1 and all(one["role"] != "assistant" for one in behind):
        raise RowProblem(
            "have answers to different prompts",
            f"message {shared} is {behind[0]} in one and {behind[-1]} in the other"[:200],
            "both answers of a pair belong to one prompt",
        )
    return shared


def conversation_of(prompt: Messages, answer: Messages) -> Messages:
    """Return prompt and answer as one conversation in which only the answer is trained on."""
    return [
        {**message, "step_loss_mask": 0} if message["role"] == "assistant" else message
        for message in prompt
    ] + answer
