"""Engines that somebody else has started: they join a running run, generate with its weights, leave
or die."""

from __future__ import annotations

import json
import re
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from slime.cli.engines import main as engines_command
from slime.engines.keys import header_of
from slime.errors import UserError
from slime.processes.host import free_port
from tests.support.external_engine import ITS_KEY, ExternalEngine, external_engine
from tests.support.processes import Driver, StartHeld, World, start, wait_held, wait_while_running

Start = Callable[..., Driver]
#: The external engine passes for one on another host.
BROADCAST = ("--custom-megatron-init-path", "tests.support.toy.engines_look_remote")
HELD = ("--custom-rm-path", "tests.support.hold.reward", "--router-policy", "round_robin")


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> World:
    return World.create(tmp_path_factory.mktemp("external"))


@pytest.fixture
def external(world: World, tmp_path: Path) -> Iterator[ExternalEngine]:
    with external_engine(world.inputs / "model", tmp_path / "external.log") as engine:
        yield engine


@pytest.fixture
def begin(world: World, start_held: StartHeld) -> Start:
    def start_driver(name: str, *flags: object) -> Driver:
        words = world.flags(name, *HELD, "--no-colocate", *flags)
        return start_held(words, world.outputs / name, **ITS_KEY)

    return start_driver


def check_end(driver: Driver, steps: list[int]) -> None:
    assert driver.end() == 0, driver.stderr
    assert driver.steps() == steps and "Traceback" not in driver.stderr
    rows = [row for row in driver.rows() if "rollout/raw_reward" in row]
    assert [row["rollout/num_samples"] for row in rows] == [8] * len(steps)
    assert (
        [row["rollout/weight_version/min"] for row in rows]
        == steps
        == [row["rollout/weight_version/max"] for row in rows]
    ), "nobody has generated with old weights"
    driver.leaves_nothing()


def test_one_joins_and_leaves(
    begin: Start, hold: Path, external: ExternalEngine, capsys: pytest.CaptureFixture[str]
) -> None:
    (hold / "hold-0").touch()
    (hold / "hold-1").touch()
    driver = begin("joins", "--num-rollout", 3)
    run = str(driver.path)

    def said(*words: str) -> str:
        engines_command([*words])
        return capsys.readouterr().out

    wait_held(driver, hold, 0)
    assert "gets weights with the next push, then requests" in said("add", run, external.address)
    listed = said(run).splitlines()
    assert re.fullmatch(r"engine-0 +serving +0 +http://127.0.0.1:\d+", listed[1])
    assert listed[2].split() == ["external", "joining", "0", external.url]
    (hold / "hold-0").unlink()
    wait_held(driver, hold, 1)
    assert said(run).splitlines()[2].split() == ["external", "serving", "0", external.url]
    assert f"{external.url} has left" in said("remove", run, external.address)
    assert len(said(run).splitlines()) == 2
    (hold / "hold-1").unlink()
    check_end(driver, [1, 2, 3])
    tokens = external.end()
    assert 4 <= tokens <= 4 * 4 + 1, (
        "half of the rollout's eight samples, of four tokens at most, were its own"
    )


def weight_version(url: str) -> str:
    """What an engine samples with."""
    body = json.dumps({"input_ids": [1, 2], "sampling_params": {"max_new_tokens": 1}}).encode()
    request = urllib.request.Request(
        f"{url}/generate",
        body,
        {"Content-Type": "application/json", **header_of(*ITS_KEY.values())},
    )
    with urllib.request.urlopen(request, timeout=60) as answer:
        return str(json.load(answer)["meta_info"]["weight_version"])


@pytest.mark.full
@pytest.mark.parametrize(
    "way", [pytest.param((), id="shared-memory"), pytest.param(BROADCAST, id="broadcast")]
)
def test_one_is_killed_and_another_takes_its_place(
    begin: Start,
    world: World,
    hold: Path,
    external: ExternalEngine,
    tmp_path: Path,
    way: tuple[str, ...],
) -> None:
    """There from the launch on, beside one of the run's own; killed in the middle of a rollout."""
    for number in range(3):
        (hold / f"hold-{number}").touch()
    flags = (
        "--rollout-external-engine-addrs",
        external.address,
        "--rollout-num-gpus",
        1,
        "--use-fault-tolerance",
    )
    driver = begin(f"killed-{len(way)}", "--num-rollout", 4, *flags, *way)
    wait_held(driver, hold, 0)
    assert weight_version(external.url) == "1"
    external.process.kill()
    wait_while_running(driver, lambda: "engines left: 1" in driver.stderr, "the death is noticed")
    assert f"the external engine {external.url} no longer answers" in driver.stderr
    (hold / "hold-0").unlink()
    wait_held(driver, hold, 1)
    with external_engine(world.inputs / "model", tmp_path / "second.log") as second:
        engines_command(["add", str(driver.path), second.address])
        (hold / "hold-1").unlink()
        wait_held(driver, hold, 2)
        wait_while_running(
            driver, lambda: f"{second.url} serves after" in driver.stderr, "it serves"
        )
        assert weight_version(second.url) == "3", "of the launch and of two steps"
        (hold / "hold-2").unlink()
        check_end(driver, [1, 2, 3, 4])
        assert second.end() > 4


@pytest.mark.full
def test_instead_of_the_runs_own(begin: Start, hold: Path, external: ExternalEngine) -> None:
    """None is started; without --use-fault-tolerance its death ends the run with one message."""
    (hold / "hold-1").touch()
    driver = begin("instead", "--rollout-external-engine-addrs", external.address)
    wait_held(driver, hold, 1)
    assert not driver.family("slime.embedded") and weight_version(external.url) == "2"
    external.process.kill()
    assert driver.end() == 1
    error = driver.error()
    assert f"the external engine {external.url} no longer answers" in error[0]
    assert "--use-fault-tolerance" in "".join(error) and "Traceback" not in driver.stderr
    driver.leaves_nothing()


@pytest.mark.full
def test_the_runs_own_leaves_for_it(begin: Start, hold: Path, external: ExternalEngine) -> None:
    (hold / "hold-0").touch()
    (hold / "hold-1").touch()
    driver = begin("own-leaves", "--num-rollout", 3)
    wait_held(driver, hold, 0)
    engines_command(["add", str(driver.path), external.address])
    with pytest.raises(UserError, match="is the last engine that serves"):
        engines_command(["remove", str(driver.path), "engine-0"])
    (hold / "hold-0").unlink()
    wait_held(driver, hold, 1)
    engines_command(["remove", str(driver.path), "engine-0"])
    assert not driver.family("slime.embedded")
    (hold / "hold-1").unlink()
    check_end(driver, [1, 2, 3])


def test_a_launch_with_an_address_where_nobody_answers(world: World) -> None:
    """Said before anything is started."""
    port = free_port()
    with start(
        world.flags("nobody", "--rollout-external-engine-addrs", f"127.0.0.1:{port}"),
        world.outputs / "n",
    ) as run:
        assert run.end() == 2 and f"no engine answers at http://127.0.0.1:{port}" in run.error()[0]
        assert not (world.outputs / "nobody").exists()
