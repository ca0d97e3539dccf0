"""What is trained of a conversation: exactly what the model would generate, for the templates of public models."""

from __future__ import annotations

import re
from itertools import groupby
from typing import Any

import pytest

from slime.errors import UserError
from slime.prompts.chat_template import render_messages, template_form
from slime.prompts.sft_encoding import Encoded, SftEncoding, SftTotals
from tests.support.prompt_fixtures import CHATML, make_tokenizer
from tests.support.public_templates import public_templates, tokenizer_of

TEMPLATES = public_templates()
TOOL = {
    "type": "function",
    "function": {
        "name": "lookup",
        "description": "DESCRIPTION",
        "parameters": {"type": "object", "properties": {"city": {"type": "string", "description": "x"}}},
    },
}


def user(number: int) -> dict[str, Any]:
    return {"role": "user", "content": f"USER{number}"}


def answer(number: int, **more: Any) -> dict[str, Any]:
    return {"role": "assistant", "content": f"ANSWER{number}", **more}


def thoughtful(number: int) -> dict[str, Any]:
    return answer(number, reasoning_content=f"REASON{number}")


SYSTEM = {"role": "system", "content": "SYSTEM"}
CALL = {
    "role": "assistant",
    "content": "",
    "tool_calls": [{"id": "callid001", "function": {"name": "lookup", "arguments": '{"city": "CITY0"}'}}],
}
RESULT = {"role": "tool", "content": "RESULT0", "tool_call_id": "callid001", "name": "lookup"}
SHAPES: dict[str, list[dict[str, Any]]] = {
    "one turn": [user(0), answer(0)],
    "several turns": [user(0), answer(0), user(1), answer(1), user(2), answer(2)],
    "system": [SYSTEM, user(0), answer(0), user(1), answer(1)],
    "tools": [user(0), CALL, RESULT, answer(1), user(2), answer(2)],
    "reasoning": [user(0), thoughtful(0), user(1), thoughtful(1)],
    "reasoning inline": [user(0), answer(0, content="<think>\nREASON0\n</think>\n\nANSWER0"), user(1), answer(1)],
    "reasoning and tools": [user(0), CALL | {"reasoning_content": "REASON0"}, RESULT, thoughtful(1)],
    "no generation prompt": [user(0), answer(0), user(1), answer(1)],
}
#: Why a template may refuse: its own words, or calls that it has no way to write.
REFUSALS = (
    "does not write its call",
    "the chat template refuses the messages",
)
_WORDS = re.compile("(?:ANSWER|REASON|CITY)\\d")
_FOREIGN = re.compile("USER|SYSTEM|RESULT|DESCRIPTION")
#: What models write around their words: headers of channels, closing marks.
_STRUCTURE = re.compile(
    r"</?(?:\w+:)?think(?::\w+)?>|\[/?THINK\]|<\|?channel\|?>|<\|(?:END_THINKING|think)\|>|to=\w+"
    r"|\[BEGIN FINAL RESPONSE\]|(?:final|assistant|analysis|thought|response|message|think|all)"
)


def trained_texts(encoded: Encoded, tokenizer: Any) -> list[str]:
    """The text of each run of trained tokens."""
    found = []
    for sequence in encoded.sequences:
        assert len(sequence.tokens) == len(sequence.mask) and sequence.mask[-1] == 1
        for bit, run in groupby(zip(sequence.mask, sequence.tokens), key=lambda pair: pair[0]):
            if bit:
                found.append(tokenizer.decode([token for _, token in run]))
    return found


def encode(template: str, messages: list[dict[str, Any]], **options: Any) -> tuple[Encoded, list[str], Any]:
    tokenizer = tokenizer_of(template)
    encoded = SftEncoding(tokenizer).encode(messages, **options)
    return encoded, trained_texts(encoded, tokenizer), tokenizer


def test_templates_of_many_models_are_here() -> None:
    if not TEMPLATES:
        pytest.skip("none of the packages with chat templates is installed (the extra 'dev' has one)")
    assert len(TEMPLATES) >= 70


@pytest.mark.parametrize("name", TEMPLATES)
def test_what_is_trained_is_what_the_model_would_generate(name: str) -> None:
    """Decoding the trained runs gives each turn's words and its end, and nothing else; or the template refuses."""
    tokenizer = tokenizer_of(TEMPLATES[name])
    silent = tokenizer_of(TEMPLATES[name].replace("add_generation_prompt", "nobody_sets_this"))
    encodings = {shape: SftEncoding(tokenizer) for shape in SHAPES}
    encodings["no generation prompt"] = SftEncoding(silent)
    for shape, messages in SHAPES.items():
        encoding = encodings[shape]
        tools = [TOOL] if "tools" in shape else None
        try:
            encoded = encoding.encode(messages, tools=tools)
        except UserError as error:
            assert any(reason in str(error) for reason in REFUSALS), (shape, str(error))
            continue
        texts = trained_texts(encoded, encoding.tokenizer)
        turns = [message for message in messages if message["role"] == "assistant"]
        assert len(texts) == len(turns), (shape, texts)
        lost = 0
        for message, text in zip(turns, texts):
            assert not _FOREIGN.search(text), (shape, text)
            wanted, found = set(_WORDS.findall(str(message))), set(_WORDS.findall(text))
            lost += len(wanted - found)
            assert found <= wanted and all(word.startswith("REASON") for word in wanted - found), (shape, text)
            if "tools" not in shape:
                rest = _WORDS.sub("", text)
                for token in sorted(encoding.tokenizer.all_special_tokens, key=len, reverse=True):
                    rest = rest.replace(token, "")
                assert not _STRUCTURE.sub("", rest).strip(), (shape, text)
        assert lost == encoded.lost_reasoning, (shape, texts)


# -- kinds of templates, written out ---------------------------------------------------------------------------------

R1 = (  # opens reasoning where the assistant is asked, and drops it from every answer
    "{{ bos_token }}{% for m in messages %}{% if m.role == 'user' %}<U>{{ m.content }}{% else %}"
    "<A>{{ m.content.split('</think>')[-1] }}<EOS>{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<A><think>\n{% endif %}"
)
QWEN3 = (  # leaves the reasoning of earlier answers out
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{% if m.role == 'assistant' and loop.last %}"
    "<think>\n{{ m.reasoning_content or '' }}\n</think>\n\n{% endif %}{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
GLM = (  # a turn ends where the next one begins
    "{% for m in messages %}<|{{ m.role }}|>\n{{ m.content }}{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>\n{% endif %}{# <|user|> <|assistant|> #}"
)


def test_reasoning_is_put_where_the_generation_prompt_opens_it() -> None:
    for message in (thoughtful(0), answer(0, content="<think>\nREASON0\n</think>\n\nANSWER0")):
        encoded, texts, tokenizer = encode(R1, [user(0), message])
        assert texts == ["REASON0\n</think>\n\nANSWER0<EOS>"] and encoded.lost_reasoning == 0
        [sequence] = encoded.sequences
        assert tokenizer.decode(sequence.tokens[: sequence.prompt_length]) == "<BOS><U>USER0<A><think>\n"


def test_an_answer_without_reasoning_follows_the_head_alone_and_is_counted() -> None:
    encoded, texts, tokenizer = encode(R1, [user(0), answer(0), user(1), answer(1)])
    assert texts == ["ANSWER0<EOS>", "ANSWER1<EOS>"] and encoded.without_reasoning == 2
    [sequence] = encoded.sequences
    assert tokenizer.decode(sequence.tokens) == "<BOS><U>USER0<A>ANSWER0<EOS><U>USER1<A>ANSWER1<EOS>"


def test_a_template_that_leaves_earlier_reasoning_out_splits_the_conversation() -> None:
    encoded, texts, tokenizer = encode(QWEN3, SHAPES["reasoning"])
    assert texts == [f"<think>\nREASON{i}\n</think>\n\nANSWER{i}<|im_end|>" for i in (0, 1)]
    first, second = (tokenizer.decode(sequence.tokens) for sequence in encoded.sequences)
    assert second.startswith(first.partition("<think>")[0] + "ANSWER0<|im_end|>\n"), "as the model will see it"
    totals = SftTotals()
    totals.add(encoded)
    assert (totals.rows, totals.split, totals.sequences) == (1, 1, 2)


def test_a_turn_that_ends_where_the_next_begins_is_trained_with_that_token() -> None:
    tokenizer = tokenizer_of(GLM)
    ends = [tokenizer.convert_tokens_to_ids("<|user|>")]
    encoded = SftEncoding(tokenizer, ends).encode(SHAPES["several turns"])
    assert trained_texts(encoded, tokenizer) == [f"ANSWER{i}<|user|>" for i in range(3)]
    assert len(encoded.sequences) == 1 and encoded.unended is None


def test_reasoning_that_no_template_writes_is_counted() -> None:
    plain = CHATML.replace("m['content']", "m['content'].split('</think>')[-1]")
    encoding = SftEncoding(make_tokenizer(plain))
    assert encoding.encode([user(0), thoughtful(0)]).lost_reasoning == 1
    assert encoding.encode([user(0), answer(0, content="<think>REASON0</think>ANSWER0")]).lost_reasoning == 1
    assert encoding.encode([user(0), answer(0)]).lost_reasoning == 0


def test_turns_without_weight_are_context() -> None:
    encoded, texts, _ = encode(QWEN3, [user(0), answer(0, weight=0), user(1), answer(1)])
    assert texts == ["<think>\n\n</think>\n\nANSWER1<|im_end|>"] and len(encoded.sequences) == 1
    with pytest.raises(UserError, match="no assistant message to train on"):
        encode(QWEN3, [user(0), answer(0, train=False)])


def test_a_template_that_drops_words_of_an_answer_is_refused() -> None:
    shy = CHATML.replace("m['content']", "m['content'][:3]")
    with pytest.raises(UserError, match=r"messages\[1\] cannot be told.*\n.*does not write its text"):
        SftEncoding(make_tokenizer(shy)).encode([user(0), answer(0)])


def test_a_conversation_may_begin_with_the_assistant() -> None:
    _, texts, _ = encode(QWEN3, [answer(0), user(1), answer(1)])
    assert [text.split("\n\n")[-1] for text in texts] == ["ANSWER0<|im_end|>", "ANSWER1<|im_end|>"]


# -- forms that templates want -----------------------------------------------------------------------------------------


def test_calls_have_the_form_that_the_template_writes_as_it_is() -> None:
    head = "{% for m in messages %}{% for c in m.tool_calls or [] %}{{ c.function.name }}"
    texts = tokenizer_of(head + "{{ c.function.arguments | tojson }}{% endfor %}{{ m.content }}{% endfor %}")
    joined = tokenizer_of(head + "{{ '' + c.function.arguments }}{% endfor %}{{ m.content }}{% endfor %}")
    for tokenizer in (texts, joined):
        assert render_messages(tokenizer, [CALL]) == 'lookup{"city": "CITY0"}'
    assert (template_form(texts).text_arguments, template_form(joined).text_arguments) == (False, True)


def test_a_developer_speaks_as_the_system_where_no_template_knows_it() -> None:
    messages = [SYSTEM, {"role": "developer", "content": "DEV"}, user(0)]
    told = render_messages(tokenizer_of(CHATML), messages, add_generation_prompt=False)
    assert told == "<|im_start|>system\nSYSTEM\n\nDEV<|im_end|>\n<|im_start|>user\nUSER0<|im_end|>\n"
    known = tokenizer_of(CHATML + "{# developer #}")
    assert "<|im_start|>developer\nDEV<|im_end|>" in render_messages(known, messages)


def test_content_is_a_list_of_parts_where_the_template_wants_one() -> None:
    wants = (
        "{% for m in messages %}{% for p in m.content %}{% if p.type == 'text' %}{{ p.text }}{% endif %}{% endfor %}"
    )
    assert render_messages(tokenizer_of(wants + "{% endfor %}"), [user(0), answer(0)]) == "USER0ANSWER0"
