"""One weight push, pause to continue, no request in flight: colocated by handles, or to GPUs of its own by NCCL.

    python -m benchmarks.gpu.weight_sync --shape qwen3-4b --way colocated                 # 1 GPU
    python -m benchmarks.gpu.weight_sync --shape qwen3-4b --way apart                     # 1 -> 1, 2 GPUs
    python -m benchmarks.gpu.weight_sync --shape qwen3-4b --way apart --tp 2              # 2 -> 2, 4 GPUs
    python -m benchmarks.gpu.weight_sync --shape tiny --engine embedded --rounds 2        # dry, on a CPU

The trainer is a real one with its optimizer; with --way colocated it sleeps but for its weights while it pushes, and
the engine has taken back its weights only, as in a run.
"""

from __future__ import annotations

import argparse
from typing import Any

from benchmarks.gpu import ranks
from benchmarks.gpu.setting import add_arguments, engines, make_model, median, publish, workspace
from slime.config import make_config


def parse_args(argv: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_arguments(parser)
    parser.add_argument("--way", choices=["colocated", "apart"], default="colocated")
    parser.add_argument("--tp", type=int, default=1, help="tensor-parallel size of trainer and engine")
    parser.add_argument("--ep", type=int, default=1, help="expert-parallel size of the trainer")
    parser.add_argument("--pp", type=int, default=1, help="pipeline-parallel size of the trainer")
    parser.add_argument("--buffer-mb", type=int, default=512, help="--update-weight-buffer-size")
    parser.add_argument("--verify", action="store_true", help="compare every weight after the first push")
    return parser.parse_args(argv)


def main(argv: list[str] | None = None) -> None:
    args = parse_args(argv)
    world = max(args.tp, args.ep) * args.pp
    with workspace() as folder:
        model = make_model(args, folder)
        flags: dict[str, Any] = {
            "hf_checkpoint": str(model),
            "rollout_engine": args.engine,
            "colocate": args.way == "colocated",
            "tensor_model_parallel_size": args.tp,
            "expert_model_parallel_size": args.ep,
            "pipeline_model_parallel_size": args.pp,
            "update_weight_buffer_size": args.buffer_mb << 20,
            "check_weight_update_equal": args.verify,
        }
        config = make_config(
            **flags, actor_num_gpus_per_node=world, rollout_num_gpus=args.tp, rollout_num_gpus_per_engine=args.tp,
            rollout_batch_size=world, num_rollout=1,
        )  # fmt: skip
        first = 0 if args.way == "colocated" else world
        gpus = _gpus(first, args.tp)
        with engines(args, config, model, folder, [gpus]) as [url]:
            if args.way == "colocated" and args.engine == "sglang":
                _memory(url, "release", ["kv_cache", "weights", "cuda_graph"])
            slots = tuple(range(first, first + args.tp))
            receipts = ranks.run(push, world, flags, url, slots, args.rounds, args.way == "colocated", args.engine)
    totals = [receipt["total"] for receipt in receipts[1:]] or [receipts[0]["total"]]
    row = {"what": "weight sync", "way": args.way, "tp": args.tp, "ep": args.ep, "pp": args.pp}
    publish(args, row | {"buffer_mb": args.buffer_mb, "seconds": median(totals), "raw": receipts})


def push(backend: Any, rank: int, url: str, slots: tuple[int, ...], rounds: int, colocated: bool, engine: str) -> Any:
    """On each trainer rank: connect, push, report the receipts."""
    import torch.distributed as dist

    from slime.weights.sync import WeightSync
    from slime.weights.transport import EngineSlots

    world = dist.get_world_size()
    sync = WeightSync(backend.config, backend.model_chunks, backend.hf_config, rank=rank, world_size=world)
    sync.connect([EngineSlots(url, slots)])
    if colocated:
        backend.sleep(keep_weights=True)
        if rank == 0 and engine == "sglang":
            _memory(url, "resume", ["weights"])
        dist.barrier()
    receipts = [sync.push() for _ in range(rounds + 1)]
    sync.close()
    return [
        {**receipt.seconds, "bytes": receipt.nbytes, "transport": receipt.transport, "checked": len(receipt.checked)}
        for receipt in receipts
    ]


def _memory(url: str, verb: str, tags: list[str]) -> None:
    from slime.weights.engine_fleet import EngineFleet

    fleet = EngineFleet([url])
    fleet.post(f"/{verb}_memory_occupation", {"tags": tags}, 120)
    fleet.close()


def _gpus(first: int, count: int) -> tuple[str, ...]:
    import torch

    if not torch.cuda.is_available():
        return ()
    here = torch.cuda.device_count()
    if first + count > here:
        raise SystemExit(f"this takes {first + count} GPUs, {here} are here")
    return tuple(str(number) for number in range(first, first + count))


if __name__ == "__main__":
    main()
