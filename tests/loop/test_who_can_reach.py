"""Who can reach a run: what listens is what docs/security.md lists, on loopback; only whoever has
the run's key is answered by its engines and its router; and nobody can read the key anywhere."""

from __future__ import annotations

import ipaddress
import json
import re
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import psutil
import pytest

from slime.engines.keys import header_of
from tests.support.processes import ROOT, Driver, World, start, wait_held, wait_until
from tests.support.sglang_servers import fake_environment

pytestmark = pytest.mark.slow

#: Written for engines that this host does not have.
_NOT_HERE = {"SGLang"}

#: What steers an engine, generates with it or tells of it.
_OF_ENGINE = (
    *(
        "/generate",
        "/v1/chat/completions",
        "/abort_request",
        "/pause_generation",
        "/continue_generation",
    ),
    *(
        "/flush_cache",
        "/update_weights_from_tensor",
        "/update_weights_from_disk",
        "/init_weights_update_group",
    ),
    *("/update_weights_from_distributed", "/weights_checker", "/release_memory_occupation"),
)
_OF_ROUTER = ("/generate", "/v1/chat/completions", "/workers", "/flush_cache")


@dataclass
class Held:
    """A run that waits in its second rollout until ``go_on``; its engine runs for it."""

    driver: Driver
    hold: Path
    engine: str

    def go_on(self) -> None:
        (self.hold / "hold-1").unlink(missing_ok=True)
        assert self.driver.end() == 0, self.driver.stderr


def held(folder: Path, engine: str, *flags: object) -> Iterator[Held]:
    world, hold = World.create(folder), folder
    (hold / "hold-1").touch()
    words = world.flags(
        "run", "--custom-rm-path", "tests.support.hold.reward", "--rollout-engine", engine, *flags
    )
    words = [word for word in words if word != "--colocate" or "--no-colocate" not in flags]
    environment = fake_environment(hold / "calls.jsonl") if engine == "sglang" else {}
    with start(words, world.outputs / "run", SLIME_TEST_HOLD=str(hold), **environment) as driver:
        wait_held(driver, hold, 1)
        yield Held(driver, hold, engine)


#: Two ranks, whose engine gets weights by broadcast: all kinds of ports there are.
_APART = (
    *("--no-colocate", "--rollout-num-gpus", 1, "--actor-num-gpus-per-node", 2),
    *("--custom-megatron-init-path", "tests.support.toy.engines_look_remote"),
)


@pytest.fixture(scope="module", params=["embedded", pytest.param("sglang", marks=pytest.mark.full)])
def run(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Held]:
    flags = _APART if request.param == "embedded" else ()
    yield from held(tmp_path_factory.mktemp("run"), request.param, *flags)


# -- ports -----------------------------------------------------------------------------------------


def documented() -> set[str]:
    """The names of processes in the table."""
    rows = [
        line
        for line in (ROOT / "docs" / "security.md").read_text().splitlines()
        if line.startswith("| `")
    ]
    return {name.strip("` ") for row in rows for name in row.split("|")[1].split(",")} - _NOT_HERE


def listening(driver: Driver) -> list[tuple[str, str]]:
    """(command line, address) of every port that a process of the run listens on."""
    found = []
    for process in driver.family(""):
        try:
            connections, words = process.net_connections("inet"), " ".join(process.cmdline())
        except psutil.Error:  # a worker that Ray has just ended
            continue
        found += [(words, c.laddr.ip) for c in connections if c.status == psutil.CONN_LISTEN]
    return found


def not_listening(found: list[tuple[str, str]]) -> set[str]:
    """Rows of the table without a port."""
    return {name for name in documented() if not any(name in words for words, _ in found)}


def listening_soon(driver: Driver) -> list[tuple[str, str]]:
    with suppress(AssertionError):  # Ray opens some of its own late
        wait_until(lambda: not not_listening(listening(driver)), "all ports", seconds=60)
    return listening(driver)


def test_every_port_is_listed_and_on_loopback(run: Held) -> None:
    if run.engine != "embedded":
        pytest.skip("the table's rows are those of a run with embedded engines")
    names, found = documented(), listening_soon(run.driver)
    assert len(names) > 6
    assert not not_listening(found)
    unknown = [words for words, _ in found if not any(name in words for name in names)]
    assert not unknown, "a row of docs/security.md is missing"
    reachable = [
        (words[:80], ip)
        for words, ip in found
        if not ipaddress.ip_address(re.sub("^::ffff:", "", ip)).is_loopback
    ]
    assert not reachable


@pytest.mark.full
def test_agents_elsewhere_reach_the_router_where_it_is_asked_for(tmp_path: Path) -> None:
    for run in held(tmp_path, "embedded", *_APART, "--listen-on-network"):
        addresses = {ip for words, ip in listening_soon(run.driver) if "sglang::router" in words}
        run.go_on()
    assert any(not ipaddress.ip_address(ip).is_loopback for ip in addresses)


# -- the key ---------------------------------------------------------------------------------------


def status(url: str, key: str = "", method: str = "POST") -> int:
    body = json.dumps({}).encode() if method == "POST" else None
    headers = {"Content-Type": "application/json", **header_of(key)}
    request = urllib.request.Request(url, body, headers, method=method)
    try:
        with urllib.request.urlopen(request, timeout=60) as answer:
            return int(answer.status)
    except urllib.error.HTTPError as error:
        return error.code


#: Engine → module in its server's command line.
_SERVERS = {"embedded": "slime.embedded", "sglang": "slime.engines.sglang.engine_process"}


def engine_url(run: Held) -> str:
    """By its command line: asked for a page, the ports of gloo in the same process never answer."""
    # a fork has its command line as a title, which is one word
    servers = run.driver.family(_SERVERS[run.engine])
    titles = [" ".join(process.cmdline()) for process in servers]
    commands = [title.split() for title in titles]
    (words,) = [words for words in commands if "--port" in words]
    return f"http://{words[words.index('--host') + 1]}:{words[words.index('--port') + 1]}"


def router_url(driver: Driver) -> str:
    """Its title hides its command line, and its metrics have a port of their own, which answers at
    any path."""
    for process in driver.family("sglang::router"):
        for connection in process.net_connections("inet"):
            url = f"http://{connection.laddr.ip}:{connection.laddr.port}"
            if (
                connection.status != psutil.CONN_LISTEN
                or status(f"{url}/liveness", method="GET") != 200
            ):
                continue
            if status(f"{url}/nowhere", method="GET") != 200:
                return url
    raise AssertionError("no router answers")


def test_only_the_run_is_answered(run: Held) -> None:
    key = run.driver.key()
    server, router = engine_url(run), router_url(run.driver)
    for url, paths in ((server, _OF_ENGINE), (router, _OF_ROUTER)):
        for wrong in ("", "none", key[:-1]):
            assert {path: status(url + path, wrong) for path in paths} == dict.fromkeys(paths, 401)
    for url in (f"{server}/server_info", f"{server}/v1/loads", f"{router}/workers"):
        assert (status(url, method="GET"), status(url, key, method="GET")) == (401, 200)


def test_the_key_is_nowhere_to_be_read(run: Held) -> None:
    """The last one: the run goes on to its end."""
    driver, key = run.driver, run.driver.key()
    commands = [" ".join(process.cmdline()) for process in driver.family("")]
    assert len(key) > 40 and len(commands) > 5 and not any(key in command for command in commands)
    run.go_on()
    assert driver.steps() == [1, 2]
    log = (driver.path / "logs" / "engine-0.log").read_text()
    assert "api_key='•••'" in log or run.engine != "sglang", (
        "what SGLang logs of its arguments is looked through"
    )
    written = [path for path in driver.path.rglob("*") if path.is_file()]
    told = [str(path) for path in written if key.encode() in path.read_bytes()]
    assert told == [] and key not in driver.stderr
