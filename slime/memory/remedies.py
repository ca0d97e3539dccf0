"""Flags that reduce the memory of a trainer.

`slime.memory.check` tries them on a plan that does not fit. `remedies` suggests them, with the
values of the run, after a rank ran out of memory.
"""

from __future__ import annotations

from collections.abc import Sequence

from slime.config.config import Config
from slime.memory.activations import Recompute

_MIN_CHUNK_ROWS = 128  # of logits; matrix products of fewer rows are slow

SEQUENCE_PARALLEL = "--sequence-parallel"
OFFLOAD_MOMENTS = "--offload-optimizer-states"
OFFLOAD_ALL = "--optimizer-cpu-offload"
NARROW_MOMENTS = "--exp-avg-dtype bf16 --exp-avg-sq-dtype bf16"
OFFLOAD_ROLLOUT = "--offload-rollout"
OFFLOAD_WEIGHTS = "--offload-rollout-weights"
SHARD_STATES = "no --no-use-distributed-optimizer"


def more_recompute(now: Recompute) -> tuple[str, Recompute] | None:
    """Return (flags, the recomputation that they give); None if all layers are recomputed."""
    whole = Recompute("full", "uniform", 1, now.modules)
    if now.granularity is None:
        return "--recompute-activations", whole
    if now.granularity == "selective":
        return "--recompute-granularity selective → full", whole
    if now.method == "block":
        return (
            f"--recompute-method block (of {now.num_layers} layers) → uniform "
            "--recompute-num-layers 1",
            whole,
        )
    return None


def other_fraction(now: float, then: float) -> str:
    return f"--sglang-mem-fraction-static {now:g} → {then:g}"


def wider_tensor_parallel(tensor: int) -> str:
    return f"--tensor-model-parallel-size {tensor} → {2 * tensor}"


def wider_context_parallel(context: int) -> str:
    return f"--context-parallel-size {context} → {2 * context}"


# -- after running out of memory -------------------------------------------------------------------

#: Changes that reduce host memory, for a run whose flags are unknown.
ON_HOST = (
    f"{OFFLOAD_ALL} {NARROW_MOMENTS}: 4 bytes per parameter less",
    "without --async-save: it copies what is saved",
    "fewer trainer ranks and engines per host, or more hosts: optimizer states are sharded over "
    "them",
    "slime plan shows what the run keeps in host memory",
)


def host_remedies(config: Config) -> list[str]:
    """List changes of flags after a GPU run has filled its host's memory."""
    megatron = config.megatron
    narrow, copies, *rest = ON_HOST
    ways = []
    kept = {megatron.optimizer.get(name) for name in ("exp_avg_dtype", "exp_avg_sq_dtype")}
    if megatron.use_distributed_optimizer and kept != {"bf16"}:
        ways.append(narrow)
    if config.checkpoint.async_save:
        ways.append(copies)
    if (megatron.optimizer_cpu_offload or megatron.offload_optimizer_states) and not (
        config.cluster.colocate and config.cluster.offload_train
    ):
        flag = OFFLOAD_ALL if megatron.optimizer_cpu_offload else OFFLOAD_MOMENTS
        ways.append(f"without {flag}, if the GPUs have room for the states")
    return [*ways, *rest]


def remedies(
    config: Config, phase: str, lengths: Sequence[int], *, whole_step: bool, on_gpu: bool
) -> list[str]:
    """List changes of flags, most useful first, with the values of this run.

    Args:
        phase: phase of the update in which an allocation failed.
        lengths: tokens of the samples of the rank's largest micro-batch; empty if unknown.
        whole_step: this micro-batch is the rank's whole part of an optimizer step.
    """
    training = phase == "forward_backward"
    scoring = phase in ("log_probs", "ref_log_probs") or training
    ways: list[str] = []
    if training:
        ways += _recompute(config)
    if scoring:
        ways += _smaller_micro_batches(config, lengths)
        ways += _parallel(config)
    ways += _states(config, on_gpu) if not scoring else _moments_on_host(config, on_gpu)
    ways += _sharing(config, on_gpu)
    if scoring:
        ways += _smaller_blocks_of_logits(config, on_gpu)
        ways += _smaller_steps(config, whole_step and len(lengths) > 1)
    if not on_gpu:
        ways.append(
            "other processes of this host compete for the same memory: engines, Ray's object "
            "store, page cache"
        )
    return ways


def _smaller_blocks_of_logits(config: Config, on_gpu: bool) -> list[str]:
    """Suggest so few rows that a block, which has more columns with fewer rows, is limited by the
    size of the vocabulary (`slime.algorithms.logprobs`)."""
    rows = config.train.log_probs_chunk_size
    if not on_gpu or 0 < rows <= _MIN_CHUNK_ROWS:
        return []
    return [
        f"--log-probs-chunk-size {rows} → {_MIN_CHUNK_ROWS}: blocks of logits take about 0.1 GB "
        "instead of up to 0.4"
    ]


def _smaller_steps(config: Config, of_one_micro_batch: bool) -> list[str]:
    """Suggest a smaller global batch, which lowers the peak only if it shrinks micro-batches: their
    gradients are accumulated one after the other."""
    size = config.train.global_batch_size
    steps = config.train.num_steps_per_rollout
    if size % 2:
        return []
    change = (
        f"--global-batch-size {size} → {size // 2} (and --num-steps-per-rollout {steps} → "
        f"{steps * 2})"
    )
    if of_one_micro_batch:
        return [
            f"{change}: the largest micro-batch is all that this rank has of a step, and becomes "
            "half of it"
        ]
    return [
        f"{change}: lowers the peak only once a rank's part of a step is less than one micro-batch"
    ]


def _recompute(config: Config) -> list[str]:
    found = more_recompute(Recompute.of(config))
    if found is None:
        return []
    return [f"{found[0]}: keep one activation per layer, recompute the rest in the backward pass"]


def _smaller_micro_batches(config: Config, lengths: Sequence[int]) -> list[str]:
    train = config.train
    context = config.megatron.context_parallel_size
    single = lengths[0] if len(lengths) == 1 else None
    ways = []
    if single is not None:
        ways.append(
            f"the largest micro-batch is one sample of {single} tokens, which no batch size can "
            f"split: {wider_context_parallel(context)}, or shorter samples: "
            f"--rollout-max-response-len {config.rollout.rollout_max_response_len} → "
            f"{max(1, config.rollout.rollout_max_response_len * 3 // 4)}"
        )
    if cap := train.packed_tokens:
        start = -(-config.rollout.rollout_max_response_len // context)
        lower = max(1, min(cap * 3 // 4, start) if start < cap else cap * 3 // 4)
        if single is None or single <= cap * context:
            ways.insert(
                0,
                f"--max-tokens-per-gpu {cap} → {lower} (a safe start is rollout_max_response_len ÷ "
                f"context_parallel_size = {config.rollout.rollout_max_response_len} ÷ {context} = "
                f"{start})",
            )
    elif train.micro_batch_size > 1:
        ways.insert(
            0,
            f"--micro-batch-size {train.micro_batch_size} → {train.micro_batch_size // 2}, or "
            "pack by tokens: --use-dynamic-batch-size --max-tokens-per-gpu "
            f"{sum(lengths) // 2 if lengths else 4096}",
        )
    if train.seq_length is not None:
        ways.append(f"--seq-length {train.seq_length} → {max(2, train.seq_length * 3 // 4)}")
    return ways


def _parallel(config: Config) -> list[str]:
    megatron = config.megatron
    tensor = megatron.tensor_model_parallel_size
    if tensor > 1 and not megatron.sequence_parallel:
        return [
            f"{SEQUENCE_PARALLEL}: splits activations that each of the {tensor} tensor-parallel "
            "ranks holds whole"
        ]
    if tensor == 1:
        return [f"{wider_tensor_parallel(1)} {SEQUENCE_PARALLEL}, if there are more GPUs"]
    return []


def _moments_on_host(config: Config, on_gpu: bool) -> list[str]:
    """Suggest offloading the moments; without a GPU they are in host memory anyway."""
    megatron = config.megatron
    if not on_gpu or megatron.offload_optimizer_states or megatron.optimizer_cpu_offload:
        return []
    return [
        f"{OFFLOAD_MOMENTS}: Adam's moments live in host memory, 8 bytes per parameter and "
        f"replica less here; {OFFLOAD_ALL}: master weights too, 12 bytes less"
    ]


def _states(config: Config, on_gpu: bool) -> list[str]:
    """Suggest less memory for weights, gradients and optimizer states, at any batch size."""
    megatron = config.megatron
    ways = _moments_on_host(config, on_gpu)
    if not megatron.use_distributed_optimizer:
        ways.append(f"{SHARD_STATES}: states are sharded over the data-parallel ranks")
    ways.append(
        f"{wider_tensor_parallel(megatron.tensor_model_parallel_size)}, or more trainer GPUs"
    )
    return ways


def _sharing(config: Config, on_gpu: bool) -> list[str]:
    """Suggest less memory for colocated engines."""
    if not (config.cluster.colocate and on_gpu) or config.debug.debug_train_only:
        return []
    fraction = config.engine.sglang.get("mem_fraction_static")
    change = "--sglang-mem-fraction-static 0.4 (now SGLang's own choice)"
    if isinstance(fraction, float):
        change = other_fraction(fraction, round(max(0.1, fraction - 0.2), 1))
    if config.cluster.offload_rollout:
        return [f"{change}: if the sleeping engines hold more of this GPU than their CUDA contexts"]
    return [f"{OFFLOAD_ROLLOUT}: the engines free their part of this GPU during training", change]
