"""The vision tower: its settings in a config, and the positions of image tokens.

A run trains and serves the tower if it reads images (``--multimodal-keys``). Otherwise it trains
only the text part, and exports copy the tower. `seeing` marks a config whose tower is built, for
all code that builds from the config.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

#: Marks a parsed config.json whose tower is built; never written to a file.
_MARK = "slime_sees_images"


class ImageSpan(NamedTuple):
    """The placeholder tokens of an image: ``rows * columns`` tokens from ``start`` on."""

    start: int
    rows: int
    columns: int

    @property
    def length(self) -> int:
        return self.rows * self.columns

    @property
    def end(self) -> int:
        return self.start + self.length


class ImageError(ValueError):
    """Data is no image, or an image that the model does not support; the message says why."""


@dataclass(frozen=True)
class VisionKind:
    """Facts about a family's vision tower that are not in config.json.

    Attributes:
        module: transformers' class of tower and projector.
        names: regular expression (full match) of its Hugging Face tensors.
        interleaved: time, row and column alternate among the rotary frequencies; otherwise each has
            a contiguous section.
        sections: default of ``mrope_section``; () if tokens of images have the positions of text.
        has_levels: features of inner blocks are added after the first decoder layers (DeepStack).
        kept: activations that a block keeps per patch for its backward pass, in multiples of its
            hidden size and of its MLP's inner size. Measured.
        bidirectional: the tokens of an image attend to all tokens of the same image.
        around: text that the model's own processor writes before and after each image of a rendered
            prompt.
    """

    module: str
    sections: tuple[int, ...]
    names: str = r"model\.visual\..*"
    interleaved: bool = True
    has_levels: bool = False
    kept: tuple[float, float] = (11, 2)
    bidirectional: bool = False
    around: str = ""

    @property
    def has_axes(self) -> bool:
        """Tell whether tokens have positions in time, row and column."""
        return bool(self.sections)


@dataclass(frozen=True)
class VisionSpec:
    """The tower and projector of a model, and the tokens around its images.

    Attributes:
        kind: of its family.
        config: ``vision_config`` of config.json.
        image_token: id of the placeholder; an image has one placeholder per merged patch.
        start_token, end_token: ids of the tokens before and after an image.
        sections: number of rotary frequencies for time, row and column.
    """

    kind: VisionKind
    config: dict[str, Any]
    image_token: int
    start_token: int
    end_token: int
    sections: tuple[int, ...]

    def size_in_tokens(self, grid: tuple[int, int, int]) -> tuple[int, int]:
        """Return rows and columns of a prepared image, in tokens.

        Args:
            grid: as in `slime.models.images.PreparedImage`.
        Raises:
            ImageError: the tower does not take images of this size.
        """
        _, rows, columns = grid
        return rows // self.merge_size, columns // self.merge_size

    def placeholder(self, tokenizer: Any) -> str:
        """Return the text that stands for an image in a message."""
        ids = [self.start_token, self.image_token, self.end_token]
        return "".join(tokenizer.convert_ids_to_tokens(ids))

    @property
    def depth(self) -> int:
        return int(self.config["depth"])

    @property
    def hidden_size(self) -> int:
        return int(self.config["hidden_size"])

    @property
    def inner_size(self) -> int:
        return int(self.config["intermediate_size"])

    @property
    def num_positions(self) -> int:
        """Rows of the learned position embedding."""
        return int(self.config.get("num_position_embeddings", 2304))

    @property
    def patch_size(self) -> int:
        return int(self.config["patch_size"])

    @property
    def frames(self) -> int:
        """Frames per patch; a still image is repeated."""
        return int(self.config.get("temporal_patch_size", 2))

    @property
    def channels(self) -> int:
        return int(self.config.get("in_channels", 3))

    @property
    def merge_size(self) -> int:
        """Patches per token in each direction."""
        return int(self.config.get("spatial_merge_size", 2))

    @property
    def merged_size(self) -> int:
        """Width of the concatenated patches of one token."""
        return self.hidden_size * self.merge_size**2

    @property
    def num_levels(self) -> int:
        """Number of first decoder layers after which features of inner blocks are added."""
        if not self.kind.has_levels:
            return 0
        given = self.config.get("deepstack_visual_indexes")
        return len((8, 16, 24) if given is None else given)

    def frequency_axes(self, count: int) -> np.ndarray:
        """Return which of time (0), row (1) and column (2) each of ``count`` frequencies uses. If
        interleaved, they alternate while the sections last, and the rest uses time.

        Example:
            >>> kind = VisionKind("", (2, 1, 1))
            >>> VisionSpec(kind, {}, 0, 0, 0, (2, 1, 1)).frequency_axes(5).tolist()
            [0, 1, 2, 0, 0]
        """
        axes = np.zeros(count, dtype=np.int64)
        if not self.kind.interleaved:
            return np.repeat(np.arange(3), self.sections)[:count]
        for axis in (1, 2):
            axes[axis : 3 * self.sections[axis] : 3] = axis
        return axes


_PROJECTOR = "(merger|multi_modal_projector)"


def is_projector(name: str) -> bool:
    """Tell whether a parameter of the vision model belongs to its projector."""
    return re.search(_PROJECTOR, name) is not None


def frozen_parts(*, tower: bool, projector: bool) -> tuple[str, ...]:
    """Return regular expressions (re.search) of Megatron's names of frozen parts."""
    parts = (
        (tower, rf"^vision_model\.(?!.*{_PROJECTOR})"),
        (projector, rf"^vision_model\..*{_PROJECTOR}"),
    )
    return tuple(pattern for is_frozen, pattern in parts if is_frozen)


def seeing(config: Mapping[str, Any]) -> dict[str, Any]:
    """Mark a parsed config.json: its model is built with the vision tower."""
    return {**config, _MARK: True}


def sees(config: Mapping[str, Any]) -> bool:
    """Tell whether `seeing` has marked a parsed config."""
    return bool(config.get(_MARK))


def placeholder_runs(tokens: Sequence[int], vision: VisionSpec) -> list[tuple[int, int]]:
    """Return (start, length) of each run of placeholders after a start-of-image token.

    Example:
        >>> vision = VisionSpec(VisionKind("", (2, 1, 1)), {}, 9, 1, 2, (2, 1, 1))
        >>> placeholder_runs([5, 1, 9, 9, 2], vision)
        [(2, 2)]
    """
    ids = np.asarray(tokens)
    is_image = np.concatenate([[False], ids == vision.image_token, [False]])
    edges = np.flatnonzero(is_image[1:] != is_image[:-1])
    return [
        (int(start), int(end - start))
        for start, end in zip(edges[::2], edges[1::2])
        if start and ids[start - 1] == vision.start_token
    ]


def one_placeholder_each(tokens: Sequence[int], vision: VisionSpec) -> list[int]:
    """Return the tokens with a single placeholder per image, for engines.

    SGLang uses the tokens of a request only if each image has one placeholder. Otherwise it decodes
    and tokenises them again, which may give other tokens.

    Example:
        >>> vision = VisionSpec(VisionKind("", (2, 1, 1)), {}, 9, 1, 2, (2, 1, 1))
        >>> one_placeholder_each([5, 1, 9, 9, 2], vision)
        [5, 1, 9, 2]
    """
    shorter: list[int] = []
    end = 0
    for start, length in placeholder_runs(tokens, vision):
        shorter += tokens[end : start + 1]
        end = start + length
    return [*shorter, *tokens[end:]]


def rotary_positions(length: int, spans: Sequence[ImageSpan]) -> np.ndarray:
    """Return the positions of tokens in time, row and column, int64 [3, length].

    The three positions of a text token are equal. The tokens of an image share one time; rows and
    columns count from it, and text after the image continues after the larger of the two.

    Args:
        spans: images in order.

    Source: Wang et al., Qwen2-VL (arXiv:2409.12191), section 2.1.

    Example:
        >>> rotary_positions(6, [ImageSpan(1, 1, 3)]).tolist()
        [[0, 1, 1, 1, 4, 5], [0, 1, 1, 1, 4, 5], [0, 1, 2, 3, 4, 5]]
    """
    found = np.empty((3, length), dtype=np.int64)
    token = position = 0
    for span in spans:
        found[:, token : span.start] = np.arange(position, position + span.start - token)
        position += span.start - token
        found[0, span.start : span.end] = position
        found[1, span.start : span.end] = position + np.repeat(np.arange(span.rows), span.columns)
        found[2, span.start : span.end] = position + np.tile(np.arange(span.columns), span.rows)
        position += max(span.rows, span.columns)
        token = span.end
    found[:, token:] = np.arange(position, position + length - token)
    return found
