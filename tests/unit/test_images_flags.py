"""What does not go with images is refused by name, before anything starts."""

from __future__ import annotations

import json
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from slime.cluster.engine_fit import EngineInfo, check_fit
from slime.config import make_config
from slime.engines.api import WEIGHT_PROBE
from slime.engines.sglang import model_faults
from slime.engines.sglang.command import check_sglang
from slime.engines.sglang.model_faults import check_model
from slime.errors import UserError
from slime.memory.plan import facts_of
from slime.memory.trainer import StageMemory
from slime.models import family_of
from slime.models.flops import sequence_cost
from slime.models.images import ImageReader
from slime.models.vision import ImageError, VisionKind, VisionSpec, seeing
from slime.run.preflight import check_architecture
from tests.support.hf_configs import config_of
from tests.support.images import (
    IMAGES,
    picture,
    read_config,
    save_seeing,
    save_seeing_with_tokenizer,
)
from tests.support.tiny_models import save_tiny


@pytest.mark.parametrize(
    "flags",
    [
        {
            "num_virtual_stages_per_pipeline_rank": 2,
            "pipeline_model_parallel_size": 2,
            "actor_num_gpus_per_node": 2,
        },
        {"custom_convert_samples_to_train_data_path": "a.b"},
        {"custom_model_provider_path": "a.b"},
    ],
)
def test_flags_that_would_leave_images_out(flags: dict[str, Any]) -> None:
    with pytest.raises(UserError, match="does not go with --multimodal-keys"):
        make_config(**IMAGES, **flags)


def test_a_trained_tower_and_an_overlapped_reduction_exclude_each_other() -> None:
    with pytest.raises(UserError, match="--overlap-grad-reduce and a trained vision tower"):
        make_config(**IMAGES, overlap_grad_reduce=True)
    make_config(
        **IMAGES, overlap_grad_reduce=True, freeze_vision_tower=True, freeze_vision_projector=True
    )


@pytest.mark.parametrize("flag", ["freeze_vision_tower", "freeze_vision_projector"])
def test_adapters_freeze_what_sees_images(flag: str) -> None:
    make_config(**IMAGES, lora_rank=8, overlap_grad_reduce=True)
    with pytest.raises(UserError, match="has no effect with --lora-rank"):
        make_config(**IMAGES, lora_rank=8, **{flag: True})


@pytest.mark.parametrize(
    "flag", ["freeze_vision_tower", "freeze_vision_projector", "allow_image_urls"]
)
def test_flags_of_images_without_images_have_no_effect(flag: str) -> None:
    with pytest.raises(UserError, match="multimodal-keys"):
        make_config(**{flag: True})


def test_models_that_see_nothing_are_refused_before_the_launch(tmp_path: Path) -> None:
    save_tiny("mistral3", tmp_path)
    with pytest.raises(UserError, match="images cannot be trained with models of the family mistr"):
        check_architecture(make_config(hf_checkpoint=str(tmp_path), **IMAGES))


def test_a_directory_without_an_image_processor_is_refused(tmp_path: Path) -> None:
    save_seeing_with_tokenizer(tmp_path)
    (tmp_path / "preprocessor_config.json").unlink()
    with pytest.raises(UserError, match="has no image processor that can be loaded"):
        check_architecture(make_config(hf_checkpoint=str(tmp_path), **IMAGES))


@pytest.mark.parametrize("missing", ["image_token_id", "vision_config"])
def test_a_config_without_what_images_need_is_refused(missing: str) -> None:
    config = config_of("qwen3_vl")
    config |= {"image_token_id": 5, "vision_start_token_id": 6, "vision_end_token_id": 7}
    config.pop(missing, None)
    with pytest.raises(UserError, match=missing):
        family_of(config).describe(seeing(config))


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"vision_config": {"image_size": None}}, "no vision_config.image_size"),
        ({"vision_config": {"vision_use_head": True}}, "a pooling head"),
        ({"mm_tokens_per_image": 8}, "6 x 6 patches cannot be averaged to 8 tokens"),
        ({"mm_tokens_per_image": 16}, "6 x 6 patches cannot be averaged to 16 tokens"),
        ({"image_token_index": 97}, "the image token 97 is outside of the vocabulary of 97"),
    ],
)
def test_a_gemma_that_cannot_see_is_refused(
    changes: dict[str, Any], said: str, tmp_path: Path
) -> None:
    save_seeing(tmp_path, "gemma3")
    config = read_config(tmp_path)
    tower = {**config["vision_config"], **changes.get("vision_config", {})}
    with pytest.raises(UserError, match=said):
        family_of(config).describe(seeing({**config, **changes, "vision_config": tower}))


def test_settings_that_images_of_one_size_exclude_are_refused(tmp_path: Path) -> None:
    model = str(tmp_path)
    save_seeing(tmp_path, "gemma3")
    with pytest.raises(UserError, match=r"--image-max-pixels has no effect(.|\n)*to 24 x 24"):
        check_architecture(make_config(hf_checkpoint=model, image_max_pixels=65536, **IMAGES))
    config = make_config(hf_checkpoint=model, **IMAGES)
    by_te = replace(config, train=replace(config.train, transformer_impl="transformer_engine"))
    with pytest.raises(UserError, match="transformer_engine cannot compute images of gemma3"):
        check_architecture(by_te)
    described = seeing(read_config(tmp_path))
    with pytest.raises(UserError, match="SGLang does not compute images of gemma3"):
        check_model(family_of(described).describe(described), described)
    file = tmp_path / "preprocessor_config.json"
    settings = json.loads(file.read_text())
    file.write_text(json.dumps({**settings, "size": {"height": 28, "width": 28}}))
    reader = ImageReader(model)
    vision = family_of(described).describe(described).vision
    assert vision is not None
    with pytest.raises(ImageError, match="makes it 28 x 28 pixels, and the vision tower takes 24"):
        vision.size_in_tokens(reader.grid(picture(30, 20)))
    file.write_text(json.dumps({**settings, "do_pan_and_scan": True}))
    with pytest.raises(UserError, match="pan and scan, which is not supported"):
        ImageReader(model)


@pytest.mark.parametrize(
    ("version", "is_refused"), [("0.5.13", True), ("0.5.18.post1", True), ("0.5.19", False)]
)
def test_versions_of_sglang_that_compute_images_wrongly_are_refused(
    version: str, is_refused: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Qwen3.5: a kernel reads one of three rows of positions. Launched engines are refused, and
    those that others have started."""
    monkeypatch.setattr(model_faults, "installed_version", lambda: version)
    config = config_of("qwen3_5")
    spec = family_of(config).describe(config)
    vision = VisionSpec(VisionKind("", (1, 1, 1)), {}, 1, 2, 3, (1, 1, 1))
    check_model(spec, config)  # text alone
    check_model(replace(spec, vision=vision, transformer={}), config)  # another model
    expected: AbstractContextManager[Any] = nullcontext()
    if is_refused:
        words = r"SGLang up to 0\.5\.18 computes images(.|\n)*--rollout-engine embedded"
        expected = pytest.raises(UserError, match=words)
    with expected:
        check_model(replace(spec, vision=vision), config)


@pytest.mark.parametrize("kind", ["qwen3_5", "qwen3_vl", "gemma3"])
@pytest.mark.parametrize("version", ["0.5.18", "0.5.19"])
def test_external_engines_that_compute_images_wrongly_are_refused(
    version: str, kind: str, tmp_path: Path
) -> None:
    save_seeing(tmp_path, kind)
    server = {"version": version, "dtype": "float32", "custom_weight_loader": [WEIGHT_PROBE]}
    engine = EngineInfo({}, server)
    words = {
        ("qwen3_5", "0.5.18"): r"SGLang 0\.5\.18(.|\n)*three rows(.|\n)*newer",
        ("gemma3", "0.5.18"): r"SGLang, in which tokens of an image(.|\n)*embedded engine",
        ("gemma3", "0.5.19"): r"SGLang, in which tokens of an image(.|\n)*embedded engine",
    }
    for flags, is_refused in (({}, False), (IMAGES, (kind, version) in words)):
        config = make_config(hf_checkpoint=str(tmp_path), **flags)
        expected: AbstractContextManager[Any] = nullcontext()
        if is_refused:
            expected = pytest.raises(UserError, match=words[kind, version])
        with expected:
            check_fit(config, "http://engine", engine, None, lambda text: None)


def test_a_version_of_sglang_that_tokenises_prompts_anew_is_refused(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    config = seeing(QWEN3_VL_8B)
    spec = family_of(config).describe(config)
    monkeypatch.setattr(model_faults, "installed_version", lambda: "0.5.13")
    check_model(spec, config)
    monkeypatch.setattr(model_faults, "installed_version", lambda: "0.5.12")
    with pytest.raises(UserError, match=r"SGLang 0\.5\.12 tokenises prompts with images again"):
        check_model(spec, config)


def test_limits_that_sglang_would_not_know_are_refused() -> None:
    flags = {**IMAGES, "rollout_engine": "sglang"}
    check_sglang(make_config(**flags))
    with pytest.raises(UserError, match="--image-max-pixels is not passed on to SGLang"):
        check_sglang(make_config(**flags, image_max_pixels=65536))


QWEN3_VL_8B: dict[str, Any] = {
    "model_type": "qwen3_vl",
    "image_token_id": 151655,
    "vision_start_token_id": 151652,
    "vision_end_token_id": 151653,
    "text_config": {
        "hidden_size": 4096,
        "intermediate_size": 12288,
        "num_hidden_layers": 36,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "vocab_size": 151936,
        "rope_scaling": {"rope_type": "default", "mrope_section": [24, 20, 20]},
    },
    "vision_config": {
        "depth": 27,
        "hidden_size": 1152,
        "intermediate_size": 4304,
        "num_heads": 16,
        "patch_size": 16,
        "out_hidden_size": 4096,
        "num_position_embeddings": 2304,
        "deepstack_visual_indexes": [8, 16, 24],
    },
}


def test_the_tower_counts_in_flops_and_memory(tmp_path: Path) -> None:
    """Counted by hand for Qwen3-VL-8B: blocks for each patch, mergers for each token."""
    table = family_of(QWEN3_VL_8B)
    text = sequence_cost(table, QWEN3_VL_8B)
    cost = sequence_cost(table, seeing(QWEN3_VL_8B))
    assert (cost.linear, cost.quadratic) == (text.linear, text.quadratic)
    assert text.of_images([1000]) == 0
    block = 4 * 1152 * 1152 + 2 * 1152 * 4304
    patch = 3 * 2 * 16 * 16 * 1152
    merger = 4608 * 4608 + 4608 * 4096
    assert cost.image == 2 * (4 * (27 * block + patch) + 4 * merger)
    assert cost.image_pair == 4 * 1152 * 27
    assert cost.of_images([10, 2]) == 12 * cost.image + cost.image_pair * (40**2 + 8**2)
    (tmp_path / "config.json").write_text(json.dumps(QWEN3_VL_8B))
    plans = [
        facts_of(make_config(hf_checkpoint=str(tmp_path), **flags), on_gpu=True).trainer
        for flags in ({}, IMAGES, {**IMAGES, "freeze_vision_tower": True})
    ]
    stages = [StageMemory(plan, 0) for plan in plans if plan is not None]
    numbers = [sum(p.numel for p in stage.parameters) for stage in stages]
    tower = sum(
        parameter.numel
        for parameter in table.parameters(table.describe(seeing(QWEN3_VL_8B)), ())
        if parameter.rule.is_vision
    )
    assert numbers == [numbers[0], numbers[0] + tower, numbers[0] + tower]
    assert 5.7e8 < tower < 5.9e8
    trained = [stage.trained for stage in stages]
    assert trained[0] < trained[2] < trained[1] == trained[0] + tower
    seen = [stage.training().get("activations of the vision tower", 0.0) for stage in stages]
    assert seen[0] == 0.0 and seen[1] == pytest.approx(27 * seen[2])
