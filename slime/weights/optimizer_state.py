"""Two gaps between megatron-core's optimizer checkpoints and torch's Adam, closed here.

megatron-core 0.16.1 was written for Transformer Engine's Adam, which keeps one step count per group and makes its
state on demand. torch's Adam keeps a step tensor per parameter and has no state at all before its first step.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch

from slime.errors import UserError


def parts(optimizer: Any) -> Iterator[Any]:
    """Megatron's optimizers inside a chained one (dense and expert parameters), or the one itself."""
    from megatron.core.optimizer.optimizer import ChainedOptimizer

    yield from optimizer.chained_optimizers if isinstance(optimizer, ChainedOptimizer) else [optimizer]


def ensure_state(optimizer: Any) -> None:
    """Give Adam the state that its first step would give it, so that it can be saved, and loaded into, before that.

    Raises:
        UserError: the distributed optimizer around plain SGD, whose state megatron-core cannot lay out.
    """
    from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer

    for part in parts(optimizer):
        inner = part.optimizer
        if isinstance(inner, torch.optim.SGD) and isinstance(part, DistributedOptimizer):
            raise UserError(
                "the state of SGD under the distributed optimizer cannot be saved",
                why="megatron-core lays out Adam's two moments only",
                fix="pass --no-save-optim and --no-load-optim, or use Adam",
            )
        if not isinstance(inner, torch.optim.Adam | torch.optim.AdamW):
            continue
        for group in inner.param_groups:
            for parameter in group["params"]:
                if not inner.state[parameter]:
                    step_device = parameter.device if group.get("fused") or group.get("capturable") else "cpu"
                    inner.state[parameter] = {
                        "step": torch.zeros((), dtype=torch.float32, device=step_device),
                        "exp_avg": torch.zeros_like(parameter),
                        "exp_avg_sq": torch.zeros_like(parameter),
                    }


#: Entries of torch's parameter groups that say how this process computes, never what.
_OF_THIS_PROCESS = frozenset({"foreach", "fused", "capturable", "differentiable"})
#: Entries that are state.
_STATE = frozenset({"params", "step", "lr"})


@contextmanager
def loading(optimizer: Any, settings_of_checkpoint: bool = False) -> Iterator[None]:
    """Around ``optimizer.load_state_dict``: torch's step tensors survive it, one per parameter, and settings stay.

    megatron-core's loader expects every entry of the state in the checkpoint, but lays out the moments only (the step
    is kept with the parameter groups); and it hands one step tensor to all parameters, so that each would advance it
    for all. torch's loader besides replaces learning rate, betas and the like by the checkpoint's, so that flags
    changed for a resume would have no effect.

    Args:
        settings_of_checkpoint: take those settings from the checkpoint after all.
    """
    from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer

    patched = [
        part
        for part in parts(optimizer)
        if isinstance(part, DistributedOptimizer) and isinstance(part.optimizer, torch.optim.Adam | torch.optim.AdamW)
    ]
    inner_ones = [part.optimizer for part in parts(optimizer) if part.optimizer is not None]
    settings = [[dict(group) for group in inner.param_groups] for inner in inner_ones]
    for part in patched:
        part._set_main_param_and_optimizer_states = partial(_set_with_step, part)
    try:
        yield
    finally:
        for part in patched:
            del part._set_main_param_and_optimizer_states
    for inner, groups in zip(inner_ones, settings, strict=True):
        for group, own in zip(inner.param_groups, groups, strict=True):
            kept = own.keys() & _OF_THIS_PROCESS if settings_of_checkpoint else own.keys() - _STATE
            group.update({name: own[name] for name in kept})
        if isinstance(inner, torch.optim.Adam | torch.optim.AdamW):
            for state in inner.state.values():
                state["step"] = state["step"].clone()


def _set_with_step(part: Any, model_parameter: torch.nn.Parameter, tensors: dict[str, torch.Tensor]) -> None:
    group_index, group_order = part.model_param_group_index_map[model_parameter]
    main_parameter = part.optimizer.param_groups[group_index]["params"][group_order]
    with_step = {**tensors, "step": part.optimizer.state[main_parameter]["step"]}
    type(part)._set_main_param_and_optimizer_states(part, model_parameter, with_step)
