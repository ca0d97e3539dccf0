#!/usr/bin/env bash
# A recipe on GSM8K; the run.sh of each Qwen3 recipe calls it.
#   recipes/gsm8k.sh train.py|train_async.py CONFIG MODEL_NAME [any flag of slime train]
# Environment: MODEL, the model's Hugging Face directory (default models/MODEL_NAME); GSM8K, the folder that holds
# train.jsonl and test.jsonl (default data/gsm8k); PYTHON, an interpreter that has slime (default: .venv, made here).
# Relative paths, also those in flags, are the caller's; outputs/ is made in the folder that it is called in.
set -euo pipefail
program=$1 config=$2 name=$3
shift 3
root=$(realpath "$(dirname "$0")/..")
model=$(realpath -m "${MODEL:-models/$name}")
data=$(realpath -m "${GSM8K:-data/gsm8k}")
[ -n "${PYTHON:-}" ] || make --quiet -C "$root" install
exec "${PYTHON:-$root/.venv/bin/python}" "$root/$program" --config "$root/recipes/$config" --hf-checkpoint "$model" \
    --prompt-data "$data/train.jsonl" --eval-prompt-data gsm8k "$data/test.jsonl@[0:500]" --eval-interval 20 \
    --output-dir "$PWD/outputs" "$@"
