"""Models that also see images: the text part is trained and served, and an export carries the rest
along."""

from __future__ import annotations

import copy
import json
from pathlib import Path

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

from slime.errors import UserError
from slime.models import family_of
from slime.models.ignore_list import refuse_untried
from tests.support.embedded_models import make_scheduler, make_sequence, run
from tests.support.hf_configs import NESTED, PUBLISHED, config_of
from tests.support.tiny_models import WITH_IMAGES, save_tiny
from tests.support.trainer_ranks import make_batch
from tests.support.trainers import trainer

#: Beginnings of names that are not the text part's.
NOT_TEXT = ("vision_tower.", "multi_modal_projector.", "visual.", "model.visual.")


def as_published(kind: str, directory: Path) -> None:
    """A tiny model in bfloat16, with one tensor of its tower in float32. Qwen2.5-VL describes its
    decoder at the top of config.json."""
    save_tiny(kind, directory)
    tensors = load_file(directory / "model.safetensors")
    exact = min(name for name in tensors if name.startswith(NOT_TEXT))
    halves = {name: one if name == exact else one.bfloat16() for name, one in tensors.items()}
    save_file(halves, directory / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((directory / "config.json").read_text())
    if config["model_type"] == "qwen2_5_vl":
        text = config.pop("text_config")
        rotary = text.pop("rope_parameters")
        sections = {"type": "mrope", "mrope_section": rotary["mrope_section"]}
        text |= {"rope_theta": rotary["rope_theta"], "rope_scaling": sections}
        config = {**text, **config}
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
    configs = [json.loads((tmp_path / at / "config.json").read_text()) for at in ("hf", "back")]
    for key in ("rope_scaling", "text_config", "vision_config"):
        assert configs[0].get(key) == configs[1].get(key)
    assert before.keys() == untrained.keys() == trained.keys()
    for name, one in before.items():
        assert untrained[name].dtype == trained[name].dtype == one.dtype
        assert torch.equal(untrained[name], one)
    moved = [name for name, one in before.items() if not torch.equal(trained[name], one)]
    assert moved and not any(name.startswith(NOT_TEXT) for name in moved)


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


@pytest.mark.parametrize("family", ["qwen2_5_vl", "qwen3_vl", "qwen3_vl_moe"])
def test_positions_of_images_do_not_matter_to_text(family: str) -> None:
    config = config_of(family)
    table = family_of(config)
    plain = table.model_spec(config)
    text = config["text_config"]
    text["rope_scaling"] = {"rope_type": "default", "mrope_section": [1, 1]}
    assert table.model_spec(config) == plain
    text["rope_scaling"] |= {"rope_type": "yarn", "factor": 4.0}
    with pytest.raises(UserError, match="'yarn'"):
        table.model_spec(config)
    text["rope_scaling"] = {"type": "mrope", "mrope_section": [1, 1]}
    if family == "qwen2_5_vl":  # its earlier name, which transformers knows of this family alone
        assert table.model_spec(config) == plain
    else:
        with pytest.raises(UserError, match="'mrope'"):
            table.model_spec(config)


def test_qwen2_5_vl_is_described_inside_or_at_the_top() -> None:
    of_text = PUBLISHED["Qwen/Qwen2.5-7B"]["config"]
    flat = {  # Qwen2.5-VL-7B-Instruct, as published
        **of_text,
        "model_type": "qwen2_5_vl",
        "max_position_embeddings": 128000,
        "rope_theta": 1e6,
        "rope_scaling": {"type": "mrope", "mrope_section": [16, 24, 24]},
        "vision_config": {"model_type": "qwen2_5_vl"},
    }
    table = family_of(flat)
    spec = table.model_spec(flat)
    assert spec == table.model_spec(transformers.Qwen2_5_VLConfig(**copy.deepcopy(flat)).to_dict())
    text = family_of(of_text)
    assert list(table.hf_tensors(spec)) == list(text.hf_tensors(text.model_spec(of_text)))
    # the outer field at its default does not untie what is tied inside
    inside = config_of("qwen2_5_vl", tie_word_embeddings=True)
    assert table.model_spec({**inside, "tie_word_embeddings": False}).tie_embeddings


@pytest.mark.parametrize(
    ("family", "config_class"),
    [
        ("qwen2_5_vl", transformers.Qwen2_5_VLConfig),
        ("qwen3_vl", transformers.Qwen3VLConfig),
        ("qwen3_vl_moe", transformers.Qwen3VLMoeConfig),
    ],
)
def test_fields_that_are_left_out_are_as_in_transformers(family: str, config_class: type) -> None:
    """Those without which a decoder cannot be described are required."""
    full = config_class().to_dict()
    text = full["text_config"]
    names = ("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads")
    short = {key: text[key] for key in (*names, "num_experts", "num_local_experts") if key in text}
    table = family_of({"model_type": family})
    assert table.model_spec({"text_config": short}) == table.model_spec(full)


@pytest.mark.parametrize("family", NESTED)
def test_towers_are_not_quantised(family: str) -> None:
    with pytest.raises(UserError, match=f"{family} are not quantised by int4"):
        refuse_untried(family_of({"model_type": family}), "int4")


def test_another_decoder_is_refused_by_name() -> None:
    config = config_of("mistral3")
    config["text_config"]["model_type"] = "mistral4"
    with pytest.raises(UserError, match="'mistral4'"):
        family_of(config).model_spec(config)


def test_a_config_without_a_description_of_the_decoder_is_refused() -> None:
    with pytest.raises(UserError, match="text_config"):
        family_of({"model_type": "mistral3"}).model_spec({"model_type": "mistral3"})
