"""Problems with rows of data: collected over all rows, and reported once with a count and the first
place."""

from __future__ import annotations

import difflib
import shlex
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from slime.errors import UserError
from slime.prompts.conversation import ConversationError

#: `RowProblem.refuse_at` of a remark, which never stops a launch.
NEVER = 2.0
#: Most rows of one kind that an error names.
_MAX_LISTED = 200


class RowProblem(Exception):
    """A problem of one row. The code that reads and checks rows raises and catches it; users see a
    `UserError` or a warning made from it.

    Args:
        kind: completes "3 of 100 rows …"; problems of one kind are counted together.
        detail: about this row (a parse error, the type that was found).
        fix: what to do, the same for all of one kind.
        refuse_at: share of rows at which the launch is refused; below it there is a warning. 0: one
            row is enough; 1: every row must have the problem; above 1: never refused.
        is_told: warn if the launch is not refused.
        lists: name all rows of this kind, not only the first.
    """

    def __init__(
        self,
        kind: str,
        detail: str = "",
        fix: str = "",
        *,
        refuse_at: float = 0.0,
        is_told: bool = True,
        lists: bool = False,
    ) -> None:
        super().__init__(kind, detail, fix)
        self.kind = kind
        self.detail = detail
        self.fix = fix
        self.refuse_at = refuse_at
        self.is_told = is_told
        self.lists = lists

    @staticmethod
    def of(error: ConversationError) -> RowProblem:
        """Return the problem of a row whose conversation cannot be understood."""
        detail = f"{error.where}: {error.detail}" if error.detail else error.where
        return RowProblem(f"have {error.kind}", detail, error.fix)

    def at(self, where: str) -> UserError:
        """Return the error for a single row, when rows are streamed."""
        return UserError(f"{where}: rows here {self.kind}", why=self.detail, fix=self.fix)


def remark(kind: str, detail: str = "", fix: str = "") -> RowProblem:
    """Make a problem that never refuses the launch, with the arguments of `RowProblem`."""
    return RowProblem(kind, detail, fix, refuse_at=NEVER)


#: End of a flag, or of a key of --eval-config → what data sets usually call its column.
_USUAL = {
    "input-key": ("prompt", "question", "problem", "messages", "instruction", "query", "text",
                  "input"),
    "label-key": ("answer", "label", "solution", "target", "ground_truth", "final_answer"),
    "response-key": ("response", "completion", "output", "generated_text"),
}  # fmt: skip

#: Ends of flags that may be left out, because rows need no such column.
_OPTIONAL = ("label-key", "metadata-key", "tool-key")


def missing_key(key: str, flag: str, row_keys: Iterable[str]) -> RowProblem:
    """Make the problem of a row without the column that ``flag`` names. List the row's keys, and
    suggest one with a similar or usual name."""
    return missing_keys({flag: key}, row_keys)


def missing_keys(named: Mapping[str, str], row_keys: Iterable[str]) -> RowProblem:
    """Make one problem of a row without several columns.

    Args:
        named: flag → the column that it names, which the row has not.
    """
    keys = [str(key) for key in row_keys]
    kind = " and ".join(f"no key '{key}'" for key in named.values())
    shown = ", ".join(name if name == name.strip() and name else repr(name) for name in keys)
    fixes = [_column_fix(key, flag, keys) for flag, key in named.items()]
    return RowProblem(f"have {kind}", f"its keys are: {shown or 'none'}", "; ".join(fixes))


def usual_column(flag: str, keys: Iterable[str]) -> str | None:
    """Return the column among ``keys`` that data sets usually have for ``flag``, if any."""
    usual = next((names for end, names in _USUAL.items() if _ends(flag, end)), ())
    there = set(keys)
    return next((name for name in usual if name in there), None)


def _column_fix(key: str, flag: str, keys: list[str]) -> str:
    if key.partition(".")[0] in keys:
        return f"write the value of '{key}' into a column of its own: {flag} names whole columns"
    near = difflib.get_close_matches(key, keys, n=1)
    if name := near[0] if near else usual_column(flag, keys):
        return f"pass {flag} {shlex.quote(name)}"
    fix = f"pass {flag} with an existing column"
    return f"{fix}, or leave it out if there is none" if _ends(flag, _OPTIONAL) else fix


def _ends(flag: str, end: str | tuple[str, ...]) -> bool:
    return flag.replace("_", "-").endswith(end)


@dataclass
class Problems:
    """Problems by kind: how many, and the first.

    Example:
        >>> problems = Problems()
        >>> problems.add("a.jsonl:3", RowProblem("are not valid JSON", "unexpected character"))
        >>> print(problems.error("a.jsonl", 100))
        a.jsonl: 1 of 100 rows are not valid JSON (first: a.jsonl:3)
          why: unexpected character
    """

    found: dict[str, tuple[int, str, RowProblem]] = field(default_factory=dict)
    listed: dict[str, list[str]] = field(default_factory=dict)
    """For kinds that list all rows: kind → each row and its detail."""

    def add(self, where: str, problem: RowProblem) -> None:
        self._count(where, problem, 1)
        if problem.lists:
            self.listed.setdefault(problem.kind, []).append(f"{where}: {problem.detail}")

    def _count(self, where: str, problem: RowProblem, count: int) -> None:
        known, first_where, first = self.found.get(problem.kind, (0, where, problem))
        self.found[problem.kind] = (known + count, first_where, first)

    def merge(self, other: Problems) -> None:
        for count, where, problem in other.found.values():
            self._count(where, problem, count)
        for kind, places in other.listed.items():
            self.listed.setdefault(kind, []).extend(places)

    def refused(self, num_rows: int) -> Problems:
        """Return the kinds that refuse the launch, if ``num_rows`` rows were checked."""
        found = self.found.items()
        refused = {kind: one for kind, one in found if one[0] >= one[2].refuse_at * num_rows}
        return Problems(refused, self.listed)

    def tolerated(self, num_rows: int) -> Problems:
        """Return the other kinds, which only give a warning."""
        refused = self.refused(num_rows).found
        found = self.found.items()
        return Problems(
            {kind: one for kind, one in found if kind not in refused and one[2].is_told}
        )

    def told(self, num_rows: int, *, has_more: bool = False) -> str:
        """Return all kinds with count and first place, the most frequent first.

        Args:
            num_rows: how many rows were checked.
            has_more: the data has further rows.
        """
        rows = f"the {num_rows} rows checked" if has_more else f"{num_rows} rows"
        return "; ".join(
            f"{count} of {rows} {p.kind} (first: {where})" for count, where, p in self._ranked()
        )

    def error(self, path: str, num_rows: int, *, has_more: bool = False) -> UserError:
        """Return one error for all kinds; see `told`."""
        ranked = self._ranked()
        details = []
        for _, where, p in ranked:
            if p.detail and p.kind in self.listed:
                details.append("\n    ".join(self.listed[p.kind][:_MAX_LISTED]))
            elif p.detail:
                details.append(f"{where}: {p.detail}" if len(ranked) > 1 else p.detail)
        fixes = dict.fromkeys(p.fix for _, _, p in ranked if p.fix)
        return UserError(
            f"{path}: {self.told(num_rows, has_more=has_more)}",
            why="; ".join(details),
            fix="; ".join(fixes),
        )

    def warnings(self, path: str, num_rows: int, *, has_more: bool = False) -> list[str]:
        """Return one line per kind; see `told`."""
        said = []
        for entry in self._ranked():
            problem = entry[2]
            one = Problems({problem.kind: entry}).told(num_rows, has_more=has_more)
            said.append(
                "; ".join(part for part in (f"{path}: {one}", problem.detail, problem.fix) if part)
            )
        return said

    def _ranked(self) -> list[tuple[int, str, RowProblem]]:
        return sorted(self.found.values(), key=lambda entry: -entry[0])
