"""The records of the token mixers: each names classes that exist, and the axes of its rules."""

from __future__ import annotations

import pkgutil

import pytest

from slime.models import FAMILIES
from slime.models.mixers import (
    GATED_ATTENTION,
    GATED_DELTA_NET,
    MIXERS,
    TokenMixer,
    mixer_of,
    mixers_of,
)
from slime.models.table import shapes_of
from slime.processes.host import free_port
from slime.trainer.megatron.backend import MegatronBackend  # noqa: F401  (prepares the host)
from slime.trainer.megatron.delta_net import PackedGatedDeltaNet
from slime.trainer.megatron.layers import GatedActivation
from slime.trainer.megatron.model import transformer_config
from slime.trainer.megatron.parallel import RankInfo
from tests.support.memory_jobs import FAMILIES as CONFIGS
from tests.support.memory_jobs import models
from tests.support.trainer_ranks import trainer_config


@pytest.mark.parametrize("mixer", MIXERS, ids=lambda mixer: mixer.name)
def test_a_record_names_classes_that_exist(mixer: TokenMixer) -> None:
    assert callable(pkgutil.resolve_name(mixer.embedded).build)
    if mixer.megatron_module is not None:
        assert callable(pkgutil.resolve_name(mixer.megatron_module))
    fields = pkgutil.resolve_name(mixer.megatron_config).__dataclass_fields__
    assert {*mixer.megatron_overrides, *mixer.unread_flags} <= fields.keys()


@pytest.mark.parametrize("name", ["qwen3_next", "qwen3_5_text"])
def test_the_layers_of_a_hybrid_have_two_mixers(name: str) -> None:
    """Each rule of a mixer applies to its layers alone, and no axis has two sizes."""
    config = CONFIGS[name]
    family = next(one for one in FAMILIES if config["model_type"] in one.model_types)
    spec = family.model_spec(config)
    kinds = [mixer_of(spec.transformer, layer) for layer in range(spec.num_layers)]
    assert kinds == [GATED_DELTA_NET] * 3 + [GATED_ATTENTION]
    assert mixers_of(spec.transformer) == [GATED_DELTA_NET, GATED_ATTENTION]
    assert not GATED_DELTA_NET.widths.keys() & GATED_ATTENTION.widths.keys()
    for layer in range(spec.num_layers):
        rules = [rule for rule in family.rules if rule.applies(spec, layer) and rule.is_of_layer]
        shapes = [shapes_of(rule, spec) for rule in rules]
        assert all(size > 0 for shape in shapes for tensor in shape for size in tensor)
        names = [rule.megatron_names[0] for rule in rules]
        assert len(names) == len(set(names))
        is_delta_net = any(rule.megatron_names[0].endswith("A_log") for rule in rules)
        assert is_delta_net == (kinds[layer] is GATED_DELTA_NET)


@pytest.mark.parametrize("name", ["qwen3", "glm4", "deepseek_v3", "deepseek_v3, whole queries"])
def test_the_rules_of_a_layer_are_those_of_its_mixer(name: str) -> None:
    """Every rule of the record is in the family's table, and its shapes follow from the spec."""
    config = CONFIGS[name]
    family = next(one for one in FAMILIES if config["model_type"] in one.model_types)
    spec = family.model_spec(config)
    mixer = mixer_of(spec.transformer, 0)
    assert mixers_of(spec.transformer) == [mixer]
    assert set(mixer.rules) <= set(family.rules)
    shapes = [shapes_of(rule, spec) for rule in mixer.rules if rule.applies(spec, 0)]
    assert all(size > 0 for shape in shapes for tensor in shape for size in tensor)
    assert mixer.kept_heads is not None
    heads, width = mixer.kept_heads(spec)
    assert mixer.kept(spec, 1, False) <= 2 * heads * width


def test_megatron_gets_our_parts_in_the_layers_that_have_them() -> None:
    """Delta nets in three of four layers, the activation of a gated MLP in all of one model."""
    info = RankInfo(0, 1, 0, "127.0.0.1", free_port())
    found = {}
    with models(info, ["qwen3_next", "qwen3"], {}) as built:
        for name, [chunk] in built:
            layers = chunk.decoder.layers
            found[name] = [
                [isinstance(layer.self_attention, PackedGatedDeltaNet) for layer in layers],
                any(isinstance(module, GatedActivation) for module in chunk.modules()),
            ]
    assert found["qwen3_next"][0] == [True, True, True, False]
    assert not any(found["qwen3"][0])
    assert found["qwen3"][1]


@pytest.mark.parametrize(
    ("name", "is_ours"), [("qwen3", True), ("gemma3_text", True), ("gpt_oss", False)]
)
def test_the_activation_of_a_gated_mlp_is_ours(name: str, is_ours: bool) -> None:
    config = CONFIGS[name]
    family = next(one for one in FAMILIES if config["model_type"] in one.model_types)
    made = transformer_config(family.model_spec(config), trainer_config())
    assert made.use_te_activation_func == is_ours
