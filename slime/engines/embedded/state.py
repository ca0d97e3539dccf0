"""What the request handlers share, and how they read bodies and answer."""

from __future__ import annotations

import asyncio
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import orjson
from aiohttp import web

from slime.engines.embedded.engine import Engine
from slime.engines.embedded.fields import BadRequest
from slime.engines.embedded.generate_request import Limits
from slime.engines.embedded.hub import Hub
from slime.engines.embedded.weight_update import WeightUpdater


class Unavailable(Exception):
    """The server cannot do this now; answered with status 503."""


@dataclass
class ServerState:
    """A loaded server.

    Attributes:
        tokenizer: a Hugging Face tokenizer with its chat template, or None.
        updates: one thread each for updates that may wait for each other's collectives.
    """

    engine: Engine
    hub: Hub
    updater: WeightUpdater
    limits: Limits
    tokenizer: Any
    model_name: str
    architectures: list[str]
    updates: ThreadPoolExecutor


#: A task that yields the state once the model is loaded.
STATE: web.AppKey[asyncio.Task[ServerState]] = web.AppKey("state")


def state_of(request: web.Request) -> ServerState:
    """Raises:
    Unavailable: the model is still being loaded, or could not be.
    """
    task = request.app[STATE]
    if not task.done():
        raise Unavailable("the model is being loaded")
    if task.cancelled() or task.exception() is not None:
        raise Unavailable("the model could not be loaded")
    return task.result()


async def json_body(request: web.Request) -> dict[str, Any]:
    """The body as an object; {} when there is none.

    Raises:
        BadRequest: not JSON, or not an object.
    """
    raw = await request.read()
    if not raw.strip():
        return {}
    try:
        body = orjson.loads(raw)
    except orjson.JSONDecodeError as error:
        raise BadRequest(f"the body is not valid JSON: {error}") from error
    if not isinstance(body, dict):
        raise BadRequest(f"the body must be a JSON object, got {type(body).__name__}")
    return body


def json_response(body: Any, status: int = 200) -> web.Response:
    return web.Response(body=orjson.dumps(body), status=status, content_type="application/json")
