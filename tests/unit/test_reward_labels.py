"""Labels that the built-in graders cannot compare a response with, and those that are rarely
meant."""

from __future__ import annotations

from typing import Any

import pytest

from slime.rollout.rewards.labels import check_label, doubt_label
from slime.rollout.rewards.math_grading import grade_math
from slime.rollout.rewards.text import grade_f1


@pytest.mark.parametrize(
    ("rm_type", "label", "said"),
    [
        ("math", "", "is empty"),
        ("boxed_math", " \n", "is empty"),
        ("math", None, "is None"),
        ("math", float("nan"), "is nan"),
        ("math", ["1"], "is a list"),
        ("math", "so it is 4 ####", "nothing after ####"),
        ("deepscaler", r"\boxed{ }", r"empty \boxed"),
        ("math", r"\frac{1}{2", "braces"),
        ("math", "$.$", "neither a number nor a word"),
        ("math", "null", "is 'null'"),
        ("math", r"\text{ }", "neither a number nor a word"),
        ("dapo", "$", "leaves nothing"),
        ("f1", " ", "is empty"),
        ("gpqa", "K", "none of the letters A to J"),
        ("gpqa", "Paris", "none of the letters"),
        ("gpqa", 12, "none of the letters"),
        ("math", '["34"]', "the text of a list"),
        ("math", "['34']", "the text of a list"),
        ("math", '{"answer": "34"}', "the text of a dict"),
        ("math", '"34"', "the text of a str"),
        ("dapo", '["34", null]', "the text of a list"),
        ("remote_rm", {"answer": b"34"}, "cannot be sent as JSON"),
    ],
)
def test_labels_that_cannot_be_graded(rm_type: str, label: Any, said: str) -> None:
    reason = check_label(rm_type, label)
    assert reason is not None and said in reason


@pytest.mark.parametrize(
    ("rm_type", "label", "metadata"),
    [
        ("math", "1,2", {}),
        ("math", 0, {}),
        ("math", r"\{\}", {}),
        ("math", r"\emptyset", {}),
        ("math", "½", {}),
        ("math", "yes", {}),
        ("math", '"yes"', {}),
        ("math", "[1, 2)", {}),
        ("math", "f'(x)", {}),
        ("math", "5'10\"", {}),
        ("dapo", '"34"', {}),
        ("math", "a long solution, " * 40 + "#### 18", {}),
        ("math", "a long solution, " * 40 + r"\boxed{18}", {}),
        ("dapo", "34", {}),
        ("f1", "The Beatles", {}),
        ("f1", "A", {}),
        ("f1", "<", {}),
        ("gpqa", "(c)", {}),
        ("gpqa", 1, {"choices": ["red", "blue"]}),
        ("gpqa", "blue", {"choices": {"a": "red", "b": "blue"}}),
        ("remote_rm", None, {}),
        ("ifbench", None, {}),
        (None, "", {}),
    ],
)
def test_labels_that_can_be_graded(
    rm_type: str | None, label: Any, metadata: dict[str, Any]
) -> None:
    assert check_label(rm_type, label, metadata) is None


@pytest.mark.parametrize(
    ("label", "said"),
    [
        ("<", "'<', which has neither"),
        ("none", "'none'"),
        ("1}", "braces"),
        ("()", "neither"),
        ("word " * 60, "a text of 60 words"),
        ("unknown", "'unknown'"),
        ("x<sup>2</sup>", "marks of HTML"),
        ("2\x0crac12", "control characters"),
    ],
)
def test_labels_that_a_response_can_match_are_not_refused(label: str, said: str) -> None:
    assert check_label("math", label) is None
    assert grade_math(rf"\boxed{{{label}}}", label) == 1.0
    doubt = doubt_label("math", label)
    assert doubt is not None and said in doubt[1]


def test_choices_of_a_row_are_checked_with_its_label() -> None:
    reason = check_label("gpqa", "A", {"choices": "red, blue"})
    assert reason is not None and "choices in its metadata that cannot be read" in reason
    assert check_label("gpqa", "C", {"choices": {"A": "red", "B": "blue", "C": None}}) is not None


@pytest.mark.parametrize("label", ["1,2", "0", r"\{\}", "½", "yes", r"\boxed{18}"])
def test_usual_labels_are_not_in_doubt(label: str) -> None:
    assert doubt_label("math", label) is None


@pytest.mark.parametrize("label", ["A", "the", "<", "?"])
def test_f1_compares_labels_without_words_as_they_are(label: str) -> None:
    assert grade_f1(label.lower(), label) == 1.0
    assert grade_f1("", label) == grade_f1("an", label) == grade_f1("B", label) == 0.0


@pytest.mark.parametrize("label", ["nan", "None", "['Paris', 'Lyon']", "-", "…"])
def test_labels_of_f1_that_are_rarely_meant(label: str) -> None:
    kind, why = doubt_label("f1", label) or ("", "")
    assert "word by word" in kind and repr(label) in why


@pytest.mark.parametrize("label", ["Paris", "A", "北京", "5", "the"])
def test_labels_of_f1_that_are_meant(label: str) -> None:
    assert doubt_label("f1", label) is None
