"""`slime report`: write a run's report.html."""

from __future__ import annotations

import argparse

from slime.observe.report import write_report


def main(argv: list[str]) -> int:
    """`slime report`."""
    parser = argparse.ArgumentParser(prog="slime report", description="Write a run's report.html.", allow_abbrev=False)
    parser.add_argument("run_dir", help="a run folder, e.g. outputs/demo")
    parser.add_argument("--output", help="where to write; by default RUN_DIR/report.html")
    arguments = parser.parse_args(argv)
    print(write_report(arguments.run_dir, arguments.output))
    return 0
