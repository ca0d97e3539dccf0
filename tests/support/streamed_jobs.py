"""What a trainer rank does in the tests of streamed optimizer states: steps with gradients that
depend on parameters alone, and everything that the optimizer holds afterwards."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from slime.checkpoints.optimizer_state import held_state, parts
from tests.support.megatron_jobs import backend_of, parameters

#: Elements of a bucket: smaller than most parameters of the tiny models.
SMALL_BUCKET = 192


def make_step(backend: Any, seed: int, *, poison: bool = False) -> tuple[float, bool]:
    """Do one optimizer step; returns (gradient norm, was it applied)."""
    from slime.trainer.megatron.optimizer import apply_gradients

    for chunk in backend.model_chunks:
        chunk.zero_grad_buffer()
        for parameter in chunk.parameters():
            if parameter.requires_grad:
                gradient = torch.sin(parameter.detach().float() * 1000 + seed)
                parameter.main_grad.copy_(gradient)
                if poison:
                    parameter.main_grad.view(-1)[0] = float("nan")
    outcome = apply_gradients(backend.optimizer, backend.config.megatron.clip_grad)
    if outcome.applied:
        backend.scheduler.step(6)
    return outcome.grad_norm, outcome.applied


def all_states(backend: Any) -> list[tuple[str, torch.Tensor]]:
    """Copies of what the optimizer holds for this rank's shards, with step counts, in order."""
    found = []
    for part in parts(backend.optimizer):
        for run in held_state(part):
            found += [(name, tensor.clone()) for name, tensor in sorted(run.tensors.items())]
        for state in part.optimizer.state.values():
            if "step" in state:
                found.append(("step", state["step"].clone()))
    return found


def train(
    info: Any,
    model: Path,
    flags: dict[str, Any],
    steps: int = 4,
    first: int = 0,
    skipped: int | None = None,
) -> dict[str, Any]:
    """Steps ``first`` to ``first + steps``; a checkpoint afterwards with ``save``."""
    from slime.trainer.megatron.streamed import StreamedStates

    before = StreamedStates.bucket
    StreamedStates.bucket = SMALL_BUCKET
    try:
        backend = backend_of(info, model, **flags)
        outcomes = [
            make_step(backend, number, poison=number == skipped)
            for number in range(first, first + steps)
        ]
        if "save" in flags:
            backend.save(first + steps)
    finally:
        StreamedStates.bucket = before
    rates = [group["lr"] for group in backend.optimizer.param_groups]
    return {
        "outcomes": outcomes,
        "weights": parameters(backend),
        "states": all_states(backend),
        "rates": rates,
    }
