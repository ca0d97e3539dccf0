"""The user's functions in an update: loaded once, and what those that see a whole rollout may change of it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from slime.config.config import Config
from slime.config.flag import option_of
from slime.hook_loading import FunctionFailed, failures_of, named, user_function
from slime.samples.batch import TrainBatch
from slime.trainer.records import RolloutTensors
from slime.trainer.returned import check_finite, check_reducer, per_token

#: The flags, for messages.
ADVANTAGES, POSTPROCESS = option_of("custom_advantage_function_path"), option_of("rollout_data_postprocess_path")
LOSS, TIS, REDUCER = (option_of(f"custom_{name}_function_path") for name in ("loss", "tis", "pg_loss_reducer"))


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
        def find(path: str | None, flag: str) -> Callable[..., Any] | None:
            return user_function(path, flag) if path else None

        flags = config.algorithm
        return UserFunctions(
            config.flat(),
            advantages=find(flags.custom_advantage_function_path, ADVANTAGES),
            postprocess=find(config.rollout.rollout_data_postprocess_path, POSTPROCESS),
            loss=find(flags.custom_loss_function_path, LOSS),
            tis=find(flags.custom_tis_function_path, TIS),
            reducer=_reducer(flags.custom_pg_loss_reducer_function_path),
        )


def _reducer(path: str | None) -> Callable[..., Any] | None:
    """The function that makes a reducer; what it makes is the user's code too."""
    if path is None:
        return None
    make = user_function(path, REDUCER)

    def make_reducer(*args: Any) -> Callable[[Tensor], Tensor]:
        reduce = make(*args)
        check_reducer(reduce, named(path, REDUCER))

        def call(losses: Tensor) -> Tensor:
            with failures_of(f"what {named(path, REDUCER)} returned"):
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
    origin: str,
    batch: TrainBatch,
    data: RolloutTensors,
    without_effect: dict[str, str],
) -> Any:
    """Call a function with ``rollout_data`` and take over into ``data`` what it assigned there.

    Args:
        call: the function, its other arguments given.
        origin: the function in messages (`slime.hook_loading.named`).
        without_effect: keys of `ASSIGNABLE` that nothing would read after this, with the reason.
    Returns:
        What the function returned, which nothing reads.
    Raises:
        FunctionFailed: it assigned a key that cannot be changed or would have no effect, or something else than one
            finite number per response token.
    """
    before = rollout_data(batch, data)
    view = dict(before)
    returned = call(view)
    assigned = [key for key in {**before, **view} if view.get(key) is not before.get(key) or key not in before]
    for key in assigned:
        why = without_effect.get(key) if key in ASSIGNABLE else f"it may assign {', '.join(ASSIGNABLE)}"
        if why:
            raise FunctionFailed(
                f"{origin} assigned rollout_data[{key!r}], which would have no effect",
                why=why,
                fix="leave that key alone",
            )
    for key in ASSIGNABLE:  # also where entries of a list were replaced
        if view.get(key) is not None or key in assigned:
            what = f"{origin} assigned rollout_data[{key!r}]"
            values = per_token(view.get(key), data.loss_masks, batch.sample_indices, what)
            if key in assigned:
                check_finite(values, data.loss_masks, batch.sample_indices, what)
            setattr(data, key, values)
    if data.returns is None:
        data.returns = data.advantages
    return returned
