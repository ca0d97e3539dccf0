"""Modules with the parameters that an SGLang rank has: fused projections, slices of a
tensor-parallel group."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from sglang import RELEASE
from slime.engines.sglang.weight_probe import Tree
from slime.engines.wire.expert_runs import ExpertRun

#: SGLang concatenates these while it loads them: within one call, or not at all.
_DOWN_PROJECTIONS, _FUSED_DOWN = ("q_a_proj", "kv_a_proj_with_mqa"), "fused_qkv_a_proj_with_mqa"
_QKV, _GATE_UP = ("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj")
_EXPERT = re.compile(r"(.*\.experts)\.(\d+)\.(\w+)_proj\.weight")
_ROWS = ("o_proj.weight", "down_proj.weight")  # cut along their inputs


@dataclass
class Group:
    rank_in_group: int


def _set_rank(module: Any, rank: int) -> None:
    if RELEASE < (0, 5, 22):
        module.tp_rank = rank
    else:
        module.tp_group = module.kv_tp_group = Group(rank)


@dataclass
class Indices:
    org_vocab_start_index: int
    org_vocab_end_index: int


class Rank(nn.Module):
    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        """SGLang's own: single tensors of a checkpoint, each to its place."""
        tree = Tree(self)
        fuses = any(f".{_FUSED_DOWN}." in name for name in tree.parameters)
        for name, whole in loaded_together(weights, fuses):
            assert ExpertRun.parse(name) is None, f"{name} is not in any checkpoint"
            held = tree.find(name, tuple(whole.shape))
            if held is not None:
                held.tensor.copy_(whole.narrow(held.dim, held.start, held.stop - held.start))


def loaded_together(
    weights: Iterable[tuple[str, torch.Tensor]], fuses: bool
) -> list[tuple[str, torch.Tensor]]:
    """What one call of ``load_weights`` takes: without halves of a pair whose other half is not in
    the call, of which SGLang says nothing.

    Args:
        fuses: the model has such pairs.
    """
    table = list(weights)
    names = {name for name, _ in table}
    return [(name, tensor) for name, tensor in table if not fuses or _partner(name) in names]


def _partner(name: str) -> str:
    """The other half of a pair; the name itself for a tensor of none."""
    q, kv = _DOWN_PROJECTIONS
    if f".{q}." in name:
        return name.replace(q, kv)
    return name.replace(kv, q) if f".{kv}." in name else name


def sharded_model(named: Mapping[str, torch.Tensor], arch: Any, rank: int, size: int) -> nn.Module:
    """The parameters of rank ``rank`` of ``size``, copied out of whole tensors."""
    root = Rank()
    experts: dict[str, dict[int, dict[str, torch.Tensor]]] = {}
    for name, tensor in named.items():
        owner, _, leaf = name.rpartition(".")
        parent, _, last = owner.rpartition(".")
        expert = _EXPERT.fullmatch(name)
        if expert:
            experts.setdefault(expert[1], {}).setdefault(int(expert[2]), {})[expert[3]] = tensor
        elif leaf == "weight_scale" and last in (
            *_QKV,
            *_GATE_UP,
        ):  # of tensors: one for each part, on every rank
            parts = _QKV if last in _QKV else _GATE_UP
            if last == parts[0]:
                fused = "qkv_proj" if last in _QKV else "gate_up_proj"
                _put(
                    root,
                    f"{parent}.{fused}",
                    leaf,
                    torch.cat([named[f"{parent}.{p}.{leaf}"] for p in parts]),
                )
        elif last in _DOWN_PROJECTIONS and f"{parent}.q_a_proj.{leaf}" in named:
            if last == _DOWN_PROJECTIONS[0]:
                halves = [named[f"{parent}.{p}.{leaf}"] for p in _DOWN_PROJECTIONS]
                _put(root, f"{parent}.{_FUSED_DOWN}", leaf, torch.cat(halves))
        elif last in _QKV and f"{parent}.k_proj.{leaf}" in named:
            if last == "q_proj":
                _qkv(
                    root,
                    parent,
                    leaf,
                    [named[f"{parent}.{p}.{leaf}"] for p in _QKV],
                    rank,
                    size,
                    named,
                )
        elif last in _GATE_UP:
            if last == "gate_proj":
                halves = [named[f"{parent}.{p}.{leaf}"].chunk(size)[rank] for p in _GATE_UP]
                _set_rank(_put(root, f"{parent}.gate_up_proj", leaf, torch.cat(halves)), rank)
        elif name.endswith(("embed_tokens.weight", "lm_head.weight")):
            rows = tensor.shape[0]
            # SGLang pads vocabularies to multiples of 64 per rank
            each = -(-rows // (64 * size)) * 64
            begin, end = min(rows, rank * each), min(rows, (rank + 1) * each)
            padded = torch.zeros(each, *tensor.shape[1:], dtype=tensor.dtype)
            padded[: end - begin] = tensor[begin:end]
            _put(root, owner, leaf, padded).shard_indices = Indices(begin, end)
        elif name.endswith(_ROWS):
            _set_rank(_put(root, owner, leaf, tensor.chunk(size, dim=1)[rank]), rank)
        else:
            _put(root, owner, leaf, tensor)
    for owner, found in experts.items():
        ordered = [found[number] for number in sorted(found)]
        w13 = [torch.cat([e["gate"].chunk(size)[rank], e["up"].chunk(size)[rank]]) for e in ordered]
        module = _put(root, owner, "w13_weight", torch.stack(w13))
        module.register_parameter(
            "w2_weight", _parameter(torch.stack([e["down"].chunk(size, 1)[rank] for e in ordered]))
        )
        module.moe_ep_rank, module.moe_tp_rank = 0, rank
    return root


def _qkv(
    root: nn.Module,
    parent: str,
    leaf: str,
    whole: list[torch.Tensor],
    rank: int,
    size: int,
    named: Mapping[str, Any],
) -> None:
    head = _head_size(parent, whole, named)
    kv_heads = whole[1].shape[0] // head
    replicas = max(1, size // kv_heads)
    pieces = [whole[0].chunk(size)[rank]] + [
        t.chunk(size // replicas)[rank // replicas] for t in whole[1:]
    ]
    module: Any = _put(root, f"{parent}.qkv_proj", leaf, torch.cat(pieces))
    _set_rank(module, rank)
    module.num_kv_head_replicas = replicas
    module.q_proj_shard_size, module.kv_proj_shard_size = pieces[0].shape[0], pieces[1].shape[0]


def _head_size(parent: str, whole: list[torch.Tensor], named: Mapping[str, torch.Tensor]) -> int:
    norm = named.get(f"{parent}.q_norm.weight")
    return int(norm.shape[0]) if norm is not None else 1


def _put(root: nn.Module, path: str, leaf: str, tensor: torch.Tensor) -> Any:
    module = root
    for part in path.split(".") if path else []:
        if part not in module._modules:
            module.add_module(part, nn.Module())
        module = module._modules[part]  # type: ignore[assignment]
    module.register_parameter(leaf, _parameter(tensor))
    return module


def _parameter(tensor: torch.Tensor) -> nn.Parameter:
    return nn.Parameter(tensor.detach().clone(), requires_grad=False)
