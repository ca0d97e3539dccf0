"""MXFP4: files of published gpt-oss models are read as the numbers that they hold, by slices, and
weights are written back to the same numbers."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file

from slime.__main__ import main
from slime.checkpoints.hf_files import INDEX, SINGLE, HfReader
from slime.checkpoints.mxfp4 import Mxfp4Tensor, decode, encode
from slime.embedded.architecture import Architecture
from slime.embedded.weights import make_store
from slime.models.quantised import Quantisation, format_of
from slime.models.spec import read_hf_config
from slime.weights.source import write_hf
from tests.support.megatron_jobs import batch, exported, make_model, single
from tests.support.quantised_models import tensors_of

SIZES = {
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "rope_theta": None,
    "rope_parameters": {"rope_theta": 1000.0, "rope_type": "default"},
    "dtype": "bfloat16",
}


@st.composite
def stored(draw: st.DrawFn) -> tuple[torch.Tensor, torch.Tensor]:
    experts, rows, count = (draw(st.integers(1, 3)) for _ in range(3))
    generator = torch.Generator().manual_seed(draw(st.integers(0, 999)))
    low, high = draw(st.sampled_from([(1, 250), (118, 122), (127, 128)]))
    shape = (experts, rows, count)
    blocks = torch.randint(0, 256, (*shape, 16), generator=generator, dtype=torch.uint8)
    scales = torch.randint(low, high, shape, generator=generator, dtype=torch.uint8)
    if draw(st.booleans()):
        blocks[0, 0, 0] = draw(st.sampled_from([0x00, 0x11, 0x22, 0x80, 0x99]))
    return blocks, scales


def by_the_definition(blocks: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    """Number by number: sign, two bits of exponent, one of mantissa."""

    def number(code: int) -> float:
        sign = -1.0 if code & 8 else 1.0
        exponent, mantissa = (code >> 1) & 3, code & 1
        if exponent == 0:
            return sign * mantissa * 0.5
        return sign * (1 + mantissa / 2) * 2.0 ** (exponent - 1)

    rows = []
    for row, exponents in zip(blocks.flatten(0, 1).tolist(), scales.flatten(0, 1).tolist()):
        values = []
        for block, exponent in zip(row, exponents):
            for byte in block:
                values += [number(c) * 2.0 ** (exponent - 127) for c in (byte & 15, byte >> 4)]
        rows.append(values)
    return torch.tensor(rows, dtype=torch.float64).view(*blocks.shape[:2], -1)


@settings(max_examples=40, deadline=None)
@given(stored())
def test_numbers_are_those_of_the_definition(parts: tuple[torch.Tensor, torch.Tensor]) -> None:
    expected = by_the_definition(*parts)
    for dtype in (torch.float32, torch.bfloat16):
        assert torch.equal(decode(*parts, dtype).double(), expected)


@given(stored())
def test_transformers_reads_the_same(parts: tuple[torch.Tensor, torch.Tensor]) -> None:
    from transformers.integrations.mxfp4 import convert_moe_packed_tensors

    theirs = convert_moe_packed_tensors(*parts, dtype=torch.bfloat16)
    assert torch.equal(decode(*parts, torch.bfloat16).transpose(1, 2), theirs)


@settings(deadline=None)
@given(stored())
def test_numbers_that_were_stored_come_back(parts: tuple[torch.Tensor, torch.Tensor]) -> None:
    weight = decode(*parts, torch.bfloat16)
    again = encode(weight)
    assert [one.shape for one in again] == [one.shape for one in parts]
    assert torch.equal(decode(*again, torch.bfloat16), weight)


@given(st.integers(0, 999), st.floats(-20, 20))
def test_other_numbers_go_to_the_nearest_and_none_is_cut(seed: int, power: float) -> None:
    weight = torch.randn(3, 64, generator=torch.Generator().manual_seed(seed)) * 2.0**power
    blocks, scales = encode(weight)
    found = decode(blocks, scales, torch.float32)
    unit = torch.exp2(scales.float() - 127).repeat_interleave(32, dim=-1)
    grid = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6])
    grid = torch.cat([grid, -grid]) * unit[..., None]
    nearest = (grid - weight[..., None]).abs().amin(dim=-1)
    assert torch.equal((found - weight).abs(), nearest)
    assert (weight.abs() <= 6 * unit).all()
    # the scale is the smallest of these
    assert (weight.abs() / unit).unflatten(-1, (-1, 32)).amax(dim=-1).min() > 3


@given(stored(), st.data())
def test_slices_are_those_of_the_whole(
    parts: tuple[torch.Tensor, torch.Tensor], data: st.DataObject
) -> None:
    tensor = Mxfp4Tensor(*parts)
    whole = decode(*parts, torch.bfloat16).transpose(1, 2)
    assert tuple(tensor.shape) == tuple(whole.shape) and torch.equal(tensor[...], whole)
    ranges = []
    for size in whole.shape:
        start = data.draw(st.integers(0, size - 1))
        ranges.append(slice(start, data.draw(st.integers(start + 1, size))))
    for index in ((ranges[0],), tuple(ranges[:2]), tuple(ranges), (ranges[0], slice(None))):
        assert torch.equal(tensor[index], whole[index])
    assert torch.equal(tensor[ranges[0]], whole[ranges[0]])


@pytest.fixture(scope="module")
def directories(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """ "published": experts in MXFP4; "plain": the same numbers; "rough": before they were
    rounded."""
    root = tmp_path_factory.mktemp("models")
    found = {name: root / name for name in ("rough", "published", "plain")}
    make_model(found["rough"], "gpt_oss", **SIZES)
    tensors = load_file(found["rough"] / SINGLE)
    save_file({name: t.bfloat16() for name, t in tensors.items()}, found["rough"] / SINGLE)
    convert("hf-to-mxfp4", found["rough"], found["published"])
    _scatter(found["published"])
    convert("quantised-to-hf", found["published"], found["plain"])
    return found


def convert(command: str, source: Path, target: Path) -> None:
    words = ["--hf_model_path", str(source), "--save_path", str(target)]
    assert main(["convert", command, *words]) == 0


def _scatter(directory: Path) -> None:
    """Put scales into another file than blocks, as shards of a published model may."""
    tensors = load_file(directory / SINGLE)
    (directory / SINGLE).unlink()
    files: dict[str, dict[str, torch.Tensor]] = {
        "model-1.safetensors": {},
        "model-2.safetensors": {},
    }
    for name, tensor in tensors.items():
        files[f"model-{2 if name.endswith('_scales') else 1}.safetensors"][name] = tensor
    for file, there in files.items():
        save_file(there, directory / file)
    where = {name: file for file, there in files.items() for name in there}
    (directory / INDEX).write_text(json.dumps({"weight_map": where}))


def test_a_directory_has_the_names_and_numbers_of_a_published_one(
    directories: dict[str, Path],
) -> None:
    names = set(json.loads((directories["published"] / INDEX).read_text())["weight_map"])
    experts = "model.layers.1.mlp.experts."
    assert {name for name in names if name.startswith(experts)} == {
        experts + leaf
        for leaf in (
            *("gate_up_proj_blocks", "gate_up_proj_scales", "gate_up_proj_bias"),
            *("down_proj_blocks", "down_proj_scales", "down_proj_bias"),
        )
    }
    config = read_hf_config(directories["published"])
    assert config["quantization_config"]["quant_method"] == "mxfp4"
    assert format_of(config) == "MXFP4" and Quantisation.read(config) is None
    rough, plain = (tensors_of(directories[name]) for name in ("rough", "plain"))
    assert rough.keys() == plain.keys()
    reader = HfReader(directories["published"])
    for name, tensor in plain.items():
        is_rounded = name.endswith(("gate_up_proj", "down_proj"))
        assert torch.equal(rough[name], tensor) != is_rounded, name
        assert torch.equal(reader[name][...], tensor), name


def test_trainer_and_engine_hold_the_numbers_and_export_plain_weights(
    directories: dict[str, Path], tmp_path: Path
) -> None:
    plain = tensors_of(directories["plain"])
    scores = []
    for name in ("published", "plain"):
        with single(directories[name]) as backend:
            scores.append(backend.log_probs(batch()))
            if name == "published":
                weights = {key: t.bfloat16() for key, t in exported(backend).items()}
                source: Any = _source(backend)
                write_hf(source, tmp_path / "export", assets_from=directories[name])
    assert all(torch.equal(one, other) for one, other in zip(*scores, strict=True))
    assert weights.keys() == plain.keys()
    assert all(torch.equal(weights[name], plain[name]) for name in plain)
    assert "quantization_config" not in read_hf_config(tmp_path / "export")
    held = make_store(
        directories["published"],
        Architecture.from_dir(directories["published"]),
        "auto",
        torch.device("cpu"),
        64,
        False,
    ).held
    assert all(torch.equal(held[name], plain[name]) for name in plain)


def _source(backend: Any) -> Any:
    from slime.weights.source import ModelSource

    return ModelSource(backend.model_chunks, backend.hf_config)


@pytest.mark.parametrize(
    ("family", "changes", "said"),
    [
        ("gpt_oss", {**SIZES, "intermediate_size": 48}, "inputs of 32 and 48"),
        ("qwen3", {}, "is not stored in MXFP4"),
    ],
)
def test_what_has_no_such_form_is_refused(
    family: str,
    changes: dict[str, Any],
    said: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    model = make_model(tmp_path / "model", family, **changes)
    words = ["--hf_model_path", str(model), "--save_path", str(tmp_path / "out")]
    assert main(["convert", "hf-to-mxfp4", *words]) != 0
    assert said in " ".join(capsys.readouterr().err.split())


def test_stacks_have_no_int4(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model = make_model(tmp_path / "model", "gpt_oss", **SIZES)
    words = ["--hf_model_path", str(model), "--save_path", str(tmp_path / "out")]
    assert main(["convert", "hf-to-fp8", *words]) != 0
    assert "hf-to-mxfp4" in capsys.readouterr().err
