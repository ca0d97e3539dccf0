"""Flags for Megatron: the fields of megatron-core's config classes, and the other names of
Megatron-LM's command line.

megatron-core's wheel has the config classes but not Megatron-LM's argument parser. `FIELDS`
declares what its source does not say of a field (range, what it acts with, why it cannot be set
here); the other tables are what launch scripts written for that parser need besides the fields.
"""

from __future__ import annotations

from collections.abc import Container
from dataclasses import dataclass, replace
from typing import Any

from slime.config.flag import (
    FRACTION,
    NO_MTP,
    POSITIVE,
    SOME,
    WEIGHT,
    FlagMeta,
    FlagSpec,
    Kind,
    Requirement,
    finite,
    on,
)
from slime.config.native import NativeField, megatron_version, native_fields

#: field -> (Megatron-LM's name of it, further spellings)
NAMES: dict[str, tuple[str, ...]] = {
    "num_moe_experts": ("num_experts",),
    "layernorm_epsilon": ("norm_epsilon",),
    "layernorm_zero_centered_gamma": ("apply_layernorm_1p",),
    "num_layers_in_first_pipeline_stage": ("decoder_first_pipeline_num_layers",),
    "num_layers_in_last_pipeline_stage": ("decoder_last_pipeline_num_layers",),
    "bucket_size": ("ddp_bucket_size",),
    "average_in_collective": ("ddp_average_in_collective",),
    "pad_buckets_for_high_nccl_busbw": ("ddp_pad_buckets_for_high_nccl_busbw",),
    "reduce_scatter_with_fp32_accumulation": ("ddp_reduce_scatter_with_fp32_accumulation",),
    "fp8": ("fp8_format",),
    "fp8_param": ("fp8_param_gather",),
    "fp4": ("fp4_format",),
}

#: Fields that a group of ours spells differently, or that the trainer builds itself.
SKIPPED_FIELDS = frozenset(
    {"virtual_pipeline_model_parallel_size", "check_for_nan_in_grad", "grad_reduce_in_fp32"}
)

_PRECISION = "it follows --bf16, --fp16 or --fp32"
_PACKED = "training batches are packed, with another shape at each step"
_INFERENCE = "generation is the engine's work"
_FSDP = "Megatron-FSDP is not in this version; use --use-distributed-optimizer"
_NO_FAMILY = "no model family of this version has such layers"
_LOADED = "weights are loaded from a checkpoint"
_SCHEDULE = "it follows from the pipeline's schedule"
_OUTPUT = (
    "log-probs are computed from the hidden states in chunks, without Megatron's output layer and "
    "cross entropy"
)
_OWN_ATTENTION = (
    "attention to packed sequences is torch's or Transformer Engine's own, with a softmax in "
    "float32"
)
_OWN_NORM = "norms are torch's or Transformer Engine's own"
_OWN_ROTARY = "angles are computed once per micro-batch, and applied by the trainer's own rotation"
_NOT_READ = "Megatron does not read it any more"
_NO_DEEPEP = "DeepEP's exchange is not in this version"
_DROPS_TOKENS = (
    "tokens are never dropped here, so that a token's log-prob depends on its own sample alone"
)
_ANY_ROWS = "the products of experts take any number of rows"

_STAGES = on("num_virtual_stages_per_pipeline_rank") | on("num_layers_per_virtual_pipeline_stage")
_FP8 = on("fp8_format")
_FP4 = on("fp4_format")
_CPU_OPTIMIZER = on("optimizer_cpu_offload")
_PRECISION_AWARE = on("use_precision_aware_optimizer")
_SHARDED = (
    on("optimizer", "adam", why="only Adam's states are sharded over the replicas"),
    on(
        "use_distributed_optimizer",
        why="each rank updates all parameters, so there is nothing to gather or to shard",
    ),
)
#: Launch scripts carry the settings of loss scaling along with --bf16 too.
_SCALED = on("fp16", why="only a loss in float16 is scaled", warns=True)


def _fields(names: str, *needs: Requirement, **meta: Any) -> dict[str, FlagMeta]:
    """The same declaration for several fields, whose names are given as words."""
    return dict.fromkeys(names.split(), FlagMeta(needs=needs, **meta))


#: What is declared of megatron-core's fields, by the field's name; the others may have any value.
FIELDS: dict[str, FlagMeta] = {
    # numbers
    **_fields("microbatch_group_size_per_vp_stage", _STAGES, range=SOME),
    **_fields("overlap_p2p_comm_warmup_flush", _STAGES),
    **_fields("align_param_gather", on("overlap_param_gather"), _STAGES),
    **_fields("loss_scale", range=POSITIVE),
    **_fields("initial_loss_scale min_loss_scale", _SCALED, range=POSITIVE),
    **_fields("loss_scale_window hysteresis", _SCALED, range=SOME),
    **_fields("decoupled_lr decoupled_min_lr", range=finite(0)),
    **_fields("bucket_size", on("overlap_grad_reduce"), range=SOME),
    **_fields("pad_buckets_for_high_nccl_busbw", *_SHARDED),
    **_fields("moe_aux_loss_coeff moe_z_loss_coeff", range=WEIGHT),
    **_fields("moe_router_bias_update_rate", range=finite(0)),
    # details of something that is switched on apart
    **_fields(
        "fp8_recipe fp8_margin fp8_interval fp8_amax_history_len fp8_amax_compute_algo fp8_wgrad "
        "fp8_dot_product_attention fp8_multi_head_attention fp8_quantizer_factory tp_only_amax_red "
        "activation_func_fp8_input_store reuse_grad_buf_for_mxfp8_param_ag",
        _FP8,
    ),
    **_fields("fp4_recipe fp4_param fp4_quantizer_factory", _FP4),
    **_fields(
        "num_layers_at_start_in_bf16 num_layers_at_end_in_bf16", on("first_last_layers_bf16")
    ),
    **_fields("optimizer_offload_fraction", _CPU_OPTIMIZER, range=FRACTION),
    **_fields(
        "use_torch_optimizer_for_cpu_offload overlap_cpu_optimizer_d2h_h2d pin_cpu_grads "
        "pin_cpu_params",
        _CPU_OPTIMIZER,
    ),
    **_fields(
        "main_grads_dtype main_params_dtype exp_avg_dtype exp_avg_sq_dtype store_param_remainders",
        _PRECISION_AWARE,
    ),
    **_fields("offload_modules", on("fine_grained_activation_offloading")),
    **_fields("min_offloaded_tensor_size", on("fine_grained_activation_offloading"), range=SOME),
    **_fields("disable_parameter_transpose_cache", on("transformer_impl", "transformer_engine")),
    # values that are not there
    **_fields(
        "moe_token_dispatcher_type",
        instead=dict.fromkeys(
            ("allgather", "flex"),
            (
                "alltoall",
                "ways of exchanging tokens differ in speed alone, and the one here has splits of "
                "any size",
            ),
        ),
    ),
    # accepted with a warning: speed alone, or weights that are not used
    **_fields("cross_entropy_loss_fusion cross_entropy_fusion_impl", no_effect=_OUTPUT),
    **_fields("masked_softmax_fusion", no_effect=_OWN_ATTENTION),
    **_fields("persist_layer_norm memory_efficient_layer_norm", no_effect=_OWN_NORM),
    **_fields(
        "async_tensor_model_parallel_allreduce gradient_reduce_div_fusion", no_effect=_NOT_READ
    ),
    **_fields(
        "moe_enable_deepep moe_flex_dispatcher_backend moe_deepep_num_sms moe_hybridep_num_sms",
        no_effect=f"it is about speed alone: {_NO_DEEPEP}",
    ),
    **_fields(
        "mtp_num_layers mtp_loss_scaling_factor",
        no_effect="layers for multi-token prediction are not trained; engines keep those of "
        "--hf-checkpoint",
    ),
    **_fields(
        "barrier_with_L1_time",
        no_effect="Megatron's timers are not used; times are logged as perf/…",
    ),
    **_fields("init_method_std embedding_init_method_std", no_effect=_LOADED),
    **_fields(
        "moe_permute_fusion",
        no_effect=(
            "it is about speed alone: tokens are permuted by gathers, which give the same result"
        ),
    ),
    # refused
    **_fields("variable_seq_lengths", refused=f"it is always on: {_PACKED}"),
    **_fields("params_dtype pipeline_dtype autocast_dtype enable_autocast", refused=_PRECISION),
    **_fields("mtp_standalone", refused=NO_MTP),
    **_fields(
        "moe_enable_routing_replay",
        refused="use --use-routing-replay or --use-rollout-routing-replay",
    ),
    **_fields(
        "use_megatron_fsdp use_custom_fsdp data_parallel_sharding_strategy "
        "outer_dp_sharding_strategy "
        "fsdp_double_buffer fsdp_manual_registration preserve_fp32_weights "
        "keep_fp8_transpose_cache "
        "init_model_with_meta_device suggested_communication_unit_size",
        refused=_FSDP,
    ),
    **_fields(
        "enable_cuda_graph external_cuda_graph cuda_graph_impl cuda_graph_scope "
        "cuda_graph_use_single_mempool "
        "cuda_graph_retain_backward_graph cuda_graph_warmup_steps",
        refused=f"CUDA graphs need fixed shapes: {_PACKED}",
    ),
    **_fields(
        "flash_decode inference_rng_tracker inference_sampling_seed use_inference_optimized_layers "
        "inference_fuse_tp_communication mlp_chunks_for_prefill cache_mla_latents",
        refused=_INFERENCE,
    ),
    **_fields(
        "is_hybrid_model mamba_state_dim mamba_head_dim mamba_num_groups mamba_num_heads "
        "use_mamba_mem_eff_path "
        "heterogeneous_block_specs hetereogenous_dist_checkpoint experimental_attention_variant "
        "dsa_indexer_n_heads dsa_indexer_head_dim dsa_indexer_topk dsa_indexer_loss_coeff "
        "dsa_indexer_use_sparse_loss linear_attention_freq linear_conv_kernel_dim "
        "linear_key_head_dim "
        "linear_value_head_dim linear_num_key_heads linear_num_value_heads "
        "apply_residual_connection_post_layernorm layernorm_zero_centered_gamma glu_linear_offset "
        "activation_func_clamp_value use_fused_weighted_squared_relu softmax_scale softmax_type "
        "window_size "
        "window_attn_skip_freq qk_l2_norm attention_output_gate no_rope_freq mrope_section "
        "moe_shared_expert_gate",
        refused=_NO_FAMILY,
    ),
    **_fields(
        "tp_comm_overlap tp_comm_bulk_wgrad tp_comm_bulk_dgrad tp_comm_overlap_ag "
        "tp_comm_overlap_rs "
        "tp_comm_overlap_rs_dgrad tp_comm_split_ag tp_comm_atomic_ag tp_comm_split_rs "
        "tp_comm_atomic_rs "
        "tp_comm_overlap_disable_qkv tp_comm_overlap_disable_fc1 tp_comm_bootstrap_backend",
        refused=f"its user buffers need fixed shapes: {_PACKED}",
    ),
    **_fields("perform_initialization use_cpu_initialization", refused=_LOADED),
    **_fields(
        "overlap_p2p_comm batch_p2p_comm use_ring_exchange_p2p deallocate_pipeline_outputs",
        refused=_SCHEDULE,
    ),
    **_fields("defer_embedding_wgrad_compute wgrad_deferral_limit", refused=_OUTPUT),
    **_fields("attention_softmax_in_fp32 apply_query_key_layer_scaling", refused=_OWN_ATTENTION),
    **_fields("apply_rope_fusion fused_single_qkv_rope", refused=_OWN_ROTARY),
    **_fields("moe_router_padding_for_quantization moe_router_padding_for_fp8", refused=_ANY_ROWS),
    **_fields(
        "qk_clip log_max_attention_logit qk_clip_alpha qk_clip_threshold",
        refused="attention logits are not looked at in this version",
    ),
    **_fields(
        "use_kitchen use_kitchen_attention kitchen_attention_backend",
        refused="the Kitchen kernels are not in this version",
    ),
    **_fields(
        "moe_token_drop_policy moe_expert_capacity_factor moe_pad_expert_input_to_capacity "
        "moe_token_dropping",
        refused=_DROPS_TOKENS,
    ),
    **_fields(
        "moe_router_topk_limited_devices",
        refused="Megatron removed it; use --moe-router-num-groups and --moe-router-group-topk",
    ),
    **_fields(
        "moe_per_layer_logging",
        refused="the experts' load is logged as a mean over the layers, train/moe_…",
    ),
    **_fields(
        "ep_overlap_early_attn_memory_release",
        refused="the experts' exchange is not overlapped in this version",
    ),
    **_fields(
        "fp32_residual_connection", refused="the residual stream has the precision of the weights"
    ),
    **_fields("bias_activation_fusion", refused="SwiGLU is one kernel anyway"),
    **_fields(
        "batch_invariant_mode",
        refused="a set of batch-invariant kernels is not in this version; see --deterministic-mode",
    ),
    **_fields(
        "num_microbatches_with_partial_activation_checkpoints",
        refused="all micro-batches are recomputed alike",
    ),
    **_fields(
        "pipeline_model_parallel_comm_backend",
        refused="all groups have one backend; see --distributed-backend",
    ),
    **_fields(
        "hierarchical_context_parallel_sizes",
        refused="the ranks of a context-parallel group exchange heads for tokens at once",
    ),
    **_fields("use_te_rng_tracker", refused="torch's own generators are seeded and saved"),
    **_fields(
        "num_distributed_optimizer_instances",
        refused="optimizer states are sharded over all replicas",
    ),
    **_fields(
        "overlap_param_gather_with_optimizer_step",
        refused="parameters are gathered with the forward pass; see --overlap-param-gather",
    ),
    **_fields(
        "log_num_zeros_in_grad",
        refused="counting zeros of gradients is not in this version; their norm is logged as "
        "train/grad_norm",
    ),
    **_fields(
        "muon_momentum muon_split_qkv muon_use_nesterov muon_scale_mode muon_fp32_matmul_prec "
        "muon_num_ns_steps "
        "muon_tp_mode muon_extra_scale_factor",
        refused="the optimizers are adam and sgd",
    ),
    **_fields("max_seqlen_per_dp_cp_rank", refused="use --max-tokens-per-gpu"),
    **_fields(
        "hybrid_context_parallel", refused="context parallelism has one size for all sequences"
    ),
    **_fields(
        "cpu_offloading cpu_offloading_num_layers cpu_offloading_activations "
        "cpu_offloading_weights "
        "cpu_offloading_double_buffering",
        refused="use --recompute-activations or --optimizer-cpu-offload",
    ),
    **_fields("test_mode", refused="it switches checks of Megatron off"),
    **_fields("moe_extended_tp", refused="Megatron removed it; use --expert-tensor-parallel-size"),
    **_fields(
        "moe_layer_recompute",
        refused="use --recompute-granularity selective --recompute-modules moe",
    ),
    **_fields(
        "moe_router_fusion",
        refused="the router is computed by operations of torch alone, with Transformer Engine too",
    ),
    **_fields(
        "moe_shared_expert_overlap", refused="shared experts are computed after the routed ones"
    ),
    **_fields("moe_input_jitter_eps", refused="log-probs would not be reproducible"),
    **_fields("moe_router_force_load_balancing", refused="it routes at random"),
    **_fields("moe_apply_probs_on_input", refused="expert outputs are weighted, not their inputs"),
    **_fields("moe_latent_size", refused="no model family here has it"),
    **_fields(
        "moe_use_legacy_grouped_gemm",
        refused="it needs the grouped_gemm package; products are grouped anyway",
    ),
    **_fields(
        "overlap_moe_expert_parallel_comm", refused="the exchange is not overlapped in this version"
    ),
}


@dataclass(frozen=True)
class Shorthand:
    """A flag without a value of its own: it sets other flags.

    Attributes:
        sets: value by dest.
        help: what it is for.
    """

    sets: dict[str, Any]
    help: str


#: ``--no-rope-fusion`` and its like.
SHORTHANDS: dict[str, Shorthand] = {
    "no_rope_fusion": Shorthand({"apply_rope_fusion": False}, "Do not fuse rotary embeddings."),
    "no_bias_swiglu_fusion": Shorthand(
        {"bias_activation_fusion": False}, "Do not fuse bias and SwiGLU."
    ),
    "no_bias_gelu_fusion": Shorthand(
        {"bias_activation_fusion": False}, "Do not fuse bias and GELU."
    ),
    "grad_reduce_in_bf16": Shorthand(
        {"accumulate_allreduce_grads_in_fp32": False}, "Reduce gradients in bfloat16."
    ),
    "use_flash_attn": Shorthand(
        {"attention_backend": "flash"}, "Same as --attention-backend flash."
    ),
    "no_position_embedding": Shorthand(
        {"position_embedding_type": "rope"}, "No learned position embedding."
    ),
    "use_rotary_position_embeddings": Shorthand(
        {"position_embedding_type": "rope"}, "Same as --position-embedding-type rope."
    ),
}


def _model(dest: str, kind: Kind, help: str, choices: tuple[str, ...] = ()) -> FlagSpec:
    default: Any = False if kind == "bool" else None
    return FlagSpec(
        dest, "megatron", dest, kind, default, sections=("model",), optional=True, choices=choices,
        help=help, origin="Megatron-LM",
    )  # fmt: skip


#: Arguments of the model that Megatron-LM passes beside `TransformerConfig`.
MODEL_FLAGS: tuple[FlagSpec, ...] = (
    _model("swiglu", "bool", "Gated MLP with SiLU."),
    _model("vocab_size", "int", "Vocabulary size before padding."),
    _model(
        "make_vocab_size_divisible_by",
        "int",
        "Changes nothing: rows of padding take part in no number, and as many are added as tensor "
        "parallelism needs.",
    ),
    _model(
        "max_position_embeddings",
        "int",
        "Longest sequence; rotary positions need no table, so only more than the model's own is "
        "refused.",
    ),
    _model("rotary_base", "float", "Base of the rotary embedding (rope_theta)."),
    _model("rotary_percent", "float", "Fraction of the head that is rotated."),
    _model(
        "rotary_seq_len_interpolation_factor", "float", "Factor of linear position interpolation."
    ),
    _model("use_rope_scaling", "bool", "Llama 3's scaling of the rotary embedding."),
    _model("rope_scaling_factor", "float", "Factor of that scaling."),
    _model("untie_embeddings_and_output_weights", "bool", "Separate output layer."),
    _model(
        "group_query_attention",
        "bool",
        "Fewer key-value heads than query heads; see --num-query-groups.",
    ),
    _model("post_self_attn_layernorm", "bool", "Norm after attention (GLM-4)."),
    _model("post_mlp_layernorm", "bool", "Norm after the MLP (GLM-4)."),
)

#: What is always so: accepted, because it asks for what happens anyway. name -> (values that are
#: so, remark)
ALWAYS: dict[str, tuple[tuple[str, ...], str]] = {
    "use_mcore_models": ((), "Always so."),
    "no_create_attention_mask_in_dataloader": ((), "Always so: there is no data loader of masks."),
    "use_dist_ckpt": ((), "Always so."),
    "auto_detect_ckpt_format": ((), "Always so."),
    "reset_position_ids": ((), "Always so: each packed sequence has positions of its own."),
    "reset_attention_mask": ((), "Always so: packed sequences do not see each other."),
    "position_embedding_type": (("rope",), "The only kind; scaled as the model's config says."),
    "ckpt_format": (("torch_dist",), "The only format."),
    "tokenizer_type": (("HuggingFaceTokenizer",), "The only tokenizer."),
    "dataloader_type": (("external",), "Batches come from the rollout."),
}

_ITERS = "it follows from num_rollout, the batch sizes and --num-steps-per-rollout"
_ROLLOUT_DATA = "training data comes from the rollout; see --prompt-data"
_EVAL = "evaluation generates; see --eval-interval and --eval-prompt-data"
_OBSERVE = "metrics go to the run folder; see --output-dir, --use-tensorboard and --use-wandb"

#: Megatron-LM's arguments that mean something else here. name -> reason
REFUSED_NAMES: dict[str, str] = {
    "train_iters": _ITERS,
    "train_samples": _ITERS,
    "exit_interval": _ITERS,
    "rampup_batch_size": "the batch size is constant; see --global-batch-size",
    "data_path": _ROLLOUT_DATA,
    "train_data_path": _ROLLOUT_DATA,
    "split": _ROLLOUT_DATA,
    "mock_data": _ROLLOUT_DATA,
    "num_workers": "use --num-data-workers",
    "eval_iters": _EVAL,
    "tokenizer_model": "the tokenizer is that of --hf-checkpoint",
    "vocab_file": "the tokenizer is that of --hf-checkpoint",
    "merge_file": "the tokenizer is that of --hf-checkpoint",
    "tensorboard_dir": _OBSERVE,
    "log_interval": "every step is logged",
    "log_throughput": "throughput is always logged, as perf/…",
    "log_params_norm": (
        "the norm of parameters is not in this version; that of gradients is logged as "
        "train/grad_norm"
    ),
    "use_checkpoint_args": "the architecture is that of --hf-checkpoint",
    "pretrained_checkpoint": "use --load",
    "non_persistent_save_interval": "use --save-interval",
    "lora_rank": "LoRA is not in this version",
    "encoder_seq_length": "use --seq-length",
    "virtual_pipeline_model_parallel_size": "use --num-layers-per-virtual-pipeline-stage",
    "cuda_graph_warmup": "CUDA graphs need fixed shapes",
    "use_torch_fsdp2": _FSDP,
    "use_gated_attention": _NO_FAMILY,
    "enable_experimental": _NO_FAMILY,
    "profile": "profiling is not in this version; py-spy works on every process",
}


def lm_flags() -> dict[str, FlagSpec]:
    """Flags for the three tables above that are neither field nor shorthand, each with its
    status."""
    specs = list(MODEL_FLAGS)
    for dest, (values, remark) in ALWAYS.items():
        specs.append(
            replace(
                _model(dest, "str" if values else "bool", remark, values), meta=FlagMeta(off="-")
            )
        )
    for dest, reason in REFUSED_NAMES.items():
        specs.append(replace(_model(dest, "str", ""), many=True, meta=FlagMeta(refused=reason)))
    return {spec.dest: spec for spec in specs}


def native_flags(own: Container[str]) -> dict[str, FlagSpec]:
    """Megatron's fields as flags by dest, without those that a group of ours already has.

    A field that several classes have (``fp8_recipe``) is one flag that sets each.
    """
    model = {spec.dest for spec in MODEL_FLAGS}
    specs: dict[str, FlagSpec] = {}
    for (section, field_name), native in native_fields().items():
        name = NAMES.get(field_name)
        dest = name[0] if name else field_name
        if dest in own or field_name in own or field_name in SKIPPED_FIELDS:
            continue
        if section == "model" and (dest in model or dest in specs):
            continue
        if dest in specs:
            specs[dest] = replace(specs[dest], sections=(*specs[dest].sections, section))
            continue
        specs[dest] = FlagSpec(
            dest=dest,
            group="megatron",
            attribute=field_name,
            kind=native.kind,
            default=native.default,
            sections=(section,),
            many=native.many,
            scalar_or_list=native.scalar_or_list,
            optional=native.optional or native.default is None,
            choices=native.choices,
            help=native.help,
            meta=_meta_of(native, dest, name[1:] if name else ()),
            origin=f"megatron-core {megatron_version()}",
        )
    return specs


def _meta_of(native: NativeField, dest: str, aliases: tuple[str, ...]) -> FlagMeta:
    """Aliases are the field's own name and what megatron-core says of its argument names."""
    spelled = {alias.removeprefix("--") for alias in (*native.arg_names, *aliases)}
    if dest != native.name:
        spelled.add(native.name.replace("_", "-"))
    off = ""
    if native.kind == "bool" and native.default is True:
        negatives = [alias for alias in spelled if alias.startswith(("no-", "disable-"))]
        off = negatives[0] if negatives else ""
    spelled -= {dest.replace("_", "-"), off}
    declared = FIELDS.get(native.name, FlagMeta())
    return replace(declared, aliases=tuple(sorted(spelled)), off=off, read_by=("trainer",))
