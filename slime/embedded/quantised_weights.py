"""Keep the stored form of quantised weights in an engine that computes with dequantised ones.

    update ─► stored parts (INT4, FP8), kept as they came
           ─► weight in the engine's dtype, once all its parts are there

The stored parts are kept because trainer and engine compare them; they are a quarter or half of the
weights' size.
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
    """Import compressed-tensors if the model needs it. It imports transformers, which fails in a
    thread while another one, that of the tokenizer, imports it too.

    Raises:
        UserError: the model's quantisation is not known, compressed-tensors is needed and not
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
        tensors: those that have come.
        names: of every tensor that an update brings, plain ones included.
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
        # a weight in FP8 has the name of the plain one, but a dtype of its own
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
        """Explain why a tensor of this dtype cannot be this part; "" if it can."""
        wanted = self._table[name][0]
        is_scale = name.endswith(SCALE_NAMES) and "float" in dtype
        return (
            ""
            if wanted in ("", dtype) or is_scale
            else f"{name} is {dtype}, and stored as {wanted}"
        )

    def begin(self) -> None:
        """Forget which parts have come: parts of another version follow."""
        self._fresh = {}

    def take(self, name: str, tensor: torch.Tensor) -> tuple[str, torch.Tensor] | None:
        """Keep a part; the weight and its name once all parts have come."""
        module = self.quantisation.module(name)
        assert module is not None
        own = tensor.dtype if self._table[name][0] else self._dtype
        self.tensors[name] = tensor.detach().to(own, copy=True)
        names = {f"{module}.{part}" for part in self.quantisation.scheme.parts((1, 1), "")}
        fresh = self._fresh.setdefault(module, set())
        fresh.add(name)
        if fresh != names:
            return None
        # a push that failed half-way comes again under the same version: what is whole stays so,
        # and is made anew
        return f"{module}.weight", dequantise(
            module, self.tensors, self.quantisation.scheme, self._dtype
        )

    def reset(self) -> None:
        """Overwrite every part with noise."""
        for tensor in self.tensors.values():
            tensor.view(-1).view(torch.uint8).random_()
        self._fresh = {}

    def held(self, named: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """Return all weights by the names that updates use, plain and quantised; parts that never
        came are left out."""
        found = {
            name: self.tensors.get(name) if name in self else named.get(name) for name in self.names
        }
        return {name: tensor for name, tensor in found.items() if tensor is not None}
