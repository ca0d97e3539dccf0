"""Images of samples: their positions among the tokens, and their bytes.

    Sample.multimodal_inputs        {"images": [reference, …]}, in the order of their tokens
    Sample.multimodal_train_inputs  {"spans": [[start, rows, columns], …]}, one for each image

A reference is the path of a file: a user's file, or one in the run's media folder, which stores
bytes from rows and tool results once for all samples. Journal and dumps hold references.
`TrainBatch.images` has the bytes of each image once.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from slime.models.vision import ImageSpan, VisionSpec, placeholder_runs

IMAGES = "images"
SPANS = "spans"


@dataclass(frozen=True)
class Media:
    """An image of a sample.

    Attributes:
        span: its placeholder tokens.
        reference: the path of its file, which identifies the image.
    """

    span: ImageSpan
    reference: str


def references_of(sample: Any) -> list[str]:
    """Return the references of a `slime.samples.types.Sample`'s images."""
    return list((sample.multimodal_inputs or {}).get(IMAGES) or [])


def media_of(inputs: dict[str, Any] | None, train_inputs: dict[str, Any] | None) -> list[Media]:
    """Read a sample's ``multimodal_inputs`` and ``multimodal_train_inputs``.

    Raises:
        ValueError: the numbers of images and spans differ.
    """
    references = (inputs or {}).get(IMAGES) or []
    spans = (train_inputs or {}).get(SPANS) or []
    if len(references) != len(spans):
        raise ValueError(f"{len(references)} images, and placeholders of {len(spans)}")
    return [Media(ImageSpan(*span), str(one)) for span, one in zip(spans, references)]


def media_before(
    inputs: dict[str, Any] | None, train_inputs: dict[str, Any] | None, length: int
) -> tuple[dict[str, Any] | None, dict[str, Any] | None]:
    """Return a sample's ``multimodal_inputs`` and ``multimodal_train_inputs`` without the images
    after the first ``length`` tokens."""
    if not train_inputs:
        return inputs, train_inputs
    kept = [span for span in train_inputs[SPANS] if span[0] < length]
    references = (inputs or {})[IMAGES][: len(kept)]
    return {**(inputs or {}), IMAGES: references}, {SPANS: kept}


def media_behind(
    media: Sequence[Media], prompt_length: int, prompt: Sequence[int], vision: VisionSpec
) -> list[Media]:
    """Return the images of a sample whose prompt is replaced by another one: the first images of
    its own prompt, as many as the new one has placeholders for, and those of the response.

    Args:
        prompt_length: of its own prompt.
        prompt: the new one.
    """
    runs = placeholder_runs(prompt, vision)
    starts = [one.span.start for one in media]
    of_prompt = [one for one, start in zip(media, starts) if start < prompt_length]
    shift = len(prompt) - prompt_length
    return [
        *(_moved(one, start) for one, (start, _) in zip(of_prompt, runs)),
        *(_moved(one, s + shift) for one, s in zip(media, starts) if s >= prompt_length),
    ]


def _moved(one: Media, start: int) -> Media:
    return replace(one, span=one.span._replace(start=start))


def media_problem(media: Sequence[Media], tokens: Sequence[int], image_token: int) -> str:
    """Describe the first problem with the positions of a sample's images; "" if there is none."""
    end = 0
    for number, one in enumerate(media, start=1):
        span = one.span
        if span.start < end or span.rows < 1 or span.columns < 1:
            return f"image {number} at token {span.start}, where image {number - 1} is"
        if span.start < 1 or span.end >= len(tokens):
            return f"image {number} without tokens around it"
        if any(token != image_token for token in tokens[span.start : span.end]):
            return (
                f"image {number}, which is {span.rows} x {span.columns} tokens from token "
                f"{span.start} on, and other tokens there than {span.length} placeholders"
            )
        end = span.end
    return ""


def keep_bytes(folder: Path, data: bytes) -> str:
    """Write an image into the run's media folder, unless it exists; return its reference."""
    path = folder / hashlib.sha256(data).hexdigest()[:32]
    if not path.exists():
        folder.mkdir(parents=True, exist_ok=True)
        part = path.with_suffix(f".{os.getpid()}")
        part.write_bytes(data)
        part.replace(path)
    return str(path)
