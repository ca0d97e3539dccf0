"""The journal keeps each finished group in the run folder before training uses it, so no crash
loses it.

A checkpoint records which groups training has consumed. A resumed run draws all others again, with
the same indices and in the same order. The journal restores the groups that it holds:

    draw ─► in the journal? ─┬─ finished ─► is judged and trained on as it is, nothing is generated
                             ├─ begun ────► continues where it stopped (--partial-rollout)
                             └─ no ───────► generated

If the resumed training repeats the old one, each finished group is trained on once, and none is
generated twice. With other training flags (--lr), the weights pushed after the checkpoint differ,
and the groups that they sampled are generated again. If timing decides which rollout draws a group,
an earlier rollout may draw it than in the launch that finished it. The group is restored there too,
if training has reached its weights.

A file per rollout, ``journal/rollout_000012.log``: records that are only ever appended,

    length (uint64) │ checksum of the payload (XXH3, uint64) │ payload (pickle)

The first record tells what the samples were made with. Reading stops at a record that is cut short
or does not match its checksum. Records are written at once, so none is lost if all processes die,
and synced to disk every second, in case the host dies. A file is removed once two checkpoints have
passed it.

Like a checkpoint it is a pickle, because it holds what users put into samples: read only files that
you have written.
"""

from __future__ import annotations

import contextlib
import enum
import os
import pickle
import re
import struct
import threading
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import orjson
import xxhash

from slime import deadlines
from slime.config.config import Config
from slime.files import bring_to_disk, content_fingerprint, entries_of, json_safe
from slime.log import get_logger, tell
from slime.samples.sample_fields import unpicklable
from slime.samples.types import ANY_VERSION, Sample, VersionWindow
from slime.user_code.loading import fingerprint

logger = get_logger(__name__)

_HEAD = struct.Struct("<QQ")
_FILE = re.compile(r"rollout_([0-9]{6,18})\.log")
#: Format of the records; a file in another one is removed, like a file made with other flags.
_FORMAT = 2
#: Flags of user functions that change a sample before it is judged.
MAKERS = ("custom_generate_function_path", "rollout_sample_hook_path", "custom_rm_path")
#: Flags of the fingerprinted groups that do not change samples.
_WITHOUT_EFFECT = frozenset((
    "num_rollout", "num_epoch", "start_rollout_id", "rollout_stall_timeout", "num_data_workers",
    "rm_num_workers", "freeze_vision_tower", "freeze_vision_projector"
))  # fmt: skip


class RecordKind(enum.StrEnum):
    """The kind of a record of a group."""

    FINISHED = "finished"
    BEGUN = "begun"  # put back with the tokens generated so far
    FORGOTTEN = "forgotten"  # earlier records of the group no longer count


@dataclass(frozen=True, slots=True)
class _RecordPlace:
    """Kind, rollout and file offset of a record."""

    kind: RecordKind
    rollout_id: int
    drawn_as: int
    offset: int


class Journal:
    """The journal of one run (or stage). A failure to write is logged and does not end the run.
    After a disk error the journal resumes with the file of the next rollout; if samples cannot be
    pickled, it ends.

    Args:
        folder: holds the files; created by the first write.
        made_with: what samples depend on; files that were written with something else are removed.
    Attributes:
        num_restored: groups drawn as prompts that `restore` found finished, since the last call of
            `metrics`.
        newest_version: the newest weight version among recorded tokens; 0 if there are none.
    """

    def __init__(self, folder: Path, made_with: str) -> None:
        self._folder = folder
        self._made_with = made_with
        self._places: dict[int, list[_RecordPlace]] = {}
        """By group, in the order in which they were written."""
        self._files: dict[int, BinaryIO] = {}
        """By rollout, open for appending."""
        self._dirty: set[int] = set()
        self._lock = threading.Lock()
        self._is_open = True
        self._unwritable: set[int] = set()
        """Rollouts whose file failed: records after a partial record would not be found."""
        self._ended = threading.Event()
        self._syncing: threading.Thread | None = None
        self.num_restored = 0
        self.newest_version = 0
        self._read_all()

    # -- reading -----------------------------------------------------------------------------------

    def _read_all(self) -> None:
        removed = 0
        for rollout_id, path in sorted(_files_in(self._folder).items()):
            try:
                removed += self._read_file(rollout_id, path)
            except OSError as problem:
                logger.error(
                    "the journal of rollout %d is lost, its groups are generated again: %s",
                    rollout_id,
                    problem,
                )
        if removed:
            tell(
                logger,
                "%d groups of the journal were made with another model, other flags of data, "
                "generation or reward, or other functions: they are generated again",
                removed,
            )

    def _read_file(self, rollout_id: int, path: Path) -> int:
        """Index the records of a file; remove the file if it was made with something else.

        Returns:
            The number of records that were removed.
        """
        with path.open("r+b") as file:
            records = _records(file)
            _, made_with = next(records, (0, None))
            if made_with is None:
                if path.stat().st_size:  # otherwise it was created and nothing was written yet
                    logger.warning(
                        "%s was damaged from its beginning: what it held is generated again", path
                    )
                path.unlink()
                return 0
            if made_with != self._made_with:
                path.unlink()
                return sum(1 for _ in records)
            for offset, (kind, group_index, key, _, newest_version) in records:
                self.newest_version = max(self.newest_version, newest_version)
                self._places.setdefault(group_index, []).append(
                    _RecordPlace(RecordKind(kind), rollout_id, key, offset)
                )
            if left := os.fstat(file.fileno()).st_size - file.tell():
                logger.warning(
                    "%s was damaged or cut short: its last %d bytes are left out, what they held "
                    "is generated again",
                    path,
                    left,
                )
                file.truncate(file.tell())
        return 0

    def restore(
        self, rollout_id: int, drawn: list[Sample], key: int, versions: VersionWindow = ANY_VERSION
    ) -> tuple[list[Sample], bool]:
        """Return the journal's state of a drawn group, or ``drawn`` if it has none.

        Args:
            rollout_id: the rollout that draws. A later rollout may have drawn this group in an
                earlier launch. Its record counts only if no token is newer than ``versions.newest``
                or in ``versions.ahead``; with newest None (deterministic runs) it never counts.
            key: `drawn_as` of the drawn group; a record with another key is of other data.
            versions: records with tokens of ``unreachable`` versions do not count; if there are
                such versions, records of unknown versions do not count either.
        Returns:
            The group, and whether the file of this rollout or a later one holds it as finished.
            Such a file stays as long as the group may be drawn again.
        """
        index = drawn[0].group_index
        for place in reversed(self._places.get(index, ()) if index is not None else ()):
            is_later = place.rollout_id > rollout_id
            if is_later and versions.newest is None:
                continue
            if place.kind is RecordKind.FORGOTTEN:
                break
            if place.drawn_as != key:
                tell(
                    logger,
                    "the prompt data is not that of the last launch: groups of the journal whose "
                    "prompt or label is another now (first: group %d) are generated again",
                    index,
                    once=f"other data in {self._folder}",
                )
                break
            if (found := self._read(place)) is None:
                break
            known = _versions_in(found)
            if is_later and not (
                known and max(known) <= (versions.newest or 0) and versions.ahead.isdisjoint(known)
            ):
                continue
            if versions.unreachable and not (known and versions.unreachable.isdisjoint(known)):
                tell(
                    logger,
                    "the run continues from its checkpoint in another way than before (flags, "
                    "functions, weights): journalled groups that were generated with weights "
                    "pushed after that checkpoint are generated again",
                    once=f"unreachable in {self._folder}",
                )
                continue
            self.num_restored += place.kind is RecordKind.FINISHED and is_prompt(drawn)
            return found, place.kind is RecordKind.FINISHED and place.rollout_id >= rollout_id
        return drawn, False

    def _read(self, place: _RecordPlace) -> list[Sample] | None:
        try:
            with _path(self._folder, place.rollout_id).open("rb") as file:
                file.seek(place.offset)
                _, record = next(_records(file))
            return [Sample.from_dict(item) for item in pickle.loads(record[3])]
        except Exception as problem:  # a disk error, or a user's class that no longer exists
            logger.warning(
                "a group of rollout %d cannot be read, it is generated again: %r",
                place.rollout_id,
                problem,
            )
            return None

    # -- writing -----------------------------------------------------------------------------------

    def note(self, kind: RecordKind, rollout_id: int, key: int, samples: Sequence[Sample]) -> None:
        """Record the outcome of a group.

        Args:
            key: `drawn_as` of the drawn group.
        """
        index = samples[0].group_index
        if not self._is_open or index is None:
            return
        if rollout_id in self._unwritable:
            if kind is RecordKind.FORGOTTEN:
                self._remove_files_with(index)
            return
        try:
            kept = [] if kind is RecordKind.FORGOTTEN else [sample.to_dict() for sample in samples]
            # pickled separately: most are never read
            content = pickle.dumps(kept, protocol=pickle.HIGHEST_PROTOCOL)
            newest = max(_versions_in(samples), default=0)
            with self._lock:
                file = self._file(rollout_id)
                place = _RecordPlace(kind, rollout_id, key, file.tell())
                _append(file, (kind.value, index, key, content, newest))
                self._dirty.add(rollout_id)
        except OSError as problem:  # a full disk
            self._end_file(rollout_id, problem)
            if kind is RecordKind.FORGOTTEN:
                self._remove_files_with(index)
            return
        except Exception as problem:  # user values that cannot be pickled
            self._end(problem, unpicklable(samples))
            return
        self._places.setdefault(index, []).append(place)
        self.newest_version = max(self.newest_version, newest)

    def forget(self, rollout_id: int, group_indices: Iterable[int] | None) -> None:
        """Exclude these groups of a rollout from training, in this run or one that resumes it.
        None: all groups that the rollout has recorded."""
        if group_indices is None:
            noted = self._places.items()
            group_indices = [
                index for index, places in noted if any(p.rollout_id == rollout_id for p in places)
            ]
        for index in group_indices:
            if places := self._places.get(index):
                self.note(
                    RecordKind.FORGOTTEN,
                    rollout_id,
                    places[-1].drawn_as,
                    [Sample(group_index=index)],
                )

    def forget_newer(self, rollout_id: int, version: int) -> None:
        """Exclude groups that a rollout has recorded with tokens of weights newer than ``version``
        or of unknown weights."""
        newer: list[int] = []
        for index, places in self._places.items():
            of_it = [
                place
                for place in places
                if place.rollout_id == rollout_id and place.kind is not RecordKind.FORGOTTEN
            ]
            if of_it:
                known = _versions_in(self._read(of_it[-1]) or ())
                if not known or max(known) > version:
                    newer.append(index)
        self.forget(rollout_id, newer)

    def _file(self, rollout_id: int) -> BinaryIO:
        if rollout_id not in self._files:
            self._folder.mkdir(parents=True, exist_ok=True)
            file = _path(self._folder, rollout_id).open("ab", buffering=0)
            self._files[rollout_id] = file
            if not file.tell():
                _append(file, self._made_with)
                # otherwise a host crash may lose the directory entry, and with it the file
                bring_to_disk(self._folder)
            if self._syncing is None:
                self._syncing = threading.Thread(
                    target=self._sync_now_and_then, name="slime-journal", daemon=True
                )
                self._syncing.start()
        return self._files[rollout_id]

    def _end(self, problem: Exception, place: str) -> None:
        """End the journal, because a sample has a value that cannot be pickled.

        Args:
            place: where a user function has put a value that cannot be pickled.
        """
        self._is_open = False
        why = f"a function of yours has set {place}" if place else ""
        logger.error(
            "the journal ends here; a crash would lose what is generated from now on: %s",
            why or f"{type(problem).__name__}: {problem}",
        )

    def _end_file(self, rollout_id: int, problem: OSError) -> None:
        """Stop writing a rollout's file. Records are independent: only missing groups are generated
        again."""
        if rollout_id not in self._unwritable:
            self._unwritable.add(rollout_id)
            logger.error(
                "the journal of rollout %d ends here; a crash would lose what it generates from "
                "now on: %s: %s. The next rollout has a file of its own",
                rollout_id,
                type(problem).__name__,
                problem,
            )

    def _remove_files_with(self, index: int) -> None:
        """Remove the files with records of a group if it cannot be recorded as forgotten. Their
        other groups are generated again."""
        spoilt = {place.rollout_id for place in self._places.get(index, ())}
        for rollout_id in spoilt:
            self._unwritable.add(rollout_id)
            with contextlib.suppress(OSError):
                _path(self._folder, rollout_id).unlink(missing_ok=True)
        for each, places in self._places.items():
            self._places[each] = [place for place in places if place.rollout_id not in spoilt]

    def _sync_now_and_then(self) -> None:
        while not self._ended.wait(deadlines.JOURNAL_SYNC):
            self._sync()

    def _sync(self) -> None:
        """Sync written records to disk; other threads may write meanwhile."""
        with self._lock:
            files = {
                rollout_id: os.dup(self._files[rollout_id].fileno())
                for rollout_id in self._dirty
                if rollout_id in self._files
            }
            self._dirty.clear()
        for rollout_id, file in files.items():
            try:
                os.fsync(file)
            except OSError as problem:
                self._end_file(rollout_id, problem)
            finally:
                os.close(file)

    # -- its size ----------------------------------------------------------------------------------

    def drop(self, before: int) -> None:
        """Remove the files of rollouts before this one."""
        with self._lock:
            for rollout_id in [rollout_id for rollout_id in self._files if rollout_id < before]:
                self._files.pop(rollout_id).close()
        for rollout_id, path in _files_in(self._folder).items():
            if rollout_id < before:
                path.unlink(missing_ok=True)
        self._places = {
            index: kept
            for index, places in self._places.items()
            if (kept := [place for place in places if place.rollout_id >= before])
        }

    def metrics(self) -> dict[str, float]:
        """Return the number of restored groups since the last call; {} if there are none."""
        count = self.num_restored
        self.num_restored = 0
        return {"rollout/num_restored_groups": float(count)} if count else {}

    def close(self) -> None:
        self._ended.set()
        if self._syncing is not None:
            self._syncing.join()
        self._sync()
        for file in self._files.values():
            file.close()
        self._files.clear()


def _versions_in(samples: Sequence[Sample]) -> set[int]:
    """Return the weight versions of the tokens of a group, as far as they are known."""
    return {version for sample in samples for version in sample.token_versions()}


# -- of a run --------------------------------------------------------------------------------------


def open_journal(config: Config, folder: Path) -> Journal | None:
    """Return the journal of a run, with the records of earlier launches; None if it is off
    (--no-journal)."""
    if not config.fault_tolerance.journal or config.debug.load_debug_rollout_data:
        return None
    return Journal(folder, _made_with(config))


def _made_with(config: Config) -> str:
    """Return the fingerprint of everything that determines a run's samples: flags of data,
    generation and reward, and the files of user functions."""
    groups = (config.data, config.rollout, config.reward)
    values = {name: json_safe(value) for group in groups for name, value in vars(group).items()}
    if config.images.multimodal_keys:
        values |= {name: json_safe(value) for name, value in vars(config.images).items()}
    for name in _WITHOUT_EFFECT:
        values.pop(name, None)
    values |= _further_fields(config)
    given = [values.get(name) or () for name in MAKERS]
    paths = [path for value in given for path in ([value] if isinstance(value, str) else value)]
    model = config.checkpoint.hf_checkpoint
    return fingerprint(
        [_FORMAT, values, str(model), content_fingerprint(Path(model)) if model else ""], paths
    )


def _further_fields(config: Config) -> dict[str, Any]:
    """Return the flags by which samples have fields that others lack. Those of one batch must all
    have them."""
    found: dict[str, Any] = {}
    teachers = config.distillation
    if teachers.use_opd and not teachers.in_trainer:
        found["teachers"] = [teachers.opd_teacher_key, teachers.in_loss and teachers.opd_top_k]
    if teachers.use_opd and teachers.opd_teacher_prompt_key:
        found["teacher_prompt"] = teachers.opd_teacher_prompt_key
    if config.algorithm.use_sampling_mask:
        found["sampling_mask"] = True
    if config.train.use_rollout_routing_replay:
        found["routed_experts"] = True
    return found


def drawn_as(drawn: Sequence[Sample]) -> int:
    """Return a hash of a drawn group's indices, prompts, labels and images, by which the journal
    recognises the group."""
    told = [[s.index, s.prompt, s.label, s.tokens[: s.prompt_length]] for s in drawn]
    for row, sample in zip(told, drawn):
        row += [sample.multimodal_inputs] if sample.multimodal_inputs else []
    return xxhash.xxh3_64_intdigest(orjson.dumps(json_safe(told)))


def is_prompt(drawn: Iterable[Sample]) -> bool:
    """Tell whether a group was drawn without generated tokens. The journal's record of it is then
    of an earlier launch, not of a group that this launch put back."""
    return not any(sample.response_length for sample in drawn)


# -- files -----------------------------------------------------------------------------------------


def _path(folder: Path, rollout_id: int) -> Path:
    return folder / f"rollout_{rollout_id:06d}.log"


def _files_in(folder: Path) -> dict[int, Path]:
    """Return the files by rollout."""
    named = ((_FILE.fullmatch(path.name), path) for path in entries_of(folder))
    return {int(match.group(1)): path for match, path in named if match}


def _append(file: BinaryIO, record: Any) -> None:
    payload = pickle.dumps(record, protocol=pickle.HIGHEST_PROTOCOL)
    at = file.tell()
    left = memoryview(_HEAD.pack(len(payload), xxhash.xxh3_64_intdigest(payload)) + payload)
    try:
        while left:
            left = left[file.write(left) :]
    except OSError:
        file.truncate(at)  # records after a partial one would not be found
        raise


def _records(file: BinaryIO) -> Iterator[tuple[int, Any]]:
    """Yield (offset, record) of each complete record from the file's position on; leave the
    position after the last one."""
    at = file.tell()
    size = os.fstat(file.fileno()).st_size
    while len(head := file.read(_HEAD.size)) == _HEAD.size:
        length, checksum = _HEAD.unpack(head)
        if length > size - file.tell():  # cut short, or no length at all
            break
        payload = file.read(length)
        if xxhash.xxh3_64_intdigest(payload) != checksum:
            break
        yield at, pickle.loads(payload)
        at = file.tell()
    file.seek(at)
