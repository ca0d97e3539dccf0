"""The push of adapters: what is sent, under which name, and every fault that is refused before."""

from __future__ import annotations

import base64
import io
import pickle
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from math import prod
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from slime.config import make_config
from slime.config.groups_lora import LoraConfig
from slime.embedded.weight_update import ABILITIES as EMBEDDED
from slime.engines.adapters import as_served
from slime.engines.sglang.adapter_probe import adapter_fingerprints
from slime.engines.wire.abilities import SGLANG, Abilities
from slime.engines.wire.buckets import fingerprint
from slime.errors import UserError
from slime.models import family_of
from slime.models.adapters import AdapterConfig, adapter_family, count_parameters
from slime.models.parameters import ModelParameters
from slime.weights import adapter_sync
from slime.weights.adapter_checks import (
    check_engine,
    check_names,
    check_sets,
    check_values,
    has_visibly_learned,
)
from slime.weights.adapter_layout import AdapterLayout, LargestValues
from slime.weights.adapter_sync import AdapterBuffer, AdapterSync
from slime.weights.receipt import WeightMismatch
from tests.support.fake_adapter_engine import FakeAdapterEngine
from tests.support.hf_configs import config_of
from tests.support.megatron_stub import MegatronStub, random_hf

PREFIX = "base_model.model.model.layers.0."


class Model:
    """A model's tables, and random weights with adapters in a stub of the trainer's model."""

    def __init__(self, name: str = "qwen2", **flags: Any) -> None:
        self.config = config_of(name)
        self.family = family_of(self.config)
        self.spec = self.family.model_spec(self.config)
        self.adapters = AdapterConfig.for_model(
            LoraConfig(**{"lora_rank": 4, **flags}), self.family, self.spec
        )
        self.parameters = ModelParameters(self.family, self.spec, adapters=self.adapters)
        self.layout = AdapterLayout.of(self.parameters)
        self.table = adapter_family(self.family, self.spec, self.adapters)
        self.base = random_hf(self.family, self.spec, seed=1)
        self.trained = random_hf(self.table, self.spec, seed=2)

    def stub(self) -> MegatronStub:
        stub = MegatronStub(self.family, self.spec, self.base)
        adapters = MegatronStub(self.table, self.spec, self.trained)
        for name, parameter in adapters.named_parameters():
            stub._place(name, parameter.detach())
        return stub

    def sync(self, **flags: Any) -> AdapterSync:
        return AdapterSync(make_config(**flags), [self.stub()], self.config, self.adapters)


@pytest.fixture
def model() -> Model:
    return Model()


@pytest.fixture
def engines(model: Model) -> Iterator[list[FakeAdapterEngine]]:
    with ExitStack() as stack:
        yield [stack.enter_context(FakeAdapterEngine(model.base)) for _ in range(2)]


def connected(engines: list[FakeAdapterEngine], model: Model) -> AdapterSync:
    sync = model.sync()
    sync.connect([engine.url for engine in engines])
    return sync


# -- what is sent ----------------------------------------------------------------------------------


def test_each_version_has_its_name_and_requests_go_on(
    engines: list[FakeAdapterEngine], model: Model
) -> None:
    sync = connected(engines, model)
    receipt = sync.push()
    for engine in engines:
        assert list(engine.adapters) == ["policy-1"]
        for name, tensor in engine.adapters["policy-1"].items():
            assert torch.equal(tensor, model.trained[name])
        assert not {"/pause_generation", "/flush_cache", "/abort_request"} & set(engine.calls)
        assert not any("update_weights" in path for path in engine.calls)
        assert engine.weight_version == "1"
    assert receipt.adapter == "policy-1" and receipt.full
    assert receipt.num_tensors == receipt.loaded == len(model.trained)
    assert receipt.nbytes == 4 * sum(t.numel() for t in model.trained.values())
    assert receipt.fingerprints == {n: fingerprint(t) for n, t in model.trained.items()}
    assert set(receipt.checked) == set(model.trained)
    assert sync.push().adapter == "policy-2"
    assert list(engines[0].adapters) == ["policy-1", "policy-2"]
    sync.close()


def test_fingerprints_are_those_of_the_engines_dtype(model: Model) -> None:
    with FakeAdapterEngine(model.base, torch.bfloat16) as engine:
        sync = connected([engine], model)
        receipt = sync.push()
        name, tensor = next(iter(model.trained.items()))
        assert receipt.fingerprints[name] == fingerprint(tensor.to(torch.bfloat16))
        assert engine.adapters["policy-1"][name].dtype == torch.bfloat16
        sync.close()


def test_a_push_that_is_repeated_replaces_what_it_had_loaded(
    engines: list[FakeAdapterEngine], model: Model
) -> None:
    sync = connected(engines, model)
    engines[1].fail["/load_lora_adapter_from_tensors"] = "no room"
    with pytest.raises(UserError, match="no room"):
        sync.push()
    assert list(engines[0].adapters) == ["policy-1"]
    engines[1].fail.clear()
    assert sync.push().version == 1
    assert engines[0].calls.count("/unload_lora_adapter") == 1
    assert [list(engine.adapters) for engine in engines] == [["policy-1"]] * 2
    sync.close()


@pytest.mark.parametrize("experts", ["per-expert", "shared-outer"])
@pytest.mark.parametrize(
    ("family", "owner", "leaves"),
    [
        ("qwen3_moe", "mlp", ("up_proj", "down_proj")),
        ("mixtral", "block_sparse_moe", ("w3", "w2")),
        ("qwen3_5_moe_text", "mlp", ("gate_proj", "down_proj")),
    ],
)
def test_experts_are_stacked(
    experts: str, family: str, owner: str, leaves: tuple[str, str]
) -> None:
    model = Model(family, lora_experts=experts)
    sent = laid_out(model)
    layer = f"{PREFIX}{owner}.experts."
    count = model.spec.num_experts
    # of the inner layers experts share A, of the outer one B
    for leaf, shared, single in zip(leaves, "AB", "BA"):
        outer = sent[f"{layer}{leaf}.lora_{shared}.weight"]
        inner = sent[f"{layer}{leaf}.lora_{single}.weight"]
        assert len(outer) == (1 if experts == "shared-outer" else count) and len(inner) == count
        for expert in range(count):
            whole = model.trained.get(f"{layer}{leaf}.lora_{shared}.weight")
            own = model.trained.get(f"{layer}{expert}.{leaf}.lora_{shared}.weight", whole)
            assert torch.equal(outer[min(expert, len(outer) - 1)], own)
            alone = model.trained[f"{layer}{expert}.{leaf}.lora_{single}.weight"]
            assert torch.equal(inner[expert], alone)
    assert sum(t.count_nonzero() for t in sent.values()) == sum(
        t.count_nonzero() for t in model.trained.values()
    )


def test_a_lower_rank_of_experts_gives_the_same_products() -> None:
    model = Model("qwen3_moe", lora_rank=8, lora_rank_by_topk=True)
    adapters, sent = model.adapters, laid_out(model)
    assert adapters.expert_rank < adapters.rank
    name = PREFIX + "mlp.experts.{}down_proj.lora_{}.weight"
    down, up = (sent[name.format("", side)][1] for side in "AB")
    a, b = (model.trained[name.format("1.", side)] for side in "AB")
    expected = adapters.expert_scaling * b.double() @ a.double()
    torch.testing.assert_close(adapters.scaling * up.double() @ down.double(), expected)


@pytest.mark.parametrize("experts", ["per-expert", "shared-outer"])
@pytest.mark.parametrize("targets", [("all-linear",), ("up_proj", "down_proj", "o_proj")])
@pytest.mark.parametrize("by_topk", [False, True])
def test_gate_and_up_that_alternate_have_one_a(
    experts: str, targets: tuple[str, ...], by_topk: bool
) -> None:
    """SGLang multiplies the first half of the alternating rows by the A of gate, the rest by that
    of up."""
    model = Model(
        "gpt_oss",
        lora_rank=8,
        lora_experts=experts,
        lora_target_modules=targets,
        lora_rank_by_topk=by_topk,
    )
    sent, adapters, layout = laid_out(model), model.adapters, model.layout
    layer = f"{PREFIX}mlp.experts."
    leaves = ("gate_proj", "up_proj")
    assert layout.rank == max(2 * adapters.expert_rank, adapters.rank)
    for expert in range(model.spec.num_experts):
        products = []
        a = {}
        for leaf in leaves:
            a[leaf] = sent[f"{layer}{leaf}.lora_A.weight"]
            a[leaf] = a[leaf][min(expert, len(a[leaf]) - 1)]
            b = sent[f"{layer}{leaf}.lora_B.weight"][expert]
            products.append(adapters.alpha / layout.rank * b.double() @ a[leaf].double())
            shared = model.trained.get(f"{layer}{leaf}.lora_A.weight")
            own = model.trained.get(f"{layer}{expert}.{leaf}.lora_A.weight", shared)
            if own is None:
                assert leaf not in adapters.targets and not b.any()
                continue
            up = model.trained[f"{layer}{expert}.{leaf}.lora_B.weight"]
            expected = adapters.expert_scaling * up.double() @ own.double()
            torch.testing.assert_close(products[-1], expected)
        assert torch.equal(a["gate_proj"], a["up_proj"]) and a["up_proj"].any()
    name = f"{PREFIX}self_attn.o_proj.lora_{{}}.weight"
    a, b = (sent[name.format(side)].double() for side in "AB")
    own = [model.trained[name.format(side)].double() for side in "AB"]
    torch.testing.assert_close(
        adapters.alpha / layout.rank * b @ a, adapters.scaling * own[1] @ own[0]
    )


@pytest.mark.parametrize("family", ["qwen2", "deepseek_v3", "qwen3_moe", "gpt_oss"])
@pytest.mark.parametrize("targets", [("all-linear",), ("o_proj", "k_proj", "up_proj", "down_proj")])
@pytest.mark.parametrize("experts", ["per-expert", "shared-outer"])
def test_engines_hold_what_the_memory_plan_counts(
    family: str, targets: tuple[str, ...], experts: str
) -> None:
    if family == "deepseek_v3" and "k_proj" in targets:
        targets = ("o_proj", "q_a_proj", "up_proj", "down_proj")
    flags: dict[str, Any] = {"lora_rank": 8, "lora_target_modules": targets}
    if family in ("qwen3_moe", "gpt_oss"):
        flags |= {"lora_experts": experts, "lora_rank_by_topk": experts == "shared-outer"}
    model = Model(family, **flags)
    served = as_served(model.adapters, model.family, model.spec)
    counted = count_parameters(model.family, model.spec, served)
    assert counted == sum(prod(shape) for shape in model.layout.sent.values())
    assert {name.rpartition(".")[2] for name in served.targets} == set(model.layout.targets)


@pytest.mark.parametrize(
    ("name", "targets", "filled"),
    [
        ("qwen2", ("q_proj", "v_proj"), "self_attn.k_proj"),
        ("qwen2", ("k_proj",), "self_attn.q_proj"),
        ("qwen2", ("up_proj",), "mlp.gate_proj"),
        ("deepseek_v3", ("q_a_proj",), "self_attn.kv_a_proj_with_mqa"),
    ],
)
def test_sets_that_engines_fuse_are_complete(
    name: str, targets: tuple[str, ...], filled: str
) -> None:
    model = Model(name, lora_target_modules=targets)
    sent = laid_out(model)
    check_sets(sent)
    for side in "AB":
        tensor = sent[f"{PREFIX}{filled}.lora_{side}.weight"]
        assert not tensor.any() and filled.rpartition(".")[2] in model.layout.targets
        assert tensor.shape[0 if side == "A" else 1] == 4
    own = {name: sent[name] for name in model.trained}
    assert all(torch.equal(own[name], tensor) for name, tensor in model.trained.items())


def test_embedding_and_output_layer_are_sent() -> None:
    model = Model("mistral", lora_target_modules=("embed_tokens", "lm_head"))
    head = "base_model.model.lm_head.lora_{}.weight"
    embedding = "base_model.model.model.embed_tokens.lora_embedding_{}"
    vocab, hidden = model.spec.vocab_size, model.spec.hidden_size
    assert model.layout.sent == {
        embedding.format("A"): (4, vocab), embedding.format("B"): (hidden, 4),
        head.format("A"): (4, hidden), head.format("B"): (vocab, 4),
    }  # fmt: skip
    for name in (embedding.format("A"), head.format("B")):
        model.trained[name].zero_()
    with FakeAdapterEngine(model.base) as engine:
        sync = connected([engine], model)
        sync.push()
        assert engine.configs["policy-1"]["target_modules"] == ["embed_tokens", "lm_head"]
        for name, tensor in engine.adapters["policy-1"].items():
            assert torch.equal(tensor, model.trained[name])
        for name, parameter in sync._source._local.items():
            if name == "embedding.word_embeddings.adapter.up":
                parameter.data.zero_()
        with pytest.raises(UserError, match=r"of zeros alone.*lora_embedding_B"):
            sync.push()
        sync.close()


def laid_out(model: Model) -> dict[str, torch.Tensor]:
    buffer = AdapterBuffer(model.layout.entries(torch.float32), is_shared=False)
    buffer.buffer.zero_()
    views = buffer.tensors()
    for name, tensor in model.trained.items():
        model.layout.place(name, tensor, views)
    return views


def in_runs(tensors: dict[str, torch.Tensor], length: int) -> dict[str, torch.Tensor]:
    """Experts in runs of at most this many, as `ModelSource` yields them."""
    found: dict[str, torch.Tensor] = {}
    stacks: dict[tuple[str, str], list[torch.Tensor]] = {}
    for name, tensor in tensors.items():
        owner, is_expert, rest = name.partition(".mlp.experts.")
        number, _, leaf = rest.partition(".")
        if is_expert and number.isdigit():
            stacks.setdefault((owner, leaf), []).append(tensor)
        else:
            found[name] = tensor
    for (owner, leaf), experts in stacks.items():
        for first in range(0, len(experts), length):
            run = experts[first : first + length]
            name = f"{owner}.mlp.experts.{first}-{first + len(run) - 1}.{leaf}"
            found[name] = torch.stack(run)
    return found


@settings(max_examples=30)
@given(
    st.sampled_from(["qwen3_moe", "gpt_oss"]),
    st.sampled_from(["per-expert", "shared-outer"]),
    st.booleans(),
    st.integers(1, 5),
    st.sampled_from([torch.float32, torch.bfloat16]),
    st.data(),
)
def test_runs_of_experts_are_sent_as_single_ones(
    family: str, experts: str, by_topk: bool, length: int, dtype: torch.dtype, data: st.DataObject
) -> None:
    model = Model(family, lora_rank=8, lora_experts=experts, lora_rank_by_topk=by_topk)
    layout = model.layout
    broken = data.draw(st.sampled_from(sorted(model.trained)))
    model.trained[broken][-1, -1] = data.draw(st.sampled_from([float("nan"), float("-inf"), -99.0]))
    runs = in_runs(model.trained, length)
    buffers = []
    for tensors in (model.trained, runs):
        buffer = AdapterBuffer(layout.entries(dtype), is_shared=False)
        for name, tensor in tensors.items():
            assert layout.fits(name, tuple(tensor.shape))
            layout.place(name, tensor, buffer.tensors())
        buffers.append(buffer.buffer)
    assert torch.equal(*buffers)
    check_names({name: tuple(tensor.shape) for name, tensor in runs.items()}, layout.trained, "it")
    largest = layout.largest(buffers[1], dtype)
    assert set(largest.names) == model.trained.keys()
    for name, found in zip(largest.names, largest.values, strict=True):
        cast = (model.trained[name] * layout.pieces[name][0].factor).to(dtype)
        torch.testing.assert_close(found, cast.abs().max().float(), equal_nan=True, rtol=0, atol=0)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda run: {}, r"is not complete: 2 of .* are missing, .*experts\.0\.up_proj\.lora_B"),
        (lambda run: {"0-1": run[:1]}, r"belong to no layer .*experts\.0-1\.up_proj\.lora_B"),
        (lambda run: {"0-1": run[:, 1:]}, r"experts\.0\.up_proj\.lora_B\.weight of shape"),
        (lambda run: {"1-2": run}, r"is not complete: 1 of .*experts\.0\.up_proj\.lora_B"),
        (lambda run: {"0-1": run, "3-4": run}, r"no layer .*: .*experts\.4\.up_proj\.lora_B"),
    ],
)
def test_a_wrong_run(change: Callable[[torch.Tensor], dict[str, torch.Tensor]], said: str) -> None:
    model = Model("qwen3_moe")
    assert model.spec.num_experts == 4
    tensors = in_runs(model.trained, 2)
    name = PREFIX + "mlp.experts.{}.up_proj.lora_B.weight"
    with FakeAdapterEngine(model.base) as engine:
        sync = connected([engine], model)
        sync._source.tensors = lambda: iter(tensors.items())
        sync.push()
        run = tensors.pop(name.format("0-1"))
        tensors |= {name.format(place): one for place, one in change(run).items()}
        with pytest.raises(UserError, match=said):
            sync.push()
        assert list(engine.adapters) == ["policy-1"]
        sync.close()


def test_memory_that_cannot_be_locked_is_only_slower(
    model: Model, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def refuse(buffer: torch.Tensor, owner: object) -> None:
        raise MemoryError("ulimit -l may be too low")

    monkeypatch.setattr(adapter_sync, "lock_pages", refuse)
    monkeypatch.setattr(torch.cuda, "set_device", lambda gpu: None)
    entries = model.layout.entries(torch.float32)
    buffer = AdapterBuffer(entries, is_shared=True, locked_by=torch.device("cuda", 1))
    assert not any(view.any() for view in buffer.tensors().values())
    assert "pushes of adapters take longer: ulimit" in caplog.text


@settings(max_examples=20)
@given(
    st.lists(st.lists(st.integers(1, 5), min_size=2, max_size=3), min_size=1, max_size=5),
    st.sampled_from([torch.float32, torch.bfloat16]),
    st.booleans(),
)
def test_a_payload_is_what_a_plain_unpickler_reads(
    shapes: list[list[int]], dtype: torch.dtype, is_shared: bool
) -> None:
    from slime.engines.wire.buckets import dtype_name, entries_of

    names = [f"t{number}" for number in range(len(shapes))]
    buffer = AdapterBuffer(
        entries_of(names, [dtype_name(dtype)] * len(names), shapes), is_shared=is_shared
    )
    buffer.buffer.copy_(torch.arange(len(buffer.buffer)) % 61)
    expected = {name: tensor.clone() for name, tensor in buffer.tensors().items()}
    text = buffer.payload(2)
    readers = [pickle.load(io.BytesIO(base64.b64decode(text))) for _ in range(2)]
    del buffer
    for found in readers:
        assert list(found) == names
        for name, tensor in found.items():
            assert tensor.dtype == dtype and torch.equal(tensor, expected[name])


def test_what_sglang_holds_is_read_as_it_was_sent() -> None:
    """It concatenates q, k and v, and repeats the A of a layer that is one in the checkpoint."""
    down, rows = torch.arange(12.0).view(3, 4), torch.arange(24.0).view(2, 3, 4)
    layer = {"m.qkv_proj.lora_A.weight": torch.cat([down, down + 1, down + 2])}
    layer |= {"m.gate_up_proj.lora_A.weight": torch.cat([down, down])}
    layer |= {"m.experts.gate_up_proj.lora_A.weight": torch.cat([rows, rows + 1], dim=1)}
    layer |= {"m.gate.lora_A.weight": down}
    sent = {f"m.{part}_proj.lora_A.weight": down + n for n, part in enumerate("qkv")}
    sent |= {"m.gate_up_proj.lora_A.weight": down}
    sent |= {
        f"m.experts.{part}_proj.lora_A.weight": rows + n for n, part in enumerate(("gate", "up"))
    }
    sent |= {"m.lost.lora_A.weight": down}

    class Runner:
        lora_manager = SimpleNamespace(
            lora_refs={"id": SimpleNamespace(lora_name="policy-1")},
            loras={"id": SimpleNamespace(
                layers=[SimpleNamespace(weights=layer)], embedding_layers={}
            )},
        )  # fmt: skip

        def held(self, name: str) -> dict[str, str]:
            return adapter_fingerprints(name, {n: list(t.shape) for n, t in sent.items()})

    expected = {name: fingerprint(tensor) for name, tensor in sent.items() if "lost" not in name}
    assert Runner().held("policy-1") == {**expected, "m.gate.lora_A.weight": fingerprint(down)}
    with pytest.raises(ValueError, match="no adapter is called policy-2, only policy-1"):
        Runner().held("policy-2")
    with pytest.raises(ValueError, match="serves no adapters"):
        adapter_fingerprints("policy-1", {})


# -- faults ----------------------------------------------------------------------------------------


@pytest.fixture
def refused(model: Model) -> Callable[..., str]:
    """``refused(change, …)``: what a push of changed tensors says; nothing was sent."""

    def push(change: Callable[[dict[str, torch.Tensor]], Any], *, pushes: int = 0) -> str:
        with FakeAdapterEngine(model.base) as engine:
            sync = connected([engine], model)
            for _ in range(pushes):
                sync.push(has_learned=True)
            change(model.trained)
            real = sync._source.tensors
            sync._source.tensors = lambda: iter(model.trained.items())
            with pytest.raises(UserError) as caught:
                sync.push(has_learned=True)
            assert len(engine.adapters) == pushes and sync.version == pushes
            sync._source.tensors = real
            sync.close()
            return str(caught.value)

    return push


Q = PREFIX + "self_attn.q_proj.lora_{}.weight"


def _zero(side: str) -> Callable[[dict[str, torch.Tensor]], None]:
    def change(tensors: dict[str, torch.Tensor]) -> None:
        for name, tensor in tensors.items():
            if f".lora_{side}." in name:
                tensor.zero_()

    return change


def test_a_stale_adapter(refused: Callable[..., str]) -> None:
    assert "is stale: every tensor is that of the last version" in refused(lambda t: None, pushes=1)


def test_a_zero_adapter(refused: Callable[..., str]) -> None:
    assert "is zero: every B is" in refused(_zero("B"))


def test_a_lost_tensor(refused: Callable[..., str]) -> None:
    said = refused(lambda tensors: tensors[Q.format("A")].zero_())
    assert "an A of zeros alone" in said and Q.format("A") in said


def test_numbers_that_are_not_finite(refused: Callable[..., str]) -> None:
    said = refused(lambda tensors: tensors[Q.format("B")][0].fill_(float("nan")))
    assert "not finite" in said and Q.format("B") in said


@pytest.mark.parametrize("pushes", [0, 1])
def test_a_partial_adapter(refused: Callable[..., str], pushes: int) -> None:
    said = refused(lambda tensors: tensors.pop(Q.format("B")), pushes=pushes)
    assert "is not complete: 1 of 28" in said and Q.format("B") in said


def test_a_stray_key(refused: Callable[..., str]) -> None:
    stray = PREFIX + "mlp.gate.lora_A.weight"
    said = refused(lambda tensors: tensors.update({stray: torch.ones(4, 4)}))
    assert "belong to no layer with an adapter" in said and stray in said


def test_another_shape(refused: Callable[..., str]) -> None:
    said = refused(lambda tensors: tensors.update({Q.format("A"): torch.ones(5, 16)}))
    assert "of shape [5, 16]" in said


def test_a_wrong_base(model: Model) -> None:
    name = "model.layers.1.mlp.down_proj.weight"
    other = {**model.base, name: model.base[name] + 1}
    with FakeAdapterEngine(other) as engine:
        sync = connected([engine], model)
        with pytest.raises(UserError, match="engines' base are not the trainer's") as caught:
            sync.push()
        assert name in str(caught.value) and not engine.adapters
        sync.close()


def test_the_base_is_compared_once_and_again_for_engines_that_come(model: Model) -> None:
    with FakeAdapterEngine(model.base) as one, FakeAdapterEngine(model.base) as other:
        sync = connected([one], model)
        for _ in range(3):
            sync.push()
        assert one.base_checks == 1
        sync.connect([one.url, other.url])
        assert sync.push().version == 4
        assert (one.base_checks, other.base_checks) == (2, 1)
        assert list(other.adapters) == ["policy-4"], "an engine that comes has the newest alone"
        sync.close()


def test_what_an_engine_holds_is_compared(model: Model) -> None:
    with FakeAdapterEngine(model.base) as engine:
        sync = connected([engine], model)
        sync.push()
        engine.corrupt = lambda tensors: tensors[Q.format("B")].add_(1)
        with pytest.raises(WeightMismatch, match=r"q_proj\.lora_B\.weight differs"):
            sync.push()
        assert sync.version == 1
        sync.close()


def test_one_side_of_the_experts() -> None:
    layout = Model("qwen3_moe").layout
    one_side = {n: s for n, s in layout.sent.items() if "experts.down_proj" not in n}
    with pytest.raises(UserError, match="adapters of one side only: down_proj is missing"):
        check_sets(one_side)
    with pytest.raises(UserError, match="is not complete"):
        check_names(one_side, layout.sent, "the adapter")


@pytest.mark.parametrize(
    ("name", "without", "said"),
    [
        ("qwen2", "k_proj", "q_proj and none of k_proj"),
        ("qwen2", "q_proj", "none of q_proj"),
        ("qwen2", "up_proj", "gate_proj and none of up_proj"),
        ("deepseek_v3", "kv_a_proj_with_mqa", "q_a_proj and none of kv_a_proj_with_mqa"),
        ("qwen2", "o_proj.lora_B", "has no lora_B"),
    ],
)
def test_an_incomplete_set(name: str, without: str, said: str) -> None:
    sent = Model(name).layout.sent
    with pytest.raises(UserError, match=said):
        check_sets({n: s for n, s in sent.items() if f".{without}." not in n})


ROOM = Abilities("SGLang", (), "slices", adapters=True, adapter_rank=4)


@pytest.mark.parametrize(
    ("lacks", "said"),
    [
        ({"adapters": False}, "serves no adapters"),
        ({"adapter_rank": 2}, "adapters of rank 4 are above what engine http://e has room for, 2"),
        ({"adapter_targets": ("q_proj", "k_proj", "v_proj")}, "no room for adapters of down_proj"),
        ({"adapters_at_once": 1}, "--max-loras-per-batch 3"),
        ({"shares_outer_experts": True}, "--no-experts-shared-outer-loras"),
        ({"quantises": True}, "engine http://e quantises its base by itself"),
    ],
)
def test_an_engine_without_room(lacks: dict[str, Any], said: str) -> None:
    layout = Model("qwen3_moe").layout
    check_engine("http://e", ROOM, layout)
    quantised = Abilities(**vars(ROOM) | {"quantises": True})
    check_engine("http://e", quantised, layout, has_quantised_base=True)
    with pytest.raises(UserError) as caught:
        check_engine("http://e", Abilities(**vars(ROOM) | lacks), layout)
    assert said in str(caught.value)


def test_queries_that_sglang_cannot_load() -> None:
    layout = Model("qwen2").layout
    lone = AdapterLayout(**vars(layout) | {"lone_queries": True})
    check_engine("http://e", Abilities(**vars(EMBEDDED) | {"adapters": True}), lone)
    with pytest.raises(UserError, match="--lora-exclude-modules q_proj"):
        check_engine("http://e", Abilities(**vars(SGLANG) | {"adapters": True}), lone)


def test_nothing_is_asked_of_the_first_push() -> None:
    names = [Q.format("A"), Q.format("B")]
    largest = LargestValues(names, torch.tensor([1.0, 0.0]), torch.tensor([False, True]))
    check_values(largest, {"x": "1"}, {"x": "1"}, has_learned=False)


@pytest.mark.parametrize(
    ("optimizer", "rate", "norm", "skipped", "has_learned"),
    [
        ("adam", 1e-5, 0.5, 0.0, True),
        ("adam", 1e-9, 0.5, 0.0, False),
        ("adam", 1e-5, 0.0, 0.0, False),
        ("adam", 1e-5, 0.5, 1.0, False),
        ("sgd", 1e-2, 0.5, 0.0, False),
    ],
)
def test_a_step_that_16_bits_may_not_show_is_not_taken_for_a_stale_push(
    optimizer: str, rate: float, norm: float, skipped: float, has_learned: bool
) -> None:
    steps = [{"train/grad_norm": norm, "train/skipped": skipped}]
    assert has_visibly_learned(optimizer, [rate], steps) is has_learned
