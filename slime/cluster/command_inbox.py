"""Orders to a running run: small files in its folder, so that whoever may write there can give
them, and nobody else.

    <run>/engines/<id>.order.json     {"verb": "add", "url": "10.0.0.7:30000"}: written by `slime
    engines` <run>/engines/<id>.answer.json    {"said": …}, {"refused": …}, …: written by the
    driver, which removes the order;
                                      removed by who has read it

No port is opened for it. The driver looks when it looks about anyway, and as a rule at no more than
the time at which the folder was last changed. Imports no Ray.
"""

from __future__ import annotations

import contextlib
import os
import platform
import re
import secrets
import stat
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import orjson

from slime import deadlines
from slime.errors import RunFailed, UserError
from slime.files import read_object, write_atomically
from slime.log import get_logger
from slime.observe.run_folder import RunFolder

logger = get_logger(__name__)

_ORDER = re.compile(r"([0-9a-f]{16})\.order\.json")
_OURS = re.compile(r"[0-9a-f]{16}\.(order|answer)\.json")
_LARGEST = 4096
FOLDER = "engines"


@dataclass(frozen=True)
class EngineCommand:
    """What somebody wants of a run.

    Attributes:
        id: of its files.
        verb: "add", "remove", "list", or nonsense.
    """

    id: str
    verb: str
    url: str = ""


class CommandInbox:
    """The driver's side.

    Args:
        run: the run's folder.
        clock: as the file system counts, seconds since 1970.
    """

    def __init__(self, run: Path, clock: Callable[[], float] = time.time) -> None:
        self._folder = run / FOLDER
        self._clock = clock
        self._seen: int | None = None
        self._answered: set[str] = set()
        self._folder.mkdir(parents=True, exist_ok=True)
        self.close()  # what a former life of the run left

    def take(self) -> list[EngineCommand]:
        """The orders that are not answered yet; never raises what comes of others' files."""
        try:
            changed = self._folder.stat().st_mtime_ns
            if changed == self._seen:
                return []
            orders = [
                order
                for path in sorted(self._folder.iterdir())
                if (order := self._read(path)) is not None
            ]
        except OSError as error:
            logger.debug("no orders: %s", error)
            return []
        settled = self._clock() - changed / 1e9 > deadlines.COMMAND_INBOX_SETTLED
        self._seen = changed if settled and not orders else None
        return orders

    def answer(self, order: EngineCommand, words: Mapping[str, Any]) -> None:
        self._answered.add(order.id)
        try:
            write_atomically(self._folder / f"{order.id}.answer.json", orjson.dumps(words))
            (self._folder / f"{order.id}.order.json").unlink(missing_ok=True)
        except OSError as error:  # a full disk must not end the run
            logger.warning("an order could not be answered: %s", error)

    def close(self) -> None:
        """Orders that nobody will answer."""
        with contextlib.suppress(OSError):
            for path in self._folder.iterdir():
                if _OURS.fullmatch(path.name):
                    path.unlink(missing_ok=True)

    def _read(self, path: Path) -> EngineCommand | None:
        found = _ORDER.fullmatch(path.name)
        if found is None or found.group(1) in self._answered:
            return None
        try:
            status = path.lstat()
            words = (
                read_object(path)
                if stat.S_ISREG(status.st_mode) and status.st_size <= _LARGEST
                else {}
            )
        except OSError:  # taken back, or not for us to read
            return None
        return EngineCommand(found.group(1), str(words.get("verb", "")), str(words.get("url", "")))


def give_order(
    run: Path,
    verb: str,
    url: str = "",
    *,
    seconds: float = deadlines.COMMAND_INBOX_WAIT,
    poll: float = deadlines.COMMAND_INBOX_POLL,
) -> dict[str, Any]:
    """Have a running run do something, and wait for its answer.

    Args:
        run: its folder.
        seconds: that the answer may take; the order is taken back then.
    Raises:
        UserError: the run does not run, cannot be written to, refuses, or gives no answer.
    """
    folder = run / FOLDER
    order = secrets.token_hex(8)
    asked = folder / f"{order}.order.json"
    answered = folder / f"{order}.answer.json"
    _check_runs(run)
    if not folder.is_dir():
        raise UserError(
            f"{run} has no engines",
            why=f"there is no {folder}: it generates nothing, or comes up only now",
        )
    try:
        write_atomically(asked, orjson.dumps({"verb": verb, "url": url}))
    except OSError as error:
        raise UserError(
            f"{folder} cannot be written to",
            why=error.strerror or str(error),
            fix="call it as the user of the run",
        ) from error
    end = time.monotonic() + seconds
    try:
        while not answered.exists():
            _check_runs(run)
            if time.monotonic() > end:
                raise RunFailed(
                    f"the run {run} gave no answer within {seconds:.0f} s, and the order was "
                    "taken back",
                    why="nobody joins or leaves during a weight push, and a driver that hangs "
                    "hears nothing",
                    fix=f"try again; {run}/logs/driver.log says what it is at",
                )
            time.sleep(poll)
        words = read_object(answered)
    finally:
        asked.unlink(missing_ok=True)
        answered.unlink(missing_ok=True)
    if refused := words.get("refused"):
        raise UserError(refused["what"], why=refused["why"], fix=refused["fix"])
    return words


def _check_runs(run: Path) -> None:
    stages = RunFolder(run).read_summary()["stages"]
    newest = max(stages.values(), key=lambda stage: stage.get("started") or 0.0, default=None)
    if newest is None:
        raise UserError(
            f"{run} is not a run folder", why="it has no run.json", fix="pass outputs/<run>"
        )
    state = newest.get("state")
    pid = newest.get("pid")
    if state == "running" and newest.get("host") == platform.node() and not _lives(pid):
        state = "gone: its driver was killed"
    if state != "running":
        raise UserError(
            f"the run {run} does not run: it is {state}",
            fix="engines can join while it runs; for a launch, name them with "
            "--rollout-external-engine-addrs",
        )


def _lives(pid: Any) -> bool:
    return isinstance(pid, int) and os.path.exists(f"/proc/{pid}")
