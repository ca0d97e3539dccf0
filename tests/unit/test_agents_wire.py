"""Requests as command-line agents sent them, shortened, without the agents."""

from __future__ import annotations

import copy
from typing import Any

import aiohttp
import pytest

from slime.agents.conversation import ChatFormat
from slime.agents.endpoint import AgentEndpoint
from slime.prompts.chat_template import in_turns, takes_any_order
from tests.support.agents import TEMPLATE, Play, tokenizer
from tests.support.embedded_models import EOS

CALL = (
    '<think>\nhm\n</think>\n\nI will write it. <tool_call>\n{"name": "run", "arguments": {"cmd": '
    '"ls"}}\n</tool_call>'
)
LINES = [f"{CALL}<|im_end|>", "Done.<|im_end|>"]
#: As Mistral's: one system message, first, and turns that alternate.
STRICT = (
    "{% set rest = messages[1:] if messages[0].role == 'system' else messages %}"
    "{% for m in rest if m.role != 'tool' and not m.tool_calls %}{% if (m.role == 'user') != "
    "(loop.index0 % 2 == 0) %}"
    "{{ raise_exception('turns must alternate') }}{% endif %}{% endfor %}"
) + TEMPLATE
#: As DeepSeek-V3's: whatever a system message says comes first.
GATHERED = (
    "{% for m in messages if m.role == 'system' %}{{ m.content }}{% endfor %}"
    "{% set messages = messages | rejectattr('role', 'equalto', 'system') | list %}"
) + TEMPLATE


def codex_asks(answer: dict[str, Any] | None) -> tuple[str, dict[str, Any]]:
    """@openai/codex 0.169.0: two messages of the developer, two of the user, and tools that are no
    functions."""

    def says(role: str, *texts: str) -> dict[str, Any]:
        parts = [{"type": "input_text", "text": text} for text in texts]
        return {"type": "message", "id": f"msg_{role}", "role": role, "content": parts}

    items = [
        says("developer", "You are a coding agent."),
        says("developer", "<skills_instructions/>", "<permissions/>"),
        says("user", "<environment_context/>"),
        says("user", "Write it."),
    ]
    function: dict[str, Any] = {
        "type": "function",
        "name": "run",
        "strict": False,
        "parameters": {"type": "object"},
    }
    if answer is not None:
        call = answer["output"][-1]
        result = {
            "type": "function_call_output",
            "id": "fco_1",
            "call_id": call["call_id"],
            "output": "Output:\n",
        }
        items += [*answer["output"], result]
    return "responses", {
        "model": "policy",
        "input": items,
        "tools": [
            function,
            {"type": "namespace", "name": "agents", "tools": [function]},
            {"type": "web_search"},
        ],
        "tool_choice": "auto",
        "parallel_tool_calls": True,
        "reasoning": {"summary": "auto"},
        "store": False,
        "include": ["reasoning.encrypted_content"],
        "prompt_cache_key": "01a2",
        "client_metadata": {"thread_id": "01a2"},
    }


def claude_asks(answer: dict[str, Any] | None) -> tuple[str, dict[str, Any]]:
    """@anthropic-ai/claude-code 2.1.330: the system speaks again behind the user, as blocks and
    then as a string, and behind results of tools."""
    text = "# Environment"
    blocks = [{"type": "text", "text": text, "cache_control": {"type": "ephemeral"}}]
    messages: list[dict[str, Any]] = [
        {
            "role": "user",
            "content": [
                {"type": "text", "text": "<system-reminder/>"},
                {"type": "text", "text": "Do it"},
            ],
        },
        {"role": "system", "content": text if answer else blocks},
    ]
    if answer is not None:
        result = {
            "type": "tool_result",
            "content": "",
            "is_error": False,
            "tool_use_id": answer["content"][-1]["id"],
        }
        messages += [
            {"role": "assistant", "content": answer["content"]},
            {"role": "user", "content": [result]},
            {"role": "system", "content": "It is late."},
        ]
    return "messages?beta=true", {
        "model": "policy",
        "messages": messages,
        "system": [
            {"type": "text", "text": "You are an agent."},
            {"type": "text", "text": "\nBe kind."},
        ],
        "tools": [
            {"name": "run", "description": "Run", "input_schema": {}},
            {"name": "x", "defer_loading": True},
        ],
        "metadata": {"user_id": "{}"},
        "max_tokens": 32000,
        "thinking": {"type": "adaptive", "display": "omitted"},
        "context_management": {"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]},
        "output_config": {"effort": "high"},
    }


@pytest.mark.parametrize(
    "template", [TEMPLATE, STRICT, GATHERED], ids=["any order", "strict", "gathered"]
)
@pytest.mark.parametrize("asks", [codex_asks, claude_asks])
def test_an_agents_requests_are_one_conversation_in_every_template(
    asks: Any, template: str
) -> None:
    play = Play(LINES)
    play.model.tokenizer = play.state.tokenizer = copy.copy(tokenizer())
    play.model.tokenizer.chat_template = template

    async def agent(endpoint: AgentEndpoint) -> None:
        answer = None
        headers = {"Authorization": f"Bearer {endpoint.api_key}"}
        async with aiohttp.ClientSession(base_url=endpoint.base_url + "/", headers=headers) as http:
            for _ in LINES:
                path, body = asks(answer)
                async with http.post(path, json=body) as response:
                    answer = await response.json()
                    assert response.status == 200, answer

    (sample,) = play.run(agent).samples()
    (asked, then), (said, last) = play.model.asked, play.model.said
    assert then[: len(asked) + len(said)] == asked + said and sample.tokens == then + last
    assert play.trained(sample) == said + last
    words = (
        ["<permissions/>", "Write it."]
        if asks is codex_asks
        else ["Be kind.", "Do it", "# Environment"]
    )
    if asks is claude_asks:
        assert "It is late." in play.text(then[len(asked) + len(said) :])
    places = [play.text(asked).find(word) for word in words]
    assert -1 not in places and places == sorted(places)


def test_messages_in_turns_say_all_that_was_said() -> None:
    def told(*messages: tuple[str, str], begins: bool = True) -> list[tuple[str, str]]:
        made = in_turns(
            [{"role": role, "content": content} for role, content in messages], begins=begins
        )
        return [(message["role"], message["content"]) for message in made]

    first = [
        ("system", "a"),
        ("system", "b"),
        ("user", "c"),
        ("system", "d"),
        ("assistant", "e"),
        ("system", "f"),
    ]
    assert told(*first) == [
        ("system", "a\n\nb"),
        ("user", "c\n\nd"),
        ("assistant", "e"),
        ("user", "f"),
    ]
    later = [("system", "a"), ("tool", "b"), ("tool", "c"), ("user", "d"), ("user", "e")]
    assert told(*later, begins=False) == [
        ("user", "a"),
        ("tool", "b"),
        ("tool", "c"),
        ("user", "d\n\ne"),
    ]
    assert told() == []


def test_a_template_tells_whether_it_takes_any_order() -> None:
    found = copy.copy(tokenizer())
    taken = []
    for found.chat_template in (TEMPLATE, STRICT, GATHERED):
        ChatFormat.of(found, "", {EOS})
        taken.append(takes_any_order(found))
    assert taken == [True, False, False]
