"""HTTP/1.1 as engines and routers speak it: requests over connections that are kept and used again.

    connections = Connections("http://127.0.0.1:30000")
    status, body = await connections.request("POST", "/generate", b"{}", {"Content-Type": "application/json"})

Made for thousands of small requests at once, where a general client takes most of a rollout's processor time: no
redirects, cookies, proxies or compression, which none of them uses. Deadlines are the caller's: a request that is
cancelled closes its connection.
"""

from __future__ import annotations

import asyncio
import ssl
import time
from collections import deque
from collections.abc import Mapping
from urllib.parse import quote, urlsplit

#: An idle connection is not used again after so long; a server may be about to close it.
_IDLE_SECONDS = 30.0


class Broken(Exception):
    """A connection could not be made, ended before the answer was there, or brought something else than HTTP."""


class Connections:
    """Of one server; for one event loop.

    Args:
        url: scheme, host and port; a path in it begins each request's.
    """

    def __init__(self, url: str) -> None:
        parts = urlsplit(url)
        self._tls = parts.scheme == "https"
        self._host, self._port = parts.hostname or "", parts.port or (443 if self._tls else 80)
        self._prefix, self._authority = parts.path.rstrip("/"), parts.netloc.rpartition("@")[2]
        self._idle: deque[_Connection] = deque()  # the oldest first
        self._open: set[_Connection] = set()

    async def request(
        self, method: str, path: str, body: bytes | None = None, headers: Mapping[str, str] | None = None
    ) -> tuple[int, bytes]:
        """Status and body of the answer.

        Raises:
            Broken: see the class. What only asks (GET) is sent once more when it met a connection that had ended.
        """
        if not path.isascii() or " " in path:
            path = quote(path, safe="/?&=%:;,+@!$'()*~")
        lines = [f"{method} {self._prefix}{path} HTTP/1.1", f"Host: {self._authority}"]
        lines += [f"{name}: {value}" for name, value in (headers or {}).items()]
        lines += [] if body is None and method == "GET" else [f"Content-Length: {len(body or b'')}"]
        message = "\r\n".join([*lines, "\r\n"]).encode("latin-1") + (body or b"")
        connection = self._take()
        if connection is not None:
            try:
                return await self._ask(connection, message)
            except Broken:
                if method != "GET":
                    raise
        return await self._ask(await self._connect(), message)

    def close(self) -> None:
        """Close all of them; requests that are under way fail."""
        for connection in list(self._open):
            connection.close()
        self._open.clear()
        self._idle.clear()

    def _take(self) -> _Connection | None:
        oldest = time.monotonic() - _IDLE_SECONDS
        while self._idle and self._idle[0].used < oldest:
            self._drop(self._idle.popleft())
        while self._idle:
            connection = self._idle.pop()
            if connection.is_open:
                return connection
            self._drop(connection)
        return None

    async def _connect(self) -> _Connection:
        context = ssl.create_default_context() if self._tls else None
        loop = asyncio.get_running_loop()
        try:
            _, connection = await loop.create_connection(_Connection, self._host, self._port, ssl=context)
        except OSError as error:
            raise Broken(f"no connection: {error}") from error
        self._open.add(connection)
        return connection

    async def _ask(self, connection: _Connection, message: bytes) -> tuple[int, bytes]:
        try:
            answer = await connection.ask(message)
        except BaseException:  # cancelled, too: what is still to come must not meet the next request
            self._drop(connection)
            raise
        if connection.is_open:
            connection.used = time.monotonic()
            self._idle.append(connection)
        else:
            self._drop(connection)
        return answer

    def _drop(self, connection: _Connection) -> None:
        self._open.discard(connection)
        connection.close()


class _Connection(asyncio.Protocol):
    """One request at a time.

    Attributes:
        is_open: another request may be sent.
        used: `time.monotonic` of the last answer.
    """

    def __init__(self) -> None:
        self.is_open, self.used = True, 0.0
        self._transport: asyncio.Transport | None = None
        self._answer: asyncio.Future[tuple[int, bytes]] | None = None
        self._begin()

    def _begin(self) -> None:
        self._buffer = bytearray()
        self._status, self._length = 0, -1
        self._is_chunked, self._chunks = False, bytearray()

    def ask(self, message: bytes) -> asyncio.Future[tuple[int, bytes]]:
        assert self._transport is not None and (self._answer is None or self._answer.done())
        self._answer = asyncio.get_running_loop().create_future()
        if self._transport.is_closing():
            self._fail("the connection had ended")
        else:
            self._transport.write(message)
        return self._answer

    def close(self) -> None:
        self.is_open = False
        if self._transport is not None:
            self._transport.abort()

    # -- what asyncio calls ----------------------------------------------------------------------------------------

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport

    def data_received(self, data: bytes) -> None:
        if self._answer is None or self._answer.done():  # nobody has asked
            self.close()
            return
        self._buffer += data
        try:
            body = self._read()
        except (ValueError, IndexError):
            self._fail(f"the answer is no HTTP: {bytes(self._buffer[:80])!r}")
            return
        if body is not None:
            self._done(body)

    def connection_lost(self, error: Exception | None) -> None:
        self.is_open = False
        if self._status and self._length < 0 and not self._is_chunked and error is None:
            self._done(bytes(self._buffer))  # its end is that of the connection
        else:
            self._fail(f"the connection ended before the answer was there{f': {error}' if error else ''}")

    def _done(self, body: bytes) -> None:
        status = self._status
        self.is_open = self.is_open and not self._buffer
        self._begin()
        if self._answer is not None and not self._answer.done():
            self._answer.set_result((status, body))

    def _fail(self, what: str) -> None:
        self.close()
        if self._answer is not None and not self._answer.done():
            self._answer.set_exception(Broken(what))

    # -- reading ---------------------------------------------------------------------------------------------------

    def _read(self) -> bytes | None:
        """The body, once all of it is there.

        Raises:
            ValueError, IndexError: no HTTP.
        """
        while not self._status:
            end = self._buffer.find(b"\r\n\r\n")
            if end < 0:
                return None
            self._read_head(bytes(self._buffer[:end]))
            del self._buffer[: end + 4]
        if self._is_chunked:
            return self._read_chunks()
        if self._length < 0 or len(self._buffer) < self._length:
            return None
        body = bytes(self._buffer[: self._length])
        del self._buffer[: self._length]
        return body

    def _read_head(self, head: bytes) -> None:
        first, *lines = head.split(b"\r\n")
        version, code = first.split(b" ", 2)[:2]
        if not version.startswith(b"HTTP/1."):
            raise ValueError(version)
        status = int(code)
        if 100 <= status < 200:
            return  # another head follows
        for line in lines:
            name, _, value = line.partition(b":")
            name, value = name.lower(), value.strip()
            if name == b"content-length":
                self._length = int(value)
            elif name == b"transfer-encoding":
                self._is_chunked = value.lower() == b"chunked"
            elif name == b"connection" and value.lower() == b"close":
                self.is_open = False
        if status in (204, 304):
            self._length = 0
        if version == b"HTTP/1.0" or (self._length < 0 and not self._is_chunked):
            self.is_open = False
        self._status = status

    def _read_chunks(self) -> bytes | None:
        while (end := self._buffer.find(b"\r\n")) >= 0:
            size = int(self._buffer[:end].partition(b";")[0], 16)
            if size == 0:  # behind it trailers, up to an empty line
                last = self._buffer.find(b"\r\n\r\n", end)
                if last < 0:
                    return None
                del self._buffer[: last + 4]
                return bytes(self._chunks)
            if len(self._buffer) < end + 2 + size + 2:
                return None
            self._chunks += self._buffer[end + 2 : end + 2 + size]
            del self._buffer[: end + 2 + size + 2]
        return None
