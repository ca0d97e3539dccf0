#!/usr/bin/env bash
# A recipe on GSM8K; the run.sh of each Qwen3 recipe calls it.
#   recipes/gsm8k.sh train|train-async CONFIG MODEL_NAME [any flag of slime train]
# Environment: MODEL, the model's Hugging Face directory (default models/MODEL_NAME); GSM8K, the folder that holds
# train.jsonl and test.jsonl (default data/gsm8k); PYTHON, an interpreter that has slime.
# Relative paths, also those in flags, are the caller's; outputs/ is made in the folder that it is called in.
set -euo pipefail
command=$1 config=$2 name=$3
shift 3
. "$(dirname "$0")/environment.sh"
model=$(realpath -m "${MODEL:-models/$name}")
data=$(realpath -m "${GSM8K:-data/gsm8k}")
exec "$python" -m slime "$command" --config "$root/recipes/$config" --hf-checkpoint "$model" \
    --prompt-data "$data/train.jsonl" --eval-prompt-data gsm8k "$data/test.jsonl@[0:500]" --eval-interval 20 \
    --output-dir "$PWD/outputs" "$@"
