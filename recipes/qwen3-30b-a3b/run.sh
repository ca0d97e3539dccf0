#!/usr/bin/env bash
# GSM8K with Qwen3-30B-A3B on eight GPUs.
#   MODEL=path/to/Qwen3-30B-A3B GSM8K=path/to/gsm8k recipes/qwen3-30b-a3b/run.sh [any flag of slime train; --dry-run shows the memory plan]
exec "$(dirname "$0")/../gsm8k.sh" train qwen3-30b-a3b/config.yaml Qwen3-30B-A3B "$@"
