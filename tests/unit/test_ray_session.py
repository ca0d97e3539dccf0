"""What a run says when its own Ray does not come up."""

from __future__ import annotations

from typing import Any

import pytest
import ray

from slime.cluster import ray_session
from slime.config import make_config
from slime.errors import UserError


@pytest.mark.parametrize("error", [Exception("The current node timed out during startup.\nmore"), KeyboardInterrupt()])
def test_a_ray_that_does_not_start_is_explained_and_taken_down(
    error: BaseException, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ray raises a bare Exception when a daemon of it is killed while it starts. Ctrl-C stays what it is."""
    downs: list[None] = []

    def init(**_: Any) -> None:
        raise error

    monkeypatch.setattr(ray, "init", init)
    monkeypatch.setattr(ray, "is_initialized", lambda: False)
    monkeypatch.setattr(ray, "shutdown", lambda: downs.append(None))
    monkeypatch.setattr(ray_session, "start_reaper", lambda command: None)
    with pytest.raises(type(error) if isinstance(error, KeyboardInterrupt) else UserError) as caught:
        ray_session.start_ray(make_config(num_rollout=1, rollout_batch_size=1, rm_type="random"), 1)
    assert downs == [None]
    if isinstance(caught.value, UserError):
        assert caught.value.why == "The current node timed out during startup." and "again" in caught.value.fix
