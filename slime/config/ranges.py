"""Which numbers a flag may have. One table; `tests/unit/test_config_ranges.py` keeps it complete.

>>> INTERVALS["rollout_top_p"].words
'more than 0 and at most 1'
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from slime.config.registry import all_flags
from slime.config.resolve import Draft
from slime.errors import UserError

_INF = math.inf
_SEEDS = 2**32 - 1  # NumPy's generator takes no larger one


@dataclass(frozen=True)
class Interval:
    """Numbers from ``low`` to ``high``; NaN is in none.

    Attributes:
        above, below: an end itself is not in it. Below infinity means finite.
        or_minus_one: -1 has a meaning of its own.
        what: what the number is, for errors.
    """

    low: float
    high: float = _INF
    above: bool = False
    below: bool = False
    or_minus_one: bool = False
    what: str = ""

    def __contains__(self, value: float) -> bool:
        if self.or_minus_one and value == -1:
            return True
        enough = value > self.low if self.above else value >= self.low
        return enough and (value < self.high if self.below else value <= self.high)

    @property
    def words(self) -> str:
        parts = []
        if self.low > -_INF:
            parts.append(f"{'more than' if self.above else 'at least'} {self.low:g}")
        if self.high < _INF:
            parts.append(f"{'less than' if self.below else 'at most'} {self.high:.10g}")
        elif self.below:
            parts.append("finite")
        return " and ".join(parts) + (", or -1" if self.or_minus_one else "")


def _at_least(low: float, what: str = "") -> Interval:
    return Interval(low, what=what)


def _finite(low: float, what: str = "", *, above: bool = False) -> Interval:
    return Interval(low, below=True, above=above, what=what)


_GROUPS: tuple[tuple[Interval, tuple[str, ...]], ...] = (
    (_at_least(2, "a prompt token and a response token"), (
        "seq_length", "rollout_max_context_len", "eval_max_context_len",
    )),
    (_at_least(1), (
        "actor_num_nodes", "actor_num_gpus_per_node", "rollout_num_gpus_per_engine", "num_gpus_per_node",
        "tensor_model_parallel_size", "pipeline_model_parallel_size", "context_parallel_size",
        "expert_model_parallel_size", "expert_tensor_parallel_size", "num_layers_per_virtual_pipeline_stage",
        "num_virtual_stages_per_pipeline_rank", "microbatch_group_size_per_vp_stage", "recompute_num_layers",
        "min_offloaded_tensor_size",
        "num_epoch", "rollout_batch_size", "n_samples_per_prompt", "over_sampling_batch_size", "global_batch_size",
        "num_steps_per_rollout", "micro_batch_size", "max_tokens_per_gpu", "data_pad_size_multiplier",
        "rollout_max_prompt_len", "rollout_max_response_len", "eval_max_prompt_len", "eval_max_response_len",
        "eval_interval", "n_samples_per_eval_prompt", "eval_pass_k", "lr_decay_iters", "lr_decay_samples",
        "lr_wsd_decay_iters", "loss_scale_window", "hysteresis", "ddp_bucket_size", "save_interval", "save_retain",
        "ref_update_interval", "update_weight_buffer_size", "update_weights_interval",
        "embedded_max_slots", "rm_num_workers", "sglang_server_concurrency", "sglang_router_request_timeout_secs",
    )),
    (_at_least(0), (
        "rollout_num_gpus", "num_rollout", "num_data_workers", "async_buffer_size", "start_rollout_id",
        "rollout_stop_token_ids", "eval_min_new_tokens", "lr_warmup_iters", "lr_warmup_samples", "ckpt_step",
        "ref_ckpt_step",
    )),
    (Interval(0, _SEEDS, what="a seed of every generator, NumPy's included"), ("seed", "rollout_seed")),
    (Interval(1, or_minus_one=True, what="-1 leaves the choice to the program"), ("log_probs_chunk_size",)),
    (Interval(1, or_minus_one=True, what="-1 is the whole vocabulary"), ("rollout_top_k", "eval_top_k")),
    (_finite(0, above=True), (
        "placement_timeout", "distributed_timeout_minutes", "rollout_timeout", "rollout_stall_timeout", "rm_timeout",
        "gpu_memory_gb", "rollout_health_check_interval", "rollout_health_check_timeout",
    )),
    (_finite(0), ("rollout_health_check_first_wait",)),
    # sampling
    (_finite(0, "log-probs are divided by it", above=True), ("rollout_temperature",)),
    (_finite(0, "0 is greedy"), ("eval_temperature",)),
    (Interval(0, 1, above=True, what="a probability"), ("rollout_top_p", "eval_top_p")),
    (Interval(0, 1, what="a fraction of a probability"), ("rollout_min_p",)),
    (Interval(0, 1, what="a fraction"), ("rollout_max_failed_fraction", "lr_warmup_fraction",
                                         "optimizer_offload_fraction")),
    (Interval(0, 1, above=True, what="a fraction"), ("load_debug_rollout_data_subsample",)),
    # algorithm
    (Interval(0, 1, what="a discount; above 1 returns would grow with the length"), ("gamma",)),
    (_finite(0, "a penalty; below 0 it would reward leaving the reference model"), ("kl_coef", "kl_loss_coef")),
    (Interval(-_INF, below=True, above=True, what="a bonus, or a penalty below 0"), ("entropy_coef",)),
    (_at_least(0, "a distance from the ratio 1"), ("eps_clip", "eps_clip_high")),
    (Interval(1, above=True, what="a ratio beyond the clip range"), ("eps_clip_c",)),
    (Interval(0, above=True, what="an importance weight"), ("tis_clip",)),
    (_finite(0, "an importance weight"), ("tis_clip_low",)),
    (_at_least(0, "a KL divergence"), ("opsm_delta",)),
    # optimizer
    (_finite(0), ("lr", "min_lr", "lr_warmup_init", "decoupled_lr", "decoupled_min_lr")),
    (_finite(0), ("weight_decay", "start_weight_decay", "end_weight_decay")),
    (_at_least(0, "a norm; 0 does not clip"), ("clip_grad",)),
    (Interval(0, 1, below=True, what="the weight of the past in a running mean"), (
        "adam_beta1", "adam_beta2", "sgd_momentum",
    )),
    (_finite(0, "without it a gradient of 0 would be divided by 0", above=True), ("adam_eps",)),
    (_finite(0, above=True), ("loss_scale", "initial_loss_scale", "min_loss_scale")),
    (_finite(0, "the weight of a loss"), ("moe_aux_loss_coeff", "moe_z_loss_coeff")),
    (_finite(0), ("moe_router_bias_update_rate",)),
)  # fmt: skip

INTERVALS: dict[str, Interval] = {dest: interval for interval, dests in _GROUPS for dest in dests}


def check_ranges(draft: Draft) -> None:
    """Refuse numbers that make no sense, NaN among them.

    Raises:
        UserError: the first one found.
    """
    for dest in INTERVALS:
        check_number(dest, draft.values.get(dest))


def check_number(dest: str, value: Any, where: str = "") -> None:
    """Refuse a value of a flag, or one of its values, that makes no sense; None is unset.

    Args:
        where: what is said instead of the flag, for a value from elsewhere.
    Raises:
        UserError: it is not in the flag's interval.

    Example:
        >>> check_number("gamma", 0.99)
        >>> check_number("gamma", 2.0)
        Traceback (most recent call last):
        slime.errors.UserError: --gamma is 2
          why: a discount; above 1 returns would grow with the length: it must be at least 0 and at most 1
          fix: pass such a number, or leave it out (default: 1.0)
    """
    interval = INTERVALS[dest]
    for number in value if isinstance(value, list | tuple) else (value,):
        if number is None or number in interval:
            continue
        spec = all_flags()[dest]
        default = spec.meta.derived or ("unset" if spec.default is None else spec.default)
        raise UserError(
            f"{where or spec.option} is {number:.10g}",
            why=f"{interval.what}: it must be {interval.words}" if interval.what else f"it must be {interval.words}",
            fix=f"pass such a number, or leave it out (default: {default})",
        )
