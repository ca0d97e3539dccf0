#!/usr/bin/env bash
# Sums with SmolLM2-135M-Instruct: a rising reward within 15 minutes on two CPU cores; runs unchanged on one GPU.
#   recipes/smollm2-arithmetic/run.sh [any flag of slime train]      CONFIG=FILE.yaml: another configuration beside it
# Relative paths in flags are the caller's, and outputs/ is made in the folder that it is called in.
set -euo pipefail
. "$(dirname "$0")/../environment.sh"
"$python" -m recipes.smollm2 "$root/models/smollm2"
"$python" -m recipes.smollm2_data "$root/data/sums"
exec "$python" -m slime train --config "$root/recipes/smollm2-arithmetic/${CONFIG:-config.yaml}" \
    --hf-checkpoint "$root/models/smollm2" --prompt-data "$root/data/sums/train.jsonl" \
    --eval-prompt-data sums "$root/data/sums/test.jsonl" --output-dir "$PWD/outputs" "$@"
