"""When each step of a run with one engine ends, by a model of the engine: a token of every answer
under way takes a fixed time and a time for each token in the caches.

    python -m benchmarks.waves --prompts 8 --samples 4 --ahead 3 --train-per-token 50 \\
        --train-fixed 2.5
    python -m benchmarks.waves --prompts 16 --samples 4 --ahead 3 --fixed 3.5 --per-cached 40 \\
        --caches 565000 --train-per-token 22 --train-fixed 2

It tells what `benchmarks.gpu.long_tail` is too short for: the pace of a run that goes on. A rollout
begins when the training begins of the one that is --ahead before it. The first rollouts begin
together, and go on ending together.
"""

from __future__ import annotations

import argparse
from collections import Counter

from benchmarks.gpu.long_tail import add_lengths, lengths_of
from benchmarks.pace import num_rollouts
from slime.forecast.engine import EngineSpeed, Request, SimulatedEngine


def ends(args: argparse.Namespace, num_steps: int, begun: int) -> list[float]:
    """Seconds from the beginning of the first rollout to the end of each step.

    Args:
        args: of `parse_args`.
        begun: rollouts of the run, at least ``num_steps``.
    """
    lengths = lengths_of(args)
    size = args.prompts * args.samples
    fixed = args.fixed * 1e-3
    cached = args.per_cached * 1e-9
    engine = SimulatedEngine(EngineSpeed(0.0, 0.0, 0.0, 0.0, fixed, cached, args.caches, 0.0))
    left: Counter[int] = Counter()

    def lengths_in(rollout: int) -> list[int]:
        return [lengths[i % len(lengths)] for i in range(rollout * size, (rollout + 1) * size)]

    def begin(rollout: int, now: float) -> None:
        if rollout < begun:
            left[rollout] = size
            for length in lengths_in(rollout):
                engine.add(Request(rollout, args.prompt_tokens, length, 0), now)

    def generate(until: float) -> None:
        while engine.next_end() <= until:
            left[engine.finish().group] -= 1

    for rollout in range(args.ahead):
        begin(rollout, 0.0)
    now = 0.0
    found = list[float]()
    for step in range(num_steps):
        while left[step]:
            now = engine.next_end()
            generate(now)
        begin(step + args.ahead, now)
        now += args.train_fixed + args.train_per_token * 1e-6 * sum(lengths_in(step))
        found.append(now)
        generate(now)
    return found


def parse_args(argv: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--prompts", type=int, default=8)
    add("--samples", type=int, default=4)
    add("--ahead", type=int, default=3)
    add(
        "--steps",
        type=int,
        default=9,
        help="of which the ends are printed, of a run that ends there",
    )
    add("--fixed", type=float, default=4.0, help="ms for a token of every answer")
    add("--per-cached", type=float, default=45.0, help="ns more for each token in the caches")
    add("--caches", type=int, default=900_000, help="tokens that they hold")
    add("--train-fixed", type=float, default=2.0, help="seconds of a step, push included")
    add("--train-per-token", type=float, default=50.0, help="µs more for each token of its answers")
    add("--prompt-tokens", type=int, default=120)
    add_lengths(parser)
    args = parser.parse_args(argv)
    if args.ahead < 1:
        parser.error(
            "--ahead is the number of rollouts under way besides the one that is trained: 1 or more"
        )
    return args


def main() -> None:
    args = parse_args()
    print(
        "steps end after",
        ", ".join(f"{end:.0f}" for end in ends(args, args.steps, args.steps)),
        "s",
    )
    waves = 20 * args.ahead
    far = ends(args, args.ahead + waves, num_rollouts(args.ahead + waves, args.ahead))
    print(f"a run that goes on takes {(far[-1] - far[args.ahead - 1]) / waves:.1f} s a step")


if __name__ == "__main__":
    main()
