"""The table of adapters: layers, names, shapes, and the flags that choose them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from slime.checkpoints.peft_files import WEIGHTS, check_adapter
from slime.config import make_config
from slime.config.groups_lora import LoraConfig
from slime.errors import UserError
from slime.models import family_of
from slime.models.adapters import (
    AdapterConfig,
    adaptable,
    adapted_layers,
    adapter_family,
    by_expert,
    count_parameters,
    is_adapter_parameter,
    peft_name,
    split_peft_name,
)
from slime.models.layouts import GATE_UP, QKV, Shard, SomeParts
from slime.models.parameters import ModelParameters
from slime.models.peft_config import CONFIG
from slime.models.spec import ModelSpec
from slime.models.table import ModelFamily
from tests.support.hf_configs import ARCHITECTURES, PUBLISHED, config_of
from tests.support.trainer_ranks import tiny_spec


def model(name: str) -> tuple[ModelFamily, ModelSpec]:
    config = PUBLISHED[name]["config"]
    family = family_of(config)
    return family, family.model_spec(config)


def adapters(name: str, **flags: Any) -> AdapterConfig:
    return AdapterConfig.for_model(LoraConfig(**{"lora_rank": 1, **flags}), *model(name))


# -- how many --------------------------------------------------------------------------------------

ATTENTION = ("q_proj", "k_proj", "v_proj", "o_proj")
MLP = ("gate_proj", "up_proj", "down_proj")


@pytest.mark.parametrize(
    ("name", "flags", "count"),
    [
        ("Qwen/Qwen3-0.6B", {}, 630_784),
        ("HuggingFaceTB/SmolLM2-135M", {}, 305_280),
        ("Qwen/Qwen3-4B", {}, 2_064_384),
        ("Qwen/Qwen3-4B", {"lora_target_modules": ATTENTION}, 737_280),
        ("Qwen/Qwen3-4B", {"lora_exclude_modules": ATTENTION}, 1_327_104),
        ("Qwen/Qwen3-30B-A3B", {"lora_target_modules": ATTENTION}, 835_584),
        ("Qwen/Qwen3-30B-A3B", {"lora_target_modules": MLP}, 51_904_512),
        # Σ (in + out) as of any other layer
        (
            "Qwen/Qwen3-30B-A3B",
            {"lora_target_modules": ("embed_tokens", "lm_head")},
            2 * (151_936 + 2048),
        ),
        (
            "Qwen/Qwen3-30B-A3B",
            {"lora_target_modules": MLP, "lora_experts": "shared-outer"},
            14_450_688,
        ),
    ],
)
def test_parameters_per_unit_of_rank(name: str, flags: dict[str, Any], count: int) -> None:
    """The numbers that Tinker's table and PEFT have."""
    for rank in (1, 32):
        chosen = adapters(name, lora_rank=rank, **flags)
        assert count_parameters(*model(name), chosen) == rank * count


def test_the_rank_of_experts_is_divided_by_experts_per_token() -> None:
    name = "Qwen/Qwen3-30B-A3B"
    chosen = adapters(name, lora_rank=16, lora_rank_by_topk=True)
    assert (chosen.rank, chosen.expert_rank) == (16, 2)
    assert (chosen.scaling, chosen.expert_scaling) == (2.0, 16.0)
    assert count_parameters(*model(name), chosen) == 16 * 835_584 + 2 * 51_904_512


# -- names and shapes ------------------------------------------------------------------------------

NUM_EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")


@pytest.mark.parametrize(
    "name", {row["config"]["model_type"]: name for name, row in PUBLISHED.items()}.values()
)
def test_every_linear_layer_has_two_tensors_that_fit_it(name: str) -> None:
    """At most 16 experts per layer: hundreds of them differ in their number alone."""
    config = PUBLISHED[name]["config"]
    few = {key: min(config[key], 16) for key in NUM_EXPERTS if config.get(key)}
    family = family_of(config)
    spec = family.model_spec({**config, **few})
    chosen = AdapterConfig.for_model(LoraConfig(lora_rank=3), family, spec)
    table = adapter_family(family, spec, chosen)
    found = dict(table.hf_tensors(spec))
    base = dict(family.hf_tensors(spec))
    no_target = ("embed_tokens", "lm_head", ".gate.", "shared_expert_gate", ".router.", "_bias")
    linear = {
        hf: shape
        for hf, shape in base.items()
        if len(shape) == 2 and not any(name in hf for name in no_target)
    }
    inner = int(spec.transformer.get("moe_ffn_hidden_size") or 0)
    for hf, shape in base.items():  # stacks
        owner, is_expert, leaf = hf.partition(".experts.")
        if len(shape) == 3 and is_expert:
            parts = {"gate_proj": (inner, spec.hidden_size), "up_proj": (inner, spec.hidden_size)}
            if leaf == "down_proj":
                parts = {leaf: (spec.hidden_size, inner)}
            for part, sizes in parts.items():
                linear |= {f"{owner}.experts.{i}.{part}.weight": sizes for i in range(shape[0])}
    assert len(found) == 2 * len(linear)
    for hf, (rows, columns) in linear.items():
        module = hf.removesuffix(".weight")
        assert found[peft_name(module, "A")] == (3, columns)
        assert found[peft_name(module, "B")] == (rows, 3)
    parameters = ModelParameters(family, spec, adapters=chosen)
    assert parameters.trained == found and parameters.stored == base
    assert parameters.served == {hf: ("", shape) for hf, shape in found.items()}
    stage = sum(one.numel for one in table.parameters(spec, range(spec.num_layers)))
    assert stage == count_parameters(family, spec, chosen)


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_both_ways_of_a_name_agree(name: str) -> None:
    config = config_of(name)
    family = family_of(config)
    spec = family.describe(config)
    chosen = AdapterConfig.for_model(LoraConfig(lora_rank=2), family, spec)
    assert chosen.targets == set(adaptable(family, spec))
    table = adapter_family(family, spec, chosen)
    for name, _ in table.hf_tensors(spec):
        found = table.match_hf(name)
        assert found is not None, name
        rule, numbers = found
        megatron = rule.megatron_names[0].format(**numbers)
        assert is_adapter_parameter(megatron)
        match = table.match_megatron(megatron, spec)
        assert match is not None and name in match.exports
        assert split_peft_name(name) is not None
    assert not any(is_adapter_parameter(n) for rule in family.rules for n in rule.megatron_names)


def test_shared_sides_have_no_number() -> None:
    family, spec = model("Qwen/Qwen3-30B-A3B")
    chosen = adapters("Qwen/Qwen3-30B-A3B", lora_target_modules=MLP, lora_experts="shared-outer")
    layer = "base_model.model.model.layers.0.mlp.experts."
    names = [n for n, _ in adapter_family(family, spec, chosen).hf_tensors(spec)]
    shared = [f"{layer}{leaf}" for leaf in (
        "gate_proj.lora_A.weight", "up_proj.lora_A.weight", "down_proj.lora_B.weight"
    )]  # fmt: skip
    assert [n for n in names if n.startswith(layer) and not n[len(layer)].isdigit()] == shared
    whole = [n for name in names for n in by_expert(name, spec.num_experts)]
    per_expert = adapters("Qwen/Qwen3-30B-A3B", lora_target_modules=MLP)
    assert set(whole) == {n for n, _ in adapter_family(family, spec, per_expert).hf_tensors(spec)}
    assert split_peft_name(f"{layer}3.up_proj.weight") is None


# -- some parts of a fused layer -------------------------------------------------------------------


@settings(max_examples=40, deadline=None)
@given(st.data())
def test_parts_without_an_adapter_are_rows_of_zeros(data: st.DataObject) -> None:
    spec = tiny_spec()
    heads, groups, width = spec.num_heads, spec.num_query_groups, spec.head_dim
    fused, rows = data.draw(
        st.sampled_from(
            [(QKV, (heads * width, groups * width, groups * width)), (GATE_UP, (64, 64))]
        )
    )
    present = tuple(
        data.draw(st.lists(st.booleans(), min_size=len(rows), max_size=len(rows)).filter(any))
    )
    size = data.draw(st.sampled_from([1, 2]))
    layout = SomeParts(fused, rows, present)
    tensors = [torch.rand(n, 3) + 1 for n, is_there in zip(rows, present) if is_there]
    pieces = [layout.load(tensors, Shard(rank, size), spec) for rank in range(size)]
    for before, after in zip(tensors, layout.export(pieces, spec), strict=True):
        assert torch.equal(before, after)
    absent = sum(n for n, is_there in zip(rows, present) if not is_there)
    assert sum(int((piece == 0).all(1).sum()) for piece in pieces) == absent


def test_a_part_that_is_no_target_is_in_no_file() -> None:
    family, spec = model("Qwen/Qwen3-0.6B")
    chosen = adapters("Qwen/Qwen3-0.6B", lora_target_modules=("q_proj", "v_proj"))
    (layer,) = adapted_layers(family, spec, chosen)
    assert layer.present == (True, False, True)
    assert [name.rsplit(".", 3)[1] for name in layer.down.hf_names] == ["q_proj", "v_proj"]


# -- flags -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "flags", "said"),
    [
        ("Qwen/Qwen3-0.6B", {"lora_target_modules": ("q_prj",)}, "nearest: q_proj"),
        ("Qwen/Qwen3-0.6B", {"lora_target_modules": ("q_proj,v_proj",)}, "modules q_proj v_proj"),
        ("Qwen/Qwen3-0.6B", {"lora_exclude_modules": ("kv_b_proj",)}, "has no such layer"),
        ("Qwen/Qwen3-0.6B", {"lora_target_modules": ("embed_tokens",)}, "cannot be adapted"),
        ("Qwen/Qwen3-0.6B", {"lora_target_modules": ("lm_head",)}, "are one weight"),
        ("Qwen/Qwen3-30B-A3B", {"lora_exclude_modules": ("lm_head",)}, "has no effect"),
        ("Qwen/Qwen3-30B-A3B", {"lora_target_modules": ("gate",)}, "router"),
        ("Qwen/Qwen3-30B-A3B", {"lora_target_modules": ("gate_proj", "up_proj")}, "down_proj is"),
        ("Qwen/Qwen3-30B-A3B", {"lora_exclude_modules": ("gate_proj", "up_proj")}, "up_proj is"),
        ("Qwen/Qwen3-30B-A3B", {"lora_rank": 12, "lora_rank_by_topk": True}, "--lora-rank 16"),
        ("Qwen/Qwen3-0.6B", {"lora_rank_by_topk": True}, "without adapters of routed experts"),
        (
            "Qwen/Qwen3-30B-A3B",
            {"lora_target_modules": ATTENTION, "lora_experts": "shared-outer"},
            "without adapters of routed experts",
        ),
        (
            "Qwen/Qwen3-0.6B",
            {"lora_target_modules": ("q_proj",), "lora_exclude_modules": ("q_proj",)},
            "no layer is left",
        ),
        (
            "Qwen/Qwen3-0.6B",
            {"lora_target_modules": ("q_proj",), "lora_exclude_modules": ("v_proj",)},
            "--lora-exclude-modules v_proj has no effect",
        ),
        (
            "Qwen/Qwen3-30B-A3B",
            {"lora_target_modules": ("gate_proj", "up_proj", "down_proj"), "lora_dropout": 0.1},
            "--lora-dropout has no effect on adapters of down_proj gate_proj up_proj",
        ),
        (
            "Qwen/Qwen3-30B-A3B",
            {"lora_target_modules": ("embed_tokens",), "lora_dropout": 0.1},
            "--lora-dropout has no effect on adapters of embed_tokens",
        ),
    ],
)
def test_what_cannot_be_adapted_is_refused_by_name(
    name: str, flags: dict[str, Any], said: str
) -> None:
    with pytest.raises(UserError) as caught:
        adapters(name, **flags)
    assert said in str(caught.value)


def test_all_linear_is_the_default() -> None:
    name = "moonshotai/Moonlight-16B-A3B"
    assert adapters(name) == adapters(name, lora_target_modules=("all-linear",))
    assert adapters(name).targets == {
        "q_proj", "kv_a_proj_with_mqa", "kv_b_proj", "o_proj", "gate_proj", "up_proj", "down_proj",
    }  # fmt: skip


def test_flags_that_contradict_adapters() -> None:
    for flags in (
        {"only_train_params_name_list": ("mlp",)},
        {"freeze_params_name_list": ("mlp",)},
        {"ref_update_interval": 2, "use_kl_loss": True},
        {"moe_router_bias_update_rate": 0.001},
    ):
        option = next(iter(flags)).replace("_", "-")
        with pytest.raises(UserError, match=f"--{option} and --lora-rank"):
            make_config(lora_rank=8, **flags)
    with pytest.raises(UserError, match="--lora-alpha has no effect without --lora-rank"):
        make_config(lora_alpha=16.0)


def test_settings_that_are_unusual_with_adapters_are_warned_of() -> None:
    usual = make_config(lora_rank=8, lr=1e-4).warnings
    warned = make_config(lora_rank=8, lr=1e-6, lora_dropout=0.1).warnings
    new = " ".join(warned[len(usual) :])
    assert "--lr 1e-06" in new and "--lora-dropout 0.1" in new
    assert AdapterConfig.of(make_config()) is None


def test_an_adapter_to_start_from_is_looked_at_before_the_launch(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="is no PEFT adapter"):
        check_adapter(tmp_path)
    (tmp_path / CONFIG).write_text(json.dumps({"peft_type": "LORA", "use_dora": True}))
    with pytest.raises(UserError, match=r"(?s)not plain LoRA.*DoRA"):
        check_adapter(tmp_path)
    (tmp_path / CONFIG).write_text(json.dumps({"peft_type": "LORA"}))
    with pytest.raises(UserError, match="there is no"):
        check_adapter(tmp_path)
    (tmp_path / WEIGHTS).touch()
    check_adapter(tmp_path)
