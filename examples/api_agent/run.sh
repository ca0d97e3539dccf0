#!/bin/sh
# A tiny model, made on the spot, learns to call the agent's calculator. MODEL=… takes another one that calls tools.
# What follows goes to `slime train`.
set -e
here=$(cd "$(dirname "$0")" && pwd)
export PYTHONPATH="$here/../..${PYTHONPATH:+:$PYTHONPATH}"
python=${PYTHON:-python}
data=outputs/api-agent-data
if [ -z "$MODEL" ]; then
  only="" flags="--fp32 --lr 1e-3 --rollout-max-response-len 48 --rollout-max-context-len 192"
else
  only="--data-only" flags="--bf16 --lr 2e-6 --rollout-max-response-len 512 --rollout-max-context-len 4096"
fi
"$python" -m examples.api_agent.data $data $only
exec "$python" -m slime train --hf-checkpoint "${MODEL:-$data/model}" $flags \
  --prompt-data $data/train.jsonl --input-key question --label-key answer --rollout-shuffle \
  --custom-generate-function-path "$here/rollout.py:generate" \
  --eval-prompt-data products $data/test.jsonl --eval-interval 10 \
  --rollout-batch-size 4 --n-samples-per-prompt 8 --num-rollout 30 \
  --colocate --weight-decay 0 --lr-decay-style constant --save "{run}/checkpoints" "$@"
