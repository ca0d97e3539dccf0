"""harmony, the answer format of gpt-oss: messages, each on a channel.

    <|channel|>analysis<|message|>They ask for the weather.<|end|>
    <|start|>assistant<|channel|>commentary<|message|>Let me look.<|end|>
    <|start|>assistant<|channel|>commentary to=functions.weather <|constrain|>json<|message|>
    {"city": "Bern"}<|call|>

Messages on the channel analysis are reasoning; a message with a recipient calls a tool; all others
are text for the user. The header of the first message, ``<|start|>assistant``, is in the prompt.
The recipient may also come before the channel, as the published template writes earlier calls.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass

_HEAD = "<|start|>assistant"
_START = "<|start|>"
_CHANNEL = "<|channel|>"
_MESSAGE = "<|message|>"
_ENDS = re.compile(r"<\|(?:end|call|return)\|>")
_MARKS = (_START, _CHANNEL, _MESSAGE, "<|end|>", "<|call|>", "<|return|>", "<|constrain|>")
#: Beginnings of the first message, whose header is in the prompt.
_FIRST = (_CHANNEL, " to=", "to=")


@dataclass(frozen=True)
class ChannelMessage:
    """One message of an answer.

    Attributes:
        channel: "analysis", "commentary" or "final"; "" for text outside of all channels.
        recipient: "functions.NAME"; "" for the user.
        is_whole: its end has been written.
    """

    channel: str
    recipient: str
    content: str
    is_whole: bool

    @property
    def is_reasoning(self) -> bool:
        return self.channel == "analysis" and not self.recipient

    @property
    def tool(self) -> str:
        """Name of the tool that it calls; "" if it calls none."""
        return self.recipient.removeprefix("functions.")

    def written(self) -> str:
        """Return it as a model writes it."""
        if not self.channel and not self.recipient:
            return self.content
        recipient = f" to={self.recipient}" if self.recipient else ""
        end = ("<|call|>" if self.recipient else "<|end|>") if self.is_whole else ""
        return f"{_HEAD}{recipient}{_CHANNEL}{self.channel}{_MESSAGE}{self.content}{end}"


def messages(text: str) -> Iterator[ChannelMessage]:
    """Parse an answer, or its beginning. A header without its message is not a message yet.

    Example:
        >>> [(one.channel, one.tool) for one in messages(
        ...     "<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant to=functions.f"
        ...     '<|channel|>commentary json<|message|>{}<|call|>')]
        [('analysis', ''), ('commentary', 'f')]
    """
    first, *others = text.split(_START)
    if not first.startswith(_FIRST):
        if first:
            yield ChannelMessage("", "", first, bool(others))
    else:
        others = [first, *others]
    for place, part in enumerate(others):
        head, found, body = part.partition(_MESSAGE)
        if not found:
            continue
        end = _ENDS.search(body)
        channel = re.search(r"<\|channel\|>\s*(\w*)", head)
        recipient = re.search(r"\bto=([^\s<]+)", head)
        yield ChannelMessage(
            channel[1] if channel else "final",
            recipient[1] if recipient and recipient[1] != "user" else "",
            body if end is None else body[: end.start()],
            end is not None or place + 1 < len(others),
        )


def may_be_a_head(text: str) -> bool:
    """Tell whether the beginning of an answer may become the header of its first message."""
    return any(text.startswith(mark) or mark.startswith(text) for mark in _FIRST)


def held_back(text: str) -> int:
    """Count the characters at the end that may become a mark."""
    longest = max(map(len, _MARKS)) - 1
    for count in range(min(len(text), longest), 0, -1):
        if any(mark.startswith(text[-count:]) for mark in _MARKS):
            return count
    return 0
