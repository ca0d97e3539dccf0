"""`slime engines`: list the engines of a running run, add one, or remove one.

slime engines outputs/sums                            its engines, their states and requests
slime engines add outputs/sums 10.0.0.7:30000         add an engine that you have started
slime engines remove outputs/sums 10.0.0.7:30000      remove it; it keeps running
slime engines remove outputs/sums engine-1            remove one of the run's own and end it

An added engine gets the weights of the run's next push, and requests from then on. Each push
replaces its weights until it is removed.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from slime.cli.arguments import Arguments
from slime.cluster.command_inbox import send_command

_VERBS = ("add", "remove")


def main(argv: list[str]) -> None:
    """Print the engines of a run, or its answer to the command.

    Raises:
        UserError: the run is not running, or refuses the command.
    """
    verb = argv[0] if argv[:1] and argv[0] in _VERBS else ""
    parser = Arguments(f"slime engines {verb}".rstrip(), __doc__)
    parser.add_argument("run_dir", help="the folder of a running run, outputs/<run>")
    if verb:
        parser.add_argument(
            "engine", help="HOST:PORT of the engine" + (", or its name" if verb == "remove" else "")
        )
        asked = parser.parse_args(argv[1:])
        print(send_command(Path(asked.run_dir), verb, asked.engine)["said"])
        return
    asked = parser.parse_args(argv)
    print("\n".join(_table(send_command(Path(asked.run_dir), "list")["engines"])))


def _table(rows: Sequence[Mapping[str, str]]) -> list[str]:
    lines = [("engine", "state", "requests", "url")]
    lines += [
        (row["name"] or row["kind"], row["state"], row["requests"], row["url"]) for row in rows
    ]
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    return [
        "  ".join(word.ljust(width) for word, width in zip(line, widths, strict=True)).rstrip()
        for line in lines
    ]
