"""What processes hold of the host's memory, and how engines tell."""

from __future__ import annotations

import mmap
import os
import subprocess
import sys
from types import SimpleNamespace
from typing import Any

import pytest
import ray

from slime.cluster import engines as engines_module
from slime.cluster.engines import EngineHostMemory
from slime.processes.footprint import Footprint, of_this_host, own_bytes

MB = 1_000_000
HOLD = (
    "import sys; held = bytearray(b'x') * 80_000_000; print(len(held), flush=True); "
    "sys.stdin.read()"
)


def test_a_family_is_counted_without_what_it_shares() -> None:
    before = own_bytes(os.getpid())
    assert of_this_host()["perf/driver_memory_gb"] == pytest.approx(before / 1e9, abs=0.05)
    with mmap.mmap(-1, 80 * MB) as shared:
        shared.write(b"x" * len(shared))
        assert own_bytes(os.getpid()) < before + 60 * MB, "pages that others may map"
    with subprocess.Popen(
        [sys.executable, "-c", HOLD], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as child:
        assert child.stdout is not None and child.stdin is not None
        child.stdout.readline()
        assert 80 * MB < own_bytes(child.pid) < 200 * MB
        footprint = Footprint()
        both = footprint.gigabytes(os.getpid())
        assert both * 1000 * MB > own_bytes(os.getpid()) + 70 * MB
        child.stdin.close()
        child.wait()
        assert footprint.gigabytes(os.getpid()) < both - 0.07 and own_bytes(child.pid) == 0


def test_engines_tell_at_the_next_step_and_nobody_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    answers: dict[str, float | Exception] = {}
    asked: list[str] = []

    class Handle:
        def __init__(self, name: str) -> None:
            self.name = name

        def memory(self) -> str:
            asked.append(self.name)
            return self.name

    handles: Any = [Handle("a"), Handle("b")]

    def get(name: str) -> float:
        answer = answers.pop(name)
        if isinstance(answer, Exception):
            raise answer
        return answer

    fake = SimpleNamespace(
        wait=lambda refs, timeout: (refs, []) if refs[0] in answers else ([], refs),
        get=get,
        exceptions=ray.exceptions,
    )
    monkeypatch.setattr(engines_module, "ray", fake)
    memory = EngineHostMemory(handles)
    assert memory.metrics() == {} and asked == ["a", "b"]
    assert memory.metrics() == {} and asked == ["a", "b"], (
        "a question that is open is not asked again"
    )
    answers |= {"a": 2.0, "b": 3.0}
    assert memory.metrics() == {"perf/engine_memory_gb": 3.0} and asked == ["a", "b", "a", "b"]
    answers |= {"b": ray.exceptions.RayActorError()}
    assert memory.metrics() == {"perf/engine_memory_gb": 2.0}, "of the one that is left"
    answers |= {"a": 0.0}
    assert memory.metrics() == {}, "its server is down"
