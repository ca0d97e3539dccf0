#!/bin/sh
# A tiny model, made on the spot, learns to call the calculator. MODEL=… takes another one.
# What follows goes to `slime train`.
set -e
here=$(cd "$(dirname "$0")" && pwd)
export PYTHONPATH="$here/../..${PYTHONPATH:+:$PYTHONPATH}"
python=${PYTHON:-python}
data=outputs/calculator-data
if [ -z "$MODEL" ]; then
  only="" flags="--fp32 --lr 1e-3"
else
  only="--data-only" flags="--bf16 --lr 2e-5"
fi
"$python" -m examples.calculator.data $data $only
exec "$python" -m slime train --hf-checkpoint "${MODEL:-$data/model}" $flags \
  --prompt-data $data/train.jsonl --input-key question --label-key answer --apply-chat-template --rollout-shuffle \
  --custom-generate-function-path "$here/rollout.py:generate" \
  --custom-rm-path "$here/rollout.py:reward" --reward-key score --log-reward-category how \
  --eval-prompt-data products $data/test.jsonl --eval-interval 10 \
  --rollout-batch-size 16 --n-samples-per-prompt 8 --num-rollout 30 \
  --rollout-max-response-len 48 --rollout-max-context-len 192 \
  --colocate --weight-decay 0 --lr-decay-style constant --save "{run}/checkpoints" "$@"
