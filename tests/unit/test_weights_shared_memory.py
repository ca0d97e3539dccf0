"""Shared segments: reused while their owner lives, gone when it does not, however it ended."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from concurrent.futures import Future
from pathlib import Path
from typing import Any, cast

import pytest
import torch

from slime.engines.api import EngineError
from slime.engines.fleet import EngineFleet
from slime.engines.wire.buckets import Packing
from slime.engines.wire.shared_memory import Segment, SegmentPool, attach, remove_stale
from slime.errors import UserError
from slime.weights.shared_memory_transport import SharedMemoryTransport

_OWNER = """
import sys
from pathlib import Path
from slime.engines.wire.shared_memory import Segment
segment = Segment(1000, Path(sys.argv[1]))
print(segment.name)
"""


def test_readers_see_what_the_owner_wrote_and_cannot_change_it(tmp_path: Path) -> None:
    segment = Segment(16, tmp_path)
    segment.tensor.copy_(torch.arange(16, dtype=torch.uint8))
    view = attach(segment.name, 16, tmp_path)
    assert view.tolist() == list(range(16))
    segment.tensor[0] = 99
    assert view[0] == 99
    view[1] = 77
    assert segment.tensor[1] == 1
    segment.close()
    assert view[2] == 2  # a mapping outlives the name
    assert list(tmp_path.iterdir()) == []


def test_pool_takes_turns_grows_and_reuses(tmp_path: Path) -> None:
    pool = SegmentPool(2, tmp_path)
    first, second, again = pool.take(10), pool.take(10), pool.take(8)
    assert (first[0], second[0], again[0]) == (0, 1, 0) and again[1] is first[1] is not second[1]
    assert pool.turn == 1
    assert pool.take(100)[1].nbytes == 100 and len(list(tmp_path.iterdir())) == 2
    pool.close()
    assert list(tmp_path.iterdir()) == []


def test_segments_end_with_their_owner(tmp_path: Path) -> None:
    command = [sys.executable, "-c", _OWNER, str(tmp_path)]
    said = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True).stdout
    assert said.startswith("slime-weights-")
    assert list(tmp_path.iterdir()) == []


def test_segments_of_killed_owners_are_removed_and_of_living_ones_are_not(tmp_path: Path) -> None:
    reader, writer = os.pipe()
    owner = os.fork()
    if owner == 0:
        try:
            segment = Segment(1000, tmp_path)
            os.write(writer, segment.name.encode())
            signal.pause()
        finally:
            os._exit(1)
    os.close(writer)
    with open(reader) as pipe:
        name = os.read(pipe.fileno(), 1000).decode()
        try:
            assert remove_stale(tmp_path) == [] and (tmp_path / name).exists()
        finally:
            os.kill(owner, signal.SIGKILL)
            os.waitpid(owner, 0)
    mine = Segment(10, tmp_path)
    assert (tmp_path / name).exists()
    assert remove_stale(tmp_path) == [name]
    assert [path.name for path in tmp_path.iterdir()] == [mine.name]
    mine.close()


def test_names_stay_below_the_directory(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="not a name below"):
        attach("../etc/passwd", 1, tmp_path)
    with pytest.raises(FileNotFoundError):
        attach("slime-weights-none", 1, tmp_path)
    segment = Segment(10, tmp_path)
    with pytest.raises(ValueError, match="has 10 bytes, the request says 11"):
        attach(segment.name, 11, tmp_path)
    segment.close()


def test_no_room_is_said_before_anything_is_written(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"cannot reserve(.|\n)*shm-size"):
        Segment(1 << 60, tmp_path)
    assert list(tmp_path.iterdir()) == []
    with pytest.raises(UserError, match="cannot reserve"):
        Segment(1, tmp_path / "nowhere")


class Fleet:
    """Engines that answer everything with an error, while they have one."""

    error: Exception | None

    def __init__(self, error: Exception) -> None:
        self.error = error

    def start(self, path: str, body: Any, timeout: float) -> Future[list[Any]]:
        answer: Future[list[Any]] = Future()
        if self.error is None:
            answer.set_result([])
        else:
            answer.set_exception(self.error)
        return answer

    def wait(self, answers: Future[list[Any]], timeout: float) -> list[Any]:
        return answers.result(timeout)


@pytest.mark.parametrize(
    "error", [EngineError("http://engine", "refused"), TimeoutError(), ValueError("no JSON")]
)
def test_failed_answers_are_no_failure_of_the_next_push(error: Exception) -> None:
    fleet = Fleet(error)
    transport = SharedMemoryTransport(cast(EngineFleet, fleet), Packing(16, torch.float32))
    tensors = [("a", torch.zeros(4)), ("b", torch.ones(4))]  # a bucket each
    with pytest.raises(type(error)):
        transport.send(tensors, 1, lambda name, tensor: None)
    fleet.error = None
    assert transport.send(tensors, 2, lambda name, tensor: None).num_tensors == 2
    transport.close()
