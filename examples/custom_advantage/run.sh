#!/bin/sh
# A tiny model, made on the spot, learns to write numbers backwards. What follows goes to `slime train`.
set -e
here=$(cd "$(dirname "$0")" && pwd)
export PYTHONPATH="$here/../..${PYTHONPATH:+:$PYTHONPATH}"
python=${PYTHON:-python}
data=outputs/custom-advantage-data
"$python" -m examples.custom_advantage.data $data
exec "$python" -m slime train --hf-checkpoint $data/model \
  --prompt-data $data/train.jsonl --input-key question --label-key answer --apply-chat-template --rollout-shuffle \
  --custom-rm-path "$here/credit.py:reward" --custom-advantage-function-path "$here/credit.py:advantages" \
  --eval-prompt-data backwards $data/test.jsonl --n-samples-per-eval-prompt 4 --eval-interval 10 \
  --rollout-batch-size 32 --n-samples-per-prompt 8 --num-rollout 40 \
  --rollout-max-response-len 8 --rollout-max-context-len 64 \
  --colocate --fp32 --lr 1e-3 --weight-decay 0 --lr-decay-style constant --save "{run}/checkpoints" "$@"
