#!/bin/sh
# MODEL: a Hugging Face directory, or a name of the hub, of a model that calls tools; e.g. Qwen/Qwen3-0.6B.
# What follows goes to `slime train`.
set -e
here=$(cd "$(dirname "$0")" && pwd)
exec "${PYTHON:-python}" -m slime train --hf-checkpoint "${MODEL:?set MODEL}" \
  --prompt-data "$here/questions.jsonl" --input-key question --label-key answer \
  --custom-generate-function-path "$here/rollout.py:generate" \
  --rollout-batch-size 8 --n-samples-per-prompt 8 --num-rollout 100 \
  --rollout-max-response-len 512 --rollout-max-context-len 4096 \
  --use-dynamic-batch-size --max-tokens-per-gpu 8192 --colocate --save "{run}/checkpoints" "$@"
