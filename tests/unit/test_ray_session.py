"""What a run says when its own Ray does not come up."""

from __future__ import annotations

import os
from pathlib import Path
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


@pytest.mark.parametrize("given", ["nothing", "a mode", "a token", "a file"])
def test_a_run_leaves_no_token_behind(given: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ray asks for one, and writes it into the home folder where there is none."""
    monkeypatch.setenv("HOME", str(tmp_path))
    for name in ("RAY_AUTH_MODE", "RAY_AUTH_TOKEN", "RAY_AUTH_TOKEN_PATH"):
        monkeypatch.delenv(name, raising=False)
    if given == "a file":
        (tmp_path / ".ray").mkdir()
        (tmp_path / ".ray" / "auth_token").write_text("theirs")
    elif given != "nothing":
        monkeypatch.setenv("RAY_AUTH_MODE" if given == "a mode" else "RAY_AUTH_TOKEN", "disabled")
    before = os.environ.get("RAY_AUTH_TOKEN")
    ray_session._bring_a_token()
    after = os.environ.get("RAY_AUTH_TOKEN")
    assert len(after or "") == 64 if given == "nothing" else after == before
