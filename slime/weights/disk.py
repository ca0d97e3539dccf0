"""Transport through a directory that trainer and engines share: slow, but it works everywhere.

disk_dir/weight_v000007/ (a Hugging Face directory) ── /update_weights_from_disk ──► engines
"""

from __future__ import annotations

import re
import shutil
from dataclasses import dataclass
from pathlib import Path

import torch

from slime.checkpoints.hf_files import HfWriter
from slime.engines.fleet import EngineFleet
from slime.engines.wire.buckets import dtype_in
from slime.models import read_hf_config
from slime.models.quantised import Quantisation
from slime.weights.transport import NamedTensors, Observer, Transferred, Transport, deadline_for

_VERSION_DIR = re.compile(r"weight_v(\d{6,})")


@dataclass(eq=False)
class DiskTransport(Transport):
    """Writes each version as a Hugging Face directory and lets the engines read it. The last
    version remains, for engines that restart later.

    Args:
        fleet: the engines; they must see ``directory`` under the same path.
        directory: parent of the version directories.
        dtype: of the engines' floating-point weights.
        assets_from: directory with the config and tokenizer to copy.
        keep: do not remove earlier versions.
    """

    name = "disk"

    fleet: EngineFleet
    directory: Path
    dtype: torch.dtype
    assets_from: Path
    keep: bool = False

    def send(self, tensors: NamedTensors, version: int, observe: Observer) -> Transferred:
        target = self.directory / f"weight_v{version:06d}"
        num_tensors = 0
        quantised = Quantisation.read(read_hf_config(self.assets_from)) is not None
        with HfWriter(target, self.assets_from, quantised=quantised) as writer:
            for name, tensor in tensors:
                cast = tensor.to(dtype_in(self.dtype, name, tensor.dtype))
                observe(name, cast)
                writer.add(name, cast)
                num_tensors += 1
        body = {
            "model_path": str(target.resolve()),
            "weight_version": str(version),
            "flush_cache": False,
        }
        self.fleet.post("/update_weights_from_disk", body, deadline_for(writer.total_bytes))
        if not self.keep:
            self._remove_others(version)
        return Transferred(num_tensors, writer.total_bytes)

    def _remove_others(self, version: int) -> None:
        for entry in self.directory.iterdir():
            found = _VERSION_DIR.fullmatch(entry.name)
            if found and int(found.group(1)) != version:
                shutil.rmtree(entry, ignore_errors=True)
