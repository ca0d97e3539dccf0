"""Directories of checkpoints, finished through the calls of a real save. No torch in sight."""

from __future__ import annotations

from pathlib import Path

from slime.checkpoints import directory as ckpt
from slime.checkpoints.directory import FileRecord


def complete(root: Path, iteration: int, content: str = "x", track: bool = True) -> Path:
    """A finished save of one file, through the same calls as a real one."""
    final = root / ckpt.iteration_name(iteration)
    partial = ckpt.partial_dir(final)
    for name in ("data.distcp", ".metadata", "metadata.json", "common.pt", ckpt.EXTRA_STATE):
        (partial / name).write_text(content)
    records = [
        FileRecord(path.name, path.stat().st_size, ckpt.file_fingerprint(path))
        for path in sorted(partial.iterdir())
    ]
    ckpt.write_manifest(partial, records)
    ckpt.publish(partial, final)
    if track:
        ckpt.set_latest(root, iteration)
    return final


def as_by_another_program(checkpoint: Path) -> Path:
    """Without what only this program writes."""
    for name in (ckpt.MANIFEST, ckpt.EXTRA_STATE):
        (checkpoint / name).unlink()
    return checkpoint


def flip_a_byte(file: Path) -> None:
    """In its middle; the size stays."""
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 1
    file.write_bytes(content)
