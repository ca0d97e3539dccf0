"""What was trained is there afterwards, however a run ends, and in the networks and accounts that
people have."""

from __future__ import annotations

import json
import os
import signal
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.support.forks import run_fork
from tests.support.processes import (
    ROOT,
    Driver,
    StartHeld,
    World,
    start,
    wait_held,
    wait_while_running,
)

pytestmark = pytest.mark.slow

#: Nobody listens there, as behind a proxy that knows nothing of our hosts.
PROXIES = {
    spelling: "http://127.0.0.1:9"
    for name in ("http_proxy", "https_proxy", "all_proxy")
    for spelling in (name, name.upper())
}


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> World:
    return World.create(tmp_path_factory.mktemp("first-hour"))


@pytest.fixture(scope="module")
def kept(world: World) -> Iterator[Driver]:
    """A run to its end with --save alone, behind a proxy that no part of it may use."""
    path = world.outputs / "kept"
    flags = ["--save-min-seconds", "0", "--custom-rm-path", "tests.support.hold.ask_the_router"]
    with pytest.MonkeyPatch.context() as patch:
        for name in ("no_proxy", "NO_PROXY"):
            patch.delenv(name, raising=False)
        driver = start(world.flags("kept", *flags), path, **PROXIES)
    with driver:
        assert driver.end() == 0, driver.stderr
        yield driver


def state_of(driver: Driver) -> str:
    return str(json.loads((driver.path / "run.json").read_text())["stages"][""]["state"])


def check_stopped(driver: Driver, status: int) -> None:
    assert driver.end() == status, driver.stderr
    driver.leaves_nothing(30)
    assert state_of(driver) == "stopped" and (driver.path / "report.html").exists()
    assert f"  report: {driver.path / 'report.html'}" in driver.stderr.splitlines()
    assert "Traceback" not in driver.stderr and "***" not in driver.stderr


# -- what is kept ----------------------------------------------------------------------------------


def test_save_alone_saves_on_the_way_and_leaves_a_model(kept: Driver) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    assert state_of(kept) == "finished" and kept.steps() == [1, 2]
    assert "nothing of this training will be kept" not in kept.stderr
    assert f"after every rollout, in {kept.path}/checkpoints; the newest 2 are kept" in kept.stderr
    assert {"iter_0000000", "iter_0000001"} <= {
        path.name for path in (kept.path / "checkpoints").iterdir()
    }
    model, tokenizer = (
        make.from_pretrained(kept.path / "model") for make in (AutoModelForCausalLM, AutoTokenizer)
    )
    prompt = tokenizer("1+1=", return_tensors="pt")
    assert (
        model.generate(**prompt, max_new_tokens=2, do_sample=False).shape[1]
        > prompt["input_ids"].shape[1]
    )


def test_the_last_lines_name_the_model_the_report_and_what_is_next(kept: Driver) -> None:
    ended, model, checkpoint, flat, vary, report, following = kept.stderr.splitlines()[-7:]
    # every reward is 1
    assert flat.startswith("  warning: No step had any contrast: in all 2 steps ")
    assert vary.startswith("    try: ")
    assert ended == "finished, 2 of 2 steps"
    assert model == f"  model: {kept.path / 'model'}"
    assert checkpoint == f"  checkpoint: {kept.path / 'checkpoints' / 'iter_0000001'}"
    assert (
        report == f"  report: {kept.path / 'report.html'}" and (kept.path / "report.html").exists()
    )
    assert following.startswith("  next: ") and following.endswith(f" chat {kept.path}")


def test_users_code_reaches_the_router_past_the_proxy(kept: Driver) -> None:
    assert [row["rollout/raw_reward"] for row in kept.rows() if "rollout/raw_reward" in row] == [
        1.0,
        1.0,
    ]


# -- signals ---------------------------------------------------------------------------------------


@pytest.fixture
def begin(world: World, start_held: StartHeld) -> Callable[..., Driver]:
    """``begin(name, *flags)``: a driver whose rewards obey ``hold``."""

    def start_driver(name: str, *flags: object) -> Driver:
        words = world.flags(name, "--custom-rm-path", "tests.support.hold.reward", *flags)
        return start_held(words, world.outputs / name)

    return start_driver


def test_sigterm_for_the_group_while_ray_starts(begin: Callable[..., Driver]) -> None:
    driver = begin("ray-starts")
    wait_while_running(driver, (driver.path / "run.json").exists, "its folder")
    wait_while_running(driver, lambda: driver.family("gcs_server"), "Ray")
    driver.signal(signal.SIGTERM, group=True)
    driver.signal(signal.SIGTERM)
    check_stopped(driver, 0)


@pytest.mark.full
def test_ctrl_c_while_ray_starts(begin: Callable[..., Driver]) -> None:
    driver = begin("ray-starts-ctrl-c")
    wait_while_running(driver, lambda: driver.family("gcs_server"), "Ray")
    driver.signal(signal.SIGINT, group=True)
    check_stopped(driver, 130)


# SIGTERM and Ctrl-C are tried every day by tests/loop/test_process_end.py
@pytest.mark.parametrize(
    ("number", "status"),
    [
        pytest.param(signal.SIGINT, 130, id="ctrl-c", marks=pytest.mark.full),
    ],
)
def test_a_terminal_that_closes_and_one_ctrl_c_save_what_was_trained(
    number: signal.Signals, status: int, begin: Callable[..., Driver], hold: Path
) -> None:
    (hold / "hold-1").touch()
    driver = begin(f"saved-{status}", "--save", "{run}/checkpoints", "--save-interval", 2)
    wait_held(driver, hold, 1)
    driver.signal(number, group=True)
    check_stopped(driver, status)
    assert (driver.path / "checkpoints" / "iter_0000000").is_dir() and (
        driver.path / "model"
    ).is_dir()
    assert f" resume {driver.path}\n" in driver.stderr


@pytest.mark.full
def test_sigterm_when_ray_is_dead_already(begin: Callable[..., Driver], hold: Path) -> None:
    """Ray would wait a minute for its daemon and then end the driver in the middle of its end."""
    (hold / "hold-1").touch()
    driver = begin("without-ray", "--save", "{run}/checkpoints", "--save-interval", 2)
    wait_held(driver, hold, 1)
    driver.kill("gcs_server")
    driver.signal(signal.SIGTERM, group=True)
    check_stopped(driver, 0)
    assert (driver.path / "checkpoints" / "iter_0000000").is_dir()


# -- refused before anything starts ----------------------------------------------------------------


def test_wandb_without_a_key_says_what_to_do(world: World, tmp_path: Path) -> None:
    pytest.importorskip("wandb", reason="the wandb extra is not installed")
    environment = {
        name: value for name, value in os.environ.items() if not name.startswith(("WANDB", "NETRC"))
    }
    environment |= {"WANDB_CONFIG_DIR": str(tmp_path), "NETRC": str(tmp_path / "netrc")}
    flags = world.flags("wandb", "--use-wandb", "--log-level", "ERROR")
    done = run_fork(
        [sys.executable, str(ROOT / "train.py"), *flags], environment | {"SLIME_DEBUG": "0"}
    )
    said = done.stderr.decode()
    error = said[said.index("error: ") :].splitlines()
    assert done.returncode == 2 and "Traceback" not in said
    assert len(error) == 3 and "no API key" in error[0] and "--wandb-mode offline" in error[2]
    assert not (world.outputs / "wandb").exists()
