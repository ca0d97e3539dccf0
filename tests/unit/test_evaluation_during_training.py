"""Evaluations beside training: each is of one version of the weights, logged once, under its step,
and not lost."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from slime.cluster.trainer_group import Launch
from slime.cluster.waiting import StopRequested
from slime.config import make_config
from slime.errors import UserError
from slime.files import read_lines
from slime.loop import train_on
from slime.observe.run_data import merge_rows
from slime.run import session as module
from slime.run.stopping import StopSignals
from slime.samples.types import VersionWindow

LAST = 6


class Evaluating:
    """An evaluation that ends when somebody waits for it, or after so many looks."""

    def __init__(self, number: int, looks: int) -> None:
        self.number, self.looks = number, looks

    def ends_within(self, seconds: float) -> bool:
        self.looks -= 1
        return self.looks < 0


class Cluster:
    """In the cluster's place: notes what is done, in order.

    Args:
        looks: at an evaluation until it has ended by itself.
        fails: the evaluation that ends in an error, by its number.
    """

    has_trainers = has_engines = True

    def __init__(self, *, looks: int = 99, fails: int = -1, take_turns: bool = False) -> None:
        self.looks, self.fails, self.is_sequential = looks, fails, take_turns
        self.done: list[str] = []
        self.version = self.begun = 0
        self.evaluating: Evaluating | None = None
        self.after: list[int | None] = []  # the rollouts after which evaluations were begun

    def launch(self) -> Launch:
        return Launch(self.starts_at, 0, {}, {})

    def pop_metrics(self) -> dict[str, float]:
        return {}

    def start_generating(self, rollout_id: int, versions: VersionWindow) -> int:
        return rollout_id

    def collect(self, generating: int) -> Any:
        return SimpleNamespace(
            rollout_id=generating,
            metrics={"rollout/raw_reward": generating / 10},
            versions={},
            warnings=[],
        )

    def train(self, batch: Any) -> dict[str, float]:
        self.done.append(f"train {batch.rollout_id}")
        return {"train/loss": 0.1}

    def evaluate_preferences(self) -> dict[str, float]:
        return {}

    def update_weights(self) -> dict[str, float]:
        assert self.evaluating is None, "its answers would be of two versions"
        self.version += 1
        self.done.append(f"push {self.version}")
        return {"perf/weight_version": self.version}

    def save(self, rollout_id: int, pushed: Any, metrics: Any) -> None:
        self.done.append(f"save {rollout_id}")

    def begin_evaluation(self, rollout_id: int, *, is_first: bool) -> Evaluating:
        assert self.evaluating is None
        self.evaluating = Evaluating(self.begun, self.looks)
        self.begun += 1
        self.done.append(f"evaluate {self.evaluating.number}")
        self.after.append(None if is_first else rollout_id)
        return self.evaluating

    def collect_evaluation(self, evaluating: Evaluating) -> dict[str, float]:
        assert evaluating is self.evaluating
        self.evaluating = None
        self.done.append(f"evaluated {evaluating.number}")
        if evaluating.number == self.fails:
            raise UserError("the judge is gone")
        return {"eval/sums": evaluating.number / 10, "perf/eval_time": 1.0}

    def restart_trainers(self, version: int) -> Any:
        self.done.append("restart")
        return SimpleNamespace(start_rollout_id=self.restarts_at, extra_state={})

    def describe_unresponsive(self) -> str:
        return ""

    def close(self, *, politely: bool) -> None: ...

    restarts_at = starts_at = 0


Make = Callable[..., Any]


@pytest.fixture
def make(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Make]:
    """``make(cluster, **flags)``: a launched session on ``cluster`` that evaluates after every
    second rollout."""
    made = []

    def session(cluster: Cluster, *, resuming: bool = False, **flags: Any) -> module.Session:
        monkeypatch.setattr(module, "Cluster", lambda *_, **__: cluster)
        monkeypatch.setattr(module, "setup_logging", lambda *_, **__: None)
        given = {
            "async_buffer_size": 1,
            "eval_interval": 2,
            "num_rollout": LAST,
            "use_tensorboard": False,
            **flags,
        }
        given |= {
            "eval_prompt_data": ("sums", "sums.jsonl"),
            "output_dir": str(tmp_path),
            "run_name": "run",
        }
        made.append(
            module.Session(
                make_config(rollout_batch_size=1, **given), StopSignals(), resuming=resuming
            )
        )
        made[-1].launch()
        cluster.done.clear()
        return made[-1]

    yield session
    for one in made:
        one.sinks.close()


def rows(session: module.Session) -> list[dict[str, Any]]:
    return read_lines(session.run.metrics_path)


def evaluated(session: module.Session) -> dict[int, float]:
    return {row["step"]: row["eval/sums"] for row in rows(session) if "eval/sums" in row}


#: Step → the number of its evaluation, over ten: before the first rollout and after each second
#: one.
ALL = {0: 0.0, 2: 0.1, 4: 0.2, 6: 0.3}


def test_it_goes_on_beside_the_next_step_until_the_next_push(make: Make) -> None:
    cluster = Cluster()
    session = make(cluster)
    train_on(session)
    assert cluster.done[:10] == [
        *("evaluate 0", "train 0", "evaluated 0", "push 2", "train 1", "push 3"),
        *("evaluate 1", "train 2", "evaluated 1", "push 4"),
    ]
    assert cluster.done[-3:] == ["push 7", "evaluate 3", "evaluated 3"], (
        "nothing is left that the last could be beside"
    )
    assert evaluated(session) == ALL
    by_step = merge_rows(rows(session))
    assert [row["step"] for row in by_step] == list(range(LAST + 1))
    assert ["perf/evaluation_wait_time" in row for row in by_step] == [
        False,
        True,
        False,
        True,
        False,
        True,
        False,
    ]
    assert "perf/evaluate_time" in by_step[-1] and not any(
        "perf/evaluate_time" in row for row in by_step[:-1]
    )
    assert by_step[2]["rollout/raw_reward"] == 0.1 and by_step[2]["eval/sums"] == 0.1


def test_it_is_logged_as_soon_as_it_has_ended(make: Make) -> None:
    """Two pushes lie four rollouts apart."""
    cluster = Cluster(looks=1)
    session = make(cluster, update_weights_interval=4, num_rollout=8, eval_interval=4)
    train_on(session)
    assert [row["step"] for row in rows(session)] == [1, 0, 2, 3, 4, 5, 4, 6, 7, 8]
    assert "eval/sums" in rows(session)[1] and evaluated(session) == {0: 0.0, 4: 0.1, 8: 0.2}


def test_in_lock_step_nothing_is_beside_anything(make: Make) -> None:
    cluster = Cluster(take_turns=True)
    session = make(cluster, async_buffer_size=0)
    train_on(session)
    at = [i for i, what in enumerate(cluster.done) if what.startswith("evaluate ")]
    assert len(at) == 4 and all(cluster.done[i + 1].startswith("evaluated") for i in at)
    assert [row["step"] for row in rows(session)] == list(range(LAST + 1)) and evaluated(
        session
    ) == ALL


def test_a_checkpoint_waits_for_it(make: Make, tmp_path: Path) -> None:
    """Whoever goes on from there does not evaluate again what lies before it."""
    cluster = Cluster()
    session = make(
        cluster,
        update_weights_interval=6,
        eval_interval=6,
        save=str(tmp_path / "c"),
        save_interval=3,
    )
    train_on(session)
    assert cluster.done == [
        *("evaluate 0", "train 0", "train 1", "train 2", "evaluated 0", "save 2"),
        *("train 3", "train 4", "train 5", "save 5", "push 2", "evaluate 1", "evaluated 1"),
    ]


def test_its_failure_ends_the_run(make: Make) -> None:
    session = make(Cluster(fails=1))
    with pytest.raises(UserError, match="the judge is gone"):
        train_on(session)
    assert session.sinks.open_phase == "evaluation_wait" and evaluated(session) == {0: 0.0}


@pytest.mark.parametrize(("looks", "expected"), [(2, ["save 0", "evaluated 0"]), (9, ["save 0"])])
def test_whoever_is_asked_to_stop_saves_first_and_takes_what_is_nearly_there(
    make: Make, tmp_path: Path, looks: int, expected: list[str]
) -> None:
    cluster = Cluster(looks=looks)
    session = make(
        cluster,
        save=str(tmp_path / "c"),
        update_weights_interval=9,
        eval_interval=9,
        no_export_model=True,
    )
    session.log(session.evaluate(0))
    session._last_trained, session._unlogged_metrics = 0, {"rollout/raw_reward": 0.5}
    session.saving.finish = lambda: None
    session.leave()
    assert cluster.done[1:] == expected
    assert evaluated(session) == ({0: 0.0} if looks == 2 else {})


@pytest.mark.parametrize(("restarts_at", "kept"), [(0, {}), (1, {}), (2, {2: 0.0})])
def test_a_trainer_that_begins_again_keeps_what_will_not_be_evaluated_again(
    make: Make, restarts_at: int, kept: dict[int, float]
) -> None:
    """An evaluation of step 2 is under way when the trainer is lost, and goes on from a
    checkpoint."""
    cluster = Cluster()
    session = make(cluster)
    session.note_trained(1, {})
    session.evaluate(1)
    cluster.restarts_at = restarts_at
    session.restart_trainer()
    assert (
        cluster.done == ["evaluate 0", "restart", "evaluated 0", "push 2"]
        and evaluated(session) == kept
    )


def test_a_stop_while_it_is_waited_for_leaves_the_step_to_be_logged(make: Make) -> None:
    cluster = Cluster()
    session = make(cluster)

    def stopped(evaluating: Evaluating) -> dict[str, float]:
        raise StopRequested("evaluating")

    cluster.collect_evaluation = stopped  # type: ignore[method-assign]
    with pytest.raises(StopRequested):
        train_on(session)
    session.leave()
    assert [row["step"] for row in rows(session)] == [1]


@pytest.mark.parametrize("stopped_at", [1, 2, 3])
@pytest.mark.parametrize("take_turns", [True, False])
def test_an_evaluation_that_a_stop_cut_short_is_made_up_for(
    make: Make, stopped_at: int, take_turns: bool
) -> None:
    """The last one, too, with whose step the run is finished; once."""
    step = 2 * stopped_at
    cluster = Cluster(take_turns=take_turns)
    session = make(cluster)
    collect = cluster.collect_evaluation

    def stopped(evaluating: Evaluating) -> dict[str, float]:
        if evaluating.number == stopped_at:
            raise StopRequested("evaluating")
        return collect(evaluating)

    cluster.collect_evaluation = stopped  # type: ignore[method-assign]
    with pytest.raises(StopRequested):
        train_on(session)
    if session.step == step:
        session.log(session._unlogged_metrics)
    session.close()
    assert step not in evaluated(session)
    for is_owed in (True, False):
        again = Cluster(take_turns=take_turns)
        again.starts_at = step
        session = make(again, resuming=True)
        train_on(session)
        session.finish()
        session.close()
        assert (again.after[:1] == [step - 1]) == is_owed
        assert set(evaluated(session)) == set(ALL)
