"""Models that also see images: the text part is trained and served, and an export carries the rest
along."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from slime.errors import UserError
from slime.models import family_of
from tests.support.embedded_models import make_scheduler, make_sequence, run
from tests.support.hf_configs import config_of
from tests.support.tiny_models import WITH_IMAGES, save_tiny
from tests.support.trainer_ranks import make_batch
from tests.support.trainers import trainer


def as_published(kind: str, directory: Path) -> None:
    """A tiny model in bfloat16, with one tensor of its tower in float32."""
    save_tiny(kind, directory)
    tensors = load_file(directory / "model.safetensors")
    exact = min(name for name in tensors if name.startswith("vision_tower."))
    halves = {name: one if name == exact else one.bfloat16() for name, one in tensors.items()}
    save_file(halves, directory / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((directory / "config.json").read_text())
    (directory / "config.json").write_text(json.dumps({**config, "dtype": "bfloat16"}))


@pytest.mark.parametrize("kind", WITH_IMAGES)
def test_names_dtypes_and_bytes_come_back(kind: str, tmp_path: Path) -> None:
    as_published(kind, tmp_path / "hf")
    backend = trainer(hf_checkpoint=str(tmp_path / "hf"), save_hf=str(tmp_path / "back"), bf16=True)
    before = load_file(tmp_path / "hf" / "model.safetensors")
    try:
        backend.save(0)
        untrained = load_file(tmp_path / "back" / "model.safetensors")
        backend.train(make_batch())
        backend.save(1)
    finally:
        backend.close()
    trained = load_file(tmp_path / "back" / "model.safetensors")
    assert before.keys() == untrained.keys() == trained.keys()
    for name, one in before.items():
        assert untrained[name].dtype == trained[name].dtype == one.dtype
        assert torch.equal(untrained[name], one)
    moved = [name for name, one in before.items() if not torch.equal(trained[name], one)]
    assert moved and all(name.startswith("language_model.") for name in moved)


@pytest.mark.parametrize("kind", WITH_IMAGES)
def test_the_embedded_engine_computes_the_same(kind: str, tmp_path: Path) -> None:
    model = save_tiny(kind, tmp_path)
    scheduler = make_scheduler(tmp_path, max_length=48)
    for tokens in make_batch().tokens:
        sequence = make_sequence(tokens.tolist(), max_new_tokens=0, logprob_start=0)
        run(scheduler, [sequence])
        with torch.no_grad():
            scores = model(tokens[None]).logits[0, :-1].log_softmax(-1)
        theirs = scores.gather(1, tokens[1:, None])[:, 0]
        ours = torch.tensor(sequence.input_logprobs)
        assert torch.allclose(ours, theirs, atol=5e-6, rtol=0)


def test_another_decoder_is_refused_by_name() -> None:
    config = config_of("mistral3")
    config["text_config"]["model_type"] = "mistral4"
    with pytest.raises(UserError, match="'mistral4'"):
        family_of(config).model_spec(config)


def test_a_config_without_a_description_of_the_decoder_is_refused() -> None:
    with pytest.raises(UserError, match="text_config"):
        family_of({"model_type": "mistral3"}).model_spec({"model_type": "mistral3"})
