"""The Triton kernels against torch in float64; `test_kernels` says where the cases run.

As a script it runs all of them on a CPU, where triton has to be told TRITON_INTERPRET=1, and prints
one JSON object: the largest error by case, or what happened instead.
"""

from __future__ import annotations

import json
import sys
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any
from unittest import mock

import torch
from torch import Tensor

from slime.models.quantised import Fp8, Int4

CPU = torch.device("cpu")
#: Largest error, relative to the largest entry of a tensor; of 16 bits the last one, since the
#: interpreter truncates.
TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 2**-7, torch.float16: 2**-10}


def worst(ours: Sequence[Tensor | None], exact: Sequence[Tensor]) -> float:
    """Largest difference, relative to the largest entry of its tensor (or to 1e-3, if that is
    larger)."""
    errors = [0.0]
    for a, b in zip(ours, exact, strict=True):
        assert a is not None and a.shape == b.shape, (
            f"{None if a is None else a.shape} instead of {b.shape}"
        )
        if b.numel():
            a, b = a.detach(), b.detach()
            errors.append(float((a.double() - b).abs().max() / b.abs().max().clamp(min=1e-3)))
    return max(errors)


def compared(
    ours: Callable[..., Sequence[Tensor]],
    exact: Callable[..., Sequence[Tensor]],
    inputs: Sequence[Tensor],
) -> float:
    """Of both functions' results and of the gradients of all ``inputs`` that have one; ``exact``
    gets float64."""
    doubles = [x.detach().double().requires_grad_(x.requires_grad) for x in inputs]
    outs, references = ours(*inputs), exact(*doubles)
    assert all(out.dtype == inputs[0].dtype for out in outs)
    grads = [torch.randn_like(out) for out in outs]
    wanted = [x for x in inputs if x.requires_grad]
    back = torch.autograd.grad(outs, wanted, grads)
    assert all(grad.dtype == x.dtype for grad, x in zip(back, wanted))
    given = [(out, grad.double()) for out, grad in zip(references, grads) if out.requires_grad]
    expected = torch.autograd.grad(
        [out for out, _ in given],
        [x for x in doubles if x.requires_grad],
        [grad for _, grad in given],
        allow_unused=True,
        materialize_grads=True,
    )
    return worst([*outs, *back], [*references, *expected])


# -- the norm --------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Norm:
    """Of ``shape``; ``frozen``: what gets no gradient; ``programs``: at most so many in the
    backward pass."""

    shape: tuple[int, ...]
    dtype: torch.dtype = torch.float32
    frozen: str = ""
    programs: int | None = None
    transposed: bool = False

    def error(self, device: torch.device) -> float:
        from slime.trainer.kernels import rms_norm

        eps = 1e-5

        def ours(x: Tensor, weight: Tensor) -> list[Tensor]:
            return [
                rms_norm.RMSNormFunction.apply(
                    x.transpose(0, 1) if self.transposed else x, weight, eps
                )
            ]

        def exact(x: Tensor, weight: Tensor) -> list[Tensor]:
            x = x.transpose(0, 1) if self.transposed else x
            return [x * (x.square().mean(-1, keepdim=True) + eps).rsqrt() * weight]

        inputs = [
            (torch.randn(shape, device=device).to(self.dtype) * 3).requires_grad_(
                name != self.frozen
            )
            for name, shape in (("x", self.shape), ("weight", self.shape[-1:]))
        ]
        limit = self.programs or rms_norm._MAX_PROGRAMS
        with mock.patch.object(rms_norm, "_MAX_PROGRAMS", limit):
            return compared(ours, exact, inputs)


NORMS = {
    "odd width": Norm((5, 7)),
    "one row": Norm((1, 16)),
    "a vector": Norm((12,)),
    "no rows": Norm((0, 8)),
    "several tiles, the last one not full": Norm((70, 128)),
    "several tiles per program": Norm((170, 100), programs=2),
    "wide": Norm((3, 2560)),
    "wider than a tile": Norm((3, 5000)),
    "[tokens, 1, width], strided": Norm((3, 40, 24), transposed=True),
    "frozen weight": Norm((9, 20), frozen="weight"),
    "input without gradient": Norm((9, 20), frozen="x"),
    "bfloat16": Norm((33, 96), torch.bfloat16),
    "float16": Norm((33, 96), torch.float16),
}


# -- heads -----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Heads:
    """Arguments of `SplitNormRotate` by their sizes; ``strided``: none of the inputs is
    contiguous."""

    tokens: int
    groups: int
    per_group: int
    dim: int
    half: int
    interleaved: bool = False
    norm: bool = True
    dtype: torch.dtype = torch.float32
    angles: torch.dtype | None = None
    frozen: str = ""
    strided: bool = False
    query_only: bool = False

    def error(self, device: torch.device) -> float:
        from slime.trainer.kernels.attention_heads import SplitNormRotate

        def random(name: str, *shape: int) -> Tensor:
            step = 2 if self.strided else 1
            x = torch.randn(*shape[:-1], shape[-1] * step, device=device).to(self.dtype)[
                ..., ::step
            ]
            return x.detach().requires_grad_(name != self.frozen)

        shape = (self.tokens, self.groups, (self.per_group + 2) * self.dim)
        inputs = [random("mixed", *shape)]
        if self.norm:
            inputs += [
                random("weights", self.dim)
                .detach()
                .contiguous()
                .requires_grad_(self.frozen != "weights")
                for _ in range(2)
            ]
        angles = torch.randn(self.tokens, 1, self.half * (2 if self.strided else 1), device=device)
        cos, sin = (x.to(self.angles or self.dtype)[..., :: 2 if self.strided else 1]
                    for x in (angles.cos(), angles.sin()))  # fmt: skip
        kept = slice(0, 1 if self.query_only else 3)

        def ours(mixed: Tensor, *weights: Tensor) -> Sequence[Tensor]:
            norms = weights or (None, None)
            return SplitNormRotate.apply(
                mixed, *norms, cos, sin, self.per_group, 1e-5, self.interleaved
            )[kept]

        def exact(mixed: Tensor, *weights: Tensor) -> Sequence[Tensor]:
            return self.written_out(mixed, weights, cos.double(), sin.double())[kept]

        return compared(ours, exact, inputs)

    def written_out(
        self, mixed: Tensor, weights: Sequence[Tensor], cos: Tensor, sin: Tensor
    ) -> list[Tensor]:
        """Query, key, value."""
        heads = mixed.unflatten(-1, (self.per_group + 2, self.dim))
        parts = [heads[:, :, : self.per_group].flatten(1, 2), heads[:, :, -2]]
        for number, weight in enumerate(weights):
            x = parts[number]
            parts[number] = x * (x.square().mean(-1, keepdim=True) + 1e-5).rsqrt() * weight
        return [*(self.rotated(x, cos, sin) for x in parts), heads[:, :, -1]]

    def rotated(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        i = torch.arange(self.half)
        pairs = (2 * i, 2 * i + 1) if self.interleaved else (i, i + self.half)
        first, second = (x[..., columns.to(x.device)] for columns in pairs)
        turned = torch.cat([first * cos - second * sin, second * cos + first * sin], dim=-1)
        places = torch.cat(pairs).argsort().to(x.device)
        return torch.cat([turned[..., places], x[..., 2 * self.half :]], dim=-1)


HEADS = {
    "no tokens": Heads(0, 2, 2, 8, 4),
    "one token": Heads(1, 1, 1, 24, 6),
    "Qwen3's kind, a tile of one token": Heads(33, 2, 4, 16, 8),
    "several tiles per program, the last one not full": Heads(140, 1, 2, 16, 8),
    "as many queries as keys": Heads(9, 3, 1, 8, 4),
    "three groups of three, an odd number of pairs": Heads(17, 3, 3, 12, 5),
    "partly rotated, interleaved": Heads(35, 2, 2, 16, 4, interleaved=True),
    "partly rotated, interleaved, without norm": Heads(
        140, 2, 2, 8, 2, interleaved=True, norm=False
    ),
    "partly rotated, without norm, odd size": Heads(33, 2, 1, 10, 3, norm=False),
    "all rotated, without norm": Heads(40, 1, 3, 16, 8, norm=False),
    "more not rotated than rotated": Heads(5, 1, 2, 40, 3),
    "strided inputs and angles": Heads(21, 2, 2, 16, 8, strided=True),
    "frozen norms": Heads(9, 1, 2, 8, 4, frozen="weights"),
    "input without gradient": Heads(9, 1, 2, 8, 4, frozen="mixed"),
    "nobody asks for keys and values": Heads(9, 1, 2, 8, 4, query_only=True),
    "bfloat16": Heads(40, 2, 2, 16, 8, dtype=torch.bfloat16),
    "bfloat16, angles in float32": Heads(
        40, 2, 2, 16, 4, dtype=torch.bfloat16, angles=torch.float32
    ),
    "float16, interleaved": Heads(40, 2, 2, 16, 8, dtype=torch.float16, interleaved=True),
}

#: As Megatron builds them: the settings of a family's config.json that matter to its heads.
FAMILIES: dict[str, dict[str, Any]] = {
    "qwen3": {},
    "llama": {"rope_scaling": {
        "rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
        "original_max_position_embeddings": 16,
    }},
    "glm4": {"partial_rotary_factor": 0.5, "attention_bias": True},
    "glm4_moe": {"partial_rotary_factor": 0.5, "attention_bias": True, "use_qk_norm": True},
}  # fmt: skip


@contextmanager
def attention_of(family: str) -> Iterator[tuple[Any, Any]]:
    """(A model of four layers, the attention of its first one)."""
    from slime.models import family_of
    from slime.processes.host import free_port
    from slime.trainer.megatron.backend import MegatronBackend
    from slime.trainer.megatron.parallel import RankInfo
    from tests.support.hf_configs import config_of
    from tests.support.trainer_ranks import trainer_config

    shape = {"hidden_size": 32, "head_dim": 16, "num_hidden_layers": 2, "rms_norm_eps": 1e-5}
    config = config_of(family, **shape, **FAMILIES[family])
    backend = MegatronBackend(trainer_config(), RankInfo(0, 1, 0, "127.0.0.1", free_port()))
    try:
        backend.setup(spec=family_of(config).model_spec(config).padded(1), initialise=True)
        [chunk] = backend.model_chunks
        yield chunk, chunk.module.decoder.layers[0].self_attention
    finally:
        backend.close()


def family_error(family: str, device: torch.device) -> float:
    """Of `PackedSelfAttention._heads_in_one_pass` against ``_heads``."""
    from slime.trainer.megatron.layers import RMSNorm

    results = []
    with attention_of(family) as (chunk, attention):
        assert isinstance(attention.q_layernorm, RMSNorm) == (family in ("qwen3", "glm4_moe"))
        positions = torch.cat([torch.arange(30, device=device), torch.arange(11, device=device)])
        angles = chunk.module.angles["main"](positions)
        hidden = torch.randn(41, 1, 32, device=device, requires_grad=True)
        parameters = [p for name, p in attention.named_parameters() if "linear_proj" not in name]
        with torch.no_grad():
            for parameter in parameters:
                parameter.add_(torch.randn_like(parameter))
        grads: list[Tensor] = []
        for heads in (attention._heads, attention._heads_in_one_pass):
            chunk.zero_grad_buffer()
            hidden.grad = None
            outs = heads(hidden, *angles)
            grads = grads or [torch.randn_like(out) for out in outs]
            torch.autograd.backward(outs, grads)
            assert hidden.grad is not None
            results.append([*outs, hidden.grad, *(p.main_grad.clone() for p in parameters)])
    assert all(out.abs().max() > 0 for out in results[0])
    return worst(results[1], [out.double() for out in results[0]])


# -- quantised weights -----------------------------------------------------------------------------


@dataclass(frozen=True)
class Stored:
    """A weight of ``shape`` with what quantisers trip over: kernels make the same bits of it as
    torch on a CPU."""

    scheme: Int4 | Fp8
    shape: tuple[int, ...]
    dtype: torch.dtype = torch.float32

    def error(self, device: torch.device) -> float:
        """The share of bytes that differ."""
        from slime.engines.wire import quantised, quantised_kernels

        assert quantised_kernels.takes(self.scheme)
        weight = torch.randn(self.shape)
        weight[0], weight[1, : weight.shape[1] // 2], weight[2] = 0, weight[1, 0], weight[2] * 1e-12
        weight = weight.to(self.dtype)
        parts_of = quantised._parts if weight.dim() == 2 else quantised._parts_of_stack
        torch_parts = parts_of(weight, self.scheme)
        kernel_parts = quantised_kernels.quantise(weight.to(device), self.scheme)
        assert kernel_parts.keys() == torch_parts.keys()
        differ = total = 0
        for name, part in torch_parts.items():
            ours = kernel_parts[name].cpu()
            assert (ours.shape, ours.dtype) == (part.shape, part.dtype), name
            differ += int(
                (ours.contiguous().view(torch.uint8) != part.contiguous().view(torch.uint8)).sum()
            )
            total += part.numel() * part.dtype.itemsize
        return differ / total


STORED = {
    "INT4": Stored(Int4(32), (37, 96)),
    "INT4 in small groups, several programs": Stored(Int4(8), (1100, 16)),
    "INT4 in bfloat16": Stored(Int4(128), (70, 256), torch.bfloat16),
    "INT4 in float16": Stored(Int4(32), (70, 64), torch.float16),
    "FP8 by block": Stored(Fp8((16, 16)), (48, 64)),
    "FP8 by block, the last ones smaller": Stored(Fp8((32, 16)), (70, 41)),
    "FP8 by block of 128, bfloat16": Stored(Fp8((128, 128)), (200, 300), torch.bfloat16),
    "FP8 by tensor, a stack": Stored(Fp8((0, 0), "weight_scale"), (5, 90, 70)),
    "FP8 by tensor": Stored(Fp8((0, 0), "weight_scale"), (90, 70)),
    "FP8 by tensor, bfloat16": Stored(Fp8((0, 0), "weight_scale"), (90, 70), torch.bfloat16),
}

CASES: dict[str, Callable[[torch.device], float]] = {
    **{f"norm: {name}": case.error for name, case in NORMS.items()},
    **{f"heads: {name}": case.error for name, case in HEADS.items()},
    **{f"stored: {name}": case.error for name, case in STORED.items()},
    **{
        f"family: {name}": lambda device, name=name: family_error(name, device) for name in FAMILIES
    },
}


def tolerance(name: str, interpreted: bool) -> float:
    kind, _, rest = name.partition(": ")
    if kind == "stored":
        case_of = STORED[rest]
        exact = not interpreted or (
            isinstance(case_of.scheme, Int4) and case_of.dtype != torch.bfloat16
        )
        # the interpreter truncates to bfloat16, and makes 0 of the smallest FP8
        return 0.0 if exact else 0.04
    case = {"norm": NORMS, "heads": HEADS}.get(kind, {}).get(rest)  # type: ignore[attr-defined]
    return TOLERANCE[case.dtype if case is not None else torch.float32]


def interpreter_fault() -> str:
    """Why the interpreter cannot run what the kernels use; "" if it can."""
    import triton
    import triton.language as tl

    @triton.jit
    def double(x_ptr, n, rounds):
        for i in range(rounds):
            at = i * 4 + tl.arange(0, 4)
            x = tl.load(x_ptr + at, mask=at < n, other=0.0)
            tl.store(x_ptr + at, x + tl.sum(x, axis=0), mask=at < n)

    x = torch.ones(6)
    try:
        double[(1,)](x, 6, 2)
    except Exception as error:  # of any kind: it is triton's
        return f"{type(error).__name__}: {error}"
    return "" if x.tolist() == [5.0] * 4 + [3.0] * 2 else f"wrong result {x.tolist()}"


def main() -> int:
    fault = interpreter_fault()
    results: dict[str, float | str] = {}
    if not fault:
        for name, case in CASES.items():
            torch.manual_seed(0)
            try:
                results[name] = case(CPU)
            except Exception:  # is that case's result
                results[name] = traceback.format_exc()
    print(json.dumps({"fault": fault, "results": results}))
    return 0


if __name__ == "__main__":
    sys.exit(main())
