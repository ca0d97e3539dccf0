"""Images in requests of agents: stored in the run's folder, with placeholders among the tokens.

A message in the common form of `slime.prompts.conversation` has a placeholder in its content for
each of its images, and the references of the images under ``images``.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from slime.engines.chat_messages import refused
from slime.engines.request_fields import BadRequest
from slime.errors import UserError
from slime.prompts.conversation import ImageParts, Messages
from slime.prompts.images import ImagePrompts, kept, read_inline


class AgentImages:
    """The images of one run's agents.

    Args:
        folder: the run's media folder.
        limit: largest number of images in one conversation.
    """

    def __init__(self, prompts: ImagePrompts, tokenizer: Any, folder: str, limit: int) -> None:
        self.prompts = prompts
        self._placeholder = prompts.placeholder(tokenizer)
        self._folder = folder
        self._limit = limit

    def read(self, read: Callable[[ImageParts], Messages], field: str) -> Messages:
        """Return the messages with the references of their images.

        Args:
            read: reads the messages of the request, and collects images.
            field: the request's field, for errors.
        Raises:
            BadRequest: an image cannot be read, or a text contains the placeholder.
        """
        parts = ImageParts(self._placeholder)
        messages = read(parts)
        with refused(field):
            sources = read_inline(parts, field)
        for number, source in enumerate(sources, start=1):
            try:
                self.prompts.size(source)
            except ValueError as error:
                raise BadRequest(f"image {number} of {field}: {error}", field) from error
        references = iter(kept(sources, self._folder))
        counts = [message["content"].count(self._placeholder) for message in messages]
        if sum(counts) != len(sources):
            raise BadRequest(
                f"{field} has {sum(counts)} placeholders of images and {len(sources)} images: "
                f"{self._placeholder} may not stand in a text",
                field,
            )
        return [
            message | {"images": [next(references) for _ in range(count)]} if count else message
            for message, count in zip(messages, counts)
        ]

    def expand(self, tokens: list[int], messages: Messages) -> list[int]:
        """Expand the placeholder of each image to the image's number of tokens.

        Raises:
            BadRequest: the chat template drops some images.
        """
        try:
            return self.prompts.expand(tokens, images_in(messages), "this conversation")[0]
        except UserError as error:
            raise BadRequest(str(error), "messages") from error

    def check(self, references: Sequence[str]) -> None:
        """Check the number of images of a conversation.

        Raises:
            BadRequest: there are too many.
        """
        if len(references) > self._limit:
            raise BadRequest(
                f"the conversation has {len(references)} images, the run allows {self._limit} "
                "(--images-per-sample)",
                "messages",
            )


def images_in(messages: Messages) -> list[str]:
    """Return the references of all images of messages, in order."""
    return [one for message in messages for one in message.get("images") or ()]
