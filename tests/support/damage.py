"""Damages of run folders: what file managers, disks, editors and people leave in one. Drawn by a
seed."""

from __future__ import annotations

import os
import random
import shutil
from collections.abc import Callable
from pathlib import Path

#: Of a JSON file, what another program, an editor or a mistake may have made of it.
SHAPES = (
    b"[]",
    b"3",
    b"null",
    b'"text"',
    b"{}",
    b"[" * 4000,
    b'{"stages": []}',
    b'{"stages": {"": 3, "../x": {}}}',
    b'{"stages": {"": {"started": "soon", "state": 7, "pid": -1, "cwd": "\\u0000"}}}',
    b'{"stages": {"": {"started": 1e300, "state": "running", "cwd": "/nowhere"}}}',
    b'{"origins": 1, "observe": []}',
    b'{"origins": {}, "observe": null, "checkpoint": [1]}',
    b'{"files": {}}',
    b'{"files": {"../../run.json": {"nbytes": 1, "xxh3": ""}}}',
    b'{"files": {"common.pt": 3}}',
    b'{"files": []}',
    b'{"step": "x", "train/loss": []}\n{"step": null}\n{"step": 1e400}\n[1]\n',
    b'{"step": %s}' % (b"9" * 5000),
    b'{"n": %s}' % (b"9" * 5000),
    b"\x00" * 300,
)
_COPIES = ("{} (copy)", "{} - Copy", "{}~", "Copy of {}", ".{}.swp", "{}.bak")
_JUNK = (".DS_Store", "Thumbs.db", "desktop.ini", "._config.json", "New Folder/")


def damage(folder: Path, dice: random.Random) -> str:
    """Harm something in a run folder. Returns what was done, for messages."""
    places = sorted(path for path in folder.rglob("*") if path.name != ".lock")
    files = [path for path in places if path.is_file()]
    kind = dice.choice(_KINDS)
    if kind in _OF_ITERATIONS:
        target = dice.choice(sorted(folder.glob("checkpoints/iter_*")))
    elif kind in (_become_a_file, _remove, _link, _copy):
        target = dice.choice(places)
    else:
        target = dice.choice(_likely(files, dice))
    said = kind(target, dice)
    return f"{kind.__name__} {target.relative_to(folder)} {said or ''}"


def _likely(files: list[Path], dice: random.Random) -> list[Path]:
    """The few files that decide how a run goes on are hit as often as all others together."""
    deciding = [
        path for path in files if path.suffix in (".json", ".txt") or path.parent.name == "journal"
    ]
    return deciding if dice.random() < 0.5 else files


def _copy(path: Path, dice: random.Random) -> str:
    """As file managers do: beside it, by its stem or its whole name."""
    pattern = dice.choice(_COPIES)
    is_whole = path.is_dir() or dice.random() < 0.5
    name = pattern.format(path.name) if is_whole else pattern.format(path.stem) + path.suffix
    if path.is_dir():
        shutil.copytree(path, path.with_name(name))
    else:
        shutil.copyfile(path, path.with_name(name))
        if dice.random() < 0.5:
            _flip(path.with_name(name), dice)
    return name


def _junk(path: Path, dice: random.Random) -> str:
    name = dice.choice(_JUNK)
    if name.endswith("/"):
        (path.parent / name).mkdir(exist_ok=True)
    else:
        (path.parent / name).write_bytes(dice.randbytes(40))
    return name


def _become_a_folder(path: Path, dice: random.Random) -> str:
    path.unlink()
    path.mkdir()
    if dice.random() < 0.5:
        (path / "inside").write_text("x")
    return ""


def _become_a_file(path: Path, dice: random.Random) -> str:
    _remove(path, dice)
    path.write_bytes(dice.choice((b"", b"a file")))
    return ""


def _cut(path: Path, dice: random.Random) -> str:
    size = path.stat().st_size
    length = dice.randrange(size) if size else 0
    os.truncate(path, length)
    return f"to {length} of {size} bytes"


def _empty(path: Path, dice: random.Random) -> str:
    os.truncate(path, 0)
    return ""


def _flip(path: Path, dice: random.Random) -> str:
    content = bytearray(path.read_bytes())
    places = (
        [dice.randrange(len(content)) for _ in range(dice.choice((1, 1, 1, 5)))] if content else []
    )
    for place in places:
        content[place] ^= 1 << dice.randrange(8)
    path.write_bytes(content)
    return f"at {places}"


def _encode(path: Path, dice: random.Random) -> str:
    text = path.read_bytes().decode("utf-8", "replace")
    encoding = dice.choice(("utf-16", "utf-16-be", "utf-8-sig", "latin-1", "utf-32"))
    path.write_bytes((text + "ä" * dice.randrange(2)).encode(encoding, "replace"))
    return f"as {encoding}"


def _link(path: Path, dice: random.Random) -> str:
    """To nothing, to itself, or to what was here."""
    to = dice.choice(("nothing", "itself", "elsewhere"))
    elsewhere = path.with_name(f"{path.name}.moved")
    if to == "elsewhere":
        path.rename(elsewhere)
    else:
        _remove(path, dice)
    path.symlink_to(
        {"nothing": Path("/nowhere/at/all"), "itself": path, "elsewhere": elsewhere}[to]
    )
    return f"to {to}"


def _pipe(path: Path, dice: random.Random) -> str:
    path.unlink()
    os.mkfifo(path)
    return ""


def _reshape(path: Path, dice: random.Random) -> str:
    content = dice.choice(SHAPES)
    path.write_bytes(content)
    return f"{content[:60]!r}"


def _remove(path: Path, dice: random.Random) -> str:
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink()
    return ""


def _rename_iteration(path: Path, dice: random.Random) -> str:
    """Another number, spelt rightly or not; where there is one of the name already it goes."""
    names = (
        "iter_0000009",
        "iter_0000001",
        "iter_3",
        "iter_00000003",
        "iter_٠٠٠٠٠٠٣",
        f"iter_{'9' * 200}",
        "release",
    )
    target = path.with_name(dice.choice(names))
    if target.exists() and target != path:
        shutil.rmtree(target)
    path.rename(target)
    return f"to {target.name[:20]}"


def _double_iteration(path: Path, dice: random.Random) -> str:
    names = (
        "iter_0000009", "iter_0000004", "iter_3", "{} - Copy", "{} (copy)", "{}.damaged",
        ".{}.replaced",
    )  # fmt: skip
    target = path.with_name(dice.choice(names).format(path.name))
    shutil.copytree(path, target, dirs_exist_ok=True)
    return f"as {target.name}"


def _lose_manifest(path: Path, dice: random.Random) -> str:
    """With a byte of another file, or that file."""
    (path / "manifest.json").unlink()
    other = dice.choice(sorted(path.iterdir()))
    return f"and {dice.choice((_flip, _remove, _cut))(other, dice)} {other.name}"


_KINDS: tuple[Callable[[Path, random.Random], str], ...] = (
    *(
        _copy,
        _junk,
        _become_a_folder,
        _become_a_file,
        _cut,
        _empty,
        _flip,
        _flip,
        _flip,
        _encode,
        _link,
        _pipe,
    ),
    *(_reshape, _reshape, _remove, _rename_iteration, _double_iteration, _lose_manifest),
)
_OF_ITERATIONS = (_rename_iteration, _double_iteration, _lose_manifest)
