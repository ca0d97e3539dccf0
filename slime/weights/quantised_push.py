"""Pushes to engines of quantised weights: the exporter's tensors in the form that --hf-checkpoint stores.

    HfExporter.tensors() ─► QuantisedExport.tensors() ─► buckets, receipt, engines

A weight is cast to the engine's dtype and then quantised, as `slime convert` does with a directory of that dtype: both
give the same bits.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Protocol

import torch

from slime.checkpoints.hf_io import HfExporter
from slime.engines.wire.buckets import dtype_in, dtype_name, dtype_of
from slime.engines.wire.quantised import quantise, require_library
from slime.models.ignore_list import Matrix, check
from slime.models.quantised import Quantisation


class Export(Protocol):
    """What a push asks of an exporter."""

    def tensors(self) -> Iterator[tuple[str, torch.Tensor]]: ...
    def nbytes(self) -> int: ...
    def names(self) -> list[str]: ...


class QuantisedExport:
    """The weights of an exporter, with those of Linear layers quantised. Building one is not collective, iterating is.

    Args:
        exporter: whole tensors, no runs of experts.
        dtype: of the engines' weights that are not quantised.
        converts: false on ranks that only take part in gathering, and neither send nor pack.
    Attributes:
        zeros: matrices that the last pass found to be all zeros: a router or an embedding of zeros was lost on the way.
    Raises:
        UserError: the ignore list does not fit the model; compressed-tensors is needed and not installed.
    """

    def __init__(
        self, exporter: HfExporter, quantisation: Quantisation, dtype: torch.dtype, *, converts: bool = True
    ) -> None:
        require_library(quantisation.scheme)
        found = check(exporter.family, exporter.spec, quantisation)
        self._exporter, self._quantisation, self._dtype, self._converts = exporter, quantisation, dtype, converts
        self._chosen: dict[str, Matrix] = {matrix.weight: matrix for matrix in found.quantised}
        self.zeros: list[str] = []

    def tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        """(name, whole tensor) as the quantised model stores it; parts of a weight follow each other."""
        if not self._converts:
            yield from self._exporter.tensors()
            return
        self.zeros = []
        for name, tensor in self._exporter.tensors():
            if tensor.dim() == 2 and not tensor.any():
                self.zeros.append(name)
            if name not in self._chosen:
                yield name, tensor
                continue
            cast = tensor.detach().to(dtype_in(self._dtype, name, tensor.dtype))
            yield from quantise(self._chosen[name].module, cast, self._quantisation.scheme).items()

    def names(self) -> list[str]:
        """Of all tensors that `tensors` yields; those of one weight in the order of the format's table."""
        return [part for name in self._exporter.names() for part in self._parts(name)]

    def nbytes(self) -> int:
        """Of the same, but with the whole size of what is not quantised: an upper bound for deadlines."""
        parts = [facts for name in self._exporter.names() for facts in self._parts(name).values()]
        stored = sum(math.prod(shape) * dtype_of(dtype).itemsize for dtype, shape in parts if dtype)
        return stored + self._exporter.nbytes()

    def _parts(self, name: str) -> dict[str, tuple[str, tuple[int, ...]]]:
        matrix = self._chosen.get(name)
        if matrix is None:
            return {name: ("", ())}
        parts = self._quantisation.scheme.parts(matrix.shape, dtype_name(self._dtype))
        return {f"{matrix.module}.{part}": facts for part, facts in parts.items()}
