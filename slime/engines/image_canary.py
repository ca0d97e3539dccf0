"""The canary for images: trainer and engines score the same tokens after two different pictures,
which must affect the log-probs.

    text ─► picture ─► text once with each picture; the text after it is compared

Faults of the vision tower, the projector, row and column positions, or image sizes show only in the
log-probs after a picture. These must also change with the picture: an engine that ignores images
would agree with a trainer that ignores them, too.
"""

from __future__ import annotations

import base64
import io
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from slime.config.config import Config
from slime.errors import UserError
from slime.log import get_logger
from slime.models.vision import ImageSpan
from slime.prompts.images import images_of
from slime.samples.media import Media

logger = get_logger(__name__)

_SIDE = 96
#: Tokens of text on either side of a picture.
_TEXT = 8


def scoring_request(tokens: list[int]) -> dict[str, Any]:
    """Make the request for the log-probs of given tokens."""
    return {
        "input_ids": tokens,
        "sampling_params": {"temperature": 1.0, "max_new_tokens": 0},
        "return_logprob": True,
        "logprob_start_len": 0,
    }


@dataclass(frozen=True)
class ImageCanary:
    """Tokens around a placeholder for a picture, and the pictures to insert.

    Attributes:
        tokens: with all placeholders.
        compared: indices of the compared log-probs of ``tokens[1:]``: those of text.
    """

    tokens: list[int]
    span: ImageSpan
    pictures: tuple[bytes, ...]

    @staticmethod
    def of(config: Config, text: Sequence[int]) -> ImageCanary | None:
        """Make the canary of a run; None without images, or if the context is too short.

        Args:
            text: tokens from which to take the text.
        """
        prompts = images_of(config)
        if prompts is None:
            return None
        vision = prompts.vision
        special = (vision.start_token, vision.image_token, vision.end_token)
        plain = [token for token in text if token not in special]
        pictures = tuple(_picture(number) for number in range(2))
        rows, columns = prompts.size(pictures[0])
        before = [*plain[:_TEXT], vision.start_token]
        span = ImageSpan(len(before), rows, columns)
        behind = [vision.end_token, *plain[-_TEXT:]]
        tokens = [*before, *[vision.image_token] * span.length, *behind]
        context = config.rollout.rollout_max_context_len
        if context is not None and len(tokens) >= context:
            logger.info(
                "the canary has no pictures: they need %d tokens, the context is %d",
                len(tokens),
                context,
            )
            return None
        return ImageCanary(tokens, span, pictures)

    @property
    def compared(self) -> list[int]:
        last = len(self.tokens) - 1
        return [*range(self.span.start - 1), *range(self.span.end - 1, last)]

    @property
    def media(self) -> list[Media]:
        return [Media(self.span, "canary")]

    def chosen(self, log_probs: Sequence[float]) -> list[float]:
        """Select the compared log-probs from those of ``tokens[1:]``."""
        return [log_probs[place] for place in self.compared]

    def body(self, picture: bytes) -> dict[str, Any]:
        """Return the request for log-probs with one of the pictures."""
        tokens = [*self.tokens[: self.span.start + 1], *self.tokens[self.span.end :]]
        return {**scoring_request(tokens), "image_data": [in_base64(picture)]}

    def has_tokens(self, told: Sequence[Any]) -> bool:
        """Tell whether an engine's answer has these tokens. Engines may use other ids for
        placeholders."""
        own = self.span
        return len(told) == len(self.tokens) and all(
            told[place] == token
            for place, token in enumerate(self.tokens)
            if not own.start <= place < own.end
        )

    def check_effect(
        self, event: str, expected: Sequence[float], said: Mapping[str, Sequence[float]]
    ) -> float:
        """Return the mean difference between the log-probs after the two pictures, in the engine
        (or the trainer) where it is smallest.

        Args:
            expected: the trainer's, of both pictures in turn.
            said: the engines', by URL.
        Raises:
            UserError: the trainer's or an engine's do not depend on the picture.
        """
        effects = {"the trainer": self.effect(expected)}
        effects |= {f"engine {url}": self.effect(own) for url, own in said.items()}
        for who, effect in effects.items():
            if effect == 0:
                raise UserError(
                    f"after {event}, {who} gives the same log-probs behind two different pictures",
                    why="it ignores images: their placeholders are treated as ordinary "
                    "tokens, or the tower's features are zeros",
                    fix="read the log about the tower's weights; --no-check-canary goes on "
                    "regardless",
                )
        return min(effects.values())

    def effect(self, both: Sequence[float]) -> float:
        """Return the mean difference between the log-probs after the two pictures.

        Args:
            both: `chosen` of both pictures in turn.
        """
        half = len(both) // 2
        own = len(self.tokens) - self.span.end
        behind = zip(both[half - own : half], both[len(both) - own :])
        return statistics.fmean(abs(a - b) for a, b in behind)


def in_base64(picture: bytes) -> str:
    """Return a picture as requests carry it."""
    return base64.b64encode(picture).decode("ascii")


def _picture(number: int) -> bytes:
    """Draw a colour gradient (0) or stripes (1)."""
    import numpy as np
    from PIL import Image

    along = np.arange(_SIDE)
    shades = np.zeros((_SIDE, _SIDE, 3), np.uint8)
    if number == 0:
        shades[..., 0] = along * 255 // _SIDE
        shades[..., 1] = (along * 255 // _SIDE)[:, None]
    else:
        shades[(along // 8) % 2 == 0] = 255
        shades[..., 2] = 40
    stream = io.BytesIO()
    Image.fromarray(shades).save(stream, "PNG")
    return stream.getvalue()
