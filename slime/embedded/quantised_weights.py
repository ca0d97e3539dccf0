"""Keep the stored form of quantised weights in an engine that computes with dequantised ones.

    update ─► stored parts (INT4, FP8), kept as received
           ─► weight in the engine's dtype, after all its parts have arrived

The stored parts are kept so that trainer and engine can compare them. They take a quarter or half
of the weights' memory.
"""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from pathlib import Path

import torch

from slime.embedded.architecture import Architecture
from slime.engines.wire.buckets import SCALE_NAMES
from slime.engines.wire.quantised import dequantise, require_library
from slime.models import read_hf_config
from slime.models.parameters import ModelParameters
from slime.models.quantised import Int4, Quantisation


def import_library_for(model_path: str) -> None:
    """Import compressed-tensors if the model needs it. Call this before the tokenizer's thread
    starts: both import transformers, which fails in two threads at once.

    Raises:
        UserError: the model's quantisation is unknown, or compressed-tensors is needed and not
            installed.
    """
    path = Path(model_path) / "config.json"
    quantisation = Quantisation.read(read_hf_config(path)) if path.is_file() else None
    if quantisation is not None and isinstance(quantisation.scheme, Int4):
        require_library(quantisation.scheme)
        importlib.import_module("compressed_tensors")


class StoredForm:
    """The quantised tensors of a model, by name.

    Attributes:
        tensors: the received tensors.
        names: names of all tensors of a complete update, including unquantised ones.
    Raises:
        UserError: compressed-tensors is needed and not installed.
    """

    def __init__(self, arch: Architecture, quantisation: Quantisation, dtype: torch.dtype) -> None:
        require_library(quantisation.scheme)
        self.quantisation = quantisation
        self._dtype = dtype
        parameters = ModelParameters(arch.family, arch.spec, quantisation)
        served = parameters.served
        self.names = tuple(served)
        plain = parameters.stored
        # an FP8 weight has the name of the unquantised weight, but its own dtype
        self._table = {
            name: facts for name, facts in served.items() if name not in plain or facts[0]
        }
        self.tensors: dict[str, torch.Tensor] = {}
        self._fresh: dict[str, set[str]] = {}

    def __contains__(self, name: str) -> bool:
        return name in self._table

    def shape(self, name: str) -> tuple[int, ...]:
        return self._table[name][1]

    def problem(self, name: str, dtype: str) -> str:
        """Return why a tensor of this dtype cannot be the part ``name``; "" if it can."""
        wanted = self._table[name][0]
        is_scale = name.endswith(SCALE_NAMES) and "float" in dtype
        if wanted in ("", dtype) or is_scale:
            return ""
        return f"{name} is {dtype}, and stored as {wanted}"

    def begin(self) -> None:
        """Forget which parts have arrived, before those of another version."""
        self._fresh = {}

    def take(self, name: str, tensor: torch.Tensor) -> tuple[str, torch.Tensor] | None:
        """Store a part. Return (name, dequantised weight) if all its parts have arrived."""
        module = self.quantisation.module(name)
        assert module is not None
        own = tensor.dtype if self._table[name][0] else self._dtype
        self.tensors[name] = tensor.detach().to(own, copy=True)
        names = {f"{module}.{part}" for part in self.quantisation.scheme.parts((1, 1), "")}
        fresh = self._fresh.setdefault(module, set())
        fresh.add(name)
        if fresh != names:
            return None
        # a failed push may be repeated under the same version; complete weights stay complete and
        # are dequantised again
        return f"{module}.weight", dequantise(
            module, self.tensors, self.quantisation.scheme, self._dtype
        )

    def reset(self) -> None:
        """Overwrite every part with noise."""
        for tensor in self.tensors.values():
            tensor.view(-1).view(torch.uint8).random_()
        self._fresh = {}

    def held(self, named: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """Return all weights by the names that updates use, unquantised and quantised, without
        parts that never arrived."""
        found = {
            name: self.tensors.get(name) if name in self else named.get(name) for name in self.names
        }
        return {name: tensor for name, tensor in found.items() if tensor is not None}
