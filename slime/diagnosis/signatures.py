"""How known troubles show in what a run leaves behind: a `Trouble`, and the words by which it is
told from others.

The words are those of the libraries that say them, at the place where they say them: the last line
of a traceback, a line of NCCL's own, our errors' first line. So the text of a sample that a user's
function prints sets nothing off.
"""

from __future__ import annotations

import enum
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from slime.diagnosis.reading import TextLine, TextSource
from slime.diagnosis.record import Trouble

#: Flags of a run by name with underscores, as config.json has them; what is not set may be missing.
Flags = Mapping[str, Any]


_OPTION = re.compile(r"--([a-z][a-z-]*[a-z])")


def now(flags: Flags, name: str) -> str:
    """What a flag is in this run, in brackets: " (now 0.8)"; " (not set)"."""
    value = flags.get(name)
    return " (not set)" if value is None else f" (now {value})"


def flag_in(words: str) -> str:
    """``rollout_batch_size`` of "a smaller --rollout-batch-size"."""
    found = _OPTION.search(words)
    assert found is not None, words
    return found[1].replace("-", "_")


def with_value(flags: Flags, words: str) -> str:
    """The same words, with what their flag is in this run behind it."""
    return _OPTION.sub(lambda found: found[0] + now(flags, flag_in(found[0])), words, count=1)


class Level(enum.IntEnum):
    """How far from the cause of a run's end a trouble is: the first of them is told first."""

    CAUSE = 0
    TIME_OUT = 1
    DEATH = 2
    LOST = 3
    RUN = 4


class Form(enum.Enum):
    """Where a trouble's words stand."""

    #: The last line of a traceback, with the exception's name.
    RAISED = enum.auto()
    #: At the beginning of any line, behind what loggers put there.
    SAID = enum.auto()
    #: The first line of the error that ended the run (or of one that the driver has logged).
    ERROR = enum.auto()


@dataclass(frozen=True)
class Signature:
    """How one trouble is recognised.

    Attributes:
        words: searched from the beginning of the message: behind the exception's name, the logger's
            prefix, "error: ".
        kinds: of sources in which it counts; empty: all.
        context: must be in one of the lines before.
        is_survived: of a run that goes on, or has finished, it tells nothing: the run has dealt
            with it.
        exact: remedies with this run's values; () for those of the trouble. Is given the flags and
            the match.
    """

    trouble: Trouble
    words: str
    form: Form = Form.RAISED
    level: Level = Level.CAUSE
    kinds: tuple[str, ...] = ()
    context: str = ""
    is_survived: bool = False
    exact: Callable[[Flags, re.Match[str]], tuple[str, ...]] = lambda flags, match: ()

    def find(
        self, source: TextSource, line: TextLine, before: Sequence[str], is_raised: bool
    ) -> re.Match[str] | None:
        """The match in a line, given those before it, if it stands where such words stand."""
        if self.kinds and source.kind not in self.kinds:
            return None
        if self.form is Form.RAISED and not is_raised:
            return None
        if self.form is Form.ERROR and source.kind not in ("crash", "driver"):
            return None
        match = _compiled(self.words, self.form).match(line.text)
        if match is None or not self.context:
            return match
        context = re.compile(self.context)
        return match if any(context.search(text) for text in before) else None


#: 2026-11-23 06:40:11.132 ERROR   driver  session: …; [2025-03-08 02:04:48 TP0] …; [rank0]:[E1218 …
#: a.cpp:629] …
_PREFIX = (
    r"(?:\([\w.:= -]{1,60}\) ?|\[[^\]]{1,120}\]:? ?|\d{4}-\d\d-\d\d \d\d:\d\d:\d\d[.,]\d+ "
    r"(?:WARNING|ERROR|CRITICAL) +"
    r"\S+(?: \d+)?  [\w.]+: |error: |ERROR: +|what\(\): +|Uncaught exception: |\w+\.cc:\d+: )*"
)
_RAISED = r"(?:\[[^\]]{1,80}\]:? ?)*(?:why: )?(?:[A-Za-z_]\w*\.)*"
_compiled_words: dict[tuple[str, Form], re.Pattern[str]] = {}


def _compiled(words: str, form: Form) -> re.Pattern[str]:
    found = _compiled_words.get((words, form))
    if found is None:
        before = {Form.RAISED: _RAISED, Form.SAID: rf"\s*{_PREFIX}", Form.ERROR: _PREFIX}[form]
        found = _compiled_words[words, form] = re.compile(f"{before}(?:{words})")
    return found


@dataclass(frozen=True)
class Seen:
    """A signature in a source."""

    signature: Signature
    source: TextSource
    line: TextLine
    match: re.Match[str]


#: How many lines before an exception may be the context of it.
_CONTEXT_LINES = 120
_STAMP = re.compile(r"^\[?(\d{4}-\d\d-\d\d \d\d:\d\d:\d\d)")
#: Lines that tell of nothing wrong: our INFO and DEBUG.
_CALM = re.compile(r"^(?:\d{4}-\d\d-\d\d )?\d\d:\d\d:\d\d[.,]\d+ (?:INFO|DEBUG) ")
#: What every line of a log has of which a signature's words are a part: most lines need no closer
#: look.
_ALARMING = re.compile(
    r"[Ee]rror|[Ee]xception|[Ff]ailed|Fatal|time(?:d )?out|killed|Refused|AddrInUse"
)


def look(source: TextSource, signatures: Sequence[Signature], since: str = "") -> Iterator[Seen]:
    """The signatures in a source, each line of it under the first that fits.

    Args:
        since: "2026-11-23 06:40:11": lines under an earlier time, as far as the log tells, are of
            an earlier launch.
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
        for signature in signatures:
            match = signature.find(source, line, before, is_raised)
            if match is not None:
                yield Seen(signature, source, line, match)
                break
