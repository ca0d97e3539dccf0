"""Causes in images: their positions, the vision tower and projector, and the preparation of
pixels."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from slime.diagnosis.align.case import Discrepancy, Tried, Untested
from slime.diagnosis.align.evidence import size
from slime.diagnosis.align.reference import Reference
from slime.diagnosis.align.sight import Read, Sight
from slime.models.images import ImageReader, PreparedImage
from slime.models.vision import frozen_parts

#: Mean and standard deviation per colour channel in published image processors.
_COLOURS: dict[str, tuple[list[float], list[float]]] = {
    "0.5": ([0.5] * 3, [0.5] * 3),
    "CLIP": ([0.48145466, 0.4578275, 0.40821073], [0.26862954, 0.26130258, 0.27577711]),
    "ImageNet": ([0.485, 0.456, 0.406], [0.229, 0.224, 0.225]),
}
#: Pillow's filters: 2 is bilinear, 3 bicubic.
_FILTERS = {2: "bilinear", 3: "bicubic"}


def images(case: Discrepancy) -> Iterator[Tried]:
    """Test whether one side processes images differently."""
    model = case.model()
    if model.images is None:
        raise Untested("the run reads no images")
    if not any(sample.media for sample in case.samples):
        raise Untested("no sample has an image")
    details = _where(case)
    yield from _positions(case, details)
    yield from _features(case, details)
    yield from _weights(case, details)
    yield from _preparation(case, model.images, details)


def _where(case: Discrepancy) -> tuple[str, ...]:
    """Describe how much samples with and without images differ."""
    apart = [
        (bool(sample.media), (scores - sample.engine)[sample.counted])
        for sample, scores in zip(case.samples, case.trainer, strict=True)
    ]
    without = [values for has_images, values in apart if not has_images]
    if not without:
        return ()
    own = torch.cat([values for has_images, values in apart if has_images])
    return (
        f"samples with images differ by {size(own):.3g}, those without by "
        f"{size(torch.cat(without)):.3g}",
    )


def _positions(case: Discrepancy, details: tuple[str, ...]) -> Iterator[Tried]:
    vision = case.model().arch.spec.vision
    if vision is not None and vision.kind.bidirectional:
        yield case.with_setting(
            "tokens of an image attend only to earlier ones",
            sight=Sight(is_causal=True),
            details=details,
            remedies=("the attention of the engine or the trainer is causal within images",),
        )
    if vision is None or not vision.kind.has_axes:
        return
    remedies = (
        "SGLang up to 0.5.18 reads one of the three rows of positions in Qwen3.5; in an engine of "
        "your own, compare mrope_section and mrope_interleaved of config.json",
    )
    changes = {
        "rows and columns of images have the position in time": lambda turns: turns[:1].expand(
            3, -1
        ),
        "tokens of images have positions as text has": lambda turns: torch.arange(
            turns.shape[1]
        ).expand(3, -1),
        "rows and columns of images are exchanged": lambda turns: turns[[0, 2, 1]],
    }
    for what, positions in changes.items():
        sight = Sight(positions=positions)
        yield case.with_setting(what, sight=sight, details=details, remedies=remedies)


def _features(case: Discrepancy, details: tuple[str, ...]) -> Iterator[Tried]:
    remedies = ("read the engine's log about weights named visual; the canary finds it at a push",)
    changes = {
        "images are not looked at: their placeholders are read as tokens": Sight(is_blind=True),
        "the features of images are zeros": Sight(features=lambda own, _: torch.zeros_like(own)),
    }
    vision = case.model().arch.spec.vision
    if vision is not None and vision.num_levels:
        what = "the features of the tower's inner blocks are not added behind the first layers"
        changes[what] = Sight(features=_without_levels)
    for what, sight in changes.items():
        yield case.with_setting(what, sight=sight, details=details, remedies=remedies)


def _without_levels(features: Tensor, hidden: int) -> Tensor:
    return torch.cat([features[:, :hidden], torch.zeros_like(features[:, hidden:])], dim=1)


def _weights(case: Discrepancy, details: tuple[str, ...]) -> Iterator[Tried]:
    """Try the tower or the projector of other weights (``--also``)."""
    model = case.model()
    vision = model.arch.spec.vision
    assert vision is not None
    for label, directory in (case.facts.get("other_weights") or {}).items():
        other = Reference(directory, model.dtype, images=model.images).store.named
        for part in ("tower", "projector"):
            is_tower = part == "tower"
            (own,) = frozen_parts(tower=is_tower, projector=not is_tower)
            names = [name for name in other if _is_of(name, own, vision.kind.names)]
            with model.holding({name: other[name] for name in names}):
                yield case.tried(
                    f"the vision {part} is that of {label}",
                    model.of_all(case.samples),
                    details=details,
                    remedies=("--check-weight-update-equal compares every tensor of a push",),
                )


def _is_of(name: str, part: str, names: str) -> bool:
    """Tell whether a Hugging Face name matches ``part``, a pattern of Megatron's names.

    Args:
        names: pattern of the vision model's Hugging Face names.
    """
    return re.fullmatch(names, name) is not None and bool(re.search(part, f"vision_model.{name}"))


def _preparation(
    case: Discrepancy, reader: ImageReader, details: tuple[str, ...]
) -> Iterator[Tried]:
    own = reader.processor
    changes: dict[str, dict[str, Any]] = {
        "images are not normalised": {"do_normalize": False},
        "images are not rescaled to 0..1": {"do_rescale": False},
    }
    for name, (mean, deviation) in _COLOURS.items():
        if list(own.image_mean) != mean:
            words = f"colours are normalised by the numbers of {name}"
            changes[words] = {"image_mean": mean, "image_std": deviation}
    for number, name in _FILTERS.items():
        if int(own.resample) != number:
            changes[f"images are scaled with the {name} filter"] = {"resample": number}
    reads: dict[str, Read] = {
        what: reader.with_settings(**changed).read for what, changed in changes.items()
    }
    reads["red and blue are exchanged"] = lambda data: _exchanged(reader.read(data))
    remedies = (
        "compare the engine's preprocessor_config.json with that of --hf-checkpoint; have the same "
        "transformers, and torchvision on both sides or on neither",
    )
    for what, read in reads.items():
        yield case.with_setting(what, sight=Sight(read=read), details=details, remedies=remedies)


def _exchanged(image: PreparedImage) -> PreparedImage:
    patches = image.pixels.view(len(image.pixels), 3, -1)
    return image._replace(pixels=patches.flip(1).reshape(image.pixels.shape))
