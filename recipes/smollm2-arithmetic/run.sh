#!/usr/bin/env bash
# Sums with SmolLM2-135M-Instruct: a rising reward within 15 minutes on two CPU cores; runs unchanged on one GPU.
#   recipes/smollm2-arithmetic/run.sh [any flag of slime train]
set -euo pipefail
cd "$(dirname "$0")/../.."
[ -n "${PYTHON:-}" ] || make --quiet install
python=${PYTHON:-.venv/bin/python}
$python -m recipes.smollm2 models/smollm2
$python -m recipes.smollm2_data data/sums
exec $python train.py --config recipes/smollm2-arithmetic/config.yaml "$@"
