"""Flags that do something only together with another one. Alone they would be ignored, so they are refused."""

from __future__ import annotations

from slime.config.resolve import Draft
from slime.config.specs import option_of
from slime.errors import UserError

_FP8_DETAILS = (
    "fp8_recipe", "fp8_margin", "fp8_interval", "fp8_amax_history_len", "fp8_amax_compute_algo", "fp8_wgrad",
    "fp8_dot_product_attention", "fp8_multi_head_attention", "fp8_quantizer_factory", "tp_only_amax_red",
    "activation_func_fp8_input_store", "reuse_grad_buf_for_mxfp8_param_ag",
)  # fmt: skip
_FP4_DETAILS = ("fp4_recipe", "fp4_param", "fp4_quantizer_factory")
_CPU_OPTIMIZER_DETAILS = (
    "optimizer_offload_fraction", "use_torch_optimizer_for_cpu_offload", "overlap_cpu_optimizer_d2h_h2d",
    "pin_cpu_grads", "pin_cpu_params",
)  # fmt: skip
_PRECISION_AWARE_DETAILS = (
    "main_grads_dtype", "main_params_dtype", "exp_avg_dtype", "exp_avg_sq_dtype", "store_param_remainders",
)  # fmt: skip
_WSD_DETAILS = ("lr_wsd_decay_iters", "lr_wsd_decay_style")

#: flag → (flag that it needs, value that one must have, or None for any true one)
ACTS_WITH: dict[str, tuple[str, str | None]] = {
    "max_tokens_per_gpu": ("use_dynamic_batch_size", None),
    "balance_by_flops": ("use_dynamic_batch_size", None),
    "kl_loss_coef": ("use_kl_loss", None),
    "use_unbiased_kl": ("use_kl_loss", None),
    "opsm_delta": ("use_opsm", None),
    "mask_offpolicy_in_partial_rollout": ("partial_rollout", None),
    "update_weight_disk_dir": ("update_weight_transport", "disk"),
    "update_weight_disk_keep_files": ("update_weight_transport", "disk"),
    "custom_loss_function_path": ("loss_type", "custom_loss"),
    "rm_url": ("rm_type", "remote_rm"),
    "save_retain": ("save", None),
    "async_save": ("save", None),
    "ckpt_step": ("load", None),
    "ref_ckpt_step": ("ref_load", None),
    "load_debug_rollout_data_subsample": ("load_debug_rollout_data", None),
    **dict.fromkeys(_FP8_DETAILS, ("fp8_format", None)),
    **dict.fromkeys(_FP4_DETAILS, ("fp4_format", None)),
    **dict.fromkeys(("num_layers_at_start_in_bf16", "num_layers_at_end_in_bf16"), ("first_last_layers_bf16", None)),
    **dict.fromkeys(_CPU_OPTIMIZER_DETAILS, ("optimizer_cpu_offload", None)),
    **dict.fromkeys(_PRECISION_AWARE_DETAILS, ("use_precision_aware_optimizer", None)),
    **dict.fromkeys(("offload_modules", "min_offloaded_tensor_size"), ("fine_grained_activation_offloading", None)),
    **dict.fromkeys(("ddp_bucket_size", "overlap_param_gather"), ("overlap_grad_reduce", None)),
    "align_param_gather": ("overlap_param_gather", None),
    "disable_parameter_transpose_cache": ("transformer_impl", "transformer_engine"),
    **dict.fromkeys(_WSD_DETAILS, ("lr_decay_style", "WSD")),
    "sgd_momentum": ("optimizer", "sgd"),
}


def check_needs(draft: Draft) -> None:
    """Refuse a flag whose other one is missing.

    Raises:
        UserError: the first one found.
    """
    for dest, (needed, value) in ACTS_WITH.items():
        if draft.differs(dest):
            present = draft.values.get(needed)
            if not present if value is None else present != value:
                raise without(dest, option_of(needed) + (f" {value}" if value else ""))


def without(dest: str, needed: str, why: str = "") -> UserError:
    """The refusal of ``dest`` for lack of ``needed``, an option with its value if it must have one."""
    return UserError(
        f"{option_of(dest)} has no effect without {needed}",
        why=why,
        fix=f"pass {needed} too, or leave {option_of(dest)} out",
    )
