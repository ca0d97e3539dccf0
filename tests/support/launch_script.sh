#!/bin/bash
# A launch as users of the reference system write theirs, on a model of 70 thousand parameters: $HERE/$MODEL, described
# in $HERE/models/$MODEL.sh. Ports and Ray's folder are the caller's, as are the processes that a script of one's own
# would kill by name.

set -ex

# Ray buffers neither stdout nor stderr
export PYTHONBUFFERED=16

source "${HERE}/models/${MODEL}.sh"

CKPT_ARGS=(
   --hf-checkpoint ${HERE}/${MODEL}
   # --hf-checkpoint ${HERE}/${MODEL}-FP8
   --ref-load ${HERE}/${MODEL}_torch_dist
   --load ${HERE}/${MODEL}_slime/
   --save ${HERE}/${MODEL}_slime/
   --save-interval 2
)

ROLLOUT_ARGS=(
   --prompt-data ${HERE}/sums.jsonl
   --input-key prompt
   --label-key label
   --apply-chat-template
   --rollout-shuffle
   --custom-rm-path tests.support.toy.distinct_share
   --num-rollout 2
   --rollout-batch-size 4
   --n-samples-per-prompt 4
   --rollout-max-response-len 8
   --rollout-temperature 1

   --global-batch-size 16
   --balance-data
)

EVAL_ARGS=(
   --eval-interval 2
   --eval-prompt-data sums ${HERE}/sums.jsonl@[0:4]
   --n-samples-per-eval-prompt 2
   --eval-max-response-len 8
   --eval-top-p 1
)

PERF_ARGS=(
   --tensor-model-parallel-size 2
   --sequence-parallel
   --pipeline-model-parallel-size 1
   --context-parallel-size 1
   --expert-model-parallel-size 1
   --expert-tensor-parallel-size 1

   --recompute-granularity full
   --recompute-method uniform
   --recompute-num-layers 1

   # --micro-batch-size 1
   --use-dynamic-batch-size
   --max-tokens-per-gpu 1024
)

GRPO_ARGS=(
   --advantage-estimator grpo
   --use-kl-loss
   --kl-loss-coef 0.00
   --kl-loss-type low_var_kl
   --entropy-coef 0.00
   --eps-clip 0.2
   --eps-clip-high 0.28
)

OPTIMIZER_ARGS=(
   --optimizer adam
   --lr 1e-6
   --lr-decay-style constant
   --weight-decay 0.1
   --adam-beta1 0.9
   --adam-beta2 0.98
)

WANDB_ARGS=(
   # --use-wandb
   # --wandb-project slime-dev
   # --wandb-group qwen3-tiny
)

SGLANG_ARGS=(
   --rollout-num-gpus-per-engine 2
   --sglang-mem-fraction-static 0.7
)

MISC_ARGS=(
   # the default of Megatron is 0.1
   --attention-dropout 0.0
   --hidden-dropout 0.0
   --accumulate-allreduce-grads-in-fp32
   --attention-softmax-in-fp32
   --attention-backend ${ATTENTION:-flash}
   --ci-test
)

PYTHONPATH=/root/Megatron-LM python3 tools/convert_hf_to_torch_dist.py \
   ${MODEL_ARGS[@]} \
   --hf-checkpoint ${HERE}/${MODEL} \
   --save ${HERE}/${MODEL}_torch_dist

export MASTER_ADDR=${MASTER_ADDR:-"127.0.0.1"}
ray start --head --node-ip-address ${MASTER_ADDR} --num-gpus ${GPUS:-8} --disable-usage-stats \
   --dashboard-host=127.0.0.1 --dashboard-port=${DASHBOARD_PORT:-8265} ${RAY_ARGS}

RUNTIME_ENV_JSON="{
  \"env_vars\": {
    \"PYTHONPATH\": \"/root/Megatron-LM/\",
    \"CUDA_DEVICE_MAX_CONNECTIONS\": \"1\",
    \"NCCL_NVLS_ENABLE\": \"0\"
  }
}"

ray job submit --address="http://127.0.0.1:${DASHBOARD_PORT:-8265}" \
   --runtime-env-json="${RUNTIME_ENV_JSON}" \
   -- python3 train.py \
   --actor-num-nodes 1 \
   --actor-num-gpus-per-node 2 \
   --colocate \
   ${MODEL_ARGS[@]} \
   ${CKPT_ARGS[@]} \
   ${ROLLOUT_ARGS[@]} \
   ${OPTIMIZER_ARGS[@]} \
   ${GRPO_ARGS[@]} \
   ${WANDB_ARGS[@]} \
   ${PERF_ARGS[@]} \
   ${EVAL_ARGS[@]} \
   ${SGLANG_ARGS[@]} \
   ${MISC_ARGS[@]}

PYTHONPATH=/root/Megatron-LM python3 tools/convert_torch_dist_to_hf.py \
   --input-dir ${HERE}/${MODEL}_slime/iter_0000001 \
   --output-dir ${HERE}/${MODEL}_hf \
   --origin-hf-dir ${HERE}/${MODEL}
