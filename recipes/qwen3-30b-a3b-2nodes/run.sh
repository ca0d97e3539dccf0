#!/usr/bin/env bash
# GSM8K with Qwen3-30B-A3B on two nodes of eight GPUs; Ray runs on both already, see README.md.
#   MODEL=path/to/Qwen3-30B-A3B GSM8K=path/to/gsm8k recipes/qwen3-30b-a3b-2nodes/run.sh [any flag of slime train; --dry-run shows the memory plan]
exec "$(dirname "$0")/../gsm8k.sh" train qwen3-30b-a3b-2nodes/config.yaml Qwen3-30B-A3B --ray-address "${RAY_ADDRESS:-auto}" "$@"
