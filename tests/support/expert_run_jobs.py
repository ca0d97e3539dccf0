"""What a trainer rank does in the tests of runs of experts."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from slime.engines.wire import expert_runs
from slime.weights.engine_check import SliceCheck
from slime.weights.source import ModelSource
from slime.weights.sync import WeightSync
from slime.weights.transport import EngineSlots
from tests.support.megatron_jobs import backend_of


@contextmanager
def _of_three() -> Iterator[None]:
    """Runs of three experts at most, whatever their size."""
    bounds = expert_runs.bounds
    expert_runs.bounds = lambda count, nbytes: bounds(count, 1, 3)
    try:
        yield
    finally:
        expert_runs.bounds = bounds


def compare_with_singles(info: Any, model: Path, layout: dict[str, Any]) -> dict[str, Any]:
    """Names of experts, or of their adapters, that are not the same in runs and one by one."""
    backend = backend_of(info, model, **layout)
    parts = backend.model_chunks, backend.hf_config
    for parameter in backend.model_chunks[0].parameters():
        parameter.data.uniform_(-1, 1)  # one side of an adapter begins with zeros
    with _of_three():
        singles = ModelSource(*parts, adapters=backend.adapters)
        runs = ModelSource(*parts, adapters=backend.adapters, in_runs=True)
        wanted = {name: tensor.clone() for name, tensor in singles.tensors()}
        found, lengths = {}, []
        for name, tensor in runs.tensors():
            run = expert_runs.ExpertRun.parse(name)
            lengths.append(1 if run is None else len(tensor))
            pairs = [(name, tensor)] if run is None else run.split(tensor)
            found.update({one: part.clone() for one, part in pairs})
    different = [
        name
        for name in sorted(wanted.keys() | found.keys())
        if name not in wanted or name not in found or not torch.equal(wanted[name], found[name])
    ]
    result = {"different": different, "several_in_a_run": max(lengths) > 1}
    return result | {
        "fewer": len(runs.names()) < len(singles.names()) and sum(lengths) == len(wanted)
    }


def push_in_runs(
    info: Any, model: Path, engines: Sequence[EngineSlots]
) -> tuple[Any, list[str], list[str]]:
    """Two receipts of pushes in runs, their names; and the names when the engines' runs are of no
    known form."""
    flags = {"expert_model_parallel_size": 2, "colocate": True, "check_weight_update_equal": True}
    backend = backend_of(
        info, model, rollout_engine="sglang", update_weight_buffer_size=20_000, **flags
    )
    parts = backend.config, backend.model_chunks, backend.hf_config
    with torch.no_grad():
        for chunk in backend.model_chunks:
            for parameter in chunk.parameters():
                parameter.mul_(2)
    with _of_three():
        sync = WeightSync(*parts, rank=info.rank, world_size=info.world_size)
        sync.connect(engines)
        receipts = [sync.push() for _ in range(2)]
        names = sync._names
        is_whole = SliceCheck._is_whole
        SliceCheck._is_whole = lambda check, name: expert_runs.ExpertRun.parse(name) is None  # type: ignore[method-assign]
        try:
            sync.connect(engines)
            sync.push()
        finally:
            SliceCheck._is_whole = is_whole  # type: ignore[method-assign]
        fallback = sync._names
        sync.close()
    return receipts, names, fallback
