"""Flags of Megatron's that do something only together with others. Alone they would be ignored."""

from __future__ import annotations

from slime.config.registry import all_flags
from slime.config.resolve import Draft
from slime.errors import UserError

_FP8_DETAILS = (
    "fp8_recipe", "fp8_margin", "fp8_interval", "fp8_amax_history_len", "fp8_amax_compute_algo", "fp8_wgrad",
    "fp8_dot_product_attention", "fp8_multi_head_attention", "fp8_quantizer_factory", "tp_only_amax_red",
    "activation_func_fp8_input_store", "reuse_grad_buf_for_mxfp8_param_ag",
)  # fmt: skip
_FP4_DETAILS = ("fp4_recipe", "fp4_param", "fp4_quantizer_factory")
#: Launch scripts carry these along with --bf16 too.
_SCALING = ("initial_loss_scale", "min_loss_scale", "loss_scale_window", "hysteresis")
_CPU_OPTIMIZER_DETAILS = (
    "optimizer_offload_fraction", "use_torch_optimizer_for_cpu_offload", "overlap_cpu_optimizer_d2h_h2d",
    "pin_cpu_grads", "pin_cpu_params",
)  # fmt: skip
_PRECISION_AWARE_DETAILS = (
    "main_grads_dtype", "main_params_dtype", "exp_avg_dtype", "exp_avg_sq_dtype", "store_param_remainders",
)  # fmt: skip
_WSD_DETAILS = ("lr_wsd_decay_iters", "lr_wsd_decay_style")

#: flag → (flag that it needs, value that one must have, or None for any)
ACTS_WITH: dict[str, tuple[str, str | None]] = {
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


def check_megatron(draft: Draft) -> None:
    """Refuse flags that would be ignored, and schedules that Megatron cannot make.

    Raises:
        UserError: the first one found.
    """
    for dest, (needed, value) in ACTS_WITH.items():
        if _differs(draft, dest):
            present = draft.values.get(needed)
            if not present if value is None else present != value:
                raise _without(dest, _option(needed) + (f" {value}" if value else ""))
    _without_effect(draft)
    _loss_scale(draft)
    _distributed_optimizer(draft)
    _virtual_stages(draft)
    _schedule(draft)


def _option(dest: str) -> str:
    return "--" + dest.replace("_", "-")


def _differs(draft: Draft, dest: str) -> bool:
    return draft.is_given(dest) and draft[dest] != all_flags()[dest].default


def _without(dest: str, needed: str, why: str = "") -> UserError:
    return UserError(
        f"{_option(dest)} has no effect without {needed}",
        why=why,
        fix=f"pass {needed} too, or leave {_option(dest)} out",
    )


def _without_effect(draft: Draft) -> None:
    """Warn of settings whose absence changes no number."""
    for dest in draft.given.values:
        reason = all_flags()[dest].meta.no_effect
        if reason and _differs(draft, dest):
            draft.warnings.append(f"{_option(dest)} has no effect: {reason}")
    scaling = [_option(dest) for dest in _SCALING if _differs(draft, dest)]
    if scaling and not draft["fp16"]:
        draft.warnings.append(f"{', '.join(scaling)}: no effect without --fp16")


def _loss_scale(draft: Draft) -> None:
    scale = draft.values.get("loss_scale")
    if scale not in (None, 1.0) and not draft["fp16"]:
        raise UserError(
            f"--loss-scale {scale:g} needs --fp16",
            why="only a loss in float16 is scaled, and Megatron would divide the gradients by it all the same",
            fix="leave it out",
        )


def _distributed_optimizer(draft: Draft) -> None:
    """What belongs to optimizer states that are sharded over the replicas."""
    for dest in ("overlap_param_gather", "use_precision_aware_optimizer", "ddp_pad_buckets_for_high_nccl_busbw"):
        if not draft.values.get(dest):
            continue
        if draft["optimizer"] != "adam":
            raise UserError(
                f"{_option(dest)} has no effect with --optimizer {draft['optimizer']}",
                why="only Adam's states are sharded over the replicas",
                fix=f"leave {_option(dest)} out",
            )
        if not draft["use_distributed_optimizer"]:
            why = "each rank updates all parameters, so there is nothing to gather or to shard"
            raise _without(dest, "--use-distributed-optimizer", why)


def _virtual_stages(draft: Draft) -> None:
    stages = draft["num_layers_per_virtual_pipeline_stage"] or draft["num_virtual_stages_per_pipeline_rank"]
    for dest in ("microbatch_group_size_per_vp_stage", "overlap_p2p_comm_warmup_flush", "align_param_gather"):
        if _differs(draft, dest) and not stages:
            raise _without(dest, "--num-virtual-stages-per-pipeline-rank")


def _schedule(draft: Draft) -> None:
    """What Megatron's schedule of learning rate and weight decay would stop at, or choose between."""
    for same in (
        ("lr_decay_iters", "lr_decay_samples"),
        ("lr_warmup_fraction", "lr_warmup_samples", "lr_warmup_iters"),
    ):
        given = [_option(dest) for dest in same if draft[dest]]
        if len(given) > 1:
            raise UserError(f"{' and '.join(given)} say the same thing", fix="give one of them")
    if draft["lr_decay_style"] == "WSD" and draft["lr_wsd_decay_iters"] is None:
        raise UserError(
            "--lr-decay-style WSD needs --lr-wsd-decay-iters",
            why="it is the length of the last phase, in which the learning rate decays",
            fix="pass the number of optimizer steps",
        )
    start, end, style = draft["start_weight_decay"], draft["end_weight_decay"], draft["weight_decay_incr_style"]
    if end < start:
        raise UserError(
            f"--end-weight-decay {end:g} is less than --start-weight-decay {start:g}",
            why="Megatron's schedule of the weight decay only rises",
        )
    if style == "constant" and start != end:
        raise UserError(
            f"--start-weight-decay {start:g} and --end-weight-decay {end:g} differ",
            why="--weight-decay-incr-style is constant",
            fix="pass --weight-decay-incr-style linear or cosine, or --weight-decay alone",
        )
