"""No request, however malformed, makes a server of ours fail: neither a status of 500 nor the end
of it."""

from __future__ import annotations

import asyncio
import itertools
import json
from collections.abc import Iterator
from typing import Any

import pytest
from aiohttp import web
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from benchmarks.watched_runs import make_run
from slime.agents.endpoint import AgentEndpoint
from slime.embedded import control_routes, generate_routes, openai_routes
from slime.embedded.options import EngineOptions
from slime.page import server as watch
from tests.support.agents import Play
from tests.support.embedded_models import save_tiny_model
from tests.support.malformed import ODD, Request, post, requests, status_of
from tests.support.served import served, served_engine

PROMPT = [72, 101, 108, 108, 111]


# -- the embedded engine ---------------------------------------------------------------------------


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    model = save_tiny_model(tmp_path_factory.mktemp("models") / "tiny", "qwen3")
    options = EngineOptions(
        str(model), dtype="float32", device="cpu", max_slots=4, max_context_len=64
    )
    with served_engine(options) as url:
        yield url


_MODULES = (generate_routes, control_routes, openai_routes)
ROUTES = sorted({route.path.split("{")[0] for module in _MODULES for route in module.routes})
FIELDS = [
    *(
        "input_ids",
        "text",
        "sampling_params",
        "stream",
        "rid",
        "return_logprob",
        "logprob_start_len",
        "n",
        "prompt",
    ),
    *(
        "top_logprobs_num",
        "model",
        "messages",
        "tools",
        "tool_choice",
        "max_tokens",
        "temperature",
        "stop",
        "logprobs",
    ),
    *(
        "seed",
        "mode",
        "tags",
        "timeout",
        "group_name",
        "rank_offset",
        "world_size",
        "backend",
        "names",
        "dtypes",
    ),
    *(
        "shapes",
        "load_format",
        "segments",
        "serialized_named_tensors",
        "model_path",
        "weight_version",
        "new_version",
    ),
    *(
        "name",
        "truncate_size",
        "action",
        "flush_cache",
        "abort_all_requests",
        "abort_all",
        "tokens",
        "echo",
        "suffix",
    ),
    *(
        "master_address",
        "master_port",
        "add_special_tokens",
        "chat_template_kwargs",
        "stream_options",
    ),
]
WHOLE = {"input_ids": PROMPT, "sampling_params": {"max_new_tokens": 1}}


def well(url: str) -> None:
    """It generates, also after requests that paused it or that released its memory."""
    assert (
        post(url, "/resume_memory_occupation")[0] == 200
        and post(url, "/continue_generation")[0] == 200
    )
    assert status_of(url, Request("GET", "/health_generate", b"", {})) == 200


@settings(max_examples=120, deadline=None)
@given(request=requests(ROUTES, FIELDS, WHOLE))
def test_no_malformed_request_is_an_error_of_the_engine(engine: str, request: Request) -> None:
    status = status_of(engine, request)
    assert status < 500 or status in (501, 503, 505), status
    if "pause" in request.path or "release_memory" in request.path:
        well(engine)


JOINS = {"group_name": "g", "rank_offset": 1, "world_size": 2, "master_port": 1, "backend": "gloo"}
JOINS["master_address"] = "127.0.0.1"
SEGMENTS = "/update_weights_from_tensor", "load_format", "shared_memory"


@pytest.mark.parametrize(
    ("route", "body"),
    [
        *(
            ("/init_weights_update_group", {**JOINS, "world_size": size})
            for size in (-1, 0, 1, 2**31, 2**63)
        ),
        *(
            ("/init_weights_update_group", {**JOINS, "rank_offset": rank})
            for rank in (-1, 0, 2, 2**63)
        ),
        *(
            ("/init_weights_update_group", {**JOINS, "master_port": port})
            for port in (-1, 0, 2**16, 2**63)
        ),
        *(
            ("/init_weights_update_group", {**JOINS, "master_address": name})
            for name in ("", "a\x00b", 7)
        ),
        *(
            ("/init_weights_update_group", {**JOINS, "backend": name})
            for name in ("carrier-pigeon", 7, {}, "mpi")
        ),
        *(
            ("/update_weights_from_disk", {"model_path": name})
            for name in ("x" * 5000, "/" + "y" * 300, "a\x00b", "")
        ),
        *(
            ("/update_weights_from_tensor", {"load_format": "shared_memory", "segments": [segment]})
            for segment in (
                {"shm": "x", "nbytes": -1},
                {"shm": "", "nbytes": 4},
                {"shm": "a\x00b", "nbytes": 4},
                {"shm": "z" * 5000, "nbytes": 4},
                {"shm": "..", "nbytes": 2**63},
                7,
            )
        ),
    ],
)
def test_wrong_values_are_refused_at_once(engine: str, route: str, body: dict[str, Any]) -> None:
    status, said = post(engine, route, body, timeout=15.0)
    assert status == 400 and "Error:" not in said, said
    well(engine)


# -- slime watch -----------------------------------------------------------------------------------

QUESTIONS = [
    "run", "names", "generation", "since", "rollout", "sort", "kind", "group", "dataset", "status",
    "prompt"
]  # fmt: skip
QUESTIONS += ["search", "descending", "offset", "limit", "whole", "id", "runs", "token"]


@pytest.fixture(scope="module")
def watched(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[str, str]]:
    runs = watch.Runs([make_run(tmp_path_factory.mktemp("runs") / "one")])
    runs.look()
    name = next(iter(runs.all()))

    async def build() -> web.Application:
        return watch.application(runs, None)

    with served(build) as url:
        yield url, name


PAGES = [
    "runs", "metrics", "phases", "engines", "timeline", "rollouts", "groups", "samples", "sample",
    "settings"
]  # fmt: skip


@settings(max_examples=120, deadline=None)
@given(request=requests([f"/api/{page}" for page in [*PAGES, "differences"]], QUESTIONS, {}))
def test_no_malformed_question_is_an_error_of_the_page(
    watched: tuple[str, str], request: Request
) -> None:
    url, name = watched
    asked = f"{request.path}{'&' if '?' in request.path else '?'}run={name}"
    for path in (request.path, asked):
        assert status_of(url, Request(request.method, path, request.body, request.headers)) < 500


@pytest.mark.parametrize("page", ["groups", "samples"])
def test_an_empty_filter_finds_nothing(watched: tuple[str, str], page: str) -> None:
    url, name = watched
    for field in ("prompt", "status", "dataset", "search", "sort"):
        status = status_of(url, Request("GET", f"/api/{page}?run={name}&{field}=", b"", {}))
        assert status == (400 if field == "sort" else 200)


# -- the endpoints of agents -----------------------------------------------------------------------

AGENT_ROUTES = [
    "/v1/chat/completions",
    "/v1/responses",
    "/v1/messages",
    "/v1/messages/count_tokens",
    "/v1/models",
]
AGENT_FIELDS = [
    "model", "messages", "input", "system", "instructions", "tools", "tool_choice", "max_tokens",
    "stream"
]  # fmt: skip
AGENT_FIELDS += [
    "stop", "stop_sequences", "temperature", "n", "thinking", "reasoning", "metadata",
    "previous_response_id"
]  # fmt: skip
AGENT_FIELDS += [
    "max_output_tokens", "max_completion_tokens", "response_format", "stream_options", "role",
    "content"
]  # fmt: skip
ASKED = {
    "model": "m",
    "messages": [{"role": "user", "content": "Hi"}],
    "input": "Hi",
    "max_tokens": 4,
}
#: Messages and parts that are nearly right.
NESTED = st.fixed_dictionaries(
    {"role": ODD, "content": ODD}, optional={"tool_calls": ODD, "type": ODD, "id": ODD}
)


@settings(max_examples=20, deadline=None, suppress_health_check=list(HealthCheck))
@given(
    batch=st.lists(requests(AGENT_ROUTES, AGENT_FIELDS, ASKED), min_size=4, max_size=4),
    nested=st.lists(NESTED, min_size=2, max_size=2),
)
def test_no_malformed_request_is_an_error_of_an_agents_endpoint(
    batch: list[Request], nested: list[dict[str, Any]]
) -> None:
    messages = [
        Request(
            "POST", route, json.dumps({**ASKED, "messages": [one], "input": [one]}).encode(), {}
        )
        for one in nested
        for route in AGENT_ROUTES[:4]
    ]

    async def agent(endpoint: AgentEndpoint) -> None:
        url, key = (
            endpoint.base_url.removesuffix("/v1"),
            {"Authorization": f"Bearer {endpoint.api_key}"},
        )
        for request in [*batch, *messages]:
            status = await asyncio.to_thread(status_of, url, request, key)
            assert status < 500, (request, status)

    Play(itertools.repeat("Yes.<|im_end|>")).run(agent)
