"""A whole run as tests see it: its metrics, samples and configuration, read back from its
folder."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

#: Numbers that say how samples were served, not what they are: they follow the clock, like
#: ``perf/``.
_SERVING = (
    "rollout/engine_load",
    "rollout/prefix_cache",
    "rollout/avg_cached",
    "rollout/requests",
    "rollout/retries",
)
_BY_THE_CLOCK = ("perf/", "time", "stage", *_SERVING)


@dataclass(frozen=True)
class RunResult:
    """A run that has ended.

    Attributes:
        path: its run folder.
        rows: ``metrics.jsonl``.
    """

    path: Path
    rows: list[dict[str, Any]] = field(repr=False)

    def series(self, name: str) -> list[float]:
        """The values of a metric, over the rows that have it."""
        return [row[name] for row in self.rows if name in row]

    def steps(self) -> dict[int, dict[str, Any]]:
        """Training rows by step, without what follows the clock."""
        trained = [row for row in self.rows if "rollout/raw_reward" in row]
        return {
            row["step"]: {
                name: value for name, value in row.items() if not name.startswith(_BY_THE_CLOCK)
            }
            for row in trained
        }

    def samples(self, rollout_id: int) -> list[Any]:
        """Everything that was generated in a rollout (the run was given `dumps`)."""
        from slime.rollout.debug_data import load_samples

        return load_samples(self.path / "dumps" / f"{rollout_id}.pt")

    def tokens(self, rollout_id: int) -> list[tuple[int, list[int], list[float], float]]:
        """(index, tokens, log-probs, reward) of every sample of a rollout."""
        return [
            (s.index, s.tokens, s.rollout_log_probs, s.reward) for s in self.samples(rollout_id)
        ]

    def config(self) -> dict[str, Any]:
        return json.loads((self.path / "config.json").read_text())


Run = Callable[..., RunResult]

#: A small GRPO step: 4 prompts × 4 samples of at most 8 tokens, rewarded by `toy.digit_share`.
GRPO = (
    *("--rollout-batch-size", 4, "--n-samples-per-prompt", 4, "--rollout-max-response-len", 8),
    *("--num-steps-per-rollout", 1, "--custom-rm-path", "tests.support.toy.digit_share"),
)
