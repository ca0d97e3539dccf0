"""Optimizer states in host memory, streamed through the GPU bucket by bucket for each step.

    host (pinned)   [ bucket 0 | bucket 1 | bucket 2 | … ]    masters, exp_avg, exp_avg_sq
                        │ ▲
    GPU             [ slot 0 ] [ slot 1 ] [ slot 2 ]          gradients and weights stay here

While one bucket is updated, the next is copied to the GPU and the previous one back, each on its
own CUDA stream. The update is the inner torch optimizer's step over views of a slot, so results
equal those of an optimizer whose states are on the GPU.

`StreamedStates` replaces the step of a torch optimizer. `StreamedOptimizer` is Megatron's
distributed optimizer with its float32 master weights in host memory too
(``--optimizer-cpu-offload``).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from megatron.core.optimizer import OptimizerConfig
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer
from megatron.core.tensor_parallel import param_is_not_tensor_parallel_duplicate
from megatron.core.transformer.module import param_is_not_shared
from torch import Tensor

from slime.checkpoints.optimizer_state import MASTER
from slime.errors import UserError
from slime.memory.trainer import STREAM_BUCKET, STREAM_SLOTS
from slime.processes.pinned_memory import host_buffer
from slime.trainer.megatron import device

#: Parameters start at multiples of this many elements in the host's buffers, and bucket sizes are
#: multiples of it, so that kernels vectorise equally wherever a parameter is split.
ALIGNMENT = 64


@dataclass(frozen=True, eq=False)
class Member:
    """A parameter whose states are in host memory.

    Attributes:
        main: the optimizer's parameter: a master weight in host memory, or a tensor on the device
            with only its moments in host memory.
        offset: its first element in the host's buffers.
        weights: the model's flat weights, to which a master in host memory is copied after its
            update; None for a tensor on the device.
    """

    main: Tensor
    offset: int
    weights: Tensor | None = None


@dataclass(frozen=True)
class _PartOfMember:
    """The elements of a member that lie in one bucket.

    Attributes:
        start, end: range of elements of the parameter.
        at: their first index in the bucket.
    """

    member: Member
    start: int
    end: int
    at: int


@dataclass(frozen=True)
class _Bucket:
    start: int
    end: int
    pieces: list[_PartOfMember]


class _Slot:
    """Device memory for a bucket, and the events that order the streams' use of it."""

    def __init__(self, host: Mapping[str, Tensor], numel: int) -> None:
        where = torch.cuda.current_device()
        self.buffers = {
            name: torch.empty(numel, dtype=flat.dtype, device=where) for name, flat in host.items()
        }
        self.loaded = torch.cuda.Event()
        self.updated = torch.cuda.Event()
        self.returned = torch.cuda.Event()


def host_states(numel: int, dtype: torch.dtype) -> Tensor:
    """Return a flat tensor of zeros in host memory, page-locked where there is a GPU."""
    pin = device.has_gpu()
    buffer = host_buffer(numel * dtype.itemsize, pin=pin)
    # newly mapped pinned pages are zeros already, and zeroing them again takes seconds
    return (buffer if pin else buffer.zero_()).view(dtype)


def aligned(numel: int) -> int:
    return -(-numel // ALIGNMENT) * ALIGNMENT


def state_names(inner: torch.optim.Optimizer) -> tuple[str, ...]:
    """Return the names of the states that an optimizer keeps per element.

    Raises:
        UserError: it is neither torch's Adam nor SGD.
    """
    if isinstance(inner, torch.optim.Adam | torch.optim.AdamW):
        return ("exp_avg", "exp_avg_sq")
    if isinstance(inner, torch.optim.SGD):
        return ("momentum_buffer",) if inner.defaults["momentum"] else ()
    raise UserError(
        f"the states of {type(inner).__module__}.{type(inner).__name__} cannot be in host memory",
        why="it counts steps per group, and a step in buckets would count each bucket",
        fix="leave out --offload-optimizer-states and --optimizer-cpu-offload, or use "
        "--optimizer adam",
    )


class StreamedStates:
    """Keeps states of a torch optimizer in host memory and performs its step bucket by bucket.

    Other parameters than ``members`` keep their states on the device and are updated as usual.
    ``inner.state`` has views of the host's buffers, so checkpoints read and fill these.

    Args:
        inner: the optimizer; `install` replaces its ``step``.
        members: parameters in order of their offsets.
        masters: flat buffer of the members' master weights, if any are in host memory.
        dtypes: storage dtypes of states below float32. These are computed in float32 and rounded
            stochastically.
    Attributes:
        bucket: elements of a bucket, a multiple of `ALIGNMENT`.
        host: the flat buffers in host memory, by the name of the state.
    """

    bucket = STREAM_BUCKET

    def __init__(
        self,
        inner: torch.optim.Optimizer,
        members: Sequence[Member],
        masters: Tensor | None = None,
        dtypes: Mapping[str, torch.dtype] | None = None,
    ) -> None:
        self.inner = inner
        self.members = list(members)
        self._step = inner.step
        numel = aligned(_end(self.members[-1])) if self.members else 0
        self.host = {} if masters is None else {MASTER: masters}
        for name in state_names(inner):
            dtype = (dtypes or {}).get(name, torch.float32)
            self.host[name] = host_states(numel, dtype)
        self._buckets = list(_buckets(self.members, self.bucket))
        self._to_device = torch.cuda.Stream()
        self._to_host = torch.cuda.Stream()
        groups = inner.param_groups
        self._group_of = {p: i for i, group in enumerate(groups) for p in group["params"]}
        streamed = {member.main for member in self.members}
        self._resident = [main for main in self._group_of if main not in streamed]
        for member in self.members:
            inner.state[member.main] = self._views(member)

    @staticmethod
    def install(
        inner: torch.optim.Optimizer,
        members: Sequence[Member] | None = None,
        masters: Tensor | None = None,
        dtypes: Mapping[str, torch.dtype] | None = None,
    ) -> StreamedStates:
        """Make ``inner.step()`` stream its states. By default members are all parameters of a new
        optimizer, and only their moments are in host memory."""
        chosen = _all_of(inner) if members is None else members
        states = StreamedStates(inner, chosen, masters, dtypes)
        inner.step = states.step  # type: ignore[method-assign, assignment]
        return states

    def _views(self, member: Member) -> dict[str, Tensor]:
        main = member.main
        found = {}
        if "exp_avg" in self.host:
            where = torch.cuda.current_device()
            found["step"] = torch.zeros((), dtype=torch.float32, device=where)
        for name in state_names(self.inner):
            flat = self.host[name][member.offset : member.offset + main.numel()]
            found[name] = flat.view(main.shape)
        return found

    def holds(self, storage: torch.UntypedStorage) -> bool:
        """Tell whether a storage is one of the host's buffers."""
        return any(flat.untyped_storage()._cdata == storage._cdata for flat in self.host.values())

    @torch.no_grad()
    def reset(self) -> None:
        """Reset moments and step counts; keep the members' buffers."""
        for main in self._resident:
            self.inner.state.pop(main, None)
        for state in self._states():
            for value in state.values():
                value.zero_()

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        """Do one optimizer step over all parameters."""
        assert closure is None
        groups = self.inner.param_groups
        try:
            self._update_resident(groups)
            self._update_streamed(groups)
        finally:
            self.inner.param_groups = groups

    def _update_resident(self, groups: list[dict[str, Any]]) -> None:
        """Update the parameters whose states are on the device."""
        if not self._resident:
            return
        for main in self._resident:
            main.grad = _gradient(main).float().view(main.shape)
        self._call(groups, [(main, main) for main in self._resident])
        for main in self._resident:
            main.grad = None

    def _update_streamed(self, groups: list[dict[str, Any]]) -> None:
        if not self._buckets:
            return
        largest = max(bucket.end - bucket.start for bucket in self._buckets)
        slots = [_Slot(self.host, largest) for _ in range(min(STREAM_SLOTS, len(self._buckets)))]
        noise = self._noise()
        here = torch.cuda.current_stream()
        self._to_device.wait_stream(here)  # the slots' memory may have had other uses
        for number, bucket in enumerate(self._buckets):
            slot = slots[number % len(slots)]
            with torch.cuda.stream(self._to_device):
                self._to_device.wait_event(slot.returned)
                for name, flat in self.host.items():
                    part = flat[bucket.start : bucket.end]
                    slot.buffers[name][: part.numel()].copy_(part, non_blocking=True)
                slot.loaded.record(self._to_device)
            here.wait_event(slot.loaded)
            self._update_bucket(groups, bucket, slot, noise)
            slot.updated.record(here)
            with torch.cuda.stream(self._to_host):
                self._to_host.wait_event(slot.updated)
                for name, flat in self.host.items():
                    part = flat[bucket.start : bucket.end]
                    part.copy_(slot.buffers[name][: part.numel()], non_blocking=True)
                slot.returned.record(self._to_host)
        here.wait_stream(self._to_host)
        device.synchronize()  # the host may read its buffers now
        steps = [state["step"] for state in self._states() if "step" in state]
        if steps:
            torch._foreach_add_(steps, 1)

    def _states(self) -> list[dict[str, Tensor]]:
        return [self.inner.state[member.main] for member in self.members]

    def _noise(self) -> torch.Generator | None:
        """Return the generator for stochastic rounding. It depends only on the step count, so that
        a resumed run rounds as an uninterrupted one; None if all states are float32."""
        if all(flat.dtype == torch.float32 for flat in self.host.values()):
            return None
        count = self._states()[0]["step"]
        return torch.Generator(count.device).manual_seed(int(count))

    def _update_bucket(
        self,
        groups: list[dict[str, Any]],
        bucket: _Bucket,
        slot: _Slot,
        noise: torch.Generator | None,
    ) -> None:
        numel = bucket.end - bucket.start
        states = {name: buffer[:numel].float() for name, buffer in slot.buffers.items()}
        steps = self._step_counts(bucket)
        updated = []
        for index, piece in enumerate(bucket.pieces):
            main = piece.member.main
            inside = slice(piece.at, piece.at + piece.end - piece.start)
            if piece.member.weights is None:
                part = main.detach().view(-1)[piece.start : piece.end]
            else:
                part = states[MASTER][inside]
            part.grad = _gradient(main).reshape(-1)[piece.start : piece.end].float()
            self.inner.state[part] = {
                name: flat[inside] for name, flat in states.items() if name != MASTER
            }
            if steps:
                self.inner.state[part]["step"] = steps[index]
            updated.append((part, main))
        try:
            self._call(groups, updated)
        finally:
            for part, _ in updated:
                del self.inner.state[part]
        for piece, (part, _) in zip(bucket.pieces, updated, strict=True):
            if piece.member.weights is not None:
                piece.member.weights[piece.start : piece.end].copy_(part)
        for name, flat in states.items():
            if noise is not None and slot.buffers[name].dtype != torch.float32:
                slot.buffers[name][:numel].copy_(round_stochastically(flat, noise))

    def _step_counts(self, bucket: _Bucket) -> tuple[Tensor, ...]:
        """Return copies of the step counts, because each bucket's update adds 1 to them and a
        parameter may be in several buckets."""
        counts = [self.inner.state[piece.member.main].get("step") for piece in bucket.pieces]
        return torch.stack(counts).unbind() if counts[0] is not None else ()

    def _call(self, groups: list[dict[str, Any]], parts: list[tuple[Tensor, Tensor]]) -> None:
        """Run the inner optimizer on ``parts``: (tensor, the parameter whose group applies)."""
        chosen: dict[int, list[Tensor]] = {}
        for part, main in parts:
            chosen.setdefault(self._group_of[main], []).append(part)
        self.inner.param_groups = [
            {**groups[index], "params": tensors} for index, tensors in chosen.items()
        ]
        self._step()


def states_of(inner: torch.optim.Optimizer) -> StreamedStates | None:
    """Return the `StreamedStates` that were installed on an optimizer."""
    owner = getattr(inner.step, "__self__", None)
    return owner if isinstance(owner, StreamedStates) else None


def round_stochastically(values: Tensor, generator: torch.Generator) -> Tensor:
    """Round float32 values to bfloat16, up or down with probabilities that preserve the mean.

    Rounding to nearest would freeze the second moment: it decays by a thousandth per step, while
    bfloat16 values differ by a 128th to a 256th.
    """
    noise = torch.randint(
        0, 1 << 16, values.shape, dtype=torch.int32, device=values.device, generator=generator
    )
    bits = values.view(torch.int32).add(noise).bitwise_and_(-1 << 16)
    return bits.view(torch.float32).bfloat16()


def _gradient(main: Tensor) -> Tensor:
    gradient = getattr(main, "decoupled_grad", None)
    found: Tensor | None = main.grad if gradient is None else gradient
    assert found is not None, "Megatron has a gradient for each trained parameter"
    return found


def _all_of(inner: torch.optim.Optimizer) -> list[Member]:
    members: list[Member] = []
    for group in inner.param_groups:
        for parameter in group["params"]:
            offset = aligned(_end(members[-1])) if members else 0
            members.append(Member(parameter, offset))
    return members


def _end(member: Member) -> int:
    return member.offset + member.main.numel()


def _buckets(members: Sequence[Member], size: int) -> Iterator[_Bucket]:
    """Cut the host's buffers every ``size`` elements."""
    assert size % ALIGNMENT == 0
    end = _end(members[-1]) if members else 0
    waiting = list(members)
    for start in range(0, end, size):
        stop = min(start + size, end)
        pieces = []
        for member in waiting:
            if member.offset >= stop:
                break
            first = max(member.offset, start)
            last = min(_end(member), stop)
            if first < last:
                inside = (first - member.offset, last - member.offset, first - start)
                pieces.append(_PartOfMember(member, *inside))
        waiting = [member for member in waiting if _end(member) > stop]
        if pieces:
            yield _Bucket(start, stop, pieces)


class StreamedOptimizer(DistributedOptimizer):
    """Megatron's distributed optimizer with master weights and moments in host memory.

    It reads gradients in Megatron's buffers, without a float32 copy of all of them. In the
    configuration, ``optimizer_offload_fraction`` is the share of states in host memory, and
    ``exp_avg_dtype`` and ``exp_avg_sq_dtype`` are the dtypes of the host's buffers.
    """

    def __init__(
        self,
        optimizer: torch.optim.Optimizer | None,
        config: OptimizerConfig,
        *args: Any,
        **kwargs: Any,
    ) -> None:
        self._members: list[Member] = []
        self._masters: Tensor | None = None
        super().__init__(optimizer, config, *args, **kwargs)
        if not self.is_stub_optimizer:
            dtypes = {"exp_avg": config.exp_avg_dtype, "exp_avg_sq": config.exp_avg_sq_dtype}
            StreamedStates.install(self.optimizer, self._members, self._masters, dtypes)

    @torch.no_grad()
    def _build_model_and_main_param_groups(
        self,
        gbuf_ranges: list[Any],
        param_gbuf_map: dict[Any, Any],
        opt_group_ranges: list[Any],
        config: OptimizerConfig,
    ) -> tuple[list[Any], ...]:
        """Let Megatron create its shards parameter by parameter, and move each master to the host
        before the next, so that the device never holds all of them."""
        build = super()._build_model_and_main_param_groups
        everything = [parameter for group in opt_group_ranges for parameter in group["params"]]
        numels = {}
        for parameter in everything:
            buffer, dtype, bucket = param_gbuf_map[parameter]
            numels[parameter] = gbuf_ranges[buffer][dtype][bucket]["param_map"][parameter][
                "param"
            ].size
        offsets = _offsets(numels, config.optimizer_offload_fraction)
        if any(parameter.dtype != torch.float32 for parameter in offsets):
            total = sum(aligned(numels[parameter]) for parameter in offsets)
            self._masters = host_states(total, torch.float32)
        found: tuple[list[Any], ...] = ([], [], [], [], [])
        for group in opt_group_ranges:
            of_group: tuple[list[Any], ...] = ([], [], [], [], [])
            for parameter in group["params"]:
                alone: dict[str, Any] = {"params": [parameter], "orig_group": {}}
                for parts, [part] in zip(
                    of_group, build(gbuf_ranges, param_gbuf_map, [alone], config), strict=True
                ):
                    parts += part
                if parameter in offsets:
                    [main] = alone["orig_group"]["params"]
                    is_half = parameter.dtype != torch.float32
                    self._place(main, offsets[parameter], of_group[2][-1] if is_half else None)
            group["orig_group"]["params"] = [*of_group[3], *of_group[4]]
            for groups, parts in zip(found, of_group, strict=True):
                groups.append(parts)
        return found

    def _place(self, main: Tensor, offset: int, weights: Tensor | None) -> None:
        """Register an optimizer's parameter at an offset of the host's buffers, and move it there
        if it is the master of half-precision ``weights``."""
        if weights is not None:
            assert self._masters is not None
            host = self._masters[offset : offset + main.numel()]
            main.data = host.copy_(main)
        self._members.append(Member(main, offset, weights))

    def _copy_model_grads_to_main_grads(self) -> None:
        if self.is_stub_optimizer:
            return
        pairs = [
            *zip(self.model_float16_groups, self.shard_fp32_from_float16_groups, strict=True),
            *zip(self.model_fp32_groups, self.shard_fp32_groups, strict=True),
        ]
        for parameters, mains in pairs:
            for parameter, main in zip(parameters, mains, strict=True):
                run = self._get_model_param_range_map(parameter)["param"]
                gradient = parameter.main_grad.view(-1)[run.start : run.end]
                # the loss scale is divided out in float32
                main.decoupled_grad = gradient if self.grad_scaler is None else gradient.float()

    def _collect_main_grad_data_for_unscaling(self) -> list[Tensor]:
        return [main.decoupled_grad for main in self.get_parameters()]

    def get_main_grads_for_grad_norm(self) -> list[Tensor]:
        """Return the gradients for the norm, so that each parameter counts once over all ranks."""
        counted = [
            main.decoupled_grad
            for main in self.get_parameters()
            if param_is_not_shared(main)
            and param_is_not_tensor_parallel_duplicate(main, self.tp_group)
        ]
        # on a GPU the norm is computed in float32 for gradients of any dtype
        return [one if one.is_cuda else one.float() for one in counted]

    def _copy_main_params_to_model_params(self) -> None:
        """Copy the masters on the device; streamed masters were copied during the step."""
        streamed = {member.main for member in self._members}
        shards = zip(self.shard_fp32_from_float16_groups, self.shard_float16_groups, strict=True)
        for mains, weights in shards:
            for main, half in zip(mains, weights, strict=True):
                if main not in streamed:
                    half.copy_(main)


def _offsets(numels: Mapping[Any, int], fraction: float) -> dict[Any, int]:
    """Return offsets in the host's buffers for the first parameters, until they have ``fraction``
    of all elements."""
    budget = fraction * sum(numels.values())
    offsets: dict[Any, int] = {}
    held = 0
    end = 0
    for parameter, numel in numels.items():
        if held >= budget:
            break
        offsets[parameter] = end
        held += numel
        end += aligned(numel)
    return offsets
