"""The directory of Megatron checkpoints: names, tracker, completeness, publishing, retention.

    checkpoints/
      iter_0000007/  iter_0000010/       one directory per saved rollout; complete or not there
        adapter/                         trained adapters as a PEFT directory
      latest_checkpointed_iteration.txt  "10"; written last
      .latest                            a copy, "10", to detect damage of that file
      .iter_0000013.partial/             a save in progress, or one that died
      iter_0000008.damaged/              found damaged by a run that resumed from an earlier one

Imports no torch, as the launch reads the directory early.
"""

from __future__ import annotations

import json
import os
import re
import shutil
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from slime.errors import UserError, first_few
from slime.files import bring_to_disk, json_checksum, read_plain, write_atomically
from slime.log import get_logger

logger = get_logger(__name__)

TRACKER = "latest_checkpointed_iteration.txt"
MANIFEST = "manifest.json"
EXTRA_STATE = "extra_state.pt"
#: Folder of a checkpoint with its adapters in PEFT's format.
ADAPTER = "adapter"
#: The critic's part of a checkpoint: prefix of its tensors' names, or, for a critic on its own
#: ranks, a folder that is itself a checkpoint.
CRITIC = "critic"
RELEASE = "release"
_ITERATION = re.compile(r"iter_[0-9]{7,18}")
#: Maximum digits of an iteration, as Python refuses to parse very long numbers.
_MAX_DIGITS = 18
_LATEST = ".latest"
#: Files that every checkpoint needs.
_NEEDED = frozenset((".metadata", "common.pt", "metadata.json"))
#: A word that occurs in common.pt of every checkpoint of slime, but not of other programs.
_OUR_MARK = b"has_rng_state"
_LEFTOVER = re.compile(r"\.(iter_\d{7,}|release)\.(partial|replaced|discarded)")


def iteration_name(iteration: int | str) -> str:
    """Name an iteration's directory: ``iter_0000010`` for 10, ``release`` for converted weights."""
    return RELEASE if iteration == RELEASE else f"iter_{int(iteration):07d}"


def saved_iterations(root: Path) -> list[int]:
    """List the iterations that have a directory, in order; [] if ``root`` does not exist. Copies
    with other names are not included.

    Raises:
        UserError: the directory cannot be read, or is a broken link.
    """
    try:
        named = [
            entry.name
            for entry in root.iterdir()
            if _ITERATION.fullmatch(entry.name) and entry.is_dir()
        ]
    except (FileNotFoundError, NotADirectoryError) as error:
        if root.is_symlink():
            raise UserError(
                f"the checkpoints in {root} are out of reach",
                why=f"it is a link to {os.readlink(root)}, which does not exist",
                fix="mount the file system of the target",
            ) from error
        return []
    except OSError as error:
        raise UserError(
            f"the checkpoints in {root} cannot be read", why=error.strerror or str(error)
        ) from error
    return sorted(
        number
        for name in named
        if iteration_name(number := int(name.removeprefix("iter_"))) == name
    )


def own_iterations(root: Path) -> list[int]:
    """List the iterations of the run's current branch, in order. Later iterations belong to a
    branch that was left with --ckpt-step."""
    saved = saved_iterations(root)
    tracked = _tracked_if_readable(root)
    return [
        iteration for iteration in saved if not isinstance(tracked, int) or iteration <= tracked
    ]


def read_tracker(root: Path) -> int | str | None:
    """Read the tracker file: an iteration, "release" (weights only, converted), or None without it.

    Raises:
        UserError: the file contains anything else, or cannot be read.
    """
    try:
        text = read_plain(root / TRACKER).decode("ascii", "backslashreplace").strip()
    except (FileNotFoundError, NotADirectoryError):
        return None
    except OSError as error:
        text = error.strerror or str(error)
    if text == RELEASE:
        return text
    if text.isdecimal() and len(text) <= _MAX_DIGITS:
        return int(text)
    latest = _last_set(root)
    raise UserError(
        f"{root / TRACKER} does not hold an iteration number",
        why=f"it says {text[:40]!r}",
        fix=f"write {latest or f'one of {saved_iterations(root)}'} into it, or pass --ckpt-step",
    )


def has_checkpoints(root: Path) -> bool:
    """Tell whether ``root`` has checkpoints, even if the tracker file is lost."""
    return bool(saved_iterations(root)) or os.path.lexists(root / TRACKER)


def _tracked_if_readable(root: Path) -> int | str | None:
    """Read the tracker, or the last value set if the file is lost, damaged, or names a missing
    iteration."""
    try:
        tracked = read_tracker(root)
    except UserError:  # the file is damaged
        tracked = None
    latest = _last_set(root)
    if latest is None or tracked == latest or not iteration_dir(root, latest).is_dir():
        return tracked
    if tracked is None or not iteration_dir(root, tracked).is_dir():
        return latest
    return tracked


def _last_set(root: Path) -> int | str | None:
    """Return the last value given to `set_latest`; None if unknown."""
    try:
        text = read_plain(root / _LATEST).decode("ascii", "replace").strip()
    except OSError:
        return None
    if text == RELEASE:
        return text
    return int(text) if re.fullmatch(r"[0-9]{1,18}", text) else None


def check_tracker(root: Path) -> None:
    """Refuse a tracker file that names an earlier iteration than the last saved one: it is damaged,
    or was edited to go back, for which --ckpt-step must be used.

    Raises:
        UserError: the tracker names an earlier iteration.
    """
    tracked = _tracked_if_readable(root)
    latest = _last_set(root)
    goes_back = isinstance(tracked, int) and isinstance(latest, int) and tracked < latest
    if goes_back and iteration_dir(root, str(latest)).is_dir():
        raise UserError(
            f"{root / TRACKER} says {tracked}, and the run has saved {latest} last",
            why="the file is damaged, or was edited to go back",
            fix=f"write {latest} into it; to go back, repeat the command of the run with --load "
            f"{root} --save {root} --ckpt-step {tracked}",
        )


def iteration_dir(root: Path, iteration: int | str) -> Path:
    """Return the directory of an iteration, which has another name if a save died while replacing
    it."""
    name = iteration_name(iteration)
    replaced = _hidden(root / name, "replaced")
    return replaced if not (root / name).exists() and replaced.exists() else root / name


def is_leftover(name: str) -> bool:
    """Tell whether the name belongs to an unfinished save."""
    return bool(_LEFTOVER.fullmatch(name))


def is_saved(root: Path, iteration: int) -> bool:
    """Return whether the save of ``iteration`` is complete, and it is not being saved again."""
    final = root / iteration_name(iteration)
    return _tracked_if_readable(root) == iteration and not partial_path(final).exists()


@dataclass(frozen=True)
class Damage:
    """An iteration that cannot be loaded, and why, in a few words."""

    iteration: int | str
    why: str


def find_whole(root: Path, corrupt: Sequence[Damage] = ()) -> tuple[int | str | None, list[Damage]]:
    """Find the iteration to resume from: the tracked one, else the newest intact one before it,
    else the newest intact one after it, which belongs to a branch left with --ckpt-step. Without a
    tracker: the newest intact one.

    Args:
        corrupt: iterations with known changes of content, which sizes of files do not show.
    Returns:
        (the iteration, or None if none is intact; damaged iterations that take precedence over it).
    """
    known = {damage.iteration: damage for damage in corrupt}
    found: list[Damage] = []
    for iteration in _by_preference(root):
        if iteration in known:
            found.append(known[iteration])
            continue
        try:
            check_complete(iteration_dir(root, iteration))
        except UserError as error:
            found.append(Damage(iteration, error.why or error.what))
            continue
        return iteration, found
    return None, found


def _by_preference(root: Path) -> list[int | str]:
    saved = saved_iterations(root)[::-1]
    tracked = _tracked_if_readable(root)
    if tracked is None:
        return list(saved)
    if tracked == RELEASE:
        return [tracked, *saved]
    before = [iteration for iteration in saved if iteration < int(tracked)]
    return [tracked, *before, *(iteration for iteration in saved if iteration > int(tracked))]


def newest_whole(root: Path) -> Path | None:
    """Return the directory that `find_whole` chooses; None if there is none."""
    iteration, _ = find_whole(root)
    return None if iteration is None else iteration_dir(root, iteration)


def set_aside(root: Path, iteration: int | str) -> Path | None:
    """Rename a damaged iteration to ``iter_0000010.damaged``, so that it is not loaded; an older
    directory of this name is removed. Return the new path, or None if there is no such
    iteration."""
    directory = iteration_dir(root, iteration)
    if not directory.exists():
        return None
    aside = root / f"{iteration_name(iteration)}.damaged"
    if aside.exists():
        shutil.rmtree(aside)
    directory.rename(aside)
    bring_to_disk(root)
    return aside


# -- completeness ----------------------------------------------------------------------------------


@dataclass(frozen=True)
class FileRecord:
    """One file of a checkpoint: path relative to the iteration's directory, size, xxh3-128 of its
    content."""

    path: str
    nbytes: int
    xxh3: str


def write_manifest(directory: Path, records: list[FileRecord]) -> None:
    """Write the last file of a checkpoint, which lists all files and the iteration's name."""
    listed = {record.path: {"nbytes": record.nbytes, "xxh3": record.xxh3} for record in records}
    content = {"name": _final_name(directory), "files": listed}
    content["checksum"] = json_checksum(content)
    write_atomically(directory / MANIFEST, json.dumps(content, indent=1).encode(), durable=True)


def _final_name(directory: Path) -> str:
    """Return the final name of an iteration that may be being written or replaced."""
    return directory.name.split(".")[1] if is_leftover(directory.name) else directory.name


def read_manifest(directory: Path) -> list[FileRecord] | None:
    """Read the manifest; None for a checkpoint that another program wrote.

    Raises:
        UserError: the manifest cannot be read, is of another iteration, does not list all files, or
            is missing although slime wrote the checkpoint.
    """
    path = directory / MANIFEST
    try:
        data = json.loads(read_plain(path))
        checksum = data.pop("checksum", None)
        if checksum not in (None, json_checksum(data)):  # an earlier release wrote none
            raise ValueError("its checksum is another")
        records = [
            FileRecord(str(name), entry["nbytes"], entry["xxh3"])
            for name, entry in data["files"].items()
        ]
        written_as = data.get("name", _final_name(directory))
    except FileNotFoundError as error:
        if _is_ours(directory):
            why = f"its {MANIFEST} is missing, so its files cannot be checked"
            raise UserError(
                f"{directory} cannot be trusted", why=why, fix=_go_back(directory)
            ) from error
        return None
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        if isinstance(error, OSError):
            why = error.strerror or str(error)
        else:
            why = f"it is not a manifest: {error!r:.100}"
        raise UserError(f"{path} is damaged", why=why, fix=_go_back(directory)) from error
    fault = _fault_of_manifest(directory, written_as, {record.path for record in records})
    if fault:
        raise UserError(f"{path} is damaged", why=fault, fix=_go_back(directory))
    return records


def _fault_of_manifest(directory: Path, written_as: str, listed: set[str]) -> str:
    """Describe a wrong entry of a manifest; "" if there is none."""
    name = _final_name(directory)
    if written_as != name and _ITERATION.fullmatch(name):
        return f"the directory was written as {written_as}, and copied or renamed"
    if any(
        path.removeprefix(f"{ADAPTER}/").removeprefix(f"{CRITIC}/") != Path(path).name
        for path in listed
    ):
        return "it lists files of other directories"
    left_out = sorted(_NEEDED - listed)
    return f"it does not list {', '.join(left_out[:4])}" if left_out else ""


def _is_ours(directory: Path) -> bool:
    """Tell whether slime wrote a checkpoint, which it never does without a manifest."""
    try:
        return (directory / EXTRA_STATE).exists() or _OUR_MARK in read_plain(
            directory / "common.pt"
        )
    except OSError:
        return False


def check_complete(directory: Path) -> None:
    """Check that all files of the manifest exist and have their sizes. Reads no data. A checkpoint
    of another program has no manifest; it must have the files that every checkpoint needs.

    Raises:
        UserError: names missing or truncated files, and iterations to go back to.
    """
    if not directory.is_dir():
        raise UserError(f"there is no checkpoint {directory}", fix=_go_back(directory))
    records = read_manifest(directory)
    if records is None:
        missing = sorted(name for name in _NEEDED if not (directory / name).is_file())
        if missing:
            raise UserError(
                f"{directory} is not a complete checkpoint",
                f"missing: {', '.join(missing)}",
                _go_back(directory),
            )
        return
    faults = [fault for record in records if (fault := _fault_of_file(directory, record))]
    if faults:
        why = first_few(faults, between="; ")
        raise UserError(f"{directory} is damaged", why=why, fix=_go_back(directory))


def _fault_of_file(directory: Path, record: FileRecord) -> str:
    """Describe a missing file or a wrong size; "" if the file has neither fault."""
    path = directory / record.path
    try:
        if not path.is_file():
            return f"{record.path} is missing"
        nbytes = path.stat().st_size
    except OSError as error:
        return f"{record.path}: {error.strerror}"
    return "" if nbytes == record.nbytes else f"{record.path} has {nbytes} of {record.nbytes} bytes"


def check_contents(directory: Path, rank: int = 0, world_size: int = 1) -> None:
    """Compare the files' hashes with the manifest; each rank reads its share.

    Raises:
        UserError: names the first file that has changed or cannot be read.
    """
    records = read_manifest(directory) or []
    for record in records[rank::world_size]:
        try:
            is_same = file_fingerprint(directory / record.path) == record.xxh3
            why = "its content is not what was written (xxh3-128 differs from manifest.json)"
        except OSError as error:  # a fault of the disk
            is_same = False
            why = f"it cannot be read: {error.strerror}"
        if not is_same:
            raise UserError(
                f"{directory / record.path} is corrupt", why=why, fix=_go_back(directory)
            )


def file_record(path: Path, checkpoint: Path) -> FileRecord:
    """Make the record of an existing file of a checkpoint."""
    name = path.relative_to(checkpoint).as_posix()
    return FileRecord(name, path.stat().st_size, file_fingerprint(path))


def file_fingerprint(path: Path) -> str:
    """Return the xxh3-128 of a file's bytes."""
    import xxhash

    digest = xxhash.xxh3_128()
    with path.open("rb", buffering=0) as stream:
        while chunk := stream.read(1 << 24):
            digest.update(chunk)
    return digest.hexdigest()


def _go_back(directory: Path) -> str:
    root = directory.parent
    own = directory.name
    others = [i for i in saved_iterations(root) if iteration_name(i) != own]
    if others:
        return (
            f"pass --ckpt-step with an earlier iteration of {root}: "
            f"{', '.join(map(str, others[-5:]))}"
        )
    return "pass --load with another checkpoint, or leave --load out to start from --hf-checkpoint"


# -- writing ---------------------------------------------------------------------------------------


def _bring_to_disk_below(directory: Path) -> None:
    """Sync all files and directories to disk, before a rename publishes them."""
    for folder, _, names in os.walk(directory):
        for name in names:
            bring_to_disk(Path(folder, name))
        bring_to_disk(Path(folder))


def partial_dir(final: Path) -> Path:
    """Make an empty directory next to ``final`` to write into; remains of an earlier attempt are
    removed.

    Raises:
        UserError: the parent directory is not writable.
    """
    path = partial_path(final)
    try:
        final.parent.mkdir(parents=True, exist_ok=True)
        if path.exists():
            shutil.rmtree(path)
        path.mkdir()
    except OSError as error:
        raise UserError(
            f"cannot write to {final.parent}",
            why=error.strerror or str(error),
            fix="pass a directory that you may write to",
        ) from error
    return path


def partial_path(final: Path) -> Path:
    """Return the hidden directory that is renamed to ``final`` when complete."""
    return _hidden(final, "partial")


def _hidden(final: Path, state: str) -> Path:
    return final.with_name(f".{final.name}.{state}")


def discard_partial(final: Path) -> bool:
    """Remove the files of an unfinished save; False if there are none.

    The directory is renamed first, so that a writer that still runs cannot publish it.
    """
    discarded = _hidden(final, "discarded")
    shutil.rmtree(discarded, ignore_errors=True)
    try:
        partial_path(final).rename(discarded)
    except OSError:  # it does not exist, or the disk fails: the next save tries again
        return False
    shutil.rmtree(discarded, ignore_errors=True)
    return True


def publish(partial: Path, final: Path) -> None:
    """Rename a finished directory to its final name. An older one of that name is removed
    afterwards; between the two renames it is at ``.<name>.replaced``, where `iteration_dir` finds
    it."""
    _bring_to_disk_below(partial)
    replaced = _hidden(final, "replaced")
    if replaced.exists() and final.exists():
        shutil.rmtree(replaced)
    if final.exists():
        final.rename(replaced)
    partial.rename(final)
    bring_to_disk(final.parent)
    if replaced.exists():
        shutil.rmtree(replaced)


def set_latest(root: Path, iteration: int | str) -> None:
    """Make the tracker name this iteration. If the process is killed between writing the two files,
    `check_tracker` accepts the state."""
    before = _last_set(root)
    goes_back = isinstance(before, int) and isinstance(iteration, int) and iteration < before
    for name in (_LATEST, TRACKER) if goes_back else (TRACKER, _LATEST):
        write_atomically(root / name, f"{iteration}\n".encode(), durable=True)


def retain(root: Path, keep: int | None) -> list[int]:
    """Remove all but the newest ``keep`` iterations, and remains of dead saves. The tracked
    iteration is always kept.

    Returns:
        The removed iterations.
    """
    for entry in root.iterdir():
        if is_leftover(entry.name) and entry.is_dir():
            owner = root / entry.name.split(".")[1]
            if entry.name.endswith(".replaced") and not owner.exists():
                # a save died between the two renames of `publish`: this is the only copy
                entry.rename(owner)
            else:
                shutil.rmtree(entry, ignore_errors=True)
    if keep is None:
        return []
    latest = read_tracker(root)
    iterations = saved_iterations(root)
    # later iterations belong to a branch that was left with --ckpt-step: remove them first
    if isinstance(latest, int):
        iterations.sort(key=lambda iteration: (iteration <= latest, iteration))
    doomed = [i for i in iterations[: max(0, len(iterations) - max(1, keep))] if i != latest]
    removed = []
    for iteration in doomed:
        victim = root / iteration_name(iteration)
        # invisible at once, even if the removal is cut short
        hidden = _hidden(victim, "discarded")
        try:
            victim.rename(hidden)
        except OSError as error:  # the checkpoint that was just saved is complete all the same
            logger.warning("the old checkpoint %s cannot be removed: %s", victim, error)
            continue
        removed.append(iteration)
        shutil.rmtree(hidden, ignore_errors=True)
    return removed
