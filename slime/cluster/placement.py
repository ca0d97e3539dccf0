"""Which process runs where: the seeds' GPU formulas, one Ray placement group, and a deadline on getting it.

Where there is no GPU, a "GPU" of the placement flags is one CPU process slot.

    decoupled   [ trainer 0 … A-1 | engines A … A+R-1 ]        needs A + R
    colocated   [ trainer 0 … A-1 ]                            needs max(A, R)
                [ engines 0 … R-1 ]
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Any

import ray
from ray.util.placement_group import PlacementGroup, placement_group, remove_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from slime.config import Config
from slime.errors import UserError
from slime.observe.log import get_logger

logger = get_logger(__name__)


@dataclass(frozen=True)
class PlacementPlan:
    """How many slots a run needs, and which belong to whom.

    Attributes:
        num_train: trainer ranks (one slot each).
        num_rollout: slots of all engines together.
        slots_per_engine: slots of one engine (its tensor x pipeline parallel size).
        rollout_offset: first slot of the engines.
        total: slots of the placement group.
        formula: how ``total`` came about, for messages.
    """

    num_train: int
    num_rollout: int
    slots_per_engine: int
    rollout_offset: int
    total: int
    formula: str

    @property
    def num_engines(self) -> int:
        return self.num_rollout // self.slots_per_engine if self.slots_per_engine else 0

    @staticmethod
    def of(config: Config) -> PlacementPlan:
        """The plan for a resolved configuration.

        Example: 4 trainer GPUs and 4 engine GPUs need 8 when decoupled, 4 with --colocate.
        """
        cluster = config.cluster
        train = cluster.actor_num_nodes * cluster.actor_num_gpus_per_node
        rollout = cluster.rollout_num_gpus or 0
        per_engine = cluster.rollout_num_gpus_per_engine
        trainer_text = (
            f"actor_num_nodes {cluster.actor_num_nodes} x actor_num_gpus_per_node {cluster.actor_num_gpus_per_node}"
        )
        if not needs_engines(config):
            return PlacementPlan(train, 0, per_engine, 0, train, trainer_text)
        if config.debug.debug_rollout_only:
            return PlacementPlan(0, rollout, per_engine, 0, rollout, f"rollout_num_gpus {rollout}")
        if cluster.colocate:
            total, offset = max(train, rollout), 0
            formula = f"max({trainer_text}, rollout_num_gpus {rollout})"
        else:
            total, offset = train + rollout, train
            formula = f"{trainer_text} + rollout_num_gpus {rollout}"
        return PlacementPlan(train, rollout, per_engine, offset, total, f"{formula} = {total}")


def needs_engines(config: Config) -> bool:
    """False for SFT, for --debug-train-only and when rollouts are loaded from dumps."""
    debug = config.debug
    if debug.debug_train_only or debug.load_debug_rollout_data:
        return False
    return config.algorithm.loss_type != "sft_loss" or has_evaluation(config)


def has_evaluation(config: Config) -> bool:
    return bool(config.eval.eval_prompt_data or config.eval.eval_config)


def node_has_gpus() -> bool:
    """Whether the joined Ray cluster has GPUs at all."""
    return ray.cluster_resources().get("GPU", 0) > 0


@dataclass
class Slots:
    """A reserved placement group whose bundles are ordered by node."""

    group: PlacementGroup
    order: list[int]
    node_ips: list[str]
    on_gpu: bool

    def options(self, slot: int, share: float) -> dict[str, Any]:
        """Ray actor options that put a process on slot ``slot``, taking ``share`` of it (colocated processes share)."""
        strategy = PlacementGroupSchedulingStrategy(
            placement_group=self.group,
            placement_group_bundle_index=self.order[slot],
            placement_group_capture_child_tasks=True,
        )
        resources = {"num_cpus": share, "num_gpus": share} if self.on_gpu else {"num_cpus": share}
        return {"scheduling_strategy": strategy, **resources}

    def release(self) -> None:
        remove_placement_group(self.group)


@ray.remote(num_cpus=0.01)
def _where_am_i() -> tuple[str, list[str]]:
    return ray.util.get_node_ip_address(), [str(gpu) for gpu in ray.get_gpu_ids()]


def reserve(plan: PlacementPlan, timeout: float) -> Slots:
    """Reserve the plan's slots, waiting at most ``timeout`` seconds.

    Raises:
        UserError: the cluster does not have that many, or they did not become free in time.
    """
    on_gpu = node_has_gpus()
    kind = "GPU" if on_gpu else "CPU"
    there = ray.cluster_resources().get(kind, 0)
    if there < plan.total:
        raise UserError(
            f"this run needs {plan.total} {_slots(on_gpu)}, the Ray cluster has {there:g}",
            why=plan.formula,
            fix="lower --actor-num-gpus-per-node or --rollout-num-gpus, pass --colocate to share GPUs, or add nodes",
            check_id="placement",
        )
    bundle = {"GPU": 1, "CPU": 1} if on_gpu else {"CPU": 1}
    group = placement_group([dict(bundle) for _ in range(plan.total)], strategy="PACK")
    started = time.monotonic()
    ready, _ = ray.wait([group.ready()], timeout=timeout)
    if not ready:
        free = ray.available_resources().get(kind, 0)
        remove_placement_group(group)
        raise UserError(
            f"{plan.total} {_slots(on_gpu)} did not become free within {timeout:.0f} s",
            why=f"{plan.formula}; the cluster has {there:g}, of which {free:g} are free: another job holds the rest",
            fix="end the other job, wait, or raise --placement-timeout",
            check_id="placement",
        )
    places = []
    for index in range(plan.total):
        strategy = PlacementGroupSchedulingStrategy(placement_group=group, placement_group_bundle_index=index)
        gpus = {"num_gpus": 0.01} if on_gpu else {}
        places.append(_where_am_i.options(scheduling_strategy=strategy, **gpus).remote())
    found = ray.get(places, timeout=timeout)
    order = sorted(range(plan.total), key=lambda i: (_ip_key(found[i][0]), found[i][1]))
    logger.info("placement: %s, ready after %.1f s", plan.formula, time.monotonic() - started)
    return Slots(group, order, [found[i][0] for i in order], on_gpu)


def _slots(on_gpu: bool) -> str:
    return "GPUs" if on_gpu else "process slots (CPUs)"


def _ip_key(address: str) -> tuple[int, ...]:
    return tuple(int(part) if part.isdigit() else 0 for part in address.split("."))
