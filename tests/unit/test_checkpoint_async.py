"""--async-save: training goes on while a snapshot is written; nothing is visible before it is
whole; errors surface."""

from __future__ import annotations

import errno
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from slime.checkpoints import sharded_store
from slime.checkpoints.directory import read_tracker, saved_iterations
from slime.errors import UserError
from slime.processes.pinned_memory import HostMemory
from tests.support import megatron_jobs as jobs
from tests.support.megatron_jobs import parameters, single
from tests.support.trainer_ranks import make_batch

SECONDS = 30.0


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return jobs.make_model(tmp_path_factory.mktemp("models") / "qwen3")


class Gate:
    """Holds every write of tensors until it is opened."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.reached, self.opened = threading.Event(), threading.Event()
        self.failure: OSError | None = None
        write = sharded_store.FingerprintedFile.write

        def held(file: Any, data: Any) -> int:
            self.reached.set()
            assert self.opened.wait(SECONDS)
            if self.failure is not None:
                raise self.failure
            return write(file, data)

        monkeypatch.setattr(sharded_store.FingerprintedFile, "write", held)


@pytest.fixture
def gate(monkeypatch: pytest.MonkeyPatch) -> Iterator[Gate]:
    gate = Gate(monkeypatch)
    yield gate
    gate.opened.set()


def test_training_goes_on_and_the_checkpoint_is_of_the_moment_of_saving(
    model: Path, tmp_path: Path, gate: Gate
) -> None:
    flags: dict[str, Any] = {"save": str(tmp_path), "async_save": True, "bf16": True}
    with single(model, **flags) as backend:
        jobs.fake_step(backend, 1)
        position = {"position": [1, 2]}
        backend.save(0, position)
        position["position"].append(3)  # a snapshot too
        saved, rates = parameters(backend), backend.learning_rates()
        assert gate.reached.wait(SECONDS)
        jobs.fake_step(backend, 2)
        after_two = parameters(backend)
        jobs.fake_step(backend, 3)
        assert not saved_iterations(tmp_path) and read_tracker(tmp_path) is None
        gate.opened.set()
        backend.finish_saving()
        assert saved_iterations(tmp_path) == [0] and read_tracker(tmp_path) == 0
        backend.close()
    with single(model, **flags, load=str(tmp_path)) as backend:
        assert all(torch.equal(a, b) for a, b in zip(parameters(backend), saved, strict=True))
        assert backend.extra_state == {"position": [1, 2]} and backend.learning_rates() == rates
        jobs.fake_step(backend, 2)  # moments and master weights are of that moment, too
        assert all(torch.equal(a, b) for a, b in zip(parameters(backend), after_two, strict=True))


def test_the_next_save_waits_and_the_memory_is_used_again(
    model: Path, tmp_path: Path, gate: Gate
) -> None:
    with single(model, save=str(tmp_path), async_save=True) as backend:
        backend.save(0)
        first = backend.writer._memory._buffer.data_ptr()
        threading.Timer(0.2, gate.opened.set).start()
        backend.save(1)
        assert 0 in saved_iterations(tmp_path)
        backend.finish_saving()
        assert saved_iterations(tmp_path) == [0, 1] and read_tracker(tmp_path) == 1
        assert backend.writer._memory._buffer.data_ptr() == first
        backend.close()
        assert backend.writer._memory.nbytes == 0


@pytest.mark.parametrize("noticed_by", ["train", "save", "finish_saving"])
def test_an_error_of_the_writer_surfaces_at_the_next_call(
    model: Path, tmp_path: Path, gate: Gate, noticed_by: str
) -> None:
    with single(model, save=str(tmp_path), async_save=True) as backend:
        gate.opened.set()
        backend.save(0)
        backend.finish_saving()
        gate.failure = OSError(errno.ENOSPC, "No space left on device")
        backend.save(1)
        backend.writer._thread.join(SECONDS)
        call = {"train": lambda: backend.train(make_batch()), "save": lambda: backend.save(2)}
        with pytest.raises(
            UserError,
            match=r"iter_0000001(.|\n)*No space left(.|\n)*previous checkpoint is untouched",
        ):
            call.get(noticed_by, backend.finish_saving)()
        assert sorted(entry.name for entry in tmp_path.iterdir()) == [
            ".latest",
            "iter_0000000",
            "latest_checkpointed_iteration.txt",
        ]
        gate.failure = None
        backend.save(3)  # the disk has room again
        backend.close()
    assert saved_iterations(tmp_path) == [0, 3]


def test_host_memory_copies_any_tensor_into_storage_of_its_own() -> None:
    memory = HostMemory()
    whole = torch.arange(12.0).view(3, 4)
    tensors = [
        whole[:, 1:3],
        torch.tensor(3, dtype=torch.int64),
        torch.empty(0, 5),
        whole.bfloat16(),
        whole > 3,
    ]
    copies = memory.copy(tensors)
    for copy, tensor in zip(copies, tensors, strict=True):
        assert torch.equal(copy, tensor) and copy.dtype == tensor.dtype
        assert copy.untyped_storage().nbytes() == tensor.numel() * tensor.element_size()
    whole.zero_()
    assert copies[0].tolist() == [[1, 2], [5, 6], [9, 10]]
    size = memory.nbytes
    memory.copy(tensors[:1])
    assert memory.nbytes == size
