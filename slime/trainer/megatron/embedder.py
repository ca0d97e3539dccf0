"""Images in the trainer: their features in place of placeholder tokens, and behind the first
decoder layers.

    pixels ─► tower and projector ─► features ─┬─► embeddings of the placeholders
                                               └─► added behind decoder layers 0, 1, …

Features that go into inner layers are taken out of autograd's graph there and their gradients are
put back where the embeddings were replaced: a recomputed layer then has no way into the tower,
which would be gone through twice.
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
    """The images of a micro-batch, each once, however many samples have it.

    Attributes:
        pixels: [patches, numbers per patch], in host memory: a step's would fill a GPU's.
        grids: int64 [images, 3], likewise.
        rows: int64 [N], positions in the pack that stand for a part of an image.
        features: int64 [N], which of the features belongs there.
        levels: of features that are added behind layers, filled by `embed_images`.
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
    """Features for inner layers, [N, hidden] each, and what comes back for them."""

    rows: Tensor
    values: list[Tensor]
    gradients: list[Tensor | None] = field(init=False)

    def __post_init__(self) -> None:
        self.gradients = [None] * len(self.values)


class SampleMedia:
    """What the images of some samples mean for their tokens.

    Args:
        media: of each sample.
        lengths: tokens of each sample.
    Attributes:
        references: of the images, each once.
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

    def features(self, number: int) -> Tensor:
        """Return which feature each token of a sample stands for, int64 [tokens]; -1: none."""
        found = torch.full((self._lengths[number],), -1)
        for one in self._media[number]:
            start = self._starts[one.reference]
            found[one.span.start : one.span.end] = torch.arange(start, start + one.span.length)
        return found

    def key(self, number: int, length: int) -> bytes:
        """Return what tells the images in the first tokens of a sample from others there."""
        own = [one for one in self._media[number] if one.span.start < length]
        return repr([(one.span, one.reference) for one in own]).encode()

    def packed(self, features: Tensor, read: Callable[[str], PreparedImage]) -> PackedImages | None:
        """Return the images of a pack whose tokens stand for ``features``; None for none."""
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
    """Return the images of ``count`` positions of a pack, from ``start`` on; rows count from
    there."""
    inside = (images.rows >= start) & (images.rows < start + count)
    return replace(images, rows=images.rows[inside] - start, features=images.features[inside])


class _Replaced(torch.autograd.Function):
    """Embeddings [T, 1, H] with features [N, (1 + levels) * H] in place of some rows. The gradients
    of the levels are there when this is gone through: all layers are behind it."""

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
    """Put the features of images in place of their placeholders' embeddings [T, 1, H]."""
    features = see(tower, images.pixels, images.grids).index_select(0, images.features)
    hidden = embedded.size(-1)
    _, *inner = features.detach().split(hidden, dim=-1)
    images.levels = _Levels(images.rows, inner)
    result: Tensor = _Replaced.apply(embedded, features, images.levels)
    return result


def add_levels(layers: Sequence[nn.Module], count: int) -> None:
    """Let the first ``count`` decoder layers add features of images to their outputs."""

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
