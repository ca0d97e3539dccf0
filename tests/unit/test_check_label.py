"""`check_label`: which labels the built-in graders cannot compare a response with."""

from __future__ import annotations

from typing import Any

import pytest

from slime.rollout.rewards.labels import check_label


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
        ("math", "word " * 60, "a text of 60 words"),
        ("dapo", "$", "leaves nothing"),
        ("f1", "the", "no word"),
        ("gpqa", "K", "none of the letters A to J"),
        ("gpqa", "Paris", "none of the letters"),
        ("gpqa", 12, "none of the letters"),
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
        ("math", "a long solution, " * 40 + "#### 18", {}),
        ("math", "a long solution, " * 40 + r"\boxed{18}", {}),
        ("dapo", "34", {}),
        ("f1", "The Beatles", {}),
        ("gpqa", "(c)", {}),
        ("gpqa", 1, {"choices": ["red", "blue"]}),
        ("gpqa", "blue", {"choices": {"a": "red", "b": "blue"}}),
        ("remote_rm", None, {}),
        ("ifbench", None, {}),
        (None, "", {}),
    ],
)
def test_labels_that_can_be_graded(rm_type: str | None, label: Any, metadata: dict[str, Any]) -> None:
    assert check_label(rm_type, label, metadata) is None
