"""`slime doctor` finds nothing in any recipe and example: no false alarm, on hosts like those that
they are for."""

from __future__ import annotations

import importlib
import json
import os
import runpy
import shutil
import subprocess
import sys
from collections import namedtuple
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from recipes import demo, smollm2_data
from slime.config import make_config, parse_args
from slime.diagnosis import checks_host, doctor, one_round
from slime.diagnosis.doctor import CHECKS
from tests.support import toy
from tests.support.hf_configs import PUBLISHED
from tests.support.processes import ROOT
from tests.support.prompt_fixtures import make_tokenizer, write_jsonl

pytestmark = pytest.mark.usefixtures("sglang_stand_in")
Usage = namedtuple("Usage", "total used free")
YAMLS = sorted((ROOT / "recipes").glob("*/*.yaml"))
MODELS = {
    "0.6b": "Qwen/Qwen3-0.6B",
    "4b": "Qwen/Qwen3-4B",
    "30b": "Qwen/Qwen3-30B-A3B",
    "smollm2": "HuggingFaceTB/SmolLM2-135M",
}
QUESTIONS = [
    {"question": f"{n} bags of 4?", "answer": f"They are {n} * 4 = {4 * n}\n#### {4 * n}"}
    for n in range(2, 40)
]
BOTH = ("data", "reward")
#: Examples whose rewards nobody can try on the first rows: of games, of another model, for made-up
#: prompts.
REWARDED_ELSEWHERE = ("self_play", "judge", "curriculum", "api_agent")
#: What a directory of a published model has here: config.json and a tokenizer.
WITHOUT_WEIGHTS = [check for check in CHECKS if check.name not in ("weights", "device")]


@pytest.fixture(autouse=True)
def plain_host(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for name in (
        "RAY_ADDRESS",
        "NCCL_TIMEOUT",
        "NCCL_SOCKET_IFNAME",
        "NCCL_IB_DISABLE",
        "WANDB_API_KEY",
    ):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(checks_host, "_INFINIBAND", tmp_path)
    monkeypatch.setattr(checks_host.shutil, "disk_usage", lambda path: Usage(4e12, 0, 4e12))
    monkeypatch.setattr("slime.memory.hardware.free_host_memory", lambda: 16e9)
    monkeypatch.chdir(tmp_path)


def published(folder: Path, name: str) -> Path:
    make_tokenizer().save_pretrained(folder)
    (folder / "config.json").write_text(json.dumps(PUBLISHED[name]["config"]))
    return folder


def nothing_found(
    argv: list[Any], entry: str = "train", checks: Any = CHECKS, looked_at: tuple = BOTH
) -> None:
    report = doctor.examine([str(word) for word in argv], entry, checks)
    assert report.findings == [], doctor.text(report)
    if "sft_loss" not in argv:
        assert {*looked_at} <= {o.check.name for o in report.outcomes if o.state == "ok"}
        config = parse_args([str(word) for word in argv], entry)
        # refuses nothing
        make_config(entry=entry, **one_round.flags_of_a_round(config, Path("round")))


@pytest.mark.parametrize("path", YAMLS, ids=lambda path: f"{path.parent.name}-{path.stem}")
def test_recipes(path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    recipe = path.parent.name
    model = published(
        tmp_path / "model", next(model for size, model in MODELS.items() if size in recipe)
    )
    flags: list[Any] = [
        "--config",
        path,
        "--hf-checkpoint",
        model,
        "--output-dir",
        tmp_path / "outputs",
    ]
    if recipe == "smollm2-arithmetic":
        smollm2_data.write(tmp_path)
    else:
        write_jsonl(tmp_path / "train.jsonl", QUESTIONS[8:])
        write_jsonl(tmp_path / "test.jsonl", QUESTIONS[:8])
    flags += [
        "--prompt-data",
        tmp_path / "train.jsonl",
        "--eval-prompt-data",
        "test",
        tmp_path / "test.jsonl",
    ]
    flags += ["--eval-interval", 20]
    if recipe.startswith("qwen3"):
        monkeypatch.setenv("SLIME_NUM_GPUS", {"qwen3-0.6b": "1", "qwen3-4b": "4"}.get(recipe, "8"))
        flags += ["--gpu-memory-gb", 141 if recipe == "qwen3-30b-a3b" else 80]
        flags += ["--ray-address", "auto"] if "2nodes" in recipe else []
    else:
        monkeypatch.setenv("SLIME_NUM_GPUS", "0")
    nothing_found(flags, "train_async" if path.stem == "apart" else "train", WITHOUT_WEIGHTS)


def test_the_demo(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SLIME_NUM_GPUS", "0")
    monkeypatch.setattr(demo, "SFT_BATCH", 16)
    launched: list[list[str]] = []
    monkeypatch.setattr("slime.cli.train.main", launched.append)
    monkeypatch.setattr(demo, "_say_what_happened", lambda run: None)
    monkeypatch.setattr(sys, "argv", ["demo", "--output-dir", str(tmp_path), "--run-name", "demo"])
    assert demo.main() == 0
    supervised, reinforced = launched
    nothing_found(supervised)
    trained = reinforced[reinforced.index("--hf-checkpoint") + 1]
    Path(trained).parent.mkdir(parents=True)
    Path(trained).symlink_to(tmp_path / "demo-inputs" / "seed-0" / "model")
    nothing_found(reinforced)


class Started(Exception):
    pass


@pytest.fixture
def flags_of_python(monkeypatch: pytest.MonkeyPatch) -> Callable[[Path, Path], list[str]]:
    """The flags with which a script that calls `slime.train` starts its run."""

    def started(self: object, command: list[str], log: Path) -> None:
        raise Started(*command[command.index("train") + 1 :])

    monkeypatch.setattr("slime.run.api.TrainingRun._start", started)

    def flags(script: Path, model: Path) -> list[str]:
        monkeypatch.setattr(sys, "argv", [script.name, str(model)])
        with pytest.raises(Started) as ended:
            runpy.run_path(str(script), run_name="__main__")
        return list(ended.value.args)

    return flags


def test_the_example_in_python(
    flags_of_python: Callable[[Path, Path], list[str]],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("SLIME_NUM_GPUS", "0")
    model = toy.write_model(tmp_path / "model", "llama")
    nothing_found(flags_of_python(ROOT / "examples" / "first_run.py", model))


@pytest.mark.parametrize(
    "example", sorted(path.parent.name for path in (ROOT / "examples").glob("*/data.py"))
)
def test_the_examples(example: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With the flags of their scripts; the interpreter here only says how it was called."""
    monkeypatch.setenv("SLIME_NUM_GPUS", "0")
    monkeypatch.setattr(
        "examples.tiny.write_model", lambda folder, *_, **__: published(folder, MODELS["smollm2"])
    )
    says = tmp_path / "says"
    says.write_text("#!/bin/sh\nprintf '%s\\t' \"$@\"\necho\n")
    says.chmod(0o755)
    env = {**os.environ, "PYTHON": str(says)}
    script = ["sh", str(ROOT / "examples" / example / "run.sh"), "--save", "kept"]
    done = subprocess.run(
        script, capture_output=True, text=True, env=env, cwd=tmp_path, timeout=60, check=True
    )
    made, *trained = (line.split("\t")[:-1] for line in done.stdout.splitlines())
    assert made[:2] == ["-m", f"examples.{example}.data"]
    module = importlib.import_module(made[1])
    if example == "seeing":  # a picture for each row takes most of the time
        monkeypatch.setattr(module, "SIZES", {"sft": 512, "train": 256, "test": 64})
    module.write(Path(made[2]))
    looked_at = BOTH[:1] if example in REWARDED_ELSEWHERE else BOTH
    assert trained
    for words in trained:
        assert words[:3] == ["-m", "slime", "train"]
        flags = [*words[3:], "--output-dir", tmp_path]
        nothing_found(flags, checks=WITHOUT_WEIGHTS, looked_at=looked_at)
        if "--save-hf" in words:  # the next one begins with what this one would have taught
            taught = words[words.index("--save-hf") + 1]
            shutil.copytree(words[words.index("--hf-checkpoint") + 1], taught)
