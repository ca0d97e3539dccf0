"""The example of a model that may run Python, in front of an engine that plays the model."""

from __future__ import annotations

import asyncio

from examples.python_sandbox.data import SIGNS, result
from examples.python_sandbox.rollout import generate, reward
from slime.rollout.generate import bind_state
from slime.samples.types import Sample
from tests.support.agents import Play

END = "<|im_end|>"


def play(*lines: str, room: int = 2000) -> tuple[Play, Sample]:
    stage = Play(lines, max_new_tokens=room)
    stage.sample.prompt, stage.sample.label = (
        [{"role": "user", "content": "What is 3 times 4?"}],
        "12",
    )

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
    stage, _ = play(
        "<python>1/0</python>", "<python>while True: print(1)</python>", f"12{END}", room=6000
    )
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
    stage, sample = play("<python>print(3*4)</python>", room=12)
    assert sample.response == "<python>prin" and len(stage.model.asked) == 1


def test_what_a_program_printed_is_no_answer() -> None:
    stage, sample = play("<python>print(3*4)</python>", END)
    assert stage.text(stage.trained(sample)) == f"<python>print(3*4)</python>{END}"
    assert sample.response.endswith("\n12\n") and reward(None, sample) == 0.0


def test_every_question_tells_the_operators_apart() -> None:
    for a in range(10, 100):
        for b in range(10, 100):
            assert len({result(a, sign, b) for sign in SIGNS.values()}) == 3
