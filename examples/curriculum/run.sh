#!/bin/sh
# A tiny model, made on the spot, learns to write longer and longer words backwards. What follows goes to `slime train`.
set -e
here=$(cd "$(dirname "$0")" && pwd)
export PYTHONPATH="$here/../..${PYTHONPATH:+:$PYTHONPATH}"
python=${PYTHON:-python}
data=outputs/curriculum-data
"$python" -m examples.curriculum.data $data
exec "$python" -m slime train --hf-checkpoint $data/model \
  --data-source-path "$here/source.py:Curriculum" --rollout-all-samples-process-path "$here/source.py:tell_source" \
  --custom-rm-path "$here/source.py:reward" --reward-key score --log-reward-category level \
  --rollout-batch-size 32 --n-samples-per-prompt 8 --num-rollout 40 \
  --rollout-max-response-len 14 --rollout-max-context-len 64 \
  --colocate --fp32 --lr 1e-3 --weight-decay 0 --lr-decay-style constant --save "{run}/checkpoints" "$@"
