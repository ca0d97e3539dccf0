"""The trainer's side of a push of adapters on a CPU: how long gathering and checking take on the
host.

    python -m benchmarks.adapter_push                          # Qwen3-30B-A3B, experts share sides
    python -m benchmarks.adapter_push --experts per-expert
    python -m benchmarks.adapter_push --expert-parallel 2      # two processes, gloo
    python -m benchmarks.adapter_push --model dense            # Qwen3-4B at full width

The model has the layers and experts of Qwen3-30B-A3B, and an eighth of its widths: what is measured
depends on the number of tensors. There is no engine. "cpu" is the processor time of this process,
which other processes on the host disturb less than "wall".
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import nn

from slime.checkpoints.megatron_names import Placement
from slime.config import make_config
from slime.config.groups_lora import LoraConfig
from slime.engines.wire.buckets import fingerprints
from slime.models import family_of
from slime.models.adapters import AdapterConfig, adapter_family
from slime.models.layouts import Shard
from slime.models.spec import ModelSpec
from slime.models.table import ModelFamily
from slime.processes.host import free_port
from slime.weights.adapter_checks import check_values
from slime.weights.adapter_sync import AdapterSync
from slime.weights.source import exhaust

_COMMON = {
    "num_attention_heads": 32,
    "vocab_size": 1024,
    "rope_theta": 1e6,
    "rms_norm_eps": 1e-6,
    "hidden_act": "silu",
    "max_position_embeddings": 4096,
    "tie_word_embeddings": False,
}
MODELS: dict[str, dict[str, Any]] = {
    "moe": {
        **_COMMON, "architectures": ["Qwen3MoeForCausalLM"], "model_type": "qwen3_moe",
        "num_hidden_layers": 48, "hidden_size": 256, "intermediate_size": 768,
        "moe_intermediate_size": 96, "num_experts": 128, "num_experts_per_tok": 8,
        "num_key_value_heads": 4, "head_dim": 16, "norm_topk_prob": True,
        "decoder_sparse_step": 1, "mlp_only_layers": [],
    },
    "dense": {
        **_COMMON, "architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3",
        "num_hidden_layers": 36, "hidden_size": 2560, "intermediate_size": 9728,
        "num_key_value_heads": 8, "head_dim": 128,
    },
}  # fmt: skip


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", choices=sorted(MODELS), default="moe")
    parser.add_argument("--experts", default="shared-outer")
    parser.add_argument("--rank", type=int, default=32)
    parser.add_argument("--expert-parallel", type=int, default=1)
    parser.add_argument("--rounds", type=int, default=5)
    args = parser.parse_args(argv)
    arguments = (args, free_port())
    if args.expert_parallel == 1:
        measure(0, *arguments)
    else:
        mp.spawn(measure, arguments, nprocs=args.expert_parallel)
    return 0


def measure(rank: int, args: argparse.Namespace, port: int) -> None:
    """Gather and check in each round; rank 0 prints a line of JSON."""
    torch.set_num_threads(1)
    size = args.expert_parallel
    if size > 1:
        dist.init_process_group(
            "gloo", rank=rank, world_size=size, init_method=f"tcp://127.0.0.1:{port}"
        )
        place = Placement(ep_rank=rank, ep_size=size, ep_group=dist.group.WORLD)
        Placement.current = staticmethod(lambda: place)  # type: ignore[method-assign]
    config = MODELS[args.model]
    family = family_of(config)
    spec = family.model_spec(config)
    flags = {"lora_experts": args.experts} if args.model == "moe" else {}
    adapters = AdapterConfig.for_model(LoraConfig(lora_rank=args.rank, **flags), family, spec)
    model = holder(adapter_family(family, spec, adapters), spec, size)
    sync = AdapterSync(make_config(), [model], config, adapters)
    sync._shares_memory = True  # as with engines on this host
    for _ in range(args.rounds):
        if size > 1:
            dist.barrier()
        tensors = sync._source.tensors()
        if rank:
            exhaust(tensors)
        else:
            print(json.dumps(one_push(sync, tensors)), flush=True)


def one_push(sync: AdapterSync, tensors: Any) -> dict[str, Any]:
    seconds: dict[str, Any] = {}
    sync._spare = sync._begin_buffer(torch.bfloat16)
    sync._spare.result()
    with phase("gather", seconds):
        buffer, largest = sync._gather(tensors, torch.bfloat16)
    with phase("fingerprint", seconds):
        prints = fingerprints(buffer.tensors())
    with phase("values", seconds):
        check_values(largest, prints, {}, has_learned=True)
    with phase("payload", seconds):
        buffer.payload(1)
    return {"bytes": len(buffer.buffer), "sent": len(prints), **seconds}


@contextmanager
def phase(name: str, seconds: dict[str, Any]) -> Iterator[None]:
    wall = time.perf_counter()
    cpu = time.process_time()
    yield
    seconds[name] = {
        "wall": round(time.perf_counter() - wall, 4),
        "cpu": round(time.process_time() - cpu, 4),
    }


def holder(table: ModelFamily, spec: ModelSpec, expert_ranks: int) -> nn.Module:
    """A module with one rank's adapters, under the trainer's names."""
    shapes = dict(table.hf_tensors(spec))
    root = nn.Module()
    for layer in range(spec.num_layers):
        for rule in table.rules:
            if rule.when is not None and not rule.when(spec, layer):
                continue
            names = [name.format(layer=layer, expert=0) for name in rule.hf_names]
            sources = [torch.empty(shapes[name]) for name in names]
            shape = tuple(rule.layout.load(sources, Shard(), spec).shape)
            if rule.is_expert:
                shape = (spec.num_experts // expert_ranks, *shape)
            value = torch.randn(shape, dtype=torch.bfloat16)
            *path, leaf = rule.megatron_names[0].format(layer=layer, expert="").split(".")
            module = root
            for part in path:
                if part not in module._modules:
                    module.add_module(part, nn.Module())
                module = module.get_submodule(part)
            module.register_parameter(leaf, nn.Parameter(value, requires_grad=False))
    for number, child in root.get_submodule("decoder.layers").named_children():
        child.layer_number = int(number) + 1  # type: ignore[assignment]
    return root


if __name__ == "__main__":
    sys.exit(main())
