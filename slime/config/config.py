"""`Config`: the resolved, frozen configuration of a run, and the views that others take of it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from slime.config.flat import FlatArgs
from slime.config.groups_megatron import MegatronConfig
from slime.config.groups_rollout import DataConfig, EngineConfig, EvalConfig, RewardConfig, RolloutConfig
from slime.config.groups_run import ClusterConfig, DebugConfig, FaultToleranceConfig, ObserveConfig
from slime.config.groups_train import AlgorithmConfig, CheckpointConfig, SyncConfig, TrainConfig
from slime.config.specs import GROUPS, own_flags


@dataclass(frozen=True)
class Config:
    """All flags of a run, by group, after `slime.config.resolve`.

    Attributes:
        origins: where each value came from, by flag name with underscores: "flag", "yaml <file>", "default",
            or "derived: <formula>".
        extra: names of --custom-config-path that are no flags; hooks find them in `flat()`.

    Example:
        >>> config = make_config(rollout_batch_size=32, n_samples_per_prompt=8, num_steps_per_rollout=2, num_rollout=1)
        >>> config.train.global_batch_size, config.origins["global_batch_size"]
        (128, 'derived: rollout_batch_size × n_samples_per_prompt ÷ num_steps_per_rollout = 32 × 8 ÷ 2')
    """

    cluster: ClusterConfig
    data: DataConfig
    rollout: RolloutConfig
    reward: RewardConfig
    eval: EvalConfig
    algorithm: AlgorithmConfig
    train: TrainConfig
    megatron: MegatronConfig
    checkpoint: CheckpointConfig
    sync: SyncConfig
    engine: EngineConfig
    fault_tolerance: FaultToleranceConfig
    observe: ObserveConfig
    debug: DebugConfig
    origins: dict[str, str]
    extra: dict[str, Any]

    def flat(self) -> FlatArgs:
        """``args`` for hooks: a new mutable namespace of every flag, unset ones at their defaults."""
        values: dict[str, Any] = {}
        for spec in own_flags().values():
            values[spec.dest] = getattr(getattr(self, spec.group), spec.attribute)
        return FlatArgs({**values, **self.extra})


def build(values: dict[str, Any], origins: dict[str, str], extra: dict[str, Any]) -> Config:
    """The frozen groups from resolved values by dest."""
    groups: dict[str, dict[str, Any]] = {group: {} for group in GROUPS}
    for spec in own_flags().values():
        groups[spec.group][spec.attribute] = values[spec.dest]
    built = {group: cls(**groups[group]) for group, cls in GROUPS.items()}
    return Config(**built, origins=origins, extra=extra)
