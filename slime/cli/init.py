"""`slime init`: copy the recipes and examples into a folder, to run and to change.

slime init my-project
cd my-project && python -m recipes.demo        a tiny model learns sums, in a few minutes on a CPU
"""

from __future__ import annotations

import os
import re
import shlex
import shutil
import sys
import tempfile
from pathlib import Path

import slime
from slime.cli.arguments import Arguments
from slime.documentation import DOCS_URL, PROJECT_URL
from slime.errors import UserError

PARTS = ("recipes", "examples")
_LINK = re.compile(r"\]\((?:\.\./)+docs/")


def main(argv: list[str]) -> int:
    """Copy, list what was copied, and print the command to run next. Returns the exit status."""
    parser = Arguments("slime init", __doc__)
    parser.add_argument(
        "folder", nargs="?", default=".", help="where to; made if missing (default: here)"
    )
    folder = Path(parser.parse_args(argv).folder)
    copy_starter(folder)
    print(f"copied to {folder.resolve()}:")
    for name, title in contents(folder):
        print(f"  {name:<32}{title}")
    go_there = "" if folder.resolve() == Path.cwd() else f"cd {shlex.quote(str(folder))} && "
    print(f"next: {go_there}{_python()} -m recipes.demo")
    return 0


def copy_starter(folder: Path) -> None:
    """Copy the recipes and examples into ``folder``. Links to the documentation become URLs.

    Raises:
        UserError: ``folder`` already has one of them, it cannot be created, or this installation
            has no recipes and examples.
    """
    there = [name for name in PARTS if os.path.lexists(folder / name)]
    if there:
        raise UserError(
            f"{folder / there[0]} exists",
            why="slime init overwrites nothing",
            fix="name another folder: slime init FOLDER",
        )
    source = _source()
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(prefix=".slime-init-", dir=folder) as scratch:
            for name in PARTS:  # a failed copy leaves nothing in the folder
                left_out = shutil.ignore_patterns("__pycache__", "outputs", ".*")
                shutil.copytree(source / name, Path(scratch, name), ignore=left_out)
            for page in Path(scratch).rglob("*.md"):
                text = page.read_text(encoding="utf-8")
                page.write_text(_LINK.sub(f"]({DOCS_URL}/", text), encoding="utf-8")
            for name in PARTS:
                os.rename(Path(scratch, name), folder / name)
    except (FileExistsError, NotADirectoryError, PermissionError) as error:
        raise UserError(
            f"cannot copy to {folder}", why=str(error), fix="name another folder: slime init FOLDER"
        ) from error


def contents(folder: Path) -> list[tuple[str, str]]:
    """List what can be run: (path below ``folder``, title of its page)."""
    rows = [("recipes/demo.py", "A tiny model learns sums: SFT, then GRPO")]
    for part in PARTS:
        for page in sorted((folder / part).glob("*/README.md")):
            title = page.read_text(encoding="utf-8").partition("\n")[0].removeprefix("# ")
            rows.append((str(page.parent.relative_to(folder)), title))
    return rows


def _source() -> Path:
    """Return the folder with the recipes and examples: in the installed package, or its git clone.

    Raises:
        UserError: neither holds them.
    """
    package = Path(slime.__file__).parent
    for folder in (package / "starter", package.parent):
        if (folder / "recipes" / "demo.py").is_file() and (folder / "examples").is_dir():
            return folder
    raise UserError(
        "this installation has no recipes and examples",
        why=f"looked in {package}",
        fix=f"they are at {PROJECT_URL}",
    )


def _python() -> str:
    """Return the command for this interpreter: "python" if that runs the same environment, else its
    path."""
    found = shutil.which("python")
    here = Path(sys.executable).absolute().parent
    return (
        "python" if found and Path(found).absolute().parent == here else shlex.quote(sys.executable)
    )
