"""`slime doctor` where things go wrong that no check expects: it goes on, says so, and its JSON is
JSON."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest

from slime.config import parse_args
from slime.diagnosis import checks_host, doctor
from slime.diagnosis.doctor import Report, at_start, examine
from slime.samples.types import Sample
from tests.support.processes import ROOT, World


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> World:
    return World.create(tmp_path_factory.mktemp("doctor"))


@pytest.fixture(autouse=True)
def no_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SLIME_NUM_GPUS", "0")


def _flags(world: World, *more: object) -> list[str]:
    return world.flags("examined", "--save", world.outputs / "kept", *more)


def _found(report: Report) -> dict[str, str]:
    return {finding.trouble.name: finding.detail for finding in report.findings}


# -- rewards of the user's -------------------------------------------------------------------------


def loud(args: Any, sample: Sample) -> float:
    os.write(1, b"from C\n")
    subprocess.run(["echo", "from a program"], check=True)
    print("from Python", file=sys.__stdout__)
    return float(sample.response == sample.label)


def huge(args: Any, sample: Sample) -> float:
    return 1e308


def quotes_surrogates(args: Any, sample: Sample) -> float:
    raise ValueError("half a character: \ud800")


def uses_up(args: Any, sample: Sample) -> float:
    return float(str(sample.label.pop("answer", "")) == sample.response)


async def blocks_its_loop(args: Any, sample: Sample) -> float:
    BLOCKED.wait(60)
    return 1.0


BLOCKED = threading.Event()

# -- what is expected ------------------------------------------------------------------------------


def test_a_check_that_fails_itself_does_not_end_the_examination(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken() -> dict[str, object]:
        raise OverflowError("too many addresses")

    monkeypatch.setattr("psutil.net_if_addrs", broken)
    report = examine(_flags(world))
    assert "OverflowError" in _found(report)["check-broken"] and not report.is_fatal
    assert report.outcomes[-1].check.name == "credentials"


def test_a_reward_beyond_all_floats_is_the_functions_mistake(world: World) -> None:
    report = examine(_flags(world, "--custom-rm-path", f"{__file__}:huge"))
    assert "check-broken" not in _found(report)
    assert any("huge" in detail for detail in _found(report).values())


def test_what_a_launch_would_end_of_too_is_fatal(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken() -> int:
        raise ValueError("a value of another type")

    monkeypatch.setattr("slime.run.preflight.num_cpus", broken)
    report = examine(_flags(world))
    assert (
        "a value of another type (slime.run.preflight:" in _found(report)["check-broken"]
        and report.is_fatal
    )


def test_a_launch_does_not_end_of_being_looked_at(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    def no_rights() -> dict[str, object]:
        raise PermissionError("netlink")

    monkeypatch.setenv("NCCL_SOCKET_IFNAME", "eth0")
    monkeypatch.setattr(checks_host.psutil, "net_if_addrs", no_rights)
    assert at_start(parse_args(_flags(world))) == []


def test_json_holds_whatever_an_error_says(world: World) -> None:
    report = examine(_flags(world, "--custom-rm-path", f"{__file__}:quotes_surrogates"))
    said = json.dumps(doctor.as_json(report), ensure_ascii=False).encode()
    assert b"half a character" in said and "reward-fails" in _found(report)


def test_a_module_that_exits_on_import_is_a_finding(world: World, tmp_path: Path) -> None:
    (tmp_path / "leaves.py").write_text("import sys\nsys.exit('usage: leaves.py FILE')\n")
    report = examine(_flags(world, "--custom-rm-path", f"{tmp_path}/leaves.py:score"))
    assert "usage: leaves.py FILE" in _found(report)["hook"]


def test_a_reward_may_change_its_sample(world: World, tmp_path: Path) -> None:
    rows = [{"prompt": "1", "label": {"answer": "7"}}, {"prompt": "2", "label": {"answer": "8"}}]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    given = ["--prompt-data", tmp_path / "rows.jsonl", "--label-type", "raw"]
    report = examine(_flags(world, *given, "--custom-rm-path", f"{__file__}:uses_up"))
    (reward,) = (outcome for outcome in report.outcomes if outcome.check.name == "reward")
    assert "check-broken" not in _found(report) and reward.state in ("ok", "warning")


def test_a_reward_that_blocks_its_event_loop_is_not_waited_for(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("slime.deadlines.CHECKS_DATA_ALL_REWARDS", 0.05)
    try:
        report = examine(_flags(world, "--custom-rm-path", f"{__name__}:blocks_its_loop"))
        (reward,) = (outcome for outcome in report.outcomes if outcome.check.name == "reward")
        assert reward.state == "left out" and "more than 0.05 s" in reward.note
    finally:
        BLOCKED.set()


def test_nothing_but_the_answer_is_on_stdout(world: World) -> None:
    command = [sys.executable, "-m", "slime", "doctor", "--json"]
    command += _flags(world, "--custom-rm-path", f"{__file__}:loud")
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["ok"] and "from a program" in done.stderr


# -- damaged files ---------------------------------------------------------------------------------


@pytest.mark.parametrize("value", ["fp8", [1]])
def test_a_quantisation_config_of_any_form_is_refused(
    value: object, world: World, tmp_path: Path
) -> None:
    model = _model(world, tmp_path, quantization_config=value)
    assert "quantised-weights" in _found(examine(_flags(world, "--hf-checkpoint", model)))


@pytest.mark.parametrize("text", ["{", "[]"])
def test_a_damaged_generation_config_is_named(text: str, world: World, tmp_path: Path) -> None:
    model = _model(world, tmp_path)
    (model / "generation_config.json").write_text(text)
    report = examine(_flags(world, "--hf-checkpoint", model))
    assert "generation_config.json" in _found(report)["tokenizer"]


def test_a_parquet_file_that_is_none_is_named(world: World, tmp_path: Path) -> None:
    (tmp_path / "rows.parquet").write_text("version https://git-lfs.github.com/spec/v1\n")
    report = examine(_flags(world, "--prompt-data", tmp_path / "rows.parquet"))
    assert "data-file" in _found(report) and "check-broken" not in _found(report)


def _model(world: World, folder: Path, **changes: object) -> Path:
    model = Path(shutil.copytree(world.inputs / "model", folder / "model"))
    facts = json.loads((model / "config.json").read_text())
    (model / "config.json").write_text(json.dumps(facts | changes))
    return model
