"""Tensors that an engine fuses as it loads them share a bucket on every way; the receipt names a
torn pair."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file

from slime.config import make_config
from slime.engines.launch import EnginePlace
from slime.engines.sglang import load_marks, weight_probe
from slime.engines.sglang.load_marks import LoadMarks
from slime.engines.wire.buckets import pack
from slime.models import FAMILIES, family_of, ignore_list
from slime.models.deepseek_v3 import DEEPSEEK_V3
from slime.models.fused_loading import LoadGroups
from slime.models.quantised import Fp8, Int4, Quantisation
from slime.weights import route
from slime.weights.receipt import Sampler, WeightMismatch, kinds_of
from slime.weights.source import ModelSource, QuantisedSource
from slime.weights.sync import WeightSync
from slime.weights.transport import EngineSlots
from tests.support import stage_jobs
from tests.support.embedded_models import save_tiny_model
from tests.support.fake_weight_engine import FakeWeightEngine
from tests.support.hf_configs import config_of
from tests.support.megatron_jobs import make_model
from tests.support.megatron_stub import MegatronStub, random_hf
from tests.support.sglang_servers import FakeSGLang, fake_sglang
from tests.support.trainer_ranks import Pools

HF_CONFIG = config_of("deepseek_v3")
SPEC = DEEPSEEK_V3.model_spec(HF_CONFIG)
GROUPS = DEEPSEEK_V3.load_groups(SPEC)
NAMES = [name for name, _ in DEEPSEEK_V3.hf_tensors(SPEC)]
ATTENTION = "model.layers.{}.self_attn."
PAIR = ("q_a_proj", "kv_a_proj_with_mqa")


def pair(layer: int, leaf: str = "weight") -> tuple[str, ...]:
    return tuple(f"{ATTENTION.format(layer)}{part}.{leaf}" for part in PAIR)


# -- what belongs together -------------------------------------------------------------------------


@pytest.mark.parametrize("leaf", ["weight", "weight_scale_inv", "weight_scale", "weight_packed"])
def test_parts_belong_together_by_the_last_part_of_their_names(leaf: str) -> None:
    for name in pair(3, leaf):
        assert GROUPS.members(name) == pair(3, leaf)
    assert GROUPS.members(f"{ATTENTION.format(3)}q_b_proj.{leaf}") == ()


def test_every_layer_of_the_model_has_one_group() -> None:
    assert GROUPS.among(NAMES) == [pair(layer) for layer in range(SPEC.num_layers)]


def test_queries_that_are_not_compressed_have_no_group() -> None:
    spec = DEEPSEEK_V3.model_spec({**HF_CONFIG, "q_lora_rank": None})
    groups = DEEPSEEK_V3.load_groups(spec)
    assert groups.among(dict(DEEPSEEK_V3.hf_tensors(spec))) == []


@pytest.mark.parametrize("family", FAMILIES, ids=lambda family: family.name)
def test_declared_parts_are_tensors_of_the_family(family: Any) -> None:
    known = {name for rule in family.rules for name in rule.hf_names}
    for fused in family.fused:
        assert {f"{part}.weight" for part in fused.parts} <= known
        assert f"{fused.fused}.weight" not in known and fused.source


def test_half_of_a_pair_cannot_be_quantised() -> None:
    weights = ignore_list.matrices(DEEPSEEK_V3, SPEC)
    half = Quantisation("fp8", Fp8((16, 16)), ("lm_head", r"re:.*kv_a_proj_with_mqa"))
    found = ignore_list.examine(weights, half)
    assert set(found.torn) == {
        f"{ATTENTION.format(n)}fused_qkv_a_proj_with_mqa" for n in range(SPEC.num_layers)
    }
    assert not ignore_list.examine(weights, Quantisation("fp8", Fp8((16, 16)), ("lm_head",))).torn


# -- buckets ---------------------------------------------------------------------------------------


@st.composite
def grouped(draw: st.DrawFn) -> tuple[list[tuple[str, torch.Tensor]], dict[str, tuple[str, ...]]]:
    """Tensors in any order, and which of them belong together."""
    tensors, groups = [], dict[str, tuple[str, ...]]()
    for number in range(draw(st.integers(1, 10))):
        dtype = draw(st.sampled_from([torch.float32, torch.bfloat16, torch.uint8]))
        size = draw(st.integers(1, 4))
        names = tuple(f"t{number}.{place}" for place in range(size))
        groups |= dict.fromkeys(names, names) if size > 1 else {}
        for name in names:
            tensors.append((name, torch.randint(0, 100, (draw(st.integers(0, 9)), 3)).to(dtype)))
    return draw(st.permutations(tensors)), groups


@settings(max_examples=80)
@given(drawn=grouped(), limit=st.integers(1, 400))
def test_no_group_is_split_whatever_sizes_and_order(drawn: Any, limit: int) -> None:
    tensors, groups = drawn
    buckets = list(pack(iter(tensors), limit, together=lambda name: groups.get(name, ())))
    names = [entry.name for bucket in buckets for entry in bucket.entries]
    assert sorted(names) == sorted(name for name, _ in tensors)  # each once
    sent = {name: tensor for bucket in buckets for name, tensor in bucket.tensors}
    assert all(torch.equal(sent[name], tensor) for name, tensor in tensors)
    where = {
        entry.name: number for number, bucket in enumerate(buckets) for entry in bucket.entries
    }
    assert all(len({where[name] for name in group}) == 1 for group in groups.values())
    sizes = {name: tensor.numel() * tensor.element_size() for name, tensor in tensors}
    largest = max(sum(sizes[member] for member in groups.get(name, (name,))) for name in sizes)
    assert max(bucket.nbytes for bucket in buckets) <= max(limit, largest)


def test_a_group_that_is_not_sent_whole_is_an_error() -> None:
    both: Any = {"a": ("a", "b"), "b": ("a", "b")}.__getitem__
    with pytest.raises(ValueError, match=r"not sent: \['b'\]"):
        list(pack([("a", torch.zeros(1))], 100, together=both))
    with pytest.raises(ValueError, match="different dtypes"):
        list(pack([("a", torch.zeros(1)), ("b", torch.zeros(1).bfloat16())], 100, together=both))


@pytest.mark.parametrize("scheme", [Fp8((16, 16)), Int4(16)], ids=str)
def test_weights_and_scales_of_quantised_pairs_are_kept_together(scheme: Fp8 | Int4) -> None:
    if isinstance(scheme, Int4):
        pytest.importorskip("compressed_tensors", reason="the quantised extra is not installed")
    weights = ignore_list.matrices(DEEPSEEK_V3, SPEC)
    plain = {
        matrix.kernel for matrix in weights if scheme.misfit(matrix.shape) or not matrix.is_linear
    }
    ignored = [matrix.module for matrix in weights if matrix.kernel in plain]
    method = "fp8" if isinstance(scheme, Fp8) else "compressed-tensors"
    quantisation = Quantisation(method, scheme, ("lm_head", *ignored))
    stub = MegatronStub(DEEPSEEK_V3, SPEC, random_hf(DEEPSEEK_V3, SPEC))
    export = QuantisedSource(ModelSource([stub], HF_CONFIG), quantisation, torch.bfloat16)
    groups = GROUPS.among(export.names())
    assert len(groups) > SPEC.num_layers
    for limit in (1, 3000, 1 << 20):
        buckets = pack(export.tensors(), limit, torch.bfloat16, together=GROUPS.members)
        names = [{entry.name for entry in bucket.entries} for bucket in buckets]
        assert all(any(set(group) <= bucket for bucket in names) for group in groups)


# -- pushes to SGLang ------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_model(tmp_path_factory.mktemp("models") / "deepseek", "deepseek_v3")


@pytest.fixture(scope="module")
def server(
    model_dir: Path, sglang_stand_in: None, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[FakeSGLang]:
    config = run_config(model_dir, colocate=True)
    with fake_sglang(config, model_dir, tmp_path_factory.mktemp("log"), EnginePlace(number=0)) as [
        found
    ]:
        yield found


def run_config(model_dir: Path, **flags: Any) -> Any:
    words = {"rollout_engine": "sglang", "fp32": True, "rollout_batch_size": 4, "num_rollout": 1}
    return make_config(**words, hf_checkpoint=str(model_dir), **flags)  # type: ignore[arg-type]


def connected(model_dir: Path, server: FakeSGLang, seed: int, **flags: Any) -> WeightSync:
    generator = torch.Generator().manual_seed(seed)
    start = load_file(model_dir / "model.safetensors")
    new = {name: torch.randn(tensor.shape, generator=generator) for name, tensor in start.items()}
    hf_config = json.loads((model_dir / "config.json").read_text())
    family = family_of(hf_config)
    stub = MegatronStub(family, family.model_spec(hf_config), new)
    sync = WeightSync(run_config(model_dir, **flags), [stub], hf_config)
    sync.connect([EngineSlots(server.url, (0,))])
    return sync


WAYS = {
    "IPC handles": {"colocate": True},
    "gloo broadcast": {},
    "disk": {"update_weight_transport": "disk"},
}


@pytest.mark.parametrize(
    ("way", "size"),
    [
        ("IPC handles", 6_000),
        ("gloo broadcast", 20_000),
        ("disk", 1),
    ],
)
def test_pairs_arrive_at_any_bucket_size(
    server: FakeSGLang, model_dir: Path, tmp_path: Path, way: str, size: int
) -> None:
    flags: dict[str, Any] = dict(WAYS[way])
    if way == "disk":
        flags["update_weight_disk_dir"] = str(tmp_path / "push")
    sync = connected(model_dir, server, size, update_weight_buffer_size=size, **flags)
    groups = sync._load_groups.among(sync._names)
    assert groups
    compared = []
    for _ in range(2):
        receipt = sync.push()
        assert receipt.transport == way and receipt.loaded == receipt.num_tensors == len(
            sync._names
        )
        compared.append([set(group) & set(receipt.checked) for group in groups])
        assert all(compared[-1])
        assert all(set(kind) & set(receipt.checked) for kind in kinds_of(sync._names))
    assert "known to be loaded" in str(receipt)
    sync.close()


@pytest.mark.parametrize("way", ["IPC handles", "gloo broadcast"])
def test_a_torn_pair_is_named_by_the_receipt(server: FakeSGLang, model_dir: Path, way: str) -> None:
    sync = connected(model_dir, server, 3, update_weight_buffer_size=6_000, **WAYS[way])
    transport: Any = sync._transport
    packing = transport.packing
    transport.packing = replace(packing, together=None)
    with pytest.raises(WeightMismatch) as caught:
        sync.push()
    lost = {line.split()[0] for line in caught.value.mismatches}
    assert lost == {name for group in sync._load_groups.among(sync._names) for name in group}
    q, kv = pair(0)
    assert (
        f"{q} was sent and not loaded by {server.url} (SGLang loads it only together with {kv})"
        in str(caught.value)
    )
    transport.packing = packing
    assert sync.push().loaded == len(sync._names)
    sync.close()


def test_every_weight_of_a_pair_is_compared_where_all_are(
    server: FakeSGLang, model_dir: Path
) -> None:
    sync = connected(
        model_dir, server, 4, update_weight_buffer_size=6_000, check_weight_update_equal=True
    )
    receipt = sync.push()
    assert receipt.full and set(receipt.checked) == set(sync._names)
    sync.close()


# -- pushes to other engines -----------------------------------------------------------------------


def assert_together(engine: FakeWeightEngine, groups: list[tuple[str, ...]]) -> None:
    assert groups and len(engine.loads) > len(groups)
    for group in groups:
        assert all(set(group) <= names or not set(group) & names for names in engine.loads)


@pytest.mark.parametrize("way", ["shared memory", "gloo broadcast"])
def test_embedded_engines_get_pairs_together(monkeypatch: pytest.MonkeyPatch, way: str) -> None:
    if way == "gloo broadcast":
        monkeypatch.setattr(route, "is_local", lambda url: False)
    new = random_hf(DEEPSEEK_V3, SPEC, seed=2)
    with FakeWeightEngine(random_hf(DEEPSEEK_V3, SPEC, seed=1)) as engine:
        stub = MegatronStub(DEEPSEEK_V3, SPEC, new)
        sync = WeightSync(make_config(update_weight_buffer_size=3000), [stub], HF_CONFIG)
        sync.connect([engine.url])
        receipt = sync.push()
        assert receipt.transport == way and receipt.loaded == receipt.num_tensors == len(new)
        assert_together(engine, GROUPS.among(new))
        assert all(torch.equal(engine.tensors[name], tensor) for name, tensor in new.items())
        sync.close()


def test_a_tensor_that_an_engine_drops_is_named() -> None:
    start = random_hf(DEEPSEEK_V3, SPEC, seed=1)
    with FakeWeightEngine(start) as engine:
        sync = WeightSync(make_config(), [MegatronStub(DEEPSEEK_V3, SPEC, start)], HF_CONFIG)
        sync.connect([engine.url])
        load = engine._load

        def without(tensors: Any, body: dict[str, Any]) -> None:
            load([one for one in tensors if one[0] != "model.norm.weight"], body)

        engine._load = without  # type: ignore[method-assign]
        with pytest.raises(
            WeightMismatch, match=r"model\.norm\.weight was sent and not loaded by http"
        ):
            sync.push()
        sync.close()


@pytest.mark.parametrize("layout", ["PP2", "TP2"])
def test_layers_that_are_gathered_keep_their_pairs(
    ranks: Pools, tmp_path: Path, layout: str
) -> None:
    flags: dict[str, Any] = {"update_weight_buffer_size": 6_000}
    flags |= (
        {"pipeline_model_parallel_size": 2}
        if layout == "PP2"
        else {"tensor_model_parallel_size": 2}
    )
    model = make_model(tmp_path / "model", "deepseek_v3")
    start = load_file(model / "model.safetensors")
    with FakeWeightEngine(start) as engine:
        found = ranks.run(2, stage_jobs.push_twice, model, flags, [EngineSlots(engine.url, ())])
        spec = DEEPSEEK_V3.model_spec(model)
        assert_together(engine, DEEPSEEK_V3.load_groups(spec).among(start))
    assert {receipt.loaded for receipt in found[0]["receipts"]} == {len(start)}


# -- what an SGLang process is asked ---------------------------------------------------------------


@settings(max_examples=100)
@given(
    shape=st.lists(st.integers(1, 5), max_size=3),
    dtype=st.sampled_from(
        [
            torch.float32,
            torch.bfloat16,
            torch.float16,
            torch.float8_e4m3fn,
            torch.int32,
            torch.int64,
            torch.uint8,
        ]
    ),
    turned=st.booleans(),
)
def test_a_mark_stays_until_its_tensor_is_loaded(
    shape: list[int], dtype: torch.dtype, turned: bool
) -> None:
    def made() -> torch.Tensor:
        tensor = torch.randint(0, 100, shape).to(dtype)
        return tensor.permute(tuple(reversed(range(tensor.dim())))) if turned else tensor

    held = {"one": made(), "other": made(), "empty": torch.zeros(0, 3, dtype=dtype)}
    marks = LoadMarks(held)
    marks.set()
    assert len(marks) == 2 and marks.untouched() == ["one", "other"]
    held["one"].copy_(made())
    assert marks.untouched() == ["other"]
    held["other"].copy_(made())
    assert marks.untouched() == []


def test_marks_are_of_the_last_push() -> None:
    model = torch.nn.Linear(2, 2)
    weight = torch.zeros(3)
    assert load_marks.untouched(model) == []
    for names in (["w"], ["v", "w"], []):
        load_marks.forget(model)
        found = dict.fromkeys(names, weight)
        assert load_marks.mark(model, lambda found=found: found, keep=True) == len(names)
        assert load_marks.untouched(model) == names
        assert load_marks.untouched(model) == []  # they are read once


def test_places_are_found_again_where_parameters_have_moved() -> None:
    model = torch.nn.Linear(2, 2)

    def mark() -> list[str]:
        load_marks.mark(model, lambda: {"weight": model.weight}, keep=True)
        return load_marks.untouched(model)

    assert mark() == ["weight"] and model.weight[0].isnan().all()
    old = model.weight.data
    model.weight.data = torch.zeros(2, 2)
    old.zero_()
    assert mark() == ["weight"] and model.weight[0].isnan().all() and not old.any()


@pytest.mark.usefixtures("sglang_stand_in")
def test_the_probe_finds_a_shared_expert_behind_the_routed_ones() -> None:
    """SGLang stacks them so for models of the shape of DeepSeek-V3."""
    owner = "model.layers.1.mlp"
    model, routed, inner, hidden = torch.nn.Module(), 3, 4, 6
    experts: Any = torch.nn.Module()
    experts.w13_weight = torch.nn.Parameter(torch.randn(routed + 1, 2 * inner, hidden))
    experts.w2_weight = torch.nn.Parameter(torch.randn(routed + 1, hidden, inner))
    experts.num_fused_shared_experts, experts._num_local_routed = 1, routed
    module = model
    for part in owner.split("."):
        module.add_module(part, torch.nn.Module())
        module = module._modules[part]  # type: ignore[assignment]
    module.add_module("experts", experts)
    tree = weight_probe.Tree(model)
    parts = {
        "gate": ((inner, hidden), experts.w13_weight[routed, :inner]),
        "up": ((inner, hidden), experts.w13_weight[routed, inner:]),
        "down": ((hidden, inner), experts.w2_weight[routed]),
    }
    for projection, (shape, expected) in parts.items():
        held = tree.find(f"{owner}.shared_experts.{projection}_proj.weight", shape)
        assert held is not None and torch.equal(held.tensor, expected)
    assert tree.find(f"{owner}.experts.{routed}.gate_proj.weight", (inner, hidden)) is None
    experts.num_fused_shared_experts = 0
    assert tree.find(f"{owner}.shared_experts.gate_proj.weight", (inner, hidden)) is None


# -- the sample ------------------------------------------------------------------------------------


@settings(max_examples=50)
@given(num_layers=st.integers(1, 6), pushes=st.integers(1, 8))
def test_every_push_compares_each_kind_and_each_group(num_layers: int, pushes: int) -> None:
    names = ["model.embed_tokens.weight"]
    for layer in range(num_layers):
        names += [f"model.layers.{layer}.input_layernorm.weight", *pair(layer)]
    groups, kinds = LoadGroups(DEEPSEEK_V3.fused, SPEC).among(names), kinds_of(names)
    assert len(kinds) == 4 and sorted(name for kind in kinds for name in kind) == sorted(names)
    sampler = Sampler(floor=0.0, digest=lambda name, tensor: "f", always=[*kinds, *groups])
    seen = set[str]()
    for _ in range(pushes):
        sampler.begin(last_push_seconds=0.0, full=False)
        for name in names:
            sampler.observe(name, torch.zeros(1))
        sampler.end()
        taken = set(sampler.fingerprints)
        assert all(taken & set(one) for one in [*kinds, *groups])
        seen |= taken
    if pushes > 1:
        assert {name for group in groups for name in group} <= seen
