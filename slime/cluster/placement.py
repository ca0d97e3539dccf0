"""The reserved slots of a run, and which slots each engine occupies, node by node."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from ray.util.placement_group import PlacementGroup, remove_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from slime.cluster.engine_table import EngineEntry, EngineTable, external_engine
from slime.config.config import Config
from slime.engines.kinds import engine_of
from slime.engines.launch import EnginePlace, ServedModel, ServerGroup
from slime.errors import UserError
from slime.placement import PlacementPlan


@dataclass(frozen=True)
class GpuSlot:
    """The location of one slot: its bundle in the placement group, node address and id, and GPU.

    ``memory`` is the bytes of the node's smallest GPU, None if its driver does not report them;
    ``host_memory`` that of the node itself.
    """

    bundle: int
    ip: str
    node: str
    gpu: str
    memory: float | None = None
    host_memory: float = math.inf

    @property
    def environment(self) -> dict[str, str]:
        """The environment of a rank there, which sees its own GPU only. Ray sets it, unless
        RAY_EXPERIMENTAL_NOSET_CUDA_VISIBLE_DEVICES tells it not to."""
        return {"CUDA_VISIBLE_DEVICES": self.gpu} if self.gpu else {}


@dataclass
class GpuSlots:
    """A reserved placement group and its slots, ordered by node and GPU."""

    group: PlacementGroup
    places: list[GpuSlot]
    on_gpu: bool

    def options(self, slot: int, share: float) -> dict[str, Any]:
        """Return Ray's actor options that place a process on a slot. It takes ``share`` of the
        slot, less than 1 if colocated processes share it."""
        strategy = PlacementGroupSchedulingStrategy(
            placement_group=self.group,
            placement_group_bundle_index=self.places[slot].bundle,
            placement_group_capture_child_tasks=True,
        )
        resources = {"num_cpus": share, "num_gpus": share} if self.on_gpu else {"num_cpus": share}
        return {"scheduling_strategy": strategy, **resources}

    @property
    def gpu_memory(self) -> float | None:
        """The bytes of the smallest GPU, None if no driver reports them."""
        return min(
            (place.memory for place in self.places if place.memory is not None), default=None
        )

    @property
    def host_memory(self) -> float:
        """The bytes of memory of the smallest node."""
        return min(place.host_memory for place in self.places)

    def release(self) -> None:
        remove_placement_group(self.group)


# -- engines ---------------------------------------------------------------------------------------

#: Kinds of servers that only answer together.
PAIR = ("prefill", "decode")


@dataclass(frozen=True)
class EnginePart:
    """One node's part of an engine; an engine on one node has one part.

    Attributes:
        name: "engine-3", "engine-3-node-1".
        model: the model that it serves.
        slot: the first of its slots, where the actor that owns the server process runs.
        slots: all its slots, in the order of the engine's ranks.
        group: settings of its server group.
        place: its GPUs and nodes for the command line; ports are added at its start.
    """

    name: str
    model: ServedModel
    slot: int
    slots: tuple[int, ...]
    group: ServerGroup
    place: EnginePlace

    @property
    def is_first(self) -> bool:
        return self.place.node_rank == 0


def engine_parts(config: Config, plan: PlacementPlan, slots: GpuSlots) -> list[EnginePart]:
    """Return the parts of all engines; the parts of one engine are adjacent, its first node first.

    Raises:
        UserError: the slots of an engine are spread unevenly over nodes.
    """
    parts: list[EnginePart] = []
    slot = plan.rollout_offset
    number = 0
    for model in engine_of(config).served_models(config):
        for group in model.groups:
            parts += _parts_of(model, group, number, slot, slots)
            number += group.num_engines
            slot += group.num_gpus
    return parts


def _parts_of(
    model: ServedModel, group: ServerGroup, first_number: int, first_slot: int, slots: GpuSlots
) -> list[EnginePart]:
    parts = []
    for index in range(group.num_engines):
        number = first_number + index
        begin = first_slot + index * group.num_gpus_per_engine
        by_node: dict[str, list[int]] = {}
        for slot in range(begin, begin + group.num_gpus_per_engine):
            by_node.setdefault(slots.places[slot].node, []).append(slot)
        if len({len(own) for own in by_node.values()}) > 1:
            uneven = ", ".join(
                f"{len(own)} on {slots.places[own[0]].ip}" for own in by_node.values()
            )
            raise UserError(
                f"engine {number} would have {uneven} of its {group.num_gpus_per_engine} GPUs",
                why="SGLang wants the same number on every node",
                fix="choose --rollout-num-gpus-per-engine so that it divides the GPUs of a node, "
                "or is a multiple",
            )
        for rank, own in enumerate(by_node.values()):
            place = EnginePlace(
                number=number,
                gpus=tuple(slots.places[slot].gpu for slot in own) if slots.on_gpu else (),
                num_gpus=group.num_gpus_per_engine,
                num_nodes=len(by_node),
                node_rank=rank,
                overrides=group.overrides,
                model_path=None if model.is_policy else model.path,
            )
            name = f"engine-{number}" if rank == 0 else f"engine-{number}-node-{rank}"
            parts.append(EnginePart(name, model, own[0], tuple(own), group, place))
    return parts


def parts_by_number(parts: Sequence[EnginePart]) -> dict[int, list[EnginePart]]:
    """Return the parts of each engine."""
    found: dict[int, list[EnginePart]] = {}
    for part in parts:
        found.setdefault(part.place.number, []).append(part)
    return found


def initial_engine_table(parts: Sequence[EnginePart], external: Sequence[str]) -> EngineTable:
    """Return a table of the run's engines, before their launch.

    Args:
        external: URLs of engines that were started outside the run.
    """
    engines = []
    for number, own in parts_by_number(parts).items():
        first = own[0]
        engines.append(
            EngineEntry(
                number,
                tuple(part.name for part in own),
                is_policy=first.model.is_policy,
                can_restart=first.model.is_policy and first.group.worker_type not in PAIR,
            )
        )
    engines += [external_engine(number, url) for number, url in enumerate(external, len(engines))]
    return EngineTable(engines)
