"""Errors for users: what happened, why, and what to do about it."""

from __future__ import annotations

import difflib
import os
from collections.abc import Callable, Sequence
from pathlib import Path


class UserError(Exception):
    """A mistake or condition that the user can fix. Shown in a few lines without a traceback; exit
    status 2.

    Notes (``error.add_note``) are shown below it, e.g. where the crash folder is. If `several` made
    it, ``errors`` has the single errors.

    Args:
        what: the fact, with the user's own values in it ("no column 'question' in train.jsonl").
        why: what the program knows about the cause ("the columns are: prompt, answer").
        fix: what to do next, as concrete as possible ("pass --input-key prompt").

    Example:
        >>> print(UserError("--load points to an empty directory", fix="pass --hf-checkpoint"))
        --load points to an empty directory
          fix: pass --hf-checkpoint
    """

    exit_status = 2
    errors: tuple[UserError, ...] = ()

    def __init__(self, what: str, why: str = "", fix: str = "") -> None:
        super().__init__(what, why, fix)  # pickling (Ray) restores the error from these
        self.what = what
        self.why = why
        self.fix = fix

    @property
    def in_brief(self) -> str:
        """``what``, followed by ``why`` in brackets if there is one."""
        return f"{self.what} ({self.why})" if self.why else self.what

    def __str__(self) -> str:
        lines = [self.what]
        if self.why:
            lines.append(f"  why: {self.why}")
        if self.fix:
            lines.append(f"  fix: {self.fix}")
        return "\n".join(lines)


def several(errors: Sequence[UserError]) -> UserError:
    """Combine errors into one that lists each once; a single distinct error is returned as it is.

    Example:
        >>> print(several([
        ...     UserError("--num-rollout is required"),
        ...     UserError("--bf16 and --fp32", fix="choose one")]))
        2 errors
          1. --num-rollout is required
          2. --bf16 and --fp32
             fix: choose one
    """
    distinct = list({str(error): error for error in errors}.values())
    if len(distinct) == 1:
        return distinct[0]
    lines = [f"{len(distinct)} errors"]
    for number, error in enumerate(distinct, 1):
        first, *rest = UserError.__str__(error).splitlines()
        notes = getattr(error, "__notes__", ())
        lines += [
            f"  {number}. {first}",
            *(f"   {line}" for line in rest),
            *(f"     {line}" for line in notes),
        ]
    combined = UserError("\n".join(lines))
    combined.errors = tuple(distinct)
    return combined


def is_debugging() -> bool:
    """Tell whether ``SLIME_DEBUG`` is set, to anything but 0: errors have tracebacks, and logs are
    at level DEBUG."""
    return os.environ.get("SLIME_DEBUG", "0") not in ("", "0")


def first_few(names: Sequence[object], most: int = 4, between: str = ", ") -> str:
    """List names for a message, and count those beyond ``most``.

    Example:
        >>> first_few(["a", "b", "c", "d"], 2)
        'a, b and 2 more'
    """
    more = f" and {len(names) - most} more" if len(names) > most else ""
    return between.join(map(str, names[:most])) + more


def a_type(value: object) -> str:
    """Name the type of a value with its article.

    Example:
        >>> a_type(3), a_type("3"), a_type({})
        ('an int', 'a str', 'a dict')
    """
    return with_article(type(value).__name__)


def with_article(name: str) -> str:
    """Put "a" or "an" before the name of a type. A "u" reads as in "unit"."""
    is_vowel = name[:1].lower() in tuple("aeio") or name == "ndarray"
    return f"{'an' if is_vowel else 'a'} {name}"


def contents_of(folder: Path, like: str = "") -> str:
    """List the first names in a folder for a message, those similar to ``like`` before the others;
    "nothing" if there are none."""
    try:
        names = sorted(entry.name for entry in folder.iterdir())
    except OSError:
        names = []
    near = difflib.get_close_matches(like, names)
    names = [*near, *(name for name in names if name not in near)]
    return first_few(names, 10) or "nothing"


def in_place_of(missing: Path) -> str:
    """Return, for a message about a missing path, what its folder has instead."""
    gone = missing
    while not gone.parent.is_dir() and gone.parent != gone:
        gone = gone.parent
    folder = gone.parent
    if gone.is_file():
        return f"{gone} is a file"
    where = "the current folder" if folder == Path() else folder
    there = f"{where} has: {contents_of(folder, like=gone.name)}"
    return there if gone == missing else f"there is no {gone}; {there}"


class RunFailed(UserError):
    """A run cannot continue, and the user made no mistake: one of its processes died or does not
    respond.

    Shown like any `UserError`, but the exit status is 1: a retry of the same command may succeed.
    """

    exit_status = 1


def safe_repr(value: object, show: Callable[[object], str] = repr) -> str:
    """Return the repr of a value (or with ``show`` its str), also of a user's class whose repr
    raises."""
    try:
        return show(value)
    except Exception as error:
        return f"<{type(value).__name__}, whose repr raises {type(error).__name__}>"


def name_and_text(error: BaseException) -> str:
    """Return the class and the message of an error, also of a user's class whose message cannot be
    made.

    Example:
        >>> name_and_text(ValueError("too long"))
        'ValueError: too long'
    """
    try:
        text = str(error)
    except Exception as again:
        text = f"(its text raises {type(again).__name__})"
    return f"{type(error).__name__}: {text}"
