"""Documentation that must not fall behind the code."""

from __future__ import annotations

import ast
import importlib.util
import re
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest

from tests.support.import_graph import nodes_of
from tests.support.metrics_page import documented_names
from tests.support.processes import ROOT

METRIC = re.compile(r"(train|rollout|perf|eval|multi_turn|passrate)/[\w<>@/.\-]+")


@pytest.fixture(scope="module")
def make_docs() -> ModuleType:
    spec = importlib.util.spec_from_file_location("make_docs", ROOT / "tools" / "make_docs.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def metric_names(path: Path) -> Iterator[str]:
    """String literals and f-strings that look like metric names, with <> for what is filled in."""
    for node in nodes_of(path):
        if isinstance(node, ast.JoinedStr):
            text = "".join(
                part.value if isinstance(part, ast.Constant) else "<>" for part in node.values
            )  # type: ignore[misc]
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            text = node.value
        else:
            continue
        if (
            METRIC.fullmatch(text)
            and not text.endswith(("/", "-", "_"))
            and text.split("/", 1)[1] != "<>"
        ):
            yield text


def is_documented(name: str, documented: set[str]) -> bool:
    candidates = {name, f"{name}/<>"}  # `distribution` adds /mean and so on
    return bool(candidates & documented) or f"{name}/mean" in documented


def test_every_metric_is_documented() -> None:
    documented = documented_names()
    files = [p for p in (ROOT / "slime").rglob("*.py") if not {"observe", "page"} & {*p.parts}]
    found = {name: p.name for p in files for name in metric_names(p)}
    assert len(found) > 30, "the search for names still works"
    missing = {name: file for name, file in found.items() if not is_documented(name, documented)}
    # renamed before they are logged, or put together from parts that are documented one by one
    intermediate = {
        "train/skipped",
        "train/critic-skipped",
        "eval/<>/truncated_ratio",
        "eval/<>-<>",
        "perf/<>_time",
    }
    assert {n: f for n, f in missing.items() if n not in intermediate} == {}


def test_generated_pages_are_fresh(
    make_docs: ModuleType, capsys: pytest.CaptureFixture[str]
) -> None:
    assert make_docs.main(["--check"]) == 0, capsys.readouterr().out


def test_hooks_page_has_every_hook(make_docs: ModuleType) -> None:
    from slime.user_code.hooks import HOOKS

    page = make_docs.PAGES["docs/hooks.md"]()
    for flag in HOOKS:
        assert f"`--{flag.replace('_', '-')}`" in page, flag
    assert "data_source: DataSource" in page and "hook(self" not in page
    assert "| `get_samples(num_samples: int) -> list[list[Sample]]` |" in page
    resumes = "called when a run resumes from it"  # the second line of a method's docstring
    assert resumes in page


@pytest.mark.parametrize(
    "page",
    sorted(p.relative_to(ROOT) for p in [*ROOT.glob("docs/*.md"), *ROOT.glob("*.md")]),
    ids=str,
)
def test_links_between_pages_work(page: Path) -> None:
    text = re.sub(r"```.*?```", "", (ROOT / page).read_text(encoding="utf-8"), flags=re.DOTALL)
    targets = [t for t in re.findall(r"\]\(([^)#]+)[^)]*\)", text) if "://" not in t]
    missing = [t for t in targets if not (ROOT / page).parent.joinpath(t).exists()]
    assert missing == []


# -- the life of a sample --------------------------------------------------------------------------


def identifiers(path: Path) -> set[str]:
    """Names that a file defines: functions, classes, arguments, attributes, and keys of its
    dicts."""
    found: set[str] = set()
    for node in nodes_of(path):
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
            found.add(node.name)
        elif isinstance(node, ast.AnnAssign) and isinstance(node.target, (ast.Name, ast.Attribute)):
            found.add(node.target.id if isinstance(node.target, ast.Name) else node.target.attr)
        elif isinstance(node, ast.arg):
            found.add(node.arg)
        elif isinstance(node, ast.Attribute):
            found.add(node.attr)
        elif isinstance(node, ast.Dict):
            found.update(
                key.value
                for key in node.keys
                if isinstance(key, ast.Constant) and isinstance(key.value, str)
            )
    return found


def mentions() -> Iterator[tuple[list[Path], str]]:
    """(files linked in a line, name in backticks of the same line) of docs/life-of-a-sample.md."""
    for line in (ROOT / "docs" / "life-of-a-sample.md").read_text(encoding="utf-8").splitlines():
        files = [
            (ROOT / "docs" / target).resolve()
            for target in re.findall(r"\]\((\.\./slime/[^)]+\.py)\)", line)
        ]
        text = re.sub(r"\[`[^`]*`\]\([^)]*\)", "", line)
        yield from ((files, name) for name in re.findall(r"`([^`]+)`", text))


def test_the_life_of_a_sample_names_what_there_is() -> None:
    """Every name stands in a file linked in its line, is a field of a record, or a flag."""
    from slime.config.flags import all_flags
    from slime.samples.types import Sample

    flags = {f"--{name.replace('_', '-')}" for name in all_flags()}
    general = set(vars(Sample())) | {"Sample", "rollout_id", "rollout_data"}
    found = list(mentions())
    assert len(found) > 80, "the search for names still works"
    wrong = []
    for files, name in found:
        if name.startswith("--"):
            wrong += [name] if name not in flags else []
            continue
        known = general.union(*(identifiers(file) for file in files), {"n_samples_per_prompt"})
        wrong += [f"{name} ({part})" for part in name.split(".") if part not in known]
    assert wrong == []
