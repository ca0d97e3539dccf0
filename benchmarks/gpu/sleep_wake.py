"""Sleep and wake of a trainer: seconds, bytes, what stays on the GPU, and that every bit comes
back.

    python -m benchmarks.gpu.sleep_wake --shape qwen3-4b
    # dry: without a GPU there is nothing to move
    python -m benchmarks.gpu.sleep_wake --shape tiny --rounds 2

The first sleep pins host memory, which later ones use again; it is reported apart.
"""

from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path
from typing import Any

from benchmarks.gpu import ranks
from benchmarks.gpu.report import Report, Row, at_most
from benchmarks.gpu.setting import make_model, median, new_parser, workspace


def parse_args(argv: list[str] | None = None) -> argparse.Namespace:
    parser = new_parser(__doc__)
    parser.add_argument("--gpus", type=int, default=1)
    parser.add_argument("--tp", type=int, default=1)
    return parser.parse_args(argv)


def main(argv: list[str] | None = None) -> int:
    args = parse_args(argv)
    report = Report("sleep and wake", args)
    with workspace() as folder:
        report.case(f"{args.gpus} GPU(s), tp{args.tp}", lambda: measure(args, folder))
    return report.finish()


def measure(args: argparse.Namespace, folder: Path) -> Row:
    flags = {"hf_checkpoint": str(make_model(args, folder)), "tensor_model_parallel_size": args.tp}
    first, *later = ranks.run(take_turns, args.gpus, flags, args.rounds)
    seconds = {name: median([row[name] for row in later]) for name in ("sleep", "wake")}
    total = seconds["sleep"] + seconds["wake"]
    return {
        "shape": str(args.model or args.shape), "gpus": args.gpus, "tp": args.tp, **seconds,
        "first_sleep": first["sleep"], "raw": [first, *later],
        "goals": [at_most("sleep + wake", total, 3.0, "s")],
    }  # fmt: skip


def take_turns(
    place: ranks.Place, answer: ranks.Answer, flags: dict[str, Any], rounds: int
) -> None:
    """On each trainer rank; rank 0 answers with seconds and what was measured, by round."""
    import torch
    import torch.distributed as dist

    from slime.engines.wire.buckets import fingerprint
    from slime.trainer.megatron import device
    from slime.trainer.megatron.offload import torch_optimizers

    backend = ranks.trainer(place, **flags)
    backend.setup()
    for inner in torch_optimizers(backend.optimizer):  # the states that the first step would make
        for group in inner.param_groups:
            for parameter in group["params"]:
                inner.state[parameter] |= {
                    name: torch.randn_like(parameter) for name in ("exp_avg", "exp_avg_sq")
                }
    watched = [p for chunk in backend.model_chunks for p in chunk.parameters()][::5]
    before = [fingerprint(p) for p in watched]
    rows = []
    for _ in range(rounds + 1):
        row: dict[str, float] = {}
        for name, move in (("sleep", backend.sleep), ("wake", backend.wake)):
            device.synchronize()
            dist.barrier()
            started = time.perf_counter()
            row |= {key.removeprefix("perf/"): value for key, value in move().items()}
            device.synchronize()
            row[name] = time.perf_counter() - started
        assert [fingerprint(p) for p in watched] == before, "weights came back changed"
        rows.append(row)
    if place.rank == 0:
        answer(rows)
    backend.close()


if __name__ == "__main__":
    sys.exit(main())
