"""Decode encoded images (PNG, JPEG, …) with Pillow, which is imported when they are. Without torch,
as pages and `slime chat` use it too."""

from __future__ import annotations

import io
from typing import Any

from slime.models.vision import ImageError

#: Images with more pixels are refused before decoding, as a small file may contain a huge image.
_MAX_PIXELS = 1 << 28
#: Pillow's modes of 32 bits, and those with an alpha channel.
_DEEP = ("I", "F")
_WITH_ALPHA = ("RGBA", "LA", "PA", "RGBa", "La")
#: EXIF tag of an image's orientation.
_ORIENTATION = 0x0112


def decoded(data: bytes) -> Any:
    """Decode an image to a Pillow image in RGB with 8 bits: turned as its EXIF data says, on white
    where it is transparent, and with the upper 8 bits of 16.

    Raises:
        ImageError: ``data`` is empty, no image, damaged or truncated, has too many pixels, or
            pixels of 32 bits.
    """
    from PIL import Image, ImageOps, UnidentifiedImageError

    if not data:
        raise ImageError("it is empty")
    try:
        with Image.open(io.BytesIO(data)) as image:
            width, height = image.size
            if width * height > _MAX_PIXELS:
                raise ImageError(f"it has {width} x {height} pixels, more than {_MAX_PIXELS:,}")
            frames = getattr(image, "n_frames", 1)
            if frames > 1 and image.format != "MPO":  # MPO holds a photo and its preview
                raise ImageError(f"it has {frames} frames; videos are not supported")
            image.load()
            return in_rgb(ImageOps.exif_transpose(image))
    except ImageError:
        raise
    except UnidentifiedImageError as error:
        raise ImageError("it is not in a format that Pillow knows") from error
    except Image.DecompressionBombError as error:
        raise ImageError("it has too many pixels") from error
    except Exception as error:  # each of Pillow's formats raises other exceptions
        raise ImageError(f"it cannot be decoded: {error}") from error


def in_rgb(image: Any) -> Any:
    """Convert a Pillow image to RGB. Pillow alone makes 16 bits white and shows the colour behind
    transparent pixels, often black.

    Raises:
        ImageError: its pixels have 32 bits, whose range is unknown.
    """
    import numpy as np
    from PIL import Image

    if image.mode in _DEEP:
        raise ImageError("its pixels have 32 bits; convert it to 8 bits")
    if image.mode.startswith("I;16"):
        return Image.fromarray((np.asarray(image) >> 8).astype(np.uint8)).convert("RGB")
    if _is_transparent(image):
        white = Image.new("RGBA", image.size, "white")
        return Image.alpha_composite(white, image.convert("RGBA")).convert("RGB")
    return image.convert("RGB")


def _is_transparent(image: Any) -> bool:
    return image.mode in _WITH_ALPHA or "transparency" in image.info


def for_engine(data: bytes) -> bytes:
    """Return the image as `decoded` has it, encoded; ``data`` itself if any reader sees it so.

    Args:
        data: an image that `decoded` accepts.
    """
    from PIL import Image

    with Image.open(io.BytesIO(data)) as image:
        is_upright = image.getexif().get(_ORIENTATION, 1) == 1
        if is_upright and not image.mode.startswith("I;16") and not _is_transparent(image):
            return data
    stream = io.BytesIO()
    decoded(data).save(stream, "PNG")
    return stream.getvalue()
