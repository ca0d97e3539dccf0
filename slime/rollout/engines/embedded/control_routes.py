"""Routes that steer the engine: abort, pause, flush, memory, weights and reports."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from concurrent.futures import Future
from datetime import UTC, datetime
from typing import Any, get_args

from aiohttp import web

import slime
from slime.rollout.engines.embedded.engine import PauseMode, as_state
from slime.rollout.engines.embedded.sampling_params import BadRequest
from slime.rollout.engines.embedded.sequence import Sequence
from slime.rollout.engines.embedded.state import ServerState, json_body, json_response, state_of
from slime.rollout.engines.embedded.weights import WeightError, describe

_ORDER_DEADLINE = 120.0  # seconds until the engine thread must have taken an order up: a step, at most
_TAGS = ("weights", "kv_cache", "cuda_graph")

routes = web.RouteTableDef()


async def _on_engine(future: Future[Any]) -> Any:
    return await asyncio.wait_for(asyncio.wrap_future(future), _ORDER_DEADLINE)


# -- reports -------------------------------------------------------------------------------------------


@routes.get("/model_info")
@routes.get("/get_model_info")
async def model_info(request: web.Request) -> web.Response:
    engine = state_of(request).engine
    return json_response(
        {
            "model_path": engine.options.model_path,
            "tokenizer_path": engine.options.model_path,
            "is_generation": True,
            "preferred_sampling_params": None,
            "weight_version": engine.store.version,
            "has_image_understanding": False,
            "has_audio_understanding": False,
            "model_type": engine.arch.model_type,
            "architectures": state_of(request).architectures,
        }
    )


@routes.get("/server_info")
@routes.get("/get_server_info")
async def server_info(request: web.Request) -> web.Response:
    state = state_of(request)
    engine = state.engine
    load = await _on_engine(engine.call(lambda: as_state(engine)))
    options = engine.options
    return json_response(
        {
            "model_path": options.model_path,
            "tokenizer_path": options.model_path,
            "served_model_name": state.model_name,
            "tp_size": 1,
            "dp_size": 1,
            "device": engine.device.type,
            "dtype": str(engine.store.dtype).removeprefix("torch."),
            "context_length": engine.max_length,
            "max_running_requests": options.max_slots,
            "random_seed": options.random_seed,
            "enable_deterministic_inference": options.deterministic,
            "max_total_num_tokens": load["max_total_num_tokens"],
            "weights": describe(engine.store),
            "memory": {"weights_bytes": engine.store.nbytes, "kv_cache_bytes": engine.cache.nbytes},
            "paused": engine.paused,
            "internal_states": [load],
            "version": f"slime-embedded {slime.__version__}",
        }
    )


@routes.get("/v1/loads")
async def loads(request: web.Request) -> web.Response:
    engine = state_of(request).engine
    load = await _on_engine(engine.call(lambda: as_state(engine)))
    return json_response(
        {"timestamp": datetime.now(UTC).isoformat(), "version": slime.__version__, "loads": [load]},
    )


# -- requests in flight --------------------------------------------------------------------------------


@routes.post("/abort_request")
async def abort_request(request: web.Request) -> web.Response:
    body = await json_body(request)
    rid = body.get("rid") or ""
    if not body.get("abort_all") and not rid:
        raise BadRequest("give rid, or abort_all: true")

    def matches(sequence: Sequence) -> bool:
        return bool(body.get("abort_all")) or sequence.rid == rid or sequence.rid.startswith(f"{rid}_")

    state_of(request).engine.abort(matches, body.get("abort_message") or "Aborted by AbortReq.")
    return web.Response()


@routes.post("/pause_generation")
async def pause_generation(request: web.Request) -> web.Response:
    mode: PauseMode = (await json_body(request)).get("mode") or "abort"
    if mode not in get_args(PauseMode):
        raise BadRequest(f"mode must be abort, retract or in_place, got {mode!r}")
    await _on_engine(state_of(request).engine.pause(mode))
    return json_response({"message": "Generation paused successfully.", "status": "ok"})


@routes.post("/continue_generation")
async def continue_generation(request: web.Request) -> web.Response:
    await _on_engine(state_of(request).engine.resume())
    return json_response({"message": "Generation continued successfully.", "status": "ok"})


@routes.get("/flush_cache")
@routes.post("/flush_cache")
async def flush_cache(request: web.Request) -> web.Response:
    engine = state_of(request).engine
    timeout = float(request.query.get("timeout", 0))
    end = time.monotonic() + timeout

    def flush() -> int:
        if not engine.scheduler.num_active:
            engine.scheduler.flush()
        return engine.scheduler.num_active

    while (active := await _on_engine(engine.call(flush))) and time.monotonic() < end:
        await asyncio.sleep(0.02)
    if active:
        return web.Response(status=400, text=f"Cache not flushed: {active} requests are running.\n")
    return web.Response(text="Cache flushed.\n")


# -- memory --------------------------------------------------------------------------------------------


def _tags(body: dict[str, Any]) -> set[str]:
    tags = body.get("tags") or list(_TAGS)
    unknown = [tag for tag in tags if tag not in _TAGS]
    if unknown:
        raise BadRequest(f"unknown tag {unknown[0]!r}; the tags are {', '.join(_TAGS)}")
    return set(tags)


@routes.post("/release_memory_occupation")
async def release_memory(request: web.Request) -> web.Response:
    engine, tags = state_of(request).engine, _tags(await json_body(request))

    def release() -> None:
        if engine.scheduler.has_work:
            raise BadRequest(f"memory cannot be released while {len(engine.scheduler.everything())} requests are there")
        if "kv_cache" in tags:
            engine.scheduler.slots.reset()
            engine.cache.release()
        if "weights" in tags:
            engine.store.release()
        engine.released |= tags

    await _on_engine(engine.call(release))
    return web.Response()


@routes.post("/resume_memory_occupation")
async def resume_memory(request: web.Request) -> web.Response:
    engine, tags = state_of(request).engine, _tags(await json_body(request))

    def resume() -> None:
        if "weights" in tags & engine.released:
            engine.store.resume()
        engine.released -= tags

    await _on_engine(engine.call(resume))
    return web.Response()


# -- weights -------------------------------------------------------------------------------------------


async def _update(request: web.Request, apply: Callable[[ServerState], Callable[[Any], str]]) -> web.Response:
    state, body = state_of(request), await json_body(request)
    try:
        message = await asyncio.get_running_loop().run_in_executor(state.updates, apply(state), body)
    except WeightError as error:
        return json_response({"success": False, "message": str(error)}, status=400)
    return json_response({"success": True, "message": message})


@routes.post("/update_weights_from_tensor")
async def update_from_tensor(request: web.Request) -> web.Response:
    return await _update(request, lambda state: state.updater.from_tensor)


@routes.post("/update_weights_from_distributed")
async def update_from_distributed(request: web.Request) -> web.Response:
    return await _update(request, lambda state: state.updater.from_distributed)


@routes.post("/update_weights_from_disk")
async def update_from_disk(request: web.Request) -> web.Response:
    return await _update(request, lambda state: state.updater.from_disk)


@routes.post("/init_weights_update_group")
async def init_group(request: web.Request) -> web.Response:
    return await _update(request, lambda state: state.updater.join_group)


@routes.post("/destroy_weights_update_group")
async def destroy_group(request: web.Request) -> web.Response:
    return await _update(request, lambda state: state.updater.leave_group)


@routes.post("/update_weight_version")
async def update_weight_version(request: web.Request) -> web.Response:
    engine, body = state_of(request).engine, await json_body(request)
    if not isinstance(body.get("new_version"), str):
        raise BadRequest("new_version must be a string")

    def set_version() -> None:
        engine.store.version = body["new_version"]

    await _on_engine(engine.call(set_version))
    return json_response({"success": True, "message": "Weight version updated.", "new_version": body["new_version"]})


@routes.get("/weights_checker")
@routes.post("/weights_checker")
async def weights_checker(request: web.Request) -> web.Response:
    engine, body = state_of(request).engine, await json_body(request)
    store, action = engine.store, body.get("action") or "fingerprint"
    actions: dict[str, Callable[[], Any]] = {
        "fingerprint": lambda: store.fingerprints(body.get("names")),
        "checksum": lambda: store.fingerprints(body.get("names")),
        "snapshot": store.take_snapshot,
        "reset_tensors": store.reset,
        "compare": store.compare,
    }
    if action not in actions:
        raise BadRequest(f"unknown action {action!r}; the actions are {', '.join(actions)}")
    try:
        result = await _on_engine(engine.call(actions[action]))
    except WeightError as error:
        return json_response({"success": False, "message": str(error)}, status=400)
    answer: dict[str, Any] = {"success": True, "message": "Success.", "weight_version": store.version}
    if result is not None:
        answer["fingerprints"] = result
    return json_response(answer)
