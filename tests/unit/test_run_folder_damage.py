"""A run folder may contain anything: a resume goes on from the newest whole state or refuses in one
sentence, and what only reads never fails. No launches: everything that `slime resume` reads up to
where the trainer would load."""

from __future__ import annotations

import collections
import os
import random
import shutil
import tempfile
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from benchmarks.watched_runs import make_run
from slime.__main__ import main
from slime.checkpoints import directory, resuming
from slime.checkpoints.load_plan import resolve_load
from slime.config import Config, make_config
from slime.errors import UserError
from slime.files import read_object
from slime.page.server import Runs
from slime.rollout.journal import RecordKind, open_journal
from slime.run.ancestry import PushLog
from slime.run.session import Session
from slime.run.stopping import StopSignals
from tests.support.checkpoint_dirs import complete
from tests.support.damage import damage
from tests.support.journals import generated, note, restored
from tests.support.run_folders import create_run

DAMAGES, READ_DAMAGES = 510, 90
ITERATIONS = (1, 2, 3)


@dataclass
class Reached:
    """Where a resume would have let the trainer load.

    Attributes:
        iteration: of the checkpoint; None for a fresh start.
        groups: what the journal has.
    """

    iteration: int | None
    config: dict[str, Any]
    groups: dict[int, list[Any]]


@dataclass
class Case:
    """A run that was killed in its fifth rollout.

    Attributes:
        folder: to be damaged.
        original: a copy of it.
    """

    folder: Path
    original: Path

    def damaged(self, seed: int) -> str:
        """Make it whole, and damage it. Returns what was done."""
        shutil.rmtree(self.folder, ignore_errors=True)
        shutil.copytree(self.original, self.folder)
        return f"seed {seed}, {damage(self.folder, random.Random(seed))}"


@pytest.fixture(scope="module")
def case() -> Iterator[Case]:
    # pytest's own folder is for its user alone
    base = Path(tempfile.mkdtemp(prefix="slime-damage-"))
    (base / "model").mkdir()
    (base / "model" / "config.json").write_text('{"model_type": "qwen3"}')
    folder = make_run(base / "outputs" / "run", rollouts=3, groups=2, size=2)
    for made in ("config.json", "run.json"):
        (folder / made).unlink()
    run = create_run(config_of(base), resuming=True)
    run.set_state("launched")
    (run.logs / "driver.log").write_text("a line\n")
    run.write_crash(RuntimeError("x"))
    for iteration in ITERATIONS:
        complete(run.path / "checkpoints", iteration, content=f"has_rng_state {iteration} ä\n" * 4)
    config = config_of(base)
    pushes = PushLog(run.journal, config)
    pushes.begin(4, {})
    for version in range(1, 6):
        pushes.note(version, 4)
    journal = open_journal(config, run.journal)
    assert journal is not None
    for group in range(8):
        note(journal, RecordKind.FINISHED, 4 + group // 4, generated(group))
    journal.close()
    shutil.copytree(run.path, base / "original")
    yield Case(run.path, base / "original")
    shutil.rmtree(base)


def config_of(base: Path) -> Config:
    return make_config(
        output_dir=str(base / "outputs"),
        run_name="run",
        save=str(base / "outputs" / "run" / "checkpoints"),
        hf_checkpoint=str(base / "model"),
        rollout_batch_size=4,
        n_samples_per_prompt=2,
        num_rollout=9,
        prompt_data="data.jsonl",
        lr=3e-6,
    )


@pytest.fixture
def reached(monkeypatch: pytest.MonkeyPatch) -> list[Reached]:
    """Filled by each resume that comes as far as that."""
    found: list[Reached] = []

    @contextmanager
    def open_session(config: Config, *, resuming: bool) -> Iterator[None]:
        resolve_load(config)  # as `preflight` does
        with StopSignals() as signals:
            session = Session(config, signals, resuming=resuming)
            try:
                plan, _ = agreed(config)
                session.sinks.begin(plan.start_rollout_id, 9)
                journal = open_journal(config, session.run.journal)
                assert journal is not None
                groups = {group: restored(journal, 4 + group // 4, group) for group in range(8)}
                journal.close()
                found.append(Reached(plan.iteration, config.values(), groups))
            finally:
                session.close()
        yield

    agreed = resuming.agreed_plan
    monkeypatch.setattr(resuming, "all_gather", lambda value: [value])
    monkeypatch.setattr(resuming.dist, "get_rank", lambda: 0)
    monkeypatch.setattr(resuming.dist, "get_world_size", lambda: 1)
    monkeypatch.setattr("slime.run.session.open_session", open_session)
    monkeypatch.setattr("slime.loop.train", lambda session: None)
    # by the test of what only reads
    monkeypatch.setattr("slime.run.session.try_to_write_report", lambda run: None)
    monkeypatch.setattr("slime.page.report.try_to_write_report", lambda run: None)
    return found


def is_as_written(checkpoint: Path, original: Path) -> bool:
    return all(same(checkpoint / path.name, path) for path in original.iterdir())


def same(file: Path, original: Path) -> bool:
    """A manifest may be in another encoding."""
    read = read_object if file.name == directory.MANIFEST else Path.read_bytes
    return file.is_file() and read(file) == read(original)


def newest_whole(root: Path, original: Path) -> int | None:
    """By comparing all bytes."""
    names = {number: directory.iteration_name(number) for number in ITERATIONS}
    places = {
        n: root / name if (root / name).exists() else root / f".{name}.replaced"
        for n, name in names.items()
    }
    return max(
        (n for n, place in places.items() if is_as_written(place, original / names[n])),
        default=None,
    )


def tree(folder: Path) -> dict[str, bytes | str]:
    """What is there, without the lock's text."""
    found: dict[str, bytes | str] = {}
    for path in folder.rglob("*"):
        if path.name != ".lock":
            is_plain = path.is_file() and not path.is_symlink()
            found[str(path.relative_to(folder))] = (
                path.read_bytes() if is_plain else "no plain file"
            )
    return found


@pytest.mark.parametrize(
    "part", [0, *(pytest.param(part, marks=pytest.mark.full) for part in range(1, 6))]
)
def test_a_resume_goes_on_from_the_newest_whole_state_or_refuses(
    part: int, case: Case, reached: list[Reached], capfd: pytest.CaptureFixture[str]
) -> None:
    folder, original = case.folder, case.original
    ends: collections.Counter[bool] = collections.Counter()
    wrong, num_restored = [], 0
    for seed in range(part, DAMAGES, 6):
        done = case.damaged(seed)
        expected = newest_whole(folder / "checkpoints", original / "checkpoints")
        has_none = not (folder / "checkpoints").exists()
        before = tree(folder)
        reached.clear()
        status, said = run_command(["resume", str(folder)], capfd)
        if reached:
            right = (
                status == 0
                and is_right(reached[0], expected)
                and (expected is not None or has_none)
            )
        else:
            right = (
                status == 2
                and said.count("error: ") == 1
                and "fix: " in said
                and tree(folder) == before
            )
        if not right or "Traceback" in said:
            wrong.append(
                f"{done}: status {status}, expected {expected}, "
                f"{[one.iteration for one in reached]}\n{said}"
            )
        ends[bool(reached)] += 1
        num_restored += sum(map(count_generated, reached))
    assert not wrong, "\n".join(wrong)
    assert ends[True] > ends[False] and num_restored > 6 * ends[True], (ends, num_restored)


def run_command(words: list[str], capfd: pytest.CaptureFixture[str]) -> tuple[int, str]:
    """Exit status, and what it says; a traceback counts as the latter."""
    capfd.readouterr()
    try:
        status = main(words)
    except BaseException:
        return -1, traceback.format_exc()
    return status, capfd.readouterr().err


def count_generated(one: Reached) -> int:
    return sum(samples[0].tokens == [5, 6, 7, 8] for samples in one.groups.values())


def is_right(one: Reached, expected: int | None) -> bool:
    """It goes on from there, as it was configured, with nothing in the journal that was not
    generated."""
    tokens = [sample.tokens for samples in one.groups.values() for sample in samples]
    is_configured = one.config["lr"] == 3e-6 and one.config["num_rollout"] == 9
    return (
        one.iteration == expected
        and is_configured
        and all(t in ([5, 6], [5, 6, 7, 8]) for t in tokens)
    )


@pytest.mark.parametrize(
    "part", [0, *(pytest.param(part, marks=pytest.mark.full) for part in range(1, 3))]
)
def test_what_only_reads_never_fails(
    part: int,
    case: Case,
    tmp_path: Path,
    capfd: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("slime.cli.model_source._converted", lambda model, base: model.path)
    folder = case.folder
    wrong = []
    for seed in range(10_000 + part, 10_000 + READ_DAMAGES, 3):
        done = case.damaged(seed)
        before = tree(folder)
        commands = [
            ["report", str(folder), "--output", str(tmp_path / "page.html")],
            ["explain", str(folder)],
            ["bundle", str(folder), "--samples", "--output", str(tmp_path / "x.tar.gz")],
            ["export", str(folder), "--gguf", str(tmp_path / "x.gguf")],
            ["flags", "lr", str(folder)],
            ["align", str(folder)],
        ]
        for words in (commands[seed // 3 % 6], commands[(seed // 3 + 1) % 6]):
            status, said = run_command(words, capfd)
            if status not in (0, 1 if words[0] == "explain" else 0, 2) or "Traceback" in said:
                wrong.append(f"{words[0]}, {done}: status {status}\n{said}")
        try:
            runs = Runs([folder.parent])
            runs.look()
            runs.close()
        except UserError:
            pass
        except Exception:
            wrong.append(f"watch, {done}\n{traceback.format_exc()}")
        if tree(folder) != before:
            wrong.append(f"{done}: something has changed")
    assert not wrong, "\n".join(wrong)


@pytest.fixture
def as_nobody(case: Case) -> Iterator[Path]:
    """A copy of the run at its place, which belongs to the user who now runs: root may read
    everything."""
    was = os.geteuid()
    home = case.folder.parents[1]
    home.chmod(0o755)
    shutil.rmtree(case.folder, ignore_errors=True)
    shutil.copytree(case.original, case.folder)
    if was == 0:
        for path in (home, home / "outputs", case.folder, *case.folder.rglob("*")):
            os.chown(path, 65534, 65534)
        os.seteuid(65534)
    yield case.folder
    os.seteuid(was)
    for path in (case.folder, *case.folder.rglob("*")):
        path.chmod(0o755)


@pytest.mark.parametrize(
    "name",
    [
        *(
            "config.json",
            "run.json",
            "metrics.jsonl",
            "samples",
            "journal",
            "journal/pushes.jsonl",
            "crash",
            "logs",
        ),
        *(
            "checkpoints",
            "checkpoints/iter_0000003",
            "checkpoints/iter_0000003/common.pt",
            "history",
            "trace",
            ".",
        ),
    ],
)
def test_what_this_user_may_not_read(
    name: str, as_nobody: Path, reached: list[Reached], capfd: pytest.CaptureFixture[str]
) -> None:
    folder = as_nobody
    (folder / name).chmod(0)
    for words in (["explain"], ["flags", "lr"], ["report"], ["bundle"], ["resume"]):
        more = {
            "report": ["--output", f"{folder.parent}/x.html"],
            "bundle": ["--output", f"{folder.parent}/x.tar.gz"],
        }
        status, said = run_command([*words, str(folder), *more.get(words[0], [])], capfd)
        assert status in (0, 1 if words[0] == "explain" else 0, 2) and "Traceback" not in said, (
            words,
            said,
        )
    assert [one.iteration for one in reached] in ([], [3]) or name.startswith("checkpoints/")
