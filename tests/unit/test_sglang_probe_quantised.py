"""Where SGLang's ranks have parts of quantised weights, and what a look at layers as if open leaves
behind."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from slime.engines.sglang import weight_probe
from slime.engines.sglang.loadable import close_layers, open_layers, opened_for_lookup
from slime.engines.sglang.weight_probe import Held, Tree
from slime.engines.wire.expert_runs import ExpertRun
from tests.support.quantised_models import same_bits
from tests.support.repacked_layers import Model, weights

EXPERTS, WIDTH, INNER = 4, 8, 16  # in words, groups or blocks


def module_with(path: str, named: dict[str, torch.Tensor], **facts: Any) -> nn.Module:
    root = module = nn.Module()
    for part in path.split("."):
        module.add_module(part, nn.Module())
        module = module._modules[part]  # type: ignore[assignment]
    for name, tensor in named.items():
        module.register_parameter(name, nn.Parameter(tensor, requires_grad=False))
    vars(module).update(facts)
    return root


def numbers(*shape: int, start: int = 0) -> torch.Tensor:
    return start + torch.arange(torch.Size(shape).numel(), dtype=torch.float32).reshape(shape)


def part_of(sent: torch.Tensor, held: Held) -> torch.Tensor:
    return sent.narrow(held.dim, held.start, held.stop - held.start)


# -- experts ---------------------------------------------------------------------------------------


def sent_experts(leaf: str) -> dict[str, torch.Tensor]:
    """A part of each expert's three weights, as a checkpoint has them, all numbers different."""
    shapes = {"gate": (INNER, WIDTH), "up": (INNER, WIDTH), "down": (WIDTH, INNER)}
    return {
        f"mlp.experts.{number}.{projection}_proj.{leaf}": numbers(
            *shape, start=1000 * (3 * number + place)
        )
        for number in range(EXPERTS)
        for place, (projection, shape) in enumerate(shapes.items())
    }


def stacked(
    sent: dict[str, torch.Tensor], leaf: str, rank: int, size: int, *, turned: bool
) -> dict[str, torch.Tensor]:
    """A tensor-parallel rank's parameters of all experts."""

    def of(number: int, projection: str) -> torch.Tensor:
        return sent[f"mlp.experts.{number}.{projection}_proj.{leaf}"]

    w13, w2 = [], []
    for number in range(EXPERTS):
        upper = torch.cat(
            [of(number, projection).chunk(size)[rank] for projection in ("gate", "up")]
        )
        lower = of(number, "down").chunk(size, 1)[rank]
        w13.append(upper.t() if turned else upper)
        w2.append(lower.t() if turned else lower)
    return {
        f"w13_{leaf}": torch.stack(w13).contiguous(),
        f"w2_{leaf}": torch.stack(w2).contiguous(),
    }


@pytest.mark.parametrize(
    ("leaf", "turned"),
    [("weight_packed", True), ("weight_scale", True), ("weight_scale_inv", False)],
)
@pytest.mark.parametrize("size", [1, 2])
def test_parts_of_experts_are_found_on_every_rank(leaf: str, turned: bool, size: int) -> None:
    sent = sent_experts(leaf)
    covered = {name: torch.zeros_like(tensor, dtype=torch.bool) for name, tensor in sent.items()}
    for rank in range(size):
        root = module_with(
            "mlp.experts", stacked(sent, leaf, rank, size, turned=turned), moe_tp_rank=rank
        )
        if turned:
            for parameter in root.parameters():
                parameter.is_transposed = True  # type: ignore[attr-defined]
        tree = Tree(root)
        for name, tensor in sent.items():
            held = tree.find(name, tuple(tensor.shape))
            assert held is not None and torch.equal(held.tensor, part_of(tensor, held)), name
            covered[name].narrow(held.dim, held.start, held.stop - held.start).fill_(True)
    assert all(bool(seen.all()) for seen in covered.values())


@pytest.mark.parametrize(
    ("leaf", "turned"),
    [("weight_packed", True), ("weight_scale", True), ("weight_scale_inv", False)],
)
@pytest.mark.parametrize("size", [1, 2])
def test_a_run_of_parts_lies_where_its_experts_do(leaf: str, turned: bool, size: int) -> None:
    sent = sent_experts(leaf)
    for rank in range(size):
        root = module_with(
            "mlp.experts", stacked(sent, leaf, rank, size, turned=turned), moe_tp_rank=rank
        )
        if turned:
            for parameter in root.parameters():
                parameter.is_transposed = True  # type: ignore[attr-defined]
        for projection in ("gate", "up", "down"):
            run = ExpertRun("mlp.experts", 1, 2, projection, leaf)
            together = torch.stack([sent[run.expert_name(number)] for number in (1, 2)])
            held = Tree(root).experts(run)
            assert held is not None and torch.equal(held.target, held.of(together))
            compared = Tree(root).find(run.name_of(leaf), tuple(together.shape))
            assert compared is not None and torch.equal(
                compared.tensor, part_of(together, compared)
            )


def test_runs_of_scales_and_sizes_that_an_expert_has_one_of() -> None:
    scales = {
        "w13_weight_scale": numbers(EXPERTS, 2),
        "w2_weight_scale": numbers(EXPERTS, start=100),
    }
    tree = Tree(module_with("mlp.experts", {**scales, "w13_weight_shape": numbers(EXPERTS, 2)}))
    expected = {"gate": [[2], [4]], "up": [[3], [5]], "down": [[101], [102]]}
    for projection, values in expected.items():
        held = tree.experts(ExpertRun("mlp.experts", 1, 2, projection, "weight_scale"))
        assert held is not None and held.target.tolist() == values
    size = tree.experts(ExpertRun("mlp.experts", 1, 2, "up", "weight_shape"))
    assert size is not None and size.target.tolist() == [[2, 3], [4, 5]]


def test_scales_of_experts_in_fp8_by_tensor_lie_in_a_row() -> None:
    gate_and_up, down = numbers(EXPERTS, 2), numbers(EXPERTS, start=100)
    tree = Tree(
        module_with("mlp.experts", {"w13_weight_scale": gate_and_up, "w2_weight_scale": down})
    )
    for number in range(EXPERTS):
        for projection, expected in (
            ("gate", 2 * number),
            ("up", 2 * number + 1),
            ("down", 100 + number),
        ):
            held = tree.find(f"mlp.experts.{number}.{projection}_proj.weight_scale", (1,))
            assert held is not None and held.tensor.tolist() == [expected]


def test_a_rank_has_its_own_experts_alone() -> None:
    sent = sent_experts("weight_scale_inv")
    own = {
        name: tensor[2:]
        for name, tensor in stacked(sent, "weight_scale_inv", 0, 1, turned=False).items()
    }
    tree = Tree(module_with("mlp.experts", own, moe_ep_rank=1))
    names = [
        name for name, tensor in sent.items() if tree.find(name, tuple(tensor.shape)) is not None
    ]
    assert names == [name for name in sent if ".experts.2." in name or ".experts.3." in name]


# -- fused linear layers ---------------------------------------------------------------------------


def test_scales_of_fused_layers_are_found_by_tensor_and_by_block() -> None:
    sizes = {
        "q_proj_shard_size": 256,
        "kv_proj_shard_size": 128,
        "tp_rank": 0,
        "num_kv_head_replicas": 1,
    }
    by_block = module_with("attn.qkv_proj", {"weight_scale_inv": numbers(4, 3)}, **sizes)
    found = [Tree(by_block).find(f"attn.{name}_proj.weight_scale_inv", shape) for name, shape in
             (("q", (2, 3)), ("k", (1, 3)), ("v", (1, 3)))]  # fmt: skip
    assert [None if held is None else held.tensor[:, 0].tolist() for held in found] == [
        [0, 3],
        [6],
        [9],
    ]
    by_tensor = Tree(module_with("attn.qkv_proj", {"weight_scale": numbers(3)}, **sizes))
    one = [by_tensor.find(f"attn.{name}_proj.weight_scale", (1,)) for name in "qkv"]
    assert [None if held is None else held.tensor.tolist() for held in one] == [[0], [1], [2]]


def test_blocks_that_q_and_k_share_are_not_compared() -> None:
    sizes = {
        "q_proj_shard_size": 192,
        "kv_proj_shard_size": 64,
        "tp_rank": 0,
        "num_kv_head_replicas": 1,
    }
    root = module_with("attn.qkv_proj", {"weight_scale_inv": numbers(3, 3)}, **sizes)
    assert Tree(root).find("attn.q_proj.weight_scale_inv", (2, 3)) is None


def test_parameters_of_sglangs_own_are_not_missed_in_a_full_check() -> None:
    own = {
        "weight_g_idx": numbers(3),
        "weight_shape": numbers(2),
        "k_scale": numbers(1),
        "empty": torch.empty(0),
    }
    root = module_with(
        "mlp.up_proj", {**own, "weight_scale": numbers(1), "weight_packed": numbers(2, 2)}
    )
    layout = weight_probe._layout(
        root, {"mlp.up_proj.weight_packed": [2, 2], "mlp.up_proj.weight_shape": [2]}
    )
    assert layout["others"] == ["mlp.up_proj.weight_scale"]  # which nothing has brought
    assert layout["slices"] == {
        "mlp.up_proj.weight_packed": [0, 0, 2],
        "mlp.up_proj.weight_shape": None,
    }


# -- a look ----------------------------------------------------------------------------------------


def state(model: Model) -> dict[str, tuple[Any, int, tuple[int, ...], torch.Tensor]]:
    return {name: (tensor, tensor.data_ptr(), tensor.stride(), tensor.clone())
            for name, tensor in model.named_parameters()}  # fmt: skip


def test_a_look_sees_open_layers_and_leaves_everything_as_it_was() -> None:
    model = Model(weights(0))
    before, sent = state(model), weights(1)
    with opened_for_lookup(model):
        shapes = {name: tuple(parameter.shape) for name, parameter in model.named_parameters()}
        assert {name: shapes[name] for name in sent} == {
            name: tuple(tensor.shape) for name, tensor in sent.items()
        }
    after = state(model)
    assert after.keys() == before.keys()
    for name, (tensor, place, stride, bits) in before.items():
        assert after[name][0] is tensor and after[name][1:3] == (place, stride), name
        assert same_bits(after[name][3], bits), f"{name} was written to"
    assert model.experts.is_marlin_converted and close_layers(model) == []


def test_a_look_that_fails_at_a_later_layer_leaves_everything_as_it_was(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    model = Model(weights(0))
    before = state(model)

    def create(self: Any, layer: Any, **given: Any) -> None:
        layer.register_parameter(
            "w13_weight_packed", nn.Parameter(torch.empty(1), requires_grad=False)
        )
        raise RuntimeError("out of memory")

    monkeypatch.setattr(type(model.experts.quant_method), "create_weights", create)
    shapes = {"int4.weight_packed": [48, 4]}
    said = weight_probe._answer(model, {"action": "layout", "tensors": shapes, "opens": True})
    assert "out of memory" in said["error"]
    assert {name: held[0] for name, held in state(model).items()} == {
        name: held[0] for name, held in before.items()
    }
    assert model.experts.is_marlin_converted and close_layers(model) == []


def test_a_look_at_open_layers_leaves_them_open() -> None:
    model, new = Model(weights(0)), weights(1)
    open_layers(model)
    with opened_for_lookup(model):
        pass
    model.load_weights(new.items())
    assert close_layers(model) != []
    expected = dict(Model(new).named_parameters())
    assert all(
        same_bits(tensor, expected[name])
        for name, tensor in model.named_parameters()
        if "norm" not in name
    )


def test_the_probe_reports_the_layout_of_open_layers_where_it_is_told_to() -> None:
    model, name = Model(weights(0)), "int4.weight_packed"
    shapes = {name: list(weights(0)[name].shape)}
    slices = [
        weight_probe._answer(model, {"action": "layout", "tensors": shapes, "opens": opens})[
            "slices"
        ][name]
        for opens in (True, False)
    ]
    assert slices == [[0, 0, 48], None]


# -- vision models and gated delta nets ------------------------------------------------------------


def test_names_of_vision_and_hybrid_models() -> None:
    """As SGLang's Qwen3.5 has them, on each of two ranks; queries, keys and values of a delta net
    are found only where a rank has them whole."""
    layer = "model.language_model.layers.0"
    sent = {
        "model.language_model.norm.weight": numbers(WIDTH),
        f"{layer}.self_attn.q_norm.weight": numbers(WIDTH, start=100),
        f"{layer}.linear_attn.in_proj_qkv.weight": numbers(8, WIDTH, start=200),
        f"{layer}.linear_attn.in_proj_z.weight": numbers(4, WIDTH, start=300),
        f"{layer}.linear_attn.in_proj_b.weight": numbers(2, WIDTH, start=400),
        f"{layer}.linear_attn.in_proj_a.weight": numbers(2, WIDTH, start=500),
        f"{layer}.linear_attn.conv1d.weight": numbers(8, 1, 4, start=600),
        "model.visual.blocks.0.attn.qkv.weight": numbers(6, WIDTH, start=700),
    }

    def of(name: str) -> torch.Tensor:
        return next(tensor for key, tensor in sent.items() if name in key)

    for size in (1, 2):
        for rank in range(size):
            root = nn.Module()

            def put(path: str, tensor: torch.Tensor, **facts: Any) -> None:
                module = root  # noqa: B023
                for part in path.split("."):
                    if part not in module._modules:
                        module.add_module(part, nn.Module())
                    module = module._modules[part]  # type: ignore[assignment]
                module.weight = nn.Parameter(tensor.contiguous(), requires_grad=False)
                vars(module).update(tp_rank=rank, tp_size=size, **facts)  # noqa: B023

            def mine(*parts: torch.Tensor) -> torch.Tensor:
                return torch.cat([part.chunk(size)[rank] for part in parts])  # noqa: B023

            queries_keys_values = of("qkv.weight").split([2, 2, 4])
            net = "model.layers.0.linear_attn"
            put("model.norm", of("model.norm"))
            put("model.layers.0.q_norm", of("q_norm"))
            put(
                f"{net}.in_proj_qkvz",
                mine(*queries_keys_values, of("in_proj_z")),
                output_sizes=[2, 2, 4, 4],
            )
            put(f"{net}.in_proj_ba", mine(of("in_proj_b"), of("in_proj_a")), output_sizes=[2, 2])
            put(f"{net}.conv1d", mine(*of("conv1d").split([2, 2, 4])))
            put("visual.blocks.0.attn.qkv_proj", mine(of("attn.qkv")))
            tree = Tree(root)
            found = {name: tree.find(name, tuple(tensor.shape)) for name, tensor in sent.items()}
            missing = {name.rsplit(".", 2)[1] for name, held in found.items() if held is None}
            assert missing == (set() if size == 1 else {"in_proj_qkv", "conv1d", "qkv"})
            for name, held in found.items():
                assert held is None or torch.equal(part_of(sent[name], held), held.tensor)


def test_an_untrained_tower_is_not_missed() -> None:
    root = module_with("model.norm", {"weight": numbers(WIDTH)})
    root.add_module("visual", module_with("blocks.0", {"weight": numbers(WIDTH)}))
    root.add_module("lm_head", module_with("part", {"weight": numbers(WIDTH)}))
    sent = {"model.language_model.norm.weight": [WIDTH]}
    others = weight_probe._layout(root, sent)["others"]
    assert others == ["lm_head.part.weight"]
    both = {**sent, "model.visual.blocks.0.weight": [WIDTH]}
    root.visual.add_module("merger", module_with("norm", {"weight": numbers(WIDTH)}))
    others = weight_probe._layout(root, both)["others"]
    assert others == ["lm_head.part.weight", "visual.merger.norm.weight"]
