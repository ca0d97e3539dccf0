"""Choose the contents of a run's report: all metrics, and a selection of large data."""

from __future__ import annotations

import contextlib
import gzip
import itertools
import json
import time
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import orjson

from slime.observe.catalog import phases, plain_name, thin
from slime.observe.run_data import RunData, Stage, config_value
from slime.page.files import ReadPosition, is_inside, new_lines
from slime.page.lanes import timeline_of, traced_steps
from slime.page.pictures import with_pictures
from slime.page.rows import COLUMNS, SORTS, row_of, short_texts, training_of, with_training
from slime.page.stages import alarms_of, all_runs, describe, engines, settings, settings_that_differ

#: Bytes of samples' lines over all stages of a report; fewer while the run rewrites it.
SAMPLE_BYTES = 5 << 20
_PASSING_BYTES = 1 << 20
#: Files with samples in a report that cannot hold all of them.
_MAX_ROLLOUTS = 8
_MAX_EVALUATIONS = 2
#: Rollouts with a timeline, and digits of a metric that are kept.
_MAX_TIMELINES = 3
#: Groups whose images are shown.
_MAX_PICTURES = 100
_DIGITS = 7
_COMPRESSION = 4  # 6 takes twice as long for 6 % less

Row = dict[str, Any]


def contents_of(runs: Sequence[RunData], *, is_passing: bool = False) -> dict[str, Any]:
    """Return the data for all requests of the page (``static/frozen.js``).

    Args:
        runs: the newest stage of each is shown at first.
        is_passing: the report will be rewritten soon, so it holds fewer samples.
    """
    named = {
        f"{i}.{stage.name}": (run.path, stage) for i, run in enumerate(runs) for stage in run.stages
    }
    share = (_PASSING_BYTES if is_passing else SAMPLE_BYTES) // len(named)
    stages = {key: _of_stage(path, stage, share) for key, (path, stage) in named.items()}
    told = []
    for key, (path, stage) in named.items():
        held = len(stages[key]["samples"])
        told.append(describe(path, stage, key, alarms_of(stage), {"samples": held, "texts": held}))
    newest = [f"{i}.{run.stages[-1].name}" for i, run in enumerate(runs)]
    return {
        "runs": {
            **all_runs(told),
            "shown": ",".join(newest),
            "written": time.strftime("%Y-%m-%d %H:%M:%S"),
            "origin": "written from " + ", ".join(str(run.path) for run in runs),
        },
        "sorts": SORTS,
        "stages": stages,
        "differences": {
            "runs": list(named),
            "flags": settings_that_differ([stage for _, stage in named.values()]),
        },
    }


def packed(data: dict[str, Any]) -> bytes:
    """Compress the data for `page_files.one_file`."""
    try:
        plain = orjson.dumps(data, option=orjson.OPT_NON_STR_KEYS, default=repr)
    except TypeError:  # a folder whose name is no Unicode
        plain = json.dumps(data, default=repr).encode()
    return gzip.compress(plain, _COMPRESSION, mtime=0)


def _of_stage(run: Path, stage: Stage, sample_bytes: int) -> dict[str, Any]:
    samples, steps, note = _samples(run, stage, sample_bytes)
    names = stage.keys()
    return {
        "names": [[name, *plain_name(name)] for name in names],
        "series": {name: _thinned(stage, name) for name in names},
        "phases": phases(stage),
        "engines": engines(stage),
        "settings": settings(stage),
        "timeline": _timelines(run, stage),
        "samples": samples,
        "steps": {"steps": steps, "samples": len(samples), "texts": len(samples), "note": note},
    }


def _thinned(stage: Stage, name: str) -> tuple[list[float], list[float | None]]:
    points = thin(stage.series(name))
    return [step for step, _ in points], [
        None if y is None else float(f"{y:.{_DIGITS}g}") for _, y in points
    ]


def _timelines(run: Path, stage: Stage) -> dict[str, Any]:
    there = traced_steps(run, stage)
    kept = spread(there, _MAX_TIMELINES)
    timelines = {step: timeline_of(run, stage, step) for step in kept}
    note = ""
    if len(kept) < len(there):
        note = f"This file contains the timelines of {len(kept)} of {len(there)} steps."
    return {"steps": kept, "timelines": timelines, "note": note}


def spread(items: Sequence[Any], count: int) -> list[Any]:
    """Choose at most ``count`` items, evenly spread, with the first and the last.

    Example:
        >>> spread(range(9), 3), spread("ab", 3)
        ([0, 4, 8], ['a', 'b'])
    """
    if len(items) <= count:
        return list(items)
    return [items[round(i * (len(items) - 1) / (count - 1))] for i in range(count)]


# -- samples ---------------------------------------------------------------------------------------


def _samples(
    run: Path, stage: Stage, most_bytes: int
) -> tuple[list[Row], list[dict[str, Any]], str]:
    """Return the rows of samples with their records, a summary of each file, and a note on what is
    left out."""
    rollouts = _sizes(stage.rollouts)
    evaluations = _sizes(stage.evaluations)
    is_whole = sum(rollouts.values()) + sum(evaluations.values()) <= most_bytes
    kept_rollouts = list(rollouts) if is_whole else spread(list(rollouts), _MAX_ROLLOUTS)
    kept_evaluations = (
        list(evaluations) if is_whole else spread(list(evaluations), _MAX_EVALUATIONS)
    )
    files = [("rollout", path) for path in kept_rollouts]
    files += [("eval", path) for path in kept_evaluations]
    rows: list[Row] = []
    told: list[dict[str, Any]] = []
    for kind, path in files:
        read = list(_rows(path, stage, kind)) if is_inside(path, run) else []
        if kind == "rollout" and read:
            _add_training(read, path, run)
        groups = _groups(read)
        if read:
            told.append(_summary(read))
        rows += read if is_whole else itertools.chain(*_chosen(groups, most_bytes // len(files)))
    told.sort(key=lambda entry: (entry["step"], entry["kind"]))
    for number, row in enumerate(rows, 1):
        row["id"] = number
    _add_pictures(rows)
    note = ""
    if not is_whole:
        note = (
            f"This file contains {len(rows):,} samples from {len(kept_rollouts)} of "
            f"{len(rollouts)} steps and {len(kept_evaluations)} of {len(evaluations)} "
            "evaluations: whole groups, largest reward spread first. For all recorded samples, "
            f"run: slime watch {run}"
        )
    return rows, told, note


def _add_pictures(rows: Sequence[Row]) -> None:
    """Add pictures to the samples of the first groups. All samples of a group have the same."""
    groups: set[Any] = set()
    for row in rows:
        if "images" in row["record"]:
            groups.add((row["kind"], row["step"], row["dataset"], row["grp"]))
            if len(groups) > _MAX_PICTURES:
                return
            row["record"] = with_pictures(row["record"])


def _sizes(paths: dict[str, Path]) -> dict[Path, int]:
    """Return the sizes of the files that still exist, each with its file of training's values."""
    sizes = {}
    for path in paths.values():
        with contextlib.suppress(FileNotFoundError):
            sizes[path] = path.stat().st_size
            if path.name.startswith("rollout_"):
                sizes[path] += (
                    path.with_name(path.name.replace("rollout_", "trained_")).stat().st_size
                )
    return sizes


def _rows(path: Path, stage: Stage, kind: str) -> Iterator[Row]:
    reward_key = config_value(
        stage.config, "reward_key" if kind == "rollout" else "eval_reward_key"
    )
    try:
        _, lines, _ = new_lines(path, ReadPosition())
    except OSError:  # a resumed run moved it away, or it is not ours to read
        return
    for line in lines:
        _, _, length, *values = row_of(0, line, stage.name, kind, path.stem, reward_key)
        row = {**dict(zip(COLUMNS, values, strict=True)), "record": line.value, "length": length}
        yield row | {"short": short_texts(line.value)}


def _add_training(rows: Sequence[Row], path: Path, run: Path) -> None:
    known = training_of(path, rows[0]["step"] - 1, run)
    for row in rows:
        record = with_training(row["record"], known)
        if record is not row["record"]:
            more = {name: record["tokens"][name] for name in ("advantages", "log_prob_diffs")}
            row |= {"record": record, "length": row["length"] + len(orjson.dumps(more))}


def _groups(rows: Iterable[Row]) -> list[list[Row]]:
    """Group the rows by data set and group, and add each reward minus the mean of its group."""
    groups: dict[Any, list[Row]] = {}
    for row in rows:
        groups.setdefault((row["dataset"], row["grp"]), []).append(row)
    for group in groups.values():
        mean = _mean(group)
        rewards = [row["reward"] for row in group if row["reward"] is not None]
        for row in group:
            row["spread"] = max(rewards) - min(rewards) if rewards else None
            row["above"] = None if row["reward"] is None or mean is None else row["reward"] - mean
    return list(groups.values())


def _summary(rows: Sequence[Row]) -> dict[str, Any]:
    """Return the entry of a file in the page's list of steps, over all its samples."""
    first = rows[0]
    return {
        "kind": first["kind"],
        "step": first["step"],
        "samples": len(rows),
        "groups": len({row["grp"] for row in rows} - {None}),
        "reward": _mean(rows),
    }


def _mean(rows: Sequence[Row]) -> float | None:
    rewards = [row["reward"] for row in rows if row["reward"] is not None]
    return sum(rewards) / len(rewards) if rewards else None


def _chosen(groups: Sequence[list[Row]], most_bytes: int) -> list[list[Row]]:
    """Choose whole groups that fit, from all data sets in turn. If none fits, take the best and the
    worst sample of one, without tokens."""
    by_dataset: dict[Any, list[list[Row]]] = {}
    for group in groups:
        by_dataset.setdefault(group[0]["dataset"], []).append(group)
    ordered = [list(most_telling_first(each)) for each in by_dataset.values()]
    in_turns = [
        group for turn in itertools.zip_longest(*ordered) for group in turn if group is not None
    ]
    kept = []
    left = most_bytes
    for group in in_turns:
        size = sum(row["length"] for row in group)
        if size <= left:
            kept.append(group)
            left -= size
    if not kept and in_turns:
        ends = sorted(in_turns[0], key=lambda row: -_or_least(row["reward"]))
        kept = [[ends[0], ends[-1]] if len(ends) > 1 else ends]
        for row in kept[0]:
            row["record"] = {
                name: value for name, value in row["record"].items() if name != "tokens"
            }
    return kept


def _or_least(value: float | None) -> float:
    return float("-inf") if value is None else value


def most_telling_first(groups: Iterable[list[Row]]) -> Iterator[list[Row]]:
    """Yield groups with the largest reward spread first; of equal ones, the best and the worst in
    turn."""
    by_spread: dict[float, list[list[Row]]] = {}
    for group in groups:
        rewards = [row["reward"] for row in group if row["reward"] is not None]
        by_spread.setdefault(max(rewards) - min(rewards) if rewards else -1.0, []).append(group)
    for spread_of in sorted(by_spread, reverse=True):
        alike = deque(sorted(by_spread[spread_of], key=lambda group: -_or_least(_mean(group))))
        while alike:
            yield alike.popleft()
            if alike:
                yield alike.pop()
