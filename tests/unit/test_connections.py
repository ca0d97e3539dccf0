"""HTTP as engines and routers speak it: every way of saying how long an answer is, cut anywhere; connections that are
used again, that end, and that are left."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from slime.engines.connections import Broken, Connections

Serve = Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]


def with_server(serve: Serve, test: Callable[[Connections], Awaitable[Any]]) -> Any:
    async def main() -> Any:
        server = await asyncio.start_server(serve, "127.0.0.1", 0)
        connections = Connections(f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}/prefix/")
        try:
            return await asyncio.wait_for(test(connections), timeout=60)
        finally:
            connections.close()
            server.close()

    return asyncio.run(main())


async def read_request(reader: asyncio.StreamReader) -> tuple[str, dict[str, str], bytes]:
    head = (await reader.readuntil(b"\r\n\r\n")).decode().split("\r\n")
    headers = dict(line.split(": ", 1) for line in head[1:-2])
    return head[0], headers, await reader.readexactly(int(headers.get("Content-Length", 0)))


def answering(*answers: bytes, seen: list[Any] | None = None, cuts: tuple[int, ...] = (), close: bool = False) -> Serve:
    """A server that gives these answers over one connection, each in pieces that end at ``cuts``."""

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        for answer in answers:
            try:
                request = await read_request(reader)
            except asyncio.IncompleteReadError:
                break
            if seen is not None:
                seen.append((id(writer), *request))
            for start, end in zip((0, *cuts), (*cuts, len(answer))):
                writer.write(answer[start:end])
                await writer.drain()
                await asyncio.sleep(0)
        if close:
            writer.close()

    return serve


ANSWERS = {
    "length": b"HTTP/1.1 200 OK\r\ncontent-length: 5\r\nX: y\r\n\r\nhello",
    "chunks": b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n2\r\nhe\r\n3;x=y\r\nllo\r\n0\r\n\r\n",
    "trailers": b"HTTP/1.1 200 OK\r\nTransfer-Encoding: Chunked\r\n\r\n5\r\nhello\r\n0\r\nA: b\r\nC: d\r\n\r\n",
    "continued": b"HTTP/1.1 100 Continue\r\n\r\nHTTP/1.1 200 OK\r\nContent-Length: 5\r\n\r\nhello",
}


@pytest.mark.parametrize("name", ANSWERS)
@settings(max_examples=25)
@given(data=st.data())
def test_an_answer_is_whole_wherever_it_is_cut(name: str, data: st.DataObject) -> None:
    answer, seen = ANSWERS[name], list[Any]()
    cuts = tuple(sorted(data.draw(st.sets(st.integers(1, len(answer) - 1), max_size=6))))

    async def test(connections: Connections) -> None:
        for _ in range(2):
            assert await connections.request("POST", "/generate", b"{}", {"K": "v"}) == (200, b"hello")

    with_server(answering(answer, answer, seen=seen, cuts=cuts), test)
    assert [request[1] for request in seen] == ["POST /prefix/generate HTTP/1.1"] * 2
    assert seen[0][0] == seen[1][0], "over one connection"
    headers, body = seen[0][2:]
    assert headers["Host"].startswith("127.0.0.1:") and headers["K"] == "v" and body == b"{}"


@pytest.mark.parametrize(
    "answer",
    [
        b"HTTP/1.1 503 Busy\r\nConnection: close\r\nContent-Length: 5\r\n\r\nhello",
        b"HTTP/1.1 503 Busy\r\n\r\nhello",
        b"HTTP/1.0 503 Busy\r\nContent-Length: 5\r\n\r\nhello",
    ],
    ids=["says so", "no length", "1.0"],
)
def test_an_answer_that_ends_its_connection(answer: bytes) -> None:
    seen = list[Any]()

    async def test(connections: Connections) -> None:
        for _ in range(2):
            assert await connections.request("GET", "/health") == (503, b"hello")

    with_server(answering(answer, seen=seen, close=True), test)
    assert seen[0][0] != seen[1][0] and "Content-Length" not in seen[0][2]


@pytest.mark.parametrize("method", ["GET", "POST"])
def test_a_connection_that_has_ended_meanwhile(method: str) -> None:
    """What only asks is sent again; whoever orders something is to know."""

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await read_request(reader)
        writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: 0\r\n\r\n")
        await reader.readuntil(b"\r\n\r\n")  # the next request, which gets no answer
        writer.close()

    async def test(connections: Connections) -> None:
        assert await connections.request(method, "/") == (200, b"")
        if method == "GET":
            assert await connections.request(method, "/") == (200, b"")
        else:
            with pytest.raises(Broken, match="ended before the answer was there"):
                await connections.request(method, "/")

    with_server(serve, test)


@pytest.mark.parametrize(
    ("answer", "said"),
    [
        (b"HTTP/1.1 200 OK\r\nContent-Length: 9\r\n\r\nhello", "ended before the answer was there"),
        (b"SSH-2.0-OpenSSH\r\n\r\n", "no HTTP: b'SSH-2.0"),
        (b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\nzz\r\n", "no HTTP: b'zz"),
    ],
)
def test_what_is_no_answer(answer: bytes, said: str) -> None:
    async def test(connections: Connections) -> None:
        with pytest.raises(Broken, match=said):
            await connections.request("POST", "/")

    with_server(answering(answer, close=True), test)


def test_nobody_is_there() -> None:
    async def main() -> None:
        with pytest.raises(Broken, match="no connection"):
            await Connections("http://127.0.0.1:1").request("GET", "/")

    asyncio.run(main())


def test_a_request_that_is_left_closes_its_connection() -> None:
    """So that its answer does not meet the next one."""
    left = asyncio.Event()

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        request, _, _ = await read_request(reader)
        if request.startswith("POST /prefix/slow"):
            assert await reader.read() == b"", "its end is seen"
            left.set()
        else:
            writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: 4\r\n\r\nfast")

    async def test(connections: Connections) -> None:
        slow = asyncio.create_task(connections.request("POST", "/slow"))
        assert await connections.request("POST", "/fast") == (200, b"fast")
        slow.cancel()
        await left.wait()
        assert await connections.request("POST", "/fast") == (200, b"fast")

    with_server(serve, test)


def test_many_at_once_get_each_their_own() -> None:
    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while True:
            try:
                _, _, body = await read_request(reader)
            except asyncio.IncompleteReadError:
                return
            await asyncio.sleep(0.001 * (int(body) % 7))
            writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n%s" % (len(body), body))

    async def test(connections: Connections) -> None:
        for _ in range(2):
            bodies = [str(number).encode() for number in range(50)]
            answers = await asyncio.gather(*(connections.request("POST", "/", body) for body in bodies))
            assert [body for _, body in answers] == bodies
        assert len(connections._open) == 50

    with_server(serve, test)
