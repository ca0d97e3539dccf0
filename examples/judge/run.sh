#!/bin/sh
# A tiny model learns what another tiny model, on an engine of its own, says yes to. What follows goes to `slime train`.
set -e
here=$(cd "$(dirname "$0")" && pwd)
export PYTHONPATH="$here/../..${PYTHONPATH:+:$PYTHONPATH}"
python=${PYTHON:-python}
data=outputs/judge-data
"$python" -m examples.judge.data $data
exec "$python" -m slime train --hf-checkpoint $data/model \
  --prompt-data $data/train.jsonl --input-key question --apply-chat-template \
  --sglang-config $data/models.yaml --rollout-num-gpus 2 --custom-rm-path "$here/rollout.py:reward" \
  --eval-prompt-data things $data/test.jsonl --n-samples-per-eval-prompt 32 --eval-interval 5 \
  --rollout-batch-size 8 --n-samples-per-prompt 16 --num-rollout 15 \
  --rollout-max-response-len 4 --rollout-max-context-len 64 \
  --fp32 --lr 2e-3 --weight-decay 0 --lr-decay-style constant --save "{run}/checkpoints" "$@"
