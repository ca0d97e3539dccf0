"""`make test-full`: run every test but those that need a GPU, and record the result in docs/test-report.md.

python tools/test_report.py [pytest arguments]
"""

from __future__ import annotations

import datetime
import os
import platform
import subprocess
import sys
import tempfile
import xml.etree.ElementTree as ElementTree
from collections import Counter
from pathlib import Path

ROOT = Path(__file__).parents[1]
REPORT = ROOT / "docs" / "test-report.md"
_OUTCOMES = ("failure", "error", "skipped")


def main() -> int:
    with tempfile.TemporaryDirectory() as folder:
        results = Path(folder) / "results.xml"
        arguments = sys.argv[1:] or ["-m", "not gpu"]
        done = subprocess.run([sys.executable, "-m", "pytest", f"--junitxml={results}", *arguments], cwd=ROOT)
        if not results.exists():
            return done.returncode or 1
        REPORT.write_text(_page(ElementTree.parse(results).getroot(), arguments))
    print(f"wrote {REPORT.relative_to(ROOT)}")
    return done.returncode


def _page(root: ElementTree.Element, arguments: list[str]) -> str:
    cases = list(root.iter("testcase"))
    seconds = sum(float(suite.get("time", 0)) for suite in root.iter("testsuite"))
    modules = sorted({case.get("classname", "") for case in cases})
    table = {module: Counter(_outcome(c) for c in cases if c.get("classname") == module) for module in modules}
    total = Counter(_outcome(case) for case in cases)
    bad = [case for case in cases if _outcome(case) in ("failure", "error")]
    lines = [
        "# Results of the full test suite",
        "",
        f"Written by `make test-full` (`pytest {' '.join(arguments)}`): {datetime.date.today()}, commit {_commit()},",
        f"{os.cpu_count()} cores, {platform.system()}, Python {platform.python_version()}, {seconds / 60:.0f} minutes.",
        "",
        f"**{total['passed']} passed, {total['failure'] + total['error']} failed, {total['skipped']} skipped.**",
        "",
        *[f"- failed: `{case.get('classname')}::{case.get('name')}`" for case in bad],
        *[
            f"- skipped: `{c.get('classname')}::{c.get('name')}`: {_reason(c)}"
            for c in cases
            if _outcome(c) == "skipped"
        ],
        *([""] if bad or total["skipped"] else []),
        "| module | passed | failed | skipped |",
        "|---|--:|--:|--:|",
        *[
            f"| {module} | {counts['passed']} | {counts['failure'] + counts['error']} | {counts['skipped']} |"
            for module, counts in table.items()
        ],
    ]
    return "\n".join(lines) + "\n"


def _outcome(case: ElementTree.Element) -> str:
    return next((kind for kind in _OUTCOMES if case.find(kind) is not None), "passed")


def _reason(case: ElementTree.Element) -> str:
    skipped = case.find("skipped")
    return str(skipped.get("message", "")) if skipped is not None else ""


def _commit() -> str:
    def git(*words: str) -> str:
        return subprocess.run(["git", *words], cwd=ROOT, capture_output=True, text=True, check=True).stdout.strip()

    dirty = git("status", "--porcelain", "--untracked-files=no")
    return git("rev-parse", "--short", "HEAD") + (" with uncommitted changes" if dirty else "")


if __name__ == "__main__":
    sys.exit(main())
