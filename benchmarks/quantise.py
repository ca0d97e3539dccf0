"""How fast `slime convert` quantises, and how much memory it takes beside the files that are
mapped.

    # 0.6B parameters in 4 shards, on this machine's cores
    python benchmarks/quantise.py
    python benchmarks/quantise.py --layers 8 --shards 8

Random weights of Qwen3-0.6B's shape are written once; each conversion runs in a process of its own,
whose anonymous memory is looked at every 20 ms.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import torch
from safetensors.torch import save_file

from slime.checkpoints.hf_files import INDEX
from slime.models import family_of

SHAPE = {
    "model_type": "qwen3",
    "architectures": ["Qwen3ForCausalLM"],
    "vocab_size": 151936,
    "hidden_size": 1024,
    "intermediate_size": 3072,
    "num_attention_heads": 16,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "tie_word_embeddings": True,
    "dtype": "bfloat16",
}
COMMANDS = {
    "INT4, groups of 32": ("hf-to-int4", "--group_size", "32"),
    "INT4, groups of 128, asymmetric": ("hf-to-int4", "--group_size", "128", "--asymmetric"),
    "FP8, blocks of 128×128": ("hf-to-fp8",),
    "FP8 per tensor": ("hf-to-fp8", "--per_tensor"),
}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--layers", type=int, default=28)
    parser.add_argument("--shards", type=int, default=4)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        plain = Path(folder) / "plain"
        largest = write(plain, options.layers, options.shards)
        print(f"{options.layers} layers in {options.shards} shards of up to {largest / 1e6:.0f} MB")
        # the command's own imports are more than this, and are the same for all
        idle = measured("--help")[1]
        for number, (title, words) in enumerate(COMMANDS.items()):
            target = Path(folder) / str(number)
            seconds, peak = measured(
                *words, "--hf_model_path", str(plain), "--save_path", str(target)
            )
            size = sum(path.stat().st_size for path in target.glob("*.safetensors"))
            back, peak_back = measured(
                "quantised-to-hf", "--hf_model_path", str(target), "--save_path", f"{target}-back"
            )
            print(
                f"{title:32}  {seconds:5.1f} s, {size / 1e6:6.0f} MB, peak "
                f"{(peak - idle) / 1e6:4.0f} MB"
                f"    and back {back:5.1f} s, peak {(peak_back - idle) / 1e6:4.0f} MB"
            )


def write(directory: Path, layers: int, shards: int) -> int:
    """Bytes of the largest shard."""
    config = {**SHAPE, "num_hidden_layers": layers}
    family = family_of(config)
    directory.mkdir()
    (directory / "config.json").write_text(json.dumps(config))
    names = list(family.hf_tensors(family.describe(config)))
    where: dict[str, str] = {}
    for number in range(shards):
        file = f"model-{number + 1:05d}-of-{shards:05d}.safetensors"
        part = names[number * len(names) // shards : (number + 1) * len(names) // shards]
        save_file(
            {name: (torch.randn(shape) * 0.02).bfloat16() for name, shape in part}, directory / file
        )
        where |= {name: file for name, _ in part}
    (directory / INDEX).write_text(json.dumps({"metadata": {}, "weight_map": where}))
    return max(path.stat().st_size for path in directory.glob("*.safetensors"))


def measured(*words: str) -> tuple[float, int]:
    """Seconds, and the largest anonymous memory in bytes, of a `slime convert`."""
    started = time.perf_counter()
    peak = 0
    child = subprocess.Popen(
        [sys.executable, "-m", "slime", "convert", *words], stdout=subprocess.DEVNULL
    )
    while child.poll() is None:
        lines = Path(f"/proc/{child.pid}/status").read_text().splitlines()
        peak = max(
            [peak, *(int(line.split()[1]) * 1024 for line in lines if line.startswith("RssAnon"))]
        )
        time.sleep(0.02)
    if child.returncode:
        raise SystemExit(f"slime convert {words[0]} ended with {child.returncode}")
    return time.perf_counter() - started, peak


if __name__ == "__main__":
    main()
