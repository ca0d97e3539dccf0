"""What a token's linear layers cost by format, in SGLang's kernels: why quantised engines are as
fast as they are.

    python -m benchmarks.gpu.linear_layers --out results.jsonl

One GPU, no server: the four products of a layer of Qwen3-4B's shape for so many tokens at once,
with what each format does to the activations before. A CUDA graph of several layers is replayed, so
that launches do not count and weights come from memory as in a model. Microseconds of a layer.
"""

from __future__ import annotations

import argparse
import statistics
import sys
from collections.abc import Callable
from functools import partial
from typing import Any

import torch

from benchmarks.gpu.report import Report, Row, add_arguments
from slime.engines.wire.quantised import quantise
from slime.models.quantised import Fp8

#: Outputs and inputs.
PRODUCTS = {"qkv": (6144, 2560), "o": (2560, 4096), "gate_up": (19456, 2560), "down": (2560, 9728)}
TOKENS = (1, 16, 64, 256)
_BLOCK = 128
Product = Callable[[torch.Tensor], Any]


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--repeats", type=int, default=20)
    add_arguments(parser)
    args = parser.parse_args(argv)
    report = Report("linear_layers", args)
    for name, make in KINDS.items():
        report.case(name, partial(_of_kind, make, args))
    return report.finish()


def _of_kind(make: Callable[[torch.Tensor], Product], args: argparse.Namespace) -> Row:
    row: Row = {}
    layers = [
        {
            name: make(torch.randn(shape, device="cuda", dtype=torch.bfloat16) * 0.02)
            for name, shape in PRODUCTS.items()
        }
        for _ in range(args.layers)
    ]
    for tokens in TOKENS:
        inputs = {
            name: torch.randn(tokens, shape[1], device="cuda").bfloat16()
            for name, shape in PRODUCTS.items()
        }
        of_all = {
            name: _microseconds([layer[name] for layer in layers], inputs[name], args)
            for name in PRODUCTS
        }
        row[f"{tokens} tokens"] = {"layer": round(sum(of_all.values()), 1), **of_all}
    return row


def _microseconds(products: list[Product], x: torch.Tensor, args: argparse.Namespace) -> float:
    """Of one product, on average over the layers; the median of the repeats."""
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):  # compiles, before it is captured
        for product in products[:2]:
            product(x)
    stream.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for product in products:
            product(x)
    seen = []
    for _ in range(args.repeats):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        graph.replay()
        end.record()
        end.synchronize()
        seen.append(1000 * begin.elapsed_time(end) / len(products))
    return round(statistics.median(seen), 1)


def _bfloat16(weight: torch.Tensor) -> Product:
    return lambda x: torch.nn.functional.linear(x, weight)


def _fp8_by_block(weight: torch.Tensor) -> Product:
    from sglang.srt.layers.quantization.fp8_utils import triton_w8a8_block_fp8_linear

    numbers, scale = quantise("m", weight, Fp8((_BLOCK, _BLOCK))).values()
    return lambda x: triton_w8a8_block_fp8_linear(x, numbers, [_BLOCK, _BLOCK], scale)


#: DeepGEMM, SGLang's other choice for FP8, compiles for more than ten minutes, and pushes to it are
#: refused.
KINDS: dict[str, Callable[[torch.Tensor], Product]] = {
    "bf16": _bfloat16,
    "fp8-block, Triton": _fp8_by_block,
}

if __name__ == "__main__":
    sys.exit(main())
