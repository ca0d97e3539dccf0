"""The run folder: all output of one run, readable while the run is in progress.

outputs/<run_name>/
  config.json           every setting and where it came from (config.<stage>.json for a named stage)
  run.json              stages with start, end and state; host, pid and command line
  metrics.jsonl         one JSON object per step
  tensorboard/          event files
  samples/              generated samples, per rollout and per evaluation
  trace/                timelines that open in Perfetto, per rollout
  logs/                 one file per process
  model/                with --save: the final model, a Hugging Face directory
  journal/              while it runs: samples not yet trained on, and the pushes of weights
  reference_log_probs/  with a preference loss: log-probs of the reference model
  crash/                traceback, last metrics and configuration of a failed run
  report.html           all of it on one page
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import functools
import importlib.metadata
import os
import platform
import re
import shlex
import shutil
import stat
import sys
import time
import traceback
from collections.abc import Callable, Collection, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import orjson

from slime import deadlines
from slime.errors import UserError
from slime.files import entries_of, indented_json, read_lines, read_object, write_atomically
from slime.log import get_logger
from slime.redact import redact_argv, redact_text

if TYPE_CHECKING:
    from slime.config.config import Config

logger = get_logger(__name__)

#: Maximum bytes of each log in a crash folder, and maximum number of logs.
_LOG_BYTES = 64 << 10
_MAX_LOGS = 64
_CONFIG = re.compile(r"config(?:\.([^\s/()~]{1,100}))?\.json")
#: Larger times and process ids in ``run.json`` are damage; no date can be made of them.
_MAX_NUMBER = 1e11
#: Files and folders of a run folder.
_FILES = ("run.json", "metrics.jsonl", "report.html", ".lock", "config.json")
_FOLDERS = (
    "logs", "samples", "journal", "trace", "tensorboard", "crash", "history", "engines", "model",
    "reference_log_probs",
)  # fmt: skip
_SUFFIXES_INSIDE = (".jsonl", ".json", ".log")
#: Files that do not make a folder a run folder; a folder with only these counts as empty.
_OF_NOBODY = frozenset((".lock", ".DS_Store", "Thumbs.db", "desktop.ini"))
_REPORTED_PACKAGES = (
    "slime-rl", "torch", "megatron-core", "sglang", "ray", "transformers", "sglang-router",
)  # fmt: skip


@dataclass(frozen=True)
class RunFolder:
    """Paths of one run. It is cheap to create and picklable.

    Attributes:
        path: the folder itself.
        stage: name of this stage if several share the folder (SFT, then RL); None if there is only
            one.
    """

    path: Path
    stage: str | None = None

    # -- layout ------------------------------------------------------------------------------------

    @property
    def config_path(self) -> Path:
        return self.path / (f"config.{self.stage}.json" if self.stage else "config.json")

    @property
    def metrics_path(self) -> Path:
        return self.path / "metrics.jsonl"

    @property
    def report_path(self) -> Path:
        return self.path / "report.html"

    @property
    def logs(self) -> Path:
        return self.path / "logs"

    @property
    def crash(self) -> Path:
        return self.path / "crash"

    @property
    def tensorboard(self) -> Path:
        return self._of_stage("tensorboard")

    @property
    def samples(self) -> Path:
        return self._of_stage("samples")

    @property
    def journal(self) -> Path:
        return self._of_stage("journal")

    @property
    def trace(self) -> Path:
        return self._of_stage("trace")

    @property
    def reference_log_probs(self) -> Path:
        return self._of_stage("reference_log_probs")

    @property
    def model(self) -> Path:
        return self._of_stage("model")

    def _of_stage(self, name: str) -> Path:
        return self.path / name / self.stage if self.stage else self.path / name

    # -- creation ----------------------------------------------------------------------------------

    @staticmethod
    def claim(config: Config, *, resuming: bool = False) -> tuple[RunFolder, ExitStack]:
        """Create the folder of this run, or reopen it to resume, and lock it. A refused launch
        changes nothing.

        Args:
            config: gives ``--output-dir``, ``--run-name``, ``--stage`` and ``--save``.
            resuming: the run continues from a checkpoint, so the folder (or stage) may exist.

        Returns:
            The folder, and an `ExitStack` that holds its lock and the lock of ``--save``.

        Raises:
            UserError: another live process holds one of the locks, the folder (or this stage in
                it) exists and ``resuming`` is false, or it cannot be written.
        """
        observe = config.observe
        run = RunFolder(Path(observe.output_dir) / observe.run_name, observe.stage or None)
        if not resuming:
            run._check_unused()
        with ExitStack() as locks:
            locks.enter_context(run.lock())
            if not resuming:
                run._check_unused()  # a concurrent launch may have held the lock
            if config.checkpoint.save is not None:
                locks.enter_context(lock_folder(Path(config.checkpoint.save)))
            run._check_places()  # before the first change
            try:
                if run.config_path.exists() and run.config_path.stat().st_size:
                    run._keep_config()
                run._begin(config)
            except OSError as error:
                raise _cannot_write(run.path, error) from error
            return run, locks.pop_all()

    def _begin(self, config: Config) -> None:
        config.save(self.config_path)
        self._keep_config()
        self.logs.mkdir(exist_ok=True)
        self.set_state("running")

    def reclaim(self, config: Config, locks: ExitStack) -> bool:
        """Make the folder, and that of ``--save``, again if somebody has removed or moved them
        during the run: the run can then be resumed, and no other one may write there.

        Args:
            locks: from `claim`; gets the new locks.
        Returns:
            Whether the run folder was made again.
        Raises:
            FolderTaken: another process has made one of the folders again.
            UserError: a folder cannot be written.
        """
        save = config.checkpoint.save
        lost = [
            folder for folder in (self.path, save and Path(save)) if folder and _is_lost(folder)
        ]
        for folder in lost:
            locks.enter_context(lock_folder(folder))
        is_gone = self.path in lost and not self.config_path.exists()
        if is_gone:
            try:
                self._begin(config)
                self.set_state("launched")
            except OSError as error:
                raise _cannot_write(self.path, error) from error
        return is_gone

    def lock(self) -> AbstractContextManager[None]:
        """Lock the folder against all other processes. Only the holder of the lock may change the
        folder.

        Raises:
            UserError: another live process holds it, or the folder cannot be written.
        """
        return lock_folder(self.path)

    def _check_unused(self) -> None:
        entries = {entry.name for entry in entries_of(self.path)} - _OF_NOBODY
        if not entries or self._was_never_launched():
            return
        if self.stage is None:
            raise UserError(
                f"the run folder {self.path} exists already",
                why="a run never writes over the results of another one",
                fix="pass another --run-name, or set --load to its checkpoint directory to "
                "continue that run",
            )
        if not config_files(self.path):
            raise UserError(
                f"{self.path} is not a run folder",
                why="it has no config.json",
                fix="pass another --run-name",
            )
        if self.config_path.exists():
            raise UserError(
                f"the run folder {self.path} already has stage '{self.stage}'",
                fix="pass another --stage or --run-name, or set --load to its checkpoint "
                "directory to continue it",
            )

    def _check_places(self) -> None:
        """Check that the run can write to all of its paths.

        Raises:
            UserError: a path is a folder instead of a file or the reverse, or it cannot be read
                and written.
        """
        folders = [self.path / name for name in _FOLDERS]
        files = [*(self.path / name for name in _FILES), *config_files(self.path).values()]
        files += [path for folder in folders for path in _no_plain_files(folder)]
        for path, is_folder in (dict.fromkeys(folders, True) | dict.fromkeys(files, False)).items():
            if not os.path.lexists(path):
                continue
            if path.is_symlink() and not path.exists():
                why = "it is a link to nothing"
            elif path.is_dir() != is_folder or not (path.is_dir() or path.is_file()):
                why = f"the run has a {'folder' if is_folder else 'file'} of that name"
            elif not os.access(path, os.R_OK | os.W_OK, effective_ids=True):
                why = f"user {os.geteuid()} may not read and write it"
            else:
                continue
            raise UserError(
                f"{path} is in the run's way", why, "move it away; nothing has been changed"
            )

    def _was_never_launched(self) -> bool:
        """Tell whether an earlier launch under this name ended before it was up, for example
        without data, GPUs or a model; a corrected launch then takes its place."""
        entry = self.read_summary()["stages"].get(self.stage or "")
        if entry is None or entry.get("launched") is not None:
            return False
        if entry.get("state") != "running":
            return True
        here = entry.get("host") == platform.node()
        return here and not Path(f"/proc/{entry.get('pid')}").exists()  # killed during its launch

    def _keep_config(self) -> None:
        """Copy the configuration file to ``history/``; the copy can replace a lost file."""
        stamp = time.strftime("%Y%m%d-%H%M%S", time.localtime(self.config_path.stat().st_mtime))
        history = self.path / "history"
        history.mkdir(exist_ok=True)
        shutil.copyfile(self.config_path, history / f"{self.config_path.stem}.{stamp}.json")

    def config(self) -> Config:
        """Return the configuration of the newest launch.

        Raises:
            UserError: it is missing or damaged; the fix names a copy of it, or the command of the
                run.
        """
        from slime.config.config import Config

        try:
            return Config.load(self.config_path)
        except UserError as error:
            raise UserError(
                error.what, error.why, self._instead_of_the_config(Config.load)
            ) from error

    def _instead_of_the_config(self, load: Callable[[Path], Config]) -> str:
        """Return a fix for a missing or damaged configuration file."""
        copies = [*(self.path / "history").glob(f"{self.config_path.stem}.*-*.json")]
        copies += self.crash.glob(f"*/{self.config_path.name}")
        for copy in sorted(copies, key=_written, reverse=True):
            with contextlib.suppress(UserError):
                load(copy)
                command = shlex.join(["cp", str(copy), str(self.config_path)])
                return f"{command} brings back the newest settings that are whole"
        argv = self.read_summary()["stages"].get(self.stage or "", {}).get("argv")
        is_known = isinstance(argv, list) and all(isinstance(word, str) for word in argv)
        was = f"; it was: {shlex.join(argv)}" if is_known else ""
        return f"repeat the command of the run with --load set to its --save{was}"

    # -- state -------------------------------------------------------------------------------------

    def note_inputs(self, inputs: dict[str, str]) -> dict[str, Any]:
        """Store fingerprints of this launch's inputs (`slime.run.changed_inputs`). Return those of
        the previous launch, or {} if there was none."""
        summary = self.read_summary()
        entry = summary["stages"].setdefault(self.stage or "", {})
        before = entry.get("inputs")
        entry["inputs"] = inputs
        self._write_summary(summary)
        return before if isinstance(before, dict) else {}

    def set_state(self, state: str) -> None:
        """Write the state of this stage to ``run.json``: "running", "finished", "stopped" (can be
        resumed) or "failed".

        "launched" records that all processes are up; from then on the folder belongs to this run.
        """
        summary = self.read_summary()
        entry = summary["stages"].setdefault(self.stage or "", {})
        if state == "running":
            entry.update(
                started=time.time(),
                ended=None,
                pid=os.getpid(),
                host=platform.node(),
                argv=redact_argv(sys.argv),
                cwd=os.getcwd(),
                packages=package_versions(),
            )
        elif state == "launched":
            entry["launched"] = time.time()
            state = "running"
        else:
            entry["ended"] = time.time()
        entry["state"] = state
        self._write_summary(summary)

    def _write_summary(self, summary: dict[str, Any]) -> None:
        write_atomically(self.path / "run.json", indented_json(summary))

    def read_summary(self) -> dict[str, Any]:
        """Read ``run.json``: ``{"name", "stages": {stage or "": {"state", "started", "ended",
        "pid", "host", "argv", "cwd", "packages"}}}``. Damaged entries are left out."""
        summary = read_object(self.path / "run.json")
        stages = summary.get("stages")
        whole = {
            name: {key: value for key, value in entry.items() if _is_of_a_stage(key, value)}
            for name, entry in (stages.items() if isinstance(stages, dict) else ())
            if isinstance(entry, dict) and (not name or _CONFIG.fullmatch(f"config.{name}.json"))
        }
        return {**summary, "name": self.path.name, "stages": whole}

    def state(self) -> str | None:
        """Return the state of this stage, None before it started."""
        state = self.read_summary()["stages"].get(self.stage or "", {}).get("state")
        return str(state) if state is not None else None

    def write_crash(self, error: BaseException, note: str = "") -> Path | None:
        """Write ``crash/<time>/`` with the traceback, the last metrics, the configuration and the
        ends of the newest logs, and set the state "failed". Returns the folder.

        A folder that cannot be written must not hide the error, for example of a full disk: that
        is logged, and None is returned.

        Args:
            note: what the run was doing, for example the open phase.
        """
        folder = self.crash / time.strftime("%Y%m%d-%H%M%S")
        details = {
            "error": type(error).__name__,
            "message": redact_text(str(error)),
            "notes": [redact_text(str(note)) for note in getattr(error, "__notes__", ())],
            "note": redact_text(note),
            "stage": self.stage,
            "time": time.time(),
            "host": platform.node(),
            "python": platform.python_version(),
            "packages": package_versions(),
            "argv": redact_argv(sys.argv),
        }
        try:
            folder.mkdir(parents=True, exist_ok=True)
            told = redact_text("".join(traceback.format_exception(error)))
            (folder / "traceback.txt").write_text(told, encoding="utf-8", errors="replace")
            (folder / "crash.json").write_bytes(indented_json(details))
            last_rows = read_lines(self.metrics_path)[-20:]
            (folder / "last_metrics.jsonl").write_bytes(
                b"".join(orjson.dumps(row) + b"\n" for row in last_rows)
            )
            if self.config_path.exists():
                shutil.copyfile(self.config_path, folder / self.config_path.name)
            self.set_state("failed")
            self._keep_ends_of_logs(folder / "logs")
        except OSError as problem:
            logger.error("could not write the crash report to %s: %s", folder, problem)
            return None
        return folder

    def _keep_ends_of_logs(self, folder: Path) -> None:
        newest = sorted(self.logs.glob("*.log"), key=_written, reverse=True)[:_MAX_LOGS]
        for path in newest:
            # removed meanwhile, a broken link, or a pipe, which would block
            if not path.is_file():
                continue
            folder.mkdir(exist_ok=True)
            said = redact_text(_end_of(path).decode("utf-8", "surrogateescape"))
            (folder / path.name).write_bytes(said.encode("utf-8", "surrogateescape"))


def config_files(folder: Path) -> dict[str, Path]:
    """Return stage ("" for a run without stages) → configuration file, newest last. Copies that
    file managers make (``config (copy).json``, ``config.json~``) do not count."""
    named = {
        match.group(1) or "": path
        for path in entries_of(folder)
        if (match := _CONFIG.fullmatch(path.name))
    }
    return dict(sorted(named.items(), key=lambda item: _written(item[1])))


def newest_stage(folder: Path, stage: str | None = None) -> RunFolder:
    """Return the run's stage of that name, else its newest stage."""
    stages = RunFolder(folder).read_summary()["stages"]
    started = dict.fromkeys(config_files(folder), 0.0)
    started |= {name: entry.get("started") or 0.0 for name, entry in stages.items()}
    newest = max(reversed(started), key=lambda name: started[name], default="")
    return RunFolder(folder, (stage if stage is not None else newest) or None)


def _no_plain_files(folder: Path, levels: int = 2) -> Iterator[Path]:
    """Yield folders, links and pipes whose suffix is that of a file of a run."""
    try:
        entries = list(os.scandir(folder))
    except OSError:
        return
    for entry in entries:
        if entry.name.endswith(_SUFFIXES_INSIDE):
            if not entry.is_file(follow_symlinks=False):
                yield Path(entry.path)
        elif levels > 1 and entry.is_dir(follow_symlinks=False):
            yield from _no_plain_files(Path(entry.path), levels - 1)


def _is_of_a_stage(key: str, value: Any) -> bool:
    """Tell whether a value in ``run.json`` has the type that a run writes."""
    if key in ("started", "ended", "launched", "pid"):
        is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
        return value is None or (is_number and abs(value) < _MAX_NUMBER)
    if key in ("state", "host", "cwd"):
        return isinstance(value, str) and "\0" not in value
    return not isinstance(value, bool)


class FolderTaken(UserError):
    """A folder that this process has locked was moved or removed, and another run has made it
    again."""


@functools.cache  # a host may get another name meanwhile
def _holder(process_id: int) -> bytes:
    return f"pid {process_id} on {platform.node()}\n".encode()


def _is_lost(folder: Path) -> bool:
    """Tell whether the lock that this process holds on a folder is no longer in it.

    Raises:
        FolderTaken: the lock there is of another process.
    """
    try:
        found = (folder / ".lock").read_bytes()
    except FileNotFoundError:
        return True
    except OSError:  # out of reach for a moment
        return False
    if found in (b"", _holder(os.getpid())):  # b"": the file system has no locks
        return False
    raise FolderTaken(
        f"{folder} is another run's now ({found.decode(errors='replace').strip()})",
        why="the folder of this run was moved or removed while it ran",
        fix="resume this run from where its folder was moved",
    )


@contextmanager
def lock_folder(folder: Path) -> Iterator[None]:
    """Hold ``folder/.lock``, which names this process; create the folder if it is missing.

    Raises:
        UserError: another live process holds it, or the folder cannot be written.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
        descriptor = os.open(folder / ".lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
    except OSError as error:
        if os.path.lexists(folder / ".lock") and error.errno in (
            errno.EISDIR,
            errno.ELOOP,
            errno.ENXIO,
        ):
            what = f"{folder / '.lock'} is in the run's way"
            raise UserError(what, error.strerror or "", "remove it, if it is not yours") from error
        raise _cannot_write(folder, error) from error
    try:
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):
            what = f"{folder / '.lock'} is in the run's way"
            raise UserError(what, "it is not a regular file", "remove it, if it is not yours")
        try:
            _take_lock(descriptor)
        except BlockingIOError as error:
            holder = os.read(descriptor, 200).decode(errors="replace").strip()
            raise UserError(
                f"another process is writing to {folder}",
                why=f"it is {holder}" if holder else "it holds the lock",
                fix="wait for it or stop it, or write to another folder (--run-name, --save)",
            ) from error
        except OSError as error:  # the file system has no locks
            logger.warning("no lock on %s: %s", folder, error.strerror)
            os.ftruncate(descriptor, 0)
        else:
            os.ftruncate(descriptor, 0)
            os.pwrite(descriptor, _holder(os.getpid()), 0)
        yield
    finally:
        os.close(descriptor)


def is_held(path: Path) -> bool:
    """Tell whether a live process of this host is writing to the folder."""
    lock = path / ".lock"
    try:
        descriptor = os.open(lock, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError:
        return False
    try:
        fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except OSError:
        return True
    finally:
        os.close(descriptor)
    return False


def check_no_run_writes(output: Path, flag: str, own: Collection[Path] = ()) -> None:
    """Refuse to write into the folder of a run in progress.

    Args:
        own: folders that the caller itself has locked.
    Raises:
        UserError: ``output``, the value of a command's ``flag``, is in such a folder.
    """
    folder = folder_being_written(output, own)
    if folder is not None:
        why = f"a run is writing to {folder}, and nobody else may"
        raise UserError(
            f"{flag} {output} is in a folder of a run that goes on", why, "pass another place"
        )


def folder_being_written(path: Path, own: Collection[Path] = ()) -> Path | None:
    """Return the folder of a run in progress that contains a path; None if there is none."""
    place = path.resolve()
    folders = (folder for folder in (place, *place.parents) if folder not in own)
    return next(filter(is_held, folders), None)


def _take_lock(descriptor: int) -> None:
    """Take the lock; retry for a moment, since `is_held` takes it for an instant."""
    end = time.monotonic() + deadlines.RUN_FOLDER_LOCK
    while True:
        try:
            return fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            if time.monotonic() > end:
                raise
            time.sleep(0.02)


def _cannot_write(folder: Path, error: OSError) -> UserError:
    return UserError(
        f"cannot write to the folder {folder}",
        why=error.strerror or str(error),
        fix="pass --output-dir and --save with directories you can write to",
    )


def _written(path: Path) -> float:
    try:
        return path.stat().st_mtime
    except OSError:
        return 0.0


def _end_of(path: Path) -> bytes:
    with open(path, "rb") as file:
        skipped = path.stat().st_size - _LOG_BYTES
        if skipped <= 0:
            return file.read(_LOG_BYTES)
        file.seek(skipped)
        return file.read(_LOG_BYTES).partition(b"\n")[2]


@functools.cache
def package_versions() -> dict[str, str]:
    """Return package → version for the main packages; "not installed" for missing ones."""
    versions = {}
    for name in _REPORTED_PACKAGES:
        try:
            versions[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            versions[name] = "not installed"
    return versions
