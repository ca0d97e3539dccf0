"""Check data, hooks and rewards with the run's own rows, chat template and reward function."""

from __future__ import annotations

import asyncio
import contextlib
import copy
import dataclasses
import io
import itertools
import queue
import sys
import threading
from collections.abc import Iterable, Sequence
from statistics import fmean
from traceback import walk_tb
from types import CodeType
from typing import Any, TextIO, cast

from slime import deadlines
from slime.config.config import Config
from slime.diagnosis.check import CheckedRun, CheckFindings, LeftOut
from slime.errors import UserError
from slime.prompts.prepare import remember
from slime.prompts.problems import RowProblem
from slime.prompts.readers import iter_rows
from slime.prompts.row_format import RowFormat, read_prompt
from slime.prompts.tokenizer import with_opening
from slime.redact import Redacting
from slime.rollout.rewards.pool import RewardPool
from slime.rollout.validate_rows import data_errors
from slime.run import preflight
from slime.samples.types import Sample, SampleStatus
from slime.user_code.hooks import RewardFunction
from slime.user_code.loading import check_signature, load_function

#: Number of rows with labels that are tried as answers.
_ROWS = 6
#: Answers with the label, in forms that rewards look for.
_FORMS = (
    "{}",
    "\\boxed{{{}}}",
    "Answer: {}",
    "#### {}",
    "The answer is {}.",
    "<answer>{}</answer>",
    "<think>\n</think>\nThe answer is \\boxed{{{}}}.",
    "<think>\n</think>\n<answer>{}</answer>",
)
_NOISE = "lorem ipsum zzz qqq"
#: --rm-type → why its rewards do not depend on the label; and the --rm-type that asks a
#: server.
_BLIND = {"random": "it is by chance", "ifbench": "it reads no labels"}
_REMOTE = "remote_rm"


def data(case: CheckedRun, findings: CheckFindings) -> None:
    """Check that all rows of the data sets can be used, with the messages of `slime train`."""
    if case.names:
        raise LeftOut(f"not downloaded yet: {', '.join(case.names)}")
    report = findings.attempt(preflight.data_report, case.run, case.tokenizer)
    if report is None:
        return
    for error in report.errors:
        findings.add_error(error)
    for line in report.warnings:
        findings.add("data-rows", line, is_fatal=False)
    for line in report.templated:
        findings.add("template-twice", line, is_fatal=False)
    for line in report.notes:
        findings.note(line)
        findings.launch_notes.append(line)
    if report.error is None:
        remember(report.checked)  # so that the rollout process does not check them again


def first_rows(case: CheckedRun, findings: CheckFindings) -> None:
    """Check what needs no tokenizer: that the data sets can be opened, and their first rows have
    the columns that the flags name."""
    for error in data_errors(case.run):
        findings.add_error(error)


def hooks(case: CheckedRun, findings: CheckFindings) -> None:
    """Check that users' functions can be imported and have the right signatures."""
    findings.attempt(preflight.check_functions, case.run.flat(), trouble="hook")
    findings.attempt(preflight.warn_of_old_plugins, case.run)


def reward(case: CheckedRun, findings: CheckFindings) -> None:
    """Check that there is a reward, and that the label as the answer scores above noise."""
    config = case.run
    findings.attempt(preflight.check_rewards, config)
    if any(finding.is_fatal for finding in findings.all):
        return
    flags = config.reward
    kind = str(flags.rm_type or "").removeprefix("boxed_")
    if not (flags.custom_rm_path or flags.rm_type):
        raise LeftOut("rewards come from somewhere else than --custom-rm-path and --rm-type")
    if not flags.custom_rm_path and kind in (*_BLIND, _REMOTE):
        raise LeftOut(f"--rm-type {flags.rm_type} is not asked: {_BLIND.get(kind, 'remote')}")
    if (
        not config.data.prompt_data
        or config.data.data_source_path
        or not config.data.rollout_global_dataset
    ):
        raise LeftOut("prompts do not come from --prompt-data")
    try:
        rows = _labelled(config, case.tokenizer)
        if flags.custom_rm_path:
            check_signature(
                load_function(flags.custom_rm_path), RewardFunction, flags.custom_rm_path
            )
    except UserError as error:
        raise LeftOut("its data or its function cannot be read") from error
    rollout = config.rollout
    makes_samples = rollout.custom_generate_function_path or rollout.rollout_function_path
    if config.data.label_key is None and flags.custom_rm_path and not makes_samples:
        function = load_function(flags.custom_rm_path)
        if _reads(getattr(function, "__code__", None), "label"):
            detail = f"{flags.custom_rm_path} reads sample.label: without --label-key, it is None"
            findings.add("reward-flat", detail, is_fatal=False)
    if len({str(row.label) for row in rows}) < 2:
        raise LeftOut("fewer than two different labels in the first rows (--label-key)")
    try:
        # in a run, this output goes to logs/rollout.log
        out, err = (io.StringIO() if case.is_launch else one for one in (sys.stdout, sys.stderr))
        # drop warnings about missing rewards, which are reported below
        with (
            CheckFindings(findings.trouble).report_warnings(),
            contextlib.redirect_stdout(cast(TextIO, Redacting(out))),
            contextlib.redirect_stderr(cast(TextIO, Redacting(err))),
        ):
            scores, failure = _scores(config, rows, case.tokenizer, trial_only=case.is_launch)
    except UserError as error:
        if _asks_a_server(error):
            raise LeftOut("it asks a server, which may not be up yet") from error
        # custom generate functions may add fields to samples that the reward needs
        findings.add_error(error, "reward-fails", is_fatal=not makes_samples)
    else:
        if failure is not None:
            findings.add_error(failure, "reward-fails", is_fatal=False)
        elif scores is not None:
            _judge(scores, findings)


def _reads(code: CodeType | None, name: str) -> bool:
    """Tell whether the code of a function, or of one inside it, reads an attribute of this name."""
    if code is None:
        return False
    inner = (constant for constant in code.co_consts if isinstance(constant, CodeType))
    return name in code.co_names or any(_reads(part, name) for part in inner)


#: Packages with errors that are about a server.
_CLIENTS = (
    "httpx", "httpcore", "aiohttp", "requests", "urllib", "urllib3", "openai", "anthropic",
    "grpc",
)  # fmt: skip


def _asks_a_server(error: BaseException) -> bool:
    """Tell whether a reward failed because of a server or an engine of the run, which may not be up
    yet."""
    found: BaseException | None = error
    seen: list[BaseException] = []  # chains of causes may be cycles
    while found is not None and not any(found is one for one in seen):
        seen.append(found)
        frames = [str(frame.f_globals.get("__name__")) for frame, _ in walk_tb(found.__traceback__)]
        is_of_client = type(found).__module__.partition(".")[0] in _CLIENTS
        if (
            isinstance(found, ConnectionError | TimeoutError)
            or is_of_client
            or "slime.rollout.plugin_api" in frames
        ):
            return True
        found = found.__cause__ or found.__context__
    return False


def _labelled(config: Config, tokenizer: Any) -> list[Sample]:
    """Return samples of the first rows that have a label and a locally computed reward."""
    form = RowFormat.of(config)
    found = list[Sample]()
    assert config.data.prompt_data is not None
    for number, (_, row) in enumerate(
        itertools.islice(iter_rows(config.data.prompt_data), 4 * _ROWS)
    ):
        try:
            prompt = read_prompt(row, form, tokenizer)
        except RowProblem:
            continue  # the check of the data reports it
        if prompt.label is None or str(prompt.metadata.get("rm_type")).endswith((_REMOTE, *_BLIND)):
            continue
        text = str(prompt.text)
        ids = tokenizer.encode(text, add_special_tokens=False)
        tokens = prompt.tokens or with_opening(
            tokenizer, text, ids, templated=form.apply_chat_template
        )
        found.append(
            Sample(
                number,
                number,
                prompt=prompt.text,
                tokens=tokens,
                label=prompt.label,
                metadata=prompt.metadata,
            )
        )
        if len(found) == _ROWS:
            break
    return found


@dataclasses.dataclass(frozen=True)
class Scores:
    """Mean rewards of three kinds of answers.

    Attributes:
        gold: answers with the row's own label, in the form that scores best.
        noise: answers without any label.
        other: answers with another row's label, in the same form.
        reads_label: whether the score of an answer depends on the row's label.
    """

    gold: float
    noise: float
    other: float
    reads_label: bool


#: Scores (None for ``trial_only``), and the first error of the reward, or None.
_Found = tuple[Scores | None, UserError | None]


def _scores(config: Config, rows: Sequence[Sample], tokenizer: Any, *, trial_only: bool) -> _Found:
    """Score answers in a separate thread.

    Raises:
        UserError: the reward fails for all labels as answers, or takes longer than --rm-timeout.
        LeftOut: the answers take too long.
    """
    reward = dataclasses.replace(
        config.reward, rm_timeout=min(config.reward.rm_timeout, deadlines.CHECKS_DATA_REWARD)
    )
    patience = config.reward.rm_timeout
    config = dataclasses.replace(config, reward=reward)
    done = queue.SimpleQueue[_Found | BaseException]()

    def score() -> None:
        try:
            done.put(asyncio.run(_scored(config, rows, tokenizer, patience, trial_only)))
        except BaseException as error:  # raised below, in the calling thread
            done.put(error)

    # a thread, because an async function that blocks its event loop cannot be cancelled
    threading.Thread(target=score, name="slime-doctor-reward", daemon=True).start()
    try:
        found = done.get(timeout=deadlines.CHECKS_DATA_ALL_REWARDS)
    except queue.Empty as none:
        raise LeftOut(
            f"{_ROWS * (len(_FORMS) + 3)} answers take it more than "
            f"{deadlines.CHECKS_DATA_ALL_REWARDS:g} s"
        ) from none
    if isinstance(found, BaseException):
        raise found
    return found


async def _scored(
    config: Config, rows: Sequence[Sample], tokenizer: Any, patience: float, trial_only: bool
) -> _Found:
    pool = RewardPool(config)
    failures = list[UserError]()

    async def rewards_of(samples: list[Sample]) -> list[Any]:
        """Return a reward or an error for each sample, in order."""
        if not config.reward.group_rm:
            return list(await asyncio.gather(*map(pool.score, samples), return_exceptions=True))
        try:
            return list(await pool.score_group(samples))
        except UserError as error:
            return [error] * len(samples)

    async def mean(answers: Iterable[tuple[Sample, str]], *, must_score: bool = False) -> float:
        rewards = await rewards_of([_answered(row, text, tokenizer) for row, text in answers])
        if any(pool.metrics().values()):  # a reward timed out, or a grader died
            if patience > config.reward.rm_timeout:
                raise LeftOut(
                    f"it takes more than {deadlines.CHECKS_DATA_REWARD:g} s, which --rm-timeout "
                    f"{patience:g} allows"
                )
            raise UserError(
                f"a reward did not come within {config.reward.rm_timeout:g} s",
                why="a sample whose reward does not come within --rm-timeout scores 0",
                fix="make the function faster, or raise --rm-timeout",
            )
        failed = [one for one in rewards if isinstance(one, BaseException)]
        if failed and (
            (must_score and len(failed) == len(rewards)) or not isinstance(failed[0], UserError)
        ):
            raise failed[0]
        failures.extend(one for one in failed if isinstance(one, UserError))
        key = config.reward.reward_key
        numbers = [
            one[key] if isinstance(one, dict) and key else one
            for one in rewards
            if one not in failed
        ]
        return fmean(map(float, numbers)) if numbers else 0.0

    try:
        labels = [str(row.label) for row in rows]
        gold = {_FORMS[0]: await mean(zip(rows, labels), must_score=True)}
        if trial_only:
            return None, next(iter(failures), None)
        for form in _FORMS[1:]:
            gold[form] = await mean((row, form.format(label)) for row, label in zip(rows, labels))
        form = max(gold, key=lambda one: gold[one])
        others = labels[1:] + labels[:1]
        swapped = [
            dataclasses.replace(row, label=other.label)
            for row, other in zip(rows, [*rows[1:], rows[0]])
        ]
        noise = await mean((row, _NOISE) for row in rows)
        wrong = await mean((row, form.format(label)) for row, label in zip(rows, others))
        mistaken = await mean((row, form.format(label)) for row, label in zip(swapped, labels))
        return Scores(gold[form], noise, wrong, mistaken != gold[form]), next(iter(failures), None)
    finally:
        await pool.close()


def _answered(row: Sample, text: str, tokenizer: Any) -> Sample:
    """Return a completed sample, as a reward function sees it in a run."""
    ids = tokenizer.encode(text, add_special_tokens=False)
    return dataclasses.replace(
        row,
        prompt=row.prompt,
        response=text,
        tokens=[*row.tokens, *ids],
        response_length=len(ids),
        label=copy.deepcopy(row.label),  # a reward may modify its arguments
        metadata=copy.deepcopy(row.metadata),
        status=SampleStatus.COMPLETED,
    )


def _judge(scores: Scores, findings: CheckFindings) -> None:
    means = (
        f"the label as the answer scores {scores.gold:g}, another row's {scores.other:g}, noise "
        f"{scores.noise:g}"
    )
    if scores.reads_label:
        if scores.gold > scores.noise and scores.gold >= scores.other:
            findings.note(means)
        else:
            findings.add(
                "reward-inverted", f"{means} (means of the form that scores best)", is_fatal=False
            )
    elif scores.gold == scores.noise == scores.other:
        detail = (
            f"{means} (in {len(_FORMS)} forms); where it wants yet another form, or reads no "
            "label, that is fine"
        )
        findings.add("reward-flat", detail, is_fatal=False)
    else:
        findings.note("it does not depend on the label")
