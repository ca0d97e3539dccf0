#!/bin/sh
# A tiny model, made on the spot, learns Nim by playing against itself. What follows goes to `slime train`.
set -e
here=$(cd "$(dirname "$0")" && pwd)
export PYTHONPATH="$here/../..${PYTHONPATH:+:$PYTHONPATH}"
python=${PYTHON:-python}
data=outputs/self-play-data
"$python" -m examples.self_play.data $data
exec "$python" -m slime train --hf-checkpoint $data/model \
  --prompt-data $data/train.jsonl --input-key stones --rollout-shuffle \
  --custom-generate-function-path "$here/rollout.py:generate" --reward-key score --log-reward-category how \
  --custom-reward-post-process-path "$here/rollout.py:compare" \
  --eval-prompt-data by-chance $data/test.jsonl --n-samples-per-eval-prompt 16 --eval-interval 10 \
  --rollout-batch-size 14 --n-samples-per-prompt 16 --num-rollout 40 \
  --rollout-max-response-len 96 --rollout-max-context-len 128 \
  --colocate --fp32 --lr 4e-3 --weight-decay 0 --lr-decay-style constant --save "{run}/checkpoints" "$@"
