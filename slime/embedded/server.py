"""The HTTP server: it binds its port first, then loads the model and serves until stopped."""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import random
import signal
import socket
import sys
from collections.abc import Awaitable, Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch
from aiohttp import web
from aiohttp.http_exceptions import BadHttpMessage
from aiohttp.typedefs import Middleware

from slime import deadlines
from slime.embedded import control_routes, generate_routes, openai_routes
from slime.embedded.architecture import Architecture
from slime.embedded.engine import Engine, EngineDead, Hub
from slime.embedded.generate_request import RequestLimits
from slime.embedded.generate_routes import STATE, ServerState, Unavailable, json_response
from slime.embedded.images import ImageRequests
from slime.embedded.options import EngineOptions
from slime.embedded.quantised_weights import import_library_for
from slime.embedded.weight_update import WeightUpdater
from slime.engines.keys import VARIABLE, admits
from slime.engines.request_fields import BadRequest
from slime.engines.tool_calls import chat_template, tool_format
from slime.errors import UserError
from slime.http_access import EngineAccess, is_loopback
from slime.log import get_logger
from slime.models import family_name
from slime.models.images import ImageReader
from slime.processes.owner import follow_parent
from slime.prompts.tokenizer import load_tokenizer

logger = get_logger(__name__)

_LARGEST_BODY = 1 << 30

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


async def serve(
    listener: socket.socket,
    options: EngineOptions,
    parent_pid: int | None,
    key: str = "",
    *,
    inference_only: bool = False,
) -> int:
    """Serve until SIGTERM, SIGINT, or the death of parent or engine; return the exit status.

    Args:
        key: required in requests (`slime.engines.keys`); "" admits all requests.
        inference_only: refuse the routes that control the engine.
    Raises:
        UserError: the model cannot be loaded.
    """
    loop = asyncio.get_running_loop()
    stopping = asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stopping.set)
    if parent_pid is not None:
        follow_parent(parent_pid, lambda: loop.call_soon_threadsafe(stopping.set))
    sys.setswitchinterval(deadlines.EMBEDDED_SWITCH_INTERVAL)
    loading = loop.create_task(load(options, loop, stopping))
    app = application(
        loading, EngineAccess(is_loopback(listener.getsockname()[0]), inference_only), key
    )
    logging.getLogger("aiohttp.server").addFilter(_is_no_http2_preface)
    runner = web.AppRunner(
        app,
        handler_cancellation=True,
        access_log=None,
        shutdown_timeout=deadlines.EMBEDDED_SEND_ANSWERS,
    )
    await runner.setup()
    await web.SockSite(runner, listener).start()
    stop = loop.create_task(stopping.wait())
    try:
        await asyncio.wait({loading, stop}, return_when=asyncio.FIRST_COMPLETED)
        if not loading.done():
            return 0
        state = loading.result()
        host, port = listener.getsockname()[:2]
        logger.info(
            "serving %s on http://%s:%d (%d threads)",
            state.model_name,
            host,
            port,
            torch.get_num_threads(),
        )
        await stopping.wait()
        return await _shut_down(state)
    finally:
        stop.cancel()
        await runner.cleanup()


def application(
    loading: asyncio.Task[ServerState], access: EngineAccess, key: str = ""
) -> web.Application:
    """Build the server's routes, which answer with status 503 until ``loading`` is done."""
    app = web.Application(
        middlewares=[_guarding(access, key), _errors], client_max_size=_LARGEST_BODY
    )
    for module in (generate_routes, control_routes, openai_routes):
        app.add_routes(module.routes)
    app[STATE] = loading
    return app


async def load(
    options: EngineOptions, loop: asyncio.AbstractEventLoop, stopping: asyncio.Event
) -> ServerState:
    """Load model and tokenizer, and start the engine's thread.

    Args:
        stopping: set when that thread dies.
    Raises:
        UserError: the model cannot be loaded.
    """
    hub = Hub(loop)
    with ThreadPoolExecutor(2, thread_name_prefix="load") as pool:
        await loop.run_in_executor(pool, import_library_for, options.model_path)
        tokenizer_loading = loop.run_in_executor(pool, _tokenizer_of, options)
        if options.enable_multimodal:  # the tower imports transformers, as the tokenizer does
            await asyncio.wait([tokenizer_loading])
        engine = await loop.run_in_executor(pool, Engine, options, hub.deliver)
        tokenizer = await tokenizer_loading
    engine.on_death = lambda: loop.call_soon_threadsafe(stopping.set)
    engine.start()
    limits = RequestLimits(
        vocab_size=engine.arch.spec.vocab_size,
        context_length=engine.max_length,
        eos_token_ids=end_tokens(engine.arch, tokenizer),
        tokenizer=tokenizer,
        noise=random.Random(options.random_seed),
        records_experts=options.enable_return_routed_experts,
        adapters=engine.adapters,
        images=_image_requests(options, engine),
    )
    config = json.loads((Path(options.model_path) / "config.json").read_text())
    return ServerState(
        engine=engine,
        hub=hub,
        updater=WeightUpdater(engine),
        limits=limits,
        tokenizer=tokenizer,
        model_name=options.served_model_name or Path(options.model_path).name,
        tool_format=tool_format(
            chat_template(Path(options.model_path)), family_name(options.model_path)
        )
        if tokenizer is not None
        else None,
        architectures=list(config.get("architectures") or []),
        updates=ThreadPoolExecutor(8, thread_name_prefix="update"),
    )


def _image_requests(options: EngineOptions, engine: Engine) -> ImageRequests | None:
    vision = engine.arch.spec.vision
    if vision is None:
        return None
    reader = ImageReader(options.model_path, options.image_max_pixels)
    return ImageRequests(reader, vision, options.limit_images)


async def _shut_down(state: ServerState) -> int:
    """Abort and answer all requests in flight, then end the threads; return the exit status."""
    died = state.engine.death is not None
    if not died:
        with contextlib.suppress(EngineDead):
            state.engine.abort(lambda sequence: True, "the server is shutting down")
            state.engine.resume()
    deadline = asyncio.get_running_loop().time() + deadlines.EMBEDDED_FINISH_REQUESTS
    while state.hub.in_flight and asyncio.get_running_loop().time() < deadline:
        await asyncio.sleep(0.02)
    state.engine.stop()
    state.updates.shutdown(wait=False, cancel_futures=True)
    counters = state.engine.scheduler.counters
    logger.info(
        "stopping, %d tokens decoded and %d prefilled",
        counters.decoded_tokens,
        counters.prefilled_tokens,
    )
    return 1 if died else 0


def _guarding(access: EngineAccess, key: str) -> Middleware:
    """Refuse requests that are not admitted or lack the right key, before their body is read."""

    @web.middleware
    async def guard(request: web.Request, handler: Handler) -> web.StreamResponse:
        if told := access.refusal(request.path, request.headers):
            return _refusal(request, told, 403, "forbidden")
        if admits(key, request.method, request.path, request.headers.get("Authorization", "")):
            return await handler(request)
        said = (
            f"this engine asks for the key of its run, or of its {VARIABLE} (Authorization: "
            "Bearer KEY)"
        )
        return _refusal(request, said, 401, "unauthorized")

    return guard


@web.middleware
async def _errors(request: web.Request, handler: Handler) -> web.StreamResponse:
    """Answer errors with JSON and a message. An unexpected exception becomes status 500, with the
    traceback in the log."""
    try:
        return await handler(request)
    except BadRequest as error:
        return _refusal(request, str(error), 400, "invalid_request_error", error.field)
    # RequestPayloadError: the body does not have the encoding that its header names
    except (UserError, web.RequestPayloadError) as error:
        return _refusal(request, str(error), 400, "invalid_request_error")
    except (Unavailable, EngineDead) as error:
        return _refusal(request, str(error), 503, "unavailable")
    except TimeoutError:
        return _refusal(request, "the engine thread did not answer in time", 503, "unavailable")
    except web.HTTPException as error:
        return _refusal(
            request, f"{request.method} {request.path}: {error.reason}", error.status, "not_found"
        )
    except asyncio.CancelledError:
        raise
    except Exception as error:
        logger.exception("%s %s failed", request.method, request.path)
        return _refusal(request, f"{type(error).__name__}: {error}", 500, "internal_error")


def _is_no_http2_preface(record: logging.LogRecord) -> bool:
    """Filter from the log the tracebacks of the router's gRPC probe of every new worker."""
    error = record.exc_info[1] if record.exc_info else None
    return not (isinstance(error, BadHttpMessage) and "PRI/Upgrade" in str(error))


def _refusal(
    request: web.Request, message: str, status: int, kind: str, param: str | None = None
) -> web.Response:
    """Build an error response like SGLang: on OpenAI's routes the body is the error, on other
    routes it has a field ``error``."""
    error = {"message": message, "type": kind, "param": param, "code": status}
    is_openai = request.path.startswith("/v1/")
    return json_response(
        {"object": "error", **error} if is_openai else {"error": error}, status=status
    )


def end_tokens(arch: Architecture, tokenizer: Any) -> frozenset[int]:
    """Return the tokens that end an answer, of config and tokenizer; those for which the model has
    no output are left out."""
    found = set(arch.eos_token_ids)
    if tokenizer is not None and tokenizer.eos_token_id is not None:
        found.add(tokenizer.eos_token_id)
    return frozenset(token for token in found if 0 <= token < arch.spec.vocab_size)


def _tokenizer_of(options: EngineOptions) -> Any:
    """Load the model's tokenizer; return None if its directory has none."""
    model_path = options.model_path
    names = ("tokenizer.json", "tokenizer_config.json", "tokenizer.model", "vocab.json")
    if not any((Path(model_path) / name).is_file() for name in names):
        logger.warning(
            "%s has no tokenizer: requests must bring input_ids, answers carry no text", model_path
        )
        return None
    return load_tokenizer(model_path, trust_remote_code=options.trust_remote_code)
