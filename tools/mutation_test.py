"""`make mutation`: change one thing in the code at a time, and see whether the nearest tests
notice.

python tools/mutation_test.py                           # all: an hour on a core
python tools/mutation_test.py --named                   # only the patches of tools/mutations.toml
python tools/mutation_test.py --only 'slime/samples/*'  # only files like this
python tools/mutation_test.py --share 2/8               # a part; run each in a copy of the tree
python tools/mutation_test.py --list                    # show the mutations; run nothing
python tools/mutation_test.py --show-tests FILE         # test files that a mutation of FILE runs

A call that was ended goes on when it is repeated.

A mutation is killed when a test fails, or when a test hangs that passes otherwise; it survives when
none does. Patches with a name are listed in tools/mutations.toml, as are mutations that change no
result, with the reason. The others are drawn by a seed, a budget per part of the code, one per
function first. The draw ranks each candidate by a hash of its own text, so a change elsewhere does
not draw others.

One process imports the libraries, and forks a child per mutation, which imports the changed code
and the tests from a copy of the working tree. The working tree is never written to, but for the
report.

Why no library: mutmut 3 rewrites whole functions into trampolines, which processes started by a
test do not see and `inspect.getsource` breaks; cosmic-ray starts a Python of its own per mutation
(25 s of imports here), has no operator that drops a statement, a factor or a bound, and mutates
type hints.
"""

from __future__ import annotations

import argparse
import ast
import contextlib
import fnmatch
import hashlib
import importlib
import json
import math
import os
import platform
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import tomllib
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from multiprocessing import resource_tracker
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
CASES = "tools/mutations.toml"
REPORT = "docs/mutation-report.md"
RESULTS = ".cache/mutations.jsonl"
SEED = 29
#: Least share of the drawn mutations that has to be killed.
LEAST = 0.95
#: Test files per mutation, those among them that are named after the module, and seconds after
#: which no further test is begun.
MOST_FILES = 8
MOST_NAMESAKES = 2
MOST_SECONDS = 150.0
#: For the check that tests which noticed something pass without it.
CHECK_SECONDS = 1800.0
#: A child that has not ended so long after that hangs.
GRACE_SECONDS = 120.0


@dataclass(frozen=True)
class Part:
    """A part of the code: its files, how many mutations are drawn there, and tests that run before
    the nearest."""

    name: str
    files: tuple[str, ...]
    budget: int
    tests: tuple[str, ...] = ()


PARTS = (
    Part("algorithms", ("slime/algorithms/*.py",), 18),
    Part("samples", ("slime/samples/*.py",), 18, ("tests/unit/test_user_contract.py",)),
    Part(
        "trainer",
        ("slime/trainer/*.py",),
        14,
        ("tests/unit/test_train_loss.py", "tests/unit/test_rollout_metrics.py"),
    ),
    Part(
        "trainer/megatron",
        ("slime/trainer/megatron/*.py",),
        16,
        ("tests/unit/test_train_numerics.py",),
    ),
    Part("weights", ("slime/weights/*.py",), 14),
    Part("journal", ("slime/rollout/journal.py", "slime/run/ancestry.py"), 12),
    Part("schedule", ("slime/run/schedule.py",), 8),
    Part("sampler", ("slime/embedded/sampler.py",), 10),
)
#: Files whose code needs a GPU, Transformer Engine or NCCL: no test of a CPU runs it.
NEEDS_A_GPU = (
    "slime/trainer/kernels/*",
    "slime/trainer/megatron/te_layers.py",
    "slime/trainer/megatron/device.py",
    "slime/trainer/memory.py",
    "slime/weights/ipc.py",
)
#: Conditions that only hold on a GPU, or that only choose between equal results.
_GPU_WORDS = ("is_cuda", "has_gpu", "has_kernels", "cuda", "deterministic", "flash")
#: Calls that say something and compute nothing.
_TALK = (
    "UserError", "FunctionFailed", "NonFiniteTraining", "logger", "tell", "warnings", "print",
    "described", "named", "cast",
)  # fmt: skip
#: Methods whose receiver may stand alone.
_DROPPED_CALLS = (
    "clamp", "clamp_", "clamp_min", "clamp_max", "abs", "square", "mul_", "add_", "neg_", "detach",
    "masked_fill", "masked_fill_", "flip", "cumsum", "float", "double", "log", "exp",
)  # fmt: skip
_NOT_MUTATED = ("__repr__", "__str__", "__post_init__")
#: Imported once, before the first child is forked.
_LIBRARIES = (
    "torch", "torch.distributed", "numpy", "pytest", "hypothesis", "orjson", "xxhash",
    "safetensors.torch", "rich", "transformers", "transformers.models.qwen3",
    "transformers.models.llama", "aiohttp.web", "psutil", "yaml", "megatron.core",
    "megatron.core.optimizer", "megatron.core.models.gpt",
    "megatron.core.transformer.moe.moe_layer", "megatron.core.pipeline_parallel",
    "megatron.core.dist_checkpointing",
)  # fmt: skip


# -- what is changed -------------------------------------------------------------------------------


@dataclass(frozen=True)
class Mutation:
    """One change of one file.

    Attributes:
        name: of a patch of the table; "" for a drawn one.
        part: of the code, by `PARTS`.
        function: qualified name of the function changed.
        operator: kind of change.
        before, after: text that is replaced, and what by, from byte ``start`` on.
    """

    part: str
    file: str
    function: str
    operator: str
    line: int
    start: int
    before: str
    after: str
    name: str = ""

    def apply(self, text: str) -> str:
        data = text.encode()
        end = self.start + len(self.before.encode())
        assert data[self.start : end].decode() == self.before
        return (data[: self.start] + self.after.encode() + data[end:]).decode()

    def lines(self, text: str) -> tuple[str, str]:
        """The changed lines before and after, without indentation at their ends."""
        data = text.encode()
        end = self.start + len(self.before.encode())
        first = data.rfind(b"\n", 0, self.start) + 1
        last = data.find(b"\n", end)
        head = data[first : self.start].decode()
        tail = data[end : None if last < 0 else last].decode()
        return f"{head}{self.before}{tail}".strip(), f"{head}{self.after}{tail}".strip()


def candidates(part: str, file: str, text: str) -> list[Mutation]:
    """All mutations of the functions of a file."""
    return list(_Finder(part, file, text).mutations())


class _Finder:
    """Walks the functions of a module and proposes changes of expressions and statements that
    compute."""

    def __init__(self, part: str, file: str, text: str) -> None:
        self._part = part
        self._file = file
        self._data = text.encode()
        starts = [0]
        for line in self._data.splitlines(keepends=True):
            starts.append(starts[-1] + len(line))
        self._starts = starts
        self._tree = ast.parse(text)
        self._of_one_type = set()
        for node in ast.walk(self._tree):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                types = [
                    ast.unparse(a.annotation) for a in node.args.args if a.annotation is not None
                ]
                if len(types) >= 2 and types[0] == types[1]:
                    self._of_one_type.add(node.name)

    def mutations(self) -> Iterator[Mutation]:
        yield from self._bodies(self._tree.body, "")

    def _bodies(self, body: Sequence[ast.stmt], inside: str) -> Iterator[Mutation]:
        """Functions of a module or class."""
        for node in body:
            if isinstance(node, ast.ClassDef):
                yield from self._bodies(node.body, f"{inside}{node.name}.")
            elif (
                isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
                and node.name not in _NOT_MUTATED
            ):
                name = f"{inside}{node.name}"
                for statement in node.body:
                    yield from self._statement(statement, name)

    def _statement(self, node: ast.stmt, name: str) -> Iterator[Mutation]:
        if isinstance(
            node, ast.Raise | ast.Assert | ast.Import | ast.ImportFrom | ast.Global | ast.Nonlocal
        ):
            return
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant):
            return
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            for statement in node.body:
                yield from self._statement(statement, f"{name}.{node.name}")
            return
        if isinstance(node, ast.If | ast.While):
            if self._is_gpu(node.test):
                for statement in node.orelse:
                    yield from self._statement(statement, name)
                return
            if not self._only_raises(node.body):
                yield from self._negated(node.test, name)
        yield from self._dropped(node, name)
        for child in ast.iter_child_nodes(node):
            if isinstance(child, ast.stmt):
                yield from self._statement(child, name)
            elif isinstance(child, ast.excepthandler):
                for statement in child.body:
                    yield from self._statement(statement, name)
            elif isinstance(child, ast.withitem):
                yield from self._expression(child.context_expr, name)
            elif isinstance(child, ast.expr) and child is not getattr(node, "annotation", None):
                yield from self._expression(child, name)

    def _dropped(self, node: ast.stmt, name: str) -> Iterator[Mutation]:
        is_call = (
            isinstance(node, ast.Expr)
            and isinstance(node.value, ast.Call)
            and not self._is_talk(node.value)
        )
        is_update = isinstance(node, ast.AugAssign) or (
            isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Subscript)
        )
        if is_call or is_update or isinstance(node, ast.Continue | ast.Break):
            yield self._mutation(node, name, "drop statement", "pass")
        if isinstance(node, ast.AugAssign):
            swapped = {ast.Add: "-=", ast.Sub: "+=", ast.Mult: "/=", ast.Div: "*="}.get(
                type(node.op)
            )
            if swapped and not self._is_text(node.value):
                words = f"{self._text(node.target)} {swapped} {self._text(node.value)}"
                yield self._mutation(node, name, "swap operator", words)
        if (
            isinstance(node, ast.Return)
            and node.value is not None
            and not isinstance(node.value, ast.Constant)
        ):
            yield self._mutation(node, name, "return None", "return None")

    def _negated(self, test: ast.expr, name: str) -> Iterator[Mutation]:
        if isinstance(test, ast.UnaryOp) and isinstance(test.op, ast.Not):
            yield self._mutation(test, name, "negate condition", f"({self._text(test.operand)})")
        else:
            yield self._mutation(test, name, "negate condition", f"not ({self._text(test)})")

    def _expression(self, node: ast.expr, name: str) -> Iterator[Mutation]:
        if isinstance(node, ast.JoinedStr | ast.Lambda) or self._is_talk(node):
            return
        if isinstance(node, ast.IfExp | ast.BoolOp) and self._is_gpu(node):
            return
        if isinstance(node, ast.Compare) and len(node.ops) == 1:
            yield from self._comparison(node, name)
        elif isinstance(node, ast.BinOp):
            yield from self._binary(node, name)
        elif isinstance(node, ast.BoolOp):
            word = " or " if isinstance(node.op, ast.And) else " and "
            values = [f"({self._text(value)})" for value in node.values]
            yield self._mutation(node, name, "and ↔ or", f"({word.join(values)})")
        elif isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub | ast.Not):
            # often the last dimension, which has a second name
            if isinstance(node.operand, ast.Constant):
                yield self._mutation(node, name, "change constant", "0")
                return
            yield self._mutation(node, name, "drop sign or not", f"({self._text(node.operand)})")
        elif isinstance(node, ast.Constant):
            yield from self._constant(node, name)
        elif isinstance(node, ast.IfExp):
            yield from self._negated(node.test, name)
        elif isinstance(node, ast.Call):
            yield from self._call(node, name)
        for child in ast.iter_child_nodes(node):
            if isinstance(child, ast.expr):
                yield from self._expression(child, name)
            elif isinstance(child, ast.keyword):
                yield from self._expression(child.value, name)
            elif isinstance(child, ast.comprehension):
                yield from self._expression(child.iter, name)
                for test in child.ifs:
                    yield from self._negated(test, name)
                    yield from self._expression(test, name)

    def _comparison(self, node: ast.Compare, name: str) -> Iterator[Mutation]:
        left = self._operand(node.left)
        right = self._operand(node.comparators[0])
        swapped = {
            ast.Lt: "<=", ast.LtE: "<", ast.Gt: ">=", ast.GtE: ">", ast.Eq: "!=", ast.NotEq: "==",
            ast.Is: "is not", ast.IsNot: "is", ast.In: "not in", ast.NotIn: "in",
        }[type(node.ops[0])]  # fmt: skip
        yield self._mutation(node, name, "swap comparison", f"({left} {swapped} {right})")

    def _binary(self, node: ast.BinOp, name: str) -> Iterator[Mutation]:
        if self._is_text(node.left) or self._is_text(node.right):
            return
        left = self._operand(node.left)
        right = self._operand(node.right)
        swapped = {
            ast.Add: "-",
            ast.Sub: "+",
            ast.Mult: "/",
            ast.Div: "*",
            ast.FloorDiv: "*",
            ast.Mod: "+",
            ast.Pow: "*",
            ast.BitOr: "&",
            ast.BitAnd: "|",
            ast.BitXor: "|",
            ast.LShift: ">>",
            ast.RShift: "<<",
        }.get(type(node.op))
        if swapped:
            yield self._mutation(node, name, "swap operator", f"({left} {swapped} {right})")
        if isinstance(node.op, ast.Mult | ast.Div | ast.Add | ast.Sub):
            yield self._mutation(node, name, "drop operand", f"({left})")
        if isinstance(node.op, ast.Mult):
            yield self._mutation(node, name, "drop operand", f"({right})")

    def _constant(self, node: ast.Constant, name: str) -> Iterator[Mutation]:
        value = node.value
        if isinstance(value, bool):
            yield self._mutation(node, name, "change constant", str(not value))
        elif isinstance(value, int):
            yield self._mutation(
                node, name, "change constant", {0: "1", 1: "0"}.get(value, str(value + 1))
            )
        elif (
            isinstance(value, float) and not 0 < abs(value) < 1e-4
        ):  # those keep from dividing by zero
            yield self._mutation(
                node, name, "change constant", {0.0: "1.0", 1.0: "0.0"}.get(value, str(value * 2))
            )

    def _call(self, node: ast.Call, name: str) -> Iterator[Mutation]:
        function = node.func
        words = [self._text(argument) for argument in node.args]
        if isinstance(function, ast.Name) and function.id in ("min", "max"):
            other = "max" if function.id == "min" else "min"
            yield self._mutation(function, name, "min ↔ max", other)
            if len(node.args) == 2:
                yield self._mutation(
                    node, name, "drop bound", words[isinstance(node.args[0], ast.Constant)]
                )
        if isinstance(function, ast.Attribute):
            if function.attr in _DROPPED_CALLS:
                of_module = isinstance(function.value, ast.Name) and function.value.id in (
                    "torch",
                    "math",
                    "F",
                )
                yield self._mutation(
                    node, name, "drop call", words[0] if of_module else self._text(function.value)
                )
            others = {
                "argmax": "argmin",
                "maximum": "minimum",
                "minimum": "maximum",
                "max": "min",
                "min": "max",
            }
            if function.attr in others:
                yield self._mutation(
                    function,
                    name,
                    "min ↔ max",
                    f"{self._text(function.value)}.{others[function.attr]}",
                )
        if len(words) >= 2 and words[0] != words[1] and self._first_two_have_one_type(function):
            swapped = ", ".join(
                [words[1], words[0], *words[2:], *(self._text(k) for k in node.keywords)]
            )
            yield self._mutation(node, name, "swap arguments", f"{self._text(function)}({swapped})")

    def _first_two_have_one_type(self, function: ast.expr) -> bool:
        """Whether it is a function of this file that takes two arguments of one type first."""
        return self._text(function).rpartition(".")[2] in self._of_one_type

    def _mutation(self, node: ast.AST, name: str, operator: str, after: str) -> Mutation:
        start = self._starts[node.lineno - 1] + node.col_offset  # type: ignore[attr-defined]
        return Mutation(
            self._part, self._file, name, operator, node.lineno, start, self._text(node), after
        )  # type: ignore[attr-defined]

    def _text(self, node: ast.AST) -> str:
        start = self._starts[node.lineno - 1] + node.col_offset  # type: ignore[attr-defined]
        end = self._starts[node.end_lineno - 1] + node.end_col_offset  # type: ignore[attr-defined]
        return self._data[start:end].decode()

    def _operand(self, node: ast.AST) -> str:
        """Its text, in parentheses where another operator beside it could bind more tightly."""
        is_one = isinstance(
            node, ast.Name | ast.Attribute | ast.Constant | ast.Call | ast.Subscript
        )
        return self._text(node) if is_one else f"({self._text(node)})"

    def _is_gpu(self, node: ast.expr) -> bool:
        return any(word in self._text(node) for word in _GPU_WORDS)

    @staticmethod
    def _is_talk(node: ast.expr) -> bool:
        while isinstance(node, ast.Call | ast.Attribute):
            if isinstance(node, ast.Attribute) and node.attr in _TALK:
                return True
            node = node.func if isinstance(node, ast.Call) else node.value
        return isinstance(node, ast.Name) and node.id in _TALK

    @staticmethod
    def _is_text(node: ast.expr) -> bool:
        texts = (ast.JoinedStr, ast.List, ast.Tuple, ast.Dict, ast.ListComp)
        return isinstance(node, texts) or (
            isinstance(node, ast.Constant) and isinstance(node.value, str | bytes)
        )

    @staticmethod
    def _only_raises(body: Sequence[ast.stmt]) -> bool:
        return isinstance(body[-1], ast.Raise)


# -- which of them ---------------------------------------------------------------------------------


@dataclass
class Cases:
    """What tools/mutations.toml lists.

    Attributes:
        named: patches that tests have to notice.
        equivalent: (file, function, line before, line after) → the reason why no result changes;
            without lines it is said of all mutations of the function.
    """

    named: list[Mutation]
    equivalent: dict[tuple[str, str, str, str], str]


class StaleTable(Exception):
    """The table names code that is no longer there."""


def read_cases(root: Path) -> Cases:
    """The table, checked against the code.

    Raises:
        StaleTable: text that its file has not, or more than once.
    """
    table = tomllib.loads((root / CASES).read_text(encoding="utf-8"))
    named = []
    stale = []
    for row in table.get("named", []):
        text = ""
        if (root / row["file"]).exists():
            text = (root / row["file"]).read_text(encoding="utf-8")
        count = text.count(row["before"])
        if count != 1:
            stale.append(
                f"[[named]] {row['name']}: {row['file']} has its text {count} times: "
                f"{row['before']}"
            )
            continue
        at = text.index(row["before"])
        line = text[:at].count("\n") + 1
        start = len(text[:at].encode())
        named.append(
            Mutation(
                _part_of(row["file"]),
                row["file"],
                "",
                "patch",
                line,
                start,
                row["before"],
                row["after"],
                row["name"],
            )
        )
    equivalent = {}
    for row in table.get("equivalent", []):
        key = (row["file"], row["function"], row.get("before", ""), row.get("after", ""))
        equivalent[key] = row["reason"]
        if key not in _keys(root, row["file"]):
            stale.append(f"[[equivalent]] no such mutation: {key}")
    if stale:
        raise StaleTable(f"{CASES} is out of date:\n" + "\n".join(stale))
    return Cases(named, equivalent)


def _keys(root: Path, file: str) -> set[tuple[str, str, str, str]]:
    if not (root / file).exists():
        return set()
    text = (root / file).read_text(encoding="utf-8")
    found = candidates("", file, text)
    return {
        key
        for m in found
        for key in ((file, m.function, "", ""), (file, m.function, *m.lines(text)))
    }


def _part_of(file: str) -> str:
    return next((part.name for part in PARTS if _is_in(file, part)), "elsewhere")


def _is_in(file: str, part: Part) -> bool:
    return any(
        fnmatch.fnmatch(file, pattern) and file.count("/") == pattern.count("/")
        for pattern in part.files
    )


def draw(root: Path, cases: Cases, seed: int) -> list[Mutation]:
    """The drawn mutations of all parts: one per function first, then further ones up to the
    budget."""
    chosen: list[Mutation] = []
    for part in PARTS:
        files = sorted({file for pattern in part.files for file in root.glob(pattern)})
        found: list[tuple[str, Mutation]] = []
        for path in files:
            file = str(path.relative_to(root))
            if any(fnmatch.fnmatch(file, pattern) for pattern in NEEDS_A_GPU):
                continue
            text = path.read_text(encoding="utf-8")
            seen: Counter[tuple[str, ...]] = Counter()
            for mutation in candidates(part.name, file, text):
                lines = mutation.lines(text)
                of_function = (file, mutation.function, "", "")
                if (
                    of_function in cases.equivalent
                    or (file, mutation.function, *lines) in cases.equivalent
                ):
                    continue
                words = (file, mutation.function, mutation.operator, *lines)
                seen[words] += 1
                digest = hashlib.sha256(
                    "|".join([str(seed), *words, str(seen[words])]).encode()
                ).hexdigest()
                # each function returns something, and that nothing comes back is noticed at once
                if mutation.operator != "return None" or int(digest[-1], 16) == 0:
                    found.append((digest, mutation))
        found.sort(key=lambda pair: pair[0])
        per_function: Counter[tuple[str, str]] = Counter()
        ranked = []
        for digest, mutation in found:
            place = (mutation.file, mutation.function)
            ranked.append((per_function[place], digest, mutation))
            per_function[place] += 1
        ranked.sort(key=lambda entry: entry[:2])
        chosen += [mutation for _, _, mutation in ranked[: part.budget]]
    return chosen


# -- running tests ---------------------------------------------------------------------------------


@dataclass
class Result:
    """What became of a mutation.

    Attributes:
        outcome: "killed"; "timed out", where a test hangs; "survived"; "undecided", where the time
            was over before all tests had run.
        test: what noticed it.
        source, tests: fingerprints of the changed file and of the test's, by which a result is
            known again.
    """

    part: str
    file: str
    function: str
    operator: str
    line: int
    before: str
    after: str
    name: str
    outcome: str
    test: str = ""
    seconds: float = 0.0
    source: str = ""
    tests: str = ""


@dataclass
class _Outcome:
    failed: list[str] = field(default_factory=list)
    passed: list[str] = field(default_factory=list)
    status: int | None = None
    begun: str = ""

    @property
    def hangs(self) -> bool:
        return self.status is None


class _Recorder:
    """A pytest plugin that writes each outcome down, and begins no test after the end of the
    time."""

    def __init__(self, path: Path, seconds: float, skipped: frozenset[str]) -> None:
        self._path = path
        self._end = time.monotonic() + seconds
        self._skipped = skipped

    def _write(self, *words: str) -> None:
        with open(self._path, "a") as file:
            file.write(json.dumps(words) + "\n")

    def pytest_collection_modifyitems(self, items: list[Any]) -> None:
        items[:] = [item for item in items if item.nodeid not in self._skipped]

    def pytest_runtest_protocol(self, item: Any, nextitem: Any) -> None:
        if time.monotonic() > self._end:
            item.session.shouldstop = "the time is over"
        self._write("begun", item.nodeid)

    def pytest_runtest_logreport(self, report: Any) -> None:
        if report.failed:
            self._write("failed", report.nodeid)
        elif report.when == "call" and report.passed:
            self._write("passed", report.nodeid)

    def pytest_collectreport(self, report: Any) -> None:
        if report.failed:
            self._write("failed", report.nodeid)


class Workshop:
    """A copy of the working tree in which one file at a time is changed and tests are run by forked
    children."""

    def __init__(self, root: Path, folder: Path) -> None:
        self.tree = folder / "tree"
        self._log = folder / "outcomes.jsonl"
        self._output = folder / "output.txt"
        self._changes = 0
        listed = subprocess.run(
            ["git", "ls-files", "-co", "--exclude-standard"],
            cwd=root,
            capture_output=True,
            text=True,
            check=True,
        )
        for name in listed.stdout.splitlines():
            if (root / name).is_file():
                (self.tree / name).parent.mkdir(parents=True, exist_ok=True)
                shutil.copy2(root / name, self.tree / name)
        self._root = root

    def warm_up(self, names: Iterable[str]) -> None:
        """Import libraries, and modules of the copy, once for all children."""
        elsewhere = (self._root, self._root / "tools")
        sys.path[:] = [
            str(self.tree),
            *(p for p in sys.path if p and Path(p).resolve() not in elsewhere),
        ]
        for name in names:
            with contextlib.suppress(ImportError):
                importlib.import_module(name)
        resource_tracker.ensure_running()  # one for all children

    @contextlib.contextmanager
    def changed(self, mutation: Mutation) -> Iterator[None]:
        path = self.tree / mutation.file
        before = path.read_bytes()
        stamp = path.stat().st_mtime_ns
        self._changes += 1
        path.write_text(mutation.apply(before.decode()), encoding="utf-8")
        # bytecode is known by the second in which its source was written: each change has one of
        # its own
        os.utime(path, ns=(stamp, stamp + self._changes * 1_000_000_000))
        try:
            yield
        finally:
            path.write_bytes(before)
            os.utime(path, ns=(stamp, stamp))

    def run(
        self,
        runs: Sequence[Sequence[str]],
        seconds: float,
        skipped: frozenset[str],
        changed: Iterable[str] = (),
    ) -> _Outcome:
        """Run tests in a child: one pytest per entry, up to the first in which a test fails.

        Files that come later are then not even imported.

        Args:
            changed: modules that are imported anew: what was changed, and all that depends on it.
        """
        self._log.unlink(missing_ok=True)
        pid = os.fork()
        if pid == 0:
            self._child(runs, seconds, skipped, changed)
        status = _wait(pid, seconds + GRACE_SECONDS)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(pid, signal.SIGKILL)  # what the tests have left
        outcome = _Outcome(status=status)
        for line in self._log.read_text().splitlines() if self._log.exists() else []:
            kind, test = json.loads(line)
            if kind == "failed":
                outcome.failed.append(test)
            elif kind == "begun":
                outcome.begun = test
            else:
                outcome.passed.append(test)
        return outcome

    def _enter(self, changed: Iterable[str]) -> None:
        """Let this process and those that it starts import from the copy, and what has changed
        anew."""
        os.chdir(self.tree)
        os.environ["PYTHONPATH"] = str(self.tree)
        os.environ["TOKENIZERS_PARALLELISM"] = "false"
        os.environ.setdefault("OMP_NUM_THREADS", "1")
        ours = [name for name in sys.modules if name.partition(".")[0] == "tools"]
        for name in [*ours, *changed]:
            if sys.modules.pop(name, None) is not None and "." in name:
                package, _, leaf = name.rpartition(".")
                vars(sys.modules.get(package, argparse)).pop(leaf, None)

    def _child(
        self,
        runs: Sequence[Sequence[str]],
        seconds: float,
        skipped: frozenset[str],
        changed: Iterable[str],
    ) -> None:
        status = 3
        try:
            os.setsid()
            self._enter(changed)
            target = os.open(self._output, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
            os.dup2(target, 1)
            os.dup2(target, 2)
            _start_fork_server()
            import pytest

            marks = "not slow and not full and not gpu"
            words = ["-q", "-p", "no:cacheprovider", "-m", marks, "--tb=short", "--maxfail=1"]
            recorder = _Recorder(self._log, seconds, skipped)
            for tests in runs:
                status = int(pytest.main([*words, *tests], plugins=[recorder]))
                if status not in (0, 5):  # all passed; there are none
                    break
            sys.stdout.flush()
        finally:
            os._exit(status)


def _wait(pid: int, seconds: float) -> int | None:
    """The status of a child; None, and the child's end, where it takes longer."""
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        done, status = os.waitpid(pid, os.WNOHANG)
        if done:
            return os.waitstatus_to_exitcode(status)
        time.sleep(0.05)
    with contextlib.suppress(ProcessLookupError):
        os.killpg(pid, signal.SIGKILL)
    os.waitpid(pid, 0)
    return None


def _start_fork_server() -> None:
    """Fork the server from which tests fork trainer ranks, instead of starting it: it has the
    libraries already.

    It is forked before a test runs, so that ranks inherit nothing of a trainer in this process.
    """
    from multiprocessing import forkserver, util

    start = util.spawnv_passfds

    def fork(path: Any, words: Sequence[str], handles: Any) -> int:
        if "multiprocessing.forkserver" not in words[-1]:
            return start(path, words, handles)
        pid = os.fork()
        if pid == 0:
            try:
                exec(words[-1], {})
            finally:
                os._exit(0)
        return pid

    util.spawnv_passfds = fork
    try:
        forkserver.ensure_running()
    finally:
        util.spawnv_passfds = start


class Judge:
    """Runs the tests of mutations. A test counts only while it passes on the code as it is."""

    def __init__(
        self, shop: Workshop, surroundings: Mapping[str, Surroundings], seconds: float
    ) -> None:
        self._shop = shop
        self._surroundings = surroundings
        self._seconds = seconds
        self._sound: set[str] = set()
        self._unsound: set[str] = set()

    def verdict(self, mutation: Mutation) -> tuple[str, str]:
        """(outcome, test that noticed it), as long as `check` finds nothing wrong with that
        test."""
        with self._shop.changed(mutation):
            around = self._surroundings[mutation.file]
            runs = [[test] for test in around.tests]
            outcome = self._shop.run(
                runs, self._seconds, frozenset(self._unsound), around.dependent
            )
        if outcome.hangs:
            return "timed out", outcome.begun
        if outcome.failed:
            return "killed", outcome.failed[0]
        if outcome.status in (0, 5):  # all passed; there are none
            return "survived", ""
        if outcome.status == 2:  # pytest was told to stop
            return "undecided", ""
        return "killed", outcome.begun  # the process has died

    def check(self, tests: Iterable[str]) -> set[str]:
        """Those among tests that fail, or hang, without a mutation, too."""
        new = [
            test
            for test in dict.fromkeys(tests)
            if "::" in test and test not in self._sound | self._unsound
        ]
        while new:
            outcome = self._shop.run([new], CHECK_SECONDS, frozenset(self._unsound))
            bad = {*outcome.failed, outcome.begun} if outcome.hangs else set(outcome.failed)
            for test in bad & set(new):
                print(f"  does not count, it fails without a mutation too: {test}", flush=True)
            self._unsound |= bad
            self._sound |= set(outcome.passed) - bad
            before = len(new)
            new = [test for test in new if test not in self._sound | self._unsound]
            if len(new) == before:  # not to be found by its name, or skipped
                self._unsound |= set(new)
                break
        return self._unsound


@dataclass(frozen=True)
class Surroundings:
    """What has to do with a file.

    Attributes:
        tests: files that its mutations run: those of its part first, then those named after it,
            then the nearest by imports.
        needed: modules that these import.
        dependent: modules that import it, itself among them.
    """

    tests: list[str]
    needed: set[str]
    dependent: set[str]


def surroundings(root: Path, files: Iterable[str]) -> dict[str, Surroundings]:
    """For each file."""
    sys.path.insert(0, str(root))
    from tools.changed_tests import ImportGraph

    def modules(files: Iterable[str]) -> set[str]:
        paths = (Path(file).with_suffix("") for file in files)
        names = (
            ".".join(path.parent.parts if path.name == "__init__" else path.parts) for path in paths
        )
        return {name for name in names if name.startswith(("slime.", "tests.support."))}

    graph = ImportGraph(root)
    found = {}
    for file in files:
        first = [test for part in PARTS if _is_in(file, part) for test in part.tests]
        nearest = graph.nearest([file])
        namesakes = [test for test in nearest if f"_{Path(file).stem}_" in f"{Path(test).stem}_"]
        chosen = [*first, *namesakes[:MOST_NAMESAKES], *nearest]
        tests = list(dict.fromkeys(chosen))[:MOST_FILES]
        found[file] = Surroundings(
            tests, modules(graph.imported(tests)), modules(graph.importers(file))
        )
    return found


# -- the whole -------------------------------------------------------------------------------------


def main(words: list[str] | None = None, root: Path = ROOT) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--named", action="store_true", help="only the patches of the table")
    add(
        "--only", default="*", help="only mutations of files like this, or patches with such a name"
    )
    add("--share", default="1/1", metavar="K/N", help="only every Nth mutation, from the Kth on")
    add("--list", action="store_true", help="show the mutations and run nothing")
    add("--seed", type=int, default=SEED, help="of the draw")
    add("--seconds", type=float, help=f"of tests per mutation; {MOST_SECONDS:g} when left out")
    add("--minutes", type=float, default=math.inf, help="begin no other mutation after so long")
    add("--again", action="store_true", help="run also what has been killed before")
    add("--show-tests", metavar="FILE", help="the test files that a mutation of FILE runs")
    add("--json", type=Path, help="write the results here, too")
    chosen = parser.parse_args(words)
    if chosen.show_tests:
        print(*surroundings(root, [chosen.show_tests])[chosen.show_tests].tests, sep="\n")
        return 0
    try:
        cases = read_cases(root)
    except StaleTable as error:
        print(error, file=sys.stderr)
        return 2
    mutations = cases.named if chosen.named else [*cases.named, *draw(root, cases, chosen.seed)]
    mutations = [
        m
        for m in mutations
        if fnmatch.fnmatch(m.file, chosen.only) or fnmatch.fnmatch(m.name, chosen.only)
    ]
    share, shares = (int(number) for number in chosen.share.split("/"))
    mutations = mutations[share - 1 :: shares]
    if chosen.list:
        for mutation in mutations:
            print(_described(root, mutation))
        return 0
    with tempfile.TemporaryDirectory(prefix="mutations-") as folder:
        limits = _Limits(chosen.seconds or MOST_SECONDS, time.monotonic() + 60 * chosen.minutes)
        results = _run_all(root, mutations, Path(folder), chosen.again, limits)
    if chosen.json:
        chosen.json.write_text(
            json.dumps([asdict(result) for result in results], indent=1), encoding="utf-8"
        )
    print(_table(results))
    if chosen.only == "*" and shares == 1 and not chosen.named:
        (root / REPORT).write_text(
            page(_commit(root), mutations, results, cases, chosen.seed), encoding="utf-8"
        )
        print(f"wrote {REPORT}")
    return int(len(results) < len(mutations) or not is_good(results))


@dataclass(frozen=True)
class _Limits:
    """Seconds of tests per mutation, and when no other mutation is begun (`time.monotonic`)."""

    seconds: float
    end: float


def _run_all(
    root: Path, mutations: Sequence[Mutation], folder: Path, again: bool, limits: _Limits
) -> list[Result]:
    """What became of the mutations, without those that the time did not suffice for."""
    texts = {
        file: (root / file).read_text(encoding="utf-8")
        for file in {mutation.file for mutation in mutations}
    }
    known = {} if again else _known(root)
    results: dict[Mutation, Result] = {}
    survivors: dict[Mutation, Result] = {}
    for mutation in mutations:
        result = known.get((mutation.name, _fingerprint(mutation.apply(texts[mutation.file]))))
        if result is not None and result.outcome not in _NOTICED:
            survivors[mutation] = result
        elif result is not None and result.tests == _fingerprint_of(root, result.test):
            results[mutation] = result
    left = sorted((m for m in mutations if m not in results), key=lambda m: m in survivors)
    if left and time.monotonic() < limits.end:
        around = surroundings(root, {mutation.file for mutation in left})
        shop = Workshop(root, folder)
        shop.warm_up(
            [*_LIBRARIES, *sorted(set().union(*(each.needed for each in around.values())))]
        )
        judge = Judge(shop, around, limits.seconds)
    while left and time.monotonic() < limits.end:
        batch = left[:10]
        left = left[10:]
        found = {}
        for mutation in batch:
            print(
                f"[{len(results) + len(found) + 1}/{len(mutations)}] {_described(root, mutation)}",
                flush=True,
            )
            start = time.monotonic()
            outcome, test = judge.verdict(mutation)
            taken = round(time.monotonic() - start, 1)
            print(
                f"    {outcome} by {test} ({taken} s)" if test else f"    {outcome} ({taken} s)",
                flush=True,
            )
            found[mutation] = _result(root, mutation, texts[mutation.file], outcome, test, taken)
        bad = judge.check(result.test for result in found.values())
        left = [*(mutation for mutation, result in found.items() if result.test in bad), *left]
        found = {mutation: result for mutation, result in found.items() if result.test not in bad}
        _keep(root, found.values())
        results |= found
    results = {**survivors, **results}
    return [results[mutation] for mutation in mutations if mutation in results]


def _result(
    root: Path, mutation: Mutation, text: str, outcome: str, test: str, seconds: float
) -> Result:
    before, after = mutation.lines(text)
    source = _fingerprint(mutation.apply(text))
    return Result(
        mutation.part,
        mutation.file,
        mutation.function,
        mutation.operator,
        mutation.line,
        before,
        after,
        mutation.name,
        outcome,
        test,
        seconds,
        source,
        _fingerprint_of(root, test),
    )


def _keep(root: Path, results: Iterable[Result]) -> None:
    (root / RESULTS).parent.mkdir(parents=True, exist_ok=True)
    with open(root / RESULTS, "a") as file:
        file.writelines(json.dumps(asdict(result)) + "\n" for result in results)


def _known(root: Path) -> dict[tuple[str, str], Result]:
    """(Name, changed source) → the last result."""
    path = root / RESULTS
    if path.exists():
        rows = [Result(**json.loads(line)) for line in path.read_text().splitlines()]
    else:
        rows = []
    return {(row.name, row.source): row for row in rows}


def _fingerprint(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def _fingerprint_of(root: Path, test: str) -> str:
    path = root / test.partition("::")[0].partition(" ")[0]
    return _fingerprint(path.read_text(encoding="utf-8")) if test and path.is_file() else ""


def _described(root: Path, mutation: Mutation) -> str:
    before, after = mutation.lines((root / mutation.file).read_text(encoding="utf-8"))
    name = mutation.name or f"{mutation.function}, {mutation.operator}"
    return f"{mutation.file}:{mutation.line} ({name})\n    - {before}\n    + {after}"


#: Outcomes of a mutation that tests have noticed.
_NOTICED = ("killed", "timed out")


def is_good(results: Sequence[Result]) -> bool:
    drawn = [result for result in results if not result.name]
    missed = [result for result in results if result.outcome not in _NOTICED]
    return not any(result.name for result in missed) and len(missed) <= (1 - LEAST) * len(drawn)


def _table(results: Sequence[Result]) -> str:
    rows: dict[str, Counter[str]] = defaultdict(Counter)
    for result in results:
        for row in ("listed by name" if result.name else result.part, "all"):
            rows[row][result.outcome] += 1
    order = ["listed by name", *(part.name for part in PARTS), "all"]
    lines = [
        "| part | mutations | killed | timed out | survived | undecided |",
        "|---|--:|--:|--:|--:|--:|",
    ]
    for name in [name for name in order if name in rows]:
        count = rows[name]
        values = (
            count.total(),
            *(count[kind] for kind in ("killed", "timed out", "survived", "undecided")),
        )
        lines.append(f"| {name} | " + " | ".join(map(str, values)) + " |")
    return "\n".join(lines)


def _commit(root: Path) -> str:
    done = subprocess.run(
        ["git", "rev-parse", "--short", "HEAD"], cwd=root, capture_output=True, text=True
    )
    return done.stdout.strip() or "no commit"


def page(
    commit: str, mutations: Sequence[Mutation], results: Sequence[Result], cases: Cases, seed: int
) -> str:
    """The report."""
    drawn = [result for result in results if not result.name]
    named = [result for result in results if result.name]
    survivors = [result for result in results if result.outcome not in _NOTICED]
    missing = len(mutations) - len(results)
    noticed = {
        kind: sum(r.outcome in _NOTICED for r in rows)
        for kind, rows in (("drawn", drawn), ("named", named))
    }
    lines = [
        "# Results of mutation testing",
        "",
        f"Written by `make mutation` at commit {commit}; run until {time.strftime('%Y-%m-%d')} "
        f"with Python {platform.python_version()}, seed {seed}.",
        "Each mutation changes one expression or statement and runs the tests nearest to it; see",
        "[tests/README.md](../tests/README.md#mutation-testing).",
        "",
        f"**Tests notice {noticed['drawn']} of {len(drawn)} drawn mutations and {noticed['named']} "
        f"of {len(named)} listed by name.**",
        *([f"{missing} more are drawn or listed and were not run."] if missing else []),
        f"`tools/mutations.toml` sets {len(cases.equivalent)} mutations or functions aside that "
        "change no result.",
        "",
        _table(results),
        "",
        "## Survived or undecided",
        "",
        *(
            [
                f"- `{r.file}`, `{r.function or r.name}`: `{r.before}` → `{r.after}`"
                for r in survivors
            ]
            or ["None."]
        ),
        "",
        "## Listed by name",
        "",
        "| mutation | noticed by |",
        "|---|---|",
        *(f"| {r.name} | {f'`{r.test}`' if r.test else 'nothing'} |" for r in named),
        "",
    ]
    return "\n".join(lines)


if __name__ == "__main__":
    sys.exit(main())
