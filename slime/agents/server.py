"""The server of all agent endpoints of a process. It has one port; the key of a request says which
sample the request belongs to.

POST /v1/chat/completions, /v1/responses, /v1/messages, /v1/messages/count_tokens    GET /v1/models
key: "Authorization: Bearer …", "x-api-key: …", or in the path: /key/…/v1/…
"""

from __future__ import annotations

import asyncio
import hashlib
import hmac
import secrets
from collections.abc import Awaitable, Callable
from types import ModuleType
from typing import Any
from weakref import WeakKeyDictionary

import orjson
from aiohttp import web

from slime import deadlines
from slime.agents import chat_api, messages_api, responses_api
from slime.agents.session import AgentSession, Refusal
from slime.agents.turns import Turn
from slime.engines.chat_answers import EVENT_HEADERS
from slime.engines.request_fields import BadRequest, json_object
from slime.errors import UserError
from slime.log import get_logger
from slime.processes.host import bind
from slime.rollout.loop import close_with_rollouts

logger = get_logger(__name__)

_LARGEST_BODY = 64 << 20
_NO_RETRY = {"x-should-retry": "false"}  # the clients of OpenAI and Anthropic read it

#: Path of a route that generates → the module that reads its requests and writes its answers.
_APIS: dict[str, ModuleType] = {
    "/chat/completions": chat_api,
    "/responses": responses_api,
    "/messages": messages_api,
}
_SESSION: web.RequestKey[AgentSession] = web.RequestKey("session", AgentSession)
Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


class AgentServer:
    """The server for all samples of an event loop; use `shared_server` to get it."""

    def __init__(self) -> None:
        self._sessions: dict[bytes, tuple[str, AgentSession]] = {}
        self._said: set[str] = set()
        self._runner: web.AppRunner | None = None
        self.host = ""
        self.port = 0

    async def start(self, host: str, port: int) -> AgentServer:
        """Listen; return the server itself.

        Raises:
            UserError: the port is in use, or the address does not belong to this host.
        """
        app = web.Application(
            middlewares=[self._errors, self._authenticated], client_max_size=_LARGEST_BODY
        )
        for prefix in ("/v1", "/key/{key}/v1"):
            for path, api in _APIS.items():
                app.router.add_post(prefix + path, _answering(api))
            app.router.add_post(f"{prefix}/messages/count_tokens", _count_tokens)
            app.router.add_get(f"{prefix}/models", _models)
            app.router.add_get(f"{prefix}/models/{{model:.+}}", _model)
        try:
            listener = bind(host, port)
        except UserError as error:
            raise UserError(
                error.what, why=error.why, fix="choose another --agent-host or --agent-port"
            ) from error
        self._runner = web.AppRunner(
            app,
            handler_cancellation=True,
            access_log=None,
            keepalive_timeout=deadlines.ENDPOINT_KEEPALIVE,
            shutdown_timeout=0.2,
        )
        await self._runner.setup()
        await web.SockSite(self._runner, listener, backlog=1024).start()
        self.host = host
        self.port = int(listener.getsockname()[1])
        logger.info("agents are answered at http://%s:%d", host, self.port)
        return self

    async def close(self) -> None:
        if self._runner is not None:
            await self._runner.cleanup()

    def open(self, session: AgentSession) -> str:
        """Return a new key for the requests of ``session``."""
        key = f"sk-slime-{secrets.token_urlsafe(32)}"
        self._sessions[_digest(key)] = (key, session)
        return key

    def revoke(self, key: str) -> None:
        """Revoke a key, and end its requests."""
        _, session = self._sessions.pop(_digest(key))
        session.end()

    def _session_of(self, key: str) -> AgentSession | None:
        """Find the session of a key by its digest. The comparison takes constant time, so that it
        does not reveal other keys."""
        known, session = self._sessions.get(_digest(key), ("", None))
        is_same = hmac.compare_digest(known.encode(), key.encode(errors="replace"))
        return session if is_same else None

    @web.middleware
    async def _authenticated(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        scheme, _, token = request.headers.get("Authorization", "").partition(" ")
        given = request.match_info.get("key") or request.headers.get("x-api-key") or ""
        session = self._session_of(given or (token.strip() if scheme.lower() == "bearer" else ""))
        if session is None:
            raise Refusal("no such key, or its sample is done", "invalid_api_key", status=401)
        request[_SESSION] = session
        return await handler(request)

    @web.middleware
    async def _errors(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        """Answer every refusal in the format of its protocol; any other exception becomes status
        500, with the traceback in the log."""
        try:
            return await handler(request)
        except BadRequest as error:
            self._tell(request, str(error))
            return _refused(request, str(error), param=error.field)
        except web.RequestPayloadError as error:  # the body is not encoded as its header says
            return _refused(request, str(error))
        except UserError as error:
            self._tell(request, str(error))
            return _refused(request, str(error))
        except Refusal as error:
            return _refused(request, str(error), error.status, error.kind, error.code)
        except TimeoutError:
            return _refused(
                request,
                f"the body did not come within {deadlines.ENDPOINT_REQUEST_BODY:.0f} s",
                408,
                "timeout_error",
            )
        except web.HTTPException as error:
            said = f"{request.method} {request.path}: {error.reason}"
            kind = "request_too_large" if error.status == 413 else "not_found_error"
            return _refused(request, said, error.status, kind)
        except Exception as error:
            # the path may contain the key
            logger.exception("%s failed", request.match_info.route.resource)
            return _refused(request, f"{type(error).__name__}: {error}", 500, "api_error")

    def _tell(self, request: web.Request, message: str) -> None:
        """Log each distinct refusal once, at most a hundred."""
        if message not in self._said and len(self._said) < 100:
            self._said.add(message)
            logger.warning(
                "an agent's request to %s was refused: %s",
                request.match_info.route.resource,
                message,
            )


def _digest(key: str) -> bytes:
    return hashlib.sha256(key.encode(errors="replace")).digest()


# -- requests --------------------------------------------------------------------------------------


def _answering(api: ModuleType) -> Handler:
    """Make the handler of a protocol's generation route."""

    async def handle(request: web.Request) -> web.StreamResponse:
        session = request[_SESSION]
        ask = api.read(await _body(request), session)
        working = asyncio.ensure_future(session.answer(ask))
        try:
            if not ask.stream:
                return _json(api.whole(await working))
            await asyncio.wait({working}, timeout=deadlines.ENDPOINT_STREAM_PING)
            if working.done():
                working.result()  # a refusal can still set the HTTP status
            return await _stream(request, working, api)
        finally:
            working.cancel()

    return handle


async def _stream(
    request: web.Request, working: asyncio.Task[Turn], api: ModuleType
) -> web.StreamResponse:
    """Send pings until the answer is complete, then all of its events. Earlier events could reach a
    client twice: after a weight update or an engine failure, text may be generated again."""
    response = web.StreamResponse(headers=EVENT_HEADERS)
    try:
        await response.prepare(request)
        while not working.done():
            await response.write(api.ping())
            await asyncio.wait({working}, timeout=deadlines.ENDPOINT_STREAM_PING)
        for event in _events(request, working, api):
            await response.write(event)
        await response.write_eof()
    except ConnectionError:  # the client has gone; the caller cancels its request
        pass
    return response


def _events(request: web.Request, working: asyncio.Task[Turn], api: ModuleType) -> list[bytes]:
    """Return the events of an answer, or of an error: the HTTP status was already sent."""
    try:
        return list(api.events(working.result()))
    except (BadRequest, Refusal) as error:
        return [api.error_event(str(error))]
    except Exception as error:
        logger.exception("%s failed", request.match_info.route.resource)
        return [api.error_event(f"{type(error).__name__}: {error}")]


async def _body(request: web.Request) -> dict[str, Any]:
    async with asyncio.timeout(deadlines.ENDPOINT_REQUEST_BODY):
        return json_object(await request.read())


def _json(body: Any, status: int = 200, headers: dict[str, str] | None = None) -> web.Response:
    return web.Response(
        body=orjson.dumps(body), status=status, content_type="application/json", headers=headers
    )


def _refused(
    request: web.Request,
    message: str,
    status: int = 400,
    kind: str = "invalid_request_error",
    code: str | None = None,
    param: str | None = None,
) -> web.Response:
    if _SESSION in request:
        request[_SESSION].refused = message
    error = chat_api.error
    if "/v1/messages" in request.path or "anthropic-version" in request.headers:
        error = messages_api.error
    return _json(error(message, kind, code, param), status, _NO_RETRY)


_CARD = {
    "id": "policy",
    "object": "model",
    "type": "model",
    "display_name": "policy",
    "created": 0,
    "owned_by": "slime",
}


async def _count_tokens(request: web.Request) -> web.Response:
    """Count the tokens of a prompt without generating; Anthropic's clients ask before they compact
    it."""
    session = request[_SESSION]
    ask = messages_api.read(await _body(request), session)
    return _json({"input_tokens": len(session.tree.find_place(session.with_kwargs(ask)).prompt)})


async def _models(request: web.Request) -> web.Response:
    return _json(
        {
            "object": "list",
            "data": [_CARD],
            "has_more": False,
            "first_id": "policy",
            "last_id": "policy",
        }
    )


async def _model(request: web.Request) -> web.Response:
    """Describe the policy; any model name is accepted."""
    return _json(_CARD | {"id": request.match_info["model"]})


# -- one for each event loop -----------------------------------------------------------------------

_SERVERS: WeakKeyDictionary[asyncio.AbstractEventLoop, asyncio.Task[AgentServer]] = (
    WeakKeyDictionary()
)


async def shared_server(host: str, port: int) -> AgentServer:
    """Return the server of this event loop; the first call starts it.

    Raises:
        UserError: it cannot listen there.
    """
    loop = asyncio.get_running_loop()
    if loop not in _SERVERS:
        _SERVERS[loop] = loop.create_task(AgentServer().start(host, port))
    try:
        return await asyncio.shield(_SERVERS[loop])
    except UserError:
        _SERVERS.pop(loop, None)
        raise


async def close_server() -> None:
    """Stop listening, if this event loop has a server."""
    task = _SERVERS.pop(asyncio.get_running_loop(), None)
    if task is not None and not task.cancelled():
        await (await task).close()


close_with_rollouts(close_server)
