"""Addresses of engines, as users write them."""

from __future__ import annotations

import contextlib
from urllib.parse import urlsplit

from slime.errors import UserError


def engine_url(address: str, where: str) -> str:
    """Return the base URL of an engine.

    Args:
        address: HOST:PORT, with or without ``http://``.
        where: the flag or command that received the address, for messages.
    Raises:
        UserError: ``address`` has another form.

    Example:
        >>> urls = "10.0.0.7:30000", "http://[::1]:30000/"
        >>> tuple(engine_url(url, "slime engines add") for url in urls)
        ('http://10.0.0.7:30000', 'http://[::1]:30000')
    """
    text = address if "://" in address else f"http://{address}"
    scheme = ""
    host = None
    port = None
    rest = ""
    with contextlib.suppress(ValueError):  # no address, or a host that cannot be looked up
        parts = urlsplit(text)
        (parts.hostname or "").encode("idna")
        scheme = parts.scheme
        host = parts.hostname
        port = parts.port
        rest = parts.path.strip("/") or parts.query or parts.fragment or parts.username or ""
    if scheme != "http" or not host or not port or rest or any(map(str.isspace, address)):
        raise UserError(
            f"{where}: {address!r} is no address of an engine",
            why="an address is HOST:PORT of an engine's HTTP server, without TLS",
            fix="write it as in 10.0.0.7:30000",
        )
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"
