"""Read images with a model's own image processor. Imports torch; Pillow and transformers are
imported when a reader is made."""

from __future__ import annotations

import copy
import hashlib
import itertools
import threading
import time
from collections import OrderedDict
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from slime.errors import UserError
from slime.models.decode_image import decoded
from slime.models.vision import ImageError
from slime.processes.host import num_cpus

#: Limits of a reader's caches: bytes of prepared images, and number of images with known grids.
_KEPT_BYTES = 1 << 28
_KEPT_GRIDS = 1 << 16
#: Most threads that prepare images ahead; the ranks of a host share its cores.
_MAX_THREADS = 8


class PreparedImage(NamedTuple):
    """An image as the input of a vision tower.

    Attributes:
        pixels: float32 [patches, values per patch]; for processors that scale all images to one
            size, [1, channels, rows, columns].
        grid: frames, rows and columns of patches; of pixels for processors of one size.
    """

    pixels: Tensor
    grid: tuple[int, int, int]


class ImageReader:
    """Decodes and prepares images for one model.

    Args:
        model_path: Hugging Face directory with preprocessor_config.json.
        max_pixels: larger images are scaled down to this many; None: the model's own limit.
        kept_bytes: limit of the cache of prepared images.
    Attributes:
        processor: transformers' image processor.
    Raises:
        UserError: the directory has no image processor, or one with settings that are not
            supported, or Pillow is missing.
    """

    def __init__(
        self, model_path: str | Path, max_pixels: int | None = None, kept_bytes: int = _KEPT_BYTES
    ) -> None:
        try:
            import PIL.Image  # noqa: F401

            # from its module: older versions of the package export it only with torchvision
            from transformers.models.auto.image_processing_auto import AutoImageProcessor

            self.processor: Any = AutoImageProcessor.from_pretrained(str(model_path))
        except (OSError, ValueError, ImportError, KeyError) as error:
            raise UserError(
                f"{model_path} has no image processor that can be loaded",
                why=f"{type(error).__name__}: {str(error).strip().splitlines()[0]}",
                fix="add the preprocessor_config.json that was published with the weights; "
                "pip install pillow, if it is missing",
            ) from error
        if getattr(self.processor, "do_pan_and_scan", None):
            raise UserError(
                f"{model_path} prepares images with pan and scan, which is not supported",
                why="do_pan_and_scan of its preprocessor_config.json adds crops of an image to the "
                "prompt",
                fix="set do_pan_and_scan to false there, as published",
            )
        if max_pixels is not None:
            size = dict(self.processor.size)
            if "longest_edge" not in size:
                raise UserError(
                    "--image-max-pixels has no effect on this model",
                    why=f"its image processor scales all images to {size['height']} x "
                    f"{size['width']} pixels",
                    fix="leave it out",
                )
            size["longest_edge"] = min(max_pixels, size["longest_edge"])
            size["shortest_edge"] = min(size["shortest_edge"], size["longest_edge"])
            self.processor.size = size
        self._max_bytes = kept_bytes
        self._clear()

    def _clear(self) -> None:
        self._kept: OrderedDict[bytes, PreparedImage] = OrderedDict()
        self._bytes = 0
        self._grids: dict[bytes, tuple[int, int, int]] = {}
        self._seconds = 0.0
        self._lock = threading.Lock()

    def with_settings(self, **settings: Any) -> ImageReader:
        """Return a reader whose image processor has these attributes changed."""
        other = copy.copy(self)
        other.processor = copy.copy(self.processor)
        for name, value in settings.items():
            setattr(other.processor, name, value)
        other._clear()
        return other

    def read(self, data: bytes) -> PreparedImage:
        """Decode and prepare an encoded image (PNG, JPEG, …). Thread-safe.

        Raises:
            ImageError: the image cannot be decoded, or is too large or too narrow.
        """
        key = hashlib.sha256(data).digest()
        with self._lock:
            if key in self._kept:
                self._kept.move_to_end(key)
                return self._kept[key]
            started = time.perf_counter()
            prepared = self._prepared(data)
            self._seconds += time.perf_counter() - started
            self._keep(key, prepared)
            return prepared

    def read_ahead(self, images: Iterable[bytes]) -> None:
        """Prepare images in several threads, as many as the cache holds, for `read` to find.

        Raises:
            ImageError: as `read`.
        """
        started = time.perf_counter()
        keys = {hashlib.sha256(data).digest(): data for data in images}
        threads = min(_MAX_THREADS, num_cpus())
        nbytes = 0
        with self._lock, ThreadPoolExecutor(threads) as pool:
            missing = iter([key for key in keys if key not in self._kept])
            while nbytes < self._max_bytes and (chunk := list(itertools.islice(missing, threads))):
                found = pool.map(self._prepared, [keys[key] for key in chunk])
                for key, prepared in zip(chunk, found, strict=True):
                    self._keep(key, prepared)
                    nbytes += prepared.pixels.nbytes
            self._seconds += time.perf_counter() - started

    def _keep(self, key: bytes, prepared: PreparedImage) -> None:
        self._kept[key] = prepared
        self._bytes += prepared.pixels.nbytes
        while self._bytes > self._max_bytes and len(self._kept) > 1:
            self._bytes -= self._kept.popitem(last=False)[1].pixels.nbytes
        if len(self._grids) >= _KEPT_GRIDS:
            self._grids.clear()
        self._grids[key] = prepared.grid

    def grid(self, data: bytes) -> tuple[int, int, int]:
        """Return the grid of an image, which is cached for longer than the image.

        Raises:
            ImageError: as `read`.
        """
        known = self._grids.get(hashlib.sha256(data).digest())
        return self.read(data).grid if known is None else known

    def take_seconds(self) -> float:
        """Return the seconds spent on decoding and preparing images since the last call."""
        with self._lock:
            found = self._seconds
            self._seconds = 0.0
            return found

    def _prepared(self, data: bytes) -> PreparedImage:
        image = decoded(data)
        try:
            found = self.processor(images=[image], return_tensors="pt")
        except (ValueError, TypeError, ZeroDivisionError) as error:
            raise ImageError(f"the image processor refuses it: {error}") from error
        pixels = torch.as_tensor(found["pixel_values"], dtype=torch.float32)
        if "image_grid_thw" not in found:
            return PreparedImage(pixels, (1, int(pixels.shape[-2]), int(pixels.shape[-1])))
        frames, rows, columns = (int(size) for size in found["image_grid_thw"][0])
        return PreparedImage(pixels, (frames, rows, columns))
