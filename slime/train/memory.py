"""Peak memory of each phase of an update, and what to say when memory runs out.

    with memory.phase("forward_backward"):      records perf/forward_backward_peak_memory_gb; an allocation that fails
        ...                                     inside becomes an `OutOfMemory` with peaks, batch and remedies

On a GPU the peak is what torch's allocator had handed out at most; without one it is the resident size of the process.
"""

from __future__ import annotations

import re
import resource
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import psutil
import torch

from slime.config import Config
from slime.errors import UserError
from slime.samples.batch import TrainBatch

_GB = 1e9
_FEW_ROWS = 128  # of logits: fewer make slow products
_STATUS, _CLEAR_REFS = Path("/proc/self/status"), Path("/proc/self/clear_refs")

#: What libraries write instead of raising torch.OutOfMemoryError or MemoryError.
_WORDS = re.compile(
    r"out of memory|CUBLAS_STATUS_ALLOC_FAILED|can't allocate memory|CUDNN_STATUS_ALLOC_FAILED|cannot allocate memory",
    re.IGNORECASE,
)


class OutOfMemory(UserError):
    """An allocation failed in a trainer rank. The run cannot go on: other ranks wait for this one."""


@dataclass(frozen=True)
class LargestMicroBatch:
    """The micro-batch with the most tokens of a rank's rollout; the likeliest to have been under way.

    Attributes:
        lengths: tokens of its samples, prompt and response, longest first.
        sample_indices: of these samples, in the same order.
        whole_step: it is all that this rank has of its optimizer step.
    """

    lengths: list[int]
    sample_indices: list[int]
    whole_step: bool = False

    @property
    def num_tokens(self) -> int:
        return sum(self.lengths)

    @staticmethod
    def of(batch: TrainBatch) -> LargestMicroBatch:
        totals = batch.total_lengths
        found = [(samples, len(step.micro_batches) == 1) for step in batch.steps for samples in step.micro_batches]
        largest, whole = max(found, key=lambda one: sum(totals[i] for i in one[0]), default=([], False))
        order = sorted(largest, key=lambda i: -totals[i])
        return LargestMicroBatch([totals[i] for i in order], [batch.sample_indices[i] for i in order], whole)

    def __str__(self) -> str:
        count = len(self.lengths)
        lengths = ", ".join(map(str, self.lengths[:8])) + (", …" if count > 8 else "")
        named = ", ".join(map(str, self.sample_indices[:8])) + (", …" if count > 8 else "")
        plural = "sample" if count == 1 else "samples"
        return f"{self.num_tokens} tokens in {count} {plural} (lengths {lengths}; index {named})"


class PhaseMemory:
    """Peak memory in bytes by phase, of this process.

    Args:
        device: the trainer's.
        batch: what is trained on; None outside of an update.

    Example:
        >>> meter = PhaseMemory(config, torch.device("cpu"))  # doctest: +SKIP
        >>> with meter.phase("log_probs"):  # doctest: +SKIP
        ...     pass
        >>> meter.peaks  # doctest: +SKIP
        {'log_probs': 1073741824.0}
    """

    def __init__(self, config: Config, device: torch.device, batch: TrainBatch | None = None) -> None:
        self.config, self.device, self.batch = config, device, batch
        self.peaks: dict[str, float] = {}

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Record the peak inside the block, the largest of several blocks of one name.

        Raises:
            OutOfMemory: an allocation failed inside, on the device or on the host.
        """
        _reset_peak(self.device)
        try:
            yield
        except (MemoryError, RuntimeError) as error:
            if not is_out_of_memory(error):
                raise
            self._note(name)
            raise out_of_memory(error, name, self) from error
        self._note(name)

    def _note(self, name: str) -> None:
        self.peaks[name] = max(self.peaks.get(name, 0.0), _peak(self.device))

    def metrics(self, peaks: list[float] | None = None) -> dict[str, float]:
        """``perf/<phase>_peak_memory_gb``, of ``peaks`` in the order of ``self.peaks`` where given."""
        values = list(self.peaks.values()) if peaks is None else peaks
        return {f"perf/{name}_peak_memory_gb": value / _GB for name, value in zip(self.peaks, values)}


def is_out_of_memory(error: BaseException) -> bool:
    """Did an allocation fail, whichever library says so?

    Example:
        >>> is_out_of_memory(MemoryError()), is_out_of_memory(RuntimeError("shape mismatch"))
        (True, False)
    """
    if isinstance(error, MemoryError | torch.OutOfMemoryError):
        return True
    return isinstance(error, RuntimeError) and _WORDS.search(str(error)) is not None


def out_of_memory(error: BaseException, phase: str, memory: PhaseMemory) -> OutOfMemory:
    """The report: peaks by phase, the largest micro-batch, remedies with this run's values."""
    config = memory.config
    peaks = ", ".join(
        f"{name} {peak / _GB:.2f} GB" + (" (here)" if name == phase else "") for name, peak in memory.peaks.items()
    )
    what = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
    lines = [what, f"peak memory by phase: {peaks}", _device_use(memory.device)]
    largest = None
    if memory.batch is not None:
        largest = LargestMicroBatch.of(memory.batch)
        lines.append(f"largest micro-batch of this rank: {largest}")
    where = "GPU memory" if memory.device.type == "cuda" and not isinstance(error, MemoryError) else "host memory"
    ways = remedies(config, phase, largest, on_gpu=memory.device.type == "cuda")
    return OutOfMemory(
        f"out of {where} in {phase}",
        why="\n       ".join(line for line in lines if line),
        fix="one or more of these, the first ones cost least:\n       " + "\n       ".join(ways),
    )


def remedies(config: Config, phase: str, largest: LargestMicroBatch | None, *, on_gpu: bool) -> list[str]:
    """What to change, most useful first, with the values of this run."""
    training = phase == "forward_backward"
    scoring = phase in ("log_probs", "ref_log_probs") or training
    ways: list[str] = []
    if training:
        ways += _recompute(config)
    if scoring:
        ways += _smaller_micro_batches(config, largest)
        ways += _parallel(config)
    ways += _states(config, on_gpu) if not scoring else _moments_on_host(config, on_gpu)
    ways += _sharing(config, on_gpu)
    if scoring:
        ways += _smaller_blocks_of_logits(config, on_gpu)
        ways += _smaller_steps(config, largest)
    if not on_gpu:
        ways.append("other processes of this host compete for the same memory: engines, Ray's object store, page cache")
    return ways


def _smaller_blocks_of_logits(config: Config, on_gpu: bool) -> list[str]:
    """Fewer rows make blocks of more columns (`slime.algorithms.logprobs`), until these are the whole vocabulary."""
    rows = config.train.log_probs_chunk_size
    if not on_gpu or 0 < rows <= _FEW_ROWS:
        return []
    return [f"--log-probs-chunk-size {rows} → {_FEW_ROWS}: blocks of logits take 0.4 GB at most, and then about 0.1"]


def _smaller_steps(config: Config, largest: LargestMicroBatch | None) -> list[str]:
    """Gradients of micro-batches are added up one after the other: how many a step has does not matter to the peak."""
    size, steps = config.train.global_batch_size, config.train.num_steps_per_rollout
    if size % 2:
        return []
    change = f"--global-batch-size {size} → {size // 2} (and --num-steps-per-rollout {steps} → {steps * 2})"
    if largest is not None and largest.whole_step and len(largest.lengths) > 1:
        return [f"{change}: the largest micro-batch is all that this rank has of a step, and becomes half of it"]
    return [f"{change}: lowers the peak only once a rank's part of a step is less than one micro-batch"]


def _recompute(config: Config) -> list[str]:
    megatron = config.megatron
    if megatron.recompute_granularity is None:
        return ["--recompute-activations: keep one activation per layer, compute the rest again going back"]
    if megatron.recompute_granularity == "selective":
        return ["--recompute-granularity selective → full --recompute-method uniform --recompute-num-layers 1"]
    if megatron.recompute_method == "block":
        return [f"--recompute-method block (of {megatron.recompute_num_layers} layers) → uniform: all layers"]
    return []


def _smaller_micro_batches(config: Config, largest: LargestMicroBatch | None) -> list[str]:
    train, context = config.train, config.megatron.context_parallel_size
    single = largest if largest is not None and len(largest.lengths) == 1 else None
    ways = []
    if single is not None:
        ways.append(
            f"the largest micro-batch is one sample of {single.num_tokens} tokens, which no batch size can split: "
            f"--context-parallel-size {context} → {2 * context}, or shorter samples: --rollout-max-response-len "
            f"{config.rollout.rollout_max_response_len} → {max(1, config.rollout.rollout_max_response_len * 3 // 4)}"
        )
    if train.use_dynamic_batch_size and train.max_tokens_per_gpu:
        cap = train.max_tokens_per_gpu
        start = -(-config.rollout.rollout_max_response_len // context)
        lower = max(1, min(cap * 3 // 4, start) if start < cap else cap * 3 // 4)
        if single is None or single.num_tokens <= cap * context:
            ways.insert(
                0,
                f"--max-tokens-per-gpu {cap} → {lower} (a safe start is rollout_max_response_len ÷ "
                f"context_parallel_size = {config.rollout.rollout_max_response_len} ÷ {context} = {start})",
            )
    elif train.micro_batch_size > 1:
        ways.insert(
            0,
            f"--micro-batch-size {train.micro_batch_size} → {train.micro_batch_size // 2}, or pack by tokens: "
            f"--use-dynamic-batch-size --max-tokens-per-gpu {largest.num_tokens // 2 if largest else 4096}",
        )
    if train.seq_length is not None:
        ways.append(f"--seq-length {train.seq_length} → {max(2, train.seq_length * 3 // 4)}")
    return ways


def _parallel(config: Config) -> list[str]:
    megatron = config.megatron
    tensor = megatron.tensor_model_parallel_size
    if tensor > 1 and not megatron.sequence_parallel:
        return [f"--sequence-parallel: splits over the {tensor} tensor-parallel ranks what each of them holds whole"]
    if tensor == 1:
        return ["--tensor-model-parallel-size 1 → 2 --sequence-parallel, with GPUs to spare"]
    return []


def _moments_on_host(config: Config, on_gpu: bool) -> list[str]:
    """Without a GPU they are there anyway."""
    megatron = config.megatron
    if not on_gpu or megatron.offload_optimizer_states or megatron.optimizer_cpu_offload:
        return []
    return [
        "--offload-optimizer-states: Adam's moments live in host memory, 8 bytes per parameter and replica less here"
    ]


def _states(config: Config, on_gpu: bool) -> list[str]:
    """Weights, gradients and optimizer states; what the batch is does not matter to them."""
    megatron = config.megatron
    ways = _moments_on_host(config, on_gpu)
    if not megatron.use_distributed_optimizer:
        ways.append("remove --no-use-distributed-optimizer: states are sharded over the data-parallel ranks")
    tensor = megatron.tensor_model_parallel_size
    ways.append(f"--tensor-model-parallel-size {tensor} → {2 * tensor}, or more trainer GPUs")
    return ways


def _sharing(config: Config, on_gpu: bool) -> list[str]:
    """Colocated engines hold a part of the same GPU."""
    if not (config.cluster.colocate and on_gpu) or config.debug.debug_train_only:
        return []
    fraction = config.engine.sglang.get("mem_fraction_static")
    change = (
        f"--sglang-mem-fraction-static {fraction} → {max(0.1, fraction - 0.2):.1f}"
        if isinstance(fraction, float)
        else "--sglang-mem-fraction-static 0.4 (now SGLang's own choice)"
    )
    if config.cluster.offload_rollout:
        return [f"{change}: if the engines, which sleep now, hold more of this GPU than their CUDA contexts"]
    return ["--offload-rollout: the engines give their part of this GPU away meanwhile", change]


def _device_use(device: torch.device) -> str:
    if device.type != "cuda":
        return f"resident memory of this process: {psutil.Process().memory_info().rss / _GB:.2f} GB"
    free, total = torch.cuda.mem_get_info(device)
    held = torch.cuda.memory_reserved(device)
    used = torch.cuda.memory_allocated(device)
    others = max(0, total - free - held)
    return (
        f"GPU of {total / _GB:.1f} GB: {used / _GB:.2f} GB in tensors and {(held - used) / _GB:.2f} GB cached by this "
        f"process, {others / _GB:.2f} GB held by others, {free / _GB:.2f} GB free"
    )


# -- where the numbers come from -------------------------------------------------------------------------------------


def _reset_peak(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
        return
    try:
        _CLEAR_REFS.write_text("5")  # the high-water mark of resident memory starts again
    except OSError:  # a container may forbid it; then the peak is that of the process so far
        return


def _peak(device: torch.device) -> float:
    """Bytes."""
    if device.type == "cuda":
        return float(torch.cuda.max_memory_allocated(device))
    found = re.search(r"^VmHWM:\s+(\d+) kB", _STATUS.read_text(), re.MULTILINE) if _STATUS.exists() else None
    kilobytes = found.group(1) if found else resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return float(kilobytes) * 1024
