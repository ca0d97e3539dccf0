"""Access rules of our HTTP servers: Host and Origin headers, keys, and the open routes.

Every user of the host can reach a server on loopback, and so can every page in the user's browser.
`foreign` refuses pages from another origin, and pages whose host name resolves to this host (DNS
rebinding). `slime watch` requires a token if it listens on other addresses. Engines require a key
(`slime.engines.keys`).
"""

from __future__ import annotations

import hmac
import ipaddress
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit

import orjson
from aiohttp import web
from aiohttp.typedefs import Middleware

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]
TOKEN_HEADER = "X-Slime-Token"
#: Only this server's own files, nothing inline: text injected into the page can neither run nor
#: load anything.
POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; img-src 'self' "
    "data:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)
HEADERS = {
    "Content-Security-Policy": POLICY,
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cache-Control": "no-store",
}


def is_loopback(host: str) -> bool:
    """Tell whether an address to listen on can be reached only from this host.

    Example:
        >>> tuple(map(is_loopback, ("127.0.0.1", "::1", "localhost", "0.0.0.0")))
        (True, True, True, False)
    """
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def host_in_url(host: str) -> str:
    """Return a host as a URL has it: an IPv6 address in brackets.

    Example:
        >>> host_in_url("10.0.0.7"), host_in_url("::1")
        ('10.0.0.7', '[::1]')
    """
    return f"[{host}]" if ":" in host else host


def host_of(header: str) -> str:
    """Return the name in a Host header, without port and brackets.

    Example:
        >>> host_of("localhost:8265"), host_of("[::1]:8265"), host_of("evil.example")
        ('localhost', '::1', 'evil.example')
    """
    if header.startswith("["):
        return header[1:].partition("]")[0].lower()
    return header.partition(":")[0].lower()


def foreign(headers: Mapping[str, str], *, on_loopback: bool) -> str:
    """Why a request counts as from a page of another site; "" if it does not. Programs send no
    Origin.

    Args:
        headers: a mapping that ignores the case of names.
        on_loopback: the server listens only on loopback, so that only loopback names are valid.

    Example:
        >>> foreign({"Host": "evil.example:30000"}, on_loopback=True)
        'it answers on names of loopback alone, not on evil.example'
        >>> foreign(
        ...     {"Host": "localhost:30000", "Origin": "http://localhost:3000"}, on_loopback=True)
        ''
    """
    host = headers.get("Host", "")
    origin = headers.get("Origin")
    if on_loopback and not is_loopback(host_of(host)):
        return f"it answers on names of loopback alone, not on {host_of(host) or 'none'}"
    if origin is not None:
        try:
            parts = urlsplit(origin)
            name = parts.hostname or ""
            place = parts.netloc
        except ValueError:  # not a URL
            name = ""
            place = ""
        if not is_loopback(name) and (on_loopback or place.lower() != host.lower()):
            return f"it answers no page of another origin ({origin[:100]})"
    mode = headers.get("Sec-Fetch-Mode")
    if headers.get("Sec-Fetch-Site") == "cross-site" and mode != "navigate":
        return "it answers no page of another site"
    return ""


#: Routes of `slime serve` without --control-routes: generation, and information about the model.
_INFERENCE = (
    "/", "/health", "/health_generate", "/ping", "/metrics", "/get_load", "/v1/loads", "/generate",
    "/encode", "/classify", "/tokenize", "/detokenize", "/invocations", "/model_info",
    "/get_model_info", "/server_info", "/get_server_info", "/v1/chat/completions",
    "/v1/completions", "/v1/embeddings", "/v1/rerank", "/v1/score", "/v1/responses", "/v1/classify",
    "/v1/messages", "/v1/messages/count_tokens", "/v1/tokenize", "/v1/detokenize",
)  # fmt: skip


def is_inference(path: str) -> bool:
    """Tell whether a route only generates or reports; any other route may change the server or its
    weights.

    Example:
        >>> (is_inference("/v1/models/sums"), is_inference("/flush_cache"),
        ...  is_inference("/update_weights_from_disk"))
        (True, False, False)
    """
    return path in _INFERENCE or path == "/v1/models" or path.startswith("/v1/models/")


@dataclass(frozen=True)
class EngineAccess:
    """Decides which requests an engine answers; the key is checked elsewhere.

    Attributes:
        on_loopback: the engine listens only on loopback.
        inference_only: its control routes are closed.
    """

    on_loopback: bool
    inference_only: bool = False

    def refusal(self, path: str, headers: Mapping[str, str]) -> str:
        """Why a request is refused, with status 403; "" if it is not."""
        if reason := foreign(headers, on_loopback=self.on_loopback):
            return f"forbidden: {reason}"
        if self.inference_only and not is_inference(path):
            return (
                f"{path} is closed: it steers the server, or there is no such route (slime serve "
                "--control-routes)"
            )
        return ""


class AsgiGuard:
    """ASGI middleware that applies `EngineAccess` to an application, such as SGLang's server."""

    def __init__(self, app: Any, access: EngineAccess) -> None:
        self._app = app
        self._access = access

    async def __call__(self, scope: dict[str, Any], receive: Any, send: Any) -> None:
        refused = ""
        if scope["type"] in ("http", "websocket"):
            names = {
                name.decode("latin-1").title(): value.decode("latin-1")
                for name, value in scope["headers"]
            }
            refused = self._access.refusal(scope["path"], names)
        if not refused:
            await self._app(scope, receive, send)
        elif scope["type"] == "websocket":
            await send({"type": "websocket.close", "code": 1008})
        else:
            body = orjson.dumps({"error": {"message": refused, "type": "forbidden", "code": 403}})
            headers = [
                (b"content-type", b"application/json"),
                (b"content-length", str(len(body)).encode()),
            ]
            await send({"type": "http.response.start", "status": 403, "headers": headers})
            await send({"type": "http.response.body", "body": body})


def guard(token: str | None, cookie: str) -> Middleware:
    """Return the access middleware of `slime watch`.

    Args:
        token: that requests need; None on loopback.
        cookie: the cookie's name, with the port in it: all ports of a host share their cookies.
    """

    @web.middleware
    async def check(request: web.Request, handler: Handler) -> web.StreamResponse:
        try:
            response = await _answer(request, handler)
        except web.HTTPException as refusal:
            refusal.headers.update(HEADERS)
            raise
        response.headers.update(HEADERS)
        return response

    async def _answer(request: web.Request, handler: Handler) -> web.StreamResponse:
        if request.method not in ("GET", "HEAD"):
            raise web.HTTPMethodNotAllowed(request.method, ["GET", "HEAD"])
        if reason := foreign(request.headers, on_loopback=token is None):
            raise web.HTTPForbidden(text=f"forbidden: {reason}\n")
        if token is None:
            return await handler(request)
        given = request.query.get("token")
        if given is not None and request.path == "/" and _same(given, token):
            # remove the token from the address bar
            found = web.Response(status=302, headers={"Location": "/"})
            found.set_cookie(cookie, token, httponly=True, samesite="Strict", path="/")
            return found
        if not any(_same(word, token) for word in _words(request, cookie)):
            raise web.HTTPUnauthorized(
                text="open the address that `slime watch` printed, with its token\n"
            )
        return await handler(request)

    return check


def _words(request: web.Request, cookie: str) -> list[str]:
    in_head = (request.cookies.get(cookie), request.headers.get(TOKEN_HEADER))
    return [word for word in (*in_head, request.query.get("token")) if word]


def _same(given: str, token: str) -> bool:
    return hmac.compare_digest(given.encode("utf-8", "replace"), token.encode())
