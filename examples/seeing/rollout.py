"""The reward of the example of a model that sees: 1 for the right count, else 0."""

from __future__ import annotations

from typing import Any

from slime.samples.types import Sample


async def reward(args: Any, sample: Sample, **kwargs: Any) -> float:
    return float(sample.response.strip() == str(sample.label))
