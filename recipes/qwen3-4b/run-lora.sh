#!/usr/bin/env bash
# GSM8K with adapters (LoRA) of Qwen3-4B on one GPU of 48 GB or more, trainer and engine in turns.
#   MODEL=path/to/Qwen3-4B GSM8K=path/to/gsm8k recipes/qwen3-4b/run-lora.sh [any flag of slime train]
exec "$(dirname "$0")/../gsm8k.sh" train qwen3-4b/lora.yaml Qwen3-4B "$@"
