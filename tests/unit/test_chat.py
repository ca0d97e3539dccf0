"""`slime chat` shows a question of the run's own form, and keeps a toy's questions apart."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from slime.cli.chat import Conversation, example_question

MESSAGES = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "1+1?"},
    {"role": "assistant", "content": "2"},
    {"role": "user", "content": "2+2?"},
]


def make_run(folder: Path, *, stage: str = "", prompt: Any = None, **data: Any) -> Path:
    """A run folder as far as chat reads it, with one recorded sample where ``prompt`` is given."""
    folder.mkdir(exist_ok=True)
    name = f"config.{stage}.json" if stage else "config.json"
    config = {"data": data, "observe": {"output_dir": str(folder.parent)}, "origins": {}}
    (folder / name).write_text(json.dumps(config))
    if prompt is not None:
        samples = folder / "samples" / stage
        samples.mkdir(parents=True, exist_ok=True)
        (samples / "rollout_000000.jsonl").write_text(json.dumps({"prompt": prompt}) + "\n")
    return folder


@pytest.mark.parametrize(
    ("prompt", "expected"),
    [
        ("37+5=", "37+5="),
        (MESSAGES, "2+2?"),
        ("x" * 1000, "x" * 400 + " …"),
        ([], None),
        (17, None),
        ([{"role": "user", "content": [{"type": "image"}]}], None),
    ],
)
def test_a_recorded_prompt(prompt: Any, expected: str | None, tmp_path: Path) -> None:
    assert example_question(make_run(tmp_path / "run", prompt=prompt)) == expected


@pytest.mark.parametrize("question", ["2+2?", MESSAGES])
def test_a_prompt_in_a_template_is_read_from_the_data(question: Any, tmp_path: Path) -> None:
    data = tmp_path / "train.jsonl"
    data.write_text(json.dumps({"question": question}) + "\n")
    flags = {"prompt_data": f"{data}@[0:10]", "input_key": "question", "apply_chat_template": True}
    run = make_run(tmp_path / "run", prompt="<user>2+2?<end><assistant>", **flags)
    assert example_question(run) == "2+2?"
    data.unlink()
    assert example_question(run) is None


def test_the_last_stage_counts(tmp_path: Path) -> None:
    make_run(tmp_path / "run", stage="a", prompt="first")
    run = make_run(tmp_path / "run", stage="b", prompt="second")
    os.utime(run / "config.a.json", (1, 1))  # stages are ordered by their configurations' time
    assert example_question(run) == "second"


def test_what_is_no_run_has_no_example(tmp_path: Path) -> None:
    assert example_question(tmp_path) is None
    assert example_question(tmp_path / "org" / "name") is None


@pytest.mark.parametrize(("forgets", "turns"), [(True, [1, 1]), (False, [1, 3])])
def test_a_toy_gets_each_question_by_itself(
    forgets: bool, turns: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = []

    def answer(self: Conversation, path: str, body: dict[str, Any], text_of: Any) -> Iterator[str]:
        asked.append(len(body["messages"]))
        yield "42"

    monkeypatch.setattr(Conversation, "_stream", answer)
    conversation = Conversation("http://127.0.0.1:1", "toy", {}, forgets=forgets)
    for question in ("37+5=", "12+9="):
        assert "".join(conversation.ask(question)) == "42"
    assert asked == turns
