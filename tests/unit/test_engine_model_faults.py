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
    for config in (small, large):
        engine_kind("embedded").check_model(family_of(config).model_spec(config), config)
    engine_kind("sglang").check_model(family_of(small).model_spec(small), small)
    with pytest.raises(UserError, match=r"SGLang computes this Gemma 3 without(.|\n)*linear"):
        engine_kind("sglang").check_model(family_of(large).model_spec(large), large)


def test_experts_in_mxfp4_are_refused_with_sglang_alone() -> None:
    stored = PUBLISHED["openai/gpt-oss-20b"]["config"]
    plain = {key: value for key, value in stored.items() if key != "quantization_config"}
    spec = family_of(stored).model_spec(stored)
    engine_kind("embedded").check_model(spec, stored)
    engine_kind("sglang").check_model(spec, plain)
    with pytest.raises(UserError, match=r"MXFP4(.|\n)*quantised-to-hf"):
        engine_kind("sglang").check_model(spec, stored)
