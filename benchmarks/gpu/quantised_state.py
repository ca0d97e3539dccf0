"""What an engine's process computes with, for `benchmarks.gpu.quantised`: runs inside it, as a custom weight loader."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch

from slime.engines.wire.buckets import word_fingerprint


def report(model: Any, named_tensors: list[tuple[str, torch.Tensor]]) -> None:
    """Fingerprints of all parameters, under SGLang's names and in the form that its kernels take, into a file.

    Args:
        named_tensors: the path of the file, in a uint8 tensor.
    """
    [(_, raw)] = named_tensors
    path = Path(raw.cpu().numpy().tobytes().decode())
    try:
        # scales of the cache are no weights: nothing brings them, and a reset of all weights changes them
        held = {
            name: tensor for name, tensor in model.named_parameters() if not name.endswith((".k_scale", ".v_scale"))
        }
        found = {name: word_fingerprint(tensor) for name, tensor in held.items()}
    except Exception as error:  # must not reach the engine's scheduler, which would die of it
        found = {"error": repr(error)}
    path.with_suffix(".new").write_text(json.dumps(found))
    path.with_suffix(".new").rename(path)
