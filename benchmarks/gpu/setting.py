"""What the measurements of engines share: random weights, engines and routers as processes, results as JSON."""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

from benchmarks.gpu.trainer import SHAPES
from slime.cluster.ports import reserve_port
from slime.cluster.server_process import ServerProcess
from slime.config import Config
from slime.rollout.engines.launch import LaunchSpec, embedded_command, router_command, sglang_command
from slime.rollout.engines.sglang.command import EnginePlace

HOST = "127.0.0.1"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Those that every measurement has."""
    parser.add_argument("--shape", choices=list(SHAPES), default="qwen3-0.6b", help="random weights of this shape")
    parser.add_argument("--model", type=Path, help="a Hugging Face directory instead of random weights")
    parser.add_argument("--engine", choices=["sglang", "embedded"], default="sglang")
    parser.add_argument("--engine-flags", default="", help="more flags for the engine's server, in one word")
    parser.add_argument("--rounds", type=int, default=5, help="measurements; medians are reported (default: 5)")
    parser.add_argument("--out", type=Path, help="append results to this file, one JSON object per line")


def make_model(args: argparse.Namespace, folder: Path) -> Path:
    """``--model``, or a directory with random weights in bfloat16 and a byte tokenizer."""
    if args.model is not None:
        return Path(args.model)
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    settings = dict(SHAPES[args.shape])
    kind = settings.pop("model_type")
    path = folder / args.shape
    with torch.device("cuda" if torch.cuda.is_available() else "cpu"):
        config = AutoConfig.for_model(kind, **settings, eos_token_id=257, bos_token_id=None)
        model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    model.save_pretrained(path)
    _byte_tokenizer().save_pretrained(path)
    return path


def _byte_tokenizer() -> Any:
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    vocabulary = {character: i for i, character in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    vocabulary |= {"<pad>": 256, "<eos>": 257}
    tokenizer = Tokenizer(models.BPE(vocabulary, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)  # type: ignore[assignment]
    tokenizer.decoder = decoders.ByteLevel()  # type: ignore[assignment]
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token="<pad>", eos_token="<eos>")


@contextmanager
def workspace() -> Iterator[Path]:
    with tempfile.TemporaryDirectory(prefix="slime-benchmark-") as folder:
        yield Path(folder)


@contextmanager
def engines(
    args: argparse.Namespace, config: Config, model: Path, folder: Path, gpus: Sequence[tuple[str, ...]] = ((),)
) -> Iterator[list[str]]:
    """Base URLs of one engine for each entry of ``gpus`` (the ids that it sees; () for the environment's)."""
    with ExitStack() as stack:
        started = []
        for number, own in enumerate(gpus):
            held = [reserve_port(HOST), reserve_port(HOST)]
            for reservation in held:
                stack.callback(reservation.release)
            port = held[0].port
            if args.engine == "sglang":
                place = EnginePlace(number, own, max(1, len(own)), held[1].port)
                spec = sglang_command(config, str(model), HOST, port, place)
            else:
                spec = embedded_command(config, str(model), HOST, port)
            spec.argv.extend(args.engine_flags.split())
            started.append(_start(stack, f"engine-{number}", spec, port, folder))
        for process in started:
            process.wait_ready()
        yield [process.url for process in started]


@contextmanager
def router(config: Config, folder: Path, urls: list[str]) -> Iterator[str]:
    import asyncio

    from slime.rollout.router import register_workers

    with ExitStack() as stack:
        reservation = reserve_port(HOST)
        stack.callback(reservation.release)
        spec = router_command(config, HOST, reservation.port, urls)
        process = _start(stack, "router", spec, reservation.port, folder)
        process.wait_ready()
        asyncio.run(register_workers(process.url, urls, timeout=60.0))
        yield process.url


def _start(stack: ExitStack, name: str, spec: LaunchSpec, port: int, folder: Path) -> ServerProcess:
    process = ServerProcess(name, spec, f"http://{HOST}:{port}", folder / f"{name}.log")
    process.start()
    stack.callback(process.stop)
    return process


def device_name() -> str:
    import torch

    return torch.cuda.get_device_name() if torch.cuda.is_available() else "CPU"


def publish(args: argparse.Namespace, row: dict[str, Any]) -> None:
    """Print a result, and keep it with ``--out``."""
    row = {"device": device_name(), "shape": str(args.model or args.shape), "engine": args.engine, **row}
    json.dump(row, sys.stdout)
    print(flush=True)
    if args.out is not None:
        with open(args.out, "a", encoding="utf-8") as file:
            file.write(json.dumps(row) + "\n")


def median(values: Sequence[float]) -> float:
    return float(statistics.median(values))
