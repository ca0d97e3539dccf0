"""``return_routed_experts``: what an engine answers is what transformers' routers choose, in
SGLang's format."""

from __future__ import annotations

import base64
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from slime.processes.host import free_port
from slime.samples.routed_experts import decode_routed_experts
from tests.support.contract_servers import (
    CONTEXT,
    PROMPT,
    Server,
    embedded_argv,
    long_generation,
    num_running,
    running,
    wait_until,
)
from tests.support.embedded_models import router_choices, save_tiny_model

SHAPES = {"qwen3_moe": (2, 2), "deepseek_v3": (2, 4)}


@pytest.fixture(
    scope="module", params=["qwen3_moe", pytest.param("deepseek_v3", marks=pytest.mark.full)]
)
def experts_dir(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_model(tmp_path_factory.mktemp("models") / request.param, request.param)


@pytest.fixture(scope="module")
def experts_engine(experts_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    port = free_port()
    flags = [
        "--dtype",
        "float32",
        "--max-context-len",
        str(CONTEXT),
        "--max-slots",
        "4",
        "--device",
        "cpu",
    ]
    flags += ["--prefill-tokens", "64", "--enable-return-routed-experts"]
    log = tmp_path_factory.mktemp("log") / "server.log"
    with running(embedded_argv(experts_dir, port, *flags), port, log) as server:
        yield server


def ask(engine: Server, body: dict[str, Any], **params: Any) -> Any:
    params = {"max_new_tokens": 8, "ignore_eos": True, **params}
    return engine.ok(
        "/generate", {"return_routed_experts": True, "sampling_params": params, **body}
    )


def assert_right(directory: Path, prompt: list[int], answer: dict[str, Any]) -> None:
    tokens, meta = prompt + answer["output_ids"], answer["meta_info"]
    start = meta["routed_experts_start_len"]
    before = np.zeros((start, *SHAPES[directory.name]), np.int32)
    rows = decode_routed_experts(
        meta["routed_experts"],
        len(tokens),
        start=start,
        before=before,
        shape=SHAPES[directory.name],
    )
    expected = router_choices(directory, tokens)[:-1]
    assert np.array_equal(np.sort(rows, axis=-1)[start:], expected[start:])


def test_prompt_and_output(experts_engine: Server, experts_dir: Path) -> None:
    answer = ask(experts_engine, {"input_ids": PROMPT})
    assert_right(experts_dir, PROMPT, answer)
    assert len(base64.b64decode(answer["meta_info"]["routed_experts"])) == 4 * 15 * np.prod(
        SHAPES[experts_dir.name]
    )
    later = ask(experts_engine, {"input_ids": PROMPT, "routed_experts_start_len": 5})
    assert later["meta_info"]["routed_experts_start_len"] == 5
    assert_right(experts_dir, PROMPT, later)


def test_batches_of_several_samples_with_a_common_prefix(
    experts_engine: Server, experts_dir: Path
) -> None:
    prompts = [PROMPT * 10, PROMPT * 10 + [1, 2], [9, 8]]
    answers = ask(experts_engine, {"input_ids": prompts}, n=3)
    assert (
        len(answers) == 9
        and sum(answer["meta_info"]["cached_tokens"] for answer in answers) > 3 * 79
    )
    for index, answer in enumerate(answers):
        assert_right(experts_dir, prompts[index // 3], answer)
    turn = prompts[0] + answers[0]["output_ids"] + [4, 5]
    again = ask(experts_engine, {"input_ids": turn})
    assert_right(experts_dir, turn, again)


def test_the_last_chunk_of_a_stream_has_them(experts_engine: Server, experts_dir: Path) -> None:
    body = {"input_ids": PROMPT, "stream": True, "return_routed_experts": True}
    answer = experts_engine.post(
        "/generate", body | {"sampling_params": {"max_new_tokens": 30, "ignore_eos": True}}
    )
    lines = [line.removeprefix(b"data: ") for line in answer.raw.split(b"\n\n") if line]
    chunks = [json.loads(line) for line in lines[:-1]]
    assert len(chunks) > 1 and not any(
        "routed_experts" in chunk["meta_info"] for chunk in chunks[:-1]
    )
    assert_right(experts_dir, PROMPT, chunks[-1])


def test_an_aborted_answer_and_the_one_that_resumes_it(
    experts_engine: Server, experts_dir: Path
) -> None:
    request = long_generation(experts_engine, "long", return_routed_experts=True)
    wait_until(lambda: num_running(experts_engine) == 1)
    experts_engine.ok("/abort_request", {"rid": "long"})
    aborted = request.join()
    assert aborted["meta_info"]["finish_reason"]["type"] == "abort"
    assert_right(experts_dir, PROMPT, aborted)
    so_far = PROMPT + aborted["output_ids"]
    assert_right(experts_dir, so_far, ask(experts_engine, {"input_ids": so_far}))


def test_answers_carry_none_unless_asked(experts_engine: Server) -> None:
    assert "routed_experts" not in experts_engine.generate(PROMPT)["meta_info"]
    info = experts_engine.get("/server_info").json
    assert info["enable_return_routed_experts"] is True


def test_an_engine_that_records_none_says_so(engine: Server) -> None:
    answer = engine.post("/generate", {"input_ids": PROMPT, "return_routed_experts": True})
    assert (
        answer.status == 400 and "--enable-return-routed-experts" in answer.json["error"]["message"]
    )
    for start in (-1, len(PROMPT) + 1, "x"):
        body = {
            "input_ids": PROMPT,
            "return_routed_experts": False,
            "routed_experts_start_len": start,
        }
        answer = engine.post("/generate", body)
        assert (answer.status == 200) == (start == len(PROMPT) + 1), (
            "not looked at where nothing is asked for"
        )
