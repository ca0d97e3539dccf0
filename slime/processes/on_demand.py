"""Start a server when its first client connects: Ray's agent for runtime environments, which most
runs never ask, and which costs half a CPU second and 60 MB.

    raylet ─► this file as a script ─► the server, in the same process, with the socket that the
                                       first client is waiting at

Only the standard library is imported: this file runs as a script without site-packages.
"""

from __future__ import annotations

import os
import select
import socket
import sys
from collections.abc import Sequence

_SERVE = "--serve"


def wait_for_client(host: str, port: int, seconds: float, command: Sequence[str]) -> None:
    """Listen until a client connects, then become ``command``; return if the parent ends before.

    Args:
        seconds: between looks at the parent.
        command: Python, its options, and a script that binds ``port``.
    """
    parent = os.getppid()
    family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
    listener = socket.socket(family, kind, protocol)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    listener.bind(address)
    listener.listen()
    while not select.select([listener], [], [], seconds)[0]:
        if os.getppid() != parent:
            return
    listener.set_inheritable(True)
    script = next(place for place, word in enumerate(command) if word.endswith(".py"))
    own = [__file__, _SERVE, str(listener.fileno()), str(port)]
    os.execv(command[0], [*command[:script], *own, *command[script:]])


def serve(listener: int, port: int, argv: Sequence[str]) -> None:
    """Run a script for which binding ``port`` gives the socket with the descriptor ``listener``."""
    import runpy

    bind = socket.socket.bind

    def bind_or_take(own: socket.socket, address: tuple[str, int]) -> None:
        if address[1] == port:
            os.dup2(listener, own.fileno())
        else:
            bind(own, address)

    socket.socket.bind = bind_or_take  # type: ignore[method-assign,assignment]
    sys.argv = list(argv)
    sys.path[0] = os.path.dirname(argv[0])
    runpy.run_path(argv[0], run_name="__main__")


if __name__ == "__main__":
    words = sys.argv[1:]
    if words[0] == _SERVE:
        serve(int(words[1]), int(words[2]), words[3:])
    else:
        wait_for_client(words[0], int(words[1]), float(words[2]), words[3:])
