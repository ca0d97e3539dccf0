"""Getting the slots of a `PlacementPlan`: one Ray placement group, and a deadline on having it."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import ray
from ray.util.placement_group import PlacementGroup, placement_group, remove_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from slime.cluster.waiting import DeadlinePassed, wait_for
from slime.errors import UserError
from slime.log import get_logger
from slime.memory.hardware import seen_gpu_memory
from slime.placement import PlacementPlan

logger = get_logger(__name__)


@dataclass(frozen=True)
class Place:
    """Where one slot is: its bundle in the placement group, node address and id, and GPU.

    ``memory``: bytes of the node's smallest GPU, None where its driver does not tell.
    """

    bundle: int
    ip: str
    node: str
    gpu: str
    memory: float | None = None


@dataclass
class Slots:
    """A reserved placement group; ``places[slot]``, ordered by node and GPU."""

    group: PlacementGroup
    places: list[Place]
    on_gpu: bool

    def options(self, slot: int, share: float) -> dict[str, Any]:
        """Ray actor options that put a process on slot ``slot``, taking ``share`` of it (colocated processes share)."""
        strategy = PlacementGroupSchedulingStrategy(
            placement_group=self.group,
            placement_group_bundle_index=self.places[slot].bundle,
            placement_group_capture_child_tasks=True,
        )
        resources = {"num_cpus": share, "num_gpus": share} if self.on_gpu else {"num_cpus": share}
        return {"scheduling_strategy": strategy, **resources}

    @property
    def gpu_memory(self) -> float | None:
        """Bytes of the smallest GPU, None where no driver tells."""
        return min((place.memory for place in self.places if place.memory is not None), default=None)

    def release(self) -> None:
        remove_placement_group(self.group)


@ray.remote(num_cpus=0.01)
def _where_am_i(bundle: int) -> Place:
    gpus = [str(gpu) for gpu in ray.get_gpu_ids()]
    node, memory = ray.get_runtime_context().get_node_id(), seen_gpu_memory() if gpus else None
    return Place(bundle, ray.util.get_node_ip_address(), node, ",".join(gpus), memory)


def reserve(plan: PlacementPlan, timeout: float, should_stop: Callable[[], bool] = lambda: False) -> Slots:
    """Reserve the plan's slots, waiting at most ``timeout`` seconds.

    Raises:
        UserError: the cluster does not have that many, or they did not become free in time. StopRequested.
    """
    on_gpu = ray.cluster_resources().get("GPU", 0) > 0
    kind = "GPU" if on_gpu else "CPU"
    there = ray.cluster_resources().get(kind, 0)
    if there < plan.total:
        raise UserError(
            f"this run needs {plan.total} {_slots(on_gpu)}, the Ray cluster has {there:g}",
            why=plan.formula,
            fix="lower --actor-num-gpus-per-node or --rollout-num-gpus, pass --colocate to share GPUs, or add nodes",
        )
    bundle = {"GPU": 1, "CPU": 1} if on_gpu else {"CPU": 1}
    group = placement_group([dict(bundle) for _ in range(plan.total)], strategy="PACK")
    started = time.monotonic()
    try:
        wait_for([group.ready()], "placement", timeout, should_stop)
        places = [_where_am_i.options(**_on_bundle(group, i, on_gpu)).remote(i) for i in range(plan.total)]
        found = wait_for(places, "asking where the slots are", timeout, should_stop)
    except DeadlinePassed as error:
        free = ray.available_resources().get(kind, 0)
        remove_placement_group(group)
        raise UserError(
            f"{plan.total} {_slots(on_gpu)} did not become free within {timeout:.0f} s",
            why=f"{plan.formula}; the cluster has {there:g}, of which {free:g} are free: another job holds the rest",
            fix="end the other job, wait, or raise --placement-timeout",
        ) from error
    except BaseException:
        remove_placement_group(group)
        raise
    ordered = sorted(found, key=lambda place: (_ip_key(place.ip), place.node, place.gpu))
    logger.info("placement: %s, ready after %.1f s", plan.formula, time.monotonic() - started)
    return Slots(group, ordered, on_gpu)


def _on_bundle(group: PlacementGroup, index: int, on_gpu: bool) -> dict[str, Any]:
    strategy = PlacementGroupSchedulingStrategy(placement_group=group, placement_group_bundle_index=index)
    return {"scheduling_strategy": strategy, **({"num_gpus": 0.01} if on_gpu else {})}


def _slots(on_gpu: bool) -> str:
    return "GPUs" if on_gpu else "process slots (CPUs)"


def _ip_key(address: str) -> tuple[int, ...]:
    return tuple(int(part) if part.isdigit() else 0 for part in address.split("."))
