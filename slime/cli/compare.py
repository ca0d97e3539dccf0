"""`slime compare`: judge a run by the ranges that its recipe expects.

slime compare outputs/my-run recipes/qwen3-4b
slime compare outputs/my-run recipes/qwen3-4b/expected-apart.toml

Ends with 0 when every range that the run has reached is kept, and with 1 otherwise. Each range says
whether it was measured, is predicted, or is a bound beyond which something is wrong.
"""

from __future__ import annotations

from pathlib import Path

from slime.cli.arguments import Arguments
from slime.errors import UserError
from slime.observe.expected import comparison, read_expected
from slime.observe.run_data import read_run


def main(argv: list[str]) -> int:
    """Print the table; returns the exit status.

    Raises:
        UserError: there is no such run, stage or file of ranges.
    """
    parser = Arguments("slime compare", __doc__)
    parser.add_argument("run_dir", help="a run folder, outputs/<run>")
    parser.add_argument("recipe", help="a recipe's folder, or a file of ranges")
    parser.add_argument("--stage", help="of a run with several; default: the newest")
    asked = parser.parse_args(argv)
    ranges = read_expected(Path(asked.recipe))
    stages = read_run(Path(asked.run_dir)).stages
    chosen = [one for one in stages if asked.stage in (None, one.name)]
    if not chosen:
        raise UserError(
            f"{asked.run_dir} has no stage {asked.stage or 'yet'}",
            why=f"its stages are: {', '.join(one.name for one in stages) or 'none'}",
        )
    lines, is_right = comparison(chosen[-1], ranges)
    print("\n".join(lines))
    return 0 if is_right else 1
