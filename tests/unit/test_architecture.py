"""The rules of docs/architecture.md that a machine can check: who imports whom, sizes, names,
handled exceptions."""

from __future__ import annotations

import ast
import gc
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

from slime.observe.trackers import TRACKERS
from tests.support.import_graph import (
    FACE,
    FILES,
    ROOT,
    forget_trees,
    imported_by,
    imported_modules,
    imports_of_modules,
    in_circles,
    longest_chain,
    module_name,
    nodes_of,
    tree_of,
)


@pytest.fixture(scope="module", autouse=True)
def trees() -> Iterator[None]:
    gc.disable()  # millions of nodes that stay would be looked at again and again
    yield
    forget_trees()
    gc.enable()


TESTS = sorted((ROOT / "tests").rglob("*.py"))

#: From the ground up: a package or file imports only from those before it. docs/architecture.md
#: says what each is for.
FLOORS = (
    *("documentation", "deadlines", "errors", "data_path", "redact", "files", "paths"),
    *(f"processes.{name}" for name in ("stacks", "children", "host", "garbage", "footprint")),
    *("log", "user_code.process_state", "user_code.calls", "user_code.loading"),
    *("processes", "http_access", "hub"),
    *("config", "placement", "algorithms", "models", "samples", "user_code", "observe"),
    *(
        "prompts",
        "engines",
        "rollout",
        "memory",
        "forecast",
        "checkpoints",
        "weights",
        "trainer",
        "cluster",
    ),
    *("sandbox", "embedded", "page", "agents", "environments", "compat"),
    *("run.preflight", "diagnosis", "run", "loop", "run.api", "cli", "__main__"),
)
#: Library → the only modules that import it.
LIBRARIES: dict[str, tuple[str, ...]] = {
    "ray": ("cluster",),
    "megatron": ("trainer.megatron", "checkpoints", "weights", "config.megatron_flags"),
    "sglang": ("engines.sglang", "weights", "config.megatron_flags"),
    **{name: (f"observe.{name}_sink",) for name in TRACKERS},
    "compressed_tensors": ("engines.wire.quantised",),
    "tensorboard": ("observe.tensorboard_sink",),
}
#: Never imported at run time by these (a quick `--help`, cheap supports).
LIGHT = ("config", "observe", "errors", "user_code", "__main__")
HEAVY_LIBRARIES = ("torch", "ray", "transformers", "megatron", "sglang", "datasets")


def floor_of(module: str) -> int:
    """The row of FLOORS that says most of ``module``: "run.api" before "run"."""
    within = [name for name in FLOORS if is_within(module, (name,))]
    return FLOORS.index(max(within, key=len))


def is_within(module: str, prefixes: tuple[str, ...]) -> bool:
    return any(module == prefix or module.startswith(prefix + ".") for prefix in prefixes)


def is_type_checking(node: ast.AST) -> bool:
    return (
        isinstance(node, ast.If)
        and isinstance(node.test, ast.Name)
        and node.test.id == "TYPE_CHECKING"
    )


def test_imports_lead_downwards() -> None:
    """No package, and no file beside them, imports from a floor above its own."""
    found = [
        f"{name} imports {target}"
        for name, targets in imports_of_modules().items()
        for target in targets
        if name not in FACE and floor_of(target) > floor_of(name)
    ]
    assert found == []


def test_no_files_import_each_other_in_a_circle() -> None:
    assert in_circles(imports_of_modules()) == []  # these, or what imports them


#: Modules on the longest chain of imports from the loop: who follows a fact from there to its
#: ground passes so many.
MAX_CHAIN = 23


def test_the_longest_chain_of_imports_from_the_loop_is_short() -> None:
    chain = longest_chain(imports_of_modules(), "loop")
    assert len(chain) <= MAX_CHAIN, " → ".join(chain)


def test_the_longest_chain_is_found() -> None:
    assert longest_chain({"a": {"b", "c"}, "b": {"d"}, "c": {"b"}, "d": set()}, "a") == (
        "a",
        "c",
        "b",
        "d",
    )


@pytest.mark.parametrize("library", LIBRARIES)
def test_library_is_imported_only_where_it_belongs(library: str) -> None:
    found = [
        f"{path.relative_to(ROOT)}:{line}"
        for path in FILES
        for module, line in imported_by(path)
        if module.split(".")[0] == library and not is_within(module_name(path), LIBRARIES[library])
    ]
    assert found == []


def test_light_modules_import_nothing_heavy_at_their_top() -> None:
    found = []
    for path in FILES:
        if not is_within(module_name(path), LIGHT):
            continue
        for statement in tree_of(path).body:
            if is_type_checking(statement) or isinstance(
                statement, (ast.FunctionDef, ast.ClassDef)
            ):
                continue
            for module, line in imported_modules(statement):
                if module.split(".")[0] in HEAVY_LIBRARIES:
                    found.append(f"{path.relative_to(ROOT)}:{line} imports {module}")
    assert found == []


def test_tests_share_through_their_support_alone() -> None:
    """No test module imports another one or a conftest, and each shared name is imported from where
    it is made."""
    names = {path.stem for path in TESTS if path.stem.startswith("test_")} | {"conftest"}
    found = []
    for path in TESTS:
        for node in nodes_of(path):
            if not isinstance(node, (ast.Import, ast.ImportFrom)):
                continue
            place = f"{path.relative_to(ROOT)}:{node.lineno}"
            if isinstance(node, ast.Import):
                modules = [alias.name for alias in node.names]
            else:
                modules = [node.module or ""]
            found += [
                f"{place} imports {module}" for module in modules if set(module.split(".")) & names
            ]
            source = ROOT / (modules[0].replace(".", "/") + ".py")
            if (
                modules[0].startswith("tests.support.")
                and source.exists()
                and isinstance(node, ast.ImportFrom)
            ):
                borrowed = {
                    name
                    for name in (alias.name for alias in node.names)
                    if name not in made_in(source)
                }
                found += [
                    f"{place} imports {name} from {source.stem}, where it is borrowed"
                    for name in borrowed
                ]
    assert found == []


def test_benchmarks_import_nothing_from_tests() -> None:
    """A benchmark runs without the tests; what both use is in ``benchmarks/``."""
    found = [
        f"{path.relative_to(ROOT)}:{line} imports {module}"
        for path in sorted((ROOT / "benchmarks").rglob("*.py"))
        for module, line in imported_by(path)
        if module.split(".")[0] == "tests"
    ]
    assert found == []


def test_no_two_test_files_have_one_name() -> None:
    """pytest, called for all folders at once, would take the second for the first."""
    names = [path.name for path in TESTS if path.stem.startswith("test_")]
    assert {name for name in names if names.count(name) > 1} == set()


@cache
def made_in(path: Path) -> set[str]:
    """Names that a module makes at its top: functions, classes, and what is assigned."""
    made = set()
    for node in tree_of(path).body:
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
            made.add(node.name)
        elif isinstance(node, (ast.Assign, ast.AnnAssign)):
            made |= {
                part.id
                for part in ast.walk(node)
                if isinstance(part, ast.Name) and type(part.ctx) is ast.Store
            }
    return made


def asked_which_engine(tree: ast.AST) -> Iterator[int]:
    """Lines that compare ``rollout_engine``, or one of its values, with something."""
    for node in ast.walk(tree):
        if isinstance(node, (ast.Compare, ast.Match)):
            words = ast.unparse(node)
            if "rollout_engine" in words.replace("'rollout_engine'] == 'auto'", "") or any(
                isinstance(part, ast.Constant) and part.value in ("embedded", "sglang")
                for part in operands(node)
            ):
                yield node.lineno


def operands(node: ast.AST) -> list[ast.AST]:
    return [node.left, *node.comparators] if isinstance(node, ast.Compare) else list(ast.walk(node))


def test_the_record_of_an_engine_is_asked_and_never_its_name() -> None:
    """What depends on the engine is a field of `slime.engines.kinds`, or of its options in the
    configuration."""
    found = [
        f"{path.relative_to(ROOT)}:{line}"
        for path in FILES
        if module_name(path) not in ("engines.kinds", "config.engine_flags")
        if any(word in path.read_text() for word in ("rollout_engine", "embedded", "sglang"))
        for line in asked_which_engine(tree_of(path))
    ]
    assert found == []


@pytest.mark.parametrize(
    "code",
    [
        "config.engine.rollout_engine != 'sglang'",
        "flags.get('rollout_engine') in ('embedded',)",
        "draft['rollout_engine'] == kind",
        "name == 'embedded'",
    ],
)
def test_a_question_which_engine_it_is_is_found(code: str) -> None:
    assert list(asked_which_engine(ast.parse(code))) == [1]


def test_names_say_what_is_inside() -> None:
    vague = {"utils", "util", "misc", "helpers", "helper", "common"}
    assert [str(p.relative_to(ROOT)) for p in FILES if {p.stem, p.parent.name} & vague] == []


def _catches_everything(handler: ast.ExceptHandler) -> bool:
    kinds = handler.type.elts if isinstance(handler.type, ast.Tuple) else [handler.type]
    return any(
        k is None or (isinstance(k, ast.Name) and k.id in ("Exception", "BaseException"))
        for k in kinds
    )


def _swallows(handler: ast.ExceptHandler) -> bool:
    """Neither raises nor looks at the exception: it goes on as if nothing had happened."""
    for node in ast.walk(handler):
        if isinstance(node, ast.Raise):
            return False
        if handler.name and isinstance(node, ast.Name) and node.id == handler.name:
            return False
    return True


def test_no_exception_is_swallowed() -> None:
    found = [
        f"{path.relative_to(ROOT)}:{node.lineno}"
        for path in FILES
        for node in nodes_of(path)
        if isinstance(node, ast.ExceptHandler) and _catches_everything(node) and _swallows(node)
    ]
    assert found == []


@pytest.mark.parametrize(
    ("code", "swallows"),
    [
        ("try: f()\nexcept Exception: pass", True),
        ("try: f()\nexcept: x = 1", True),
        ("try: f()\nexcept (ValueError, BaseException): log('oh')", True),
        ("try: f()\nexcept Exception as e: log('oh')", True),
        ("try: f()\nexcept Exception as e: log(e)", False),
        ("try: f()\nexcept BaseException:\n  close()\n  raise", False),
        ("try: f()\nexcept OSError: pass", False),
    ],
)
def test_the_check_for_swallowed_exceptions(code: str, swallows: bool) -> None:
    (handler,) = [node for node in ast.walk(ast.parse(code)) if isinstance(node, ast.ExceptHandler)]
    assert (_catches_everything(handler) and _swallows(handler)) is swallows


#: Beginnings of a docstring that only the name above it completes.
INCOMPLETE = re.compile(r"(Of|Those|To be|Who|By|As|Such|Likewise|The same)\b")


@pytest.mark.parametrize(
    ("text", "incomplete"),
    [("The same for a batch.", True), ("Assign rows.", False), ("Return the same rows.", False)],
)
def test_the_check_for_incomplete_docstrings(text: str, incomplete: bool) -> None:
    assert bool(INCOMPLETE.match(text)) is incomplete


def test_docstrings_make_sense_without_the_name_above_them() -> None:
    described = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)
    assert [
        f"{path.name}: {node.name}"
        for path in FILES
        for node in ast.walk(tree_of(path))
        if isinstance(node, described) and INCOMPLETE.match(ast.get_docstring(node) or "")
    ] == []


def test_public_modules_have_docstrings() -> None:
    found = [
        str(p.relative_to(ROOT))
        for p in FILES
        if not ast.get_docstring(tree_of(p)) and tree_of(p).body and not p.stem.startswith("_")
    ]
    assert found == []
