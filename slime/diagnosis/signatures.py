"""Find known troubles in the logs and the error of a run by the signatures in data/troubles.toml.

A signature holds the words of the library that reports a trouble, and the place where they appear:
the last line of a traceback, a log line such as NCCL's, or the first line of slime's own errors. So
printed output of a user's function matches no signature.
"""

from __future__ import annotations

import enum
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

from slime.diagnosis.reading import KINDS, TextLine, TextSource
from slime.diagnosis.remedies import REMEDIES, Flags
from slime.diagnosis.troubles import SIGNATURE_TABLES, TROUBLES, Trouble


class Level(enum.IntEnum):
    """Distance of a trouble from the cause of a run's end; lower levels are reported first."""

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
#: Form of a signature → regular expression of the text before its words in the line.
_BEFORE = {
    "raised": r"(?:\[[^\]]{1,80}\]:? ?)*(?:why: )?(?:[A-Za-z_]\w*\.)*",
    "logged": rf"\s*{_PREFIX}",
    "error": rf"{_PREFIX}(?:\w+: )*",
}


@dataclass(frozen=True)
class Signature:
    """How one trouble is recognised; data/troubles.toml describes the fields.

    Attributes:
        patterns: one of them matches from the start of a line that reports the trouble.
        exact: returns remedies with the run's values; if it returns [], the trouble's own apply.
    """

    trouble: Trouble
    patterns: tuple[re.Pattern[str], ...] = field(repr=False)
    form: str
    level: Level
    kinds: tuple[str, ...]
    context: re.Pattern[str] | None
    is_survived: bool
    exact: Callable[[Flags], list[str]]

    @classmethod
    def from_table(
        cls,
        *,
        trouble: str,
        words: str | list[str],
        form: str = "raised",
        level: str = "cause",
        kinds: Sequence[str] = (),
        context: str = "",
        is_survived: bool = False,
        exact: str = "",
    ) -> Signature:
        if not KINDS.issuperset(kinds):
            raise ValueError(f"signature of {trouble}: unknown kinds in {kinds}")
        return cls(
            TROUBLES[trouble],
            tuple(
                re.compile(f"{_BEFORE[form]}(?:{one})")
                for one in ([words] if isinstance(words, str) else words)
            ),
            form,
            Level[level.upper().replace("-", "_")],
            tuple(kinds),
            re.compile(context) if context else None,
            is_survived,
            REMEDIES[exact] if exact else lambda flags: [],
        )

    def fits(
        self, source: TextSource, line: TextLine, before: Sequence[str], is_raised: bool
    ) -> bool:
        """Tell whether a line with the texts ``before`` it reports the trouble."""
        if self.kinds and source.kind not in self.kinds:
            return False
        if self.form == "raised" and not is_raised:
            return False
        if self.form == "error" and source.kind not in ("crash", "driver"):
            return False
        if not any(pattern.match(line.text) for pattern in self.patterns):
            return False
        return self.context is None or any(self.context.search(text) for text in before)


SIGNATURES: tuple[Signature, ...] = tuple(
    Signature.from_table(**table) for table in SIGNATURE_TABLES
)


@dataclass(frozen=True)
class Seen:
    """A match of a signature in a line of a source."""

    signature: Signature
    source: TextSource
    line: TextLine


#: Number of lines before a match that are searched for its context.
_CONTEXT_LINES = 120
_STAMP = re.compile(r"^\[?(\d{4}-\d\d-\d\d \d\d:\d\d:\d\d)")
#: INFO and DEBUG lines of slime's logs report no trouble.
_CALM = re.compile(r"^(?:\d{4}-\d\d-\d\d )?\d\d:\d\d:\d\d[.,]\d+ (?:INFO|DEBUG) ")
#: Every line that matches a signature has one of these words; other lines are skipped for speed.
_ALARMING = re.compile(
    r"[Ee]rror|[Ee]xception|[Ff]ailed|Fatal|time(?:d )?out|killed|Refused|AddrInUse"
)


def find_signatures(source: TextSource, since: str = "") -> Iterator[Seen]:
    """Find the signatures in a source; each line counts for the first signature that matches.

    Args:
        since: "2026-11-23 06:40:11": lines with an earlier timestamp belong to an earlier launch
            and are skipped. "" skips none.
    """
    texts = [line.text for line in source.lines]
    is_error = source.kind in ("crash", "driver")
    stamp = ""
    previous = ""
    for index, line in enumerate(source.lines):
        text = line.text
        if found := _STAMP.match(text):
            stamp = found[1]
        # the last line of a traceback follows an indented line
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
