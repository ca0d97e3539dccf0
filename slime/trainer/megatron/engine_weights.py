"""Fake quantisation: the trainer's model computes with the weights of quantised engines.

    parameter ─ shards of the tensor-parallel ranks ─► Hugging Face weights
              ─ quantise, dequantise ─► this rank's shard again

The weights that are swapped in for a pass equal, bit for bit, those that engines compute with after
a push, at any layout (`slime.engines.wire.quantised` does the arithmetic for both). A backward pass
inside the block gives the original parameters the gradients of the loss at the quantised weights.
This is the straight-through estimator: it treats rounding as the identity.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor, nn

from slime.checkpoints.hf_io import load_hf, shard_of, with_padding_of
from slime.checkpoints.megatron_names import ModelPart, Placement, global_parameters
from slime.checkpoints.quantised_reader import QuantisedReader
from slime.config.config import Config
from slime.engines.wire.quantised import as_engines_compute, require_library
from slime.log import get_logger
from slime.models import Match, family_of
from slime.models.ignore_list import check
from slime.models.quantised import Quantisation
from slime.models.spec import HfConfig, ModelSpec, check_same_model, read_hf_config
from slime.models.vision import seeing
from slime.weights.route import flag_dtype

logger = get_logger(__name__)


def frozen_reader(config: Config, base: Path, device: torch.device) -> QuantisedReader | None:
    """Return the reader of a frozen base that engines hold quantised; None if engines hold
    unquantised weights.

    Args:
        base: the Hugging Face directory from which the base is loaded.
        device: on which quantised weights are computed.
    """
    hf_config = read_hf_config(config.checkpoint.model_dir)
    quantisation = Quantisation.read(hf_config)
    if quantisation is None:
        return None
    logger.info(
        "adapters are trained beside a frozen base with the values of %s, from %s",
        quantisation,
        base,
    )
    return QuantisedReader(
        base,
        quantisation,
        flag_dtype(config, hf_config),
        model_name=config.checkpoint.model_name,
        device=device,
    )


def load_same_model(
    chunks: Sequence[nn.Module],
    spec: ModelSpec,
    config: Config,
    directory: Path,
    reader: QuantisedReader | None,
    part: ModelPart,
) -> None:
    """Fill a part of the model from a Hugging Face directory of the same architecture.

    Args:
        reader: reads the directory with the engines' quantised values; None: unquantised weights.
    Raises:
        UserError: the directory holds another architecture, or as `load_hf`.
    """
    name = config.checkpoint.model_name
    theirs = read_hf_config(directory)
    if spec.vision is not None:
        theirs = seeing(theirs)
    check_same_model(spec, family_of(theirs, name).model_spec(theirs), directory)
    load_hf(chunks, directory, theirs, model_name=name, reader=reader, part=part)


class EngineWeights:
    """The parameters of a rank's model that engines hold quantised.

    The constructor is not collective; `swapped_in` is, over the tensor-parallel ranks.

    Args:
        chunks: this rank's model, one chunk per virtual pipeline stage, wrapped or not.
        hf_config: the config from which the model was built.
        dtype: dtype of the engines' unquantised weights.
        model_name: name of the conversion table, if the config does not determine it.
    Raises:
        UserError: the ignore list does not fit the model, or compressed-tensors is needed and not
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
                holders[_stack_of(tensor).data_ptr()] = match.rule.is_expert
        of_chunks = [parameter for chunk in chunks for parameter in chunk.parameters()]
        #: (quantised parameter, whether it belongs to routed experts)
        self._parameters = [
            (p, holders[p.data_ptr()]) for p in of_chunks if p.data_ptr() in holders
        ]

    @staticmethod
    def of(
        config: Config, chunks: Sequence[nn.Module], hf_config: HfConfig
    ) -> EngineWeights | None:
        """Return the weights for a run's flags; None if engines hold unquantised weights."""
        quantisation = Quantisation.read(read_hf_config(hf_config))
        if quantisation is None:
            return None
        dtype = flag_dtype(config, hf_config)
        return EngineWeights(chunks, hf_config, quantisation, dtype, config.checkpoint.model_name)

    @contextmanager
    def swapped_in(self, *, experts_only: bool = False) -> Iterator[None]:
        """Let the model compute with these weights inside the block, then restore its own exactly.
        Collective. The block needs memory for a second copy of the parameters."""
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
                        tensor.copy_(self._engine_shard(match, tensor.detach()))
            yield
        finally:
            for parameter, data in zip(parameters, own):
                parameter.data = data

    def _named(self) -> Iterator[tuple[str, Tensor]]:
        return global_parameters(self._chunks, self._spec.num_experts, self._placement, part="base")

    def _engine_shard(self, match: Match, own: Tensor) -> Tensor:
        """Return this rank's shard of the weight with which engines compute."""
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


def _stack_of(tensor: Tensor) -> Tensor:
    """Return the stacked parameter if ``tensor`` is one expert's view of it, else ``tensor``."""
    stack, _ = getattr(tensor, "stacked_in", (tensor, 0))
    return stack
