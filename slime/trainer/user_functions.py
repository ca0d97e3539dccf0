"""The user's functions in an update: loading them, and checking their changes to a rollout."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from slime.config.config import Config
from slime.config.flag import option_of
from slime.log import get_logger, tell
from slime.samples.batch import TrainBatch
from slime.trainer.records import RolloutTensors
from slime.trainer.validate_hook_output import (
    are_finite,
    check_finite,
    check_log_probs,
    check_masks,
    check_reducer,
    finite_where_untrained,
    per_token,
)
from slime.user_code.loading import (
    FunctionFailed,
    failures_of,
    makers_of_samples,
    named,
    named_functions,
    user_function,
)

logger = get_logger(__name__)

#: The flags, for messages.
ADVANTAGES = option_of("custom_advantage_function_path")
POSTPROCESS = option_of("rollout_data_postprocess_path")
LOSS, TIS, REDUCER = (
    option_of(f"custom_{name}_function_path") for name in ("loss", "tis", "pg_loss_reducer")
)


@dataclass
class UserFunctions:
    """The functions that the flags name; None for a flag that is not set. ``args`` is their first
    argument."""

    args: Any
    advantages: Callable[..., Any] | None
    postprocess: Callable[..., Any] | None
    loss: Callable[..., Any] | None
    tis: Callable[..., Any] | None
    reducer: Callable[..., Any] | None
    _compared: set[str] = field(default_factory=set)

    def compares(self, flag: str, lengths: Tensor, config: Config) -> bool:
        """Tell whether the function of ``flag`` is to be compared with its values for single
        samples: at its first micro-batch of several. Not where ranks have other samples, or parts
        of them: they would call the function more or less often, and collectives in it would wait
        for ever.

        Args:
            lengths: response tokens of each sample.
        """
        if flag in self._compared or len(lengths) < 2 or not bool((lengths > 0).all()):
            return False
        layout = config.megatron
        replica = layout.tensor_model_parallel_size * layout.pipeline_model_parallel_size
        if dist.is_initialized() and dist.get_world_size() > replica:
            return False
        self._compared.add(flag)
        return True

    @staticmethod
    def load(config: Config) -> UserFunctions:
        def find(path: str | None, flag: str) -> Callable[..., Any] | None:
            return user_function(path, flag) if path else None

        flags = config.algorithm
        return UserFunctions(
            config.shared_args,
            advantages=find(flags.custom_advantage_function_path, ADVANTAGES),
            postprocess=find(config.rollout.rollout_data_postprocess_path, POSTPROCESS),
            loss=find(flags.custom_loss_function_path, LOSS),
            tis=find(flags.custom_tis_function_path, TIS),
            reducer=_reducer(flags.custom_pg_loss_reducer_function_path),
        )


#: Flags of the functions that can make an update's loss NaN, in reverse order of their calls.
_IN_THE_LOSS = (
    "custom_loss_function_path", "custom_pg_loss_reducer_function_path", "custom_tis_function_path",
    "rollout_data_postprocess_path", "custom_advantage_function_path",
    "custom_reward_post_process_path",
)  # fmt: skip


def functions_before_loss(config: Config) -> list[str]:
    """Return the names, for messages, of the user's functions that may have made a loss NaN."""
    flags = vars(config.flat())
    return [*named_functions(flags, _IN_THE_LOSS), *makers_of_samples(flags)]


def _reducer(path: str | None) -> Callable[..., Any] | None:
    """Return the function that makes a reducer, whose errors also name the user's code."""
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


#: Keys of ``rollout_data`` that a function may assign, each a field of `RolloutTensors`.
ASSIGNABLE = (
    "advantages", "returns", "loss_masks", "log_probs", "ref_log_probs", "rollout_log_probs",
)  # fmt: skip

#: Keys that a function may read, but whose entries it must not change.
READ_ONLY = (
    "tokens", "response_lengths", "total_lengths", "rewards", "raw_reward", "truncated",
    "sample_indices", "group_indices", "rollout_ids", "kl", "teacher_log_probs",
)  # fmt: skip


def _same(values: list[Any], before: list[Any]) -> bool:
    pairs = zip(values, before)
    return len(values) == len(before) and all(
        torch.equal(now, then) if isinstance(then, Tensor) else now == then for now, then in pairs
    )


def rollout_data(batch: TrainBatch, data: RolloutTensors) -> dict[str, Any]:
    """Return the dict that the functions for advantages and postprocessing read and change, with
    one list entry per sample of this rank."""
    return {
        "tokens": batch.tokens,
        "response_lengths": batch.response_lengths,
        "total_lengths": batch.total_lengths,
        "rewards": batch.rewards,
        "raw_reward": batch.raw_rewards,
        "truncated": batch.truncated,
        "sample_indices": batch.sample_indices,
        "group_indices": batch.group_indices,
        "rollout_ids": batch.trajectory_ids,
        "metadata": batch.metadata,
        "teacher_log_probs": data.teacher_log_probs(batch),
        "kl": data.kl,
        **{name: vars(data)[name] for name in ASSIGNABLE},
    }


def _tell_of_no_tokens(masks: list[Tensor], before: list[Tensor], origin: str) -> None:
    """Warn if a function masks every trained token of this rank."""
    if masks and torch.cat(before).any() and not torch.cat(masks).any():
        tell(
            logger,
            "%s masks every token of the %d samples of a rank: it trains on nothing",
            origin,
            len(masks),
            once=f"no tokens {origin}",
        )


def change_rollout(
    call: Callable[[dict[str, Any]], Any],
    origin: str,
    batch: TrainBatch,
    data: RolloutTensors,
    without_effect: dict[str, str],
) -> Any:
    """Call a function with ``rollout_data`` and copy its assignments into ``data``.

    Args:
        call: the function, with its other arguments bound.
        origin: the function's name in messages (`slime.user_code.loading.named`).
        without_effect: keys of `ASSIGNABLE` that nothing reads after this, with the reason.
    Returns:
        The return value of the function; None if it is ``rollout_data``.
    Raises:
        FunctionFailed: it assigned a key that cannot be changed or would have no effect, or a value
            that is not one finite number per response token.
    """
    before = rollout_data(batch, data)
    view = dict(before)
    read_only = {
        key: [value.clone() if isinstance(value, Tensor) else value for value in before[key]]
        for key in READ_ONLY
        if before[key] is not None
    }
    masks = [mask.clone() for mask in data.loss_masks]
    was_finite = {
        key for key in ASSIGNABLE if before[key] is not None and are_finite(before[key], masks)
    }
    returned = call(view)
    for key, values in read_only.items():
        if not _same(before[key], values):
            raise FunctionFailed(
                f"{origin} changed rollout_data[{key!r}] in place",
                why=f"that is what training goes by; a function may assign {', '.join(ASSIGNABLE)}",
                fix="work on a copy",
            )
    assigned = [
        key
        for key in {**before, **view}
        if view.get(key) is not before.get(key) or key not in before
    ]
    for key in assigned:
        why = f"it may assign {', '.join(ASSIGNABLE)}"
        if key in ASSIGNABLE:
            why = without_effect.get(key, "")
        if why:
            raise FunctionFailed(
                f"{origin} assigned rollout_data[{key!r}], which would have no effect",
                why=why,
                fix="leave that key alone",
            )
    # also where entries of a list were replaced; the masks first, as they say what is trained
    for key in sorted(ASSIGNABLE, key=lambda name: name != "loss_masks"):
        if view.get(key) is not None or key in assigned:
            what = f"{origin} assigned rollout_data[{key!r}]"
            values = per_token(view.get(key), data.loss_masks, batch.sample_indices, what)
            if key in assigned or key in was_finite:  # entries may have been changed in place
                check_finite(values, data.loss_masks, batch.sample_indices, what)
            if key == "loss_masks":
                check_masks(values, masks, origin)
                _tell_of_no_tokens(values, masks, origin)
            elif key.endswith("log_probs") and (key in assigned or key in was_finite):
                check_log_probs(values, data.loss_masks, batch.sample_indices, what)
            setattr(data, key, finite_where_untrained(values, data.loss_masks))
    if data.returns is None:
        data.returns = data.advantages
    return None if returned is view else returned
