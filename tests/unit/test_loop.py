"""The order of the loop's verbs when trainer ranks are lost: what was dropped is done again, and
not more often."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from slime.loop import train


class Lost(Exception):
    """Of trainer ranks."""


class Session:
    """Four rollouts, saved after each second one; ``dies`` names the moments at which trainers are
    lost, once each."""

    def __init__(self, dies: list[str], restarts: int = 9) -> None:
        self.dies, self.restarts = dies, restarts
        self.start = self.saved = 0
        self.config = SimpleNamespace(sync=SimpleNamespace(async_buffer_size=0))
        self.saving = SimpleNamespace(is_due=lambda rollout_id: rollout_id % 2 == 1)
        self.done: list[str] = []
        self.lacks_evaluation = False

    @property
    def schedule(self) -> Any:
        return SimpleNamespace(
            rollout_ids=range(self.start, 4),
            evaluates_first=self.start == 0,
            pushes=lambda rollout_id: False,
            evaluates=lambda rollout_id: False,
        )

    def _at(self, moment: str) -> None:
        if moment in self.dies:
            self.dies.remove(moment)
            raise Lost(moment)
        self.done.append(moment)

    def evaluate(self, rollout_id: int) -> dict[str, float]:
        self._at("evaluate")
        return {}

    def may_start(self, rollout_id: int) -> bool:
        return True

    def start_generating(self, rollout_id: int) -> int:
        return rollout_id

    def collect(self, generating: int) -> int:
        return generating

    def train(self, batch: int) -> dict[str, float]:
        self._at(f"train {batch}")
        return {}

    def finish_evaluation(self) -> None: ...

    def save(self, rollout_id: int) -> None:
        self.saved = rollout_id + 1

    def log(self, metrics: dict[str, float]) -> None: ...

    def stop_if_asked(self) -> None: ...

    def may_restart_trainer(self, error: Exception) -> bool:
        self.restarts -= isinstance(error, Lost)
        return isinstance(error, Lost) and self.restarts >= 0

    def restart_trainer(self) -> None:
        self._at("begin again")
        self.start = self.saved


@pytest.mark.parametrize(
    ("dies", "expected"),
    [
        ([], "evaluate, train 0, train 1, train 2, train 3"),
        (["train 3"], "evaluate, train 0, train 1, train 2, begin again, train 2, train 3"),
        (
            ["train 1"],
            "evaluate, train 0, begin again, evaluate, train 0, train 1, train 2, train 3",
        ),
        (["evaluate"], "begin again, evaluate, train 0, train 1, train 2, train 3"),
        (["train 2", "begin again"], "evaluate, train 0, train 1, begin again, train 2, train 3"),
    ],
)
def test_what_was_lost_is_done_again(dies: list[str], expected: str) -> None:
    session: Any = Session(dies)
    train(session)
    assert ", ".join(session.done) == expected


def test_the_last_loss_and_other_errors_end_the_run() -> None:
    session: Any = Session(["train 2", "begin again"], restarts=1)
    with pytest.raises(Lost, match="begin again"):
        train(session)
    other: Any = Session([])
    other.save = lambda rollout_id: 1 / 0
    with pytest.raises(ZeroDivisionError):
        train(other)
