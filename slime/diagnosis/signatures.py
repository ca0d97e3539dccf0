"""How known troubles show in what a run leaves behind, and the search for them.

A signature has the words of the library that reports a trouble, at the place where it reports
them: the last line of a traceback, a line of NCCL's own, the first line of our errors. So the
output of a user's function sets nothing off. The signatures are in data/troubles.toml.
"""

from __future__ import annotations

import enum
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from slime.diagnosis.reading import TextLine, TextSource
from slime.diagnosis.remedies import REMEDIES, Flags
from slime.diagnosis.troubles import DATA, TROUBLES, Trouble


class Level(enum.IntEnum):
    """How far a trouble is from the cause of a run's end: the lowest level is told first."""

    CAUSE = 0
    TIME_OUT = 1
    DEATH = 2
    LOST = 3
    RUN = 4


#: 2026-11-23 06:40:11.132 ERROR   driver  session: …; [2025-03-08 02:04:48 TP0] …; [rank0]:[E1218 …
#: a.cpp:629] …
_PREFIX = (
    r"(?:\([\w.:= -]{1,60}\) ?|\[[^\]]{1,120}\]:? ?|\d{4}-\d\d-\d\d \d\d:\d\d:\d\d[.,]\d+ "
    r"(?:WARNING|ERROR|CRITICAL) +"
    r"\S+(?: \d+)?  [\w.]+: |error: |ERROR: +|what\(\): +|Uncaught exception: |\w+\.cc:\d+: )*"
)
#: Form of a signature → regular expression of the text before its words.
_BEFORE = {
    "raised": r"(?:\[[^\]]{1,80}\]:? ?)*(?:why: )?(?:[A-Za-z_]\w*\.)*",
    "said": rf"\s*{_PREFIX}",
    "error": _PREFIX,
}


def _no_remedies(flags: Flags) -> list[str]:
    return []


@dataclass(frozen=True)
class Signature:
    """How one trouble is recognised; data/troubles.toml describes the fields.

    Attributes:
        pattern: matches a whole line that reports the trouble.
        exact: gives remedies with this run's values; none: those of the trouble.
    """

    trouble: Trouble
    pattern: re.Pattern[str] = field(repr=False)
    form: str
    level: Level
    kinds: tuple[str, ...]
    context: re.Pattern[str] | None
    is_survived: bool
    exact: Callable[[Flags], list[str]]

    @staticmethod
    def of(fields: dict[str, Any]) -> Signature:
        words = fields["words"]
        if isinstance(words, list):
            words = "|".join(words)
        form = fields.get("form", "raised")
        context = fields.get("context")
        return Signature(
            TROUBLES[fields["trouble"]],
            re.compile(f"{_BEFORE[form]}(?:{words})"),
            form,
            Level[fields.get("level", "cause").upper().replace("-", "_")],
            tuple(fields.get("kinds", ())),
            re.compile(context) if context else None,
            fields.get("is_survived", False),
            REMEDIES[fields["exact"]] if "exact" in fields else _no_remedies,
        )

    def fits(
        self, source: TextSource, line: TextLine, before: Sequence[str], is_raised: bool
    ) -> bool:
        """Whether a line, given those before it, reports the trouble."""
        if self.kinds and source.kind not in self.kinds:
            return False
        if self.form == "raised" and not is_raised:
            return False
        if self.form == "error" and source.kind not in ("crash", "driver"):
            return False
        if self.pattern.match(line.text) is None:
            return False
        return self.context is None or any(self.context.search(text) for text in before)


SIGNATURES: tuple[Signature, ...] = tuple(Signature.of(fields) for fields in DATA["signature"])


@dataclass(frozen=True)
class Seen:
    """A signature in a source."""

    signature: Signature
    source: TextSource
    line: TextLine


#: How many lines before an exception may be the context of it.
_CONTEXT_LINES = 120
_STAMP = re.compile(r"^\[?(\d{4}-\d\d-\d\d \d\d:\d\d:\d\d)")
#: INFO and DEBUG lines of ours report no trouble.
_CALM = re.compile(r"^(?:\d{4}-\d\d-\d\d )?\d\d:\d\d:\d\d[.,]\d+ (?:INFO|DEBUG) ")
#: Every line that a signature fits has one of these; most lines of a log need no closer look.
_ALARMING = re.compile(
    r"[Ee]rror|[Ee]xception|[Ff]ailed|Fatal|time(?:d )?out|killed|Refused|AddrInUse"
)


def look(source: TextSource, since: str = "") -> Iterator[Seen]:
    """Find the signatures in a source; each line counts for the first that fits.

    Args:
        since: "2026-11-23 06:40:11": lines that the log stamps with an earlier time belong to an
            earlier launch.
    """
    texts = [line.text for line in source.lines]
    is_error = source.kind in ("crash", "driver")
    stamp = ""
    previous = ""
    for index, line in enumerate(source.lines):
        text = line.text
        if found := _STAMP.match(text):
            stamp = found[1]
        # a traceback's last line follows an indented one, in a process's log as in the error that
        # quotes it
        is_raised = source.kind == "crash" or (previous[:1].isspace() and not text[:1].isspace())
        previous = text if text.strip() else previous
        if not text.strip() or _CALM.match(text) or (since and stamp and stamp < since):
            continue
        if not is_error and not _ALARMING.search(text):
            continue
        before = texts[max(0, index - _CONTEXT_LINES) : index]
        for signature in SIGNATURES:
            if signature.fits(source, line, before, is_raised):
                yield Seen(signature, source, line)
                break
