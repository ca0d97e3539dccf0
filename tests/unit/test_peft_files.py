"""PEFT directories: what is written loads in PEFT with the same logits, and what PEFT saves is
read."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, get_args

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, AutoModelForImageTextToText

from slime.checkpoints.hf_files import HfReader
from slime.checkpoints.merging import merge_adapter, merged
from slime.checkpoints.peft_files import (
    WEIGHTS,
    ExpertLayout,
    fitted,
    is_loadable,
    module_of,
    read_adapter,
    rewrite_adapter,
    write_adapter,
    write_plain,
)
from slime.config.groups_lora import LoraConfig
from slime.embedded.adapters import AdapterTable
from slime.errors import UserError
from slime.models import family_of
from slime.models.adapters import AdapterConfig, adapter_family, peft_name
from slime.models.peft_config import CONFIG
from slime.models.spec import ModelSpec
from slime.models.table import ModelFamily
from tests.support.embedded_models import (
    make_scheduler,
    make_sequence,
    run,
    save_tiny_model,
)
from tests.support.hf_configs import config_of
from tests.support.tiny_models import WITH_IMAGES, save_tiny

peft = pytest.importorskip("peft")

LAYOUTS = get_args(ExpertLayout)
PROMPT = torch.arange(3, 40)[None]


@pytest.fixture(scope="module")
def bases(tmp_path_factory: pytest.TempPathFactory) -> Any:
    made: dict[str, Path] = {}

    def base(shape: str) -> Path:
        if shape not in made:
            made[shape] = tmp_path_factory.mktemp("base") / shape
            if shape in WITH_IMAGES:
                save_tiny(shape, made[shape])
            else:
                save_tiny_model(made[shape], shape)
        return made[shape]

    return base


def described(base: Any) -> tuple[ModelFamily, ModelSpec]:
    family = family_of(base)
    return family, family.model_spec(base)


def adapters_of(base: Any, **flags: Any) -> AdapterConfig:
    return AdapterConfig.for_model(
        LoraConfig(lora_rank=4, lora_alpha=6.0, **flags), *described(base)
    )


def random_tensors(
    base: Any, adapters: AdapterConfig, seed: int = 0, dtype: torch.dtype = torch.float32
) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    shapes = adapter_family(*described(base), adapters).hf_tensors(described(base)[1])
    return {
        name: (torch.randn(shape, generator=generator) * 0.1).to(dtype) for name, shape in shapes
    }


def logits(model: Any) -> torch.Tensor:
    with torch.no_grad():
        return model(PROMPT).logits


def opened(base: Path) -> Any:
    has_images = "text_config" in json.loads((base / "config.json").read_text())
    auto = AutoModelForImageTextToText if has_images else AutoModelForCausalLM
    return auto.from_pretrained(base, dtype=torch.float32)


def loaded_by_peft(base: Path, directory: Path) -> Any:
    model = opened(base)
    return peft.PeftModel.from_pretrained(model, directory)


# -- what we write ---------------------------------------------------------------------------------


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize(
    ("shape", "flags"),
    [
        ("llama", {}),
        ("mistral", {"lora_target_modules": ("embed_tokens", "lm_head", "down_proj")}),
        ("qwen3", {"lora_target_modules": ("q_proj", "up_proj")}),
        ("glm4", {}),
        ("qwen3_moe", {}),
        ("qwen3_moe", {"lora_rank_by_topk": True}),
        ("qwen3_moe", {"lora_experts": "shared-outer"}),
        ("glm4_moe", {}),
        ("deepseek_v3", {}),
        ("minimax_m2", {"lora_experts": "shared-outer", "lora_rank_by_topk": True}),
    ],
)
def test_peft_loads_what_is_written(
    bases: Any, tmp_path: Path, shape: str, flags: dict[str, Any], layout: ExpertLayout
) -> None:
    base = bases(shape)
    adapters = adapters_of(base, **flags)
    tensors = random_tensors(base, adapters)
    directory = write_adapter(
        tmp_path / "adapter", tensors, adapters, described(base)[1], base=str(base), layout=layout
    )
    model = loaded_by_peft(base, directory)
    seen = logits(model)
    with model.disable_adapter():
        assert (logits(model) - seen).abs().max() > 0.05
    adapter = read_adapter(directory, family_of(base))
    merge_adapter(base, adapter, tmp_path / "merged")
    ours = AutoModelForCausalLM.from_pretrained(tmp_path / "merged", dtype=torch.float32)
    torch.testing.assert_close(logits(ours), seen, rtol=1e-5, atol=1e-4)
    back = fitted(adapter, adapters, *described(base))
    assert back.keys() == tensors.keys()
    assert all(torch.equal(back[name][:], tensors[name]) for name in tensors)


@pytest.mark.parametrize(
    ("family", "flags"),
    [
        ("gpt_oss", {}),
        ("gpt_oss", {"lora_experts": "shared-outer", "lora_rank_by_topk": True}),
        ("gpt_oss", {"lora_target_modules": ("gate_proj", "down_proj", "o_proj")}),
        ("qwen3_5_moe_text", {"lora_rank_by_topk": True}),
        ("qwen3_5_moe_text", {"lora_target_modules": ("up_proj", "down_proj", "o_proj")}),
        ("qwen3_vl_moe", {}),
    ],
)
def test_adapters_of_experts_in_stacks_are_those_of_peft(
    tmp_path: Path, family: str, flags: dict[str, Any]
) -> None:
    """As they are written without being told a layout: loaded by PEFT, read, and merged."""
    base = tmp_path / "base"
    model = save_tiny(family, base)
    adapters = adapters_of(base, **flags)
    tensors = random_tensors(base, adapters)
    spec = described(base)[1]
    directory = write_adapter(tmp_path / "a", tensors, adapters, spec, base=str(base))
    assert any(".experts.base_layer.lora_B" in name for name in load_file(directory / WEIGHTS))
    adapter = read_adapter(directory, family_of(base))
    back = fitted(adapter, adapters, *described(base))
    assert back.keys() == tensors.keys()
    assert all(torch.equal(back[name][:], tensors[name]) for name in tensors)
    assert not is_loadable(adapter, spec)
    plain = read_adapter(write_plain(tmp_path / "plain", adapter, spec), family_of(base))
    again = fitted(plain, adapters, *described(base))
    assert all(torch.equal(again[name][:], tensors[name]) for name in tensors)

    wrapped = peft.PeftModel.from_pretrained(model, directory)
    seen = logits(wrapped).log_softmax(-1)
    with wrapped.disable_adapter():
        assert (logits(wrapped).log_softmax(-1) - seen).abs().max() > 0.05
    merge_adapter(base, adapter, tmp_path / "merged")
    ours = type(model).from_pretrained(tmp_path / "merged", dtype=torch.float32).eval()
    torch.testing.assert_close(logits(ours).log_softmax(-1), seen, rtol=0, atol=1e-5)
    theirs = wrapped.merge_and_unload().state_dict()
    assert all(torch.equal(weight, theirs[name]) for name, weight in ours.state_dict().items())
    stored, merged_names = HfReader(base).names(), HfReader(tmp_path / "merged").names()
    assert stored == merged_names


EXPERT_LAYERS = ("gate_proj", "up_proj", "down_proj")


@pytest.mark.parametrize(
    ("rank", "flags"),
    [
        (8, {}),
        (4, {"lora_target_modules": ("q_proj", "k_proj", "v_proj", "o_proj")}),
        (8, {"lora_target_modules": ("gate_proj", "down_proj")}),
        (8, {"lora_target_modules": ("up_proj", "down_proj", "o_proj")}),
        (4, {"lora_target_modules": EXPERT_LAYERS, "lora_rank_by_topk": True}),
        (8, {"lora_rank_by_topk": True, "lora_experts": "shared-outer"}),
    ],
)
def test_gate_and_up_that_alternate_have_one_a_in_files_for_engines(
    tmp_path: Path, bases: Any, rank: int, flags: dict[str, Any]
) -> None:
    """Whatever is adapted, and however often it is written again, it is read as it was trained."""
    base = bases("gpt_oss")
    adapters = adapters_of(base, **flags)
    tensors = random_tensors(base, adapters)
    family, spec = described(base)
    given = {"base": str(base), "layout": "per-expert"}
    source = write_adapter(tmp_path / "0", tensors, adapters, spec, **given)
    for number in ("1", "2"):
        adapter = read_adapter(source, family)
        half = {"gate_proj", "up_proj"} & adapters.targets
        assert is_loadable(adapter, spec) or len(half) == 1  # zeros of the other are not read
        assert json.loads((source / CONFIG).read_text())["r"] == rank
        gates = [name for name in load_file(source / WEIGHTS) if ".gate_proj.lora_A" in name]
        held = load_file(source / WEIGHTS)
        assert all(torch.equal(held[g], held[g.replace("gate", "up")]) for g in gates)
        back = fitted(adapter, adapters, family, spec)
        assert back.keys() == tensors.keys()
        assert all(torch.equal(back[name][:], tensors[name]) for name in tensors)
        source = rewrite_adapter(tmp_path / number, source, "per-expert", spec, base=str(base))


def test_an_a_that_gate_and_up_share_is_written_as_it_is(tmp_path: Path, bases: Any) -> None:
    """PEFT's own adapters of stacks have one A for both: engines need no second rank."""
    base = bases("gpt_oss")
    family, spec = described(base)
    adapters = adapters_of(base)
    tensors = random_tensors(base, adapters)
    for name in [name for name in tensors if ".gate_proj.lora_A" in name]:
        tensors[name.replace("gate_proj", "up_proj")] = tensors[name]
    given = {"base": str(base), "layout": "per-expert"}
    written = write_adapter(tmp_path / "a", tensors, adapters, spec, **given)
    adapter = read_adapter(written, family)
    assert adapter.rank == adapters.rank and is_loadable(adapter, spec)
    back = fitted(adapter, adapters, family, spec)
    assert all(torch.equal(back[name][:], tensors[name]) for name in tensors)


def test_config_has_the_fields_that_engines_read(bases: Any, tmp_path: Path) -> None:
    base = bases("llama")
    adapters = adapters_of(base)
    tensors = random_tensors(base, adapters, dtype=torch.bfloat16)
    write_adapter(tmp_path / "a", tensors, adapters, described(base)[1], base="org/base")
    config = json.loads((tmp_path / "a" / CONFIG).read_text())
    assert config == {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": "org/base",
        "r": 4,
        "lora_alpha": 6,
        "lora_dropout": 0.0,
        "target_modules": sorted(adapters.targets),
        "bias": "none",
        "use_rslora": False,
        "use_dora": False,
        "fan_in_fan_out": False,
        "inference_mode": True,
        "modules_to_save": None,
        "rank_pattern": {},
        "alpha_pattern": {},
        "init_lora_weights": True,
        "target_parameters": None,
        "peft_version": "0.21.2",
    }
    written = load_file(tmp_path / "a" / WEIGHTS)
    assert written.keys() == tensors.keys()
    assert all(torch.equal(written[name], tensors[name]) for name in tensors)


def test_sets_that_engines_fuse_are_complete(bases: Any, tmp_path: Path) -> None:
    """SGLang 0.5.16 fails on q without v, and on k or v without q."""
    base = bases("qwen3")
    adapters = adapters_of(base, lora_target_modules=("v_proj", "up_proj", "o_proj"))
    tensors = random_tensors(base, adapters)
    write_adapter(tmp_path / "a", tensors, adapters, described(base)[1], base=str(base))
    written = load_file(tmp_path / "a" / WEIGHTS)
    attention = "model.layers.1.self_attn."
    for leaf in ("q_proj", "k_proj"):
        for side in ("A", "B"):
            assert not written[peft_name(attention + leaf, side)].any()
    assert written[peft_name("model.layers.1.mlp.gate_proj", "B")].shape == (80, 4)
    config = json.loads((tmp_path / "a" / CONFIG).read_text())
    assert config["target_modules"] == [
        "gate_proj", "k_proj", "o_proj", "q_proj", "up_proj", "v_proj",
    ]  # fmt: skip
    back = read_adapter(tmp_path / "a")
    assert back.targets == ("o_proj", "up_proj", "v_proj")
    assert fitted(back, adapters, *described(base)).keys() == tensors.keys()


def test_a_directory_of_something_else_is_not_replaced(bases: Any, tmp_path: Path) -> None:
    base = bases("llama")
    adapters = adapters_of(base)
    tensors = random_tensors(base, adapters)
    (tmp_path / "a").mkdir()
    (tmp_path / "a" / "thesis.tex").touch()
    with pytest.raises(UserError, match="something else than an adapter"):
        write_adapter(tmp_path / "a", tensors, adapters, described(base)[1], base="b")
    again = write_adapter(tmp_path / "b", tensors, adapters, described(base)[1], base="b")
    write_adapter(again, tensors, adapters, described(base)[1], base="c")
    assert read_adapter(again).base == "c"


# -- what PEFT saves -------------------------------------------------------------------------------


def saved_by_peft(base: Path, directory: Path, seed: int = 0, **settings: Any) -> Any:
    """A PEFT model with random factors, saved; returns it."""
    model = opened(base)
    model = peft.get_peft_model(
        model, peft.LoraConfig(**{"r": 4, "lora_alpha": 6, "task_type": "CAUSAL_LM", **settings})
    )
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_" in name:
                parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.1)
    model.eval().save_pretrained(directory)
    return model


EXPERTS = ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]


@pytest.mark.parametrize(
    ("shape", "settings"),
    [
        ("llama", {"target_modules": "all-linear"}),
        ("llama", {"target_modules": r"model\.layers\.\d+\.self_attn\.[qv]_proj"}),
        ("llama", {"target_modules": ["model.layers.1.mlp.up_proj", "o_proj"]}),
        ("llama", {"target_modules": ["q_proj"], "use_rslora": True}),
        (
            "llama",
            {
                "target_modules": ["q_proj", "down_proj", "up_proj"],
                "rank_pattern": {"q_proj": 2, r"layers\.1\.mlp\.down_proj": 7},
                "alpha_pattern": {"up_proj": 3},
            },
        ),
        ("llama", {"target_modules": ["embed_tokens", "q_proj"]}),
        ("mistral", {"target_modules": ["embed_tokens", "lm_head", "q_proj"]}),
        ("qwen3_moe", {"target_modules": ["q_proj"], "target_parameters": EXPERTS}),
        ("qwen3_moe", {"target_modules": [], "target_parameters": EXPERTS[:1]}),
        ("qwen3_moe", {"target_modules": [], "target_parameters": EXPERTS[1:]}),
        ("qwen3_moe", {"target_modules": ["gate_proj", "up_proj", "down_proj"]}),
        ("qwen3_moe", {"target_modules": "all-linear"}),
        ("minimax_m2", {"target_modules": ["q_proj"], "target_parameters": EXPERTS}),
        ("minimax_m2", {"target_modules": "all-linear"}),  # routers have other names in files
        ("gpt_oss", {"target_modules": ["q_proj"], "target_parameters": EXPERTS}),
        ("gpt_oss", {"target_modules": [], "target_parameters": EXPERTS[:1]}),
    ],
)
def test_what_peft_saves_is_read(
    bases: Any, tmp_path: Path, shape: str, settings: dict[str, Any]
) -> None:
    base = bases(shape)
    model = saved_by_peft(base, tmp_path / "a", **settings)
    seen = logits(model)
    adapter = read_adapter(tmp_path / "a", family_of(base))
    assert adapter.base == str(base)
    assert all(
        source.shape[0 if name.endswith("A.weight") or "embedding_A" in name else 1] == adapter.rank
        for name, source in adapter.tensors.items()
    )
    if adapter.targets == ("embed_tokens", "q_proj"):  # tied: as PEFT merges it
        seen = logits(model.merge_and_unload())
    merge_adapter(base, adapter, tmp_path / "merged")
    ours = AutoModelForCausalLM.from_pretrained(tmp_path / "merged", dtype=torch.float32)
    torch.testing.assert_close(logits(ours), seen, rtol=1e-5, atol=1e-4)


@pytest.mark.parametrize(
    ("shape", "settings"),
    [
        ("llama", {"target_modules": ["q_proj", "down_proj"], "layers_to_transform": [1]}),
        ("llama", {"target_modules": r".*\.layers\.0\.mlp\.up_proj|.*\.1\..*v_proj"}),
        ("llama", {"target_modules": ["up_proj"], "exclude_modules": r".*\.0\..*"}),
        ("llama", {"target_modules": ["up_proj", "o_proj"], "exclude_modules": ["o_proj"]}),
        ("qwen3_moe", {"target_modules": r".*\.1\..*(q|gate|up|down)_proj"}),
        ("qwen3_moe", {"target_modules": [], "target_parameters": ["experts.gate_up_proj"]}),
        ("mistral3", {"target_modules": r".*language_model.*\.1\..*(q|up)_proj"}),
    ],
)
def test_engines_load_adapters_of_some_layers(
    bases: Any, tmp_path: Path, shape: str, settings: dict[str, Any]
) -> None:
    """And PEFT loads what is written for them."""
    base = bases(shape)
    model = saved_by_peft(base, tmp_path / "a", **settings)
    family, spec = described(base)
    adapter = read_adapter(tmp_path / "a", family)
    assert not is_loadable(adapter, spec)
    written = write_plain(tmp_path / "plain", adapter, spec)
    scheduler = make_scheduler(base)
    sequence = make_sequence(PROMPT[0].tolist(), max_new_tokens=0, logprob_start=0)
    sequence.adapter = AdapterTable(scheduler.store).load_directory("a", str(written))
    run(scheduler, [sequence])
    theirs = logits(model)[0, :-1].log_softmax(-1).gather(1, PROMPT[0, 1:, None])[:, 0]
    assert torch.allclose(torch.tensor(sequence.input_logprobs), theirs, atol=1e-5)
    assert read_adapter(written, family).names() == adapter.names()
    assert torch.allclose(logits(loaded_by_peft(base, written)), logits(model), atol=1e-5)


@pytest.mark.parametrize(
    ("shape", "targets"),
    [("llama", "all-linear"), ("mistral", ["embed_tokens", "lm_head", "down_proj"])],
)
def test_a_merge_has_the_bits_of_merge_and_unload(
    bases: Any, tmp_path: Path, shape: str, targets: Any
) -> None:
    base = bases(shape)
    model = saved_by_peft(base, tmp_path / "a", target_modules=targets)
    theirs = model.merge_and_unload().state_dict()
    reader = HfReader(base)
    spec = described(base)[1]
    ours = dict(merged(reader, sorted(reader.names()), read_adapter(tmp_path / "a"), spec))
    assert ours.keys() <= theirs.keys()
    assert all(torch.equal(ours[name], theirs[name]) for name in ours)


def test_a_merge_rounds_once(bases: Any, tmp_path: Path) -> None:
    base = save_tiny_model(tmp_path / "base", "llama")
    model = AutoModelForCausalLM.from_pretrained(base, dtype=torch.bfloat16)
    model.save_pretrained(base)
    adapters = adapters_of(base)
    tensors = random_tensors(base, adapters)
    directory = write_adapter(tmp_path / "a", tensors, adapters, described(base)[1], base="b")
    merge_adapter(base, read_adapter(directory), tmp_path / "merged")
    module = "model.layers.1.mlp.down_proj"
    up, down = (tensors[peft_name(module, side)].double() for side in ("B", "A"))
    exact = HfReader(base)[f"{module}.weight"][:].double() + 1.5 * up @ down
    found = HfReader(tmp_path / "merged")[f"{module}.weight"][:]
    assert found.dtype == torch.bfloat16
    assert (found.double() - exact).abs().max() <= (exact.abs().max() * 2**-8)


# -- round trips -----------------------------------------------------------------------------------


@settings(max_examples=30, deadline=None)
@given(
    family=st.sampled_from(["llama", "qwen3", "qwen3_moe", "glm4", "glm4_moe", "deepseek_v3"]),
    layout=st.sampled_from(LAYOUTS),
    experts=st.sampled_from(["per-expert", "shared-outer"]),
    rank=st.sampled_from([2, 4, 6]),
    by_topk=st.booleans(),
    dtype=st.sampled_from([torch.float32, torch.bfloat16]),
    excluded=st.sets(st.sampled_from(["q_proj", "o_proj", "k_proj", "kv_b_proj"])),
    seed=st.integers(0, 99),
)
def test_round_trip_is_the_identity(
    tmp_path_factory: pytest.TempPathFactory,
    family: str,
    layout: ExpertLayout,
    experts: str,
    rank: int,
    by_topk: bool,
    dtype: torch.dtype,
    excluded: set[str],
    seed: int,
) -> None:
    base = config_of(family)
    table, spec = described(base)
    known = {name.split(".")[-2] for name, _ in table.hf_tensors(spec)}
    flags: dict[str, Any] = {"lora_rank": rank, "lora_exclude_modules": tuple(excluded & known)}
    if spec.num_experts:
        flags |= {"lora_experts": experts, "lora_rank_by_topk": by_topk}
    adapters = AdapterConfig.for_model(LoraConfig(**flags), table, spec)
    tensors = random_tensors(base, adapters, seed, dtype)
    directory = tmp_path_factory.mktemp("adapter") / "a"
    write_adapter(directory, tensors, adapters, spec, base="b", layout=layout)
    back = fitted(read_adapter(directory), adapters, table, spec)
    assert back.keys() == tensors.keys()
    assert all(torch.equal(back[name][:], tensors[name]) for name in tensors)
    assert all(tuple(back[name].shape) == tuple(tensors[name].shape) for name in tensors)
    assert all(torch.equal(back[name][1:2], tensors[name][1:2]) for name in tensors)


# -- what is refused -------------------------------------------------------------------------------


def changed(directory: Path, **fields: Any) -> None:
    config = json.loads((directory / CONFIG).read_text()) | fields
    (directory / CONFIG).write_text(json.dumps(config))


@pytest.mark.parametrize(
    ("fields", "word"),
    [
        ({"peft_type": "IA3"}, "IA3"),
        ({"use_dora": True}, "DoRA"),
        ({"bias": "lora_only"}, "biases"),
        ({"modules_to_save": ["lm_head"]}, "lm_head"),
        ({"init_lora_weights": "pissa_niter_4"}, "pissa"),
        ({"use_qalora": True}, "use_qalora"),
        ({"trainable_token_indices": [1]}, "trainable_token_indices"),
        ({"rank_pattern": {"q_proj": 3}}, "rank 3"),
        ({"target_modules": ["k_proj"]}, "no target"),
    ],
)
def test_other_adapters_are_refused_by_name(
    bases: Any, tmp_path: Path, fields: dict[str, Any], word: str
) -> None:
    base = bases("llama")
    adapters = adapters_of(base, lora_target_modules=("q_proj", "k_proj", "v_proj"))
    tensors = random_tensors(base, adapters)
    directory = write_adapter(tmp_path / "a", tensors, adapters, described(base)[1], base="b")
    changed(directory, **fields)
    with pytest.raises(UserError, match=word):
        read_adapter(directory)


@pytest.mark.parametrize(
    ("change", "word"),
    [
        (lambda tensors: tensors.pop(peft_name("model.layers.0.mlp.up_proj", "B")), "no lora_B"),
        (
            lambda tensors: tensors.update({"base_model.model.lm_head.weight": torch.ones(2)}),
            "lm_h",
        ),
        (
            lambda tensors: tensors.update(
                {peft_name("model.layers.0.mlp.up_proj", "A"): torch.ones(3, 48)}
            ),
            "rank 4",
        ),
        (lambda tensors: tensors.clear(), "no module"),
    ],
)
def test_faulty_tensors_are_refused_by_name(
    bases: Any, tmp_path: Path, change: Any, word: str
) -> None:
    base = bases("llama")
    adapters = adapters_of(base)
    tensors = random_tensors(base, adapters)
    directory = write_adapter(tmp_path / "a", tensors, adapters, described(base)[1], base="b")
    change(tensors)
    save_file(tensors, directory / WEIGHTS)
    with pytest.raises(UserError, match=word):
        read_adapter(directory)


def test_files_that_are_missing_or_damaged(bases: Any, tmp_path: Path) -> None:
    with pytest.raises(UserError, match="no PEFT adapter"):
        read_adapter(bases("llama"))
    (tmp_path / CONFIG).write_text('{"peft_type": "LORA"}')
    with pytest.raises(UserError, match=WEIGHTS):
        read_adapter(tmp_path)
    (tmp_path / WEIGHTS).write_bytes(b"version https://git-lfs")
    with pytest.raises(UserError, match="readable safetensors"):
        read_adapter(tmp_path)
    (tmp_path / CONFIG).write_text("[")
    with pytest.raises(UserError, match="damaged"):
        read_adapter(tmp_path)


@pytest.mark.parametrize(
    ("flags", "word"),
    [
        ({"lora_rank": 8}, "--lora-rank 4"),
        ({"lora_target_modules": ("q_proj",)}, "no target"),
        ({"lora_exclude_modules": ()}, "all targets"),
    ],
)
def test_flags_that_do_not_fit_the_adapter(
    bases: Any, tmp_path: Path, flags: dict[str, Any], word: str
) -> None:
    base = bases("llama")
    family, spec = described(base)
    excluded = {"lora_exclude_modules": ("down_proj",)}
    adapters = adapters_of(base, **excluded)
    tensors = random_tensors(base, adapters)
    directory = write_adapter(tmp_path / "a", tensors, adapters, spec, base="b")
    chosen = LoraConfig(**({"lora_rank": 4} | excluded | flags))
    if "lora_target_modules" in flags:
        chosen = LoraConfig(lora_rank=4, **flags)
    with pytest.raises(UserError, match=word):
        fitted(read_adapter(directory), AdapterConfig.for_model(chosen, family, spec), family, spec)


def test_another_alpha_is_folded(bases: Any, tmp_path: Path) -> None:
    base = bases("llama")
    family, spec = described(base)
    adapters = adapters_of(base)
    tensors = random_tensors(base, adapters)
    directory = write_adapter(tmp_path / "a", tensors, adapters, spec, base="b")
    twice = AdapterConfig.for_model(LoraConfig(lora_rank=4, lora_alpha=12.0), family, spec)
    for name, source in fitted(read_adapter(directory), twice, family, spec).items():
        factor = 0.5 if "lora_B" in name else 1.0
        assert torch.equal(source[:], tensors[name] * factor)


def test_experts_that_differ_do_not_become_one(bases: Any, tmp_path: Path) -> None:
    base = bases("qwen3_moe")
    family, spec = described(base)
    adapters = adapters_of(base)
    tensors = random_tensors(base, adapters)
    directory = write_adapter(tmp_path / "a", tensors, adapters, spec, base="b")
    shared = adapters_of(base, lora_experts="shared-outer")
    sources = fitted(read_adapter(directory), shared, family, spec)
    name = next(name for name in sources if ".experts.gate_proj" in name)
    with pytest.raises(UserError, match="per-expert"):
        sources[name][:]
    assert module_of(name).endswith("experts.gate_proj")


def test_an_adapter_of_another_model_is_not_merged(bases: Any, tmp_path: Path) -> None:
    base = bases("qwen3")
    adapters = adapters_of(base)
    tensors = random_tensors(base, adapters)
    directory = write_adapter(tmp_path / "a", tensors, adapters, described(base)[1], base="org/b")
    with pytest.raises(UserError, match=r"does not fit|does not belong") as error:
        merge_adapter(bases("llama"), read_adapter(directory), tmp_path / "merged")
    assert "org/b" in error.value.fix
    assert not (tmp_path / "merged").exists()
