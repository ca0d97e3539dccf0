#!/bin/sh
# MODEL: a Hugging Face directory, or a name of the hub. What follows goes to slime train: --prompt-data, --num-rollout …
set -e
here=$(cd "$(dirname "$0")" && pwd)
exec slime train --hf-checkpoint "${MODEL:?set MODEL}" \
  --input-key question --label-key answer --apply-chat-template \
  --custom-generate-function-path "$here/rollout.py:generate" --custom-rm-path "$here/rollout.py:reward" \
  --rollout-batch-size 8 --n-samples-per-prompt 8 --rollout-max-response-len 1024 "$@"
