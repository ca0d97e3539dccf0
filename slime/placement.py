"""How many GPUs trainer and engines need, and how they share them. Imports no Ray.

On hosts without GPUs, a "GPU" of the placement flags is one CPU process slot.

    decoupled   [ trainer 0 … A-1 | engines A … A+R-1 ]        needs A + R
    colocated   [ trainer 0 … A-1 ]                            needs max(A, R)
                [ engines 0 … R-1 ]

A critic on its own GPUs has the slots after these.
"""

from __future__ import annotations

import os
from dataclasses import dataclass, replace

from slime.config.config import Config


@dataclass(frozen=True)
class PlacementPlan:
    """The slots that a run needs for trainer ranks and engines.

    Attributes:
        num_train: trainer ranks (one slot each).
        num_rollout: slots of all engines together.
        slots_per_engine: slots of one engine (its tensor x pipeline parallel size).
        rollout_offset: first slot of the engines.
        total: slots of the placement group.
        formula: the calculation of ``total``, for messages.
        num_external: external engines at the launch, which take no slots.
        num_critic: ranks of a critic on its own GPUs, in the last slots.
    """

    num_train: int
    num_rollout: int
    slots_per_engine: int
    rollout_offset: int
    total: int
    formula: str
    num_external: int = 0
    num_critic: int = 0

    @property
    def critic_offset(self) -> int:
        """First slot of the critic."""
        return self.total - self.num_critic

    @property
    def num_engines(self) -> int:
        """Number of engines that the run starts."""
        return self.num_rollout // self.slots_per_engine

    @property
    def has_engines(self) -> bool:
        return self.num_engines + self.num_external > 0

    @staticmethod
    def of(config: Config) -> PlacementPlan:
        """Return the plan for a resolved configuration: 4 trainer GPUs and 4 engine GPUs need 8
        slots, 4 with --colocate."""
        plan = PlacementPlan._without_critic(config)
        critic = config.critic
        if not (critic.has_own_gpus and plan.num_train):
            return plan
        total = plan.total + critic.num_gpus
        formula = (
            f"{plan.formula.rsplit(' = ', 1)[0]} + critic_num_nodes {critic.critic_num_nodes} x "
            f"critic_num_gpus_per_node {critic.critic_num_gpus_per_node} = {total}"
        )
        return replace(plan, total=total, formula=formula, num_critic=critic.num_gpus)

    @staticmethod
    def _without_critic(config: Config) -> PlacementPlan:
        cluster = config.cluster
        train = cluster.actor_num_nodes * cluster.actor_num_gpus_per_node
        rollout = cluster.rollout_num_gpus
        per_engine = cluster.rollout_num_gpus_per_engine
        trainer_text = (
            f"actor_num_nodes {cluster.actor_num_nodes} x actor_num_gpus_per_node "
            f"{cluster.actor_num_gpus_per_node}"
        )
        if not needs_engines(config):
            if config.debug.debug_rollout_only:  # only SFT samples are prepared
                return PlacementPlan(
                    0, 0, per_engine, 0, 1, "no trainer and no engine: one slot, as Ray wants one"
                )
            return PlacementPlan(train, 0, per_engine, 0, train, trainer_text)
        external = len(config.engine.rollout_external_engine_addrs)
        if config.debug.debug_rollout_only:
            return PlacementPlan(
                0, rollout, per_engine, 0, rollout, f"rollout_num_gpus {rollout}", external
            )
        if cluster.colocate:
            total = max(train, rollout)
            offset = 0
            formula = f"max({trainer_text}, rollout_num_gpus {rollout})"
        else:
            total = train + rollout
            offset = train
            formula = f"{trainer_text} + rollout_num_gpus {rollout}"
        return PlacementPlan(
            train, rollout, per_engine, offset, total, f"{formula} = {total}", external
        )


#: Settings that are valid only for a certain number of pipeline stages.
_BY_STAGE = (
    "pipeline_model_parallel_layout", "num_layers_in_first_pipeline_stage",
    "num_layers_in_last_pipeline_stage", "account_for_embedding_in_pipeline_split",
    "account_for_loss_in_pipeline_split", "microbatch_group_size_per_vp_stage",
)  # fmt: skip


def critic_placed(config: Config) -> Config:
    """Return the configuration for a critic with its own layout: the critic's parallel sizes
    replace the policy's, and so do its GPUs if it has its own."""
    own = config.critic
    megatron = config.megatron
    cluster = config.cluster
    if own.has_own_gpus:
        cluster = replace(
            cluster,
            actor_num_nodes=own.critic_num_nodes,
            actor_num_gpus_per_node=own.critic_num_gpus_per_node,
            colocate=False,
            offload_train=False,
        )
    if own.critic_pipeline_model_parallel_size != megatron.pipeline_model_parallel_size:
        transformer = {k: v for k, v in megatron.transformer.items() if k not in _BY_STAGE}
        megatron = replace(
            megatron,
            transformer=transformer,
            num_layers_per_virtual_pipeline_stage=None,
            num_virtual_stages_per_pipeline_rank=None,
        )
    megatron = replace(megatron, **own.parallel_sizes)
    return replace(config, cluster=cluster, megatron=megatron)


def joined_cluster(config: Config) -> str | None:
    """Return the address of the Ray cluster to join; None if the run starts one on this host."""
    address = config.cluster.ray_address or os.environ.get("RAY_ADDRESS") or "local"
    return None if address == "local" else address


def needs_engines(config: Config) -> bool:
    """Return whether the run generates. It does not for SFT without evaluation, --debug-train-only
    or rollouts loaded from dumps."""
    debug = config.debug
    if debug.debug_train_only or debug.load_debug_rollout_data:
        return False
    return not config.algorithm.trains_on_data or has_evaluation(config)


def has_evaluation(config: Config) -> bool:
    return bool(config.eval.eval_prompt_data or config.eval.eval_config)


def requests_in_flight(config: Config) -> int:
    """Return the largest number of concurrent requests to all engines together."""
    if not needs_engines(config):
        return 0
    rollout = config.rollout
    engines = max(1, PlacementPlan.of(config).num_engines)
    samples = rollout.over_sampling_batch_size * rollout.n_samples_per_prompt
    return min(samples, config.engine.sglang_server_concurrency * engines)
