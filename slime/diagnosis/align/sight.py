"""How the reference computes image features and positions, with steps that can be changed."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch import Tensor, nn

from slime.embedded.images import FeatureCache, SeenImages, SequenceImage, SequenceImages
from slime.models.images import PreparedImage
from slime.models.vision import VisionSpec, placeholder_runs
from slime.samples.media import Media

#: Prepares an encoded image.
Read = Callable[[bytes], PreparedImage]


@dataclass(frozen=True)
class Sight:
    """Changes to how images are processed.

    Attributes:
        read: prepares images; None: the run's image processor.
        positions: maps rotary positions [3, tokens] to changed ones; None: unchanged.
        features: (features [image tokens, (1 + levels) * hidden], hidden) → changed features; None:
            unchanged.
        is_blind: placeholders are embedded as ordinary tokens.
        is_causal: tokens of an image attend only to earlier ones, whatever the model wants.
    """

    read: Read | None = None
    positions: Callable[[Tensor], Tensor] | None = None
    features: Callable[[Tensor, int], Tensor] | None = None
    is_blind: bool = False
    is_causal: bool = False

    def positions_of(self, images: SequenceImages, count: int) -> Tensor:
        """Return the rotary positions of the first ``count`` tokens, int64 [3, count]."""
        own = torch.from_numpy(images.axis_positions(0, count))
        return own if self.positions is None else self.positions(own)

    def see(
        self,
        tower: nn.Module,
        images: SequenceImages,
        count: int,
        hidden: int,
        cache: FeatureCache,
        epoch: int,
    ) -> SeenImages | None:
        """Return the image features among the first ``count`` tokens; None if there are none.

        Args:
            hidden: the model's width.
            cache: features of images that were prepared and computed in the same way.
            epoch: of the weights.
        """
        if self.is_blind:
            return None
        device = next(tower.parameters()).device
        seen = cache.see(tower, epoch, [(images, 0, count)], device)
        if seen is None or self.features is None:
            return seen
        return seen._replace(features=self.features(seen.features, hidden))


def read_images(media: Sequence[Media], length: int, read: Read) -> SequenceImages | None:
    """Read the images of a sample of ``length`` tokens; None if it has no images."""
    found = []
    for one in media:
        data = Path(one.reference).read_bytes()
        found.append(SequenceImage(one.span, hashlib.sha256(data).digest(), read(data)))
    return SequenceImages(found, length) if found else None


def behind(
    media: Sequence[Media], prompt_length: int, context: Tensor, vision: VisionSpec
) -> list[Media] | None:
    """Move a sample's images to another prompt; None if its placeholders do not match them."""
    own = [one for one in media if one.span.start < prompt_length]
    runs = placeholder_runs(context.tolist(), vision)
    if [length for _, length in runs] != [one.span.length for one in own]:
        return None
    starts = [start for start, _ in runs]
    starts += [one.span.start + len(context) - prompt_length for one in media[len(own) :]]
    return [replace(one, span=one.span._replace(start=start)) for one, start in zip(media, starts)]
