"""What is wrong with rows of data: collected over all of them, reported once, with a count and the first place."""

from __future__ import annotations

import difflib
from collections.abc import Iterable
from dataclasses import dataclass, field

from slime.errors import UserError


class RowProblem(Exception):
    """One row cannot be used. Raised and caught in `slime.prompts`; users see the `UserError` made from it.

    Args:
        kind: completes "3 of 100 rows …"; problems of one kind are counted together.
        detail: about this row (a parse error, the type that was found).
        fix: what to do, the same for all of one kind.
    """

    def __init__(self, kind: str, detail: str = "", fix: str = "") -> None:
        super().__init__(kind, detail, fix)
        self.kind, self.detail, self.fix = kind, detail, fix

    def at(self, where: str) -> UserError:
        """The error for a single row, when rows are streamed."""
        return UserError(f"{where}: rows here {self.kind}", why=self.detail, fix=self.fix)


#: End of a flag → what data sets usually call its column.
_USUAL = {
    "input-key": ("prompt", "question", "problem", "messages", "instruction", "query", "text", "input"),
    "label-key": ("answer", "label", "solution", "target", "ground_truth", "final_answer"),
    "response-key": ("response", "completion", "output", "generated_text"),
}


def missing_key(key: str, flag: str, row_keys: Iterable[str]) -> RowProblem:
    """A row without the column that ``flag`` names; tells the keys there are, and one of a like or usual name."""
    keys = [str(k) for k in row_keys]
    usual = [name for end, names in _USUAL.items() if flag.endswith(end) for name in names if name in keys]
    near = difflib.get_close_matches(key, keys, n=1, cutoff=0.5) or usual
    if near:
        fix = f"pass {flag} {near[0]}"
    else:
        fix = f"pass {flag} with the column that is meant, or leave it out where there is none"
    return RowProblem(f"have no key '{key}'", f"the keys there are: {', '.join(keys) or 'none'}", fix)


@dataclass
class Problems:
    """Problems by kind: how many, and the first.

    Example:
        >>> problems = Problems()
        >>> problems.add("a.jsonl:3", RowProblem("are no valid JSON", "unexpected character"))
        >>> print(problems.error("a.jsonl", 100))
        a.jsonl: 1 of 100 rows are no valid JSON (first: a.jsonl:3)
          why: unexpected character
    """

    found: dict[str, tuple[int, str, RowProblem]] = field(default_factory=dict)

    def add(self, where: str, problem: RowProblem, count: int = 1) -> None:
        known, first_where, first = self.found.get(problem.kind, (0, where, problem))
        self.found[problem.kind] = (known + count, first_where, first)

    def merge(self, other: Problems) -> None:
        for count, where, problem in other.found.values():
            self.add(where, problem, count)

    def error(self, path: str, num_rows: int, *, has_more: bool = False) -> UserError:
        """One error for all kinds, the most frequent first.

        Args:
            num_rows: how many were looked at; ``has_more``: and there are others.
        """
        ranked = sorted(self.found.values(), key=lambda entry: -entry[0])
        rows = f"the first {num_rows} rows" if has_more else f"{num_rows} rows"
        said = "; ".join(f"{count} of {rows} {p.kind} (first: {where})" for count, where, p in ranked)
        first = ranked[0][2]
        return UserError(f"{path}: {said}", why=first.detail, fix=first.fix)
