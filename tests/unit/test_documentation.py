"""Messages name the documentation by URL, and every page and section that they name is there."""

from __future__ import annotations

import ast
import re
import tomllib
from collections.abc import Iterable, Iterator
from pathlib import Path

import pytest

from slime.documentation import DOCS_URL, PROJECT_URL, doc_url, with_doc_urls
from tests.support.import_graph import forget_trees, nodes_of
from tests.support.processes import ROOT

SOURCES = sorted(
    path for folder in ("slime", "recipes", "examples") for path in (ROOT / folder).rglob("*.py")
)
SCRIPTS = sorted((ROOT / "slime").rglob("*.js"))
PAGE = re.compile(r"(?<![\w/.-])docs/[\w-]+\.md")


@pytest.fixture(scope="module", autouse=True)
def no_trees_afterwards() -> Iterator[None]:
    """The other tests of documentation, which come before, left them."""
    yield
    forget_trees()


def docstrings(nodes: Iterable[ast.AST]) -> set[int]:
    """Ids of the constants that are expression statements: docstrings, and those below fields."""
    return {
        id(node.value)
        for node in nodes
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)
    }


def messages(path: Path) -> Iterator[str]:
    nodes = nodes_of(path)
    skipped = docstrings(nodes)
    for node in nodes:
        if (
            isinstance(node, ast.Constant)
            and isinstance(node.value, str)
            and id(node) not in skipped
        ):
            yield node.value


def named_pages() -> dict[str, str]:
    """What is given to `doc_url`, below fields of flags, and in the scripts of the page → where."""
    found = {}
    for path in SOURCES:
        text = path.read_text(encoding="utf-8")
        called = re.findall(r"\bdoc_url\(['\"]([^'\"]+)", text)
        below_fields = re.findall(r"(?<![\w/.-])docs/([\w-]+\.md(?:#[\w-]+)?)", text)
        found |= dict.fromkeys([*called, *below_fields], str(path))
    for path in SCRIPTS:
        for page in re.findall(
            r"\$\{DOCS\}/([\w-]+\.md(?:#[\w-]+)?)", path.read_text(encoding="utf-8")
        ):
            found[page] = str(path)
    return found


def anchors(page: Path) -> set[str]:
    """As GitHub makes them of headings."""
    text = re.sub(r"```.*?```", "", page.read_text(encoding="utf-8"), flags=re.DOTALL)
    titles = re.findall(r"^#+ (.+)$", text, re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in titles}


def test_every_page_that_is_named_is_there() -> None:
    named = named_pages()
    assert len(named) > 15, "the search for names still works"
    missing = {
        name: where
        for name, where in named.items()
        if not (page := ROOT / "docs" / name.partition("#")[0]).is_file()
        or ("#" in name and name.partition("#")[2] not in anchors(page))
    }
    assert missing == {}


def test_no_message_names_a_page_by_a_path() -> None:
    wrong = {str(path): text for path in SOURCES for text in messages(path) if PAGE.search(text)}
    assert wrong == {}
    assert not [path for path in SCRIPTS if PAGE.search(path.read_text(encoding="utf-8"))]


def test_help_of_flags_names_pages_by_url(capsys: pytest.CaptureFixture[str]) -> None:
    from slime.__main__ import main

    assert main(["train", "--help", "all"]) == 0
    said = capsys.readouterr().out
    assert not PAGE.search(said) and DOCS_URL in said
    assert main(["flags", "agent-host"]) == 0
    assert doc_url("agents.md") in capsys.readouterr().out


def test_the_project_has_one_url() -> None:
    urls = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["urls"]
    assert {url.removeprefix(PROJECT_URL)[:1] for url in urls.values()} <= {"", "/"}
    assert urls["Documentation"] == f"{DOCS_URL}/index.md"
    for path in SCRIPTS:
        assert set(re.findall(r'"(https://github[^"]*/docs)', path.read_text())) <= {DOCS_URL}


def test_text_of_users_stays() -> None:
    assert with_doc_urls("see docs/serving.md#tools.") == f"see {doc_url('serving.md#tools')}."
    assert with_doc_urls("mydocs/a.md") == "mydocs/a.md"


def test_links_to_sections_lead_to_a_heading() -> None:
    wrong = []
    for page in [*ROOT.glob("*.md"), *ROOT.glob("docs/*.md"), *ROOT.glob("*/*/README.md")]:
        text = re.sub(r"```.*?```", "", page.read_text(encoding="utf-8"), flags=re.DOTALL)
        for target, anchor in re.findall(r"\]\(([^):#\s]*)#([^)\s]+)\)", text):
            named = page.parent / target if target else page
            if named.suffix == ".md" and anchor not in anchors(named):
                wrong.append(f"{page.relative_to(ROOT)}: {target}#{anchor}")
    assert wrong == []
