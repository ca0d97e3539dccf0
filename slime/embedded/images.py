"""Images in the embedded engine: from requests to the decoder's inputs."""

from __future__ import annotations

import base64
import binascii
import hashlib
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from slime.engines.request_fields import BadRequest
from slime.models.images import ImageReader, PreparedImage
from slime.models.tower import see
from slime.models.vision import (
    ImageError,
    ImageSpan,
    VisionSpec,
    placeholder_runs,
    rotary_positions,
)

_FIELD = "image_data"
#: Bytes of features to keep for sequences with the same images.
_KEPT_BYTES = 1 << 28


@dataclass(frozen=True)
class ImageRequests:
    """Reads the images of requests.

    Attributes:
        limit: maximum number of images per prompt.
    """

    reader: ImageReader
    vision: VisionSpec
    limit: int

    def read(self, ids: list[int], given: Any) -> tuple[list[int], SequenceImages | None]:
        """Read the images of one prompt; expand single placeholders to the number that the image
        needs.

        Args:
            given: base64 or a data URI, or a list of them; None for none.
        Raises:
            BadRequest: an image is unreadable, or the placeholders do not match the images.
        """
        sources = [] if given is None else [given] if isinstance(given, str) else given
        if not isinstance(sources, list) or not all(isinstance(one, str) for one in sources):
            raise BadRequest(f"{_FIELD} must be text in base64, or a list of such text", _FIELD)
        runs = placeholder_runs(ids, self.vision)
        if len(runs) != len(sources):
            raise BadRequest(
                f"the prompt has placeholders of {len(runs)} images, {_FIELD} has {len(sources)}",
                _FIELD,
            )
        if len(sources) > self.limit:
            raise BadRequest(
                f"{_FIELD} has {len(sources)} images, this engine takes {self.limit}", _FIELD
            )
        if not sources:
            return ids, None
        whole: list[int] = []
        images: list[SequenceImage] = []
        end = 0
        for number, ((start, length), source) in enumerate(zip(runs, sources), start=1):
            key, prepared, (rows, columns) = self._image(number, source)
            if length not in (1, rows * columns):
                raise BadRequest(
                    f"image {number} is {rows} x {columns} = {rows * columns} tokens, the prompt "
                    f"has {length} placeholders for it",
                    _FIELD,
                )
            whole += ids[end:start]
            span = ImageSpan(len(whole), rows, columns)
            images.append(SequenceImage(span, key, prepared))
            whole += [self.vision.image_token] * span.length
            end = start + length
        whole += ids[end:]
        return whole, SequenceImages(images, len(whole))

    def _image(self, number: int, source: str) -> tuple[bytes, PreparedImage, tuple[int, int]]:
        """Return the digest of an image's bytes, the image, and its rows and columns of tokens."""
        text = source
        if source.startswith("data:"):
            head, _, text = source.partition(",")
            if not head.endswith(";base64"):
                raise BadRequest(f"image {number} is a data URI without base64", _FIELD)
        elif source.startswith(("http:", "https:", "file:", "/")):
            raise BadRequest(
                f"image {number} is the address of a file; this engine takes the bytes of images, "
                "in base64",
                _FIELD,
            )
        try:
            data = base64.b64decode(text, validate=True)
            prepared = self.reader.read(data)
            size = self.vision.size_in_tokens(prepared.grid)
            return hashlib.sha256(data).digest(), prepared, size
        except binascii.Error as error:
            raise BadRequest(f"image {number} is not valid base64: {error}", _FIELD) from error
        except ImageError as error:
            raise BadRequest(f"image {number}: {error}", _FIELD) from error


class SequenceImage(NamedTuple):
    """An image of a prompt; ``key`` is a digest of its bytes."""

    span: ImageSpan
    key: bytes
    prepared: PreparedImage


class SequenceImages:
    """The images of a prompt of ``length`` tokens."""

    def __init__(self, images: Sequence[SequenceImage], length: int) -> None:
        self.images = images
        self._length = length
        self._known = rotary_positions(length, [image.span for image in images])
        self._ahead = int(self._known[:, -1].max()) + 1 - length

    def blocks(self, start: int, end: int) -> tuple[tuple[int, int], ...]:
        """Return (start, end) of the images that have tokens from ``start`` to ``end``."""
        spans = [image.span for image in self.images]
        return tuple((one.start, one.end) for one in spans if one.start < end and one.end > start)

    def axis_positions(self, start: int, count: int) -> np.ndarray:
        """Return the rotary positions of tokens, int64 [3, count]."""
        found = np.arange(start, start + count) + self._ahead + np.zeros((3, 1), np.int64)
        known = min(count, max(0, self._length - start))
        found[:, :known] = self._known[:, start : start + known]
        return found

    def distinct(self, tokens: np.ndarray) -> np.ndarray:
        """Replace each image's placeholders by a negative number from its digest. Equal tokens then
        have equal keys and values."""
        found = tokens.copy()
        for image in self.images:
            number = int.from_bytes(image.key[:7], "big")
            found[image.span.start : image.span.end] = -1 - number
        return found


class SeenImages(NamedTuple):
    """Features of images in one forward pass.

    Attributes:
        rows: int64 [n], the tokens of the pass to which they belong.
        features: [n, (1 + levels) * hidden].
    """

    rows: Tensor
    features: Tensor

    def placed(self, hidden: Tensor) -> Tensor:
        """Replace embeddings [tokens, hidden] of images by the features."""
        own = self.features[:, : hidden.shape[1]].to(hidden.dtype)
        return hidden.index_copy(0, self.rows, own)

    def added(self, hidden: Tensor, layer: int) -> Tensor:
        """Add the features of a layer to its output."""
        start = (1 + layer) * hidden.shape[1]
        own = self.features[:, start : start + hidden.shape[1]].to(hidden.dtype)
        return hidden.index_add(0, self.rows, own) if own.shape[1] else hidden


class FeatureCache:
    """Computes the features of each image once for all sequences with it."""

    def __init__(self) -> None:
        self._kept: OrderedDict[bytes, Tensor] = OrderedDict()
        self._epoch = -1

    def see(
        self,
        tower: nn.Module,
        epoch: int,
        places: Sequence[tuple[SequenceImages | None, int, int]],
        device: torch.device,
    ) -> SeenImages | None:
        """Return the features of images at the given tokens; None if there are no images.

        Args:
            epoch: of the weights; drops features of earlier epochs.
            places: (images, first position, number of tokens) of each sequence, in the order of the
                tokens.
        """
        if epoch != self._epoch:
            self._kept.clear()
            self._epoch = epoch
        rows: list[Tensor] = []
        features: list[Tensor] = []
        offset = 0
        for images, start, count in places:
            for image in () if images is None else images.images:
                first = max(start, image.span.start)
                last = min(start + count, image.span.end)
                if first < last:
                    own = self._features(tower, image)
                    rows.append(torch.arange(first, last) + (offset - start))
                    features.append(own[first - image.span.start : last - image.span.start])
            offset += count
        if not rows:
            return None
        return SeenImages(torch.cat(rows).to(device), torch.cat(features))

    def _features(self, tower: nn.Module, image: SequenceImage) -> Tensor:
        found = self._kept.get(image.key)
        if found is None:
            prepared = image.prepared
            found = see(tower, prepared.pixels, torch.tensor([prepared.grid]))
            self._kept[image.key] = found
        self._kept.move_to_end(image.key)
        while len(self._kept) > 1 and sum(one.nbytes for one in self._kept.values()) > _KEPT_BYTES:
            self._kept.popitem(last=False)
        return found
