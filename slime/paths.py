"""Path patterns with a rollout's number, such as ``dumps/{rollout_id:04d}.pt``: checked at launch,
filled in to write a file, and matched to find it again.

The syntax is that of `str.format`: ``{rollout_id}`` with any format of integers, ``{{`` and ``}}``
for literal braces. For an evaluation, the field becomes ``eval_`` and the number of the last
rollout trained on before it, in the same format, or ``eval_start`` before any training.

>>> [str(fill("dumps/{rollout_id:04d}.pt", id)) for id in (12, Evaluation(12), Evaluation(None))]
['dumps/0012.pt', 'dumps/eval_0012.pt', 'dumps/eval_start.pt']
"""

from __future__ import annotations

import glob
import re
import string
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from slime.errors import UserError

ROLLOUT = "rollout_id"
RANK = "rank"
_OF_STEP = ("role", ROLLOUT, "step_id")
#: Flag that takes a pattern → the fields that the pattern may have.
FIELDS: dict[str, tuple[str, ...]] = {
    "save_debug_rollout_data": (ROLLOUT,),
    "load_debug_rollout_data": (ROLLOUT,),
    "save_debug_train_data": (ROLLOUT, RANK),
    "save_hf": (ROLLOUT,),
    "ci_save_grad_norm": _OF_STEP,
    "ci_load_grad_norm": _OF_STEP,
}
#: At most so many rollouts' paths are compared at launch.
_MAX_COMPARED = 1000


@dataclass(frozen=True)
class Evaluation:
    """The evaluation after a rollout; ``after`` is None before any training."""

    after: int | None

    def __format__(self, spec: str) -> str:
        return "eval_start" if self.after is None else "eval_" + format(self.after, spec)

    def __str__(self) -> str:
        return format(self)

    __repr__ = __str__


def fill(pattern: str, rollout_id: int | Evaluation, step_id: int = 0, role: str = "actor") -> Path:
    """Return the path of a rollout, or of one of its optimizer steps.

    Raises:
        KeyError, IndexError, ValueError: the pattern is one that `check` refuses.
    """
    # rank 0 writes one file for all ranks
    return Path(pattern.format(**{ROLLOUT: rollout_id, RANK: 0, "step_id": step_id, "role": role}))


def check(
    pattern: str, option: str, *, fields: Sequence[str] = (ROLLOUT,), num_rollout: int = 1
) -> None:
    """Check that a pattern can be filled in, and gives each rollout of the run its own path.

    Args:
        option: the flag, for the error.
        fields: the fields that the pattern may have.
        num_rollout: length of the run; 1 if it is not known.
    Raises:
        UserError: says what is wrong with the pattern.
    """
    named = " and ".join(f"{{{name}}}" for name in fields)
    allowed = f"the only field is {named}" if len(fields) == 1 else f"the fields are {named}"
    fix = "write it like {rollout_id} or {rollout_id:04d}, and {{ and }} for braces that are meant"
    try:
        unknown = [name for name in _fields(pattern) if name not in fields]
        if unknown:
            paths = []
        else:
            paths = [str(fill(pattern, i)) for i in range(max(1, min(num_rollout, _MAX_COMPARED)))]
        why = f"; there is no {{{unknown[0]}}}" if unknown else ""
        if not unknown:
            fill(pattern, Evaluation(0))
            why = "; this one makes a null character" if any("\0" in path for path in paths) else ""
    except (KeyError, IndexError, ValueError) as error:
        why = f"; {type(error).__name__}: {error}"
    if why:
        raise UserError(f"{option} {pattern} cannot be filled in", why=allowed + why, fix=fix)
    if len(set(paths)) < len(paths):
        same = next(i for i, path in enumerate(paths) if path in paths[:i])
        raise UserError(
            f"{option} {pattern} has no {{rollout_id}} in it"
            if len(set(paths)) == 1
            else f"{option} {pattern} gives rollouts {paths.index(paths[same])} and {same} the "
            "same file",
            why="one would write over the other",
            fix="put {rollout_id} into the name, e.g. dump_{rollout_id}.pt",
        )


def literal(path: str) -> str:
    """Return the pattern of exactly this path: braces are escaped."""
    return path.replace("{", "{{").replace("}", "}}")


def names_rollout(pattern: str) -> bool:
    """Tell whether each rollout has a path of its own."""
    return ROLLOUT in _fields(pattern)


def with_rollout(pattern: str) -> str:
    """Return the pattern with the rollout in the file's name.

    >>> with_rollout("dumps/data.pt"), with_rollout("d.d/data")
    ('dumps/data_{rollout_id}.pt', 'd.d/data_{rollout_id}')
    """
    folder, slash, name = pattern.rpartition("/")
    suffix = Path(name).suffix
    return f"{folder}{slash}{name.removesuffix(suffix)}_{{{ROLLOUT}}}{suffix}"


def has_fields(pattern: str) -> bool:
    """Tell whether a pattern has fields, or an unmatched brace."""
    try:
        return any(True for _ in _fields(pattern))
    except ValueError:  # an unmatched brace
        return True


def _fields(pattern: str) -> Iterator[str]:
    """Yield the names of the fields, including fields inside format specs."""
    for _, name, spec, _ in string.Formatter().parse(pattern):
        if name is not None:
            yield name
            yield from _fields(spec or "")


def fixed_folder(pattern: str) -> Path:
    """Return the folder that contains the paths of all rollouts; a path without fields is returned.

    >>> str(fixed_folder("exports/run1_{rollout_id}/model"))
    'exports'
    """
    before = ""
    is_whole = True
    for text, name, _, _ in string.Formatter().parse(pattern):
        before += text
        if name is not None:
            is_whole = False
            break
    return Path(before) if is_whole else Path(before + "x").parent


def found(pattern: str) -> list[tuple[Path, int | None]]:
    """Return the existing paths of rollouts, without evaluations, sorted by rollout; its number is
    None if the pattern has no ``{rollout_id}``.

    A path matches if the pattern, filled in with the number read from it, gives the same path. So
    every format of integers is recognised.
    """
    pattern = str(Path(pattern))
    wanted = ""
    texts = ""
    for text, name, _, _ in string.Formatter().parse(pattern):
        wanted += glob.escape(text) + ("*" if name is not None else "")
        texts += re.escape(text) + ("(.*)" if name == ROLLOUT else ".*" if name is not None else "")
    matcher = re.compile(texts, re.DOTALL)
    there = list[tuple[Path, int | None]]()
    for path in map(Path, glob.glob(wanted)):
        match = matcher.fullmatch(str(path))
        if match is None or not match.groups():
            there += [] if match is None else [(path, None)]
            continue
        number = next(
            (i for i in _numbers(match.group(1)) if str(fill(pattern, i)) == str(path)), None
        )
        there += [] if number is None else [(path, number)]
    return sorted(there, key=lambda entry: (entry[1] or 0, entry[0]))


def _numbers(text: str) -> Iterator[int]:
    """Yield the numbers that a text may mean: decimal with signs, fill characters or separators, or
    in another base."""
    if digits := re.sub(r"\D", "", text):
        yield int(digits)
    for base in (16, 8, 2):
        try:
            yield int(text, base)
        except ValueError:
            continue
