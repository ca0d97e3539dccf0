"""Models that an engine computes otherwise than the trainer are refused with the engine's name."""

from __future__ import annotations

import pytest

from slime.engines.kinds import engine_kind
from slime.errors import UserError
from slime.models import family_of
from tests.support.hf_configs import PUBLISHED


def test_gemma_with_a_scaled_rotary_embedding_is_refused_with_sglang_alone() -> None:
    small = PUBLISHED["google/gemma-3-1b-pt"]["config"]
    large = {**small, "rope_scaling": {"rope_type": "linear", "factor": 8.0}}
    nested = PUBLISHED["google/gemma-3-4b-pt"]["config"]
    whole = {"model_type": "gemma3", "text_config": nested, "vision_config": {}}
    for config in (small, large, whole):
        engine_kind("embedded").check_model(family_of(config).model_spec(config), config)
    engine_kind("sglang").check_model(family_of(small).model_spec(small), small)
    for config in (large, whole):
        with pytest.raises(UserError, match=r"SGLang computes this Gemma 3 without(.|\n)*linear"):
            engine_kind("sglang").check_model(family_of(config).model_spec(config), config)


def test_queries_that_grow_from_another_position_on_are_refused_with_sglang_alone() -> None:
    same = PUBLISHED["mistralai/Ministral-3-8B-Base-2512"]["config"]
    shorter = same["rope_parameters"] | {"original_max_position_embeddings": 8192}
    other = {"model_type": "mistral3", "text_config": same | {"rope_parameters": shorter}}
    for config in (same, other):
        engine_kind("embedded").check_model(family_of(config).model_spec(config), config)
    engine_kind("sglang").check_model(family_of(same).model_spec(same), same)
    with pytest.raises(UserError, match=r"grow from position 16384 on(.|\n)*which is 8192"):
        engine_kind("sglang").check_model(family_of(other).model_spec(other), other)


def test_experts_in_mxfp4_are_refused_with_sglang_alone() -> None:
    stored = PUBLISHED["openai/gpt-oss-20b"]["config"]
    plain = {key: value for key, value in stored.items() if key != "quantization_config"}
    spec = family_of(stored).model_spec(stored)
    engine_kind("embedded").check_model(spec, stored)
    engine_kind("sglang").check_model(spec, plain)
    with pytest.raises(UserError, match=r"MXFP4(.|\n)*quantised-to-hf"):
        engine_kind("sglang").check_model(spec, stored)


def test_gpt_oss_without_the_limit_of_its_gates_is_refused_with_sglang_alone() -> None:
    stored = PUBLISHED["openai/gpt-oss-20b"]["config"]
    without = {"quantization_config", "swiglu_limit"}
    config = {key: value for key, value in stored.items() if key not in without}
    spec = family_of(config).model_spec(config)
    engine_kind("embedded").check_model(spec, config)
    engine_kind("sglang").check_model(spec, {**config, "swiglu_limit": 7.0})
    with pytest.raises(UserError, match=r'"swiglu_limit": 7\.0'):
        engine_kind("sglang").check_model(spec, config)


def test_hybrids_whose_layers_sglang_would_not_find_are_refused_with_it_alone() -> None:
    text = PUBLISHED["Qwen/Qwen3.5-9B"]["config"]
    published = {"model_type": "qwen3_5", "text_config": text, "tie_word_embeddings": False}
    silent = {**text, "full_attention_interval": None}
    with_gaps = {**silent, "layer_types": ["full_attention", *text["layer_types"][1:]]}
    for config, said in (
        (text, "no class for text models"),
        ({**published, "text_config": silent}, "kinds of this model's layers"),
        ({**published, "text_config": with_gaps}, "kinds of this model's layers"),
    ):
        spec = family_of(config).model_spec(config)
        engine_kind("embedded").check_model(spec, config)
        with pytest.raises(UserError, match=said):
            engine_kind("sglang").check_model(spec, config)
    for config in (published, PUBLISHED["Qwen/Qwen3-Next-80B-A3B-Instruct"]["config"]):
        engine_kind("sglang").check_model(family_of(config).model_spec(config), config)
