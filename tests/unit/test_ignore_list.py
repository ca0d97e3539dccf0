"""Rules that spare modules, as the library compressed-tensors takes them: on any names, and on
whole models."""

from __future__ import annotations

import re
from functools import cache
from typing import Any

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from slime.models import family_of
from slime.models.ignore_list import check, examine, matrices, names
from slime.models.quantised import Fp8, Int4, Quantisation
from tests.support.hf_configs import config_of

pytest.importorskip("compressed_tensors", reason="the quantised extra is not installed")

#: Of which transformers has a Linear module for each Linear layer; experts it has as one tensor.
DENSE = ("llama", "qwen2", "qwen3", "mistral", "glm4")
MODULES = [
    *(
        "lm_head",
        "model.embed_tokens",
        "model.embed_tokens.weight",
        "model.layers.1",
        "model.layers.10",
        "model.norm",
    ),
    *(
        f"model.layers.{i}.{part}"
        for i in (0, 1, 10)
        for part in ("mlp.gate", "mlp.gate_proj", "self_attn.q_proj")
    ),
]
PARTS = [
    "re:", ".*", "mlp", r"\.", ".", "gate", "layers", "1", "0", "$", "^", "_proj", "(q|k)_proj",
    "model", "lm_head"
]  # fmt: skip
RULES = st.one_of(
    st.sampled_from(MODULES), st.lists(st.sampled_from(PARTS), max_size=6).map("".join)
)


@settings(max_examples=200)
@given(RULES, st.sampled_from(MODULES))
@example("model.layers.1", "model.layers.10.mlp.gate")
@example("re:model.layers.1", "model.layers.10.mlp.gate")
@example("re:mlp", "model.layers.1.mlp.gate")
@example("re:", "lm_head")
@example("", "lm_head")
def test_a_rule_names_what_the_library_says(rule: str, name: str) -> None:
    from compressed_tensors.utils import match_name

    assert names(rule, name) == match_name(name, rule)


def test_a_rule_that_names_a_norm_is_not_idle() -> None:
    """As lists of published FP8 models have them, by the hundred."""
    config = config_of("qwen3_moe")
    family = family_of(config)
    rules = (
        "lm_head",
        "model.layers.0.mlp.gate",
        "model.layers.0.input_layernorm",
        "model.norm.weight",
        "model.layers.1",
    )
    found = check(family, family.describe(config), Quantisation("fp8", Fp8((8, 8)), rules))
    assert found.idle == ("model.layers.1",)


@cache
def model_of(family: str, is_tied: bool) -> tuple[dict[str, Any], Any]:
    from transformers import AutoConfig, AutoModelForCausalLM

    config = config_of(family, tie_word_embeddings=is_tied, pad_token_id=None)
    with torch.device("meta"):
        return config, AutoModelForCausalLM.from_config(AutoConfig.for_model(**config))


@settings(max_examples=60)
@given(st.data(), st.sampled_from(DENSE), st.booleans())
def test_the_library_quantises_the_same_modules(
    data: st.DataObject, family: str, is_tied: bool
) -> None:
    """It would also look for the output layer of a tied model, of which nothing is stored: that is
    a finding."""
    from compressed_tensors.utils import match_named_modules

    config, model = model_of(family, is_tied)
    modules = [name for name, _ in model.named_modules() if name]
    of_this_model = st.sampled_from([*modules, *(f"re:{re.escape(name)}" for name in modules)])
    rules = tuple(data.draw(st.lists(st.one_of(RULES, of_this_model), max_size=4)))
    theirs = {name for name, _ in match_named_modules(model, ["Linear"], rules)}
    table = family_of(config)
    found = examine(
        matrices(table, table.describe(config)), Quantisation("compressed-tensors", Int4(8), rules)
    )
    assert {one.module for one in found.quantised} | set(found.tied) == theirs
    assert {one.module for one in found.ignored}.isdisjoint(theirs)
    assert bool(found.tied) == (is_tied and "lm_head" in theirs)
