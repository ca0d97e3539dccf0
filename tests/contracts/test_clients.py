"""Other people's clients: the requests that they send, recorded, and the answers, read as they read
them.

``client_requests.jsonl`` was recorded between real clients and an engine: SGLang 0.5.16's frontend
language (``sglang.lang`` with ``RuntimeEndpoint``), its ``Runtime``, the curl and ``requests``
examples of its docs, and the ``openai`` package 3.51. Each line has the client, the request, and
the status that the client is to get: 400 marks what this engine refuses.
"""

from __future__ import annotations

import json
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from tests.support.contract_servers import PROMPT, Answer, Server, logprobs_of
from tests.support.embedded_models import byte_tokenizer

RECORDED = [
    json.loads(line)
    for line in (Path(__file__).parent / "client_requests.jsonl").read_text().splitlines()
]


def send(engine: Server, request: dict[str, Any]) -> Answer:
    answer = engine.call(request["method"], request["path"], request.get("body"))
    assert answer.status == request["status"], (request, answer.raw[:500])
    return answer


def named(client: str) -> dict[str, Any]:
    return next(request for request in RECORDED if request["client"] == client)


def name_of(request: dict[str, Any]) -> str:
    return f"{request['client']} {request['path']}"


# -- how the clients read answers ------------------------------------------------------------------


def read_events(raw: bytes) -> list[Any]:
    """As every client does: lines that begin with "data:", until the one that says [DONE]."""
    lines = [line for line in raw.decode().split("\n") if line.startswith("data:")]
    assert lines[-1] == "data: [DONE]"
    return [json.loads(line[5:]) for line in lines[:-1]]


def read_generate(body: dict[str, Any], answer: Answer) -> None:
    """`RuntimeEndpoint.generate`, its stream, and SGLang's examples: text, cumulative, and
    meta_info."""
    if body.get("stream"):
        texts = [event["text"] for event in read_events(answer.raw)]
        assert all(later.startswith(earlier) for earlier, later in pairwise(texts)) and texts
        items = read_events(answer.raw)[-1:]
    else:
        items = answer.json if isinstance(answer.json, list) else [answer.json]
    is_batch = isinstance(body.get("text"), list) or isinstance(body.get("input_ids", [0])[0], list)
    assert isinstance(answer.json if not body.get("stream") else None, list) == is_batch
    for item in items:
        meta = item["meta_info"]
        assert isinstance(item["text"], str) and meta["finish_reason"]["type"] in ("stop", "length")
        assert meta["prompt_tokens"] > 0 and meta["completion_tokens"] == len(item["output_ids"])
        if body.get("return_logprob"):
            read_logprobs(body, meta)


def read_logprobs(body: dict[str, Any], meta: dict[str, Any]) -> None:
    """Triples (log-prob, token, text); the text only when asked for, the first input without a
    log-prob."""
    with_text, tops, start = (
        body.get("return_text_in_logprobs"),
        body.get("top_logprobs_num"),
        "logprob_start_len",
    )
    shown: Any = str if with_text else type(None)
    for value, token, text in meta["output_token_logprobs"] + meta["input_token_logprobs"][1:]:
        assert value <= 0 and isinstance(token, int) and isinstance(text, shown)
    asked = body.get(start) if body.get(start) is not None else -1
    assert len(meta["input_token_logprobs"]) == (meta["prompt_tokens"] - asked if asked >= 0 else 0)
    if tops:
        assert [len(row) for row in meta["output_top_logprobs"]] == [tops] * meta[
            "completion_tokens"
        ]
        assert meta["input_top_logprobs"][0] is None
        assert [len(row) for row in meta["input_top_logprobs"][1:]] == [tops] * (
            len(meta["input_token_logprobs"]) - 1
        )


def read_usage(usage: dict[str, Any]) -> None:
    assert usage["total_tokens"] == usage["prompt_tokens"] + usage["completion_tokens"]


def read_completion(body: dict[str, Any], answer: Answer) -> None:
    """`openai.types.Completion` and its chunks."""
    events = read_events(answer.raw) if body.get("stream") else [answer.json]
    if isinstance(body["prompt"], list) and isinstance(body["prompt"][0], str):
        prompts = body["prompt"]
    else:
        prompts = [None]
    assert {event["object"] for event in events} == {"text_completion"} and all(
        event["id"] for event in events
    )
    choices = [choice for event in events for choice in event["choices"]]
    assert {choice["index"] for choice in choices} == set(
        range((body.get("n") or 1) * len(prompts))
    )
    assert choices[-1]["finish_reason"] in ("stop", "length")
    read_usage(events[-1]["usage"])
    if body.get("logprobs") is not None:
        lists = [choice["logprobs"] for choice in choices]
        for entry in lists:
            sizes = {
                len(entry[name])
                for name in ("tokens", "token_logprobs", "top_logprobs", "text_offset")
            }
            assert len(sizes) == 1
        outputs = sum(len(entry["tokens"]) for entry in lists)
        echoed = (
            events[-1]["usage"]["prompt_tokens"] * (body.get("n") or 1) if body.get("echo") else 0
        )
        assert outputs == events[-1]["usage"]["completion_tokens"] + echoed


def read_chat(body: dict[str, Any], answer: Answer) -> None:
    """`openai.types.chat.ChatCompletion` and its chunks."""
    if not body.get("stream"):
        assert answer.json["object"] == "chat.completion"
        assert [choice["index"] for choice in answer.json["choices"]] == list(
            range(body.get("n") or 1)
        )
        for choice in answer.json["choices"]:
            message = choice["message"]
            assert (
                message["role"] == "assistant"
                and isinstance(message["content"], str)
                and not message["tool_calls"]
            )
            assert choice["finish_reason"] in ("stop", "length")
            assert bool(choice["logprobs"]) == bool(body.get("logprobs"))
        read_usage(answer.json["usage"])
        return
    events = read_events(answer.raw)
    assert {event["object"] for event in events} == {"chat.completion.chunk"}
    deltas = [choice for event in events for choice in event["choices"]]
    assert deltas[0]["delta"]["role"] == "assistant" and deltas[-1]["finish_reason"] in (
        "stop",
        "length",
    )
    entries = [
        entry for delta in deltas if delta["logprobs"] for entry in delta["logprobs"]["content"]
    ]
    tops = body.get("top_logprobs") or 0
    assert all(len(entry["top_logprobs"]) == tops and entry["logprob"] <= 0 for entry in entries)
    usage = [event["usage"] for event in events if "usage" in event]
    if (body.get("stream_options") or {}).get("include_usage"):
        assert events[-1]["choices"] == [] and len(entries) == usage[-1]["completion_tokens"]
    if (body.get("stream_options") or {}).get("continuous_usage_stats"):
        assert len(usage) == len(events)
    for entry in usage:
        read_usage(entry)


def read_refusal(path: str, answer: Answer) -> None:
    """`openai.APIStatusError` takes ``error`` of the body or all of it; SGLang has ``error`` on its
    own routes."""
    body = answer.json
    if path == "/load_lora_adapter":
        assert body["success"] is False and body["error_message"]
        return
    error = body.get("error", body)
    assert (
        error["message"]
        and error["code"] in (answer.status, "model_not_found")
        and "param" in error
    )
    assert ("error" in body) == (not path.startswith("/v1/") or answer.status == 404)


READERS = {
    "/generate": read_generate,
    "/v1/completions": read_completion,
    "/v1/chat/completions": read_chat,
}


@pytest.mark.parametrize("request_", RECORDED, ids=name_of)
def test_recorded_requests_get_answers_that_their_clients_can_read(
    engine: Server, request_: dict[str, Any]
) -> None:
    answer = send(engine, request_)
    if request_["status"] >= 400:
        read_refusal(request_["path"], answer)
    elif request_["path"] in READERS:
        READERS[request_["path"]](request_["body"], answer)


# -- what a client does with several of them -------------------------------------------------------


def test_select_chooses_by_the_likelihood_of_the_choices(engine: Server, model_dir: Path) -> None:
    """`RuntimeEndpoint.select`: the prompt's length, then input log-probs of every choice from two
    before its end."""
    prefix, choices = [
        r for r in RECORDED if r["client"] == "sglang.lang: select token_length_normalized"
    ]
    length = send(engine, prefix).json["meta_info"]["prompt_tokens"]
    start = choices["body"]["logprob_start_len"]
    assert start == length - 2
    answers = send(engine, choices).json
    for text, answer in zip(choices["body"]["text"], answers, strict=True):
        entries = answer["meta_info"]["input_token_logprobs"]
        tokens = byte_tokenizer().encode(text)
        assert [entry[2] for entry in entries] == [
            byte_tokenizer().decode([token]) for token in tokens[start:]
        ]
        expected = logprobs_of(model_dir, tokens)[start:]
        assert [entry[0] for entry in entries[1:]] == pytest.approx(expected, abs=1e-4)
        assert answer["meta_info"]["output_token_logprobs"] == [] and entries[0][0] is None


def test_the_frontend_finds_the_model_and_the_servers_state(engine: Server) -> None:
    assert engine.get("/get_model_info").json["architectures"] == ["Qwen3ForCausalLM"]
    assert send(engine, named("sglang.lang: get_server_info")).json["internal_states"]
    [card] = send(engine, named("sglang.utils: wait_for_server")).json["data"]
    assert card["id"] == "tiny" and card["object"] == "model"


def test_text_completion_is_generation(engine: Server) -> None:
    body = {
        "model": "tiny",
        "prompt": PROMPT,
        "max_tokens": 6,
        "temperature": 0,
        "logprobs": 2,
        "ignore_eos": True,
    }
    plain = engine.generate(PROMPT, max_new_tokens=6, temperature=0)
    [choice] = engine.ok("/v1/completions", body)["choices"]
    assert choice["text"] == plain["text"] and choice["finish_reason"] == "length"
    values = [entry[0] for entry in plain["meta_info"]["output_token_logprobs"]]
    assert choice["logprobs"]["token_logprobs"] == pytest.approx(values, abs=1e-5)
    chunks = read_events(engine.post("/v1/completions", body | {"stream": True}).raw)
    assert "".join(chunk["choices"][0]["text"] for chunk in chunks) == plain["text"]
    echoed = engine.ok("/v1/completions", body | {"echo": True, "max_tokens": 0})["choices"][0]
    assert (
        echoed["text"] == byte_tokenizer().decode(PROMPT)
        and echoed["logprobs"]["token_logprobs"][0] is None
    )
    assert (
        len(echoed["logprobs"]["tokens"]) == len(PROMPT) == len(echoed["logprobs"]["top_logprobs"])
    )


def test_tokens_there_and_back(engine: Server) -> None:
    ids = engine.ok("/tokenize", {"prompt": "Hello wo"})
    assert ids["tokens"] == byte_tokenizer().encode("Hello wo") and ids["count"] == 8
    assert engine.ok("/detokenize", {"tokens": ids["tokens"]}) == {"text": "Hello wo"}
    messages = [{"role": "user", "content": "Hi"}]
    rendered = engine.ok("/v1/tokenize", {"messages": messages})["tokens"]
    usage = engine.ok("/v1/chat/completions", {"messages": messages, "max_tokens": 1})["usage"]
    assert usage["prompt_tokens"] == len(rendered)


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/completions"])
def test_a_model_that_is_not_served_and_a_temperature_beyond_openais_are_refused(
    engine: Server, path: str
) -> None:
    body = {"messages": [{"role": "user", "content": "Hi"}]} if "chat" in path else {"prompt": "Hi"}
    wrong = engine.post(path, {**body, "model": "gpt-4o", "max_tokens": 1})
    assert wrong.status == 404 and wrong.json["error"]["code"] == "model_not_found"
    hot = engine.post(path, {**body, "model": "tiny", "temperature": 99})
    assert (
        hot.status == 400
        and hot.json["param"] == "temperature"
        and "from 0 to 2" in hot.json["message"]
    )
    for model in ("tiny", "default", None):
        assert engine.post(path, {**body, "model": model, "max_tokens": 1}).status == 200
