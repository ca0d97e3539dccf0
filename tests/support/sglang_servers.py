"""SGLang's stand-in as a server process, started as a run starts SGLang."""

from __future__ import annotations

import dataclasses
import json
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from slime.cluster.server_process import ServerProcess
from slime.config import Config, make_config
from slime.engines.launch import EnginePlace
from slime.engines.sglang.command import sglang_command
from slime.processes.host import PortReservation, reserve_port
from tests.support.forks import servers_as_forks
from tests.support.processes import ROOT

FAKE = Path(__file__).parent / "fake_sglang"
_reservations: list[PortReservation] = []


def run_config(**flags: Any) -> Config:
    """A run on SGLang's engines."""
    defaults = {
        "rollout_batch_size": 4,
        "num_rollout": 1,
        "hf_checkpoint": "m",
        "rollout_engine": "sglang",
    }
    return make_config(**{**defaults, **flags})


@contextmanager
def sglang_installed() -> Iterator[None]:
    """Within the block SGLang "is installed" for this process; a real one comes first."""
    sys.path.append(str(FAKE))
    try:
        yield
    finally:
        sys.path.remove(str(FAKE))
        for name in [
            name for name in sys.modules if name == "sglang" or name.startswith("sglang.")
        ]:
            del sys.modules[name]


def fake_environment(calls: Path, **more: str) -> dict[str, str]:
    """Of a process for which SGLang is to be the stand-in; its servers write each call to
    ``calls``, a JSON line."""
    path = os.pathsep.join([str(FAKE), str(ROOT), os.environ.get("PYTHONPATH", "")])
    return {"PYTHONPATH": path, "FAKE_SGLANG_CALLS": str(calls), **more}


class _Forked(ServerProcess):
    """A fork of the process that has imported what it needs (`tests.support.forks`)."""

    def start(self) -> None:
        with servers_as_forks():
            super().start()


@dataclass
class FakeSGLang:
    url: str
    process: ServerProcess
    calls_file: Path

    def calls(self) -> list[dict[str, Any]]:
        lines = self.calls_file.read_text().splitlines() if self.calls_file.exists() else []
        return [json.loads(line) for line in lines]

    def forget(self) -> None:
        self.calls_file.write_text("")


def process_of(
    config: Config, model: Path, folder: Path, place: EnginePlace, **env: str
) -> FakeSGLang:
    reservation = reserve_port("127.0.0.1")  # held as long as this process lives
    _reservations.append(reservation)
    port, calls = reservation.port, folder / f"calls-{place.number}.jsonl"
    spec = sglang_command(config, str(model), "127.0.0.1", port, place)
    spec = dataclasses.replace(spec, is_preloaded=True)
    spec.env.update(fake_environment(calls, OMP_NUM_THREADS="1", **env))
    url = f"http://127.0.0.1:{port}"
    return FakeSGLang(
        url, _Forked(f"engine-{place.number}", spec, url, folder / f"{place.number}.log"), calls
    )


@contextmanager
def fake_sglang(
    config: Config, model: Path, folder: Path, *places: EnginePlace, **env: str
) -> Iterator[list[FakeSGLang]]:
    """Servers for the places, ready."""
    servers = [process_of(config, model, folder, place, **env) for place in places]
    try:
        for server in servers:
            server.process.start()
        for server in servers:
            server.process.wait_ready()
        yield servers
    finally:
        for server in servers:
            server.process.stop()
