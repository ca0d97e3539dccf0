"""The run folder: everything one run leaves behind, readable while the run goes on.

outputs/<run_name>/
  config.json           every setting and where it came from (config.<stage>.json for a named stage)
  run.json              stages with start, end and state; host, pid and command line
  metrics.jsonl         one JSON object per step
  tensorboard/          event files
  samples/              what was generated, per rollout and per evaluation
  trace/                timelines that open in Perfetto, per rollout
  logs/                 one file per process
  model/                with --save: the model at the end, a Hugging Face directory
  journal/              while it runs: what was generated and not trained on yet, and when which weights were pushed
  crash/                traceback, last metrics and configuration of a failed run
  report.html           all of it on one page
"""

from __future__ import annotations

import fcntl
import importlib.metadata
import os
import platform
import shutil
import sys
import time
import traceback
from collections.abc import Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import orjson

from slime.errors import UserError
from slime.files import json_safe, read_lines, read_object, write_atomically
from slime.log import get_logger
from slime.redact import redact_argv, redact_text

if TYPE_CHECKING:
    from slime.config.config import Config

logger = get_logger(__name__)

#: What a crash folder keeps of each log, and of how many.
_LOG_BYTES, _MOST_LOGS = 64 << 10, 64
_READERS_SECONDS = 0.5
_REPORTED_PACKAGES = ("slime-rl", "torch", "megatron-core", "sglang", "ray", "transformers", "sglang-router")


@dataclass(frozen=True)
class RunFolder:
    """Paths of one run. Cheap and picklable; other processes build it again from path and stage.

    Attributes:
        path: the folder itself.
        stage: name of this stage where several share one folder (SFT, then RL); None when there is only one.
    """

    path: Path
    stage: str | None = None

    # -- layout --------------------------------------------------------------------------------------

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
    def model(self) -> Path:
        return self._of_stage("model")

    def _of_stage(self, name: str) -> Path:
        return self.path / name / self.stage if self.stage else self.path / name

    # -- creation ------------------------------------------------------------------------------------

    @staticmethod
    def claim(config: Config, *, resuming: bool = False) -> tuple[RunFolder, ExitStack]:
        """Make the folder of this run, or open it again to continue. A launch that is refused changes nothing.

        Args:
            config: gives ``--output-dir``, ``--run-name``, ``--stage`` and ``--save``.
            resuming: a checkpoint is being continued, so an existing folder (or stage) is what we want.

        Returns:
            The folder, and its lock and that of ``--save``, until they are closed.

        Raises:
            UserError: another live process writes to one of them, the folder (or this stage in it) exists and we are
                not resuming, or it cannot be written.
        """
        observe = config.observe
        run = RunFolder(Path(observe.output_dir) / observe.run_name, observe.stage or None)
        if not resuming:
            run._check_unused()
        with ExitStack() as locks:
            locks.enter_context(run.lock())
            if not resuming:
                run._check_unused()  # of two launches at once, the other one may have had the lock
            if config.checkpoint.save is not None:
                locks.enter_context(lock_folder(Path(config.checkpoint.save)))
            try:
                if run.config_path.exists() and run.config_path.stat().st_size:
                    run._keep_old_config()
                config.save(run.config_path)
                run.logs.mkdir(exist_ok=True)
                run.set_state("running")
            except OSError as error:
                raise _cannot_write(run.path, error) from error
            return run, locks.pop_all()

    def lock(self) -> AbstractContextManager[None]:
        """Keep every other process from writing here. A process that does not hold the lock changes nothing in the
        folder.

        Raises:
            UserError: another live process holds it, or the folder cannot be written.
        """
        return lock_folder(self.path)

    def _check_unused(self) -> None:
        entries = {entry.name for entry in self.path.iterdir()} - {".lock"} if self.path.is_dir() else set()
        if not entries or self._was_never_launched():
            return
        if self.stage is None:
            raise UserError(
                f"the run folder {self.path} exists already",
                why="a run never writes over the results of another one",
                fix="pass another --run-name, or set --load to its checkpoint directory to continue that run",
            )
        if not any(self.path.glob("config*.json")):
            raise UserError(
                f"{self.path} is not a run folder", why="it has no config.json", fix="pass another --run-name"
            )
        if self.config_path.exists():
            raise UserError(
                f"the run folder {self.path} already has stage '{self.stage}'",
                fix="pass another --stage or --run-name, or set --load to its checkpoint directory to continue it",
            )

    def _was_never_launched(self) -> bool:
        """An earlier try under this name ended before anything ran, for want of data, GPUs, a model that loads: the
        corrected one takes its place."""
        entry = self.read_summary()["stages"].get(self.stage or "")
        if entry is None or entry.get("launched") is not None:
            return False
        if entry.get("state") != "running":
            return True
        here = entry.get("host") == platform.node()
        return here and not Path(f"/proc/{entry.get('pid')}").exists()  # killed while it came up

    def _keep_old_config(self) -> None:
        """A resumed run may have other settings; those of the earlier part stay readable."""
        stamp = time.strftime("%Y%m%d-%H%M%S", time.localtime(self.config_path.stat().st_mtime))
        history = self.path / "history"
        history.mkdir(exist_ok=True)
        shutil.copyfile(self.config_path, history / f"{self.config_path.stem}.{stamp}.json")

    # -- state ---------------------------------------------------------------------------------------

    def set_state(self, state: str) -> None:
        """Note in ``run.json`` how this stage stands: "running", "finished", "stopped" (can resume) or "failed".

        "launched" notes that everything is up; from then on the folder belongs to this run.
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
            entry["launched"], state = time.time(), "running"
        else:
            entry["ended"] = time.time()
        entry["state"] = state
        write_atomically(self.path / "run.json", orjson.dumps(json_safe(summary), option=orjson.OPT_INDENT_2))

    def read_summary(self) -> dict[str, Any]:
        """``run.json``: ``{"name", "stages": {stage or "": {"state", "started", "ended", "pid", "host", "argv",
        "cwd", "packages"}}}``."""
        summary = read_object(self.path / "run.json")
        return summary if isinstance(summary.get("stages"), dict) else {"name": self.path.name, "stages": {}}

    def state(self) -> str | None:
        """The state of this stage, None before it started."""
        state = self.read_summary()["stages"].get(self.stage or "", {}).get("state")
        return str(state) if state is not None else None

    def write_crash(self, error: BaseException, note: str = "") -> Path | None:
        """Keep what explains a failure: ``crash/<time>/`` with the traceback, the last metrics, the configuration and
        the ends of all logs (which the next launch goes on with).

        Drivers call it on the way out. It never hides the error itself: when the folder cannot be written (a full
        disk may be the reason of the crash), it logs that and returns None.

        Args:
            note: what the run was doing, e.g. the open phase.
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
            (folder / "crash.json").write_bytes(orjson.dumps(json_safe(details), option=orjson.OPT_INDENT_2))
            last_rows = read_lines(self.metrics_path)[-20:]
            (folder / "last_metrics.jsonl").write_bytes(b"".join(orjson.dumps(row) + b"\n" for row in last_rows))
            if self.config_path.exists():
                shutil.copyfile(self.config_path, folder / self.config_path.name)
            self.set_state("failed")
            self._keep_ends_of_logs(folder / "logs")
        except OSError as problem:
            logger.error("could not write the crash report to %s: %s", folder, problem)
            return None
        return folder

    def _keep_ends_of_logs(self, folder: Path) -> None:
        newest = sorted(self.logs.glob("*.log"), key=_written, reverse=True)[:_MOST_LOGS]
        for path in newest:
            if not path.is_file():  # gone meanwhile, a broken link, or a pipe, which nobody may ever write to
                continue
            folder.mkdir(exist_ok=True)
            said = redact_text(_end_of(path).decode("utf-8", "surrogateescape"))
            (folder / path.name).write_bytes(said.encode("utf-8", "surrogateescape"))


@contextmanager
def lock_folder(folder: Path) -> Iterator[None]:
    """Hold ``folder/.lock``, which names this process; the folder is made where there is none.

    Raises:
        UserError: another live process holds it, or the folder cannot be written.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
        descriptor = os.open(folder / ".lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
    except OSError as error:
        raise _cannot_write(folder, error) from error
    try:
        try:
            _take_lock(descriptor)
        except BlockingIOError as error:
            holder = os.read(descriptor, 200).decode(errors="replace").strip()
            raise UserError(
                f"another process is writing to {folder}",
                why=f"it is {holder}" if holder else "it holds the lock",
                fix="wait for it or stop it, or write to another folder (--run-name, --save)",
            ) from error
        except OSError as error:  # a file system without locks
            logger.warning("no lock on %s: %s", folder, error.strerror)
        else:
            os.ftruncate(descriptor, 0)
            os.pwrite(descriptor, f"pid {os.getpid()} on {platform.node()}\n".encode(), 0)
        yield
    finally:
        os.close(descriptor)


def _take_lock(descriptor: int) -> None:
    """Waits for readers, who look for an instant whether the lock is held."""
    end = time.monotonic() + _READERS_SECONDS
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


def package_versions() -> dict[str, str]:
    versions = {}
    for name in _REPORTED_PACKAGES:
        try:
            versions[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            versions[name] = "not installed"
    return versions
