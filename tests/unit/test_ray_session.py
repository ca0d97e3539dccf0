"""What a run says when its own Ray does not come up."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import ray

from slime.cluster import ray_session
from slime.cluster.waiting import DeadlinePassed, StopRequested
from slime.config import make_config
from slime.errors import UserError
from tests.support.processes import ROOT


@pytest.mark.parametrize(
    "error", [Exception("The current node timed out during startup.\nmore"), KeyboardInterrupt()]
)
def test_a_ray_that_does_not_start_is_explained_and_taken_down(
    error: BaseException, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ray raises a bare Exception when a daemon of it is killed while it starts. Ctrl-C stays what
    it is."""
    downs: list[None] = []

    def init(**_: Any) -> None:
        raise error

    monkeypatch.setattr(ray, "init", init)
    monkeypatch.setattr(ray, "is_initialized", lambda: False)
    monkeypatch.setattr(ray, "shutdown", lambda: downs.append(None))
    with pytest.raises(
        type(error) if isinstance(error, KeyboardInterrupt) else UserError
    ) as caught:
        ray_session.start_ray(make_config(num_rollout=1, rollout_batch_size=1, rm_type="random"), 1)
    assert downs == [None]
    if isinstance(caught.value, UserError):
        assert (
            caught.value.why == "The current node timed out during startup."
            and "again" in caught.value.fix
        )


def test_workers_of_a_local_ray_have_the_priority_of_the_driver(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    seen: list[str | None] = []
    variable = "RAY_worker_niceness"
    monkeypatch.delenv(variable, raising=False)
    monkeypatch.setattr(ray, "init", lambda **_: seen.append(os.environ.get(variable)))
    monkeypatch.setattr(ray, "is_initialized", lambda: False)
    assert ray_session.start_ray(
        make_config(num_rollout=1, rollout_batch_size=1, rm_type="random"), 1
    )
    assert seen == ["0"]


@pytest.mark.parametrize(
    ("asked", "status", "error"),
    [(True, None, StopRequested), (False, 1, Exception)],
    ids=["SIGTERM has come", "it has ended"],
)
def test_a_raylet_that_does_not_come_up_is_not_waited_for(
    asked: bool, status: int | None, error: type[Exception], monkeypatch: pytest.MonkeyPatch
) -> None:
    def is_not_there(address: str, node: str) -> None:
        raise RuntimeError("not yet")

    monkeypatch.setattr(ray_session.services, "get_node", is_not_there)
    monkeypatch.setattr(ray_session._Daemon, "raylet", SimpleNamespace(poll=lambda: status))
    with ray_session._waiting_for_raylet(lambda: asked):
        assert ray_session.is_ray_starting()
        with pytest.raises(error, match="starting Ray" if asked else "ended as it started"):
            ray_session.services.get_node("address", "node")
    assert not ray_session.is_ray_starting() and ray_session.services.get_node is is_not_there


def test_the_raylet_is_told_of_reserved_ports_and_of_no_agent_that_serves_metrics(
    tmp_path: Path,
) -> None:
    given = [
        "raylet",
        f"--session_dir={tmp_path}",
        "--node_id=abc",
        "--dashboard_agent_command=python agent.py",
    ]
    with ray_session._waiting_for_raylet(lambda: False):
        command = ray_session._with_idle_dashboard_agent([*given, "--head"])
        ports = {name: reserved.port for name, reserved in ray_session._reserved_ports.items()}
    assert command == [*given[:-1], ray_session._NO_AGENT, "--head"]
    assert {
        path.name.removesuffix("_abc"): int(path.read_text()) for path in tmp_path.iterdir()
    } == ports
    assert len(set(ports.values())) == len(ray_session._AGENT_PORTS) and 52365 not in ports.values()


@pytest.fixture
def silent(monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """The address of a cluster that accepts connections and says nothing."""
    monkeypatch.setattr(ray, "is_initialized", lambda: False)
    with socket.create_server(("127.0.0.1", 0)) as server:
        yield f"127.0.0.1:{server.getsockname()[1]}"


def test_a_cluster_that_does_not_answer_is_named_at_the_deadline(
    silent: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("slime.deadlines.RAY_SESSION_JOIN", 0.3)
    with pytest.raises(UserError, match=f"no Ray cluster answers at {silent}") as caught:
        ray_session.start_ray(make_config(ray_address=silent), 1)
    assert "did not answer within" in caught.value.why and "RAY_ADDRESS" in caught.value.fix


def test_a_signal_is_heard_while_a_cluster_does_not_answer(silent: str) -> None:
    with pytest.raises(StopRequested):
        ray_session.start_ray(make_config(ray_address=silent), 1, should_stop=lambda: True)


@pytest.mark.parametrize(
    ("given", "brings"),
    [
        ({}, True),
        ({"RAY_AUTH_TOKEN": ""}, True),
        ({"RAY_AUTH_MODE": "token"}, True),
        ({"RAY_AUTH_MODE": "disabled"}, False),
        ({"RAY_AUTH_TOKEN": "theirs"}, False),
        ({"RAY_AUTH_TOKEN_PATH": "there"}, False),
        ({"a file": "theirs"}, False),
    ],
)
def test_a_run_brings_a_token_where_none_is(
    given: dict[str, str], brings: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ray asks for one, and would write it into the home folder where there is none."""
    monkeypatch.setenv("HOME", str(tmp_path))
    for name in ("RAY_AUTH_MODE", "RAY_AUTH_TOKEN", "RAY_AUTH_TOKEN_PATH"):
        # so that it is as before afterwards, also where it is not there
        monkeypatch.setenv(name, "")
        monkeypatch.delenv(name)
    if "a file" in given:
        (tmp_path / ".ray").mkdir()
        (tmp_path / ".ray" / "auth_token").write_text(given["a file"])
    else:
        for name, value in given.items():
            monkeypatch.setenv(name, value)
    ray_session._provide_token()
    after = os.environ.get("RAY_AUTH_TOKEN", "")
    assert len(after) == 64 if brings else after == given.get("RAY_AUTH_TOKEN", "")


def test_what_a_local_ray_inherits_is_not_the_drivers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KEPT", "mine")
    monkeypatch.delenv("NEW", raising=False)
    with pytest.raises(KeyError), ray_session._with_environment({"KEPT": "its", "NEW": "its"}):
        assert os.environ["KEPT"] == os.environ["NEW"] == "its"
        raise KeyError
    assert os.environ["KEPT"] == "mine" and "NEW" not in os.environ


_KILLED = """
import os, psutil, ray, signal
from slime.cluster.ray_session import dead_daemons, start_ray
from slime.config import make_config
from tests.support.processes import wait_until
assert dead_daemons() == []
assert start_ray(make_config(num_rollout=1, rollout_batch_size=1, rm_type="random"), 1)
assert dead_daemons() == []
family = {child.pid for child in psutil.Process().children(recursive=True)}
[raylet] = [process for process in psutil.process_iter(["name"]) \
if process.pid in family and process.info["name"] == "raylet"]
raylet.kill()
wait_until(lambda: dead_daemons() == ["raylet"], "its end")
print("seen", flush=True)
os._exit(0)
"""


def test_a_raylet_that_is_killed_is_seen_at_once() -> None:
    command = [sys.executable, "-c", _KILLED]
    ran = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, timeout=120)
    assert ran.stdout.endswith("seen\n"), ran.stderr[-2000:]


_LEFT = """
import os, psutil, ray, select, subprocess, sys
from slime.cluster.ray_session import start_ray
from slime.config import make_config
from tests.support.moments import DAEMON
from tests.support.processes import wait_until

@ray.remote
def leave(file):
    subprocess.run([sys.executable, "-S", "-c", DAEMON, file], check=True)

assert start_ray(make_config(num_rollout=1, rollout_batch_size=1, rm_type="random"), 1)
ray.get(leave.remote(sys.argv[1]))
wait_until(lambda: os.path.exists(sys.argv[1]), "the daemon runs")
family = {child.pid for child in psutil.Process().children(recursive=True)}
ports = {each.laddr.port for process in psutil.process_iter(["net_connections"]) \
if process.pid in family for each in process.info["net_connections"] or () \
if each.status == "LISTEN"}
daemon = os.pidfd_open(int(open(sys.argv[1]).read()))
ray.shutdown()
poller = select.poll()
poller.register(daemon, select.POLLIN)
print(bool(poller.poll(0)), 52365 in ports, psutil.Process().children(), flush=True)
"""


@pytest.mark.full
def test_daemons_of_a_task_are_gone_when_ray_is_shut_down(tmp_path: Path) -> None:
    command = [sys.executable, "-c", _LEFT, str(tmp_path / "daemon")]
    ran = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, timeout=300)
    assert ran.stdout.endswith("True False []\n"), ran.stderr[-2000:]


def test_slots_that_others_hold_are_waited_for_aloud(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    clock = [0.0]

    class Held:
        bundle_specs = ({"CPU": 1},) * 3

        def wait(self, seconds: float) -> bool:
            clock[0] += 30.0
            return False

    monkeypatch.setattr(ray_session, "time", SimpleNamespace(monotonic=lambda: clock[0]))
    with caplog.at_level("INFO"), pytest.raises(DeadlinePassed, match="not reserved within 200 s"):
        ray_session._wait_for(Held(), 200.0, lambda: False)  # type: ignore[arg-type]
    assert [record.args[:2] for record in caplog.records] == [
        (3, seconds) for seconds in (60.0, 120.0, 180.0)
    ]
