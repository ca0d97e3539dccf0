"""A whole launch as users of the reference system write theirs: conversion, ``ray start``, ``ray
job submit``, and the conversion back."""

from __future__ import annotations

import json
import os
import secrets
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
import torch
from safetensors.torch import load_file

from slime.processes.host import free_port
from tests.support import toy
from tests.support.forks import socket_of_forks
from tests.support.processes import PATIENCE, ROOT

pytestmark = pytest.mark.slow


@pytest.fixture
def ray_folder() -> Iterator[Path]:
    """For a cluster's sockets, whose paths are short; the cluster ends with the test, and no other
    one does."""
    folder = Path(tempfile.mkdtemp(prefix="ray-"))
    yield folder
    for process in _of(folder):
        process.kill()
    shutil.rmtree(folder, ignore_errors=True)


def _of(folder: Path) -> set[psutil.Process]:
    """What ``ray start`` has left behind, and all that came of it."""
    found = set[psutil.Process]()
    for process in psutil.process_iter():
        try:
            if f"--temp-dir {folder}" in process.environ().get("RAY_ARGS", "") or str(
                folder
            ) in str(process.cmdline()):
                found |= {process, *process.children(recursive=True)}
        except psutil.Error:
            continue
    return found - {psutil.Process()}


SHAPE = """--swiglu --num-layers 2 --hidden-size 64 --ffn-hidden-size 128 --num-attention-heads 4
    --group-query-attention --num-query-groups 2 --use-rotary-position-embeddings \
--disable-bias-linear
    --normalization "RMSNorm" --rotary-base 10000 --vocab-size 32 --kv-channels 16"""
#: Family of `toy` → its MODEL_ARGS.
MODELS = {
    "glm4": f"""--spec "slime_plugins.models.glm4" "get_glm_spec" {SHAPE} \
--norm-epsilon 1.5625e-07 --rotary-percent 0.5
        --rotary-interleaved --no-rope-fusion --post-self-attn-layernorm --post-mlp-layernorm""",
    "qwen3": f"{SHAPE} --norm-epsilon 1e-6 --qk-layernorm",
}


#: Stand-ins: `ray` starts no cluster and runs a job as it is; `python3` is a fork of the process
#: that tests' drivers are forks of.
COMMANDS = {
    "ray": """#!/bin/sh
[ "$1" = job ] || exit 0
while [ "$1" != -- ]; do shift; done
shift
exec "$@"
""",
    "python3": f"""#!{sys.executable}
import os, sys
sys.path.insert(0, {str(ROOT)!r})
from slime.processes import preloaded
env = {{name: os.environ[name] for name in os.environ if name != "PYTHONBUFFERED"}}
given = env.get("PYTHONPATH", "")
env["PYTHONPATH"] = ":".join([{str(ROOT)!r}, given])  # Python adds the folder of a script
argv = [sys.executable, *sys.argv[1:]]
server = preloaded._connect(os.environ["FORKS"])
preloaded._request_fork(server, argv, env, (0, 1, 2), 0, is_watched=True)
status = server.recv(64)
sys.exit(int(status))
""",
}


@pytest.mark.parametrize(
    ("family", "has_cluster"),
    [
        pytest.param("glm4", False, id="glm4"),
        pytest.param("qwen3", True, id="qwen3", marks=pytest.mark.full),
    ],
)
def test_a_launch_script_of_the_reference_system_trains(
    family: str, has_cluster: bool, tmp_path: Path, ray_folder: Path
) -> None:
    """Its own arguments, but for what needs a GPU: their number, and flash attention."""
    if not has_cluster:
        (tmp_path / "bin").mkdir()
        for name, text in COMMANDS.items():
            (tmp_path / "bin" / name).write_text(text)
            (tmp_path / "bin" / name).chmod(0o755)
    model = f"{family}-tiny"
    toy.write_model(tmp_path / model, family)
    toy.write_data(tmp_path / "sums.jsonl")
    (tmp_path / "models").mkdir()
    (tmp_path / "models" / f"{model}.sh").write_text(f"MODEL_ARGS=(\n{MODELS[family]}\n)\n")
    for name in ("train.py", "tools"):  # it stands in its repository, and outputs/ comes to be here
        (tmp_path / name).symlink_to(ROOT / name)
    ports = [
        f"{flag} {free_port()}"
        for flag in ("--port", "--dashboard-agent-listen-port", "--ray-client-server-port")
    ]
    given = {
        "HERE": str(tmp_path),
        "MODEL": model,
        "PATH": f"{tmp_path / 'bin'}:{Path(sys.executable).parent}:{os.environ['PATH']}",
        "FORKS": socket_of_forks(),
        "OMP_NUM_THREADS": "1",
        "GPUS": "0",
        "ATTENTION": "auto",
        "DASHBOARD_PORT": str(free_port()),
        "RAY_AUTH_MODE": "token",
        "RAY_AUTH_TOKEN": secrets.token_hex(32),
        "RAY_ARGS": " ".join(
            [
                "--num-cpus 4 --min-worker-port 0 --max-worker-port 0",
                *ports,
                f"--temp-dir {ray_folder}",
            ]
        ),
    }
    kept = {
        name: value
        for name, value in os.environ.items()
        if name not in ("RAY_ADDRESS", "PYTHONPATH")
    }
    log = tmp_path / "script.log"
    with open(log, "w") as output:
        script = ["bash", str(ROOT / "tests/support/launch_script.sh")]
        done = subprocess.run(
            script,
            cwd=tmp_path,
            env=kept | given,
            stdout=output,
            stderr=subprocess.STDOUT,
            timeout=3 * PATIENCE,
        )
    assert done.returncode == 0, log.read_text()[-8000:]

    [run] = (tmp_path / "outputs").glob(f"{model}-*")
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    trained = [row for row in rows if "rollout/raw_reward" in row]
    assert [row["step"] for row in trained] == [1, 2] and any(
        row["train/grad_norm"] > 0 for row in trained
    )
    assert [row["step"] for row in rows if "eval/sums" in row] == [0, 2]
    assert (tmp_path / f"{model}_torch_dist" / "release").is_dir(), "what --ref-load reads"
    assert (tmp_path / f"{model}_slime" / "iter_0000001").is_dir()
    config = json.loads((run / "config.json").read_text())
    assert config["checkpoint"]["ref_load"].endswith(f"{model}_torch_dist")
    before, after = (
        load_file(tmp_path / name / "model.safetensors") for name in (model, f"{model}_hf")
    )
    assert before.keys() == after.keys(), "what the last command has written"
    assert any(not torch.equal(before[name], after[name].to(before[name])) for name in before)
