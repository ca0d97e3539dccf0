"""Report what an SGLang process holds, tensor by tensor, through its ``--custom-weight-loader``.

Stock SGLang hashes all parameters or none, under its own fused names. This module finds single
tensors by the names under which they were sent; each rank answers for its slice:

    trainer ──► rank   /update_weights_from_tensor, load_format = the dotted path of `report`,
                       a request as "tensor"
    trainer ◄── rank   TCP store: which slices it holds, and their fingerprints

Only ``open`` and ``close`` (`slime.engines.sglang.loadable`) and ``mark``
(`slime.engines.sglang.load_marks`) change the model. Errors are reported as text: an exception
would end the engine.
"""

from __future__ import annotations

import json
import logging
import re
import traceback
import weakref
from contextlib import nullcontext
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from slime import deadlines
from slime.engines.sglang import load_marks
from slime.engines.sglang.adapter_probe import adapter_fingerprints
from slime.engines.sglang.loadable import close_layers, open_layers, opened_for_lookup
from slime.engines.wire.buckets import FINGERPRINTS
from slime.engines.wire.expert_runs import ExpertRun
from slime.models import FAMILIES
from slime.models.fused_loading import fused_place
from slime.models.ignore_list import FUSED

logger = logging.getLogger(__name__)

_EXPERT = re.compile(r"(.*\.experts)\.(\d+)\.(gate|up|down)_proj\.(weight\w*)")
_SHARED_EXPERT = re.compile(r"(.*)\.shared_experts\.(gate|up|down)_proj\.(weight\w*)")
#: The size of a quantised weight. It is not compared: the shapes of the other parts imply it, parts
#: of a fused layer share it, and no kernel reads it.
SIZE = "weight_shape"
#: Parameters that no push contains: those that SGLang creates, and scales of its cache.
_OWN = re.compile(r".*(g_idx|g_idx_sort_indices|weight_shape|[kv]_scale)")
#: Beginnings of names in checkpoints, and SGLang's, which differ between its models.
_DECODERS = (
    ("model.language_model.", "model."),
    ("model.language_model.", "language_model.model."),
)
#: Parts of gated delta nets, and their place among the rows of a layer that SGLang has in one:
#: (layer, first part, end).
_DELTA_NET = {
    "in_proj_qkv": ("in_proj_qkvz", 0, 3),
    "in_proj_z": ("in_proj_qkvz", 3, 4),
    "in_proj_b": ("in_proj_ba", 0, 1),
    "in_proj_a": ("in_proj_ba", 1, 2),
}
#: Modules of vision models that pushes leave out if they are not trained.
_TOWERS = ("visual", "vision_tower", "vision_encoder", "multi_modal_projector")
#: Layers that SGLang concatenates as it loads them, of all families.
_CONCATENATED = tuple(fused for family in FAMILIES for fused in family.fused)


@dataclass(frozen=True)
class Held:
    """The part of a sent tensor that this rank holds: ``sent.narrow(dim, start, stop - start)`` is
    ``tensor``.

    Attributes:
        parameter: name of the engine's parameter that contains it.
    """

    tensor: torch.Tensor
    dim: int
    start: int
    stop: int
    parameter: str


@dataclass(frozen=True)
class HeldExperts:
    """The part of a run of experts that this rank holds: ``target`` is
    ``sent[first:stop].narrow(axis, start, size)``.

    Attributes:
        first, stop: places in the run.
        axis, start: of the tensor-parallel slice; its size is ``target.shape[axis]``.
        parameter: name of the engine's parameter that contains it.
    """

    target: torch.Tensor
    first: int
    stop: int
    axis: int
    start: int
    parameter: str

    def of(self, sent: torch.Tensor) -> torch.Tensor:
        """Return the value that ``target`` must have."""
        return sent[self.first : self.stop].narrow(
            self.axis, self.start, self.target.shape[self.axis]
        )


def report(model: nn.Module, named_tensors: list[tuple[str, torch.Tensor]]) -> None:
    """SGLang's hook for custom weight loaders.

    Args:
        named_tensors: one uint8 tensor of JSON: ``{"action", "host", "port", "key"}`` with, by
            action: "layout": ``"tensors": {name: shape}``, and ``"opens"``: as they are while
            layers are open; "mark" and "open": no more; the tensors of the last layout, which will
            be sent, are marked; "fingerprint": some of these tensors and ``"method"``, of
            `FINGERPRINTS`; the answer also names what was marked and is not loaded; "close": no
            more; "adapter": ``"lora_name"`` and ``"tensors"`` that were sent
            (`slime.engines.sglang.adapter_probe`).
    """
    try:
        [(_, raw)] = named_tensors
        request = json.loads(bytes(raw.cpu().numpy().tobytes()))
        answer = _answer(model, request)
        limit = timedelta(seconds=deadlines.WEIGHT_PROBE_STORE)
        port = int(request["port"])
        store = dist.TCPStore(
            request["host"], port, is_master=False, timeout=limit, wait_for_workers=False
        )
        rank = dist.get_rank() if dist.is_initialized() else 0
        store.set(f"{request['key']}/{rank}", json.dumps(answer))
    # must not reach the engine's scheduler; the trainer notices the missing answer
    except Exception as error:
        logger.exception("the answer about the weights could not be sent (%s)", error)


def _answer(model: nn.Module, request: dict[str, Any]) -> dict[str, Any]:
    try:
        action = request["action"]
        if action == "open":
            return {"layers": open_layers(model), "marked": _mark(model, keep=False)}
        if action == "close":
            return {"layers": close_layers(model)}
        if action == "layout":
            with opened_for_lookup(model) if request.get("opens") else nullcontext():
                return _layout(model, request["tensors"])
        if action == "adapter":
            found = adapter_fingerprints(request["lora_name"], request["tensors"])
            return {"fingerprints": found}
        if action == "mark":
            return {"marked": _mark(model, keep=True)}
        return _fingerprints(model, request["tensors"], request["method"])
    except Exception as error:  # would end the engine's scheduler
        logger.exception("weights could not be reported")
        return {"error": f"{type(error).__name__}: {error}", "traceback": traceback.format_exc()}


#: Model → shapes of the tensors that pushes send, by name.
_shapes: weakref.WeakKeyDictionary[nn.Module, dict[str, list[int]]] = weakref.WeakKeyDictionary()


def _layout(model: nn.Module, shapes: dict[str, list[int]]) -> dict[str, Any]:
    """Find this rank's slice of each named tensor (None: it has no part), and the engine's
    parameters that no name covers."""
    tree = Tree(model)
    _shapes[model] = shapes
    load_marks.forget(model)
    slices: dict[str, list[int] | None] = {}
    touched = set()
    for name, shape in shapes.items():
        held = tree.find(name, tuple(shape))
        slices[name] = None if held is None else [held.dim, held.start, held.stop]
        if held is not None:
            touched.add(held.parameter)
    own = {
        name
        for name, parameter in tree.parameters.items()
        if _OWN.fullmatch(name) or not parameter.numel()
    }
    touched_parts = {name.partition(".")[0] for name in touched}
    left_out = {
        name
        for name in tree.parameters
        if name.startswith(_TOWERS) and name.partition(".")[0] not in touched_parts
    }
    others = sorted(set(tree.parameters) - touched - own - left_out)
    return {"slices": slices, "others": others}


def _fingerprints(model: nn.Module, shapes: dict[str, list[int]], method: str) -> dict[str, Any]:
    if method not in FINGERPRINTS:
        raise ValueError(f"unknown fingerprint method {method!r}; known: {', '.join(FINGERPRINTS)}")
    take = FINGERPRINTS[method]
    fingerprints = {name: take(tensor) for name, tensor in _held(model, shapes).items()}
    return {"fingerprints": fingerprints, "untouched": load_marks.untouched(model)}


def _mark(model: nn.Module, *, keep: bool) -> int:
    return load_marks.mark(model, lambda: _held(model, _shapes.get(model, {})), keep=keep)


def _held(model: nn.Module, shapes: dict[str, list[int]]) -> dict[str, torch.Tensor]:
    """Find this rank's parts of the tensors."""
    tree = Tree(model)
    found = {name: tree.find(name, tuple(shape)) for name, shape in shapes.items()}
    return {name: held.tensor for name, held in found.items() if held is not None}


class Tree:
    """Finds a model's parameters by their names in checkpoints."""

    def __init__(self, model: nn.Module) -> None:
        # layers that may have adapters are wrapped; the wrapped layer holds the weights
        self.modules = {
            name: module._modules.get("base_layer") or module
            for name, module in model.named_modules()
        }
        self.parameters = {
            name.replace(".base_layer.", "."): parameter
            for name, parameter in model.named_parameters()
        }

    def find(self, name: str, shape: tuple[int, ...]) -> Held | None:
        """Find this rank's slice of a tensor; None if this rank has no part, or its layout is
        unknown.

        Args:
            shape: of the whole tensor, as sent.
        """
        if name.endswith(SIZE):
            return None
        found = (self._find(one, shape) for one in _names_in_sglang(name))
        return next((held for held in found if held is not None), None)

    def _find(self, name: str, shape: tuple[int, ...]) -> Held | None:
        if name in self.parameters:
            return self._direct(name, shape)
        run = ExpertRun.parse(name)
        if run is not None:
            return self._run(run, shape)
        owner, _, leaf = name.rpartition(".")
        parent, _, projection = owner.rpartition(".")
        expert = _EXPERT.fullmatch(name)
        if expert is not None:
            number = int(expert.group(2))
            return self._expert(
                ExpertRun(expert.group(1), number, number, expert.group(3), expert.group(4))
            )
        if projection in _DELTA_NET:
            return self._of_delta_net(parent, projection, leaf)
        if projection not in FUSED:
            return self._concatenated(owner, leaf, shape) or self._shared_expert(name)
        fused, part = FUSED[projection]
        parameter = f"{parent}.{fused}.{leaf}"
        if parameter not in self.parameters:
            return self._shared_expert(name)
        module = self.modules[f"{parent}.{fused}"]
        tensor = self.parameters[parameter]
        # one scale per projection, the same on every rank
        if tensor.dim() == 1 and leaf == "weight_scale":
            return Held(tensor[part : part + 1], 0, 0, 1, parameter)
        if fused == "qkv_proj":
            return self._of_qkv(parameter, module, part)
        size = self.parameters[parameter].shape[0] // 2
        start = _tp_rank(module) * size
        return Held(
            self.parameters[parameter][part * size : (part + 1) * size],
            0,
            start,
            start + size,
            parameter,
        )

    def _direct(self, name: str, shape: tuple[int, ...]) -> Held | None:
        tensor = self.parameters[name]
        if tuple(tensor.shape) == shape:
            return Held(tensor, 0, 0, shape[0] if shape else 1, name)
        if tensor.dim() != len(shape):
            return None
        owner = name.rpartition(".")[0]
        # a rank's rows are parts of queries, keys and values
        if owner.endswith((".conv1d", ".attn.qkv_proj")):
            return None
        module = self.modules[owner]
        if "shard_indices" in vars(module):  # a vocabulary, padded
            indices: Any = vars(module)["shard_indices"]
            start = int(indices.org_vocab_start_index)
            stop = int(indices.org_vocab_end_index)
            return Held(tensor[: stop - start], 0, start, stop, name)
        dims = [dim for dim, (own, whole) in enumerate(zip(tensor.shape, shape)) if own != whole]
        if len(dims) != 1:
            return None
        size = int(tensor.shape[dims[0]])
        start = _tp_rank(module) * size
        return Held(tensor, dims[0], start, start + size, name)

    def _concatenated(self, owner: str, leaf: str, shape: tuple[int, ...]) -> Held | None:
        """Find the first or last part of a parameter that SGLang concatenates on loading. Every
        rank holds such parameters whole."""
        place = fused_place(_CONCATENATED, owner)
        tensor = None if place is None else self.parameters.get(f"{place[0]}.{leaf}")
        if place is None or tensor is None or tensor.dim() != len(shape) or not shape:
            return None
        module, part, count = place
        rows = shape[0]
        all_rows = tensor.shape[0]
        if tuple(tensor.shape[1:]) != shape[1:] or rows > all_rows or part not in (0, count - 1):
            return None
        begin = 0 if part == 0 else all_rows - rows
        return Held(tensor[begin : begin + rows], 0, 0, rows, f"{module}.{leaf}")

    def _of_qkv(self, parameter: str, module: Any, part: int) -> Held | None:
        sizes = [module.q_proj_shard_size, module.kv_proj_shard_size, module.kv_proj_shard_size]
        # weight rows per row of this parameter: more than one for block scales
        unit = sum(sizes) // self.parameters[parameter].shape[0]
        if not unit or any(size % unit for size in sizes):
            return None
        begin = sum(sizes[:part]) // unit
        size = sizes[part] // unit
        if part:
            rank = _tp_rank(module, "kv_tp_group") // module.num_kv_head_replicas
        else:
            rank = _tp_rank(module)
        tensor = self.parameters[parameter][begin : begin + size]
        return Held(tensor, 0, rank * size, (rank + 1) * size, parameter)

    def _of_delta_net(self, parent: str, projection: str, leaf: str) -> Held | None:
        """Find parts of ``in_proj_qkvz`` or ``in_proj_ba``. Queries, keys and values, which are one
        tensor in checkpoints, are found only if the rank holds them whole."""
        fused, first, end = _DELTA_NET[projection]
        parameter = f"{parent}.{fused}.{leaf}"
        tensor = self.parameters.get(parameter)
        if tensor is None or not tensor.dim():
            return None
        module: Any = self.modules[f"{parent}.{fused}"]
        ranks = int(module.tp_size)
        # weight rows per row of this parameter: more than one for block scales
        unit = sum(module.output_sizes) // ranks // int(tensor.shape[0])
        sizes = [size // ranks for size in module.output_sizes]
        if (ranks > 1 and end - first > 1) or not unit or any(size % unit for size in sizes):
            return None
        begin = sum(sizes[:first]) // unit
        size = sum(sizes[first:end]) // unit
        start = _tp_rank(module) * size
        return Held(tensor[begin : begin + size], 0, start, start + size, parameter)

    def _shared_expert(self, name: str) -> Held | None:
        """Find a shared expert that SGLang stacks after the routed ones, as for DeepSeek-V3."""
        found = _SHARED_EXPERT.fullmatch(name)
        module = None if found is None else self.modules.get(f"{found[1]}.experts")
        if found is None or module is None or vars(module).get("num_fused_shared_experts") != 1:
            return None
        begin, count = _routed_experts(module, 0)
        behind = begin + count
        held = self.experts(
            ExpertRun(f"{found[1]}.experts", behind, behind, found[2], found[3]), num_shared=1
        )
        return None if held is None else _of_one(held)

    def _expert(self, run: ExpertRun) -> Held | None:
        held = self.experts(run)
        return None if held is None or held.first == held.stop else _of_one(held)

    def _run(self, run: ExpertRun, shape: tuple[int, ...]) -> Held | None:
        """Return None also for a part that is sliced along two axes: `Held` has one."""
        held = self.experts(run)
        if held is None or held.first == held.stop or len(shape) != held.target.dim():
            return None
        size = int(held.target.shape[held.axis])
        if held.stop - held.first == shape[0]:
            return Held(held.target, held.axis, held.start, held.start + size, held.parameter)
        whole = size == shape[held.axis]
        return Held(held.target, 0, held.first, held.stop, held.parameter) if whole else None

    def experts(self, run: ExpertRun, num_shared: int = 0) -> HeldExperts | None:
        """Find this rank's part of a run, which may be empty; None if the layout is unknown.

        SGLang's fused experts: w13 [experts, 2 x intermediate, hidden], w2 [experts, hidden,
        intermediate]; in w13 the gate comes first, or second where `_gate_half` says so. Quantised
        weights and group scales may be transposed; a scale per tensor has one column, or no second
        axis.

        Args:
            num_shared: shared experts after the routed ones that the run may include.
        """
        module = self.modules.get(run.owner)
        leaf = f"{'w2' if run.projection == 'down' else 'w13'}_{run.leaf}"
        # looked up each time: engines may replace parameters
        stacked = None if module is None else module._parameters.get(leaf)
        if (
            module is None
            or stacked is None
            or stacked.dim() > 3
            or (stacked.dim() < 3 and run.leaf == "weight")
        ):
            return None
        begin, count = _routed_experts(module, int(stacked.shape[0]))
        count += num_shared
        first = min(max(run.first, begin), begin + count)
        stop = max(first, min(run.last + 1, begin + count))
        part = stacked.detach()[first - begin : stop - begin]
        half = None if run.projection == "down" else _gate_half(module) ^ (run.projection == "up")
        place = (first - run.first, stop - run.first)
        name = f"{run.owner}.{leaf}"
        if part.dim() < 3:
            part = part.unsqueeze(1) if part.dim() == 1 else part
            if half is not None and run.leaf != SIZE:
                part = part[:, half : half + 1]
            return HeldExperts(part, *place, 1, 0, name)
        if vars(stacked).get("is_transposed"):
            part = part.transpose(1, 2)
        if half is not None:
            part = part.chunk(2, dim=1)[half]
        axis = 2 if half is None else 1
        start = int(vars(module).get("moe_tp_rank", 0)) * int(part.shape[axis])
        return HeldExperts(part, *place, axis, start, name)


def _names_in_sglang(name: str) -> list[str]:
    """Return the names that a tensor of a checkpoint may have in SGLang: its models rename
    decoders of vision models, and hybrid models have no module for attention."""
    decoders = [new + name.removeprefix(old) for old, new in _DECODERS if name.startswith(old)]
    tower = name.removeprefix("model.").replace(".attn.qkv.", ".attn.qkv_proj.")
    towers = [tower] if tower.startswith(_TOWERS) else []
    names = [name, *decoders, *towers]
    return names + [one.replace(".self_attn.", ".") for one in names if ".self_attn." in one]


def _of_one(held: HeldExperts) -> Held:
    """Return the first expert of a run."""
    size = int(held.target.shape[held.axis])
    return Held(held.target[0], held.axis - 1, held.start, held.start + size, held.parameter)


def _routed_experts(module: Any, stacked: int) -> tuple[int, int]:
    """Return the number of this rank's first routed expert, and their count; shared experts may be
    stacked after them."""
    here = vars(module)
    count = int(here.get("_num_local_routed", stacked))
    return int(here.get("moe_ep_rank", 0)) * count, count


def _gate_half(module: Any) -> int:
    """Return the half of w13 that is the gate: 1 for kernels that expect it second, like
    FlashInfer's CUTLASS ones, else 0."""
    method: Any = vars(module).get("quant_method") or vars(module).get("_modules", {}).get(
        "quant_method"
    )
    try:
        return int(bool(method.load_up_proj_weight_first))
    except AttributeError:  # SGLang's default: most methods lack the attribute
        return 0


def _tp_rank(module: Any, group: str = "tp_group") -> int:
    """Return the rank of a parallel layer; 0 for layers that are whole on every rank.

    SGLang keeps the number up to 0.5.21, and then the group of a linear layer. Attention keeps
    neither in some models; its heads are those of its projections.
    """
    held = vars(module)
    for name in ("tp_rank", "attn_tp_rank"):
        if name in held:
            return int(held[name])
    owners = [held, *(vars(child) for child in module.children())]
    groups = (owner[group] for owner in owners if owner.get(group) is not None)
    return int(getattr(next(groups, None), "rank_in_group", 0))
