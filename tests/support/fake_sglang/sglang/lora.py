"""Adapters as SGLang 0.5.16 takes them: what it accepts and never applies, and what it dies of at
the next request.

Accepted and not applied: a layer with one side alone, one side of the experts, rsLoRA's factor,
patterns of ranks. Accepted and deadly: a name that is no target, a wrong shape. Sets of q, k and v
without v are refused, without k they are filled up with zeros.
"""

from __future__ import annotations

import argparse
import asyncio
import base64
import hashlib
import io
import json
import uuid
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from aiohttp import web
from safetensors.torch import load_file

from sglang import RELEASE
from sglang.scheduler import die
from slime.embedded.adapters import AdapterForm, place
from slime.embedded.generate_routes import json_response, state_of
from slime.embedded.weights import WeightError
from slime.models.adapters import adaptable_by_name, peft_name, split_peft_name

Tensors = dict[str, torch.Tensor]

#: Layers that are concatenated as they are loaded, in the order of their rows.
FUSED = {
    "qkv_proj": ("q_proj", "k_proj", "v_proj"),
    "gate_up_proj": ("gate_proj", "up_proj"),
    "fused_qkv_a_proj_with_mqa": ("q_a_proj", "kv_a_proj_with_mqa"),
}
_OWNER = {part: fused for fused, parts in FUSED.items() for part in parts}
_INTO, _BACK = ("gate_proj", "up_proj", "gate_up_proj"), "down_proj"
_LOAD, _LOAD_TENSORS = "/load_lora_adapter", "/load_lora_adapter_from_tensors"
_UNLOAD = "/unload_lora_adapter"
ROUTES = (_LOAD, _LOAD_TENSORS, _UNLOAD)


@dataclass
class Ref:
    lora_name: str
    lora_path: str
    pinned: bool


@dataclass
class Layer:
    weights: Tensors = field(default_factory=dict)


@dataclass
class Loaded:
    """One adapter in host memory, its fused layers concatenated."""

    layers: list[Layer]
    embedding_layers: Tensors = field(default_factory=dict)


class LoRAManager:
    """What a scheduler process holds, and what its tokenizer process does with requests.

    Attributes:
        deadly: name of an adapter → what the next request that names it ends in.
    """

    def __init__(self, args: argparse.Namespace) -> None:
        self.args = args
        self.lora_refs: dict[str, Ref] = {}
        self.loras: dict[str, Loaded] = {}
        self.deadly: dict[str, str] = {}
        self.update_lock = asyncio.Lock()
        if args.enable_lora and not args.lora_paths:
            needed = args.max_lora_rank and args.lora_target_modules
            assert needed, (
                "When no initial --lora-paths is provided, you need to specify both "
                "--max-lora-rank and --lora-target-modules for LoRA initialization."
            )

    async def answer(self, request: web.Request, body: Mapping[str, Any]) -> web.Response:
        problem = ""
        async with self.update_lock:  # as SGLang, also while an unload waits
            try:
                if not (self.args.enable_lora or self.args.lora_paths):
                    raise ValueError(
                        "LoRA is not enabled. Please set `--enable-lora` to enable LoRA."
                    )
                if request.path == _UNLOAD:
                    await self._unload(request, body)
                else:
                    self._load(request, body)
            except (ValueError, RuntimeError, WeightError, KeyError) as error:
                problem = str(error)
        report = {
            "success": not problem,
            "error_message": problem,
            "loaded_adapters": {ref.lora_name: ref.lora_path for ref in self.lora_refs.values()},
        }
        return json_response(report, status=400 if problem else 200)

    def check_request(self, body: Mapping[str, Any]) -> None:
        """End the server if a request names an adapter that SGLang cannot put into its pool."""
        asked = body.get("lora_path")
        _, _, of_model = str(body.get("model") or "").partition(":")
        for name in (*(asked if isinstance(asked, list) else [asked]), of_model):
            if name in self.deadly:
                die(f"ValueError: {self.deadly[name]}")

    # -- loading -----------------------------------------------------------------------------------

    def _load(self, request: web.Request, body: Mapping[str, Any]) -> None:
        engine = state_of(request).engine
        name, pinned = body["lora_name"], bool(body.get("pinned"))
        config, tensors, path = self._content(request.path, body)
        self._validate(name, config, pinned)
        store = engine.store
        layers = [Layer() for _ in range(store.arch.spec.num_layers)]
        outside: Tensors = {}
        for one, tensor in tensors.items():
            number = _layer_of(one)
            if number is not None:
                layers[number].weights[one] = tensor
            else:
                outside[one] = tensor
        for layer in layers:
            _fuse(layer.weights)
        effective, problem = _applied(store, config, tensors)
        key = uuid.uuid4().hex
        engine.adapters.load(name, effective[0], effective[1], path, pinned=pinned)
        self.lora_refs[key] = Ref(name, path, pinned)
        self.loras[key] = Loaded(layers, outside)
        if problem:
            self.deadly[name] = problem

    def _content(self, path: str, body: Mapping[str, Any]) -> tuple[dict[str, Any], Tensors, str]:
        if path == _LOAD:
            directory = Path(body["lora_path"])
            config = json.loads((directory / "adapter_config.json").read_text())
            return config, load_file(directory / "adapter_model.safetensors"), str(directory)
        from sglang.as_sglang import SGLangUnpickler, _pairs

        by_rank = RELEASE >= (0, 5, 17)
        texts = body["serialized_named_tensors"] if by_rank else [body["serialized_tensors"]]
        assert not by_rank or len(texts) == self.args.tp_size, f"{len(texts)} texts"
        contents = [
            SGLangUnpickler(io.BytesIO(base64.b64decode(text, validate=True))).load()
            for text in texts
        ]
        content = contents[0]
        flat = body.get("load_format") == "flattened_bucket"
        tensors = dict(_pairs(content, "flattened_bucket")) if flat else dict(content)
        expected = body.get("expected_checksums")
        if expected is not None and _checksums(tensors) != expected:
            die("RuntimeError: [LORA-CHECK] rank0 adapter sync MISMATCH")
        return dict(body["config_dict"]), tensors, "__tensor__"

    def _validate(self, name: str, config: Mapping[str, Any], pinned: bool) -> None:
        if config.get("use_dora"):
            raise ValueError(
                f"Failed to load {name} because LoRA serving currently doesn't support DoRA "
                "adapters"
            )
        if any(ref.lora_name == name for ref in self.lora_refs.values()):
            raise ValueError(f"Failed to load LoRA adapter {name} because it is already loaded")
        allowed = set(self.args.lora_target_modules or ["all"])
        targets = {_OWNER.get(target, target) for target in config["target_modules"]}
        fits = "all" in allowed or targets <= {_OWNER.get(one, one) for one in allowed}
        if config["r"] > (self.args.max_lora_rank or config["r"]) or not fits:
            raise ValueError(
                f"LoRA adapter {name} with rank {config['r']} is incompatible with the current "
                "LoRA memory pool configuration."
            )
        pins = sum(ref.pinned for ref in self.lora_refs.values())
        if pinned and pins >= (self.args.max_loras_per_batch or 8) - 1:
            raise ValueError(f"Failed to load LoRA adapter {name} as a pinned adapter.")

    async def _unload(self, request: web.Request, body: Mapping[str, Any]) -> None:
        state = state_of(request)
        name = body["lora_name"]
        adapter = state.engine.adapters.loaded.get(name)
        if adapter is None:
            raise ValueError(f"LoRA with name {name} does not exist.")
        state.engine.adapters.unload(name)
        while any(sequence.adapter is adapter for sequence in state.hub.in_flight):
            await asyncio.sleep(0.01)
        [key] = [key for key, ref in self.lora_refs.items() if ref.lora_name == name]
        del self.lora_refs[key], self.loras[key]
        self.deadly.pop(name, None)


def _layer_of(name: str) -> int | None:
    _, found, rest = name.partition(".layers.")
    return int(rest.split(".")[0]) if found else None


def _checksums(tensors: Tensors) -> dict[str, str]:
    return {
        name: hashlib.sha256(
            tensor.contiguous().flatten().view(torch.uint8).numpy().tobytes()
        ).hexdigest()
        for name, tensor in tensors.items()
    }


def _fuse(weights: Tensors) -> None:
    """Concatenate the parts of fused layers along their rows; KeyError for q without v."""
    for name in list(weights):
        module, _, rest = name.partition(".lora_")
        parent, _, leaf = module.rpartition(".")

        def other(part: str, parent: str = parent, rest: str = rest) -> str:
            return f"{parent}.{part}.lora_{rest}"

        if name not in weights:
            continue
        if leaf == "q_proj":
            value = weights[other("v_proj")]
            key = weights.pop(other("k_proj"), torch.zeros_like(value))
            weights[other("qkv_proj")] = torch.cat([weights.pop(name), key, value])
            del weights[other("v_proj")]
        elif leaf in ("gate_proj", "q_a_proj"):
            second = FUSED[_OWNER[leaf]][1]
            first = weights.pop(name)
            found = weights.pop(other(second), torch.zeros_like(first))
            weights[other(_OWNER[leaf])] = torch.cat([first, found], dim=first.dim() - 2)


def _applied(
    store: Any, config: Mapping[str, Any], tensors: Tensors
) -> tuple[tuple[dict[str, Any], Tensors], str]:
    """What SGLang computes with, as the embedded engine takes it, and what it will die of or ""."""
    leaves = {*adaptable_by_name(store.arch.family, store.arch.spec), "gate_up_proj"}
    sides: dict[str, set[str]] = {}
    problem = ""
    for name in tensors:
        split = split_peft_name(name)
        if split is None or split[0].rpartition(".")[2] not in leaves:
            problem = f"Cannot find target module name for {name}"
        else:
            sides.setdefault(split[0], set()).add(split[1])
    modules = [module for module, found in sides.items() if len(found) == 2]
    experts = [module for module in modules if ".experts." in module]
    ways = {module.rpartition(".")[2] for module in experts}
    if experts and not (_BACK in ways and ways & {*_INTO}):
        modules = [module for module in modules if ".experts." not in module]
    plain = {"peft_type": "LORA", "r": config["r"], "lora_alpha": config["lora_alpha"]}
    used: Tensors = {}
    kept: list[str] = []
    for module in modules:
        names = [peft_name(module, side) for side in ("A", "B")]
        pair = {one: tensors[one] for one in names}
        try:
            _place(store, {**plain, "target_modules": [module]}, pair)
        except WeightError as error:
            problem = problem or str(error)
        else:
            used |= pair
            kept.append(module)
    if not kept:  # nothing that it applies
        name, shape = next(_tables(store, config["r"]))
        kept = [name]
        used = {f"base_model.model.{name}.lora_{s}.weight": torch.zeros(shape[s]) for s in "AB"}
    return ({**plain, "target_modules": kept}, used), problem


def _place(store: Any, config: Mapping[str, Any], tensors: Tensors) -> None:
    place(store, AdapterForm.read(config), tensors)


def _tables(store: Any, rank: int) -> Any:
    for name, (linear, rows) in store.parts.items():
        if ".layers." in name:
            out = len(range(*rows.indices(linear.weight.shape[0])))
            yield (
                name.removesuffix(".weight"),
                {"A": (rank, linear.weight.shape[1]), "B": (out, rank)},
            )
