#!/usr/bin/env bash
# GSM8K with Qwen3-30B-A3B on two nodes of eight GPUs; Ray runs on both already, see README.md.
#   MODEL=path/to/Qwen3-30B-A3B GSM8K=path/to/gsm8k recipes/qwen3-30b-a3b-2nodes/run.sh [any flag of slime train; --dry-run shows the memory plan]
set -euo pipefail
here=$(pwd)
model=$(realpath -m "${MODEL:-models/Qwen3-30B-A3B}")
data=$(realpath -m "${GSM8K:-data/gsm8k}")
cd "$(dirname "$0")/../.."
[ -n "${PYTHON:-}" ] || make --quiet install
python=${PYTHON:-.venv/bin/python}
exec $python train.py --config recipes/qwen3-30b-a3b-2nodes/config.yaml --hf-checkpoint "$model" --prompt-data "$data/train.jsonl" \
    --eval-prompt-data gsm8k "$data/test.jsonl@[0:500]" --eval-interval 20 --output-dir "$here/outputs" \
    --ray-address "${RAY_ADDRESS:-auto}" "$@"
