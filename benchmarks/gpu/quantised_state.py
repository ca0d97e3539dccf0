"""What an engine's process computes with, for `benchmarks.gpu.quantised`: runs inside it, as a
custom weight loader."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from slime.engines.fleet import EngineFleet
from slime.engines.wire.buckets import word_fingerprint
from slime.weights.engine_check import serialized

#: `report`, as SGLang's ``--custom-weight-loader`` takes it.
STATE = "benchmarks.gpu.quantised_state.report"


def report(model: Any, named_tensors: list[tuple[str, torch.Tensor]]) -> None:
    """Fingerprints of all parameters, under SGLang's names and in the form that its kernels take,
    into a file.

    Args:
        named_tensors: the path of the file without this rank's number, in a uint8 tensor.
    """
    [(_, raw)] = named_tensors
    rank = dist.get_rank() if dist.is_initialized() else 0
    path = Path(f"{raw.cpu().numpy().tobytes().decode()}.{rank}")
    try:
        # scales of the cache are no weights: nothing brings them, and a reset of all weights
        # changes them
        held = {
            name: tensor
            for name, tensor in model.named_parameters()
            if not name.endswith((".k_scale", ".v_scale"))
        }
        found = {name: word_fingerprint(tensor) for name, tensor in held.items()}
    except Exception as error:  # must not reach the engine's scheduler, which would die of it
        found = {"error": repr(error)}
    new = path.with_name(f"new-{path.name}")
    new.write_text(json.dumps(found))
    new.rename(path)


def state_of(fleet: EngineFleet, folder: Path, ranks: int, seconds: float) -> dict[str, str]:
    """What a server's processes hold: parameter, with the rank's number → fingerprint.

    Args:
        fleet: one server, which was started with `report` as a custom weight loader.
        folder: for files that go from there to here.
    Raises:
        RuntimeError: a process could not say it.
    """
    path = folder / f"state-{time.monotonic_ns()}"
    payload = serialized(torch.frombuffer(bytearray(str(path).encode()), dtype=torch.uint8))
    body = {
        "serialized_named_tensors": [payload] * ranks,
        "load_format": STATE,
        "flush_cache": False,
    }
    fleet.post("/update_weights_from_tensor", body, seconds)
    held: dict[str, str] = {}
    for rank in range(ranks):
        file = Path(f"{path}.{rank}")
        found = json.loads(file.read_text())
        file.unlink()
        if "error" in found:
            raise RuntimeError(f"the engine's parameters could not be read: {found['error']}")
        held |= {f"{name} of rank {rank}": value for name, value in found.items()}
    return held
