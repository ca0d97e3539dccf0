"""Routes that control the engine (abort, pause, flush, memory, weights, adapters, reports), and
SGLang's unsupported routes."""

from __future__ import annotations

import asyncio
import hashlib
import tempfile
import time
from collections.abc import Awaitable, Callable, Mapping
from concurrent.futures import Future
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch
from aiohttp import web

import slime
from slime import deadlines
from slime.embedded.adapters import AdapterTable, check_added_tokens
from slime.embedded.engine import describe_adapters, load_report
from slime.embedded.generate_request import refuse_unknown
from slime.embedded.generate_routes import ServerState, json_body, json_response, state_of
from slime.embedded.sequence import Sequence
from slime.embedded.serialized_tensors import read_named_tensors
from slime.embedded.weight_update import ABILITIES, NAME, PATH, WeightUpdater
from slime.embedded.weights import WeightError, describe
from slime.engines.request_fields import (
    FLAG,
    OBJECT,
    TEXT,
    BadRequest,
    FieldKind,
    integer,
    number,
    one_of,
    optional,
    required,
    strings,
)
from slime.observe.torch_profile import TRACE_SUFFIX, TorchProfile

_TAGS = ("weights", "kv_cache", "cuda_graph")
_TAG = one_of(*_TAGS)
_UP_TO_600 = number(lambda x: 0 <= x <= 600, "")
_PAUSE_MODE = one_of("abort", "retract", "in_place")
_WAIT_LIMIT = FieldKind(
    "a number of seconds from 0 to 600", lambda text: _UP_TO_600.convert(float(text))
)

routes = web.RouteTableDef()


async def _on_engine(future: Future[Any]) -> Any:
    return await asyncio.wait_for(asyncio.wrap_future(future), deadlines.CONTROL_ROUTES_COMMAND)


Handler = Callable[[ServerState, dict[str, Any]], Awaitable[web.Response]]


def _post(path: str, *, also_get: bool = False) -> Callable[[Handler], Handler]:
    """Register a handler of a path; it receives the server's state and the request's body. A
    `WeightError` becomes status 400."""

    def register(handler: Handler) -> Handler:
        async def answer(request: web.Request) -> web.Response:
            try:
                return await handler(state_of(request), await json_body(request))
            except WeightError as error:
                return json_response({"success": False, "message": str(error)}, status=400)

        for method in ("GET", "POST") if also_get else ("POST",):
            routes.route(method, path)(answer)
        return handler

    return register


# -- reports ---------------------------------------------------------------------------------------


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
    load, adapters = await _on_engine(
        engine.call(lambda: (load_report(engine), describe_adapters(engine)))
    )
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
            "enable_return_routed_experts": options.enable_return_routed_experts,
            "max_total_num_tokens": load["max_total_num_tokens"],
            "weights": describe(engine.store),
            "memory": {"weights_bytes": engine.store.nbytes, "kv_cache_bytes": engine.cache.nbytes},
            "paused": engine.paused,
            "internal_states": [load],
            "version": f"slime-embedded {slime.__version__}",
            "enable_lora": engine.adapters.enabled,
            "adapters": adapters,
            "abilities": replace(ABILITIES, adapters=engine.adapters.enabled).to_json(),
        }
    )


@routes.get("/get_load")
async def get_load(request: web.Request) -> web.Response:
    """Return SGLang's former load report, for the router's ``power_of_two`` policy."""
    engine = state_of(request).engine
    load = await _on_engine(engine.call(lambda: load_report(engine)))
    waiting = load["num_waiting_reqs"]
    held = load["num_total_tokens"]
    report = {
        "dp_rank": load["dp_rank"],
        "num_reqs": load["num_running_reqs"] + waiting,
        "num_waiting_reqs": waiting,
        "num_tokens": held,
        "num_pending_tokens": held - load["num_used_tokens"],
        "ts_tic": time.perf_counter(),
    }
    return json_response([report])


@routes.get("/v1/loads")
async def loads(request: web.Request) -> web.Response:
    engine = state_of(request).engine
    load = await _on_engine(engine.call(lambda: load_report(engine)))
    return json_response(
        {"timestamp": datetime.now(UTC).isoformat(), "version": slime.__version__, "loads": [load]},
    )


# -- requests in flight ----------------------------------------------------------------------------


@_post("/abort_request")
async def abort_request(state: ServerState, body: dict[str, Any]) -> web.Response:
    rid = optional(body, "rid", TEXT, "")
    everything = optional(body, "abort_all", FLAG, False)
    if not everything and not rid:
        raise BadRequest("give rid, or abort_all: true", "rid")

    def matches(sequence: Sequence) -> bool:
        return everything or sequence.rid == rid or sequence.rid.startswith(f"{rid}_")

    state.engine.abort(matches, optional(body, "abort_message", TEXT, "Aborted by AbortReq."))
    return web.Response()


@_post("/pause_generation")
async def pause_generation(state: ServerState, body: dict[str, Any]) -> web.Response:
    await _on_engine(state.engine.pause(optional(body, "mode", _PAUSE_MODE, "abort")))
    return json_response({"message": "Generation paused successfully.", "status": "ok"})


@routes.post("/continue_generation")
async def continue_generation(request: web.Request) -> web.Response:
    await _on_engine(state_of(request).engine.resume())
    return json_response({"message": "Generation continued successfully.", "status": "ok"})


@routes.get("/flush_cache")
@routes.post("/flush_cache")
async def flush_cache(request: web.Request) -> web.Response:
    engine = state_of(request).engine
    end = time.monotonic() + _WAIT_LIMIT.read("timeout", request.query.get("timeout", "0"))

    def flush() -> int:
        if not engine.scheduler.num_active:
            engine.scheduler.flush()
        return engine.scheduler.num_active

    while (active := await _on_engine(engine.call(flush))) and time.monotonic() < end:
        await asyncio.sleep(0.02)
    if active:
        return web.Response(status=400, text=f"Cache not flushed: {active} requests are running.\n")
    return web.Response(text="Cache flushed.\n")


# -- memory ----------------------------------------------------------------------------------------


def _tags(body: dict[str, Any]) -> set[str]:
    return {_TAG.read("tags", tag) for tag in optional(body, "tags", strings(), _TAGS)}


@_post("/release_memory_occupation", also_get=True)
async def release_memory(state: ServerState, body: dict[str, Any]) -> web.Response:
    engine = state.engine
    tags = _tags(body)

    def release() -> None:
        if engine.scheduler.has_work:
            raise BadRequest(
                f"memory cannot be released while {len(engine.scheduler.everything())} requests "
                "are there"
            )
        if "kv_cache" in tags:
            engine.scheduler.slots.reset()
            engine.cache.release()
        if "weights" in tags:
            engine.store.release()
            engine.adapters.release()
        engine.released |= tags

    await _on_engine(engine.call(release))
    return web.Response()


@_post("/resume_memory_occupation", also_get=True)
async def resume_memory(state: ServerState, body: dict[str, Any]) -> web.Response:
    engine = state.engine
    tags = _tags(body)

    def resume() -> None:
        if "weights" in tags & engine.released:
            engine.store.resume()
            engine.adapters.resume()
        engine.released -= tags

    await _on_engine(engine.call(resume))
    return web.Response()


# -- weights ---------------------------------------------------------------------------------------


def _update_route(path: str, method: Callable[[WeightUpdater, dict[str, Any]], str]) -> None:
    @_post(path)
    async def update(state: ServerState, body: dict[str, Any]) -> web.Response:
        loop = asyncio.get_running_loop()
        message = await loop.run_in_executor(state.updates, method, state.updater, body)
        return json_response({"success": True, "message": message})


for _path, _method in WeightUpdater.ROUTES.items():
    _update_route(_path, getattr(WeightUpdater, _method))


@_post("/update_weight_version")
async def update_weight_version(state: ServerState, body: dict[str, Any]) -> web.Response:
    version = required(body, "new_version", TEXT)

    def set_version() -> None:
        state.engine.store.version = version

    await _on_engine(state.engine.call(set_version))
    return json_response(
        {"success": True, "message": "Weight version updated.", "new_version": version}
    )


@_post("/get_weights_by_name", also_get=True)
async def get_weights_by_name(state: ServerState, body: dict[str, Any]) -> web.Response:
    """Return the first rows of a parameter as nested lists, for inspection."""
    engine = state.engine
    name = required(body, "name", TEXT)
    count = optional(body, "truncate_size", integer(1, 10_000), 100)
    try:
        values = await _on_engine(
            engine.call(lambda: engine.store.parameter(name)[:count].float().tolist())
        )
    except WeightError as error:
        raise BadRequest(str(error), "name") from error
    return json_response(values)


@_post("/weights_checker", also_get=True)
async def weights_checker(state: ServerState, body: dict[str, Any]) -> web.Response:
    engine = state.engine
    store = engine.store
    chosen = optional(body, "names", strings(), None)
    name = optional(body, "lora_name", TEXT, None)
    version: str | None = None
    more: dict[str, Any] = {}
    if name is not None:  # an adapter's tensors, as the engine uses them
        optional(body, "action", one_of("fingerprint", "checksum"), "fingerprint")
        adapter = engine.adapters.find(name, "lora_name")
        found = await _on_engine(engine.call(lambda: adapter.fingerprints(chosen)))
        more = {"lora_name": name, "fingerprints": found, "loaded": len(adapter.names)}
        version = adapter.version
    else:
        actions: dict[str, Callable[[], Any]] = {
            "fingerprint": lambda: store.fingerprints(chosen),
            "checksum": lambda: store.fingerprints(chosen),
            "snapshot": store.take_snapshot,
            "reset_tensors": store.reset,
            "compare": store.compare,
        }
        action = optional(body, "action", one_of(*actions), "fingerprint")
        found = await _on_engine(engine.call(actions[action]))
        if found is not None:
            more = {
                "fingerprints": found,
                "loaded": len(store.pushed),
                "missing": store.missing(),
            }
    stated = {"weight_version": store.version if version is None else version}
    return json_response({"success": True, "message": "Success."} | stated | more)


# -- adapters --------------------------------------------------------------------------------------

_LOAD_FORMAT = one_of("flattened_bucket")
_OF_ANY_LOAD = ("lora_name", "pinned", "weight_version")
_OF_DIRECTORY = (*_OF_ANY_LOAD, "lora_path")
_OF_TENSORS = (
    *_OF_ANY_LOAD, "config_dict", "serialized_tensors", "load_format", "expected_checksums",
    "added_tokens_config",
)  # fmt: skip


def _load_directory(adapters: AdapterTable, body: Mapping[str, Any]) -> None:
    refuse_unknown(body, _OF_DIRECTORY, (), ("lora_id",))
    name = required(body, "lora_name", NAME)
    adapters.load_directory(name, required(body, "lora_path", PATH), **_load_options(body))


def _load_tensors(adapters: AdapterTable, body: Mapping[str, Any]) -> None:
    refuse_unknown(body, _OF_TENSORS, (), ("lora_id",))
    name = required(body, "lora_name", NAME)
    config = required(body, "config_dict", OBJECT)
    load_format = optional(body, "load_format", _LOAD_FORMAT, None)
    added = optional(body, "added_tokens_config", OBJECT, {})
    check_added_tokens(added, adapters.vocab_size)
    payload = required(body, "serialized_tensors", TEXT)
    pairs = read_named_tensors(payload, load_format, "serialized_tensors")
    tensors = dict(pairs)
    if len(tensors) < len(pairs):
        raise WeightError("serialized_tensors has a name twice")
    expected = optional(body, "expected_checksums", OBJECT, None)
    if expected is not None:
        _compare(expected, tensors)
    adapters.load(name, config, tensors, **_load_options(body))


def _unload(adapters: AdapterTable, body: Mapping[str, Any]) -> None:
    refuse_unknown(body, ("lora_name",), (), ("lora_id",))
    adapters.unload(required(body, "lora_name", NAME))


def _load_options(body: Mapping[str, Any]) -> dict[str, Any]:
    return {
        "pinned": optional(body, "pinned", FLAG, False),
        "version": optional(body, "weight_version", TEXT, None),
    }


def _compare(expected: Mapping[str, Any], tensors: Mapping[str, torch.Tensor]) -> None:
    """Compare tensors with SGLang's checksums: sha256 of the received bytes.

    Raises:
        WeightError: a checksum differs, is missing or was not expected; names the tensor.
    """
    for name in expected:
        if name not in tensors:
            raise WeightError(f"expected_checksums names {name}, which is not among the tensors")
    for name, tensor in tensors.items():
        if name not in expected:
            raise WeightError(f"expected_checksums has none for {name}")
        raw = tensor.detach().contiguous().flatten().view(torch.uint8).numpy()
        found = hashlib.sha256(raw.data).hexdigest()
        if found != expected[name]:
            raise WeightError(
                f"{name} has another checksum than expected ({found[:8]}…, not "
                f"{str(expected[name])[:8]}…)"
            )


def _adapter_route(path: str, change: Callable[[AdapterTable, Mapping[str, Any]], None]) -> None:
    """Register a route that changes the adapters, with SGLang's request and answer. A load may have
    the additional field ``weight_version``, the version that all tokens of requests with this
    adapter report."""

    @_post(path)
    async def answer(state: ServerState, body: dict[str, Any]) -> web.Response:
        adapters = state.engine.adapters
        message = ""
        try:
            await asyncio.get_running_loop().run_in_executor(state.updates, change, adapters, body)
        except (WeightError, BadRequest) as error:
            message = str(error)
        report = {
            "success": not message,
            "error_message": message,
            "loaded_adapters": {name: one.path for name, one in adapters.loaded.items()},
        }
        return json_response(report, status=400 if message else 200)


_adapter_route("/load_lora_adapter", _load_directory)
_adapter_route("/load_lora_adapter_from_tensors", _load_tensors)
_adapter_route("/unload_lora_adapter", _unload)


# -- profiling -------------------------------------------------------------------------------------


@_post("/start_profile")
async def start_profile(state: ServerState, body: dict[str, Any]) -> web.Response:
    """Start the profiler on the engine thread, as SGLang's route does."""
    folder = Path(optional(body, "output_dir", TEXT, tempfile.gettempdir()))
    name = optional(body, "profile_id", TEXT, str(time.time()))
    if state.profile is not None:
        raise BadRequest("the profiler is running; /stop_profile ends it")
    path = folder / f"{name}-TP-0{TRACE_SUFFIX}"
    state.profile = await _on_engine(state.engine.call(lambda: TorchProfile(path)))
    return web.Response(text="Start profiling.\n")


@_post("/stop_profile")
async def stop_profile(state: ServerState, body: dict[str, Any]) -> web.Response:
    profile = state.profile
    if profile is None:
        raise BadRequest("the profiler is not running; /start_profile starts it")
    state.profile = None
    await _on_engine(state.engine.call(profile.stop))
    return web.Response(text="Stop profiling. This will take some time.\n")


# -- what SGLang's server has besides --------------------------------------------------------------

_EMBEDDING = "this is a model for generation, not for embeddings or classification"
_SESSIONS = "it keeps no sessions; prompts that share a prefix find it in the cache without one"

#: Path → why it is unsupported. The status is 400, because OpenAI's client retries after 501.
REFUSED = {
    "/encode": _EMBEDDING,
    "/classify": _EMBEDDING,
    "/v1/embeddings": _EMBEDDING,
    "/v1/classify": _EMBEDDING,
    "/v1/rerank": _EMBEDDING,
    "/v1/score": "ask /generate for input log-probs (return_logprob, logprob_start_len) instead",
    "/v1/responses": "it speaks /v1/chat/completions and /v1/completions",
    "/v1/messages": "it speaks /v1/chat/completions and /v1/completions",
    "/concate_and_append_request": "SGLang has taken this route out, too",
    "/open_session": _SESSIONS,
    "/close_session": _SESSIONS,
    "/parse_function_call": (
        "it has no tool-call parser; the text of an answer is returned as it is"
    ),
    "/separate_reasoning": "it has no reasoning parser; the text of an answer is returned as it is",
    "/update_weights_from_ipc": "use /update_weights_from_tensor, _distributed or _disk",
    "/set_internal_state": "its settings come from its command line",
    "/configure_logging": "its settings come from its command line",
    "/metrics": "ask /v1/loads or /server_info for its counters",
}


async def _refuse(request: web.Request) -> web.Response:
    raise BadRequest(
        f"the embedded engine does not support {request.path}: {REFUSED[request.path]}"
    )


for _path in REFUSED:
    routes.route("*", _path)(_refuse)
