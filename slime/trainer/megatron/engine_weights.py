"""The weights that quantised engines compute with, in the trainer's own model.

    parameter ─ pieces of the tensor ranks ─► Hugging Face weights
              ─ quantise, dequantise ─► this rank's piece again

Swapped in around a pass, they make the trainer compute what engines compute after a push of its
weights: the same bits (`slime.engines.wire.quantised` has the arithmetic, for pushes too), at any
layout. A backward pass inside the block leaves gradients of the loss at these weights with the
plain parameters, which is what a straight-through estimator is: rounding counts as the identity.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
import torch.distributed as dist
from torch import Tensor, nn

from slime.checkpoints.hf_io import shard_of, with_padding_of
from slime.checkpoints.megatron_names import Placement, global_parameters
from slime.config.config import Config
from slime.engines.wire.quantised import as_engines_compute, require_library
from slime.models import Match, family_of
from slime.models.ignore_list import check
from slime.models.quantised import Quantisation
from slime.models.spec import HfConfig, read_hf_config
from slime.weights.route import flag_dtype


class EngineWeights:
    """The parameters of a rank's model that engines hold quantised.

    Building one is not collective, swapping in is, over the tensor-parallel ranks.

    Args:
        chunks: this rank's model, one chunk per virtual pipeline stage, wrapped or not.
        hf_config: what the model was built from.
        dtype: of the engines' weights.
        model_name: conversion table, when the config does not tell.
    Raises:
        UserError: the ignore list does not fit the model; compressed-tensors is needed and not
            installed.
    """

    def __init__(
        self,
        chunks: Sequence[nn.Module],
        hf_config: HfConfig,
        quantisation: Quantisation,
        dtype: torch.dtype,
        model_name: str | None = None,
    ) -> None:
        require_library(quantisation.scheme)
        self._chunks = chunks
        self._scheme = quantisation.scheme
        self._dtype = dtype
        family = family_of(hf_config, model_name)
        self._spec = family.model_spec(hf_config)
        self._placement = Placement.current()
        chosen = {matrix.weight for matrix in check(family, self._spec, quantisation).quantised}
        self._matches: dict[str, Match] = {}
        holders: dict[int, bool] = {}
        for name, tensor in self._named():
            match = family.match_megatron(name, self._spec)
            if match is not None and chosen.intersection(match.exports):
                self._matches[name] = match
                holders[_whole(tensor).data_ptr()] = match.rule.is_expert
        of_chunks = [parameter for chunk in chunks for parameter in chunk.parameters()]
        #: Each parameter that is quantised, and whether it is that of routed experts.
        self._parameters = [
            (p, holders[p.data_ptr()]) for p in of_chunks if p.data_ptr() in holders
        ]

    @staticmethod
    def of(
        config: Config, chunks: Sequence[nn.Module], hf_config: HfConfig
    ) -> EngineWeights | None:
        """Build it from a run's flags; None if engines hold plain weights."""
        quantisation = Quantisation.read(read_hf_config(hf_config))
        if quantisation is None:
            return None
        dtype = flag_dtype(config, hf_config)
        return EngineWeights(chunks, hf_config, quantisation, dtype, config.checkpoint.model_name)

    @contextmanager
    def swapped_in(self, *, experts_only: bool = False) -> Iterator[None]:
        """Within the block the model computes with these weights instead of those that it has now,
        which come back afterwards, bit for bit. Takes the memory of the parameters a second time.
        Collective."""
        parameters = [
            parameter for parameter, is_expert in self._parameters if is_expert or not experts_only
        ]
        own = [parameter.data for parameter in parameters]
        try:
            with torch.no_grad():
                for parameter in parameters:
                    parameter.data = parameter.data.clone()
                for name, tensor in self._named():
                    match = self._matches.get(name)
                    if match is not None and (match.rule.is_expert or not experts_only):
                        tensor.copy_(self._piece(match, tensor.detach()))
            yield
        finally:
            for parameter, data in zip(parameters, own):
                parameter.data = data

    def _named(self) -> Iterator[tuple[str, Tensor]]:
        return global_parameters(self._chunks, self._spec.num_experts, self._placement, part="base")

    def _piece(self, match: Match, own: Tensor) -> Tensor:
        """This rank's piece of the weight that engines compute with."""
        layout = match.rule.layout
        shard = shard_of(match, self._placement)
        if self._scheme.is_of_rows(own.shape[1]):
            return as_engines_compute(own, self._scheme, self._dtype)
        pieces = [own]
        if shard.size > 1:
            group = self._placement.etp_group if match.rule.is_expert else self._placement.tp_group
            pieces = [torch.empty_like(own) for _ in range(shard.size)]
            dist.all_gather(pieces, own.contiguous(), group=group)
        spec = with_padding_of(match, own, self._spec, shard)
        weights = [
            as_engines_compute(one, self._scheme, self._dtype)
            for one in layout.export(pieces, spec)
        ]
        return layout.load(weights, shard, spec)


def _whole(tensor: Tensor) -> Tensor:
    """The parameter that a single expert's weight is a view of; any other is whole itself."""
    stack, _ = getattr(tensor, "stacked_in", (tensor, 0))
    return stack
