"""Pushes to engines of quantised weights: the exporter's tensors in the form that --hf-checkpoint
stores.

    HfExporter.tensors() ─► QuantisedExport.tensors() ─► buckets, receipt, engines

A weight is cast to the engine's dtype and then quantised, as `slime convert` does with a directory
of that dtype: both give the same bits.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Protocol

import torch

from slime.checkpoints.hf_io import HfExporter
from slime.engines.wire.buckets import dtype_in, dtype_name, dtype_of
from slime.engines.wire.expert_runs import ExpertRun
from slime.engines.wire.quantised import quantise, quantise_run, require_library
from slime.models.ignore_list import WeightMatrix, check
from slime.models.quantised import Quantisation


class Export(Protocol):
    """What a push asks of an exporter."""

    def tensors(self) -> Iterator[tuple[str, torch.Tensor]]: ...
    def nbytes(self) -> int: ...
    def names(self) -> list[str]: ...


class QuantisedExport:
    """The weights of an exporter, with those of Linear layers quantised. Building one is not
    collective, iterating is.

    Args:
        exporter: whole tensors; experts may come in runs, and then their parts do.
        dtype: of the engines' weights that are not quantised.
        converts: false on ranks that only take part in gathering, and neither send nor pack.
    Attributes:
        zeros: matrices, or runs with one, that the last pass, once it was through, found to be all
            zeros: a router or an embedding of zeros was lost on the way.
    Raises:
        UserError: the ignore list does not fit the model; compressed-tensors is needed and not
            installed.
    """

    def __init__(
        self,
        exporter: HfExporter,
        quantisation: Quantisation,
        dtype: torch.dtype,
        *,
        converts: bool = True,
    ) -> None:
        require_library(quantisation.scheme)
        found = check(exporter.family, exporter.spec, quantisation)
        self._exporter = exporter
        self._quantisation = quantisation
        self._dtype = dtype
        self._converts = converts
        self._chosen: dict[str, WeightMatrix] = {
            matrix.weight: matrix for matrix in found.quantised
        }
        self.zeros: list[str] = []

    def tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        """(name, whole tensor) as the quantised model stores it; parts of a weight follow each
        other."""
        if not self._converts:
            yield from self._exporter.tensors()
            return
        self.zeros, found = [], dict[str, torch.Tensor]()
        for name, tensor in self._exporter.tensors():
            matrix = self._matrix(name)
            run = ExpertRun.parse(name)
            if tensor.dim() > 1:
                found[name] = (
                    tensor.flatten(-2).any(-1).all()
                )  # read at the end: it would wait for the GPU
            if matrix is None:
                yield name, tensor
                continue
            cast = tensor.detach().to(dtype_in(self._dtype, name, tensor.dtype))
            scheme = self._quantisation.scheme
            stored = (
                quantise(matrix.module, cast, scheme)
                if run is None
                else quantise_run(run, cast, scheme)
            )
            yield from stored.items()
        some = torch.stack([*found.values()]).tolist() if found else []
        self.zeros = [name for name, has_some in zip(found, some) if not has_some]

    def names(self) -> list[str]:
        """Of all tensors that `tensors` yields; those of one weight in the order of the format's
        table."""
        return [part for name in self._exporter.names() for part in self._parts(name)]

    def nbytes(self) -> int:
        """Of the same, but with the whole size of what is not quantised: an upper bound for
        deadlines."""
        parts = [facts for name in self._exporter.names() for facts in self._parts(name).values()]
        stored = sum(math.prod(shape) * dtype_of(dtype).itemsize for dtype, shape in parts if dtype)
        return stored + self._exporter.nbytes()

    def _matrix(self, name: str) -> WeightMatrix | None:
        """That is quantised; the first of a run, of which all are or none
        (`slime.models.ignore_list`)."""
        run = ExpertRun.parse(name)
        return self._chosen.get(name if run is None else run.expert_name(run.first))

    def _parts(self, name: str) -> dict[str, tuple[str, tuple[int, ...]]]:
        matrix = self._matrix(name)
        run = ExpertRun.parse(name)
        if matrix is None:
            return {name: ("", ())}
        parts = self._quantisation.scheme.parts(matrix.shape, dtype_name(self._dtype))
        if run is None:
            return {f"{matrix.module}.{leaf}": facts for leaf, facts in parts.items()}
        count = run.last - run.first + 1
        return {
            run.name_of(leaf): (dtype, (count, *shape)) for leaf, (dtype, shape) in parts.items()
        }
