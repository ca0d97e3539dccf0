"""`make test-full`: run every test but those that need a GPU, and record the result in
docs/test-report.md.

python tools/test_report.py                         # all: hours; called again it goes on
python tools/test_report.py tests/unit --minutes 5  # some files or folders, each file for so long
python tools/test_report.py --jobs 8                # so many files at a time: one per two cores
python tools/test_report.py --again                 # forget what was run at this commit

Each file is a process of its own, so that one that crashes or hangs costs its own results alone.
Every test's outcome is written down as it comes, and the report after every file: a run that is
killed leaves a true one.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import platform
import signal
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
REPORT = "docs/test-report.md"
#: A folder per state of the sources, in it a file of results per test file.
RESULTS = ".cache/test-report"
#: Longest time of a file: rare layouts start hundreds of trainers, random kills hundreds of runs.
MINUTES = 180.0


@dataclass
class FileResult:
    """What became of a test file.

    Attributes:
        seconds: from its start to its end, imports included.
        end: "" when pytest came to its end, else what happened instead.
        outcomes: test → "passed", "failed" or "skipped".
        reasons: skipped test → why.
    """

    file: str
    day: str
    seconds: float = 0.0
    end: str = ""
    outcomes: dict[str, str] = field(default_factory=dict)
    reasons: dict[str, str] = field(default_factory=dict)

    @property
    def is_good(self) -> bool:
        return not self.end and "failed" not in self.outcomes.values()


def main(words: list[str] | None = None, root: Path = ROOT) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("paths", nargs="*", default=["tests"], help="test files, or folders of them")
    add("--minutes", type=float, default=MINUTES, help="longest time of a file")
    add("--jobs", type=int, default=1, help="files at a time")
    add("--again", action="store_true", help="run also what has a result at this commit")
    chosen = parser.parse_args(words)
    commit, state = _sources(root)
    files = sorted(
        {str(file.relative_to(root)) for path in chosen.paths for file in _test_files(root / path)}
    )
    folder = root / RESULTS / state
    folder.mkdir(parents=True, exist_ok=True)
    kept = {} if chosen.again else {file: found for file in files if (found := _read(folder, file))}
    results = dict(kept)
    with ThreadPoolExecutor(chosen.jobs) as pool:
        interrupted = threading.Event()
        missing = [file for file in files if file not in kept]
        runs = [
            pool.submit(_run, root, file, folder, chosen.minutes, interrupted) for file in missing
        ]
        try:
            for run in as_completed(runs):
                result = run.result()
                results[result.file] = result
                print(
                    f"[{len(results)}/{len(files)}] {result.file}: {result.seconds:.0f} s",
                    flush=True,
                )
                (root / REPORT).write_text(
                    page(commit, files, list(results.values())), encoding="utf-8"
                )
        finally:
            interrupted.set()
            for run in runs:
                run.cancel()
    (root / REPORT).write_text(page(commit, files, list(results.values())), encoding="utf-8")
    print(f"wrote {REPORT}; {len(kept)} of {len(files)} files had been run before")
    return int(not all(result.is_good for result in results.values()))


def _test_files(path: Path) -> list[Path]:
    return [path] if path.is_file() else sorted(path.rglob("test_*.py"))


def _sources(root: Path) -> tuple[str, str]:
    """(The commit as people read it, a name for the exact state of all tracked files but the
    report.)"""

    def git(*words: str) -> str:
        return subprocess.run(
            ["git", *words], cwd=root, capture_output=True, text=True, check=True
        ).stdout.strip()

    commit = git("rev-parse", "--short", "HEAD")
    changes = git("diff", "HEAD", "--", ".", f":!{REPORT}")
    if not changes:
        return commit, commit
    return (
        f"{commit} with uncommitted changes",
        f"{commit}-{hashlib.sha256(changes.encode()).hexdigest()[:12]}",
    )


def _place(folder: Path, file: str) -> Path:
    return folder / (file.replace("/", "--") + ".json")


def _read(folder: Path, file: str) -> FileResult | None:
    path = _place(folder, file)
    return FileResult(**json.loads(path.read_text())) if path.exists() else None


def _run(
    root: Path, file: str, folder: Path, minutes: float, interrupted: threading.Event
) -> FileResult:
    """Run one file to its end or the end of its time; the result is also written to ``folder``,
    unless interrupted."""
    lines = _place(folder, file).with_suffix(".jsonl")
    lines.unlink(missing_ok=True)
    result = FileResult(file, time.strftime("%Y-%m-%d"))
    start = time.monotonic()
    command = [sys.executable, str(Path(__file__).resolve()), "--one-file", str(lines), file]
    environment = {**os.environ, "HYPOTHESIS_PROFILE": "random"}
    process = subprocess.Popen(command, cwd=root, env=environment, start_new_session=True)
    while (
        process.poll() is None
        and time.monotonic() < start + minutes * 60
        and not interrupted.wait(0.2)
    ):
        pass
    if process.poll() is None:
        result.end = f"did not end within {minutes:g} minutes"
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()
    elif process.returncode not in (0, 1, 5):  # passed, failed, nothing to run without a GPU
        result.end = f"pytest ended with status {process.returncode}"
    result.seconds = round(time.monotonic() - start, 1)
    for line in lines.read_text().splitlines() if lines.exists() else []:
        test, outcome, reason = json.loads(line)
        result.outcomes[test] = outcome if result.outcomes.get(test) != "failed" else "failed"
        if reason:
            result.reasons[test] = reason
    if not interrupted.is_set():
        _place(folder, file).write_text(json.dumps(asdict(result)))
    return result


class _Recorder:
    """Of pytest: a JSON line per outcome, on the disk as soon as it is known."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def _write(self, *line: str) -> None:
        with open(self._path, "a", encoding="utf-8") as file:
            file.write(json.dumps(line) + "\n")

    def pytest_runtest_logreport(self, report: Any) -> None:
        # setting up and taking down count when they fail
        if report.when == "call" or not report.passed:
            reason = report.longrepr[2].removeprefix("Skipped: ") if report.skipped else ""
            self._write(report.nodeid, report.outcome, reason)

    def pytest_collectreport(self, report: Any) -> None:
        if not report.passed:
            reason = str(report.longrepr[2]).removeprefix("Skipped: ") if report.skipped else ""
            self._write(report.nodeid, report.outcome, reason)


def _one_file(lines: str, file: str) -> int:
    import pytest

    return int(pytest.main(["-m", "not gpu", "--tb=short", file], plugins=[_Recorder(Path(lines))]))


def page(commit: str, files: Iterable[str], results: list[FileResult]) -> str:
    """docs/test-report.md: what was run of ``files``, and what came of it."""
    missing = sorted(set(files) - {result.file for result in results})
    days = sorted({result.day for result in results})
    folders = sorted({str(Path(file).parent) for file in files})
    total = _counts(results)
    failed = [test for r in results for test, outcome in r.outcomes.items() if outcome == "failed"]
    longest = sorted(results, key=lambda r: -r.seconds)[:10]
    reasons = Counter(
        (str(Path(r.file).parent), reason) for r in results for reason in r.reasons.values()
    )
    lines = [
        "# Results of the full test suite",
        "",
        f"Written by `make test-full` at commit {commit}; run on {', '.join(days)} with "
        f"{os.cpu_count()} cores,",
        f"{platform.system()}, Python {platform.python_version()}. Each file is a process of its "
        "own.",
        "",
        f"**{total['passed']} passed, {total['failed']} failed, {total['skipped']} skipped.**",
        "",
        "| folder | passed | failed | skipped | minutes |",
        "|---|--:|--:|--:|--:|",
        *(
            _row(folder, [r for r in results if str(Path(r.file).parent) == folder])
            for folder in folders
        ),
    ]
    sections = {
        "Failed": [f"`{test}`" for test in failed],
        "Ended early": [
            f"`{r.file}`: {r.end}, after {len(r.outcomes)} tests" for r in results if r.end
        ],
        "Not run yet": [f"`{file}`" for file in missing],
        "Skipped": [
            f"{folder}: {count} × {reason}" for (folder, reason), count in sorted(reasons.items())
        ],
        "Longest": [f"`{r.file}`: {r.seconds / 60:.1f} minutes" for r in longest],
    }
    for title, items in sections.items():
        lines += ["", f"## {title}", "", *(f"- {item}" for item in items)] if items else []
    return "\n".join(lines) + "\n"


def _counts(results: list[FileResult]) -> Counter[str]:
    return Counter(outcome for result in results for outcome in result.outcomes.values())


def _row(folder: str, results: list[FileResult]) -> str:
    counts = _counts(results)
    minutes = sum(result.seconds for result in results) / 60
    return (
        f"| {folder} | {counts['passed']} | {counts['failed']} | {counts['skipped']} | "
        f"{minutes:.1f} |"
    )


if __name__ == "__main__":
    # not without the files that are run
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    sys.exit(_one_file(*sys.argv[2:]) if sys.argv[1:2] == ["--one-file"] else main())
