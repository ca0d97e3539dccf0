"""Adapters over HTTP: loaded, unloaded and refused while requests run; fingerprints and reports."""

from __future__ import annotations

import base64
import pickle
import re
from collections.abc import Iterator
from multiprocessing.reduction import ForkingPickler
from pathlib import Path
from typing import Any

import pytest
import torch

from slime.engines.wire.abilities import Abilities
from slime.engines.wire.buckets import fingerprint
from tests.support.adapters import (
    checksums,
    load_body,
    merge_adapter,
    random_adapter,
    save_adapter,
)
from tests.support.contract_servers import (
    PROMPT,
    Background,
    Server,
    logprobs_of,
    long_generation,
    num_running,
    start_embedded,
    wait_until,
)

LOAD = "/load_lora_adapter_from_tensors"


@pytest.fixture(scope="module")
def adapting(model_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    folder = tmp_path_factory.mktemp("adapting")
    first = save_adapter(folder / "first", *random_adapter(model_dir, seed=11))
    flags = ["--lora-paths", f"first={first}", "--max-loaded-loras", "4", "--max-lora-rank", "8"]
    with start_embedded(model_dir, folder / "log", *flags) as running:
        yield running


@pytest.fixture
def engine(adapting: Server) -> Iterator[Server]:
    yield adapting
    adapting.ok("/continue_generation")
    for one in resident(adapting):
        if one["loaded"] and one["lora_name"] != "first":
            adapting.ok("/unload_lora_adapter", {"lora_name": one["lora_name"]})
    adapting.ok("/update_weight_version", {"new_version": "0"})


def resident(engine: Server) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = engine.get("/server_info").json["adapters"]
    return found


def output_log_probs(answer: dict[str, Any]) -> list[float]:
    return [entry[0] for entry in answer["meta_info"]["output_token_logprobs"]]


def test_adapters_of_the_command_line_are_there(engine: Server) -> None:
    info = engine.get("/server_info").json
    assert Abilities.read(info).adapters and info["enable_lora"]
    [first] = info["adapters"]
    assert first["lora_name"] == "first" and first["pinned"] and first["loaded"]
    assert (first["rank"], first["scaling"], first["num_requests"]) == (4, 2.0, 0)
    card = engine.get("/v1/models").json["data"][1]
    assert card["id"] == "first" and card["parent"] == "tiny"
    assert engine.get("/v1/models/first").json["id"] == "first"
    assert engine.get("/v1/models/other").status == 404


def test_requests_finish_with_the_adapter_that_they_began_with(
    engine: Server, model_dir: Path, tmp_path: Path
) -> None:
    adapters = [random_adapter(model_dir, seed=seed) for seed in (1, 2)]
    engine.ok(LOAD, load_body("policy", *adapters[0], weight_version="1"))
    engine.ok("/update_weight_version", {"new_version": "1"})
    old = long_generation(engine, "old", lora_path="policy")
    wait_until(lambda: num_running(engine) == 1)
    engine.ok("/pause_generation", {"mode": "retract"})
    engine.ok("/unload_lora_adapter", {"lora_name": "policy"})
    engine.ok(LOAD, load_body("policy", *adapters[1], weight_version="2"))
    engine.ok("/update_weight_version", {"new_version": "2"})
    new = long_generation(engine, "new", lora_path="policy")
    base = long_generation(engine, "base")
    both = [one for one in resident(engine) if one["lora_name"] == "policy"]
    assert [one["loaded"] for one in both] == [False, True]
    assert both[0]["num_requests"] == 1 and old.is_alive
    engine.ok("/continue_generation")
    for number, (request, adapter) in enumerate(zip((old, new), adapters, strict=True)):
        answer = request.join()
        merged = merge_adapter(model_dir, *adapter, tmp_path / str(number))
        expected = logprobs_of(merged, PROMPT + answer["output_ids"])[len(PROMPT) - 1 :]
        assert output_log_probs(answer) == pytest.approx(expected, abs=1e-4)
        version = str(number + 1)
        assert answer["meta_info"]["token_weight_versions"] == [[0, version]]
        assert answer["meta_info"]["weight_version"] == version
    expected = logprobs_of(model_dir, PROMPT + base.join()["output_ids"])[len(PROMPT) - 1 :]
    assert output_log_probs(base.join()) == pytest.approx(expected, abs=1e-4)
    wait_until(lambda: [one["lora_name"] for one in resident(engine)] == ["first", "policy"])


def test_adapters_are_loaded_while_others_generate(engine: Server, model_dir: Path) -> None:
    requests = [long_generation(engine, str(seed), seed, lora_path="first") for seed in range(3)]
    wait_until(lambda: num_running(engine) == 3)
    for seed in range(3):
        engine.ok(LOAD, load_body(f"a{seed}", *random_adapter(model_dir, seed=seed)))
    short = {"input_ids": PROMPT, "sampling_params": {"max_new_tokens": 2}}
    answers = [engine.ok("/generate", short | {"lora_path": f"a{seed}"}) for seed in range(3)]
    assert all(answer["meta_info"]["completion_tokens"] == 2 for answer in answers)
    assert all(one.join()["meta_info"]["completion_tokens"] == 240 for one in requests)


@pytest.mark.parametrize("mode", ["in_place", "retract"])
def test_a_pause_changes_nothing(engine: Server, mode: str) -> None:
    expected = long_generation(engine, "whole", lora_path="first", count=60).join()
    paused = long_generation(engine, "paused", lora_path="first", count=60)
    wait_until(lambda: num_running(engine) == 1)
    engine.ok("/pause_generation", {"mode": mode})
    engine.ok("/continue_generation")
    assert paused.join()["output_ids"] == expected["output_ids"]


def test_a_stream_names_the_version_of_its_adapter(engine: Server, model_dir: Path) -> None:
    engine.ok(LOAD, load_body("policy", *random_adapter(model_dir), weight_version="9"))
    body = {"input_ids": PROMPT, "stream": True, "lora_path": "policy"}
    sampling = {"max_new_tokens": 64, "ignore_eos": True}
    raw = engine.post("/generate", body | {"sampling_params": sampling}).raw
    # as many as the client was quick enough to get, all of one version
    versions = re.findall(rb'"weight_version":"(\d+)"', raw)
    assert versions and set(versions) == {b"9"}


def test_fingerprints_are_of_what_multiplies(engine: Server, model_dir: Path) -> None:
    config, tensors = random_adapter(model_dir)
    engine.ok(LOAD, load_body("policy", config, tensors))
    asked = {"action": "fingerprint", "lora_name": "policy", "names": None}
    answer = engine.ok("/weights_checker", asked)
    assert answer["fingerprints"] == {name: fingerprint(one) for name, one in tensors.items()}
    assert answer["loaded"] == len(tensors)
    name = next(iter(tensors))
    some = engine.ok("/weights_checker", asked | {"names": [name]})["fingerprints"]
    assert some == {name: fingerprint(tensors[name])}
    assert engine.post("/weights_checker", asked | {"names": ["other"]}).status == 400
    refused = engine.post("/weights_checker", asked | {"lora_name": "other"})
    assert refused.status == 400 and b"no adapter 'other'" in refused.raw
    assert engine.post("/weights_checker", asked | {"action": "reset_tensors"}).status == 400


def test_tensors_may_come_in_shared_memory_or_one_bucket(engine: Server, model_dir: Path) -> None:
    config, tensors = random_adapter(model_dir)
    before = torch.multiprocessing.get_sharing_strategy()
    torch.multiprocessing.set_sharing_strategy("file_system")
    try:
        payload = base64.b64encode(bytes(ForkingPickler.dumps(tensors))).decode()
        body = load_body("shared", config, {}) | {"serialized_tensors": payload}
        engine.ok(LOAD, body | {"expected_checksums": checksums(tensors)})
    finally:
        torch.multiprocessing.set_sharing_strategy(before)
    fingerprints = engine.ok("/weights_checker", {"lora_name": "shared"})["fingerprints"]
    assert fingerprints == {name: fingerprint(one) for name, one in tensors.items()}


def test_openai_routes_name_adapters(engine: Server) -> None:
    def text(**fields: Any) -> str:
        body = {"prompt": PROMPT, "max_tokens": 8, "temperature": 0, **fields}
        return str(engine.ok("/v1/completions", body)["choices"][0]["text"])

    adapted = text(model="tiny:first")
    assert text(model="first") == text(model="tiny", lora_path="first") == adapted
    assert text(model="tiny") == text(model="default") != adapted
    chat = {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 4, "temperature": 0}
    assert engine.post("/v1/chat/completions", chat | {"model": "tiny:first"}).status == 200
    for fields, status, said in (
        ({"model": "tiny:other"}, 400, b"no adapter 'other' is loaded (loaded: first)"),
        ({"model": "big:first"}, 404, b"model_not_found"),
        ({"model": "tiny:first", "lora_path": "other"}, 400, b"model names the adapter 'first'"),
    ):
        answer = engine.post("/v1/completions", {"prompt": PROMPT, **fields})
        assert answer.status == status and said in answer.raw


CONFIG, TENSORS = {"r": 1}, {"x": torch.zeros(1)}
ODD: list[tuple[str, dict[str, Any], str]] = [
    (LOAD, {}, "lora_name must be a text"),
    (LOAD, {"lora_name": "a"}, "config_dict must be an object"),
    (LOAD, {"lora_name": "a", "config_dict": {}}, "serialized_tensors must be a string"),
    (LOAD, load_body("", CONFIG, TENSORS), "lora_name must be a text of 1 to 255"),
    (LOAD, load_body("a", CONFIG, TENSORS), "peft_type must be LORA"),
    (LOAD, load_body("a", CONFIG, TENSORS, pinned="yes"), "pinned must be true or false"),
    (LOAD, load_body("a", CONFIG, TENSORS, pined=True), "unknown field 'pined'; nearest: 'pinned'"),
    (LOAD, load_body("a", CONFIG, TENSORS, load_format="raw"), "load_format must be one of"),
    (LOAD, load_body("a", CONFIG, TENSORS, added_tokens_config={"<a>": 999}), "adds the token"),
    (
        LOAD,
        load_body("a", CONFIG, TENSORS, expected_checksums={"x": "00"}),
        "x has another checksum than expected",
    ),
    (
        LOAD,
        load_body("a", CONFIG, TENSORS, expected_checksums={"y": "00"}),
        "expected_checksums names y",
    ),
    (LOAD, load_body("a", CONFIG, TENSORS, expected_checksums={}), "has none for x"),
    (
        LOAD,
        load_body("a", CONFIG, {}) | {"serialized_tensors": "%"},
        "serialized_tensors is not base64",
    ),
    (
        LOAD,
        load_body("a", CONFIG, {})
        | {"serialized_tensors": base64.b64encode(pickle.dumps(print)).decode()},
        "names builtins.print, which is no part of a tensor",
    ),
    ("/load_lora_adapter", {"lora_name": "a"}, "lora_path must be a path"),
    ("/load_lora_adapter", {"lora_name": "a", "lora_path": "/none"}, "cannot be read"),
    ("/unload_lora_adapter", {"lora_name": "a"}, "no adapter 'a' is loaded (loaded: first)"),
    ("/unload_lora_adapter", {"lora_name": "a", "wait": True}, "unknown field 'wait'"),
]


@pytest.mark.parametrize(("path", "body", "said"), ODD)
def test_odd_bodies_are_refused_by_name(
    engine: Server, path: str, body: dict[str, Any], said: str
) -> None:
    answer = engine.post(path, body)
    assert answer.status == 400
    assert not answer.json["success"] and said in answer.json["error_message"]
    assert list(answer.json["loaded_adapters"]) == ["first"]


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"lora_path": "other"}, "no adapter 'other' is loaded (loaded: first)"),
        ({"lora_path": 5}, "lora_path must be a string, got 5"),
        ({"lora_path": ["first", None]}, "lora_path has 2 entries for 1 prompt"),
    ],
)
def test_requests_for_odd_adapters(engine: Server, fields: dict[str, Any], said: str) -> None:
    answer = engine.post("/generate", {"input_ids": PROMPT, **fields})
    assert answer.status == 400 and said in answer.json["error"]["message"]


def test_one_name_is_loaded_once(engine: Server, model_dir: Path) -> None:
    body = load_body("policy", *random_adapter(model_dir))
    tries = [Background(lambda: engine.post(LOAD, body).status) for _ in range(4)]
    assert sorted(one.join() for one in tries) == [200, 400, 400, 400]
    assert [one["lora_name"] for one in resident(engine)].count("policy") == 1


def test_memory_comes_back_with_its_adapters(engine: Server) -> None:
    before = long_generation(engine, "before", lora_path="first", count=8).join()
    engine.ok("/release_memory_occupation")
    engine.ok("/resume_memory_occupation")
    after = long_generation(engine, "after", lora_path="first", count=8).join()
    assert after["output_ids"] == before["output_ids"]
