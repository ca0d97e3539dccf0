"""Ports that no sibling process of ours can take: reserved by a lock file and tested by binding.

Guessing ports ends in "Max retries exceeded … /get_model_info" when several servers start on one host. A port
is held from `reserve_port` until `PortReservation.release`, so that two servers that start at once never get the
same one; ports lie below the kernel's ephemeral range, so that an outgoing connection cannot take one either.
"""

from __future__ import annotations

import fcntl
import os
import random
import socket
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import IO

from slime.errors import UserError

_FIRST_PORT, _LAST_PORT = 15000, 32000
_TRIES = 200


@dataclass
class PortReservation:
    """A reserved port; ``release`` gives it back."""

    port: int
    _lock: IO[str]

    def release(self) -> None:
        self._lock.close()  # closing drops the lock; the empty file stays and is reused


def reserve_port(host: str = "0.0.0.0") -> PortReservation:
    """Reserve a free TCP port on this node.

    Raises:
        UserError: no free port was found.
    """
    folder = Path(tempfile.gettempdir()) / f"slime-ports-{os.getuid()}"
    folder.mkdir(exist_ok=True)
    for port in random.sample(range(_FIRST_PORT, _LAST_PORT), _TRIES):
        lock = open(folder / f"{port}.lock", "w")  # noqa: SIM115  held open as the lock
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as probe:
                probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
                probe.bind((host, port))
        except OSError:
            lock.close()
            continue
        return PortReservation(port, lock)
    raise UserError(
        f"no free port of this host between {_FIRST_PORT} and {_LAST_PORT} in {_TRIES} tries",
        fix="end what holds them: ss -ltnp lists the listening processes",
    )


def node_ip() -> str:
    """Address under which other nodes reach this one (loopback when the host has no route)."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect(("192.0.2.1", 9))  # a documentation address: chooses a route, sends nothing
            return str(probe.getsockname()[0])
        except OSError:
            return "127.0.0.1"
