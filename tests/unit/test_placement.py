"""Placement formulas, ports and server processes; nothing here starts Ray."""

from __future__ import annotations

import os
import random
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import MagicMock

import psutil
import pytest
from hypothesis import given
from hypothesis import strategies as st

from slime.cluster import rank_group, trainer_group
from slime.cluster.placement import GpuSlot, GpuSlots
from slime.cluster.rank_group import threads_per_process
from slime.cluster.server_process import ServerDied, ServerProcess
from slime.cluster.trainer_group import Trainers, TrainerStart
from slime.cluster.waiting import ActorDied, NamedActor
from slime.config import make_config
from slime.engines.launch import LaunchSpec
from slime.errors import UserError
from slime.memory.plan import MemoryPlan, summary
from slime.placement import PlacementPlan
from slime.processes.host import reserve_port
from slime.run.preflight import check_slots
from slime.samples.batch import TrainLayout
from tests.support.megatron_jobs import make_model
from tests.support.processes import is_running, wait_until


def plan(**flags: object) -> PlacementPlan:
    base = {
        "hf_checkpoint": "model",
        "prompt_data": "data.jsonl",
        "rollout_batch_size": 8,
        "num_rollout": 1,
    }
    return PlacementPlan.of(make_config(**{**base, **flags}))


@given(
    nodes=st.integers(1, 4),
    per_node=st.integers(1, 8),
    engines=st.integers(1, 8),
    size=st.integers(1, 4),
    share=st.booleans(),
)
def test_formulas_of_the_faq(
    nodes: int, per_node: int, engines: int, size: int, share: bool
) -> None:
    train, rollout = nodes * per_node, engines * size
    got = plan(
        actor_num_nodes=nodes,
        actor_num_gpus_per_node=per_node,
        rollout_num_gpus=rollout,
        rollout_num_gpus_per_engine=size,
        colocate=share,
        rollout_batch_size=train * 8,
    )
    assert got.total == (max(train, rollout) if share else train + rollout)
    assert got.rollout_offset == (0 if share else train)
    assert got.num_engines == engines
    assert str(got.total) in got.formula


def test_sft_and_train_only_need_no_engines() -> None:
    assert plan(loss_type="sft_loss").total == plan().num_train == 1
    assert plan(debug_train_only=True).num_engines == 0
    assert plan(debug_rollout_only=True).num_train == 0


@pytest.mark.parametrize("address", [None, "local"])
def test_a_ray_of_its_own_is_not_asked_for_more_than_the_host_carries(
    address: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SLIME_NUM_GPUS", "0")
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    with pytest.raises(UserError, match="this run needs 4001 process slots"):
        check_slots(make_config(ray_address=address, actor_num_gpus_per_node=4000))


def only_port(monkeypatch: pytest.MonkeyPatch, port: int) -> None:
    """`reserve_port` tries no other one."""
    monkeypatch.setattr(random.SystemRandom, "sample", lambda self, population, k: [port])


def test_a_reserved_port_is_not_given_twice(monkeypatch: pytest.MonkeyPatch) -> None:
    first = reserve_port("127.0.0.1")
    only_port(monkeypatch, first.port)
    with pytest.raises(UserError, match="no free port"):
        reserve_port("127.0.0.1")
    first.release()
    again = reserve_port("127.0.0.1")
    assert again.port == first.port
    again.release()


def test_programs_with_one_seed_draw_ports_of_their_own() -> None:
    """Hypothesis seeds the global generator, and so do users: it must not choose the port."""
    before = random.getstate()
    reserve_port("127.0.0.1").release()
    assert random.getstate() == before


def test_a_port_in_use_is_passed_over(monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        only_port(monkeypatch, taken.getsockname()[1])
        with pytest.raises(UserError, match="no free port"):
            reserve_port("127.0.0.1")


def test_ranks_that_found_different_checkpoints_are_refused() -> None:
    group = Trainers.__new__(Trainers)  # no actors: that would need Ray
    with pytest.raises(UserError, match="different rollouts: 0, 6"):
        group.agreed_start([TrainerStart(6), TrainerStart(0), TrainerStart(6)])
    assert (
        group.agreed_start([TrainerStart(6, reports=False), TrainerStart(6)]).start_rollout_id == 6
    )
    assert group._reporting_rank == 1


class FakeCritics:
    """Of one rank, without an actor."""

    def __init__(self) -> None:
        self.actors = {NamedActor("critic-0"): rank_that_answers("critic")}
        self.loaded: list[object] = []

    def load(self, plan: object, starts: Sequence[TrainerStart]) -> TrainLayout:
        self.loaded.append(plan)
        return starts[0].layout


def rank_that_answers(name: str) -> SimpleNamespace:
    return SimpleNamespace(failed_step=SimpleNamespace(remote=lambda: f"failed step of {name}"))


def two_groups() -> tuple[Trainers, FakeCritics]:
    group = Trainers.__new__(Trainers)
    critics = FakeCritics()
    group.actors = {NamedActor("trainer-0"): rank_that_answers("trainer")}
    group._critic = critics  # type: ignore[assignment]
    return group, critics


def test_the_critic_loads_what_belongs_to_the_policys_checkpoint() -> None:
    group, critics = two_groups()
    wide = TrainLayout(data_parallel_size=3)
    of_policy = TrainerStart(6, layout=TrainLayout(2), plan="plan")  # type: ignore[arg-type]
    start = group.agreed_start([of_policy, TrainerStart(0, layout=wide)])
    assert start.start_rollout_id == 6 and critics.loaded == ["plan"]
    assert group.layout == TrainLayout(2, critic=wide)
    assert group.names == {"trainer-0", "critic-0"}


@pytest.mark.parametrize("fails", ["trainer", "critic"])
def test_who_failed_tells_while_the_others_train(
    fails: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    group, _ = two_groups()
    monkeypatch.setattr(
        trainer_group,
        "all_answered",
        lambda asked: set(asked.values()) == {f"failed step of {fails}"},
    )
    fake = SimpleNamespace(get=lambda refs: refs, wait=lambda refs, **_: ([], refs))
    monkeypatch.setattr(trainer_group, "ray", fake)
    monkeypatch.setattr(trainer_group, "raise_failed", lambda asked, what: None)
    assert group.failed_step() == [f"failed step of {fails}"]
    fake.get = lambda refs: [None for _ in refs]
    monkeypatch.setattr(trainer_group.deadlines, "TRAINER_GROUP_QUICK_CALL", 0.01)
    with pytest.raises(UserError, match="no rank has returned its failed step"):
        group.failed_step()


def critic_is_gone(asked: Mapping[NamedActor, object], what: str) -> None:
    if any(worker.name == "critic-0" for worker in asked):
        raise ActorDied("critic-0 has died")


def test_a_rank_that_is_gone_does_not_hide_what_the_others_tell(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    group, _ = two_groups()
    monkeypatch.setattr(trainer_group, "all_answered", lambda asked: True)
    monkeypatch.setattr(trainer_group, "raise_failed", critic_is_gone)
    monkeypatch.setattr(trainer_group, "ray", SimpleNamespace(get=lambda refs: refs))
    assert group.failed_step() == ["failed step of trainer"]
    group.actors = {}
    with pytest.raises(UserError, match="no rank has returned its failed step"):
        group.failed_step()


@pytest.mark.parametrize("is_gone", [True, False])
@pytest.mark.parametrize("is_written", [True, False])
def test_nobody_waits_for_a_part_that_the_critic_will_not_write(
    is_gone: bool, is_written: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One of its ranks is gone, or all have answered, as their save has failed before."""
    group, _ = two_groups()
    for actor in group._everyone.values():
        actor.finish_saving = SimpleNamespace(remote=lambda: "finish_saving")
    group.config = make_config(hf_checkpoint=str(tmp_path), save=str(tmp_path))
    group._saving = 3
    if is_written:
        (tmp_path / ".critic" / "iter_0000003").mkdir(parents=True)
    monkeypatch.setattr(trainer_group, "all_answered", lambda asked: len(asked) == 1)
    monkeypatch.setattr(
        trainer_group, "raise_failed", critic_is_gone if is_gone else lambda asked, what: None
    )
    wait = SimpleNamespace(wait=lambda refs, **_: ([], refs))
    monkeypatch.setattr(trainer_group, "ray", wait)
    monkeypatch.setattr(trainer_group.deadlines, "TRAINER_GROUP_CRITIC_PART", 0.01)
    end = time.monotonic() + 0.1
    told = "critic-0 has died" if is_gone else "part of the checkpoint was not written"
    if not is_written:
        with pytest.raises(UserError, match=told):
            group.wait_for_async_save(lambda: False)
    elif is_gone:  # the policy goes on without it
        with pytest.raises(UserError, match=told):
            group.wait_for_async_save(lambda: time.monotonic() > end)
        assert time.monotonic() > end
    else:
        group.wait_for_async_save(lambda: time.monotonic() > end)


def test_threads_share_the_cores() -> None:
    cores = len(os.sched_getaffinity(0))
    assert threads_per_process(1, take_turns=True) == cores
    assert threads_per_process(cores * 2, take_turns=True) == 1
    assert threads_per_process(1, take_turns=False) <= cores


def server(tmp_path: Path, body: str, port: int, timeout: float = 20.0) -> ServerProcess:
    spec = LaunchSpec([sys.executable, "-c", body], {}, "/", timeout)
    return ServerProcess("server", spec, f"http://127.0.0.1:{port}", tmp_path / "server.log")


def test_server_process_starts_and_stops_with_its_children(tmp_path: Path) -> None:
    port = reserve_port("127.0.0.1")
    child_file = tmp_path / "child"
    body = (
        "import subprocess, http.server\n"
        f"child = subprocess.Popen(['sleep', '600']); open({str(child_file)!r}, "
        "'w').write(str(child.pid))\n"
        f"http.server.HTTPServer(('127.0.0.1', {port.port}), "
        "http.server.SimpleHTTPRequestHandler).serve_forever()\n"
    )
    process = server(tmp_path, body, port.port)
    process.start()
    process.wait_ready()
    child = psutil.Process(int(child_file.read_text()))
    assert process.is_alive()
    process.stop()
    assert not process.is_alive()
    wait_until(lambda: not is_running(child), "the server's child ends with it")
    port.release()


PROXIES = ("http_proxy", "HTTP_PROXY", "all_proxy", "ALL_PROXY")


def test_no_proxy_stands_between_our_own_processes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Neither for the poll of a server that starts, nor for what its own clients ask of the run's
    hosts."""
    with socket.socket() as dead:
        dead.bind(("127.0.0.1", 0))  # and never listens
        for name in PROXIES:
            monkeypatch.setenv(name, f"http://127.0.0.1:{dead.getsockname()[1]}")
        monkeypatch.setenv("no_proxy", "intranet")
        monkeypatch.delenv("NO_PROXY", raising=False)
        port = reserve_port("127.0.0.1")
        said = tmp_path / "said"
        body = (
            "import http.server, os, urllib.request\nfrom http.server import "
            "SimpleHTTPRequestHandler as Handler\n"
            "past = [host for host in ('intranet', '127.0.0.1', '10.0.0.7') if "
            "urllib.request.proxy_bypass(host)]\n"
            f"open({str(said)!r}, 'w').write(' '.join(past) + ' ' + os.environ['NO_PROXY'])\n"
            f"http.server.HTTPServer(('127.0.0.1', {port.port}), Handler).serve_forever()\n"
        )
        spec = LaunchSpec([sys.executable, "-c", body], {}, "/", 20.0)
        process = ServerProcess(
            "server",
            spec,
            f"http://127.0.0.1:{port.port}",
            tmp_path / "server.log",
            hosts=["10.0.0.7"],
        )
        process.start()
        try:
            process.wait_ready()
        finally:
            process.stop()
            port.release()
    assert said.read_text() == "intranet 127.0.0.1 10.0.0.7 intranet,localhost,127.0.0.1,10.0.0.7"


def test_a_server_that_dies_shows_its_last_words(tmp_path: Path) -> None:
    process = server(tmp_path, "raise SystemExit('no such model')", 1)
    process.start()
    with pytest.raises(ServerDied, match="no such model") as died:
        process.wait_ready()
    assert not died.value.is_port_clash


def test_a_server_that_never_answers_is_killed_at_the_deadline(tmp_path: Path) -> None:
    process = server(tmp_path, "import time; time.sleep(600)", 1, timeout=0.5)
    process.start()
    with pytest.raises(ServerDied, match="not ready within"):
        process.wait_ready()
    assert not process.is_alive()


def test_a_server_dies_when_its_owner_is_killed(tmp_path: Path) -> None:
    pid_file = tmp_path / "pid"
    owner = subprocess.Popen(
        [
            sys.executable,
            "-c",
            f"""
import sys, time
from pathlib import Path
from slime.cluster.server_process import ServerProcess
from slime.engines.launch import LaunchSpec
process = ServerProcess("s", LaunchSpec(["sleep", "600"]), "http://127.0.0.1:1", \
Path({str(tmp_path / "log")!r}))
process.start()
Path({str(pid_file)!r}).write_text(str(process.pid))
time.sleep(600)
""",
        ]
    )
    wait_until(lambda: pid_file.exists() and pid_file.read_text(), "the server is started")
    served = Path(f"/proc/{pid_file.read_text()}")
    assert served.exists()
    owner.send_signal(signal.SIGKILL)
    owner.wait()
    wait_until(lambda: not served.exists(), "the server dies with its owner")


def test_supervised_samples_can_be_looked_at_without_a_trainer(tmp_path: Path) -> None:
    flags: dict[str, Any] = {
        "loss_type": "sft_loss",
        "n_samples_per_prompt": 1,
        "debug_rollout_only": True,
    }
    plan = PlacementPlan.of(make_config(**flags, actor_num_gpus_per_node=8))
    assert (plan.num_train, plan.num_engines, plan.total) == (0, 0, 1)
    evaluates = PlacementPlan.of(
        make_config(**flags, eval_prompt_data=["a", "a.jsonl"], rollout_num_gpus=2)
    )
    assert (evaluates.num_train, evaluates.num_engines, evaluates.total) == (0, 2, 2), (
        "the model as it is"
    )
    memory = MemoryPlan.of(
        make_config(**flags, hf_checkpoint=str(make_model(tmp_path / "m")), gpu_memory_gb=80)
    )
    assert memory.fits and not memory.phases and summary(memory)


def test_each_rank_sees_its_own_gpu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever Ray was told about the variable; a critic's ranks are behind the policy's."""
    started: list[dict[str, str]] = []

    def start(*args: Any) -> MagicMock:
        started.append(args[-1])
        return MagicMock()

    remote = MagicMock()
    remote.options.return_value.remote = start
    monkeypatch.setattr(rank_group, "ray", MagicMock(remote=lambda actor: remote))
    monkeypatch.setattr(rank_group, "wait_for", lambda *args: [("127.0.0.1", 1)])
    places = [GpuSlot(i, "10.0.0.1", "node", f"GPU-{i}") for i in range(4)]
    slots = GpuSlots(MagicMock(), places, on_gpu=True)
    group = rank_group.RankGroup(
        trainer_group.CriticTrainerActor, make_config(), slots, [2, 3], tmp_path, 1, shares=False
    )
    group.begin_setup(lambda: False)
    assert [own["CUDA_VISIBLE_DEVICES"] for own in started] == ["GPU-2", "GPU-3"]
