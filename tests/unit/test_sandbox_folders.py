"""Folders of sandboxes: none stays behind, whatever a program did in it and however its run
ended."""

from __future__ import annotations

import asyncio
import fcntl
import os
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from slime.sandbox import folders
from slime.sandbox.folders import PROGRAM, TASK, remove, remove_stale, temporary_folder


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.setattr(folders, "_has_looked", False)
    return tmp_path


def test_a_folder_is_gone_when_its_block_ends(place: Path) -> None:
    async def use() -> None:
        async with temporary_folder(TASK) as folder:
            assert Path(folder).parent == place.resolve() and os.listdir(folder) == []
            (Path(folder) / "in").mkdir()
            raise LookupError

    with pytest.raises(LookupError):
        asyncio.run(use())
    assert os.listdir(place) == []


def test_what_a_killed_run_left_is_removed_by_the_next_and_what_is_held_stays(place: Path) -> None:
    hold = """
import asyncio, sys, time
from slime.sandbox.folders import PROGRAM, temporary_folder
async def main():
    async with temporary_folder(PROGRAM) as folder:
        open(folder + "/file", "w").close()
        print(folder, flush=True)
        time.sleep(1000)
asyncio.run(main())
"""
    environ = {**os.environ, "TMPDIR": str(place)}
    started = [
        subprocess.Popen(
            [sys.executable, "-c", hold], env=environ, stdout=subprocess.PIPE, text=True
        )
        for _ in range(2)
    ]
    killed, alive = (process.stdout.readline().strip() for process in started)  # type: ignore[union-attr]
    try:
        started[0].kill()
        started[0].wait()
        (place / "slime-other").mkdir()

        async def use() -> list[str]:
            async with temporary_folder(TASK) as own:
                return [name for name in os.listdir(place) if name != Path(own).name]

        assert sorted(asyncio.run(use())) == sorted(["slime-other", Path(alive).name])
        assert not os.path.exists(killed) and os.path.exists(f"{alive}/file")
    finally:
        started[1].kill()
        started[1].wait()
    for process in started:
        process.stdout.close()  # type: ignore[union-attr]


def test_links_and_folders_of_others_are_left_alone(place: Path) -> None:
    (place / "far").mkdir()
    (place / "far" / "file").write_text("kept")
    os.symlink(place / "far", place / f"{PROGRAM}link")
    (place / f"{PROGRAM}held").mkdir()
    held = os.open(place / f"{PROGRAM}held", os.O_RDONLY)
    fcntl.flock(held, fcntl.LOCK_EX)
    left = [f"{PROGRAM}link", f"{PROGRAM}held"]
    if os.geteuid() == 0:
        (place / f"{TASK}other").mkdir()
        os.chown(place / f"{TASK}other", 12345, 12345)
        left.append(f"{TASK}other")
    assert remove_stale() == [] and sorted(os.listdir(place)) == sorted(["far", *left])
    os.close(held)
    assert remove_stale() == [f"{PROGRAM}held"] and (place / "far" / "file").read_text() == "kept"


def test_a_folder_is_taken_by_another_process_before_it_is_held(
    place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    make, made = tempfile.mkdtemp, []

    def taken_at_first(**options: str) -> str:
        made.append(make(**options))
        if len(made) == 1:
            os.rmdir(made[0])
        return made[-1]

    monkeypatch.setattr(tempfile, "mkdtemp", taken_at_first)

    async def use() -> str:
        async with temporary_folder(PROGRAM) as folder:
            return folder

    assert asyncio.run(use()) == made[1]


def test_folders_without_rights_and_deeper_than_a_path_are_removed(place: Path) -> None:
    top = place / "top"
    top.mkdir()
    (place / "far").mkdir(mode=0o755)
    os.symlink(place / "far", top / "link")
    code = """
import os, sys
os.chdir(sys.argv[1])
for _ in range(3000):
    os.mkdir("d")
    open("file", "w").close()
    os.chdir("d")
os.chdir(sys.argv[1])
os.chmod("d", 0)
"""
    subprocess.run([sys.executable, "-c", code, str(top)], check=True)
    remove(str(top))
    assert os.listdir(place) == ["far"] and (place / "far").stat().st_mode & 0o777 == 0o755
