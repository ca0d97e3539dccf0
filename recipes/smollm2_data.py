"""Sums for SmolLM2: `python -m recipes.smollm2_data FOLDER` writes train.jsonl and test.jsonl."""

from __future__ import annotations

import json
import random
import re
import sys
from pathlib import Path
from typing import Any

from slime.samples.types import Sample


def write(folder: Path, seed: int = 0) -> None:
    """ "What is i + j? Answer with just the number." for 1 ≤ i, j < 20: 261 for training, 100 held
    out."""
    pairs = [(i, j) for i in range(1, 20) for j in range(1, 20)]
    random.Random(seed).shuffle(pairs)
    folder.mkdir(parents=True, exist_ok=True)
    for name, part in (("test", pairs[:100]), ("train", pairs[100:])):
        with open(folder / f"{name}.jsonl", "w") as out:
            for i, j in part:
                row = {
                    "prompt": f"What is {i} + {j}? Answer with just the number.",
                    "label": str(i + j),
                }
                out.write(json.dumps(row) + "\n")


def reward(args: Any, sample: Sample, **_: Any) -> float:
    """1 when the last number of the response is the sum, else 0."""
    numbers = re.findall(r"\d+", sample.response)
    return float(bool(numbers) and numbers[-1] == sample.label)


if __name__ == "__main__":
    write(Path(sys.argv[1]))
