"""Who may look: the token, the Host header, and what a browser is told to keep to.

On loopback everybody on the host may look, as at the run's files that it may read. A page of elsewhere in the user's
browser may not: its name is no name of this host (DNS rebinding), and nothing allows it to read an answer. Elsewhere
than on loopback there is a token: in the address once, from then on in a cookie.
"""

from __future__ import annotations

import hmac
import ipaddress
from collections.abc import Awaitable, Callable

from aiohttp import web
from aiohttp.typedefs import Middleware

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]
TOKEN_HEADER = "X-Slime-Token"
#: Nothing from elsewhere, nothing inline: text that gets into the page can never run, nor load anything.
POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; img-src 'self' data:;"
    " base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
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
    """Whether an address to listen on is reached from this host alone.

    Example:
        >>> is_loopback("127.0.0.1"), is_loopback("::1"), is_loopback("localhost"), is_loopback("0.0.0.0")
        (True, True, True, False)
    """
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def host_of(header: str) -> str:
    """The name in a Host header, without port and brackets.

    Example:
        >>> host_of("localhost:8265"), host_of("[::1]:8265"), host_of("evil.example")
        ('localhost', '::1', 'evil.example')
    """
    if header.startswith("["):
        return header[1:].partition("]")[0].lower()
    return header.partition(":")[0].lower()


def guard(token: str | None, cookie: str) -> Middleware:
    """The middleware that every request passes.

    Args:
        token: None on loopback.
        cookie: its name; ports of one host share their cookies, so it should have the port in it.
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
        if token is None:
            if not is_loopback(host_of(request.headers.get("Host", ""))):
                raise web.HTTPForbidden(text="this page answers on loopback names alone\n")
            return await handler(request)
        given = request.query.get("token")
        if given is not None and request.path == "/" and _same(given, token):
            found = web.Response(status=302, headers={"Location": "/"})  # so that the token leaves the address bar
            found.set_cookie(cookie, token, httponly=True, samesite="Strict", path="/")
            return found
        if not any(_same(word, token) for word in _words(request, cookie)):
            raise web.HTTPUnauthorized(text="open the address that `slime watch` printed, with its token\n")
        return await handler(request)

    return check


def _words(request: web.Request, cookie: str) -> list[str]:
    words = (request.cookies.get(cookie), request.headers.get(TOKEN_HEADER), request.query.get("token"))
    return [word for word in words if word]


def _same(given: str, token: str) -> bool:
    return hmac.compare_digest(given.encode("utf-8", "replace"), token.encode())
