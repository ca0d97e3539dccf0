"""A server process started from a `LaunchSpec`, for tests and benchmarks."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from slime.cluster.server_process import ServerProcess
from slime.engines.launch import LaunchSpec


@contextmanager
def running_server(spec: LaunchSpec, url: str, log: Path) -> Iterator[subprocess.Popen[bytes]]:
    """Ready at the beginning of the block, gone at its end."""
    server = ServerProcess("server", spec, url, log)
    server.start()
    try:
        server.wait_ready()
        assert server._process is not None
        yield server._process
    finally:
        server.stop()
