"""Who is waited for is named with its process; answers, failures and deadlines. No Ray is
started."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
from ray.exceptions import (
    ActorUnavailableError,
    OutOfMemoryError,
    OwnerDiedError,
    RayActorError,
    RayTaskError,
)

from slime import deadlines
from slime.cluster import waiting
from slime.cluster.waiting import (
    ActorDied,
    ConnectionBroken,
    DeadlinePassed,
    NamedActor,
    Process,
    StopRequested,
    Watch,
    raise_failed,
    wait_for,
)
from slime.errors import UserError

NEVER = "never"


class Dead:
    """A reference to the answer of an actor that is gone."""


@pytest.fixture(autouse=True)
def references(monkeypatch: pytest.MonkeyPatch) -> None:
    """A reference is its value; `NEVER` does not come, an exception is raised."""

    def wait(
        refs: list[Any], num_returns: int = 1, timeout: float = 0.0
    ) -> tuple[list[Any], list[Any]]:
        assert timeout <= deadlines.WAITING_POLL or num_returns > 1
        done = [ref for ref in refs if ref is not NEVER][:num_returns]
        return done, [ref for ref in refs if ref not in done]

    def get(ref: Any) -> Any:
        if isinstance(ref, Dead):
            raise RayActorError
        if isinstance(ref, Exception):
            raise ref
        return ref

    monkeypatch.setattr(waiting, "ray", SimpleNamespace(wait=wait, get=get))
    monkeypatch.setattr("slime.deadlines.WAITING_CAUSE", 0.0)


HERE = Process(4711, "10.0.0.3")


def worker(name: str, process: Any = HERE) -> NamedActor:
    return NamedActor(name, process)


def test_who_does_not_answer_is_named_with_the_pid_to_dump() -> None:
    asked: Any = {worker("trainer-0"): "done", worker("trainer-1", Process(12, "10.0.0.4")): NEVER}
    with pytest.raises(DeadlinePassed) as failed:
        wait_for(asked, "training", 0.0)
    assert "training: no answer within 0 s from" in failed.value.what
    assert "trainer-1 (pid 12 on 10.0.0.4)" in failed.value.what
    with pytest.raises(DeadlinePassed) as failed:
        wait_for({worker("trainer-1", Process(12, "10.0.0.4")): NEVER}, "training", 0.0)  # type: ignore[dict-item]
    assert "py-spy dump --pid 12, on 10.0.0.4," in failed.value.fix


def test_who_is_stopped_is_named_at_a_deadline(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever is waited for may wait for it in turn: the rollout actor for its router."""
    monkeypatch.setattr(waiting, "stopped_parts", lambda: {4800: "pid 4800 (sglang::router)"})
    with pytest.raises(DeadlinePassed) as failed:
        wait_for({worker("rollout"): NEVER}, "connecting to the router", 0.0)  # type: ignore[dict-item]
    assert failed.value.why == "pid 4800 (sglang::router) is stopped (SIGSTOP) and does not answer"


def test_a_process_that_never_said_where_it_is_has_a_name_only() -> None:
    for process in (None, NEVER, Dead()):
        assert str(worker("engine-0", process)) == "engine-0"
    with pytest.raises(DeadlinePassed, match=r"from engine-0, waited for since") as failed:
        wait_for({worker("engine-0", NEVER): NEVER}, "starting", 0.0)  # type: ignore[dict-item]
    assert "<its pid>" in failed.value.fix


def test_who_died_is_named_with_its_process_and_the_others_are_not_waited_for() -> None:
    asked: Any = {worker("trainer-0"): Dead(), worker("trainer-1"): NEVER}
    with pytest.raises(ActorDied, match=r"trainer-0 \(pid 4711 on 10.0.0.3\) died \(training\)"):
        wait_for(asked, "training", 60.0)
    with pytest.raises(ActorDied, match="trainer-0"):
        raise_failed(asked, "training")


def test_a_lost_host_is_named_and_no_lack_of_memory_is_guessed() -> None:
    said = (
        "The actor died because its node has died. Node Id: f843\n\tthe actor's node was "
        "terminated unexpectedly: health check failed due to missing too many heartbeats\n"
        "\tThe actor never ran - it was cancelled before it started running."
    )
    asked: Any = {worker("trainer-1", Process(12, "10.0.0.4")): RayActorError(error_msg=said)}
    with pytest.raises(ActorDied) as died:
        wait_for(asked, "training", 60.0)
    expected = "host 10.0.0.4 is lost, and trainer-1 (pid 12 on 10.0.0.4) with it (training)"
    assert died.value.what == expected
    assert "missing too many heartbeats. The network" in died.value.why
    assert "memory" not in died.value.why + died.value.fix
    assert died.value.names == ("trainer-1",)


def test_a_connection_that_broke_ends_a_call_and_not_a_watch() -> None:
    broken: Any = ActorUnavailableError("RPC error: Connection reset by peer", b"0" * 16)
    with pytest.raises(ActorDied, match=r"the connection to it broke \(training\)") as failed:
        wait_for({worker("trainer-1"): broken}, "training", 60.0)
    assert "Connection reset by peer" in failed.value.why
    heard = []
    answers = iter([broken, "alive", NEVER])
    questions: Any = {worker("trainer-1"): lambda: next(answers)}
    watch = Watch(questions, lambda name, answer: heard.append(answer))
    for _ in range(3):
        watch.poll()
    assert heard == ["alive"]


@pytest.mark.parametrize(("gpus", "words"), [(4, "--async-save"), (0, "--max-tokens-per-gpu")])
def test_a_full_host_is_told_with_what_lowers_its_use(
    gpus: int, words: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Micro-batches are in host memory only where there is no GPU."""
    monkeypatch.setattr(waiting, "num_gpus", lambda: gpus)
    for error in (OutOfMemoryError("Task was killed"), Dead()):
        with pytest.raises(ActorDied, match="trainer-0") as died:
            wait_for({worker("trainer-0"): error}, "training", 60.0)  # type: ignore[dict-item]
        assert words in died.value.fix
        assert ("--max-tokens-per-gpu" in died.value.fix) is (gpus == 0)


def test_samples_that_died_with_the_rollout_actor_are_a_message() -> None:
    """Ray's own words for it are a traceback; nor is it the trainer that was lost."""
    gone = OwnerDiedError("00ff", None, "")
    for error in (gone, RayTaskError("train", "Traceback …", gone)):
        with pytest.raises(
            ActorDied, match=r"trainer-0 .* lacks what it was to work on \(training\)"
        ) as died:
            wait_for({worker("trainer-0"): error}, "training", 60.0)
        assert died.value.names == () and "rollout actor" in died.value.why


@pytest.mark.parametrize(
    ("error", "happened", "remedy"),
    [
        ("NCCL error: unhandled cuda error, NCCL version 2.28", "a GPU failed", "CUDA_LAUNCH"),
        ("NCCL error: remote process exited", "lost each other", "network"),
    ],
)
def test_a_gpu_that_fails_under_nccl_is_no_lost_peer(
    error: str, happened: str, remedy: str
) -> None:
    with pytest.raises(ConnectionBroken, match=happened) as broken:
        wait_for({worker("trainer-0"): RuntimeError(error)}, "training", 60.0)  # type: ignore[dict-item]
    assert remedy in broken.value.fix


def test_a_mistake_of_the_user_explains_what_another_saw_first() -> None:
    asked: Any = {
        worker("trainer-0"): RuntimeError("connection closed"),
        worker("trainer-1"): UserError("no such file"),
    }
    with pytest.raises(UserError, match="no such file"):
        wait_for(asked, "training", 60.0)


def test_answers_come_in_order_and_a_stop_ends_the_wait() -> None:
    asked: Any = {worker("a"): 1, worker("b"): 2, worker("c"): 3}
    assert wait_for(asked, "asking", 60.0) == [1, 2, 3]
    with pytest.raises(StopRequested, match="asking"):
        wait_for(asked, "asking", 60.0, should_stop=lambda: True)


def test_a_watch_asks_again_only_when_it_was_answered() -> None:
    answers, asked, heard = {"a": "fine", "b": NEVER}, [], []

    def question(name: str) -> Callable[[], Any]:
        return lambda: asked.append(name) or answers[name]  # type: ignore[func-returns-value]

    watch = Watch(
        {worker(name): question(name) for name in answers},
        lambda name, answer: heard.append((name, answer)),
    )
    for _ in range(3):
        watch.poll()
    assert asked == ["a", "b", "a", "a"] and heard == [("a", "fine")] * 2
