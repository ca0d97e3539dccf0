"""Derive --max-tokens-per-gpu from the memory plan if the user left it out."""

from __future__ import annotations

from dataclasses import replace

from slime.config.config import Config
from slime.memory.hardware import DeviceMemory, device_memory, is_on_gpu
from slime.memory.plan import MemoryPlan, gb
from slime.placement import joined_cluster

#: Upper bounds of a derived limit: so many tokens keep a GPU busy, and a CPU gains little beyond
#: 1,024 (docs/performance.md, "Micro-batches").
LARGEST_ON_GPU = 16384
LARGEST_ON_CPU = 4096
SMALLEST = 512

#: Fraction of a device that the chosen plan may fill, as the plan is an estimate and the lengths of
#: prompts may be unknown.
_SHARE = 0.9


def with_token_limit(config: Config, device: DeviceMemory | None = None) -> Config:
    """Return the configuration with --max-tokens-per-gpu set if micro-batches are packed and the
    flag was left out.

    The limit is a power of two, so that small changes of free memory do not change a run's
    micro-batches.

    Args:
        device: memory of a trainer rank's device; default: from the flags and this host.
    Raises:
        UserError: the model's family is unknown.
    """
    if not config.train.use_dynamic_batch_size or config.train.max_tokens_per_gpu is not None:
        return config
    if config.debug.debug_rollout_only:
        return config
    if device is None and joined_cluster(config) is not None and not is_on_gpu(config):
        return _with(config, LARGEST_ON_CPU, "the memory of the cluster's nodes is not known here")
    device = device or device_memory(config)
    tokens = LARGEST_ON_GPU if device.on_gpu else LARGEST_ON_CPU
    while tokens > SMALLEST and not _fits(_with(config, tokens, ""), device):
        tokens //= 2
    kind = "GPU" if device.on_gpu else "host"
    return _with(
        config, tokens, f"the memory plan: {gb(device.nbytes)} GB of the {kind} ({device.source})"
    )


def packing_line(config: Config) -> str:
    """Describe in one line how samples become micro-batches."""
    train = config.train
    if train.packed_tokens is None:
        return (
            f"micro-batches: {train.micro_batch_size} samples each (--micro-batch-size), not packed"
        )
    origin = config.origins.get("max_tokens_per_gpu", "").removeprefix("derived: ")
    return (
        f"micro-batches: packed up to {train.packed_tokens:,} tokens per GPU "
        f"(--max-tokens-per-gpu: {origin})"
    )


def _with(config: Config, tokens: int, formula: str) -> Config:
    train = replace(config.train, max_tokens_per_gpu=tokens)
    return replace(
        config, train=train, origins=config.origins | {"max_tokens_per_gpu": f"derived: {formula}"}
    )


def _fits(config: Config, device: DeviceMemory) -> bool:
    """Tell whether the trainer's phases fit; the other phases do not depend on the limit."""
    phases = [
        one
        for one in MemoryPlan.of(config, device).phases
        if one.name in ("log-probs", "critic", "train", "all")
    ]
    return all(phase.total <= _SHARE * device.nbytes for phase in phases)
