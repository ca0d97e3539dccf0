"""Nobody without the run's key is answered by its engines and its router, and nobody can read the key anywhere."""

from __future__ import annotations

import json
import urllib.error
import urllib.request
from pathlib import Path

import psutil
import pytest

from slime.engines.keys import header_of
from tests.support.processes import Driver, StartHeld, World, wait_held
from tests.support.sglang_servers import fake_environment

pytestmark = pytest.mark.slow

#: What steers an engine, generates with it or tells of it.
_OF_ENGINE = (
    *("/generate", "/v1/chat/completions", "/abort_request", "/pause_generation", "/continue_generation"),
    *("/flush_cache", "/update_weights_from_tensor", "/update_weights_from_disk", "/init_weights_update_group"),
    *("/update_weights_from_distributed", "/weights_checker", "/release_memory_occupation"),
)
_OF_ROUTER = ("/generate", "/v1/chat/completions", "/workers", "/flush_cache")


def status(url: str, key: str = "", method: str = "POST") -> int:
    body = json.dumps({}).encode() if method == "POST" else None
    headers = {"Content-Type": "application/json", **header_of(key)}
    request = urllib.request.Request(url, body, headers, method=method)
    try:
        with urllib.request.urlopen(request, timeout=60) as answer:
            return int(answer.status)
    except urllib.error.HTTPError as error:
        return error.code


def url_of(driver: Driver, word: str, path: str) -> str:
    """Of the server whose command line has the word, and which answers at the path; a router's metrics have a port of
    their own, which answers at any."""
    for process in driver.family(word):
        for connection in process.net_connections("inet"):
            url = f"http://{connection.laddr.ip}:{connection.laddr.port}"
            if connection.status != psutil.CONN_LISTEN or status(f"{url}{path}", method="GET") != 200:
                continue
            if status(f"{url}/nowhere", method="GET") != 200:
                return url
    raise AssertionError(f"no {word} answers")


@pytest.mark.parametrize("engine", ["embedded", pytest.param("sglang", marks=pytest.mark.full)])
def test_only_the_run_is_answered(
    start_held: StartHeld, hold: Path, tmp_path_factory: pytest.TempPathFactory, engine: str
) -> None:
    world = World.create(tmp_path_factory.mktemp("keys"))
    (hold / "hold-1").touch()
    words = world.flags("run", "--custom-rm-path", "tests.support.hold.reward", "--rollout-engine", engine)
    environment = fake_environment(hold / "calls.jsonl") if engine == "sglang" else {}
    driver = start_held(words, world.outputs / "run", **environment)
    wait_held(driver, hold, 1)
    key = driver.key()
    server, router = url_of(driver, "slime.engines.", "/health"), url_of(driver, "sglang::router", "/liveness")
    for url, paths in ((server, _OF_ENGINE), (router, _OF_ROUTER)):
        for wrong in ("", "none", key[:-1]):
            assert {path: status(url + path, wrong) for path in paths} == dict.fromkeys(paths, 401)
    for url in (f"{server}/server_info", f"{server}/v1/loads", f"{router}/workers"):
        assert (status(url, method="GET"), status(url, key, method="GET")) == (401, 200)
    commands = [" ".join(process.cmdline()) for process in driver.family("")]
    assert len(key) > 40 and len(commands) > 5 and not any(key in command for command in commands)
    (hold / "hold-1").unlink()
    assert driver.end() == 0, driver.stderr
    assert driver.steps() == [1, 2]
    written = [path for path in driver.path.rglob("*") if path.is_file()]
    log = (driver.path / "logs" / "engine-0.log").read_text()
    assert "api_key='•••'" in log or engine != "sglang", "what SGLang logs of its arguments is looked through"
    told = [str(path) for path in written if key.encode() in path.read_bytes()]
    assert told == [] and key not in driver.stderr
