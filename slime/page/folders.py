"""Follow run folders as they grow, and find the run folders in a path."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from slime.errors import UserError
from slime.observe.catalog import plain_name
from slime.observe.run_data import Stage, merge_rows, read_stages
from slime.observe.run_folder import config_files
from slime.page.files import ReadPosition, is_inside, is_unchanged, new_lines
from slime.page.index import SampleIndex, path_key
from slime.page.stages import alarms_of, describe

#: The newest runs of a folder that are shown.
MAX_RUNS = 30


class RunWatch:
    """One run folder; thread-safe. `refresh` reads new data.

    Attributes:
        key: id of the folder, equal in every process; does not reveal the path.
        index: index of the samples.
        generation: changes when the metrics restart, for example when a resumed run repeats steps;
            numbers are never reused.
    """

    def __init__(self, path: Path, cache: Path | None = None) -> None:
        self.path = path
        self.index = SampleIndex(path, cache)
        self.key = path_key(path)
        # differs from an earlier server's, so that an open page requests everything again
        self.generation = time.time_ns() // 1000
        self._lock = threading.RLock()
        self._place = ReadPosition()
        # stage and step of each line, in the order of the lines
        self._changed: list[tuple[str, float]] = []
        self._rows: dict[str, dict[float, dict[str, Any]]] = {}
        self._stages: list[Stage] = []
        self._alarms: dict[str, tuple[Any, list[dict[str, str]]]] = {}
        self.refresh()

    def refresh(self) -> None:
        """Read new metrics and the state of the run."""
        with self._lock:
            path = self.path / "metrics.jsonl"
            if not is_unchanged(path, self._place) and is_inside(path, self.path):
                try:
                    self._read(path)
                except FileNotFoundError:  # it is being replaced
                    return
            rows = {
                name: [steps[step] for step in sorted(steps)] for name, steps in self._rows.items()
            }
            self._stages = read_stages(self.path, rows)

    def _read(self, path: Path) -> None:
        is_other, lines, after = new_lines(path, self._place)
        if is_other:
            self.generation += 1
            self._rows = {}
            self._changed = []
        for line in lines:
            name = str(line.value.get("stage") or "")
            step = line.value.get("step")
            if isinstance(step, (int, float)):
                steps = self._rows.setdefault(name, {})
                steps[step] = merge_rows([*([steps[step]] if step in steps else []), line.value])[0]
                self._changed.append((name, step))
        self._place = after[0]

    def stages(self) -> list[Stage]:
        """Return the stages at the last `refresh`, ordered by their start."""
        return self._stages

    def metrics(
        self, stage: Stage, names: Iterable[str] | None, generation: int, since: int
    ) -> dict[str, Any]:
        """Return the values of the steps that changed since an earlier answer.

        Args:
            names: which metrics; None: all.
            generation, since: from the last answer; for another generation, all steps are returned.

        Returns:
            ``{"generation", "since", "steps": [...], "columns": {name: [value or null per step]},
            "bad": {name: [steps with a value that was no finite number]}, "names": [[name, title,
            unit] of all there are]}``.
        """
        with self._lock:
            since = since if generation == self.generation else 0
            steps = sorted({step for name, step in self._changed[since:] if name == stage.name})
            rows = self._rows.get(stage.name, {})
            known = stage.keys()
            wanted = known if names is None else [name for name in names if name in set(known)]
            bad = {
                name: [step for step in steps if rows[step].get(name, 0) is None] for name in wanted
            }
            return {
                "generation": self.generation,
                "since": len(self._changed),
                "steps": steps,
                "columns": {name: [rows[step].get(name) for step in steps] for name in wanted},
                "bad": {name: of_name for name, of_name in bad.items() if of_name},
                "names": [[name, *plain_name(name)] for name in known],
            }

    def alarms(self, stage: Stage) -> list[dict[str, str]]:
        """Return the alarms as `alarms_of` does, cached until the metrics change."""
        key = (self.generation, len(self._changed), stage.summary.get("ended") is not None)
        known = self._alarms.get(stage.name)
        if known is None or known[0] != key:
            known = self._alarms[stage.name] = (key, alarms_of(stage))
        return known[1]

    def describe(self, stage: Stage, key: str) -> dict[str, Any]:
        """Return the entry of a stage in the list of runs."""
        return describe(self.path, stage, key, self.alarms(stage), self.index.progress())


def is_run(path: Path) -> bool:
    """Tell whether a folder is a run folder."""
    return (path / "metrics.jsonl").is_file() or bool(config_files(path))


def runs_below(paths: Sequence[Path]) -> list[Path]:
    """Find run folders: each of ``paths``, or the newest ones in a folder of runs.

    Raises:
        UserError: a path does not exist, or neither is nor contains a run folder.
    """
    found: dict[Path, None] = {}
    for path in paths:
        if not path.is_dir():
            raise UserError(
                f"there is no folder {path}", fix="pass run folders, or a folder that holds some"
            )
        if is_run(path):
            found[path] = None
            continue
        inside = sorted(
            (p for p in path.iterdir() if p.is_dir() and is_run(p)), key=_last_change, reverse=True
        )
        if not inside:
            raise UserError(
                f"{path} holds no run", why="a run folder has config.json or metrics.jsonl"
            )
        found.update(dict.fromkeys(inside[:MAX_RUNS]))
    return list(found)


def _last_change(path: Path) -> float:
    files = [path / name for name in ("metrics.jsonl", "run.json") if (path / name).is_file()]
    return max((file.stat().st_mtime for file in files), default=0.0)
