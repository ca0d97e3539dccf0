"""The engine contract: what rollout and weight sync rely on, against a live server over HTTP.

One suite for every implementation. The fixture ``engine`` yields a running server with the tiny
model of ``model_dir``; another implementation is one more entry of ``ENGINES`` in ``conftest.py``.
"""

from __future__ import annotations

import asyncio
import base64
import json
import os
import pickle
import signal
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise
from multiprocessing.reduction import ForkingPickler
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from slime.engines.api import EngineClient, EngineError, GenerateResult
from slime.engines.client import RolloutClient
from slime.engines.router import list_workers, register_workers
from slime.engines.wire.buckets import fingerprint, pack
from slime.engines.wire.process_group import ExternalGroup
from slime.engines.wire.shared_memory import Segment
from slime.processes.host import free_port
from slime.rollout.generate import GenerateState, bind_state, generate, sampling_params
from slime.samples.types import Sample
from tests.support.contract_servers import (
    CONTEXT,
    PROMPT,
    Background,
    Server,
    embedded_argv,
    logprobs_of,
    long_generation,
    num_running,
    running,
    start_embedded,
    wait_until,
)
from tests.support.embedded_models import EOS, byte_tokenizer

#: Routes that every engine answers.
GET_ROUTES = (
    "/health", "/health_generate", "/model_info", "/get_model_info", "/server_info", "/v1/loads"
)  # fmt: skip
POST_ROUTES = (
    "/generate", "/abort_request", "/pause_generation", "/continue_generation", "/flush_cache",
    "/update_weights_from_tensor", "/update_weights_from_distributed", "/update_weights_from_disk",
    "/init_weights_update_group", "/destroy_weights_update_group", "/release_memory_occupation",
    "/resume_memory_occupation", "/weights_checker", "/v1/chat/completions",
)  # fmt: skip

# -- generation ------------------------------------------------------------------------------------


def test_every_route_of_the_protocol_exists(engine: Server) -> None:
    for path in GET_ROUTES:
        assert engine.get(path).status == 200, path
    for path in POST_ROUTES:
        if "memory_occupation" not in path and "pause" not in path:
            assert engine.post(path).status in (200, 400), path


def test_meta_info_has_the_fields_of_the_protocol(engine: Server, model_dir: Path) -> None:
    answer = engine.generate(PROMPT, max_new_tokens=6)
    meta = answer["meta_info"]
    assert meta["finish_reason"] == {"type": "length", "length": 6}
    assert (meta["prompt_tokens"], meta["completion_tokens"], meta["cached_tokens"]) == (
        len(PROMPT),
        6,
        0,
    )
    assert meta["weight_version"] == "0" and meta["token_weight_versions"] == [[0, "0"]]
    assert meta["input_token_logprobs"] == [] and meta["output_token_logprobs_length"] == 6
    assert all(len(entry) == 3 and entry[2] is None for entry in meta["output_token_logprobs"])
    assert [entry[1] for entry in meta["output_token_logprobs"]] == answer["output_ids"]
    for name in (
        "id",
        "e2e_latency",
        "queue_time",
        "prefill_time",
        "decode_time",
        "decode_throughput",
    ):
        assert name in meta
    assert answer["text"] == byte_tokenizer().decode(answer["output_ids"], skip_special_tokens=True)
    expected = logprobs_of(model_dir, PROMPT + answer["output_ids"])[len(PROMPT) - 1 :]
    assert [entry[0] for entry in meta["output_token_logprobs"]] == pytest.approx(
        expected, abs=1e-4
    )


def test_input_log_probs(engine: Server, model_dir: Path) -> None:
    engine.generate(PROMPT)  # leaves the prompt in the cache, which must not shorten the answer
    body = {
        "input_ids": PROMPT,
        "sampling_params": {"max_new_tokens": 1, "temperature": 0.5},
        "return_logprob": True,
    }
    expected = logprobs_of(model_dir, PROMPT)
    for start in (0, 3):
        meta = engine.ok("/generate", body | {"logprob_start_len": start})["meta_info"]
        assert meta["input_token_logprobs"][0][:2] == [None, PROMPT[start]]
        assert [entry[1] for entry in meta["input_token_logprobs"]] == PROMPT[start:]
        values = [entry[0] for entry in meta["input_token_logprobs"][1:]]
        assert values == pytest.approx(expected[start:], abs=1e-4)


def test_batches_text_and_n(engine: Server) -> None:
    params = {"max_new_tokens": 3, "temperature": 0}
    both = engine.ok("/generate", {"text": ["Hello wo", "Other"], "sampling_params": params})
    assert isinstance(both, list) and len(both) == 2
    assert (
        both[0]["output_ids"]
        == engine.ok("/generate", {"text": "Hello wo", "sampling_params": params})["output_ids"]
    )
    samples = engine.ok(
        "/generate", {"text": "Hello wo", "sampling_params": {"n": 3, "max_new_tokens": 8}}
    )
    assert len(samples) == 3 and len({tuple(sample["output_ids"]) for sample in samples}) == 3
    assert sum(sample["meta_info"]["cached_tokens"] for sample in samples) >= 2 * (len(PROMPT) - 1)


def test_seeds_make_samples_repeatable(engine: Server) -> None:
    first, second, other = (
        engine.generate(PROMPT, sampling_seed=seed)["output_ids"] for seed in (4, 4, 5)
    )
    assert first == second != other


def test_stop_string_is_trimmed_unless_asked_not_to(engine: Server) -> None:
    letters = {
        str(token): 1000.0 for token in byte_tokenizer().encode("abcdefghijklmnopqrstuvwxyz")
    }
    params = {"max_new_tokens": 40, "sampling_seed": 3, "logit_bias": letters, "temperature": 10.0}
    free = engine.generate(PROMPT, **params)
    text = free["text"]
    assert text.isalpha() and len(text) == 40
    position = next(i for i in range(4, 38) if text.find(text[i : i + 2]) == i)
    stop = text[position : position + 2]
    kept = engine.generate(PROMPT, **params, stop=[stop, "0"], no_stop_trim=True)
    trimmed = engine.generate(PROMPT, **params, stop=stop)
    assert kept["meta_info"]["finish_reason"] == {"type": "stop", "matched": stop}
    assert kept["text"] == text[: position + 2] and trimmed["text"] == text[:position]
    assert kept["output_ids"] == trimmed["output_ids"] == free["output_ids"][: position + 2]


def test_stop_tokens(engine: Server) -> None:
    free = engine.generate(PROMPT, max_new_tokens=20, sampling_seed=3)["output_ids"]
    token = free[6]
    position = free.index(token)
    body = {
        "max_new_tokens": 20,
        "sampling_seed": 3,
        "stop_token_ids": [token],
        "ignore_eos": False,
    }
    answer = engine.generate(PROMPT, **body)
    assert answer["output_ids"] == free[: position + 1]
    assert answer["meta_info"]["finish_reason"] == {"type": "stop", "matched": token}


def test_streaming_is_cumulative(engine: Server) -> None:
    body = {"input_ids": PROMPT, "stream": True, "return_logprob": True}
    body["sampling_params"] = {"max_new_tokens": 12, "ignore_eos": True, "sampling_seed": 9}
    raw = engine.post("/generate", body).raw.decode()
    events = [line.removeprefix("data: ") for line in raw.split("\n\n") if line]
    assert events[-1] == "[DONE]"
    chunks = [json.loads(event) for event in events[:-1]]
    assert len(chunks) > 3
    for before, after in pairwise(chunks):
        assert after["output_ids"][: len(before["output_ids"])] == before["output_ids"]
        assert after["text"].startswith(before["text"])
        assert len(after["meta_info"]["output_token_logprobs"]) == len(after["output_ids"])
    assert chunks[0]["meta_info"]["finish_reason"] is None
    whole = engine.generate(PROMPT, max_new_tokens=12, sampling_seed=9)
    assert chunks[-1]["output_ids"] == whole["output_ids"] and chunks[-1]["text"] == whole["text"]
    assert chunks[-1]["meta_info"]["finish_reason"] == {"type": "length", "length": 12}


def test_a_client_that_leaves_frees_its_slot(engine: Server) -> None:
    async def leave() -> None:
        async with EngineClient(engine.url) as client:
            with pytest.raises(EngineError, match="no answer within"):
                params = {"max_new_tokens": 240, "ignore_eos": True}
                body = {"input_ids": PROMPT, "sampling_params": params}
                await client.post("/generate", body, timeout=0.05)

    asyncio.run(leave())
    wait_until(lambda: num_running(engine) == 0, 5.0)


@pytest.mark.parametrize(
    ("raw", "said"),
    [
        (b"{nonsense", "not valid JSON"),
        (b'{"input_ids": [1], "sampling_params": {"top_p": 7}}', "top_p must be"),
        (json.dumps({"input_ids": [1] * 300}).encode(), f"300 tokens, the context holds {CONTEXT}"),
        (b'{"input_ids": [1], "stop": "x"}', "'stop'"),
    ],
)
def test_bad_requests_get_status_400_and_the_reason(engine: Server, raw: bytes, said: str) -> None:
    answer = engine.call("POST", "/generate", raw=raw)
    assert answer.status == 400 and said in answer.json["error"]["message"]


# -- abort, pause, flush ---------------------------------------------------------------------------


@pytest.mark.parametrize("order", [{"rid": "victim"}, {"abort_all": True}])
def test_abort_returns_what_there_is(engine: Server, order: dict[str, Any]) -> None:
    requests = [long_generation(engine, "victim"), long_generation(engine, "bystander", seed=2)]
    wait_until(lambda: num_running(engine) == 2)
    assert engine.post("/abort_request", order).status == 200
    victim, bystander = (request.join() for request in requests)
    assert victim["meta_info"]["finish_reason"]["type"] == "abort"
    assert len(victim["output_ids"]) == victim["meta_info"]["completion_tokens"] < 240
    expected = "length" if "rid" in order else "abort"
    assert bystander["meta_info"]["finish_reason"]["type"] == expected
    resumed = engine.generate(PROMPT + victim["output_ids"], max_new_tokens=2, sampling_seed=1)
    assert resumed["meta_info"]["prompt_tokens"] == len(PROMPT) + len(victim["output_ids"])


def test_pause_with_abort_ends_requests_and_holds_new_ones(engine: Server) -> None:
    running_request = long_generation(engine, "a")
    wait_until(lambda: num_running(engine) == 1)
    engine.ok("/pause_generation", {})
    assert running_request.join()["meta_info"]["finish_reason"]["type"] == "abort"
    held = long_generation(engine, "b", count=5)
    wait_until(lambda: engine.get("/v1/loads").json["loads"][0]["num_waiting_reqs"] == 1)
    assert engine.get("/health").status == 200 and engine.post("/flush_cache").status == 200
    assert held.is_alive
    engine.ok("/continue_generation")
    assert len(held.join()["output_ids"]) == 5


@pytest.mark.parametrize("mode", ["retract", "in_place"])
def test_pause_and_continue_change_no_token(engine: Server, mode: str) -> None:
    expected = engine.generate(PROMPT, max_new_tokens=200, sampling_seed=1)["output_ids"]
    request = long_generation(engine, "x", count=200)
    wait_until(lambda: num_running(engine) == 1)
    engine.ok("/pause_generation", {"mode": mode})
    assert num_running(engine) == (1 if mode == "in_place" else 0)
    assert engine.post("/flush_cache").status == (400 if mode == "in_place" else 200)
    assert request.is_alive
    engine.ok("/continue_generation")
    assert request.join()["output_ids"] == expected


# -- weights ---------------------------------------------------------------------------------------


def greedy_logprobs(engine: Server) -> list[float]:
    body = {
        "input_ids": PROMPT,
        "sampling_params": {"max_new_tokens": 0},
        "return_logprob": True,
        "logprob_start_len": 0,
    }
    return [
        entry[0] for entry in engine.ok("/generate", body)["meta_info"]["input_token_logprobs"][1:]
    ]


def push_by_shared_memory(engine: Server, directory: Path, limit: int = 60_000) -> None:
    for bucket in pack(load_file(directory / "model.safetensors").items(), limit):
        segment = Segment(bucket.nbytes)
        try:
            segment.tensor[: bucket.nbytes].copy_(bucket.buffer)
            table = [entry.to_json() for entry in bucket.entries]
            segments = [{"shm": segment.name, "nbytes": bucket.nbytes, "tensors": table}]
            body = {
                "load_format": "shared_memory",
                "weight_version": "5",
                "flush_cache": False,
                "segments": segments,
            }
            engine.ok("/update_weights_from_tensor", body)
        finally:
            segment.close()


def push_by_broadcast(engine: Server, directory: Path, limit: int = 60_000) -> None:
    store = ExternalGroup.open_store("127.0.0.1", 2, 60.0)
    join = {
        "master_address": "127.0.0.1",
        "master_port": store.port,
        "rank_offset": 1,
        "world_size": 2,
    }
    joining = Background(
        lambda: engine.ok(
            "/init_weights_update_group", join | {"group_name": "push", "backend": "gloo"}
        )
    )
    group = ExternalGroup(store, "127.0.0.1", "push", "gloo", 0, 2, 60.0)
    joining.join()
    for bucket in pack(load_file(directory / "model.safetensors").items(), limit):
        body = {
            "names": [entry.name for entry in bucket.entries],
            "dtypes": [entry.dtype for entry in bucket.entries],
            "shapes": [list(entry.shape) for entry in bucket.entries],
            "group_name": "push",
            "weight_version": "5",
            "load_format": "flattened_bucket",
        }
        answer = Background(lambda body=body: engine.ok("/update_weights_from_distributed", body))  # type: ignore[misc]
        group.broadcast(bucket.buffer, 60.0)
        assert answer.join()["success"]
    engine.ok("/destroy_weights_update_group", {"group_name": "push"})
    group.close()


def post_serialized(engine: Server, payload: bytes, load_format: str | None = None) -> None:
    body = {"serialized_named_tensors": [base64.b64encode(payload).decode()], "weight_version": "5"}
    engine.ok(
        "/update_weights_from_tensor", body | ({"load_format": load_format} if load_format else {})
    )


def push_by_pickle(engine: Server, directory: Path) -> None:
    """As SGLang's ``MultiprocessingSerializer`` does, but with the bytes in the pickle."""
    post_serialized(engine, pickle.dumps(list(load_file(directory / "model.safetensors").items())))


def push_by_shared_pickle(engine: Server, directory: Path) -> None:
    """As SGLang's ``MultiprocessingSerializer`` does, with torch's handles of shared memory."""
    before = torch.multiprocessing.get_sharing_strategy()
    torch.multiprocessing.set_sharing_strategy("file_system")
    try:
        tensors = list(load_file(directory / "model.safetensors").items())
        post_serialized(engine, bytes(ForkingPickler.dumps(tensors)))
    finally:
        torch.multiprocessing.set_sharing_strategy(before)


@dataclass
class FlattenedTensorMetadata:
    name: str
    shape: torch.Size
    dtype: torch.dtype
    start_idx: int
    end_idx: int
    numel: int


def push_by_flattened_pickle(engine: Server, directory: Path) -> None:
    """SGLang's FlattenedTensorBucket, whose table is pickled as a class of SGLang."""
    table, parts, offset = [], [], 0
    for name, tensor in load_file(directory / "model.safetensors").items():
        parts.append(tensor.flatten().view(torch.uint8))
        end = offset + parts[-1].numel()
        table.append(
            FlattenedTensorMetadata(
                name, tensor.shape, tensor.dtype, offset, end, parts[-1].numel()
            )
        )
        offset = end
    content = {"flattened_tensor": torch.cat(parts), "metadata": table}
    module = ModuleType("sglang.srt.weight_sync.tensor_bucket")
    module.FlattenedTensorMetadata = FlattenedTensorMetadata  # type: ignore[attr-defined]
    with pytest.MonkeyPatch.context() as patch:
        for name in ("sglang", "sglang.srt", "sglang.srt.weight_sync"):
            patch.setitem(sys.modules, name, ModuleType(name))
        patch.setitem(sys.modules, module.__name__, module)
        patch.setattr(FlattenedTensorMetadata, "__module__", module.__name__)
        payload = pickle.dumps(content)
    assert b"sglang.srt.weight_sync.tensor_bucket" in payload
    post_serialized(engine, payload, "flattened_bucket")


def push_by_disk(engine: Server, directory: Path) -> None:
    engine.ok("/update_weights_from_disk", {"model_path": str(directory), "weight_version": "5"})


PUSHES = [push_by_shared_memory, push_by_broadcast, push_by_disk]
PUSHES += [push_by_pickle, push_by_shared_pickle, push_by_flattened_pickle]


@pytest.mark.parametrize("push", PUSHES)
def test_pushed_weights_arrive_and_are_used(
    engine: Server, other_dir: Path, push: Callable[[Server, Path], None]
) -> None:
    tensors = load_file(other_dir / "model.safetensors")
    engine.generate(PROMPT)
    engine.ok("/pause_generation", {})
    push(engine, other_dir)
    engine.ok("/flush_cache")
    engine.ok("/continue_generation")
    prints = engine.ok("/weights_checker", {"action": "fingerprint"})["fingerprints"]
    assert prints == {name: fingerprint(tensor) for name, tensor in tensors.items()}
    assert greedy_logprobs(engine) == pytest.approx(logprobs_of(other_dir, PROMPT), abs=1e-4)
    answer = engine.generate(PROMPT)
    assert answer["meta_info"]["weight_version"] == "5" and answer["meta_info"][
        "token_weight_versions"
    ] == [[0, "5"]]
    assert engine.get("/model_info").json["weight_version"] == "5"


def test_a_push_in_the_middle_is_told_apart_token_by_token(engine: Server, other_dir: Path) -> None:
    request = long_generation(engine, "y")
    wait_until(lambda: num_running(engine) == 1)
    engine.ok("/pause_generation", {"mode": "in_place"})
    push_by_shared_memory(engine, other_dir)
    engine.ok("/continue_generation")
    meta = request.join()["meta_info"]
    (first, old), (second, new) = meta["token_weight_versions"]
    assert (first, old, new) == (0, "0", "5") and 0 < second < 240


def test_answers_cut_by_a_push_go_on_with_exactly_the_new_weights(
    engine: Server, model_dir: Path, other_dir: Path
) -> None:
    """What the new weights sample sees keys and values of theirs alone, also of the prompt and the
    old tokens."""
    sample = Sample(tokens=list(PROMPT), index=0)

    async def rollout() -> None:
        async with RolloutClient(engine.url, max_concurrency=4) as client:
            params = sampling_params(
                temperature=1.0, max_new_tokens=240, ignore_eos=True, skip_special_tokens=False
            )
            bind_state(GenerateState(SimpleNamespace(), byte_tokenizer(), client, params))
            await generate(None, sample, params)

    def in_thread() -> dict[str, Any]:
        asyncio.run(rollout())
        return {}

    request = Background(in_thread)
    wait_until(lambda: num_running(engine) == 1)
    engine.ok("/pause_generation", {"mode": "abort"})
    push_by_shared_memory(engine, other_dir)
    engine.ok("/flush_cache")
    engine.ok("/continue_generation")
    request.join()
    assert sample.weight_versions == ["0", "5"] and sample.response_length == 240
    bound = sample.token_spans[1].start
    assert 0 < bound < 240
    old, new = (logprobs_of(path, sample.tokens)[-240:] for path in (model_dir, other_dir))
    assert sample.rollout_log_probs == pytest.approx(old[:bound] + new[bound:], abs=1e-4)


@pytest.mark.parametrize("kind", ["name", "shape", "segment"])
def test_a_wrong_push_fails_by_name_and_changes_nothing(engine: Server, kind: str) -> None:
    before = engine.ok("/weights_checker", {"action": "fingerprint"})["fingerprints"]
    if kind == "name":
        name, size = ("model.norm.weights", 48)
    else:
        name, size = ("model.norm.weight", 47 if kind == "shape" else 48)
    segment = Segment(4096)
    try:
        tables = [
            {
                "name": "model.embed_tokens.weight",
                "dtype": "float32",
                "shape": [384, 48],
                "offset": 0,
            }
        ]
        if kind != "segment":
            tables = [{"name": name, "dtype": "float32", "shape": [size], "offset": 0}]
        segments = [{"shm": segment.name, "nbytes": 4096, "tensors": tables}]
        body = {"load_format": "shared_memory", "weight_version": "9", "segments": segments}
        answer = engine.post("/update_weights_from_tensor", body)
    finally:
        segment.close()
    assert answer.status == 400 and answer.json["success"] is False
    said = "model.embed_tokens.weight ends at byte" if kind == "segment" else name
    assert said in answer.json["message"]
    assert engine.ok("/weights_checker", {"action": "fingerprint"})["fingerprints"] == before
    assert engine.get("/model_info").json["weight_version"] == "0"


def test_incomplete_directories_and_unknown_groups_are_refused(
    engine: Server, tmp_path: Path
) -> None:
    answer = engine.post("/update_weights_from_disk", {"model_path": str(tmp_path)})
    assert answer.status == 400 and "model.safetensors" in answer.json["message"]
    body = {"names": [], "dtypes": [], "shapes": [], "group_name": "nobody"}
    answer = engine.post("/update_weights_from_distributed", body)
    assert answer.status == 400 and "no weight update group 'nobody'" in answer.json["message"]


def test_snapshot_reset_compare(engine: Server, model_dir: Path) -> None:
    engine.ok("/weights_checker", {"action": "snapshot"})
    engine.ok("/weights_checker", {"action": "compare"})
    engine.ok("/weights_checker", {"action": "reset_tensors"})
    answer = engine.post("/weights_checker", {"action": "compare"})
    assert answer.status == 400 and "differ from the snapshot" in answer.json["message"]
    push_by_shared_memory(engine, model_dir)
    engine.ok("/weights_checker", {"action": "compare"})


def test_memory_can_be_released_and_taken_back(engine: Server) -> None:
    before = engine.generate(PROMPT, sampling_seed=1)["output_ids"]
    assert engine.post("/release_memory_occupation", {"tags": ["kv_cache"]}).status == 200
    assert engine.post("/release_memory_occupation", {"tags": ["weights"]}).status == 200
    answer = engine.post("/generate", {"input_ids": PROMPT})
    assert answer.status == 503 and "resume_memory_occupation" in answer.json["error"]["message"]
    assert engine.get("/health").status == 200
    assert engine.post("/resume_memory_occupation", {}).status == 200
    assert engine.generate(PROMPT, sampling_seed=1)["output_ids"] == before


# -- OpenAI ----------------------------------------------------------------------------------------


def test_chat_completions(engine: Server) -> None:
    body = {
        "model": "tiny",
        "messages": [{"role": "user", "content": "Hi"}],
        "max_tokens": 6,
        "temperature": 0,
    }
    answer = engine.ok("/v1/chat/completions", body | {"n": 2, "logprobs": True, "top_logprobs": 2})
    assert [choice["index"] for choice in answer["choices"]] == [0, 1]
    choice = answer["choices"][0]
    assert choice["message"]["role"] == "assistant" and choice["finish_reason"] in (
        "stop",
        "length",
    )
    entry = choice["logprobs"]["content"][0]
    assert (
        entry["logprob"] == pytest.approx(entry["top_logprobs"][0]["logprob"])
        and len(entry["top_logprobs"]) == 2
    )
    prompt = byte_tokenizer().apply_chat_template(
        body["messages"], add_generation_prompt=True, return_dict=False
    )
    assert answer["usage"]["prompt_tokens"] == len(prompt)
    plain = engine.ok(
        "/generate",
        {"input_ids": prompt, "sampling_params": {"max_new_tokens": 6, "temperature": 0}},
    )
    assert choice["message"]["content"] == plain["text"]


def test_chat_streams(engine: Server) -> None:
    body = {
        "messages": [{"role": "user", "content": "Hi"}],
        "max_tokens": 9,
        "seed": 3,
        "ignore_eos": True,
    }
    whole = engine.ok("/v1/chat/completions", body)["choices"][0]["message"]["content"]
    raw = engine.post(
        "/v1/chat/completions", body | {"stream": True, "stream_options": {"include_usage": True}}
    ).raw
    events = [line.removeprefix("data: ") for line in raw.decode().split("\n\n") if line]
    assert events[-1] == "[DONE]"
    chunks = [json.loads(event) for event in events[:-1]]
    assert (
        "".join(chunk["choices"][0]["delta"].get("content", "") for chunk in chunks[:-1]) == whole
    )
    assert chunks[-2]["choices"][0]["finish_reason"] == "length"
    assert chunks[-1]["usage"]["completion_tokens"] == 9


def test_models_are_listed(engine: Server) -> None:
    [model] = engine.get("/v1/models").json["data"]
    assert model["id"] == "tiny" and model["max_model_len"] == CONTEXT


# -- the server as a process -----------------------------------------------------------------------


def test_through_the_router(engine: Server, tmp_path: Path) -> None:
    port = free_port()
    argv = [
        sys.executable,
        "-m",
        "sglang_router.launch_router",
        "--host",
        "127.0.0.1",
        "--port",
        str(port),
    ]
    argv += [
        "--prometheus-host",
        "127.0.0.1",
        "--prometheus-port",
        str(free_port()),
        "--policy",
        "cache_aware",
    ]

    async def use(router: Server) -> None:
        await register_workers(router.url, [engine.url], timeout=60.0)
        async with EngineClient(router.url) as client:
            assert [worker.url for worker in await list_workers(client)] == [engine.url]
            params = {"max_new_tokens": 5, "ignore_eos": True, "sampling_seed": 2}
            body = {"input_ids": PROMPT, "sampling_params": params, "return_logprob": True}
            answers = await asyncio.gather(*(client.post("/generate", body) for _ in range(10)))
            results = [GenerateResult.from_json(answer) for answer in answers]
        direct = engine.generate(PROMPT, max_new_tokens=5, sampling_seed=2)
        assert all(result.token_ids == direct["output_ids"] for result in results)
        assert all(
            len(result.log_probs) == 5 and result.finish_reason == "length" for result in results
        )

    with running(argv, port, tmp_path / "router.log") as router:
        asyncio.run(use(router))


def test_sigterm_ends_cleanly_and_answers_what_is_in_flight(
    model_dir: Path, tmp_path: Path
) -> None:
    with start_embedded(model_dir, tmp_path / "log") as own:
        request = long_generation(own, "z")
        wait_until(lambda: num_running(own) == 1)
        own.process.send_signal(signal.SIGTERM)
        assert request.join()["meta_info"]["finish_reason"]["type"] == "abort"
        assert own.process.wait(20) == 0


def test_the_server_ends_with_its_parent(model_dir: Path, tmp_path: Path) -> None:
    port = free_port()
    argv = [
        arg
        for arg in embedded_argv(model_dir, port)
        if arg not in ("--parent-pid", str(os.getpid()))
    ]
    script = (
        "import os, subprocess, sys, time\n"
        "child = subprocess.Popen([*sys.argv[1:], '--parent-pid', str(os.getpid())])\n"
        "print(child.pid, flush=True)\n"
        "time.sleep(600)\n"
    )
    parent = subprocess.Popen(
        [sys.executable, "-c", script, *argv], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL
    )
    assert parent.stdout is not None
    child = int(parent.stdout.readline())
    probe = Server(f"http://127.0.0.1:{port}", parent, tmp_path / "none")

    def is_up() -> bool:
        try:
            return probe.get("/health").status == 200
        except OSError:
            return False

    wait_until(is_up, 120.0)
    parent.kill()
    parent.wait(10)
    wait_until(lambda: not Path(f"/proc/{child}").exists() or _is_zombie(child), 10.0)


def _is_zombie(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] == "Z"
    except FileNotFoundError:
        return True


def test_a_taken_port_shows_before_the_model_is_read(server: Server, tmp_path: Path) -> None:
    port = int(server.url.rsplit(":", 1)[1])
    argv = embedded_argv(tmp_path / "no-model", port)
    ended = subprocess.run(argv, capture_output=True, text=True, timeout=60, check=False)
    assert (
        ended.returncode == 2
        and "already in use" in ended.stderr
        and "Traceback" not in ended.stderr
    )


def test_a_bad_model_directory_is_one_clear_error(tmp_path: Path, model_dir: Path) -> None:
    ended = subprocess.run(
        embedded_argv(tmp_path, free_port()),
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert (
        ended.returncode == 2
        and "config.json does not exist" in ended.stderr
        and "Traceback" not in ended.stderr
    )


def test_eos_of_the_tiny_model_is_known(engine: Server) -> None:
    body = {
        "input_ids": PROMPT,
        "sampling_params": {"max_new_tokens": 20, "logit_bias": {str(EOS): 100.0}},
    }
    answer = engine.ok("/generate", body)
    assert (
        answer["meta_info"]["finish_reason"] == {"type": "stop", "matched": EOS}
        and answer["text"] == ""
    )
