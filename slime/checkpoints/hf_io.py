"""Megatron model ↔ Hugging Face tensors, on any parallel layout.

    Hugging Face directory ── load_hf ──► model chunks ── iter_hf_tensors ──► (name, tensor) … ──
    save_hf ──► directory

`load_hf` reads on each rank only the slices that it keeps. `iter_hf_tensors` is collective: all
ranks call it, all ranks get every tensor whole, in the same order whatever the layout.
"""

from __future__ import annotations

import dataclasses
import logging
import re
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn

from slime.checkpoints.gathering import PlacedParameter, batches, gather, whole_bytes
from slime.checkpoints.hf_files import HfReader, HfWriter
from slime.checkpoints.megatron_names import Placement, global_parameters
from slime.engines.wire import expert_runs
from slime.engines.wire.buckets import dtype_in, dtype_name
from slime.errors import UserError
from slime.models import Match, ModelFamily, family_of
from slime.models.layouts import Shard, VocabParallel
from slime.models.spec import HfConfig, ModelSpec
from slime.processes.json_collectives import all_gather

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class HfLoadReport:
    """What `load_hf` did on this rank.

    Attributes:
        directory: where from.
        num_loaded: parameters (Megatron tensors) of this rank, all of them loaded.
        num_elements: numbers in them.
        nbytes: bytes read, in the file's dtype.
        files: weight files read from, and how many parameters took something from each.
        ignored: tensors in the files that the family is known not to use.
        seconds: wall time.
    """

    directory: Path
    num_loaded: int
    num_elements: int
    nbytes: int
    files: dict[str, int]
    ignored: tuple[str, ...]
    seconds: float

    def __str__(self) -> str:
        amount = f"{self.num_elements / 1e6:,.1f} M numbers, {self.nbytes / 1e6:,.0f} MB"
        source = f"{len(self.files)} file(s) of {self.directory}"
        text = (
            f"loaded {self.num_loaded} parameters ({amount}) from {source} in {self.seconds:.1f} s"
        )
        return text + (
            f"; {len(self.ignored)} tensors are not used by this model family"
            if self.ignored
            else ""
        )


def load_hf(
    model_chunks: Sequence[nn.Module],
    hf_dir: str | Path,
    hf_config: HfConfig | None = None,
    *,
    model_name: str | None = None,
) -> HfLoadReport:
    """Fill the model with a Hugging Face checkpoint. Collective under ``torch.distributed``.

    An optimizer that keeps its own copy of the parameters must be told afterwards
    (``reload_model_params``).

    Args:
        model_chunks: this rank's model, one chunk per virtual pipeline stage, wrapped or not.
        hf_dir: directory with safetensors.
        hf_config: its config; read from ``hf_dir`` when None.
        model_name: conversion table, when config.json does not tell.
    Raises:
        UserError: files missing or damaged, a tensor of the wrong shape, a parameter that got
            nothing, or a tensor that no parameter took; by name.
    """
    started = time.perf_counter()
    config = hf_config if hf_config is not None else hf_dir
    family = family_of(config, model_name)
    spec = family.model_spec(config)
    placement = Placement.current()
    reader = HfReader(hf_dir)
    ignored = reader.verify(family, spec)
    taken: set[str] = set()
    files: dict[str, int] = {}
    num_loaded = num_elements = nbytes = 0
    with torch.no_grad():
        for name, target in global_parameters(model_chunks, spec.num_experts, placement):
            match = _match(family, name, spec, target)
            if match is None:
                continue
            piece = _read_piece(reader, match, name, target, spec, placement)
            target.copy_(piece)
            taken.update(match.sources)
            num_loaded = num_loaded + 1
            num_elements = num_elements + piece.numel()
            nbytes += piece.numel() * piece.element_size()
            for file_name in {reader.file_of(source) for source in match.sources}:
                files[file_name] = files.get(file_name, 0) + 1
    _check_all_taken(sorted(family.expected_hf_names(spec)), taken, Path(hf_dir))
    seconds = time.perf_counter() - started
    report = HfLoadReport(
        Path(hf_dir), num_loaded, num_elements, nbytes, files, tuple(ignored), seconds
    )
    logger.info("%s", report)
    return report


def _match(family: ModelFamily, name: str, spec: ModelSpec, tensor: torch.Tensor) -> Match | None:
    match = _match_of(family, name, spec)
    if match is None and isinstance(tensor, nn.Parameter):
        raise UserError(
            f"the model has a parameter {name} {list(tensor.shape)} that the table of "
            f"{family.name} does not know",
            why="it would start from random numbers",
            fix="drop the flag that adds it, or choose the model family that has it",
        )
    return match


def _match_of(family: ModelFamily, name: str, spec: ModelSpec) -> Match | None:
    """Also for runs of experts, whose names the tables do not know."""
    known, last = expert_runs.first_of(name)
    match = family.match_megatron(known, spec)
    if match is None or last is None:
        return match
    return dataclasses.replace(
        match, exports=tuple(expert_runs.run_name(one, last) for one in match.exports)
    )


def shard_of(match: Match, placement: Placement) -> Shard:
    """Which piece of a parameter this rank holds."""
    if match.rule.layout.tp_axis is None:
        return Shard()
    if match.rule.is_expert:
        return Shard(placement.etp_rank, placement.etp_size)
    return Shard(placement.tp_rank, placement.tp_size)


def with_padding_of(match: Match, tensor: torch.Tensor, spec: ModelSpec, shard: Shard) -> ModelSpec:
    """The model itself tells how far its vocabulary was padded."""
    if not isinstance(match.rule.layout, VocabParallel):
        return spec
    return dataclasses.replace(spec, padded_vocab_size=tensor.shape[0] * shard.size)


def _read_piece(
    reader: HfReader,
    match: Match,
    name: str,
    target: torch.Tensor,
    spec: ModelSpec,
    placement: Placement,
) -> torch.Tensor:
    shard = shard_of(match, placement)
    sources = " + ".join(match.sources)
    try:
        padded = with_padding_of(match, target, spec, shard)
        piece = match.rule.layout.load([reader[source] for source in match.sources], shard, padded)
    except ValueError as error:
        raise UserError(
            f"{sources} does not fit {name}",
            why=str(error),
            fix="use the config.json that belongs to the weights",
        ) from error
    if piece.shape != target.shape:
        raise UserError(
            f"{sources} gives {list(piece.shape)} for {name}, which is {list(target.shape)}"
            + (f" on tensor-parallel rank {shard.rank} of {shard.size}" if shard.size > 1 else ""),
            why="the weights and the model that was built have different shapes",
            fix="leave the architecture flags out (they are read from config.json), or make them "
            "agree with it",
        )
    return piece


def _check_all_taken(expected: list[str], taken: set[str], directory: Path) -> None:
    """Every expected tensor was taken by a parameter on some rank."""
    flags = torch.tensor([name in taken for name in expected], dtype=torch.uint8)
    if dist.is_initialized() and dist.get_world_size() > 1:
        flags = flags.to(_collective_device())
        dist.all_reduce(flags, op=dist.ReduceOp.MAX)
    left_over = [name for name, was_taken in zip(expected, flags.tolist()) if not was_taken]
    if left_over:
        raise UserError(
            f"{len(left_over)} tensors of {directory} were taken by no parameter",
            why=f"the first: {', '.join(left_over[:4])}",
            fix="the model was built without the layers they belong to: check the flags on "
            "layers, biases and norms",
        )


def _collective_device() -> torch.device:
    on_gpu = "nccl" in dist.get_backend()
    return torch.device("cuda", torch.cuda.current_device()) if on_gpu else torch.device("cpu")


# -- export
# ------------------------------------------------------------------------------------------------


class HfExporter:
    """The model's weights as Hugging Face tensors. Building one and iterating are collective.

    Args:
        model_chunks: this rank's model, one chunk per virtual pipeline stage, wrapped or not.
        hf_config: what the model was built from.
        model_name: conversion table, when the config does not tell.
        own_stage: only what this pipeline stage holds; collective over the ranks of the stage, and
            nothing crosses the pipeline.
        in_runs: experts that are stacked here come many at a time
            (`slime.engines.wire.expert_runs`).
    """

    def __init__(
        self,
        model_chunks: Sequence[nn.Module],
        hf_config: HfConfig,
        *,
        model_name: str | None = None,
        own_stage: bool = False,
        in_runs: bool = False,
    ) -> None:
        self.family = family_of(hf_config, model_name)
        self.spec = self.family.model_spec(hf_config)
        place = Placement.current()
        self.placement = dataclasses.replace(place, pp_group=None) if own_stage else place
        self._local = dict(
            global_parameters(model_chunks, self.spec.num_experts, self.placement, in_runs=in_runs)
        )
        self._matches: dict[str, Match] = {}
        for name, tensor in self._local.items():
            match = _match(self.family, name, self.spec, tensor)
            if match is not None:
                self._matches[name] = match
        self._plan = [(held, self._match_of(held.name)) for held in self._exchange()]
        self._names = [name for _, match in self._plan for name in match.exports]

    def tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        """(Hugging Face name, whole tensor), the same on every rank: embedding, layers in order,
        final norm, output.

        On one rank the tensors are views of the parameters where the layout allows: use them before
        the next optimizer step, or copy. On several they are views of buffers that hold a batch of
        them: copy what is kept.
        """
        exported = {held.name: match for held, match in self._plan if match.exports}
        plan = [held for held, match in self._plan if match.exports]
        for batch in batches(plan, self.placement):
            pieces = gather(batch, self._local, self.placement, self._device())
            for held in batch:
                match = exported[held.name]
                with torch.no_grad():
                    tensors = _exported(match, pieces[held.name], self.spec)
                yield from zip(match.exports, tensors, strict=True)

    def nbytes(self) -> int:
        """Of all tensors that `tensors` yields, in the model's dtypes, with padding."""
        return sum(whole_bytes(held, self.placement) for held, match in self._plan if match.exports)

    def names(self) -> list[str]:
        """Names of all tensors that `tensors` yields, in order."""
        return self._names

    def _match_of(self, name: str) -> Match:
        match = self._matches.get(name) or _match_of(self.family, name, self.spec)
        assert match is not None
        return match

    def _exchange(self) -> list[PlacedParameter]:
        """Who holds what, over pipeline stages and expert ranks, in the order of export."""
        place = self.placement
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
                said = [
                    row for part in all_gather([vars(held) for held in mine], group) for row in part
                ]
                mine = [PlacedParameter(**{**row, "shape": tuple(row["shape"])}) for row in said]
        first: dict[str, PlacedParameter] = {}
        for held in mine:
            first.setdefault(held.name, held)
        return sorted(first.values(), key=lambda held: _export_order(held.name))

    def _device(self) -> torch.device:
        return next(iter(self._local.values())).device if self._local else _collective_device()


def _exported(match: Match, pieces: Sequence[torch.Tensor], spec: ModelSpec) -> list[torch.Tensor]:
    """Hugging Face tensors from the pieces of all tensor-parallel ranks; [experts, out, in] each
    for a run."""
    if expert_runs.ExpertRun.parse(match.exports[0]) is None:
        return match.rule.layout.export(pieces, spec)
    # layouts know the axes of one expert: that of the experts goes behind them for the while
    moved = match.rule.layout.export([piece.permute(1, 2, 0) for piece in pieces], spec)
    return [tensor.permute(2, 0, 1) for tensor in moved]


def iter_hf_tensors(
    model_chunks: Sequence[nn.Module], hf_config: HfConfig, *, model_name: str | None = None
) -> Iterator[tuple[str, torch.Tensor]]:
    """One pass over the model's weights as Hugging Face tensors; see `HfExporter`. Collective."""
    return HfExporter(model_chunks, hf_config, model_name=model_name).tensors()


def _export_order(name: str) -> tuple[int, list[int | str]]:
    """Embedding, layers by number, the rest; numbers inside names compare as numbers."""
    layer = re.match(r"decoder\.layers\.(\d+)\.", name)
    stage = 1 + int(layer.group(1)) if layer else 0 if name.startswith("embedding.") else 1 << 30
    return stage, [int(part) if part.isdigit() else part for part in re.split(r"(\d+)", name)]


def save_hf(
    model_chunks: Sequence[nn.Module],
    hf_config: HfConfig,
    directory: str | Path,
    *,
    assets_from: str | Path,
    dtype: torch.dtype | None = None,
    model_name: str | None = None,
) -> Path:
    """Write the model as a Hugging Face directory (sharded safetensors, index, config, tokenizer).
    Collective.

    Rank 0 writes, into a hidden directory that is renamed when it is complete.

    Args:
        assets_from: Hugging Face directory whose config and tokenizer files go along.
        dtype: of the floating-point weights; the model's own when None.
    Raises:
        UserError: ``directory`` is ``assets_from``, or it cannot be written (rank 0; nothing
            half-written is left).
    """
    tensors = iter_hf_tensors(model_chunks, hf_config, model_name=model_name)
    if dist.is_initialized() and dist.get_rank() != 0:
        for _ in tensors:
            pass
        return Path(directory)
    try:
        with HfWriter(directory, assets_from) as writer:
            for name, tensor in tensors:
                writer.add(name, tensor.to(dtype_in(dtype, name, tensor.dtype)))
    except (OSError, UserError):
        for (
            _
        ) in tensors:  # the other ranks are inside the collectives; leave them no one to wait for
            pass
        raise
    logger.info("wrote %.2f GB of weights to %s", writer.total_bytes / 1e9, directory)
    return Path(directory)
