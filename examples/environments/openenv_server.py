"""An environment of OpenEnv: it asks for a letter, twice, and rewards it. python openenv_server.py
PORT"""

from __future__ import annotations

import random
import sys
from typing import Any

import uvicorn
from openenv.core.env_server import (
    Action,
    ConcurrencyConfig,
    Environment,
    Observation,
    State,
    create_fastapi_app,
)

STEPS = 2


class Say(Action):
    text: str


class Asked(Observation):
    text: str = ""


class Letters(Environment):
    SUPPORTS_CONCURRENT_SESSIONS = True

    def __init__(self) -> None:
        super().__init__()
        self._state = State(step_count=0)
        self._rng = random.Random()
        self._letter = ""

    def reset(self, seed: int | None = None, episode_id: str | None = None, **_: Any) -> Asked:
        self._rng = random.Random(seed)
        self._state = State(episode_id=episode_id, step_count=0)
        return self._ask(None)

    def step(self, action: Say, timeout_s: float | None = None, **_: Any) -> Asked:  # type: ignore[override]
        self._state.step_count += 1
        return self._ask(0.5 * (action.text == self._letter))

    def _ask(self, reward: float | None) -> Asked:
        self._letter = self._rng.choice("wxyz")
        return Asked(
            text=f"say {self._letter}", reward=reward, done=self._state.step_count == STEPS
        )

    @property
    def state(self) -> State:
        return self._state


if __name__ == "__main__":
    most = ConcurrencyConfig(max_concurrent_envs=256)
    app = create_fastapi_app(Letters, Say, Asked, concurrency_config=most)
    uvicorn.run(app, host="127.0.0.1", port=int(sys.argv[1]), log_level="warning")
