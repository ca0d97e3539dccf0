"""`slime launch --slurm FLAGS`: write the job of a run on a cluster. It starts nothing.

slime launch --slurm --nodes 2 --config my.yaml > job.sh        sbatch job.sh
slime launch --kuberay --image my/slime --config my.yaml > job.yaml      kubectl apply -f job.yaml
slime launch --skypilot --gpu H200 --config my.yaml > job.yaml  sky launch job.yaml
slime launch --slurm train-async --config my.yaml               the flags of `slime train-async`

Every node runs `slime doctor --node` with the run's flags first, and the job ends if one of them
finds something fatal. Then Ray starts on all nodes, and the first one runs `slime train` with the
same flags. Paths must mean the same on every node.
"""

from __future__ import annotations

import argparse
import re
import shlex
import sys
from importlib.metadata import version
from typing import Any

import yaml

from slime.cli.arguments import Arguments, at_least_one, run_flags
from slime.config import Config, parse_args
from slime.config.make import flags_given
from slime.errors import UserError
from slime.placement import PlacementPlan
from slime.redact import redact_argv

_PORT = 6379
_KINDS = ("slurm", "kuberay", "skypilot")
#: Option → the kinds of job that have it, for options that not every kind has.
_OPTIONS = {
    "time": ("slurm",),
    "partition": ("slurm",),
    "image": ("kuberay", "skypilot"),
    "volume_claim": ("kuberay",),
    "gpu": ("skypilot",),
}
_GPUS_PER_NODE = 8
#: Seconds that a node waits for Ray on the first node, and the first node for all others.
_WAIT = 300
#: Shell: succeed if Ray on the first node answers.
_ANSWERS = 'ray status --address "$RAY_ADDRESS"'
_SHARED_MEMORY = "64Gi"
_MODELS = "/models"


def main(argv: list[str]) -> int:
    """Print the job; returns the exit status.

    Raises:
        UserError: not exactly one kind of job was named, it lacks a given option, there are too
            few nodes, or the flags of the run are wrong.
    """
    own, words = _parser().parse_known_args(argv)
    entry, flags = run_flags(words)
    kinds = [kind for kind in _KINDS if getattr(own, kind)]
    if len(kinds) != 1 or not flags:
        raise UserError(
            "slime launch needs one of --slurm, --kuberay and --skypilot, and the flags of a run",
            fix="slime launch --slurm --config my.yaml",
        )
    _refuse_others(own, kinds[0])
    if "num_gpus_per_node" not in flags_given(flags):
        flags += ["--num-gpus-per-node", str(own.gpus_per_node or _GPUS_PER_NODE)]
    _set_size(own, parse_args(flags, entry))
    if redact_argv(flags) != flags:
        print("the job has a secret in it: set its variable on the nodes instead", file=sys.stderr)
    writer = {"slurm": slurm, "kuberay": kuberay, "skypilot": skypilot}[kinds[0]]
    sys.stdout.write(writer(own, entry.replace("_", "-"), shlex.join(flags)))
    return 0


def _refuse_others(own: argparse.Namespace, kind: str) -> None:
    """Refuse options that only another kind of job has.

    Raises:
        UserError: such an option was given.
    """
    parser = _parser()
    for name, kinds in _OPTIONS.items():
        if kind not in kinds and getattr(own, name) != parser.get_default(name):
            option = name.replace("_", "-")
            raise UserError(
                f"slime launch --{kind} has no --{option}",
                why=f"it is an option of {' and '.join(f'--{one}' for one in kinds)}",
                fix=f"remove --{option} {getattr(own, name)}",
            )


def _set_size(own: argparse.Namespace, config: Config) -> None:
    """Set the GPUs per node, and the number of nodes if it was not given.

    Raises:
        UserError: two flags disagree on the GPUs per node, or the run needs more nodes.
    """
    per_node = config.cluster.num_gpus_per_node
    if own.gpus_per_node not in (None, per_node):
        raise UserError(
            f"--gpus-per-node {own.gpus_per_node} contradicts --num-gpus-per-node {per_node}",
            why="both are the GPUs of a node; the second is a flag of the run",
            fix="remove one of them",
        )
    own.gpus_per_node = per_node
    gpus = PlacementPlan.of(config).total
    needed = max(1, -(-gpus // per_node))
    if own.nodes is not None and own.nodes < needed:
        raise UserError(
            f"--nodes {own.nodes} of {per_node} GPUs are {own.nodes * per_node} GPUs, and the run "
            f"needs {gpus}",
            fix=f"--nodes {needed}, or leave it out",
        )
    own.nodes = own.nodes or needed


def _parser() -> Arguments:
    parser = Arguments("slime launch", __doc__)
    for kind in _KINDS:
        parser.add_argument(f"--{kind}", action="store_true")
    parser.add_argument("--nodes", type=at_least_one, help="default: as many as the flags need")
    parser.add_argument(
        "--gpus-per-node", type=at_least_one, help=f"{_GPUS_PER_NODE}, or --num-gpus-per-node"
    )
    parser.add_argument("--job-name", type=_name, default="slime")
    parser.add_argument("--time", default="24:00:00", help="Slurm's limit (24:00:00)")
    parser.add_argument("--partition", help="Slurm's")
    parser.add_argument("--image", default="slime:cuda", help="of KubeRay and SkyPilot")
    parser.add_argument("--volume-claim", help=f"of Kubernetes, mounted at {_MODELS}")
    parser.add_argument("--gpu", default="H200", help="SkyPilot's name of the GPU (H200)")
    return parser


def _name(text: str) -> str:
    """Parse a job name that Slurm, Kubernetes and SkyPilot all accept."""
    if not re.fullmatch(r"[a-z]([a-z0-9-]{0,38}[a-z0-9])?", text):
        raise argparse.ArgumentTypeError("must be small letters, digits and dashes")
    return text


def slurm(own: argparse.Namespace, command: str, flags: str) -> str:
    """Return a batch script: doctor and Ray run once per node, the driver runs on the first
    node."""
    partition = f"#SBATCH --partition={own.partition}\n" if own.partition else ""
    return f"""#!/bin/bash
#SBATCH --job-name={own.job_name}
#SBATCH --nodes={own.nodes}
#SBATCH --ntasks-per-node=1
#SBATCH --gpus-per-node={own.gpus_per_node}
#SBATCH --exclusive
#SBATCH --mem=0
#SBATCH --time={own.time}
#SBATCH --output=%x-%j.log
{partition}set -euo pipefail

flags={shlex.quote(flags)}
mapfile -t nodes < <(scontrol show hostnames "$SLURM_JOB_NODELIST")
first=${{nodes[0]}}
address=$(srun --overlap --nodes=1 --ntasks=1 --nodelist="$first" hostname --ip-address)
export RAY_ADDRESS="${{address%% *}}:{_PORT}"
export RAY_USAGE_STATS_ENABLED=0

echo "slime doctor on ${{#nodes[@]}} nodes"
srun --overlap --label --kill-on-bad-exit=1 bash -c "slime doctor {command} --node $flags"

ray=()
cleanup() {{
    kill "${{ray[@]}}" 2>/dev/null || true
    wait
}}
trap cleanup EXIT
srun --overlap --nodes=1 --ntasks=1 --nodelist="$first" env -u RAY_ADDRESS \\
    ray start --head --node-ip-address="${{address%% *}}" --port={_PORT} --block &
ray+=($!)
{_wait_until(_ANSWERS)}
for node in "${{nodes[@]:1}}"; do
    srun --overlap --nodes=1 --ntasks=1 --nodelist="$node" \\
        ray start --address="$RAY_ADDRESS" --block &
    ray+=($!)
done
{_wait_until(_all_joined(own.nodes))}
srun --overlap --nodes=1 --ntasks=1 --nodelist="$first" bash -c "slime {command} $flags"
"""


def skypilot(own: argparse.Namespace, command: str, flags: str) -> str:
    """Return a SkyPilot task. Its ``run`` starts on every node and never calls ``ray stop``, which
    would end SkyPilot's own Ray too."""
    run = f"""set -euo pipefail
first=$(echo "$SKYPILOT_NODE_IPS" | head -n1)
export RAY_ADDRESS="$first:{_PORT}"
export RAY_USAGE_STATS_ENABLED=0
slime doctor {command} --node {flags}
if [ "$SKYPILOT_NODE_RANK" != 0 ]; then
    {_wait_until(_ANSWERS, indent=4)}
    ray start --address="$RAY_ADDRESS" --block || true  # ends when Ray on the first node ends
    exit 0
fi
env -u RAY_ADDRESS ray start --head --node-ip-address="$first" --port={_PORT} --block &
ray=$!
trap 'kill $ray' EXIT
{_wait_until(_all_joined(own.nodes))}
slime {command} {flags}
"""
    task: dict[str, Any] = {
        "name": own.job_name,
        "num_nodes": own.nodes,
        "resources": {
            "accelerators": f"{own.gpu}:{own.gpus_per_node}",
            "image_id": f"docker:{own.image}",
            "network_tier": "best",
        },
        "run": run,
    }
    return _as_yaml(task)


def kuberay(own: argparse.Namespace, command: str, flags: str) -> str:
    """Return a RayJob. Ray starts in a pod after its init container (`slime doctor`) has succeeded;
    the driver starts when all pods are ready."""

    def group(role: str) -> dict[str, Any]:
        common: dict[str, Any] = {
            "image": own.image,
            "resources": {"limits": {"nvidia.com/gpu": own.gpus_per_node}},
            "volumeMounts": [{"name": "shm", "mountPath": "/dev/shm"}],
        }
        volumes: list[dict[str, Any]] = [
            {"name": "shm", "emptyDir": {"medium": "Memory", "sizeLimit": _SHARED_MEMORY}}
        ]
        if own.volume_claim:
            common["volumeMounts"].append({"name": "models", "mountPath": _MODELS})
            claim = {"claimName": own.volume_claim}
            volumes.append({"name": "models", "persistentVolumeClaim": claim})
        check = f"slime doctor {command} --node {flags}"
        doctor = {"name": "doctor", "command": ["bash", "-c", check], **common}
        ray = {
            "name": f"ray-{role}",
            "env": [{"name": "RAY_USAGE_STATS_ENABLED", "value": "0"}],
            **common,
        }
        pod = {"initContainers": [doctor], "containers": [ray], "volumes": volumes}
        return {"rayStartParams": {}, "template": {"spec": pod}}

    workers = own.nodes - 1
    cluster: dict[str, Any] = {"rayVersion": version("ray"), "headGroupSpec": group("head")}
    if workers:
        cluster["workerGroupSpecs"] = [
            {
                "groupName": "workers",
                "replicas": workers,
                "minReplicas": workers,
                "maxReplicas": workers,
                **group("worker"),
            }
        ]
    job = {
        "apiVersion": "ray.io/v1",
        "kind": "RayJob",
        "metadata": {"name": own.job_name},
        "spec": {
            "entrypoint": f"slime {command} {flags}",
            "shutdownAfterJobFinishes": True,
            "backoffLimit": 0,
            "rayClusterSpec": cluster,
        },
    }
    return _as_yaml(job)


def _all_joined(nodes: int) -> str:
    """Return a shell command that succeeds if ``nodes`` nodes have joined Ray. A run that starts
    earlier is refused."""
    program = (
        'import ray, sys; ray.init(log_to_driver=False, logging_level="ERROR"); '
        'there = sum(node["Alive"] for node in ray.nodes()); '
        f'there < {nodes} and sys.exit(f"{{there}} of {nodes} nodes have joined Ray")'
    )
    return f"python3 -c {shlex.quote(program)}"


def _wait_until(condition: str, indent: int = 0) -> str:
    """Return shell lines that try a condition every two seconds, and fail after `_WAIT` seconds."""
    lines = [
        f"for _ in $(seq {_WAIT // 2}); do {condition} >/dev/null 2>&1 && break; sleep 2; done",
        f"{condition} >/dev/null",
    ]
    return ("\n" + " " * indent).join(lines)


class _Dumper(yaml.SafeDumper):
    """A YAML dumper that writes scripts as literal blocks and uses no aliases."""

    def ignore_aliases(self, data: Any) -> bool:
        return True


def _script(dumper: yaml.SafeDumper, text: str) -> yaml.ScalarNode:
    style = "|" if "\n" in text else None
    return dumper.represent_scalar("tag:yaml.org,2002:str", text, style=style)


_Dumper.add_representer(str, _script)


def _as_yaml(value: dict[str, Any]) -> str:
    return yaml.dump(value, Dumper=_Dumper, sort_keys=False, width=1000)
