"""Names of a rank's Megatron parameters with global layer and expert numbers.

With pipeline parallelism (also with virtual stages) the first layer of each chunk is
``decoder.layers.0``. With expert parallelism the first expert of each rank is expert 0, and its
experts are one parameter. Conversion tables have global numbers, and a parameter per expert.
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

ModelPart = Literal["everything", "base", "adapters", "trunk", "adapters and head"]
"""A subset of a model's parameters: those of the base, or those of adapters. Without adapters,
everything is the base. The trunk is the base without the output layer; "adapters and head" is the
rest."""


@dataclass(frozen=True)
class Placement:
    """This rank's place in the parallel layout, and the groups that gather weights.

    A group is None if it has one member, or if ``torch.distributed`` is not used.
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
        """Return the placement in Megatron's parallel state, or that of a single rank if it is not
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
    is_adapter = is_adapter_parameter(name)
    if part in ("trunk", "adapters and head"):
        is_beside = is_adapter or name.startswith("output_layer.")
        return is_beside == (part == "adapters and head")
    return part == "everything" or is_adapter == (part == "adapters")


def unwrapped(model_chunks: Sequence[nn.Module]) -> list[nn.Module]:
    """Return the GPT models inside Megatron's wrappers (DistributedDataParallel, Float16Module)."""
    # without Megatron nothing can be wrapped; its import on a CPU needs preparation
    if "megatron.core" not in sys.modules:
        return list(model_chunks)
    from megatron.core.utils import unwrap_model

    return unwrap_model(list(model_chunks))


def stored_tensors(model_chunks: Sequence[nn.Module]) -> list[torch.Tensor]:
    """Return the tensors of this rank's chunks that checkpoints hold: parameters and persistent
    buffers (a router's expert bias)."""
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
    """Yield (global name, local tensor) of each parameter and persistent buffer of this rank.

    Stacked experts, and their biases, are yielded one by one as views:
    ``…mlp.experts.linear_fc1.weight{expert}``.

    Args:
        in_runs: yield stacked experts in runs, ``…linear_fc1.weight{first}-{last}`` [experts, out,
            in]; only for families whose checkpoints hold single experts without biases.
        part: the part of the model.

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
            # a side of an adapter that all experts of a layer share is a matrix, not a stack
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
    """[experts, out, in] → each expert's [out, in], sharing memory, so that a copy into it changes
    the model.

    The attribute ``stacked_in`` of each is (stacked tensor, index in it).
    """
    for place, weight in enumerate(weights.detach()):
        expert = nn.Parameter(weight, requires_grad=False)
        expert.stacked_in = (weights, place)  # type: ignore[attr-defined]
        yield expert


def _layer_numbers(chunk: nn.Module) -> dict[int, int]:
    """Map local layer numbers to global ones, both from 0. Megatron's ``layer_number`` is
    global and counts from 1."""
    layers = chunk.get_submodule("decoder.layers")
    return {
        int(local): int(layer.layer_number) - 1  # type: ignore[arg-type]
        for local, layer in layers.named_children()
    }


def _globalised(name: str, layer_numbers: dict[int, int], first_expert: int) -> str:
    name = _LAYER.sub(lambda found: f"decoder.layers.{layer_numbers[int(found.group(1))]}.", name)
    return _EXPERT.sub(lambda found: f"{found.group(1)}{int(found.group(2)) + first_expert}", name)
