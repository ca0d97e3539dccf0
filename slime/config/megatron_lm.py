"""Names of Megatron-LM's command line that are no field of megatron-core, and fields that are not offered.

megatron-core's wheel has the config classes but not Megatron-LM's argument parser; this table is what launch
scripts written for that parser need besides the fields themselves.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from slime.config.field import FlagMeta
from slime.config.specs import FlagSpec, Kind

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
SKIPPED_FIELDS = frozenset({"virtual_pipeline_model_parallel_size", "check_for_nan_in_grad", "grad_reduce_in_fp32"})

_PRECISION = "it follows --bf16, --fp16 or --fp32"
_PACKED = "training batches are packed, with another shape at each step"
_INFERENCE = "generation is the engine's work"
_FSDP = "Megatron-FSDP is not in this version; use --use-distributed-optimizer"
_NO_FAMILY = "no model family of this version has such layers"
_LOADED = "weights are loaded from a checkpoint"
_SCHEDULE = "it follows from the pipeline's schedule"
_OUTPUT = "log-probs are computed from the hidden states in chunks, without Megatron's output layer and cross entropy"
_OWN_ATTENTION = "attention to packed sequences is torch's or Transformer Engine's own, with a softmax in float32"
_OWN_NORM = "norms are torch's or Transformer Engine's own"
_OWN_ROTARY = "angles are computed once per micro-batch, and applied by the trainer's own rotation"
_NOT_READ = "Megatron does not read it any more"
_NO_DEEPEP = "DeepEP's exchange is not in this version"
_DROPS_TOKENS = "tokens are never dropped here, so that a token's log-prob depends on its own sample alone"
_ANY_ROWS = "the products of experts take any number of rows"
_MTP = "training of multi-token-prediction layers is not in this version"

#: Fields of megatron-core that exist but cannot be set here, with the reason.
REFUSED_FIELDS: dict[str, str] = {
    "variable_seq_lengths": f"it is always on: {_PACKED}",
    "params_dtype": _PRECISION,
    "pipeline_dtype": _PRECISION,
    "autocast_dtype": _PRECISION,
    "enable_autocast": _PRECISION,
    "mtp_num_layers": _MTP,
    "mtp_loss_scaling_factor": _MTP,
    "mtp_standalone": _MTP,
    "moe_enable_routing_replay": "use --use-routing-replay or --use-rollout-routing-replay",
    **dict.fromkeys(
        (
            "use_megatron_fsdp",
            "use_custom_fsdp",
            "data_parallel_sharding_strategy",
            "outer_dp_sharding_strategy",
            "fsdp_double_buffer",
            "fsdp_manual_registration",
            "preserve_fp32_weights",
            "keep_fp8_transpose_cache",
            "init_model_with_meta_device",
            "suggested_communication_unit_size",
        ),
        _FSDP,
    ),
    **dict.fromkeys(
        (
            "enable_cuda_graph",
            "external_cuda_graph",
            "cuda_graph_impl",
            "cuda_graph_scope",
            "cuda_graph_use_single_mempool",
            "cuda_graph_retain_backward_graph",
            "cuda_graph_warmup_steps",
        ),
        f"CUDA graphs need fixed shapes: {_PACKED}",
    ),
    **dict.fromkeys(
        (
            "flash_decode",
            "inference_rng_tracker",
            "inference_sampling_seed",
            "use_inference_optimized_layers",
            "inference_fuse_tp_communication",
            "mlp_chunks_for_prefill",
            "cache_mla_latents",
        ),
        _INFERENCE,
    ),
    **dict.fromkeys(
        (
            "is_hybrid_model",
            "mamba_state_dim",
            "mamba_head_dim",
            "mamba_num_groups",
            "mamba_num_heads",
            "use_mamba_mem_eff_path",
            "heterogeneous_block_specs",
            "hetereogenous_dist_checkpoint",
            "experimental_attention_variant",
            "dsa_indexer_n_heads",
            "dsa_indexer_head_dim",
            "dsa_indexer_topk",
            "dsa_indexer_loss_coeff",
            "dsa_indexer_use_sparse_loss",
            "linear_attention_freq",
            "linear_conv_kernel_dim",
            "linear_key_head_dim",
            "linear_value_head_dim",
            "linear_num_key_heads",
            "linear_num_value_heads",
            "apply_residual_connection_post_layernorm",
            "layernorm_zero_centered_gamma",
            "glu_linear_offset",
            "activation_func_clamp_value",
            "use_fused_weighted_squared_relu",
            "softmax_scale",
            "softmax_type",
            "window_size",
            "window_attn_skip_freq",
            "qk_l2_norm",
            "attention_output_gate",
            "no_rope_freq",
            "mrope_section",
            "moe_shared_expert_gate",
        ),
        _NO_FAMILY,
    ),
    **dict.fromkeys(
        (
            "tp_comm_overlap",
            "tp_comm_bulk_wgrad",
            "tp_comm_bulk_dgrad",
            "tp_comm_overlap_ag",
            "tp_comm_overlap_rs",
            "tp_comm_overlap_rs_dgrad",
            "tp_comm_split_ag",
            "tp_comm_atomic_ag",
            "tp_comm_split_rs",
            "tp_comm_atomic_rs",
            "tp_comm_overlap_disable_qkv",
            "tp_comm_overlap_disable_fc1",
            "tp_comm_bootstrap_backend",
        ),
        f"its user buffers need fixed shapes: {_PACKED}",
    ),
    **dict.fromkeys(("perform_initialization", "use_cpu_initialization"), _LOADED),
    **dict.fromkeys(
        ("overlap_p2p_comm", "batch_p2p_comm", "use_ring_exchange_p2p", "deallocate_pipeline_outputs"), _SCHEDULE
    ),
    **dict.fromkeys(("defer_embedding_wgrad_compute", "wgrad_deferral_limit"), _OUTPUT),
    **dict.fromkeys(("attention_softmax_in_fp32", "apply_query_key_layer_scaling"), _OWN_ATTENTION),
    **dict.fromkeys(("apply_rope_fusion", "fused_single_qkv_rope"), _OWN_ROTARY),
    **dict.fromkeys(("moe_router_padding_for_quantization", "moe_router_padding_for_fp8"), _ANY_ROWS),
    **dict.fromkeys(("qk_clip", "log_max_attention_logit"), "attention logits are not looked at in this version"),
    **dict.fromkeys(
        ("use_kitchen", "use_kitchen_attention", "kitchen_attention_backend"),
        "the Kitchen kernels are not in this version",
    ),
    "moe_token_drop_policy": _DROPS_TOKENS,
    "moe_router_topk_limited_devices": "Megatron removed it; use --moe-router-num-groups and --moe-router-group-topk",
    "moe_per_layer_logging": "the experts' load is logged as a mean over the layers, train/moe_…",
    "ep_overlap_early_attn_memory_release": "the experts' exchange is not overlapped in this version",
    "fp32_residual_connection": "the residual stream has the precision of the weights",
    "bias_activation_fusion": "SwiGLU is one kernel anyway",
    "batch_invariant_mode": "its kernels are not in this version; see --deterministic-mode",
    "num_microbatches_with_partial_activation_checkpoints": "all micro-batches are recomputed alike",
    "pipeline_model_parallel_comm_backend": "all groups have one backend; see --distributed-backend",
    "hierarchical_context_parallel_sizes": "the ranks of a context-parallel group exchange heads for tokens at once",
    "use_te_rng_tracker": "torch's own generators are seeded and saved",
    "num_distributed_optimizer_instances": "optimizer states are sharded over all replicas",
    "overlap_param_gather_with_optimizer_step": "parameters are gathered with the forward pass; see"
    " --overlap-param-gather",
    "log_num_zeros_in_grad": "not in this version; the gradient norm is logged as train/grad_norm",
    **dict.fromkeys(
        (
            "muon_momentum",
            "muon_split_qkv",
            "muon_use_nesterov",
            "muon_scale_mode",
            "muon_fp32_matmul_prec",
            "muon_num_ns_steps",
            "muon_tp_mode",
            "muon_extra_scale_factor",
        ),
        "the optimizers are adam and sgd",
    ),
    "max_seqlen_per_dp_cp_rank": "use --max-tokens-per-gpu",
    "hybrid_context_parallel": "context parallelism has one size for all sequences",
    "cpu_offloading": "use --recompute-activations or --optimizer-cpu-offload",
    "cpu_offloading_num_layers": "use --recompute-activations or --optimizer-cpu-offload",
    "cpu_offloading_activations": "use --recompute-activations or --optimizer-cpu-offload",
    "cpu_offloading_weights": "use --recompute-activations or --optimizer-cpu-offload",
    "cpu_offloading_double_buffering": "use --recompute-activations or --optimizer-cpu-offload",
    "test_mode": "it switches checks of Megatron off",
    "moe_extended_tp": "Megatron removed it; use --expert-tensor-parallel-size",
    "moe_layer_recompute": "use --recompute-granularity selective --recompute-modules moe",
}

#: Fields that are about speed alone, and about parts of Megatron that are not used: accepted, with a warning.
NO_EFFECT: dict[str, str] = {
    **dict.fromkeys(("cross_entropy_loss_fusion", "cross_entropy_fusion_impl"), _OUTPUT),
    "masked_softmax_fusion": _OWN_ATTENTION,
    **dict.fromkeys(("persist_layer_norm", "memory_efficient_layer_norm"), _OWN_NORM),
    **dict.fromkeys(("async_tensor_model_parallel_allreduce", "gradient_reduce_div_fusion"), _NOT_READ),
    **dict.fromkeys(("moe_flex_dispatcher_backend", "moe_deepep_num_sms", "moe_hybridep_num_sms"), _NO_DEEPEP),
    "barrier_with_L1_time": "Megatron's timers are not used; times are logged as perf/…",
}

#: Fields that launch scripts of other systems set, and that can be read here but not trained with: what they ask for
#: would be ignored. `slime.train.expert_rules` refuses them.
REFUSED_AT_LAUNCH: dict[str, str] = {
    "moe_router_fusion": "the router is computed by operations of torch alone, with Transformer Engine too",
    "moe_expert_capacity_factor": _DROPS_TOKENS,
    "moe_pad_expert_input_to_capacity": _DROPS_TOKENS,
    "moe_token_dropping": _DROPS_TOKENS,
    "moe_enable_deepep": _NO_DEEPEP,
    "moe_shared_expert_overlap": "shared experts are computed after the routed ones",
    "moe_input_jitter_eps": "log-probs would not be reproducible",
    "moe_router_force_load_balancing": "it routes at random",
    "moe_apply_probs_on_input": "expert outputs are weighted, not their inputs",
    "moe_latent_size": "no model family here has it",
    "moe_use_legacy_grouped_gemm": "it needs the grouped_gemm package; products are grouped anyway",
    "overlap_moe_expert_parallel_comm": "the exchange is not overlapped in this version",
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
    "no_bias_swiglu_fusion": Shorthand({"bias_activation_fusion": False}, "Do not fuse bias and SwiGLU."),
    "no_bias_gelu_fusion": Shorthand({"bias_activation_fusion": False}, "Do not fuse bias and GELU."),
    "grad_reduce_in_bf16": Shorthand({"accumulate_allreduce_grads_in_fp32": False}, "Reduce gradients in bfloat16."),
    "use_flash_attn": Shorthand({"attention_backend": "flash"}, "Same as --attention-backend flash."),
    "no_position_embedding": Shorthand({"position_embedding_type": "rope"}, "No learned position embedding."),
    "use_rotary_position_embeddings": Shorthand(
        {"position_embedding_type": "rope"}, "Same as --position-embedding-type rope."
    ),
}


def _model(dest: str, kind: Kind, help: str, choices: tuple[str, ...] = ()) -> FlagSpec:
    default: Any = False if kind == "bool" else None
    return FlagSpec(
        dest, "megatron", dest, kind, default, sections=("model",), optional=True, choices=choices, help=help,
        origin="Megatron-LM",
    )  # fmt: skip


#: Arguments of the model that Megatron-LM passes beside `TransformerConfig`.
MODEL_FLAGS: tuple[FlagSpec, ...] = (
    _model("swiglu", "bool", "Gated MLP with SiLU."),
    _model("vocab_size", "int", "Vocabulary size before padding."),
    _model(
        "make_vocab_size_divisible_by",
        "int",
        "Changes nothing: rows of padding take part in no number, and as many are added as tensor parallelism needs.",
    ),
    _model(
        "max_position_embeddings",
        "int",
        "Longest sequence; rotary positions need no table, so only more than the model's own is refused.",
    ),
    _model("rotary_base", "float", "Base of the rotary embedding (rope_theta)."),
    _model("rotary_percent", "float", "Fraction of the head that is rotated."),
    _model("rotary_seq_len_interpolation_factor", "float", "Factor of linear position interpolation."),
    _model("use_rope_scaling", "bool", "Llama 3's scaling of the rotary embedding."),
    _model("rope_scaling_factor", "float", "Factor of that scaling."),
    _model("untie_embeddings_and_output_weights", "bool", "Separate output layer."),
    _model("group_query_attention", "bool", "Fewer key-value heads than query heads; see --num-query-groups."),
    _model("post_self_attn_layernorm", "bool", "Norm after attention (GLM-4)."),
    _model("post_mlp_layernorm", "bool", "Norm after the MLP (GLM-4)."),
)

#: What is always so: accepted, because it asks for what happens anyway. name -> (values that are so, remark)
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
    "log_params_norm": "not in this version; the gradient norm is logged as train/grad_norm",
    "use_checkpoint_args": "the architecture is that of --hf-checkpoint",
    "pretrained_checkpoint": "use --load",
    "non_persistent_save_interval": "use --save-interval",
    "lora_rank": "LoRA is not in this version",
    "encoder_seq_length": "use --seq-length",
    "virtual_pipeline_model_parallel_size": "use --num-layers-per-virtual-pipeline-stage",
    "cuda_graph_warmup": "CUDA graphs need fixed shapes",
    "use_torch_fsdp2": _FSDP,
    "profile": "use --use-pytorch-profiler",
}


def lm_flags() -> list[FlagSpec]:
    """Flags for the three tables above that are neither field nor shorthand, each with its status."""
    specs = list(MODEL_FLAGS)
    for dest, (values, remark) in ALWAYS.items():
        specs.append(replace(_model(dest, "str" if values else "bool", remark, values), meta=FlagMeta(off="-")))
    for dest, reason in REFUSED_NAMES.items():
        specs.append(replace(_model(dest, "str", ""), many=True, meta=FlagMeta(refused=reason)))
    return specs
