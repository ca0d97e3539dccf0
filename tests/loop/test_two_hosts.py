"""A run over two hosts, each with its own address, processes and Ray node, on a network that is
cut, slow, or away for some seconds.

What happens is the table in docs/clusters.md.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.processes import Driver, World, start, wait_until, wait_while_running
from tests.support.two_hosts import TwoHosts, two_hosts, why_impossible

WHY_IMPOSSIBLE = why_impossible()

pytestmark = [
    pytest.mark.full,
    pytest.mark.skipif(bool(WHY_IMPOSSIBLE), reason=f"no namespaces: {WHY_IMPOSSIBLE}"),
]

#: Seconds until Ray's head gives a silent node up: five checks of 10 s, 3 s apart. The rest is for
#: a crowded host.
RAY_GIVES_UP = 65.0 + 45.0
#: Seconds for what a lost host still runs to end, once its network is back.
LEFTOVERS_END = 180.0

#: Where a run is held → file that holds it, flags that make it wait there.
PLACES = {
    "generating": ("request-0", "--custom-generate-function-path", "tests.support.hold.generate"),
    "training": ("train", "--custom-megatron-init-path", "tests.support.hold.hold_phases"),
    "pushing": ("paused", "--custom-megatron-init-path", "tests.support.hold.hold_phases"),
}
#: The demo's model earns nothing at first, and loss and gradient would be 0.
REWARD = ["--custom-rm-path", "tests.support.hold.reward"]
HOLDS = [word for _, *words in (PLACES["generating"], PLACES["training"]) for word in words]


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> World:
    return World.create(tmp_path_factory.mktemp("two-hosts"))


@pytest.fixture
def hosts(tmp_path: Path) -> Iterator[TwoHosts]:
    """A slot on the first, two on the second: a trainer rank on each, and an engine."""
    with two_hosts(tmp_path) as hosts:
        hosts.start_ray((1, 2), RAY_AUTH_MODE="disabled")
        yield hosts


def begin(hosts: TwoHosts, world: World, hold: Path, name: str, *more: object) -> Driver:
    spread = ["--ray-address", hosts.ray_address, "--actor-num-gpus-per-node", 2, "--no-colocate"]
    return start(
        world.flags(name, *spread, *HOLDS, *REWARD, *more),
        world.outputs / name,
        prefix=hosts.first.prefix,
        SLIME_TEST_HOLD=str(hold),
        RAY_AUTH_MODE="disabled",
    )


def hold_at(hold: Path, place: str) -> None:
    (hold / f"hold-{PLACES[place][0]}").touch()


def wait_at(driver: Driver, hold: Path, place: str) -> None:
    wait_while_running(driver, (hold / f"held-{PLACES[place][0]}").exists, place)


def go_on(hold: Path, place: str) -> None:
    (hold / f"hold-{PLACES[place][0]}").unlink()


def leftovers_end(hosts: TwoHosts) -> None:
    assert not hosts.first.of_runs()
    wait_until(lambda: not hosts.second.of_runs(), "no process is left behind", LEFTOVERS_END)


def test_an_undisturbed_run_then_a_slow_network(hosts: TwoHosts, world: World, hold: Path) -> None:
    """20 Mbit/s and a round trip of 200 ms change how long a run takes, and no number of it."""
    rows = []
    for name in ("undisturbed", "slow"):
        with begin(hosts, world, hold, name, "--deterministic-rollout") as driver:
            assert driver.end() == 0, driver.stderr
        assert driver.steps() == [1, 2]
        leftovers_end(hosts)
        rows.append([row for row in driver.rows() if "train/loss" in row])
        carried = hosts.cable.carried
        hosts.cable.delay = 0.1
        hosts.cable.rate = 20e6
    assert carried > 1e6  # both hosts took part
    assert any(row["train/grad_norm"] > 0 for row in rows[0])
    for before, after in zip(*rows, strict=True):
        for name in ("train/loss", "train/grad_norm", "rollout/raw_reward"):
            assert after[name] == before[name]


@pytest.mark.parametrize("place", PLACES)
def test_a_cut_network_ends_the_run_and_names_the_host(
    hosts: TwoHosts, world: World, hold: Path, place: str
) -> None:
    """Packets vanish without an error; no side learns it from the kernel."""
    hold_at(hold, place)
    with begin(hosts, world, hold, f"cut-{place}") as driver:
        wait_at(driver, hold, place)
        hosts.cable.is_cut = True
        cut_at = time.monotonic()
        go_on(hold, place)
        assert driver.end(RAY_GIVES_UP + cut_at - time.monotonic()) == 1, driver.stderr
        error = "\n".join(driver.error())
        assert f"host {hosts.second.address} is lost" in error.splitlines()[0]
        assert "memory" not in error
        assert "slime resume continues" in error
        waits = {"generating": "generating", "training": "training", "pushing": "pushing weights"}
        assert f"{waits[place]}: nothing heard for 60 s from" in driver.stderr
        assert not hosts.first.of_runs()
        hosts.cable.heal()
        leftovers_end(hosts)


def test_a_rank_that_waits_in_a_collective_ends_at_its_own_limit(
    hosts: TwoHosts, world: World, hold: Path
) -> None:
    """--distributed-timeout-minutes is shorter than Ray's patience here."""
    hold_at(hold, "training")
    with begin(hosts, world, hold, "limit", "--distributed-timeout-minutes", 0.4) as driver:
        wait_at(driver, hold, "training")
        hosts.cable.is_cut = True
        go_on(hold, "training")
        assert driver.end(60) == 1, driver.stderr
        first = driver.error()[0]
        assert "training: processes that work together lost each other" in first
        assert hosts.second.address in first
        hosts.cable.heal()
        leftovers_end(hosts)


def test_a_network_that_is_away_for_seconds(hosts: TwoHosts, world: World, hold: Path) -> None:
    """The run goes on, or ends with the call whose connection Ray gave up."""
    for place in PLACES:
        hold_at(hold, place)
    with begin(hosts, world, hold, "away", "--num-rollout", 3) as driver:
        for place in ("pushing", "generating", "training"):
            wait_at(driver, hold, place)
            hosts.cable.is_cut = True
            go_on(hold, place)
            time.sleep(10)
            hosts.cable.heal()
        status = driver.end()
    assert "memory" not in driver.stderr
    if status == 0:
        assert driver.steps() == [1, 2, 3]
    else:
        first = driver.error()[0]
        assert hosts.second.address in first
        assert "the connection to it broke" in first
    leftovers_end(hosts)
