"""One weight push, pause to continue, no request in flight: colocated by handles, or to GPUs of its
own by NCCL.

    # 1 GPU
    python -m benchmarks.gpu.weight_sync --shape qwen3-4b --way colocated
    # 1 -> 1, 2 GPUs
    python -m benchmarks.gpu.weight_sync --shape qwen3-4b --way apart
    # 2 -> 2, 4 GPUs
    python -m benchmarks.gpu.weight_sync --shape qwen3-4b --way apart --tp 2
    # quantised engines
    python -m benchmarks.gpu.weight_sync --shape qwen3-4b --way apart --served fp8-block
    # dry, on a CPU
    python -m benchmarks.gpu.weight_sync --shape tiny --engine embedded --rounds 2

The trainer is a real one with its optimizer; with --way colocated it sleeps but for its weights
while it pushes, and the engine has taken back its weights only, as in a run. With --served the
engine is started from the trainer's weights in that format, so that pushes must leave each of its
parameters, in the form that its kernels take, as the start had made it; those that differ are
reported.
"""

from __future__ import annotations

import argparse
import cProfile
import json
import multiprocessing as mp
import pstats
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from benchmarks.gpu import ranks
from benchmarks.gpu.quantised_models import FORMATS, Sizes, convert, quantise_on_gpu
from benchmarks.gpu.quantised_state import STATE, state_of
from benchmarks.gpu.report import Report, Row, at_most
from benchmarks.gpu.setting import (
    await_engine,
    engine,
    gpu_ids,
    make_model,
    median,
    new_parser,
    workspace,
)
from benchmarks.gpu.trainer import FULL_LAYERS, SHAPES
from slime.config import make_config
from slime.engines.fleet import EngineFleet


def parse_args(argv: list[str] | None = None) -> argparse.Namespace:
    parser = new_parser(__doc__)
    add = parser.add_argument
    add("--way", choices=["colocated", "apart"], default="colocated")
    add("--tp", type=int, default=1, help="tensor-parallel size of trainer and engine")
    add("--ep", type=int, default=1, help="expert-parallel size of the trainer")
    add("--pp", type=int, default=1, help="pipeline-parallel size of the trainer")
    add("--buffer-mb", type=int, default=512, help="--update-weight-buffer-size")
    add("--profile", action="store_true", help="of one more push, where rank 0 spends its time")
    add(
        "--served",
        choices=[form for form in FORMATS if form != "bf16"],
        help="what the engine holds",
    )
    add(
        "--fp8-gemm",
        default="triton",
        help="SGLang's --fp8-gemm-backend with FP8 (default: triton)",
    )
    add("--disk", action="store_true", help="--update-weight-transport disk")
    add("--verify", action="store_true", help="compare every weight after each push")
    return parser.parse_args(argv)


def main(argv: list[str] | None = None) -> int:
    args = parse_args(argv)
    report = Report("weight sync", args)
    with workspace() as folder:
        what = f", {args.served}" * bool(args.served) + ", disk" * args.disk
        report.case(
            f"{args.way}, tp{args.tp} ep{args.ep} pp{args.pp}{what}", lambda: measure(args, folder)
        )
    return report.finish()


def measure(args: argparse.Namespace, folder: Path) -> Row:
    world = max(args.tp, args.ep) * args.pp
    first = 0 if args.way == "colocated" else world  # GPU of the engine
    gpus = gpu_ids(first, args.tp)
    model = make_model(args, folder)
    served = as_served(model, args.served) if args.served else model
    flags: dict[str, Any] = {
        "hf_checkpoint": str(served),
        "rollout_engine": args.engine,
        "colocate": args.way == "colocated",
        "tensor_model_parallel_size": args.tp,
        "expert_model_parallel_size": args.ep,
        "pipeline_model_parallel_size": args.pp,
        "update_weight_buffer_size": args.buffer_mb << 20,
        "check_weight_update_equal": args.verify,
    }
    if args.served:
        flags["ref_load"] = str(model)
    if args.ep > 1:
        flags["expert_tensor_parallel_size"] = 1
    if args.disk:
        flags |= {
            "update_weight_transport": "disk",
            "update_weight_disk_dir": str(folder / "weights"),
        }
    asks_state = bool(args.served) and args.engine == "sglang"
    if asks_state:
        flags["sglang_custom_weight_loader"] = [STATE]
        flags |= {"sglang_fp8_gemm_backend": args.fp8_gemm} if "fp8" in args.served else {}
    if args.way == "apart":
        flags |= {"rollout_num_gpus": args.tp, "rollout_num_gpus_per_engine": args.tp}
    elif args.engine == "sglang":
        flags |= {"rollout_num_gpus_per_engine": args.tp}
    config = make_config(
        **flags, actor_num_gpus_per_node=world, rollout_batch_size=world, num_rollout=1
    )
    slots = tuple(range(first, first + args.tp))
    # on GPUs of its own it starts while the trainer does
    wait = args.way == "colocated" or asks_state
    with engine(args, config, served, folder, gpus, args.tp, wait=wait) as url:
        before = held(url, folder, args.tp) if asks_state else {}
        if config.cluster.offload_rollout and args.engine == "sglang":
            memory(url, "release", ["kv_cache", "weights", "cuda_graph"])
        receipts = ranks.run(push, world, flags, url, slots, args.rounds, args.profile)
        after = held(url, folder, args.tp) if asks_state else {}
    counted = receipts[1:] or receipts
    seconds = median([receipt["total"] for receipt in counted])
    goals = [at_most(f"pause to continue, {counted[-1]['bytes'] / 1e9:.2f} GB", seconds, 0.2, "s")]
    if args.ep > 1:
        full = median([at_full_size(receipt, args.shape) for receipt in counted])
        goals = [at_most("pause to continue, scaled to all layers", full, 1.0, "s")]
    return {
        "shape": str(args.model or args.shape),
        "way": args.way,
        "tp": args.tp,
        "ep": args.ep,
        "pp": args.pp,
        "buffer_mb": args.buffer_mb,
        "bytes": counted[-1]["bytes"],
        "seconds": seconds,
        "raw": receipts,
        "goals": goals,
        **({"served": args.served, **differences(before, after)} if asks_state else {}),
    }


def as_served(model: Path, form: str) -> Path:
    """The model in another format, beside it."""
    target = model.with_name(f"{model.name}-{form}")
    if not (target / "config.json").exists():
        process = mp.get_context("spawn").Process(target=_convert, args=(form, model, target))
        process.start()
        process.join()
        if not (target / "config.json").exists():
            raise RuntimeError(f"{model} was not converted to {form}")
    return target


def _convert(form: str, model: Path, target: Path) -> None:
    quantise_on_gpu()
    small = (
        SHAPES["tiny"]["hidden_size"]
        >= json.loads((model / "config.json").read_text())["hidden_size"]
    )
    print(
        convert(form, Sizes(0, 32, 16) if small else Sizes(0, 128, 128), model, target), flush=True
    )


def held(url: str, folder: Path, ranks: int) -> dict[str, str]:
    fleet = EngineFleet([url])
    try:
        return state_of(fleet, folder, ranks, 120.0)
    finally:
        fleet.close()


def differences(before: dict[str, str], after: dict[str, str]) -> Row:
    differ = sorted(
        name for name in before.keys() | after.keys() if before.get(name) != after.get(name)
    )
    return {
        "verdict": "wrong" if differ else "right",
        "parameters": len(before),
        "some": differ[:4],
    }


def at_full_size(receipt: Row, shape: str) -> float:
    """Seconds that a push of the whole model would take, of a shape that has its first layers: the
    transfer grows with the bytes (embedding and output layer are there once), the rest stays as it
    is."""
    config = SHAPES[shape]
    nbytes = receipt["bytes"]
    layers = config["num_hidden_layers"]
    tables = 1 if config["tie_word_embeddings"] else 2
    outer = 2 * tables * config["vocab_size"] * config["hidden_size"]  # in bfloat16
    whole = outer + (nbytes - outer) * FULL_LAYERS.get(shape, layers) / layers
    return float(receipt["total"] + receipt["transfer"] * (whole / nbytes - 1))


def push(
    place: ranks.Place,
    answer: ranks.Answer,
    flags: dict[str, Any],
    url: str,
    slots: tuple[int, ...],
    rounds: int,
    with_profile: bool,
) -> None:
    """On each trainer rank: connect and push; rank 0 answers with the receipts."""
    import torch.distributed as dist

    from slime.weights.sync import WeightSync
    from slime.weights.transport import EngineSlots

    backend = ranks.trainer(place, **flags)
    backend.setup()
    config = backend.config
    if not config.cluster.colocate:  # else it sleeps, and would die of being asked
        await_engine(url)
    sync = WeightSync(
        config, backend.model_chunks, backend.hf_config, rank=place.rank, world_size=place.world
    )
    sync.connect([EngineSlots(url, slots)])
    if config.cluster.offload_train:
        backend.sleep(keep_weights=True)
    if (
        place.rank == 0
        and config.cluster.offload_rollout
        and config.engine.rollout_engine == "sglang"
    ):
        memory(url, "resume", ["weights"])
    dist.barrier()
    receipts = [sync.push() for _ in range(rounds + 1)]
    if with_profile:
        profile(sync.push, place.rank)
    if place.rank == 0:
        answer(
            [
                {
                    **r.seconds,
                    "bytes": r.nbytes,
                    "transport": r.transport,
                    "checked": len(r.checked),
                }
                for r in receipts
            ]
        )
    sync.close()
    backend.close()


def profile(work: Callable[[], Any], rank: int) -> None:
    """Where the host's time goes in ``work``, on the first rank; on others it just runs."""
    recorder = cProfile.Profile()
    if rank == 0:
        recorder.enable()
    work()
    recorder.disable()
    if rank == 0:
        for order in ("cumulative", "tottime"):
            pstats.Stats(recorder).sort_stats(order).print_stats(22)


def memory(url: str, verb: str, tags: list[str]) -> None:
    fleet = EngineFleet([url])
    fleet.post(f"/{verb}_memory_occupation", {"tags": tags}, 120)
    fleet.close()


if __name__ == "__main__":
    sys.exit(main())
