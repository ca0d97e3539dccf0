"""Fill a Megatron model from a Hugging Face directory, on any parallel layout.

Each rank reads only the slices that it keeps. `slime.weights.source` is the reverse.
"""

from __future__ import annotations

import dataclasses
import logging
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import torch
import torch.distributed as dist
from torch import nn

from slime.checkpoints.hf_files import HfReader
from slime.checkpoints.megatron_names import ModelPart, Placement, global_parameters
from slime.checkpoints.reward_models import fill_head
from slime.engines.wire import expert_runs
from slime.errors import UserError
from slime.models import Match, ModelFamily, family_of
from slime.models.layouts import OneExpert, Shard, TensorSource, VocabParallel
from slime.models.parameters import ModelParameters
from slime.models.spec import HfConfig, ModelSpec

logger = logging.getLogger(__name__)


class ModelReader(Protocol):
    """Interface of readers of a directory's tensors, such as `HfReader`."""

    def verify(self, family: ModelFamily, spec: ModelSpec) -> list[str]: ...

    def file_of(self, name: str) -> str: ...

    def __getitem__(self, name: str) -> TensorSource: ...


@dataclass(frozen=True)
class HfLoadReport:
    """The result of `load_hf` on this rank.

    Attributes:
        directory: the Hugging Face directory.
        num_loaded: number of parameters (Megatron tensors) of this rank, all loaded.
        num_elements: number of their elements.
        nbytes: bytes read, in the file's dtype; for quantised weights, bytes after decoding.
        files: weight file → number of parameters that were read from it.
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
    reader: ModelReader | None = None,
    part: ModelPart = "base",
) -> HfLoadReport:
    """Fill the model with a Hugging Face checkpoint. Collective under ``torch.distributed``.

    An optimizer with its own copy of the parameters must update it afterwards
    (``reload_model_params``).

    Args:
        model_chunks: this rank's model, one chunk per virtual pipeline stage, wrapped or not.
        hf_dir: directory with safetensors.
        hf_config: its config; read from ``hf_dir`` when None.
        model_name: name of the conversion table, if config.json does not determine it.
        reader: reader of ``hf_dir``; default: a reader of unquantised weights.
        part: the part of the model that is filled. With "trunk", the head of a reward model is
            loaded too.
    Raises:
        UserError: files are missing or damaged, a tensor has a wrong shape, or a parameter or a
            tensor has no counterpart; names them.
    """
    started = time.perf_counter()
    config = hf_config if hf_config is not None else hf_dir
    family = family_of(config, model_name)
    spec = family.model_spec(config)
    placement = Placement.current()
    reader = reader or HfReader(hf_dir, as_trunk=part == "trunk")
    ignored = reader.verify(family, spec)
    taken: set[str] = set()
    files: dict[str, int] = {}
    num_loaded = num_elements = nbytes = 0
    with torch.no_grad():
        for name, target in global_parameters(model_chunks, spec.num_experts, placement, part=part):
            match = match_parameter(family, name, spec, target)
            if match is None:
                continue
            piece = _read_piece(reader, match, name, target, spec, placement)
            target.copy_(piece)
            if not bool(torch.isfinite(target).all()):  # of a GPU's copy this takes no time
                raise UserError(
                    f"{hf_dir}: {match.sources[0]} has values that are not finite",
                    why="a model with NaN or infinite weights generates and learns nothing",
                    fix="download the file again, or take an earlier checkpoint",
                )
            taken.update(match.sources)
            num_loaded += 1
            num_elements += piece.numel()
            nbytes += piece.nbytes
            for file_name in {reader.file_of(source) for source in match.sources}:
                files[file_name] = files.get(file_name, 0) + 1
    if isinstance(reader, HfReader) and reader.score is not None:
        fill_head(model_chunks, reader.score[:])
    expected = set(ModelParameters(family, spec).trained)
    if part == "trunk" and not spec.tie_embeddings:
        output = family.match_megatron("output_layer.weight", spec)
        expected -= set(output.sources if output is not None else ())
    _check_all_taken(sorted(expected), taken, Path(hf_dir))
    seconds = time.perf_counter() - started
    report = HfLoadReport(
        Path(hf_dir), num_loaded, num_elements, nbytes, files, tuple(ignored), seconds
    )
    logger.info("%s", report)
    return report


@torch.no_grad()
def fill_adapters(
    model_chunks: Sequence[nn.Module],
    table: ModelFamily,
    spec: ModelSpec,
    tensors: Mapping[str, TensorSource],
) -> None:
    """Fill the adapters of a model on any parallel layout. Adapters that are not in ``tensors`` do
    not change.

    Args:
        table: table of the adapters (`slime.models.adapters.adapter_family`).
        tensors: full tensors, by PEFT's names.
    Raises:
        UserError: a tensor has a wrong shape.
    """
    placement = Placement.current()
    for name, target in global_parameters(
        model_chunks, spec.num_experts, placement, part="adapters"
    ):
        match = match_parameter(table, name, spec, target)
        if match is not None and match.sources[0] in tensors:
            target.copy_(_read_piece(tensors, match, name, target, spec, placement))


def match_parameter(
    family: ModelFamily, name: str, spec: ModelSpec, tensor: torch.Tensor
) -> Match | None:
    """Find the row of the family's table for a tensor of the model; None for a buffer without one.

    Raises:
        UserError: the table does not know a parameter.
    """
    match = match_of(family, name, spec)
    if match is None and isinstance(tensor, nn.Parameter):
        raise UserError(
            f"the model has a parameter {name} {list(tensor.shape)} that the table of "
            f"{family.name} does not know",
            why="it would keep its random initial values",
            fix="leave out the flag that adds it, or choose the model family that has it",
        )
    return match


def match_of(family: ModelFamily, name: str, spec: ModelSpec) -> Match | None:
    """Find the row of a name, which may also be the name of a run of experts."""
    known, last = expert_runs.first_of(name)
    match = family.match_megatron(known, spec)
    if match is None or last is None:
        return match
    return dataclasses.replace(
        match, exports=tuple(expert_runs.run_name(one, last) for one in match.exports)
    )


def shard_of(match: Match, placement: Placement) -> Shard:
    """Return which piece of a parameter this rank holds."""
    if match.rule.layout.tp_axis is None:
        return Shard()
    if match.rule.is_expert:
        return Shard(placement.etp_rank, placement.etp_size)
    return Shard(placement.tp_rank, placement.tp_size)


def with_padding_of(match: Match, tensor: torch.Tensor, spec: ModelSpec, shard: Shard) -> ModelSpec:
    """Return the spec with the padded vocabulary that the model was built with."""
    if not isinstance(match.rule.layout, VocabParallel):
        return spec
    return dataclasses.replace(spec, padded_vocab_size=tensor.shape[0] * shard.size)


def _read_piece(
    reader: ModelReader | Mapping[str, TensorSource],
    match: Match,
    name: str,
    target: torch.Tensor,
    spec: ModelSpec,
    placement: Placement,
) -> torch.Tensor:
    shard = shard_of(match, placement)
    sources = " + ".join(match.sources)
    found: list[TensorSource] = [reader[source] for source in match.sources]
    if match.rule.is_stacked:
        found = [OneExpert(stack, match.expert) for stack in found]
    try:
        padded = with_padding_of(match, target, spec, shard)
        piece = match.rule.layout.load(found, shard, padded)
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
    """Refuse a directory that has tensors which no parameter of any rank took. Collective."""
    flags = torch.tensor([name in taken for name in expected], dtype=torch.uint8)
    if dist.is_initialized() and dist.get_world_size() > 1:
        flags = flags.to(collective_device())
        dist.all_reduce(flags, op=dist.ReduceOp.MAX)
    left_over = [name for name, was_taken in zip(expected, flags.tolist()) if not was_taken]
    if left_over:
        raise UserError(
            f"{len(left_over)} tensors of {directory} were taken by no parameter",
            why=f"the first: {', '.join(left_over[:4])}; the model was built without their layers",
            fix="check the flags on layers, biases and norms",
        )


def collective_device() -> torch.device:
    on_gpu = "nccl" in dist.get_backend()
    return torch.device("cuda", torch.cuda.current_device()) if on_gpu else torch.device("cpu")
