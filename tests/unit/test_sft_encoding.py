"""What is trained of a conversation: exactly what the model would generate, for the templates of
public models."""

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
        "parameters": {
            "type": "object",
            "properties": {"city": {"type": "string", "description": "x"}},
        },
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
    "tool_calls": [
        {"id": "callid001", "function": {"name": "lookup", "arguments": '{"city": "CITY0"}'}}
    ],
}
RESULT = {"role": "tool", "content": "RESULT0", "tool_call_id": "callid001", "name": "lookup"}
SHAPES: dict[str, list[dict[str, Any]]] = {
    "one turn": [user(0), answer(0)],
    "several turns": [user(0), answer(0), user(1), answer(1), user(2), answer(2)],
    "system": [SYSTEM, user(0), answer(0), user(1), answer(1)],
    "tools": [user(0), CALL, RESULT, answer(1), user(2), answer(2)],
    "reasoning": [user(0), thoughtful(0), user(1), thoughtful(1)],
    "reasoning inline": [
        user(0),
        answer(0, content="<think>\nREASON0\n</think>\n\nANSWER0"),
        user(1),
        answer(1),
    ],
    "reasoning and tools": [
        user(0),
        CALL | {"reasoning_content": "REASON0"},
        RESULT,
        thoughtful(1),
    ],
    "no generation prompt": [user(0), answer(0), user(1), answer(1)],
}
#: Templates that write no calls of tools, so rows with calls are refused. (That of
#: DeepSeek-R1-Distill looks for a null content, which transformers takes away.)
NO_CALLS = {
    *(
        "cohere",
        "cohere2",
        "deepseek_r1_distill",
        "gemma",
        "gemma3",
        "idefics3",
        "lfm2",
        "llama3",
        "llava_next",
    ),
    *("phi3", "phi3_5", "qwen2_5_vl", "smolvlm"),
}
#: Templates that raise for a system message.
NO_SYSTEM = {"gemma"}
#: Templates of models that do not reason: there is no place for reasoning in a key of its own.
NO_REASONING = (NO_CALLS - {"deepseek_r1_distill"}) | {
    *(
        "gemma4",
        "gemma4_v2",
        "gemma4_v3",
        "gemma4_v4",
        "lfm2_v2",
        "llama3_1",
        "llama3_2",
        "qwen2_5",
    ),
    *("qwen3_instruct_2507", "qwen3_vl"),
}
#: Those that write no reasoning where it is beside a call or behind a result: the generation prompt
#: behind a tool's result opens none (DeepSeek-V3), the marks leave it out (gpt-oss for training).
#: Gemma 4 writes it before calls alone.
NO_REASONING_WITH_TOOLS = (NO_REASONING - NO_CALLS) | {"deepseekv3", "gptoss_training"}
_WORDS = re.compile("(?:ANSWER|REASON|CITY)\\d")
_FOREIGN = re.compile("USER|SYSTEM|RESULT|DESCRIPTION")
#: Marks of reasoning in the data, and those that templates write for the keys of reasoning.
_THINK_MARKS = re.compile(r"</?think>")
_ROLE_MARKS = re.compile(
    "assistant|user|im_start|start_of_turn|start_header|CHATBOT|role", re.IGNORECASE
)
#: What the models of some families write around their words, besides.
_HEADERS = {
    "gptoss": ("analysisassistantfinal", "final", ""),
    "muse_glimmer": ("to=selfassistantto=user", "to=user", ""),
    "diffusion_gemma": ("thought", ""),
    "gemma4_v5": ("thought", ""),
}


def family(name: str) -> str:
    return name.removeprefix("trl/").removesuffix("_training")


def may_be_refused(name: str, shape: str) -> bool:
    return ("tools" in shape and family(name) in NO_CALLS) or (
        shape == "system" and family(name) in NO_SYSTEM
    )


def loses_reasoning(name: str, shape: str) -> bool:
    lacking = NO_REASONING_WITH_TOOLS if "tools" in shape else NO_REASONING
    own_key = shape in ("reasoning", "reasoning and tools")
    return own_key and (family(name) in lacking or name.removeprefix("trl/") in lacking)


def trained_texts(encoded: Encoded, tokenizer: Any) -> list[str]:
    """The text of each run of trained tokens."""
    found = []
    for sequence in encoded.sequences:
        assert len(sequence.tokens) == len(sequence.mask) and sequence.mask[-1] == 1
        for bit, run in groupby(zip(sequence.mask, sequence.tokens), key=lambda pair: pair[0]):
            if bit:
                found.append(tokenizer.decode([token for _, token in run]))
    return found


def encode(
    template: str, messages: list[dict[str, Any]], **options: Any
) -> tuple[Encoded, list[str], Any]:
    tokenizer = tokenizer_of(template)
    encoded = SftEncoding(tokenizer).encode(messages, **options)
    return encoded, trained_texts(encoded, tokenizer), tokenizer


def test_templates_of_many_models_are_here() -> None:
    if not TEMPLATES:
        pytest.skip(
            "none of the packages with chat templates is installed (the extra 'dev' has one)"
        )
    assert len(TEMPLATES) >= 70


@pytest.mark.parametrize("name", TEMPLATES)
def test_what_is_trained_is_what_the_model_would_generate(name: str) -> None:
    """Decoding the trained runs gives each turn's words and its end, and nothing else. Only the
    templates listed above refuse, or lose reasoning."""
    tokenizer = tokenizer_of(TEMPLATES[name])
    silent = tokenizer_of(TEMPLATES[name].replace("add_generation_prompt", "nobody_sets_this"))
    encodings = {shape: SftEncoding(tokenizer) for shape in SHAPES}
    encodings["no generation prompt"] = SftEncoding(silent)
    for shape, messages in SHAPES.items():
        encoding = encodings[shape]
        tools = [TOOL] if "tools" in shape else None
        if may_be_refused(name, shape):
            with pytest.raises(
                UserError, match=r"does not write its call|System role not supported"
            ):
                encoding.encode(messages, tools=tools)
            continue
        encoded = encoding.encode(messages, tools=tools)
        texts = trained_texts(encoded, encoding.tokenizer)
        turns = [message for message in messages if message["role"] == "assistant"]
        assert len(texts) == len(turns), (shape, texts)
        lost = 0
        for message, text in zip(turns, texts):
            assert not _FOREIGN.search(text), (shape, text)
            wanted, found = set(_WORDS.findall(str(message))), set(_WORDS.findall(text))
            lost += len(wanted - found)
            assert found <= wanted and all(word.startswith("REASON") for word in wanted - found), (
                shape,
                text,
            )
            if "tools" not in shape:
                assert_only_words(name, text, encoding.tokenizer)
        assert lost == encoded.lost_reasoning, (shape, texts)
        assert bool(lost) == loses_reasoning(name, shape), (shape, texts)


def assert_only_words(name: str, text: str, tokenizer: Any) -> None:
    """Nothing but words of the answer, special tokens, marks of reasoning and the headers of the
    family."""
    rest = _WORDS.sub("", text)
    for token in sorted(tokenizer.all_special_tokens, key=len, reverse=True):
        rest = rest.replace(token, "")
    if family(name) not in _HEADERS:
        assert not _ROLE_MARKS.search(text[: _WORDS.search(text).start()]), text  # type: ignore[union-attr]
    assert "".join(_THINK_MARKS.sub("", rest).split()) in _HEADERS.get(family(name), ("",)), text


# -- kinds of templates, written out ---------------------------------------------------------------

R1 = (  # opens reasoning where the assistant is asked, and drops it from every answer
    "{{ bos_token }}{% for m in messages %}{% if m.role == 'user' %}<U>{{ m.content }}{% else %}"
    "<A>{{ m.content.split('</think>')[-1] }}<EOS>{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<A><think>\n{% endif %}"
)
QWEN3 = (  # leaves the reasoning of earlier answers out
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{% if m.role == 'assistant' and loop.last %}"
    "<think>\n{{ m.reasoning_content or '' }}\n</think>\n\n{% endif %}{{ m.content "
    "}}<|im_end|>\n{% endfor %}"
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
        assert (
            tokenizer.decode(sequence.tokens[: sequence.prompt_length])
            == "<BOS><U>USER0<A><think>\n"
        )


def test_an_answer_without_reasoning_follows_the_head_alone_and_is_counted() -> None:
    encoded, texts, tokenizer = encode(R1, [user(0), answer(0), user(1), answer(1)])
    assert texts == ["ANSWER0<EOS>", "ANSWER1<EOS>"] and encoded.without_reasoning == 2
    [sequence] = encoded.sequences
    assert (
        tokenizer.decode(sequence.tokens) == "<BOS><U>USER0<A>ANSWER0<EOS><U>USER1<A>ANSWER1<EOS>"
    )


def test_a_template_that_leaves_earlier_reasoning_out_splits_the_conversation() -> None:
    encoded, texts, tokenizer = encode(QWEN3, SHAPES["reasoning"])
    assert texts == [f"<think>\nREASON{i}\n</think>\n\nANSWER{i}<|im_end|>" for i in (0, 1)]
    first, second = (tokenizer.decode(sequence.tokens) for sequence in encoded.sequences)
    assert second.startswith(first.partition("<think>")[0] + "ANSWER0<|im_end|>\n"), (
        "as the model will see it"
    )
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
    assert (
        encoding.encode(
            [user(0), answer(0, content="<think>REASON0</think>ANSWER0")]
        ).lost_reasoning
        == 1
    )
    assert encoding.encode([user(0), answer(0)]).lost_reasoning == 0


@pytest.mark.parametrize(
    ("prompt", "label"),
    [
        ([answer(0), user(1), answer(1)], None),
        ([{"role": "user", "content": ""}, answer(0)], None),
        ("", "ANSWER0"),
    ],
)
def test_an_answer_with_nothing_before_it_is_refused(prompt: Any, label: str | None) -> None:
    bare = "{% for m in messages %}{{ m['content'] }}<|im_end|>{% endfor %}"
    bare = bare.replace("<|im_end|>", "{% if m['role'] == 'assistant' %}<|im_end|>{% endif %}")
    encoding = SftEncoding(make_tokenizer(bare))
    with pytest.raises(UserError, match="the first token of all is trained"):
        encoding.encode(prompt, label)
    assert encoding.encode([user(0), answer(0)]).sequences[0].prompt_length == len("USER0")


@pytest.mark.parametrize("weight", [0, 1])
def test_a_label_answers_a_conversation_that_ends_with_a_question(weight: int) -> None:
    tokenizer = make_tokenizer()
    encoding = SftEncoding(tokenizer)
    asked = [
        {"role": "user", "content": "a"},
        {"role": "assistant", "content": "b", "weight": weight},
        {"role": "user", "content": "c"},
    ]
    answered = [*asked, {"role": "assistant", "content": "d"}]
    assert encoding.encode(asked, "d") == encoding.encode(answered)
    ignored = encoding.encode(answered, "e")
    assert ignored.unread_label
    assert ignored.sequences == encoding.encode(answered).sequences
    [sequence] = encoding.encode(asked, "d").sequences
    assert encoding.trained_text(sequence) == "b<|im_end|>" * weight + "d<|im_end|>"


def test_turns_without_weight_are_context() -> None:
    encoded, texts, _ = encode(QWEN3, [user(0), answer(0, weight=0), user(1), answer(1)])
    assert texts == ["<think>\n\n</think>\n\nANSWER1<|im_end|>"] and len(encoded.sequences) == 1
    with pytest.raises(UserError, match="no assistant message to train on"):
        encode(QWEN3, [user(0), answer(0, train=False)])


def test_a_template_that_drops_words_of_an_answer_is_refused() -> None:
    shy = CHATML.replace("m['content']", "m['content'][:3]")
    with pytest.raises(
        UserError, match=r"does not tell .* messages\[1\]\n.*does not write its text"
    ):
        SftEncoding(make_tokenizer(shy)).encode([user(0), answer(0)])


_FIRST_CALL = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] or '' }}"
    "{% if m['tool_calls'] %}{% set c = m['tool_calls'][0]['function'] %}"
    "<call>{{ c['name'] }} {{ CITIES }}</call>{% endif %}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


@pytest.mark.parametrize(
    ("written", "cities", "said"),
    [
        ("c['arguments'] | tojson", ["ROME", "OSLO"], "each of its 2 calls of 'lookup'"),
        ("c['arguments'] | length", ["ROME"], "the argument 'city' of its call"),
    ],
)
def test_a_template_that_drops_a_call_or_its_arguments_is_refused(
    written: str, cities: list[str], said: str
) -> None:
    calls = [{"function": {"name": "lookup", "arguments": {"city": city}}} for city in cities]
    tokenizer = make_tokenizer(_FIRST_CALL.replace("CITIES", written))
    with pytest.raises(UserError, match=said):
        SftEncoding(tokenizer).encode([user(0), answer(0, tool_calls=calls)])


@pytest.mark.parametrize(
    ("condition", "role"),
    [("m['role'] != 'critic'", "critic"), ("m['role'] != 'system' or loop.first", "system")],
)
def test_messages_that_the_template_leaves_out_are_found(condition: str, role: str) -> None:
    messages = [user(0), answer(0), {"role": role, "content": "SAID"}, user(1), answer(1)]
    shy = CHATML.replace("{{ '<|im", f"{{% if {condition} %}}{{{{ '<|im", 1)
    shy = shy.replace("{% endfor %}", "{% endif %}{% endfor %}", 1)
    assert SftEncoding(make_tokenizer(shy)).encode(messages).left_out_roles == [role]
    assert SftEncoding(make_tokenizer()).encode(messages).left_out_roles == []


def test_an_answer_that_brings_its_end_token_gets_no_second_one() -> None:
    tokenizer = make_tokenizer()
    [sequence] = SftEncoding(tokenizer).encode("Q", "A<|im_end|>").sequences
    assert tokenizer.decode(sequence.tokens) == "QA<|im_end|>"


def test_a_conversation_may_begin_with_the_assistant() -> None:
    _, texts, _ = encode(QWEN3, [answer(0), user(1), answer(1)])
    assert [text.split("\n\n")[-1] for text in texts] == ["ANSWER0<|im_end|>", "ANSWER1<|im_end|>"]


# -- forms that templates want ---------------------------------------------------------------------


def test_calls_have_the_form_that_the_template_writes_as_it_is() -> None:
    head = "{% for m in messages %}{% for c in m.tool_calls or [] %}{{ c.function.name }}"
    texts = tokenizer_of(
        head + "{{ c.function.arguments | tojson }}{% endfor %}{{ m.content }}{% endfor %}"
    )
    joined = tokenizer_of(
        head + "{{ '' + c.function.arguments }}{% endfor %}{{ m.content }}{% endfor %}"
    )
    for tokenizer in (texts, joined):
        assert render_messages(tokenizer, [CALL]) == 'lookup{"city": "CITY0"}'
    assert (template_form(texts).text_arguments, template_form(joined).text_arguments) == (
        False,
        True,
    )


def test_a_developer_speaks_as_the_system_where_no_template_knows_it() -> None:
    messages = [SYSTEM, {"role": "developer", "content": "DEV"}, user(0)]
    told = render_messages(tokenizer_of(CHATML), messages, add_generation_prompt=False)
    assert (
        told == "<|im_start|>system\nSYSTEM\n\nDEV<|im_end|>\n<|im_start|>user\nUSER0<|im_end|>\n"
    )
    known = tokenizer_of(CHATML + "{# developer #}")
    assert "<|im_start|>developer\nDEV<|im_end|>" in render_messages(known, messages)


def test_content_is_a_list_of_parts_where_the_template_wants_one() -> None:
    wants = (
        "{% for m in messages %}{% for p in m.content %}{% if p.type == 'text' %}{{ p.text }}{% "
        "endif %}{% endfor %}"
    )
    assert (
        render_messages(tokenizer_of(wants + "{% endfor %}"), [user(0), answer(0)])
        == "USER0ANSWER0"
    )


# -- what templates do that trains the wrong tokens unless it is noticed ---------------------------

CALLS = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content or '' }}{% for c in "
    "m.tool_calls or [] %}"
    "<call>{{ c.function.name }} {{ c.function.arguments | tojson }}</call>{% endfor "
    "%}<|im_end|>\n{% endfor %}"
)
ASKS = "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"


@pytest.mark.parametrize(
    "varying", ["{{ range(9999) | random }}", "{{ strftime_now('%H:%M:%S.%f') }}"]
)
def test_a_template_that_writes_something_else_each_time_is_refused(varying: str) -> None:
    with pytest.raises(UserError, match="differently each time"):
        encode(f"<|im_start|>system\n{varying}<|im_end|>\n{CHATML}", [user(0), answer(0)])


def test_a_date_that_changes_while_a_conversation_is_encoded_trains_no_prompt(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    tokenizer = tokenizer_of(
        f"<|im_start|>system\n{{# strftime_now #}}{{{{ today }}}}<|im_end|>\n{CHATML}"
    )
    days = iter(["Mon", "Mon", "Tue"])
    plain = tokenizer.apply_chat_template
    encoding = SftEncoding(tokenizer)
    monkeypatch.setattr(
        tokenizer, "apply_chat_template", lambda *a, **k: plain(*a, today=next(days, "Tue"), **k)
    )
    encoded = encoding.encode([user(0), answer(0)])
    assert trained_texts(encoded, tokenizer) == ["ANSWER0<|im_end|>"]
    assert "Tue" in tokenizer.decode(encoded.sequences[0].tokens)


def test_reasoning_that_the_prompt_opens_is_closed_although_the_answer_is_written_behind_its_mark() -> (  # noqa: E501
    None
):
    opens = (
        "{% for m in messages %}<|im_start|>{{ m.role }}\n{% if m.role == 'assistant' "
        "%}<think>\n{% endif %}"
    )
    opens += "{{ m.content.split('</think>')[-1].strip() }}<|im_end|>\n{% endfor %}"
    opens += "{% if add_generation_prompt %}<|im_start|>assistant\n<think>\n{% endif %}"
    encoded, texts, _ = encode(opens, [user(0), thoughtful(0)])
    assert texts == ["REASON0\n</think>\n\nANSWER0<|im_end|>"] and encoded.lost_reasoning == 0
    encoded, texts, tokenizer = encode(opens, [user(0), answer(0)])
    assert texts == ["ANSWER0<|im_end|>"] and encoded.without_reasoning == 1
    assert "<think>" not in tokenizer.decode(encoded.sequences[0].tokens), (
        "the answer is no reasoning"
    )


def test_reasoning_that_a_template_writes_before_calls_alone_or_as_a_part_is_trained() -> None:
    before_calls = CALLS.replace(
        "{{ m.content",
        "{% if m.tool_calls and m.reasoning %}[{{ m.reasoning }}]{% endif %}{{ m.content",
    )
    encoded, texts, _ = encode(before_calls + ASKS, SHAPES["reasoning and tools"], tools=[TOOL])
    assert texts[0].startswith("[REASON0]<call>lookup") and encoded.lost_reasoning == 1, (
        "that of the answer"
    )
    parts = CHATML.replace("m['content']", "body(m['content'])")
    parts = (
        "{% macro body(c) %}{% if c is string %}{{ c }}{% else %}{% for p in c %}"
        "{{ '[THINK]' + p.thinking + '[/THINK]' if p.type == 'thinking' else p.text }}{% endfor "
        "%}{% endif %}"
        "{% endmacro %}" + parts
    )
    for message in (thoughtful(0), answer(0, content="<think>\nREASON0\n</think>\n\nANSWER0")):
        encoded, texts, _ = encode(parts, [user(0), message])
        assert texts == ["[THINK]REASON0[/THINK]ANSWER0<|im_end|>"] and encoded.lost_reasoning == 0


def test_a_turn_of_calls_ends_with_its_first_end_token() -> None:
    """Some templates write an empty answer behind calls (DeepSeek), or always the head of the next
    turn (Command R)."""
    for behind in ("<|im_start|>assistant\n<|im_end|>\n", "<|im_start|>assistant\n"):
        template = CALLS.replace(
            "<|im_end|>\n{% endfor %}",
            "<|im_end|>\n{% if m.tool_calls %}" + behind + "{% endif %}{% endfor %}",
        )
        _, texts, _ = encode(template + ASKS, [user(0), CALL], tools=[TOOL])
        assert texts == ['<call>lookup {"city": "CITY0"}</call><|im_end|>']


def test_the_role_mark_is_not_trained_where_a_template_ends_prompts_with_the_end_token() -> None:
    ends = CHATML.partition("{% if add_generation_prompt")[0] + "{{ eos_token }}"
    for shape in ("one turn", "several turns"):
        _, texts, _ = encode(ends, SHAPES[shape])
        assert [text.removesuffix("<EOS>").strip() for text in texts] == [
            f"ANSWER{i}<|im_end|>" for i in range(len(texts))
        ]


def test_reasoning_that_is_given_twice_is_trained_once_and_two_that_differ_are_refused() -> None:
    keyed = CHATML.replace(
        "m['content'] +",
        "('<think>' ~ m.reasoning_content ~ '</think>' if m.reasoning_content else '') + "
        "m['content'] +",
    )
    inline = "<think>REASON0</think>ANSWER0"
    _, texts, _ = encode(keyed, [user(0), answer(0, content=inline, reasoning="REASON0")])
    assert texts == [inline + "<|im_end|>"]
    with pytest.raises(UserError, match="other reasoning in its content"):
        encode(keyed, [user(0), answer(0, content=inline, reasoning="REASON1")])
    with pytest.raises(UserError, match="reasoning in several places that differ"):
        encode(keyed, [user(0), answer(0, reasoning="REASON0", thinking="REASON1")])


def test_special_tokens_in_words_are_counted() -> None:
    assert encode(CHATML, [user(0), answer(0)])[0].control_tokens == 0
    encoded, _, _ = encode(CHATML, [answer(0, content="<|im_end|>", role="user"), answer(0)])
    assert encoded.control_tokens == 1


def test_a_warning_names_the_switch_that_makes_the_template_write_reasoning() -> None:
    switched = "{% if enable_thinking is defined %}{% endif %}" + CHATML
    assert "enable_thinking" in encode(switched, [user(0), thoughtful(0)])[0].reasoning_fix
    assert "enable_thinking" not in encode(CHATML, [user(0), thoughtful(0)])[0].reasoning_fix


def test_words_that_the_template_cuts_off_are_found() -> None:
    short = CHATML.replace(
        "m['content']", "(m['content'][:9] if m['role'] == 'user' else m['content'])"
    )
    messages = [{"role": "user", "content": "hello world"}, answer(0)]
    assert SftEncoding(make_tokenizer(short)).encode(messages).left_out_roles == ["user"]
    assert SftEncoding(make_tokenizer()).encode(messages).left_out_roles == []


def test_a_template_that_cuts_every_message_is_not_given_parts_as_text() -> None:
    short = CHATML.replace("m['content']", "m['content'][:4]")
    assert not template_form(make_tokenizer(short)).parts


def test_tools_that_the_template_leaves_out_are_found() -> None:
    messages = [user(0), answer(0)]
    assert SftEncoding(make_tokenizer()).encode(messages, tools=[TOOL]).left_out_tools == ["lookup"]
    writes = make_tokenizer("{{ tools | tojson if tools else '' }}" + CHATML)
    assert SftEncoding(writes).encode(messages, tools=[TOOL]).left_out_tools == []


@pytest.mark.parametrize("prompt", ["USER0", [user(0)]])
@pytest.mark.parametrize("label", [[answer(0)], answer(0), '[{"from": "gpt", "value": "ANSWER0"}]'])
def test_a_label_may_be_messages(prompt: Any, label: Any) -> None:
    encoding = SftEncoding(make_tokenizer())
    assert encoding.encode(prompt, label) == encoding.encode([user(0), answer(0)])


REMINDS = CHATML.replace(
    "m['content'] +", "m['content'] + (' BE BRIEF' if loop.last and m['role'] == 'user' else '') +"
)
MISTRAL = (  # no generation prompt, and the system message before the last question
    "{{ bos_token }}{% for m in messages if m.role != 'system' %}{% if m.role == 'user' %}[INST] "
    "{% if loop.last and messages[0].role == 'system' %}{{ messages[0].content }} {% endif %}"
    "{{ m.content }}[/INST]{% else %} {{ m.content }}{{ eos_token }}{% endif %}{% endfor %}"
)
R1_ZERO = (  # opens reasoning behind each question
    "{% for m in messages %}{% if m.role == 'user' %}User: {{ m.content }} Assistant: <think>"
    "{% else %}{{ m.content }}<EOS>{% endif %}{% endfor %}{# eos_token #}"
)


@pytest.mark.parametrize(
    ("template", "messages", "before", "trained"),
    [
        (REMINDS, [user(0), answer(0)], "USER0 BE BRIEF<|im_end|>\n<|im_start|>assistant\n",
         "ANSWER0<|im_end|>"),
        (MISTRAL, [SYSTEM, user(0), answer(0)], "[INST] SYSTEM USER0[/INST]", " ANSWER0<EOS>"),
        (R1_ZERO, [user(0), thoughtful(0)], "<think>", "REASON0</think>ANSWER0<EOS>"),
        (R1_ZERO, [user(0), answer(0)], "Assistant: ", "ANSWER0<EOS>"),
    ],
)  # fmt: skip
def test_an_answer_follows_the_prompt_that_the_model_is_given(
    template: str, messages: list[dict[str, Any]], before: str, trained: str
) -> None:
    """Also where the template writes the last question differently once it is answered."""
    encoded, texts, tokenizer = encode(template, messages)
    [sequence] = encoded.sequences
    assert texts == [trained] and not encoded.left_out_roles
    prompt = tokenizer.decode(sequence.tokens[: sequence.prompt_length])
    assert prompt.endswith(before)
    rendered = render_messages(tokenizer, messages[:-1])
    assert rendered == prompt or encoded.without_reasoning == 1


@pytest.mark.parametrize(
    ("asked", "header", "before", "trained", "unmatched"),
    [
        ('<A>{"think": 1}<E>', "<A><E>", '<A>{"think": 1}<E>', "ANSWER0<EOS>", ""),
        ("<A>now<E>\n", "<A><E>\n", "<A>now<E>\n", "ANSWER0<EOS>", ""),
        ("<A>Sure,", "<A>", "<A>", "ANSWER0<EOS>", "Sure,"),
        ("<A>analysis<E>", "<A>final<E>", "<A>", "final<E>ANSWER0<EOS>", "analysis<E>"),
        ("<A><think></think>", "<A><think>REASON0</think>", "<A><think>", None, "</think>"),
    ],
)
def test_an_answer_that_does_not_begin_with_the_generation_prompt(
    asked: str, header: str, before: str, trained: str | None, unmatched: str
) -> None:
    template = (
        "{% for m in messages %}{% if m.role == 'assistant' %}HEAD{{ m.content }}<EOS>{% else %}"
        "<U>{{ m.content }}{% endif %}{% endfor %}{% if add_generation_prompt %}ASKED{% endif %}"
    )
    reasons = "REASON0" in header
    header = header.replace("REASON0", "{{ m.reasoning_content or '' }}")
    template = template.replace("HEAD", header).replace("ASKED", asked) + "{# <E> eos_token #}"
    encoded, texts, tokenizer = encode(template, [user(0), thoughtful(0) if reasons else answer(0)])
    assert texts == [trained or "REASON0</think>ANSWER0<EOS>"]
    [sequence] = encoded.sequences
    assert tokenizer.decode(sequence.tokens[: sequence.prompt_length]) == f"<U>USER0{before}"
    assert encoded.unmatched == unmatched


OWN_MARKS = CHATML.replace(
    "m['content'] +", "('<M>' + m['thinking'] + '</M>' if 'thinking' in m else '') + m['content'] +"
)


@pytest.mark.parametrize(
    ("said", "trained"),
    [
        ("<think>\n\n</think>\n\nANSWER0", "ANSWER0<|im_end|>"),
        ("REASON0\n</think>\n\nANSWER0", "<M>REASON0</M>ANSWER0<|im_end|>"),
        ("Close it with `</think>`.", "Close it with `</think>`.<|im_end|>"),
    ],
)
def test_marks_of_reasoning_that_hold_none(said: str, trained: str) -> None:
    assert encode(OWN_MARKS, [user(0), answer(0, content=said)])[1] == [trained]


def test_what_of_an_answer_is_not_trained_is_found() -> None:
    trims = CHATML.replace("m['content']", "m['content'].strip()")
    indented = [user(0), answer(0, content="    x = 1\n    return x")]
    assert encode(trims, indented)[0].lost_indentation == 1
    assert encode(CHATML, indented)[0].lost_indentation == 0
    assert encode(CHATML, [user(0), answer(0), user(1)])[0].unanswered
    assert not encode(CHATML, [user(0), answer(0)])[0].unanswered
    with pytest.raises(UserError, match="no assistant message to train on"):
        encode(CHATML, [user(0), answer(0, content="", reasoning_content="REASON0")])


@pytest.mark.parametrize(("name", "end"), [("CHATML", "<|im_end|>"), ("trl/gptoss", "<|return|>")])
@pytest.mark.parametrize("blank", ["", "\n"])
def test_an_answer_that_brings_its_own_end_is_trained_with_one(
    name: str, end: str, blank: str
) -> None:
    template = CHATML if name == "CHATML" else TEMPLATES.get(name)
    if template is None:
        pytest.skip(f"{name} is not installed")
    plain = encode(template, [user(0), answer(0), user(1), answer(1)])
    brought = [answer(number, content=f"ANSWER{number}{end}{blank}") for number in range(2)]
    encoded, texts, _ = encode(template, [user(0), brought[0], user(1), brought[1]])
    assert encoded == plain[0]
    assert [text.count(end) for text in texts] == [1, 1]


@pytest.mark.parametrize(
    ("label", "trained", "control_tokens"),
    [
        ("ANSWER0<|im_end|>\n", "ANSWER0<|im_end|>", 0),
        ("ANSWER0<|im_end|>\n<|im_start|>user\n", "ANSWER0<|im_end|>\n<|im_start|>user\n", 1),
    ],
)
def test_a_label_that_brings_more_than_an_answer(
    label: str, trained: str, control_tokens: int
) -> None:
    tokenizer = make_tokenizer()
    encoded = SftEncoding(tokenizer).encode("USER0", label)
    (text,) = trained_texts(encoded, tokenizer)
    assert text.removesuffix("<|im_end|>") == trained.removesuffix("<|im_end|>")
    assert encoded.control_tokens == control_tokens


def test_marks_for_training_end_with_the_last_answer() -> None:
    """Empty turns and questions without an answer are not trained, whatever the template marks."""
    marked = (
        "{% for m in messages %}{% if m.role == 'assistant' %}{% generation %}<A>{{ m.content }}"
        "<EOS>{% endgeneration %}{% else %}<U>{{ m.content }}{% endif %}{% endfor %}"
        "{% if add_generation_prompt %}<A>{% endif %}{# eos_token #}"
    )
    for messages in (
        [user(0), answer(0), user(1)],
        [user(0), answer(0, content=""), user(1), answer(0)],
    ):
        assert encode(marked, messages)[1] == ["ANSWER0<EOS>"]
