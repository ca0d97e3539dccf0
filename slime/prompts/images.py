"""Images of prompts: find them in rows and messages, read them, and expand their placeholders.

    row ─► `ImageSources.of_row` ─► sources ─► `kept` ─► references, in Sample.multimodal_inputs
    text ─► one placeholder for each image ─► tokens ─► `expand` ─► as many as the image has

In a rendered prompt an image is the text that the chat templates of its family write for one:
``<|vision_start|><|image_pad|><|vision_end|>``.
"""

from __future__ import annotations

import base64
import binascii
import functools
import http.client
import re
import urllib.request
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from slime import deadlines
from slime.config.config import Config
from slime.errors import UserError, a_type
from slime.models import family_name, family_of
from slime.models.spec import read_hf_config
from slime.models.vision import ImageError, ImageSpan, VisionSpec, placeholder_runs, seeing
from slime.prompts.conversation import (
    IMAGE_MARK,
    ConversationError,
    ImageParts,
    Messages,
    read_messages,
)
from slime.prompts.problems import RowProblem
from slime.prompts.readers import split_name, split_slice
from slime.samples.media import IMAGES, SPANS, keep_bytes, references_of
from slime.samples.types import Sample

if TYPE_CHECKING:
    from slime.models.images import ImageReader

#: Text that may be base64 if it is not a path; shorter text counts as the name of a file.
_BASE64 = re.compile(r"[A-Za-z0-9+/\s]{64,}={0,2}\s*")
_FIX = "repair or remove the files"
#: Maximum bytes of a downloaded file.
_LARGEST_FILE = 1 << 26

#: Bytes of an image, or the path of its file.
Source = bytes | str


@dataclass(frozen=True)
class ImageSources:
    """How rows of one data set name their images.

    Attributes:
        column: the column with images; "" if only messages have images.
        root: directory of the data, to which paths are relative.
        folder: where images that come as bytes are stored.
        limit: most images per row.
        allow_urls: download images.
    """

    column: str
    root: str
    folder: str
    model_path: str
    max_pixels: int | None
    limit: int
    allow_urls: bool

    @staticmethod
    def of(config: Config, path: str | None, keys: Mapping[str, Any] | None) -> ImageSources | None:
        """Read the flags; None for a run without images.

        Args:
            path: the data set's.
            keys: --multimodal-keys, or those of an evaluation set.
        Raises:
            UserError: keys name other media, or no column of images.
        """
        if not keys:
            return None
        others = sorted(set(keys) - {"image"})
        if others or not isinstance(keys.get("image"), str):
            raise UserError(
                f"--multimodal-keys names {', '.join(others) or 'no column of images'}",
                why="images are read; audio and video are not supported in this version",
                fix="""pass --multimodal-keys '{"image": "images"}' with the column of images""",
            )
        assert config.checkpoint.hf_checkpoint is not None
        file = split_name(split_slice(path or "")[0])[0]
        return ImageSources(
            keys["image"],
            str(Path(file).absolute().parent),
            media_folder(config),
            config.checkpoint.hf_checkpoint,
            config.images.image_max_pixels,
            config.images.images_per_sample,
            config.images.allow_image_urls,
        )

    def of_row(self, row: Mapping[str, Any], parts: ImageParts) -> list[Source]:
        """Return the images of a row in order: images in message parts, and images of the column in
        place of marks and bare parts.

        Raises:
            RowProblem: the number of images differs from the number of places or exceeds the limit,
                or an image cannot be read.
        """
        given = row.get(self.column)
        column = list(given) if isinstance(given, list | tuple) else [given]
        column = [] if given is None else column
        places = sum(source is None for source in parts.sources)
        if places != len(column):
            raise RowProblem(
                f"have other numbers of images (key '{self.column}') than places for them",
                f"{len(column)} images, {places} places",
                f"write {IMAGE_MARK} in the text, or a part {{'type': 'image'}}, for each image",
            )
        rest = iter(column)
        wanted = [next(rest) if source is None else source for source in parts.sources]
        if len(wanted) > self.limit:
            raise RowProblem(
                "have more images than --images-per-sample",
                f"{len(wanted)} images, {self.limit} are allowed",
                "raise it, or remove these rows",
            )
        return [self._read(number, one) for number, one in enumerate(wanted, start=1)]

    def _read(self, number: int, value: Any) -> Source:
        shown = f"image {number}"
        if isinstance(value, Mapping) and value.get("bytes") is None and value.get("path"):
            value = value["path"]
        if isinstance(value, str) and len(value) < 512:
            shown += f" ({value})"
        try:
            source = self._located(value)
            image_prompts(self.model_path, self.max_pixels).size(source)
        except (ImageError, OSError) as error:
            reason = error.strerror if isinstance(error, OSError) else str(error)
            raise RowProblem(
                "have images that cannot be read", f"{shown}: {reason or error}", _FIX, lists=True
            ) from error
        return source

    def _located(self, value: Any) -> Source:
        """Find an image by a value of a row: bytes, base64, a data URI, a path or a URL.

        Raises:
            ImageError: the value has another type, or is a URL without --allow-image-urls.
            OSError: there is no such file or server.
        """
        if isinstance(value, Mapping):
            value = value.get("bytes")
        if isinstance(value, bytes | bytearray):
            return bytes(value)
        if not isinstance(value, str) or not value:
            raise ImageError(f"it is {a_type(value)}, not a path, bytes or base64")
        if value.startswith("data:"):
            return from_data_uri(value)
        if value.startswith(("http://", "https://")):
            if not self.allow_urls:
                raise ImageError("it is a URL, which is not read without --allow-image-urls")
            return _download(value)
        path = Path(value.removeprefix("file://"))
        for place in (Path(self.root) / path, path.absolute()):
            if place.is_file():
                return str(place)
        if _BASE64.fullmatch(value):
            return decoded_base64(value)
        raise ImageError(f"there is no file {Path(self.root) / path}")


def decoded_base64(text: str) -> bytes:
    """Decode base64, which may have whitespace in it.

    Raises:
        ImageError: the text is not valid base64.
    """
    try:
        return base64.b64decode("".join(text.split()), validate=True)
    except binascii.Error as error:
        raise ImageError(f"its base64 is not valid: {error}") from error


def from_data_uri(value: str) -> bytes:
    """Return the bytes in a data URI.

    Raises:
        ImageError: the URI has no base64.
    """
    head, _, text = value.partition(",")
    if not head.endswith(";base64"):
        raise ImageError("it is a data URI without base64")
    return decoded_base64(text)


@functools.lru_cache(maxsize=64)
def _download(url: str) -> bytes:
    try:
        with urllib.request.urlopen(url, timeout=deadlines.IMAGE_DOWNLOAD) as answer:
            found: bytes = answer.read(_LARGEST_FILE + 1)
    except (ValueError, http.client.HTTPException) as error:
        raise ImageError(f"it cannot be downloaded: {error}") from error
    if len(found) > _LARGEST_FILE:
        raise ImageError(f"it has more than {_LARGEST_FILE:,} bytes")
    return found


def media_folder(config: Config) -> str:
    """Return the folder in which a run stores images that came as bytes."""
    return f"{config.observe.output_dir}/{config.observe.run_name}/media"


def kept(sources: Iterable[Source], folder: str) -> list[str]:
    """Return references of images; bytes are written into the folder."""
    return [one if isinstance(one, str) else keep_bytes(Path(folder), one) for one in sources]


def bytes_of(source: Source) -> bytes:
    """Return the bytes of an image, from its file unless they are given.

    Raises:
        OSError: the file no longer exists.
    """
    return source if isinstance(source, bytes) else Path(source).read_bytes()


@dataclass(eq=False)
class ImagePrompts:
    """Expands image placeholders among the tokens of one model."""

    reader: ImageReader
    vision: VisionSpec

    def placeholder(self, tokenizer: Any) -> str:
        return self.vision.placeholder(tokenizer)

    def size(self, source: Source) -> tuple[int, int]:
        """Return rows and columns of an image, in tokens.

        Raises:
            ImageError: it cannot be read.
            OSError: its file is not there.
        """
        return self.vision.size_in_tokens(self.reader.grid(bytes_of(source)))

    def num_tokens(self, sources: Iterable[Source]) -> int:
        """Return how many tokens images have in addition to one placeholder each."""
        return sum(rows * columns - 1 for rows, columns in map(self.size, sources))

    def expand(
        self, tokens: Sequence[int], sources: Sequence[Source], what: str, start: int = 0
    ) -> tuple[list[int], list[ImageSpan]]:
        """Expand the placeholder of each image to as many as the image has tokens. Images that
        already have all of them stay.

        Args:
            what: the owner of the tokens, for errors.
            start: number of tokens before these, which the spans count too.
        Raises:
            UserError: placeholders do not match the images, or an image can no longer be read.
        """
        runs = placeholder_runs(tokens, self.vision)
        if len(runs) != len(sources):
            raise UserError(
                f"{what} has placeholders of {len(runs)} images and {len(sources)} images",
                why="its text holds the token of an image itself, or the chat template leaves "
                "images out",
                fix="remove such rows; a template must write every image that a message has",
            )
        whole: list[int] = []
        spans: list[ImageSpan] = []
        end = 0
        for (first, length), source in zip(runs, sources):
            try:
                rows, columns = self.size(source)
            except (ValueError, OSError) as error:
                raise UserError(
                    f"an image of {what} cannot be read", why=str(error), fix="put it back"
                ) from error
            if length not in (1, rows * columns):
                raise UserError(
                    f"{what} has {length} placeholders for an image of {rows} x {columns} tokens",
                    fix="write one placeholder for each image, or all of them",
                )
            whole += tokens[end:first]
            spans.append(ImageSpan(start + len(whole), rows, columns))
            whole += [self.vision.image_token] * (rows * columns)
            end = first + length
        return [*whole, *tokens[end:]], spans

    def within(self, tokens: Sequence[int], sources: Sequence[Source]) -> Sequence[Source]:
        """Return the first images of a conversation, as many as ``tokens`` has placeholders for."""
        return sources[: len(placeholder_runs(tokens, self.vision))]

    def expand_masked(
        self, tokens: Sequence[int], mask: Sequence[int], sources: Sequence[Source], what: str
    ) -> tuple[list[int], list[int], list[ImageSpan]]:
        """Do as `expand` for tokens with a mask; the placeholders of images are not trained."""
        whole, spans = self.expand(tokens, sources, what)
        values: list[int] = []
        end = 0
        for (first, length), span in zip(placeholder_runs(tokens, self.vision), spans):
            values += [*mask[end:first], *[0] * span.length]
            end = first + length
        return whole, [*values, *mask[end:]], spans


@functools.lru_cache(maxsize=4)
def image_prompts(model_path: str, max_pixels: int | None) -> ImagePrompts:
    """Return the `ImagePrompts` of a model.

    Raises:
        UserError: the model sees no images, or has no image processor.
    """
    from slime.models.images import ImageReader

    config = seeing(read_hf_config(model_path))
    vision = family_of(config).describe(config).vision
    assert vision is not None
    return ImagePrompts(ImageReader(model_path, max_pixels), vision)


def images_of(config: Config) -> ImagePrompts | None:
    """Return the `ImagePrompts` of a run; None for a run without images.

    Raises:
        UserError: as `image_prompts`.
    """
    if not config.images.multimodal_keys or config.checkpoint.hf_checkpoint is None:
        return None
    return image_prompts(config.checkpoint.hf_checkpoint, config.images.image_max_pixels)


def add_images(sample: Sample, references: Sequence[str], spans: Sequence[ImageSpan]) -> None:
    """Record images whose tokens a sample has."""
    if not spans:
        return
    known = (sample.multimodal_train_inputs or {}).get(SPANS) or []
    own = references_of(sample)
    sample.multimodal_inputs = {**(sample.multimodal_inputs or {}), IMAGES: [*own, *references]}
    sample.multimodal_train_inputs = {SPANS: [*known, *(list(span) for span in spans)]}


def read_teacher_prompt(
    given: str | Messages, placeholder: str, limit: int
) -> tuple[str | Messages, int]:
    """Return a teacher's own prompt with placeholders, and the number of its images, which are the
    first ones of the sample's prompt.

    Args:
        given: text with marks, or messages with marks or parts without an image of their own.
        limit: number of images in the sample's prompt.
    Raises:
        UserError: it has more images, or an image of its own.
    """
    parts = ImageParts(placeholder, reads_marks=True)
    found = parts.text(given) if isinstance(given, str) else read_messages(given, images=parts)
    own = sum(source is not None for source in parts.sources)
    if own or len(parts.sources) > limit:
        raise UserError(
            f"a teacher's prompt has {own or len(parts.sources)} images"
            + (" of its own" if own else f", and the sample's prompt has {limit}"),
            why="a teacher sees the first images of the sample's prompt, or none",
            fix=f"write {IMAGE_MARK}, or a part {{'type': 'image'}}, for each of them",
        )
    return found, len(parts.sources)


def sees_images(directory: Path) -> bool:
    """Tell whether a model takes images and its directory has an image processor."""
    config = read_hf_config(directory)
    family = family_of(config) if family_name(config) else None
    sees = family is not None and family.vision is not None
    return sees and (directory / "preprocessor_config.json").is_file()


def read_inline(parts: ImageParts, where: str) -> list[bytes]:
    """Return the bytes of images that messages contain.

    Raises:
        ConversationError: an image has no data, is a URL of a file or server, or cannot be decoded.
    """
    found = []
    for number, source in enumerate(parts.sources, start=1):
        if isinstance(source, Mapping):
            source = source.get("bytes")
        try:
            if isinstance(source, bytes):
                found.append(source)
            elif isinstance(source, str) and source.startswith("data:"):
                found.append(from_data_uri(source))
            elif isinstance(source, str) and source.startswith(("http:", "https:", "file:")):
                raise ImageError("it is an address, and only bytes are taken here: send a data URI")
            elif isinstance(source, str):
                found.append(decoded_base64(source))
            else:
                raise ImageError("it has no data")
        except ImageError as error:
            kind = "an image that cannot be read"
            raise ConversationError(kind, where, f"image {number}: {error}") from error
    return found
