"""Training speed and memory on GPUs: whole optimizer steps, as a share of what a large matrix product reaches there.

    python -m benchmarks.gpu.trainer qwen3-0.6b qwen3-4b qwen3-moe-4b --out trainer.json
    python -m benchmarks.gpu.trainer qwen3-0.6b --peer --profile
    python -m benchmarks.gpu.trainer qwen3-4b --gpus 2 --layout tensor_model_parallel_size=2 sequence_parallel=true
    python -m benchmarks.gpu.trainer tiny --tokens 512 --length 64        # a dry run, on a CPU too

bfloat16, random weights, sequences of --length tokens, nearly all of them trained, a supervised loss, gradients and
Adam in float32. FLOPs are the model's: 6 per active weight and token, and causal attention; what is computed twice
(the output layer, in its backward pass) counts once. --peer runs the same model as a plain transformers loop: packed
sequences through torch's variable-length flash attention, float32 master weights, fused Adam. Sides run one after the
other in processes of their own; medians over --steps after two steps of warm-up; the matrix product is timed in each.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing as mp
import socket
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

WARM_UP_STEPS = 2
PEER_ATTENTION = "packed_varlen"  # transformers looks for a package behind a name with "flash" in it

_QWEN3 = {
    "model_type": "qwen3", "vocab_size": 151936, "num_key_value_heads": 8, "head_dim": 128, "rms_norm_eps": 1e-6,
    "rope_theta": 1000000.0, "max_position_embeddings": 40960, "tie_word_embeddings": True, "hidden_act": "silu",
}  # fmt: skip
SHAPES: dict[str, dict[str, Any]] = {
    "qwen3-0.6b": {
        **_QWEN3, "hidden_size": 1024, "intermediate_size": 3072, "num_hidden_layers": 28, "num_attention_heads": 16,
    },
    "qwen3-4b": {
        **_QWEN3, "hidden_size": 2560, "intermediate_size": 9728, "num_hidden_layers": 36, "num_attention_heads": 32,
    },
    "qwen3-moe-4b": {
        **_QWEN3, "model_type": "qwen3_moe", "hidden_size": 2048, "intermediate_size": 6144, "num_hidden_layers": 24,
        "num_attention_heads": 32, "num_key_value_heads": 4, "num_experts": 32, "num_experts_per_tok": 4,
        "moe_intermediate_size": 768, "norm_topk_prob": True, "decoder_sparse_step": 1, "mlp_only_layers": [],
    },
    "tiny": {
        **_QWEN3, "vocab_size": 1000, "hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 2,
        "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 32,
    },
}  # fmt: skip


# -- one side in one process ---------------------------------------------------------------------------------


def run_ours(rank: int, world: int, port: int, args: argparse.Namespace, shape: str, results: Any) -> None:
    import torch

    from slime.config import make_config
    from slime.train.megatron.backend import MegatronBackend  # first: it prepares a host without a GPU
    from slime.train.megatron.parallel import RankInfo
    from slime.weights.convert import family_of

    layout = dict(_setting(word) for word in args.layout)
    config = make_config(
        loss_type="sft_loss", bf16=True, lr=1e-5, rollout_batch_size=1, num_rollout=1, use_dynamic_batch_size=True,
        max_tokens_per_gpu=args.max_tokens or args.tokens, actor_num_gpus_per_node=world, **layout,
    )  # fmt: skip
    spec = family_of(SHAPES[shape]).model_spec(SHAPES[shape]).padded(config.megatron.tensor_model_parallel_size)
    backend = MegatronBackend(config, RankInfo(rank, world, rank, "127.0.0.1", port))
    backend.setup(spec=spec, initialise=True)
    layout_of = backend.layout
    batch = make_batch(args, spec.vocab_size, backend.data_parallel_rank, layout_of.data_parallel_size)

    def step() -> None:
        backend.train(batch)
        backend.synchronize()

    seconds = timed(step, args.steps)
    if rank == 0:
        results.put(report("slime", shape, args, world, seconds, _peak(torch)))
    if args.profile:  # on every rank: a step is collective
        profile(step, rank)
    backend.close()


def run_peer(rank: int, world: int, port: int, args: argparse.Namespace, shape: str, results: Any) -> None:
    import torch
    import torch.nn.functional as F
    from transformers import AutoConfig, AutoModelForCausalLM
    from transformers.modeling_utils import AttentionInterface

    device = "cuda" if torch.cuda.is_available() else "cpu"
    config = dict(SHAPES[shape])
    kind = config.pop("model_type")
    if device == "cuda":
        AttentionInterface.register(PEER_ATTENTION, packed_flash_attention)
    attention = PEER_ATTENTION if device == "cuda" else "sdpa"
    with torch.device(device):
        model = AutoModelForCausalLM.from_config(
            AutoConfig.for_model(kind, **config), dtype=torch.bfloat16, attn_implementation=attention
        )
    model.train()
    parameters = list(model.parameters())
    masters = [torch.nn.Parameter(p.detach().float()) for p in parameters]
    optimizer = torch.optim.AdamW(masters, lr=1e-5, fused=True)
    batch = make_batch(args, config["vocab_size"], 0, 1)
    groups = batch.steps[0].micro_batches

    def step() -> None:
        for samples in groups:
            lengths = [batch.tokens[i].numel() for i in samples]
            tokens = torch.cat([batch.tokens[i] for i in samples]).to(device)[None]
            positions = torch.cat([torch.arange(length) for length in lengths]).to(device)[None]
            ends = torch.tensor([0, *lengths], dtype=torch.int32).cumsum(0, dtype=torch.int32).to(device)
            packed = {"cu_seq_lens_q": ends, "max_length_q": max(lengths)} if device == "cuda" else {}
            labels = tokens.roll(-1)
            labels[positions.roll(-1) == 0] = -100
            logits = model(input_ids=tokens, position_ids=positions, use_cache=False, **packed).logits
            loss = F.cross_entropy(logits[0].float(), labels[0], ignore_index=-100, reduction="sum")
            (loss / batch.steps[0].num_loss_tokens).backward()
        with torch.no_grad():
            for parameter, master in zip(parameters, masters, strict=True):
                assert parameter.grad is not None
                master.grad = parameter.grad.float()
                parameter.grad = None
            torch.nn.utils.clip_grad_norm_(masters, 1.0)
            optimizer.step()
            optimizer.zero_grad()
            torch._foreach_copy_(parameters, masters)
        if device == "cuda":
            torch.cuda.synchronize()

    seconds = timed(step, args.steps)
    results.put(report("transformers", shape, args, 1, seconds, _peak(torch)))
    if args.profile:
        profile(step, rank)


def packed_flash_attention(
    module: Any, query: Any, key: Any, value: Any, attention_mask: Any, scaling: float | None = None, **kwargs: Any
) -> tuple[Any, None]:
    """transformers' attention interface over torch's variable-length kernel."""
    from slime.train.megatron.attention import _flash_packed
    from slime.train.megatron.packed import PackedSequences

    ends, longest = kwargs["cu_seq_lens_q"], kwargs["max_length_q"]
    sequences = PackedSequences(cu_seqlens_q=ends, cu_seqlens_kv=ends, max_seqlen_q=longest, max_seqlen_kv=longest)
    packed = [x[0].transpose(0, 1).contiguous() for x in (query, key, value)]
    scale = scaling if scaling is not None else float(query.size(-1)) ** -0.5
    return _flash_packed(packed[0], packed[1], packed[2], sequences, scale)[None], None


# -- the work, and what is measured ----------------------------------------------------------------------------


def make_batch(args: argparse.Namespace, vocab: int, rank: int, data_parallel: int) -> Any:
    """This rank's equal part of --tokens tokens in sequences of --length, in micro-batches of --max-tokens."""
    import torch

    from slime.samples.types import StepPlan, TrainBatch

    count = args.tokens // args.length // data_parallel
    generator = torch.Generator().manual_seed(rank)
    tokens = [torch.randint(0, vocab, (args.length,), generator=generator) for _ in range(count)]
    responses = [args.length - 1] * count
    per_micro = max(1, (args.max_tokens or args.tokens) // args.length)
    micro_batches = [list(range(start, min(start + per_micro, count))) for start in range(0, count, per_micro)]
    return TrainBatch(
        rollout_id=0, tokens=tokens, response_lengths=responses, loss_masks=[torch.ones(r) for r in responses],
        rewards=[0.0] * count, raw_rewards=[0.0] * count, sample_indices=list(range(count)),
        group_indices=list(range(count)), execution_ids=list(range(count)),
        rollout_mask_sums=[float(r) for r in responses], truncated=[False] * count,
        steps=[StepPlan(micro_batches, count * data_parallel, sum(responses) * data_parallel)],
    )  # fmt: skip


def timed(step: Callable[[], None], steps: int) -> list[float]:
    seconds = []
    for number in range(WARM_UP_STEPS + steps):
        start = time.perf_counter()
        step()
        if number >= WARM_UP_STEPS:
            seconds.append(time.perf_counter() - start)
    return seconds


def report(
    side: str, shape: str, args: argparse.Namespace, gpus: int, seconds: list[float], peak: float | None
) -> dict[str, Any]:
    from slime.samples.flops import SequenceCost

    median = statistics.median(seconds)
    flops = 3 * SequenceCost.from_hf_config(SHAPES[shape])(args.length) * (args.tokens // args.length)
    rate = matmul_rate()
    achieved = flops / median / gpus / 1e12
    return {
        "side": side,
        "shape": shape,
        "gpus": gpus,
        "layout": list(args.layout) if side == "slime" else [],
        "tokens": args.tokens,
        "micro_batch_tokens": args.max_tokens or args.tokens,
        "seconds": seconds,
        "tokens_per_second": args.tokens / median,
        "tflops_per_gpu": achieved,
        "matmul_tflops": rate,
        "share_of_matmul": achieved / rate,
        "peak_gb": peak,
    }


def matmul_rate(size: int = 8192, repeats: int = 20) -> float:
    """TFLOP/s of a square bfloat16 product, median of ``repeats``."""
    import torch

    device = "cuda" if torch.cuda.is_available() else "cpu"
    size, repeats = (size, repeats) if device == "cuda" else (512, 5)
    a, b = (torch.randn(size, size, device=device, dtype=torch.bfloat16) for _ in range(2))
    seconds = []
    for _ in range(repeats):
        start = time.perf_counter()
        a @ b
        if device == "cuda":
            torch.cuda.synchronize()
        seconds.append(time.perf_counter() - start)
    return 2 * size**3 / statistics.median(seconds) / 1e12


def _peak(torch: Any) -> float | None:
    """GB that the allocator had in use at most."""
    return torch.cuda.max_memory_allocated() / 1e9 if torch.cuda.is_available() else None


def profile(step: Callable[[], None], rank: int) -> None:
    """Where the time of a step goes, kernel by kernel, on the first rank."""
    from torch.profiler import ProfilerActivity
    from torch.profiler import profile as record

    with record(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as recorded:
        step()
    if rank == 0:
        table = recorded.key_averages().table(sort_by="self_cuda_time_total", row_limit=30, max_name_column_width=70)
        print(table, flush=True)


def _setting(word: str) -> tuple[str, Any]:
    name, _, value = word.partition("=")
    return name, json.loads(value)


def launch(run: Callable[..., None], world: int, args: argparse.Namespace, shape: str) -> dict[str, Any]:
    """One side in fresh processes; its result, or the exit status that there was none."""
    context = mp.get_context("spawn")
    results = context.Queue()
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = int(probe.getsockname()[1])
    processes = [context.Process(target=run, args=(r, world, port, args, shape, results)) for r in range(world)]
    for process in processes:
        process.start()
    result: dict[str, Any] | None = None
    while result is None and any(process.is_alive() for process in processes):
        if not results.empty():
            result = results.get()
        if any(process.exitcode for process in processes):  # the others would wait for it until NCCL gives up
            for process in processes:
                process.kill()
        time.sleep(0.1)
    for process in processes:
        process.join()
    if result is None:
        result = results.get() if not results.empty() else None
    return result or {"shape": shape, "failed": [process.exitcode for process in processes]}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("shapes", nargs="+", choices=SHAPES)
    parser.add_argument("--tokens", type=int, default=16384, help="per optimizer step, over all GPUs")
    parser.add_argument("--length", type=int, default=2048, help="of each sequence")
    parser.add_argument("--max-tokens", type=int, help="of a micro-batch; default: all in one")
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--gpus", type=int, default=1)
    parser.add_argument("--layout", nargs="*", default=[], metavar="NAME=VALUE", help="any flags of slime train")
    parser.add_argument("--peer", action="store_true", help="also the plain transformers loop")
    parser.add_argument("--profile", action="store_true")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    rows = []
    for shape in args.shapes:
        rows.append(launch(run_ours, args.gpus, args, shape))
        print(json.dumps(rows[-1]), flush=True)
        if args.peer:
            rows.append(launch(run_peer, 1, args, shape))
            print(json.dumps(rows[-1]), flush=True)
            if "failed" not in rows[-1] and "failed" not in rows[-2]:
                ratio = rows[-2]["tokens_per_second"] / rows[-1]["tokens_per_second"]
                print(f"{shape}: {ratio:.2f} times the plain loop's tokens per second", flush=True)
    if args.out:
        args.out.write_text(json.dumps(rows, indent=2), encoding="utf-8")


if __name__ == "__main__":
    main()
