"""Flags of the runs in which a critic is tested."""

from __future__ import annotations

from typing import Any

#: Every term of PPO counts, so that a lost one changes the result.
TRAINING: dict[str, Any] = {
    "advantage_estimator": "ppo",
    "critic_lr": 0.02,
    "optimizer": "sgd",
    "lr": 0.1,
    "clip_grad": 0.5,
    "kl_coef": 0.1,
    "gamma": 0.9,
    "lambd": 0.8,
    "critic_lambd": 0.95,
    "normalize_advantages": True,
    "normalize_values": True,
    "rollout_batch_size": 12,
}
