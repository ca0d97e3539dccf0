"""Make the checks of `slime doctor` and of a launch, and report what they find.

A trouble does not end the examination: the next check is made unless it needs what is broken.
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

#: In the order of the report.
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
    Check("data", checks_data.data, "data-rows", after=("tokenizer",)),
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

#: The checks on one host of several.
NODE_CHECKS = tuple(
    replace(check, function=checks_plan.node) if check.name == "GPUs" else check for check in CHECKS
)

#: Every launch makes these and logs what they find; they take milliseconds.
_AT_START = ("host", "network", "disk", "shared memory")
#: A launch refuses a run by these before anything starts.
_AT_LAUNCH = (
    "hub", "model", "quantisation", "architecture", "checkpoint", "weights", "tokenizer",
    "data", "hooks", "reward", "outputs", "GPUs", "engines", "trainer", "credentials",
)  # fmt: skip

#: An error of these modules is a defect of a check, not of the run.
_OURS = "slime.diagnosis."

State = Literal["ok", "warning", "FAIL", "left out"]


@dataclass(frozen=True)
class CheckOutcome:
    """The outcome of one check.

    Attributes:
        note: a few words about the result, or why the check was left out.
        launch_notes: notes that a launch logs.
    """

    check: Check
    state: State
    note: str
    findings: tuple[Finding, ...]
    seconds: float
    launch_notes: tuple[str, ...] = ()


@dataclass(frozen=True)
class Report:
    """All outcomes, in the order of the table."""

    outcomes: tuple[CheckOutcome, ...]
    seconds: float

    @property
    def findings(self) -> list[Finding]:
        """Each finding once, the fatal ones first."""
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
    """Check the run of a command line. Without a round this starts, downloads and writes nothing.

    Args:
        argv: the flags of the run.
        entry: "train" or "train_async".
        with_round: run one round, if no check failed.
    """
    started = time.perf_counter()
    case = CheckedRun.of(argv, entry)
    outcomes = {outcome.check.name: outcome for outcome in outcomes_of(case, checks)}
    if with_round:
        broken = [name for name, outcome in outcomes.items() if outcome.state == "FAIL"]
        outcomes[ROUND.name] = _made(replace(ROUND, after=tuple(broken)), case, outcomes)
    return Report(tuple(outcomes.values()), time.perf_counter() - started)


def outcomes_of(case: CheckedRun, checks: Iterable[Check]) -> list[CheckOutcome]:
    """Make the checks in order; leave out one whose prerequisite failed."""
    outcomes = dict[str, CheckOutcome]()
    for check in checks:
        outcomes[check.name] = _made(check, case, outcomes)
    return list(outcomes.values())


def preflight(config: Config, errors: Sequence[UserError] = ()) -> LoadPlan:
    """Check models, hooks, rewards, data, output directories and the size of the run; log warnings.

    Args:
        errors: what is wrong with the flags; ``config`` leaves these flags out (`judge_args`).
    Returns:
        What will be loaded.
    Raises:
        UserError: everything that cannot work, in one.
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
    """Return the error behind a finding, or one with its words."""
    if finding.error is not None:
        return finding.error
    what, *why = finding.detail.splitlines()
    return UserError(what, " ".join(why) or finding.trouble.cause, "; or ".join(finding.advice[:2]))


def at_start(config: Config) -> list[Finding]:
    """Make the quick checks of the host at launch. A check that fails itself reports nothing, so
    that it ends no run."""
    case = CheckedRun(config)
    checks = [check for check in CHECKS if check.name in _AT_START]
    found = [finding for check in checks for finding in _made(check, case, {}).findings]
    return [finding for finding in found if finding.trouble.name != "check-broken"]


def _made(check: Check, case: CheckedRun, earlier: dict[str, CheckOutcome]) -> CheckOutcome:
    started = time.perf_counter()
    findings = CheckFindings(check.trouble)
    state: State = "left out"
    try:
        _require(check, case, earlier)
        findings.attempt(check.function, case, findings)
        state = "ok"
    except LeftOut as reason:
        findings.notes = [str(reason)]
    except (Exception, SystemExit) as error:
        # the next check is made; a launch fails, since it would run the same code
        if case.is_launch and not case.errors:
            raise
        if case.errors and check.name != "flags":
            return CheckOutcome(
                check, "left out", "the flags are wrong", (), time.perf_counter() - started
            )
        detail = f"{type(error).__name__}: {error} ({_place(error)})"
        findings.add(
            "check-broken",
            detail,
            source=check.name,
            is_fatal=not _place(error).startswith(_OURS),
        )
    if check.name != "flags":
        # one that names a doubtful flag may only follow from what is wrong with that
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


def _require(check: Check, case: CheckedRun, earlier: dict[str, CheckOutcome]) -> None:
    """Check the prerequisites of a check.

    Raises:
        LeftOut: one is missing.
    """
    if case.config is None and not check.without_flags:
        raise LeftOut("the flags cannot be read yet")
    for name in check.after:
        if name in earlier and earlier[name].state in ("FAIL", "left out"):
            raise LeftOut(f"after {name}")


def _place(error: BaseException) -> str:
    """Return the innermost line of slime in a traceback: "slime.prompts.readers:141"."""
    lines = [
        (str(frame.f_globals.get("__name__")), line) for frame, line in walk_tb(error.__traceback__)
    ]
    return next(
        (f"{module}:{line}" for module, line in reversed(lines) if module.startswith("slime.")), ""
    )


# -- output ----------------------------------------------------------------------------------------


def text(report: Report) -> str:
    """Format a line for each check, then each finding with cause and remedies."""
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
    # errors of users' code quote whatever it was given
    return cast(dict[str, object], json_safe(shown))
