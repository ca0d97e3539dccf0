"""Signs of life of SGLang engines: nobody's question ends one whose memory is away, and one that
died says of what."""

from __future__ import annotations

import importlib
import json
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from slime.cluster.engine_actor import ServerExit, raise_server_exit
from slime.cluster.server_process import ServerProcess, exception_line
from slime.engines.health import HealthChecks
from slime.engines.kinds import engine_kind
from slime.engines.launch import ONE_GPU, EnginePlace, LaunchSpec
from slime.engines.sglang.command import HEALTH_GENERATES, check_sglang, sglang_command
from slime.errors import RunFailed, UserError
from tests.support.embedded_models import save_tiny_model
from tests.support.processes import wait_until
from tests.support.sglang_servers import FakeSGLang, fake_sglang, run_config

pytestmark = pytest.mark.usefixtures("sglang_stand_in")

POINTER = "ValueError: Pointer argument (at 0) cannot be accessed from Triton (cpu tensor?)"


# -- who may make an engine generate ---------------------------------------------------------------


@pytest.mark.parametrize("flags", [{"colocate": True}, {}])
@pytest.mark.parametrize(
    "place", [ONE_GPU, EnginePlace(overrides={"disaggregation_mode": "prefill"})]
)
def test_the_routers_question_needs_no_token_and_ours_does(
    flags: dict[str, Any], place: EnginePlace
) -> None:
    config = run_config(**flags)
    spec = sglang_command(config, "m", "h", 1, place)
    assert spec.env[HEALTH_GENERATES] == "false"
    assert spec.health_path == HealthChecks.of(config).path == "/health_generate"


@pytest.mark.parametrize("said", ["true", "1", "off", ""])
def test_a_user_who_wants_it_otherwise_gets_it_where_memory_stays(
    monkeypatch: pytest.MonkeyPatch, said: str
) -> None:
    monkeypatch.setenv(HEALTH_GENERATES, said)
    for flags in ({}, {"colocate": True, "offload_rollout": False}):
        assert sglang_command(run_config(**flags), "m", "h", 1).env[HEALTH_GENERATES] == said
    with pytest.raises(
        UserError, match=f"{HEALTH_GENERATES}={said} does not go with --offload-rollout"
    ) as refused:
        check_sglang(run_config(colocate=True))
    assert f"unset {HEALTH_GENERATES}" in refused.value.fix
    monkeypatch.setenv(HEALTH_GENERATES, "False")
    check_sglang(run_config(colocate=True))


def test_the_router_may_not_ask_where_every_answer_is_a_token() -> None:
    check_sglang(run_config(router_health_check_endpoint="/health_generate"))
    with pytest.raises(
        UserError, match="--router-health-check-endpoint /health_generate does not go with"
    ):
        check_sglang(run_config(colocate=True, router_health_check_endpoint="/health_generate"))


# -- an engine whose memory is away ----------------------------------------------------------------


@pytest.fixture
def server(tmp_path: Path) -> Iterator[FakeSGLang]:
    model = save_tiny_model(tmp_path / "tiny", "qwen3")
    with fake_sglang(
        run_config(colocate=True, hf_checkpoint=str(model)), model, tmp_path, ONE_GPU
    ) as [server]:
        yield server


def ask(server: FakeSGLang, path: str, body: dict[str, Any] | None = None) -> int:
    data = None if body is None else json.dumps(body).encode()
    request = urllib.request.Request(server.url + path, data, {"Content-Type": "application/json"})
    with urllib.request.urlopen(request, timeout=60) as answer:
        return int(answer.status)


def test_it_survives_the_router_and_dies_of_a_token(
    server: FakeSGLang, monkeypatch: pytest.MonkeyPatch
) -> None:
    ask(server, "/health_generate")
    ask(server, "/release_memory_occupation", {})
    assert ask(server, "/health") == ask(server, "/v1/loads") == ask(server, "/model_info") == 200
    ask(server, "/resume_memory_occupation", {"tags": ["weights"]})
    assert ask(server, "/health") == 200 and server.process.is_alive()
    with pytest.raises((urllib.error.URLError, OSError)):
        ask(server, "/health_generate")  # as SGLang's /health does without the variable
    wait_until(lambda: not server.process.is_alive(), "the server ends")
    assert (
        server.process.how_it_ended() == "was killed (SIGKILL)"
        and server.process.exception_line() == POINTER
    )
    generates = importlib.import_module("sglang.scheduler").generates
    assert generates("/health")
    monkeypatch.setenv(HEALTH_GENERATES, "false")
    assert generates("/health_generate") and not generates("/health")


# -- what a dead one says --------------------------------------------------------------------------

TRACEBACK = 'Traceback (most recent call last):\n  File "a.py", line 1, in f\n    g()\n'
TOLD = "no; why: because; fix: that"
SCHEDULER = f"[2026-01-01 TP0] Scheduler hit an exception: {TRACEBACK}{POINTER}\n\n"


@pytest.mark.parametrize(
    ("log", "expected"),
    [
        (SCHEDULER + "[2026] SIGQUIT received. signum=None\n", POINTER),
        (f"{TRACEBACK}KeyError: 'old'\n{SCHEDULER}{TRACEBACK}RuntimeError: peer gone\n", POINTER),
        (
            f"{SCHEDULER}[TP1] Scheduler hit an exception: {TRACEBACK}RuntimeError: peer gone\n",
            POINTER,
        ),
        (
            f"{TRACEBACK}torch.OutOfMemoryError: CUDA\n"
            f"{TRACEBACK}asyncio.exceptions.CancelledError\n",
            "torch.OutOfMemoryError: CUDA",
        ),
        (f"{TRACEBACK}AssertionError\n" + 39 * "later\n", "AssertionError"),
        (f"{TRACEBACK}ValueError: survived\n" + 40 * "later\n", ""),
        (f"{TRACEBACK}", ""),
        ("error: one\nerror: no\n  why: because\n  fix: that\nend\n", f"error: {TOLD}"),
        ("error: survived\n" + 40 * "later\n", ""),
        (f"{TRACEBACK}KeyError: 'a'\nerror: no\n", "KeyError: 'a'"),
        ("fine\n", ""),
        ("", ""),
    ],
)
def test_the_line_that_tells(log: str, expected: str) -> None:
    assert exception_line(log) == expected


def test_a_server_that_starts_again_is_not_blamed_for_the_former_one(tmp_path: Path) -> None:
    log = tmp_path / "engine.log"
    log.write_text(SCHEDULER)
    server = ServerProcess("engine-0", LaunchSpec(["/bin/echo", "hello"]), "http://h", log)
    server.start()
    assert server._process is not None and server._process.wait(60) == 0
    assert server.exception_line() == "" and server.log_tail() == "hello"
    assert log.read_text().startswith(SCHEDULER)


@pytest.mark.parametrize(
    ("engine", "exception", "remedies"),
    [
        ("sglang", POINTER, "1. --sglang-disable-cuda-graph, to find the cause"),
        (
            "sglang",
            "torch.OutOfMemoryError: CUDA out of memory.",
            "1. a lower --sglang-mem-fraction-static  2. a smal",
        ),
        ("sglang", "", "1. a higher --sglang-mem-fraction-static"),
        (
            "embedded",
            "torch.OutOfMemoryError: CUDA out of memory.",
            "1. a smaller --embedded-max-slots",
        ),
    ],
)
def test_a_server_exit_says_what_was_done_and_what_it_died_of(
    engine: str, exception: str, remedies: str
) -> None:
    with pytest.raises(RunFailed) as failed:
        server_exit = ServerExit("was killed (SIGKILL)", "the end", "u", exception, pid=4711)
        raise_server_exit(
            "engine-1",
            server_exit,
            engine_kind(engine).remedies(exception),
            what="giving memory up",
        )
    assert failed.value.what == "giving memory up: engine-1 (pid 4711) was killed (SIGKILL)"
    assert failed.value.why.splitlines()[-2:] == [
        "       last lines of its log:" if exception else "last lines of its log:", "      the end",
    ]  # fmt: skip
    assert failed.value.why.startswith(exception) and remedies in failed.value.fix
