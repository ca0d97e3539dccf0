"""--loss-mask-type: where a rule of the reference system would train other text than the chat
template's mask."""

from __future__ import annotations

from typing import Any

import pytest

from slime.prompts.conversation import read_messages
from slime.prompts.reference_masks import mask_difference, trained_texts
from slime.prompts.sft_encoding import SftEncoding
from tests.support.public_templates import public_templates, tokenizer_of

TEMPLATES = {name.rpartition("/")[2]: text for name, text in public_templates().items()}
TURNS = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "two?"},
    {"role": "assistant", "content": "2"},
    {"role": "user", "content": "three?"},
    {"role": "assistant", "content": "3"},
]


def difference(rule: str, template: str, messages: list[dict[str, Any]]) -> str:
    tokenizer = tokenizer_of(TEMPLATES[template])
    read = read_messages(messages)
    return mask_difference(
        rule, tokenizer, read, None, SftEncoding(tokenizer).encode(messages).sequences
    )


@pytest.mark.parametrize(
    ("rule", "template"),
    [("qwen", "qwen2_5"), ("qwen3", "qwen3_instruct_2507"), ("qwen3_5", "qwen2_5")],
)
@pytest.mark.parametrize("start", [0, 1])
def test_a_rule_made_for_a_template_trains_the_same_text(
    rule: str, template: str, start: int
) -> None:
    assert difference(rule, template, TURNS[start:]) == ""


def test_a_turn_that_is_not_trained_is_not_trained_by_the_rule_either() -> None:
    marked = [TURNS[1], {**TURNS[2], "step_loss_mask": 0}, *TURNS[3:]]
    for rule in ("qwen", "qwen3_5"):
        assert difference(rule, "qwen2_5", marked) == ""
        assert trained_texts(rule, tokenizer_of(TEMPLATES["qwen2_5"]), marked, None)[0].startswith(
            "3"
        )


def test_the_first_turn_that_differs_is_shown() -> None:
    found = difference("distill_qwen", "qwen2_5", TURNS)
    assert found == "trained turn 1: '2<|im_end|>' is trained, with distill_qwen it would be '3'"
    opened = difference("qwen", "qwen3", TURNS)
    assert (
        opened.startswith("trained turn 1: '<think>")
        and "with qwen it would be '2<|im_end|>" in opened
    )
    assert difference("qwen3_5", "llama3_2", TURNS[1:]).startswith(
        "the rule qwen3_5 cannot render it: ValueError"
    )
