"""Write the tables of docs/scaling.md: the fastest plan for 8 to 1,024 GPUs, and what limits it.

python tools/make_scaling.py            # takes some minutes
python tools/make_scaling.py --print 8  # the rows of one size
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from slime.config import make_config
from slime.forecast.layouts import Plan, best_plans
from slime.forecast.lengths import log_normal
from slime.forecast.rates import DEFAULTS
from slime.forecast.steps import Workload
from slime.memory.plan import facts_of
from slime.models import family_of
from slime.models.flops import sequence_cost

PAGE = Path(__file__).resolve().parents[1] / "docs" / "scaling.md"
BEGIN = "<!-- begin of the table by tools/make_scaling.py -->\n"
END = "<!-- end of the table by tools/make_scaling.py -->"
SIZES = (8, 16, 32, 64, 128, 256, 512, 1024)
SAMPLES = 16
LONGEST = 8192
MEAN = 2048
PROMPT_TOKENS = 256
#: Prompts of a step: a number that stays, or so many for each GPU.
FIXED = 256
PER_GPU = 2
_COMMON = {"rms_norm_eps": 1e-6, "max_position_embeddings": 40960, "head_dim": 128}
MODELS: dict[str, dict[str, Any]] = {
    "Qwen3-8B": _COMMON
    | {
        "model_type": "qwen3",
        "architectures": ["Qwen3ForCausalLM"],
        "hidden_size": 4096,
        "intermediate_size": 12288,
        "num_hidden_layers": 36,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "vocab_size": 151936,
        "tie_word_embeddings": False,
    },
    "Qwen3-30B-A3B": _COMMON
    | {
        "model_type": "qwen3_moe",
        "architectures": ["Qwen3MoeForCausalLM"],
        "hidden_size": 2048,
        "intermediate_size": 6144,
        "num_hidden_layers": 48,
        "num_attention_heads": 32,
        "num_key_value_heads": 4,
        "num_experts": 128,
        "num_experts_per_tok": 8,
        "moe_intermediate_size": 768,
        "norm_topk_prob": True,
        "decoder_sparse_step": 1,
        "mlp_only_layers": [],
        "vocab_size": 151936,
        "tie_word_embeddings": False,
    },
}


def rows(sizes: tuple[int, ...]) -> Iterator[str]:
    """Lines of the table for these numbers of GPUs."""
    for name, shape in MODELS.items():
        with tempfile.TemporaryDirectory() as folder:
            (Path(folder) / "config.json").write_text(json.dumps(shape))
            for gpus in sizes:
                for prompts, told in ((FIXED, "fixed"), (PER_GPU * gpus, "grows")):
                    yield _row(name, gpus, told, best(folder, shape, gpus, prompts))


def best(folder: str, shape: dict[str, Any], gpus: int, prompts: int) -> Plan:
    """The fastest plan for a step of so many prompts."""
    config = make_config(
        hf_checkpoint=folder,
        rollout_engine="sglang",
        colocate=True,
        actor_num_gpus_per_node=8,
        use_dynamic_batch_size=True,
        max_tokens_per_gpu=16384,
        rollout_batch_size=prompts,
        n_samples_per_prompt=SAMPLES,
        rollout_max_response_len=LONGEST,
        rollout_max_context_len=LONGEST + PROMPT_TOKENS,
        num_rollout=1,
    )
    work = Workload.of(config, log_normal(MEAN, LONGEST), PROMPT_TOKENS)
    cost = sequence_cost(family_of(folder), shape)
    rates = DEFAULTS["H200"]
    facts = facts_of(config, on_gpu=True)
    return best_plans(facts, work, cost, rates, gpus, rates.gpu_gb * 1e9)[0]


def _row(name: str, gpus: int, batch: str, plan: Plan) -> str:
    facts = plan.facts
    assert facts.trainer is not None
    layout = facts.trainer.layout
    sizes = {"TP": layout.tensor, "CP": layout.context, "PP": layout.pipeline, "EP": layout.expert}
    cut = " ".join(f"{kind} {size}" for kind, size in sizes.items() if size > 1) or "data parallel"
    placement = facts.placement
    engines = f"{placement.num_engines} × {placement.slots_per_engine}"
    if facts.colocate:
        split = "colocated"
    else:
        split = f"{placement.num_train} train, {placement.num_rollout} generate"
    return (
        f"| {name} | {gpus:,} | {batch} | {split} | {cut} | {engines} | {plan.seconds:.0f} s | "
        f"{plan.tokens_per_gpu:,.0f} | {plan.limit} |"
    )


HEAD = (
    "| model | GPUs | prompts | split | trainer | engines | a step | response tokens/s per GPU | "
    "limited by |\n|---|--:|---|---|---|--:|--:|--:|---|"
)


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__, allow_abbrev=False)
    parser.add_argument("--print", type=int, nargs="+", metavar="GPUS", help="write nothing")
    given = parser.parse_args(argv).print
    lines = [HEAD]
    for row in rows(tuple(given or SIZES)):
        print(row, flush=True)
        lines.append(row)
    if not given:
        before, _, rest = PAGE.read_text(encoding="utf-8").partition(BEGIN)
        _, _, after = rest.partition(END)
        table = "\n".join(lines)
        PAGE.write_text(f"{before}{BEGIN}{table}\n{END}{after}", encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
