"""The suite passes wherever the clone is, and whoever runs it."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.places import NO_HOME, another_ray, as_user, becomes, clone, shadow_modules

pytestmark = pytest.mark.full

#: Tests of what depends on the place: paths, processes, users, output, the sandbox, the commands,
#: and two launches.
PARTS = [
    *(
        f"tests/unit/test_{name}.py"
        for name in (
            "agents_programs",
            "api",
            "bundle",
            "changed_tests",
            "checkpoint_dir",
            "cli",
            "convert_tools",
            "dataset_folders",
            "docs",
            "doctor",
            "doctor_recipes",
            "embedded_launch",
            "hook_failures",
            "import_paths",
            "mutation_tool",
            "observe_log",
            "observe_sinks",
            "placement",
            "python_sandbox",
            "ray_address",
            "ray_session",
            "recipes",
            "report",
            "resume_command",
            "rewards",
            "run_end",
            "run_folder",
            "sandbox",
            "sandbox_folders",
            "slow_waits",
            "stacks",
            "startup_progress",
            "stopped_processes",
            "stopping",
            "test_report",
            "user_calls",
            "watch_server",
            "weights_shared_memory",
        )
    ),
    "tests/first_hour/test_readme.py",
    "tests/loop/test_outputs.py",
]
#: Without an entry in /etc/passwd: a container with ``--user``.
NAMELESS, NOBODY = 54321, 65534
ORDINARY = pytest.mark.skipif(
    not becomes(NOBODY), reason="only root, with mount namespaces, becomes another user"
)


@pytest.fixture
def folder() -> Iterator[Path]:
    """A folder under /tmp that every user may enter."""
    with tempfile.TemporaryDirectory(prefix="slime-places-", dir="/tmp") as name:
        os.chmod(name, 0o755)
        yield Path(name)


def passes(tree: Path, *, uid: int | None = None, **variables: str) -> None:
    """The parts pass in a clone."""
    environment = {
        name: value for name, value in os.environ.items() if name not in ("USER", "LOGNAME")
    }
    environment |= {"PYTHONPATH": str(tree), "OMP_NUM_THREADS": "1", **variables}
    words = [
        "-m",
        "pytest",
        "-q",
        "--tb=short",
        "-p",
        "no:cacheprovider",
        "-m",
        "not full and not gpu",
        *PARTS,
    ]
    command = [sys.executable, *words]
    if uid is not None:
        subprocess.run(["chown", "-R", str(uid), str(tree)], check=True)
        command = [*as_user(uid), *command]
    done = subprocess.run(command, cwd=tree, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-8000:] + done.stderr[-2000:]


def test_under_tmp_with_a_colour_terminal_asked_for(folder: Path) -> None:
    passes(clone(folder / "slime"), FORCE_COLOR="1")


def test_a_path_with_blanks_and_letters_beside_files_with_names_of_modules(folder: Path) -> None:
    shadow_modules(folder)
    passes(clone(folder / "Ein Ort für Läufe" / "slime"))


def test_no_home_and_another_ray(folder: Path) -> None:
    with another_ray():
        passes(clone(folder / "slime"), HOME=NO_HOME)


@ORDINARY
@pytest.mark.parametrize("uid", [NOBODY, NAMELESS])
def test_an_ordinary_user_with_a_read_only_home(uid: int, folder: Path) -> None:
    home = folder / "home"
    home.mkdir(mode=0o555)
    passes(clone(folder / "slime"), uid=uid, HOME=str(home))
