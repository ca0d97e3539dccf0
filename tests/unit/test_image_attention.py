"""Attention within images by causal kernels alone, as on GPUs, against attention with a mask.

A stand-in computes sequence by sequence what torch's packed kernel does on a GPU.
"""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from slime.models.images import ImageReader
from slime.trainer.megatron import attention, image_attention, process
from slime.trainer.megatron.flash import BlockKernel
from slime.trainer.megatron.image_attention import attend_within_images
from slime.trainer.megatron.packed import (
    LaterTokens,
    PackedSequences,
    PackingOptions,
    padded_layout,
)
from slime.weights.source import ModelSource
from tests.support.images import IMAGES, save_seeing
from tests.support.parity import worst
from tests.support.seeing_samples import batch_of, own_log_probs, their_log_probs
from tests.support.trainers import trainer, whole_gradients


class SequencesOnCpu:
    """`slime.trainer.megatron.flash.PackedKernel` on a CPU."""

    def __init__(self, ends: Tensor, longest: int, scale: float, window: int | None = None) -> None:
        self._lengths = ends.diff().tolist()
        assert longest == max(self._lengths)
        self._scale = scale
        self._window = window

    @staticmethod
    def of(sequences: PackedSequences, scale: float, window: int | None) -> SequencesOnCpu:
        return SequencesOnCpu(sequences.cu_seqlens_q, sequences.max_seqlen_q, scale, window)

    def _parts(self, *tensors: Tensor) -> Any:
        """Per sequence: its kernel, and its part of each tensor as [1, heads, length, ...]."""
        for length, *parts in zip(self._lengths, *(x.split(self._lengths) for x in tensors)):
            (block,) = padded_layout([[length]]).blocks
            kernel = BlockKernel(block.within(self._window), self._scale, tensors[0].dtype)
            yield kernel, [x.transpose(0, 1)[None].contiguous() for x in parts]

    def forward(self, query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        found = [kernel.forward(*parts) for kernel, parts in self._parts(query, key, value)]
        out, lse = (torch.cat([one[0].transpose(0, 1) for one in x]) for x in zip(*found))
        return out, lse

    def backward(self, *tensors: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        found = [kernel.backward(*parts) for kernel, parts in self._parts(*tensors)]
        grads = (torch.cat([one[0].transpose(0, 1) for one in x]) for x in zip(*found))
        return cast(tuple[Tensor, Tensor, Tensor], tuple(grads))


class _OnCpu(torch.autograd.Function):
    """The packed kernel for text, on a CPU."""

    @staticmethod
    def forward(ctx: Any, query: Tensor, key: Tensor, value: Tensor, kernel: Any) -> Tensor:
        out, lse = kernel.forward(query, key, value)
        ctx.kernel = kernel
        ctx.save_for_backward(query, key, value, out, lse)
        return cast(Tensor, out)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        return *ctx.kernel.backward(grad.contiguous(), *ctx.saved_tensors), None


def sequences_of(lengths: list[int], images: Tensor) -> PackedSequences:
    ends = torch.tensor([0, *lengths]).cumsum(0)
    return PackedSequences(
        cu_seqlens_q=ends.int(),
        max_seqlen_q=max(lengths),
        lengths=lengths,
        later=LaterTokens.of(images, ends[:-1]),
    )


#: Tokens of text, and of the image behind them.
PIECES = st.lists(st.tuples(st.integers(0, 4), st.integers(0, 7)), min_size=1, max_size=3)


def numbers_of(pieces: list[tuple[int, int]]) -> list[int]:
    """The image of each token of a sequence, -1 for text."""
    found: list[int] = []
    for place, (text, image) in enumerate(pieces):
        found += [-1] * text + [place] * image
    return found or [-1]


@settings(max_examples=40, deadline=None)
@given(
    samples=st.lists(PIECES, min_size=1, max_size=3),
    window=st.sampled_from([None, 1, 3]),
    strength=st.sampled_from([0.3, 6.0]),
    seed=st.integers(0, 99),
)
def test_two_causal_calls_are_one_with_a_mask(
    samples: list[list[tuple[int, int]]], window: int | None, strength: float, seed: int
) -> None:
    """In float64, forward and backward, with grouped queries, images of no and one token, images
    that touch each other and the ends of sequences, and scores that differ much."""
    numbers = [numbers_of(pieces) for pieces in samples]
    lengths = [len(one) for one in numbers]
    images = torch.tensor([image for one in numbers for image in one])
    sequences = sequences_of(lengths, images)
    generator = torch.Generator().manual_seed(seed)

    def random(heads: int) -> Tensor:
        shape = (sum(lengths), heads, 4)
        return strength * torch.randn(shape, dtype=torch.float64, generator=generator)

    inputs = [random(heads).requires_grad_() for heads in (4, 2, 2)]
    outer = random(4)
    if sequences.later is None:
        assert all(image < 2 for pieces in samples for _, image in pieces)
        return
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(image_attention, "PackedKernel", SequencesOnCpu)
        query, key, value = inputs
        out = attend_within_images(query, key, value, sequences, 0.7, window)
        found = torch.autograd.grad((out * outer).sum(), inputs)

    every_query, every_key, every_value = (
        x.repeat_interleave(4 // x.size(1), dim=1) for x in inputs
    )
    layout = padded_layout([[length] for length in lengths], images)
    expected = torch.zeros_like(out)
    start = 0
    for block in layout.blocks:
        for bias in block.within(window).bias.expand(block.batch, 1, -1, -1):
            cells = layout.gather[start : start + block.length]
            q, k, v = (x[cells].transpose(0, 1) for x in (every_query, every_key, every_value))
            scores = q @ k.transpose(-1, -2) * 0.7 + bias.double()
            rows = (torch.softmax(scores, dim=-1) @ v).transpose(0, 1)
            own = ~layout.padding[start : start + block.length, 0, 0]
            expected = expected.index_copy(0, cells[own], rows[own])
            start += block.length
    wanted = torch.autograd.grad((expected * outer).sum(), inputs)
    for one, other in zip([out, *found], [expected, *wanted], strict=True):
        assert (one - other).abs().max() <= 1e-12 * (1 + other.abs().max())


@pytest.mark.parametrize(
    ("dtype", "tolerance"),
    [(torch.float64, 1e-12), (torch.float32, 5e-6), (torch.float16, 0.01), (torch.bfloat16, 0.05)],
)
def test_dense_blocks_compute_the_mask_in_every_dtype(dtype: torch.dtype, tolerance: float) -> None:
    """Above the length below which bfloat16 is computed by products."""
    images = torch.full((350,), -1)
    images[20:60] = 0
    (block,) = padded_layout([[350]], images).blocks
    block = block.within(33)
    generator = torch.Generator().manual_seed(0)
    exact = [
        torch.randn(1, 350, heads, 8, dtype=torch.float64, generator=generator)
        for heads in (4, 2, 2)
    ]
    query, key, value = (x.to(dtype) for x in exact)
    found = attention._dense(query, key, value, block, 0.7)
    q, k, v = (x.repeat_interleave(4 // x.size(2), dim=2).transpose(1, 2) for x in exact)
    weights = torch.softmax(q @ k.transpose(-1, -2) * 0.7 + block.bias.double(), dim=-1)
    assert (found.double() - (weights @ v).transpose(1, 2)).abs().max() <= tolerance


def test_the_mask_is_that_of_transformers() -> None:
    """Queries see their image's later tokens behind a window's end, and none of the next image."""
    images = torch.tensor([-1, 0, 0, 0, 1, 1])
    (block,) = padded_layout([[6]], images).blocks
    assert block.within(2).bias[0, 0].eq(0).int().tolist() == [
        [1, 0, 0, 0, 0, 0],
        [1, 1, 1, 1, 0, 0],
        [0, 1, 1, 1, 0, 0],
        [0, 0, 1, 1, 0, 0],
        [0, 0, 0, 1, 1, 1],
        [0, 0, 0, 0, 1, 1],
    ]


def test_sequences_of_text_need_no_mask_of_their_own() -> None:
    images = torch.tensor([-1, 0, 0, -1, -1, -1, -1, 0, 0])
    text, seeing = padded_layout([[3], [3], [3]], images).blocks
    assert (text.batch, text.masked) == (1, False)
    assert (seeing.batch, seeing.masked) == (2, True)
    assert LaterTokens.of(torch.full((4,), -1), torch.tensor([0])) is None


@pytest.fixture
def packed_kernels(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Let a trainer on a CPU attend as on a GPU. Returns the images of each call within images."""
    calls: list[int] = []

    def options(*args: Any, **fields: Any) -> PackingOptions:
        return dataclasses.replace(PackingOptions(*args, **fields), dense=False, pair_cost=None)

    def of_text(
        query: Tensor, key: Tensor, value: Tensor, sequences: Any, scale: float, window: int | None
    ) -> Any:
        kernel = SequencesOnCpu.of(sequences, scale, window)
        return _OnCpu.apply(query, key, value, kernel)

    def of_images(query: Tensor, key: Tensor, value: Tensor, sequences: Any, *rest: Any) -> Any:
        calls.append(sequences.later.ends.numel() - 1)
        return attend_within_images(query, key, value, sequences, *rest)

    monkeypatch.setattr(process, "PackingOptions", options)
    monkeypatch.setattr(attention, "_flash_packed", of_text)
    monkeypatch.setattr(attention, "attend_within_images", of_images)
    monkeypatch.setattr(image_attention, "PackedKernel", SequencesOnCpu)
    return calls


def test_a_trainer_with_packed_kernels_is_one_with_masks(
    packed_kernels: list[int], tmp_path: Path
) -> None:
    """Log-probs are those of transformers, and gradients those of the trainer with masks; the
    micro-batch of text alone attends by the kernel for text."""
    model = save_seeing(tmp_path / "hf", "gemma3")
    reader = ImageReader(tmp_path / "hf")
    batch = batch_of(reader, [[1, 2], [0], [3, 4, 5]])
    flags: dict[str, Any] = {"kl_loss_coef": 0.0, "eps_clip": 1e9, "rollout_temperature": 1.0}
    flags |= {"hf_checkpoint": str(tmp_path / "hf"), **IMAGES}

    def computed(**more: Any) -> tuple[list[Tensor], dict[str, Tensor]]:
        backend = trainer(**flags, **more)
        try:

            def named() -> dict[str, Tensor]:
                assert backend.hf_config is not None
                source = ModelSource(backend.model_chunks, backend.hf_config)
                return {name: tensor.clone() for name, tensor in source.tensors()}

            return own_log_probs(backend, batch), whole_gradients(backend, batch, named)
        finally:
            backend.close()

    log_probs, gradients = computed()
    assert set(packed_kernels) == {4}
    recomputed = computed(recompute_granularity="selective", recompute_modules=["core_attn"])
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(process, "PackingOptions", PackingOptions)
        _, masked = computed()
    with torch.no_grad():
        theirs = their_log_probs(model, reader, batch)
    for one, other in zip(log_probs, theirs, strict=True):
        assert (one - other).abs().max() <= 5e-6
    assert gradients.keys() == masked.keys()
    for name, gradient in masked.items():
        if "self_attn.k_proj.bias" in name:  # 0 but for rounding
            continue
        assert worst(gradients[name], gradient) <= 5e-6, name
        assert worst(recomputed[1][name], gradient) <= 5e-6, name
