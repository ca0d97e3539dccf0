"""Lost trainer ranks: the new ones come up while what is under way is generated to its end, where
memory lets them."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from slime.cluster import run_cluster as module
from slime.cluster.rollout_actor import Generating
from slime.cluster.run_cluster import Cluster
from slime.cluster.trainer_group import TrainerStart
from slime.cluster.waiting import NoEngineLeft, StopRequested
from slime.config import make_config
from slime.engines.api import EngineError
from slime.errors import RunFailed
from slime.run import session


class Told(Cluster):
    """What `restart_trainers` does, in order, on parts that only say that they were asked."""

    def __init__(
        self, path: Path, *, shares_memory: bool, half_pushed: bool = False, answers: bool = True
    ) -> None:
        super().__init__(make_config(rollout_batch_size=1, colocate=shares_memory), path)
        self.done: list[str] = []
        self._answers = answers
        self._slots: Any = SimpleNamespace()
        self._gpu_memory: Any = SimpleNamespace(
            is_shared=shares_memory, release_for_launch=lambda: self.done.append("memory")
        )
        self._weights: Any = SimpleNamespace(is_pushing=half_pushed)
        self._engines: Any = SimpleNamespace(
            watch=lambda: None, continue_generation=lambda: self.done.append("go on")
        )
        self._trainers: Any = SimpleNamespace(close=lambda seconds: self.done.append("close"))
        self._rollout: Any = SimpleNamespace(
            give_up=lambda rollout: self.done.append(f"give up {rollout}"),
            forget_newer=lambda rollout, version: self.done.append(
                f"forget what {rollout} has beyond {version}"
            ),
        )
        self._generating = {rollout: Generating(rollout, None) for rollout in (4, 5)}  # type: ignore[arg-type]

    def collect(self, generating: Generating) -> Any:
        assert self._trainers_are_lost, "no engine is waited for that only a push brings back"
        if not self._answers:
            raise NoEngineLeft
        self.done.append(f"collect {generating.rollout_id}")

    def _make_trainers(self, *_: Any) -> Any:
        started = TrainerStart(3, {"source": {}})
        return SimpleNamespace(
            begin_setup=lambda should_stop: self.done.append("set up"),
            agreed_start=lambda found: started,
        )

    def _load_source(self, *_: Any, **__: Any) -> None:
        self.done.append("load")

    def _connect_trainers(self, version: int) -> None:
        self.done.append(f"introduce {version}")


@pytest.fixture(autouse=True)
def no_ray(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "config_for_resume", lambda config: config)
    monkeypatch.setattr(module, "wait_for", lambda *_: [])
    monkeypatch.setattr(module, "remove_stale", lambda: None)


def test_ranks_on_gpus_of_their_own_come_up_beside_what_is_under_way(tmp_path: Path) -> None:
    cluster = Told(tmp_path, shares_memory=False)
    cluster.restart_trainers(7)
    assert cluster.done == ["close", "set up", "collect 4", "collect 5", "load", "introduce 7"]


def test_ranks_that_share_their_gpus_wait_until_the_engines_give_memory_up(tmp_path: Path) -> None:
    cluster = Told(tmp_path, shares_memory=True)
    cluster.restart_trainers(7)
    assert cluster.done == [
        "close",
        "collect 4",
        "collect 5",
        "memory",
        "set up",
        "load",
        "introduce 7",
    ]


def test_after_a_push_that_broke(tmp_path: Path) -> None:
    """Engines go on with what they have, and what is called newer than the last push is forgotten;
    with no engine left, rollouts are given up, and what they had finished before stays."""
    cluster = Told(tmp_path, shares_memory=False, half_pushed=True, answers=False)
    cluster.restart_trainers(7)
    ended = [
        f"{verb} {rollout}{more}"
        for rollout in (4, 5)
        for verb, more in (("give up", ""), ("forget what", " has beyond 7"))
    ]
    assert cluster.done == ["close", "go on", "set up", *ended, "load", "introduce 7"]


# -- a router that dies as the run comes up --------------------------------------------------------


class DyingRouter:
    """It answers after so many tries."""

    def __init__(self, tries: int) -> None:
        self.tries, self.asked = tries, 0
        self.routers = SimpleNamespace(url="http://router", urls={})
        self.keys: dict[str, str] = {}

    def connect(self, url: str, urls: dict[str, str], keys: dict[str, str]) -> None:
        self.asked += 1
        if self.asked < self.tries:
            raise EngineError("http://router", "connection refused")

    @contextmanager
    def explain_failures(self, what: str) -> Iterator[None]:
        try:
            yield
        except EngineError as error:
            raise RunFailed(f"{what}: {error}") from error


@pytest.mark.parametrize(
    ("tolerant", "tries", "works"), [(True, 2, True), (True, 3, False), (False, 2, False)]
)
def test_a_router_that_dies_in_the_launch_is_asked_again_where_it_is_started_again(
    tolerant: bool, tries: int, works: bool
) -> None:
    router: Any = DyingRouter(tries)  # the rollout actor and the engines too
    faults = SimpleNamespace(use_fault_tolerance=tolerant)
    cluster: Any = SimpleNamespace(config=SimpleNamespace(fault_tolerance=faults))
    with nullcontext() if works else pytest.raises(RunFailed, match="connecting to the router"):
        Cluster._connect_router(cluster, router, router)
    assert router.asked == 1 + tolerant


# -- Ray's daemons ---------------------------------------------------------------------------------


@pytest.mark.parametrize("dead", [[], ["raylet"]])
def test_no_trainer_is_started_again_without_ray(
    dead: list[str], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Ray would take the order, and never carry it out."""
    monkeypatch.setattr(session, "dead_daemons", lambda: dead)
    run: Any = SimpleNamespace(
        config=make_config(rollout_batch_size=1, save="checkpoints", max_restarts=2),
        cluster=SimpleNamespace(is_loss_of_trainers=lambda error: True),
        signals=SimpleNamespace(requested=lambda: False),
        _num_restarts=0,
    )
    assert session.Session.may_restart_trainer(run, RunFailed("trainer-0 died")) == (not dead)
    assert ("Ray's raylet has ended" in caplog.text) == bool(dead)


def test_no_trainer_is_started_again_of_a_run_that_is_to_stop(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(session, "dead_daemons", lambda: [])
    run: Any = SimpleNamespace(
        config=make_config(rollout_batch_size=1, save="checkpoints", max_restarts=2),
        cluster=SimpleNamespace(is_loss_of_trainers=lambda error: True),
        signals=SimpleNamespace(requested=lambda: True),
        _num_restarts=0,
    )
    with pytest.raises(StopRequested):
        session.Session.may_restart_trainer(run, RunFailed("trainer-0 died"))
    assert run._num_restarts == 0
