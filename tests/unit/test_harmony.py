"""gpt-oss's channels: reasoning, text and calls out of what the model writes, the template's own
turns read back, and what supervised training takes of them."""

from __future__ import annotations

import json
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from slime.agents.conversation import AgentRequest, ChatFormat
from slime.engines.reasoning import SplitReasoning, reasoning_format
from slime.engines.tool_calls import FORMATS, Call, Reply, tool_format
from slime.prompts.chat_template import render_messages
from slime.prompts.sft_encoding import SftEncoding
from tests.support.public_templates import public_templates, tokenizer_of
from tests.support.written_calls import ADD, TOOLS, WEATHER

HARMONY = FORMATS["harmony"]
ANALYSIS = "<|channel|>analysis<|message|>They ask.<|end|><|start|>assistant"
FINAL = "<|channel|>final<|message|>It is warm."
CALL = (
    "<|channel|>commentary to=functions.weather <|constrain|>json<|message|>"
    '{"city": "Zürich", "days": 2}<|call|>'
)
#: The same as the published template writes it.
PAST_CALL = (
    " to=functions.weather<|channel|>commentary json<|message|>"
    '{"city": "Zürich", "days": 2}<|call|>'
)
PREAMBLE = "<|channel|>commentary<|message|>Let me look.<|end|><|start|>assistant"
TEMPLATES = {
    name: template
    for name, template in public_templates().items()
    if name.removeprefix("trl/") in ("gptoss", "gptoss_training")
}
needs_template = pytest.mark.skipif(not TEMPLATES, reason="no package with the template is there")


@pytest.mark.parametrize(
    ("text", "reply"),
    [
        (FINAL, Reply("It is warm.")),
        (FINAL + "<|return|>", Reply("It is warm.")),
        (ANALYSIS + FINAL, Reply("It is warm.")),
        (CALL, Reply("", (WEATHER,))),
        (PAST_CALL, Reply("", (WEATHER,))),
        (CALL.removesuffix("<|call|>"), Reply("", (WEATHER,))),  # its end token is the answer's
        (ANALYSIS + PREAMBLE + CALL, Reply("Let me look.", (WEATHER,))),
        ("It is warm, with <|channel|> in it", Reply("It is warm, with <|channel|> in it")),
        (ANALYSIS.removesuffix("<|start|>assistant"), Reply("")),
        ("<|chan", Reply("<|chan")),
    ],
)
def test_a_whole_answer(text: str, reply: Reply) -> None:
    assert HARMONY.read(text, TOOLS, ended=True) == reply


def test_a_call_that_nobody_can_read_is_text() -> None:
    cut = CALL[:-20]
    reply = HARMONY.read(ANALYSIS + PREAMBLE + cut, TOOLS, ended=True)
    assert not reply.calls and reply.text.startswith("Let me look.<|start|>assistant to=functions.")
    both = HARMONY.read(CALL + "<|start|>assistant" + cut, TOOLS, ended=True)
    assert both == Reply("", (WEATHER,))


_PIECES = (
    *("<|start|>assistant", "<|channel|>commentary", "<|channel|>analysis", "<|channel|>final"),
    *(" to=functions.add", "<|message|>", "<|end|>", "<|call|>", "<|return|>", "<|constrain|>json"),
    *('{"a": [1, 2]}', '{"a": ', "text", "<|", "<|en", " ", "to=", "\n"),
)


@given(st.lists(st.sampled_from(_PIECES), max_size=10).map("".join))
def test_pieces_that_were_streamed_add_up(text: str) -> None:
    replies = [HARMONY.read(text[:end], TOOLS, ended=False) for end in range(len(text) + 1)]
    replies.append(HARMONY.read(text, TOOLS, ended=True))
    for earlier, later in pairwise(replies):
        assert later.text.startswith(earlier.text)
        assert later.calls[: len(earlier.calls)] == earlier.calls


@pytest.mark.parametrize(
    ("text", "opened", "split"),
    [
        (ANALYSIS + FINAL, False, SplitReasoning("They ask.", "It is warm.")),
        (FINAL, False, SplitReasoning(None, "It is warm.")),
        ("warm", False, SplitReasoning(None, "warm")),
        ("They ask.<|end|><|start|>assistant" + FINAL, True,
         SplitReasoning("They ask.", "It is warm.")),
        ("They", True, SplitReasoning("They", "")),
        (ANALYSIS + ANALYSIS + FINAL, False,
         SplitReasoning("They ask.\n\nThey ask.", "It is warm.")),
    ],
)  # fmt: skip
def test_reasoning_is_what_is_on_its_channel(
    text: str, opened: bool, split: SplitReasoning
) -> None:
    found = reasoning_format("… <|channel|>analysis<|message|> …")
    assert found is not None and found.split(text, opened=opened) == split
    assert not found.opens("<|start|>assistant") and found.opens("<|channel|>analysis<|message|>")


# -- with the published template -------------------------------------------------------------------

USER = {"role": "user", "content": "How is the weather?"}
SCHEMAS: list[dict[str, Any]] = [
    {"type": "function", "function": {"name": name, "description": "D", "parameters": schema}}
    for name, schema in TOOLS.items()
]


def called(call: Call, reasoning: str | None = None) -> dict[str, Any]:
    function = {"name": call.name, "arguments": json.loads(call.arguments)}
    message = {
        "role": "assistant",
        "content": "",
        "tool_calls": [{"type": "function", "function": function}],
    }
    return message if reasoning is None else message | {"reasoning_content": reasoning}


RESULT = {"role": "tool", "content": "warm", "name": "weather"}
ANSWER = {"role": "assistant", "content": "It is warm.", "reasoning_content": "They ask."}


@needs_template
@pytest.mark.parametrize("message", [ANSWER, called(WEATHER, "They ask."), called(ADD)])
def test_a_turn_of_the_template_is_read_back(message: dict[str, Any]) -> None:
    template = TEMPLATES["trl/gptoss"]
    assert tool_format(template, "") is HARMONY
    tokenizer = tokenizer_of(template)
    prompt = render_messages(tokenizer, [USER], tools=SCHEMAS)
    whole = render_messages(tokenizer, [USER, message], tools=SCHEMAS, add_generation_prompt=False)
    assert whole.startswith(prompt) and prompt.endswith("<|start|>assistant")
    ends = {tokenizer.convert_tokens_to_ids(end) for end in ("<|return|>", "<|call|>")}
    chat_format = ChatFormat.of(tokenizer, "gpt_oss", ends)
    before, tokens = (
        tokenizer.encode(text, add_special_tokens=False) for text in (prompt, whole[len(prompt) :])
    )
    assert not chat_format.opens_reasoning(before)
    read = chat_format.read(tokens, AgentRequest([USER], SCHEMAS), opened=False, stop=())
    assert read.text == message["content"]
    assert read.reasoning == message.get("reasoning_content")
    calls = [one["function"] for one in read.calls]
    wanted = [one["function"] for one in message.get("tool_calls", ())]
    assert [(one["name"], json.loads(one["arguments"])) for one in calls] == [
        (one["name"], one["arguments"]) for one in wanted
    ]
    visible = tokenizer.decode(chat_format.visible_part(tokens))
    assert "They ask." not in visible and not visible.startswith("<|start|>assistant")


@needs_template
def test_training_takes_analysis_calls_and_ends_and_nothing_else() -> None:
    """The template leaves analysis out of a turn once it is answered, so that the first answer is
    trained in a sample of its own; a call keeps its analysis until the answer is asked for."""
    tokenizer = tokenizer_of(TEMPLATES["trl/gptoss"])
    messages = [USER, ANSWER, USER, called(WEATHER, "A call."), RESULT, ANSWER]
    encoded = SftEncoding(tokenizer).encode(messages, tools=SCHEMAS)
    trained = []
    for sequence in encoded.sequences:
        runs: list[list[int]] = [[]]
        for token, bit in zip(sequence.tokens, sequence.mask, strict=True):
            if bit:
                runs[-1].append(token)
            elif runs[-1]:
                runs.append([])
        trained += [tokenizer.decode(run) for run in runs if run]
    answer = (
        "<|channel|>analysis<|message|>They ask.<|end|>"
        "<|start|>assistant<|channel|>final<|message|>It is warm.<|return|>"
    )
    call = (
        "<|channel|>analysis<|message|>A call.<|end|><|start|>assistant"
        " to=functions.weather<|channel|>commentary json<|message|>"
        '{"city": "Zürich", "days": 2}<|call|>'
    )
    assert sorted(trained) == sorted([answer, call, answer])
    assert encoded.lost_reasoning == 0 and len(encoded.sequences) == 2
