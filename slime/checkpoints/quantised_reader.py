"""Reads the weights with which the engines of a quantised model compute.

    INT4 or FP8, as engines load it             ─► dequantised
    the unquantised weights it was made from    ─► quantised as `slime convert` does, dequantised

Adapters are trained on top of these. Weights are computed whole and then cut, so that they are
bit-identical in every parallel layout.
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
        directory: of quantised weights, or of the unquantised ones that they were made from.
        quantisation: of the engines.
        dtype: of the engines' unquantised weights, to which they dequantise the others.
        device: on which quantised weights are computed.
    Raises:
        UserError: as for `HfReader`; or compressed-tensors is needed and not installed.
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
        """Compare the directory with the model, see `HfReader.verify`."""
        if not self._is_stored:
            return self._files.verify(family, spec)
        verify_quantised(self.directory, family, spec, self._quantisation)
        return sorted(name for name in self._files.names() if family.is_ignored(name, spec))

    def file_of(self, name: str) -> str:
        return self._files.file_of(self._names(name)[0])

    def __getitem__(self, name: str) -> TensorSource:
        """Return an unquantised weight, which can be read in slices, or a whole dequantised
        weight."""
        if name not in self._modules:
            return self._files[name]
        return self.dequantised(name, self.parts(name))

    def dequantised(self, name: str, parts: Stored) -> torch.Tensor:
        """Return the weight that an engine computes from its parts."""
        return dequantise(self._modules[name], parts, self._quantisation.scheme, self._dtype)

    def parts(self, name: str) -> Stored:
        """Return the tensors that engines hold for a weight; {} if they hold it unquantised.

        Raises:
            UserError: the weight cannot be quantised in this way.
        """
        if name not in self._modules:
            return {}
        scheme = self._quantisation.scheme
        read = {part: self._files[part][...].to(self._device) for part in self._names(name)}
        stored = read if self._is_stored else quantise(self._modules[name], read[name], scheme)
        return as_held(stored, scheme, self._dtype)

    def _names(self, name: str) -> list[str]:
        """Return the names in the files of a weight's tensors."""
        if not self._is_stored or name not in self._modules:
            return [name]
        leaves = self._quantisation.scheme.parts((1, 1), "")
        return [f"{self._modules[name]}.{leaf}" for leaf in leaves]
