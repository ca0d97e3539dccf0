#!/usr/bin/env bash
# GSM8K with SmolLM2-135M-Instruct. GSM8K names the folder that holds train.jsonl and test.jsonl (columns question, answer).
#   GSM8K=path/to/gsm8k recipes/smollm2-gsm8k/run.sh [any flag of slime train]
# Relative paths in flags are the caller's, and outputs/ is made in the folder that it is called in.
set -euo pipefail
data=$(realpath -m "${GSM8K:-data/gsm8k}")
. "$(dirname "$0")/../environment.sh"
"$python" -m recipes.smollm2 "$root/models/smollm2"
exec "$python" -m slime train --config "$root/recipes/smollm2-gsm8k/config.yaml" \
    --hf-checkpoint "$root/models/smollm2" --prompt-data "$data/train.jsonl" \
    --eval-prompt-data gsm8k "$data/test.jsonl@[0:100]" --eval-interval 20 --output-dir "$PWD/outputs" "$@"
