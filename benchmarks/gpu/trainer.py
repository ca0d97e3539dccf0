"""Training speed and memory on GPUs: whole optimizer steps, as a share of what a large matrix
product reaches there.

    python -m benchmarks.gpu.trainer qwen3-0.6b qwen3-4b qwen3-moe-4b --out trainer.json
    python -m benchmarks.gpu.trainer qwen3-0.6b --peer --profile
    python -m benchmarks.gpu.trainer qwen3-4b --gpus 2 --tokens 32768 \\
        --layout tensor_model_parallel_size=2 sequence_parallel=true \\
        --layout context_parallel_size=2
    python -m benchmarks.gpu.trainer tiny --tokens 512 --length 64        # a dry run, on a CPU too

bfloat16, random weights, sequences of --length tokens, nearly all of them trained, a supervised
loss, gradients and Adam in float32. FLOPs are the model's: 6 per active weight and token, and
causal attention; what is computed twice (the output layer, in its backward pass) counts once.
--peer runs the same model as a plain transformers loop: packed sequences through torch's
variable-length flash attention, float32 master weights, fused Adam. Sides run one after the other
in processes of their own; medians over --steps after two steps of warm-up; the matrix product is
timed in each.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from benchmarks.gpu import ranks
from benchmarks.gpu.report import Report, Row, add_arguments, at_least, at_most
from benchmarks.gpu.timeline import find_gaps, summary

WARM_UP_STEPS = 2
# transformers looks for a package behind a name with "flash" in it
PEER_ATTENTION = "packed_varlen"

_QWEN3 = {
    "model_type": "qwen3",
    "vocab_size": 151936,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "rms_norm_eps": 1e-6,
    "rope_theta": 1000000.0,
    "max_position_embeddings": 40960,
    "tie_word_embeddings": True,
    "hidden_act": "silu",
}
_QWEN3_30B_A3B = {
    **_QWEN3,
    "model_type": "qwen3_moe",
    "hidden_size": 2048,
    "intermediate_size": 6144,
    "num_attention_heads": 32,
    "num_key_value_heads": 4,
    "num_experts": 128,
    "num_experts_per_tok": 8,
    "moe_intermediate_size": 768,
    "norm_topk_prob": True,
    "decoder_sparse_step": 1,
    "mlp_only_layers": [],
    "tie_word_embeddings": False,
}
#: As DeepSeek-V3: latent attention with compressed queries, a dense layer, then experts with a
#: shared one. The widths of the latents are the real ones, for which attention kernels are made.
_DEEPSEEK_V3 = {
    "model_type": "deepseek_v3",
    "vocab_size": 4096,
    "hidden_size": 1024,
    "intermediate_size": 2048,
    "num_hidden_layers": 4,
    "num_attention_heads": 16,
    "num_key_value_heads": 16,
    "q_lora_rank": 512,
    "kv_lora_rank": 512,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
    "first_k_dense_replace": 1,
    "moe_layer_freq": 1,
    "topk_method": "noaux_tc",
    "scoring_func": "sigmoid",
    "attention_bias": False,
    "ep_size": 1,
    "n_routed_experts": 16,
    "num_experts_per_tok": 4,
    "n_shared_experts": 1,
    "moe_intermediate_size": 512,
    "n_group": 1,
    "topk_group": 1,
    "routed_scaling_factor": 2.5,
    "norm_topk_prob": True,
    "rms_norm_eps": 1e-6,
    "rope_theta": 10000.0,
    "max_position_embeddings": 4096,
    "tie_word_embeddings": False,
    "hidden_act": "silu",
    "initializer_range": 0.05,
}
_QWEN3_5 = {
    "model_type": "qwen3_5_text",
    "vocab_size": 248320,
    "head_dim": 256,
    "linear_key_head_dim": 128,
    "linear_value_head_dim": 128,
    "linear_conv_kernel_dim": 4,
    "full_attention_interval": 4,
    "rms_norm_eps": 1e-6,
    "rope_parameters": {
        "rope_type": "default",
        "rope_theta": 10000000.0,
        "partial_rotary_factor": 0.25,
    },
    "max_position_embeddings": 262144,
    "tie_word_embeddings": True,
    "hidden_act": "silu",
}
#: Widths that Qwen3-Next and Qwen3.5-35B-A3B share, with fewer layers and experts.
_HYBRID_EXPERTS = {
    **_QWEN3_5,
    "hidden_size": 2048,
    "num_hidden_layers": 4,
    "num_attention_heads": 16,
    "num_key_value_heads": 2,
    "linear_num_key_heads": 16,
    "linear_num_value_heads": 32,
    "num_experts": 64,
    "num_experts_per_tok": 8,
    "moe_intermediate_size": 512,
    "shared_expert_intermediate_size": 512,
    "tie_word_embeddings": False,
}
#: As gpt-oss-20b, with half of its experts and a smaller vocabulary.
_GPT_OSS = {
    "model_type": "gpt_oss",
    "vocab_size": 32768,
    "hidden_size": 2880,
    "intermediate_size": 2880,
    "num_hidden_layers": 4,
    "num_attention_heads": 64,
    "num_key_value_heads": 8,
    "head_dim": 64,
    "sliding_window": 128,
    "swiglu_limit": 7.0,
    "num_local_experts": 16,
    "num_experts_per_tok": 4,
    "rms_norm_eps": 1e-5,
    "rope_parameters": {
        "rope_type": "yarn",
        "rope_theta": 150000.0,
        "factor": 32.0,
        "beta_fast": 32.0,
        "beta_slow": 1.0,
        "original_max_position_embeddings": 4096,
        "truncate": False,
    },
    "max_position_embeddings": 131072,
    "tie_word_embeddings": False,
    "hidden_act": "silu",
}
SHAPES: dict[str, dict[str, Any]] = {
    "deepseek-v3-4-layers": _DEEPSEEK_V3,
    "tiny-deepseek": {
        **_DEEPSEEK_V3,
        "vocab_size": 1000,
        "hidden_size": 128,
        "intermediate_size": 256,
        "num_attention_heads": 4,
        "num_key_value_heads": 4,
        "q_lora_rank": 48,
        "kv_lora_rank": 32,
        "qk_nope_head_dim": 16,
        "qk_rope_head_dim": 8,
        "v_head_dim": 16,
        "n_routed_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 64,
    },
    "qwen3-0.6b": {
        **_QWEN3,
        "hidden_size": 1024,
        "intermediate_size": 3072,
        "num_hidden_layers": 28,
        "num_attention_heads": 16,
    },
    "qwen3-1.7b": {
        **_QWEN3,
        "hidden_size": 2048,
        "intermediate_size": 6144,
        "num_hidden_layers": 28,
        "num_attention_heads": 16,
    },
    "qwen3-4b": {
        **_QWEN3,
        "hidden_size": 2560,
        "intermediate_size": 9728,
        "num_hidden_layers": 36,
        "num_attention_heads": 32,
    },
    "llama-3.1-8b": {
        "model_type": "llama",
        "vocab_size": 128_256,
        "hidden_size": 4096,
        "intermediate_size": 14_336,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "max_position_embeddings": 32_768,
        "rope_parameters": {"rope_type": "default", "rope_theta": 500_000.0},
        "tie_word_embeddings": False,
    },
    "qwen3-moe-4b": {
        **_QWEN3,
        "model_type": "qwen3_moe",
        "hidden_size": 2048,
        "intermediate_size": 6144,
        "num_hidden_layers": 24,
        "num_attention_heads": 32,
        "num_key_value_heads": 4,
        "num_experts": 32,
        "num_experts_per_tok": 4,
        "moe_intermediate_size": 768,
        "norm_topk_prob": True,
        "decoder_sparse_step": 1,
        "mlp_only_layers": [],
    },
    **{
        f"qwen3-30b-a3b-{layers}-layers": {**_QWEN3_30B_A3B, "num_hidden_layers": layers}
        for layers in (6, 12)
    },
    "qwen3-30b-a3b": {**_QWEN3_30B_A3B, "num_hidden_layers": 48},
    "qwen3.5-4b": {
        **_QWEN3_5,
        "hidden_size": 2560,
        "intermediate_size": 9216,
        "num_hidden_layers": 32,
        "num_attention_heads": 16,
        "num_key_value_heads": 4,
        "linear_num_key_heads": 16,
        "linear_num_value_heads": 32,
    },
    "qwen3.5-2b": {
        **_QWEN3_5,
        "hidden_size": 2048,
        "intermediate_size": 6144,
        "num_hidden_layers": 24,
        "num_attention_heads": 8,
        "num_key_value_heads": 2,
        "linear_num_key_heads": 16,
        "linear_num_value_heads": 16,
    },
    "qwen3-next-4-layers": {
        **_HYBRID_EXPERTS,
        "model_type": "qwen3_next",
        "vocab_size": 151936,
        "intermediate_size": 5120,
        "norm_topk_prob": True,
    },
    "qwen3.5-moe-4-layers": {
        **_HYBRID_EXPERTS,
        "model_type": "qwen3_5_moe_text",
        "vocab_size": 32768,
    },
    "gpt-oss-4-layers": _GPT_OSS,
    "gemma3-1b": {
        "model_type": "gemma3_text",
        "vocab_size": 262144,
        "hidden_size": 1152,
        "intermediate_size": 6912,
        "num_hidden_layers": 26,
        "num_attention_heads": 4,
        "num_key_value_heads": 1,
        "head_dim": 256,
        "sliding_window": 512,
        "query_pre_attn_scalar": 256,
        "rms_norm_eps": 1e-6,
        "max_position_embeddings": 32768,
        "tie_word_embeddings": True,
    },
    "tiny-hybrid": {
        **_QWEN3_5,
        "vocab_size": 1000,
        "hidden_size": 128,
        "intermediate_size": 256,
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 32,
        "linear_num_key_heads": 2,
        "linear_num_value_heads": 4,
        "linear_key_head_dim": 16,
        "linear_value_head_dim": 16,
    },
    "tiny-gpt-oss": {
        **_GPT_OSS,
        "vocab_size": 1000,
        "hidden_size": 128,
        "intermediate_size": 128,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "num_local_experts": 4,
        "num_experts_per_tok": 2,
        "head_dim": 32,
    },
    "tiny": {
        **_QWEN3,
        "vocab_size": 1000,
        "hidden_size": 128,
        "intermediate_size": 256,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 32,
    },
    "tiny-moe": {
        **_QWEN3,
        "model_type": "qwen3_moe",
        "vocab_size": 1000,
        "hidden_size": 128,
        "intermediate_size": 256,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 32,
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 64,
        "norm_topk_prob": True,
        "decoder_sparse_step": 1,
        "mlp_only_layers": [],
    },
}

#: Layers of the whole model, of shapes that have its first few.
FULL_LAYERS = {f"qwen3-30b-a3b-{layers}-layers": 48 for layers in (6, 12)}

#: Goals on one GPU, by shape: tokens per second, share of the matrix product's rate, peak memory in
#: GB.
LEAST_SPEED = {"qwen3-0.6b": 65_000.0}
LEAST_SHARE = {"qwen3-4b": 0.55, "qwen3-moe-4b": 0.30}
MOST_GB = {"qwen3-0.6b": 30.0, "qwen3-4b": 95.0}


# -- one side in one process -----------------------------------------------------------------------


def run_ours(
    place: ranks.Place, answer: ranks.Answer, args: argparse.Namespace, shape: str
) -> None:
    import torch

    backend = ranks.trainer(
        place,
        loss_type="sft_loss",
        bf16=True,
        lr=1e-5,
        rollout_batch_size=1,
        use_dynamic_batch_size=True,
        max_tokens_per_gpu=args.max_tokens or args.tokens,
        **dict(_setting(word) for word in args.layout),
    )
    from slime.models import family_of
    from slime.processes.garbage import freeze_gc
    from slime.trainer.megatron import device

    flags = backend.config.megatron
    spec = (
        family_of(SHAPES[shape]).model_spec(SHAPES[shape]).padded(flags.tensor_model_parallel_size)
    )
    backend.setup(spec=spec, initialise=True)
    freeze_gc()
    layout_of = backend.layout
    sharing = flags.tensor_model_parallel_size * flags.context_parallel_size
    batch = make_batch(
        args, spec.vocab_size, backend.data_parallel_rank, layout_of.data_parallel_size, sharing
    )

    peaks: list[float] = []
    losses: list[float] = []

    def step() -> None:
        metrics = backend.train(batch)  # which starts a new peak with each phase
        losses.append(metrics["train/loss"])
        device.synchronize()
        peaks.append(
            max(value for name, value in metrics.items() if name.endswith("_peak_memory_gb"))
        )

    seconds = timed(step, args.steps)
    if place.rank == 0:
        peak = max(peaks) if torch.cuda.is_available() else None
        answer({**measured("slime", shape, args, place.world, seconds, peak), "losses": losses})
    if args.profile:  # on every rank: a step is collective
        profile(step, place.rank)
    backend.close()


def run_peer(
    place: ranks.Place, answer: ranks.Answer, args: argparse.Namespace, shape: str
) -> None:
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
            AutoConfig.for_model(kind, **config),
            dtype=torch.bfloat16,
            attn_implementation=attention,
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
            ends = (
                torch.tensor([0, *lengths], dtype=torch.int32)
                .cumsum(0, dtype=torch.int32)
                .to(device)
            )
            packed = (
                {"cu_seq_lens_q": ends, "max_length_q": max(lengths)} if device == "cuda" else {}
            )
            labels = tokens.roll(-1)
            labels[positions.roll(-1) == 0] = -100
            logits = model(
                input_ids=tokens, position_ids=positions, use_cache=False, **packed
            ).logits
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
            torch._foreach_copy_(list[torch.Tensor](parameters), list[torch.Tensor](masters))
        if device == "cuda":
            torch.cuda.synchronize()

    seconds = timed(step, args.steps)
    answer(measured("transformers", shape, args, 1, seconds, _peak(torch)))
    if args.profile:
        profile(step, place.rank)


def packed_flash_attention(
    module: Any,
    query: Any,
    key: Any,
    value: Any,
    attention_mask: Any,
    scaling: float | None = None,
    **kwargs: Any,
) -> tuple[Any, None]:
    """transformers' attention interface over torch's variable-length kernel."""
    from slime.trainer.megatron.attention import torch_varlen
    from slime.trainer.megatron.packed import PackedSequences

    ends = kwargs["cu_seq_lens_q"]
    longest = kwargs["max_length_q"]
    sequences = PackedSequences(
        cu_seqlens_q=ends, cu_seqlens_kv=ends, max_seqlen_q=longest, max_seqlen_kv=longest
    )
    packed = [x[0].transpose(0, 1).contiguous() for x in (query, key, value)]
    scale = scaling if scaling is not None else float(query.size(-1)) ** -0.5
    return torch_varlen(packed[0], packed[1], packed[2], sequences, scale)[None], None


# -- the work, and what is measured ----------------------------------------------------------------


def make_batch(
    args: argparse.Namespace, vocab: int, rank: int, data_parallel: int, sharing: int = 1
) -> Any:
    """This rank's equal part of --tokens tokens in sequences of --length.

    Args:
        sharing: ranks that share the tokens of a micro-batch, which has so many times --max-tokens.
    """
    import torch

    from slime.samples.batch import StepPlan, TrainBatch

    count = args.tokens // args.length // data_parallel
    generator = torch.Generator().manual_seed(rank)
    tokens = [torch.randint(0, vocab, (args.length,), generator=generator) for _ in range(count)]
    responses = [args.length - 1] * count
    per_micro = max(
        1, (sharing * args.max_tokens if args.max_tokens else args.tokens) // args.length
    )
    micro_batches = [
        list(range(start, min(start + per_micro, count))) for start in range(0, count, per_micro)
    ]
    return TrainBatch(
        rollout_id=0,
        tokens=tokens,
        response_lengths=responses,
        loss_masks=[torch.ones(r) for r in responses],
        rewards=[0.0] * count,
        raw_rewards=[0.0] * count,
        sample_indices=list(range(count)),
        group_indices=list(range(count)),
        trajectory_ids=list(range(count)),
        rollout_mask_sums=[float(r) for r in responses],
        truncated=[False] * count,
        steps=[StepPlan(micro_batches, count * data_parallel, sum(responses) * data_parallel)],
    )


def timed(step: Callable[[], None], steps: int) -> list[float]:
    seconds = []
    for number in range(WARM_UP_STEPS + steps):
        start = time.perf_counter()
        step()
        if number >= WARM_UP_STEPS:
            seconds.append(time.perf_counter() - start)
    return seconds


def measured(
    side: str,
    shape: str,
    args: argparse.Namespace,
    gpus: int,
    seconds: list[float],
    peak: float | None,
) -> Row:
    from slime.models import family_of
    from slime.models.flops import sequence_cost

    median = statistics.median(seconds)
    cost = sequence_cost(family_of(SHAPES[shape]), SHAPES[shape])
    flops = 3 * cost(args.length) * (args.tokens // args.length)
    rate = matmul_rate()
    achieved = flops / median / gpus / 1e12
    return {
        "side": side,
        "shape": shape,
        "gpus": gpus,
        "layout": list(args.layout) if side == "slime" else [],
        "tokens": args.tokens,
        "micro_batch_tokens_per_gpu": args.max_tokens or args.tokens // gpus,
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


def profile(step: Callable[[], None], rank: int, rows: int = 30) -> None:
    """Where the time of a step goes, on the first rank: kernel by kernel, and where there was
    none."""
    import torch
    from torch.autograd import DeviceType
    from torch.profiler import ProfilerActivity
    from torch.profiler import profile as record

    with record(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as recorded:
        step()
    if rank != 0 or not torch.cuda.is_available():
        return
    kernels = [
        e
        for e in recorded.key_averages()
        if e.device_type == DeviceType.CUDA and e.self_device_time_total
    ]
    for event in sorted(kernels, key=lambda e: -e.self_device_time_total)[:rows]:
        print(
            f"{event.self_device_time_total / 1e3:9.3f} ms {event.count:6d} x {event.key[:110]}",
            flush=True,
        )
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "trace.json"
        recorded.export_chrome_trace(str(file))
        print(summary(find_gaps(json.loads(file.read_text())["traceEvents"])), flush=True)


def _setting(word: str) -> tuple[str, Any]:
    name, _, value = word.partition("=")
    return name, json.loads(value)


def goals_of(row: Row) -> list[Row]:
    """What is wanted of a shape on one GPU."""
    shape = row["shape"]
    peak = row["peak_gb"]
    goals = []
    if shape in LEAST_SPEED:
        goals.append(at_least("tokens/s", row["tokens_per_second"], LEAST_SPEED[shape]))
    if shape in LEAST_SHARE:
        goals.append(
            at_least(
                "share of the matrix product's rate", row["share_of_matmul"], LEAST_SHARE[shape]
            )
        )
    if shape in MOST_GB and peak is not None:
        goals.append(at_most("peak memory", peak, MOST_GB[shape], "GB"))
    return goals


def measure(report: Report, shape: str, args: argparse.Namespace) -> None:
    """The cases of one shape: one GPU, the layouts on --gpus with as many tokens per GPU, the
    peer."""
    speed: dict[str, float] = {}

    def side(name: str, job: Callable[..., None], gpus: int, layout: Sequence[str]) -> None:
        own = argparse.Namespace(
            **{**vars(args), "layout": layout, "tokens": args.tokens // args.gpus * gpus}
        )

        def publish(row: Row) -> None:
            speed[name] = row["tokens_per_second"]
            goals = goals_of(row) if name == alone else []
            if gpus > 1 and alone in speed:
                goals = [
                    at_least(
                        "tokens/s per GPU ÷ that of one GPU",
                        speed[name] / gpus / speed[alone],
                        0.85,
                    )
                ]
            if job is run_peer and alone in speed:
                goals = [
                    at_least("tokens/s, slime ÷ transformers", speed[alone] / speed[name], 1.3)
                ]
            report.add(name, {**row, "goals": goals})

        def run() -> None:
            ranks.run(job, gpus, own, shape, on_answer=publish)

        report.case(name, run)

    alone = f"{shape}, 1 GPU"
    side(alone, run_ours, 1, args.layout[0] if args.gpus == 1 and args.layout else [])
    if args.peer:
        side(f"{shape}, transformers", run_peer, 1, [])
    for layout in args.layout if args.gpus > 1 else []:
        side(f"{shape}, {args.gpus} GPUs, {' '.join(layout)}", run_ours, args.gpus, layout)


def parse_args(argv: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("shapes", nargs="+", choices=SHAPES)
    add("--tokens", type=int, default=16384, help="per optimizer step, over all GPUs")
    add("--length", type=int, default=2048, help="of each sequence")
    add("--max-tokens", type=int, help="of a micro-batch per GPU; default: all in one")
    add("--steps", type=int, default=5)
    add(
        "--gpus",
        type=int,
        default=1,
        help="more than one: each --layout on these, and one GPU alone",
    )
    add(
        "--layout",
        nargs="+",
        action="append",
        default=[],
        metavar="NAME=VALUE",
        help="any flags of slime train",
    )
    add("--peer", action="store_true", help="also the plain transformers loop")
    add("--profile", action="store_true")
    add_arguments(parser)
    return parser.parse_args(argv)


def main(argv: list[str] | None = None) -> int:
    args = parse_args(argv)
    report = Report("trainer", args)
    for shape in args.shapes:
        measure(report, shape, args)
    return report.finish()


if __name__ == "__main__":
    sys.exit(main())
