#!/usr/bin/env bash
# Sums with adapters (LoRA) of SmolLM2-135M-Instruct, on two CPU cores or one GPU.
#   recipes/smollm2-arithmetic/run-lora.sh [any flag of slime train]
CONFIG=lora.yaml exec "$(dirname "$0")/run.sh" "$@"
