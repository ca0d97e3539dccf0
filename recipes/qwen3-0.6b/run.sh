#!/usr/bin/env bash
# GSM8K with Qwen3-0.6B on one GPU.
#   MODEL=path/to/Qwen3-0.6B GSM8K=path/to/gsm8k recipes/qwen3-0.6b/run.sh [any flag of slime train; --dry-run shows the memory plan]
exec "$(dirname "$0")/../gsm8k.sh" train qwen3-0.6b/config.yaml Qwen3-0.6B "$@"
