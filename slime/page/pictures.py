"""Thumbnails of the images of samples, for pages."""

from __future__ import annotations

import base64
import functools
import io
from pathlib import Path
from typing import Any

#: Longest side of a thumbnail in pixels, and largest number of thumbnails of a sample.
_SIDE = 240
_MAX_PICTURES = 8


def with_pictures(record: dict[str, Any]) -> dict[str, Any]:
    """Add ``pictures``, data URIs of thumbnails, to a sample's line that refers to images. Files
    that are missing or not images are skipped."""
    references = record.get("images")
    if not isinstance(references, list):
        return record
    found = [_picture(one) for one in references[:_MAX_PICTURES] if isinstance(one, str)]
    return record | {"pictures": [one for one in found if one]}


@functools.lru_cache(maxsize=256)
def _picture(reference: str) -> str:
    from PIL import Image, ImageOps

    from slime.models.decode_image import in_rgb

    try:
        with Image.open(Path(reference)) as image:
            small = in_rgb(ImageOps.exif_transpose(image))
            small.thumbnail((_SIDE, _SIDE))
    except (OSError, ValueError, SyntaxError, Image.DecompressionBombError):
        return ""
    stream = io.BytesIO()
    small.save(stream, "JPEG", quality=80)
    return f"data:image/jpeg;base64,{base64.b64encode(stream.getvalue()).decode('ascii')}"
