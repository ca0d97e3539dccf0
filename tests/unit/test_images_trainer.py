"""Models that see images in the trainer, against transformers."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from slime.errors import UserError
from slime.models.images import ImageReader
from slime.weights.source import ModelSource
from tests.support.images import CLOSE, IMAGES, SEEING, SIGLIP, save_seeing
from tests.support.parity import worst
from tests.support.seeing_samples import batch_of, own_log_probs, their_log_probs
from tests.support.tiny_models import save_tiny
from tests.support.trainers import trainer, whole_gradients


@pytest.mark.parametrize(
    ("kind", "micro_batches"),
    [("qwen3_vl", [[i] for i in range(6)]), *((kind, [[0, 1, 2], [3, 4, 5]]) for kind in SEEING)],
)
def test_log_probs_are_those_of_transformers(
    kind: str, micro_batches: list[list[int]], tmp_path: Path
) -> None:
    """The samples have zero, one and three images, portrait and landscape, with text behind them;
    two of them share the tokens of their prompt and not its image."""
    model = save_seeing(tmp_path / "hf", kind)
    reader = ImageReader(tmp_path / "hf")
    batch = batch_of(reader, micro_batches)
    backend = trainer(hf_checkpoint=str(tmp_path / "hf"), **IMAGES)
    try:
        ours = own_log_probs(backend, batch)
    finally:
        backend.close()
    with torch.no_grad():
        theirs = their_log_probs(model, reader, batch)
    farthest = max((a - b).abs().max().item() for a, b in zip(ours, theirs))
    assert farthest <= CLOSE.get(kind, 5e-6)


@pytest.mark.parametrize("kind", ["qwen3_vl", "qwen2_5_vl"])
def test_in_bfloat16_it_is_as_near_as_transformers(kind: str, tmp_path: Path) -> None:
    """To what float32 computes. The tower's rotary frequencies stay in float32."""
    model = save_seeing(tmp_path / "hf", kind)
    reader = ImageReader(tmp_path / "hf")
    batch = batch_of(reader, [[0, 1, 2], [3, 4, 5]])
    backend = trainer(hf_checkpoint=str(tmp_path / "hf"), bf16=True, fp32=False, **IMAGES)
    try:
        ours = own_log_probs(backend, batch)
        (chunk,) = backend.model_chunks
        tower = chunk.module.vision_model
        assert {buffer.dtype for buffer in tower.buffers()} == {torch.float32}
    finally:
        backend.close()
    with torch.no_grad():
        exact = torch.cat(their_log_probs(model, reader, batch))
        theirs = torch.cat(their_log_probs(model.to(torch.bfloat16), reader, batch))
    error = (torch.cat(ours) - exact).abs().mean()
    assert error <= 1.5 * (theirs - exact).abs().mean()


@pytest.mark.parametrize(("kind", "recompute"), [(kind, kind == "qwen3_vl") for kind in SEEING])
def test_gradients_are_those_of_transformers(kind: str, recompute: bool, tmp_path: Path) -> None:
    model = save_seeing(tmp_path / "hf", kind)
    reader = ImageReader(tmp_path / "hf")
    batch = batch_of(reader, [[0, 1, 2], [3, 4, 5]])
    flags: dict[str, Any] = {"kl_loss_coef": 0.0, "eps_clip": 1e9, "rollout_temperature": 1.0}
    if recompute:
        flags |= {
            "recompute_granularity": "full",
            "recompute_method": "uniform",
            "recompute_num_layers": 1,
        }
    backend = trainer(hf_checkpoint=str(tmp_path / "hf"), **IMAGES, **flags)
    try:

        def named() -> dict[str, Tensor]:
            source = ModelSource(backend.model_chunks, backend.hf_config)
            return {name: tensor.clone() for name, tensor in source.tensors()}

        ours = whole_gradients(backend, batch, named)
    finally:
        backend.close()
    losses = [
        -reward * log_probs.mean()
        for reward, log_probs in zip(batch.rewards, their_log_probs(model, reader, batch))
    ]
    torch.stack(losses).mean().backward()
    theirs = {
        name: parameter.grad
        for name, parameter in model.named_parameters()
        if parameter.grad is not None
    }
    if "moe" in kind:  # whose experts transformers keeps in another layout than files
        theirs = {name: one for name, one in theirs.items() if ".experts." not in name}
    names = ours.keys() & {file_name(name, kind) for name in theirs}
    assert len(names) == len(theirs) and any(is_tower(name) for name in names)
    # the softmax of the tower's attention cancels what a bias of its keys adds
    theirs = {name: one for name, one in theirs.items() if not name.endswith("attn.k_proj.bias")}
    differences = {name: worst(ours[file_name(name, kind)], one) for name, one in theirs.items()}
    name = max(differences, key=differences.__getitem__)
    # the tower's first product is summed in another order, which routers of experts magnify
    assert differences[name] <= (1e-3 if kind in CLOSE else 2e-5), name


def file_name(name: str, kind: str) -> str:
    """The name in files of a parameter of transformers' model."""
    if kind == "qwen2_5_vl":
        name = name.replace("model.language_model.", "model.").replace("model.visual.", "visual.")
    if kind == "gemma3":
        name = name.replace("model.language_model.", "language_model.model.")
        name = name.replace("model.vision_tower.", "vision_tower.vision_model.")
        name = name.replace("model.multi_modal_projector.", "multi_modal_projector.")
    return name


def is_tower(name: str) -> bool:
    return re.match(r"(model\.)?visual\.(?!.*merger)|vision_tower\.", name) is not None


def is_projector(name: str) -> bool:
    return re.match(r"(model\.)?visual\..*merger|multi_modal_projector\.", name) is not None


@pytest.mark.parametrize("frozen", [("tower",), ("projector",)])
def test_tower_and_projector_are_trained_or_frozen(frozen: tuple[str, ...], tmp_path: Path) -> None:
    """Frozen parameters keep every bit, weight decay or not, and have no optimizer state."""
    save_seeing(tmp_path / "hf")
    batch = batch_of(ImageReader(tmp_path / "hf"), [[0, 1, 2], [3, 4, 5]])
    backend = trainer(
        hf_checkpoint=str(tmp_path / "hf"),
        save_hf=str(tmp_path / "back"),
        weight_decay=0.1,
        **IMAGES,
        **{f"freeze_vision_{part}": True for part in frozen},
    )
    try:
        backend.save(0)
        untrained = load_file(tmp_path / "back" / "model.safetensors")
        backend.train(batch)
        backend.save(1)
        states = sum(len(one.optimizer.state) for one in backend.optimizer.chained_optimizers)
        learned = sum(
            parameter.requires_grad
            for chunk in backend.model_chunks
            for parameter in chunk.parameters()
        )
    finally:
        backend.close()
    before = load_file(tmp_path / "hf" / "model.safetensors")
    after = load_file(tmp_path / "back" / "model.safetensors")
    assert before.keys() == untrained.keys() == after.keys()
    assert all(torch.equal(one, untrained[name]) for name, one in before.items())
    moved = {name for name, one in before.items() if not torch.equal(after[name], one)}
    expected = {
        name
        for name in before
        if not ("tower" in frozen and is_tower(name))
        and not ("projector" in frozen and is_projector(name))
    }
    assert moved == expected
    assert states == learned


def test_a_checkpoint_brings_the_tower_back(tmp_path: Path) -> None:
    save_seeing(tmp_path / "hf")
    batch = batch_of(ImageReader(tmp_path / "hf"), [[0, 1, 2], [3, 4, 5]])
    flags: dict[str, Any] = {
        "hf_checkpoint": str(tmp_path / "hf"),
        "save": str(tmp_path / "save"),
        **IMAGES,
    }
    backend = trainer(**flags)
    try:
        backend.train(batch)
        backend.save(0)
        backend.finish_saving()
        before = own_log_probs(backend, batch)
    finally:
        backend.close()
    again = trainer(load=str(tmp_path / "save"), **flags)
    try:
        after = own_log_probs(again, batch)
    finally:
        again.close()
    assert all(torch.equal(one, other) for one, other in zip(before, after))


def test_a_text_run_does_not_build_the_tower(tmp_path: Path) -> None:
    save_seeing(tmp_path / "hf")
    backend = trainer(hf_checkpoint=str(tmp_path / "hf"))
    try:
        names = [name for chunk in backend.model_chunks for name, _ in chunk.named_parameters()]
    finally:
        backend.close()
    assert not [name for name in names if "vision" in name]


def test_models_without_a_tower_are_refused(tmp_path: Path) -> None:
    save_tiny("mistral3", tmp_path / "hf")
    with pytest.raises(UserError, match="images cannot be trained with models of the family"):
        trainer(hf_checkpoint=str(tmp_path / "hf"), **IMAGES)


def test_names_that_transformers_writes_are_read(tmp_path: Path) -> None:
    """An export of Gemma 3 has those of published files."""
    save_seeing(tmp_path / "hf", "gemma3")
    file = tmp_path / "hf" / "model.safetensors"
    published = load_file(file)
    shorter = {name.replace(SIGLIP, "vision_tower."): one for name, one in published.items()}
    save_file(shorter, file, metadata={"format": "pt"})
    backend = trainer(hf_checkpoint=str(tmp_path / "hf"), save_hf=str(tmp_path / "back"), **IMAGES)
    try:
        backend.save(0)
    finally:
        backend.close()
    back = load_file(tmp_path / "back" / "model.safetensors")
    assert back.keys() == published.keys() != shorter.keys()
    assert all(torch.equal(one, published[name]) for name, one in back.items())


@pytest.mark.parametrize("kind", ["qwen3_vl_moe", "qwen2_5_vl", "gemma3"])
def test_names_dtypes_and_bytes_come_back(kind: str, tmp_path: Path) -> None:
    """In bfloat16, from and to files, tower and projector included; trained ones have moved."""
    save_seeing(tmp_path / "hf", kind)
    file = tmp_path / "hf" / "model.safetensors"
    halves = {name: one.bfloat16() for name, one in load_file(file).items()}
    save_file(halves, file, metadata={"format": "pt"})
    batch = batch_of(ImageReader(tmp_path / "hf"), [[0, 1, 2], [3, 4, 5]])
    backend = trainer(
        hf_checkpoint=str(tmp_path / "hf"), save_hf=str(tmp_path / "back"), bf16=True, **IMAGES
    )
    try:
        backend.save(0)
        untrained = load_file(tmp_path / "back" / "model.safetensors")
        backend.train(batch)
        backend.save(1)
    finally:
        backend.close()
    trained = load_file(tmp_path / "back" / "model.safetensors")
    assert halves.keys() == untrained.keys() == trained.keys()
    for name, one in halves.items():
        assert untrained[name].dtype == one.dtype and torch.equal(untrained[name], one)
    moved = [name for name, one in halves.items() if not torch.equal(trained[name], one)]
    assert any(is_tower(name) for name in moved)
    assert any(is_projector(name) for name in moved)
