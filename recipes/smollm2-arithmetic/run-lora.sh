#!/usr/bin/env bash
# Sums with adapters (LoRA) of SmolLM2-135M-Instruct, on two CPU cores or one GPU.
#   recipes/smollm2-arithmetic/run-lora.sh [any flag of slime train]
# Relative paths in flags are the caller's, and outputs/ is made in the folder that it is called in.
set -euo pipefail
. "$(dirname "$0")/../environment.sh"
"$python" -m recipes.smollm2 "$root/models/smollm2"
"$python" -m recipes.smollm2_data "$root/data/sums"
exec "$python" -m slime train --config "$root/recipes/smollm2-arithmetic/lora.yaml" \
    --hf-checkpoint "$root/models/smollm2" --prompt-data "$root/data/sums/train.jsonl" \
    --eval-prompt-data sums "$root/data/sums/test.jsonl" --output-dir "$PWD/outputs" "$@"
