"""One check under way: what it may look at, and how it tells what it finds.

What a launch refuses (`UserError`) and warns of (the log) becomes a finding here, in the same
words, so that a check has one home: the function that the launch calls.
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
from slime.diagnosis.places import trouble_at, trouble_of
from slime.diagnosis.record import Finding, Trouble
from slime.errors import UserError

T = TypeVar("T")


class LeftOut(Exception):
    """A check cannot be made here; says why."""


@dataclass
class CheckedRun:
    """The run that is looked at.

    Attributes:
        config: None where nothing can be derived from the flags. With ``errors`` it is that of the
            flags without those which they are about, to check the rest.
        errors: what a launch refuses the flags for.
        is_launch: checks take as little time as they can.
        names: models and data that are names of the hub, of which no copy is here.
    """

    config: Config | None
    errors: list[UserError] = field(default_factory=list)
    names: tuple[str, ...] = ()
    is_launch: bool = False
    _tokenizer: Any = None

    @staticmethod
    def of(argv: list[str], entry: str = "train") -> CheckedRun:
        """The case of a command line."""
        return CheckedRun(*judge_args(argv, entry))

    @property
    def doubtful(self) -> frozenset[str]:
        """Options that an error of the flags is about: what else is found of them may follow from
        it."""
        return frozenset().union(*(options_in(f"{one.what} {one.fix}") for one in self.errors))

    @property
    def run(self) -> Config:
        """The configuration, of which checks that need one can be sure."""
        assert self.config is not None
        return self.config

    @property
    def model(self) -> Path:
        """The model directory.

        Raises:
            LeftOut: no flag names one, or it is on the hub.
        """
        path = self.run.checkpoint.hf_checkpoint
        if path is None:
            raise LeftOut("--hf-checkpoint is not given")
        if path in self.names:
            raise LeftOut(f"{path} is on the hub and was not downloaded yet")
        return Path(path)

    @property
    def tokenizer(self) -> Any:
        """The model's, read once."""
        if self._tokenizer is None:
            from slime.prompts.tokenizer import load_tokenizer

            self._tokenizer = load_tokenizer(
                str(self.model),
                without_torch=True,
                trust_remote_code=self.run.checkpoint.trust_remote_code,
            )
        return self._tokenizer


@dataclass
class Look:
    """What a check has found so far.

    Attributes:
        trouble: what an error is that nothing else tells.
        notes: a few words for the line of a check that found nothing.
        told: of them, what a launch logs.
    """

    trouble: Trouble
    findings: list[Finding] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    told: list[str] = field(default_factory=list)

    def note(self, text: str) -> None:
        self.notes.append(text)

    def found(
        self,
        trouble: Trouble,
        detail: str,
        *remedies: str,
        source: str = "",
        is_fatal: bool = True,
        error: UserError | None = None,
    ) -> None:
        """Add a finding; ``remedies`` with this run's values go before those of the trouble."""
        advice = (*remedies, *trouble.remedies) if remedies else ()
        finding = Finding(trouble, detail, advice, source, is_fatal, error)
        if finding not in self.findings:
            self.findings.append(finding)

    def refused(
        self, error: UserError, trouble: Trouble | None = None, *, is_fatal: bool = True
    ) -> None:
        """Add what a launch says of it."""
        detail = "\n".join(
            [error.what, *([error.why] if error.why else []), *getattr(error, "__notes__", ())]
        )
        fixes = (error.fix,) if error.fix else ()
        self.found(
            trouble or trouble_of(error) or self.trouble,
            detail,
            *fixes,
            is_fatal=is_fatal,
            error=error,
        )

    def attempt(
        self, check: Callable[..., T], *arguments: Any, trouble: Trouble | None = None
    ) -> T | None:
        """``check(*arguments)``; what it refuses and warns of are findings.

        Args:
            trouble: what an error of it is; default: by where it is raised.
        """
        with self.warnings():
            try:
                return check(*arguments)
            except UserError as error:
                self.refused(error, trouble)
        return None

    @contextmanager
    def warnings(self) -> Iterator[None]:
        """Within the block, what slime's log is warned of are findings that stop nobody, and appear
        nowhere else."""
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
    def __init__(self, look: Look) -> None:
        super().__init__(logging.WARNING)
        self._look = look

    def emit(self, record: logging.LogRecord) -> None:
        trouble = trouble_at(record.name, record.funcName or "") or self._look.trouble
        self._look.found(trouble, record.getMessage(), is_fatal=False)


@dataclass(frozen=True)
class Check:
    """A row of what `slime doctor` looks at.

    Attributes:
        name: of its line.
        function: (case, look); raises `LeftOut` where it has nothing to look at.
        trouble: what an error is that nothing else tells.
        after: checks that must have found nothing fatal, and must not have been left out.
        without_flags: can be made where the flags are wrong.
    """

    name: str
    function: Callable[[CheckedRun, Look], None]
    trouble: Trouble
    after: tuple[str, ...] = ()
    without_flags: bool = False
