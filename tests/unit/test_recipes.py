"""The recipes for GPUs: each one's dry run prints a memory plan that fits the GPUs that its page
asks for."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from slime.__main__ import main
from tests.support.hf_configs import PUBLISHED

ROOT = Path(__file__).parents[2]

#: recipe → (configuration, model, GPUs of a host, GB of a GPU, command, further flags)
RECIPES: dict[str, tuple[str, str, int, int, str, list[str]]] = {
    "0.6B on 1": ("qwen3-0.6b/config.yaml", "Qwen/Qwen3-0.6B", 1, 80, "train", []),
    "4B on 4": ("qwen3-4b/config.yaml", "Qwen/Qwen3-4B", 4, 80, "train", []),
    "4B on 2+2": ("qwen3-4b/apart.yaml", "Qwen/Qwen3-4B", 4, 80, "train-async", []),
    "30B on 8": ("qwen3-30b-a3b/config.yaml", "Qwen/Qwen3-30B-A3B", 8, 141, "train", []),
    "30B on 8 smaller": (
        "qwen3-30b-a3b/config.yaml", "Qwen/Qwen3-30B-A3B", 8, 80, "train",
        ["--offload-optimizer-states", "--sglang-mem-fraction-static", "0.8"],
    ),
    "4B with adapters on 1": ("qwen3-4b/lora.yaml", "Qwen/Qwen3-4B", 1, 48, "train", []),
    "30B on 2 x 8": ("qwen3-30b-a3b-2nodes/config.yaml", "Qwen/Qwen3-30B-A3B", 8, 80, "train", []),
}  # fmt: skip


def arguments(folder: Path, recipe: str) -> list[str]:
    """The command of a recipe's dry run, with a model directory that holds its config.json
    alone."""
    path, model, _, size, command, more = RECIPES[recipe]
    (folder / "config.json").write_text(json.dumps(PUBLISHED[model]["config"]))
    data = folder / "train.jsonl"
    data.write_text(json.dumps({"question": "1 + 1?", "answer": "#### 2"}) + "\n")
    flags = ["--config", ROOT / "recipes" / path, "--hf-checkpoint", folder, "--prompt-data", data]
    return [command, "--dry-run", *map(str, flags), "--gpu-memory-gb", str(size), *more]


@pytest.mark.parametrize("recipe", RECIPES)
def test_the_plan_fits(
    recipe: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("SLIME_NUM_GPUS", str(RECIPES[recipe][2]))
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    monkeypatch.chdir(tmp_path)
    assert main(arguments(tmp_path, recipe)) == 0
    printed = capsys.readouterr()
    assert "memory plan: " in printed.out and "generate" in printed.out and "train" in printed.out
    assert " !" not in printed.out
    assert "weights are missing" in printed.out and "tokenizer is missing" in printed.out
    assert [path.name for path in tmp_path.iterdir() if path.is_dir()] == []


@pytest.mark.parametrize("recipe", ["4B on 4", "30B on 8"])
def test_smaller_gpus_are_refused(
    recipe: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("SLIME_NUM_GPUS", str(RECIPES[recipe][2]))
    assert main([*arguments(tmp_path, recipe), "--gpu-memory-gb", "48"]) == 2
    printed = capsys.readouterr()
    assert "the memory plan does not fit" in printed.err and " !" in printed.out
    assert (
        main([*arguments(tmp_path, recipe), "--gpu-memory-gb", "48", "--memory-plan", "warn"]) == 0
    )


def test_every_recipe_for_gpus_is_tried_here() -> None:
    found = {
        str(path.relative_to(ROOT / "recipes"))
        for path in (ROOT / "recipes").glob("qwen3-*/*.yaml")
    }
    assert found == {recipe[0] for recipe in RECIPES.values()}
    for folder in {(ROOT / "recipes" / name).parent for name in found}:
        assert (folder / "README.md").is_file()


@pytest.mark.parametrize(
    "script",
    sorted((ROOT / "recipes").glob("qwen3-*/*.sh")),
    ids=lambda path: str(path.parent.name),
)
def test_the_scripts_pass_flags_on(
    script: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """As a user starts them: from anywhere, with a model and a data folder of their own. What they
    call is called here."""
    models = {"0.6b": "Qwen/Qwen3-0.6B", "4b": "Qwen/Qwen3-4B", "30b": "Qwen/Qwen3-30B-A3B"}
    model = next(name for size, name in models.items() if f"-{size}" in script.parent.name)
    arguments(tmp_path, next(recipe for recipe, row in RECIPES.items() if row[1] == model))
    python = tmp_path / "python"
    python.write_text('#!/bin/sh\npwd; printf "%s\\n" "$@"\n')
    python.chmod(0o755)
    env = {**os.environ, "PYTHON": str(python), "MODEL": ".", "GSM8K": "."}
    command = [str(script), "--dry-run", "--gpu-memory-gb", "141", "--num-rollout", "3"]
    done = subprocess.run(
        command, capture_output=True, text=True, env=env, cwd=tmp_path, timeout=60, check=False
    )
    assert done.returncode == 0, done.stderr
    folder, option, module, *words = done.stdout.splitlines()
    assert (folder, option, module) == (str(tmp_path), "-m", "slime")
    monkeypatch.setenv("SLIME_NUM_GPUS", "8")
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    monkeypatch.chdir(tmp_path)
    assert main(words) == 0
    printed = capsys.readouterr().out
    assert "num_rollout = 3   (flag)" in printed and f"output_dir = {tmp_path}/outputs" in printed
    assert f"prompt_data = {tmp_path}/train.jsonl" in printed
    assert f"hf_checkpoint = {tmp_path}" in printed
    assert " !" not in printed


def test_a_dry_run_tells_that_data_is_missing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("SLIME_NUM_GPUS", "4")
    assert main([*arguments(tmp_path, "4B on 4"), "--prompt-data", "nowhere.jsonl"]) == 0
    assert "prompts: there is no data file 'nowhere.jsonl'" in capsys.readouterr().out


def test_a_dry_run_needs_neither_torch_nor_ray(tmp_path: Path) -> None:
    code = (
        "import sys; from slime.__main__ import main; status = main(sys.argv[1:]);"
        "print('heavy:', *sorted({'ray', 'torch', 'transformers', 'megatron'} & "
        "set(sys.modules))); sys.exit(status)"
    )
    env = {**os.environ, "SLIME_NUM_GPUS": "4"}
    command = [sys.executable, "-c", code, *arguments(tmp_path, "4B on 4")]
    done = subprocess.run(
        command, capture_output=True, text=True, env=env, cwd=ROOT, timeout=60, check=False
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.rstrip().endswith("heavy:")


@pytest.mark.parametrize("recipe", ["smollm2-arithmetic", "smollm2-gsm8k"])
def test_the_small_recipes_run_where_they_are_called_and_keep_what_they_train(
    recipe: str, tmp_path: Path
) -> None:
    """Relative paths in flags are the caller's; the interpreter here only prints its arguments, one
    per line, since paths may have spaces."""
    python = tmp_path / "python"
    python.write_text('#!/bin/sh\nprintf "%s\\n" "$@"\n')
    python.chmod(0o755)
    env = {**os.environ, "PYTHON": str(python), "GSM8K": "words"}
    command = [str(ROOT / "recipes" / recipe / "run.sh"), "--load", "earlier"]
    done = subprocess.run(
        command, capture_output=True, text=True, env=env, cwd=tmp_path, timeout=60, check=True
    )
    lines = done.stdout.splitlines()
    words = lines[lines.index("slime") :]
    assert words[:2] == ["slime", "train"] and words[-2:] == ["--load", "earlier"]
    assert words[words.index("--output-dir") + 1] == str(tmp_path / "outputs")
    assert words[words.index("--hf-checkpoint") + 1] == str(ROOT / "models" / "smollm2")


@pytest.mark.parametrize(
    "path", sorted((ROOT / "recipes").glob("*/*.yaml")), ids=lambda path: path.parent.name
)
def test_every_recipe_keeps_what_it_trains(path: Path) -> None:
    assert "\nno-save:" not in path.read_text()
