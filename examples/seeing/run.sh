#!/bin/sh
# A tiny model that sees learns to count squares: from sloppy demonstrations, then from a reward.
# What follows goes to the second `slime train`.
set -e
here=$(cd "$(dirname "$0")" && pwd)
export PYTHONPATH="$here/../..${PYTHONPATH:+:$PYTHONPATH}"
python=${PYTHON:-python}
data=outputs/seeing-data
keys='{"image": "images"}'
"$python" -m examples.seeing.data $data
"$python" -m slime train --hf-checkpoint $data/model --fp32 --loss-type sft_loss \
  --prompt-data $data/sft.jsonl --input-key question --label-key answer --multimodal-keys "$keys" --apply-chat-template \
  --num-rollout ${SFT_ROLLOUTS:-6} --rollout-batch-size 4096 --global-batch-size 128 --lr 3e-3 --lr-warmup-iters 20 \
  --weight-decay 0 --clip-grad 1.0 --output-dir $data/sft --run-name sft --save-hf $data/taught
exec "$python" -m slime train --hf-checkpoint $data/taught --fp32 --colocate \
  --prompt-data $data/train.jsonl --input-key question --label-key answer --multimodal-keys "$keys" --apply-chat-template \
  --custom-rm-path "$here/rollout.py:reward" --eval-prompt-data squares $data/test.jsonl --eval-interval 10 \
  --rollout-batch-size 32 --n-samples-per-prompt 8 --num-rollout 60 --rollout-max-response-len 4 --rollout-max-context-len 96 \
  --lr 1e-3 --lr-decay-style constant --weight-decay 0 --save "{run}/checkpoints" "$@"
