"""The two ways to a `Config`: `parse_args` from a command line, `make_config` from flag names."""

from __future__ import annotations

from typing import Any

from slime.config.config import Config, build
from slime.config.specs import own_flags
from slime.errors import UserError


def make_config(**flags: Any) -> Config:
    """The resolution of `parse_args` from flag names with underscores."""
    values = {dest: spec.default for dest, spec in own_flags().items()}
    for name in flags:
        if name not in values:
            raise UserError(f"unknown flag {name}")
    values.update(flags)
    product = (values["rollout_batch_size"] or 1) * values["n_samples_per_prompt"]
    steps = values["num_steps_per_rollout"] or product // (values["global_batch_size"] or product)
    fallback = {
        "rollout_batch_size": 1, "num_steps_per_rollout": steps, "global_batch_size": product // steps,
        "actor_num_gpus_per_node": 1, "rollout_num_gpus": 1, "num_gpus_per_node": 1, "offload_train": values["colocate"],
        "offload_rollout": values["colocate"], "distributed_backend": "gloo", "distributed_timeout_minutes": 10.0,
        "log_level": "INFO", "run_name": "run", "debug_train_only": False, "rollout_max_response_len": 1024,
        "over_sampling_batch_size": values["rollout_batch_size"] or 1, "rm_num_workers": 2,
        "eval_input_key": values["input_key"], "eval_label_key": values["label_key"], "eval_tool_key": values["tool_key"],
        "eval_temperature": values["rollout_temperature"], "eval_top_p": values["rollout_top_p"],
        "eval_top_k": values["rollout_top_k"], "eval_max_response_len": values["rollout_max_response_len"] or 1024,
        "eps_clip_high": values["eps_clip"], "grpo_std_normalization": not values["disable_grpo_std_normalization"],
        "rewards_normalization": not values["disable_rewards_normalization"], "balance_data": False,
        "bf16": not (values["fp16"] or values["fp32"]), "accumulate_allreduce_grads_in_fp32": True,
        "start_weight_decay": values["weight_decay"], "end_weight_decay": values["weight_decay"],
        "ref_load": values["hf_checkpoint"], "load": values["hf_checkpoint"],
    }  # fmt: skip
    for dest, value in fallback.items():
        if values[dest] is None:
            values[dest] = value
    return build(values, {dest: "default" for dest in values}, {})


def parse_args(argv: list[str] | None = None, entry: str = "train") -> Config:
    raise NotImplementedError("being written")
