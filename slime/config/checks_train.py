"""Contradictions between flags of the trainer: recompute, determinism, dumps, freezing."""

from __future__ import annotations

import difflib
import os
import re

from slime.config.resolve import Draft
from slime.config.specs import option_of
from slime.errors import UserError

#: What megatron-core can recompute on its own (``--recompute-modules``).
RECOMPUTE_MODULES = ("core_attn", "layernorm", "mla_up_proj", "mlp", "moe", "moe_act", "shared_experts")

#: NCCL's algorithms that add up in the same order every time.
_DETERMINISTIC_NCCL = ("Tree", "Ring", "CollnetDirect", "CollnetChain", "^NVLS")


def check_training(draft: Draft) -> None:
    """Refuse contradictions.

    Raises:
        UserError: the first one found.
    """
    _recompute(draft)
    _deterministic(draft)
    _dumps(draft)
    _expressions(draft)


def _recompute(draft: Draft) -> None:
    granularity = draft["recompute_granularity"]
    for dest, needed in (
        ("recompute_method", "full"),
        ("recompute_num_layers", "full"),
        ("recompute_modules", "selective"),
    ):
        if draft[dest] and granularity != needed:
            raise UserError(
                f"{option_of(dest)} has no effect without --recompute-granularity {needed}",
                why=f"the granularity is {granularity}" if granularity else "nothing is recomputed",
                fix=f"pass --recompute-granularity {needed}, or leave {option_of(dest)} out",
            )
    for name in draft["recompute_modules"]:
        if name not in RECOMPUTE_MODULES:
            near = difflib.get_close_matches(name, RECOMPUTE_MODULES, n=1)
            raise UserError(
                f"--recompute-modules {name}: there is no such module",
                why=f"there are {', '.join(RECOMPUTE_MODULES)}",
                fix=f"did you mean {near[0]}?" if near else "",
            )


def _deterministic(draft: Draft) -> None:
    """``--deterministic-mode``: what is known to add up in another order each time is refused."""
    if not draft.values.get("deterministic_mode"):
        return
    algorithm = os.environ.get("NCCL_ALGO")
    if algorithm and algorithm not in _DETERMINISTIC_NCCL:
        raise UserError(
            f"--deterministic-mode with NCCL_ALGO={algorithm}",
            why=f"deterministic are {', '.join(_DETERMINISTIC_NCCL)}",
            fix="unset NCCL_ALGO (Ring is taken then), or set it to one of these",
        )
    if os.environ.get("NVTE_ALLOW_NONDETERMINISTIC_ALGO") == "1":
        raise UserError("--deterministic-mode with NVTE_ALLOW_NONDETERMINISTIC_ALGO=1", fix="unset it, or set it to 0")


def _dumps(draft: Draft) -> None:
    samples, tensors = draft["save_debug_rollout_data"], draft["save_debug_train_data"]
    if samples is not None and samples == tensors:
        raise UserError(
            f"--save-debug-rollout-data and --save-debug-train-data are both {samples}",
            why="one would write over the other",
            fix="give them different paths",
        )


def _expressions(draft: Draft) -> None:
    for dest in ("only_train_params_name_list", "freeze_params_name_list"):
        for expression in draft[dest]:
            try:
                re.compile(expression)
            except re.error as error:
                raise UserError(
                    f"{option_of(dest)} {expression} is no regular expression",
                    why=str(error),
                    fix="names are searched with Python's re.search; write \\( for a bracket that is meant",
                ) from error
