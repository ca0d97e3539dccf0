"""Adapters on a real engine: seconds of a push, alone and while requests run, and what an adapter
costs generation.

    # trainer and engine on one GPU
    python -m benchmarks.gpu.adapters --shape qwen3-4b --out adapters.json
    # a GPU each
    python -m benchmarks.gpu.adapters --shape qwen3-4b --way apart
    # dry, on a CPU
    python -m benchmarks.gpu.adapters --engine embedded --shape tiny --rank 8 --in-flight 4 \\
        --new-tokens 8 --rounds 2

A push is what a run does: the trainer's adapters are gathered and checked, loaded into the engine
under a name of their own, and what the engine holds is compared with what was sent. Both sides are
drawn anew before each push. While requests run, new ones name the newest version, and those under
way end with theirs; the next push waits until all name the newest.

Before the pushes, adapters of one kind of layer after the other (of gated projections, each half)
get random values and the others zeros, and both sides score the same tokens: an engine that puts a
half in the other's place, or does not apply a kind, differs by as much as the adapter's effect.

Generation is measured without the trainer: requests for the base and for an adapter in turns on the
same server, then for the base on a server that was started without adapters.
"""

from __future__ import annotations

import argparse
import asyncio
import multiprocessing as mp
import os
import random
import statistics
import sys
import threading
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import aiohttp

from benchmarks.gpu import ranks
from benchmarks.gpu.generation import empty_cache, speed_of, straight
from benchmarks.gpu.report import Report, Row, at_least, at_most
from benchmarks.gpu.setting import (
    await_engine,
    engine,
    gpu_ids,
    make_model,
    median,
    new_parser,
    workspace,
)
from slime.config import make_config
from slime.engines.adapters import ADAPTER_FIELD, UNLOAD_ADAPTER, adapter_name
from slime.engines.fleet import EngineFleet
from slime.engines.image_canary import scoring_request
from slime.weights.canary import canary_tokens

_PATIENCE = 300.0
_MOST_OF_EFFECT = 0.3  # a half in the wrong place differed by 0.8 and 1.1 of the effect
_UP_SCALE = 0.2  # standard deviation of B: adapters add about as much as the layer computes


def parse_args(argv: list[str] | None = None) -> argparse.Namespace:
    parser = new_parser(__doc__)
    parser.add_argument("--way", choices=["colocated", "apart"], default="colocated")
    parser.add_argument("--rank", type=int, default=32)
    parser.add_argument("--in-flight", type=int, default=256)
    parser.add_argument("--prompt-tokens", type=int, default=128)
    parser.add_argument("--new-tokens", type=int, default=512)
    return parser.parse_args(argv)


def main(argv: list[str] | None = None) -> int:
    args = parse_args(argv)
    report = Report("adapters", args)
    with workspace() as folder:
        report.case("with adapters", lambda: with_adapters(args, folder))
        base = [row["base_tokens_per_second"] for row in report.rows if "raw" in row]
        if base:
            report.case("without adapters", lambda: without_adapters(args, folder, base[0]))
    return report.finish()


def with_adapters(args: argparse.Namespace, folder: Path) -> Row:
    model = make_model(args, folder)
    flags = {**_flags(args, model), "lora_rank": args.rank}
    with engine(args, make_config(**flags), model, folder, gpu_ids(0, 1)) as url:
        go = mp.get_context("spawn").Event()
        traffic = Traffic(args, url, go)
        slot = 0 if args.way == "colocated" else 1
        gpu = "".join(gpu_ids(slot, 1))
        pushes = ranks.run(push, 1, flags, url, gpu, args.rounds, go, on_answer=traffic.follow)
        outcomes = traffic.stop()
        speeds = asyncio.run(generation(args, url, ["", traffic.name]))
    base, adapted = (median(speeds[name]) for name in ("", traffic.name))
    seconds = {when: median([one["total"] for one in pushes[when]]) for when in ("idle", "loaded")}
    lost = sum(count for reason, count in outcomes.items() if reason != "length")
    effects = pushes.pop("applied")
    return {
        "shape": str(args.model or args.shape),
        "lora_rank": args.rank,
        "bytes": pushes["idle"][-1]["bytes"],
        "push_seconds": seconds,
        "outcomes": dict(outcomes),
        "applied": effects,
        "base_tokens_per_second": base,
        "adapter_tokens_per_second": adapted,
        "raw": {**pushes, "tokens_per_second": list(speeds.values())},
        "goals": [
            at_most("push, no request in flight", seconds["idle"], 0.1, "s"),
            at_most(f"push, {args.in_flight} requests in flight", seconds["loaded"], 0.1, "s"),
            at_most("requests that did not end by themselves", lost, 0),
            at_least("tokens/s, adapter ÷ base", adapted / base, 0.85),
            *(
                at_most(
                    f"{kind}: trainer and engine differ, share of the adapter's effect",
                    one["differs"] / max(one["effect"], one["differs"], 1e-9),
                    _MOST_OF_EFFECT,
                )
                for kind, one in effects.items()
            ),
        ],
    }


def without_adapters(args: argparse.Namespace, folder: Path, base: float) -> Row:
    model = make_model(args, folder)
    with engine(args, make_config(**_flags(args, model)), model, folder, gpu_ids(0, 1)) as url:
        speeds = asyncio.run(generation(args, url, [""]))[""]
    return {
        "tokens_per_second": median(speeds),
        "with_adapters": base / median(speeds),
        "raw_speeds": speeds,
    }


def _flags(args: argparse.Namespace, model: Path) -> dict[str, Any]:
    flags: dict[str, Any] = {
        "hf_checkpoint": str(model),
        "rollout_engine": args.engine,
        "colocate": args.way == "colocated",
        "actor_num_gpus_per_node": 1,
        "rollout_batch_size": 1,
        "num_rollout": 1,
    }
    if args.engine == "embedded":
        flags["embedded_max_slots"] = args.in_flight
    elif args.way == "colocated":
        flags["sglang_mem_fraction_static"] = 0.6  # the trainer is awake beside the engine
    if args.way == "apart":
        flags["rollout_num_gpus"] = 1
    return flags


# -- the trainer's rank ----------------------------------------------------------------------------


def push(
    place: ranks.Place,
    answer: ranks.Answer,
    flags: dict[str, Any],
    url: str,
    gpu: str,
    rounds: int,
    go: Any,
) -> None:
    """Push ``rounds`` times alone, then ``rounds`` times when ``go`` is set; answer with each
    version of the latter, and with all receipts at the end."""
    if gpu:
        os.environ["CUDA_VISIBLE_DEVICES"] = gpu

    import torch

    from slime.weights.adapter_sync import AdapterSync
    from slime.weights.transport import EngineSlots

    backend = ranks.trainer(place, **flags)
    backend.setup()
    await_engine(url)
    sync = AdapterSync(backend.config, backend.pushed_chunks, backend.hf_config, backend.adapters)
    sync.connect([EngineSlots(url, (0,))])

    def one() -> Row:
        with torch.no_grad():
            for chunk in backend.model_chunks:
                for parameter in chunk.parameters():
                    if parameter.requires_grad:
                        parameter.normal_(0.0, 0.01)
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        receipt = sync.push(has_learned=True)
        return {**receipt.seconds, "bytes": receipt.nbytes, "checked": len(receipt.checked)}

    effects = applied(backend, sync, url)
    one()
    receipts: dict[str, Any] = {
        "applied": effects,
        "idle": [one() for _ in range(rounds)],
        "loaded": [],
    }
    answer(sync.version)
    for _ in range(rounds):
        if not go.wait(_PATIENCE):
            raise TimeoutError("the requests did not come")
        go.clear()
        receipts["loaded"].append(one())
        answer(sync.version)
    if not go.wait(_PATIENCE):
        raise TimeoutError("requests do not end")
    answer(receipts)
    sync.close()
    backend.close()


def applied(backend: Any, sync: Any, url: str) -> dict[str, Row]:
    """Push adapters of one kind of layer after the other. Return for each kind its mean effect on
    log-probs in the trainer, and the mean difference of trainer and engine.

    The first push compares the base.
    """
    import torch

    from slime.trainer.megatron.adapters import LowRankAdapter

    fleet = EngineFleet([url])
    tokens = canary_tokens(backend.spec.vocab_size, 64)
    base = backend.canary_log_probs(tokens, base=True)
    kinds: dict[str, list[tuple[Any, int]]] = {}
    for chunk in backend.model_chunks:
        for name, module in chunk.named_modules():
            if isinstance(module, LowRankAdapter):
                kind = ".".join(name.split(".")[-3:-1])  # "experts.linear_fc1", for example
                for half in range(module.halves):
                    label = f"{kind}, {('gate', 'up')[half]}" if module.halves > 1 else kind
                    kinds.setdefault(label, []).append((module, half))
    adapters = list(dict.fromkeys(module for found in kinds.values() for module, _ in found))
    effects: dict[str, Row] = {}
    for kind, found in kinds.items():
        with torch.no_grad():
            for adapter in adapters:
                other = adapter.down if adapter.begins_with_zeros is adapter.up else adapter.up
                other.normal_(0.0, other.size(-1) ** -0.5)
                adapter.begins_with_zeros.zero_()
            for adapter, half in found:
                side = adapter.begins_with_zeros
                rows = side if adapter.halves == 1 else side.chunk(2, dim=-2)[half]
                rows.normal_(0.0, _UP_SCALE)
        ours = backend.canary_log_probs(tokens)
        sync.push()
        name = adapter_name(sync.version)
        [theirs] = fleet.post(
            "/generate", scoring_request(tokens) | {ADAPTER_FIELD: name}, _PATIENCE
        )
        fleet.post(UNLOAD_ADAPTER, {"lora_name": name}, _PATIENCE)
        scores = [entry[0] for entry in theirs["meta_info"]["input_token_logprobs"][1:]]
        effects[kind] = {
            "effect": _distance(ours, base),
            "differs": _distance(ours, scores),
        }
    fleet.close()
    return effects


def _distance(one: Sequence[float], other: Sequence[float]) -> float:
    return statistics.fmean(abs(a - b) for a, b in zip(one, other, strict=True))


# -- requests --------------------------------------------------------------------------------------


class Traffic:
    """Keeps ``--in-flight`` requests open, each for the newest adapter when it begins."""

    def __init__(self, args: argparse.Namespace, url: str, go: Any) -> None:
        self.name = ""
        self._args = args
        self._url = url
        self._go = go
        self._open: Counter[str] = Counter()
        self._outcomes: Counter[str] = Counter()
        self._is_told = False
        self._ends = threading.Event()
        self._thread = threading.Thread(target=lambda: asyncio.run(self._serve()), daemon=True)

    def follow(self, answer: Any) -> None:
        """Take a version that the trainer has pushed."""
        if not isinstance(answer, int):
            return
        older, self.name = self.name, adapter_name(answer)
        self._is_told = False
        if not older:
            self._thread.start()

    def stop(self) -> Counter[str]:
        """Wait for the open requests; how many ended how."""
        self._ends.set()
        self._thread.join()
        return self._outcomes

    async def _serve(self) -> None:
        connector = aiohttp.TCPConnector(limit=0)
        timeout = aiohttp.ClientTimeout(3600)
        async with aiohttp.ClientSession(connector=connector, timeout=timeout) as session:
            workers = [self._work(session, number) for number in range(self._args.in_flight)]
            await asyncio.gather(self._tell(session), *workers)

    async def _work(self, session: aiohttp.ClientSession, seed: int) -> None:
        generator = random.Random(seed)
        while not self._ends.is_set():
            name = self.name
            body = {
                "input_ids": [generator.randrange(256) for _ in range(self._args.prompt_tokens)],
                "sampling_params": {
                    "temperature": 1.0,
                    "max_new_tokens": self._args.new_tokens,
                    "ignore_eos": True,
                },
                ADAPTER_FIELD: name,
            }
            self._open[name] += 1
            async with session.post(f"{self._url}/generate", json=body) as answer:
                said: Any = await answer.json()
            self._open[name] -= 1
            reason = said["meta_info"]["finish_reason"]["type"] if answer.status == 200 else "error"
            self._outcomes[reason] += 1

    async def _tell(self, session: aiohttp.ClientSession) -> None:
        """Unload what no request uses, and let the next push begin."""
        while not self._ends.is_set():
            await asyncio.sleep(0.2)
            if self._is_told or self._open[self.name] < self._args.in_flight:
                continue
            for old in [name for name in self._open if name != self.name]:
                del self._open[old]
                async with session.post(
                    self._url + UNLOAD_ADAPTER, json={"lora_name": old}
                ) as answer:
                    answer.raise_for_status()
            self._is_told = True
            self._go.set()


async def generation(
    args: argparse.Namespace, url: str, names: list[str]
) -> dict[str, list[float]]:
    """Tokens per second of each adapter ("": the base), in turns."""
    generator = random.Random(0)
    prompts = [
        [generator.randrange(256) for _ in range(args.prompt_tokens)]
        for _ in range(2 * args.in_flight)
    ]
    params = {"temperature": 1.0, "max_new_tokens": args.new_tokens, "ignore_eos": True}
    connector = aiohttp.TCPConnector(limit=0)
    async with aiohttp.ClientSession(
        connector=connector, timeout=aiohttp.ClientTimeout(3600)
    ) as session:
        sends = {
            name: straight(session, url, params, **({ADAPTER_FIELD: name} if name else {}))
            for name in names
        }
        speeds: dict[str, list[float]] = {name: [] for name in names}
        for send in sends.values():  # warm-up
            await speed_of(send, prompts[: args.in_flight], args.in_flight)
        for number in range(args.rounds):
            for name in names if number % 2 == 0 else reversed(names):
                await empty_cache(session, url)
                speeds[name].append(await speed_of(sends[name], prompts, args.in_flight))
    return speeds


if __name__ == "__main__":
    sys.exit(main())
