"""Quantised weights in SGLang: which ways of pushing end right, what a push costs, how fast it
generates.

    python -m benchmarks.gpu.quantised --layers 16 --out results.jsonl --budget 400 \\
        --engine-flags "--attention-backend fa3 --sampling-backend pytorch --grammar-backend none"
    # tiny shapes on a CPU
    PYTHONPATH=.:tests/support/fake_sglang python -m benchmarks.gpu.quantised --dry

One GPU. For each shape and format an engine is started from files with the weights B; what its
processes then hold, in the form of their kernels, and what it answers are the reference. A way is
right if other weights A pushed by it change the answers, and B pushed by it brings every parameter
back bit for bit, and the answers. Ways:

    handles                   buckets by CUDA handles, into SGLang's load_weights, as for plain
                              weights
    open, handles, close      the same between two requests (`slime.engines.sglang.loadable`)
    open, runs, close         the same with a layer's experts as one tensor, as training runs push
                              them
    open, gloo, close         by broadcast, as to engines on separate GPUs
    disk; open, disk, close   /update_weights_from_disk

Then pushes with the conversion of the weights, tokens per second, ways that may end an engine, and
what the embedded engine answers, which computes with the weights that the stored ones stand for.
Each result is a line at once.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import multiprocessing as mp
import random
import statistics
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any

import torch

from benchmarks.gpu.quantised_engine import SECONDS, Engine, Seen, synchronise
from benchmarks.gpu.quantised_models import (
    FORMATS,
    OTHER,
    SERVED,
    Sizes,
    Weights,
    differing_bits,
    in_runs,
    plain,
    stored,
    write_models,
)  # fmt: skip
from benchmarks.gpu.quantised_servers import (
    Server,
    as_ready,
    compile_kernels,
    start_servers,
    stop_all,
)
from benchmarks.gpu.report import Report, Row, add_arguments, at_least, at_most
from benchmarks.gpu.setting import median, workspace

OPENED = "open, handles, close"
OPENED_RUNS = "open, runs, close"
#: Ways to try on each engine, those that may end it last.
WAYS = ("open, gloo, close", "open, disk, close", "handles", "disk")


def parse_args(argv: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--shapes", nargs="+", default=["qwen3-4b", "qwen3-moe-4b"])
    add("--formats", nargs="+", choices=list(FORMATS), default=list(FORMATS))
    add("--layers", type=int, default=16, help="the first of each shape, at most")
    add("--models", type=Path, help="keep the models there, and use those that are there")
    add("--engine", choices=["sglang", "embedded"], default="sglang")
    add("--engine-flags", default="", help="of SGLang's servers, in one word")
    add("--no-graphs", action="store_true", help="start without CUDA graphs at once")
    add("--no-deep-gemm", action="store_true", help="FP8 blocks with Triton's kernels alone")
    add("--known-ways", action="store_true", help="only the ways that should be right")
    add("--rounds", type=int, default=3, help="pushes and generations that are timed")
    add("--in-flight", type=int, default=64)
    add("--new-tokens", type=int, default=256)
    add("--dry", action="store_true", help="tiny shapes and few tokens")
    add("--logs", type=Path, help="copy the servers' logs there")
    add_arguments(parser)
    args = parser.parse_args(argv)
    args.sizes = Sizes(args.layers, 128, 128)
    if args.dry:
        args.shapes = ["tiny", "tiny-moe"]
        args.in_flight = 4
        args.new_tokens = 8
        args.rounds = 1
        args.sizes = Sizes(2, 32, 16)
    return args


def main(argv: list[str] | None = None) -> int:
    args = parse_args(argv)
    report = Report("quantised", args)
    with workspace() as scratch, ExitStack() as stack:
        folder = args.models or scratch
        bench = Bench(args, report, folder)
        stack.callback(bench.close)
        bench.start()
        for server in as_ready(bench.servers, report.end - 20):
            if server.ready.is_set():
                report.case(f"{server.name}: served", partial(bench.serve, server))
                report.case(
                    f"{server.name}: {bench.known_way(server)}", partial(bench.try_known, server)
                )
            else:
                report.add(f"{server.name}: start", {"error": server.failure})
        for server in bench.living():
            report.case(f"{server.name}: generation", partial(bench.generate, server))
        for server in bench.living():
            report.case(f"{server.name}: push", partial(bench.time_pushes, server))
        for shape in args.shapes:
            for server in bench.living(shape):
                for way in [] if args.known_ways else bench.ways(server):
                    report.case(f"{server.name}: {way}", partial(bench.try_way, server, way))
                server.stop()
            bench.start_references(shape)
        for server in as_ready(bench.references, report.end - 2):
            report.case(f"{server.name}: embedded", partial(bench.compare_reference, server))
        bench.summarise()
    return report.finish()


class Bench:
    """What the cases share.

    Attributes:
        fresh: by server, what it held and said when it was started from its files.
        broken: names of servers that `known_way` failed on.
    """

    def __init__(self, args: argparse.Namespace, report: Report, folder: Path) -> None:
        self.args = args
        self.report = report
        self.folder = folder
        self.servers: list[Server] = []
        self.references: list[Server] = []
        self.fresh: dict[str, Seen] = {}
        self.broken: set[str] = set()
        self.push_seconds: dict[str, float] = {}
        self.speeds: dict[str, float] = {}
        self._weights: dict[tuple[str, int], Weights] = {}
        self._engines: dict[str, Engine] = {}
        self._children: list[Any] = []

    def start(self) -> None:
        """Models, kernels and servers, side by side; returns at once."""
        self._children += compile_kernels(self.folder / "logs" / "kernels.log")
        context = mp.get_context("spawn")
        for shape in self.args.shapes:
            path = self.folder / shape
            if not (path / "bf16" / "config.json").exists():
                path.mkdir(parents=True, exist_ok=True)
                maker = context.Process(target=write_models, args=(shape, self.args.sizes, path))
                maker.start()
                self._children.append(maker)
        on_gpu = torch.cuda.is_available()
        self.servers = start_servers(
            self.folder,
            self.args.shapes,
            self.args.formats,
            self.args.engine_flags,
            wait=max(30.0, self.report.seconds_left - 40),
            engine=self.args.engine,
            graphs=on_gpu and not self.args.no_graphs,
            deep_gemm=on_gpu and not self.args.no_deep_gemm,
        )

    def start_references(self, shape: str) -> None:
        """Embedded engines of a shape's models; its other servers have given their memory back."""
        if self.args.engine == "sglang" and self.report.seconds_left > 30:
            self.references += start_servers(
                self.folder,
                [shape],
                self.args.formats,
                "",
                wait=max(1.0, self.report.seconds_left - 5),
                engine="embedded",
                graphs=False,
                deep_gemm=False,
            )

    def known_way(self, server: Server) -> str:
        """The way that should be right."""
        is_plain = server.form == "bf16" or (
            server.form == "fp8-block" and server.name in self.broken
        )
        return "handles" if is_plain else OPENED

    def pushed_way(self, server: Server) -> str:
        """As runs of training push: with experts in runs, where there are any."""
        known = self.known_way(server)
        if "moe" not in server.shape:
            return known
        return OPENED_RUNS if known == OPENED else "runs"

    def ways(self, server: Server) -> list[str]:
        """Those to try besides; a broadcast for the first shape alone, since it is not the shape's
        business."""
        if server.form == "bf16":
            return ["disk"]
        return [way for way in WAYS if "gloo" not in way or server.shape == self.args.shapes[0]]

    def living(self, shape: str | None = None) -> Iterator[Server]:
        """Servers that were seen sound; the death of others is reported."""
        for server in [server for server in self.servers if shape in (None, server.shape)]:
            if server.name in self.fresh and server.is_alive():
                yield server
            elif server.name in self.fresh and not server.over.is_set():
                server.over.set()
                self.report.add(f"{server.name}: end", {"error": server.why()})

    def close(self) -> None:
        stop_all([*self.servers, *self.references])
        for engine in self._engines.values():
            engine.close()
        for child in self._children:
            child.kill()
        if self.args.logs is not None:
            self.args.logs.mkdir(parents=True, exist_ok=True)
            for log in [*(self.folder / "logs").glob("*.log"), *self.folder.glob("*/made.jsonl")]:
                data = log.read_bytes()[-400_000:]
                (self.args.logs / f"{log.parent.name}-{log.name}").write_bytes(data)

    # -- cases -------------------------------------------------------------------------------------

    def serve(self, server: Server) -> Row:
        """What it holds and says fresh from its files; asked twice, to see what two answers differ
        by."""
        engine = self._engine(server)
        seen = engine.look()
        again = engine.look()
        self.fresh[server.name] = seen
        plain_one = self.fresh.get(f"{server.shape}/bf16")
        row: Row = {
            "seconds_to_ready": server.seconds,
            "cuda_graphs": server.graphs,
            "parameters": len(seen.state),
            "noise": seen.distance(again),
            "spread": statistics.pstdev(seen.log_probs),
            "answers_alike": seen.answers == again.answers,
            "state_alike": seen.state == again.state,
        }
        if plain_one is not None and plain_one is not seen:
            row["format_error"] = seen.distance(plain_one)
        made = self.folder / server.shape / "made.jsonl"
        if made.exists():
            row["converted"] = [json.loads(line) for line in made.read_text().splitlines()]
            row["converted"] = [one for one in row["converted"] if one["format"] == server.form]
        return row

    def try_known(self, server: Server) -> Row:
        """The way that should be right: alone, after a reset of all weights, and after a sleep."""
        way = self.known_way(server)
        row = self.try_way(server, way)
        if row["verdict"] == "error":
            self.broken.add(server.name)
            return row
        engine = self._engine(server)
        fresh = self.fresh[server.name]
        engine.fleet.post("/weights_checker", {"action": "reset_tensors"}, SECONDS)
        engine.push(way, self._stored(server, SERVED))
        row["after_reset"] = fresh.verdict(engine.look())
        if self.args.engine == "sglang":
            tags = ["kv_cache", "weights"]
            engine.fleet.post("/release_memory_occupation", {"tags": tags}, SECONDS)
            engine.fleet.post("/resume_memory_occupation", {"tags": ["weights"]}, SECONDS)
            engine.push(way, self._stored(server, SERVED), resume=lambda: engine.fleet.post(
                "/resume_memory_occupation", {"tags": ["kv_cache"]}, SECONDS))  # fmt: skip
            row["after_sleep"] = fresh.verdict(engine.look())
        self.report.add(f"{server.name}: opened", row)
        if "moe" in server.shape:
            for seed in (OTHER, SERVED):
                engine.push(self.pushed_way(server), self._pushed(server, seed))
            row["runs"] = fresh.verdict(engine.look())
        return {"verdict": row["verdict"], "repeated": [row.get(key, {}).get("verdict") for key in
                ("after_reset", "after_sleep", "runs")]}  # fmt: skip

    def try_way(self, server: Server, way: str) -> Row:
        """Push other weights and then those of the files; where the files are read, push the others
        as is known."""
        engine = self._engine(server)
        fresh = self.fresh[server.name]
        if not server.is_alive():
            return {"verdict": "skipped", "why": "the engine has ended", "cause": server.why()}
        known = self.known_way(server)
        row: Row = {"way": way}
        try:
            row["seconds_there"] = engine.push(
                known if "disk" in way else way, self._stored(server, OTHER)
            )
            other = engine.look()
            row["moved"] = fresh.distance(other)
            row["seconds"] = engine.push(way, self._stored(server, SERVED), server.model)
            row |= fresh.verdict(engine.look())
            if row["verdict"] == "right" and not row["moved"] > 10 * (row["distance"] + 1e-3):
                row["verdict"] = "wrong: other weights change nothing"
        except Exception as error:  # the next way may work
            time.sleep(1.0)
            row |= {"verdict": "error", "why": str(error)[:600], "engine_lives": server.is_alive()}
            if not server.is_alive():
                row["cause"] = server.why()
            elif way != known:
                engine.push(known, self._stored(server, SERVED))
                row["brought_back"] = fresh.verdict(engine.look())
        return row

    def time_pushes(self, server: Server) -> Row:
        """Seconds of pushes with the conversion, as runs do them; the first one warms up."""
        engine = self._engine(server)
        way = self.pushed_way(server)
        plain = list(in_runs(self._plain(server.shape, SERVED)) if "runs" in way else
                     self._plain(server.shape, SERVED).items())  # fmt: skip
        pushes = [
            engine.push(way, stored(plain, server.model)) for _ in range(self.args.rounds + 1)
        ]
        first = pushes[0]
        rounds = pushes[1:]
        seconds = median([one["total"] for one in rounds])
        self.push_seconds[server.name] = seconds
        synchronise()
        started = time.perf_counter()
        made = list(stored(plain, server.model))
        launched = time.perf_counter() - started
        synchronise()
        row: Row = {
            "way": way,
            "seconds": seconds,
            "first": first,
            "raw": rounds,
            "tensors": len(made),
            "conversion_launched": launched,
            "conversion_alone": time.perf_counter() - started,
            "converted_before": [engine.push(way, iter(made)) for _ in range(2)][1],
        }
        if server.form != "bf16":
            row["weights_of_8_with_other_bits_than_on_cpu"] = differing_bits(
                self._plain(server.shape, SERVED), server.model
            )
        base = self.push_seconds.get(f"{server.shape}/bf16")
        if base is not None and server.form != "bf16":
            row["goals"] = [at_most("push, ÷ bf16", seconds / base, 2.0)]
        return row

    def generate(self, server: Server) -> Row:
        rates = asyncio.run(_tokens_per_second(server.url, self.args, _vocabulary(server)))
        speed = self.speeds[server.name] = median(rates)
        row: Row = {
            "tokens_per_second": speed,
            "in_flight": self.args.in_flight,
            "cuda_graphs": server.graphs,
        }
        base = self.speeds.get(f"{server.shape}/bf16")
        if base is not None and server.form != "bf16":
            row["goals"] = [at_least("generation, ÷ bf16", speed / base, 1.2)]
        return {**row, "raw": rates}

    def compare_reference(self, server: Server) -> Row:
        """The embedded engine's answers to the same prompts, with what the same files stand for."""
        if not server.ready.is_set():
            return {"error": server.failure}
        engine = Engine(server.url, _vocabulary(server), None)
        said = engine.log_probs(prompts=4, new_tokens=1)
        engine.close()
        server.stop()
        return {
            "distances": {
                name: seen.distance(Seen(said, [], {}))
                for name, seen in self.fresh.items()
                if name.startswith(f"{server.shape}/")
            },
            "same_format": server.form,
        }

    def summarise(self) -> None:
        rows = [row for row in self.report.rows if "verdict" in row]
        self.report.add("verdicts", {row["case"]: row["verdict"] for row in rows})

    # -- inside ------------------------------------------------------------------------------------

    def _engine(self, server: Server) -> Engine:
        if server.name not in self._engines:
            self._engines[server.name] = Engine(server.url, _vocabulary(server), self.folder)
        return self._engines[server.name]

    def _plain(self, shape: str, seed: int) -> Weights:
        if (shape, seed) not in self._weights:
            from slime.models import read_hf_config

            self._weights[shape, seed] = plain(read_hf_config(self.folder / shape / "assets"), seed)
        return self._weights[shape, seed]

    def _stored(self, server: Server, seed: int) -> Iterator[tuple[str, torch.Tensor]]:
        return stored(self._plain(server.shape, seed).items(), server.model)

    def _pushed(self, server: Server, seed: int) -> Iterator[tuple[str, torch.Tensor]]:
        return stored(in_runs(self._plain(server.shape, seed)), server.model)


def _vocabulary(server: Server) -> int:
    return int(json.loads((server.model / "config.json").read_text())["vocab_size"])


async def _tokens_per_second(url: str, args: argparse.Namespace, vocabulary: int) -> list[float]:
    import aiohttp

    from benchmarks.gpu.generation import empty_cache, speed_of, straight

    draw = random.Random(1)
    prompts = [[draw.randrange(vocabulary) for _ in range(128)] for _ in range(2 * args.in_flight)]
    params = {"temperature": 1.0, "max_new_tokens": args.new_tokens, "ignore_eos": True}
    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)) as session:
        send = straight(session, url, params)
        await speed_of(send, prompts[: args.in_flight], args.in_flight)  # warm-up
        rates = []
        for _ in range(min(2, args.rounds)):
            await empty_cache(session, url)
            rates.append(await speed_of(send, prompts, args.in_flight))
        return rates


if __name__ == "__main__":
    sys.exit(main())
