"""Sleep and wake of a trainer: seconds, bytes, what stays on the GPU, and that every bit comes back.

    python -m benchmarks.gpu.sleep_wake --shape qwen3-4b
    python -m benchmarks.gpu.sleep_wake --shape tiny --rounds 2      # dry: without a GPU there is nothing to move

The first sleep pins host memory, which later ones use again; it is reported apart.
"""

from __future__ import annotations

import argparse
import time
from typing import Any

from benchmarks.gpu import ranks
from benchmarks.gpu.setting import add_arguments, make_model, median, publish, workspace


def parse_args(argv: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_arguments(parser)
    parser.add_argument("--gpus", type=int, default=1)
    parser.add_argument("--tp", type=int, default=1)
    return parser.parse_args(argv)


def main(argv: list[str] | None = None) -> None:
    args = parse_args(argv)
    with workspace() as folder:
        model = make_model(args, folder)
        flags = {"hf_checkpoint": str(model), "tensor_model_parallel_size": args.tp}
        rows = ranks.run(measure, args.gpus, flags, args.rounds)
    later = rows[1:] or rows
    totals = {name: median([row[name] for row in later]) for name in ("sleep", "wake")}
    publish(args, {"what": "sleep and wake", "gpus": args.gpus, **totals, "first_sleep": rows[0]["sleep"], "raw": rows})


def measure(backend: Any, rank: int, rounds: int) -> list[dict[str, float]]:
    import torch
    import torch.distributed as dist

    from slime.train.megatron.optimizer import torch_optimizers
    from slime.weights.buckets import fingerprint

    for inner in torch_optimizers(backend.optimizer):  # the states that the first step would make
        for group in inner.param_groups:
            for parameter in group["params"]:
                inner.state[parameter] |= {name: torch.randn_like(parameter) for name in ("exp_avg", "exp_avg_sq")}
    watched = [p for chunk in backend.model_chunks for p in chunk.parameters()][:: max(1, rounds)]
    before = [fingerprint(p) for p in watched]
    rows = []
    for _ in range(rounds + 1):
        dist.barrier()
        row: dict[str, float] = {}
        for name, move in (("sleep", backend.sleep), ("wake", backend.wake)):
            backend.synchronize()
            started = time.perf_counter()
            row |= {key.removeprefix("perf/"): value for key, value in move().items()}
            backend.synchronize()
            row[name] = time.perf_counter() - started
        assert [fingerprint(p) for p in watched] == before, "weights came back changed"
        rows.append(row)
    return rows


if __name__ == "__main__":
    main()
