# Sets root, the folder that holds recipes/, and python. A clone's own environment is made here with make; elsewhere
# (slime init) it is the caller's. PYTHON=… names another interpreter that has slime.
root=$(realpath "$(dirname "${BASH_SOURCE[0]}")/..")
if [ -n "${PYTHON:-}" ]; then
    python=$PYTHON
elif [ -f "$root/Makefile" ] && [ -d "$root/slime" ]; then
    make --quiet -C "$root" install
    python=$root/.venv/bin/python
else
    python=python
fi
export PYTHONPATH="$root${PYTHONPATH:+:$PYTHONPATH}"
