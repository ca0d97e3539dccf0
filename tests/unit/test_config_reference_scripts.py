"""Launch scripts of the reference system, array by array as a shell hands them over, for the
published models that are here: all parse, their MODEL_ARGS agree with config.json, and where one
does not, it is named."""

from __future__ import annotations

import re
import subprocess
from typing import Any

import pytest

from slime.config import Config, parse_args
from slime.errors import UserError
from slime.models import family_of
from slime.models.model_flags import check_model_flags
from tests.support.hf_configs import PUBLISHED

DENSE = """--swiglu --group-query-attention --use-rotary-position-embeddings --disable-bias-linear
    --normalization "RMSNorm" """
MOE = """--swiglu --disable-bias-linear --normalization RMSNorm --position-embedding-type rope
    --untie-embeddings-and-output-weights --moe-grouped-gemm --moe-router-dtype fp32 --moe-permute-fusion
    --moe-aux-loss-coeff 0"""
SIGMOID = """--moe-router-score-function sigmoid --moe-router-pre-softmax --moe-router-enable-expert-bias
    --moe-router-bias-update-rate 0 --moe-router-load-balancing-type seq_aux_loss
    --moe-token-dispatcher-type alltoall"""
LATENT = """--multi-latent-attention --qk-layernorm --kv-lora-rank 512 --qk-head-dim 128 --v-head-dim 128
    --kv-channels 128 --qk-pos-emb-head-dim 64 --no-position-embedding --no-rope-fusion"""
GLM45 = f"""{MOE} {SIGMOID} --group-query-attention --num-attention-heads 96 --num-query-groups 8 --kv-channels 128
    --add-qkv-bias --rotary-percent 0.5 --vocab-size 151552 --rotary-base 1000000 --moe-router-topk 8"""

#: Published model → MODEL_ARGS.
MODEL_ARGS = {
    "meta-llama/Llama-3.1-8B": f"""{DENSE} --num-layers 32 --hidden-size 4096 --ffn-hidden-size 14336
        --num-attention-heads 32 --num-query-groups 8 --max-position-embeddings 131072 --norm-epsilon 1e-5
        --rotary-base 500000 --vocab-size 128256 --kv-channels 128 --use-rope-scaling --rotary-scaling-factor 8.0
        --untie-embeddings-and-output-weights""",
    "Qwen/Qwen2.5-7B": f"""{DENSE} --num-layers 28 --hidden-size 3584 --ffn-hidden-size 18944 --add-qkv-bias
        --num-attention-heads 28 --num-query-groups 4 --norm-epsilon 1e-6 --rotary-base 1000000 --vocab-size 152064
        --untie-embeddings-and-output-weights""",
    "Qwen/Qwen3-0.6B": f"""{DENSE} --num-layers 28 --hidden-size 1024 --ffn-hidden-size 3072 --qk-layernorm
        --num-attention-heads 16 --num-query-groups 8 --norm-epsilon 1e-6 --rotary-base 1000000 --vocab-size 151936
        --kv-channels 128""",
    "Qwen/Qwen3-4B": f"""{DENSE} --num-layers 36 --hidden-size 2560 --ffn-hidden-size 9728 --qk-layernorm
        --num-attention-heads 32 --num-query-groups 8 --norm-epsilon 1e-6 --rotary-base 1000000 --vocab-size 151936
        --kv-channels 128""",
    "Qwen/Qwen3-30B-A3B": f"""{MOE} --qk-layernorm --group-query-attention --num-attention-heads 32
        --num-query-groups 4 --kv-channels 128 --num-layers 48 --hidden-size 2048 --ffn-hidden-size 6144
        --norm-epsilon 1e-6 --rotary-percent 1.0 --vocab-size 151936 --rotary-base 1000000 --moe-ffn-hidden-size 768
        --moe-router-score-function softmax --moe-token-dispatcher-type alltoall --moe-router-topk 8
        --moe-layer-freq "'([1]*48)'" --num-experts 128 --moe-token-drop-policy probs""",
    "zai-org/GLM-4-9B-0414": f"""{DENSE} --num-layers 40 --hidden-size 4096 --ffn-hidden-size 13696
        --num-attention-heads 32 --num-query-groups 2 --max-position-embeddings 32768 --seq-length 32768
        --norm-epsilon 1e-5 --rotary-base 10000 --rotary-percent 0.5 --rotary-interleaved --no-rope-fusion
        --add-qkv-bias --post-self-attn-layernorm --post-mlp-layernorm --untie-embeddings-and-output-weights
        --vocab-size 151552""",
    "zai-org/GLM-4.5-Air": f"""{GLM45} --num-layers $((1 + 45)) --hidden-size 4096 --ffn-hidden-size 10944
        --moe-ffn-hidden-size 1408 --moe-shared-expert-intermediate-size 1408 --moe-layer-freq [0]*1+[1]*45
        --num-experts 128 --moe-router-topk-scaling-factor 1.0""",
    "zai-org/GLM-4.5": f"""{GLM45} --qk-layernorm --num-layers $((3 + 89)) --hidden-size 5120
        --ffn-hidden-size 12288 --moe-ffn-hidden-size 1536 --moe-shared-expert-intermediate-size 1536
        --moe-layer-freq [0]*3+[1]*89 --num-experts 160 --moe-router-topk-scaling-factor 2.5""",
    "deepseek-ai/DeepSeek-V3": f"""{MOE} {SIGMOID} {LATENT} --q-lora-rank 1536 --num-layers 61 --hidden-size 7168
        --ffn-hidden-size 18432 --num-attention-heads 128 --norm-epsilon 1e-6 --vocab-size 129280 --rotary-base 10000
        --rotary-scaling-factor 40 --mscale 1.0 --mscale-all-dim 1.0 --make-vocab-size-divisible-by 64
        --moe-layer-freq [0]*3+[1]*58 --num-experts 256 --moe-ffn-hidden-size 2048 --moe-router-topk 8
        --moe-shared-expert-intermediate-size 2048 --moe-router-num-groups 8 --moe-router-group-topk 4
        --moe-router-topk-scaling-factor 2.5 --attention-softmax-in-fp32""",
    "moonshotai/Moonlight-16B-A3B": f"""{MOE} {SIGMOID} {LATENT} --num-layers 27 --hidden-size 2048
        --ffn-hidden-size 11264 --num-attention-heads 16 --norm-epsilon 1e-5 --vocab-size 163840 --rotary-base 50000
        --moe-layer-freq [0]*1+[1]*26 --num-experts 64 --moe-ffn-hidden-size 1408 --moe-router-topk 6
        --moe-shared-expert-intermediate-size 2816 --moe-router-num-groups 1 --moe-router-group-topk 1
        --moe-router-topk-scaling-factor 2.446""",
}
ARRAYS = {
    "CKPT_ARGS": "--hf-checkpoint no-such-model --ref-load /x_dist --load /x_run/ --save /x_run/ " "--save-interval 20",
    "ROLLOUT_ARGS": """--prompt-data /d.jsonl --input-key prompt --label-key label --apply-chat-template
        --rollout-shuffle --rm-type deepscaler --num-rollout 3000 --rollout-batch-size 32 --n-samples-per-prompt 8
        --rollout-max-response-len 8192 --rollout-temperature 0.8 --global-batch-size 256 --balance-data""",
    "EVAL_ARGS": """--eval-interval 20 --eval-prompt-data aime /a.jsonl --n-samples-per-eval-prompt 16
        --eval-max-response-len 16384 --eval-top-p 0.7""",
    "PERF_ARGS": """--tensor-model-parallel-size 2 --sequence-parallel --pipeline-model-parallel-size 1
        --context-parallel-size 1 --expert-model-parallel-size 1 --expert-tensor-parallel-size 1
        --recompute-granularity full --recompute-method uniform --recompute-num-layers 1 --use-dynamic-batch-size
        --max-tokens-per-gpu 9216""",
    "GRPO_ARGS": """--advantage-estimator grpo --use-kl-loss --kl-loss-coef 0.00 --kl-loss-type low_var_kl
        --entropy-coef 0.00 --eps-clip 0.2 --eps-clip-high 0.28""",
    "OPTIMIZER_ARGS": """--optimizer adam --lr 1e-6 --lr-decay-style constant --weight-decay 0.1 --adam-beta1 0.9
        --adam-beta2 0.98""",
    "WANDB_ARGS": "--use-wandb --wandb-project slime-dev --wandb-group qwen3-4B-test --wandb-key " "${WANDB_KEY}",
    "SGLANG_ARGS": "--rollout-num-gpus-per-engine 2 --sglang-mem-fraction-static 0.7",
    "MISC_ARGS": """--attention-dropout 0.0 --hidden-dropout 0.0 --accumulate-allreduce-grads-in-fp32
        --attention-softmax-in-fp32 --attention-backend flash""",
}  # fmt: skip
#: What scripts of large models have instead.
OFFLOAD = ARRAYS["OPTIMIZER_ARGS"] + " --optimizer-cpu-offload --overlap-cpu-optimizer-d2h-h2d" \
    " --use-precision-aware-optimizer"  # fmt: skip
GSPO = """--advantage-estimator gspo --kl-loss-coef 0.00 --kl-loss-type low_var_kl --kl-coef 0.00
    --entropy-coef 0.00 --eps-clip 1e-4 --eps-clip-high 2e-4 --use-tis"""
DAPO = """--prompt-data /d.jsonl --input-key prompt --label-key label --apply-chat-template --rollout-shuffle
    --rm-type deepscaler --num-rollout 3000 --rollout-batch-size 128 --n-samples-per-prompt 8
    --rollout-max-response-len 32768 --rollout-temperature 0.8 --over-sampling-batch-size 256
    --dynamic-sampling-filter-path slime.rollout.filter_hub.dynamic_sampling_filters.check_reward_nonzero_std
    --num-steps-per-rollout 4 --balance-data --rollout-stop-token-ids 151329 151336 151338"""
SFT = """--rollout-function-path slime.rollout.sft_rollout.generate_rollout --prompt-data /o.parquet
    --input-key messages --rollout-shuffle --num-epoch 3 --rollout-batch-size 128 --global-batch-size 128
    --loss-type sft_loss --calculate-per-token-loss --disable-compute-advantages-and-returns --debug-train-only"""
EIGHT = "--actor-num-nodes 1 --actor-num-gpus-per-node 8 --colocate"

#: Name → model, what stands before the arrays, arrays of its own ("" for none).
SCRIPTS: dict[str, tuple[str, str, dict[str, str]]] = {
    "qwen3-0.6B": ("Qwen/Qwen3-0.6B", EIGHT, {"EVAL_ARGS": "", "WANDB_ARGS": ""}),
    "qwen3-4B": ("Qwen/Qwen3-4B", EIGHT, {}),
    "qwen2.5-7B": ("Qwen/Qwen2.5-7B", EIGHT, {}),
    "qwen3-30B-A3B": (
        "Qwen/Qwen3-30B-A3B",
        EIGHT,
        {
            "CKPT_ARGS": "--hf-checkpoint no-such-model --ref-load /x_dist",
            "PERF_ARGS": "--tensor-model-parallel-size 4 --sequence-parallel --expert-model-parallel-size 8"
            " --expert-tensor-parallel-size 1 --use-dynamic-batch-size --max-tokens-per-gpu 20480",
            "EVAL_ARGS": ARRAYS["EVAL_ARGS"].replace("--eval-interval 20", ""),
            "OPTIMIZER_ARGS": OFFLOAD,
            "SGLANG_ARGS": "--rollout-num-gpus-per-engine 8 --sglang-mem-fraction-static 0.7"
            " --sglang-cuda-graph-bs 1 2 4 8 $(seq 16 8 256)",
        },
    ),
    "glm4-9B": (
        "zai-org/GLM-4-9B-0414",
        "--actor-num-nodes 1 --actor-num-gpus-per-node 4 --rollout-num-gpus 4",
        {
            "PERF_ARGS": ARRAYS["PERF_ARGS"].replace(
                "--context-parallel-size 1", "--context-parallel-size 2"
            ),
            "SGLANG_ARGS": "--rollout-num-gpus-per-engine 1 --sglang-mem-fraction-static 0.8"
            " --sglang-attention-backend fa3",
        },
    ),
    "glm4.5-air": ("zai-org/GLM-4.5-Air", EIGHT, {"GRPO_ARGS": GSPO, "OPTIMIZER_ARGS": OFFLOAD}),
    "glm4.5": (
        "zai-org/GLM-4.5",
        "--actor-num-nodes 8 --actor-num-gpus-per-node 8 --colocate --save-debug-rollout-data "
        "/x/data.pt",
        {
            "ROLLOUT_ARGS": DAPO,
            "GRPO_ARGS": GSPO,
            "OPTIMIZER_ARGS": OFFLOAD,
            "PERF_ARGS": "--tensor-model-parallel-size 8 --sequence-parallel "
            "--pipeline-model-parallel-size 4"
            " --context-parallel-size 2 --expert-model-parallel-size 16 "
            "--expert-tensor-parallel-size 1"
            " --use-dynamic-batch-size --max-tokens-per-gpu 16384",
            "SGLANG_ARGS": "--rollout-num-gpus-per-engine 32 --sglang-enable-dp-attention --sglang-dp-size 4"
            " --update-weight-buffer-size $(( 1024 * 1024 * 1024 * 4 ))",
        },
    ),
    "llama3.1-8B": (
        "meta-llama/Llama-3.1-8B",
        EIGHT.replace("8", "4"),
        {
            "ROLLOUT_ARGS": ARRAYS["ROLLOUT_ARGS"].replace(
                "deepscaler", "math --rollout-max-prompt-len 256"
            ),
            "EVAL_ARGS": "",
            "SGLANG_ARGS": "--rollout-num-gpus-per-engine 1 --sglang-mem-fraction-static 0.8 --sglang-dtype "
            "float16"
            " --sglang-max-running-requests 48 --sglang-context-length 2048 "
            "--sglang-attention-backend fa3",
        },
    ),
    "deepseek-r1": (
        "deepseek-ai/DeepSeek-V3",
        "--actor-num-nodes 16 --actor-num-gpus-per-node 8 --colocate",
        {
            "ROLLOUT_ARGS": DAPO,
            "OPTIMIZER_ARGS": OFFLOAD,
            "PERF_ARGS": "--tensor-model-parallel-size 8 --sequence-parallel "
            "--pipeline-model-parallel-size 4"
            " --context-parallel-size 4 --expert-model-parallel-size 32 "
            "--expert-tensor-parallel-size 1"
            " --decoder-last-pipeline-num-layers 13 --use-dynamic-batch-size --max-tokens-per-gpu "
            "16384",
            "SGLANG_ARGS": "--rollout-num-gpus-per-engine 64 --sglang-enable-dp-attention --sglang-dp-size 8"
            " --sglang-moe-dense-tp-size 1 --sglang-enable-dp-lm-head --sglang-disable-radix-cache"
            " --sglang-moe-a2a-backend deepep --sglang-deepep-mode auto "
            "--sglang-server-concurrency 1024",
            "MISC_ARGS": ARRAYS["MISC_ARGS"]
            + " --moe-enable-deepep --moe-token-dispatcher-type flex",
        },
    ),
    "moonlight-16B": ("moonshotai/Moonlight-16B-A3B", EIGHT, {"OPTIMIZER_ARGS": OFFLOAD}),
    "qwen3-4B-sft": (
        "Qwen/Qwen3-4B",
        EIGHT.replace(" --colocate", ""),
        {
            "ROLLOUT_ARGS": SFT,
            "EVAL_ARGS": "",
            "GRPO_ARGS": "",
            "SGLANG_ARGS": "",
            "OPTIMIZER_ARGS": "--optimizer adam --lr 1e-5 --lr-decay-style cosine --min-lr 1e-6"
            " --lr-warmup-fraction 0.1 --weight-decay 0.1 --adam-beta1 0.9 --adam-beta2 0.95",
            "PERF_ARGS": ARRAYS["PERF_ARGS"].replace("parallel-size 2", "parallel-size 1"),
        },
    ),
}


@pytest.fixture(autouse=True)
def gpu_host(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SLIME_NUM_GPUS", "8")


def words(name: str) -> list[str]:
    """What `python3 train.py` gets of a script: its arrays, expanded by bash without quotes."""
    model, run, own = SCRIPTS[name]
    arrays = {"MODEL_ARGS": MODEL_ARGS[model], **ARRAYS, **own}
    lines = [f"{array}=(\n{text}\n)" for array, text in arrays.items()]
    command = " ".join(["printf '%s\\n'", run, *(f"${{{array}[@]}}" for array in arrays)])
    script = "\n".join(["set -f", "WANDB_KEY=key", *lines, command])
    return subprocess.run(
        ["bash", "-c", script], capture_output=True, text=True, check=True
    ).stdout.splitlines()


def parsed(name: str) -> Config:
    return parse_args(words(name), entry="train_async" if name.endswith("sft") else "train")


def compare(name: str, **changes: Any) -> None:
    facts = {**PUBLISHED[SCRIPTS[name][0]]["config"], **changes}
    check_model_flags(parsed(name).megatron, family_of(facts).model_spec(facts))


@pytest.mark.parametrize("name", SCRIPTS)
def test_a_script_runs_with_its_own_arguments(name: str) -> None:
    config = parsed(name)
    given = {word for word in words(name) if word.startswith("--")}
    assert sum(origin == "flag" for origin in config.origins.values()) >= 0.85 * len(given)
    compare(name)


@pytest.mark.parametrize("name", [name for name in SCRIPTS if not name.endswith("sft")])
def test_model_args_of_another_model_are_named(name: str) -> None:
    with pytest.raises(UserError, match=r"contradicts? the model's config.json") as caught:
        compare(name, vocab_size=1111)
    assert re.search(r"--vocab-size \d+, but it is 1111", caught.value.why)
    assert "leave the flags that describe the model out" in caught.value.fix


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("qwen3-4B-sft", ["--sequence-parallel has no effect with --tensor-model-parallel-size 1"]),
        (
            "glm4.5",
            [
                "--save-debug-rollout-data /x/data.pt has no {rollout_id} in it",
                "/x/data_{rollout_id}.pt is taken",
            ],
        ),
        (
            "deepseek-r1",
            [
                "--moe-enable-deepep has no effect",
                "--moe-token-dispatcher-type flex has no effect, alltoall is taken",
                "--sglang-moe-a2a-backend deepep has no effect, none is taken",
            ],
        ),
    ],
)
def test_words_that_ask_for_nothing_here_are_warned_of(name: str, said: list[str]) -> None:
    warnings = " ".join(parsed(name).warnings)
    assert [words for words in said if words not in warnings] == []


def test_a_kl_type_without_its_loss_is_warned_of() -> None:
    (said,) = [warning for warning in parsed("glm4.5").warnings if "--kl-loss-type" in warning]
    assert "has no effect without --use-kl-loss" in said
