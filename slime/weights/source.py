"""Yield a model's weights, with names and sizes, for a push to the engines or for an export.

    ModelSource       the trainer's weights, whole, under their Hugging Face names
    QuantisedSource another source's weights as a quantised --hf-checkpoint stores them

`slime.weights.sync` pushes a source to the engines, `write_hf` writes one to a directory. Another
kind of push (only adapters, a model with frozen parts) is another source.
"""

from __future__ import annotations

import dataclasses
import logging
import math
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import nn

from slime.checkpoints.gathering import PlacedParameter, batches, gather, whole_bytes
from slime.checkpoints.hf_files import SCORE, HfReader, HfWriter
from slime.checkpoints.hf_io import collective_device, match_of, match_parameter
from slime.checkpoints.megatron_names import ModelPart, Placement, global_parameters
from slime.checkpoints.peft_files import write_adapter
from slime.checkpoints.reward_models import held_head, reward_config
from slime.engines.wire.buckets import dtype_in, dtype_name, dtype_of
from slime.engines.wire.expert_runs import ExpertRun
from slime.engines.wire.quantised import quantise, quantise_run, require_library
from slime.errors import UserError
from slime.models import Match, family_of
from slime.models.adapters import AdapterConfig
from slime.models.ignore_list import WeightMatrix, check
from slime.models.parameters import ModelParameters
from slime.models.quantised import Quantisation
from slime.models.spec import HfConfig, ModelSpec, read_hf_config
from slime.processes.json_collectives import all_gather, gather_tensors

logger = logging.getLogger(__name__)


class WeightSource(Protocol):
    """Yields the tensors of one push or one export. Iterating is collective over the trainer ranks.

    Attributes:
        parameters: of the model; the source yields the served ones, or a part of them.
        zeros: names of matrices, or of runs of experts with such a matrix, that were all zeros in
            the last complete pass: a sign of lost weights. Empty if a source does not check.
    """

    parameters: ModelParameters
    zeros: list[str]

    def names(self) -> list[str]:
        """Return the names of all tensors that `tensors` yields, in order."""

    def nbytes(self) -> int:
        """Return an upper bound of the tensors' size in bytes, for deadlines."""

    def tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield (name, whole tensor), the same on every rank; copy a tensor to keep it."""


class ModelSource:
    """The model's weights as Hugging Face tensors. Building one and iterating are collective.

    Args:
        model_chunks: this rank's model, one chunk per virtual pipeline stage, wrapped or not.
        hf_config: the config that the model was built from.
        model_name: the model family's name; needed if the config does not tell the family.
        own_stage: yield only this pipeline stage's weights; collective only over the ranks of the
            stage.
        in_runs: yield experts in runs (`slime.engines.wire.expert_runs`), unless checkpoints
            already stack all experts of a layer.
        adapters: yield the tensors of these adapters, under PEFT's names, instead of the weights.
        part: the part of the weights to yield.
    """

    def __init__(
        self,
        model_chunks: Sequence[nn.Module],
        hf_config: HfConfig,
        *,
        model_name: str | None = None,
        own_stage: bool = False,
        in_runs: bool = False,
        adapters: AdapterConfig | None = None,
        part: ModelPart = "base",
    ) -> None:
        family = family_of(hf_config, model_name)
        self._spec = family.model_spec(hf_config)
        self.parameters = ModelParameters(family, self._spec, adapters=adapters)
        self._family = self.parameters.trained_family
        self.zeros: list[str] = []
        place = Placement.current()
        self._placement = dataclasses.replace(place, pp_group=None) if own_stage else place
        self._local = dict(
            global_parameters(
                model_chunks,
                self._spec.num_experts,
                self._placement,
                in_runs=in_runs and not self._family.stacks_experts,
                part=part if adapters is None else "adapters",
            )
        )
        self._matches: dict[str, Match] = {}
        for name, tensor in self._local.items():
            match = match_parameter(self._family, name, self._spec, tensor)
            if match is not None:
                self._matches[name] = match
        self._plan: list[tuple[PlacedParameter, Match]] = []
        for held in self._exchange():
            match = self._matches.get(held.name) or match_of(self._family, held.name, self._spec)
            assert match is not None
            self._plan.append((held, match))
        # the experts of a stack share its name
        self._names = list(dict.fromkeys(name for _, match in self._plan for name in match.exports))

    def tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield embedding, layers in order, final norm, output.

        On one rank, tensors are views of the parameters if the layout allows: use or copy them
        before the next optimizer step. On several ranks they are views of reused buffers: copy a
        tensor to keep it.
        """
        exported = {held.name: match for held, match in self._plan if match.exports}
        plan = [held for held, match in self._plan if match.exports]
        stacks = _ExpertStacks(self._spec.num_experts)
        for batch in batches(plan, self._placement):
            pieces = gather(batch, self._local, self._placement, self._device())
            for held in batch:
                match = exported[held.name]
                with torch.no_grad():
                    tensors = _exported(match, pieces[held.name], self._spec)
                if match.rule.is_stacked:
                    yield from stacks.completed(match, tensors)
                else:
                    yield from zip(match.exports, tensors, strict=True)

    def nbytes(self) -> int:
        """Return the size in the model's dtypes, with padding."""
        return sum(
            whole_bytes(held, self._placement) for held, match in self._plan if match.exports
        )

    def names(self) -> list[str]:
        return self._names

    def _exchange(self) -> list[PlacedParameter]:
        """Exchange the parameters' places over pipeline stages and expert ranks; return them in
        export order."""
        place = self._placement
        mine = [
            PlacedParameter(
                name,
                tuple(self._local[name].shape),
                dtype_name(self._local[name].dtype),
                place.pp_rank,
                place.ep_rank,
                match.rule.is_expert,
                match.rule.layout.tp_axis is not None,
            )
            for name, match in self._matches.items()
        ]
        for group in (place.ep_group, place.pp_group):
            if group is not None:
                parts = all_gather([vars(held) for held in mine], group)
                rows = [row for part in parts for row in part]
                mine = [PlacedParameter(**{**row, "shape": tuple(row["shape"])}) for row in rows]
        first: dict[str, PlacedParameter] = {}
        for held in mine:
            first.setdefault(held.name, held)
        return sorted(first.values(), key=lambda held: _export_order(held.name))

    def _device(self) -> torch.device:
        return next(iter(self._local.values())).device if self._local else collective_device()


def _exported(match: Match, pieces: Sequence[torch.Tensor], spec: ModelSpec) -> list[torch.Tensor]:
    """Join the pieces of all tensor-parallel ranks; for a run, return tensors [experts, out,
    in]."""
    if ExpertRun.parse(match.exports[0]) is None:
        return match.rule.layout.export(pieces, spec)
    # layouts expect the axes of one expert first, so the axis of the experts moves last
    moved = match.rule.layout.export([piece.permute(1, 2, 0) for piece in pieces], spec)
    return [tensor.permute(2, 0, 1) for tensor in moved]


class _ExpertStacks:
    """Stacks the experts of a layer if a checkpoint holds them in one tensor. A stack needs extra
    memory until it is yielded."""

    def __init__(self, num_experts: int) -> None:
        self._num_experts = num_experts
        self._open: dict[str, torch.Tensor] = {}
        self._missing: dict[str, int] = {}

    def completed(
        self, match: Match, tensors: Sequence[torch.Tensor]
    ) -> Iterator[tuple[str, torch.Tensor]]:
        """Add one expert's tensors; yield the stacks that are now complete."""
        for name, tensor in zip(match.exports, tensors, strict=True):
            if name not in self._open:
                self._open[name] = tensor.new_empty(self._num_experts, *tensor.shape)
                self._missing[name] = self._num_experts
            self._open[name][match.expert].copy_(tensor)
            self._missing[name] -= 1
            if not self._missing[name]:
                yield name, self._open.pop(name)


class QuantisedSource:
    """Quantises another source's weights as the model stores them. Building one is not collective.

    A weight is cast to the engine's dtype and then quantised, as `slime convert` does with a
    directory of that dtype: both give the same bits.

    Args:
        source: of plain tensors. Runs of experts yield runs of quantised parts.
        dtype: of the engines' weights that are not quantised.
        converts: False on ranks that only take part in gathering and neither send nor pack.
    Raises:
        UserError: the ignore list does not fit the model, or compressed-tensors is needed and not
            installed.
    """

    def __init__(
        self,
        source: WeightSource,
        quantisation: Quantisation,
        dtype: torch.dtype,
        *,
        converts: bool = True,
    ) -> None:
        require_library(quantisation.scheme)
        self.parameters = dataclasses.replace(source.parameters, quantisation=quantisation)
        self.zeros: list[str] = []
        self._source = source
        self._scheme = quantisation.scheme
        self._dtype = dtype
        self._converts = converts
        found = check(self.parameters.family, self.parameters.spec, quantisation)
        self._chosen = {matrix.weight: matrix for matrix in found.quantised}

    def tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield the tensors as the quantised model stores them; parts of a weight are adjacent."""
        if not self._converts:
            yield from self._source.tensors()
            return
        self.zeros = []
        # read at the end, because reading synchronises with the GPU
        has_values: dict[str, torch.Tensor] = {}
        for name, tensor in self._source.tensors():
            if tensor.dim() > 1:
                has_values[name] = tensor.flatten(-2).any(-1).all()
            matrix, run = self._matrix(name)
            if matrix is None:
                yield name, tensor
                continue
            cast = tensor.detach().to(dtype_in(self._dtype, name, tensor.dtype))
            if run is None:
                yield from quantise(matrix.module, cast, self._scheme).items()
            else:
                yield from quantise_run(run, cast, self._scheme).items()
        flags = torch.stack([*has_values.values()]).tolist() if has_values else []
        self.zeros = [name for name, is_nonzero in zip(has_values, flags) if not is_nonzero]

    def names(self) -> list[str]:
        return [part for name in self._source.names() for part in self._parts(name)]

    def nbytes(self) -> int:
        """Return the size, including the plain form of quantised weights."""
        parts = [facts for name in self._source.names() for facts in self._parts(name).values()]
        stored = sum(math.prod(shape) * dtype_of(dtype).itemsize for dtype, shape in parts if dtype)
        return stored + self._source.nbytes()

    def _matrix(self, name: str) -> tuple[WeightMatrix | None, ExpertRun | None]:
        """Return the matrix if it is quantised, for a run its first one; and the run, if it is
        one."""
        run = ExpertRun.parse(name)
        return self._chosen.get(name if run is None else run.expert_name(run.first)), run

    def _parts(self, name: str) -> dict[str, tuple[str, tuple[int, ...]]]:
        matrix, run = self._matrix(name)
        if matrix is None:
            return {name: ("", ())}
        parts = self._scheme.parts(matrix.shape, dtype_name(self._dtype))
        if run is None:
            return {f"{matrix.module}.{leaf}": facts for leaf, facts in parts.items()}
        count = run.last - run.first + 1
        return {
            run.name_of(leaf): (dtype, (count, *shape)) for leaf, (dtype, shape) in parts.items()
        }


def save_hf(
    model_chunks: Sequence[nn.Module],
    hf_config: HfConfig,
    directory: str | Path,
    *,
    assets_from: str | Path,
    model_name: str | None = None,
) -> Path:
    """Write the whole model as a Hugging Face directory; see `write_hf`. Collective."""
    source = ModelSource(model_chunks, hf_config, model_name=model_name)
    return write_hf(source, directory, assets_from=assets_from)


def save_reward_model(
    model_chunks: Sequence[nn.Module],
    hf_config: HfConfig,
    directory: str | Path,
    *,
    assets_from: str | Path,
    model_name: str | None = None,
) -> Path:
    """Write a reward model as a Hugging Face sequence classifier; see `write_hf`. Collective."""
    trunk = ModelSource(model_chunks, hf_config, model_name=model_name, part="trunk")
    return write_hf(
        _RewardModelSource(trunk, model_chunks),
        directory,
        assets_from=assets_from,
        config_changes=reward_config(read_hf_config(hf_config), str(assets_from)),
    )


class _RewardModelSource:
    """Yields the trunk's tensors, then the head, which the last pipeline stage holds."""

    def __init__(self, trunk: ModelSource, model_chunks: Sequence[nn.Module]) -> None:
        self._trunk = trunk
        self._chunks = model_chunks
        self.parameters = trunk.parameters

    def tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        yield from self._trunk.tensors()
        own = held_head(self._chunks)
        held = gather_tensors(own) if dist.is_initialized() else [own]
        for head in [one for one in held or () if one is not None][:1]:
            yield SCORE, head


def collect_adapters(
    model_chunks: Sequence[nn.Module],
    hf_config: HfConfig,
    adapters: AdapterConfig,
    *,
    base: str,
    model_name: str | None = None,
) -> Callable[[Path], None]:
    """Copy the adapters to rank 0's host memory, and return a function that later writes them as a
    PEFT directory. Collective; the returned function is not, and does nothing on other ranks.

    Args:
        base: the base model's directory, or its name on the hub.
    Raises:
        UserError: in the returned function: the directory cannot be written; no partial one
            remains.
    """
    source = ModelSource(
        model_chunks, hf_config, model_name=model_name, adapters=adapters, in_runs=True
    )
    is_writer = not dist.is_initialized() or dist.get_rank() == 0
    tensors: dict[str, torch.Tensor] = {}
    for name, tensor in source.tensors():
        if is_writer:  # buffers are reused; only the writer keeps copies
            copy = tensor.detach().to("cpu", copy=True)
            run = ExpertRun.parse(name)
            tensors.update([(name, copy)] if run is None else run.split(copy))

    def write(directory: Path) -> None:
        if is_writer:
            write_adapter(directory, tensors, adapters, source.parameters.spec, base=base)
            logger.info("wrote the adapters to %s", directory)

    return write


def write_hf(
    source: WeightSource | _RewardModelSource,
    directory: str | Path,
    *,
    assets_from: str | Path,
    config_changes: Mapping[str, Any] | None = None,
) -> Path:
    """Write plain weights as a Hugging Face directory (sharded safetensors, index, config,
    tokenizer). Collective. Tensors that the family only copies come from ``assets_from``.

    Rank 0 writes to a hidden directory, which is renamed when complete.

    Args:
        assets_from: Hugging Face directory with the config and tokenizer files to copy.
        config_changes: as of `HfWriter`.
    Raises:
        UserError: on rank 0: ``directory`` is ``assets_from``, or cannot be written; no partial one
            remains.
    """
    tensors = source.tensors()
    if dist.is_initialized() and dist.get_rank() != 0:
        exhaust(tensors)
        return Path(directory)
    try:
        with HfWriter(directory, assets_from, config_changes=config_changes) as writer:
            has_weights = any(Path(assets_from).glob("*.safetensors"))  # else only a config
            start = HfReader(assets_from) if has_weights else None
            for name, tensor in tensors:
                target = tensor.dtype
                if start is not None and name.endswith(_DTYPES_OF_START) and name in start.names():
                    target = dtype_of(start.dtype_of(name))
                writer.add(name, tensor.to(target))
            if start is not None:
                parameters = source.parameters
                for name in sorted(start.names()):
                    if not parameters.family.is_carried(name, parameters.spec):
                        continue
                    writer.add(name, start[name][:])
    except (OSError, UserError):
        exhaust(tensors)  # the other ranks are in its collectives
        raise
    logger.info("wrote %.2f GB of weights to %s", writer.total_bytes / 1e9, directory)
    return Path(directory)


#: Tensors whose dtype differs between published checkpoints of one architecture. The trainer holds
#: them in float32; an export uses the dtype of the initial model.
_DTYPES_OF_START = ("linear_attn.A_log", "linear_attn.norm.weight")


def exhaust(tensors: Iterable[tuple[str, torch.Tensor]]) -> None:
    """Take part in the remaining collectives of a pass."""
    for _ in tensors:
        pass


def _export_order(name: str) -> tuple[int, list[int | str]]:
    """Return a sort key: embedding, layers by number, the rest; numbers in names compare as
    numbers."""
    layer = re.match(r"decoder\.layers\.(\d+)\.", name)
    stage = 1 + int(layer.group(1)) if layer else 0 if name.startswith("embedding.") else 1 << 30
    return stage, [int(part) if part.isdigit() else part for part in re.split(r"(\d+)", name)]
