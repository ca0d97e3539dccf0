"""Sequences of the embedded engine with images."""

from __future__ import annotations

import base64
from typing import Any

from slime.embedded.images import ImageRequests
from slime.embedded.scheduler import Scheduler
from slime.embedded.sequence import Sequence
from slime.models.images import ImageReader
from tests.support.embedded_models import make_sequence
from tests.support.images import PICTURES, with_images


def images_of(
    scheduler: Scheduler, reader: ImageReader, names: list[str], tokens: list[int]
) -> Any:
    vision = scheduler.cache.arch.spec.vision
    assert vision is not None
    data = [base64.b64encode(PICTURES[name]).decode() for name in names]
    whole, images = ImageRequests(reader, vision, 16).read(tokens, data)
    assert whole == tokens
    return images


def sequence_of(
    scheduler: Scheduler, reader: ImageReader, pieces: list[Any], **options: Any
) -> tuple[Sequence, Any]:
    tokens, media = with_images(reader, pieces)
    names = [one.reference for one in media]
    images = images_of(scheduler, reader, names, tokens)
    return make_sequence(tokens, images=images, **options), media
