"""Host memory of the run's engine servers, as a metric: asked for at one step and told at the next,
so that nobody waits."""

from __future__ import annotations

import contextlib
from collections.abc import Collection

import ray

from slime.cluster.engine_actor import EngineHandle


class EnginesMemory:
    """Args: handles: of all servers; one may hang, or be gone, which is for others to notice."""

    def __init__(self, handles: Collection[EngineHandle]) -> None:
        self._handles = handles
        self._asked: dict[EngineHandle, ray.ObjectRef] = {}
        self._told: dict[EngineHandle, float] = {}

    def metrics(self) -> dict[str, float]:
        """``perf/engine_memory_gb`` of the one that holds most, as far as any has told."""
        for handle in self._handles:
            ref = self._asked.get(handle)
            if ref is not None and not ray.wait([ref], timeout=0)[0]:
                continue
            if ref is not None:
                self._told.pop(handle, None)
                with contextlib.suppress(ray.exceptions.RayError):
                    self._told[handle] = ray.get(ref)
            self._asked[handle] = handle.memory()
        most = max(self._told.values(), default=0.0)
        return {"perf/engine_memory_gb": most} if most else {}
