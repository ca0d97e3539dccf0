"""Pushes of a DeepSeek-V3-shaped model at several bucket sizes: engines must hold and compute the
same at each.

    # 1 GPU, 3 minutes
    python -m benchmarks.gpu.fused_pairs --out fused.jsonl \\
        --engine-flags "--attention-backend fa3 --sampling-backend pytorch \\
                        --grammar-backend none --cuda-graph-max-bs-decode 32 \\
                        --mem-fraction-static 0.3"
    # dry, on a CPU
    python -m benchmarks.gpu.fused_pairs --engine embedded --shape tiny-deepseek \\
        --buffer-bytes 8000000 30000 60000

SGLang concatenates ``q_a_proj`` and ``kv_a_proj_with_mqa`` of a layer within one load call, and a
bucket is a load call. For each size the engine first gets other weights in one large bucket, then
the trainer's in buckets of that size; trainer and engine then score the canary's tokens. One more
case pushes with the pairs torn apart, as at the smallest size without `slime.models.fused_loading`:
the receipt must name the halves.
"""

from __future__ import annotations

import argparse
import itertools
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from benchmarks.gpu import ranks
from benchmarks.gpu.report import Report, Row, at_least, at_most
from benchmarks.gpu.setting import engine, make_model, new_parser, workspace
from slime.config import make_config

LARGE = 512 << 20
#: The first holds everything, the second is smaller than a pair, and with the third boundaries fall
#: anywhere.
SIZES = (LARGE, 1_200_000, 5_000_000)
#: Of the same weights, scored twice by the same engine.
SAME = 1e-3


def parse_args(argv: list[str] | None = None) -> argparse.Namespace:
    parser = new_parser(__doc__)
    parser.set_defaults(shape="deepseek-v3-4-layers", rounds=1)
    parser.add_argument(
        "--buffer-bytes",
        type=int,
        nargs="+",
        default=list(SIZES),
        help="values of --update-weight-buffer-size",
    )
    return parser.parse_args(argv)


def main(argv: list[str] | None = None) -> int:
    args = parse_args(argv)
    report = Report("fused pairs", args)
    with workspace() as folder:
        report.case(
            f"buckets of {', '.join(map(str, args.buffer_bytes))}", lambda: measure(args, folder)
        )
    return report.finish()


def measure(args: argparse.Namespace, folder: Path) -> Row:
    model = make_model(args, folder)
    flags: dict[str, Any] = {
        "hf_checkpoint": str(model),
        "rollout_engine": args.engine,
        "colocate": True,
        "offload_train": False,
        "offload_rollout": False,
    }
    config = make_config(**flags, actor_num_gpus_per_node=1, rollout_batch_size=1, num_rollout=1)
    with engine(args, config, model, folder) as url:
        found: Row = ranks.run(
            push_at_each_size, 1, flags, url, args.buffer_bytes, args.engine == "sglang"
        )
    pushes = found["pushes"]
    first = pushes[0]["engine_log_probs"]
    apart = max(
        abs(one - other)
        for push in pushes
        for one, other in zip(first, push["engine_log_probs"], strict=True)
    )
    goals = [
        at_most("log-probs at any bucket size, largest difference between two", apart, SAME, ""),
        at_least(
            "tensors known to be loaded, of those sent",
            min(p["loaded"] / p["sent"] for p in pushes),
            1.0,
        ),
        at_least(
            "pairs with a fingerprint compared",
            min(p["pairs_compared"] / p["pairs"] for p in pushes),
            1.0,
        ),
    ]
    if args.engine == "sglang":
        named = found["torn"]["halves_named"]
        goals.append(
            at_least(
                "halves of torn pairs that the receipt names",
                named,
                found["torn"]["halves_sent_alone"],
            )
        )
    return {"shape": str(args.model or args.shape), "engine": args.engine, **found, "goals": goals}


def push_at_each_size(
    place: ranks.Place,
    answer: ranks.Answer,
    flags: dict[str, Any],
    url: str,
    sizes: list[int],
    with_torn: bool,
) -> None:
    """On the trainer's rank: a push for each size, and one that tears pairs apart."""
    from slime.engines.fleet import EngineFleet
    from slime.weights.canary import Canary
    from slime.weights.receipt import WeightMismatch

    backend = ranks.trainer(place, **flags)
    backend.setup()
    canary = Canary(backend.config, EngineFleet([url]))
    wanted = Weights(backend, seed=1)
    others = Weights(backend, seed=2)

    versions = itertools.count()

    def bring(
        weights: Weights, size: int, together: bool = True
    ) -> tuple[Any, list[set[str]], list[tuple[str, ...]]]:
        weights.put()
        return push(backend, url, flags, size, next(versions), together)

    found: Row = {"pushes": []}
    for size in sizes:
        bring(others, LARGE)
        receipt, buckets, groups = bring(wanted, size)
        expected = backend.canary_log_probs(canary.tokens)
        said = canary._ask("a weight push", "")[0]
        differences = [abs(one - other) for one, other in zip(expected, said, strict=True)]
        found["pushes"].append(
            {
                "buffer_bytes": size,
                "buckets": len(buckets),
                "bytes": receipt.nbytes,
                "sent": receipt.num_tensors,
                "loaded": receipt.loaded,
                "fingerprints": len(receipt.checked),
                "pairs": len(groups),
                "pairs_compared": sum(bool(set(group) & set(receipt.checked)) for group in groups),
                "pairs_torn": _torn(buckets, groups),
                "seconds": dict(receipt.seconds),
                "train_rollout_logprob_abs_diff": sum(differences) / len(differences),
                "train_rollout_logprob_abs_diff_max": max(differences),
                "engine_log_probs": said,
            }
        )
    if with_torn:
        bring(others, LARGE)
        try:
            _, buckets, groups = bring(wanted, min(sizes), together=False)
            found["torn"] = {
                "halves_named": 0,
                "halves_sent_alone": 2 * _torn(buckets, groups),
                "said": "nothing",
            }
        except WeightMismatch as error:
            halves = [line for line in error.mismatches if "not loaded" in line]
            found["torn"] = {
                "halves_named": len(halves),
                "halves_sent_alone": len(halves),
                "said": str(error),
            }
    answer(found)
    backend.close()


def push(
    backend: Any, url: str, flags: dict[str, Any], size: int, version: int, together: bool
) -> tuple[Any, list[set[str]], list[tuple[str, ...]]]:
    """The receipt, the names in each bucket, and the groups that must not be split."""
    from slime.engines.wire import buckets as wire
    from slime.weights.sync import WeightSync
    from slime.weights.transport import EngineSlots

    config = make_config(
        **flags,
        actor_num_gpus_per_node=1,
        rollout_batch_size=1,
        num_rollout=1,
        update_weight_buffer_size=size,
    )
    sync = WeightSync(config, backend.model_chunks, backend.hf_config, start_version=version)
    buckets: list[set[str]] = []
    pack: Callable[..., Any] = wire.pack

    def noted(tensors: Any, limit: int, dtype: Any, allocate: Any, groups: Any) -> Any:
        for bucket in pack(tensors, limit, dtype, allocate, groups if together else None):
            buckets.append({entry.name for entry in bucket.entries})
            yield bucket

    wire.pack = noted  # type: ignore[assignment]
    try:
        sync.connect([EngineSlots(url, (0,))])
        receipt = sync.push()
        return (
            receipt,
            buckets,
            sync._load_groups.among(name for names in buckets for name in sorted(names)),
        )
    finally:
        wire.pack = pack
        sync.close()


def _torn(buckets: list[set[str]], groups: list[tuple[str, ...]]) -> int:
    """Groups without a bucket that has all of their members."""
    return sum(not any(set(group) <= names for names in buckets) for group in groups)


class Weights:
    """The checkpoint's, each a few percent off, in a way that the seed decides."""

    def __init__(self, backend: Any, seed: int) -> None:
        import torch

        self._parameters = [
            parameter for chunk in backend.model_chunks for parameter in chunk.parameters()
        ]
        device = self._parameters[0].device
        generator = torch.Generator(device).manual_seed(seed)
        with torch.no_grad():
            self._values = [
                one
                * (
                    1
                    + 0.1
                    * torch.randn(one.shape, generator=generator, device=device, dtype=one.dtype)
                )
                for one in self._parameters
            ]

    def put(self) -> None:
        """Into the trainer's model."""
        import torch

        with torch.no_grad():
            for parameter, value in zip(self._parameters, self._values, strict=True):
                parameter.copy_(value)


if __name__ == "__main__":
    sys.exit(main())
