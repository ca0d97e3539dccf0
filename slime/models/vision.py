"""The tower that sees images: what a config says of it, and the positions that its images have.

A run trains and serves the tower if it reads images (``--multimodal-keys``); else the text part
alone, and an export carries the tower along. `seeing` marks the config of a model that sees, so
that everything that is built from the config agrees.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

#: Marks a parsed config.json whose tower is built; never written to a file.
_MARK = "slime_sees_images"


class ImageSpan(NamedTuple):
    """An image among tokens: ``rows * columns`` placeholder tokens from ``start`` on."""

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
    """Data that is no image, or one that the model cannot take; says why."""


@dataclass(frozen=True)
class VisionKind:
    """The facts about a family's tower that its config.json does not tell.

    Attributes:
        module: transformers' class of tower and projector.
        names: regular expression (full match) of its Hugging Face tensors.
        interleaved: time, row and column take turns among the rotary frequencies; else each has a
            run of them.
        sections: where config.json is silent.
        has_levels: features of inner blocks are added behind the first decoder layers.
        kept: how many times a block keeps a patch for its backward pass, as wide as its hidden
            states and as those within its MLP. Measured.
    """

    module: str
    sections: tuple[int, int, int]
    names: str = r"model\.visual\..*"
    interleaved: bool = True
    has_levels: bool = False
    kept: tuple[float, float] = (11, 2)


@dataclass(frozen=True)
class VisionSpec:
    """The tower and projector of a model, and the tokens around its images.

    Attributes:
        kind: of its family.
        config: ``vision_config`` of config.json.
        image_token: id of the placeholder, of which an image has one per merged patch.
        start_token, end_token: ids of the tokens before and behind an image.
        sections: how many of the rotary frequencies turn by an image's time, row and column.
    """

    kind: VisionKind
    config: dict[str, Any]
    image_token: int
    start_token: int
    end_token: int
    sections: tuple[int, int, int]

    def placeholder(self, tokenizer: Any) -> str:
        """Return the text that stands for an image in a prompt."""
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
        """Rows of the table of learned positions."""
        return int(self.config.get("num_position_embeddings", 2304))

    @property
    def patch_size(self) -> int:
        return int(self.config["patch_size"])

    @property
    def frames(self) -> int:
        """Frames that a patch is made of; a still image is repeated."""
        return int(self.config.get("temporal_patch_size", 2))

    @property
    def channels(self) -> int:
        return int(self.config.get("in_channels", 3))

    @property
    def merge_size(self) -> int:
        """A token stands for so many patches in each direction."""
        return int(self.config.get("spatial_merge_size", 2))

    @property
    def merged_size(self) -> int:
        """Numbers of the patches that become one token."""
        return self.hidden_size * self.merge_size**2

    @property
    def num_levels(self) -> int:
        """Decoder layers, from the first on, behind which features of inner blocks are added."""
        if not self.kind.has_levels:
            return 0
        given = self.config.get("deepstack_visual_indexes")
        return len((8, 16, 24) if given is None else given)

    def frequency_axes(self, count: int) -> np.ndarray:
        """Return which of time (0), row (1) and column (2) turns each of ``count`` frequencies.
        Interleaved ones take turns for as long as their section lasts, then the rest turns by time.

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


def frozen_parts(*, tower: bool, projector: bool) -> tuple[str, ...]:
    """Return regular expressions (re.search) of Megatron's names of the parts that are not
    trained."""
    parts = ((tower, r"^vision_model\.(?!.*merger)"), (projector, r"^vision_model\..*merger"))
    return tuple(pattern for is_frozen, pattern in parts if is_frozen)


def seeing(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return a parsed config.json whose model is built with the tower."""
    return {**config, _MARK: True}


def sees(config: Mapping[str, Any]) -> bool:
    """Tell whether `seeing` has marked a parsed config."""
    return bool(config.get(_MARK))


def placeholder_runs(tokens: Sequence[int], vision: VisionSpec) -> list[tuple[int, int]]:
    """Return (start, length) of each run of placeholders that follows the token before an image.

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
    """Return the tokens with a single placeholder for each image, as engines take them.

    SGLang keeps the tokens of a request only if each image has one placeholder. It decodes all
    others to text and tokenises that anew, which may give other tokens.

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

    Text counts on in all three. The tokens of an image share one time; its rows and columns count
    from there, and the text behind it goes on after the larger of the two.

    Args:
        spans: in order.

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
