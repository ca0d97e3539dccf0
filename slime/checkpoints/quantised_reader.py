"""The weights that engines of a quantised model compute with, read from files.

    INT4 or FP8, as engines load it             ─► dequantised
    the plain weights that it was made from     ─► quantised as `slime convert` does, dequantised

Adapters are trained beside these. Weights are computed whole and cut afterwards, so that a parallel
layout changes no bit of them.
"""

from __future__ import annotations

from pathlib import Path

import torch

from slime.checkpoints.hf_files import HfReader
from slime.checkpoints.quantised_check import verify_quantised
from slime.engines.wire.quantised import Stored, as_held, dequantise, quantise, require_library
from slime.models import ModelFamily, ModelSpec, family_of
from slime.models.ignore_list import examine, matrices
from slime.models.layouts import TensorSource
from slime.models.quantised import Quantisation
from slime.models.spec import read_hf_config


class QuantisedReader:
    """Reads a Hugging Face directory as `HfReader` does, with the values of quantised engines.

    Args:
        directory: of quantised weights, or of the plain ones that they were made from.
        quantisation: of the engines.
        dtype: of the engines' weights that are not quantised, in which they dequantise the others.
        device: on which quantised weights are computed.
    Raises:
        UserError: `HfReader`'s; compressed-tensors is needed and not installed.
    """

    def __init__(
        self,
        directory: str | Path,
        quantisation: Quantisation,
        dtype: torch.dtype,
        *,
        model_name: str | None = None,
        device: torch.device | str = "cpu",
    ) -> None:
        require_library(quantisation.scheme)
        self.directory = Path(directory)
        self._quantisation = quantisation
        self._dtype = dtype
        self._device = device
        self._files = HfReader(directory)
        config = read_hf_config(directory)
        self._is_stored = Quantisation.read(config) is not None
        family = family_of(config, model_name)
        found = examine(matrices(family, family.describe(config)), quantisation)
        self._modules = {matrix.weight: matrix.module for matrix in found.quantised}

    def verify(self, family: ModelFamily, spec: ModelSpec) -> list[str]:
        """Compare the directory with what the model has, see `HfReader.verify`."""
        if not self._is_stored:
            return self._files.verify(family, spec)
        verify_quantised(self.directory, family, spec, self._quantisation)
        return sorted(name for name in self._files.names() if family.is_ignored(name, spec))

    def file_of(self, name: str) -> str:
        return self._files.file_of(self._names(name)[0])

    def __getitem__(self, name: str) -> TensorSource:
        """A plain weight, to be read by slices, or the whole weight that quantised parts stand
        for."""
        if name not in self._modules:
            return self._files[name]
        return self.dequantised(name, self.parts(name))

    def dequantised(self, name: str, parts: Stored) -> torch.Tensor:
        """Return the weight that its parts stand for in an engine."""
        return dequantise(self._modules[name], parts, self._quantisation.scheme, self._dtype)

    def parts(self, name: str) -> Stored:
        """Return the tensors that engines hold of a weight; {} for one that they hold plain.

        Raises:
            UserError: the weight cannot be stored so.
        """
        if name not in self._modules:
            return {}
        scheme = self._quantisation.scheme
        if self._is_stored:
            found = {part: self._files[part][...] for part in self._names(name)}
        else:
            found = {name: self._files[name][...]}
        found = {part: tensor.to(self._device) for part, tensor in found.items()}
        if not self._is_stored:
            found = quantise(self._modules[name], found[name], scheme)
        return as_held(found, scheme, self._dtype)

    def _names(self, name: str) -> list[str]:
        """The names under which the files have a weight."""
        if not self._is_stored or name not in self._modules:
            return [name]
        leaves = self._quantisation.scheme.parts((1, 1), "")
        return [f"{self._modules[name]}.{leaf}" for leaf in leaves]
