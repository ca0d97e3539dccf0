"""Profiles: the flags, the merge of traces, snapshots of memory."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from slime.cluster.trainer_group import TrainerActor
from slime.config import make_config
from slime.errors import UserError
from slime.observe.torch_profile import TRACE_SUFFIX, TorchProfile, merge_traces, read_trace
from slime.run.profiling import Profiling
from slime.trainer import memory_snapshot
from slime.trainer.memory_snapshot import MemorySnapshot


def test_steps_are_named_by_one_flag_or_by_three() -> None:
    assert list(make_config(profile_steps="3:5").debug.profiled) == [3, 4]
    three = make_config(use_pytorch_profiler=True, profile_step_start=7, profile_step_end=8)
    assert list(three.debug.profiled) == [7]
    assert list(make_config(use_pytorch_profiler=True).debug.profiled) == [10, 11]
    assert list(make_config().debug.profiled) == []


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        ({"profile_steps": "3"}, "names no steps"),
        ({"profile_steps": "5:5"}, "has no steps"),
        ({"profile_steps": "3:5", "profile_step_end": 9}, "say the same"),
        ({"profile_step_end": 9}, "profile-step-end"),
        (
            {"use_pytorch_profiler": True, "profile_step_start": 3, "profile_step_end": 2},
            "is not before",
        ),
        ({"profile_steps": "9:12", "num_rollout": 9}, "no step would be profiled"),
        ({"profile_steps": "3:5", "profile_ranks": [0, 4]}, "--profile-ranks 4 is no trainer rank"),
        ({"profile_steps": "3:5", "profile_target": ["train_actor"]}, "whole steps are profiled"),
        ({"record_memory_history": True, "memory_recorder": "memray"}, "py-spy"),
    ],
)
def test_flags_that_make_no_sense(flags: dict[str, Any], said: str) -> None:
    with pytest.raises(UserError, match=said):
        make_config(**flags)


def test_traces_of_several_processes_have_one_clock_and_numbers_of_their_own(
    tmp_path: Path,
) -> None:
    torch_like = {
        "baseTimeNanoseconds": 1_000_000_000_000,
        "traceEvents": [
            {"ph": "M", "name": "process_name", "pid": 7, "ts": 0, "args": {"name": "python"}},
            {"ph": "X", "name": "mm", "pid": 7, "tid": 1, "ts": 50.5, "dur": 2.0},
            {"ph": "s", "name": "ac2g", "id": 3, "pid": 7, "tid": 1, "ts": 51.0},
            {"ph": "X", "name": "span", "pid": "Spans", "tid": 1, "ts": 50.0, "dur": 9.0},
        ],
    }
    ours = {
        "traceEvents": [
            {"ph": "M", "name": "process_name", "pid": 7, "ts": 0, "args": {"name": "driver"}},
            {"ph": "X", "name": "train", "pid": 7, "tid": 1, "ts": 1_000_000_040, "dur": 30},
        ]
    }
    packed = tmp_path / f"a{TRACE_SUFFIX}"
    packed.write_bytes(gzip.compress(json.dumps(torch_like).encode()))
    plain = tmp_path / "b.json"
    plain.write_text(json.dumps(ours))
    target = tmp_path / "page.json.gz"
    count = merge_traces({"trainer rank 0": packed, "rollout 3": plain}, target)
    merged = read_trace(target)
    events = merged["traceEvents"]
    assert count == len(events) == 7  # and a name for "Spans"
    times = {e["name"]: e["ts"] for e in events if e["ph"] in "Xs"}
    assert times == {"train": 0.0, "span": 10.0, "mm": 10.5, "ac2g": 11.0}
    assert merged["baseTimeNanoseconds"] == 1_000_000_040_000
    names = {e["pid"]: e["args"]["name"] for e in events if e["ph"] == "M"}
    assert sorted(names.values()) == [
        "rollout 3: driver",
        "trainer rank 0: Spans",
        "trainer rank 0: python",
    ]
    assert {e["pid"] for e in events} == set(names)
    assert [e["id"] for e in events if "id" in e] == ["0:3"]


def test_torch_writes_what_the_merge_reads(tmp_path: Path) -> None:
    profile = TorchProfile(tmp_path / "deep" / f"one{TRACE_SUFFIX}")
    torch.ones(8, 8) @ torch.ones(8, 8)
    trace = read_trace(profile.stop())
    assert any(event["name"] == "aten::mm" for event in trace["traceEvents"])
    assert trace["baseTimeNanoseconds"] > 0


class RecordingCluster:
    """Stands for a cluster; notes what it is asked for."""

    def __init__(self) -> None:
        self.asked: list[object] = []

    def start_profile(self, folder: Path) -> None:
        self.asked.append(folder.name)
        folder.mkdir(parents=True)

    def stop_profile(self) -> None:
        self.asked.append("stop")


@pytest.mark.parametrize(
    ("first", "length", "asked"),
    [
        (0, 9, ["steps-3-4", "stop"]),
        (4, 9, ["steps-4-4", "stop"]),  # a resume within the window
        (0, 4, ["steps-3-4", "stop"]),  # the run is over before the window
        (0, 3, []),
        (6, 9, []),
    ],
)
def test_profilers_run_in_the_window(
    tmp_path: Path, first: int, length: int, asked: list[str]
) -> None:
    cluster = RecordingCluster()
    run: Any = SimpleNamespace(path=tmp_path, trace=tmp_path / "trace")
    profiling = Profiling(make_config(profile_steps="3:5"), run, cluster)  # type: ignore[arg-type]
    profiling.step_begins(first)
    for step in range(first + 1, length + 1):
        profiling.step_begins(step, is_over=step >= length)
    assert cluster.asked == asked


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("rollout_000000.json", b"{"),
        (f"profile/steps-0-0/trainer-rank-0{TRACE_SUFFIX}", gzip.compress(b"{}")[:-9]),
        (f"profile/steps-0-0/trainer-rank-0{TRACE_SUFFIX}", b""),
    ],
)
def test_a_page_that_cannot_be_written_does_not_end_the_run(
    name: str, content: bytes, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    broken = tmp_path / name
    run: Any = SimpleNamespace(path=tmp_path, trace=tmp_path)
    profiling = Profiling(
        make_config(profile_steps="0:1"),
        run,
        RecordingCluster(),  # type: ignore[arg-type]
    )
    profiling.step_begins(0)
    broken.write_bytes(content)
    profiling.step_begins(1)
    assert "could not be merged" in caplog.text


@pytest.mark.parametrize("error", [OSError(28, "No space left on device"), RuntimeError("Kineto")])
def test_a_rank_that_cannot_write_its_profile_goes_on(
    error: Exception, caplog: pytest.LogCaptureFixture
) -> None:
    def fails() -> None:
        raise error

    rank: Any = SimpleNamespace(rank=3, _profile=SimpleNamespace(stop=fails))
    TrainerActor.stop_profile(rank)
    TrainerActor.stop_profile(rank)  # nothing is left to be written
    assert caplog.text.count("rank 3 has no profile") == 1


@pytest.fixture
def recorded(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """What torch is asked for, on a host that says it has a GPU."""
    asked: list[Any] = []
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(
        torch.cuda.memory, "_record_memory_history", lambda **given: asked.append(given)
    )
    monkeypatch.setattr(
        torch.cuda.memory, "_dump_snapshot", lambda path: asked.append(Path(path).name)
    )
    monkeypatch.setattr(
        torch._C, "_cuda_attach_out_of_memory_observer", asked.append, raising=False
    )
    return asked


def test_a_snapshot_is_written_after_some_steps_and_when_memory_runs_out(
    tmp_path: Path, recorded: list[Any]
) -> None:
    config = make_config(
        record_memory_history=True, memory_snapshot_num_steps=2, memory_snapshot_dir=str(tmp_path)
    )
    snapshot = MemorySnapshot(config, 3)
    started, observer = recorded
    assert started == {"max_entries": memory_snapshot._ENTRIES}
    snapshot.step_ended()
    observer(0, 1, 2, 3)
    assert recorded[2:] == ["out_of_memory_rank3.pickle"]
    snapshot.step_ended()
    snapshot.close()
    assert recorded[3:] == ["memory_snapshot_rank3.pickle", {"enabled": None}]


def test_without_a_gpu_nothing_is_recorded(caplog: pytest.LogCaptureFixture) -> None:
    snapshot = MemorySnapshot(make_config(record_memory_history=True), 0)
    snapshot.step_ended()
    snapshot.close()
    assert "has no GPU" in caplog.text
