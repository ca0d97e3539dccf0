"""Trying to break an engine over HTTP: odd values, odd moments. It says what is wrong, and goes
on."""

from __future__ import annotations

import base64
import json
import os
import pickle
import time
from dataclasses import dataclass
from itertools import pairwise
from multiprocessing.reduction import ForkingPickler
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from tests.support.contract_servers import (
    CONTEXT,
    PROMPT,
    Background,
    Server,
    long_generation,
    num_running,
    wait_until,
)

CHAT = [{"role": "user", "content": "Hi"}]


def params(**values: Any) -> dict[str, Any]:
    return {"input_ids": PROMPT, "sampling_params": values}


#: (route, body, what the refusal says): the field, the value, and what is accepted.
ODD: list[tuple[str, Any, str]] = [
    ("/generate", params(logit_bias={"1": "much"}), "logit_bias must be an object of token ids"),
    ("/generate", params(logit_bias={"1": None}), "got {'1': None}"),
    ("/generate", params(logit_bias={"x": 1}), "logit_bias"),
    (
        "/generate",
        params(logit_bias={"1": 10**400}),
        "the body is not valid JSON: number is infinity",
    ),
    ("/generate", params(logit_bias=[1]), "logit_bias"),
    (
        "/generate",
        params(temperature=True),
        "temperature must be a finite number of 0 (greedy) or more, got True",
    ),
    (
        "/generate",
        params(top_p="0.9"),
        "top_p must be a finite number above 0 and at most 1, got '0.9'",
    ),
    ("/generate", params(top_k=0), "top_k must be an integer: -1 (all) or at least 1, got 0"),
    ("/generate", params(n=10**9), "n must be an integer from 1 to 4096"),
    (
        "/generate",
        params(max_new_tokens=-1),
        "max_new_tokens must be an integer of at least 0, got -1",
    ),
    ("/generate", params(stop=[1]), "stop must be a string or a list of strings"),
    ("/generate", params(stop_token_ids=[10**6]), "stop_token_ids must be a list of token ids"),
    ("/generate", params(ignore_eos="yes"), "ignore_eos must be true or false, got 'yes'"),
    ("/generate", params(sampling_seed=1.5), "sampling_seed must be an integer, got 1.5"),
    ("/generate", params(regex="a+"), "sampling_params.regex is not supported"),
    (
        "/generate",
        {"input_ids": PROMPT, "return_logprob": True, "top_logprobs_num": "two"},
        "top_logprobs_num must be",
    ),
    (
        "/generate",
        {"input_ids": PROMPT, "return_logprob": True, "top_logprobs_num": -1},
        "top_logprobs_num must be",
    ),
    (
        "/generate",
        {"input_ids": PROMPT, "return_logprob": True, "top_logprobs_num": [1]},
        "1 entries for 1 prompt",
    ),
    (
        "/generate",
        {"input_ids": PROMPT, "return_logprob": "yes"},
        "return_logprob must be true or false",
    ),
    (
        "/generate",
        {"input_ids": PROMPT, "return_logprob": True, "logprob_start_len": -2},
        "logprob_start_len must be",
    ),
    ("/generate", {"input_ids": PROMPT, "stream": 1}, "stream must be true or false, got 1"),
    ("/generate", {"input_ids": PROMPT, "nonsense": False}, "unknown field 'nonsense'"),
    (
        "/generate",
        {"input_ids": PROMPT, "lora_path": "adapter"},
        "adapter 'adapter' was named, and this engine was started without --enable-lora",
    ),
    ("/generate", {"input_ids": PROMPT, "rid": {}}, "rid must be"),
    ("/generate", {"text": ""}, "a prompt is empty"),
    ("/generate", {"input_ids": [0] * CONTEXT}, f"the prompt has {CONTEXT} tokens"),
    ("/v1/completions", {"prompt": PROMPT, "max_tokens": "many"}, "max_tokens must be an integer"),
    ("/v1/completions", {"prompt": PROMPT, "logprobs": True}, "logprobs must be an integer"),
    ("/v1/completions", {"prompt": {}}, "prompt must be"),
    ("/v1/completions", {"prompt": PROMPT, "best_of": 3}, "best_of"),
    ("/v1/completions", {"prompt": PROMPT, "suffix": "x"}, "'suffix'"),
    (
        "/v1/chat/completions",
        {"messages": CHAT, "top_logprobs": "x", "logprobs": True},
        "top_logprobs must be",
    ),
    ("/v1/chat/completions", {"messages": CHAT, "seed": "x"}, "seed must be an integer"),
    (
        "/v1/chat/completions",
        {"messages": CHAT, "stream_options": 5},
        "stream_options must be an object",
    ),
    (
        "/v1/chat/completions",
        {"messages": CHAT, "chat_template_kwargs": [1]},
        "chat_template_kwargs must be an object",
    ),
    ("/v1/chat/completions", {"messages": CHAT, "tools": 5}, "tools must be a list"),
    ("/v1/chat/completions", {"messages": CHAT, "tools": "x"}, "tools must be a list"),
    ("/v1/chat/completions", {"messages": CHAT, "tools": [{"type": "function"}]}, "tools[0]"),
    ("/v1/chat/completions", {"messages": []}, "messages must have at least one"),
    ("/v1/chat/completions", {"messages": [5]}, "messages[0] must be"),
    ("/v1/chat/completions", {"messages": [*CHAT, {"role": "user"}]}, "messages[1] has no content"),
    (
        "/v1/chat/completions",
        {"messages": [{"role": "robot", "content": "Hi"}]},
        "the role of messages[0] must be one",
    ),
    (
        "/v1/chat/completions",
        {"messages": CHAT, "continue_final_message": True},
        "continue_final_message needs",
    ),
    ("/abort_request", {"rid": 5}, "rid must be a string"),
    ("/abort_request", {}, "give rid, or abort_all"),
    ("/pause_generation", {"mode": []}, "mode must be one of: abort, retract, in_place"),
    ("/flush_cache?timeout=soon", {}, "timeout must be a number of seconds"),
    ("/release_memory_occupation", {"tags": 5}, "tags must be"),
    ("/resume_memory_occupation", {"tags": ["heap"]}, "tags must be one of: weights, kv_cache"),
    ("/weights_checker", {"action": []}, "action must be one of"),
    ("/weights_checker", {"names": 5}, "names must be"),
    ("/destroy_weights_update_group", {"group_name": []}, "group_name must be a text"),
    ("/update_weights_from_tensor", {"load_format": "shared_memory", "segments": [5]}, "segments"),
    ("/tokenize", {"prompt": 5}, "prompt must be a string"),
    ("/detokenize", {"tokens": [10**9]}, "tokens must be an integer from 0"),
]


@pytest.mark.parametrize(("path", "body", "said"), ODD)
def test_odd_values_are_refused_by_name(engine: Server, path: str, body: Any, said: str) -> None:
    answer = engine.post(path, body)
    assert answer.status == 400, answer.raw[:300]
    error = answer.json.get("error", answer.json)
    assert said in error["message"]


def test_the_engine_is_none_the_worse_for_them(engine: Server) -> None:
    before = engine.generate(PROMPT, temperature=0)["output_ids"]
    for path, body, _ in ODD:
        engine.post(path, body)
    assert engine.generate(PROMPT, temperature=0)["output_ids"] == before
    assert engine.get("/health_generate").status == 200 and num_running(engine) == 0


@pytest.mark.parametrize(
    "extreme",
    [
        {"temperature": 1e30},
        {"temperature": 1e-5},
        {"min_new_tokens": 4, "stop_token_ids": list(range(384))},
    ],
)
def test_extreme_values_end_the_request_at_worst(engine: Server, extreme: dict[str, Any]) -> None:
    reason = engine.generate(PROMPT, **{"max_new_tokens": 4, "ignore_eos": False, **extreme})[
        "meta_info"
    ]
    assert reason["finish_reason"]["type"] in ("length", "stop", "abort")
    assert len(engine.generate(PROMPT)["output_ids"]) == 8


def test_samples_of_a_seeded_request_are_those_of_consecutive_seeds(engine: Server) -> None:
    body = {
        "input_ids": PROMPT,
        "sampling_params": {"n": 3, "sampling_seed": 5, "max_new_tokens": 8, "ignore_eos": True},
    }
    together = [sample["output_ids"] for sample in engine.ok("/generate", body)]
    assert together == [
        engine.generate(PROMPT, sampling_seed=seed)["output_ids"] for seed in (5, 6, 7)
    ]


def test_no_room_and_no_tokens(engine: Server) -> None:
    longest = [65] * (CONTEXT - 1)
    answer = engine.generate(longest, max_new_tokens=50)
    assert len(answer["output_ids"]) == 1 and answer["meta_info"]["finish_reason"] == {
        "type": "length",
        "length": 1,
    }
    raw = engine.post(
        "/generate", {"input_ids": PROMPT, "stream": True, "sampling_params": {"max_new_tokens": 0}}
    ).raw
    first, done = raw.decode().strip().split("\n\n")
    assert json.loads(first[6:])["output_ids"] == [] and done == "data: [DONE]"


# -- streams ---------------------------------------------------------------------------------------


def events_of(raw: bytes) -> list[Any]:
    lines = [line[6:] for line in raw.decode().split("\n") if line.startswith("data: ")]
    assert lines[-1] == "[DONE]"
    return [json.loads(line) for line in lines[:-1]]


def letters() -> dict[str, float]:
    """A bias that leaves little but lower-case letters, so that texts are readable and stop strings
    occur."""
    return {str(token): 1000.0 for token in range(64, 90)}


def test_a_stream_never_shows_what_a_stop_string_takes_back(engine: Server) -> None:
    sampling = {
        "max_new_tokens": 40,
        "sampling_seed": 3,
        "logit_bias": letters(),
        "temperature": 2.0,
    }
    text = engine.generate(PROMPT, **sampling)["text"]
    position = next(i for i in range(6, 36) if text.find(text[i : i + 3]) == i)
    stop = text[position : position + 3]
    whole = engine.generate(PROMPT, **sampling, stop=stop)["text"]
    assert whole == text[:position]
    body = {
        "input_ids": PROMPT,
        "stream": True,
        "sampling_params": sampling | {"stop": stop, "ignore_eos": True},
    }
    texts = [event["text"] for event in events_of(engine.post("/generate", body).raw)]
    assert (
        all(later.startswith(earlier) for earlier, later in pairwise(texts)) and texts[-1] == whole
    )
    ours = {"max_new_tokens": "max_tokens", "sampling_seed": "seed"}
    asked = {ours.get(name, name): value for name, value in sampling.items()} | {
        "stop": stop,
        "ignore_eos": True,
    }
    chunks = events_of(
        engine.post("/v1/completions", asked | {"prompt": PROMPT, "stream": True}).raw
    )
    assert "".join(chunk["choices"][0]["text"] for chunk in chunks) == whole
    assert chunks[-1]["choices"][0]["matched_stop"] == stop


def streamed(engine: Server, count: int = 200) -> Background:
    body = {"input_ids": PROMPT, "stream": True, "return_logprob": True, "rid": "streamed"}
    body["sampling_params"] = {"max_new_tokens": count, "ignore_eos": True, "sampling_seed": 1}
    return Background(lambda: events_of(engine.post("/generate", body).raw))


@pytest.mark.parametrize("mode", ["retract", "in_place"])
def test_a_stream_survives_a_pause(engine: Server, mode: str) -> None:
    expected = engine.generate(PROMPT, max_new_tokens=200, sampling_seed=1)["output_ids"]
    stream = streamed(engine)
    wait_until(lambda: num_running(engine) == 1)
    engine.ok("/pause_generation", {"mode": mode})
    assert stream.is_alive
    engine.ok("/continue_generation")
    events = stream.join()
    assert events[-1]["output_ids"] == expected
    assert all(
        len(event["meta_info"]["output_token_logprobs"]) == len(event["output_ids"])
        for event in events
    )


def test_an_aborted_stream_ends_with_what_there_is(engine: Server) -> None:
    stream = streamed(engine)
    wait_until(lambda: num_running(engine) == 1)
    engine.ok("/abort_request", {"rid": "streamed"})
    last = stream.join()[-1]
    assert last["meta_info"]["finish_reason"]["type"] == "abort" and len(last["output_ids"]) < 200


def test_an_abort_during_prefill_leaves_the_group_whole(engine: Server) -> None:
    """Prompts of 250 tokens are prefilled in four steps; one of three samples is aborted somewhere
    in them."""
    prompt = [70 + i % 7 for i in range(250)]
    body = {
        "input_ids": prompt,
        "rid": "g",
        "sampling_params": {"n": 3, "max_new_tokens": 4, "ignore_eos": True},
    }
    body["sampling_params"] |= {"sampling_seed": 1}
    expected = [sample["output_ids"] for sample in engine.ok("/generate", body)]
    for _ in range(3):
        engine.ok("/flush_cache")
        group = Background(lambda: engine.ok("/generate", body))
        end = time.monotonic() + 30
        while num_running(engine) == 0 and group.is_alive:
            assert time.monotonic() < end
        engine.ok("/abort_request", {"rid": "g_0"})
        samples = group.join()
        assert [sample["output_ids"] for sample in samples[1:]] == expected[1:]
        assert samples[0]["output_ids"] == expected[0][: len(samples[0]["output_ids"])]


# -- weights ---------------------------------------------------------------------------------------


def serialized(raw: bytes, **body: Any) -> dict[str, Any]:
    return {"serialized_named_tensors": [base64.b64encode(raw).decode()], **body}


def test_an_update_without_a_pause_is_told_apart_token_by_token(
    engine: Server, other_dir: Path
) -> None:
    stream = streamed(engine, 240)
    wait_until(lambda: num_running(engine) == 1)
    payload = pickle.dumps(list(load_file(other_dir / "model.safetensors").items()))
    engine.ok(
        "/update_weights_from_tensor", serialized(payload, weight_version="5", flush_cache=False)
    )
    last = stream.join()[-1]
    assert len(last["output_ids"]) == 240
    spans = last["meta_info"]["token_weight_versions"]
    assert spans[0] == [0, "0"] and [span[1] for span in spans] in (["0"], ["0", "5"])


def test_an_update_may_abort_everything(engine: Server, model_dir: Path) -> None:
    request = long_generation(engine, "a")
    wait_until(lambda: num_running(engine) == 1)
    body = {"model_path": str(model_dir), "weight_version": "6", "abort_all_requests": True}
    engine.ok("/update_weights_from_disk", body)
    assert request.join()["meta_info"]["finish_reason"]["type"] == "abort"


@dataclass
class Malicious:
    """Its pickle makes a directory as soon as it is read."""

    path: str

    def __reduce__(self) -> Any:
        return os.mkdir, (self.path,)


def descriptor() -> bytes:
    """Made in a test, not on import: it starts a thread, which would forbid forks of this
    process."""
    return bytes(ForkingPickler.dumps([("model.norm.weight", torch.zeros(48))]))


REFUSED_PAYLOADS = {
    "class": (pickle.dumps([("model.norm.weight", Path("x"))]), "which is no part of a tensor"),
    "no tensor": (pickle.dumps([("model.norm.weight", 5)]), "holds int where a tensor is due"),
    "noise": (b"\x80\x04nothing", "cannot be read"),
    "name": (
        pickle.dumps([("model.norm.weights", torch.zeros(48))]),
        "no parameter model.norm.weights",
    ),
    "shape": (pickle.dumps([("model.norm.weight", torch.zeros(47))]), "has shape [47]"),
}


@pytest.mark.parametrize("kind", ["code", "descriptor", *REFUSED_PAYLOADS])
def test_a_pickle_runs_nothing_and_changes_nothing(
    engine: Server, kind: str, tmp_path: Path
) -> None:
    code = (
        pickle.dumps([("model.norm.weight", Malicious(str(tmp_path / "broken-in")))]),
        "names posix.mkdir",
    )
    payload, said = REFUSED_PAYLOADS.get(kind, code)
    if kind == "descriptor":
        payload, said = descriptor(), "set_sharing_strategy"
    before = engine.ok("/weights_checker", {"action": "fingerprint"})["fingerprints"]
    answer = engine.post("/update_weights_from_tensor", serialized(payload, weight_version="9"))
    assert answer.status == 400 and said in answer.json["message"] and not list(tmp_path.iterdir())
    assert engine.ok("/weights_checker", {"action": "fingerprint"})["fingerprints"] == before
