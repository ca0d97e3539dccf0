"""The group of Megatron's flags."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, ClassVar, Literal

from slime.config.flag import (
    FRACTION,
    NONE_OR_SOME,
    SOME,
    Interval,
    Part,
    at_least,
    derived,
    finite,
    flag,
    on,
    unless,
)
from slime.config.megatron_flags import SHARDED_STATES

_DECAYS = unless(
    "lr_decay_style", "constant", why="a constant learning rate does not decay, one of cosine does"
)
_MOMENTUM = Interval(0, 1, below=True, what="the weight of the past in a running mean")


@dataclass(frozen=True, kw_only=True)
class MegatronConfig:
    """Parallel layout, precision, recompute, optimizer and schedule, by Megatron's own names.

    Further fields of Megatron that the user set, by field name:
        transformer: of `TransformerConfig` and `ModelParallelConfig`.
            `slime.models.model_flags.merge_transformer` combines them with the Hugging Face
            config, and refuses contradictions.
        optimizer: of `OptimizerConfig`, beyond the fields below.
        ddp: of `DistributedDataParallelConfig`, beyond the fields below.
        model: of the model, outside `TransformerConfig` (`rotary_base`, `vocab_size`, ...). They
            are only checked against the Hugging Face config.
    """

    READ_BY: ClassVar[tuple[Part, ...]] = ("training",)

    tensor_model_parallel_size: int = flag(1, range=SOME, read_by="trainer")
    """GPUs over which each layer's matrices are split."""
    pipeline_model_parallel_size: int = flag(1, range=SOME, read_by="trainer")
    """Pipeline stages."""
    num_layers_per_virtual_pipeline_stage: int | None = flag(None, range=SOME, read_by="trainer")
    """Layers per virtual pipeline stage (interleaved schedule)."""
    num_virtual_stages_per_pipeline_rank: int | None = flag(None, range=SOME, read_by="trainer")
    """Virtual stages per pipeline rank; an alternative to the flag above."""
    context_parallel_size: int = flag(1, range=SOME, read_by="trainer")
    """GPUs over which each sequence is split."""
    expert_model_parallel_size: int = flag(1, range=SOME, read_by="trainer")
    """GPUs over which experts are spread."""
    expert_tensor_parallel_size: int | None = flag(None, range=SOME, read_by="trainer")
    """GPUs over which each expert's matrices are split; unset: the tensor-parallel size."""
    sequence_parallel: bool = flag(False, read_by="trainer")
    """Split activations of norms and dropout along the sequence; needs tensor parallelism."""
    bf16: bool = derived("true unless fp16 or fp32", read_by=("trainer", "training", "engine"))
    """Train in bfloat16 with float32 master weights."""
    fp16: bool = flag(False, read_by=("trainer", "training", "engine"))
    """Train in float16 with loss scaling."""
    fp32: bool = flag(False, read_by=("trainer", "push", "engine"))
    """Train in float32."""
    recompute_activations: bool = flag(False, read_by="config")
    """Recompute activations in the backward pass: less memory, about a third more computation."""
    recompute_granularity: Literal["full", "selective"] | None = derived(
        "full with recompute_activations"
    )
    """What is recomputed: whole layers, or --recompute-modules."""
    recompute_method: Literal["uniform", "block"] | None = derived(
        "uniform with recompute_activations", needs=on("recompute_granularity", "full")
    )
    """Which layers are recomputed, with full granularity."""
    recompute_num_layers: int | None = derived(
        "1 with recompute_activations", range=SOME, needs=on("recompute_granularity", "full")
    )
    """Layers per recomputed block, with full granularity."""
    recompute_modules: tuple[
        Literal[
            "core_attn",
            "layernorm",
            "mla_up_proj",
            "mlp",
            "mlp_act",
            "moe",
            "moe_act",
            "shared_experts",
        ],
        ...,
    ] = flag((), needs=on("recompute_granularity", "selective"))
    """Modules recomputed with selective granularity. mlp_act, slime's own, is the activation of
    dense gated MLPs, and moe_act that of routed experts: both are cheap to compute."""
    optimizer_name: Literal["adam", "sgd"] = flag("adam", name="optimizer", read_by="trainer")
    """Optimizer."""
    lr: float = flag(1e-6, range=finite(0))
    """Learning rate."""
    min_lr: float = flag(0.0, range=finite(0), needs=_DECAYS)
    """Learning rate at the end of the decay."""
    lr_decay_style: Literal["constant", "linear", "cosine", "inverse-square-root", "WSD"] = flag(
        "constant"
    )
    """Schedule of the learning rate after the warm-up."""
    lr_decay_iters: int | None = flag(None, range=SOME, needs=_DECAYS | on("lr_warmup_fraction"))
    """Optimizer steps over which the learning rate decays; unset: the whole run."""
    lr_decay_samples: int | None = flag(None, range=SOME, needs=_DECAYS | on("lr_warmup_fraction"))
    """Samples over which the learning rate decays; unset: the whole run."""
    lr_warmup_iters: int = flag(0, range=NONE_OR_SOME)
    """Optimizer steps of linear warm-up."""
    lr_warmup_fraction: float | None = flag(None, range=FRACTION)
    """Warm-up as a fraction of the decay."""
    lr_warmup_samples: int = flag(0, range=NONE_OR_SOME)
    """Warm-up in samples."""
    lr_warmup_init: float = flag(
        0.0,
        range=finite(0),
        needs=on("lr_warmup_iters") | on("lr_warmup_fraction") | on("lr_warmup_samples"),
    )
    """Learning rate at the start of the warm-up."""
    lr_wsd_decay_style: Literal["exponential", "linear", "cosine", "minus_sqrt"] = flag(
        "exponential", needs=on("lr_decay_style", "WSD")
    )
    """Last phase of the WSD schedule."""
    lr_wsd_decay_iters: int | None = flag(None, range=SOME, needs=on("lr_decay_style", "WSD"))
    """Optimizer steps of the last phase of the WSD schedule."""
    weight_decay: float = flag(0.01, range=finite(0))
    """Weight decay."""
    start_weight_decay: float = derived("weight_decay", range=finite(0))
    """Weight decay at the start, with a schedule."""
    end_weight_decay: float = derived("weight_decay", range=finite(0))
    """Weight decay at the end, with a schedule."""
    weight_decay_incr_style: Literal["constant", "linear", "cosine"] = flag("constant")
    """Schedule of the weight decay."""
    adam_beta1: float = flag(0.9, range=_MOMENTUM, needs=on("optimizer", "adam"))
    """Adam's beta 1."""
    adam_beta2: float = flag(0.999, range=_MOMENTUM, needs=on("optimizer", "adam"))
    """Adam's beta 2."""
    adam_eps: float = flag(
        1e-8,
        range=finite(0, "without it a gradient of 0 would be divided by 0", above=True),
        needs=on("optimizer", "adam"),
    )
    """Adam's epsilon."""
    sgd_momentum: float = flag(0.9, range=_MOMENTUM, needs=on("optimizer", "sgd"))
    """Momentum of SGD."""
    clip_grad: float = flag(1.0, range=at_least(0, "a norm; 0 does not clip"))
    """Largest global gradient norm; 0: no clipping."""
    check_for_nan_in_loss_and_grad: bool = flag(True)
    """Stop on NaN or Inf; off: the step is skipped and counted."""
    use_distributed_optimizer: bool = flag(True, read_by="trainer")
    """Shard optimizer states over data-parallel ranks."""
    use_precision_aware_optimizer: bool = flag(False, needs=SHARDED_STATES, read_by="trainer")
    """Keep optimizer states in lower precision: needs Transformer Engine or
    --optimizer-cpu-offload."""
    optimizer_cpu_offload: bool = flag(False, needs=SHARDED_STATES, read_by="trainer")
    """Keep master weights and Adam's moments in host memory, and stream them through the GPU in
    each step."""
    offload_optimizer_states: bool = flag(False, read_by="trainer")
    """Keep the optimizer's moments in host memory, and stream them through the GPU in each step."""
    overlap_grad_reduce: bool = flag(False)
    """Overlap gradient reduction with the backward pass."""
    overlap_param_gather: bool = flag(False, needs=(on("overlap_grad_reduce"), *SHARDED_STATES))
    """Overlap gathering of parameters with the forward pass."""
    accumulate_allreduce_grads_in_fp32: bool = derived(
        "true unless fp32 is the training precision anyway", read_by="trainer"
    )
    """Accumulate and reduce gradients in float32."""
    use_checkpoint_opt_param_scheduler: bool = flag(False, needs=on("load"))
    """On resume, take the settings of schedule and optimizer (learning rate, betas, …) from the
    checkpoint."""
    override_opt_param_scheduler: bool = flag(False, read_by=("config", "training"))
    """On resume, take the schedule's settings from the flags, which is the default."""
    transformer: dict[str, Any] = field(default_factory=dict)
    optimizer: dict[str, Any] = field(default_factory=dict)
    ddp: dict[str, Any] = field(default_factory=dict)
    model: dict[str, Any] = field(default_factory=dict)

    @property
    def dtype(self) -> str:
        """Return the dtype of the trained parameters by torch's name."""
        return "float16" if self.fp16 else "bfloat16" if self.bf16 else "float32"
