#!/usr/bin/env bash
# GSM8K with SmolLM2-135M-Instruct. GSM8K names the folder that holds train.jsonl and test.jsonl (columns question, answer).
#   GSM8K=path/to/gsm8k recipes/smollm2-gsm8k/run.sh [any flag of slime train]
set -euo pipefail
here=$(pwd)
data=$(realpath -m "${GSM8K:-data/gsm8k}")
cd "$(dirname "$0")/../.."
[ -n "${PYTHON:-}" ] || make --quiet install
python=${PYTHON:-.venv/bin/python}
$python -m recipes.smollm2 models/smollm2
exec $python train.py --config recipes/smollm2-gsm8k/config.yaml --prompt-data "$data/train.jsonl" \
    --eval-prompt-data gsm8k "$data/test.jsonl@[0:100]" --eval-interval 20 --output-dir "$here/outputs" "$@"
