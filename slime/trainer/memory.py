"""Peak memory of each phase of an update, and the error when memory runs out.

    with memory.phase("forward_backward"):      records perf/forward_backward_peak_memory_gb; an
        ...                                     allocation that fails inside becomes an
                                                `OutOfMemory` with peaks, batch and remedies

On a GPU the peak is the most that torch's allocator had allocated; without one it is the peak
resident size of the process.
"""

from __future__ import annotations

import os
import re
import resource
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import psutil
import torch

from slime.config.config import Config
from slime.errors import UserError, first_few
from slime.memory.remedies import host_remedies, remedies
from slime.models.layout_rules import critic_flags
from slime.processes.footprint import own_bytes
from slime.samples.batch import StepPlan
from slime.trainer.ranks import Ranks

_GB = 1e9
_STATUS = Path("/proc/self/status")
_CLEAR_REFS = Path("/proc/self/clear_refs")

#: Messages of libraries that do not raise torch.OutOfMemoryError or MemoryError.
_WORDS = re.compile(
    r"out of memory|can't allocate memory|cannot allocate memory"
    r"|CUBLAS_STATUS_ALLOC_FAILED|CUDNN_STATUS_ALLOC_FAILED",
    re.IGNORECASE,
)


class OutOfMemory(UserError):
    """An allocation failed in a trainer rank. The run cannot continue: other ranks wait for it."""


@dataclass(frozen=True)
class LargestMicroBatch:
    """The micro-batch with the most tokens of a rank's rollout, during which memory most likely ran
    out.

    Attributes:
        lengths: tokens of its samples, prompt and response, longest first.
        sample_indices: of these samples, in the same order.
        whole_step: whether it is this rank's only micro-batch of its optimizer step.
    """

    lengths: list[int]
    sample_indices: list[int]
    whole_step: bool = False

    @property
    def num_tokens(self) -> int:
        return sum(self.lengths)

    @staticmethod
    def of(
        steps: Sequence[StepPlan], totals: Sequence[int], indices: Sequence[int]
    ) -> LargestMicroBatch:
        """Find the largest micro-batch of the steps; ``totals`` and ``indices`` have an entry for
        each sample."""
        found = [
            (samples, len(step.micro_batches) == 1)
            for step in steps
            for samples in step.micro_batches
        ]
        largest, whole = max(
            found, key=lambda one: sum(totals[i] for i in one[0]), default=([], False)
        )
        order = sorted(largest, key=lambda i: -totals[i])
        return LargestMicroBatch([totals[i] for i in order], [indices[i] for i in order], whole)

    def __str__(self) -> str:
        count = len(self.lengths)
        plural = "sample" if count == 1 else "samples"
        return (
            f"{self.num_tokens} tokens in {count} {plural} (lengths {first_few(self.lengths, 8)}; "
            f"index {first_few(self.sample_indices, 8)})"
        )


class PhaseMemory:
    """Peak memory of this process in bytes, by phase.

    Args:
        device: the trainer's.
        largest: the largest micro-batch of the update; None outside an update.
        of_critic: whether this is a critic with its own layout, which has its own flags.

    Example:
        >>> meter = PhaseMemory(config, torch.device("cpu"))  # doctest: +SKIP
        >>> with meter.phase("log_probs"):  # doctest: +SKIP
        ...     pass
        >>> meter.peaks  # doctest: +SKIP
        {'log_probs': 1073741824.0}
    """

    def __init__(
        self,
        config: Config,
        device: torch.device,
        largest: LargestMicroBatch | None = None,
        *,
        of_critic: bool = False,
    ) -> None:
        self.config = config
        self.device = device
        self.largest = largest
        self.of_critic = of_critic
        self.peaks: dict[str, float] = {}

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Record the peak inside the block; of several blocks with the same name, the largest.

        Raises:
            OutOfMemory: an allocation failed inside, on the device or on the host.
        """
        _reset_peak(self.device)
        try:
            yield
        except (MemoryError, RuntimeError, UserError) as error:
            # the error of a user's function wraps the original one
            cause = (error.__cause__ or error) if isinstance(error, UserError) else error
            if not is_out_of_memory(cause):
                raise
            self._note(name)
            raise out_of_memory(cause, name, self) from error
        self._note(name)

    def _note(self, name: str) -> None:
        self.peaks[name] = max(self.peaks.get(name, 0.0), _peak(self.device))

    def metrics(self, ranks: Ranks) -> dict[str, float]:
        """Return ``perf/<phase>_peak_memory_gb`` and the memory held now, as the largest value of
        all ranks. Collective."""
        own = _held(self.device)
        own |= {f"perf/{name}_peak_memory_gb": peak / _GB for name, peak in self.peaks.items()}
        values = torch.tensor(list(own.values()), dtype=torch.float64, device=self.device)
        return dict(zip(own, ranks.max_over_all(values).tolist()))


def _held(device: torch.device) -> dict[str, float]:
    """Return ``perf/trainer_memory_gb`` of the host, and on a GPU the memory of tensors; both
    should be the same at every step."""
    found = {"perf/trainer_memory_gb": own_bytes(os.getpid()) / _GB}
    if device.type == "cuda":
        found["perf/trainer_gpu_memory_gb"] = torch.cuda.memory_allocated(device) / _GB
    return found


def is_out_of_memory(error: BaseException) -> bool:
    """Tell whether the error reports a failed allocation, in any library.

    Example:
        >>> is_out_of_memory(MemoryError()), is_out_of_memory(RuntimeError("shape mismatch"))
        (True, False)
    """
    if isinstance(error, MemoryError | torch.OutOfMemoryError):
        return True
    return isinstance(error, RuntimeError) and _WORDS.search(str(error)) is not None


def out_of_memory(error: BaseException, phase: str, memory: PhaseMemory) -> OutOfMemory:
    """Build the error, with peaks by phase, the largest micro-batch, and remedies with this run's
    values."""
    peaks = ", ".join(
        f"{name} {peak / _GB:.2f} GB" + (" (here)" if name == phase else "")
        for name, peak in memory.peaks.items()
    )
    what = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
    lines = [what, f"peak memory by phase: {peaks}", _device_use(memory.device)]
    largest = memory.largest
    if largest is not None:
        lines.append(f"largest micro-batch of this rank: {largest}")
    on_gpu = memory.device.type == "cuda"
    fills_gpu = on_gpu and not isinstance(error, MemoryError)
    where = "GPU memory" if fills_gpu else "host memory"
    lengths = largest.lengths if largest is not None else []
    whole = largest is not None and largest.whole_step
    if on_gpu and not fills_gpu:
        ways = host_remedies(memory.config)
    else:
        ways = remedies(memory.config, phase, lengths, whole_step=whole, on_gpu=on_gpu)
    if memory.of_critic:
        ways = [critic_flags(way) for way in ways]
    return OutOfMemory(
        f"out of {where} in {phase}",
        why="\n       ".join(line for line in lines if line),
        fix="one or more of these, the first ones cost least:\n       " + "\n       ".join(ways),
    )


def _device_use(device: torch.device) -> str:
    if device.type != "cuda":
        return f"resident memory of this process: {psutil.Process().memory_info().rss / _GB:.2f} GB"
    free, total = torch.cuda.mem_get_info(device)
    reserved = torch.cuda.memory_reserved(device)
    used = torch.cuda.memory_allocated(device)
    others = max(0, total - free - reserved)
    return (
        f"GPU of {total / _GB:.1f} GB: {used / _GB:.2f} GB in tensors and "
        f"{(reserved - used) / _GB:.2f} GB cached by this process, {others / _GB:.2f} GB held by "
        f"others, {free / _GB:.2f} GB free"
    )


# -- measurements ----------------------------------------------------------------------------------


def _reset_peak(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
        return
    try:
        _CLEAR_REFS.write_text("5")  # resets the peak of resident memory
    except OSError:  # a container may forbid it; the peak is then that of the process so far
        return


def _peak(device: torch.device) -> float:
    """Return the peak in bytes."""
    if device.type == "cuda":
        return float(torch.cuda.max_memory_allocated(device))
    status = _STATUS.read_text() if _STATUS.exists() else ""
    found = re.search(r"^VmHWM:\s+(\d+) kB", status, re.MULTILINE)
    kilobytes = found.group(1) if found else resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return float(kilobytes) * 1024
