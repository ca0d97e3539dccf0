"""An embedded engine that the test starts and ends, as a user does whose engine joins a run. It
asks for a key."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from slime.engines.api import is_ready
from slime.engines.keys import VARIABLE
from slime.processes.host import free_port
from tests.support.forks import Fork, fork_or_start
from tests.support.processes import PATIENCE, wait_until

#: In the environment of such engines, and of runs in which they take part.
ITS_KEY = {VARIABLE: "somebody's"}


@dataclass
class ExternalEngine:
    process: subprocess.Popen[bytes] | Fork
    url: str
    log: Path

    @property
    def address(self) -> str:
        return self.url.removeprefix("http://")

    def end(self) -> int:
        """SIGTERM; how many tokens it has decoded in its life."""
        self.process.terminate()
        assert self.process.wait(PATIENCE) == 0, self.log.read_text()
        [said] = [line for line in self.log.read_text().splitlines() if " tokens decoded" in line]
        return int(said.split("stopping, ")[1].split()[0])


@contextmanager
def external_engine(
    model: Path, log: Path, *words: str, key: Mapping[str, str] = ITS_KEY
) -> Iterator[ExternalEngine]:
    """One that answers; in float32, with a seed of its own and another name than the run's
    engines."""
    port = free_port()
    argv = [sys.executable, "-m", "slime.embedded", "--model-path", str(model), "--port", str(port)]
    argv += [
        "--dtype",
        "float32",
        "--random-seed",
        "7",
        "--served-model-name",
        "somebody's",
        *words,
    ]
    with open(log, "wb") as output, open(os.devnull, "rb") as nothing:
        stdio = nothing.fileno(), output.fileno(), output.fileno()
        process = fork_or_start(argv, stdio, {**os.environ, **key})
    engine = ExternalEngine(process, f"http://127.0.0.1:{port}", log)
    try:
        wait_until(
            lambda: is_ready(f"{engine.url}/health", 5) or process.poll() is not None,
            "the engine answers",
        )
        assert process.poll() is None, log.read_text()
        yield engine
    finally:
        process.kill()
        process.wait(PATIENCE)
