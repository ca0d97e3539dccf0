"""Pack a run for a bug report as one .tar.gz, without secrets and weights, and by default without
samples.

Reads only files inside the run folder and follows no links. Large files are cut in the middle.
"""

from __future__ import annotations

import gzip
import io
import os
import platform
import tarfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

from slime.diagnosis.explain import Explanation
from slime.diagnosis.reading import is_within, read_ends, run_logs
from slime.errors import UserError
from slime.files import indented_json, read_object, replacing
from slime.observe.run_folder import package_versions
from slime.redact import redact_text, redacted, secrets_in

#: Maximum bytes of the beginning and of the end of a file.
_HEAD = 64 << 10
_TAIL = 512 << 10
_METRICS_TAIL = 2 << 20
_SAMPLES_HEAD = 4 << 20
#: Maximum bytes of all files together, before compression.
_MAX_BYTES = 64 << 20
_MAX_CRASHES = 3
_NAMES_OF_A_CRASH = ("crash.json", "traceback.txt", "last_metrics.jsonl", "step.json")
_SAMPLES_OF_A_CRASH = "samples.jsonl"


@dataclass
class Bundle:
    """An archive and what it contains.

    Attributes:
        path: the archive.
        sizes: file name → uncompressed bytes, in order.
        left_out: files that are not in the archive, with the reason.
    """

    path: Path
    sizes: dict[str, int] = field(default_factory=dict)
    left_out: list[str] = field(default_factory=list)


def bundle(
    folder: Path, output: Path, found: Explanation, text: str, *, with_samples: bool = False
) -> Bundle:
    """Pack a run.

    Args:
        folder: the run folder.
        output: path that ends in .tar.gz or .tgz; an existing archive is replaced.
        found: result of `slime.diagnosis.explain.explain`; ``text`` is the same as text.
        with_samples: include prompts and responses of the newest step, and of the failed step.
    Raises:
        UserError: ``output`` has another suffix, is a directory, or cannot be written.
    """
    if not output.name.endswith((".tar.gz", ".tgz")) or output.is_dir():
        raise UserError(
            f"--output {output} is not the name of an archive", fix="let it end in .tar.gz"
        )
    packed = Bundle(output)
    configs = [
        read_object(path) for path in sorted(folder.glob("config*.json")) if is_within(path, folder)
    ]
    secrets = secrets_in([*configs, dict(os.environ)])
    try:
        with (
            replacing(output) as unfinished,
            open(unfinished, "wb") as raw,
            gzip.GzipFile("", "wb", fileobj=raw, mtime=0) as packer,
            tarfile.open(fileobj=packer, mode="w") as tar,
        ):
            root = f"{folder.resolve().name}-bundle"
            _fill(
                _Adder(tar, root, packed, lambda text: redact_text(text, secrets)),
                folder,
                found,
                text,
                with_samples,
            )
    except OSError as error:
        raise UserError(
            f"cannot write {output}",
            why=error.strerror or str(error),
            fix="pass --output with another place",
        ) from error
    return packed


class _Adder:
    """Adds redacted texts to an archive, up to `_MAX_BYTES` in all."""

    def __init__(
        self, tar: tarfile.TarFile, root: str, packed: Bundle, scrub: Callable[[str], str]
    ) -> None:
        self._tar = tar
        self._root = root
        self._packed = packed
        self._scrub = scrub
        self._left = _MAX_BYTES

    def text(self, name: str, text: str) -> None:
        content = self._scrub(text).encode("utf-8", "replace")
        if len(content) > self._left:
            self._packed.left_out.append(f"{name}: the bundle is full at {_MAX_BYTES >> 20} MB")
            return
        self._left -= len(content)
        info = tarfile.TarInfo(f"{self._root}/{self._scrub(name)}")
        info.size = len(content)
        info.mtime = int(time.time())
        info.mode = 0o644
        self._tar.addfile(info, io.BytesIO(content))
        self._packed.sizes[name] = len(content)

    def file(self, path: Path, folder: Path, head: int = _HEAD, tail: int = _TAIL) -> None:
        """Add the beginning and the end of a file of the run, if it exists."""
        name = str(path.relative_to(folder))
        if not is_within(path, folder):
            if path.is_symlink() or path.exists():
                self._packed.left_out.append(f"{name}: a link, or no plain file")
            return
        first, last, skipped = read_ends(path, folder, head, tail)
        mark = f"\n[… {skipped:,} bytes left out …]\n" if skipped else ""
        if skipped:  # drop cut lines: redaction does not recognise half a secret
            first = first[: first.rfind(b"\n") + 1]
            last = last[last.find(b"\n") + 1 :]
        self.text(name, first.decode("utf-8", "replace") + mark + last.decode("utf-8", "replace"))

    def setting(self, path: Path, folder: Path) -> None:
        """Add a JSON file, redacted by its keys, too."""
        name = str(path.relative_to(folder))
        if not is_within(path, folder):
            self.file(path, folder)
            return
        found = redacted(read_object(path))
        if found:
            self.text(name, indented_json(found).decode())
        else:
            self.file(path, folder)  # damaged JSON is added as text


def _fill(add: _Adder, folder: Path, found: Explanation, text: str, with_samples: bool) -> None:
    add.text("explain.txt", f"{text}\n")
    add.text("explain.json", indented_json(found.as_json()).decode())
    versions = {
        "python": platform.python_version(),
        "system": platform.platform(),
        **package_versions(),
    }
    add.text("versions.txt", "".join(f"{name} {version}\n" for name, version in versions.items()))
    for path in [*sorted(folder.glob("config*.json")), folder / "run.json"]:
        add.setting(path, folder)
    add.file(folder / "metrics.jsonl", folder, 4096, _METRICS_TAIL)
    for path in _crash_files(folder, with_samples):
        is_text = path.suffix in (".txt", ".log")
        add.file(path, folder, _HEAD if is_text else _SAMPLES_HEAD, _TAIL)
    for path in sorted((folder / "logs").glob("*.log")):
        if path.is_symlink():
            add.file(path, folder)  # records it as left out
    for path in run_logs(folder):
        add.file(path, folder)
    for path in _newest_samples(folder) if with_samples else ():
        add.file(path, folder, _SAMPLES_HEAD, 0)


def _crash_files(folder: Path, with_samples: bool) -> Iterator[Path]:
    crash = folder / "crash"
    if crash.is_symlink() or not crash.is_dir():
        return
    for one in sorted(crash.iterdir(), reverse=True)[:_MAX_CRASHES]:
        yield from (one / name for name in _NAMES_OF_A_CRASH)
        if with_samples:
            yield one / _SAMPLES_OF_A_CRASH
        yield from sorted(one.glob("logs/*.log"))


def _newest_samples(folder: Path) -> list[Path]:
    """Return the file of the newest rollout of each stage."""
    found: dict[Path, Path] = {}
    for path in sorted((folder / "samples").rglob("rollout_*.jsonl")):
        found[path.parent] = path
    return list(found.values())
