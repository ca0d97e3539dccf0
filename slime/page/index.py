"""An index of the samples of one run folder: their numbers, the offsets of their lines, and a word
search.

It is a small SQLite database; the texts stay in the samples' own files. A search finds candidates
by trigrams (FTS5) and then reads their lines, so its result is exact. For words that occur in many
samples it first scans lines in the requested order, which finds matches soon. Words of one or two
characters are looked up as prefixes of trigrams. Without FTS5 every line is read. The search
ignores case.
"""

from __future__ import annotations

import contextlib
import hashlib
import itertools
import os
import sqlite3
import tempfile
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import orjson

from slime.log import get_logger
from slime.observe.run_data import Stage, config_value
from slime.page.files import ReadPosition, is_inside, is_unchanged, new_lines
from slime.page.pictures import with_pictures
from slime.page.rows import (
    COLUMNS,
    Query,
    condition_of,
    order_of,
    row_of,
    searched_text,
    training_of,
    with_training,
)

logger = get_logger(__name__)

#: A database with another version of the tables is rebuilt.
_VERSION = 4
_BATCH = 1000
_CHUNK = 100
#: Fewer matches than this are sorted: at once (few), or after a scan that did not find enough
#: (late). The scan in the requested order tries this many lines (patience) without the index.
_FEW = 3000
_LATE = 25_000
_PATIENCE = 500
#: Characters of a gram, and grams of a search that are looked up: a few exclude most samples.
_TRIGRAM = 3
_MAX_GRAMS = 16
#: The first is appended to each text, so that every character begins a trigram; search words never
#: contain it. The second, appended to a prefix, sorts after all trigrams with that prefix.
_PADDING = "\n\n"
_LAST = "\U0010ffff" * 2
_BUSY_MS = 10_000
_TABLES = f"""
CREATE TABLE files (id INTEGER PRIMARY KEY AUTOINCREMENT, name TEXT UNIQUE, inode INTEGER,
                    size INTEGER, mtime INTEGER, tail BLOB);
CREATE TABLE rows (id INTEGER PRIMARY KEY AUTOINCREMENT, file INTEGER, offset INTEGER,
                   length INTEGER, {", ".join(COLUMNS)});
CREATE INDEX of_file ON rows (file, grp);
CREATE INDEX by_step ON rows (stage, kind, step, dataset, grp, reward, response_length, status);
CREATE INDEX of_prompt ON rows (stage, prompt);
CREATE INDEX by_reward ON rows (stage, kind, reward, step);
CREATE INDEX by_advantage ON rows (stage, kind, above, step);
CREATE INDEX by_spread ON rows (stage, kind, spread, step);
CREATE INDEX by_length ON rows (stage, kind, response_length, step);
CREATE TABLE progress (texts INTEGER);
INSERT INTO progress VALUES (0);
"""
#: The rewards of a group, or of a sample without a group.
_SUMMARY = (
    "SELECT count(*) AS samples, min(reward) AS least, avg(reward) AS mean, max(reward) AS "
    "greatest, group_concat(reward, ' ') AS rewards FROM rows WHERE "
)


def cache_folder() -> Path:
    """Return the folder in which indexes are kept between calls."""
    base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(base) / "slime" / "watch"


def path_key(run: Path) -> str:
    """Return a name for a folder that does not reveal its path."""
    return hashlib.blake2b(
        str(run.resolve()).encode("utf-8", "surrogateescape"), digest_size=12
    ).hexdigest()


class SampleIndex:
    """The index of one run folder. One thread calls `update`; other threads may query at the same
    time.

    Args:
        run: the run folder.
        cache: folder of the database; None: a temporary folder, deleted with this object.
    """

    def __init__(self, run: Path, cache: Path | None = None) -> None:
        self.run = run
        self._own: tempfile.TemporaryDirectory[str] | None = None
        try:
            self._open(cache or self._own_folder())
        except sqlite3.OperationalError as problem:  # the disk is full, or the index is locked
            if cache is None:
                raise
            logger.warning("%s: %s; the index of %s goes with this process", cache, problem, run)
            self._open(self._own_folder())
        self._state = 0
        #: Results that need all rows; cleared on every change.
        self._cached: dict[str, Any] = {}
        self.has_trigrams = bool(
            self._writer.execute("SELECT 1 FROM sqlite_master WHERE name = 'texts'").fetchone()
        )

    def _own_folder(self) -> Path:
        self._own = tempfile.TemporaryDirectory(prefix="slime-watch-")
        return Path(self._own.name)

    def _open(self, folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        self._path = folder / f"{path_key(self.run)}.sqlite"
        try:
            self._writer = self._opened()
        except sqlite3.OperationalError:  # another process may be using it
            raise
        except sqlite3.DatabaseError:  # damaged, or of another version
            self._remove()
            self._writer = self._opened()

    def close(self) -> None:
        self._writer.close()
        if self._own:
            self._own.cleanup()

    def _connect(self) -> sqlite3.Connection:
        connection = sqlite3.connect(self._path, timeout=_BUSY_MS / 1000, check_same_thread=False)
        connection.isolation_level = None
        connection.row_factory = sqlite3.Row
        return connection

    def _opened(self) -> sqlite3.Connection:
        connection = self._connect()
        try:
            connection.execute("PRAGMA journal_mode = WAL")
            connection.execute("PRAGMA synchronous = OFF")
            with _transaction(connection):
                if connection.execute("PRAGMA user_version").fetchone()[0] == _VERSION:
                    return connection
                if connection.execute("SELECT 1 FROM sqlite_master").fetchone():
                    raise sqlite3.DatabaseError("of another version")
                for statement in _TABLES.split(";"):
                    connection.execute(statement)
                # SQLite may be built without FTS5, or be older than trigrams
                with contextlib.suppress(sqlite3.OperationalError):
                    connection.execute(
                        "CREATE VIRTUAL TABLE texts USING fts5 (text, content='', detail=none, "
                        "tokenize='trigram case_sensitive 1')"
                    )
                connection.execute(f"PRAGMA user_version = {_VERSION}")
        except BaseException:
            connection.close()
            raise
        return connection

    def _remove(self) -> None:
        for suffix in ("", "-wal", "-shm"):
            self._path.with_name(self._path.name + suffix).unlink(missing_ok=True)

    # -- updates -----------------------------------------------------------------------------------

    def update(self, stages: Iterable[Stage], goes_on: Callable[[], bool] = lambda: True) -> bool:
        """Read new samples since the last call: first the numbers of all, then their texts.

        Args:
            goes_on: called between batches; False stops until the next call.

        Returns:
            Whether anything changed.
        """
        changed = self._update(stages, goes_on)
        # another process may update the same index
        state = self._writer.execute("PRAGMA data_version").fetchone()[0]
        if changed or state != self._state:
            self._state = state
            self._cached = {}
        return changed

    def _update(self, stages: Iterable[Stage], goes_on: Callable[[], bool]) -> bool:
        files = {}
        for stage in stages:
            for kind, paths in (("rollout", stage.rollouts), ("eval", stage.evaluations)):
                files.update(
                    {str(p.relative_to(self.run)): (p, stage, kind) for p in paths.values()}
                )
        known = {row["name"]: row for row in self._writer.execute("SELECT * FROM files")}
        changed = False
        for name in known.keys() - files.keys():
            with _transaction(self._writer):
                self._forget(known[name]["id"])
            changed = True
        for name, (path, stage, kind) in files.items():
            if not goes_on():
                return changed
            row = known.get(name)
            place = _position(row)
            if not is_unchanged(path, place) and is_inside(path, self.run):
                # a resumed run moved the file, or it is not readable
                with contextlib.suppress(OSError):
                    self._read(name, path, stage, kind)
                    self._cached = {}
                    changed = True
        return self._add_texts(goes_on) or changed

    def _forget(self, file: int) -> None:
        self._writer.execute("DELETE FROM rows WHERE file = ?", (file,))
        self._writer.execute("DELETE FROM files WHERE id = ?", (file,))

    def _read(self, name: str, path: Path, stage: Stage, kind: str) -> None:
        reward_key = config_value(
            stage.config, "reward_key" if kind == "rollout" else "eval_reward_key"
        )
        with _transaction(self._writer):  # sees what another process has read meanwhile
            row = self._writer.execute("SELECT * FROM files WHERE name = ?", (name,)).fetchone()
            place = _position(row)
            is_other, lines, after = new_lines(path, place)
            if is_other and row:
                self._forget(row["id"])
                row = None
            if row is None:
                file = self._writer.execute(
                    "INSERT INTO files (name) VALUES (?)", (name,)
                ).lastrowid
            else:
                file = row["id"]
            columns = ("file", "offset", "length", *COLUMNS)
            marks = ", ".join("?" * len(columns))
            statement = f"INSERT INTO rows ({', '.join(columns)}) VALUES ({marks})"
            values = (
                row_of(file or 0, line, stage.name, kind, path.stem, reward_key) for line in lines
            )
            while batch := list(itertools.islice(values, _BATCH)):
                self._writer.executemany(statement, batch)
            new = after[0]
            self._writer.execute(
                "UPDATE files SET inode = ?, size = ?, mtime = ?, tail = ? WHERE id = ?",
                (new.inode, new.size, new.mtime, new.tail, file),
            )
            by_group = (
                "SELECT avg(reward), max(reward) - min(reward), file, grp, dataset FROM rows WHERE "
                "file = ? GROUP BY grp, dataset"
            )
            groups = self._writer.execute(by_group, (file,)).fetchall()
            self._writer.executemany(
                "UPDATE rows SET above = reward - ?, spread = ? WHERE file = ? AND grp IS ? AND "
                "dataset IS ?",
                map(tuple, groups),
            )

    def _add_texts(self, goes_on: Callable[[], bool]) -> bool:
        if not self.has_trigrams:
            return False
        added = False
        while goes_on():
            with _transaction(self._writer):
                upto = self._texts_upto(self._writer)
                rows = self._writer.execute(
                    "SELECT id, file, offset, length FROM rows WHERE id > ? ORDER BY id LIMIT "
                    f"{_BATCH}",
                    (upto,),
                ).fetchall()
                if not rows:
                    return added
                texts = [
                    (row["id"], searched_text(record).replace("\0", " ") + _PADDING)
                    for row, record in self._records(self._writer, rows)
                ]
                self._writer.executemany("INSERT INTO texts (rowid, text) VALUES (?, ?)", texts)
                self._writer.execute("UPDATE progress SET texts = ?", (rows[-1]["id"],))
            self._cached.pop("progress", None)
            added = True
        return added

    def progress(self) -> dict[str, int]:
        """Return ``{"samples", "texts"}``: the number of samples, and of those whose texts are
        indexed."""
        cached = self._cached
        if "progress" not in cached:
            with self._reader() as reader:
                upto = self._texts_upto(reader)
                samples = reader.execute("SELECT count(*) FROM rows").fetchone()[0]
                new = reader.execute("SELECT count(*) FROM rows WHERE id > ?", (upto,))
                left = new.fetchone()[0] if self.has_trigrams else 0
            cached["progress"] = {"samples": samples, "texts": samples - left}
        return dict(cached["progress"])

    @staticmethod
    def _texts_upto(connection: sqlite3.Connection) -> int:
        return int(connection.execute("SELECT texts FROM progress").fetchone()[0])

    # -- questions ---------------------------------------------------------------------------------

    @contextlib.contextmanager
    def _reader(self) -> Iterator[sqlite3.Connection]:
        with contextlib.closing(self._connect()) as connection:
            yield connection

    def steps(self, stage: str) -> list[dict[str, Any]]:
        """Return an entry per step with samples and per evaluation: ``{"kind", "step", "samples",
        "groups", "reward", "length"}``; reward and length are means."""
        cached = self._cached
        if stage not in cached.setdefault("steps", {}):
            with self._reader() as reader:
                rows = reader.execute(
                    "SELECT kind, step, count(*) AS samples, count(DISTINCT grp) AS groups, "
                    "avg(reward) AS reward, avg(response_length) AS length FROM rows WHERE stage = "
                    "? GROUP BY kind, step ORDER BY step, kind",
                    (stage,),
                )
                cached["steps"][stage] = [dict(row) for row in rows]
        return list(cached["steps"][stage])

    def groups(
        self, query: Query, offset: int = 0, limit: int = 50
    ) -> tuple[list[dict[str, Any]], bool]:
        """Return a page of the groups with a sample that matches ``query``, in the order of these
        samples.

        Returns:
            (``{"step", "dataset", "group", "samples", "least", "mean", "greatest", "rewards"}`` of
            the whole group, with ``id`` and ``record`` of the sample that was found first; whether
            there are more). A sample without a group is a group of its own.
        """
        with self._reader() as reader:
            first: dict[Any, sqlite3.Row] = {}
            for row in self._found(reader, query):
                first.setdefault(
                    (row["file"], row["dataset"], row["grp"], row["grp"] is None and row["id"]), row
                )
                if len(first) > offset + limit:
                    break
            page = list(first.values())[offset : offset + limit]
            groups = []
            for row, record in self._rows(reader, (row["id"] for row in page)):
                where = "id = ?"
                values = [row["id"]]
                if row["grp"] is not None:
                    where = "file = ? AND grp IS ? AND dataset IS ?"
                    values = [row["file"], row["grp"], row["dataset"]]
                summary = dict(reader.execute(_SUMMARY + where, values).fetchone())
                place = {name: row[name] for name in ("id", "step", "dataset")}
                groups.append(place | {"group": row["grp"]} | summary | {"record": record})
        return groups, len(first) > offset + limit

    def find(
        self, query: Query, offset: int = 0, limit: int = 50
    ) -> tuple[list[dict[str, Any]], bool]:
        """Return a page of samples.

        Returns:
            (rows with their numbers and ``record``, the line itself; whether there are more).
        """
        with self._reader() as reader:
            ids = [
                row["id"]
                for row in itertools.islice(self._found(reader, query), offset, offset + limit + 1)
            ]
            found = [_shown(row, record) for row, record in self._rows(reader, iter(ids[:limit]))]
        return found, len(ids) > limit

    def _found(self, reader: sqlite3.Connection, query: Query) -> Iterator[sqlite3.Row]:
        """Yield the rows that a query finds, words included, in its order."""
        words = tuple(word.casefold() for word in query.words)
        if not words:
            condition, values = condition_of(query)
            columns = "id, file, dataset, grp"
            yield from reader.execute(
                f"SELECT {columns} FROM rows WHERE {condition} ORDER BY {order_of(query)}", values
            )
            return
        for row, record in self._rows(reader, self._likely(reader, query, words)):
            text = searched_text(record)
            if all(word in text for word in words):
                yield row

    def sample(self, number: int) -> dict[str, Any] | None:
        """Return one sample by its ``id`` as `find` does, with training's values of its tokens;
        None if it no longer exists."""
        with self._reader() as reader:
            for row, record in self._rows(reader, iter([number])):
                named = reader.execute(
                    "SELECT name FROM files WHERE id = ?", (row["file"],)
                ).fetchone()
                if row["kind"] == "rollout" and named is not None:
                    known = training_of(self.run / named["name"], row["step"] - 1, self.run)
                    record = with_training(record, known)
                return _shown(row, with_pictures(record))
        return None

    def _likely(
        self, reader: sqlite3.Connection, query: Query, words: Sequence[str]
    ) -> Iterator[int]:
        """Yield candidate rows in the requested order: all rows with the words, and few others."""
        grams = _grams(words)
        few = self._matches(reader, words, _FEW) if grams else None
        if few is not None and len(few) < _FEW:
            yield from _ids(reader, query, among=few)
            return
        ids = _ids(reader, query)
        tried = set()
        for number in itertools.islice(ids, _PATIENCE):
            tried.add(number)
            yield number
        matches = self._matches(reader, words)
        if matches is None:
            yield from ids
        elif len(matches) < _LATE:
            yield from (
                number for number in _ids(reader, query, among=matches) if number not in tried
            )
        else:
            yield from (number for number in ids if number in matches)

    def _matches(
        self, reader: sqlite3.Connection, words: Sequence[str], most: int = -1
    ) -> set[int] | None:
        """Return all rows that may have the words, or ``most`` of them; None if the trigrams cannot
        tell."""
        if not self.has_trigrams or any("\0" in word for word in words):
            return None
        if grams := _grams(words):
            match = " AND ".join('"' + gram.replace('"', '""') + '"' for gram in grams)
            found = reader.execute(
                "SELECT rowid FROM texts WHERE texts MATCH ? LIMIT ?", (match, most)
            )
        else:
            reader.execute(
                "CREATE VIRTUAL TABLE temp.grams USING fts5vocab('main', 'texts', 'instance')"
            )
            parts = " INTERSECT ".join(
                ["SELECT doc FROM temp.grams WHERE term >= ? AND term <= ?"] * len(words)
            )
            bounds = [bound for word in words for bound in (word, word + _LAST)]
            found = reader.execute(f"{parts} LIMIT ?", (*bounds, most))
        numbers = {row[0] for row in found}
        new = reader.execute("SELECT id FROM rows WHERE id > ?", (self._texts_upto(reader),))
        return numbers | {row["id"] for row in new}

    def _rows(
        self, connection: sqlite3.Connection, ids: Iterator[int]
    ) -> Iterator[tuple[sqlite3.Row, dict[str, Any]]]:
        """Yield rows and their lines, in the order of their ids."""
        while chunk := list(itertools.islice(ids, _CHUNK)):
            rows = connection.execute(
                f"SELECT * FROM rows WHERE id IN ({', '.join(map(str, chunk))})"
            )
            known = {row["id"]: row for row in rows}
            yield from self._records(
                connection, [known[number] for number in chunk if number in known]
            )

    def _records(
        self, connection: sqlite3.Connection, rows: Sequence[sqlite3.Row]
    ) -> Iterator[tuple[sqlite3.Row, dict[str, Any]]]:
        """Yield the lines of rows; {} if the file was rewritten since."""
        files_of_rows = ", ".join({str(row["file"]) for row in rows})
        told = connection.execute(f"SELECT id, name FROM files WHERE id IN ({files_of_rows})")
        names = {row["id"]: row["name"] for row in told}
        with contextlib.ExitStack() as files:
            opened: dict[int, Any] = {}
            for row in rows:
                file = row["file"]
                if file not in opened:
                    if len(opened) > 64:
                        files.close()
                        opened.clear()
                    try:
                        opened[file] = files.enter_context((self.run / names[file]).open("rb"))
                    except (OSError, KeyError):
                        opened[file] = None
                yield row, _line_at(opened[file], row["offset"], row["length"])


@contextlib.contextmanager
def _transaction(connection: sqlite3.Connection) -> Iterator[None]:
    connection.execute("BEGIN IMMEDIATE")
    try:
        yield
        connection.execute("COMMIT")
    except BaseException:
        if connection.in_transaction:  # on a full disk SQLite has already rolled back
            connection.execute("ROLLBACK")
        raise


def _position(row: sqlite3.Row | None) -> ReadPosition:
    if row is None:
        return ReadPosition()
    return ReadPosition(row["inode"], row["size"], row["mtime"], row["tail"])


def _ids(
    reader: sqlite3.Connection, query: Query, among: Iterable[int] | None = None
) -> Iterator[int]:
    """Yield the ids of the rows that a query finds, in its order; its words are ignored."""
    condition, values = condition_of(query)
    if among is not None:
        condition += " AND id IN (SELECT value FROM json_each(?))"
        values.append(orjson.dumps(list(among)).decode())
    found = reader.execute(
        f"SELECT id FROM rows WHERE {condition} ORDER BY {order_of(query)}", values
    )
    return (row["id"] for row in found)


def _grams(words: Sequence[str]) -> list[str]:
    """Return trigrams of the words, at most `_MAX_GRAMS`."""
    grams = sorted(
        {word[i : i + _TRIGRAM] for word in words for i in range(len(word) - _TRIGRAM + 1)}
    )
    return grams[:: -(-len(grams) // _MAX_GRAMS)] if grams else []


def _shown(row: sqlite3.Row, record: dict[str, Any]) -> dict[str, Any]:
    return {name: row[name] for name in ("id", *COLUMNS)} | {"record": record}


def _line_at(file: Any, offset: int, length: int) -> dict[str, Any]:
    if file is None:
        return {}
    file.seek(offset)
    try:
        value = orjson.loads(file.read(length))
    except orjson.JSONDecodeError:
        return {}
    return value if isinstance(value, dict) else {}
