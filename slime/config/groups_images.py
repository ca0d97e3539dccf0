"""The group about images: their column, their limits, and which parts of the vision model train."""

# ruff: noqa: RUF009 -- flag() makes a dataclass field

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

from slime.config.flag import SOME, Part, flag, on

_SEES = on("multimodal_keys", why="the model is trained on text only, and reads no images")


@dataclass(frozen=True, kw_only=True)
class ImagesConfig:
    """Images in prompts, for models that see them. docs/images.md describes their rows."""

    READ_BY: ClassVar[tuple[Part, ...]] = ("collection", "generation")

    multimodal_keys: dict[str, Any] | None = flag(
        None, read_by=("collection", "generation", "samples", "trainer", "engine")
    )
    """The column of images, as JSON: `{"image": "images"}`. Rows hold paths, bytes, data URIs or
    base64; `<image>` in the text marks the place of each, or messages have image parts."""
    image_max_pixels: int | None = flag(
        None, range=SOME, needs=_SEES, read_by=("collection", "generation", "trainer", "engine")
    )
    """Images with more pixels are scaled down to this many; default: the limit of the model's image
    processor. In Qwen's models, a token stands for 28 x 28 or 32 x 32 pixels."""
    images_per_sample: int = flag(
        16, range=SOME, needs=_SEES, read_by=("collection", "generation", "engine")
    )
    """Maximum images of one sample; rows with more are refused."""
    allow_image_urls: bool = flag(False, needs=_SEES, read_by=("collection",))
    """Download images that rows name by an http or https URL; off: such rows are refused."""
    freeze_vision_tower: bool = flag(False, needs=_SEES, read_by="trainer")
    """Do not train the tower that sees images; it gets no gradient, no optimizer state and no
    weight decay."""
    freeze_vision_projector: bool = flag(False, needs=_SEES, read_by="trainer")
    """Do not train what maps the tower's features to the decoder's embeddings."""
