"""The actor of the router, whose process may be killed at any moment of its start."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest

from slime.cluster import engine_actor as module
from slime.cluster.engine_actor import EngineActor
from slime.config import make_config
from slime.engines import keys
from slime.engines.api import EngineError
from slime.engines.keys import Key, RunKeys
from slime.errors import RunFailed


@pytest.fixture
def actor(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest
) -> Iterator[EngineActor]:
    monkeypatch.setattr(module.ray.util, "get_node_ip_address", lambda: "127.0.0.1")
    # it would take this process's log
    monkeypatch.setattr(module, "log_to_file_only", lambda *_: None)
    config = make_config(rollout_batch_size=1, use_fault_tolerance=request.param)
    actor = EngineActor(config, "router", tmp_path, 1, [], RunKeys.new())
    yield actor
    actor.stop()
    keys.set_run_keys(RunKeys(Key(), Key()))


@pytest.mark.parametrize(
    ("actor", "kills", "works"),
    [(True, 1, True), (True, 2, False), (False, 1, False)],
    indirect=["actor"],
)
def test_a_router_that_is_killed_while_it_takes_in_its_engines(
    actor: Any, kills: int, works: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is started again with --use-fault-tolerance, once; else the launch ends with its end, and
    no traceback."""
    killed: list[int] = []

    async def register(url: str, worker_urls: list[str], **_: Any) -> None:
        if len(killed) < kills:
            killed.append(actor._process.pid)
            os.kill(killed[-1], signal.SIGKILL)
            raise EngineError(url, "/workers failed: cannot connect")

    monkeypatch.setattr(module, "register_workers", register)
    said = r"putting engines behind the router: router \(pid \d+\) was killed \(SIGKILL\)"
    with nullcontext() if works else pytest.raises(RunFailed, match=said):
        actor.start_router(["http://127.0.0.1:1"], [])
    assert len(killed) == len(set(killed)) == kills
    assert (actor.server_exit() is None) == works


@pytest.mark.parametrize("actor", [True], indirect=True)
def test_a_router_that_refuses_an_engine_is_not_started_again(
    actor: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def register(url: str, worker_urls: list[str], **_: Any) -> None:
        raise EngineError(url, "it is none")

    monkeypatch.setattr(module, "register_workers", register)
    with pytest.raises(EngineError, match="it is none"):
        actor.start_router(["http://127.0.0.1:1"], [])
    assert actor.server_exit() is None, "it lives"
