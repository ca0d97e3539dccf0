"""Check the rows of all data sets before a launch, and the rest of large ones while the run goes
on.

Each row is read, rendered and measured as when it is drawn. If its answers are trained on
(``sft_loss``, ``preference_loss``) it is encoded; otherwise its built-in reward checks the label.
`slime train`, `slime doctor`, ``--dry-run`` and `slime reward` use the same functions.

Data sets of up to `ALL_ROWS` rows are checked completely. In larger ones, some rows are checked
before the launch (`positions_to_check`), and the others in a process beside the run. Rows of
``--streaming-data`` that are not among the first are checked when they are drawn.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import multiprocessing
import os
import re
import signal
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from multiprocessing.connection import Connection
from typing import Any, NamedTuple

import numpy as np

from slime.config.config import Config
from slime.documentation import doc_url
from slime.errors import UserError
from slime.hub import dataset_name
from slime.log import get_logger
from slime.models.context import model_context
from slime.processes.host import without_working_directory
from slime.processes.owner import follow_parent
from slime.prompts.conversation import read_messages, tools_of
from slime.prompts.dataset_folders import EVALUATION, TRAINING
from slime.prompts.prepare import (
    ALL_ROWS,
    CheckedRows,
    Checker,
    RowJudge,
    Scan,
    checked_rows,
    positions_to_check,
    scan_rows,
)
from slime.prompts.problems import Problems, RowProblem, remark
from slime.prompts.readers import Row, Rows, iter_rows, open_rows, split_slice
from slime.prompts.reference_masks import mask_difference
from slime.prompts.row_format import (
    Prompt,
    RowFormat,
    check_columns,
    check_label_key,
    left_out,
)
from slime.prompts.sft_encoding import Encoded, TrainedSequence, with_answer
from slime.prompts.source import prompt_checker, vocab_size_of_run
from slime.prompts.tokenizer import tokenizer_for_checks
from slime.prompts.unknown_tokens import UnknownTokens
from slime.rollout.eval_datasets import EvalDataset, eval_datasets
from slime.rollout.evaluate import eval_checker, eval_form
from slime.rollout.preferences import PreferenceEncoder
from slime.rollout.rewards.row_checks import RewardJudge
from slime.rollout.sft import compared_rule, read_ahead, sft_encoding, sft_limits
from slime.user_code.loading import shown

logger = get_logger(__name__)

#: Number of conversations whose masks are compared with another rule for loss masks.
_MAX_COMPARED = 100
#: Rows that the process beside a run checks between two reports.
_REPORTED_ROWS = 2_000


class DataInput(NamedTuple):
    """A data set that the flags name, and how its rows are checked.

    Attributes:
        splits: see `open_rows`.
        make_form: returns the columns of its rows; raises `UserError`.
        make_checker, make_judge: functions of the tokenizer.
    """

    path: str
    splits: Sequence[str]
    make_form: Callable[[], RowFormat]
    make_checker: Callable[[Any], Checker]
    make_judge: Callable[[Any], RowJudge | None]
    is_streamed: bool = False


def data_inputs(config: Config) -> Iterator[DataInput]:
    """Yield the data sets whose rows this run reads itself."""
    data = config.data
    checker = functools.partial(prompt_checker, config)
    if data.rollout_global_dataset and data.prompt_data and not data.data_source_path:
        yield DataInput(
            data.prompt_data,
            TRAINING,
            functools.partial(RowFormat.of, config),
            checker,
            lambda tokenizer: data_judge(config, tokenizer) or RewardJudge.of_training(config),
            data.streaming_data,
        )
    if held_out := config.preference.eval_preference_data:
        of_held_out = functools.partial(checker, path=held_out)
        of_pairs = functools.partial(PreferenceJudge, config)
        form = functools.partial(RowFormat.of, config, held_out)
        yield DataInput(held_out, EVALUATION, form, of_held_out, of_pairs)
    for dataset in [] if config.eval.eval_function_path else eval_datasets(config):
        yield DataInput(
            dataset.path,
            EVALUATION,
            functools.partial(eval_form, dataset, config),
            functools.partial(eval_checker, dataset, config),
            functools.partial(_evaluation_judge, dataset, config),
        )


def _evaluation_judge(dataset: EvalDataset, config: Config, tokenizer: Any) -> RowJudge | None:
    return RewardJudge.of_evaluation(dataset, config)


@dataclass
class DataSet:
    """Rows that a run reads, and their checker."""

    path: str
    rows: Rows
    checker: Checker
    is_held_out: bool = False

    @property
    def is_streamed(self) -> bool:
        return isinstance(self.rows, _FirstRows)


@dataclass(frozen=True)
class DataSize:
    """How many rows a data set has, and how many of them can be drawn."""

    num_rows: int
    num_kept: int


@dataclass
class DataReport:
    """Findings of the check before a launch.

    Attributes:
        errors: problems that stop the launch.
        warnings: problems that do not.
        templated: warnings about prompts that already carry the chat template.
        notes: which rows were checked, if not all.
        sizes: by path; streamed data has none.
        checked: data sets that were checked completely.
        trained: path of the training data, and its questions (digest → where the first row is).
    """

    errors: list[UserError] = field(default_factory=list)
    warnings: list[str] = field(default_factory=list)
    templated: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    sizes: dict[str, DataSize] = field(default_factory=dict)
    checked: list[CheckedRows] = field(default_factory=list)
    trained: tuple[str, dict[int, str]] = ("", {})

    @property
    def error(self) -> UserError | None:
        """All errors as one; None without any."""
        if len(self.errors) < 2:
            return self.errors[0] if self.errors else None
        told = "\n".join(f"  {line}" for error in self.errors for line in str(error).splitlines())
        return UserError(f"there are {len(self.errors)} problems with the data\n{told}")


def validate_data(config: Config, tokenizer: Any) -> DataReport:
    """Check --prompt-data and all evaluation sets, and report all findings together."""
    report = DataReport()
    _check_flags(config, report.errors)
    for data_set in _data_sets(config, tokenizer, report.errors):
        try:
            _check(data_set, config.data.num_data_workers, report)
        except UserError as error:
            report.errors.append(error)
    return report


def data_errors(config: Config) -> list[UserError]:
    """Find what needs no tokenizer: files that cannot be opened, columns that their first rows
    lack, and missing labels. Data sets of the hub that are not downloaded are left out."""
    errors: list[UserError] = []
    _check_flags(config, errors)
    try:
        inputs = list(data_inputs(config))
    except UserError as error:  # --eval-config cannot be read
        return [*errors, error]
    for one in inputs:
        if dataset_name(one.path):
            continue
        where = one.path
        try:
            if first := next(iter_rows(one.path, one.splits), None):
                where = first[0]
                check_columns(first[1], one.make_form())
        except RowProblem as problem:
            errors.append(problem.at(where))
        except UserError as error:
            errors.append(error)
        except OSError as error:
            errors.append(UserError(f"{where} cannot be read", why=error.strerror or str(error)))
    return errors


def _check_flags(config: Config, errors: list[UserError]) -> None:
    """Append the error of missing labels, so that those of rows are told beside it."""
    data = config.data
    if not (data.rollout_global_dataset and data.prompt_data) or data.data_source_path:
        return
    columns: Iterable[str] = ()
    with contextlib.suppress(UserError):  # reported where the rows are read
        _, columns = next(iter_rows(data.prompt_data), ("", ()))
    try:
        check_label_key(config, columns)
    except UserError as error:
        errors.append(error)


def _data_sets(config: Config, tokenizer: Any, errors: list[UserError]) -> Iterator[DataSet]:
    """Yield the data sets that can be opened; append the errors of the others to ``errors``."""
    for one in data_inputs(config):
        rows: Rows | None = None
        checker: Checker | None = None
        try:
            rows = _FirstRows(one.path) if one.is_streamed else open_rows(one.path, one.splits)
        except UserError as error:
            errors.append(error)
        try:
            checker = replace(one.make_checker(tokenizer), judge=one.make_judge(tokenizer))
        except UserError as error:
            errors.append(error)
        if rows is not None and checker is not None:
            yield DataSet(one.path, rows, checker, one.splits is EVALUATION)


def _check(data_set: DataSet, num_workers: int, report: DataReport) -> None:
    path = data_set.path
    rows = data_set.rows
    checker = data_set.checker
    positions = range(len(rows)) if data_set.is_streamed else positions_to_check(len(rows))
    found = scan_rows(rows, positions, checker, num_workers)
    is_all = len(positions) == len(rows) and not (data_set.is_streamed and len(rows) == ALL_ROWS)
    if error := found.error(path, checker, has_more=not is_all):
        report.errors.append(error)
    if line := found.templated_warning(path, checker):
        report.templated.append(line)
    if data_set.is_held_out:
        _compare_with_trained(data_set, found, report)
    else:
        report.trained = path, found.asked
    report.notes += found.notes(path)
    report.warnings += found.warnings(path, checker, has_more=not is_all)
    if isinstance(rows, _FirstRows) and rows.error is not None:
        report.errors.append(rows.error)
    if data_set.is_streamed:
        if not is_all:
            report.notes.append(
                f"{path}: the first {len(rows)} rows were checked; others are when they are drawn"
            )
        return
    report.sizes[path] = DataSize(len(rows), len(found.kept) if is_all else len(rows))
    if is_all:
        report.checked.append(checked_rows(rows, path, checker, found))
    else:
        report.notes.append(
            f"{path}: {len(positions)} of {len(rows)} rows were checked (the first, the last, and "
            "some evenly spaced between them); the others are while the run goes on"
        )


def _compare_with_trained(data_set: DataSet, found: Scan, report: DataReport) -> None:
    """Tell of prompts of an evaluation set that are trained on. It is a note if both are rows of
    one file, or if no answer is compared with a label (positions of a game may well recur)."""
    path = data_set.path
    trained_path, trained = report.trained
    both = [question for question in found.asked if question in trained]
    if not both:
        return
    first = both[0]
    line = (
        f"{path}: {len(both)} of its {len(found.asked)} different prompts are in {trained_path} as "
        f"well (first: {found.asked[first]}, which is {trained[first]}): evaluation then measures "
        "what was trained; remove them from one of the two"
    )
    is_one_file = split_slice(path)[0] == split_slice(trained_path)[0]
    is_warning = data_set.checker.compares_labels and not is_one_file
    (report.warnings if is_warning else report.notes).append(line)


class _FirstRows:
    """The first rows of a stream; ``error`` is the error that ended it, if any."""

    def __init__(self, path: str) -> None:
        self._rows: list[tuple[str, Row]] = []
        self.error: UserError | None = None
        try:
            self._rows.extend(itertools.islice(iter_rows(path), ALL_ROWS))
        except UserError as error:
            self.error = error

    def __len__(self) -> int:
        return len(self._rows)

    def __getitem__(self, position: int) -> Row:
        return self._rows[position][1]

    def where(self, position: int) -> str:
        return self._rows[position][0]


# -- supervised fine-tuning ------------------------------------------------------------------------


def data_judge(config: Config, tokenizer: Any) -> RowJudge | None:
    """Return the check of rows whose answers are trained on; None if no answers are."""
    if config.algorithm.preference is not None:
        return PreferenceJudge(config, tokenizer)
    return SftJudge(config, tokenizer) if config.algorithm.trains_on_data else None


class SftJudge:
    """Encodes rows as they are trained on (a `slime.prompts.prepare.RowJudge`)."""

    def __init__(self, config: Config, tokenizer: Any) -> None:
        self._encoding = sft_encoding(config, tokenizer)
        self._templates_text = config.data.apply_chat_template
        self._lengths = _LengthCheck(config)
        # the reference system's rule for loss masks, with which ours are compared
        self._rule = compared_rule(config)
        self._tokenizer = tokenizer
        self._to_compare = _MAX_COMPARED if self._rule else 0
        self._unknown = UnknownTokens(tokenizer, vocab_size_of_run(config))

    def __call__(self, prompts: Sequence[Prompt]) -> list[list[RowProblem]]:
        if not self._templates_text:
            read_ahead(self._encoding, ((prompt.text, prompt.label) for prompt in prompts))
        return [list(self._problems(prompt)) for prompt in prompts]

    def _problems(self, prompt: Prompt) -> Iterator[RowProblem]:
        tools = tools_of(prompt.metadata)
        try:
            encoded = self._encoding.encode(
                prompt.text, prompt.label, tokens=prompt.tokens, tools=tools
            )
        except UserError as error:
            yield _untrainable(error)
            return
        yield from _remarks(encoded)
        yield from _unknown_tokens(self._unknown, encoded.sequences)
        if encoded.unread_label:
            yield _unread_label(prompt.label)
        yield from self._other_mask(prompt, encoded)
        more = prompt.image_tokens
        lengths = [(len(one.tokens) + more, one.prompt_length + more) for one in encoded.sequences]
        yield from self._lengths.problems(min(lengths), max(length for length, _ in lengths))

    def _other_mask(self, prompt: Prompt, encoded: Encoded) -> Iterator[RowProblem]:
        """Compare the masks of the first rows with the rule of ``--loss-mask-type``."""
        if self._rule is None or not self._to_compare or not isinstance(prompt.text, list):
            return
        self._to_compare -= 1
        tools = tools_of(prompt.metadata)
        messages = with_answer(read_messages(prompt.text, tools=tools), prompt.label)
        difference = mask_difference(
            self._rule, self._tokenizer, messages, tools, encoded.sequences
        )
        if difference:
            kind = f"have other loss masks than --loss-mask-type {self._rule} gives them"
            yield remark(
                kind,
                difference,
                f"leave the flag out; why: {doc_url('conversations.md#what-is-trained')}",
            )


class PreferenceJudge:
    """Encodes the answers of rows as they are trained on (a `slime.prompts.prepare.RowJudge`)."""

    def __init__(self, config: Config, tokenizer: Any) -> None:
        self._encoder = PreferenceEncoder(config, tokenizer)
        self._lengths = _LengthCheck(config)
        self._unknown = UnknownTokens(tokenizer, vocab_size_of_run(config))

    def __call__(self, prompts: Sequence[Prompt]) -> list[list[RowProblem]]:
        self._encoder.read_ahead_rows([(prompt.text, prompt.label) for prompt in prompts])
        return [list(self._problems(prompt)) for prompt in prompts]

    def _problems(self, prompt: Prompt) -> Iterator[RowProblem]:
        try:
            answers = list(
                self._encoder.encode_answers(
                    prompt.text, prompt.label, prompt.metadata, prompt.images
                )
            )
        except UserError as error:
            yield _untrainable(error)
            return
        remarks = {one.kind: one for answer in answers for one in _remarks(answer.encoded)}
        yield from remarks.values()
        sequences = [answer.sequence for answer in answers]
        yield from _unknown_tokens(self._unknown, sequences)
        lengths = [(len(one.tokens), one.prompt_length) for one in sequences]
        longest = max(length for length, _ in lengths)
        yield from self._lengths.problems((longest, max(n for _, n in lengths)), longest)
        if not self._encoder.takes_pairs:
            kind = "desirable" if prompt.label["label"] else "undesirable"
            fix = "kto learns from answers of both kinds; one kind alone is sft_loss"
            yield RowProblem(f"have a {kind} answer", "", fix, refuse_at=1.0, is_told=False)
        elif answers[0].equals(answers[1]):
            yield RowProblem(
                "have a rejected answer that equals the chosen one, and are left out when they are "
                "drawn",
                fix="check --chosen-key and --rejected-key",
                refuse_at=1.0,
            )


def _unknown_tokens(
    unknown: UnknownTokens, sequences: Iterable[TrainedSequence]
) -> Iterator[RowProblem]:
    problems = (unknown.problem(one.tokens) for one in sequences if unknown)
    yield from itertools.islice(filter(None, problems), 1)


def _unread_label(label: Any) -> RowProblem:
    why = "their conversations end with an answer" if isinstance(label, str) else "they are no text"
    fix = (
        "leave --label-key out, or remove the answers that labels replace and write labels as text"
    )
    return remark(
        f"have labels that are not trained, because {why}", f"the first is {shown(label, 80)}", fix
    )


def _untrainable(error: UserError) -> RowProblem:
    kind = re.sub(r"\d+", "…", error.what)  # numbers of messages
    parts = (error.what if kind != error.what else "", error.why)
    detail = "; ".join(part for part in parts if part)
    return RowProblem(f"cannot be trained on: {kind}", detail, error.fix)


class _LengthCheck:
    """Finds rows that are left out when they are drawn because they are too long."""

    def __init__(self, config: Config) -> None:
        self._limit, self._prompt_limit = sft_limits(config)
        self._context = model_context(config) if self._limit is None else None

    def problems(self, drawn: tuple[int, int], longest: int) -> Iterator[RowProblem]:
        """Yield the problems with the length of a row.

        Args:
            drawn: tokens of the sample that decides, and of the part before its first trained
                token.
            longest: tokens of the longest sample of the row.
        """
        length, prompt_length = drawn
        fix = (
            "raise --seq-length, --rollout-max-context-len or --rollout-max-prompt-len, or take "
            "other data"
        )
        if self._limit is not None and length > self._limit:
            kind = f"are longer than {self._limit} tokens, and left out when they are drawn"
            yield RowProblem(kind, f"the first has {length}", fix, refuse_at=1.0)
        elif self._prompt_limit is not None and prompt_length > self._prompt_limit:
            kind = (
                f"have a prompt of more than {self._prompt_limit} tokens, and are left out when "
                "they are drawn"
            )
            yield RowProblem(kind, f"the first has {prompt_length}", fix, refuse_at=1.0)
        elif self._context is not None and longest > self._context:
            kind = (
                f"are longer than the model's context of {self._context} tokens, and are trained "
                "on as they are"
            )
            fix = f"--seq-length {self._context} leaves them out"
            yield remark(kind, f"the first has {longest}", fix)


def _remarks(encoded: Encoded) -> Iterator[RowProblem]:
    """Yield the ways in which training on a row may differ from what the user expects."""
    if len(encoded.sequences) > 1:
        kind = (
            "hold conversations whose earlier turns the chat template rewrites, and become "
            "several samples each"
        )
        yield remark(kind, f"the first becomes {len(encoded.sequences)}")
    if encoded.lost_reasoning:
        kind = "have reasoning that the chat template does not write, and are trained without it"
        yield remark(kind, fix=encoded.reasoning_fix)
    if encoded.without_reasoning:
        kind = (
            "have answers without the reasoning that the generation prompt opens, and are trained "
            "without its mark"
        )
        yield remark(kind)
    if encoded.unmatched:
        kind = (
            "have answers that begin otherwise than the generation prompt, and are trained behind "
            "another prompt than the one that engines are given"
        )
        fix = "let the chat template begin both alike (--apply-chat-template-kwargs)"
        yield remark(kind, f"the prompt of the first ends with {encoded.unmatched[-80:]!r}", fix)
    if encoded.control_tokens:
        kind = (
            "hold special tokens of the tokenizer in their words, which are read as control tokens"
        )
        yield remark(kind, fix="remove them if they are meant as text")
    if encoded.unanswered:
        kind = "end with a message that nobody answers, which is left out"
        fix = "give it an answer, or remove it"
        yield remark(kind, "training ends with the last answer", fix)
    if encoded.lost_indentation:
        kind = (
            "have answers whose indentation in the first line the chat template takes away, and "
            "are trained without it"
        )
        fix = "begin such answers with a word or a line of ```"
        yield remark(kind, fix=fix)
    yield from left_out(encoded.left_out_roles, encoded.left_out_tools)
    if encoded.unended is not None:
        kind = "do not teach the model to end its answers"
        yield remark(kind, encoded.unended.what, encoded.unended.fix)


# -- the rest of large data sets -------------------------------------------------------------------


class RemainingRows:
    """Checks the rows of large data sets that `validate_data` did not, in a process of low priority
    beside the run.

    Args:
        warn: called in a thread with each finding: once per kind at its first row, and again at the
            end with the number of rows.
    """

    def __init__(self, config: Config, warn: Callable[[str], None]) -> None:
        self._config = config
        self._warn = warn
        self._told: set[tuple[str, str]] = set()
        self._process: Any = None
        self._is_closed = False
        self._lock = threading.Lock()
        threading.Thread(target=self._check, name="slime-rows", daemon=True).start()

    def close(self) -> None:
        with self._lock:
            self._is_closed = True
            if self._process is not None:
                self._process.kill()

    def _check(self) -> None:
        if not _has_large(self._config):
            return
        context = multiprocessing.get_context("spawn")
        receiver, sender = context.Pipe(duplex=False)
        with self._lock:
            if self._is_closed:
                return
            arguments = (self._config, sender)
            self._process = context.Process(
                target=_check_beside, args=arguments, name="slime-rows", daemon=True
            )
            with without_working_directory():
                self._process.start()
        sender.close()
        with contextlib.suppress(EOFError, OSError):  # the process has ended
            while True:
                self._tell(*receiver.recv())

    def _tell(self, path: str, problems: Problems, num_rows: int) -> None:
        """Log problems of a file as they are found, and its warnings at the end.

        Args:
            num_rows: number of checked rows; 0 while the check continues.
        """
        if num_rows:
            for line in problems.warnings(path, num_rows):
                self._warn(line)
            return
        for kind, (_, where, problem) in problems.found.items():
            if (path, kind) not in self._told:
                self._told.add((path, kind))
                self._warn(
                    f"{where}: rows here {kind}; {problem.detail or problem.fix} (other rows are "
                    "still checked)"
                )


def _has_large(config: Config) -> bool:
    debug = config.debug
    if config.rollout.num_rollout == 0 or debug.debug_train_only or debug.load_debug_rollout_data:
        return False
    for one in data_inputs(config):
        with contextlib.suppress(UserError):  # the data source reports it
            if not one.is_streamed and len(open_rows(one.path, one.splits)) > ALL_ROWS:
                return True
    return False


def _check_beside(config: Config, sender: Connection) -> None:
    """Send (path, problems so far, number of rows at the end or 0) after each part of a data
    set."""
    parent = multiprocessing.parent_process()
    assert parent is not None and parent.pid is not None
    follow_parent(parent.pid, lambda: os._exit(1))
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the run ends us when it ends
    os.nice(19)
    for data_set in _data_sets(config, tokenizer_for_checks(config), []):
        if not data_set.is_streamed:
            _check_rest(data_set, sender)


def _check_rest(data_set: DataSet, sender: Connection) -> None:
    rows = data_set.rows
    if len(rows) <= ALL_ROWS:
        return
    rest = np.setdiff1d(np.arange(len(rows)), positions_to_check(len(rows))).tolist()
    total = Scan()
    for low in range(0, len(rest), _REPORTED_ROWS):
        total.merge(data_set.checker.scan(rows, rest[low : low + _REPORTED_ROWS]))
        total.kept.clear()
        if total.problems.found:
            sender.send((data_set.path, total.problems, 0))
    sender.send((data_set.path, total.problems, len(rest)))
