"""`make check`: the unit tests that a change concerns, nearest first, until their time is over.

python tools/changed_tests.py                   # what they are, against main; nothing is run
python tools/changed_tests.py --seconds 60      # run them; what was not reached is named
python tools/changed_tests.py --against HEAD~3

A test is near when few imports lie between it and a changed file. Files that are no modules (data,
pages) concern the modules that name them."""

from __future__ import annotations

import argparse
import ast
import subprocess
import sys
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
FOLDERS = ("slime", "tests", "recipes", "benchmarks", "tools")
TESTS = "tests/unit"
#: Of a change that concerns more files, the nearest ones: reading them all would take the time.
MOST = 24
#: Rules of the whole repository.
ALWAYS = ("tests/unit/test_architecture.py", "tests/unit/test_docs.py")


def main(words: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--against", default="main", help="branch or commit that the working tree is compared with"
    )
    parser.add_argument(
        "--seconds", type=float, help="run the tests, and begin no other one after so many seconds"
    )
    chosen = parser.parse_args(words)
    changed = changed_files(ROOT, chosen.against)
    tests = nearest(ROOT, changed)
    elsewhere = [
        f
        for f in changed
        if Path(f).name.startswith("test_") and f not in tests and (ROOT / f).exists()
    ]
    if chosen.seconds is None:
        print(*tests, sep="\n")
        return 0
    print(f"{len(changed)} changed files concern {len(tests)} files of {TESTS}", end="", flush=True)
    print(f"; these are the nearest {MOST}" if len(tests) > MOST else "", flush=True)
    for file in elsewhere:
        print(f"changed, and left to make test: {file}", flush=True)
    return _run([*ALWAYS, *(test for test in tests[:MOST] if test not in ALWAYS)], chosen.seconds)


def changed_files(root: Path, against: str) -> list[str]:
    """Paths that differ from where this branch left ``against``: committed, not committed, new,
    deleted.

    Raises:
        SystemExit: there is no such commit.
    """

    def git(*arguments: str) -> list[str]:
        done = subprocess.run(["git", *arguments], cwd=root, capture_output=True, text=True)
        if done.returncode:
            raise SystemExit(f"git {' '.join(arguments)}: {done.stderr.strip()}")
        return done.stdout.splitlines()

    [base] = git("merge-base", against, "HEAD")
    return sorted(
        {
            *git("diff", "--name-only", "--no-renames", base),
            *git("ls-files", "--others", "--exclude-standard"),
        }
    )


def nearest(root: Path, changed: Iterable[str]) -> list[str]:
    """Test files that import, over however many modules, one of the changed files; the nearest
    first, and of two equally near ones first the one that depends on less."""
    changed = list(changed)
    return ImportGraph(root, changed).nearest(changed)


class ImportGraph:
    """Which file of the repository imports which; read once, asked often.

    Args:
        also: files that need not exist any more.
    """

    def __init__(self, root: Path, also: Iterable[str] = ()) -> None:
        self._sources = {
            str(path.relative_to(root)): path.read_text(encoding="utf-8")
            for folder in FOLDERS
            for path in sorted((root / folder).rglob("*.py"))
        }
        names = {_module(file): file for file in [*self._sources, *also] if file.endswith(".py")}
        self._imports = {
            file: {names[name] for name in _imported(text, names)} - {file}
            for file, text in self._sources.items()
        }
        self._importers: dict[str, set[str]] = {}
        for file, targets in self._imports.items():
            for target in targets:
                self._importers.setdefault(target, set()).add(file)
        self._sizes: dict[str, int] = {}

    def nearest(self, changed: Iterable[str]) -> list[str]:
        """See `nearest`."""
        start = set()
        for file in changed:
            is_module = file.endswith(".py")
            start |= (
                {file}
                if is_module
                else {f for f, text in self._sources.items() if Path(file).name in text}
            )
        distance = _distances(start, self._importers)
        tests = [f for f in distance if f in self._sources and Path(f).match(f"{TESTS}/test_*.py")]
        return sorted(tests, key=lambda file: (distance[file], self._size(file), file))

    def importers(self, file: str) -> set[str]:
        """The file and all that import it, over however many others."""
        return set(_distances({file}, self._importers))

    def imported(self, files: Iterable[str]) -> set[str]:
        """These files and all that they import."""
        return set(_distances(set(files), self._imports))

    def _size(self, file: str) -> int:
        """How many files it depends on."""
        if file not in self._sizes:
            self._sizes[file] = len(_distances({file}, self._imports))
        return self._sizes[file]


def _distances(start: set[str], edges: dict[str, set[str]]) -> dict[str, int]:
    """Steps to every node that can be reached."""
    found = dict.fromkeys(start, 0)
    border = start
    while border:
        border = {target for file in border for target in edges.get(file, ())} - found.keys()
        found |= dict.fromkeys(border, max(found.values()) + 1)
    return found


def _module(file: str) -> str:
    return file.removesuffix(".py").removesuffix("/__init__").replace("/", ".")


def _imported(text: str, names: dict[str, str]) -> set[str]:
    """Modules among ``names`` that a source imports, or names in a string, as patches and processes
    do."""
    found = set()
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Import):
            words = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            words = [f"{node.module}.{alias.name}" for alias in node.names]
        elif (
            isinstance(node, ast.Constant)
            and isinstance(node.value, str)
            and node.value.startswith("slime.")
        ):
            words = [node.value]
        else:
            continue
        for word in words:
            while word and word not in names:
                word = word.rpartition(".")[0]
            found.add(word)
    return found - {"", "slime"}


class _Budget:
    """Of pytest: begins no test after the time is over."""

    def __init__(self, seconds: float) -> None:
        self._end = time.monotonic() + seconds
        self.left: list[str] = []
        self.has_failed = False

    def pytest_runtest_logreport(self, report: Any) -> None:
        self.has_failed |= report.failed

    def pytest_runtest_protocol(self, item: Any, nextitem: Any) -> None:
        if time.monotonic() > self._end:
            items = item.session.items
            self.left = [other.nodeid for other in items[items.index(item) + 1 :]]
            item.session.shouldstop = "the time is over"


def _run(files: list[str], seconds: float) -> int:
    import pytest

    budget = _Budget(seconds)
    status = pytest.main(["-m", "not slow and not full and not gpu", *files], plugins=[budget])
    unreached = list(dict.fromkeys(test.partition("::")[0] for test in budget.left))
    if unreached:
        print(
            f"\n{len(budget.left)} tests were not reached in {seconds:.0f} s: make test runs "
            "them. They are in"
        )
        print(*unreached, sep="\n")
        return int(budget.has_failed)  # pytest's status says that it was stopped, and nothing else
    return int(status)


if __name__ == "__main__":
    sys.exit(main())
