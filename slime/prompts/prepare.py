"""The pass over all rows before the first draw: check each row, leave out prompts that are too long, keep the order."""

from __future__ import annotations

import multiprocessing
import os
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from slime.errors import UserError
from slime.log import get_logger, tell
from slime.processes import follow_parent
from slime.prompts.chat_template import carries_template, template_markers
from slime.prompts.dataset_folders import TRAINING
from slime.prompts.problems import Problems, RowProblem
from slime.prompts.readers import Row, Rows, open_rows
from slime.prompts.row_format import Prompt, RowFormat, read_prompt
from slime.prompts.tokenizer import with_opening
from slime.samples.types import Sample

logger = get_logger(__name__)

#: Rows per tokeniser call, and per task of a data worker.
_BATCH, _TASK = 512, 4096


@dataclass
class Scan:
    """What the pass found in a range of rows.

    Attributes:
        kept: positions of the rows that can be drawn.
        too_long, shortest, longest: how many prompts exceed the limit, and the lengths of the shortest and the longest.
        templated, first_templated: how many prompts already carry the chat template, and where the first is.
    """

    kept: list[int] = field(default_factory=list)
    too_long: int = 0
    shortest: int | None = None
    longest: int = 0
    templated: int = 0
    first_templated: str = ""
    problems: Problems = field(default_factory=Problems)

    def merge(self, other: Scan) -> None:
        self.kept.extend(other.kept)
        self.too_long += other.too_long
        lengths = [length for length in (self.shortest, other.shortest) if length is not None]
        self.shortest = min(lengths, default=None)
        self.longest = max(self.longest, other.longest)
        self.first_templated = self.first_templated or other.first_templated
        self.templated += other.templated
        self.problems.merge(other.problems)


@dataclass
class Checker:
    """Checks rows one range at a time; picklable, so that data workers can hold one each.

    Args:
        max_tokens: prompts of more tokens are left out; None for no limit.
        limit_flags: what sets it, for messages.
    """

    form: RowFormat
    tokenizer: Any
    max_tokens: int | None = None
    limit_flags: str = "--rollout-max-prompt-len, --rollout-max-context-len or --seq-length"

    def __post_init__(self) -> None:
        template = self.form.apply_chat_template and not self.form.raw
        self.markers = template_markers(self.tokenizer) if template else []

    def scan(self, rows: Rows, start: int, stop: int) -> Scan:
        found = Scan()
        for low in range(start, stop, _BATCH):
            self._scan_batch(rows, range(low, min(low + _BATCH, stop)), found)
        return found

    def _scan_batch(self, rows: Rows, positions: range, found: Scan) -> None:
        prompts: list[tuple[int, Prompt]] = []
        for position in positions:
            try:
                prompt = read_prompt(rows[position], self.form, self.tokenizer)
            except RowProblem as problem:
                found.problems.add(rows.where(position), problem)
                continue
            if self.markers and carries_template(prompt.bare, self.markers):
                found.templated += 1
                found.first_templated = found.first_templated or rows.where(position)
            prompts.append((position, prompt))
        for (position, _), length in zip(prompts, self.lengths([prompt for _, prompt in prompts])):
            if self.max_tokens is None or length <= self.max_tokens:
                found.kept.append(position)
            else:
                found.too_long += 1
                found.shortest = length if found.shortest is None else min(found.shortest, length)
                found.longest = max(found.longest, length)

    def lengths(self, prompts: list[Prompt]) -> list[int]:
        """Tokens of each prompt; 0 where nothing can be measured (no limit, or chat messages without template)."""
        lengths = [len(prompt.tokens) for prompt in prompts]
        if self.max_tokens is None or self.form.raw:
            return [0] * len(prompts)
        texts = {i: p.text for i, p in enumerate(prompts) if not p.tokens and isinstance(p.text, str)}
        if texts:
            encoded = self.tokenizer(list(texts.values()), add_special_tokens=False)["input_ids"]
            templated = self.form.apply_chat_template
            for (i, text), ids in zip(texts.items(), encoded):
                lengths[i] = len(with_opening(self.tokenizer, text, ids, templated=templated))
        return lengths

    def stream(self, rows: Iterator[tuple[str, Row]]) -> Iterator[tuple[Prompt, int]]:
        """(prompt, length) of rows that come one by one; a row that cannot be used is a `UserError`."""
        for where, row in rows:
            try:
                prompt = read_prompt(row, self.form, self.tokenizer)
            except RowProblem as problem:
                raise problem.at(where) from problem
            if self.markers and carries_template(prompt.bare, self.markers):
                tell(logger, "%s", templated_warning("streamed data", 1, where, self.markers))
                self.markers = []  # once is enough
            yield prompt, self.lengths([prompt])[0]


def prepare(rows: Rows, path: str, checker: Checker, num_workers: int = 0) -> np.ndarray:
    """Positions of the rows that can be drawn, in order; int64 [number kept].

    Args:
        num_workers: processes that render and tokenise; 0 does it here.
    Raises:
        UserError: rows that cannot be used (all of them counted), or no prompt short enough.
    """
    total = Scan()
    for part in _scan_all(rows, checker, num_workers):
        total.merge(part)
    if total.problems.found:
        raise total.problems.error(path, len(rows))
    if not total.kept:
        raise _all_too_long(path, total, len(rows), checker)
    if total.too_long:
        tell(
            logger,
            "%s: %d of %d prompts are longer than %d tokens and left out (the longest: %d; %s)",
            path, total.too_long, len(rows), checker.max_tokens, total.longest, checker.limit_flags,
        )  # fmt: skip
    if total.templated:
        tell(logger, "%s", templated_warning(path, total.templated, total.first_templated, checker.markers))
    return np.asarray(total.kept, dtype=np.int64)


def read_samples(path: str, checker: Checker, splits: Sequence[str] = TRAINING) -> list[Sample]:
    """A sample of each row that can be drawn, in the order of the file, without indices.

    Args:
        splits: as of `open_rows`.
    Raises:
        UserError: as `open_rows` and `prepare`.
    """
    rows = open_rows(path, splits)
    kept = prepare(rows, path, checker)
    prompts = [read_prompt(rows[int(position)], checker.form, checker.tokenizer) for position in kept]
    return [Sample(prompt=p.text, tokens=p.tokens, label=p.label, metadata=p.metadata) for p in prompts]


def probe(rows: Rows, path: str, checker: Checker, max_rows: int) -> Scan:
    """What `prepare` would refuse, as far as the first ``max_rows`` rows show it; for the check before a launch.

    Raises:
        UserError: as `prepare`.
    """
    count = min(len(rows), max_rows)
    found = checker.scan(rows, 0, count)
    if found.problems.found:
        raise found.problems.error(path, count, has_more=count < len(rows))
    if not found.kept and count == len(rows):
        raise _all_too_long(path, found, count, checker)
    return found


def _all_too_long(path: str, found: Scan, num_rows: int, checker: Checker) -> UserError:
    return UserError(
        f"every prompt of {path} is longer than {checker.max_tokens} tokens",
        why=f"{num_rows} prompts, the shortest has {found.shortest} tokens",
        fix=f"raise {checker.limit_flags}, or take other data",
    )


def templated_warning(path: str, count: int, where: str, markers: list[str]) -> str:
    return (
        f"{path}: {count} prompts already carry the chat template (first: {where}; markers: {', '.join(markers)}), and "
        "--apply-chat-template puts them into it a second time; leave the flag out, or strip the markers from the data"
    )


def _scan_all(rows: Rows, checker: Checker, num_workers: int) -> Iterator[Scan]:
    tasks = [(low, min(low + _TASK, len(rows))) for low in range(0, len(rows), _TASK)]
    workers = min(num_workers, len(tasks))
    if workers < 2:
        yield checker.scan(rows, 0, len(rows))
        return
    # spawn: a fork would copy the locks of tokeniser and Ray threads in whatever state they are
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(workers, context, _start_worker, (rows, checker)) as pool:
        yield from pool.map(_scan_task, tasks)


_worker_state: tuple[Rows, Checker] | None = None


def _start_worker(rows: Rows, checker: Checker) -> None:
    global _worker_state
    _worker_state = rows, checker
    parent = multiprocessing.parent_process()
    assert parent is not None and parent.pid is not None
    follow_parent(parent.pid, lambda: os._exit(1))


def _scan_task(task: tuple[int, int]) -> Scan:
    assert _worker_state is not None
    rows, checker = _worker_state
    return checker.scan(rows, *task)
