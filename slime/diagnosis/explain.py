"""Explain from a run folder how the run ended: the likeliest causes first, and what to do next.

Only the folder is read. It may be damaged, and large files are read only at their two ends
(`slime.diagnosis.reading`).
"""

from __future__ import annotations

import platform
import re
import shlex
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import orjson

from slime.checkpoints.directory import newest_whole
from slime.diagnosis.reading import TextLine, TextSource, read_ends, read_log, run_logs
from slime.diagnosis.remedies import Flags, endless_generation
from slime.diagnosis.signatures import Level, Seen, find_signatures
from slime.diagnosis.troubles import TROUBLES, Finding, Trouble
from slime.documentation import doc_url
from slime.errors import UserError, contents_of, in_place_of
from slime.observe.alarms import Alarm, find_alarms
from slime.observe.run_data import flags_with_origins, merge_rows
from slime.observe.run_folder import RunFolder, is_held
from slime.processes.host import slime_command

#: Bytes that are read from the end of metrics.jsonl, where the newest rows are.
_METRICS_BYTES = 4 << 20
_OBJECT_BYTES = 16 << 20
#: Larger steps and times in files are taken for damage.
_LARGEST_NUMBER = 1e11
#: Classes of errors with messages that state cause and remedy.
_SAYS_WHY = ("UserError", "OutOfMemory", "NonFiniteTraining", "WeightMismatch")
#: Classes of errors with messages that need no class name before them.
_PLAIN_WORDS = (*_SAYS_WHY, "RunFailed", "ActorDied", "DeadlinePassed", "ConnectionBroken")
#: Share of truncated responses from which generation counts as endless.
_MAX_TRUNCATED = 0.9


@dataclass(frozen=True)
class Explanation:
    """The state of a run and the findings about it.

    Attributes:
        state: "running", "finished", "stopped", "failed", "killed" or "unknown".
        stage: the newest stage; "" for a run without stages.
        step: step of the newest row of metrics; None before the first.
        checkpoint: the newest complete checkpoint; None if there is none.
        next: command to run next; "" if none applies.
        findings: fatal ones first, each group with the most direct cause first.
        notes: what was not read, and why.
    """

    folder: Path
    state: str
    stage: str
    step: float | None
    checkpoint: Path | None
    next: str
    findings: tuple[Finding, ...]
    notes: tuple[str, ...] = ()

    def as_json(self) -> dict[str, Any]:
        """Return what `slime explain --json` prints."""
        return {
            "run": str(self.folder),
            "state": self.state,
            "stage": self.stage or None,
            "step": self.step,
            "checkpoint": str(self.checkpoint) if self.checkpoint else None,
            "next": self.next or None,
            "findings": [finding.as_json() for finding in self.findings],
            "notes": list(self.notes),
        }


def explain(folder: Path) -> Explanation:
    """Examine the newest stage of a run.

    Raises:
        UserError: ``folder`` is not a run folder.
    """
    if not folder.is_dir():
        raise UserError(
            f"there is no run folder {folder}",
            why=in_place_of(folder),
            fix="pass a directory below outputs/",
        )
    summary = _object(folder / "run.json", folder)
    entries = summary.get("stages")
    if isinstance(entries, dict):
        entries = {str(name): entry for name, entry in entries.items() if isinstance(entry, dict)}
    else:
        entries = {}
    stage = max(entries, key=lambda name: _number(entries[name].get("started")), default="")
    run = RunFolder(folder, stage or None)
    entry = entries.get(stage, {})
    if (
        not entries
        and not run.config_path.exists()
        and not run.metrics_path.exists()
        and not run.logs.is_dir()
    ):
        raise UserError(
            f"{folder} is not a run folder",
            why=f"it has none of config.json, run.json and logs/; it holds: {contents_of(folder)}",
            fix="pass a directory below outputs/",
        )
    flags = {name: value for name, value, _ in flags_with_origins(_object(run.config_path, folder))}
    rows = _rows(run, stage)
    state = _state(folder, entry)
    crash = _crash(run, stage, entry, state)
    sources = [*_crash_sources(crash), *(read_log(path, folder) for path in run_logs(folder))]
    notes = [
        f"{source.name}: {source.num_skipped:,} bytes between its ends were not read"
        for source in sources
        if source.num_skipped
    ]
    if not flags:
        notes.append(
            f"{run.config_path.name} is missing or damaged: remedies are without this run's values"
        )
    if not entries:
        notes.append("run.json is missing or damaged: how the run ended is told by its logs alone")
    findings = _log_findings(sources, flags, state, _since(entry))
    findings += _end_findings(crash, findings, state, entry)
    findings.sort(key=lambda found: (not found[1].is_fatal, found[0]))
    alarms = _alarm_findings(rows, flags, ended=state != "running")
    checkpoint = _checkpoint(folder, flags, entry)
    step = _number(rows[-1]["step"]) if rows else None
    return Explanation(
        folder,
        state,
        stage,
        step,
        checkpoint,
        _next(folder, state, flags),
        (*(finding for _, finding in findings), *alarms),
        tuple(notes),
    )


# -- reading ---------------------------------------------------------------------------------------


def _object(path: Path, root: Path) -> dict[str, Any]:
    content, _, skipped = read_ends(path, root, _OBJECT_BYTES, 0)
    try:
        value = orjson.loads(content) if not skipped else {}
    except orjson.JSONDecodeError:
        return {}
    return value if isinstance(value, dict) else {}


def _number(value: Any) -> float:
    return float(value) if isinstance(value, (int, float)) and abs(value) < _LARGEST_NUMBER else 0.0


def _rows(run: RunFolder, stage: str) -> list[dict[str, Any]]:
    whole, tail, _ = read_ends(run.metrics_path, run.path, 0, _METRICS_BYTES)
    rows = []
    for line in (whole + tail).split(b"\n"):
        try:
            row = orjson.loads(line) if line.strip() else None
        except orjson.JSONDecodeError:
            # an incomplete line: being written, cut by a crash, or cut by `read_ends`
            continue
        if isinstance(row, dict) and (row.get("stage") or "") == stage:
            rows.append(row)
    return merge_rows(rows)


def _state(folder: Path, entry: dict[str, Any]) -> str:
    state = str(entry.get("state") or "unknown")
    if state != "running":
        return state
    lock = folder / ".lock"
    held = not lock.is_symlink() and lock.is_file() and is_held(folder)
    # a file system may not share locks between hosts
    elsewhere = entry.get("host") != platform.node() and time.time() - _written(folder) < 600
    return "running" if held or elsewhere else "killed"


def _written(folder: Path) -> float:
    """Return when the run last wrote metrics or logs, in epoch seconds."""
    times = [0.0]
    for path in (folder / "metrics.jsonl", *run_logs(folder)):
        try:
            times.append(path.stat().st_mtime)
        except OSError:
            continue
    return max(times)


def _since(entry: dict[str, Any]) -> str:
    """Return the start of this launch in the format of its logs; "" if it is on another host."""
    started = _number(entry.get("started"))
    if not started or entry.get("host") != platform.node():
        return ""
    return time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(started - 2))


def _crash(
    run: RunFolder, stage: str, entry: dict[str, Any], state: str
) -> tuple[Path, dict[str, Any]] | None:
    """Return folder and crash.json of the newest crash of this launch; None if there is none."""
    if state not in ("failed", "unknown") or not run.crash.is_dir():
        return None
    for folder in sorted(run.crash.iterdir(), reverse=True):
        found = _object(folder / "crash.json", run.path)
        mine = (found.get("stage") or "") == stage and _number(found.get("time")) >= _number(
            entry.get("started")
        )
        if found and mine:
            return folder, found
    return None


def _crash_sources(crash: tuple[Path, dict[str, Any]] | None) -> list[TextSource]:
    """Return the error that ended the run as three sources: the lines of its message after the
    first, which may quote an engine's log; the first line; and the traceback."""
    if crash is None:
        return []
    folder, error = crash
    root = folder.parent.parent
    name = str((folder / "crash.json").relative_to(root))
    message = str(error.get("message") or "")
    if str(error.get("error")) not in _PLAIN_WORDS:
        message = f"{error.get('error')}: {message}"
    notes = error.get("notes")
    texts = message.split("\n")
    texts += (
        [line for note in notes for line in str(note).split("\n")]
        if isinstance(notes, list)
        else []
    )
    lines = [TextLine(text.strip()[:2000], number) for number, text in enumerate(texts, 1)]
    is_engine = lines[0].text.partition(" (pid")[0].rpartition(": ")[2].startswith("engine-")
    sources = [
        TextSource(name, "engine" if is_engine else "crash", lines[1:]),
        TextSource(name, "crash", lines[:1]),
    ]
    traceback = read_log(folder / "traceback.txt", root)
    return [
        *sources,
        TextSource(traceback.name, "traceback", traceback.lines, traceback.num_skipped),
    ]


# -- findings --------------------------------------------------------------------------------------


def _log_findings(
    sources: list[TextSource], flags: Flags, state: str, since: str
) -> list[tuple[int, Finding]]:
    """Return one ranked finding per trouble, from its best source: the error of the run for slime's
    own errors, else the newest matching line of a log."""
    ended = state not in ("running", "finished", "stopped")
    by_trouble: dict[str, list[Seen]] = {}
    for source in sources:
        for seen in find_signatures(source, since):
            if ended or not seen.signature.is_survived:
                by_trouble.setdefault(seen.signature.trouble.name, []).append(seen)
    found = []
    for several in by_trouble.values():
        best = max(reversed(several), key=_rank)
        more = f" (and {len(several) - 1} more lines like it)" if len(several) > 1 else ""
        is_error = best.signature.form == "error" and best.source.kind == "crash"
        message = _message(sources, best.source.name) if is_error else []
        own = _fixes_in(message)
        remedies = (
            *own,
            *(way for way in best.signature.exact(flags) if not _is_named(way, own)),
        )
        detail = f"{best.line.text.strip()[:400]}{_why(message)}{more}"
        rank = 10 * best.signature.level + (0 if is_error else 1)
        if best.source.kind == "crash":
            place = best.source.name
        else:
            place = f"{best.source.name}, {best.line.place}"
        found.append((rank, Finding(best.signature.trouble, detail, remedies, place, ended)))
    return found


def _is_named(remedy: str, own: tuple[str, ...]) -> bool:
    """Tell whether one of the error's own fixes names the same flag as ``remedy``."""
    flag = re.search(r"--[a-z-]+", remedy)
    return flag is not None and any(flag[0] in way for way in own)


def _rank(seen: Seen) -> int:
    if seen.source.kind == "crash":
        return 3 if seen.signature.form == "error" else 1
    if seen.source.kind == "traceback":
        return 0
    return 1 if seen.source.name.startswith("crash") else 2


def _message(sources: list[TextSource], name: str) -> list[str]:
    """Return the lines of the error that ended the run, without its first one. They name causes and
    fixes with values that are written nowhere else (batches, peaks)."""
    lines = next((source.lines for source in sources if source.name == name), [])
    return [line.text for line in lines]


def _why(message: list[str]) -> str:
    """Return the cause that an error states, and the line of the user's code that it names."""
    ends = [
        index
        for index, text in enumerate(message)
        if text.startswith(("fix: ", "in your code:", "why: last lines of"))
    ]
    why = [text for text in message[: ends[0] if ends else None] if text][:4]
    if "in your code:" in message:
        start = message.index("in your code:") + 1
        why += message[start : start + 2]
    return "".join(f"; {text[:300]}" for text in why)


def _fixes_in(lines: list[str]) -> tuple[str, ...]:
    if "in your code:" in lines:
        lines = lines[: lines.index("in your code:")]
    for index, text in enumerate(lines):
        if text.startswith("fix: "):
            fix = [text.removeprefix("fix: "), *lines[index + 1 :]]
            fix = [line for line in fix if line]
            listed = fix[1:] if len(fix) > 1 and fix[0].endswith(":") else fix
            return tuple(way for line in listed for way in re.split(r"^1\. |  \d\. ", line) if way)
    return ()


def _end_findings(
    crash: tuple[Path, dict[str, Any]] | None,
    findings: list[tuple[int, Finding]],
    state: str,
    entry: dict[str, Any],
) -> list[tuple[int, Finding]]:
    """Return a finding about the end of the run if no signature matches its error."""
    if state == "killed":
        pid = entry.get("pid")
        host = entry.get("host")
        detail = (
            f"run.json says that it runs, and nobody holds the folder any more (it was pid {pid} "
            f"on {host})"
        )
        return [(10 * Level.RUN, Finding(TROUBLES["killed"], detail, source="run.json"))]
    if state != "failed" or any(
        finding.source.startswith("crash") and rank < 10 * Level.RUN for rank, finding in findings
    ):
        return []
    if crash is None:
        detail = "run.json says that it failed, and there is no crash folder of that"
        return [(10 * Level.RUN, Finding(TROUBLES["unknown-error"], detail, source="run.json"))]
    folder, error = crash
    source = str((folder / "crash.json").relative_to(folder.parent.parent))
    lines = [line.strip() for line in str(error.get("message") or "").split("\n")]
    note = f" ({error['note']})" if error.get("note") else ""
    fix = _fixes_in(lines)
    if fix or error.get("error") in _SAYS_WHY:
        what = [line for line in lines if line not in fix and not line.startswith("fix: ")][:6]
        return [
            (
                10 * Level.CAUSE,
                Finding(TROUBLES["run-error"], "; ".join(what)[:800] + note, fix, source),
            )
        ]
    detail = f"{error.get('error')}: {lines[0][:400]}{note}"
    return [(10 * Level.RUN, Finding(TROUBLES["unknown-error"], detail, source=source))]


def _alarm_findings(rows: list[dict[str, Any]], flags: Flags, *, ended: bool) -> list[Finding]:
    """Return findings for the alarms of the metrics; they are not fatal."""
    try:
        alarms = find_alarms(rows, ended=ended, flags=flags)
    except (TypeError, KeyError, ValueError):  # rows of another version of slime
        return []
    return [_alarm_finding(alarm, rows, flags) for alarm in alarms]


def _alarm_finding(alarm: Alarm, rows: list[dict[str, Any]], flags: Flags) -> Finding:
    ratios = (row.get("rollout/truncated_ratio") for row in reversed(rows))
    if alarm.name == "truncation" and next(filter(None, ratios), 0.0) >= _MAX_TRUNCATED:
        return Finding(
            TROUBLES["endless-generation"],
            alarm.detail,
            tuple(endless_generation(flags)),
            source="metrics.jsonl",
            is_fatal=False,
        )
    trouble = Trouble(
        alarm.name.replace("_", "-"),
        symptom=alarm.title,
        cause=f"What it means: {doc_url('metrics.md')}",
        remedies=(alarm.fix,) if alarm.fix else (),
        provoke="rows of metrics that raise the alarm",
    )
    return Finding(trouble, alarm.detail, source="metrics.jsonl", is_fatal=False)


# -- the next command ------------------------------------------------------------------------------


def _checkpoint(folder: Path, flags: Flags, entry: dict[str, Any]) -> Path | None:
    save = flags.get("save")
    if not isinstance(save, str) or not save:
        return None
    began = Path(str(entry.get("cwd") or "."))  # relative paths in its flags start there
    for root in (began / save, folder / "checkpoints"):
        try:
            if root.is_dir() and (found := newest_whole(root)) is not None:
                return found
        except (OSError, UserError):  # damaged, or not readable for this user
            continue
    return None


def _next(folder: Path, state: str, flags: Flags) -> str:
    quoted = shlex.quote(str(folder))
    if state in ("failed", "killed", "stopped") and flags.get("save"):
        return f"{slime_command()} resume {quoted}"
    if state == "finished" and flags.get("save"):
        return f"{slime_command()} chat {quoted}"
    return f"{slime_command()} report {quoted}" if state == "running" else ""
