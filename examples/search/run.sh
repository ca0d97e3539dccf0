#!/bin/sh
# A tiny model, made on the spot, learns to look things up. MODEL=… takes another one.
# What follows goes to `slime train`.
set -e
here=$(cd "$(dirname "$0")" && pwd)
export PYTHONPATH="$here/../..${PYTHONPATH:+:$PYTHONPATH}"
python=${PYTHON:-python}
data=outputs/search-data
if [ -z "$MODEL" ]; then
  only="" flags="--fp32 --lr 1e-3"
else
  only="--data-only" flags="--bf16 --lr 2e-5"
fi
"$python" -m examples.search.data $data $only
exec "$python" -m slime train --hf-checkpoint "${MODEL:-$data/model}" $flags \
  --prompt-data $data/train.jsonl --input-key question --label-key answer --apply-chat-template --rollout-shuffle \
  --custom-generate-function-path "$here/rollout.py:generate" --custom-rm-path "$here/rollout.py:reward" \
  --eval-prompt-data mountains $data/test.jsonl --n-samples-per-eval-prompt 8 --eval-interval 10 \
  --rollout-batch-size 16 --n-samples-per-prompt 8 --num-rollout 30 \
  --rollout-max-response-len 64 --rollout-max-context-len 192 \
  --colocate --weight-decay 0 --lr-decay-style constant --save "{run}/checkpoints" "$@"
