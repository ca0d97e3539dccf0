"""`slime convert` and the scripts in tools/: there and back bit for bit; damage is named before
anything is made."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from slime.__main__ import main
from slime.checkpoints.directory import read_tracker
from slime.models import FAMILIES
from tests.support import megatron_jobs as jobs
from tests.support.hf_configs import NESTED
from tests.support.tiny_models import save_tiny
from tests.support.trainer_ranks import Pools

TOOLS = Path(__file__).resolve().parents[2] / "tools"


def tiny(family: str, directory: Path, dtype: torch.dtype) -> Path:
    """A transformers checkpoint; the experts' bias stays in float32, as the published models have
    it."""
    save_tiny(family, directory)
    tensors = load_file(directory / "model.safetensors")
    kept = ("e_score_correction_bias",)
    halved = {
        name: value if name.endswith(kept) else value.to(dtype) for name, value in tensors.items()
    }
    save_file(halved, directory / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((directory / "config.json").read_text()) | {
        "dtype": str(dtype).removeprefix("torch.")
    }
    (directory / "config.json").write_text(json.dumps(config))
    return directory


def convert(*words: object) -> int:
    return main(["convert", *map(str, words)])


def assert_same_files(one: Path, other: Path) -> None:
    ours, theirs = load_file(one / "model.safetensors"), load_file(other / "model.safetensors")
    assert ours.keys() == theirs.keys()
    for name, value in theirs.items():
        assert ours[name].dtype == value.dtype and torch.equal(ours[name], value), name
    written, expected = (json.loads((path / "config.json").read_text()) for path in (one, other))
    for described in (written, written.get("text_config", {})):
        # SGLang reads it, transformers writes layer_types alone
        described.pop("full_attention_interval", None)
    assert written == expected


ALWAYS = {
    ("qwen3_moe", "float32"),
    *((name, "bfloat16") for name in ("llama", "deepseek_v3", "gpt_oss", "qwen3_next")),
}


def _there_and_back() -> Iterator[Any]:
    """Each kind of layer; the others belong to ``make test-full``. Their names and shapes, both
    ways, are tested in test_families.py."""
    for family in FAMILIES:
        # mimo is not in transformers; nested ones are tested in test_nested_models.py
        if family.name == "mimo" or family.name in NESTED:
            continue
        for dtype in ("bfloat16", "float32"):
            always = (family.name, dtype) in ALWAYS
            yield pytest.param(family.name, dtype, marks=[] if always else [pytest.mark.full])


@pytest.mark.parametrize(("family", "dtype"), list(_there_and_back()))
def test_there_and_back_is_the_identity(
    family: str, dtype: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    hf, root, back = (
        tiny(family, tmp_path / "hf", getattr(torch, dtype)),
        tmp_path / "ckpt",
        tmp_path / "back",
    )
    assert convert("hf-to-megatron", "--hf_model_path", hf, "--save_path", root) == 0
    assert read_tracker(root) == "release" and (root / "release" / "metadata.json").is_file()
    said = capsys.readouterr().out
    assert "loaded" in said and "parameters" in said and f"--load {root}" in said
    assert (
        convert("megatron-to-hf", "--load_path", root, "--hf_model_path", hf, "--save_path", back)
        == 0
    )
    assert "1 file(s)" in capsys.readouterr().out
    assert_same_files(back, hf)


@pytest.fixture
def model(tmp_path: Path) -> Path:
    return jobs.make_model(tmp_path / "model")


def sharded(model: Path) -> Path:
    """The same model in two files with an index."""
    tensors = load_file(model / "model.safetensors")
    (model / "model.safetensors").unlink()
    weight_map = {
        name: f"model-0000{1 + i % 2}-of-00002.safetensors"
        for i, name in enumerate(sorted(tensors))
    }
    for file_name in set(weight_map.values()):
        part = {name: tensors[name] for name, where in weight_map.items() if where == file_name}
        save_file(part, model / file_name, metadata={"format": "pt"})
    (model / "model.safetensors.index.json").write_text(
        json.dumps({"metadata": {}, "weight_map": weight_map})
    )
    return model


def promise_more(model: Path) -> None:
    index = json.loads((model / "model.safetensors.index.json").read_text())
    index["weight_map"]["model.extra.weight"] = "model-00003-of-00003.safetensors"
    (model / "model.safetensors.index.json").write_text(json.dumps(index))


def truncate(path: Path) -> None:
    os.truncate(path, path.stat().st_size - 10)


@pytest.mark.parametrize(
    ("damage", "named"),
    [
        (
            lambda m: (m / "model-00002-of-00002.safetensors").unlink(),
            "model-00002-of-00002.safetensors",
        ),
        (
            lambda m: truncate(m / "model-00001-of-00002.safetensors"),
            "model-00001-of-00002.safetensors",
        ),
        (promise_more, "model-00003-of-00003.safetensors"),
        (lambda m: truncate(m / "model.safetensors.index.json"), "model.safetensors.index.json"),
        (lambda m: (m / "config.json").unlink(), "config.json"),
    ],
    ids=["missing shard", "truncated shard", "index without file", "truncated index", "no config"],
)
def test_damaged_models_are_refused_before_anything_is_made(
    model: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    damage: Callable[[Path], None],
    named: str,
) -> None:
    damage(sharded(model))
    assert (
        convert("hf-to-megatron", "--hf_model_path", model, "--save_path", tmp_path / "ckpt") == 2
    )
    assert named in capsys.readouterr().err
    assert not (tmp_path / "ckpt").exists()


def test_damaged_checkpoints_are_refused_and_nothing_is_replaced_unasked(
    model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    root, out = tmp_path / "ckpt", tmp_path / "out"
    assert convert("hf-to-megatron", "--hf-checkpoint", model, "--save", root) == 0
    # only its own release is there
    assert convert("hf-to-megatron", "--hf-checkpoint", model, "--save", root) == 0
    release = root / "release"
    arguments = (
        "megatron-to-hf",
        "--input-dir",
        release,
        "--origin-hf-dir",
        model,
        "--output-dir",
        out,
    )
    assert convert(*arguments) == 0
    assert_weights(out, model)
    assert convert(*arguments) == 2 and f"{out} exists" in capsys.readouterr().err
    assert convert(*arguments, "--force") == 0
    (root / "iter_0000003").mkdir()
    assert convert("hf-to-megatron", "--hf-checkpoint", model, "--save", root) == 2
    assert "holds checkpoints of a run" in capsys.readouterr().err
    [data] = release.glob("*.distcp")
    truncate(data)
    assert convert(*arguments, "--force") == 2
    assert data.name in capsys.readouterr().err
    assert_weights(out, model)  # what was there still is


def assert_weights(one: Path, other: Path) -> None:
    ours, theirs = load_file(one / "model.safetensors"), load_file(other / "model.safetensors")
    assert ours.keys() == theirs.keys()
    assert all(torch.equal(ours[name], theirs[name].to(ours[name].dtype)) for name in theirs)


def test_another_models_config_is_refused(
    model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    root = tmp_path / "ckpt"
    assert convert("hf-to-megatron", "--hf_model_path", model, "--save_path", root) == 0
    untied = jobs.make_model(tmp_path / "untied", tie_word_embeddings=False)
    words = (
        "megatron-to-hf",
        "--load_path",
        root,
        "--save_path",
        tmp_path / "out",
        "--hf_model_path",
    )
    tied = jobs.make_model(tmp_path / "tied", tie_word_embeddings=True)
    assert convert(*words, tied) == 2
    assert "1 tensor that no parameter takes: output_layer.weight" in capsys.readouterr().err
    assert (
        convert("hf-to-megatron", "--hf_model_path", tied, "--save_path", tmp_path / "of-tied") == 0
    )
    words = ("megatron-to-hf", "--load_path", tmp_path / "of-tied", "--save_path", tmp_path / "out")
    assert convert(*words, "--hf_model_path", untied) == 2
    assert "1 tensor missing: output_layer.weight" in capsys.readouterr().err


@pytest.mark.slow
def test_many_ranks_write_the_same_model(model: Path, tmp_path: Path, ranks: Pools) -> None:
    root, out = tmp_path / "ckpt", tmp_path / "out"
    to_megatron = ["hf-to-megatron", "--hf_model_path", str(model), "--save_path", str(root)]
    ranks.run(2, jobs.convert, [*to_megatron, "--tensor-model-parallel-size", "2"])
    words = [
        "megatron-to-hf",
        "--load_path",
        str(root),
        "--hf_model_path",
        str(model),
        "--save_path",
        str(out),
    ]
    ranks.run(2, jobs.convert, words)  # two pipeline stages
    assert_weights(out, model)


@pytest.mark.parametrize("script", sorted(path.name for path in TOOLS.glob("convert_*.py")))
def test_scripts_explain_themselves_without_torch(script: str) -> None:
    command = [sys.executable, "-X", "importtime", str(TOOLS / script), "--help"]
    ran = subprocess.run(
        command, capture_output=True, text=True, timeout=60, cwd=TOOLS.parent, check=False
    )
    assert ran.returncode == 0 and "--save_path" in ran.stdout
    assert " torch\n" not in ran.stderr


MODEL_ARGS = """
    --swiglu --num-layers 2 --hidden-size 32 --ffn-hidden-size 48 --kv-channels 8 --vocab-size 97 \
--rotary-base 1000
    --use-rotary-position-embeddings --disable-bias-linear --normalization RMSNorm \
--norm-epsilon 1e-5 --qk-layernorm
""".split()  # noqa: SIM905


def test_flags_that_describe_the_model_are_compared_with_its_config(
    model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ("hf-to-megatron", *MODEL_ARGS, "--hf-checkpoint", model, "--save", tmp_path / "ckpt")
    for more, said in [
        (("--num-layers", 5), "--num-layers 5, but it is 2"),
        (("--lr", "1e-6"), "slime convert does not know --lr"),
        (("--num-layer", 4), "--num-layer"),
    ]:
        assert convert(*words, *more) == 2
        assert said in capsys.readouterr().err
    assert not (tmp_path / "ckpt").exists()
    assert convert(*words) == 0
    back = (
        "megatron-to-hf",
        *MODEL_ARGS,
        "--input-dir",
        tmp_path / "ckpt",
        "--origin-hf-dir",
        model,
    )
    assert convert(*back, "--output-dir", tmp_path / "back") == 0
    assert_weights(tmp_path / "back", model)


def test_directories_that_are_not_there_are_named_by_their_flag(
    model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "notes.txt").touch()
    for words, said in [
        (
            ("hf-to-megatron", "--hf_model_path", "nowhere"),
            "--hf_model_path nowhere does not exist",
        ),
        (
            ("hf-to-megatron", "--hf_model_path", tmp_path / "notes.txt"),
            "notes.txt is not a directory",
        ),
        (
            ("megatron-to-hf", "--load_path", "nowhere", "--hf_model_path", model),
            "--load_path nowhere does not exist",
        ),
        (
            ("megatron-to-hf", "--load_path", tmp_path, "--hf_model_path", model),
            "holds no Megatron checkpoint",
        ),
        (
            ("megatron-to-hf", "--load_path", model, "--hf_model_path", model),
            "is a Hugging Face directory already",
        ),
    ]:
        assert convert(*words, "--save_path", tmp_path / "out") == 2
        said_there = capsys.readouterr().err
        assert said in said_there and "--ref-load" not in said_there
    assert not (tmp_path / "out").exists()
