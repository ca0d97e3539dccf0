"""Argument sets as launch scripts for Megatron-LM and slime-like systems spell them: all parse, and
mean the same."""

from __future__ import annotations

import re
import shlex
from typing import Any

import pytest

from slime.config import Config, make_config, parse_args
from slime.config.flags import all_flags
from slime.errors import UserError
from slime.models import family_of
from slime.models.model_flags import _outside_transformer, check_model_flags, merge_transformer

QWEN3_4B_MODEL = """
    --swiglu --num-layers 36 --hidden-size 2560 --ffn-hidden-size 9728 --num-attention-heads 32
    --group-query-attention --num-query-groups 8 --use-rotary-position-embeddings --disable-bias-linear
    --normalization RMSNorm --norm-epsilon 1e-6 --rotary-base 1000000 --vocab-size 151936 --kv-channels 128
    --qk-layernorm
"""
QWEN3_4B_RUN = """
    --actor-num-nodes 1 --actor-num-gpus-per-node 8 --colocate
    --hf-checkpoint {hf} --ref-load /root/Qwen3-4B_torch_dist --load /root/Qwen3-4B_run/ --save /root/Qwen3-4B_run/
    --save-interval 20
    --prompt-data /root/dapo-math-17k.jsonl --input-key prompt --label-key label --apply-chat-template
    --rollout-shuffle --rm-type deepscaler --num-rollout 3000 --rollout-batch-size 32 --n-samples-per-prompt 8
    --rollout-max-response-len 8192 --rollout-temperature 1 --global-batch-size 256 --balance-data
    --eval-interval 20 --eval-prompt-data aime /root/aime-2024.jsonl --n-samples-per-eval-prompt 16
    --eval-max-response-len 16384 --eval-top-p 1
    --tensor-model-parallel-size 2 --sequence-parallel --pipeline-model-parallel-size 1 --context-parallel-size 1
    --expert-model-parallel-size 1 --expert-tensor-parallel-size 1 --recompute-granularity full
    --recompute-method uniform --recompute-num-layers 1 --use-dynamic-batch-size --max-tokens-per-gpu 9216
    --advantage-estimator grpo --use-kl-loss --kl-loss-coef 0.00 --kl-loss-type low_var_kl --entropy-coef 0.00
    --eps-clip 0.2 --eps-clip-high 0.28
    --optimizer adam --lr 1e-6 --lr-decay-style constant --weight-decay 0.1 --adam-beta1 0.9 --adam-beta2 0.98
    --use-wandb --wandb-project slime-dev --wandb-group qwen3-4B-test
    --rollout-num-gpus-per-engine 2 --sglang-mem-fraction-static 0.7
    --attention-dropout 0.0 --hidden-dropout 0.0 --accumulate-allreduce-grads-in-fp32 --attention-softmax-in-fp32
    --attention-backend flash
"""
GLM4_9B = """
    --swiglu --num-layers 40 --hidden-size 4096 --ffn-hidden-size 13696 --num-attention-heads 32
    --max-position-embeddings 32768 --seq-length 32768 --use-rotary-position-embeddings --disable-bias-linear
    --normalization RMSNorm --norm-epsilon 1e-5 --rotary-base 10000 --rotary-percent 0.5 --rotary-interleaved
    --no-rope-fusion --group-query-attention --num-query-groups 2 --add-qkv-bias --post-self-attn-layernorm
    --post-mlp-layernorm --untie-embeddings-and-output-weights --vocab-size 151552
    --make-vocab-size-divisible-by 128 --position-embedding-type rope
    --actor-num-nodes 1 --actor-num-gpus-per-node 4 --rollout-num-gpus 4 --rollout-num-gpus-per-engine 2
    --hf-checkpoint {hf} --prompt-data /root/dapo.jsonl --num-rollout 100 --rollout-batch-size 16
    --n-samples-per-prompt 8 --num-steps-per-rollout 2 --tensor-model-parallel-size 2 --sequence-parallel
    --context-parallel-size 2 --use-dynamic-batch-size --max-tokens-per-gpu 4608 --recompute-activations
    --transformer-impl local --no-bias-swiglu-fusion --no-persist-layer-norm --no-gradient-accumulation-fusion
    --lr 1e-6 --lr-decay-style cosine --lr-warmup-iters 10 --lr-decay-iters 500 --min-lr 1e-7 --clip-grad 1.0
    --no-check-for-nan-in-loss-and-grad --sglang-context-length 32768 --router-policy cache_aware
    --router-balance-abs-threshold 10 --bf16
"""
QWEN3_30B_A3B = """
    --disable-bias-linear --qk-layernorm --group-query-attention --num-attention-heads 32 --num-query-groups 4
    --kv-channels 128 --num-layers 48 --hidden-size 2048 --ffn-hidden-size 6144 --normalization RMSNorm
    --position-embedding-type rope --norm-epsilon 1e-6 --rotary-percent 1.0 --swiglu
    --untie-embeddings-and-output-weights --vocab-size 151936 --rotary-base 1000000
    --moe-ffn-hidden-size 768 --moe-router-score-function softmax --moe-token-dispatcher-type alltoall
    --moe-router-topk 8 --moe-layer-freq [1]*48 --num-experts 128 --moe-grouped-gemm
    --moe-token-drop-policy probs --moe-router-dtype fp32 --moe-permute-fusion --moe-aux-loss-coeff 0
    --moe-router-load-balancing-type none
    --actor-num-nodes 1 --actor-num-gpus-per-node 8 --colocate --hf-checkpoint {hf} --prompt-data p.parquet
    --num-rollout 3000 --rollout-batch-size 32 --n-samples-per-prompt 8 --global-batch-size 256
    --tensor-model-parallel-size 4 --sequence-parallel --expert-model-parallel-size 8
    --expert-tensor-parallel-size 1 --use-dynamic-batch-size --max-tokens-per-gpu 20480
    --optimizer-cpu-offload --overlap-cpu-optimizer-d2h-h2d --use-precision-aware-optimizer
    --advantage-estimator gspo --eps-clip 4e-4 --rollout-num-gpus-per-engine 8
    --sglang-ep-size 8 --sglang-cuda-graph-bs 1 2 4 8 16 --sglang-moe-a2a-backend deepep
    --sglang-speculative-algorithm EAGLE --sglang-speculative-num-steps 3 --sglang-enable-dp-attention
    --sglang-dp-size 8 --use-tis --tis-clip 2 --update-weight-buffer-size 1073741824
"""
DEEPSEEK_V3 = """
    --disable-bias-linear --num-layers 61 --hidden-size 7168 --ffn-hidden-size 18432 --num-attention-heads 128
    --kv-channels 128 --normalization RMSNorm --norm-epsilon 1e-6 --position-embedding-type rope
    --no-position-embedding --swiglu --untie-embeddings-and-output-weights --vocab-size 129280
    --multi-latent-attention --q-lora-rank 1536 --kv-lora-rank 512 --qk-head-dim 128 --qk-pos-emb-head-dim 64
    --v-head-dim 128 --qk-layernorm --rope-type yarn --rotary-scaling-factor 40 --rotary-base 10000 --mscale 1.0
    --mscale-all-dim 1.0 --original-max-position-embeddings 4096
    --attention-softmax-in-fp32 --no-rope-fusion
    --num-experts 256 --moe-layer-freq ([0]*3+[1]*58) --moe-ffn-hidden-size 2048 --moe-router-topk 8
    --moe-shared-expert-intermediate-size 2048 --moe-router-pre-softmax --moe-router-score-function sigmoid
    --moe-router-enable-expert-bias --moe-router-load-balancing-type seq_aux_loss
    --moe-token-dispatcher-type flex --moe-enable-deepep --moe-aux-loss-coeff 0 --moe-router-bias-update-rate 0
    --moe-router-group-topk 4 --moe-router-num-groups 8 --moe-grouped-gemm
    --moe-router-topk-scaling-factor 2.5 --moe-router-dtype fp32 --moe-permute-fusion
    --decoder-last-pipeline-num-layers 13
    --actor-num-nodes 16 --actor-num-gpus-per-node 8 --colocate --hf-checkpoint {hf} --prompt-data p.jsonl
    --num-rollout 300 --rollout-batch-size 128 --n-samples-per-prompt 8 --rollout-max-response-len 32768
    --over-sampling-batch-size 256
    --dynamic-sampling-filter-path slime.rollout.filter_hub.dynamic_sampling_filters.check_reward_nonzero_std
    --num-steps-per-rollout 4 --tensor-model-parallel-size 8 --sequence-parallel --pipeline-model-parallel-size 4
    --context-parallel-size 4 --expert-model-parallel-size 32 --expert-tensor-parallel-size 1
    --use-dynamic-batch-size --max-tokens-per-gpu 16384 --balance-data --rollout-num-gpus-per-engine 64
    --load d --save s --no-load-optim --no-load-rng --finetune --no-save-optim --no-save-rng
    --distributed-timeout-minutes 60
    --sglang-disable-radix-cache --sglang-watchdog-timeout 3600
"""
MEGATRON_LM = """
    --use-mcore-models --tokenizer-type HuggingFaceTokenizer --ckpt-format torch_dist
    --num-layers 32 --hidden-size 4096 --ffn-hidden-size 14336 --num-attention-heads 32 --group-query-attention
    --num-query-groups 8 --max-position-embeddings 8192 --position-embedding-type rope --rotary-base 500000
    --use-rope-scaling --swiglu --normalization RMSNorm --norm-epsilon 1e-5 --disable-bias-linear
    --untie-embeddings-and-output-weights --init-method-std 0.01 --attention-dropout 0.0 --hidden-dropout 0.0
    --tensor-model-parallel-size 4 --pipeline-model-parallel-size 2 --num-layers-per-virtual-pipeline-stage 8
    --sequence-parallel --use-distributed-optimizer --overlap-grad-reduce --overlap-param-gather
    --micro-batch-size 1 --global-batch-size 128 --lr 3e-5 --min-lr 3e-6 --lr-decay-style cosine
    --lr-warmup-fraction 0.01 --weight-decay 0.1 --adam-beta1 0.9 --adam-beta2 0.95 --adam-eps 1e-8 --clip-grad 1.0
    --bf16 --recompute-granularity selective --recompute-modules core_attn mlp --ddp-bucket-size 40000000
    --loss-scale 1.0 --initial-loss-scale 4096 --no-masked-softmax-fusion --no-bias-dropout-fusion
    --cross-entropy-loss-fusion --deterministic-mode --fp8-format hybrid --fp8-recipe delayed
    --actor-num-nodes 2 --actor-num-gpus-per-node 8 --rollout-num-gpus 8 --hf-checkpoint {hf}
    --prompt-data x.jsonl --num-epoch 1 --rollout-batch-size 16 --n-samples-per-prompt 8
"""
SEEDS = """
    --use-fault-tolerance --sglang-mem-fraction-static 0.85 --rollout-batch-size 16 --sglang-disable-cuda-graph
    --sglang-router-strategy round_robin --rollout-num-gpus-per-engine 1 --update-weights-interval 5
    --recompute-activations --micro-batch-size 1 --tensor-model-parallel-size 2 --sequence-parallel
    --n-samples-per-prompt 8 --global-batch-size 128 --seq-length 2048
    --num-data-workers 4 --streaming-data --input-key prompt --label-key label --lr 1e-6 --clip-grad 1.0 --bf16
    --use-kl-loss --kl-loss-coef 0.01 --async-buffer-size 2 --actor-num-gpus-per-node 4 --rollout-num-gpus 4
    --sglang-context-length 16384 --log-level DEBUG --attention-backend flash --moe-permute-fusion
    --check-weight-update-equal --save-debug-rollout-data /tmp/data_{{rollout_id}}.pt --model-name qwen3
    --context-parallel-size 1 --rollout-stop A B --rollout-stop-token-ids 1 2 --no-check-for-nan-in-loss-and-grad
    --num-rollout 10 --prompt-data data.jsonl --hf-checkpoint {hf} --distributed-timeout-minutes 30
"""


@pytest.fixture(autouse=True)
def gpu_host(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SLIME_NUM_GPUS", "8")


def parse(text: str, hf: str = "no-such-model", entry: str = "train") -> Config:
    return parse_args(shlex.split(text.format(hf=hf)), entry=entry)


def test_exchanges_of_large_clusters_are_warned_of_by_name() -> None:
    for script, words in [
        (QWEN3_30B_A3B, ("--sglang-moe-a2a-backend deepep",)),
        (DEEPSEEK_V3, ("--moe-token-dispatcher-type flex", "--moe-enable-deepep")),
    ]:
        said = " ".join(parse(script).warnings)
        assert all(f"{word} has no effect" in said for word in words)


@pytest.mark.parametrize(
    "script", [QWEN3_4B_MODEL + QWEN3_4B_RUN, GLM4_9B, QWEN3_30B_A3B, DEEPSEEK_V3, MEGATRON_LM, SEEDS],
    ids=["qwen3-4b", "glm4-9b", "qwen3-30b-a3b", "deepseek-v3", "megatron-lm", "seeds"],
)  # fmt: skip
def test_launch_scripts_parse(script: str) -> None:
    config = parse(script)
    assert config.train.global_batch_size * config.train.num_steps_per_rollout == (
        config.rollout.rollout_batch_size * config.rollout.n_samples_per_prompt
    )
    words = [word for word in shlex.split(script) if word.startswith("--")]
    assert sum(origin == "flag" for origin in config.origins.values()) >= len(set(words)) * 0.9


def test_seed_flags_in_async_training() -> None:
    assert parse(SEEDS, entry="train_async").sync.async_buffer_size == 2


def test_where_native_flags_go() -> None:
    config = parse(DEEPSEEK_V3)
    transformer, model = config.megatron.transformer, config.megatron.model
    assert transformer["moe_layer_freq"] == [0] * 3 + [1] * 58
    assert (
        transformer["num_moe_experts"] == 256
        and transformer["num_layers_in_last_pipeline_stage"] == 13
    )
    assert transformer["moe_router_load_balancing_type"] == "seq_aux_loss"
    assert transformer["apply_rope_fusion"] is False and transformer["add_bias_linear"] is False
    assert (
        model["q_lora_rank"] == 1536
        and model["rotary_base"] == 10000
        and "q_lora_rank" not in transformer
    )
    assert (
        config.checkpoint.finetune
        and config.checkpoint.no_load_optim
        and config.checkpoint.no_save_rng
    )
    config = parse(MEGATRON_LM)
    assert config.megatron.optimizer == {
        "loss_scale": 1.0,
        "initial_loss_scale": 4096.0,
        "fp8_recipe": "delayed",
    }
    assert config.megatron.ddp == {"bucket_size": 40000000}
    assert (
        config.megatron.transformer["fp8"] == "hybrid"
        and config.megatron.transformer["fp8_recipe"] == "delayed"
    )
    assert config.megatron.recompute_modules == ("core_attn", "mlp")
    config = parse(QWEN3_30B_A3B)
    assert (
        config.engine.sglang["cuda_graph_bs"] == (1, 2, 4, 8, 16)
        and config.engine.sglang["ep_size"] == 8
    )
    config = parse(GLM4_9B)
    assert config.engine.router == {"policy": "cache_aware", "balance_abs_threshold": 10}


def test_native_keywords_are_fields_of_megatron() -> None:
    """What lands in the dicts can be passed on: each key is a field of the class it is for."""
    from slime.config.megatron_flags import megatron_core

    fields = {(row["section"], row["name"]) for row in megatron_core()["fields"]}
    for script in (QWEN3_4B_MODEL + QWEN3_4B_RUN, GLM4_9B, QWEN3_30B_A3B, DEEPSEEK_V3, MEGATRON_LM):
        megatron = parse(script).megatron
        for section in ("transformer", "optimizer", "ddp"):
            for key in getattr(megatron, section):
                assert (section, key) in fields


QWEN3_4B_CONFIG = {
    "hidden_size": 2560, "num_hidden_layers": 36, "intermediate_size": 9728, "num_attention_heads": 32,
    "num_key_value_heads": 8, "head_dim": 128, "rms_norm_eps": 1e-6, "vocab_size": 151936, "hidden_act": "silu",
    "rope_theta": 1000000, "tie_word_embeddings": True, "max_position_embeddings": 40960,
}  # fmt: skip


QWEN3_4B = {"model_type": "qwen3", "architectures": ["Qwen3ForCausalLM"], **QWEN3_4B_CONFIG}


def compare(script: str, facts: dict[str, Any]) -> None:
    check_model_flags(parse(script).megatron, family_of(facts).model_spec(facts))


@pytest.mark.parametrize(
    "rope", [{"rope_theta": 1000000}, {"rope_parameters": {"rope_theta": 1e6}}]
)
def test_model_flags_that_agree_with_the_checkpoint(rope: dict[str, Any]) -> None:
    facts = {key: value for key, value in QWEN3_4B.items() if key != "rope_theta"}
    compare(QWEN3_4B_MODEL + QWEN3_4B_RUN, {**facts, **rope})


@pytest.mark.parametrize(
    ("key", "value", "expected"),
    [
        (
            "num_hidden_layers",
            28,
            "1 flag contradicts the model's config.json why: --num-layers 36, but it is 28",
        ),
        ("rope_theta", 10000, "--rotary-base 1000000.0, but it is 10000"),
        ("hidden_act", "relu", "--swiglu, but it is False"),
        ("rms_norm_eps", 1e-5, "--norm-epsilon 1e-06"),
        (
            "num_key_value_heads",
            32,
            "2 flags contradict (.*)--num-query-groups 8, but it is 32; --group-query-attention",
        ),
        (
            "max_position_embeddings",
            200,
            "--max-position-embeddings 40960, but the model supports 200",
        ),
    ],
)
def test_model_flags_that_contradict_the_checkpoint(key: str, value: Any, expected: str) -> None:
    with pytest.raises(UserError) as caught:
        compare(
            QWEN3_4B_MODEL + " --max-position-embeddings 40960 " + QWEN3_4B_RUN,
            {**QWEN3_4B, key: value},
        )
    assert re.search(expected, " ".join(str(caught.value).split()))


LLAMA3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
          "original_max_position_embeddings": 8192}  # fmt: skip
LINEAR = {"rope_type": "linear", "factor": 2.0}
YARN = {
    "rope_type": "yarn",
    "factor": 40.0,
    "beta_fast": 32,
    "beta_slow": 1,
    "original_max_position_embeddings": 4096,
}


@pytest.mark.parametrize(
    ("flag", "agrees", "contradicts"),
    [
        ("--use-rope-scaling", LLAMA3, YARN),
        ("--rope-scaling-factor 8.0", LLAMA3, YARN),
        ("--rotary-seq-len-interpolation-factor 2", LINEAR, YARN),
        ("--rope-type yarn", YARN, LLAMA3),
        ("--beta-fast 32", YARN, {**YARN, "beta_fast": 16}),
        ("--original-max-position-embeddings 8192", LLAMA3, None),
    ],
)
def test_flags_of_rotary_scaling_are_compared(
    flag: str, agrees: dict[str, Any], contradicts: dict[str, Any]
) -> None:
    compare(f"{flag} {QWEN3_4B_RUN}", {**QWEN3_4B, "rope_scaling": agrees})
    with pytest.raises(UserError, match=flag.split()[0]):
        compare(f"{flag} {QWEN3_4B_RUN}", {**QWEN3_4B, "rope_scaling": contradicts})


@pytest.mark.parametrize(
    ("flag", "said"),
    [
        ("--rotary-percent 0.5", "it is 1.0"),
        ("--rotary-base 1000000.0", "it is 10000.0"),
        ("--q-lora-rank 64", "it has none"),
        ("--beta-fast 32.0", "it has none"),
        ("--use-rope-scaling", "it is False"),
        ("--post-mlp-layernorm", "it is False"),
        ("--no-swiglu", "it is True"),
        ("--untie-embeddings-and-output-weights", "it is False"),
    ],
)
def test_what_config_json_does_not_say_is_compared_with_what_is_computed(
    flag: str, said: str
) -> None:
    with pytest.raises(UserError, match=f"{flag}, but {said}"):
        compare(f"{flag} {QWEN3_4B_RUN}", {**QWEN3_4B, "model_type": "llama", "rope_theta": None})


def test_no_flag_of_the_model_is_ignored() -> None:
    """Each is compared with the checkpoint's config, or says in its help why there is nothing to
    compare."""
    flags = [
        spec for spec in all_flags().values() if "model" in spec.sections and not spec.meta.refused
    ]
    compared = _outside_transformer(family_of(QWEN3_4B).model_spec(QWEN3_4B))
    told = ("Always so", "The only", "Batches come from the rollout", "Changes nothing")
    ignored = [
        spec.dest for spec in flags if spec.dest not in compared and not spec.help.startswith(told)
    ]
    # compared apart: only more than the model's own is refused
    assert ignored == ["max_position_embeddings"]


def test_merge_transformer() -> None:
    described = {"qk_layernorm": True, "normalization": "RMSNorm"}
    assert merge_transformer(described, {"moe_z_loss_coeff": 0.1})["moe_z_loss_coeff"] == 0.1
    with pytest.raises(UserError, match="--normalization LayerNorm, but it is RMSNorm"):
        merge_transformer(described, {"normalization": "LayerNorm"})
    with pytest.raises(UserError, match="--no-qk-layernorm, but it is True"):
        merge_transformer(described, make_config(qk_layernorm=False).megatron.transformer)


def test_flags_of_experts_contradict_a_dense_model() -> None:
    dense = {"num_moe_experts": None}
    with pytest.raises(UserError, match="--moe-router-topk 8, but there are no experts"):
        merge_transformer(dense, make_config(moe_router_topk=8).megatron.transformer)
    merge_transformer(
        dense, make_config(moe_permute_fusion=True, moe_aux_loss_coeff=0).megatron.transformer
    )


def test_a_fused_permutation_is_accepted_for_what_it_is_about() -> None:
    (warning,) = make_config(moe_permute_fusion=True).warnings
    assert warning.startswith("--moe-permute-fusion has no effect: it is about speed alone")
