"""What the journal costs a rollout: CPU and wall seconds for a million tokens of finished groups,
and bytes.

    python -m benchmarks.journal
    python -m benchmarks.journal --groups 64 --samples 8 --tokens 1024 --step-seconds 22

Groups as a rollout finishes them are noted in a journal on --folder's disk, and forced to it at the
end. ``--step-seconds`` is what a step with so many tokens takes elsewhere; the share of it is
printed, and is to be 1 % at most."""

from __future__ import annotations

import argparse
import random
import statistics
import tempfile
import time
from pathlib import Path

from slime.rollout.journal import Journal, RecordKind
from slime.samples.types import Sample


def group_of(index: int, samples: int, tokens: int) -> list[Sample]:
    """A group of responses with log-probs, as an engine's answers make them."""
    draw = random.Random(index)
    made = []
    for number in range(samples):
        ids = [draw.randrange(150_000) for _ in range(tokens)]
        scores = [-draw.expovariate(1.0) for _ in range(tokens)]
        sample = Sample(
            group_index=index, index=index * samples + number, prompt="?", tokens=ids[:128]
        )
        sample.append_response_tokens(tokens=ids, log_probs=scores)
        sample.response = "word " * tokens
        made.append(sample)
    return made


def measure(groups: list[list[Sample]], folder: Path) -> tuple[float, float, float, int]:
    """CPU seconds, wall seconds in the calls (in which the rollout stands still), those of the
    longest, bytes."""
    journal = Journal(folder / "journal", "benchmark")
    cpu = time.process_time()
    wall = 0.0
    longest = 0.0
    for key, group in enumerate(groups):
        began = time.perf_counter()
        journal.note(RecordKind.FINISHED, 0, key, group)
        took = time.perf_counter() - began
        wall = wall + took
        longest = max(longest, took)
    journal.close()
    cpu = time.process_time() - cpu
    return cpu, wall, longest, sum(path.stat().st_size for path in (folder / "journal").iterdir())


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--groups", type=int, default=64)
    parser.add_argument("--samples", type=int, default=8)
    parser.add_argument("--tokens", type=int, default=1024)
    parser.add_argument("--step-seconds", type=float, help="of a step with so many tokens")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument(
        "--folder",
        type=Path,
        help="on the disk of run folders; the system's for scratch by default",
    )
    options = parser.parse_args()
    groups = [group_of(index, options.samples, options.tokens) for index in range(options.groups)]
    millions = options.groups * options.samples * options.tokens / 1e6
    rounds = []
    for _ in range(options.rounds):
        with tempfile.TemporaryDirectory(dir=options.folder) as name:
            rounds.append(measure(groups, Path(name)))
    cpu, wall, longest, size = (statistics.median(found) for found in zip(*rounds))
    print(
        f"{millions:.3g} million tokens in {options.groups} groups: CPU {cpu:.3f} s, in the calls "
        f"{wall:.3f} s"
    )
    each = f"CPU {cpu / millions:.3f} s, {size / millions / 1e6:.1f} MB"
    print(f"for a million tokens: {each}; longest call {longest:.4f} s")
    if options.step_seconds:
        print(
            f"share of a step of {options.step_seconds:g} s: {wall / options.step_seconds:.2%} "
            "(goal: at most 1 %)"
        )


if __name__ == "__main__":
    main()
