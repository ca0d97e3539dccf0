#!/usr/bin/env bash
# GSM8K with Qwen3-4B on four GPUs, trainer and engines in turns.
#   MODEL=path/to/Qwen3-4B GSM8K=path/to/gsm8k recipes/qwen3-4b/run.sh [any flag of slime train; --dry-run shows the memory plan]
exec "$(dirname "$0")/../gsm8k.sh" train qwen3-4b/config.yaml Qwen3-4B "$@"
