"""`slime launch`: the jobs that it writes, run by a shell with stand-ins for Slurm, Ray, slime."""

from __future__ import annotations

import json
import os
import shlex
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml

from benchmarks.gpu.trainer import SHAPES
from slime.cli import launch
from slime.errors import UserError

FLAGS = ["--prompt-data", "a file.jsonl", "--num-rollout", "1", "--colocate"]
FLAGS += ["--custom-rm-path", "recipes.gsm8k.reward", "--rollout-batch-size", "16"]
FLAGS += ["--actor-num-nodes", "2", "--actor-num-gpus-per-node", "8"]


@pytest.fixture
def flags(tmp_path: Path) -> list[str]:
    (tmp_path / "config.json").write_text(json.dumps(SHAPES["qwen3-0.6b"]))
    return ["--hf-checkpoint", str(tmp_path), *FLAGS]


def job(words: list[str], capsys: pytest.CaptureFixture[str]) -> str:
    assert launch.main(words) == 0
    return capsys.readouterr().out


@pytest.fixture
def stand_ins(tmp_path: Path) -> dict[str, str]:
    """The environment of a shell whose commands write what they are called with, one a line."""
    folder = tmp_path / "bin"
    folder.mkdir()
    # in one write, as some run beside others
    said = 'line="$(basename "$0")$(printf " [%s]" "$@")"; echo "$line" >>"$CALLS"\n'
    bodies = {
        "scontrol": "echo one; echo two",
        "srun": 'while [ "${1#--}" != "$1" ]; do shift; done\nexec "$@"',
        "hostname": "echo 10.0.0.1 fe80::1",
        "ray": said + 'case "$*" in *--block*) exec /bin/sleep 30;; esac',
        "slime": said + '[ "$1" = doctor ] && exit "${DOCTOR:-0}"; exit "${TRAIN:-0}"',
        "python3": '[ "$(grep -c "^ray .start" "$CALLS")" -ge "${JOINED:-1}" ]',
        "sleep": "exec /bin/sleep 0.01",
    }
    for name, body in bodies.items():
        (folder / name).write_text(f"#!/bin/bash\n{body}\n")
        (folder / name).chmod(0o755)
    return {
        **os.environ,
        "PATH": f"{folder}:{os.environ['PATH']}",
        "CALLS": str(tmp_path / "calls"),
        "SLURM_JOB_NODELIST": "node[1-2]",
        "SKYPILOT_NODE_IPS": "10.0.0.1\n10.0.0.2",
        "SKYPILOT_NODE_RANK": "0",
    }


def run(script: str, environment: dict[str, str]) -> tuple[int, list[str]]:
    """The exit status, and the calls of ray and slime."""
    assert subprocess.run(["bash", "-n"], input=script, text=True).returncode == 0
    done = subprocess.run(
        ["bash", "-s"], input=script, text=True, env=environment, timeout=20, capture_output=True
    )
    return done.returncode, Path(environment["CALLS"]).read_text().splitlines()


def test_slurm_examines_every_node_then_starts_ray_then_trains(
    flags: list[str], stand_ins: dict[str, str], capsys: pytest.CaptureFixture[str]
) -> None:
    script = job(["--slurm", "--partition", "gpu", *flags], capsys)
    head = script.split("\n\n")[0].splitlines()
    assert head[0] == "#!/bin/bash"
    assert "#SBATCH --nodes=2" in head
    assert "#SBATCH --gpus-per-node=8" in head
    assert "#SBATCH --partition=gpu" in head
    status, calls = run(script, stand_ins | {"JOINED": "2"})
    assert status == 0
    assert calls[0].startswith("slime [doctor] [train] [--node] [--hf-checkpoint]")
    assert "[a file.jsonl]" in calls[0]
    starts = sorted(call for call in calls if call.startswith("ray [start]"))
    assert starts[0] == "ray [start] [--address=10.0.0.1:6379] [--block]"
    assert "[--node-ip-address=10.0.0.1] [--port=6379]" in starts[1]
    assert len(starts) == 2
    assert calls[-1].startswith("slime [train] [--hf-checkpoint]")
    assert calls[-1].split("[--hf-checkpoint]")[1] == calls[0].split("[--hf-checkpoint]")[1]


@pytest.mark.parametrize("kind", ["slurm", "skypilot"])
def test_a_doctor_that_finds_something_ends_the_job(
    kind: str, flags: list[str], stand_ins: dict[str, str], capsys: pytest.CaptureFixture[str]
) -> None:
    text = job([f"--{kind}", *flags], capsys)
    script = text if kind == "slurm" else yaml.safe_load(text)["run"]
    status, calls = run(script, stand_ins | {"DOCTOR": "1"})
    assert status == 1
    assert len(calls) == 1


@pytest.mark.parametrize("kind", ["slurm", "skypilot"])
def test_a_node_that_does_not_join_ends_the_job(
    kind: str, flags: list[str], stand_ins: dict[str, str], capsys: pytest.CaptureFixture[str]
) -> None:
    text = job([f"--{kind}", *flags], capsys)
    script = text if kind == "slurm" else yaml.safe_load(text)["run"]
    status, calls = run(script.replace("seq 150", "seq 9"), stand_ins | {"JOINED": "9"})
    assert status == 1
    assert not any(call.startswith("slime [train]") for call in calls)


def test_the_nodes_that_have_joined_are_counted_by_ray(monkeypatch: pytest.MonkeyPatch) -> None:
    program = shlex.split(launch._all_joined(2))[2]
    monkeypatch.setattr("ray.init", lambda **_: None)
    monkeypatch.setattr("ray.nodes", lambda: [{"Alive": True}, {"Alive": False}])
    with pytest.raises(SystemExit, match="1 of 2 nodes have joined Ray"):
        exec(program)
    monkeypatch.setattr("ray.nodes", lambda: [{"Alive": True}] * 2)
    exec(program)


@pytest.mark.parametrize("kind", ["slurm", "skypilot"])
def test_the_job_ends_as_the_run_ends(
    kind: str, flags: list[str], stand_ins: dict[str, str], capsys: pytest.CaptureFixture[str]
) -> None:
    apart = [word for word in flags if word != "--colocate"]
    text = job([f"--{kind}", "train-async", *apart], capsys)
    script = text if kind == "slurm" else yaml.safe_load(text)["run"]
    status, calls = run(script, stand_ins | {"TRAIN": "3"})
    assert status == 3
    assert calls[-1].startswith("slime [train-async]")


def test_skypilot_trains_on_the_first_node_alone(
    flags: list[str], stand_ins: dict[str, str], capsys: pytest.CaptureFixture[str]
) -> None:
    """The names of fields and variables are those of https://docs.skypilot.co/en/latest/reference/
    yaml-spec.html; `ray stop` would end SkyPilot's own Ray."""
    text = job(["--skypilot", "--gpu", "H100", "--image", "me/slime:1", *flags], capsys)
    task = yaml.safe_load(text)
    assert set(task) == {"name", "num_nodes", "resources", "run"}
    assert task["num_nodes"] == 2
    assert task["resources"]["accelerators"] == "H100:8"
    assert task["resources"]["image_id"] == "docker:me/slime:1"
    assert "ray stop" not in task["run"]
    status, calls = run(task["run"], stand_ins)
    assert status == 0
    assert [call.split("]")[0] for call in calls if call.startswith("slime")] == [
        "slime [doctor",
        "slime [train",
    ]
    Path(stand_ins["CALLS"]).unlink()
    short = task["run"].replace("--block", "")
    status, calls = run(short, stand_ins | {"SKYPILOT_NODE_RANK": "1"})
    assert status == 0
    assert "ray [start] [--address=10.0.0.1:6379]" in calls
    assert not any(call.startswith("slime [train]") for call in calls)


def test_kuberay_examines_in_an_init_container_of_every_pod(
    flags: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    """The names of fields are those of https://ray-project.github.io/kuberay/reference/api/."""
    words = ["--kuberay", "--image", "me/slime:1", "--volume-claim", "models", *flags]
    made: dict[str, Any] = yaml.safe_load(job(words, capsys))
    assert (made["apiVersion"], made["kind"]) == ("ray.io/v1", "RayJob")
    spec = made["spec"]
    assert spec["entrypoint"].startswith("slime train --hf-checkpoint")
    assert spec["shutdownAfterJobFinishes"] is True
    cluster = spec["rayClusterSpec"]
    (workers,) = cluster["workerGroupSpecs"]
    assert workers["replicas"] == workers["minReplicas"] == workers["maxReplicas"] == 1
    for group in (cluster["headGroupSpec"], workers):
        pod = group["template"]["spec"]
        (doctor,) = pod["initContainers"]
        (ray,) = pod["containers"]
        assert doctor["command"][2].startswith("slime doctor train --node --hf-checkpoint")
        assert subprocess.run(["bash", "-n", "-c", doctor["command"][2]]).returncode == 0
        for container in (doctor, ray):
            assert container["image"] == "me/slime:1"
            assert container["resources"]["limits"] == {"nvidia.com/gpu": 8}
            assert {mount["name"] for mount in container["volumeMounts"]} == {
                volume["name"] for volume in pod["volumes"]
            }


def test_the_size_of_a_node_may_be_a_flag_of_the_run(
    flags: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "run.yaml").write_text("num_gpus_per_node: 4\n")
    for given in (["--num-gpus-per-node", "4"], ["--config", str(tmp_path / "run.yaml")]):
        nodes = ["--actor-num-nodes", "4", "--actor-num-gpus-per-node", "4"]
        script = job(["--slurm", *flags[:-4], *nodes, *given], capsys)
        assert "#SBATCH --gpus-per-node=4\n" in script
        assert "#SBATCH --nodes=4\n" in script
        assert "--num-gpus-per-node 8" not in script


def test_a_job_has_all_the_memory_of_its_nodes(
    flags: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    """--exclusive alone gives as much as the partition's default
    (https://slurm.schedmd.com/sbatch.html)."""
    assert "#SBATCH --mem=0\n" in job(["--slurm", *flags], capsys)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--slurm", "--image", "me/slime:1"], "--slurm has no --image"),
        (["--kuberay", "--gpu", "H100"], "--kuberay has no --gpu"),
        (["--skypilot", "--volume-claim", "models"], "--skypilot has no --volume-claim"),
        (["--slurm", "--nodes", "1"], "8 GPUs, and the run needs 16"),
        (["--slurm", "--gpus-per-node", "8", "--num-gpus-per-node", "16"], "contradicts"),
    ],
)
def test_options_without_effect_are_refused(
    words: list[str], message: str, flags: list[str]
) -> None:
    with pytest.raises(UserError, match=message):
        launch.main([*words, *flags])


def test_one_node_needs_no_workers(flags: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    words = ["--kuberay", *flags[:-4], "--actor-num-gpus-per-node", "4"]
    spec = yaml.safe_load(job(words, capsys))["spec"]
    assert "workerGroupSpecs" not in spec["rayClusterSpec"]


def test_a_secret_in_the_job_is_told(flags: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    launch.main(["--slurm", *flags])
    assert capsys.readouterr().err == ""
    launch.main(["--slurm", *flags, "--use-wandb", "--wandb-key", "0123456789abcdef"])
    assert "the job has a secret in it" in capsys.readouterr().err


@pytest.mark.parametrize(
    "words",
    [[], ["--slurm"], ["--slurm", "--kuberay", "--lr", "1"], ["--slurm", "--job-name", "A b"]],
)
def test_what_is_missing_is_told(words: list[str]) -> None:
    with pytest.raises(UserError, match="slime launch"):
        launch.main(words)
