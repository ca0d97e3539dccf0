"""`slime explain`: how a run ended, the likeliest cause, and what to do, from its folder.

slime explain outputs/sums
slime explain outputs/sums --json                 the same for a program

The exit status is 0 where nothing is wrong, and 1 where something was found.
"""

from __future__ import annotations

import textwrap
from pathlib import Path

from slime.cli.arguments import Arguments
from slime.diagnosis.explain import Explanation, explain
from slime.diagnosis.troubles import Finding
from slime.files import indented_json
from slime.redact import redact_text

_WIDTH = 116


def main(argv: list[str]) -> int:
    """Print the explanation; returns the exit status.

    Raises:
        UserError: the folder is not a run folder.
    """
    parser = Arguments("slime explain", __doc__)
    parser.add_argument(
        "run_dir", help="a run folder, outputs/<run>; it may be running, or have ended in any way"
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    arguments = parser.parse_args(argv)
    found = explain(Path(arguments.run_dir))
    answer = indented_json(found.as_json()).decode() if arguments.json else as_text(found)
    print(redact_text(answer))
    return 1 if found.findings else 0


def as_text(found: Explanation) -> str:
    """Format an explanation for the terminal."""
    stage = f", stage {found.stage}" if found.stage else ""
    step = f" at step {found.step:g}" if found.step is not None else ", before its first step"
    lines = [f"{found.folder}{stage}: {_STATES.get(found.state, found.state)}{step}"]
    if not found.findings:
        lines += ["", "Nothing is wrong, as far as its folder tells."]
    for number, finding in enumerate(found.findings, 1):
        lines += ["", *_told(number, finding)]
    lines += ["", f"checkpoint: {found.checkpoint or 'none that is whole'}"]
    lines += [f"next: {found.next}"] if found.next else []
    lines += [f"note: {note}" for note in found.notes]
    return "\n".join(lines)


_STATES = {
    "running": "it runs",
    "killed": "the driver process died without logging an error",
    "unknown": "how it stands is not known",
}


def _told(number: int, finding: Finding) -> list[str]:
    kind = "" if finding.is_fatal else " (did not end the run)"
    lines = [f"{number}. {finding.trouble.symptom}{kind}   [{finding.trouble.name}]"]
    lines += _wrapped(f"   {finding.source}: " if finding.source else "   ", finding.detail)
    lines += _wrapped("   why: ", finding.trouble.cause)
    for index, remedy in enumerate(finding.advice):
        lines += _wrapped("   try: " if index == 0 else "        ", remedy)
    return lines


def _wrapped(before: str, text: str) -> list[str]:
    return textwrap.wrap(
        f"{before}{text}",
        _WIDTH,
        subsequent_indent=" " * 8,
        break_long_words=False,
        break_on_hyphens=False,
    )
