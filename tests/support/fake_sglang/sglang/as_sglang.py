"""The embedded engine's server, turned into one that takes and refuses what stock SGLang takes and
refuses.

Its extensions go (shared memory, fingerprints by name), SGLang's ways come: pickles with an allow
list and one payload per tensor-parallel rank, custom weight loaders on modules with SGLang's fused
and sharded parameters, one group member per rank, memory tags that must be released before they are
taken back, adapters of which it checks little (`sglang.lora`), and tokens that end it while memory
is away.
"""

from __future__ import annotations

import argparse
import asyncio
import base64
import importlib
import io
import json
import os
import pickle
import threading
import time
from collections.abc import Awaitable, Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from aiohttp import web

from sglang import RELEASE, __version__
from sglang.lora import ROUTES, LoRAManager
from sglang.modules import loaded_together, sharded_model
from sglang.scheduler import NO_MEMORY, die, generates
from slime.embedded.generate_routes import health_generate, json_response, state_of
from slime.embedded.weight_update import WeightUpdater
from slime.embedded.weights import WeightError, WeightStore
from slime.engines.api import WEIGHT_LOADER, WEIGHT_PROBE
from slime.engines.sglang.weight_probe import Tree
from slime.engines.wire.buckets import entries_of, unpack
from slime.engines.wire.process_group import ExternalGroup

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]

#: Modules that SGLang's reader of pickles lets through, by the beginnings of their names.
ALLOWED = (
    "builtins.", "collections.", "copyreg.", "functools.", "itertools.", "operator.", "types.",
    "weakref.", "torch.", "multiprocessing.resource_sharer.", "multiprocessing.reduction.",
    "pickletools.", "peft.", "transformers.", "huggingface_hub.", "sglang.srt.",
)  # fmt: skip
#: Ends of names of what stands beside quantised weights.
QUANTISED = (".weight_scale", ".weight_scale_inv", ".weight_packed")
_BEGIN, _END = "/begin_weight_update", "/end_weight_update"
_JOIN_SECONDS = 60.0
_read_files = WeightUpdater.from_disk


class SGLangUnpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        if not any((module + ".").startswith(prefix) for prefix in ALLOWED):
            raise RuntimeError(f"Blocked unsafe class loading ({module}.{name})")
        return super().find_class(module, name)


class SGLangUpdater:
    """Replaces the methods of `WeightUpdater` by SGLang's behaviour."""

    def __init__(self, args: argparse.Namespace) -> None:
        self.args = args
        self.groups: dict[str, list[ExternalGroup]] = {}
        self.lock = threading.Lock()
        self.is_open = (
            False  # layers of quantised weights take weights, and cannot be computed with
        )
        self.in_session = False
        self.models: list[torch.nn.Module] = []  # one for each rank, which custom loaders see
        self.lora_manager = LoRAManager(args)

    def begin_or_end(self, path: str) -> web.Response:
        """A session, in which weights are processed for the engine's kernels before it ends."""
        opens = path == _BEGIN
        problem = ""
        if opens and self.in_session:
            problem = "a weight-update session is already open; call end_weight_update() first"
        elif not opens and not self.in_session:
            problem = "no weight-update session is open; call begin_weight_update() first"
        self.in_session = opens or (self.in_session and bool(problem))
        report = {"success": not problem, "message": problem or "Success"}
        return json_response(report, status=400 if problem else 200)

    def _check_session(self) -> None:
        if RELEASE >= (0, 5, 21) and not self.in_session:
            raise WeightError(
                "update_weights must run between begin_weight_update() and end_weight_update()"
            )

    def _spare_draft(self, body: Mapping[str, Any]) -> None:
        """SGLang would load the tensors into its draft model, too."""
        newer = RELEASE >= (0, 5, 21)
        spared = body.get("selector") == "target" if newer else body.get("disable_draft_model")
        if self.args.speculative_draft_model_path and not spared:
            raise WeightError("the draft model would take the policy's tensors")

    def from_tensor(self, own: WeightUpdater, body: Mapping[str, Any]) -> str:
        self._check_session()
        self._spare_draft(body)
        payloads, load_format = body["serialized_named_tensors"], body.get("load_format")
        assert len(payloads) == self.args.tp_size, (
            f"{len(payloads)} payloads for {self.args.tp_size} ranks"
        )
        contents = [
            SGLangUnpickler(io.BytesIO(base64.b64decode(p, validate=True))).load() for p in payloads
        ]
        with self.lock:
            if (
                load_format not in (self.args.custom_weight_loader or ())
                or load_format == WEIGHT_LOADER
            ):
                self._check_open(own)
            if load_format in (self.args.custom_weight_loader or ()):
                self._run_loader(own._engine.store, load_format, contents)
                return own._apply([], body)
            assert load_format in (None, "flattened_bucket"), f"Unknown load_format={load_format}"
            ranks = [_pairs(content, load_format) for content in contents]
            for other in ranks[1:]:
                assert all(
                    torch.equal(a, b) for (_, a), (_, b) in zip(ranks[0], other, strict=True)
                )
            return own._apply(_taken(own, ranks[0]), body)

    def from_disk(self, own: WeightUpdater, body: Mapping[str, Any]) -> str:
        self._check_open(own)
        return _read_files(own, body)

    def _check_open(self, own: WeightUpdater) -> None:
        packed = [name for name in own._engine.store.names if name.endswith(QUANTISED)]
        assert self.is_open or not packed, (
            f"'Parameter' has no attribute 'weight_loader' ({packed[:1]})"
        )

    def _run_loader(self, store: WeightStore, path: str, contents: list[Any]) -> None:
        action = ""
        if path == WEIGHT_PROBE:
            [(_, raw)] = contents[0]
            action = json.loads(bytes(raw.numpy().tobytes()))["action"]
            self.is_open = action == "open" or (self.is_open and action != "close")
        module, _, name = path.rpartition(".")
        loader = getattr(importlib.import_module(module), name)
        real = dist.is_initialized, dist.get_rank
        self._refresh(store)
        for rank, content in enumerate(contents):
            dist.is_initialized, dist.get_rank = (lambda: True), (lambda rank=rank: rank)
            try:
                loader(self.models[rank], content)
            finally:
                dist.is_initialized, dist.get_rank = real
        if len(contents[0]) > 1 or action in ("mark", "open"):  # not only looked at
            for model in self.models:
                _take_back(model, store)

    def _refresh(self, store: WeightStore) -> None:
        """The ranks' models are the same ones at every call, with the weights that the engine has
        now."""
        now = [
            sharded_model(store.held, store.arch, rank, self.args.tp_size)
            for rank in range(self.args.tp_size)
        ]
        if not self.models:
            self.models = now
        for model, fresh in zip(self.models, now, strict=True):
            for old, new in zip(model.parameters(), fresh.parameters(), strict=True):
                old.data.copy_(new)

    def join_group(self, own: WeightUpdater, body: Mapping[str, Any]) -> str:
        count = self.args.tp_size

        def join(rank: int) -> ExternalGroup:
            return ExternalGroup.join(
                body["master_address"], body["master_port"], body["group_name"], body["backend"],
                body["rank_offset"] + rank, body["world_size"], _JOIN_SECONDS,
            )  # fmt: skip

        with ThreadPoolExecutor(count) as pool:
            self.groups[body["group_name"]] = list(pool.map(join, range(count)))
        return "Succeeded to initialize custom process group."

    def leave_group(self, own: WeightUpdater, body: Mapping[str, Any]) -> str:
        if body["group_name"] not in self.groups:
            raise WeightError("The group to be destroyed does not exist.")
        for group in self.groups.pop(body["group_name"]):
            group.close()
        return "Succeeded to destroy custom process group."

    def from_distributed(self, own: WeightUpdater, body: Mapping[str, Any]) -> str:
        group_name = body.get("group_name", "weight_update_group")
        if group_name not in self.groups:
            raise WeightError(f"Group {group_name} not in {list(self.groups)}.")
        self._check_session()
        if RELEASE >= (0, 5, 21):  # before, drafts took no broadcasts
            self._spare_draft(body)
        entries = entries_of(body["names"], body["dtypes"], body["shapes"])
        assert body.get("load_format") == "flattened_bucket"
        self._check_open(own)

        def receive(group: ExternalGroup) -> list[tuple[str, torch.Tensor]]:
            buffer = torch.empty(entries[-1].offset + entries[-1].nbytes, dtype=torch.uint8)
            group.broadcast(buffer, _JOIN_SECONDS)
            return list(unpack(buffer, entries))

        groups = self.groups[group_name]
        with ThreadPoolExecutor(len(groups)) as pool:
            ranks = list(pool.map(receive, groups))
        return own._apply(_taken(own, ranks[0]), body)


def _taken(
    own: WeightUpdater, pairs: list[tuple[str, torch.Tensor]]
) -> list[tuple[str, torch.Tensor]]:
    """What SGLang takes of one call."""
    return loaded_together(
        pairs, fuses=any(".q_a_proj." in name for name in own._engine.store.names)
    )


def _take_back(model: torch.nn.Module, store: WeightStore) -> None:
    """What a loader has put into a rank's parameters, into the weights that the engine generates
    with."""
    tree = Tree(model)
    for name, tensor in store.held.items():
        held = tree.find(name, tuple(tensor.shape))
        if held is not None:
            tensor.narrow(held.dim, held.start, held.stop - held.start).copy_(held.tensor)


def _pairs(content: Any, load_format: str | None) -> list[tuple[str, torch.Tensor]]:
    if load_format is None:
        return list(content)
    flat = content["flattened_tensor"]
    return [
        (row.name, flat[row.start_idx : row.end_idx].view(row.dtype).reshape(row.shape))
        for row in content["metadata"]
    ]


def install(args: argparse.Namespace) -> None:
    """From now on `embedded.serve` behaves as SGLang started with ``args``."""
    updater = SGLangUpdater(args)
    for name in ("from_tensor", "from_distributed", "from_disk", "join_group", "leave_group"):
        method = getattr(updater, name)
        setattr(WeightUpdater, name, lambda own, body, method=method: method(own, body))
    from slime.embedded import control_routes
    from slime.embedded import server as embedded

    # its routes take the methods as they are now; a fork has imported it before
    importlib.reload(control_routes)
    plain, calls, released = embedded._errors, Calls(args), set[str]()
    is_paused = False

    @web.middleware
    async def as_sglang(request: web.Request, handler: Handler) -> web.StreamResponse:
        nonlocal is_paused
        body = await _body(request)
        path = request.path
        if path in ("/pause_generation", "/continue_generation"):
            is_paused = path == "/pause_generation"
        elif path == "/update_weights_from_tensor":  # SGLang's lock of its weights
            while state_of(request).hub.in_flight and not is_paused:
                await asyncio.sleep(0.01)
        calls.note(path, body, is_asleep=bool(released))
        if path == os.environ.get("FAKE_SGLANG_DIES_AT") and _is_first_to_die():
            die(NO_MEMORY)
        if path in (_BEGIN, _END) and RELEASE >= (0, 5, 21):
            return updater.begin_or_end(path)
        if path in ROUTES:
            return await plain(request, lambda asked: updater.lora_manager.answer(asked, body))
        if generates(path):
            updater.lora_manager.check_request(body)
            if released & {"weights", "kv_cache"}:
                die(NO_MEMORY)
            if updater.is_open:
                die("RuntimeError: layers of quantised weights were not processed")
            return await plain(request, health_generate if path == "/health" else handler)
        if "memory_occupation" in path:
            problem = _memory(path, body, released, args)
            if problem:
                die(f"AssertionError: {problem}")
        elif (
            path.startswith("/update_weights")
            and "weights" in released
            and not _looks_only(body, args)
        ):
            return json_response({"success": False, "message": "weights are released"}, status=400)
        elif path == "/weights_checker":
            action = body.get("action", "checksum")
            if action not in ("snapshot", "reset_tensors", "compare", "checksum"):
                return json_response(
                    {"success": False, "message": f"Unsupported action='{action}'"}, status=400
                )
        elif path in ("/server_info", "/get_server_info"):
            answer = await plain(request, handler)
            known = json.loads(answer.body) if isinstance(answer, web.Response) else {}
            for own in ("abilities", "adapters"):  # SGLang states none
                known.pop(own, None)
            own_names = {"fp8_gemm_runner_backend": args.fp8_gemm_backend}
            return json_response({**known, **vars(args), **own_names, "version": __version__})
        return await plain(request, handler)

    embedded._errors = as_sglang
    if args.enable_memory_saver and not args.enable_weights_cpu_backup:
        WeightStore.resume = _resume_with_rubbish  # type: ignore[method-assign]


def _is_first_to_die() -> bool:
    once = os.environ.get("FAKE_SGLANG_DIES_ONCE")
    if once is None:
        return True
    try:
        Path(once).touch(exist_ok=False)
    except FileExistsError:
        return False
    return True


def _looks_only(body: Mapping[str, Any], args: argparse.Namespace) -> bool:
    """The probe may look at shapes while the memory is away."""
    return body.get("load_format") == WEIGHT_PROBE and WEIGHT_PROBE in (
        args.custom_weight_loader or ()
    )


def _memory(
    path: str, body: Mapping[str, Any], released: set[str], args: argparse.Namespace
) -> str:
    tags = set(body.get("tags") or ("kv_cache", "weights", "cuda_graph"))
    if not args.enable_memory_saver:
        return "memory saver is not enabled"
    if path == "/release_memory_occupation":
        if tags & released:
            return f"{tags & released} are released already"
        released |= tags
    else:
        if tags - released:
            return f"KeyError: {tags - released}"
        released -= tags
    return ""


_resume = WeightStore.resume


def _resume_with_rubbish(self: WeightStore) -> None:
    """Without a backup on the host, weights that come back are whatever the memory holds."""
    _resume(self)
    self.reset()


class Calls:
    """Appends steering calls to a file, for tests to look at their order, and what comes while
    memory is away."""

    STEERING = ("pause", "continue", "update", "memory", "flush", "checker", "group", "lora")

    def __init__(self, args: argparse.Namespace) -> None:
        self._path, self._port = os.environ.get("FAKE_SGLANG_CALLS"), args.port

    def note(self, path: str, body: Mapping[str, Any], *, is_asleep: bool) -> None:
        is_steering = path == "/generate" or any(word in path for word in self.STEERING)
        if self._path is None or not (is_steering or (is_asleep and path == "/health")):
            return
        row = {"at": time.monotonic(), "port": self._port, "path": path, "tags": body.get("tags")}
        row |= {
            key: body[key]
            for key in ("load_format", "weight_version", "action", "mode", "lora_name", "lora_path")
            if key in body
        }
        with open(self._path, "a", encoding="utf-8") as file:
            file.write(json.dumps(row) + "\n")


async def _body(request: web.Request) -> dict[str, Any]:
    if request.method != "POST" or not request.can_read_body:
        return {}
    try:
        found = json.loads(await request.read())
    except ValueError:
        return {}
    return found if isinstance(found, dict) else {}
