"""The reward, the command and the Python of README.md, copied from its text and run as they stand
there."""

from __future__ import annotations

import json
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from slime.files import read_lines
from tests.support import toy
from tests.support.processes import ROOT, start


def blocks(language: str) -> list[str]:
    return re.findall(
        rf"```{language}\n(.*?)```", (ROOT / "README.md").read_text(encoding="utf-8"), re.DOTALL
    )


def block(language: str, containing: str) -> str:
    (found,) = [text for text in blocks(language) if containing in text]
    return found


def command() -> list[str]:
    """The flags of the command for a model of one's own."""
    text = block("bash", "--prompt-data train.jsonl").replace("\\\n", " ")
    (line,) = [line for line in text.splitlines() if "--prompt-data train.jsonl" in line]
    words = shlex.split(line)
    return words[next(i for i, word in enumerate(words) if word.startswith("--")) :]


@pytest.mark.slow
def test_the_reward_and_the_command_learn_from_each_other(tmp_path: Path) -> None:
    row = json.loads(block("json", "question"))
    assert set(row) == {"question", "answer"} and type(row["answer"]) is int, (
        "numbers are what data sets hold"
    )
    sums = [(i, j) for i in range(10) for j in range(10) if i + j < 10]
    rows = [{"question": f"{i}+{j}=", "answer": i + j} for i, j in sums]
    (tmp_path / "train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (tmp_path / "my_rewards.py").write_text(block("python", "# my_rewards.py"))
    model = toy.write_answering_model(tmp_path / "model")
    flags = [str(model) if word == "path/to/model" else word for word in command()]
    # of a toy: its short context, and two steps of many
    flags += ["--rollout-max-response-len", "8", "--num-rollout", "2", "--fp32"]
    flags += ["--output-dir", str(tmp_path / "outputs"), "--run-name", "readme"]
    with start(flags, tmp_path / "outputs" / "readme", cwd=tmp_path) as driver:
        assert driver.end() == 0, driver.stderr
    steps = [row for row in driver.rows() if "rollout/raw_reward" in row]
    samples = read_lines(driver.path / "samples" / "rollout_000000.jsonl")
    assert len(steps) == 2 and all(
        row["rollout/raw_reward"] > 0 and row["train/grad_norm"] > 0 for row in steps
    )
    assert not any(name.startswith("alarm/") for row in steps for name in row)
    assert all(
        re.fullmatch(r"\d", sample["response"]) and sample["response_length"] == 2
        for sample in samples
    )
    assert {sample["reward"] for sample in samples} == {0.0, 1.0}
    assert all(
        (sample["reward"] == 1.0) == (sample["response"] == sample["label"]) for sample in samples
    )


@pytest.mark.slow
def test_the_python_trains_and_prints(tmp_path: Path) -> None:
    model = toy.write_answering_model(tmp_path / "model")
    script = block("python", "import re, slime\n")
    # of a toy: it answers behind "=", with a digit; its short context; one step, of a few samples
    small = "num_rollout=1, rollout_batch_size=8, rollout_max_response_len=8, fp32=True"
    for theirs, ours in (
        ("path/to/model", str(model)),
        ('"What is {} + {}? Answer with just the number."', '"{}+{}="'),
        ("(50)", "(4)"),
        ("num_rollout=50", small),
    ):
        assert theirs in script
        script = script.replace(theirs, ours)
    (tmp_path / "readme.py").write_text(script)
    path = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])
    environment = {**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1"}
    environment.pop("HOME", None)  # which not every account has
    command = [sys.executable, "readme.py"]
    done = subprocess.run(
        command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stdout + done.stderr
    said = re.fullmatch(r"\[(0\.\d+)\] (\d) (\S+)", done.stdout.splitlines()[-1])
    assert said and float(said[1]) > 0, done.stdout
    assert (tmp_path / said[3] / "config.json").is_file()


def test_the_agent_of_the_readme_is_a_generate_function(tmp_path: Path) -> None:
    from slime.user_code.hooks import GenerateFunction
    from slime.user_code.loading import check_signature, load_function

    (tmp_path / "my_agent.py").write_text(block("python", "# my_agent.py"))
    path = f"{tmp_path / 'my_agent.py'}:generate"
    check_signature(load_function(path), GenerateFunction, path)
