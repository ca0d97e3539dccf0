"""Fingerprints of an adapter that an SGLang process has loaded; runs inside it, for the weight
probe.

Every rank of SGLang keeps adapters complete on the host, in the dtype in which they were sent.
Fused layers are concatenated along their rows: q, k and v of ``lora_A`` are one tensor
``qkv_proj``. Stock SGLang compares an adapter with checksums while loading, and exits if one
differs; this probe is queried afterwards.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping
from typing import Any

import torch

from slime.engines.adapters import FUSED_SETS
from slime.engines.wire.buckets import fingerprints

#: SGLang's name of a fused layer → its parts, in order.
_PARTS = dict(
    zip(("qkv_proj", "gate_up_proj", "fused_qkv_a_proj_with_mqa"), FUSED_SETS, strict=True)
)
_FUSED = {part: fused for fused, parts in _PARTS.items() for part in parts}


def adapter_fingerprints(name: str, shapes: Mapping[str, list[int]]) -> dict[str, str]:
    """Return fingerprints of the adapter tensors that this process holds.

    Args:
        name: the adapter's name.
        shapes: shapes of all sent tensors, by name.
    Raises:
        ValueError: this process does not have the adapter.
    """
    manager = _manager()
    refs = {ref.lora_name: key for key, ref in manager.lora_refs.items()}
    if name not in refs:
        raise ValueError(f"no adapter is called {name}, only {', '.join(refs) or 'none'}")
    adapter = manager.loras[refs[name]]
    held = dict(adapter.embedding_layers)
    for layer in adapter.layers:
        held |= layer.weights
    found = {one: _part_of(held, one, shapes) for one in shapes}
    known = {_fused_name(one) for one in shapes} | set(shapes)
    extra = {one: tensor for one, tensor in held.items() if one not in known}
    return fingerprints(
        {one: tensor for one, tensor in {**found, **extra}.items() if tensor is not None}
    )


def _part_of(
    held: Mapping[str, torch.Tensor], name: str, shapes: Mapping[str, list[int]]
) -> torch.Tensor | None:
    """Return the rows of a fused tensor that belong to a sent tensor; None if this process lacks
    them."""
    if name in held:
        return _unrepeated(held[name], shapes[name][-2])
    whole = held.get(_fused_name(name))
    if whole is None:
        return None
    module, leaf, rest = _split(name)
    first = 0
    for part in _PARTS[_FUSED[leaf]]:
        rows = shapes.get(f"{module}.{part}.{rest}", [0, 0])[-2]
        if part == leaf:
            # a fused tensor with other rows gives another fingerprint, or none
            return whole.narrow(-2, first, rows) if first + rows <= whole.shape[-2] else None
        first += rows
    return None


def _unrepeated(tensor: torch.Tensor, rows: int) -> torch.Tensor:
    """Return a tensor as it was sent. If the checkpoint's layer is already fused, SGLang repeats
    its only A for each part."""
    copies = tensor.split(rows, dim=-2)
    return copies[0] if all(torch.equal(copies[0], copy) for copy in copies[1:]) else tensor


def _fused_name(name: str) -> str:
    """Return SGLang's name of the fused tensor that contains a sent one; else the name itself."""
    module, leaf, rest = _split(name)
    return f"{module}.{_FUSED[leaf]}.{rest}" if leaf in _FUSED else name


def _split(name: str) -> tuple[str, str, str]:
    """Return ("….self_attn", "q_proj", "lora_A.weight")"""
    path, _, side = name.partition(".lora_")
    module, _, leaf = path.rpartition(".")
    return module, leaf, f"lora_{side}"


def _manager() -> Any:
    """Return the adapter manager of the process. A custom loader only gets the model, so search the
    callers' frames for it."""
    for owner in _callers():
        for runner in (owner, getattr(owner, "model_runner", None), _runner_of(owner)):
            manager = getattr(runner, "lora_manager", None)
            if manager is not None:
                return manager
    raise ValueError("this process serves no adapters (--enable-lora)")


def _runner_of(owner: Any) -> Any:
    make_runner = getattr(owner, "get_model_runner", None)
    return make_runner() if callable(make_runner) else None


def _callers() -> Iterator[Any]:
    frame = sys._getframe()
    while frame is not None:
        if (owner := frame.f_locals.get("self")) is not None:
            yield owner
        frame = frame.f_back  # type: ignore[assignment]
