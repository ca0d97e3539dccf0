"""What megatron-core takes from Apex and gets from slime: products that add to gradient buffers,
one norm of many tensors."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

from slime.algorithms.products import add_product
from slime.trainer.megatron import device
from slime.trainer.megatron.backend import MegatronBackend
from tests.support.trainer_ranks import Pools, make_batch, shard, tiny_spec, trainer_config
from tests.support.trainers import gradients, trainer

# -- products --------------------------------------------------------------------------------------


@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize(
    ("sink", "factors"),
    [
        (torch.float32, torch.float32),
        (torch.bfloat16, torch.bfloat16),
        (torch.float32, torch.bfloat16),
        (torch.float32, torch.float16),
        (torch.float64, torch.float32),
    ],
    ids=str,
)
def test_a_product_is_added_in_place(
    sink: torch.dtype, factors: torch.dtype, transposed: bool
) -> None:
    torch.manual_seed(0)
    a = torch.randn(5, 3).to(factors).t() if transposed else torch.randn(3, 5).to(factors)
    b, start = torch.randn(5, 4).to(factors), torch.randn(3, 4).to(sink)
    rows = torch.zeros(3, 6, dtype=sink)
    result = rows[:, 1:5]  # part of a buffer
    result.copy_(start)
    add_product(result, a, b)
    exact = start.double() + a.double() @ b.double()
    roughest = max(torch.finfo(sink).eps, torch.finfo(factors).eps)
    torch.testing.assert_close(result.double(), exact, rtol=4 * roughest, atol=4 * roughest)
    assert not rows[:, 0].any() and not rows[:, 5].any()


@pytest.fixture(scope="module")
def backend() -> Iterator[MegatronBackend]:
    made = trainer()
    yield made
    made.close()


@pytest.fixture
def products(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, ...]]:
    """Shapes of what was added to."""
    shapes: list[tuple[int, ...]] = []

    def noted(sink: Tensor, a: Tensor, b: Tensor) -> None:
        shapes.append(tuple(sink.shape))
        add_product(sink, a, b)

    monkeypatch.setattr(device, "add_product", noted)
    return shapes


def check_column_parallel(backend: MegatronBackend, products: list[tuple[int, ...]]) -> None:
    """Two micro-batches through one layer: their products are in the buffer, once each."""
    [chunk] = backend.model_chunks
    chunk.zero_grad_buffer()
    layer = chunk.module.decoder.layers[0].mlp.linear_fc1
    expected = torch.zeros_like(layer.weight)
    for _ in range(2):
        x = torch.randn(6, 1, 32, requires_grad=True)
        out, _ = layer(x)
        grad = torch.randn_like(out)
        out.backward(grad)
        expected += grad[:, 0].t() @ x.detach()[:, 0]
        assert x.grad is not None
        torch.testing.assert_close(x.grad[:, 0], grad[:, 0] @ layer.weight.detach())
        assert layer.weight.grad is None
    torch.testing.assert_close(layer.weight.main_grad, expected)
    assert products == [(128, 32)] * 2


def test_a_layer_adds_its_gradient_to_the_buffer(
    backend: MegatronBackend, products: list[tuple[int, ...]]
) -> None:
    check_column_parallel(backend, products)


def test_megatron_may_have_been_imported_before(
    backend: MegatronBackend, products: list[tuple[int, ...]], monkeypatch: pytest.MonkeyPatch
) -> None:
    from megatron.core.tensor_parallel import layers

    # as an import without Apex leaves it
    monkeypatch.setattr(layers, "_grad_accum_fusion_available", False)
    monkeypatch.delattr(layers, "fused_weight_gradient_mlp_cuda")
    device._offer_accumulating_products.__wrapped__()
    assert layers._grad_accum_fusion_available
    check_column_parallel(backend, products)


def test_apexs_own_products_are_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    from megatron.core.tensor_parallel import layers

    own = object()
    monkeypatch.setattr(layers, "_grad_accum_fusion_available", True)
    monkeypatch.setattr(layers, "fused_weight_gradient_mlp_cuda", own)
    device._offer_accumulating_products.__wrapped__()
    assert layers.fused_weight_gradient_mlp_cuda is own


def both_ways_job(info: Any, flags: dict[str, Any]) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Gradients with products that add, and with gradients that autograd writes out."""
    config = trainer_config(**flags, actor_num_gpus_per_node=info.world_size)
    backend = MegatronBackend(config, info)
    backend.setup(spec=tiny_spec(tie="tensor_model_parallel_size" in flags), initialise=True)
    batch = make_batch([[0, 1], [2, 3], [4], [5]])
    if backend.layout.data_parallel_size == 2:
        batch = shard(batch, [[0, 1, 4], [2, 3, 5]][backend.data_parallel_rank], [[0, 1], [2]])
    fused = gradients(backend, batch)
    layers = [
        m
        for chunk in backend.model_chunks
        for m in chunk.modules()
        if "gradient_accumulation_fusion" in vars(m)
    ]
    assert len(layers) >= 4 * 2 and all(layer.gradient_accumulation_fusion for layer in layers)
    for layer in layers:
        layer.gradient_accumulation_fusion = False
    return fused, gradients(backend, batch)


OVERLAP = {"overlap_grad_reduce": True, "ddp_bucket_size": 1}


@pytest.mark.parametrize(
    "flags",
    [
        OVERLAP,
        {**OVERLAP, "freeze_params_name_list": [r"mlp", "embedding"], "bf16": True},
        {
            "tensor_model_parallel_size": 2,
            "sequence_parallel": True,
            "freeze_params_name_list": [r"layers\.1\."],
        },
    ],
    ids=["dp2, overlapped", "dp2, overlapped, frozen, bfloat16", "tp2+sp, frozen, tied"],
)
def test_gradients_are_those_of_autograd(ranks: Pools, flags: dict[str, Any]) -> None:
    for fused, plain in ranks.run(2, both_ways_job, flags):
        assert fused.keys() == plain.keys() and len(fused) > 8
        for name, expected in plain.items():
            scale = float(expected.abs().max())
            assert scale > 0, name
            assert (fused[name] - expected).abs().max() <= (
                2e-2 if flags.get("bf16") else 1e-5
            ) * scale, name


# -- the norm --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "lists",
    [
        [[torch.tensor([3.0, 4.0])]],
        [[torch.ones(3, 2), torch.full((4,), -2.0)], [torch.tensor(5.0)]],
        [[torch.zeros(0), torch.ones(7)], []],
        [
            [torch.linspace(-1, 1, 1001, dtype=torch.bfloat16), torch.ones(3)],
            [torch.ones(2, dtype=torch.float16)],
        ],
        [[torch.full((100,), 300.0, dtype=torch.float16)] * 50],  # more than float16 can say
        [[]],
        [],
    ],
    ids=[
        "one",
        "several lists",
        "an empty tensor",
        "several dtypes",
        "float16",
        "an empty list",
        "no list",
    ],
)
def test_the_norm_is_that_of_all_entries(lists: list[list[Tensor]]) -> None:
    norm, none = device._norm_at_once(65536, torch.zeros(1, dtype=torch.int), lists, False)
    whole = torch.cat(
        [torch.zeros(0), *(t.double().flatten() for tensors in lists for t in tensors)]
    )
    assert norm.shape == (1,) and norm.dtype == torch.float32 and none is None
    assert float(norm) == pytest.approx(float(whole.norm()), rel=1e-6)


def test_the_norm_replaces_megatrons_slow_one_only(monkeypatch: pytest.MonkeyPatch) -> None:
    from megatron.core.optimizer import clip_grads
    from megatron.core.utils import local_multi_tensor_l2_norm

    apexs = object()
    monkeypatch.setattr(clip_grads, "l2_norm_impl", apexs)
    device._measure_norms_at_once()
    assert clip_grads.l2_norm_impl is apexs
    monkeypatch.setattr(clip_grads, "l2_norm_impl", local_multi_tensor_l2_norm)
    device._measure_norms_at_once()
    flag, tensors = torch.zeros(1, dtype=torch.int), [torch.randn(5), torch.randn(3, 3)]
    ours, _ = clip_grads.multi_tensor_applier(clip_grads.l2_norm_impl, flag, [tensors], False)
    theirs, _ = clip_grads.multi_tensor_applier(local_multi_tensor_l2_norm, flag, [tensors], False)
    assert clip_grads.l2_norm_impl is device._norm_at_once
    torch.testing.assert_close(ours, theirs)
