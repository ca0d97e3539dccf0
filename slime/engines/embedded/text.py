"""Tokens to text: whole, and bit by bit for streams and stop strings."""

from __future__ import annotations

from typing import Protocol

#: A decoded tail that ends in this is a character whose bytes are not all there yet.
_INCOMPLETE = "\ufffd"


class Tokenizer(Protocol):
    """What the engine needs of a Hugging Face tokenizer."""

    eos_token_id: int | None

    def encode(self, text: str, add_special_tokens: bool = ...) -> list[int]: ...

    def decode(self, token_ids: list[int], **options: bool) -> str: ...


class TextStream:
    """Decodes a growing list of tokens without starting over.

    Text is only taken over once it cannot change any more: a tail of a few tokens is decoded twice, with and without
    the new ones, since a token's text may depend on its neighbours (spaces, bytes of one character).

    Example:
        >>> stream = TextStream(tokenizer, skip_special_tokens=True, spaces_between_special_tokens=True)
        >>> stream.extend([4093, 198]); stream.text
        'user\\n'
    """

    def __init__(self, tokenizer: Tokenizer, skip_special_tokens: bool, spaces_between_special_tokens: bool) -> None:
        self._tokenizer = tokenizer
        self._options = {
            "skip_special_tokens": skip_special_tokens,
            "spaces_between_special_tokens": spaces_between_special_tokens,
        }
        self._tokens: list[int] = []
        self._context_start = self._read = 0
        self.text = ""

    def extend(self, tokens: list[int]) -> str:
        """Take in tokens; returns the text that they completed."""
        self._tokens += tokens
        before = self._decode(self._context_start, self._read)
        after = self._decode(self._context_start, len(self._tokens))
        if after.endswith(_INCOMPLETE) or len(after) <= len(before):
            return ""
        new = after[len(before) :]
        self._context_start, self._read = self._read, len(self._tokens)
        self.text += new
        return new

    def finish(self) -> str:
        """Take over what was held back; returns it."""
        before = self._decode(self._context_start, self._read)
        rest = self._decode(self._context_start, len(self._tokens))[len(before) :]
        self._context_start = self._read = len(self._tokens)
        self.text += rest
        return rest

    def _decode(self, start: int, end: int) -> str:
        return self._tokenizer.decode(self._tokens[start:end], **self._options) if end > start else ""


def find_stop(text: str, stops: tuple[str, ...], start: int) -> tuple[int, str] | None:
    """(position, stop string) of the first stop string that begins at ``start`` or later.

    Example:
        >>> find_stop("a</answer>b", ("</answer>", "b"), 0)
        (1, '</answer>')
    """
    found = [(position, stop) for stop in stops if (position := text.find(stop, start)) >= 0]
    return min(found) if found else None


def hold_back(text: str, stops: tuple[str, ...]) -> str:
    """The text up to its first stop string, and without an end that may turn out to be the beginning of one.

    Example:
        >>> hold_back("the answer</ans", ("</answer>", "END"))
        'the answer'
    """
    found = find_stop(text, stops, 0)
    text = text[: found[0]] if found else text
    longest = max((len(stop) for stop in stops), default=1) - 1
    for length in range(min(longest, len(text)), 0, -1):
        if any(len(stop) > length and stop.startswith(text[-length:]) for stop in stops):
            return text[:-length]
    return text


def trim_stop(text: str, matched: object, keep: bool) -> str:
    """The text up to the stop string that ended it, or with it when ``keep``; other text as it is."""
    if not isinstance(matched, str):
        return text
    position = text.find(matched)
    if position < 0:
        return text
    return text[: position + len(matched)] if keep else text[:position]
