"""What a run listens on is what docs/security.md lists, and nobody outside of the host reaches it."""

from __future__ import annotations

import ipaddress
import re
import socket
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import psutil
import pytest

from tests.support.processes import ROOT, Driver, StartHeld, World, wait_held, wait_until

pytestmark = pytest.mark.slow

#: Written for engines that this host does not have.
_NOT_HERE = {"SGLang"}

#: Where Ray serves its autoscaler's metrics unless told otherwise.
_RAYS_OWN_PORT = 44217


def documented() -> set[str]:
    """The names of processes in the table."""
    rows = [line for line in (ROOT / "docs" / "security.md").read_text().splitlines() if line.startswith("| `")]
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


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> World:
    return World.create(tmp_path_factory.mktemp("ports"))


@pytest.fixture
def ports(world: World, start_held: StartHeld, hold: Path) -> Callable[..., list[tuple[str, str]]]:
    """``ports(*flags)``: those of a run of two ranks whose engine gets weights by broadcast."""

    def look(*flags: object) -> list[tuple[str, str]]:
        (hold / "hold-1").touch()
        flags = ("--custom-megatron-init-path", "tests.support.toy.engines_look_remote", *flags)
        flags = ("--custom-rm-path", "tests.support.hold.reward", "--actor-num-gpus-per-node", 2, *flags)
        words = world.flags(f"run-{len(flags)}", "--no-colocate", "--rollout-num-gpus", 1, *flags)
        driver = start_held([word for word in words if word != "--colocate"], world.outputs / f"run-{len(flags)}")
        wait_held(driver, hold, 1)
        with suppress(AssertionError):  # Ray opens some of its own late
            wait_until(lambda: not not_listening(listening(driver)), "all ports", seconds=60)
        found = listening(driver)
        (hold / "hold-1").unlink()
        assert driver.end() == 0, driver.stderr
        return found

    return look


def test_every_port_is_listed_and_on_loopback(ports: Callable[..., list[tuple[str, str]]]) -> None:
    with socket.socket() as another_run:  # two runs on one host: what Ray numbers itself is taken
        with suppress(OSError):
            another_run.bind(("127.0.0.1", _RAYS_OWN_PORT))
            another_run.listen()
        names, found = documented(), ports()
    assert len(names) > 8
    assert not not_listening(found)
    unknown = [words for words, _ in found if not any(name in words for name in names)]
    assert not unknown, "a row of docs/security.md is missing"
    reachable = [
        (words[:80], ip) for words, ip in found if not ipaddress.ip_address(re.sub("^::ffff:", "", ip)).is_loopback
    ]
    assert not reachable


@pytest.mark.full
def test_agents_elsewhere_reach_the_router_where_it_is_asked_for(ports: Callable[..., list[tuple[str, str]]]) -> None:
    addresses = {ip for words, ip in ports("--listen-on-network") if "sglang::router" in words}
    assert any(not ipaddress.ip_address(ip).is_loopback for ip in addresses)
