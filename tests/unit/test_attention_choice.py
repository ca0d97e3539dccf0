"""Which way attention takes to its heads, and which kernel: decided without a GPU."""

from __future__ import annotations

import sys
import types
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from slime.trainer.megatron import attention, backend, device  # noqa: F401  (prepares the host for megatron)
from slime.trainer.megatron.attention import PackedAttention, PackedSelfAttention
from slime.trainer.megatron.layers import RMSNorm
from slime.trainer.megatron.packed import PackedSequences
from slime.trainer.megatron.rotary import Rotate
from tests.support.trainer_ranks import Pools
from tests.support.trainers import train_job

# isort: split
from megatron.core.transformer.identity_op import IdentityOp

ON_GPU, ON_CPU = SimpleNamespace(is_cuda=True), SimpleNamespace(is_cuda=False)


class TENorm(torch.nn.Module):
    """Stands for Transformer Engine's."""


class FastNorm(RMSNorm):
    """Of ours, and not ours: it may compute something else."""


def norm(kind: type = RMSNorm) -> torch.nn.Module:
    config = SimpleNamespace(
        params_dtype=torch.float32, sequence_parallel=False, layernorm_zero_centered_gamma=False
    )
    return kind(config, 4) if issubclass(kind, RMSNorm) else kind()


def layer(q: Any, k: Any, groups: int = 2, ranks: int = 1, **more: Any) -> Any:
    return SimpleNamespace(
        q_layernorm=q,
        k_layernorm=k,
        world_size=ranks,
        config=SimpleNamespace(num_query_groups=groups, attention_output_gate=False),
        **more,
    )


@pytest.fixture
def kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(device, "has_kernels", lambda: True)


@pytest.mark.usefixtures("kernels")
@pytest.mark.parametrize(
    ("given", "expected"),
    [
        (layer(norm(), norm()), True),
        (layer(None, None), True),
        (layer(IdentityOp(), IdentityOp()), True),
        (layer(IdentityOp(), None), True),
        (layer(norm(TENorm), norm(TENorm)), False),
        (layer(norm(FastNorm), norm(FastNorm)), False),
        (layer(norm(), norm(TENorm)), False),
        (layer(norm(), None), False),
        (layer(IdentityOp(), norm()), False),
        (layer(norm(), norm(), groups=2, ranks=2), True),
        (layer(norm(), norm(), groups=8, ranks=2), True),
        (layer(norm(), norm(), groups=2, ranks=4), False),
        (layer(None, None, groups=1, ranks=2), False),
    ],
    ids=[
        "ours",
        "none",
        "identities",
        "identity and none",
        "Transformer Engine's",
        "a class of ours, changed",
        "one of another kind",
        "queries only",
        "keys only",
        "a group per rank",
        "several groups per rank",
        "fewer groups than ranks",
        "one group, two ranks",
    ],
)
def test_what_takes_one_pass(given: Any, expected: bool) -> None:
    assert PackedSelfAttention._takes_one_pass(given, ON_GPU) is expected
    assert PackedSelfAttention._takes_one_pass(given, ON_CPU) is False


def test_without_a_compiler_there_are_several_passes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(device, "has_gpu", lambda: True)
    for found in (True, False):
        monkeypatch.setattr(device, "_has_compiler", lambda found=found: found)
        assert PackedSelfAttention._takes_one_pass(layer(norm(), norm()), ON_GPU) is found
    monkeypatch.setattr(device, "has_gpu", lambda: False)
    assert not device.has_kernels()


def test_a_compiler_is_looked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[str] = []
    monkeypatch.setattr(device.shutil, "which", lambda name: asked.append(name))
    monkeypatch.setenv("CC", "my-cc")
    assert not device._has_compiler.__wrapped__() and asked == ["my-cc", "gcc", "clang"]
    monkeypatch.setattr(device.shutil, "which", lambda name: name if name == "clang" else None)
    assert device._has_compiler.__wrapped__()


class Pass(torch.nn.Module):
    """Of the fake kernel, what it was given."""

    def __init__(self) -> None:
        super().__init__()
        self.given: tuple[Any, ...] = ()

    def apply(self, *args: Any) -> tuple[Tensor, ...]:  # type: ignore[override]
        self.given = args
        return args[0], args[0], args[0]


@pytest.mark.parametrize("with_norm", [True, False])
def test_what_the_kernel_is_given(with_norm: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    kernel = Pass()
    name = "slime.trainer.kernels.attention_heads"
    monkeypatch.setitem(sys.modules, name, SimpleNamespace(SplitNormRotate=kernel))
    q, k = (norm(), norm()) if with_norm else (IdentityOp(), IdentityOp())
    mixed = torch.randn(5, 1, 2, 24)
    given = layer(
        q,
        k,
        num_attention_heads_per_partition=8,
        num_query_groups_per_partition=2,
        get_query_key_value_tensors=lambda hidden, split_qkv: (
            (mixed, [16, 4, 4]) if not split_qkv else None
        ),
    )
    given.config.rotary_interleaved = True
    PackedSelfAttention._heads_in_one_pass(
        given, None, cos := torch.ones(5, 1, 2), sin := torch.zeros(5, 1, 2)
    )
    flat, query_weight, key_weight, *rest = kernel.given
    assert torch.equal(flat, mixed[:, 0]) and rest == [
        cos,
        sin,
        4,
        1e-5 if with_norm else 0.0,
        True,
    ]
    assert (query_weight, key_weight) == ((q.weight, k.weight) if with_norm else (None, None))


# -- which kernel ----------------------------------------------------------------------------------

ENDS = torch.tensor([0, 2, 5], dtype=torch.int32)
SEQUENCES = PackedSequences(cu_seqlens_q=ENDS, cu_seqlens_kv=ENDS, max_seqlen_q=3, max_seqlen_kv=3)


def test_kernels_for_one_head_size_get_zeros_behind_the_shorter_heads() -> None:
    """Seven tokens of two heads; queries and keys are wider than values."""
    wide, narrow = torch.ones(7, 2, 6), torch.ones(7, 2, 4)
    given: list[Tensor] = []

    @attention._in_one_width
    def kernel(query: Tensor, key: Tensor, value: Tensor, factor: int) -> Tensor:
        given.extend((query, key, value))
        return value * factor

    assert torch.equal(kernel(wide, wide, narrow, 3), 3 * narrow)
    assert given[0] is wide and given[1] is wide
    assert torch.equal(given[2], F.pad(narrow, (0, 2)))


@pytest.fixture
def called(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """Names of the kernels that were taken; flash-attn-4 is "installed"."""
    names: list[str] = []

    def torchs(
        query: Tensor,
        key: Tensor,
        value: Tensor,
        sequences: PackedSequences,
        scale: float,
        window: int | None,
    ) -> Tensor:
        assert sequences is SEQUENCES and scale == 0.5
        names.append("torch" if window is None else f"torch, {window}")
        return torch.zeros_like(query)

    def fast(query: Tensor, key: Tensor, value: Tensor, **options: Any) -> Any:
        ends = options.pop("cu_seqlens_q"), options.pop("cu_seqlens_k")
        assert ends[0] is ends[1] is ENDS
        hidden = options.pop("window_size", None)
        assert options == {
            "max_seqlen_q": 3,
            "max_seqlen_k": 3,
            "softmax_scale": 0.5,
            "causal": True,
        }
        names.append("flash-attn-4" if hidden is None else f"flash-attn-4, {hidden}")
        out = query.new_ones(*query.shape[:2], value.size(-1))
        return (out, None) if len(names) % 2 else out  # versions differ

    monkeypatch.setattr(attention, "torch_varlen", torchs)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda place: (9, 0))
    monkeypatch.setattr(attention, "_flash4_kernel", lambda: fast)
    yield names
    torch.use_deterministic_algorithms(False)


def attend(dim: int = 64, value_dim: int | None = None, window: int | None = None) -> Tensor:
    shapes = (4, dim), (2, dim), (2, value_dim or dim)
    query, key, value = (torch.randn(5, *shape, dtype=torch.bfloat16) for shape in shapes)
    config = SimpleNamespace(
        attention_dropout=0.0,
        kv_channels=dim,
        window_size=window and (window - 1, 0),
        window_attn_skip_freq=None,
    )
    core = PackedAttention(config, 1, softmax_scale=0.5)
    return core(query, key, value, SEQUENCES)


def test_flash_attention_4_comes_first(called: list[str]) -> None:
    for _ in range(2):
        assert attend().shape == (5, 4, 64) and attend(128, 64).shape == (5, 4, 64)
    assert called == ["flash-attn-4"] * 4


def test_each_kernel_is_told_the_window(called: list[str]) -> None:
    """flash-attn-4 counts the tokens before a token, the window the token too."""
    attend(window=2)
    attend(264, window=2)
    assert called == ["flash-attn-4, (1, 0)", "torch, 2"]


@pytest.mark.parametrize(("major", "widest"), [(9, 256), (10, 128)])
def test_torchs_kernel_for_wide_heads(
    major: int, widest: int, called: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda place: (major, 0))
    attend(widest)
    attend(widest, 64)
    assert called == ["flash-attn-4"] * 2
    attend(widest + 8)
    attend(64, widest + 8)
    attend(24)
    assert called[2:] == ["torch"] * 3


def test_torchs_kernel_where_bits_must_repeat(called: list[str]) -> None:
    torch.use_deterministic_algorithms(True)
    attend()
    assert called == ["torch"]


def test_torchs_kernel_where_there_is_no_other(
    called: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(attention, "_flash4_kernel", lambda: None)
    attend()
    assert called == ["torch"]


def flash4(
    monkeypatch: pytest.MonkeyPatch, capability: tuple[int, int]
) -> Callable[..., Any] | None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda place: capability)
    monkeypatch.setenv("FLASH_ATTENTION_CUTE_DSL_CACHE_ENABLED", "1")  # put back afterwards
    monkeypatch.setattr(attention, "_flash4_kernel", attention._flash4_kernel.__wrapped__)
    return attention._flash4(torch.device("cuda", 0), 64)


@pytest.mark.parametrize("capability", [(9, 0), (10, 0), (8, 0), (12, 0)])
def test_flash_attention_4_is_for_some_gpus(
    capability: tuple[int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    def kernel() -> None: ...

    package = types.ModuleType("flash_attn")
    package.cute = types.SimpleNamespace(flash_attn_varlen_func=kernel)  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "flash_attn", package)
    monkeypatch.setitem(sys.modules, "flash_attn.cute", package.cute)  # type: ignore[arg-type]
    assert flash4(monkeypatch, capability) is (kernel if capability[0] in (9, 10) else None)


@pytest.mark.parametrize("missing", [True, False])
def test_flash_attention_4_may_be_missing_or_another_version(
    missing: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(
        sys.modules, "flash_attn", None if missing else types.ModuleType("flash_attn")
    )
    monkeypatch.delitem(sys.modules, "flash_attn.cute", raising=False)
    assert flash4(monkeypatch, (9, 0)) is None


# -- weights that no module is called for ----------------------------------------------------------


def heads_at_once(
    self: PackedSelfAttention, hidden: Tensor, cos: Tensor, sin: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """`PackedSelfAttention._heads_in_one_pass` in torch: it reads the norms' weights, and calls no
    norm."""
    mixed, sizes = self.get_query_key_value_tensors(hidden, split_qkv=False)
    dim = self.hidden_size_per_attention_head
    query, key, value = (
        x.reshape(hidden.size(0), -1, dim) for x in mixed[:, 0].split(sizes, dim=-1)
    )
    query = F.rms_norm(query, (dim,), self.q_layernorm.weight, self.q_layernorm.eps)
    key = F.rms_norm(key, (dim,), self.k_layernorm.weight, self.k_layernorm.eps)
    return Rotate.apply(query, cos, sin, False), Rotate.apply(key, cos, sin, False), value


def one_pass_job(info: Any, flags: dict[str, Any]) -> dict[str, Any]:
    with mock.patch.object(PackedSelfAttention, "_heads", heads_at_once):
        return train_job(info, flags)


def test_late_parameters_are_awaited_for_norms_that_are_not_called(ranks: Pools) -> None:
    late = {"overlap_grad_reduce": True, "overlap_param_gather": True, "ddp_bucket_size": 1}
    plain, overlapped = (ranks.run(2, one_pass_job, flags) for flags in ({}, late))
    for ours, theirs in zip(overlapped, plain):
        assert all(
            torch.allclose(ours["weights"][n], theirs["weights"][n], atol=1e-4)
            for n in theirs["weights"]
        )


@pytest.mark.parametrize(("window", "size"), [(None, (-1, 0)), (4, (3, 0))])
def test_torchs_kernel_is_given_the_window(
    window: int | None, size: tuple[int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """-1 is no limit; a window counts the token itself."""

    def kernel(*given: Any, scale: float, window_size: tuple[int, int], enable_gqa: bool) -> Tensor:
        assert window_size == size and scale == 0.5 and enable_gqa
        query: Tensor = given[0]
        return query

    monkeypatch.setattr("torch.nn.attention.varlen.varlen_attn", kernel)
    query, key = torch.randn(5, 4, 64), torch.randn(5, 2, 64)
    assert torch.equal(attention.torch_varlen(query, key, key, SEQUENCES, 0.5, window), query)
