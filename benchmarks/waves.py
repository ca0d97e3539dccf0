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
from dataclasses import dataclass

from benchmarks.gpu.long_tail import add_lengths, lengths_of
from benchmarks.pace import num_rollouts

_TOKENS_AT_A_TIME = 8


@dataclass
class _Answer:
    rollout: int
    left: int
    cached: int


def ends(args: argparse.Namespace, num_steps: int, begun: int) -> list[float]:
    """Seconds from the beginning of the first rollout to the end of each step.

    Args:
        args: of `parse_args`.
        begun: rollouts of the run, at least ``num_steps``.
    """
    lengths = lengths_of(args)
    size = args.prompts * args.samples
    left: Counter[int] = Counter()
    waiting: list[_Answer] = []

    def begin(rollout: int) -> None:
        if rollout < begun:
            left[rollout] = size
            chosen = (
                lengths[i % len(lengths)] for i in range(rollout * size, (rollout + 1) * size)
            )
            waiting.extend(_Answer(rollout, length, args.prompt_tokens) for length in chosen)

    for rollout in range(args.ahead):
        begin(rollout)
    now = 0.0
    found = list[float]()
    trained_at = float("inf")
    under_way = list[_Answer]()
    while len(found) < num_steps:
        cached = sum(answer.cached for answer in under_way)
        while waiting and cached < args.caches:
            under_way.append(waiting.pop(0))
            cached += under_way[-1].cached
        generated = _TOKENS_AT_A_TIME * (args.fixed * 1e-3 + args.per_cached * 1e-9 * cached)
        now = now + generated if under_way else trained_at
        for answer in under_way:
            answer.left -= _TOKENS_AT_A_TIME
            answer.cached += _TOKENS_AT_A_TIME
            left[answer.rollout] -= answer.left <= 0
        under_way = [answer for answer in under_way if answer.left > 0]
        if now >= trained_at:
            found.append(trained_at)
            trained_at = float("inf")
        if trained_at == float("inf") and not left[step := len(found)] and step < num_steps:
            tokens = sum(lengths[i % len(lengths)] for i in range(step * size, (step + 1) * size))
            trained_at = now + args.train_fixed + args.train_per_token * 1e-6 * tokens
            begin(step + args.ahead)
    return found


def parse_args(argv: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--prompts", type=int, default=8)
    parser.add_argument("--samples", type=int, default=4)
    parser.add_argument("--ahead", type=int, default=3)
    parser.add_argument(
        "--steps",
        type=int,
        default=9,
        help="of which the ends are printed, of a run that ends there",
    )
    parser.add_argument("--fixed", type=float, default=4.0, help="ms for a token of every answer")
    parser.add_argument(
        "--per-cached", type=float, default=45.0, help="ns more for each token in the caches"
    )
    parser.add_argument("--caches", type=int, default=900_000, help="tokens that they hold")
    parser.add_argument(
        "--train-fixed", type=float, default=2.0, help="seconds of a step, push included"
    )
    parser.add_argument(
        "--train-per-token", type=float, default=50.0, help="µs more for each token of its answers"
    )
    parser.add_argument("--prompt-tokens", type=int, default=120)
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
