"""The check of rows: read, render and measure each one, leave out prompts that are too long, keep
the order.

The driver checks rows before a launch (`slime.rollout.validate_rows`), with further checks; the
process that draws prompts then reuses its list of kept rows.
"""

from __future__ import annotations

import difflib
import functools
import multiprocessing
import os
import re
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol, TypeGuard

import numpy as np
import xxhash

from slime.errors import UserError
from slime.log import get_logger, tell
from slime.processes.host import num_cpus, without_working_directory
from slime.processes.owner import follow_parent
from slime.prompts.chat_template import carries_template, template_markers, template_source
from slime.prompts.conversation import Messages, UnreadKeys
from slime.prompts.dataset_folders import TRAINING
from slime.prompts.labels import compares_labels
from slime.prompts.preference_rows import PreferenceColumns
from slime.prompts.problems import Problems, RowProblem, remark
from slime.prompts.readers import Row, Rows, open_rows, split_slice
from slime.prompts.row_format import Prompt, RowFormat, inputs_of, read_prompt
from slime.prompts.text_remarks import is_untemplated
from slime.prompts.tokenizer import with_opening
from slime.prompts.unknown_tokens import UnknownTokens
from slime.samples.types import Sample

logger = get_logger(__name__)

#: Rows per tokeniser call.
_BATCH = 512
#: Rows per task of a data worker.
_TASK = 1024
#: Data sets of at most this many rows are checked completely before the first draw; of larger ones,
#: a selection is.
ALL_ROWS = 20_000
#: Rows of each part of this selection: first rows, last rows, and evenly spaced rows between them.
SAMPLED_ROWS = 2_000
#: Several processes share a check that would take one process more seconds than this.
_SLOW_CHECK = 20.0
#: Upper bound of the tokens that a tokenizer adds to a text.
_MAX_ADDED_TOKENS = 64
#: Minimum number of rows for the warning that all have the same label.
_MIN_EQUAL_LABELS = 20
#: Minimum number of repeated prompts for a note.
_MIN_REPEATED_PROMPTS = 20
#: Keys of metadata that only name the row.
_NAMES_A_ROW = re.compile(r"(?:^|_)(?:id|ids|idx|index|uid|uuid|row|number|split|source)$")
#: Maximum number of prompts that are compared with those of later rows.
_MAX_COMPARED_PROMPTS = 200_000
#: Number of rows whose tokens are compared to detect another tokenizer.
_ROWS_COMPARED = 32


class RowJudge(Protocol):
    """Further checks of rows whose prompts were read; picklable."""

    def __call__(self, prompts: Sequence[Prompt]) -> list[list[RowProblem]]:
        """Return the problems of each of ``prompts``."""
        ...


@dataclass
class Scan:
    """Findings of the check of some rows.

    Attributes:
        num_checked: how many rows were checked.
        kept: positions of the rows that can be drawn.
        too_long, shortest, longest, first_too_long: how many prompts exceed the limit, the lengths
            of the shortest and the longest, and where the first is.
        templated, first_templated: how many prompts already carry the chat template, and where the
            first is.
        untemplated: how many prompts are plain text that is trained without the chat template.
        unread: columns of rows, and keys of their messages, that nothing reads.
        seen: digest of each prompt → digest of its label, and where the first row with it is.
        are_pairs: the rows are preferences; ``seen`` has their answers too.
        asked: digest of each question → where the first row with it is.
        num_asked: how many rows ``asked`` is of.
        one_label: the label of all rows so far; None if there are several, or none.
        num_labels: rows whose label a reward compares.
    """

    num_checked: int = 0
    kept: list[int] = field(default_factory=list)
    too_long: int = 0
    shortest: int | None = None
    longest: int = 0
    first_too_long: str = ""
    templated: int = 0
    first_templated: str = ""
    untemplated: int = 0
    problems: Problems = field(default_factory=Problems)
    unread: UnreadKeys = field(default_factory=UnreadKeys)
    seen: dict[int, tuple[int, str]] = field(default_factory=dict)
    are_pairs: bool = False
    asked: dict[int, str] = field(default_factory=dict)
    num_asked: int = 0
    one_label: str | None = None
    num_labels: int = 0

    def compare_label(self, prompt: int, label: int, where: str) -> None:
        """Add a problem if an earlier row has the prompt and another label (both digests)."""
        if prompt not in self.seen and len(self.seen) >= _MAX_COMPARED_PROMPTS:
            return
        first_label, first = self.seen.setdefault(prompt, (label, where))
        if first_label == label:
            return
        kind = "have the prompt of an earlier row and another label"
        detail = f"the first has the prompt of {first}"
        harm = "the same answer is rewarded in one row and not in the other"
        if self.are_pairs:
            kind = "contradict an earlier row with the same prompt and answers"
            detail = f"the first contradicts {first}"
            harm = "what one row prefers, the other rejects"
        fix = f"keep the right one: {harm}"
        self.problems.add(where, remark(kind, detail, fix))

    def note_label(self, label: Any, count: int = 1) -> None:
        """Count rows with a label, or with several if it is None."""
        text = None if label is None else str(label)
        self.one_label = text if self.one_label == text or not self.num_labels else None
        self.num_labels += count

    def note_question(self, question: int, where: str, count: int = 1) -> None:
        """Count rows that ask a question, the first of them at ``where``."""
        self.num_asked += count
        if len(self.asked) < _MAX_COMPARED_PROMPTS:
            self.asked.setdefault(question, where)

    def note_too_long(self, length: int, where: str) -> None:
        """Count a row whose prompt of ``length`` tokens exceeds the limit."""
        self.too_long += 1
        self.first_too_long = self.first_too_long or where
        self.shortest = length if self.shortest is None else min(self.shortest, length)
        self.longest = max(self.longest, length)

    def merge(self, other: Scan) -> None:
        """Add the findings of the check of later rows."""
        self.num_checked += other.num_checked
        self.kept.extend(other.kept)
        self.too_long += other.too_long
        lengths = [length for length in (self.shortest, other.shortest) if length is not None]
        self.shortest = min(lengths, default=None)
        self.longest = max(self.longest, other.longest)
        self.first_too_long = self.first_too_long or other.first_too_long
        self.first_templated = self.first_templated or other.first_templated
        self.templated += other.templated
        self.untemplated += other.untemplated
        self.problems.merge(other.problems)
        self.unread.merge(other.unread)
        self.are_pairs = self.are_pairs or other.are_pairs
        if other.num_labels:
            self.note_label(other.one_label, other.num_labels)
        for question, where in other.asked.items():
            self.note_question(question, where, 0)
        self.num_asked += other.num_asked
        for prompt, (label, where) in other.seen.items():
            self.compare_label(prompt, label, where)

    def error(self, path: str, checker: Checker, *, has_more: bool = False) -> UserError | None:
        """Return why a run cannot use the rows, or None.

        Args:
            has_more: the data has rows that were not checked.
        """
        refused = self.problems.refused(self.num_checked)
        if refused.found:
            return refused.error(path, self.num_checked, has_more=has_more)
        if self.kept or not self.num_checked:
            return None
        return UserError(
            f"every prompt of {path} is longer than {checker.max_tokens} tokens",
            why=f"{self.num_checked} prompts, the shortest has {self.shortest} tokens",
            fix=f"raise {checker.limit_flags}, or use other data",
        )

    def warnings(self, path: str, checker: Checker, *, has_more: bool = False) -> list[str]:
        """Return warnings about rows that can be used, and about prompts that are left out."""
        tolerated = self.problems.tolerated(self.num_checked)
        found = tolerated.warnings(path, self.num_checked, has_more=has_more)
        if self.too_long:
            count = self.num_checked
            rows = f"the {count} prompts checked" if has_more else f"{count} prompts"
            found.append(
                f"{path}: {self.too_long} of {rows} are longer than {checker.max_tokens} tokens "
                f"and left out (the longest: {self.longest}; {checker.limit_flags}; first: "
                f"{self.first_too_long})"
            )
        if self.one_label is not None and self.num_labels >= _MIN_EQUAL_LABELS:
            found.append(
                f"{path}: all {self.num_labels} labels are {self.one_label[:80]!r}: a model that "
                "always says so is always right; shuffle the choices of multiple-choice questions, "
                "or check the column of labels"
            )
        if self.unread.keys:
            found.append(self.unread.warning(path, self.num_checked))
        return [*found, *(f"{path}: {one}" for one in checker.unread_arguments())]

    def notes(self, path: str) -> list[str]:
        """Notes on columns that nothing reads and prompts without a template, which are usual and
        may still explain something."""
        is_noted = self.unread.columns and not self.unread.keys
        found = [self.unread.warning(path, self.num_checked)] if is_noted else []
        repeated = self.num_asked - len(self.asked)
        if (
            repeated >= _MIN_REPEATED_PROMPTS
            and not self.are_pairs
            and len(self.asked) < _MAX_COMPARED_PROMPTS
        ):
            found.append(
                f"{path}: {repeated} of {self.num_asked} prompts repeat an earlier one, so an "
                "epoch asks them several times"
            )
        if self.untemplated:
            found.append(
                f"{path}: {self.untemplated} of {self.num_checked} prompts are plain text, and are "
                "trained without the tokenizer's chat template (--apply-chat-template applies it)"
            )
        return found

    def templated_warning(self, path: str, checker: Checker) -> str:
        """Warn of prompts that carry the chat template already; "" if there are none."""
        if not self.templated:
            return ""
        return _templated_warning(path, self.templated, self.first_templated, checker.markers)


@dataclass
class Checker:
    """Checks rows one range at a time; picklable, so that data workers can hold one each.

    Args:
        max_tokens: longer prompts are left out; None for no limit.
        limit_flags: the flags that set the limit, for messages.
        judge: further checks, only made by `scan`.
        vocab_size: rows of the model's embedding; None if unknown.
    """

    form: RowFormat
    tokenizer: Any
    max_tokens: int | None = None
    limit_flags: str = "--rollout-max-prompt-len, --rollout-max-context-len or --seq-length"
    judge: RowJudge | None = None
    vocab_size: int | None = None

    def __post_init__(self) -> None:
        template = self.form.apply_chat_template and not self.form.raw
        self.markers = template_markers(self.tokenizer) if template else []

    @functools.cached_property
    def _unknown(self) -> UnknownTokens:
        return UnknownTokens(self.tokenizer, self.vocab_size)

    def _unknown_tokens(self, prompt: Prompt) -> RowProblem | None:
        return self._unknown.of_prompt(prompt, self.form) if self._unknown else None

    def scan(self, rows: Rows, positions: Sequence[int]) -> Scan:
        """Check the rows at ``positions``."""
        found = Scan(num_checked=len(positions))
        for low in range(0, len(positions), _BATCH):
            self._scan_batch(rows, positions[low : low + _BATCH], found)
        return found

    def _scan_batch(self, rows: Rows, positions: Sequence[int], found: Scan) -> None:
        """Add the findings of the check of a batch of rows to ``found``."""
        prompts = self._read_batch(rows, positions, found)
        read = list(prompts.values())
        judged = self.judge(read) if self.judge is not None else [[] for _ in read]
        for (position, prompt), length, problems in zip(
            prompts.items(), self.lengths(read), judged, strict=True
        ):
            where = rows.where(position)
            if unknown := self._unknown_tokens(prompt):
                problems = [*problems, unknown]
            for one in problems:
                found.problems.add(where, one)
            if any(one.refuse_at == 0.0 for one in problems):
                continue
            self._compare_with_earlier(prompt, where, found)
            if self.fits(length):
                found.kept.append(position)
            else:
                found.note_too_long(length, where)

    def _read_batch(self, rows: Rows, positions: Sequence[int], found: Scan) -> dict[int, Prompt]:
        """Return the prompts of rows that can be read, by position."""
        prompts: dict[int, Prompt] = {}
        for position in positions:
            where = rows.where(position)
            try:
                prompt = read_prompt(rows[position], self.form, self.tokenizer)
            except RowProblem as problem:
                found.problems.add(where, problem)
                continue
            found.unread.add(prompt.unread_columns, prompt.unread_keys)
            for one in prompt.remarks:
                found.problems.add(where, one)
            if self.markers and carries_template(prompt.bare, self.markers):
                found.templated += 1
                found.first_templated = found.first_templated or where
            is_plain = self.form.raw and not self.form.apply_chat_template and not prompt.tokens
            found.untemplated += is_plain and is_untemplated(prompt.bare, self.tokenizer)
            prompts[position] = prompt
        return prompts

    def _compare_with_earlier(self, prompt: Prompt, where: str, found: Scan) -> None:
        """Compare a row with earlier ones: its question, and its label or preference."""
        if not prompt.images:
            found.note_question(_digest_of(_question(prompt)), where)
        if self.form.preference is not None:
            found.are_pairs = True
            found.compare_label(*_preference(prompt, self.form.preference), where)
        elif self.compares_labels and not prompt.images:
            metadata = {
                key: value for key, value in prompt.metadata.items() if not _NAMES_A_ROW.search(key)
            }
            asked = (_without_blanks(prompt.bare), prompt.tokens, metadata)
            found.compare_label(_digest_of(asked), _digest_of(prompt.label), where)
            found.note_label(prompt.label)

    @property
    def compares_labels(self) -> bool:
        """Whether a built-in reward compares answers with the labels."""
        form = self.form
        rm_type = form.rm_type_of_all or form.rm_type
        return compares_labels(rm_type) and not (form.own_reward or form.raw or form.preference)

    def unread_arguments(self) -> list[str]:
        """Return warnings about arguments that the chat template does not read, so that they have
        no effect."""
        source = template_source(self.tokenizer)
        if not source or not (self.form.apply_chat_template or self.form.raw):
            return []
        names = set(re.findall(r"\w+", source))
        found = []
        for key in self.form.template_kwargs.keys() - names:
            near = difflib.get_close_matches(key, names, n=1)
            found.append(
                f"the chat template does not read '{key}', which has no effect "
                "(--apply-chat-template-kwargs)" + (f"; did you mean '{near[0]}'?" if near else "")
            )
        return sorted(found)

    def fits(self, length: int) -> bool:
        return self.max_tokens is None or length <= self.max_tokens

    def lengths(self, prompts: list[Prompt]) -> list[int]:
        """Return the number of tokens of each prompt; 0 if they are not measured: there is no
        limit, the text is too short to exceed it, or chat messages have no template."""
        lengths = [len(prompt.tokens) + prompt.image_tokens for prompt in prompts]
        if self.max_tokens is None or self.form.raw:
            return [0] * len(prompts)
        texts = {
            i: p.text
            for i, p in enumerate(prompts)
            if not p.tokens and self._may_exceed(p.text, p.image_tokens)
        }
        if texts:
            encoded = self.tokenizer(list(texts.values()), add_special_tokens=False)["input_ids"]
            templated = self.form.apply_chat_template
            for (i, text), ids in zip(texts.items(), encoded):
                lengths[i] += len(with_opening(self.tokenizer, text, ids, templated=templated))
        return lengths

    def _may_exceed(self, text: str | Messages, image_tokens: int) -> TypeGuard[str]:
        """Tell whether a text may exceed the limit: a token holds at least one byte, except for
        text that the tokenizer's normaliser adds."""
        room = (self.max_tokens or 0) - image_tokens
        return (
            isinstance(text, str)
            and 2 * len(text.encode("utf-8", "replace")) + _MAX_ADDED_TOKENS > room
        )

    def stream(self, rows: Iterator[tuple[str, Row]]) -> Iterator[tuple[Prompt, int]]:
        """Yield (prompt, length) of streamed rows; an invalid row raises a `UserError`. The judge
        is not called."""
        for where, row in rows:
            try:
                prompt = read_prompt(row, self.form, self.tokenizer)
            except RowProblem as problem:
                raise problem.at(where) from problem
            if self.markers and carries_template(prompt.bare, self.markers):
                tell(logger, "%s", _templated_warning("streamed data", 1, where, self.markers))
                self.markers = []  # once is enough
            if unknown := self._unknown_tokens(prompt):
                raise unknown.at(where)
            prompt.where = where
            yield prompt, self.lengths([prompt])[0]


def prepare(rows: Rows, path: str, checker: Checker, num_workers: int = 0) -> np.ndarray:
    """Return the positions of the rows that can be drawn, in order; int64 [number kept]. Rows that
    were checked before the launch (`remember`) are not checked again.

    Args:
        num_workers: processes that render and tokenise; 0: as many as the work needs.
    Raises:
        UserError: rows are invalid (with their number), or all prompts are too long.
    """
    kept = _remembered_rows(rows, path, checker)
    if kept is not None:
        return kept
    found = scan_rows(rows, range(len(rows)), checker, num_workers)
    if error := found.error(path, checker):
        raise error
    for warning in [*found.warnings(path, checker), found.templated_warning(path, checker)]:
        if warning:
            tell(logger, "%s", warning)
    return np.asarray(found.kept, dtype=np.int64)


def read_samples(path: str, checker: Checker, splits: Sequence[str] = TRAINING) -> list[Sample]:
    """Make a sample of each row that can be drawn, in the order of the file, without indices.

    Args:
        splits: as in `open_rows`.
    Raises:
        UserError: as `open_rows` and `prepare`.
    """
    rows = open_rows(path, splits)
    kept = prepare(rows, path, checker)
    prompts = [
        read_prompt(rows[int(position)], checker.form, checker.tokenizer) for position in kept
    ]
    return [
        Sample(
            prompt=p.text,
            tokens=p.tokens,
            label=p.label,
            metadata=p.metadata,
            multimodal_inputs=inputs_of(p, checker.form),
        )
        for p in prompts
    ]


def positions_to_check(num_rows: int) -> Sequence[int]:
    """Choose the rows that are checked before a launch: all of up to `ALL_ROWS`, else the first and
    the last `SAMPLED_ROWS`, and as many evenly spaced between them. The choice depends only on the
    number of rows.

    Example:
        >>> len(positions_to_check(20_000)), len(positions_to_check(2_000_000))
        (20000, 6000)
    """
    if num_rows <= ALL_ROWS:
        return range(num_rows)
    head = np.arange(SAMPLED_ROWS)
    tail = np.arange(num_rows - SAMPLED_ROWS, num_rows)
    between = np.linspace(SAMPLED_ROWS, num_rows - SAMPLED_ROWS - 1, SAMPLED_ROWS).astype(np.int64)
    return [int(row) for row in np.unique(np.concatenate([head, between, tail]))]


# -- rows that were checked before the launch ------------------------------------------------------


@dataclass(frozen=True)
class CheckedRows:
    """The rows of a data set that were kept, and the conditions under which this stays valid.

    Attributes:
        stamp: size and time of the files.
        first_rows: digest of the first rows and their tokens, which differs between splits and
            tokenizers.
        kept: positions, int64 [number kept].
    """

    path: str
    stamp: tuple[Any, ...]
    form: RowFormat
    max_tokens: int | None
    first_rows: str
    kept: np.ndarray


_checked: list[CheckedRows] = []


def checked_rows(rows: Rows, path: str, checker: Checker, found: Scan) -> CheckedRows:
    """Return the record of ``found``, a check of all rows."""
    kept = np.asarray(found.kept, dtype=np.int64)
    return CheckedRows(
        path,
        _stamp(path),
        checker.form,
        checker.max_tokens,
        _first_rows_digest(rows, checker),
        kept,
    )


def remember(checked: Sequence[CheckedRows]) -> None:
    """Let `prepare` in this process use these records instead of earlier ones."""
    _checked[:] = checked


def remembered() -> list[CheckedRows]:
    return list(_checked)


def _remembered_rows(rows: Rows, path: str, checker: Checker) -> np.ndarray | None:
    for one in _checked:
        is_same = (one.path, one.form, one.max_tokens) == (path, checker.form, checker.max_tokens)
        if (
            is_same
            and one.stamp == _stamp(path)
            and one.first_rows == _first_rows_digest(rows, checker)
        ):
            return one.kept
    return None


def _stamp(path: str) -> tuple[Any, ...]:
    root = Path(split_slice(path)[0])
    files = sorted(root.rglob("*")) if root.is_dir() else [root]
    known = [(str(file), file.stat()) for file in files if file.is_file()]
    return tuple((name, stat.st_size, stat.st_mtime_ns) for name, stat in known)


def _without_blanks(text: str | Messages) -> str | Messages:
    """Put one blank between the words of a text or of messages."""
    if isinstance(text, str):
        return " ".join(text.split())
    return [{**one, "content": " ".join(one["content"].split())} for one in text]


def _question(prompt: Prompt) -> Any:
    """Return what is asked, whatever stands around it: text, or the words of the first user."""
    if prompt.tokens:
        return prompt.tokens
    if isinstance(prompt.bare, str):
        return _without_blanks(prompt.bare)
    asked = [one["content"] for one in prompt.bare if one["role"] == "user"]
    return _without_blanks(asked[0]) if len(asked) == 1 else repr(prompt.bare)


def _preference(prompt: Prompt, columns: PreferenceColumns) -> tuple[int, int]:
    """Return the digests of the prompt with all answers, and of what is preferred."""
    answers = {name: repr(prompt.label[name]) for name in columns.answers}
    preferred = prompt.label["label"] if columns.label else answers.get("chosen")
    asked = (repr(prompt.text), sorted(answers.values()), len(prompt.images))
    return _digest_of(asked), _digest_of(preferred)


def _digest_of(value: Any) -> int:
    return xxhash.xxh3_64_intdigest(repr(value).encode("utf-8", "replace"))


def _first_rows_digest(rows: Rows, checker: Checker) -> str:
    digest = xxhash.xxh3_64(str(len(rows)).encode())
    for position in range(min(len(rows), _ROWS_COMPARED)):
        try:
            prompt = read_prompt(rows[position], checker.form, checker.tokenizer)
        except RowProblem:
            continue
        ids = []
        if checker.max_tokens is not None and isinstance(prompt.text, str):
            ids = checker.tokenizer.encode(prompt.text, add_special_tokens=False)
        digest.update(repr((prompt.text, prompt.label, ids)).encode())
    return digest.hexdigest()


def _templated_warning(path: str, count: int, where: str, markers: list[str]) -> str:
    return (
        f"{path}: {count} prompts already carry the chat template (first: {where}; markers: "
        f"{', '.join(markers)}), and --apply-chat-template would apply it a second time; leave "
        "the flag out, or strip the markers from the data"
    )


def scan_rows(rows: Rows, positions: Sequence[int], checker: Checker, num_workers: int = 0) -> Scan:
    """Check rows, in several processes if one would take long.

    Args:
        num_workers: processes; 0: one, or up to eight if the first rows show that one would take
            too long.
    """
    total = Scan()
    if num_workers < 2:
        first = positions[:_BATCH]
        started = time.perf_counter()
        total.merge(checker.scan(rows, first))
        positions = positions[_BATCH:]
        seconds = (time.perf_counter() - started) / max(1, len(first)) * len(positions)
        if seconds <= _SLOW_CHECK:
            total.merge(checker.scan(rows, positions))
            return total
        num_workers = min(8, num_cpus())
        logger.info(
            "checking %d rows in %d processes; one would take %.0f s",
            len(positions),
            num_workers,
            seconds,
        )
    for part in _scan_in_processes(rows, positions, checker, num_workers):
        total.merge(part)
    return total


def _scan_in_processes(
    rows: Rows, positions: Sequence[int], checker: Checker, num_workers: int
) -> Iterator[Scan]:
    tasks = [positions[low : low + _TASK] for low in range(0, len(positions), _TASK)]
    workers = min(num_workers, len(tasks))
    if workers < 2:
        yield checker.scan(rows, positions)
        return
    # spawn: a fork would copy locks that tokeniser and Ray threads may hold
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(workers, context, _start_worker, (rows, checker)) as pool:
        with without_working_directory():  # the first task starts all processes
            scans = pool.map(_scan_task, tasks)
        yield from scans


_worker_state: tuple[Rows, Checker] | None = None


def _start_worker(rows: Rows, checker: Checker) -> None:
    global _worker_state
    _worker_state = rows, checker
    parent = multiprocessing.parent_process()
    assert parent is not None and parent.pid is not None
    follow_parent(parent.pid, lambda: os._exit(1))


def _scan_task(positions: Sequence[int]) -> Scan:
    assert _worker_state is not None
    rows, checker = _worker_state
    return checker.scan(rows, positions)
