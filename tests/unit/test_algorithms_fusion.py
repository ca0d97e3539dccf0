"""What a GPU runs as one compiled kernel equals the eager lines that a CPU runs."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor

from slime.algorithms import fusion, logprobs
from slime.trainer.megatron import moe_dispatch, rotary

Call = tuple[Callable[..., Tensor], Callable[[int, torch.dtype], list[Any]]]


def _stats(n: int) -> Tensor:
    stats = torch.rand(4, n)
    stats[0] = -1e30
    return stats


CALLS: dict[str, Call] = {
    "running softmax": (
        logprobs._absorb,
        lambda n, dtype: [
            torch.randn(n, 3 * n).to(dtype),
            torch.randint(-n, 4 * n, (n,)),
            _stats(n),
            0.7,
            True,
        ],
    ),
    "slope": (
        logprobs._logit_grad,
        lambda n, dtype: [
            torch.randn(n, 3 * n).to(dtype),
            0.7,
            torch.rand(n, 1) + 9,
            torch.randn(n, 1),
        ],
    ),
    "slope with entropy": (
        logprobs._logit_grad,
        lambda n, dtype: [
            torch.randn(n, n).to(dtype),
            1.0,
            torch.rand(n, 1) + 9,
            torch.randn(n, 1),
            tuple(torch.randn(2, n, 1)),
        ],
    ),
    "rotation of a part": (
        rotary.rotate,
        lambda n, dtype: [torch.randn(n, 2, 12).to(dtype), *torch.randn(2, n, 1, 4).to(dtype)],
    ),
    "interleaved rotation": (
        rotary.rotate,
        lambda n, dtype: [torch.randn(n, 2, 8).to(dtype), *torch.randn(2, n, 1, 4).to(dtype), True],
    ),
    "sum of rows": (
        moe_dispatch._summed,
        lambda n, dtype: [torch.randn(2 * n, 6).to(dtype), torch.randint(0, 2 * n, (n, 4))],
    ),
}


@pytest.fixture(autouse=True)
def traceable_tensors(monkeypatch: pytest.MonkeyPatch) -> None:
    """The CPU's stand-in for ``Tensor.to`` (slime/trainer/megatron/device.py), if it is there, is
    nothing to trace."""
    monkeypatch.setattr(torch.Tensor, "to", torch._C.TensorBase.to)


def _compare(name: str, backend: str) -> None:
    call, arguments = CALLS[name]
    compiled = torch.compile(call.__wrapped__, fullgraph=True, dynamic=True, backend=backend)  # type: ignore[attr-defined]
    for dtype, tolerance in ((torch.float32, 1e-5), (torch.bfloat16, 2e-2)):
        for n in (5, 8):
            torch.manual_seed(n)
            values = arguments(n, dtype)
            mine = compiled(*[v.clone() if isinstance(v, Tensor) else v for v in values])
            assert torch.allclose(mine, call(*values), rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("name", CALLS)
def test_can_be_traced_as_one_graph(name: str) -> None:
    _compare(name, "aot_eager")


@pytest.mark.full
@pytest.mark.parametrize("name", CALLS)
def test_compiled_equals_eager(name: str) -> None:
    _compare(name, "inductor")


def test_many_forms_of_arguments_are_no_error(monkeypatch: pytest.MonkeyPatch) -> None:
    """torch's own limit of 8 would raise, since each of these must be one graph."""
    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend="eager"))
    compiled = fusion.whole_graph(lambda x: x + 1)
    for dimensions in range(1, 13):
        x = torch.zeros([2] * dimensions)
        assert torch.equal(compiled(x), x + 1)


def test_a_cpu_compiles_nothing() -> None:
    values = CALLS["sum of rows"][1](5, torch.float32)
    before = torch._dynamo.utils.counters["frames"]["total"]
    moe_dispatch._summed(*values)
    assert torch._dynamo.utils.counters["frames"]["total"] == before
