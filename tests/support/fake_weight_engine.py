"""An engine that holds tensors and nothing else, for tests of weight sync; runs in a thread, on a
free port.

with FakeWeightEngine({"a": torch.zeros(4)}) as engine:
    sync.connect([engine.url]); sync.push()
    assert engine.calls == ["/pause_generation", "/update_weights_from_tensor", …]
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from aiohttp import web
from safetensors.torch import load_file

from slime.embedded.weight_update import ABILITIES
from slime.engines.wire.abilities import Abilities
from slime.engines.wire.buckets import TensorEntry, dtype_name, entries_of, fingerprint, unpack
from slime.engines.wire.process_group import ExternalGroup
from slime.engines.wire.shared_memory import attach

Corrupt = Callable[[dict[str, torch.Tensor]], None]


class FakeWeightEngine:
    """Knobs may be turned while it runs.

    Attributes:
        tensors: what the engine holds.
        calls: paths of the POST requests, in order; versions: weight versions that updates carried.
        senders: last part of the group's name, of each broadcast; updating: the group that
            broadcasts right now.
        corrupt: applied to the tensors after each push, before anything is compared.
        refuse_from: do not take part in the next broadcast of a group whose name ends so.
        fail: path → message: answer it with success=false.
        delay: path → seconds before it is answered.
        loads: names that each load call brought.
    """

    def __init__(
        self, tensors: dict[str, torch.Tensor], dtype: torch.dtype = torch.float32
    ) -> None:
        self.tensors = {
            name: tensor.detach().to(dtype, copy=True) for name, tensor in tensors.items()
        }
        self.dtype = dtype
        self.calls: list[str] = []
        self.versions: list[str] = []
        self.paused = False
        self.corrupt: Corrupt | None = None
        self.fail: dict[str, str] = {}
        self.delay: dict[str, float] = {}
        self.flush_refusals = 0
        self.abilities: Abilities | None = ABILITIES
        self.url = ""
        self._snapshot: dict[str, torch.Tensor] = {}
        self.senders: list[str] = []
        self.refuse_from = ""
        self.updating = ""
        self._groups: dict[str, ExternalGroup] = {}
        self.loads: list[set[str]] = []
        self._brought: set[str] = set()

    def __enter__(self) -> FakeWeightEngine:
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)
        self._thread.start()
        asyncio.run_coroutine_threadsafe(self._start(), self._loop).result(10)
        return self

    def __exit__(self, *exc: object) -> None:
        asyncio.run_coroutine_threadsafe(self._runner.cleanup(), self._loop).result(10)
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(10)
        self._loop.close()

    async def _start(self) -> None:
        app = web.Application()
        app.router.add_get("/server_info", self._info)
        app.router.add_post("/{path:.*}", self._post)
        self._runner = web.AppRunner(app, shutdown_timeout=0.2)
        await self._runner.setup()
        site = web.TCPSite(self._runner, "127.0.0.1", 0)
        await site.start()
        self.url = f"http://127.0.0.1:{self._runner.addresses[0][1]}"

    async def _info(self, _: web.Request) -> web.Response:
        stated = None if self.abilities is None else self.abilities.to_json()
        return web.json_response({"dtype": dtype_name(self.dtype), "abilities": stated})

    async def _post(self, request: web.Request) -> web.Response:
        path, body = request.path, await request.json()
        self.calls.append(path)
        await asyncio.sleep(self.delay.get(path, 0))
        if path in self.fail:
            return web.json_response({"success": False, "message": self.fail[path]})
        if path == "/flush_cache" and self.flush_refusals:
            self.flush_refusals -= 1
            return web.Response(status=400, text="requests are running")
        answer = await asyncio.to_thread(self._handle, path, body)
        return web.json_response({"success": True, **answer})

    def _handle(self, path: str, body: dict[str, Any]) -> dict[str, Any]:
        if path == "/pause_generation":
            self.paused = True
            self._brought = set()
        elif path == "/continue_generation":
            self.paused = False
        elif path == "/update_weights_from_tensor":
            for segment in body["segments"]:
                buffer = attach(segment["shm"], segment["nbytes"])
                self._load(
                    unpack(buffer, [TensorEntry.from_json(entry) for entry in segment["tensors"]]),
                    body,
                )
        elif path == "/init_weights_update_group":
            self._groups[body["group_name"]] = ExternalGroup.join(
                body["master_address"], body["master_port"], body["group_name"], body["backend"],
                body["rank_offset"], body["world_size"], timeout=30,
            )  # fmt: skip
        elif path == "/destroy_weights_update_group":
            self._groups.pop(body["group_name"]).close()
        elif path == "/update_weights_from_distributed":
            if self.refuse_from and body["group_name"].endswith(self.refuse_from):
                self.refuse_from = ""
                raise web.HTTPBadRequest(text="refused")
            assert not self.updating, f"{body['group_name']} sends while {self.updating} does"
            self.updating = body["group_name"]
            self.senders.append(self.updating.split("-")[-1])
            try:
                entries = entries_of(body["names"], body["dtypes"], body["shapes"])
                buffer = torch.empty(entries[-1].offset + entries[-1].nbytes, dtype=torch.uint8)
                self._groups[self.updating].broadcast(buffer, timeout=30)
                self._load(unpack(buffer, entries), body)
            finally:
                self.updating = ""
        elif path == "/update_weights_from_disk":
            for file in sorted(Path(body["model_path"]).glob("*.safetensors")):
                self._load(load_file(file).items(), body)
        elif path == "/weights_checker":
            return self._check(body)
        return {}

    def _load(self, tensors: Any, body: dict[str, Any]) -> None:
        pairs = list(tensors)
        self.loads.append({name for name, _ in pairs})
        self._brought |= self.loads[-1]
        for name, tensor in pairs:
            assert (
                self.tensors[name].shape == tensor.shape
                and self.tensors[name].dtype == tensor.dtype
            ), name
            self.tensors[name].copy_(tensor)
        self.versions.append(body["weight_version"])

    def _check(self, body: dict[str, Any]) -> dict[str, Any]:
        action = body["action"]
        if action == "snapshot":
            self._snapshot = {name: tensor.clone() for name, tensor in self.tensors.items()}
        elif action == "reset_tensors":
            for tensor in self.tensors.values():
                tensor.fill_(7)
        elif action == "fingerprint":
            if self.corrupt is not None:
                self.corrupt(self.tensors)
            names = list(self.tensors) if body["names"] is None else body["names"]
            found = {
                name: fingerprint(self.tensors[name]) for name in names if name in self.tensors
            }
            missing = sorted(set(self.tensors) - self._brought)
            return {"fingerprints": found, "loaded": len(self._brought), "missing": missing}
        return {}
