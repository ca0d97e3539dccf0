"""The run that a check of `slime doctor` examines, and how the check reports what it finds.

Most checks call the functions of a launch. The errors that they raise and the warnings that they
log become findings with the same words, so that no check exists twice.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

from slime.config.config import Config
from slime.config.make import judge_args, options_in
from slime.diagnosis.troubles import TROUBLES, Finding, trouble_at, trouble_of
from slime.errors import UserError

T = TypeVar("T")


class LeftOut(Exception):
    """Raised with the reason by a check that cannot run here."""


@dataclass
class CheckedRun:
    """The run under examination.

    Attributes:
        config: None if the flags give no configuration. Flags with ``errors`` are left out, so that
            the others can be checked.
        errors: errors in the flags, with which a launch refuses them.
        names: models and data sets on the hub that are not downloaded yet.
        is_launch: the checks are part of a launch and must be fast.
    """

    config: Config | None
    errors: list[UserError] = field(default_factory=list)
    names: tuple[str, ...] = ()
    is_launch: bool = False
    _tokenizer: Any = None

    @staticmethod
    def of(argv: list[str], entry: str = "train") -> CheckedRun:
        """Read a command line."""
        return CheckedRun(*judge_args(argv, entry))

    @property
    def doubtful(self) -> frozenset[str]:
        """Options that errors in the flags name; findings about them may be consequences."""
        return frozenset().union(*(options_in(f"{one.what} {one.fix}") for one in self.errors))

    @property
    def run(self) -> Config:
        """The configuration, for checks that run only if there is one."""
        assert self.config is not None
        return self.config

    @property
    def model(self) -> Path:
        """The model directory.

        Raises:
            LeftOut: no flag names one, or it is not downloaded yet.
        """
        path = self.run.checkpoint.hf_checkpoint
        if path is None:
            raise LeftOut("--hf-checkpoint is not given")
        if path in self.names:
            raise LeftOut(f"{path} is on the hub and was not downloaded yet")
        return Path(path)

    @property
    def tokenizer(self) -> Any:
        """The model's tokenizer, read once."""
        if self._tokenizer is None:
            from slime.prompts.tokenizer import load_tokenizer

            self._tokenizer = load_tokenizer(
                str(self.model),
                without_torch=True,
                trust_remote_code=self.run.checkpoint.trust_remote_code,
            )
        return self._tokenizer


@dataclass
class CheckFindings:
    """The findings of one check.

    Attributes:
        trouble: default trouble of errors, by name; `trouble_of` takes precedence.
        notes: short remarks for the check's line in the report.
        launch_notes: remarks that a launch logs.
    """

    trouble: str
    all: list[Finding] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    launch_notes: list[str] = field(default_factory=list)

    def note(self, text: str) -> None:
        self.notes.append(text)

    def add(
        self,
        name: str,
        detail: str,
        *remedies: str,
        source: str = "",
        is_fatal: bool = True,
        error: UserError | None = None,
    ) -> None:
        """Add a finding of the trouble ``name``. ``remedies`` replace the general ones of the
        trouble."""
        finding = Finding(TROUBLES[name], detail, remedies, source, is_fatal, error)
        if finding not in self.all:
            self.all.append(finding)

    def add_error(
        self, error: UserError, trouble: str | None = None, *, is_fatal: bool = True
    ) -> None:
        """Add an error as a finding, with the words that a launch prints."""
        detail = "\n".join(
            [error.what, *([error.why] if error.why else []), *getattr(error, "__notes__", ())]
        )
        fixes = (error.fix,) if error.fix else ()
        self.add(
            trouble or trouble_of(error) or self.trouble,
            detail,
            *fixes,
            is_fatal=is_fatal,
            error=error,
        )

    def attempt(
        self, check: Callable[..., T], *arguments: Any, trouble: str | None = None
    ) -> T | None:
        """Call ``check(*arguments)``; its errors and warnings become findings.

        Args:
            trouble: trouble of its errors; by default, it depends on where they are raised.
        """
        with self.report_warnings():
            try:
                return check(*arguments)
            except UserError as error:
                self.add_error(error, trouble)
        return None

    @contextmanager
    def report_warnings(self) -> Iterator[None]:
        """Turn slime's log warnings within the block into findings that are not fatal."""
        logger = logging.getLogger("slime")
        handler = _Listener(self)
        propagates = logger.propagate
        logger.propagate = False
        others = logger.handlers
        logger.handlers = [handler]
        try:
            yield
        finally:
            logger.propagate = propagates
            logger.handlers = others


class _Listener(logging.Handler):
    def __init__(self, findings: CheckFindings) -> None:
        super().__init__(logging.WARNING)
        self._findings = findings

    def emit(self, record: logging.LogRecord) -> None:
        trouble = trouble_at(record.name, record.funcName or "") or self._findings.trouble
        self._findings.add(trouble, record.getMessage(), is_fatal=False)


@dataclass(frozen=True)
class Check:
    """One check of `slime doctor`.

    Attributes:
        function: called with (case, findings); raises `LeftOut` if there is nothing to check.
        trouble: default trouble of its errors, by name; see `CheckFindings`.
        after: this check is left out if one of these has failed or was left out.
        without_flags: the check can run even if the flags give no configuration.
        otherwise: called in place of ``function`` where ``after`` leaves the check out.
    """

    name: str
    function: Callable[[CheckedRun, CheckFindings], None]
    trouble: str
    after: tuple[str, ...] = ()
    without_flags: bool = False
    otherwise: Callable[[CheckedRun, CheckFindings], None] | None = None
