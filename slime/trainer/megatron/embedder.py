"""Images in the trainer: features replace the embeddings of placeholder tokens, and are added to
the outputs of the first decoder layers.

    pixels ─► tower and projector ─► features ─┬─► embeddings of the placeholders
                                               └─► added after decoder layers 0, 1, …

Features for inner layers are detached from autograd's graph. Their gradients re-enter it where the
embeddings were replaced. Otherwise the backward pass of a recomputed layer would run through the
tower, which would then be run through twice.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn

from slime.models.images import PreparedImage
from slime.models.tower import see
from slime.models.vision import rotary_positions
from slime.samples.media import Media

#: Prepares an encoded image.
ReadImage = Callable[[bytes], PreparedImage]


@dataclass
class PackedImages:
    """The images of a micro-batch, each once, even if several samples contain it.

    Attributes:
        pixels: of `PreparedImage`, in host memory; a step's could fill the GPU's.
        grids: int64 [images, 3], in host memory.
        rows: int64 [N], positions of the placeholder tokens in the pack.
        features: int64 [N], index of the feature for each of these positions.
        levels: features that are added after layers; `embed_images` sets them.
    """

    pixels: Tensor
    grids: Tensor
    rows: Tensor
    features: Tensor
    levels: _Levels | None = None

    def to(self, device: torch.device) -> PackedImages:
        return replace(self, rows=self.rows.to(device), features=self.features.to(device))


@dataclass
class _Levels:
    """Features for inner layers, [N, hidden] per layer, and their gradients."""

    rows: Tensor
    values: list[Tensor]
    gradients: list[Tensor | None] = field(init=False)

    def __post_init__(self) -> None:
        self.gradients = [None] * len(self.values)


class SampleMedia:
    """Maps tokens of some samples to image features and rotary positions.

    Args:
        media: images of each sample.
        lengths: number of tokens of each sample.
    Attributes:
        references: the distinct references of the images.
    """

    def __init__(self, media: Sequence[Sequence[Media]], lengths: Sequence[int]) -> None:
        self._media = media
        self._lengths = lengths
        starts: dict[str, int] = {}
        total = 0
        for one in (one for own in media for one in own):
            if one.reference not in starts:
                starts[one.reference] = total
                total += one.span.length
        self._starts = starts
        self.references = list(starts)

    def positions(self, number: int) -> Tensor:
        """Return the rotary positions of a sample, int64 [3, tokens]."""
        spans = [one.span for one in self._media[number]]
        return torch.from_numpy(rotary_positions(self._lengths[number], spans))

    def numbers(self, number: int) -> Tensor:
        """Return to which image of a sample each of its tokens belongs, int64 [tokens]; -1:
        none."""
        found = torch.full((self._lengths[number],), -1)
        for place, one in enumerate(self._media[number]):
            found[one.span.start : one.span.end] = place
        return found

    def features(self, number: int) -> Tensor:
        """Return which feature each token of a sample stands for, int64 [tokens]; -1: none."""
        found = torch.full((self._lengths[number],), -1)
        for one in self._media[number]:
            start = self._starts[one.reference]
            found[one.span.start : one.span.end] = torch.arange(start, start + one.span.length)
        return found

    def key(self, number: int, length: int) -> bytes:
        """Return a key that identifies the images in the first ``length`` tokens of a sample."""
        own = [one for one in self._media[number] if one.span.start < length]
        return repr([(one.span, one.reference) for one in own]).encode()

    def packed(self, features: Tensor, read: Callable[[str], PreparedImage]) -> PackedImages | None:
        """Return the images of a pack, given its tokens' ``features``; None without images."""
        if not self.references:
            return None
        images = [read(reference) for reference in self.references]
        rows = torch.nonzero(features >= 0)[:, 0]
        return PackedImages(
            torch.cat([image.pixels for image in images]),
            torch.tensor([image.grid for image in images]),
            rows,
            features[rows],
        )


def local_rows(images: PackedImages, start: int, count: int) -> PackedImages:
    """Return the images restricted to ``count`` positions from ``start``; rows are relative to
    ``start``."""
    inside = (images.rows >= start) & (images.rows < start + count)
    return replace(images, rows=images.rows[inside] - start, features=images.features[inside])


class _Replaced(torch.autograd.Function):
    """Embeddings [T, 1, H] with some rows replaced by features [N, (1 + levels) * H]. All layers
    come later, so the gradients of the levels are complete when this backward pass runs."""

    @staticmethod
    def forward(ctx: Any, embedded: Tensor, features: Tensor, levels: _Levels) -> Tensor:
        ctx.levels = levels
        out = embedded.clone()
        out[levels.rows, 0] = features[:, : embedded.size(-1)].to(embedded.dtype)
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, None]:
        levels: _Levels = ctx.levels
        own = grad[levels.rows, 0]
        inner = [torch.zeros_like(own) if one is None else one for one in levels.gradients]
        levels.gradients = [None] * len(levels.gradients)
        grad = grad.clone()
        grad[levels.rows, 0] = 0
        return grad, torch.cat([own, *inner], dim=-1), None


class _Added(torch.autograd.Function):
    """Hidden states [T, 1, H] with the features of one level added to some rows."""

    @staticmethod
    def forward(ctx: Any, hidden: Tensor, levels: _Levels, level: int) -> Tensor:
        ctx.levels = levels
        ctx.level = level
        out = hidden.clone()
        out[levels.rows, 0] += levels.values[level].to(hidden.dtype)
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        ctx.levels.gradients[ctx.level] = grad[ctx.levels.rows, 0]
        return grad, None, None


def embed_images(tower: nn.Module, images: PackedImages, embedded: Tensor) -> Tensor:
    """Replace the embeddings [T, 1, H] of placeholder tokens by image features."""
    features = see(tower, images.pixels, images.grids).index_select(0, images.features)
    hidden = embedded.size(-1)
    _, *inner = features.detach().split(hidden, dim=-1)
    images.levels = _Levels(images.rows, inner)
    result: Tensor = _Replaced.apply(embedded, features, images.levels)
    return result


def add_levels(layers: Sequence[nn.Module], count: int) -> None:
    """Make the first ``count`` decoder layers add image features to their outputs."""

    def hook_for(level: int) -> Callable[..., Any]:
        def hook(layer: nn.Module, args: Any, kwargs: dict[str, Any], output: Any) -> Any:
            images = getattr(kwargs["packed_seq_params"], "seen", None)
            if images is None:
                return None
            hidden, *rest = output
            return (_Added.apply(hidden, images.levels, level), *rest)

        return hook

    for level, layer in enumerate(layers[:count]):
        layer.register_forward_hook(hook_for(level), with_kwargs=True)
