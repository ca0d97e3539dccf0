"""Places that software is run in: clones at odd paths, users without rights, working directories
full of files."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from tests.support.processes import ROOT

#: A home directory in which nothing can be made, not even by root.
NO_HOME = "/dev/null"
#: Modules of Python and of libraries that are imported early and late, by the driver, by Ray and by
#: the engines.
SHADOWED = (
    "random", "types", "logging", "tokenize", "queue", "statistics", "calendar", "platform",
    "datasets", "data",
)  # fmt: skip


def shadow_modules(folder: Path) -> None:
    """Write files that end every process that imports them in place of the modules of their
    names."""
    for name in SHADOWED:
        (folder / f"{name}.py").write_text("raise SystemExit(f'{__file__} was imported')\n")


def clone(folder: Path) -> Path:
    """Copy the working tree, with changes that are not committed, as a repository of its own;
    returns ``folder``."""
    folder.mkdir(parents=True)
    listed = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    names = subprocess.run(listed, cwd=ROOT, capture_output=True, text=True, check=True).stdout
    for name in filter(None, names.split("\0")):
        if (ROOT / name).is_file():
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(ROOT / name, folder / name)
    for words in (["init", "-q"], ["add", "-A"], ["commit", "-q", "-m", "all"]):
        identity = [
            "-c", "user.name=test", "-c", "user.email=test@localhost", "-c", "commit.gpgsign=false"
        ]  # fmt: skip
        subprocess.run(["git", *identity, *words], cwd=folder, check=True)
    return folder


def as_user(uid: int) -> list[str]:
    """Return the start of a command line that runs as another user, for tests that run as root.

    An interpreter in root's own home is shown to that user in a mount namespace of the command.
    """
    change = ["setpriv", f"--reuid={uid}", f"--regid={uid}", "--clear-groups"]
    home = Path.home()
    python = Path(os.path.realpath(sys.executable))
    if not python.is_relative_to(home):
        return change
    top = home / python.relative_to(home).parts[0]
    kept = tempfile.mkdtemp(prefix="slime-places-")
    show = (
        f"mount --bind '{top}' {kept} && mount -t tmpfs -o mode=755 tmpfs '{home}' && mkdir '{top}'"
        f" && mount --move {kept} '{top}' && exec \"$@\""
    )
    return ["unshare", "--mount", "sh", "-c", show, "sh", *change]


def becomes(uid: int) -> bool:
    """Return whether commands can run as another user here, with this interpreter."""
    if os.geteuid() != 0 or not all(map(shutil.which, ("setpriv", "unshare"))):
        return False
    command = [*as_user(uid), sys.executable, "-c", "import os; print(os.getuid())"]
    return subprocess.run(command, capture_output=True, text=True).stdout.strip() == str(uid)


_CLUSTER = (
    "import ray, sys; ray.init(address='local', num_cpus=1, include_dashboard=False); print(); "
    "sys.stdin.read()"
)


@contextmanager
def another_ray() -> Iterator[None]:
    """A Ray cluster that somebody else runs on this host."""
    command = [sys.executable, "-c", _CLUSTER]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdin is not None and process.stdout is not None
        try:
            assert process.stdout.readline() == b"\n"
            yield
        finally:
            process.stdin.close()  # it reads to the end, and Ray ends with it
            process.wait(120)
