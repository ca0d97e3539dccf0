"""Optimizer states in host memory: the same bits as on the GPU, the cost of the trip, and training
in little GPU memory.

    python -m benchmarks.gpu.streamed_optimizer --out streamed.json
    # dry, on a CPU too
    python -m benchmarks.gpu.streamed_optimizer --equal tiny --shape tiny --tokens 512 \\
        --length 64 --max-tokens 256 --steps 2

Three parts, each in processes of its own:

equal     --equal-steps steps of the --equal shape with gradients made from the weights themselves
          (so that no kernel's order of additions matters), clipping, weight decay and a schedule.
          After each step the fingerprints of weights, master weights and moments are those of the
          optimizer on the GPU.
speed     whole steps of --shape, a supervised loss, all layers recomputed: states on the GPU;
          streamed; streamed with moments in bfloat16. Seconds of the step and of its optimizer,
          bytes in host memory and on the GPU, and bytes over the link per second (both directions
          added up).
limited   the same with gradients in bfloat16 and at most --limit-gib of GPU memory, which torch's
          allocator enforces.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import time
from typing import Any

from benchmarks.gpu import ranks
from benchmarks.gpu.report import Report, Row, add_arguments, at_least, at_most
from benchmarks.gpu.trainer import SHAPES, WARM_UP_STEPS, make_batch

STREAMED = {"optimizer_cpu_offload": True}
NARROW = {"exp_avg_dtype": "bf16", "exp_avg_sq_dtype": "bf16"}
SIDES: dict[str, dict[str, Any]] = {
    "on the GPU": {},
    "streamed": STREAMED,
    "streamed, bfloat16 moments": {**STREAMED, **NARROW},
}
#: The slowest link that is no fault: PCIe 5 × 16, both directions together.
LEAST_GB_PER_SECOND = 60.0


def new_backend(place: ranks.Place, shape: str, **flags: Any) -> Any:
    """This rank's trainer with random weights."""
    backend = ranks.trainer(
        place,
        loss_type="sft_loss",
        bf16=True,
        lr=1e-5,
        lr_warmup_iters=2,
        weight_decay=0.1,
        clip_grad=1.0,
        use_dynamic_batch_size=True,
        **{"max_tokens_per_gpu": 4096, **flags},
    )
    from slime.models import family_of

    spec = family_of(SHAPES[shape]).model_spec(SHAPES[shape]).padded(1)
    backend.setup(spec=spec, initialise=True)
    return backend


# -- equal -----------------------------------------------------------------------------------------


def fingerprints_of_steps(
    place: ranks.Place, answer: ranks.Answer, shape: str, flags: dict[str, Any], steps: int
) -> None:
    """Answer with the gradient norm and the fingerprint of everything, after each step."""
    import torch

    backend = new_backend(place, shape, **flags)
    from slime.trainer.megatron.optimizer import apply_gradients

    rows = []
    for number in range(steps):
        with torch.no_grad():
            for chunk in backend.model_chunks:
                chunk.zero_grad_buffer()
                for parameter in chunk.parameters():
                    parameter.main_grad.copy_(torch.sin(parameter.float() * 1000 + number))
        outcome = apply_gradients(backend.optimizer, backend.config.megatron.clip_grad)
        assert outcome.applied
        backend.scheduler.step(1)
        rows.append({"grad_norm": outcome.grad_norm, **all_fingerprints(backend)})
    answer(rows)
    backend.close()


def all_fingerprints(backend: Any) -> dict[str, str]:
    """One fingerprint for the weights, and one for each kind of state."""
    from slime.checkpoints.optimizer_state import held_state, parts
    from slime.engines.wire.buckets import fingerprint

    found: dict[str, list[str]] = {"weights": []}
    for chunk in backend.model_chunks:
        found["weights"] += [fingerprint(p.detach()) for p in chunk.parameters()]
    for part in parts(backend.optimizer):
        for run in held_state(part):
            for name, tensor in run.tensors.items():
                found.setdefault(name, []).append(fingerprint(tensor))
    return {name: " ".join(values) for name, values in found.items()}


def equal(args: argparse.Namespace) -> Row:
    flags: list[dict[str, Any]] = [{}, STREAMED]
    plain, streamed = (
        ranks.run(fingerprints_of_steps, 1, args.equal, more, args.equal_steps) for more in flags
    )
    same = [ours == theirs for ours, theirs in zip(streamed, plain, strict=True)]
    first = streamed[0]
    return {
        "shape": args.equal,
        "steps": args.equal_steps,
        "tensors": {name: len(str(value).split()) for name, value in first.items()},
        "grad_norms": [row["grad_norm"] for row in streamed],
        "equal_steps": same,
        "goals": [at_least("steps with the same bits", float(sum(same)), args.equal_steps)],
    }


# -- speed -----------------------------------------------------------------------------------------


def train(
    place: ranks.Place,
    answer: ranks.Answer,
    args: argparse.Namespace,
    flags: dict[str, Any],
    limit: float | None,
) -> None:
    """Answer with seconds, bytes and losses of whole steps.

    Args:
        limit: bytes that torch may take of the GPU.
    """
    import torch

    from slime.processes.footprint import own_bytes

    on_gpu = torch.cuda.is_available()
    if limit is not None and on_gpu:
        total = torch.cuda.get_device_properties(0).total_memory
        torch.cuda.set_per_process_memory_fraction(min(1.0, limit / total), 0)
    started = time.perf_counter()
    backend = new_backend(
        place, args.shape, max_tokens_per_gpu=args.max_tokens, recompute_granularity="full", **flags
    )
    set_up = time.perf_counter() - started
    from slime.trainer.megatron import device
    from slime.trainer.megatron.offload import torch_optimizers
    from slime.trainer.megatron.streamed import states_of

    optimizer_seconds: list[float] = []
    optim_step = backend.optim_step

    def timed_optim_step(*arguments: Any, **more: Any) -> Any:
        device.synchronize()
        before = time.perf_counter()
        outcome = optim_step(*arguments, **more)
        device.synchronize()
        optimizer_seconds.append(time.perf_counter() - before)
        return outcome

    backend.optim_step = timed_optim_step
    batch = make_batch(args, backend.spec.vocab_size, 0, 1)
    seconds: list[float] = []
    losses: list[float] = []
    if on_gpu:
        set_up_peak = torch.cuda.max_memory_reserved() / 1e9
    peaks: dict[str, float] = {}
    for _ in range(WARM_UP_STEPS + args.steps):
        device.synchronize()
        before = time.perf_counter()
        metrics = backend.train(batch)
        device.synchronize()
        seconds.append(time.perf_counter() - before)
        losses.append(metrics["train/loss"])
        for name, value in metrics.items():
            if name.endswith("_peak_memory_gb"):
                peaks[name] = max(value, peaks.get(name, 0.0))
    streams = [states_of(inner) for inner in torch_optimizers(backend.optimizer)]
    on_host = sum(
        flat.nbytes for states in streams if states is not None for flat in states.host.values()
    )
    seconds = seconds[WARM_UP_STEPS:]
    optimizer = statistics.median(optimizer_seconds[WARM_UP_STEPS:])
    row = {
        "set_up_seconds": set_up,
        "seconds": seconds,
        "tokens_per_second": args.tokens / statistics.median(seconds),
        "optimizer_seconds": optimizer_seconds,
        "optimizer_median": optimizer,
        "parameters": sum(p.numel() for c in backend.model_chunks for p in c.parameters()),
        "host_states_gb": on_host / 1e9,
        "host_rest_of_process_gb": (own_bytes(os.getpid()) - on_host) / 1e9,
        "link_gb_per_second": 2 * on_host / optimizer / 1e9,
        "peaks_gb": peaks,
        "losses": losses,
    }
    if on_gpu:
        row["set_up_reserved_gb"] = set_up_peak
        row["reserved_gb"] = torch.cuda.max_memory_reserved() / 1e9
    answer(row)
    backend.close()


def speed(args: argparse.Namespace, flags: dict[str, Any]) -> Row:
    row = ranks.run(train, 1, args, flags, None)
    goals = []
    if flags:
        goals.append(
            at_least("link, both ways", row["link_gb_per_second"], LEAST_GB_PER_SECOND, "GB/s")
        )
    return {"shape": args.shape, **row, "goals": goals}


def limited(args: argparse.Namespace) -> Row:
    flags = {**STREAMED, "accumulate_allreduce_grads_in_fp32": False}
    limit = args.limit_gib * 2**30
    row = ranks.run(train, 1, args, flags, limit)
    goals = [at_most("largest peak", max(row["peaks_gb"].values()), limit / 1e9, "GB")]
    return {"shape": args.shape, "limit_gb": limit / 1e9, **row, "goals": goals}


def parse_args(argv: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--equal", choices=SHAPES, default="qwen3-0.6b")
    parser.add_argument("--equal-steps", type=int, default=5)
    parser.add_argument("--shape", choices=SHAPES, default="qwen3-4b")
    parser.add_argument("--tokens", type=int, default=16384, help="per optimizer step")
    parser.add_argument("--length", type=int, default=2048, help="of each sequence")
    parser.add_argument("--max-tokens", type=int, default=4096, help="of a micro-batch")
    parser.add_argument("--steps", type=int, default=4)
    parser.add_argument("--limit-gib", type=float, default=24.0, help="of the last part")
    parser.add_argument("--only", nargs="+", choices=["equal", "speed", "limited"])
    add_arguments(parser)
    return parser.parse_args(argv)


def main(argv: list[str] | None = None) -> int:
    args = parse_args(argv)
    report = Report("streamed optimizer", args)
    chosen = args.only or ["equal", "speed", "limited"]
    if "equal" in chosen:
        report.case(f"{args.equal}, same bits", lambda: equal(args))
    for name, flags in SIDES.items() if "speed" in chosen else ():
        report.case(f"{args.shape}, {name}", lambda flags=flags: speed(args, flags))  # type: ignore[misc]
    if "limited" in chosen:
        report.case(f"{args.shape} in {args.limit_gib:g} GiB", lambda: limited(args))
    return report.finish()


if __name__ == "__main__":
    sys.exit(main())
