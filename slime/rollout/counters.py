"""What a rollout has counted beside its samples, for ``rollout/…``."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator

from slime import deadlines
from slime.engines.api import EngineError
from slime.engines.client import RolloutClient
from slime.rollout.dynamic_sampling import Collected
from slime.rollout.trajectory import GroupRunner
from slime.user_code.calls import hung_threads


def counts_of(collected: Collected, runner: GroupRunner) -> dict[str, float]:
    """What the collector, the runner and the client counted."""
    state = runner.state
    counts = state.client.counters.take()
    metrics: dict[str, float] = {
        "rollout/num_failed_samples": runner.num_failures,
        "rollout/num_hung_samples": runner.num_hung,
        "rollout/hung_threads": hung_threads(),
        "rollout/num_failed_groups": collected.num_failed,
        "rollout/num_surplus_groups": collected.num_surplus,
        "rollout/num_aborted_groups": collected.num_aborted,
        "rollout/prompt_too_long": state.counts["prompt_too_long"],
        "rollout/continued_requests": state.counts["continued"],
        "rollout/requests": counts["requests"],
        "rollout/retries": counts["retries"],
        "perf/data_wait_time": collected.data_seconds,
    }
    metrics |= collected.stale
    return metrics | {
        f"rollout/dynamic_filter/drop_{reason}": n for reason, n in collected.drops.items()
    }


@contextlib.asynccontextmanager
async def load_snapshots(client: RolloutClient) -> AsyncIterator[list[dict[str, int]]]:
    """Requests on each engine, every few seconds while the block runs; for
    `slime.rollout.metrics.load_metrics`."""
    snapshots: list[dict[str, int]] = []

    async def watch() -> None:
        while True:
            await asyncio.sleep(deadlines.COUNTERS_LOAD_INTERVAL)
            with contextlib.suppress(EngineError):  # a metric is not worth a run
                loads = await client.worker_loads()
                snapshots.append({url: max(0, requests) for url, (requests, _) in loads.items()})

    task = asyncio.create_task(watch())
    try:
        yield snapshots
    finally:
        task.cancel()
