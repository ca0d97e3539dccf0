"""Requests that no client means: odd methods, paths, types, lengths and bytes, drawn by
hypothesis."""

from __future__ import annotations

import http.client
import json
from dataclasses import dataclass
from typing import Any
from urllib.parse import quote, urlsplit

from hypothesis import strategies as st

METHODS = (
    "GET", "POST", "POST", "POST", "PUT", "PATCH", "DELETE", "HEAD", "OPTIONS", "TRACE", "BREW"
)  # fmt: skip
#: Of any field: what is too small, too large, too long, too deep, of another type, or no text.
ODD = st.one_of(
    st.sampled_from(
        [
            None,
            True,
            False,
            "",
            "x",
            0,
            1,
            -1,
            2,
            7,
            2**31,
            2**63 - 1,
            2**63,
            -(2**63),
            1.5,
            -0.0,
            1e308,
        ]
    ),
    st.sampled_from(
        [
            "\x00",
            "a/../b",
            "/",
            "é" * 300,
            "a" * 5000,
            "/" + "b" * 300,
            "x" * 70_000,
            [],
            {},
            [[]],
            [None],
        ]
    ),
    st.sampled_from(
        [
            ["x"],
            [1, "x"],
            [2**63],
            [-1],
            {"a": None},
            [{}],
            [[1, 2], [3]],
            {"type": "text"},
            "127.0.0.1",
        ]
    ),
    st.text(max_size=20).filter(lambda text: text.isprintable()),
    st.recursive(
        st.integers() | st.booleans() | st.none(),
        lambda inner: st.lists(inner, max_size=3),
        max_leaves=8,
    ),
)
_RAW = st.sampled_from(
    [
        b"",
        b"{",
        b"[]",
        b"null",
        b"\xff\xfe",
        b'"x"',
        b"[" * 20_000,
        b"{}" * 3,
        b"1e400",
        b"\x00" * 64,
    ]
)
_HEADERS = st.sampled_from(
    [
        {},
        {"Content-Type": "text/plain"},
        {"Content-Type": "application/json; charset=nonsense"},
        {"Content-Type": "multipart/form-data; boundary=x"},
        {"Content-Encoding": "gzip"},
        {"Accept": "\t"},
        {"Expect": "100-continue"},
        {"Range": "bytes=9-1"},
    ]
)


@dataclass(frozen=True)
class Request:
    method: str
    path: str
    body: bytes
    headers: dict[str, str]


def requests(
    routes: list[str], fields: list[str], whole: dict[str, Any]
) -> st.SearchStrategy[Request]:
    """Malformed requests.

    Args:
        routes: paths that the server has; others are drawn, too.
        fields: of queries and bodies.
        whole: a body that means something, of which some fields are replaced.
    """
    path = st.one_of(
        st.sampled_from(routes), st.sampled_from(routes), st.text("/.%abc?#é ", max_size=12)
    )
    changed = st.dictionaries(st.sampled_from(fields), ODD, max_size=5)
    bodies = changed.flatmap(lambda odd: st.sampled_from([odd, {**whole, **odd}])).map(
        lambda b: json.dumps(b).encode()
    )
    query = st.dictionaries(st.sampled_from(fields), ODD.map(str), max_size=3)

    def build(
        method: str, path: str, query: dict[str, str], body: bytes, headers: dict[str, str]
    ) -> Request:
        asked = "&".join(
            f"{quote(name)}={quote(value[:500], errors='replace')}" for name, value in query.items()
        )
        return Request(
            method,
            "/" + quote(path.lstrip("/"), safe="/%?#") + (f"?{asked}" if asked else ""),
            body,
            headers,
        )

    return st.builds(build, st.sampled_from(METHODS), path, query, bodies | _RAW, _HEADERS)


def status_of(
    url: str, request: Request, more_headers: dict[str, str] | None = None, timeout: float = 20.0
) -> int:
    """The status of the answer; 0 where the server rather closes the connection, or waits for more
    of the body."""
    parts = urlsplit(url)
    connection = http.client.HTTPConnection(parts.hostname or "", parts.port, timeout=timeout)
    try:
        connection.request(
            request.method, request.path, request.body, {**request.headers, **(more_headers or {})}
        )
        return connection.getresponse().status
    except (http.client.HTTPException, ConnectionError, TimeoutError):
        return 0
    finally:
        connection.close()


def post(url: str, path: str, body: Any = None, timeout: float = 60.0) -> tuple[int, str]:
    """Status and text of the answer to a request that is well formed."""
    parts = urlsplit(url)
    connection = http.client.HTTPConnection(parts.hostname or "", parts.port, timeout=timeout)
    try:
        connection.request(
            "POST", path, json.dumps(body or {}), {"Content-Type": "application/json"}
        )
        answer = connection.getresponse()
        return answer.status, answer.read().decode()
    finally:
        connection.close()
