"""The generate function: a process of `agent.py` for each sample, in front of the model that is
trained."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

from slime.agents.endpoint import agent_endpoint
from slime.samples.types import Sample

AGENT = Path(__file__).with_name("agent.py")


async def generate(args: Any, sample: Sample, sampling_params: dict[str, Any]) -> list[Sample]:
    """One sample, or one for each branch; all with the reward of the agent's answer."""
    async with agent_endpoint(args, sample, sampling_params) as endpoint:
        finished = await endpoint.run([sys.executable, AGENT, str(sample.prompt)], timeout=300)
    return endpoint.samples(reward=score(finished.output, sample.label))


def score(output: str, label: str) -> float:
    """1 where the last line is the answer."""
    lines = output.strip().splitlines()
    return float(bool(lines) and lines[-1].strip() == label)
