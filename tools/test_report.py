"""`make test-full`: run every test but those that need a GPU, and record the result in docs/test-report.md.

python tools/test_report.py                       # all of them: hours
python tools/test_report.py tests/unit -m full    # some: the arguments are pytest's
python tools/test_report.py --from a.xml b.xml    # nothing is run: results of `pytest --junitxml`, of this commit
"""

from __future__ import annotations

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
    words = sys.argv[1:]
    if words[:1] == ["--from"]:
        return _write([Path(word) for word in words[1:]])
    with tempfile.TemporaryDirectory() as folder:
        results = Path(folder) / "results.xml"
        done = subprocess.run(
            [sys.executable, "-m", "pytest", f"--junitxml={results}", *(words or ["-m", "not gpu"])], cwd=ROOT
        )
        return _write([results]) or done.returncode if results.exists() else done.returncode or 1


def _write(results: list[Path]) -> int:
    suites = [suite for path in results for suite in ElementTree.parse(path).getroot().iter("testsuite")]
    REPORT.write_text(_page(suites))
    print(f"wrote {REPORT.relative_to(ROOT)}")
    return int(any(int(suite.get(kind, 0)) for suite in suites for kind in ("failures", "errors")))


def _page(suites: list[ElementTree.Element]) -> str:
    cases = [case for suite in suites for case in suite.iter("testcase")]
    days = sorted({suite.get("timestamp", "")[:10] for suite in suites})
    minutes = " + ".join(f"{float(suite.get('time', 0)) / 60:.0f}" for suite in suites)
    modules = sorted({case.get("classname", "") for case in cases})
    table = {module: Counter(_outcome(c) for c in cases if c.get("classname") == module) for module in modules}
    total = Counter(_outcome(case) for case in cases)
    bad = [case for case in cases if _outcome(case) in ("failure", "error")]
    lines = [
        "# Results of the full test suite",
        "",
        f"Written by `make test-full` at commit {_commit()}; run on {', '.join(days)} with {os.cpu_count()} cores,",
        f"{platform.system()}, Python {platform.python_version()}, in {minutes} minutes.",
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
