"""Layers of experts: products and dispatch against plain formulas, every expert layout against one
process."""

from __future__ import annotations

import dataclasses
import doctest
import importlib
import re
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import Phase, given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file
from torch import Tensor

from slime.errors import UserError
from slime.models import family_of
from slime.models.layout_rules import check_layout
from slime.run.preflight import check_architecture
from slime.samples.batch import TrainBatch
from slime.trainer.megatron.backend import MegatronBackend
from slime.trainer.megatron.experts import (
    grouped_linear,
    grouped_product,
    grouped_weight_gradient,
    looped_product,
    looped_weight_gradient,
)
from slime.trainer.megatron.moe_dispatch import ExpertPlace, dispatch
from slime.trainer.megatron.moe_layer import (
    expert_arguments,
    expert_layers,
    uses_balance_losses,
)
from slime.trainer.megatron.moe_router import choose_experts, router_weights
from tests.support.parity import (
    CP2,
    DATA_PARALLEL,
    EP2,
    ETP1,
    MICRO_BATCHES,
    PP2,
    RECOMPUTE,
    SP,
    TOLERANCE,
    TP2,
    VIRTUAL,
    parity_job,
    worst,
)
from tests.support.tiny_models import EXPERTS, TOPK, save_moe, save_tiny
from tests.support.trainer_ranks import VOCAB, Pools, make_batch, shard, trainer_config
from tests.support.trainers import gradients


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_moe(tmp_path_factory.mktemp("moe"))


# -- products --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "module", ["expert_rules", "megatron.experts", "megatron.moe_dispatch", "megatron.moe_router"]
)
def test_examples_in_docstrings(module: str) -> None:
    found = doctest.testmod(
        importlib.import_module(f"slime.trainer.{module}"),
        extraglobs={"torch": torch},
        optionflags=doctest.ELLIPSIS | doctest.IGNORE_EXCEPTION_DETAIL,
    )
    assert found.failed == 0


@settings(max_examples=25)
@given(
    st.lists(st.integers(0, 5), min_size=1, max_size=6),
    st.sampled_from([torch.float32, torch.bfloat16]),
)
def test_grouped_product_equals_the_loop(sizes: list[int], dtype: torch.dtype) -> None:
    """The kernel that a GPU uses and the loop elsewhere, forward and both gradients; empty experts
    included."""
    torch.manual_seed(sum(sizes))
    ends = torch.tensor(sizes).cumsum(0, dtype=torch.int32)
    rows, grad = torch.randn(sum(sizes), 16, dtype=dtype), torch.randn(sum(sizes), 24, dtype=dtype)
    weight = torch.randn(len(sizes), 24, 16, dtype=dtype)
    tolerance = (
        {"rtol": 2e-2, "atol": 2e-2} if dtype == torch.bfloat16 else {"rtol": 1e-5, "atol": 1e-5}
    )
    if sum(sizes):
        torch.testing.assert_close(
            grouped_product(rows, weight, ends), looped_product(rows, weight, ends), **tolerance
        )
        back = weight.transpose(1, 2)
        torch.testing.assert_close(
            grouped_product(grad, back, ends), looped_product(grad, back, ends), **tolerance
        )
        ours = grouped_weight_gradient(grad, rows, ends)
        torch.testing.assert_close(ours, looped_weight_gradient(grad, rows, ends), **tolerance)
    rows.requires_grad_()
    weight.requires_grad_()
    grouped_linear(rows, weight, ends).backward(grad)
    assert rows.grad is not None and weight.grad is not None and rows.grad.shape == rows.shape
    for size, gradient in zip(sizes, weight.grad):
        assert size > 0 or not gradient.any(), "no rows, so the gradient is exactly 0"


@settings(max_examples=25)
@given(st.integers(1, 12), st.integers(1, 7), st.integers(0, 10**6))
def test_dispatch_equals_the_dense_formula(tokens: int, experts: int, seed: int) -> None:
    """Σ_k w_k · W_{e_k} x, with gradients, for one rank."""
    generator = torch.Generator().manual_seed(seed)
    topk = min(experts, 1 + seed % 3)
    x = torch.randn(tokens, 8, generator=generator, dtype=torch.float64, requires_grad=True)
    weight = torch.randn(
        experts, 8, 8, generator=generator, dtype=torch.float64, requires_grad=True
    )
    choices = torch.stack(
        [torch.randperm(experts, generator=generator)[:topk] for _ in range(tokens)]
    )
    gates = torch.rand(tokens, topk, generator=generator, dtype=torch.float64, requires_grad=True)
    plan = dispatch(choices, ExpertPlace(experts))
    rows, row_gates = plan.to_experts(x, gates)
    ours = plan.to_tokens(grouped_linear(rows, weight, plan.ends) * row_gates[:, None])
    dense = torch.einsum("nk,nkoi,ni->no", gates, weight[choices], x)
    torch.testing.assert_close(ours, dense)
    direction = torch.randn(tokens, 8, generator=generator, dtype=torch.float64)
    for a, b in zip(
        torch.autograd.grad((ours * direction).sum(), (x, weight, gates)),
        torch.autograd.grad((dense * direction).sum(), (x, weight, gates)),
    ):
        torch.testing.assert_close(a, b)


# -- router ----------------------------------------------------------------------------------------


def router_config(**fields: Any) -> Any:
    from megatron.core.transformer.transformer_config import TransformerConfig

    return TransformerConfig(
        num_layers=1,
        hidden_size=8,
        num_attention_heads=1,
        num_moe_experts=8,
        moe_ffn_hidden_size=8,
        add_bias_linear=False,
        moe_token_dispatcher_type="alltoall",
        **{"moe_router_topk": 4, **fields},
    )


@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"moe_router_pre_softmax": True, "moe_router_topk_scaling_factor": 1.5},
        {"moe_router_score_function": "sigmoid", "moe_router_topk_scaling_factor": 2.5},
        {
            "moe_router_score_function": "sigmoid",
            "moe_router_num_groups": 4,
            "moe_router_group_topk": 2,
        },
    ],
)
@pytest.mark.parametrize("biased", [False, True])
def test_router_equals_megatrons(fields: dict[str, Any], biased: bool) -> None:
    from megatron.core.transformer.moe.moe_utils import topk_routing_with_score_function

    config = router_config(**fields)
    if biased and config.moe_router_score_function != "sigmoid":
        biased = False
    torch.manual_seed(0)
    logits, bias = torch.randn(32, 8), torch.randn(8) if biased else None
    choices = choose_experts(logits, bias, config)
    ours = torch.zeros(32, 8).scatter(
        1, choices, router_weights(logits, choices, config, normalises=True)
    )
    theirs, chosen = topk_routing_with_score_function(
        logits,
        4,
        use_pre_softmax=config.moe_router_pre_softmax,
        num_groups=config.moe_router_num_groups,
        group_topk=config.moe_router_group_topk,
        scaling_factor=config.moe_router_topk_scaling_factor,
        score_function=config.moe_router_score_function,
        expert_bias=bias,
    )
    torch.testing.assert_close(ours, theirs)
    assert torch.equal(ours > 0, chosen)


# -- layouts ---------------------------------------------------------------------------------------

ETP2 = {"expert_tensor_parallel_size": 2}
# six samples over four data-parallel ranks
DYNAMIC = {"use_dynamic_batch_size": True, "max_tokens_per_gpu": 64}
SELECTIVE = {"recompute_granularity": "selective", "recompute_modules": ["moe"]}
#: name → (ranks, data-parallel size, flags); what the parity table of all families has too comes in
#: the long ones
LAYOUTS: dict[str, tuple[int, int, dict[str, Any]]] = {
    "TP2 x EP2, experts whole": (2, 1, TP2 | EP2 | ETP1),
    "TP2+SP x EP2, experts whole, recomputed": (2, 1, TP2 | SP | EP2 | ETP1 | RECOMPUTE),
}
LONG_LAYOUTS: dict[str, tuple[int, int, dict[str, Any]]] = {
    "EP2 (over data-parallel ranks)": (2, 2, EP2 | ETP1),
    "TP2, experts cut": (2, 1, TP2),
    "TP2+SP, whole experts on both": (2, 1, TP2 | SP | ETP1),
    "PP2, layers of experts recomputed": (2, 1, PP2 | SELECTIVE),
    "CP2 x EP2": (2, 1, CP2 | EP2 | ETP1),
    "DP2, experts cut over both": (2, 2, ETP2),
    "TP2+SP, experts cut": (2, 1, TP2 | SP),
    "PP2 virtual": (2, 1, PP2 | VIRTUAL),
    "EP2, reduced during the backward pass": (2, 2, EP2 | ETP1 | {"overlap_grad_reduce": True}),
    "EP4": (4, 4, {"expert_model_parallel_size": 4} | ETP1 | DYNAMIC),
    "DP2 x EP2": (4, 4, EP2 | ETP1 | DYNAMIC),
    "TP2 x EP2, experts cut": (4, 2, TP2 | EP2),
    "TP2+SP x EP2, experts cut": (4, 2, TP2 | SP | EP2),
    "PP2 x EP2": (4, 2, PP2 | EP2 | ETP1),
    "PP2 virtual x EP2": (4, 2, PP2 | EP2 | ETP1 | VIRTUAL | RECOMPUTE),
    "TP2+SP x CP2, EP2": (4, 1, TP2 | SP | CP2 | EP2 | ETP1),
}


@pytest.fixture(scope="module")
def shallow(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One layer of each sort."""
    return save_moe(tmp_path_factory.mktemp("shallow"), num_hidden_layers=2)


def alone(model: Path, ranks: Pools) -> dict[str, Any]:
    flags = {"hf_checkpoint": str(model)}
    return ranks.once(1, parity_job, flags, [make_batch(MICRO_BATCHES)])[0]


@pytest.mark.parametrize(
    "name", [*LAYOUTS, *(pytest.param(name, marks=pytest.mark.full) for name in LONG_LAYOUTS)]
)
def test_layout_gives_the_numbers_of_one_process(
    name: str, model: Path, shallow: Path, ranks: Pools
) -> None:
    if "virtual" not in name:
        model = shallow
    single = alone(model, ranks)
    size, data_parallel, flags = (LAYOUTS | LONG_LAYOUTS)[name]
    batch = make_batch(MICRO_BATCHES)
    batches = [shard(batch, members, plan) for members, plan in DATA_PARALLEL[data_parallel]]
    results = ranks.run(size, parity_job, {"hf_checkpoint": str(model), **flags}, batches)
    expected = dict(zip(single["samples"], single["log_probs"]))
    for result in results:
        for kind in ("gradients", "weights"):
            assert result[kind].keys() == single[kind].keys()
            for parameter, value in single[kind].items():
                assert worst(result[kind][parameter], value) <= TOLERANCE, (kind, parameter)
        for index, log_probs in zip(result["samples"], result["log_probs"]):
            assert (log_probs - expected[index]).abs().max() <= TOLERANCE
        if result["log_probs"]:
            for ours, theirs in zip(result["metrics"], single["metrics"]):
                assert ours == pytest.approx(theirs, rel=2e-5, abs=2e-5)


def test_experts_moved_and_their_load_is_logged(ranks: Pools, shallow: Path) -> None:
    single = alone(shallow, ranks)
    before = load_file(shallow / "model.safetensors")
    moved = [
        n
        for n, w in single["weights"].items()
        if ".experts." in n and not torch.equal(w, before[n])
    ]
    assert len(moved) > EXPERTS and ("gate.weight" in n for n in moved)
    tokens = sum(len(t) - 1 for t in make_batch().tokens)
    # shared prompts count once
    assert single["metrics"][0]["train/moe_mean_load"] <= tokens * TOPK / EXPERTS
    assert (
        single["metrics"][0]["train/moe_max_load"]
        >= single["metrics"][0]["train/moe_mean_load"]
        > 0
    )


# -- weights ---------------------------------------------------------------------------------------


def export_job(info: Any, model: Path, flags: dict[str, Any]) -> tuple[dict[str, Tensor], int]:
    from slime.checkpoints.megatron_names import Placement, global_parameters
    from slime.weights.source import ModelSource

    config = trainer_config(
        hf_checkpoint=str(model), actor_num_gpus_per_node=info.world_size, **flags
    )
    backend = MegatronBackend(config, info)
    backend.setup()
    mine = [
        n
        for n, _ in global_parameters(backend.model_chunks, EXPERTS, Placement.current())
        if ".experts." in n
    ]
    tensors = {
        n: t.clone() for n, t in ModelSource(backend.model_chunks, backend.hf_config).tensors()
    }
    return tensors, len(mine)


@pytest.mark.parametrize("flags", [EP2 | ETP1, TP2 | EP2 | ETP1], ids=["EP2", "TP2 x EP2"])
def test_expert_parallel_export_is_the_file_bit_for_bit(
    flags: dict[str, Any], model: Path, ranks: Pools
) -> None:
    original = load_file(model / "model.safetensors")
    for tensors, held in ranks.run(2, export_job, model, flags):
        assert tensors.keys() == original.keys()
        assert all(torch.equal(tensors[name], original[name]) for name in original)
        assert held == 3 * 2 * EXPERTS // 2, "each rank holds, and reads, its own experts only"


def checkpoint_job(
    info: Any, model: Path, root: Path, flags: dict[str, Any], load: bool
) -> dict[str, Tensor]:
    """Load or start fresh; one step with the same gradients everywhere; save; the weights after a
    further one."""
    from slime.weights.source import ModelSource

    where = {"load": str(root)} if load else {"save": str(root)}
    config = trainer_config(
        hf_checkpoint=str(model), actor_num_gpus_per_node=info.world_size, **where, **flags
    )
    backend = MegatronBackend(config, info)
    backend.setup()

    def step(seed: int) -> None:
        for chunk in backend.model_chunks:
            chunk.zero_grad_buffer()
            for parameter in chunk.parameters():
                parameter.main_grad.copy_(torch.sin(parameter.detach() * 1000 + seed))
        backend.optimizer.step()

    if not load:
        step(1)
        backend.save(3)
    step(2)
    return {n: t.clone() for n, t in ModelSource(backend.model_chunks, backend.hf_config).tensors()}


def test_checkpoint_of_one_expert_layout_loads_at_others(
    model: Path, ranks: Pools, tmp_path: Path
) -> None:
    """Weights and Adam's moments: the next step is the same."""
    adam = {"optimizer": "adam", "lr": 0.01, "clip_grad": 0.0}
    saved_at = {"EP2": (2, EP2 | ETP1), "one": (1, {})}
    load_at = {"EP2": [(2, TP2)], "one": [(2, EP2 | ETP1)]}
    for name, (size, flags) in saved_at.items():
        root = tmp_path / name
        expected = ranks.run(size, checkpoint_job, model, root, adam | flags, False)[0]
        for other, other_flags in load_at[name]:
            for tensors in ranks.run(other, checkpoint_job, model, root, adam | other_flags, True):
                for parameter, value in expected.items():
                    assert worst(tensors[parameter], value) <= TOLERANCE, (
                        name,
                        other_flags,
                        parameter,
                    )


# -- balance losses --------------------------------------------------------------------------------

BALANCE = {"moe_z_loss_coeff": 0.3, "moe_aux_loss_coeff": 0.5}


@pytest.mark.parametrize("experts", [None, 8])
@pytest.mark.parametrize("z_loss", [None, 0.3])
@pytest.mark.parametrize("aux_loss", [0.0, 0.5])
def test_either_balance_loss_adds_to_the_gradients_of_a_model_with_experts(
    experts: int | None, z_loss: float | None, aux_loss: float
) -> None:
    config: Any = SimpleNamespace(
        num_moe_experts=experts,
        moe_aux_loss_coeff=aux_loss,
        moe_z_loss_coeff=z_loss,
        moe_router_load_balancing_type="aux_loss",
    )
    assert uses_balance_losses(config) == (experts is not None and bool(z_loss or aux_loss))


def gradient_job(
    info: Any, flags: dict[str, Any], batches: list[TrainBatch]
) -> list[tuple[Any, dict[str, float]]]:
    """Per plan: gradients of the routers before clipping, and the metrics."""
    config = trainer_config(**flags, optimizer="sgd", actor_num_gpus_per_node=info.world_size)
    backend = MegatronBackend(config, info)
    backend.setup()
    plans = [batches[backend.data_parallel_rank]] if info.world_size > 1 else batches
    results = []
    for batch in plans:
        found = {n: g for n, g in gradients(backend, batch).items() if n.endswith("router.weight")}
        results.append((found, backend.routing.step_metrics()))
    return results


def balanced(model: Path, kind: str, **more: Any) -> dict[str, Any]:
    return {"hf_checkpoint": str(model), "moe_router_load_balancing_type": kind, **BALANCE, **more}


@pytest.mark.parametrize("kind", ["seq_aux_loss", "global_aux_loss"])
def test_balance_losses_do_not_depend_on_packing(kind: str, model: Path, ranks: Pools) -> None:
    """Of samples, of the step, and the z-loss: any micro-batches. Padding (an empty micro-batch)
    counts nothing."""
    plans = [[[0, 1], [2, 3], [4], [5]], [[0, 1, 2, 3, 4, 5]], [[5, 2], [], [0, 4, 3, 1]]]
    batches = [make_batch(plan) for plan in plans]
    (first, metrics), *others = ranks.run(1, gradient_job, balanced(model, kind), batches)[0]
    (without, none), *_ = ranks.run(1, gradient_job, {"hf_checkpoint": str(model)}, batches[:1])[0]
    assert "z_loss" not in none and metrics["load_balancing_loss"] > 0.99 and metrics["z_loss"] > 0
    for found, same_metrics in others:
        assert same_metrics == pytest.approx(metrics, rel=1e-5)
        for name, gradient in first.items():
            assert worst(found[name], gradient) <= TOLERANCE
            assert worst(without[name], gradient) > 0.1, "the losses are felt"


@pytest.mark.parametrize("kind", [pytest.param("aux_loss", marks=pytest.mark.full), "seq_aux_loss"])
def test_balance_losses_do_not_depend_on_the_layout(kind: str, model: Path, ranks: Pools) -> None:
    batch = make_batch([[0, 1], [2, 3], [4], [5]])
    flags = balanced(model, kind, use_distributed_optimizer=False)
    expected, metrics = ranks.run(1, gradient_job, flags, [batch])[0][0]
    halves = [shard(batch, [0, 1, 4], [[0, 1], [2]]), shard(batch, [2, 3, 5], [[0, 1], [2]])]
    for layout, batches in ((EP2 | ETP1, halves), (TP2 | EP2 | ETP1, [batch]), (CP2, [batch])):
        for ((found, ours),) in ranks.run(2, gradient_job, {**flags, **layout}, batches):
            assert ours == pytest.approx(metrics, rel=1e-5)
            for name, gradient in expected.items():
                assert worst(found[name], gradient) <= TOLERANCE, (layout, name)


GLOBAL_SHARDS = {
    1: [(range(6), [[0, 1, 2, 3], [4, 5]])],
    2: [([0, 1, 4], [[0, 1], [2]]), ([2, 3, 5], [[0, 1], [2]])],
    4: [([0, 4], [[0], [1]]), ([1, 5], [[0], [1]]), ([2], [[0], []]), ([3], [[0], []])],
}


@pytest.mark.parametrize(
    ("size", "data_parallel", "layout"),
    [
        (2, 2, EP2 | ETP1),
        (2, 1, TP2 | EP2 | ETP1),
        pytest.param(2, 1, CP2, marks=pytest.mark.full),
        pytest.param(4, 4, EP2 | ETP1 | DYNAMIC, marks=pytest.mark.full),
        pytest.param(4, 2, TP2 | SP | EP2 | ETP1, marks=pytest.mark.full),
    ],
    ids=["EP2 over DP2", "TP2 x EP2", "CP2", "DP4, EP2", "DP2 x TP2+SP, EP2"],
)
def test_the_global_balance_loss_is_that_of_the_step_in_one_micro_batch(
    size: int, data_parallel: int, layout: dict[str, Any], model: Path, ranks: Pools
) -> None:
    """Which is what aux_loss gives for a single micro-batch, and for no others."""
    batch = make_batch([[0, 1, 2, 3, 4, 5]])
    flags = balanced(model, "global_aux_loss", use_distributed_optimizer=False)
    alone = balanced(model, "aux_loss", use_distributed_optimizer=False)
    [[(expected, metrics)]] = ranks.once(1, gradient_job, alone, [batch])
    batches = [shard(batch, members, plan) for members, plan in GLOBAL_SHARDS[data_parallel]]
    for ((found, ours),) in ranks.run(size, gradient_job, {**flags, **layout}, batches):
        assert ours == pytest.approx(metrics, rel=1e-5)
        for name, gradient in expected.items():
            assert worst(found[name], gradient) <= TOLERANCE, name
    if layout == EP2 | ETP1:
        by_itself = ranks.run(size, gradient_job, {**alone, **layout}, batches)
        assert by_itself[0][0][1]["load_balancing_loss"] != pytest.approx(
            metrics["load_balancing_loss"], rel=1e-3
        )


# -- what a shared prompt counts -------------------------------------------------------------------


def shared_prompts(micro_batches: list[list[int]]) -> TrainBatch:
    """Five samples of one prompt, one of another, long enough to be shared where a micro-batch has
    several."""
    batch = make_batch(micro_batches)
    generator = torch.Generator().manual_seed(3)
    prompts = [torch.randint(0, VOCAB, (20,), generator=generator) for _ in range(2)]
    batch.tokens = [
        torch.cat([prompts[number == 5], tokens[-response:]])
        for number, (tokens, response) in enumerate(zip(batch.tokens, batch.response_lengths))
    ]
    return batch


def counted_job(
    info: Any, flags: dict[str, Any], batches: list[TrainBatch]
) -> list[dict[str, Any]]:
    """Per plan, each from the same weights: the routers' biases after a step, and what it
    reports."""
    settings = {
        "moe_router_bias_update_rate": 0.01,
        "optimizer": "sgd",
        "lr": 1e-12,
        "clip_grad": 0.0,
    }
    config = trainer_config(**settings, **flags, actor_num_gpus_per_node=info.world_size)
    backend = MegatronBackend(config, info)
    backend.setup()
    routers = [layer.router for layer in expert_layers(backend.model_chunks)]
    before = [router.expert_bias.clone() for router in routers]
    results = []
    for batch in [batches[backend.data_parallel_rank]] if info.world_size > 1 else batches:
        for router, bias in zip(routers, before):
            router.expert_bias.copy_(bias)
        metrics = backend.train(batch)
        names = ("loss", "grad_norm", "moe_max_load", "moe_mean_load")
        results.append(
            {"bias": torch.stack([router.expert_bias.clone() for router in routers])}
            | {name: metrics[f"train/{name}"] for name in names}
        )
    return results


def check_same_step(found: dict[str, Any], expected: dict[str, Any]) -> None:
    assert torch.equal(found["bias"], expected["bias"])
    assert found["moe_max_load"] == expected["moe_max_load"]
    assert found["moe_mean_load"] == expected["moe_mean_load"]
    assert found["loss"] == pytest.approx(expected["loss"], abs=1e-6)
    assert found["grad_norm"] == pytest.approx(expected["grad_norm"], rel=1e-5)


@st.composite
def partitions(draw: st.DrawFn) -> list[list[int]]:
    """The six samples in any order, cut anywhere."""
    order = draw(st.permutations(range(6)))
    cuts = sorted(draw(st.sets(st.integers(1, 5))))
    return [list(order[first:last]) for first, last in pairwise([0, *cuts, 6])]


def test_experts_are_counted_alike_in_any_packing(tmp_path: Path, ranks: Pools) -> None:
    """Also the expert bias, which moves by the counts: a prompt that samples share counts once for
    each of them."""
    save_tiny("glm4_moe", tmp_path)
    plans: list[list[list[int]]] = []

    @settings(max_examples=4, phases=[Phase.generate])
    @given(partitions())
    def collect(plan: list[list[int]]) -> None:
        plans.append(plan)

    collect()
    plans = [[[0], [1], [2], [3], [4], [5]], [[0, 1, 2, 3, 4, 5]], *plans]
    flags = {"hf_checkpoint": str(tmp_path)}
    alone, *others = ranks.run(1, counted_job, flags, [shared_prompts(plan) for plan in plans])[0]
    tokens = sum(tokens.numel() - 1 for tokens in shared_prompts(plans[0]).tokens)
    # two of four experts for each token
    assert alone["moe_mean_load"] == pytest.approx(tokens * 2 / 4)
    for found in others:
        check_same_step(found, alone)
    batch = shared_prompts(plans[1])
    halves = [shard(batch, [0, 1, 5], [[0, 1, 2], []]), shard(batch, [2, 3, 4], [[0, 1], [2]])]
    for layout, batches in ((CP2, [batch]), (TP2 | EP2 | ETP1, [batch]), (EP2 | ETP1, halves)):
        for (found,) in ranks.run(2, counted_job, {**flags, **layout}, batches):
            check_same_step(found, alone)


def freeze_job(info: Any, model: Path) -> tuple[dict[str, Tensor], list[str]]:
    """Weights after a step with frozen experts, and the names of the gradients that are found not
    to be finite."""
    from slime.trainer.megatron.optimizer import nonfinite_gradients
    from slime.weights.source import ModelSource

    settings = {"hf_checkpoint": str(model), "freeze_params_name_list": [r"layers.1.mlp.experts"]}
    backend = MegatronBackend(trainer_config(**settings), info)
    backend.setup()
    backend.train(make_batch(MICRO_BATCHES))
    for parameter in backend.model_chunks[0].parameters():
        if parameter.dim() == 3 and parameter.requires_grad:
            parameter.main_grad[3] = float("nan")
    bad = [name for name, _, _ in nonfinite_gradients(backend.model_chunks)]
    return {
        n: t.clone() for n, t in ModelSource(backend.model_chunks, backend.hf_config).tensors()
    }, bad


def test_frozen_experts_stay_and_bad_gradients_of_others_are_named(
    model: Path, ranks: Pools
) -> None:
    [(weights, bad)] = ranks.run(1, freeze_job, model)
    for name, before in load_file(model / "model.safetensors").items():
        frozen = "layers.1.mlp.experts" in name
        assert torch.equal(weights[name], before) == frozen, name
    assert bad and all(
        re.search(r"layers\.[23]\.mlp\.experts\.linear_fc[12]\.weight3$", name) for name in bad
    )


def test_some_experts_of_a_layer_cannot_be_frozen() -> None:
    from slime.trainer.megatron.optimizer import _check_experts

    name = "decoder.layers.1.mlp.experts.linear_fc1.weight"
    _check_experts({f"{name}0": True, f"{name}1": True})
    with pytest.raises(UserError, match="some experts of"):
        _check_experts({f"{name}0": True, f"{name}1": False})


def clip_job(info: Any, model: Path, flags: dict[str, Any], batches: list[TrainBatch]) -> float:
    """This rank's share of Σ of the squares of Adam's first moments after one step."""
    from slime.trainer.megatron.offload import torch_optimizers

    settings = {
        "hf_checkpoint": str(model),
        "clip_grad": 0.01,
        "adam_beta1": 0.5,
        "rollout_batch_size": 12,
    }
    backend = MegatronBackend(
        trainer_config(**settings, **flags, actor_num_gpus_per_node=info.world_size), info
    )
    backend.setup()
    assert backend.train(batches[backend.data_parallel_rank])["train/grad_norm"] > 0.1, (
        "there is something to clip"
    )
    states = [
        state for inner in torch_optimizers(backend.optimizer) for state in inner.state.values()
    ]
    return sum(float(state["exp_avg"].square().sum()) for state in states)


def test_adam_clips_dense_and_expert_gradients_by_one_norm(model: Path, ranks: Pools) -> None:
    """Of moments that started at 0, the norm after a step is (1 - beta1) times that of the clipped
    gradient."""
    batch = make_batch(MICRO_BATCHES)
    batches = [shard(batch, members, plan) for members, plan in DATA_PARALLEL[2]]
    for shares in (
        ranks.run(1, clip_job, model, {}, [batch]),
        ranks.run(2, clip_job, model, EP2 | ETP1, batches),
    ):
        assert sum(shares) ** 0.5 == pytest.approx(0.5 * 0.01, rel=1e-3)


def bias_job(
    info: Any, model: Path, flags: dict[str, Any], reward: float = 1.0
) -> tuple[Tensor, Tensor]:

    config = trainer_config(hf_checkpoint=str(model), optimizer="sgd", lr=0.0, **flags)
    backend = MegatronBackend(config, info)
    backend.setup()
    layer = backend.routing.layers[0]
    before = layer.router.expert_bias.clone()
    batch = make_batch()
    batch.rewards[0] = reward
    backend.train(batch)
    return before, layer.router.expert_bias.clone()


def test_expert_bias_moves_only_when_asked(ranks: Pools, tmp_path: Path) -> None:
    save_tiny("glm4_moe", tmp_path)
    before, after = ranks.run(1, bias_job, tmp_path, {})[0]
    assert torch.equal(before, after) and before.abs().sum() > 0
    before, after = ranks.run(1, bias_job, tmp_path, {"moe_router_bias_update_rate": 0.25})[0]
    assert {round(x, 4) for x in (after - before).abs().tolist()} <= {
        0.0,
        0.25,
    } and not torch.equal(before, after)
    flags = {"moe_router_bias_update_rate": 0.25, "check_for_nan_in_loss_and_grad": False}
    for reward in (float("nan"), 3e38):  # found in the loss, and in the gradients
        before, after = ranks.run(1, bias_job, tmp_path, flags, reward)[0]
        assert torch.equal(before, after), "a step that is skipped leaves everything as it was"


# -- refusals --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("setting", "said"),
    [
        ({"moe_router_load_balancing_type": "sinkhorn"}, "seq_aux_loss"),
        ({"moe_aux_loss_coeff": (0.1, 0.2)}, "0.1 0.2"),
    ],
)
def test_settings_that_would_be_ignored_are_refused(setting: dict[str, Any], said: str) -> None:
    for model in ({}, {"num_moe_experts": 4}):
        with pytest.raises(UserError) as caught:
            expert_arguments(model | setting)
        assert "--" + next(iter(setting)).replace("_", "-") in caught.value.what and said in str(
            caught.value
        )


def fusion_job(info: Any, model: Path, fused: bool) -> tuple[bool, list[Tensor], float]:
    flags = {"hf_checkpoint": str(model), "moe_permute_fusion": fused}
    backend = MegatronBackend(
        trainer_config(**flags, actor_num_gpus_per_node=info.world_size), info
    )
    backend.setup()
    scores = backend.log_probs(make_batch())
    assert scores is not None
    norm = backend.train(make_batch())["train/grad_norm"]
    return bool(backend.model_chunks[0].config.moe_permute_fusion), scores, norm


def test_fused_permutation_is_accepted_and_changes_no_bit(ranks: Pools, model: Path) -> None:
    """The kernel belongs to Megatron's dispatchers, which never run: with the flag they would want
    it at once."""
    check_architecture(trainer_config(hf_checkpoint=str(model), moe_permute_fusion=True))
    for arguments in ({}, {"num_moe_experts": 4}):  # of a dense model too
        found = expert_arguments({**arguments, "moe_permute_fusion": True})
        assert found["moe_permute_fusion"] is False
    [(kernel, expected, norm)], [(kernel_too, scores, norm_too)] = (
        ranks.run(1, fusion_job, model, fused) for fused in (False, True)
    )
    assert not kernel and not kernel_too
    assert norm == norm_too and all(
        torch.equal(a, b) for a, b in zip(expected, scores, strict=True)
    )


@pytest.mark.parametrize(
    ("flag", "value", "said"),
    [
        ("moe_router_fusion", True, "Transformer Engine too"),
        ("moe_expert_capacity_factor", 1.0, "never dropped"),
    ],
)
def test_what_the_experts_here_do_not_have_is_refused_when_flags_are_read(
    flag: str, value: Any, said: str
) -> None:
    with pytest.raises(UserError, match=f"--{flag.replace('_', '-')}(.|\\n)*{said}"):
        trainer_config(**{flag: value})


@pytest.mark.parametrize(
    ("flags", "number"),
    [
        (
            {"expert_model_parallel_size": 3, "actor_num_gpus_per_node": 3},
            "8 experts cannot be divided by 3",
        ),
        (
            {"expert_tensor_parallel_size": 3, "actor_num_gpus_per_node": 3},
            "16 intermediate features of an expert",
        ),
        (
            {"expert_tensor_parallel_size": 2, "actor_num_gpus_per_node": 3},
            "3 trainer ranks cannot be divided by 2",
        ),
    ],
)
def test_expert_layouts_that_do_not_fit_are_refused_by_number(
    flags: dict[str, Any], number: str, model: Path
) -> None:
    spec = family_of(model).model_spec(model)
    with pytest.raises(UserError) as caught:
        check_layout(spec, trainer_config(**{"expert_tensor_parallel_size": 1, **flags}))
    assert number in caught.value.why


def test_expert_parallelism_of_a_dense_model_is_refused(model: Path) -> None:
    spec = family_of(model).model_spec(model)
    facts = {key: value for key, value in spec.transformer.items() if "moe" not in key}
    dense = dataclasses.replace(spec, transformer=facts)
    with pytest.raises(UserError, match="no experts"):
        check_layout(dense, trainer_config(actor_num_gpus_per_node=2, expert_model_parallel_size=2))
