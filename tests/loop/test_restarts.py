"""--max-restarts: trainer ranks that are lost start again from the newest checkpoint, and the run
ends as if they had never been."""

from __future__ import annotations

import json
import re
import signal
from pathlib import Path
from typing import Any

import pytest

from slime.cluster.slow_waits import stopped_parts
from slime.cluster.waiting import ActorDied
from tests.support.processes import Driver, StartHeld, World, wait_until, wait_while_running
from tests.support.runs import Run, RunResult

pytestmark = pytest.mark.slow

_DIES = ("--custom-megatron-before-train-step-hook-path", "tests.support.hold.die_once")


@pytest.fixture(scope="module")
def broken(run: Run, deterministic: Any, outputs: Path) -> RunResult:
    """The unbroken run's flags. The trainer dies before the first checkpoint, and again after the
    second one."""
    for rollout_id in (0, 4):
        (outputs / f"die-{rollout_id}").touch()
    flags = [
        "--colocate",
        "--num-rollout",
        6,
        "--save-interval",
        2,
        "--save",
        outputs / "broken-checkpoints",
    ]
    result = run("broken", *deterministic("broken"), *flags, *_DIES, "--max-restarts", 2)
    assert not list(outputs.glob("die-*")), "it died twice"
    return result


def without_versions(rows: dict[int, dict[str, Any]]) -> dict[int, dict[str, Any]]:
    """A restart pushes once more, and what had been generated comes out of the journal."""

    def compared(name: str) -> bool:
        return "version" not in name and name != "rollout/num_restored_groups"

    return {
        step: {name: value for name, value in row.items() if compared(name)}
        for step, row in rows.items()
    }


def test_every_step_is_that_of_the_unbroken_run(broken: RunResult, unbroken: RunResult) -> None:
    """Samples, loss and gradient norm, bit for bit; each logged once."""
    assert [row["step"] for row in broken.rows if "rollout/raw_reward" in row] == [1, 2, 3, 4, 5, 6]
    assert without_versions(broken.steps()) == without_versions(unbroken.steps())
    for rollout_id in range(6):
        assert broken.tokens(rollout_id) == unbroken.tokens(rollout_id)


def test_versions_go_on(broken: RunResult) -> None:
    versions = broken.series("perf/weight_version")
    assert versions == sorted(set(versions)) and versions[-1] == 8 + 1, (
        "6 steps, 1 at the launch, 2 restarts"
    )


@pytest.mark.full
def test_once_too_often_is_an_error(run: Run, deterministic: Any, outputs: Path) -> None:
    (outputs / "die-1").touch()
    with pytest.raises(ActorDied, match=r"trainer-0 \(pid \d+ on [^)]*\) died \(training\)"):
        run(
            "once",
            *deterministic("once"),
            *("--colocate", "--num-rollout", 2, "--save", outputs / "once-ckpt"),
            *_DIES,
        )


@pytest.mark.full
@pytest.mark.parametrize("driver", ["train", "train_async"])
def test_a_rank_that_is_frozen_is_named_and_replaced(
    driver: str, run: Run, deterministic: Any, outputs: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Two ranks wait for each other; nobody hears of the frozen one but by the process group's
    deadline."""
    name = f"frozen-{driver}"
    (outputs / "stop-2").touch()
    flags = [
        "--num-rollout",
        4,
        "--save-interval",
        1,
        "--save",
        outputs / f"{name}-ckpt",
        "--max-restarts",
        1,
    ]
    flags += ["--actor-num-gpus-per-node", 2, "--distributed-timeout-minutes", 0.4]
    result = run(name, *deterministic(name), *flags, *_DIES, driver=driver)
    assert sorted(result.steps()) == [1, 2, 3, 4]
    told = capsys.readouterr().err
    names = (
        r"training: processes that work together lost each other; no answer from trainer-[01] "
        r"\(pid",
        r"pid \d+ \(ray::TrainerActor.*\) has been stopped since [\d:]+, and the run does not go on"
        r".*\(training\)",
    )
    assert re.search("|".join(names), told), "whoever passes the limit first says it"
    assert stopped_parts() == {}, "the frozen one is gone, and with it what it held"


@pytest.mark.full
@pytest.mark.parametrize("loads", [False, True])
def test_a_users_source_goes_back_with_the_trainer(
    run: Run, deterministic: Any, outputs: Path, loads: bool
) -> None:
    """Before the first checkpoint to where it began, afterwards to what it has saved; with and
    without --load."""
    name = f"own-source-restarted-{loads}"
    root = outputs / f"{name}-saved" / "checkpoints"
    root.parent.mkdir()
    for rollout_id in (0, 3):
        (root.parent / f"die-{rollout_id}").touch()
    flags = [
        "--save",
        root,
        *(["--load", root] if loads else []),
        "--data-source-path",
        "tests.support.toy.SumSource",
        "--num-rollout",
        4,
        "--save-interval",
        2,
    ]
    result = run(name, *deterministic(name), *flags, *_DIES, "--max-restarts", 2)
    assert not list(root.parent.glob("die-*")), "it died twice"
    assert [sample.index for k in range(4) for sample in result.samples(k)] == list(range(4 * 16))


# -- asked to stop meanwhile -----------------------------------------------------------------------


def stopped(driver: Driver) -> str:
    """The name of the newest checkpoint of a run that ended as it was asked to."""
    assert driver.end() == 0 and "Traceback" not in driver.stderr, driver.stderr
    assert json.loads((driver.path / "run.json").read_text())["stages"][""]["state"] == "stopped"
    return max(path.name for path in (driver.path / "checkpoints").glob("iter_*"))


@pytest.mark.full
def test_nothing_is_saved_of_ranks_that_stand_at_an_older_checkpoint(
    start_held: StartHeld, hold: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    """SIGTERM while the new trainer has loaded rollout 1 and waits for what is being generated;
    rollout 2 was trained on by the one that died."""
    world = World.create(tmp_path_factory.mktemp("stopped"))
    path = world.outputs / "again"
    path.mkdir(parents=True)
    (hold / "hold-request-4").touch()
    (path / "die-3").touch()
    words = world.resumable(
        "again",
        "--deterministic-rollout",
        "--custom-rm-path",
        "tests.support.hold.reward_and_count",
    )
    words = [word for word in words if word != "--colocate"]
    words += [
        "--no-colocate",
        "--num-rollout",
        "8",
        "--save-interval",
        "2",
        "--max-restarts",
        "2",
        *_DIES,
    ]
    words += ["--custom-generate-function-path", "tests.support.hold.generate"]
    driver = start_held(words, path, "train_async.py")
    log = path / "logs" / "trainer-0.log"
    wait_while_running(driver, lambda: "is started again" in driver.stderr, "the restart")
    wait_while_running(
        driver, lambda: log.read_text().count("iter_0000001") > 0, "the checkpoint is loaded"
    )
    driver.signal(signal.SIGTERM)
    assert stopped(driver) == "iter_0000001"
    assert "stopped, as the trainer was started again" in driver.stderr, driver.stderr


@pytest.mark.full
def test_a_rank_that_dies_of_what_stops_the_run_is_not_started_again(
    start_held: StartHeld, hold: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    world = World.create(tmp_path_factory.mktemp("both"))
    path = world.outputs / "both"
    path.mkdir(parents=True)
    (hold / "hold-2").touch()
    words = world.resumable(
        "both", "--deterministic-rollout", "--custom-rm-path", "tests.support.hold.reward"
    )
    words += ["--num-rollout", "6", "--save-interval", "2", "--max-restarts", "2", *_DIES]
    driver = start_held(words, path, "train.py")
    wait_while_running(driver, (hold / "held-2").exists, "the third rollout")
    (path / "die-2").write_text(str(driver.process.pid))
    (hold / "hold-2").unlink()
    wait_until(lambda: not (path / "die-2").exists(), "the rank dies")
    assert stopped(driver) == "iter_0000001"
    assert "is started again" not in driver.stderr, driver.stderr
