"""`slime init`: recipes and examples in a folder of the user's, ready to run."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

import slime
from slime.__main__ import main
from slime.cli import init
from tests.support.processes import ROOT


@pytest.fixture(scope="module")
def copied(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("init") / "my project"
    init.copy_starter(folder)
    return folder


def test_it_lists_what_it_copied_and_what_to_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PATH", "/nowhere")  # the environment is not activated
    assert main(["init", "my project"]) == 0
    said = capsys.readouterr().out.splitlines()
    assert said[0] == f"copied to {tmp_path / 'my project'}:"
    assert said[-1] == f"next: cd 'my project' && {shlex.quote(sys.executable)} -m recipes.demo"
    listed = {line.split()[0] for line in said[1:-1]}
    there = {
        str(page.parent.relative_to(tmp_path / "my project"))
        for page in (tmp_path / "my project").glob("*/*/README.md")
    }
    assert listed == there | {"recipes/demo.py"} and len(there) > 10


def test_everything_is_there_and_nothing_else(copied: Path) -> None:
    wanted = subprocess.run(
        ["git", "ls-files", "recipes", "examples"], cwd=ROOT, capture_output=True, text=True
    )
    if wanted.returncode:
        pytest.skip("this is no clone: git does not list its files")
    names = {name for name in wanted.stdout.splitlines() if (ROOT / name).exists()}
    found = {str(path.relative_to(copied)) for path in copied.rglob("*") if path.is_file()}
    assert names - found == set()
    assert [entry.name for entry in copied.iterdir() if entry.name not in init.PARTS] == []
    for name in names:
        assert os.access(copied / name, os.X_OK) == os.access(ROOT / name, os.X_OK), name


def test_links_of_the_pages_lead_somewhere(copied: Path) -> None:
    pages = list(copied.rglob("*.md"))
    targets = [
        (page, target)
        for page in pages
        for target in re.findall(r"\]\(([^)#]+)[^)]*\)", page.read_text(encoding="utf-8"))
    ]
    assert len(targets) > 20, "the search for links still works"
    relative = [(page, target) for page, target in targets if "://" not in target]
    assert [target for page, target in relative if not (page.parent / target).exists()] == []


@pytest.mark.parametrize("there", ["recipes", "examples"])
@pytest.mark.parametrize("kind", ["folder", "file", "link"])
def test_nothing_is_overwritten(
    there: str, kind: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    entry = tmp_path / there
    if kind == "folder":
        entry.mkdir()
    elif kind == "file":
        entry.write_text("mine")
    else:
        entry.symlink_to("nowhere")
    assert main(["init", str(tmp_path)]) == 2
    assert "overwrites nothing" in capsys.readouterr().err
    assert [path.name for path in tmp_path.iterdir()] == [there]


def test_a_folder_that_is_a_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "file").write_text("mine")
    assert main(["init", str(tmp_path / "file")]) == 2
    assert "cannot copy to" in capsys.readouterr().err


def test_a_copy_that_fails_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(source: Path, target: Path, **_: object) -> None:
        target.mkdir()
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(init.shutil, "copytree", full)
    assert main(["init", str(tmp_path)]) == 2
    assert list(tmp_path.iterdir()) == []


def test_an_installation_without_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(slime, "__file__", str(tmp_path / "slime" / "__init__.py"))
    assert main(["init", str(tmp_path / "new")]) == 2
    assert "no recipes and examples" in capsys.readouterr().err


def test_a_copied_recipe_uses_the_callers_python(copied: Path, tmp_path: Path) -> None:
    """There is no Makefile to make an environment with; the interpreter here says how it was
    called."""
    folder = tmp_path / "bin"
    folder.mkdir()
    (folder / "python").symlink_to("/bin/echo")
    env = {**os.environ, "PATH": f"{folder}:{os.environ['PATH']}"}
    env.pop("PYTHON", None)
    script = copied / "recipes" / "smollm2-arithmetic" / "run.sh"
    command = [str(script), "--num-rollout", "2"]
    done = subprocess.run(
        command, capture_output=True, text=True, env=env, cwd=tmp_path, timeout=60
    )
    assert done.returncode == 0, done.stderr
    said = done.stdout.splitlines()[-1]
    assert said.startswith(
        f"-m slime train --config {copied}/recipes/smollm2-arithmetic/config.yaml"
    )
