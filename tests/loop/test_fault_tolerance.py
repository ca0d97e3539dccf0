"""--use-fault-tolerance: engines that are killed or hang in the middle of a run come back; nothing
is lost."""

from __future__ import annotations

import json
import re
import signal
import urllib.request
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest

from slime.engines.keys import header_of
from tests.support.processes import Driver, StartHeld, World, wait_held, wait_while_running
from tests.support.sglang_servers import fake_environment

pytestmark = pytest.mark.full

Start = Callable[..., Driver]
ENGINE = "slime.embedded"
FAST_CHECKS = ("--rollout-health-check-interval", 1, "--rollout-health-check-timeout", 2)


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> World:
    return World.create(tmp_path_factory.mktemp("faults"))


@pytest.fixture
def begin(world: World, start_held: StartHeld) -> Start:
    def start_driver(
        name: str, *flags: object, script: str = "train.py", num_engines: int = 2, **env: str
    ) -> Driver:
        words = world.flags(
            name, "--use-fault-tolerance", "--custom-rm-path", "tests.support.hold.reward", *flags
        )
        words += (
            ["--no-colocate", "--rollout-num-gpus", str(num_engines)]
            if "--turns" not in words
            else []
        )
        words = [word for word in words if word != "--turns"]
        return start_held(words, world.outputs / name, script, **env)

    return start_driver


def is_back(driver: Driver, times: int = 1) -> bool:
    return driver.stderr.count("is back after") >= times


def weight_version(url: str, key: str) -> str:
    """What an engine samples with."""
    body = json.dumps({"input_ids": [1, 2], "sampling_params": {"max_new_tokens": 1}}).encode()
    request = urllib.request.Request(
        f"{url}/generate", body, {"Content-Type": "application/json", **header_of(key)}
    )
    with urllib.request.urlopen(request, timeout=60) as answer:
        return str(json.load(answer)["meta_info"]["weight_version"])


def engines(driver: Driver, word: str = ENGINE) -> list[psutil.Process]:
    """Its living engines, in the order of their start."""
    return sorted(driver.family(word), key=lambda process: process.create_time())


def check_end(driver: Driver, steps: list[int], restarts: int) -> None:
    assert driver.end() == 0, driver.stderr
    assert driver.steps() == steps and "Traceback" not in driver.stderr
    rows = [row for row in driver.rows() if "rollout/raw_reward" in row]
    assert sum(row["rollout/engine_restarts"] for row in rows) == restarts
    assert [row["rollout/num_samples"] for row in rows] == [8] * len(steps)
    driver.leaves_nothing()


BROADCAST = ("--custom-megatron-init-path", "tests.support.toy.engines_look_remote")


@pytest.mark.parametrize(
    "way",
    [
        pytest.param((), id="shared-memory"),
        pytest.param(BROADCAST, id="broadcast"),
        pytest.param(("--lora-rank", 4, "--router-policy", "round_robin"), id="adapters"),
    ],
)
def test_one_of_two_engines_is_killed(begin: Start, hold: Path, way: tuple[str, ...]) -> None:
    """SIGKILL in the middle of a rollout; the next ones are held until it runs again and is pushed
    to."""
    (hold / "hold-0").touch()
    driver = begin(f"killed-{len(way)}", "--num-rollout", 5, *way)
    wait_held(driver, hold, 0)
    victim = engines(driver)[0]
    victim.kill()
    wait_while_running(
        driver,
        lambda: "was killed (SIGKILL); it is started again" in driver.stderr,
        "the death is noticed",
    )
    (hold / "hold-3").touch()
    (hold / "hold-0").unlink()
    wait_held(driver, hold, 3)
    wait_while_running(driver, lambda: "runs again and comes back" in driver.stderr, "it runs")
    assert len(engines(driver)) == 2 and victim not in engines(driver)
    (hold / "hold-4").touch()
    (hold / "hold-3").unlink()
    wait_held(driver, hold, 4)
    found = re.search(r"is back after .* as (http://\S+): it was killed", driver.stderr)
    assert found is not None, driver.stderr
    assert weight_version(found[1], driver.key()) == "5", "of the launch and of four steps"
    (hold / "hold-4").unlink()
    check_end(driver, [1, 2, 3, 4, 5], restarts=1)


def test_an_engine_dies_before_the_router_knows_it(begin: Start) -> None:
    """The launch ends at once and names the engine, not the router that waits for it."""
    driver = begin("unregistered", "--turns")
    [router] = wait_while_running(driver, lambda: driver.family("sglang::router"), "a router")
    router.suspend()
    [engine] = engines(driver)
    engine.kill()
    assert driver.end(30.0) == 1, driver.stderr
    said = f"while the run came up: engine-0 (pid {engine.pid}) was killed (SIGKILL)"
    assert said in driver.error()[0], driver.stderr
    assert "Traceback" not in driver.stderr
    driver.leaves_nothing()


def test_requests_of_an_engine_that_hangs_are_sent_again(begin: Start, hold: Path) -> None:
    """It takes its share of a rollout's requests and answers none."""
    (hold / "hold-request-0").touch()
    routing = (
        "--router-policy",
        "round_robin",
        "--custom-generate-function-path",
        "tests.support.hold.generate",
    )
    driver = begin("share", *FAST_CHECKS, *routing)
    wait_while_running(driver, (hold / "held-request-0").exists, "requests wait")
    engines(driver)[0].send_signal(signal.SIGSTOP)
    (hold / "hold-request-0").unlink()
    assert driver.end() == 0 and driver.steps() == [1, 2], driver.stderr
    assert (
        "gave no sign of life for 2 s and was killed; it is started again; engines that continue "
        "meanwhile: 1" in driver.stderr
    )
    [first, _] = [row for row in driver.rows() if "rollout/raw_reward" in row]
    assert first["rollout/num_samples"] == 8 and first["rollout/retries"] >= 4  # half of them
    driver.leaves_nothing()


@pytest.mark.parametrize(
    "flags", [pytest.param((), id="weights"), pytest.param(("--lora-rank", 4), id="adapters")]
)
def test_an_engine_that_hangs_at_a_push_is_left_out(
    begin: Start, hold: Path, flags: tuple[object, ...]
) -> None:
    """It freezes when it has generated all that it was asked for, and nobody looks at its health
    any more."""
    (hold / "hold-0").touch()
    checks = ("--rollout-health-check-first-wait", 1000, "--rollout-health-check-timeout", 3)
    driver = begin(f"hung-push-{len(flags)}", *checks, *flags)
    wait_held(driver, hold, 0)
    engines(driver)[0].send_signal(signal.SIGSTOP)
    (hold / "hold-0").unlink()
    assert driver.end() == 0, driver.stderr
    assert (
        driver.steps() == [1, 2]
        and "an engine died during a weight push, which is repeated" in driver.stderr
    )
    assert (
        "gave no sign of life for 3 s and was killed; it is started again; engines that continue "
        "meanwhile: 1" in driver.stderr
    )
    driver.leaves_nothing()


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP], ids=["killed", "frozen"])
def test_the_router_is_started_again(begin: Start, hold: Path, number: signal.Signals) -> None:
    """In the middle of a rollout; the requests of the next ones go through another process at the
    same address."""
    (hold / "hold-0").touch()
    driver = begin(f"router-{number.name}", *FAST_CHECKS, "--num-rollout", 3)
    wait_held(driver, hold, 0)
    [router] = driver.family("sglang::router")
    router.send_signal(number)
    wait_while_running(
        driver, lambda: "it was started again within" in driver.stderr, "another router"
    )
    assert [process.pid for process in driver.family("sglang::router")] != [router.pid]
    (hold / "hold-0").unlink()
    check_end(driver, [1, 2, 3], restarts=0)
    assert sum(row.get("rollout/router_restarts", 0) for row in driver.rows()) == 1


@pytest.mark.parametrize(
    ("script", "flags"),
    [
        pytest.param("train.py", (), id="train"),
        pytest.param("train_async.py", (), id="async"),
        pytest.param("train_async.py", ("--lora-rank", 4), id="adapters"),
    ],
)
def test_the_only_engine_hangs_in_the_middle_of_a_rollout(
    begin: Start, hold: Path, script: str, flags: tuple[object, ...]
) -> None:
    """Nothing can be generated without it, so it comes back before the rollout is over."""
    (hold / "hold-1").touch()
    name = f"hung-{script}-{len(flags)}"
    driver = begin(name, "--num-rollout", 3, *FAST_CHECKS, *flags, script=script, num_engines=1)
    wait_held(driver, hold, 1)
    [victim] = engines(driver)
    victim.send_signal(signal.SIGSTOP)
    wait_while_running(driver, lambda: is_back(driver), "it is back")
    assert re.search(
        r"engine-0 \(pid \d+\) gave no sign of life for 2 s and was killed", driver.stderr
    )
    (hold / "hold-1").unlink()
    check_end(driver, [1, 2, 3], restarts=1)
    versions = [
        row["rollout/weight_version/max"] for row in driver.rows() if "rollout/raw_reward" in row
    ]
    # one more than without a death
    assert versions[0] == 1 and versions[-1] == (4 if script == "train.py" else 3)
    assert all(row.get("rollout/staleness/max", 0) in (0, 1) for row in driver.rows())


def test_without_a_trainer(begin: Start, hold: Path) -> None:
    """The weights that it starts with are right: it comes back as soon as it is up."""
    (hold / "hold-0").touch()
    driver = begin("no-trainer", "--debug-rollout-only")
    wait_held(driver, hold, 0)
    engines(driver)[0].kill()
    wait_while_running(driver, lambda: is_back(driver), "it is back")
    (hold / "hold-0").unlink()
    check_end(driver, [1, 2], restarts=1)


def test_an_engine_that_dies_again_and_again_ends_the_run(begin: Start, hold: Path) -> None:
    (hold / "hold-0").touch()
    driver = begin("again", num_engines=1)
    wait_held(driver, hold, 0)
    for times in range(1, 4):
        engines(driver)[0].kill()
        wait_while_running(
            driver, lambda times=times: is_back(driver, times), f"it is back {times} times"
        )
    engines(driver)[0].kill()
    assert driver.end(60) == 1, driver.stderr
    error = driver.error()
    assert re.search(
        r"engine-0 \(pid \d+\) died 4 times without a completed rollout in between.*SIGKILL",
        error[0],
    )
    assert "last lines of its log" in "".join(error) and "--use-fault-tolerance" not in "".join(
        error
    )
    assert "Traceback" not in driver.stderr
    driver.leaves_nothing()


def test_engines_that_share_their_memory_with_the_trainer(begin: Start, hold: Path) -> None:
    """The stand-in of SGLang, which minds what it is asked while its memory is away: the new engine
    starts while the trainer sleeps, gives its memory up, and then does what the other does."""
    calls = hold / "calls.jsonl"
    (hold / "hold-0").touch()
    flags = (
        "--turns", "--rollout-engine", "sglang", "--actor-num-gpus-per-node", 2,
        "--num-gpus-per-node", 8,
    )  # fmt: skip
    flags += ("--rollout-health-check-interval", 1, "--router-health-check-interval-secs", 1)
    driver = begin("turns", *flags, **fake_environment(calls))
    wait_held(driver, hold, 0)
    engines(driver, "slime.engines.sglang.engine_process")[0].kill()
    wait_while_running(
        driver,
        lambda: "was killed (SIGKILL); it is started again" in driver.stderr,
        "the death is noticed",
    )
    (hold / "hold-0").unlink()
    check_end(driver, [1, 2], restarts=1)
    by_port: dict[int, list[str]] = {}
    for call in map(json.loads, calls.read_text().splitlines()):
        if "memory_occupation" in call["path"] or "weight_version" in call:
            tags = " ".join(sorted(call.get("tags") or [f"bucket {call.get('weight_version')}"]))
            words = by_port.setdefault(call["port"], [])
            words += [
                word for word in [f"{call['path'].split('_')[0]} {tags}"] if words[-1:] != [word]
            ]
    assert len(by_port) == 3
    release = "/release cuda_graph kv_cache weights"
    pushes = {
        n: ["/resume weights", f"/update bucket {n}", "/resume cuda_graph kv_cache", release]
        for n in (1, 2, 3)
    }
    survivor = max(by_port.values(), key=len)
    # the last release is for the trainer, which saves the model
    assert survivor == [release, *pushes[1], *pushes[2], *pushes[3]]
    assert [release, *pushes[2], *pushes[3]] in by_port.values()


def test_one_of_two_engines_dies_of_taking_its_memory_back(begin: Start, hold: Path) -> None:
    """At the first push; the other one has its memory by then, and would die of being asked
    again."""
    flags = (
        "--turns", "--rollout-engine", "sglang", "--actor-num-gpus-per-node", 2,
        "--num-gpus-per-node", 8,
    )  # fmt: skip
    env = {
        "FAKE_SGLANG_DIES_AT": "/resume_memory_occupation",
        "FAKE_SGLANG_DIES_ONCE": str(hold / "dead"),
    }
    driver = begin("resume", *flags, **fake_environment(hold / "calls.jsonl", **env))
    check_end(driver, [1, 2], restarts=1)  # it starts while the other one generates
    assert (
        (hold / "dead").exists()
        and is_back(driver)
        and driver.stderr.count("is started again") == 1
    )
