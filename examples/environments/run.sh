#!/bin/sh
# sh examples/environments/run.sh harbor|openenv|verifiers [steps]: a tiny model, made on the spot, in one of three worlds.
set -e
here=$(cd "$(dirname "$0")" && pwd)
export PYTHONPATH="$here/../..${PYTHONPATH:+:$PYTHONPATH}"
exec "${PYTHON:-python}" -m examples.environments.train "${1:-harbor}" ${2:-}
