"""Whoever does not hold the lock of a run folder changes nothing in it: all commands, in any order,
beside a run."""

from __future__ import annotations

import random
import shutil
import subprocess
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from slime.__main__ import main
from slime.checkpoints import directory
from slime.checkpoints.load_plan import resolve_load
from slime.config import Config, make_config, parse_args
from slime.errors import UserError
from slime.observe.jsonl_sink import JsonlSink
from slime.observe.run_folder import RunFolder
from slime.page.folders import RunWatch
from slime.rollout.journal import RecordKind, open_journal
from slime.run.preflight import check_outputs
from slime.run.session import Session
from tests.support.checkpoint_dirs import complete
from tests.support.journals import generated, note

INTERLEAVINGS, ACTIONS = 48, 8


def flags(
    base: Path, name: str = "run", lr: str = "1e-3", save: str = "outputs/run/checkpoints"
) -> list[str]:
    """Of a run that repeats its command until it is done."""
    given = {
        "--output-dir": base / "outputs",
        "--run-name": name,
        "--hf-checkpoint": base / "model",
        "--prompt-data": base / "data.jsonl",
        "--save": base / save,
        "--load": base / save,
        "--lr": lr,
        "--rollout-batch-size": 4,
        "--n-samples-per-prompt": 2,
        "--num-rollout": 9,
        "--rm-type": "math",
        "--micro-batch-size": 1,
    }
    return [str(word) for pair in given.items() for word in pair]


@dataclass
class Going:
    """A run that goes on in this process, whose lock it holds.

    Attributes:
        seen: its folder as it has left it.
    """

    run: RunFolder
    config: Config
    locks: ExitStack
    step: int = 0
    seen: dict[str, bytes] = field(default_factory=dict)

    def goes_on(self) -> None:
        """A rollout: generated, trained on, saved."""
        journal = open_journal(self.config, self.run.journal)
        assert journal is not None
        note(journal, RecordKind.FINISHED, self.step, generated(self.step))
        journal.close()
        sink = JsonlSink(self.run)
        sink.log(self.step + 1, {"train/loss": 0.5})
        sink.close()
        root = self.run.path / "checkpoints"
        complete(root, self.step, content=f"weights {self.step}")
        directory.retain(root, 2)
        self.step += 1
        self.look()

    def look(self) -> None:
        self.seen = contents(self.run.path)


def contents(folder: Path) -> dict[str, bytes]:
    """All that a run reads, or that tells of it: not its page, the text of locks, and models that
    were converted."""
    found = {str(path.relative_to(folder)): path for path in folder.rglob("*") if path.is_file()}
    own = ("report.html", ".lock")
    return {
        name: path.read_bytes()
        for name, path in found.items()
        if path.name not in own and "/hf/" not in name
    }


@pytest.fixture
def base(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """With launches that are taken for right as far as their checkpoints are, and end as they
    begin."""

    def launch(session: Session) -> None:
        raise UserError("nothing is launched here", fix="none")

    def convert(command: list[str], **_: Any) -> subprocess.CompletedProcess[str]:
        target = Path(command[command.index("--save_path") + 1])
        target.mkdir(parents=True)
        (target / "config.json").write_text('{"model_type": "qwen3"}')
        (target / "model.safetensors").write_text("weights")
        return subprocess.CompletedProcess(command, 0, "", "")

    def export(source: Path, target: str, *_: Any) -> Path:
        return Path(shutil.copy(source / "config.json", target))

    monkeypatch.setattr("slime.run.session.preflight", resolve_load)
    monkeypatch.setattr("slime.run.session.from_the_hub", lambda config: config)
    monkeypatch.setattr("slime.run.session.check_memory", lambda config: None)
    monkeypatch.setattr("slime.run.session.at_start", lambda config: [])
    monkeypatch.setattr("slime.run.session.Session.launch", launch)
    converting = SimpleNamespace(run=convert, PIPE=subprocess.PIPE, STDOUT=subprocess.STDOUT)
    monkeypatch.setattr("slime.cli.model_source.subprocess", converting)
    monkeypatch.setattr("slime.cli.export.hf_to_gguf", export)
    monkeypatch.setattr("slime.deadlines.RUN_FOLDER_LOCK", 0.02)  # nobody lets go of one here
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text('{"model_type": "qwen3"}')
    (tmp_path / "data.jsonl").write_text('{"input": "1+1=", "label": "2"}\n')
    return tmp_path


def begin(base: Path) -> Going:
    config = parse_args(flags(base))
    run, locks = RunFolder.claim(config)
    run.set_state("launched")
    return Going(run, config, locks)


def commands(base: Path) -> dict[str, tuple[list[str], int]]:
    """What others try while the run goes on, and how it ends for them."""
    run, out = str(base / "outputs" / "run"), base / "elsewhere"
    return {
        "the same command": (["train", *flags(base)], 2),
        "another learning rate": (["train", *flags(base, lr="5e-1")], 2),
        "back to a checkpoint": (["train", *flags(base), "--ckpt-step", "0"], 2),
        "another run that saves there": (["train", *flags(base, name="other")], 2),
        "a stage of it": (["train", *flags(base), "--stage", "rl"], 2),
        "a run that saves over it": (["train", *flags(base, name="third", save="outputs/run")], 2),
        "resume": (["resume", run], 2),
        "report": (["report", run], 0),
        "report elsewhere": (["report", run, "--output", str(out / "page.html")], 0),
        "report over its settings": (["report", run, "--output", f"{run}/config.json"], 2),
        "bundle": (["bundle", run, "--output", str(out / "x.tar.gz")], 0),
        "bundle in it": (["bundle", run, "--output", f"{run}/x.tar.gz"], 2),
        "export": (["export", run, "--gguf", str(out / "x.gguf")], 0),
        "export over its metrics": (["export", run, "--gguf", f"{run}/metrics.jsonl"], 2),
        "explain": (["explain", run], 0),
        "flags": (["flags", "lr", run], 0),
        "a model card": (["push", run, "me/model", "--card-only"], 0),
    }


def watch(run: Path, cache: Path) -> None:
    watched = RunWatch(run, cache)
    watched.index.update(watched.stages())
    watched.index.close()


@pytest.mark.parametrize(
    "part", [0, *(pytest.param(part, marks=pytest.mark.full) for part in range(1, 4))]
)
def test_no_command_changes_a_run_that_goes_on(
    part: int, base: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """After them it is taken up, by the first who asks."""
    for seed in range(part, INTERLEAVINGS, 4):
        shutil.rmtree(base / "outputs", ignore_errors=True)
        (base / "elsewhere").mkdir(exist_ok=True)
        dice, tried = random.Random(seed), []
        going = begin(base)
        for _ in range(dice.randrange(1, 4)):
            going.goes_on()
        known = commands(base)
        for _ in range(ACTIONS):
            name = dice.choice(["the run", "watch", *known])
            tried.append(name)
            if name == "the run":
                going.goes_on()
                continue
            capfd.readouterr()
            if name == "watch":
                watch(going.run.path, base / "cache")
            else:
                status = main(known[name][0])
                assert status == known[name][1], (seed, tried, capfd.readouterr().err)
            assert contents(going.run.path) == going.seen, (seed, tried)
        going.run.set_state("stopped")
        going.locks.close()
        assert main(["resume", str(going.run.path)]) == 2
        assert "nothing is launched here" in capfd.readouterr().err, (seed, "it was free")
        assert RunFolder(going.run.path).config().flat().lr == 1e-3


@pytest.mark.parametrize("flag", ["save_hf", "dump_details", "save"])
def test_no_other_run_writes_into_its_folder(base: Path, flag: str) -> None:
    """Under another name, with an output there; once it has ended it may."""
    going = begin(base)
    place = (
        going.run.path / "more" / "{rollout_id}" if flag == "save_hf" else going.run.path / "more"
    )
    config = make_config(
        output_dir=str(base / "outputs"), run_name="other", num_rollout=4, **{flag: str(place)}
    )
    with pytest.raises(UserError, match=r"--.* is in a folder of a run that goes on"):
        check_outputs(config)
    check_outputs(going.config)
    going.locks.close()
    check_outputs(config)
