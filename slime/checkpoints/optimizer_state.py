"""The optimizer in a checkpoint: states are stored at their places in full parameters, independent
of the layout.

Megatron's distributed optimizer gives each data-parallel rank a flat run of every parameter, with
its master weights and moments. A flat run of a matrix consists of at most three boxes, and a
sharded checkpoint stores boxes:

    parameter of shape (3, 4), this rank has [2, 9)     . . ■ ■     (0, 2) size (1, 2)
                                                        ■ ■ ■ ■     (1, 0) size (1, 4)
                                                        ■ . . .     (2, 0) size (1, 1)

Every rank writes and reads its own boxes, without gathering or copying, and a run with another
layout finds its boxes in the checkpoint. The names are those of megatron-core ("fully reshardable":
``optimizer.state.exp_avg.decoder.…``), whose own writer gathers the whole optimizer on every host.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from slime.processes.json_collectives import all_gather

StateDict = dict[str, Any]
MASTER = "param"
_PREFIX = "optimizer.state"


# -- boxes -----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class TensorSlice:
    """A contiguous block of a row-major tensor: first index and extent along each axis."""

    offset: tuple[int, ...]
    size: tuple[int, ...]


def boxes(shape: Sequence[int], start: int, end: int) -> list[TensorSlice]:
    """Divide the flat run [start, end) of a row-major tensor with n axes into at most 2 n - 1
    boxes, in the order of its elements.

    Example:
        >>> [(box.offset, box.size) for box in boxes((3, 4), 2, 9)]
        [((0, 2), (1, 2)), ((1, 0), (1, 4)), ((2, 0), (1, 1))]
    """
    if start >= end:
        return []
    if len(shape) < 2:
        return [TensorSlice((start,) * len(shape), (end - start,) * len(shape))]
    row_size = math.prod(shape[1:])
    found: list[TensorSlice] = []

    def part_of_a_row(first: int, last: int) -> None:
        row = first // row_size
        inside = boxes(shape[1:], first - row * row_size, last - row * row_size)
        found.extend(TensorSlice((row, *box.offset), (1, *box.size)) for box in inside)

    if start % row_size:
        stop = min(end, (start // row_size + 1) * row_size)
        part_of_a_row(start, stop)
        start = stop
    rows = (end - start) // row_size
    if rows > 0:
        found.append(TensorSlice((start // row_size, *(0 for _ in shape[1:])), (rows, *shape[1:])))
        start += rows * row_size
    if start < end:
        part_of_a_row(start, end)
    return found


# -- the state of a rank ---------------------------------------------------------------------------


@dataclass
class FlatRun:
    """The optimizer's states for one run of a parameter's elements.

    Attributes:
        parameter: the model's parameter.
        start, end: the run of its elements.
        tensors: flat, end - start elements each: ``param`` (master weights), ``exp_avg``, …
        is_shard: other data-parallel ranks hold other runs; otherwise all hold the same one.
    """

    parameter: nn.Parameter
    start: int
    end: int
    tensors: dict[str, Tensor]
    is_shard: bool


def parts(optimizer: Any) -> Iterator[Any]:
    """Yield Megatron's optimizers inside a chained one (dense and expert parameters), or the
    optimizer itself; skip those without parameters."""
    from megatron.core.optimizer.optimizer import ChainedOptimizer

    chained = (
        optimizer.chained_optimizers if isinstance(optimizer, ChainedOptimizer) else [optimizer]
    )
    yield from (part for part in chained if part.optimizer is not None)


def held_state(part: Any) -> Iterator[FlatRun]:
    """Yield this rank's states of one of `parts`. The tensors are the optimizer's own, not copies
    (except for `OptimizerTensors.copies`)."""
    from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer

    if isinstance(part, DistributedOptimizer):
        for buffer in part.gbuf_ranges:
            for bucket in (bucket for buckets in buffer.values() for bucket in buckets):
                for parameter, ranges in bucket["param_map"].items():
                    run = ranges["param"]
                    tensors = part._get_main_param_and_optimizer_states(parameter)
                    yield FlatRun(
                        parameter, run.start, run.end, _flat(tensors, run.end - run.start), True
                    )
        return
    model_parameter = {main: parameter for parameter, main in _masters(part)}
    for group in part.optimizer.param_groups:
        for main in group["params"]:
            parameter = model_parameter.get(main, main)
            tensors = dict(part.optimizer.state[main])
            if parameter is not main:
                tensors[MASTER] = main
            yield FlatRun(parameter, 0, main.numel(), _flat(tensors, main.numel()), False)


def _masters(part: Any) -> Iterator[tuple[nn.Parameter, Tensor]]:
    """Yield (parameter, its float32 master weights) of a non-distributed optimizer of
    half-precision parameters."""
    from megatron.core.optimizer.optimizer import Float16OptimizerWithFloat16Params

    if isinstance(part, Float16OptimizerWithFloat16Params):
        for parameters, masters in zip(
            part.float16_groups, part.fp32_from_float16_groups, strict=True
        ):
            yield from zip(parameters, masters, strict=True)


def _flat(tensors: dict[str, Any], numel: int) -> dict[str, Tensor]:
    def belongs(name: str, value: Any) -> bool:
        return isinstance(value, Tensor) and name != "step" and value.numel() == numel

    return {
        name: value.detach().view(-1) for name, value in tensors.items() if belongs(name, value)
    }


def ensure_state(optimizer: Any) -> None:
    """Create the states that the optimizer's first step would create, so that they can be saved and
    loaded before it. States in host memory exist from the start."""
    for part in parts(optimizer):
        inner = part.optimizer
        for group in inner.param_groups:
            for parameter in group["params"]:
                if inner.state.get(parameter):
                    continue
                if isinstance(inner, torch.optim.Adam | torch.optim.AdamW):
                    on_device = group.get("fused") or group.get("capturable")
                    inner.state[parameter] = {
                        "step": torch.zeros(
                            (), dtype=torch.float32, device=parameter.device if on_device else "cpu"
                        ),
                        "exp_avg": torch.zeros_like(parameter),
                        "exp_avg_sq": torch.zeros_like(parameter),
                    }
                elif isinstance(inner, torch.optim.SGD) and group["momentum"]:
                    inner.state[parameter] = {"momentum_buffer": torch.zeros_like(parameter)}


# -- to a checkpoint and back ----------------------------------------------------------------------


def sharded_optimizer_state(optimizer: Any, model_state: StateDict) -> StateDict:
    """Return the optimizer as part of a sharded state dict. Collective.

    Args:
        model_state: the model's sharded state dict, whose data are the parameters themselves.
    Returns:
        ``param_state`` (sharded tensors over the optimizer's own memory) and what is the same on
        every rank: settings and step counts of all parameter groups, the loss scaler.
    """
    ensure_state(optimizer)
    groups = all_gather([group for part in parts(optimizer) for group in _settings(part)])
    union = {_identity(group): group for some in groups for group in map(_with_tuples, some)}
    common: StateDict = {
        "optimizer": {"param_groups": [union[key] for key in sorted(union, key=repr)]},
        "param_state": optimizer_tensors(optimizer, model_state).sharded,
        "param_state_sharding_type": "fully_reshardable",
    }
    scaler = _scaler(optimizer)
    return common if scaler is None else {**common, "grad_scaler": scaler.state_dict()}


@dataclass
class OptimizerTensors:
    """The optimizer's states on this rank as sharded tensors.

    Attributes:
        sharded: megatron-core's ShardedTensors over the optimizer's memory, one per box.
        copies: (part, held) of optimizers that return copies of their states.
        without_master: set by `known_to`: the checkpoint's own weights are the master weights.
    """

    sharded: list[Any]
    copies: list[tuple[Any, FlatRun]]
    without_master: bool = False

    def known_to(self, contents: Any) -> list[Any]:
        """Choose the tensors to read from a checkpoint by its table of contents.

        A float32 run without distributed optimizer saves no separate master weights. Other programs
        name the master weights of half-precision runs ``fp32_param``.
        """
        wanted = []
        for sharded in self.sharded:
            if (
                sharded.key.startswith(f"{_PREFIX}.{MASTER}.")
                and sharded.key not in contents.state_dict_metadata
            ):
                key = sharded.key.replace(f"{_PREFIX}.{MASTER}.", f"{_PREFIX}.fp32_{MASTER}.", 1)
                if key not in contents.state_dict_metadata:
                    self.without_master = True
                    continue
                sharded = replace(sharded, key=key)
            wanted.append(sharded)
        return wanted

    def put_back(self) -> None:
        """Write the copies back to their optimizers, after ``sharded`` has been read."""
        for part, held in self.copies:
            part._set_main_param_and_optimizer_states(held.parameter, held.tensors)


def optimizer_tensors(optimizer: Any, model_state: StateDict) -> OptimizerTensors:
    """Return every box that this rank holds; see `sharded_optimizer_state` for ``model_state``."""
    places = _places(model_state)
    found = OptimizerTensors([], [])
    for part in parts(optimizer):
        for held in held_state(part):
            for name, flat in held.tensors.items():
                for place in places[id(held.parameter)]:
                    found.sharded += _sharded(name, flat, held, place, _instance(part))
            if part.config.use_precision_aware_optimizer:  # it stores scaled or narrower values
                found.copies.append((part, held))
    return found


def restore(optimizer: Any, saved: StateDict, settings_of_checkpoint: bool = False) -> float:
    """Restore the rest of the optimizer after its tensors: step counts, learning rates, the loss
    scaler.

    Settings such as betas and weight decay stay as in the flags, so that changed flags take effect
    on resume.

    Args:
        saved: the ``optimizer`` entry of the checkpoint's common part; megatron-core's own nesting
            is understood.
        settings_of_checkpoint: take all settings from the checkpoint
            (--use-checkpoint-opt-param-scheduler).
    Returns:
        The step count.
    """
    groups = list(_find_groups(saved))
    step = max(
        (float(group["step"]) for group in groups if group.get("step") is not None), default=0.0
    )
    step = max(step, float(_find(saved, "common_step") or 0.0))
    for part in parts(optimizer):
        inner = part.optimizer
        for state in inner.state.values():
            if isinstance(state.get("step"), Tensor):
                state["step"].fill_(step)
        for group in inner.param_groups:
            match = _matching(group, groups)
            if match is None:
                continue
            kept = _OF_THIS_PROCESS | {"step"}
            taken = match.keys() - kept if settings_of_checkpoint else match.keys() & {"lr"}
            group.update({name: match[name] for name in taken})
            if "step" in group:  # Transformer Engine's Adam counts per group
                group["step"] = int(step)
    scaler = _scaler(optimizer)
    scaler_state = _find(saved, "grad_scaler")
    if scaler is not None and scaler_state is not None:
        scaler.load_state_dict(scaler_state)
    return step


@dataclass(frozen=True)
class _BlockPlace:
    """A block of a parameter that is one block of a tensor in the checkpoint."""

    box: TensorSlice
    sharded: Any


def _places(model_state: StateDict) -> dict[int, list[_BlockPlace]]:
    """Return the id of each parameter → its blocks. Gate and up projection of gated layers are
    separate tensors in the checkpoint."""
    from megatron.core.dist_checkpointing.dict_utils import nested_values
    from megatron.core.dist_checkpointing.mapping import ShardedTensor, ShardedTensorFactory

    places: dict[int, list[_BlockPlace]] = {}
    for entry in nested_values(model_state):
        if isinstance(entry, ShardedTensor):
            pieces = [entry]
        elif isinstance(entry, ShardedTensorFactory):
            pieces = [
                piece
                for piece in nested_values([entry.build()])
                if isinstance(piece, ShardedTensor)
            ]
        else:
            continue
        found = [_BlockPlace(_box_within(piece.data, entry.data), piece) for piece in pieces]
        places.setdefault(id(entry.data), []).extend(found)
    return places


def _box_within(piece: Tensor, whole: Tensor) -> TensorSlice:
    """Return the box of a view within its tensor."""
    assert piece.untyped_storage().data_ptr() == whole.untyped_storage().data_ptr(), (
        "a sharded copy, not a view"
    )
    assert piece.stride() == whole.stride(), "a transposed view"
    distance = piece.storage_offset() - whole.storage_offset()
    offset = []
    for stride in whole.stride():
        offset.append(distance // stride)
        distance %= stride
    return TensorSlice(tuple(offset), tuple(piece.shape))


def _sharded(
    name: str, flat: Tensor, held: FlatRun, place: _BlockPlace, instance: int
) -> Iterator[Any]:
    """Cut a held run at one place into boxes."""
    sharded = place.sharded
    axes = sharded.prepend_axis_num
    position = 0
    for box in boxes(held.parameter.shape, held.start, held.end):
        block = flat[position : position + math.prod(box.size)].view(box.size)
        position += block.numel()
        common = _overlap(box, place.box)
        if common is None:
            continue
        inside = zip(common.offset, box.offset, common.size, strict=True)
        block = block[
            tuple(slice(first - start, first - start + extent) for first, start, extent in inside)
        ]
        distance = [0] * axes + [
            first - start for first, start in zip(common.offset, place.box.offset, strict=True)
        ]
        data = block[(None,) * axes]
        yield replace(
            sharded,
            key=f"{_PREFIX}.{name}.{sharded.key}",
            data=data,
            dtype=data.dtype,
            local_shape=tuple(data.shape),
            global_offset=tuple(map(sum, zip(sharded.global_offset, distance, strict=True))),
            axis_fragmentations=None,  # boxes do not form a regular grid
            prepend_axis_num=0,
            replica_id=(*sharded.replica_id[:-1], instance)
            if held.is_shard
            else sharded.replica_id,
        )


def _overlap(one: TensorSlice, other: TensorSlice) -> TensorSlice | None:
    offset = tuple(map(max, one.offset, other.offset))
    ends = (
        min(a + m, b + n)
        for a, m, b, n in zip(one.offset, one.size, other.offset, other.size, strict=True)
    )
    size = tuple(end - first for end, first in zip(ends, offset, strict=True))
    return TensorSlice(offset, size) if all(extent > 0 for extent in size) else None


def _instance(part: Any) -> int:
    """Return the instance number of a distributed optimizer, if there are several instances."""
    from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer

    return part.distributed_optimizer_instance_id if isinstance(part, DistributedOptimizer) else 0


# -- settings --------------------------------------------------------------------------------------

#: Entries of torch's parameter groups that affect only the implementation in this process.
_OF_THIS_PROCESS = frozenset({"params", "foreach", "fused", "capturable", "differentiable"})
_IDENTITY = ("wd_mult", "lr_mult", "is_decoupled_lr", "is_expert_parallel")


def _settings(part: Any) -> list[dict[str, Any]]:
    steps = [float(state["step"]) for state in part.optimizer.state.values() if "step" in state]
    return [
        {
            **{
                name: _plain(value) for name, value in group.items() if name not in _OF_THIS_PROCESS
            },
            "step": max(steps, default=float(group.get("step") or 0.0)),
        }
        for group in part.optimizer.param_groups
    ]


def _plain(value: Any) -> Any:
    """Return a number that some optimizers hold as a tensor."""
    return value.item() if isinstance(value, torch.Tensor) else value


def _with_tuples(group: dict[str, Any]) -> dict[str, Any]:
    """Turn lists, which come from JSON messages between ranks, into the tuples that torch uses
    (betas)."""
    return {
        name: tuple(value) if isinstance(value, list) else value for name, value in group.items()
    }


def _identity(group: dict[str, Any]) -> tuple[Any, ...]:
    """Return the settings that identify a parameter group at every layout. Some writers prefix
    their names with ``pre_``."""
    return tuple(group.get(name, group.get(f"pre_{name}")) for name in _IDENTITY)


def _matching(group: dict[str, Any], saved: list[dict[str, Any]]) -> dict[str, Any] | None:
    """Return the saved group with the same multipliers, preferably also of the same kind (experts
    or not)."""
    identity = _identity(group)
    for length in (len(identity), len(identity) - 1):
        for candidate in saved:
            if _identity(candidate)[:length] == identity[:length]:
                return candidate
    return None


def _find_groups(saved: Any) -> Iterator[dict[str, Any]]:
    """Yield all parameter groups in a saved optimizer; a chained one is saved as several."""
    if isinstance(saved, dict):
        yield from saved.get("param_groups", ())
        for value in saved.values():
            yield from _find_groups(value)


def _find(saved: Any, name: str) -> Any:
    if not isinstance(saved, dict):
        return None
    if name in saved:
        return saved[name]
    return next(
        (found for value in saved.values() if (found := _find(value, name)) is not None), None
    )


def _scaler(optimizer: Any) -> Any:
    """Return the dynamic loss scale of fp16 training; all parts share one."""
    scalers = (vars(part).get("grad_scaler") for part in parts(optimizer))
    return next((scaler for scaler in scalers if scaler is not None), None)
