"""Refuses settings for mixture-of-experts layers that the trainer cannot apply. Needs only the
values, so that a launch can check them first."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from slime.errors import UserError

#: Load-balancing losses; they differ in the ranks whose tokens count towards the experts' shares
#: (`slime.trainer.megatron.moe_router`).
LOAD_BALANCING = ("none", "aux_loss", "seq_aux_loss", "global_aux_loss")


def check_experts(arguments: Mapping[str, Any]) -> None:
    """Refuse settings that would be ignored, also for dense models.

    Args:
        arguments: of Megatron's ``TransformerConfig``; missing ones have their defaults.
    Raises:
        UserError: names the flag.

    Example:
        >>> check_experts({"num_moe_experts": 8, "moe_router_load_balancing_type": "seq_aux_loss"})
        >>> check_experts({"num_moe_experts": 8, "moe_router_load_balancing_type": "sinkhorn"})
        Traceback (most recent call last):
        slime.errors.UserError: --moe-router-load-balancing-type sinkhorn cannot be honoured
    """
    balancing = arguments.get("moe_router_load_balancing_type", "aux_loss")
    if balancing not in LOAD_BALANCING:
        raise UserError(
            f"--moe-router-load-balancing-type {balancing} cannot be honoured",
            fix=f"one of: {', '.join(LOAD_BALANCING)}",
        )
    coefficient = arguments.get("moe_aux_loss_coeff", 0.0)
    if isinstance(coefficient, tuple):
        raise UserError(
            f"--moe-aux-loss-coeff {' '.join(map(str, coefficient))} cannot be honoured",
            why="only one load-balancing loss can be used at a time",
            fix="pass one coefficient",
        )
