"""The order in which prompts are drawn. It is a pure function of data, seed and epoch, so a
position is enough to resume: ``seek(epoch, offset)``, then ``take()`` one prompt after another,
from epoch to epoch."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import KW_ONLY, dataclass
from typing import Any, Protocol

import numpy as np
import xxhash

from slime.errors import UserError
from slime.log import get_logger, tell
from slime.prompts.prepare import Checker
from slime.prompts.problems import RowProblem
from slime.prompts.readers import Row, Rows, iter_rows
from slime.prompts.row_format import Prompt, read_prompt

logger = get_logger(__name__)

#: Rows that streaming holds to shuffle among.
SHUFFLE_BUFFER = 10_000


class PromptOrder(Protocol):
    """Prompts one after another. ``tell()`` is the position of the next ``take()``. ``shuffle``
    takes effect with the next ``seek``; without it the order is that of the data."""

    shuffle: bool

    def tell(self) -> tuple[int, int]: ...
    def seek(self, epoch: int, offset: int) -> None: ...
    def take(self) -> Prompt: ...
    def __len__(self) -> int: ...
    def fingerprint(self) -> str: ...


@dataclass(eq=False)
class MappedOrder:
    """Random access: each epoch is the original order, or a permutation of it seeded by ``seed +
    epoch``.

    Args:
        kept: positions of the rows that can be drawn; int64 [number of rows].
        unchecked: ``kept`` has all rows, and most were not checked. Each is checked when it is
            drawn: prompts that are too long and invalid rows are skipped with a warning. An offset
            counts skipped rows, so a position does not depend on them.
    """

    rows: Rows
    kept: np.ndarray
    checker: Checker
    _: KW_ONLY
    shuffle: bool
    seed: int
    unchecked: bool = False

    def __post_init__(self) -> None:
        self.seek(0, 0)

    def __len__(self) -> int:
        return len(self.kept)

    def tell(self) -> tuple[int, int]:
        return self._epoch, self._offset

    def seek(self, epoch: int, offset: int) -> None:
        self._epoch = epoch
        self._offset = offset
        self._permutation: Sequence[int] = range(len(self.kept))
        if self.shuffle:
            self._permutation = permutation(len(self.kept), self.seed, epoch)

    def take(self) -> Prompt:
        for _ in range(len(self.kept)):
            if self._offset >= len(self.kept):
                self.seek(self._epoch + 1, 0)
            position = int(self.kept[self._permutation[self._offset]])
            self._offset += 1
            prompt = self._prompt(position)
            if prompt is not None:
                prompt.where = self.rows.where(position)
                return prompt
        raise UserError(
            f"none of {len(self.kept)} consecutive rows can be used",
            fix="the warnings above say what is wrong with them",
        )

    def _prompt(self, position: int) -> Prompt | None:
        """Return the row at ``position``; None if it is skipped."""
        try:
            prompt = read_prompt(self.rows[position], self.checker.form, self.checker.tokenizer)
        except RowProblem as problem:
            if not self.unchecked:
                raise problem.at(self.rows.where(position)) from problem
            self._pass_over(position, problem)
            return None
        if not self.unchecked:
            return prompt
        judge = self.checker.judge
        for judged in judge([prompt])[0] if judge is not None else ():
            if judged.refuse_at == 0.0:
                self._pass_over(position, judged)
                return None
        length = self.checker.lengths([prompt])[0]
        if self.checker.fits(length):
            return prompt
        tell(
            logger,
            "%s: a prompt of %d tokens is longer than %d and left out, as are others when they "
            "are drawn (%s)",
            self.rows.where(position),
            length,
            self.checker.max_tokens,
            self.checker.limit_flags,
            once="a prompt that is too long",
        )
        return None

    def _pass_over(self, position: int, problem: RowProblem) -> None:
        tell(
            logger,
            "%s: rows here %s, and are left out when they are drawn (this is the first; %s)",
            self.rows.where(position),
            problem.kind,
            problem.detail or problem.fix,
            once=f"left out {problem.kind}",
        )

    def fingerprint(self) -> str:
        """Return a digest of the rows that can be drawn: their positions, and content of the first,
        middle and last."""
        digest = xxhash.xxh3_64(self.kept.tobytes())
        for position in (0, len(self.kept) // 2, len(self.kept) - 1):
            try:
                row = repr(self.rows[int(self.kept[position])])
            except RowProblem as problem:  # the row was not checked
                row = f"{problem.kind}: {problem.detail}"
            digest.update(row.encode())
        return digest.hexdigest()


def permutation(size: int, seed: int, epoch: int) -> list[int]:
    """Return the order of an epoch of shuffled data."""
    order = list(range(size))
    random.Random(seed + epoch).shuffle(order)
    return order


@dataclass(eq=False)
class StreamedOrder:
    """Sequential access (``--streaming-data``): rows are read, checked and measured when they are
    drawn.

    Shuffling picks at random, seeded by ``seed + epoch``, from a buffer of the next
    `SHUFFLE_BUFFER` rows. An offset counts drawn prompts of the epoch; seeking reads the epoch
    again up to the offset.
    """

    path: str
    checker: Checker
    _: KW_ONLY
    shuffle: bool
    seed: int

    def __post_init__(self) -> None:
        self._too_long = self._longest = 0
        self.seek(0, 0)

    def __len__(self) -> int:
        raise UserError(
            "the number of prompts is not known with --streaming-data",
            fix="pass --num-rollout instead of --num-epoch, or leave --streaming-data out",
        )

    def tell(self) -> tuple[int, int]:
        return self._epoch, self._offset

    def seek(self, epoch: int, offset: int) -> None:
        self._epoch = epoch
        self._offset = 0
        self._prompts = self._open()
        for _ in range(offset):
            self.take()

    def take(self) -> Prompt:
        prompt = next(self._prompts, None)
        if prompt is None:
            if self._offset == 0:
                raise UserError(
                    f"{self.path} has no prompt of at most {self.checker.max_tokens} tokens",
                    why=f"{self._too_long} prompts are longer",
                    fix=f"raise {self.checker.limit_flags}, or use other data",
                )
            if self._too_long:
                tell(
                    logger,
                    "%s: %d prompts are longer than %s tokens and left out (the longest: %d; %s)",
                    self.path,
                    self._too_long,
                    self.checker.max_tokens,
                    self._longest,
                    self.checker.limit_flags,
                    once=f"too long {self.path}",
                )
            self.seek(self._epoch + 1, 0)
            return self.take()
        self._offset += 1
        return prompt

    def _open(self) -> Iterator[Prompt]:
        self._too_long = self._longest = 0
        rows: Iterator[tuple[str, Row]] = iter_rows(self.path)
        if self.shuffle:
            rows = shuffled(rows, random.Random(self.seed + self._epoch).randrange, SHUFFLE_BUFFER)
        limit = self.checker.max_tokens
        for prompt, length in self.checker.stream(rows):
            if limit is None or length <= limit:
                yield prompt
            else:
                self._too_long += 1
                self._longest = max(self._longest, length)
                tell(
                    logger,
                    "%s: a prompt of %d tokens is longer than %d and left out (%s)",
                    self.path,
                    length,
                    limit,
                    self.checker.limit_flags,
                    once=f"one {self.path}",
                )

    def fingerprint(self) -> str:
        """Return a digest of the first row only, because a stream is not read to its end for
        this."""
        first = repr(next(iter_rows(self.path), None))
        return f"stream {xxhash.xxh3_64_hexdigest(first.encode())}"


def shuffled(items: Iterator[Any], randrange: Callable[[int], int], size: int) -> Iterator[Any]:
    """Yield each item once, drawn at random from a buffer of the next ``size``."""
    buffer: list[Any] = []
    for item in items:
        if len(buffer) < size:
            buffer.append(item)
            continue
        chosen = randrange(size)
        yield buffer[chosen]
        buffer[chosen] = item
    while buffer:
        chosen = randrange(len(buffer))
        item = buffer[chosen]
        buffer[chosen] = buffer[-1]
        buffer.pop()
        yield item
