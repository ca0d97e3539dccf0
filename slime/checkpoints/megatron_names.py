"""Names of a rank's Megatron parameters with global layer and expert numbers.

Under pipeline parallelism (virtual stages included) a chunk calls its first layer
``decoder.layers.0``; under expert parallelism a rank calls its first expert 0, and all its experts
are one parameter. The conversion tables speak of global numbers, and of each expert.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import nn

from slime.engines.wire import expert_runs
from slime.models.adapters import is_adapter_parameter

_LAYER = re.compile(r"decoder\.layers\.(\d+)\.")
_EXPERT = re.compile(
    r"(\.local_experts\.|\.experts\.linear_fc[12]\.(?:weight|bias|adapter\.\w+?)(?=\d+$))(\d+)"
)
_STACKED = re.compile(r"\.experts\.linear_fc[12]\.(weight|bias|adapter\.\w+)$")

ModelPart = Literal["everything", "base", "adapters", "trunk"]
"""Which parameters of a model are meant: with adapters, those of the base or those of the
adapters. Without adapters, everything is the base. The trunk is all but the output layer."""


@dataclass(frozen=True)
class Placement:
    """This rank's place in the parallel layout, and the groups that weights are gathered over.

    A group is None when it has one member (or ``torch.distributed`` is not in use).
    """

    tp_rank: int = 0
    tp_size: int = 1
    tp_group: torch.distributed.ProcessGroup | None = None
    pp_rank: int = 0
    pp_group: torch.distributed.ProcessGroup | None = None
    ep_rank: int = 0
    ep_size: int = 1
    ep_group: torch.distributed.ProcessGroup | None = None
    etp_rank: int = 0
    etp_size: int = 1
    etp_group: torch.distributed.ProcessGroup | None = None

    @staticmethod
    def current() -> Placement:
        """Return the placement in Megatron's parallel state; that of one rank alone when it is not
        initialised."""
        if not torch.distributed.is_initialized():
            return Placement()
        from megatron.core import parallel_state as ps

        if not ps.model_parallel_is_initialized():
            return Placement()

        def place(
            group: torch.distributed.ProcessGroup,
        ) -> tuple[int, int, torch.distributed.ProcessGroup | None]:
            return group.rank(), group.size(), group if group.size() > 1 else None

        pipeline = ps.get_pipeline_model_parallel_group()
        return Placement(
            *place(ps.get_tensor_model_parallel_group()),
            pipeline.rank(),
            pipeline if pipeline.size() > 1 else None,
            *place(ps.get_expert_model_parallel_group()),
            *place(ps.get_expert_tensor_parallel_group()),
        )


def belongs(name: str, part: ModelPart) -> bool:
    """Tell whether a parameter, by its Megatron name, is in a part of the model."""
    if part == "trunk":
        return not name.startswith("output_layer.")
    return part == "everything" or is_adapter_parameter(name) == (part == "adapters")


def unwrapped(model_chunks: Sequence[nn.Module]) -> list[nn.Module]:
    """The GPT models inside Megatron's wrappers (DistributedDataParallel, Float16Module)."""
    # then nothing can be wrapped by it; on a CPU its import needs preparation
    if "megatron.core" not in sys.modules:
        return list(model_chunks)
    from megatron.core.utils import unwrap_model

    return unwrap_model(list(model_chunks))


def stored_tensors(model_chunks: Sequence[nn.Module]) -> list[torch.Tensor]:
    """The tensors of this rank's chunks that a checkpoint holds: parameters, and persistent buffers
    (a router's expert bias)."""
    found: list[torch.Tensor] = []
    for chunk in model_chunks:
        found += chunk.parameters()
        for module in chunk.modules():
            computed = module._non_persistent_buffers_set
            found += [
                b for name, b in module._buffers.items() if b is not None and name not in computed
            ]
    return found


def global_parameters(
    model_chunks: Sequence[nn.Module],
    num_experts: int = 0,
    placement: Placement | None = None,
    *,
    in_runs: bool = False,
    part: ModelPart = "everything",
) -> Iterator[tuple[str, torch.Tensor]]:
    """(global name, local tensor) of every parameter of this rank, and of its persistent buffers.

    Stacked experts come one by one, as views: ``…mlp.experts.linear_fc1.weight{expert}``, and so do
    their biases.

    Args:
        in_runs: stacked experts come many at a time, ``…linear_fc1.weight{first}-{last}`` [experts,
            out, in]; for tables whose checkpoints hold experts one by one, none of which has
            biases.
        part: of the model.

    Example (second of two pipeline stages of a four-layer model):
        >>> next(global_parameters([stage]))[0]
        'decoder.layers.2.input_layernorm.weight'
    """
    ep_rank, ep_size = (placement.ep_rank, placement.ep_size) if placement else (0, 1)
    first_expert = num_experts // ep_size * ep_rank
    for chunk in unwrapped(model_chunks):
        numbers = _layer_numbers(chunk)
        persistent = set(chunk.state_dict(keep_vars=True))
        buffers = ((name, tensor) for name, tensor in chunk.named_buffers() if name in persistent)
        for name, tensor in [*chunk.named_parameters(), *buffers]:
            if not belongs(name, part):
                continue
            found = _STACKED.search(name)
            # a side of adapters that all experts of a layer share is a matrix
            is_stacked = found and (tensor.dim() == 3 or found[1] == "bias")
            if is_stacked and in_runs:
                weights = tensor.detach()
                stem = _globalised(name, numbers, first_expert)
                for start, stop in expert_runs.bounds(weights.shape[0], weights[0].nbytes):
                    yield (
                        f"{stem}{first_expert + start}-{first_expert + stop - 1}",
                        weights[start:stop],
                    )
            elif is_stacked:
                for local, expert in enumerate(_unstacked(tensor)):
                    yield _globalised(f"{name}{local}", numbers, first_expert), expert
            else:
                yield _globalised(name, numbers, first_expert), tensor


def global_name(chunk: nn.Module, name: str) -> str:
    """Return the name of a parameter of a chunk with the layer's global number."""
    return _globalised(name, _layer_numbers(chunk), 0)


def _unstacked(weights: torch.Tensor) -> Iterator[nn.Parameter]:
    """[experts, out, in] → each expert's [out, in], on the same memory: what is copied into it is
    in the model.

    ``stacked_in`` tells the parameter that it is a view of, and its place there.
    """
    for place, weight in enumerate(weights.detach()):
        expert = nn.Parameter(weight, requires_grad=False)
        expert.stacked_in = (weights, place)  # type: ignore[attr-defined]
        yield expert


def _layer_numbers(chunk: nn.Module) -> dict[int, int]:
    """Local layer id → global layer id, both from 0; the layers know their global number, from
    1."""
    layers = chunk.get_submodule("decoder.layers")
    return {
        int(local): int(layer.layer_number) - 1  # type: ignore[arg-type]
        for local, layer in layers.named_children()
    }


def _globalised(name: str, layer_numbers: dict[int, int], first_expert: int) -> str:
    name = _LAYER.sub(lambda found: f"decoder.layers.{layer_numbers[int(found.group(1))]}.", name)
    return _EXPERT.sub(lambda found: f"{found.group(1)}{int(found.group(2)) + first_expert}", name)
