"""`slime doctor FLAGS`: look at machine, model, data, rewards and plan of a run before it starts,
and say all that is wrong at once.

slime doctor --config my.yaml --lr 1e-6      the flags of `slime train`
slime doctor train-async --config my.yaml    those of `slime train-async`
slime doctor --json ...                      for programs
slime doctor --node ...                      on one host of several, before they are joined
slime doctor --round ...                     one round, too: a few answers, one step, a push, and
                                             all weights compared

Without --round it starts, downloads and writes nothing, and needs no GPU. Ends with 0 when nothing
stands in the way of the run, with 1 when something does; what is only worth a look does not count.
"""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Iterator

from slime.cli.arguments import run_flags
from slime.errors import UserError
from slime.files import indented_json

_OPTIONS = ("--json", "--round", "--node")


def main(argv: list[str]) -> int:
    """Print the findings; returns the exit status.

    Raises:
        UserError: no flags were given.
    """
    if any(word in ("--help", "-h") for word in argv):
        print(__doc__)
        return 0
    as_json = "--json" in argv
    with_round = "--round" in argv
    on_node = "--node" in argv
    entry, words = run_flags([word for word in argv if word not in _OPTIONS])
    if not words:
        raise UserError(
            "slime doctor needs the flags of a run", fix="slime doctor --config recipe.yaml …"
        )
    from slime.diagnosis import doctor

    if on_node:  # the run joins a cluster whose address this host may not know yet
        os.environ.setdefault("RAY_ADDRESS", "auto")
    checks = doctor.NODE_CHECKS if on_node else doctor.CHECKS
    with answer_alone():
        report = doctor.examine(words, entry, checks, with_round=with_round)
    answer = doctor.text(report).encode("utf-8", "replace").decode()
    print(indented_json(doctor.as_json(report)).decode() if as_json else answer)
    return int(report.is_fatal)


@contextlib.contextmanager
def answer_alone() -> Iterator[None]:
    """Redirect stdout to stderr in the block, including output of C code and of subprocesses, so
    that output of user functions does not mix with the command's answer."""
    sys.stdout.flush()
    kept = os.dup(1)
    try:
        os.dup2(2, 1)
        with contextlib.redirect_stdout(sys.stderr):
            yield
        if sys.__stdout__ is not None:
            sys.__stdout__.flush()
    finally:
        os.dup2(kept, 1)
        os.close(kept)
