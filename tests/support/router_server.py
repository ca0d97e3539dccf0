"""The real router as a process, without a run around it."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from slime.engines.api import EngineClient, EngineError
from slime.engines.keys import VARIABLE
from slime.engines.router import router_flags
from slime.processes.host import free_port


@contextmanager
def router_process(policy: str, worker_urls: Sequence[str] = (), key: str = "") -> Iterator[str]:
    """Its URL, maybe before it answers; it asks for the key, if there is one."""
    port = free_port()
    command = [
        sys.executable,
        "-m",
        "slime.engines.router_process",
        "--host",
        "127.0.0.1",
        "--port",
        str(port),
    ]
    command += ["--disable-retries", "--disable-circuit-breaker"]
    for flag, value in router_flags(policy, list(worker_urls)).items():
        command += [
            "--" + flag.replace("_", "-"),
            *(value if isinstance(value, list) else [str(value)]),
        ]
    command += [
        "--prometheus-port",
        str(free_port()),
        "--prometheus-host",
        "127.0.0.1",
        "--log-level",
        "error",
    ]
    environment = {**os.environ, VARIABLE: key}
    process = subprocess.Popen(
        command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, env=environment
    )
    try:
        yield f"http://127.0.0.1:{port}"
    finally:
        process.terminate()
        try:
            process.wait(timeout=10)
        finally:
            if process.poll() is None:
                process.kill()
                process.wait(timeout=10)


async def wait_healthy(server: EngineClient, seconds: float = 30.0) -> None:
    """Ask a router or an engine until it answers."""
    async with asyncio.timeout(seconds):
        while True:
            try:
                await server.get("/health", timeout=5)
                return
            except EngineError:
                await asyncio.sleep(0.05)
