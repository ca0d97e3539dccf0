"""A run that ends early while a checkpoint is written behind training: it becomes whole or goes,
and one is named."""

from __future__ import annotations

import signal
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from slime.checkpoints.directory import partial_dir
from slime.checkpoints.load_plan import LoadPlan
from slime.cluster import trainer_group, waiting
from slime.cluster.run_cluster import Cluster
from slime.cluster.trainer_group import Launch
from slime.cluster.waiting import NamedActor
from slime.config import Config, make_config
from slime.errors import RunFailed, UserError
from slime.observe.run_folder import RunFolder
from slime.run import saving
from slime.run import session as module
from slime.run.preflight import warn_if_nothing_is_kept
from slime.run.stopping import StopSignals
from tests.support.checkpoint_dirs import complete

Behaviour = Callable[[Callable[[], bool]], None]
NEWEST = "newest whole checkpoint: {}; "


class Trainers:
    """In the cluster's place: a save goes on behind training, and ``settles`` says what becomes of
    it."""

    has_trainers, has_engines = True, False

    def __init__(self, root: Path, settles: Behaviour) -> None:
        self.root, self.settles = root, settles
        self.asked: list[float] = []

    def launch(self) -> Launch:
        return Launch(0, 0, {}, {})

    def update_weights(self) -> dict[str, float]:
        return {}

    def pop_metrics(self) -> dict[str, float]:
        return {}

    def save(self, rollout_id: int, pushed: Any, metrics: dict[str, float]) -> None:
        (partial_dir(self.root / f"iter_{rollout_id:07d}") / "data.distcp").write_text("half")

    def wait_for_async_save(self, is_saved: Callable[[], bool], seconds: float) -> None:
        self.asked.append(seconds)
        assert not is_saved()
        self.settles(is_saved)

    def finish_saving(self) -> None:
        self.settles(lambda: False)

    def export(self, path: Path) -> None:
        path.mkdir(parents=True)
        for name in ("config.json", "model.safetensors"):
            (path / name).write_text('{"model_type": "llama"}')

    def close(self, *, politely: bool) -> None:
        self.has_trainers = False


Run = Callable[..., Trainers]


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Run:
    """``run(error, settles)``: rollout 0 is saved whole, rollout 1 behind training, then ``error``
    is raised."""

    def start(error: BaseException, settles: Behaviour, **flags: Any) -> Trainers:
        root = tmp_path / "checkpoints"
        trainers = Trainers(root, settles)
        monkeypatch.setattr(module, "Cluster", lambda *_, **__: trainers)
        monkeypatch.setattr(
            module, "preflight", lambda config: LoadPlan(kind="hf", path=root, note="")
        )
        monkeypatch.setattr(module, "check_memory", lambda config: None)
        monkeypatch.setattr(module, "setup_logging", lambda *_, **__: None)
        given = {
            "save": str(root),
            "async_save": True,
            "num_rollout": 4,
            "output_dir": str(tmp_path),
            **flags,
        }
        config = make_config(rollout_batch_size=1, run_name="run", **given)
        with module.open_session(config) as session:
            complete(root, 0)
            session.note_trained(1, {})
            session.save(1)
            raise error
        return trainers

    return start


@pytest.mark.parametrize("folder", ["kept", "other"])
def test_only_a_run_that_saves_in_the_same_place_is_repeated(folder: str, tmp_path: Path) -> None:
    def saving_in(name: str) -> Config:
        place = str(tmp_path / name)
        return make_config(run_name="run", output_dir=str(tmp_path), load=place, save=place)

    assert module._repeats(saving_in("kept")), "nothing is there yet"
    RunFolder.claim(saving_in("kept"))[1].close()
    assert module._repeats(saving_in(folder)) == (folder == "kept")


def test_a_failure_waits_for_the_checkpoint_under_way(run: Run, tmp_path: Path) -> None:
    root = tmp_path / "checkpoints"

    def finishes(is_saved: Callable[[], bool]) -> None:
        complete(root, 1)
        assert is_saved()

    with pytest.raises(UserError) as caught:
        run(UserError("a mistake in the reward function"), finishes)
    assert caught.value.__notes__[0].startswith(NEWEST.format(root / "iter_0000001"))
    assert "details: " in caught.value.__notes__[-1]


@pytest.mark.parametrize(
    "error", [RunFailed("engine-0 was killed (SIGKILL)"), KeyError("x")], ids=["lost", "defect"]
)
def test_what_is_no_mistake_ends_with_the_command_that_explains_it(
    error: Exception, run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A mistake says itself why, and what to do."""
    asked: list[bool] = []
    monkeypatch.setattr("slime.run.session.stacks.ask", lambda pids, wait: asked.append(wait))
    with pytest.raises(type(error)) as caught:
        run(error, lambda is_saved: None)
    assert caught.value.__notes__[-1].endswith(f" explain {tmp_path / 'run'}") and asked == [True]


def times_out(is_saved: Callable[[], bool]) -> None:
    assert not is_saved()


def fails(is_saved: Callable[[], bool]) -> None:
    raise UserError("the disk is full")


@pytest.mark.parametrize("settles", [times_out, fails])
def test_what_is_not_finished_goes_and_the_one_before_is_named(
    settles: Behaviour, run: Run, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    root = tmp_path / "checkpoints"
    with pytest.raises(ZeroDivisionError) as caught:
        run(ZeroDivisionError(), settles)
    assert caught.value.__notes__[0].startswith(NEWEST.format(root / "iter_0000000"))
    assert sorted(path.name for path in root.iterdir()) == [
        ".latest",
        ".lock",
        "iter_0000000",
        "latest_checkpointed_iteration.txt",
    ]
    assert "iter_0000001 was not finished" in caplog.text and ("disk is full" in caplog.text) == (
        settles is fails
    )


@pytest.mark.parametrize("gone", ["the folder", "the tracker"])
def test_checkpoints_out_of_reach_do_not_replace_the_error(
    gone: str, run: Run, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    root = tmp_path / "checkpoints"

    def breaks(is_saved: Callable[[], bool]) -> None:
        if gone == "the folder":  # the file system of the target was unmounted
            root.rename(tmp_path / "elsewhere")
            root.symlink_to("/nowhere/at/all")
        else:
            (root / "latest_checkpointed_iteration.txt").write_text("x")
        assert not is_saved()

    with pytest.raises(ZeroDivisionError) as caught:
        run(ZeroDivisionError(), breaks)
    assert "details: " in "".join(caught.value.__notes__)
    assert ("does not exist" in caplog.text) == (gone == "the folder")


def test_ctrl_c_waits_too_and_a_second_one_does_not(
    run: Run, tmp_path: Path, caplog: pytest.LogCaptureFixture, capsys: pytest.CaptureFixture[str]
) -> None:
    caplog.set_level("INFO")

    def again(is_saved: Callable[[], bool]) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run(KeyboardInterrupt(), again)
    assert "the checkpoint of rollout 1 is given up" in caplog.text
    assert f"checkpoint: {tmp_path / 'checkpoints' / 'iter_0000000'}\n" in capsys.readouterr().err


def test_a_save_in_the_foreground_is_not_waited_for(run: Run, tmp_path: Path) -> None:
    """It ended, well or not, before the failure; here with a rank that died in the middle of it."""

    def never(is_saved: Callable[[], bool]) -> None:
        raise AssertionError

    with pytest.raises(ZeroDivisionError) as caught:
        run(ZeroDivisionError(), never, async_save=False)
    assert "iter_0000000" in caught.value.__notes__[0]
    assert not list((tmp_path / "checkpoints").glob(".iter*"))


@pytest.mark.parametrize(
    ("saved", "flags", "expected"),
    [
        (3, {}, "model"),
        (3, {"save_hf": "{run}/hf/{rollout_id}"}, "hf/3"),
        (3, {"export_model": False}, None),
        (2, {}, None),
    ],
)
def test_a_run_that_was_killed_before_its_model_was_written_makes_up_for_it(
    saved: int,
    flags: dict[str, Any],
    expected: str | None,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """All was trained on, and the last checkpoint written, in a launch that came no further. A
    checkpoint of another rollout than the one that was loaded has other weights. The second time
    the model is there."""
    folder, root = tmp_path / "run", tmp_path / "run" / "checkpoints"
    monkeypatch.setattr(module, "setup_logging", lambda *_, **__: None)
    trainers = Trainers(root, lambda _: None)
    monkeypatch.setattr(module, "Cluster", lambda *_, **__: trainers)
    complete(root, saved)
    given = {
        "save": "{run}/checkpoints",
        "num_rollout": 4,
        "output_dir": str(tmp_path),
        "run_name": "run",
        **flags,
    }
    config = make_config(rollout_batch_size=1, use_tensorboard=False, **given)
    for _ in range(2):
        session = module.Session(config, StopSignals(), resuming=True)
        session.schedule.begin(4, 0)
        session.saving.begin()
        session.saving.finish()
        session.sinks.close()
        session._locks.close()
        assert session.saving.model == (folder / expected if expected else None)
    assert {path.parent for path in folder.rglob("*.safetensors")} == (
        {folder / expected} if expected else set()
    )


@pytest.mark.parametrize("has_room", [True, False])
def test_steps_are_saved_before_a_run_ends_that_cannot_log_them(
    has_room: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: Any
) -> None:
    """The disk of the run folder is full, that of --save may not be."""
    root = tmp_path / "checkpoints"
    monkeypatch.setattr(module, "setup_logging", lambda *_, **__: None)
    trainers = Trainers(root, lambda _: None)
    monkeypatch.setattr(module, "Cluster", lambda *_, **__: trainers)

    def save(rollout_id: int, pushed: Any, metrics: dict[str, float]) -> None:
        if not has_room:
            raise UserError("no room for the checkpoint")
        assert metrics == {"train/loss": 1.0}
        complete(root, rollout_id)

    trainers.save = save  # type: ignore[method-assign]
    given = {"save": str(root), "num_rollout": 9, "output_dir": str(tmp_path), "run_name": "run"}
    config = make_config(rollout_batch_size=1, use_tensorboard=False, **given)
    session = module.Session(config, StopSignals(), resuming=False)
    session.saving.begin()
    session.note_trained(3, {"train/loss": 1.0})

    def full(*_: Any) -> int:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch, pytest.raises(UserError, match="cannot write step 4"):
        patch.setattr("slime.observe.jsonl_sink.os.write", full)
        session.log({"train/loss": 1.0})
    session.close()
    assert (session.saving.newest() is not None) == has_room
    assert ("rollout 3 is lost: no room" in caplog.text) == (not has_room)


def test_the_last_lines_of_two_steps_without_contrast_say_so(
    run: Run, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A warning in the middle of such a run would be too early: it may be chance."""
    flat = {
        "rollout/zero_std/ratio": 1.0,
        "rollout/reward/min": 0.0,
        "rollout/reward/max": 0.0,
        "rollout/num_samples": 4,
    }
    trained = module.Session.note_trained

    def logs(self: module.Session, rollout_id: int, metrics: dict[str, float]) -> None:
        trained(self, rollout_id, metrics)
        self.log(flat)

    monkeypatch.setattr(module.Session, "note_trained", logs)
    with pytest.raises(KeyboardInterrupt):
        run(KeyboardInterrupt(), times_out)
    told = capsys.readouterr().err
    assert (
        "  warning: No step had any contrast: in the only step every group had the same reward"
        in told
    )
    assert told.count("warning: ") == 1 and "\n    try: read responses and labels" in told


# -- what is saved when ----------------------------------------------------------------------------


class Clock:
    """In the place of `time` in the session."""

    def __init__(self) -> None:
        self.now = 0.0

    def monotonic(self) -> float:
        return self.now


@pytest.fixture
def saved(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., list[int]]:
    """``saved(num_rollout, seconds per rollout, **flags)``: the rollouts after which a run
    saves."""
    monkeypatch.setattr(module, "Cluster", lambda *_, **__: Trainers(tmp_path, lambda _: None))
    monkeypatch.setattr(module, "setup_logging", lambda *_, **__: None)
    clock = Clock()
    monkeypatch.setattr(saving, "time", clock)

    def run(num_rollout: int, seconds: float, **flags: Any) -> list[int]:
        given = {
            "num_rollout": num_rollout,
            "output_dir": str(tmp_path),
            "use_tensorboard": False,
            **flags,
        }
        config = make_config(rollout_batch_size=1, **given)
        session = module.Session(config, StopSignals(), resuming=False)
        session.schedule.begin(0, 0)
        found = []
        for rollout_id in range(num_rollout):
            clock.now += seconds
            session.note_trained(rollout_id, {})
            if session.saving.is_due(rollout_id):
                session.save(rollout_id)
                found.append(rollout_id)
        session.sinks.close()
        session._locks.close()
        return found

    return run


@pytest.mark.parametrize(
    ("num_rollout", "seconds", "flags", "expected"),
    [
        (200, 1.0, {"save_min_seconds": 0}, list(range(19, 200, 20))),
        (4, 1.0, {"save_min_seconds": 0}, [0, 1, 2, 3]),
        (25, 1.0, {"save_min_seconds": 0}, [2, 5, 8, 11, 14, 17, 20, 23, 24]),
        (100, 901.0, {}, list(range(1, 100, 2))),
        (100, 601.0, {"save_interval": 40}, [39, 79, 99]),
        (6, 1e5, {"save": None, "save_hf": "{run}/exports/{rollout_id}"}, [5]),
        (6, 1e5, {"save": None}, []),
    ],
)  # fmt: skip
def test_a_tenth_of_the_run_or_half_an_hour(
    num_rollout: int,
    seconds: float,
    flags: dict[str, Any],
    expected: list[int],
    saved: Callable[..., list[int]],
) -> None:
    assert (
        saved(num_rollout, seconds, run_name="saves", **{"save": "{run}/ckpt", **flags}) == expected
    )


def test_the_run_folder_can_be_named_and_few_checkpoints_are_kept() -> None:
    given: dict[str, Any] = {
        "output_dir": "outputs/",
        "run_name": "first",
        "save": "{run}/checkpoints",
    }
    flags = make_config(
        **given, load="{run}/checkpoints", save_hf="{run}/hf/{rollout_id}"
    ).checkpoint
    assert flags.save == flags.load == "outputs/first/checkpoints"
    assert (flags.save_hf, flags.save_retain) == ("outputs/first/hf/{rollout_id}", 2)
    assert make_config(**given, save_interval=5).checkpoint.save_retain is None
    assert make_config(**given, save_retain=7).checkpoint.save_retain == 7
    assert make_config().checkpoint.save_retain is None


@pytest.mark.parametrize(
    ("flags", "warns"),
    [
        ({}, True),
        ({"save": "ckpt"}, False),
        ({"save_hf": "hf"}, False),
        ({"debug_rollout_only": True}, False),
        ({"num_rollout": 0}, False),
    ],
)
def test_a_run_that_keeps_nothing_is_told_so_before_it_starts(
    flags: dict[str, Any], warns: bool, caplog: pytest.LogCaptureFixture
) -> None:
    warn_if_nothing_is_kept(make_config(**{"num_rollout": 2, **flags}))
    told = [line for line in caplog.messages if "nothing of this training will be kept" in line]
    assert len(told) == warns and all("leave --no-save out" in line for line in told)


# -- waiting for ranks that may hang ---------------------------------------------------------------


class _FinishSaving:
    """The method of a rank that never answers."""

    @staticmethod
    def remote() -> str:
        return "finish_saving"


@pytest.fixture
def cluster(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Cluster:
    """Of one such rank."""
    cluster = Cluster(make_config(), tmp_path)
    # no actors: that would need Ray
    trainers = trainer_group.Trainers.__new__(trainer_group.Trainers)
    trainers.actors = {NamedActor("trainer-0"): SimpleNamespace(finish_saving=_FinishSaving)}
    cluster._trainers = trainers

    def wait(refs: list[Any], num_returns: int, timeout: float) -> tuple[list[Any], list[Any]]:
        assert refs == ["finish_saving"] and timeout <= 1
        time.sleep(0.01)
        return [], refs

    for asks in (trainer_group, waiting):
        monkeypatch.setattr(asks, "ray", SimpleNamespace(wait=wait))
    return cluster


def test_a_rank_that_hangs_does_not_keep_a_finished_save_waiting(cluster: Cluster) -> None:
    looks = iter([False, False, True])
    cluster.wait_for_async_save(lambda: next(looks), seconds=60)
    assert next(looks, "all were used") == "all were used"


def test_the_wait_has_a_deadline_and_listens_to_sigterm(cluster: Cluster) -> None:
    cluster.wait_for_async_save(lambda: False, seconds=0.02)
    asked = iter([False, True])
    cluster._should_stop = lambda: next(asked)
    cluster.wait_for_async_save(lambda: False, seconds=60)
    assert next(asked, "all were used") == "all were used"


@pytest.mark.parametrize("ends", [False, True])
def test_a_run_that_goes_on_does_not_forget_that_it_was_asked_to_stop(
    ends: bool, run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    """SIGTERM has come, and a checkpoint is being written: one that ends has taken it up, one whose
    trainer is started again has not."""
    still_asked: list[bool] = []

    def waits_for_the_checkpoint(session: module.Session, error: BaseException) -> None:
        signal.raise_signal(signal.SIGTERM)
        session.saving.wait_for_async_save(session.signals if ends else None)
        still_asked.append(session.signals.requested())

    monkeypatch.setattr(module.Session, "failed", waits_for_the_checkpoint)
    with pytest.raises(KeyError):
        run(KeyError("x"), lambda is_saved: None)
    assert still_asked == [not ends]
