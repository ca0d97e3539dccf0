"""Run the checks of `slime doctor` and of a launch, and report their findings.

A failed check does not end the examination: the checks that do not depend on it still run.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from traceback import walk_tb
from typing import Literal, cast

from slime.checkpoints.load_plan import LoadPlan, resolve_load
from slime.config.config import Config
from slime.config.make import options_in
from slime.diagnosis import checks_data, checks_host, checks_model, checks_plan
from slime.diagnosis.check import Check, CheckedRun, CheckFindings, LeftOut
from slime.diagnosis.one_round import ROUND
from slime.diagnosis.troubles import Finding
from slime.errors import UserError, several
from slime.files import json_safe
from slime.log import get_logger
from slime.processes.host import folder_of_sockets, raise_open_files
from slime.run.preflight import joins_cluster

logger = get_logger(__name__)

#: All checks, in the order of the report.
CHECKS: tuple[Check, ...] = (
    Check("flags", checks_plan.flags, "flags-contradict", without_flags=True),
    Check("host", checks_host.host, "open-files", without_flags=True),
    Check("device", checks_host.device, "torch-without-gpu", without_flags=True),
    Check("network", checks_host.network, "nccl-interface", without_flags=True),
    Check("ports", checks_host.ports, "ports", without_flags=True),
    Check("hub", checks_model.hub, "hub"),
    Check("model", checks_model.directory, "model-directory"),
    Check("quantisation", checks_model.quantisation, "quantised-weights", after=("model",)),
    Check("architecture", checks_model.architecture, "model-flags", after=("model",)),
    Check("checkpoint", checks_model.checkpoint, "checkpoint", after=("model",)),
    Check("weights", checks_model.weights, "missing-shards", after=("quantisation",)),
    Check("tokenizer", checks_model.tokenizer, "tokenizer", after=("model",)),
    Check(
        "data",
        checks_data.data,
        "data-rows",
        after=("tokenizer",),
        otherwise=checks_data.first_rows,
    ),
    Check("hooks", checks_data.hooks, "hook"),
    Check("reward", checks_data.reward, "reward-missing", after=("tokenizer",)),
    Check("outputs", checks_model.outputs, "folder"),
    Check("disk", checks_host.disk, "disk-room", after=("model",)),
    Check("shared memory", checks_host.shared_memory, "shared-memory", after=("model",)),
    Check("GPUs", checks_plan.slots, "gpus-missing"),
    Check("engines", checks_plan.engines, "engine-flags"),
    Check("trainer", checks_plan.trainer, "transformer-engine"),
    Check("memory", checks_plan.memory, "memory-training", after=("architecture",)),
    Check("age of samples", checks_plan.age, "stale-weights"),
    Check("credentials", checks_plan.credentials, "wandb-key"),
)

#: The checks for one host of several.
NODE_CHECKS = tuple(
    replace(check, function=checks_plan.node) if check.name == "GPUs" else check for check in CHECKS
)

#: Checks that every launch runs; they take milliseconds, and their findings are only logged.
_AT_START = ("host", "network", "disk", "shared memory")
#: Checks that refuse a launch before anything starts.
_AT_LAUNCH = (
    "hub", "model", "quantisation", "architecture", "checkpoint", "weights", "tokenizer",
    "data", "hooks", "reward", "outputs", "GPUs", "engines", "trainer", "credentials",
)  # fmt: skip

#: An error raised in these modules is a bug of a check, not a problem of the run.
_OURS = "slime.diagnosis."

State = Literal["ok", "warning", "FAIL", "left out"]


@dataclass(frozen=True)
class CheckOutcome:
    """The outcome of one check.

    Attributes:
        note: short remark about the result, or why the check was left out.
        launch_notes: remarks that a launch logs.
    """

    check: Check
    state: State
    note: str
    findings: tuple[Finding, ...]
    seconds: float
    launch_notes: tuple[str, ...] = ()


@dataclass(frozen=True)
class Report:
    """All outcomes, in order, and the total seconds."""

    outcomes: tuple[CheckOutcome, ...]
    seconds: float

    @property
    def findings(self) -> list[Finding]:
        """All findings without duplicates, fatal ones first."""
        found = list(
            dict.fromkeys(finding for outcome in self.outcomes for finding in outcome.findings)
        )
        return sorted(found, key=lambda finding: not finding.is_fatal)

    @property
    def is_fatal(self) -> bool:
        return any(finding.is_fatal for finding in self.findings)


def examine(
    argv: list[str],
    entry: str = "train",
    checks: Iterable[Check] = CHECKS,
    *,
    with_round: bool = False,
) -> Report:
    """Check the run of a command line. Without a round, this starts, downloads and writes nothing.

    Args:
        argv: the flags of the run.
        entry: "train" or "train_async".
        with_round: also run one round, if no check has failed.
    """
    started = time.perf_counter()
    case = CheckedRun.of(argv, entry)
    outcomes = {outcome.check.name: outcome for outcome in outcomes_of(case, checks)}
    if with_round:
        broken = [name for name, outcome in outcomes.items() if outcome.state == "FAIL"]
        outcomes[ROUND.name] = _made(replace(ROUND, after=tuple(broken)), case, outcomes)
    return Report(tuple(outcomes.values()), time.perf_counter() - started)


def outcomes_of(case: CheckedRun, checks: Iterable[Check]) -> list[CheckOutcome]:
    """Run the checks in order; leave out checks with a failed prerequisite."""
    outcomes = dict[str, CheckOutcome]()
    for check in checks:
        outcomes[check.name] = _made(check, case, outcomes)
    return list(outcomes.values())


def preflight(config: Config, errors: Sequence[UserError] = ()) -> LoadPlan:
    """Run the checks of a launch (`_AT_LAUNCH`); log their warnings.

    Args:
        errors: errors in the flags; ``config`` leaves these flags out (`judge_args`).
    Returns:
        What the run will load.
    Raises:
        UserError: the errors and all fatal findings, combined.
    """
    raise_open_files()
    if not joins_cluster(config):
        folder_of_sockets()
    case = CheckedRun(config, list(errors), is_launch=True)
    outcomes = outcomes_of(case, [check for check in CHECKS if check.name in _AT_LAUNCH])
    findings = list(dict.fromkeys(one for outcome in outcomes for one in outcome.findings))
    wrong = [*errors, *(as_error(one) for one in findings if one.is_fatal)]
    if wrong:
        raise several(wrong)
    for outcome in outcomes:
        for note in outcome.launch_notes:
            logger.info("%s", note)
    for finding in findings:
        logger.warning("%s", finding.detail)
    return resolve_load(config)


def as_error(finding: Finding) -> UserError:
    """Return the error that caused a finding, else a new error with its words."""
    if finding.error is not None:
        return finding.error
    what, *why = finding.detail.splitlines()
    return UserError(what, " ".join(why) or finding.trouble.cause, "; or ".join(finding.advice[:2]))


def at_start(config: Config) -> list[Finding]:
    """Run the quick checks of the host at launch. Findings about a broken check are dropped, so
    that a bug in a check ends no run."""
    case = CheckedRun(config)
    checks = [check for check in CHECKS if check.name in _AT_START]
    found = [finding for check in checks for finding in _made(check, case, {}).findings]
    return [finding for finding in found if finding.trouble.name != "check-broken"]


def _made(check: Check, case: CheckedRun, earlier: dict[str, CheckOutcome]) -> CheckOutcome:
    started = time.perf_counter()
    findings = CheckFindings(check.trouble)
    state: State = "left out"
    try:
        _call(check, case, findings, earlier)
        state = "ok"
    except LeftOut as reason:
        findings.notes = [str(reason)]
    except (Exception, SystemExit) as error:
        # doctor goes on with the next check; a launch fails, since it would run the same code
        if case.is_launch and not case.errors:
            raise
        if case.errors and check.name != "flags":
            return CheckOutcome(
                check, "left out", "the flags are wrong", (), time.perf_counter() - started
            )
        detail = f"{type(error).__name__}: {error} ({_place(error)})"
        findings.add(
            "check-broken", detail, source=check.name, is_fatal=not _place(error).startswith(_OURS)
        )
    if check.name != "flags":
        # drop findings that name a doubtful flag: they may be consequences of its error
        findings.all = [one for one in findings.all if not options_in(one.detail) & case.doubtful]
    if findings.all:
        state = "FAIL" if any(finding.is_fatal for finding in findings.all) else "warning"
    seconds = time.perf_counter() - started
    return CheckOutcome(
        check,
        state,
        ", ".join(findings.notes),
        tuple(findings.all),
        seconds,
        tuple(findings.launch_notes),
    )


def _call(
    check: Check, case: CheckedRun, findings: CheckFindings, earlier: dict[str, CheckOutcome]
) -> None:
    try:
        _require(check, case, earlier)
    except LeftOut:
        if check.otherwise is not None and case.config is not None:
            findings.attempt(check.otherwise, case, findings)
        raise
    findings.attempt(check.function, case, findings)


def _require(check: Check, case: CheckedRun, earlier: dict[str, CheckOutcome]) -> None:
    """Check the prerequisites of a check.

    Raises:
        LeftOut: there is no configuration, or an earlier check has failed or was left out.
    """
    if case.config is None and not check.without_flags:
        raise LeftOut("the flags cannot be read yet")
    for name in check.after:
        if name in earlier and earlier[name].state in ("FAIL", "left out"):
            raise LeftOut(f"after {name}")


def _place(error: BaseException) -> str:
    """Return slime's innermost line in a traceback: "slime.prompts.readers:141"; "" if none."""
    lines = [
        (str(frame.f_globals.get("__name__")), line) for frame, line in walk_tb(error.__traceback__)
    ]
    return next(
        (f"{module}:{line}" for module, line in reversed(lines) if module.startswith("slime.")), ""
    )


# -- output ----------------------------------------------------------------------------------------


def text(report: Report) -> str:
    """Format one line per check, then each finding with its cause and remedies."""
    width = max(len(outcome.check.name) for outcome in report.outcomes)
    lines = [f"{o.check.name:<{width}}  {o.state:<8}  {_line(o)}".rstrip() for o in report.outcomes]
    for finding in report.findings:
        lines += ["", *_finding_lines(finding)]
    fatal = sum(finding.is_fatal for finding in report.findings)
    warnings = len(report.findings) - fatal
    counts = [_counted(fatal, "error"), _counted(warnings, "warning")]
    verdict = ", ".join(counts) if report.findings else "nothing found"
    return "\n".join(
        [*lines, "", f"{verdict}; {len(report.outcomes)} checks in {report.seconds:.1f} s"]
    )


def _counted(count: int, what: str) -> str:
    return f"{count} {what}" if count == 1 else f"{count} {what}s"


def _line(outcome: CheckOutcome) -> str:
    return ", ".join(dict.fromkeys(f.trouble.name for f in outcome.findings)) or outcome.note


def _finding_lines(finding: Finding) -> list[str]:
    head = "FAIL" if finding.is_fatal else "warning"
    lines = [
        f"{head}: {finding.trouble.name}",
        *(f"  {line}" for line in finding.detail.splitlines()),
    ]
    lines.append(f"  cause: {finding.trouble.cause}")
    return [*lines, *(f"  try: {remedy}" for remedy in finding.advice)]


def as_json(report: Report) -> dict[str, object]:
    """Return what ``--json`` prints."""
    shown = {
        "ok": not report.findings,
        "fatal": report.is_fatal,
        "seconds": round(report.seconds, 3),
        "checks": [
            {"name": o.check.name, "state": o.state, "said": o.note, "seconds": round(o.seconds, 3)}
            | {"findings": [finding.as_json() for finding in o.findings]}
            for o in report.outcomes
        ],
    }
    # errors of users' code may quote values that JSON cannot hold
    return cast(dict[str, object], json_safe(shown))
