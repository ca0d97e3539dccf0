"""The example of a model that may run Python, in front of an engine that plays the model."""

from __future__ import annotations

import asyncio
import random
from pathlib import Path

import pytest

from examples import small_model
from examples.python_sandbox.rollout import generate, reward
from examples.python_sandbox.train import WORDS, question, rows, talk
from slime.rollout.generate import bind_state
from slime.samples.types import Sample, SampleStatus
from tests.support.agents import Play

END = "<|im_end|>"


def play(*lines: str, room: int = 2000) -> tuple[Play, Sample]:
    stage = Play(lines, max_new_tokens=room)
    stage.sample.prompt, stage.sample.label = [{"role": "user", "content": "What is 3 times 4?"}], "12"

    async def run() -> Sample:
        bind_state(stage.state)
        return await generate(stage.state.args, stage.sample, stage.state.params_for(stage.sample))

    return stage, asyncio.run(run())


def test_output_comes_back_and_is_not_trained_on() -> None:
    stage, sample = play("<python>print(3*4)</python>", f"12{END}")
    assert "<tool_response>\n12\n</tool_response>" in stage.text(sample.tokens)
    assert stage.text(stage.trained(sample)) == f"<python>print(3*4)</python>12{END}"
    assert reward(None, sample) == 1.0 and sample.non_generation_time > 0
    sample.validate()


def test_errors_and_endings_are_shown_to_the_model() -> None:
    stage, _ = play("<python>1/0</python>", "<python>while True: print(1)</python>", f"12{END}")
    told = stage.text(stage.model.asked[-1])
    assert "ZeroDivisionError" in told and "[ended: it wrote more than 2000 bytes]" in told


def test_programs_end() -> None:
    stage, sample = play(*["<python>pass</python>"] * 5)
    assert len(stage.model.asked) == 4 and stage.text(sample.tokens).count("(no output)") == 3
    assert reward(None, sample) == 0.0


def test_an_answer_without_a_program_is_the_last() -> None:
    stage, sample = play(f"12{END}")
    assert len(stage.model.asked) == 1 and reward(None, sample) == 1.0


def test_a_program_that_is_cut_short_is_not_run() -> None:
    stage, sample = play("<python>print(3*4)", room=12)
    assert sample.status is SampleStatus.TRUNCATED and len(stage.model.asked) == 1


def test_every_question_tells_the_operators_apart() -> None:
    labels = {row["prompt"]: row["label"] for row in rows()}
    assert len(labels) == 7 * 8 * 3
    for a in range(3, 10):
        for b in range(2, 10):
            assert len({labels[question(a, word, b)] for word in ("plus", "minus", "times")}) == 3


@pytest.mark.slow
def test_the_small_model_reads_what_it_has_seen(tmp_path: Path) -> None:
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(small_model.make(tmp_path / "model", WORDS, talk, steps=1))
    messages = [{"role": role, "content": text} for role, text in talk(random.Random(1))]
    text = tokenizer.apply_chat_template(messages, tokenize=False)
    ids = tokenizer.encode(text)
    assert tokenizer.decode(ids) == text and tokenizer.unk_token_id not in ids
