"""Routes that load and unload adapters, with the bodies and answers of SGLang's.

Beyond SGLang's fields a load may carry ``weight_version``: the version that tokens of requests with
this adapter report, whatever is pushed while they run.
"""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import Callable, Mapping
from typing import Any

import torch
from aiohttp import web

from slime.embedded.adapters import AdapterTable, check_added_tokens
from slime.embedded.generate_request import refuse_unknown
from slime.embedded.generate_routes import json_body, json_response, state_of
from slime.embedded.serialized_tensors import read_named_tensors
from slime.embedded.weight_update import NAME, PATH
from slime.embedded.weights import WeightError
from slime.engines.request_fields import (
    FLAG,
    OBJECT,
    TEXT,
    BadRequest,
    one_of,
    optional,
    required,
)

_LOAD_FORMAT = one_of("flattened_bucket")
_SHARED = ("lora_name", "pinned", "weight_version")
_OF_DIRECTORY = (*_SHARED, "lora_path")
_OF_TENSORS = (
    *_SHARED, "config_dict", "serialized_tensors", "load_format", "expected_checksums",
    "added_tokens_config",
)  # fmt: skip

routes = web.RouteTableDef()


def _load_directory(adapters: AdapterTable, body: Mapping[str, Any]) -> None:
    refuse_unknown(body, _OF_DIRECTORY, (), ("lora_id",))
    name = required(body, "lora_name", NAME)
    adapters.load_directory(name, required(body, "lora_path", PATH), **_shared(body))


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
    adapters.load(name, config, tensors, **_shared(body))


def _unload(adapters: AdapterTable, body: Mapping[str, Any]) -> None:
    refuse_unknown(body, ("lora_name",), (), ("lora_id",))
    adapters.unload(required(body, "lora_name", NAME))


def _shared(body: Mapping[str, Any]) -> dict[str, Any]:
    return {
        "pinned": optional(body, "pinned", FLAG, False),
        "version": optional(body, "weight_version", TEXT, None),
    }


def _compare(expected: Mapping[str, Any], tensors: Mapping[str, torch.Tensor]) -> None:
    """Compare tensors with SGLang's checksums: sha256 of the bytes as they came.

    Raises:
        WeightError: one differs, is missing or was not expected; names it.
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


def _route(path: str, change: Callable[[AdapterTable, Mapping[str, Any]], None]) -> None:
    @routes.post(path)
    async def answer(request: web.Request) -> web.Response:
        state = state_of(request)
        body = await json_body(request)
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


_route("/load_lora_adapter", _load_directory)
_route("/load_lora_adapter_from_tensors", _load_tensors)
_route("/unload_lora_adapter", _unload)
