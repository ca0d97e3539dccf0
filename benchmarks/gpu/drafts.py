"""What a draft model costs or gains a colocated run, and whether sleeps and pushes leave it as it
is.

    python -m benchmarks.gpu.drafts --shape qwen3-4b                     # a random EAGLE-3 draft
    python -m benchmarks.gpu.drafts --model M --algorithm STANDALONE --draft SMALL
    python -m benchmarks.gpu.drafts --model M --algorithm NEXTN --draft M    # M's own layers

A random draft proposes noise: it shows the most that drafts can cost. What a draft gains depends on
the share of its tokens that the policy accepts, so the second ratio of a real one is of that run
alone.
"""

from __future__ import annotations

import argparse
import json
import shutil
import sys
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from benchmarks.gpu import ranks
from benchmarks.gpu.report import Report, Row, at_least, at_most
from benchmarks.gpu.setting import (
    engine,
    gpu_ids,
    make_model,
    median,
    new_run_parser,
    run_training,
    workspace,
)
from benchmarks.gpu.trainer import SHAPES
from benchmarks.gpu.weight_sync import memory, push
from slime.config import make_config
from slime.engines.fleet import EngineFleet

#: Tokens that a random EAGLE-3 draft can propose.
_DRAFT_VOCABULARY = 32_000
CASES = ("the draft stays", "without drafts", "with drafts")


def parse_args(argv: list[str] | None) -> argparse.Namespace:
    parser = new_run_parser(__doc__, prompts=16, samples=8, new_tokens=256, steps=4)
    parser.add_argument("--algorithm", default="EAGLE3")
    parser.add_argument("--draft", type=Path, help="its directory, instead of random weights")
    parser.add_argument("--num-steps", type=int, default=3, help="draft tokens (default: 3)")
    parser.add_argument("--cases", nargs="+", choices=CASES, default=CASES)
    return parser.parse_args(argv)


def main(argv: list[str] | None = None) -> int:
    args = parse_args(argv)
    report = Report("drafts", args)
    with workspace() as folder:
        model = make_model(args, folder)
        draft = args.draft or _random_draft(args, folder)
        flags = {
            "--sglang-speculative-algorithm": args.algorithm,
            "--sglang-speculative-draft-model-path": draft,
            "--sglang-speculative-num-steps": args.num_steps,
            "--sglang-speculative-eagle-topk": 1,
            "--sglang-speculative-num-draft-tokens": args.num_steps + 1,
        }
        words = [str(word) for pair in flags.items() for word in pair]
        measures = {
            "the draft stays": lambda: stays(args, folder, model, draft),
            "without drafts": lambda: run(args, folder / "plain", model, []),
            "with drafts": lambda: run(args, folder / "drafts", model, words),
        }
        for case in args.cases:
            report.case(case, measures[case])
        if {"without drafts", "with drafts"} <= set(args.cases):
            report.case("compared", lambda: compared(report.rows))
    return report.finish()


def stays(args: argparse.Namespace, folder: Path, model: Path, draft: Path) -> Row:
    """Checksums of draft and policy in the engine, around a sleep and pushes of other weights."""
    flags: dict[str, Any] = {
        "hf_checkpoint": str(model),
        "rollout_engine": args.engine,
        "colocate": True,
        "sglang_speculative_algorithm": args.algorithm,
        "sglang_speculative_draft_model_path": str(draft),
        "actor_num_gpus_per_node": 1,
        "rollout_batch_size": 1,
        "num_rollout": 1,
    }
    other = dict(flags, hf_checkpoint=str(_other_weights(args, folder, model)))
    with engine(args, make_config(**flags), model, folder, gpu_ids(0, 1)) as url:
        before = _checksums(url)
        memory(url, "release", ["kv_cache", "weights", "cuda_graph"])
        ranks.run(push, 1, other, url, (0,), 1, False)
        after = _checksums(url)
    changed = {name for name in before if before[name] != after.get(name)}
    drafts = {name for name in before if name.startswith("draft.")}
    return {
        "tensors": {"draft": len(drafts), "policy": len(before) - len(drafts)},
        "goals": [
            at_most("tensors of the draft that changed", len(changed & drafts), 0),
            at_least("tensors of the policy that changed", len(changed - drafts), 1),
        ],
    }


def run(args: argparse.Namespace, folder: Path, model: Path, words: list[str]) -> Row:
    folder.mkdir()
    more = ["--colocate", "--actor-num-gpus-per-node", "1", *words, *args.more.split()]
    rows = run_training("train.py", args, model, folder, more).rows
    steps = [row for row in rows if "perf/rollout_time" in row]
    counted = steps[1:] or steps
    names = {
        "generation": "perf/rollout_time",
        "step": "perf/step_time",
        "difference": "train/train_rollout_logprob_abs_diff",
        "tokens_per_verification": "rollout/spec_accept_length",
        "accepted": "rollout/spec_accept_rate",
    }
    found = {
        word: median([row[name] for row in counted])
        for word, name in names.items()
        if all(name in row for row in counted)
    }
    return {**found, "raw": steps}


def compared(rows: list[Row]) -> Row:
    plain, drafting = (
        next(row for row in rows if row["case"] == case)
        for case in ("without drafts", "with drafts")
    )
    return {
        "generation with drafts ÷ without": drafting["generation"] / plain["generation"],
        "goals": [
            at_most(
                "difference of log-probs, with drafts ÷ without",
                drafting["difference"] / plain["difference"],
                1.25,
            )
        ],
    }


def _checksums(url: str) -> dict[str, str]:
    fleet = EngineFleet([url])
    [answer] = fleet.post("/weights_checker", {"action": "checksum"}, 120)
    fleet.close()
    sums: dict[str, str] = answer["ranks"][0]["checksums"]
    return sums


def _other_weights(args: argparse.Namespace, folder: Path, model: Path) -> Path:
    """A copy of the model whose norms are doubled: a push of it must change the engine's policy."""
    target = folder / "other"
    shutil.copytree(model, target)
    for path in target.glob("*.safetensors"):
        tensors = load_file(path)
        doubled = {name: 2 * one if one.dim() == 1 else one for name, one in tensors.items()}
        save_file(doubled, path, {"format": "pt"})
    return target


def _random_draft(args: argparse.Namespace, folder: Path) -> Path:
    """An EAGLE-3 head with random weights for the shape: a layer of attention and MLP behind a
    projection of three hidden states, and an output layer of fewer tokens."""
    path = folder / "draft"
    path.mkdir()
    shape = SHAPES[args.shape]
    hidden = shape["hidden_size"]
    inner = shape["intermediate_size"]
    heads, groups = shape["num_attention_heads"], shape["num_key_value_heads"]
    head = shape.get("head_dim") or hidden // heads
    tokens = min(_DRAFT_VOCABULARY, shape["vocab_size"])
    sizes = {
        "fc": (hidden, 3 * hidden),
        "midlayer.self_attn.q_proj": (heads * head, 2 * hidden),
        "midlayer.self_attn.k_proj": (groups * head, 2 * hidden),
        "midlayer.self_attn.v_proj": (groups * head, 2 * hidden),
        "midlayer.self_attn.o_proj": (hidden, heads * head),
        "midlayer.mlp.gate_proj": (inner, hidden),
        "midlayer.mlp.up_proj": (inner, hidden),
        "midlayer.mlp.down_proj": (hidden, inner),
        "lm_head": (tokens, hidden),
    }
    norms = ("hidden_norm", "input_layernorm", "post_attention_layernorm")
    weights = {
        f"{name}.weight": torch.randn(size, dtype=torch.bfloat16) * 0.02
        for name, size in sizes.items()
    }
    for name in ("norm", *(f"midlayer.{norm}" for norm in norms)):
        weights[f"{name}.weight"] = torch.ones(hidden, dtype=torch.bfloat16)
    weights["d2t"] = torch.zeros(tokens, dtype=torch.int64)
    weights["t2d"] = torch.arange(shape["vocab_size"]) < tokens
    save_file(weights, path / "model.safetensors", {"format": "pt"})
    config = {
        "architectures": ["LlamaForCausalLMEagle3"],
        "model_type": "llama",
        "hidden_act": "silu",
        "hidden_size": hidden,
        "intermediate_size": inner,
        "num_hidden_layers": 1,
        "num_attention_heads": heads,
        "num_key_value_heads": groups,
        "head_dim": head,
        "vocab_size": shape["vocab_size"],
        "draft_vocab_size": tokens,
        "max_position_embeddings": shape["max_position_embeddings"],
        "rms_norm_eps": shape["rms_norm_eps"],
        "torch_dtype": "bfloat16",
    }
    (path / "config.json").write_text(json.dumps(config))
    return path


if __name__ == "__main__":
    sys.exit(main())
