"""The user's functions in an update: loaded once, and what those that see a whole rollout may change of it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from slime.config.config import Config
from slime.errors import UserError
from slime.hook_loading import failures_of, user_function
from slime.samples.batch import TrainBatch
from slime.trainer.records import RolloutTensors


@dataclass
class UserFunctions:
    """The functions that the flags name; None where there is none. ``args`` is their first argument."""

    args: Any
    advantages: Callable[..., Any] | None
    postprocess: Callable[..., Any] | None
    loss: Callable[..., Any] | None
    tis: Callable[..., Any] | None
    reducer: Callable[..., Any] | None

    @staticmethod
    def load(config: Config) -> UserFunctions:
        def find(path: str | None) -> Callable[..., Any] | None:
            return user_function(path) if path else None

        flags = config.algorithm
        return UserFunctions(
            config.flat(),
            advantages=find(flags.custom_advantage_function_path),
            postprocess=find(config.rollout.rollout_data_postprocess_path),
            loss=find(flags.custom_loss_function_path),
            tis=find(flags.custom_tis_function_path),
            reducer=_reducer(flags.custom_pg_loss_reducer_function_path),
        )


def _reducer(path: str | None) -> Callable[..., Any] | None:
    """The function that makes a reducer; what it makes is the user's code too."""
    if path is None:
        return None
    make = user_function(path)

    def make_reducer(*args: Any) -> Callable[[Tensor], Tensor]:
        reduce = make(*args)

        def call(losses: Tensor) -> Tensor:
            with failures_of(f"what '{path}' returned"):
                return reduce(losses)

        return call

    return make_reducer


#: Keys of ``rollout_data`` that a function may assign, each a field of `RolloutTensors`: tensors [R_i] per sample.
ASSIGNABLE = ("advantages", "returns", "loss_masks", "log_probs", "ref_log_probs", "rollout_log_probs")


def rollout_data(batch: TrainBatch, data: RolloutTensors) -> dict[str, Any]:
    """The dict that functions around the advantages read and change: one list entry per sample of this rank."""
    return {
        "tokens": batch.tokens,
        "response_lengths": batch.response_lengths,
        "total_lengths": batch.total_lengths,
        "rewards": batch.rewards,
        "raw_reward": batch.raw_rewards,
        "truncated": batch.truncated,
        "sample_indices": batch.sample_indices,
        "group_indices": batch.group_indices,
        "rollout_ids": batch.execution_ids,
        "metadata": batch.metadata,
        "teacher_log_probs": batch.teacher_log_probs,
        "kl": data.kl,
        **{name: vars(data)[name] for name in ASSIGNABLE},
    }


def change_rollout(
    call: Callable[[dict[str, Any]], Any],
    path: str,
    batch: TrainBatch,
    data: RolloutTensors,
    without_effect: dict[str, str],
) -> None:
    """Call a function with ``rollout_data`` and take over into ``data`` what it assigned there.

    Args:
        call: the function, its other arguments given.
        path: where it is from, for errors.
        without_effect: keys of `ASSIGNABLE` that nothing would read after this, with the reason.
    Raises:
        UserError: it assigned a key that cannot be changed or would have no effect, or something else than one value
            per response token.
    """
    before = rollout_data(batch, data)
    view = dict(before)
    call(view)
    assigned = [key for key in {**before, **view} if view.get(key) is not before.get(key) or key not in before]
    for key in assigned:
        why = without_effect.get(key) if key in ASSIGNABLE else f"it may assign {', '.join(ASSIGNABLE)}"
        if why:
            raise UserError(
                f"{path} assigned rollout_data[{key!r}], which would have no effect",
                why=why,
                fix="leave that key alone",
            )
    for key in ASSIGNABLE:  # also where entries of a list were replaced
        if view.get(key) is not None or key in assigned:
            setattr(data, key, _per_token(view.get(key), key, path, data.loss_masks))
    if data.returns is None:
        data.returns = data.advantages


def _per_token(values: Any, key: str, path: str, masks: list[Tensor]) -> list[Tensor]:
    """``values`` as float32 tensors [R_i] on the device of the masks."""
    wanted = [mask.numel() for mask in masks]
    lengths = [len(v) for v in values] if values is not None else None
    if lengths != wanted:
        raise UserError(
            f"{path} assigned rollout_data[{key!r}] with other lengths than the responses",
            why=f"lengths {lengths[:8] if lengths is not None else None}… instead of {wanted[:8]}…",
            fix="give one tensor per sample with one value per response token",
        )
    return [
        torch.as_tensor(value, dtype=torch.float32, device=mask.device).detach() for value, mask in zip(values, masks)
    ]
