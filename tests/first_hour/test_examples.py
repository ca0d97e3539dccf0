"""The examples do what they say: each is run as a stranger would, on a toy model."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import nbformat
import pytest
from nbclient import NotebookClient

ROOT = Path(__file__).parents[2]


@pytest.fixture
def environment(tmp_path: Path) -> dict[str, str]:
    python_path = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])
    return {**os.environ, "PYTHONPATH": python_path, "OMP_NUM_THREADS": "1"}


@pytest.mark.full  # test_readme.py trains by the same calls
def test_the_script(models: dict[str, Path], tmp_path: Path, environment: dict[str, str]) -> None:
    command = [sys.executable, str(ROOT / "examples" / "first_run.py"), str(models["qwen3"]), "1"]
    done = subprocess.run(
        command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert ": finished, reward" in done.stdout and "the model: outputs/" in done.stdout
    (model,) = (tmp_path / "outputs").glob("run-*/model/config.json")
    assert model.is_file()


#: Examples that are a script, all of them runs of minutes.
EXAMPLES = sorted(path.parent.name for path in (ROOT / "examples").glob("*/data.py"))


@pytest.mark.full
@pytest.mark.parametrize("example", EXAMPLES)
def test_the_script_of(example: str, tmp_path: Path, environment: dict[str, str]) -> None:
    """Two steps with few samples, and the model that it makes."""
    command = [
        "sh",
        str(ROOT / "examples" / example / "run.sh"),
        "--num-rollout",
        "2",
        "--n-samples-per-prompt",
        "2",
    ]
    # it has no evaluations
    command += [] if example == "curriculum" else ["--n-samples-per-eval-prompt", "1"]
    env = {**environment, "PYTHON": sys.executable}
    done = subprocess.run(
        command, cwd=tmp_path, env=env, capture_output=True, text=True, timeout=600
    )
    assert done.returncode == 0, done.stdout + done.stderr
    [metrics] = (tmp_path / "outputs").glob("*/metrics.jsonl")
    rows = [json.loads(line) for line in metrics.read_text().splitlines()]
    assert {row["step"] for row in rows if "rollout/raw_reward" in row} == {1, 2}
    assert (metrics.parent / "model" / "config.json").is_file()


@pytest.mark.full
def test_the_notebook(
    models: dict[str, Path],
    tmp_path: Path,
    environment: dict[str, str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for name, value in {**environment, "MODEL": str(models["qwen3"]), "STEPS": "1"}.items():
        monkeypatch.setenv(name, value)
    notebook = nbformat.read(ROOT / "examples" / "first_run.ipynb", as_version=4)
    kernel = {"metadata": {"path": str(tmp_path)}}  # its working directory
    NotebookClient(notebook, timeout=300, kernel_name="python3", resources=kernel).execute()
    *_, last = notebook.cells
    assert "model" in last.outputs[0]["data"]["text/plain"] and (tmp_path / "outputs").is_dir()


@pytest.mark.full
def test_a_model_in_boxes_of_tasks(tmp_path: Path, environment: dict[str, str]) -> None:
    command = ["sh", str(ROOT / "examples" / "environments" / "run.sh"), "harbor", "1"]
    env = {**environment, "PYTHON": sys.executable}
    done = subprocess.run(
        command, cwd=tmp_path, env=env, capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "score, step by step: [0." in done.stdout
