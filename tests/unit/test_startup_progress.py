"""A start that takes long says who is late, and not too often."""

from __future__ import annotations

import logging
import os
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest

from slime.cluster.waiting import NamedActor, Process, StartupProgress
from slime.processes.host import own_addresses


def test_who_is_late_is_named_with_the_last_line_of_its_log(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "engine-0.log").write_text("Load weight begin\nCapturing graphs\n\n")
    (tmp_path / "engine-1.log").write_text("")
    now, finished = [0.0], {"rollout"}
    coming_up: Any = {
        NamedActor(name): name for name in ("engine-0", "engine-1", "engine-2", "rollout")
    }
    news = StartupProgress(
        coming_up, tmp_path, clock=lambda: now[0], done=lambda ref: str(ref) in finished
    )
    said = []
    with caplog.at_level(logging.INFO, logger="slime"):
        for second in range(400):
            now[0] = float(second)
            if second == 150:
                finished |= {"engine-1", "engine-2"}
            caplog.clear()
            news.poll()
            said += [(second, record.getMessage()) for record in caplog.records]
    assert said[:3] == [
        (45, f"engine-0 is coming up for 45 s; {tmp_path / 'engine-0.log'}: Capturing graphs"),
        (45, "engine-1 is coming up for 45 s"),
        (45, "engine-2 is coming up for 45 s"),
    ]
    assert [second for second, text in said if text.startswith("engine-0")] == [45, 90, 180, 360]
    assert not any("rollout" in text for _, text in said)
    assert [second for second, text in said if text.startswith("engine-1")] == [45, 90]


def test_a_start_that_compiles_kernels_is_told(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """FlashInfer compiles for minutes without a line in the engine's log."""
    compiler = tmp_path / "cicc"
    shutil.copy("/bin/sleep", compiler)
    here = Process(os.getpid(), next(iter(own_addresses())))
    engine = type("Engine", (NamedActor,), {"process": here})("engine-0")
    now = [0.0]
    coming_up: Any = {engine: "ref"}
    progress = StartupProgress(coming_up, tmp_path, clock=lambda: now[0], done=lambda ref: False)
    said = []
    with subprocess.Popen([compiler, "60"]) as process, caplog.at_level(logging.INFO, "slime"):
        for now[0] in (50.0, 110.0):
            progress.poll()
            said.append(caplog.messages[-1])
            process.kill()
            process.wait()
    assert [", and compiles kernels now" in text for text in said] == [True, False]
