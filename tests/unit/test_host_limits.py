"""What a host must give a run: open files, and a folder for Unix sockets."""

from __future__ import annotations

import os
import resource
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from slime.errors import UserError
from slime.processes import host
from tests.support.processes import ROOT

_RAISED = """
import resource, sys
from slime.errors import UserError
from slime.processes.host import raise_open_files
resource.setrlimit(resource.RLIMIT_NOFILE, (int(sys.argv[1]), int(sys.argv[2])))
try:
    print(raise_open_files(), *resource.getrlimit(resource.RLIMIT_NOFILE))
except UserError as error:
    print(error)
"""


def raised(soft: int, hard: int) -> str:
    words = [sys.executable, "-c", _RAISED, str(soft), str(hard)]
    return subprocess.run(
        words, cwd=ROOT, capture_output=True, text=True, check=True
    ).stdout.strip()


def test_the_soft_limit_of_open_files_is_raised_to_the_hard_one() -> None:
    hard = min(resource.getrlimit(resource.RLIMIT_NOFILE)[1] % (1 << 63), 2000)
    assert raised(100, hard) == f"{hard} {hard} {hard}"


def test_a_hard_limit_that_no_run_fits_in_is_named_with_both_numbers() -> None:
    said = raised(64, 64)
    assert (
        said.startswith("a process may open 64 files here, and a run needs at least 256")
        and "ulimit" in said
    )


def folder_of(length: int, root: Path) -> Path:
    """A folder of so many bytes below /tmp, which may be a link."""
    path = root / ("x" * (length - len(os.fsencode(root)) - 1))
    path.mkdir()
    return path


@pytest.fixture
def short(tmp_path: Path) -> Iterator[Path]:
    """A folder of 10 bytes or so, as people have; that of tests is long."""
    link = Path("/tmp") / f"s{os.getpid()}"
    link.symlink_to(tmp_path)
    try:
        yield link
    finally:
        link.unlink()


def test_names_of_sockets_fit_into_the_longest_folder_that_is_taken(short: Path) -> None:
    """And would not into one that is a byte longer, at the longest process id."""
    name = "ray/session_2026-11-26_12-21-41_241308_4194304/sockets/plasma_store"
    for length, fits in ((39, True), (40, False)):
        folder = folder_of(length, short)
        assert (host.folder_of_sockets({"TMPDIR": str(folder)})[0] == folder) is fits
        (folder / name).parent.mkdir(parents=True)
        with socket.socket(socket.AF_UNIX) as listener:
            if fits:
                listener.bind(str(folder / name))
            else:
                with pytest.raises(OSError, match="too long"):
                    listener.bind(str(folder / name))


def test_a_long_tmpdir_gives_way_to_a_short_folder(tmp_path: Path) -> None:
    folder, why = host.folder_of_sockets({"TMPDIR": str(tmp_path)})
    assert folder == Path("/tmp") and f"{tmp_path} has {len(os.fsencode(tmp_path))} bytes" in why


def test_a_tmpdir_that_cannot_be_written_gives_way_too() -> None:
    folder, why = host.folder_of_sockets({"TMPDIR": "/proc"})
    assert folder == Path("/tmp") and why.startswith("/proc cannot be written: ")


def test_a_full_tmpdir_gives_way_too(monkeypatch: pytest.MonkeyPatch, short: Path) -> None:
    write = host._write_to

    def is_full(folder: Path) -> None:
        if folder == short:
            raise OSError(28, "No space left on device")
        write(folder)

    monkeypatch.setattr(host, "_write_to", is_full)
    assert host.folder_of_sockets({"TMPDIR": str(short)}) == (
        Path("/tmp"),
        f"{short} cannot be written: No space left on device",
    )


def test_a_folder_that_is_yet_to_be_made_is_taken(short: Path) -> None:
    assert host.folder_of_sockets({"RAY_TMPDIR": str(short / "new")}) == (short / "new", "")
    assert not (short / "new").exists(), "a launch that is refused leaves nothing"


@pytest.mark.parametrize("named", ["/proc/nowhere", "/tmp/" + "x" * 40])
def test_a_ray_tmpdir_that_does_not_serve_is_refused(named: str) -> None:
    with pytest.raises(UserError, match=f"Ray cannot keep its sockets in {named}") as caught:
        host.folder_of_sockets({"RAY_TMPDIR": named, "TMPDIR": "/tmp"})
    assert "RAY_TMPDIR" in caught.value.fix


def test_without_any_folder_all_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host, "_SHORT_FOLDERS", (Path("/proc"), Path("/sys")))
    with pytest.raises(UserError, match="nor in /proc, /sys"):
        host.folder_of_sockets({"TMPDIR": "/" + "x" * 99})
