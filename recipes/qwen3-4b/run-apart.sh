#!/usr/bin/env bash
# GSM8K with Qwen3-4B on four GPUs, two for the trainer and two for the engines.
#   MODEL=path/to/Qwen3-4B GSM8K=path/to/gsm8k recipes/qwen3-4b/run-apart.sh [any flag of slime train-async; --dry-run shows the memory plan]
exec "$(dirname "$0")/../gsm8k.sh" train-async qwen3-4b/apart.yaml Qwen3-4B "$@"
