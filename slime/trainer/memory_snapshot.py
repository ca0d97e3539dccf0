"""Records allocations of GPU memory, and writes them for https://pytorch.org/memory_viz."""

from __future__ import annotations

from pathlib import Path

from slime.config.config import Config
from slime.log import get_logger

logger = get_logger(__name__)

#: Number of newest allocations and frees that are kept.
_ENTRIES = 200_000


class MemorySnapshot:
    """Records the allocations of one rank, from its construction on.

    The record is written after --memory-snapshot-num-steps steps, by default at the end of the run;
    and also if memory runs out.
    """

    def __init__(self, config: Config, rank: int) -> None:
        import torch

        self._left = config.debug.memory_snapshot_num_steps
        self._folder = Path(config.debug.memory_snapshot_dir)
        self._rank = rank
        self._is_recording = torch.cuda.is_available()
        if not self._is_recording:
            logger.warning("--record-memory-history records nothing: this rank has no GPU")
            return
        torch.cuda.memory._record_memory_history(max_entries=_ENTRIES)
        torch._C._cuda_attach_out_of_memory_observer(  # type: ignore[attr-defined]
            lambda *_: self._write("out_of_memory")  # device, sizes: the error names them
        )

    def step_ended(self) -> None:
        """Count a step; after the last one to record, write the record."""
        if self._left is not None:
            self._left -= 1
            if self._left == 0:
                self.close()

    def close(self) -> None:
        """Write the record and stop recording; a second call does nothing."""
        if not self._is_recording:
            return
        import torch

        self._write("memory_snapshot")
        self._is_recording = False
        torch.cuda.memory._record_memory_history(enabled=None)

    def _write(self, name: str) -> None:
        import torch

        if not self._is_recording:
            return
        self._folder.mkdir(parents=True, exist_ok=True)
        path = self._folder / f"{name}_rank{self._rank}.pickle"
        torch.cuda.memory._dump_snapshot(str(path))
        logger.info("allocations of GPU memory: %s", path)
