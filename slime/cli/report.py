"""`slime report`: a run's report.html, or several runs on one page."""

from __future__ import annotations

from pathlib import Path

from slime.cli.arguments import Arguments
from slime.observe.run_folder import check_no_run_writes
from slime.page.report import write_comparison, write_report


def main(argv: list[str]) -> int:
    """Write the page and print its path; returns the exit status."""
    about = "Write a run's report.html, or with several runs one page that compares them."
    parser = Arguments("slime report", about)
    parser.add_argument("run_dir", nargs="+", help="a run folder, e.g. outputs/demo")
    parser.add_argument(
        "--output",
        help="where to write; by default RUN_DIR/report.html, or comparison.html beside them",
    )
    arguments = parser.parse_args(argv)
    if arguments.output:
        check_no_run_writes(Path(arguments.output), "--output")
    first, *others = arguments.run_dir
    if others:
        print(write_comparison(arguments.run_dir, arguments.output))
    else:
        print(write_report(first, arguments.output))
    return 0
