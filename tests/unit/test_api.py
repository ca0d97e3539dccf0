"""`slime.train` from Python: what is passed on to the driver, and what the handle tells of a run
folder."""

from __future__ import annotations

import asyncio
import contextlib
import datetime
import json
import pickle
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml

from slime.config import make_config
from slime.errors import RunFailed, UserError
from slime.observe.run_folder import RunFolder
from slime.prompts.readers import open_rows
from slime.prompts.row_format import RowFormat, read_prompt
from slime.rollout.rewards.by_name import RewardByName
from slime.rollout.rewards.pool import RewardPool
from slime.run import api
from slime.samples.types import Sample
from slime.user_code.loading import load_function, save_function
from tests.support.embedded_models import save_tiny_model
from tests.support.processes import wait_until
from tests.support.run_folders import held

ROWS = [{"question": "1+1=", "answer": "2"}, {"question": "1+2=", "answer": "3"}]
SAMPLE = Sample(prompt="1+1=", response="2", label="2", metadata={"bonus": 3})


@pytest.fixture
def commands(monkeypatch: pytest.MonkeyPatch) -> list[list[str]]:
    """What would be started; nothing is."""
    started: list[list[str]] = []
    monkeypatch.setattr(
        api.TrainingRun, "_start", lambda self, command, log: started.append(command)
    )
    return started


def settings_of(
    tmp_path: Path, commands: list[list[str]], *arguments: Any, **flags: Any
) -> dict[str, Any]:
    api.train(*arguments, name="r", output_dir=tmp_path, **flags)
    (command,) = commands
    assert command[1:5] == ["-m", "slime", "train", "--config"]
    settings = yaml.safe_load(Path(command[5]).read_text())
    make_config(**settings)  # every one is a flag
    return settings


def test_rows_functions_and_flags_are_passed_on(tmp_path: Path, commands: list[list[str]]) -> None:
    settings = settings_of(
        tmp_path, commands, Path("models/tiny"), ROWS, lambda response, label: response == label,
        eval_data=ROWS[:1], num_rollout=3, rollout_batch_size=2, rollout_stop=("a", "b"),
    )  # fmt: skip
    assert settings["hf_checkpoint"] == "models/tiny" and settings["rollout_stop"] == ["a", "b"]
    assert (settings["input_key"], settings["label_key"]) == ("question", "answer")
    assert [
        json.loads(line) for line in Path(settings["prompt_data"]).read_text().splitlines()
    ] == ROWS
    assert settings["eval_prompt_data"][0] == "eval" and settings["save"] == "{run}/checkpoints"
    pool = RewardPool(make_config(custom_rm_path=settings["custom_rm_path"]))
    assert asyncio.run(pool.score(SAMPLE)) == 1.0


@pytest.mark.parametrize(
    ("reward", "flag", "value"),
    [
        ("math", "rm_type", "math"),
        ("a.b", "custom_rm_path", "a.b"),
        ("f.py:g", "custom_rm_path", "f.py:g"),
    ],
)
def test_rewards_by_name(
    tmp_path: Path, commands: list[list[str]], reward: str, flag: str, value: str
) -> None:
    settings = settings_of(tmp_path, commands, "m", ROWS, reward, input_key="question")
    assert settings[flag] == value and settings["input_key"] == "question"


def test_a_data_set_keeps_the_types_of_its_columns(
    tmp_path: Path, commands: list[list[str]]
) -> None:
    """A list of rows would make 0.10000000149011612 of 0.1, and has no dates."""
    import datasets

    columns = {
        "prompt": ["a", "b"],
        "label": np.array([0.1, np.nan], np.float32),
        "metadata": [{"day": datetime.date(2024, 1, 2)}] * 2,
    }
    table = datasets.Dataset.from_dict(columns).select([1, 0])
    settings = settings_of(tmp_path, commands, "m", table, "math")
    rows = open_rows(settings["prompt_data"])
    read = [read_prompt(row, RowFormat("prompt", "label"), None) for row in rows]
    assert [(one.text, one.label) for one in read] == [("b", None), ("a", "0.1")]
    assert read[0].metadata == columns["metadata"][0]


def test_rows_that_a_data_set_makes_when_they_are_asked_for(
    tmp_path: Path, commands: list[list[str]]
) -> None:
    import datasets

    table = datasets.Dataset.from_list(ROWS).with_transform(lambda rows: {"prompt": ["x"]})
    settings = settings_of(tmp_path, commands, "m", table, "math")
    assert Path(settings["prompt_data"]).read_text() == '{"prompt": "x"}\n' * 2


@pytest.mark.parametrize(
    "value", [np.int64(3), np.ones(2), float("nan"), datetime.date(2024, 1, 2), "\ud800", {1}]
)
def test_values_that_json_cannot_hold_are_told_with_row_and_remedy(value: Any) -> None:
    with pytest.raises(UserError, match="row 1 of data has a value") as caught:
        api._rows([{"label": "x"}, {"label": value}])
    assert "datasets.Dataset" in caught.value.fix


@pytest.mark.parametrize("data", [[], {"a": 1}, 5, ["text"], [{"a": object()}]])
def test_data_that_is_no_data(tmp_path: Path, commands: list[list[str]], data: Any) -> None:
    with pytest.raises(UserError, match="data"):
        api.train("m", data, "math", name="r", output_dir=tmp_path)
    assert commands == []


@pytest.mark.parametrize(
    ("arguments", "flags", "said"),
    [
        ((None, ROWS), {}, "model is a NoneType"),
        (("m", ROWS, 5), {}, "reward is an int"),
        (("m", ROWS, dict), {}, "the reward cannot be called"),
        (("m", ROWS, lambda completions: 0.0), {}, r"its signature is \(completions\)"),
        (("m", ROWS, "math"), {"prompt_data": "x.jsonl"}, "prompt_data is given beside data"),
        (("m", ROWS, len), {"custom_rm_path": "a.b"}, "custom_rm_path is given beside reward"),
        (("m", ROWS, "dapo"), {"rm_type": "math"}, "rm_type is given beside reward"),
        (("m", ROWS, lambda completion: 1.0), {}, "response, label, prompt, metadata, sample"),
        (("m", ROWS, lambda respone, label: 1.0), {}, "response, label, prompt, metadata, sample"),
        (("m", ROWS, "math"), {"num_rollouts": 1}, "did you mean num_rollout"),
        (
            ("m", [{"q": "1+1="}], "math"),
            {},
            "the columns are: q; looked for: prompt, question",
        ),
        (("m", [{"prompt": "1+1="}], lambda label: 1.0), {}, "the label that the reward takes"),
        (("m", ROWS, "math"), {"num_rollout": "many"}, "whole number"),
        (("m", ROWS, "math"), {"name": "inputs"}, "cannot be called inputs"),
    ],
)
def test_what_cannot_work_is_refused_here_and_leaves_nothing(
    tmp_path: Path, commands: list[list[str]], arguments: Any, flags: dict[str, Any], said: str
) -> None:
    with pytest.raises(UserError, match=said):
        api.train(*arguments, output_dir=tmp_path / "out", **flags)
    assert commands == [] and not (tmp_path / "out").exists()


def test_runs_without_a_name_get_one_of_their_own(
    tmp_path: Path, commands: list[list[str]]
) -> None:
    paths = {api.train("m", ROWS, "math", output_dir=tmp_path).path for _ in range(3)}
    assert len(paths) == 3


# -- functions -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("function", "expected"),
    [
        (lambda response, label: response == label, True),
        (lambda sample: sample.response, "2"),
        (lambda prompt, metadata: prompt + str(metadata["bonus"]), "1+1=3"),
        (lambda args, sample, **rest: args, None),
    ],
)
def test_a_reward_takes_what_its_parameters_are_called(function: Any, expected: Any) -> None:
    assert RewardByName.of(function)(None, SAMPLE) == expected


def test_a_label_that_has_a_default_is_not_needed(
    tmp_path: Path, commands: list[list[str]]
) -> None:
    def reward(response: str, label: str | None = None) -> float:
        return float(label is None)

    settings = settings_of(tmp_path, commands, "m", [{"prompt": "1+1="}], reward)
    assert "label_key" not in settings and settings["num_epoch"] == 1  # once through the data


def test_a_name_whose_run_has_kept_something(tmp_path: Path, commands: list[list[str]]) -> None:
    (tmp_path / "r" / "checkpoints").mkdir(parents=True)
    with pytest.raises(UserError, match=f"slime resume {tmp_path}/r"):
        api.train("m", ROWS, "math", name="r", output_dir=tmp_path)
    assert commands == []
    settings_of(tmp_path, commands, "m", ROWS, "math", load=str(tmp_path / "r" / "checkpoints"))


def test_functions_find_their_way_into_other_processes(tmp_path: Path) -> None:
    assert save_function(settings_of, tmp_path / "f.pkl") == f"{__name__}:settings_of"
    factor = 3
    path = save_function(lambda x: factor * x, tmp_path / "g.pkl")
    assert load_function(path)(2) == 6
    stream = sys.stdout

    def reward(response: str) -> float:
        return float(stream.closed)

    with pytest.raises(UserError, match=r"^reward cannot be handed to another process"):
        save_function(RewardByName.of(reward), tmp_path / "h.pkl")
    (tmp_path / "broken.pkl").write_bytes(pickle.dumps(1)[:-1])
    with pytest.raises(UserError, match="cannot be loaded"):
        load_function(f"{tmp_path}/broken.pkl:f")


# -- the handle ------------------------------------------------------------------------------------


def test_the_handle_reads_a_run_folder(tmp_path: Path) -> None:
    run = api.TrainingRun(tmp_path)
    assert run.state == "starting" and run.metrics == [] and run.wait() is run
    with pytest.raises(UserError, match="no samples of step -1"):
        run.samples()
    with pytest.raises(UserError, match="the run is starting; it exports the model when it ends"):
        _ = run.model
    (tmp_path / "run.json").write_text(json.dumps({"stages": {"": {"state": "running"}}}))
    rows = [
        {"step": 0, "eval/e": 0.0},
        {"step": 1, "rollout/raw_reward": 0.25},
        {"step": 2, "rollout/raw_reward": 1},
    ]
    rows.append({"step": 1, "eval/e": 0.5})  # which went on beside step 2
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (tmp_path / "samples").mkdir()
    for rollout_id in (0, 1):
        (tmp_path / "samples" / f"rollout_{rollout_id:06d}.jsonl").write_text(
            json.dumps({"response": str(rollout_id)})
        )
    assert run.series("rollout/raw_reward") == [0.25, 1] and run.series("eval/e") == [0.0, 0.5]
    assert [row["step"] for row in run.metrics] == [0, 1, 2]
    assert run.samples(1) == [{"response": "0"}] and run.samples(-1) == run.samples(2) == [
        {"response": "1"}
    ]
    with pytest.raises(UserError, match="steps 1 to 2"):
        run.samples(3)
    with hold(RunFolder(tmp_path)):
        assert "running, reward 0.250 → 1.000 in 2 steps" in repr(run)
    assert run.state == "interrupted"  # nobody writes to it any more
    config = {"checkpoint": {"save_hf": str(tmp_path / "exports" / "{rollout_id}")}, "origins": {}}
    (tmp_path / "config.json").write_text(json.dumps(config))
    save_tiny_model(tmp_path / "exports" / "7", "qwen3")
    assert run.model == tmp_path / "exports" / "7"


@contextlib.contextmanager
def hold(folder: RunFolder) -> Iterator[None]:
    """As the driver of a run does."""
    descriptor = held(folder)
    yield
    descriptor.close()


def test_nothing_that_an_earlier_run_was_given_is_written_over(
    tmp_path: Path, commands: list[list[str]]
) -> None:
    for rows in (ROWS, ROWS[:1]):
        api.train("m", rows, "math", name="r", output_dir=tmp_path)
    first, second = (yaml.safe_load(Path(command[5]).read_text()) for command in commands)
    assert first["run_name"] == second["run_name"] == "r"
    assert (
        len(Path(first["prompt_data"]).read_text().splitlines()) == 2
        and first["prompt_data"] != second["prompt_data"]
    )


def started(tmp_path: Path, code: str) -> api.TrainingRun:
    run = api.TrainingRun(tmp_path)
    run._start([sys.executable, "-c", code], tmp_path / "driver.log")
    return run


def test_a_run_that_fails_says_what_the_driver_said(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    said = (
        "error: an earlier one\\nerror: there is no flag --a-b\\n  why: a reason\\n  fix: did you "
        "mean --bc?"
    )
    waits = (
        f"import sys, time, pathlib\nwhile not pathlib.Path({str(tmp_path / 'go')!r}).exists(): "
        "time.sleep(0.01)\n"
    )
    run = started(tmp_path, waits + f"print('{said}', file=sys.stderr); sys.exit(2)")
    awaited = threading.Thread(
        target=lambda: wait_until(lambda: run._is_awaited, "wait") and (tmp_path / "go").touch()
    )
    awaited.start()
    with pytest.raises(RunFailed) as failed:
        run.wait()
    awaited.join()
    assert str(failed.value) == "there is no flag a_b\n  why: a reason\n  fix: did you mean bc?"
    assert run.state == "failed" and capsys.readouterr().out == ""  # it is told once
    with pytest.raises(RunFailed, match="ended with status 3"):
        started(tmp_path, "raise SystemExit(3)").wait()


def test_stopping_lets_the_driver_save_first(tmp_path: Path) -> None:
    code = """if True:
        import pathlib, signal, sys, threading
        def end(*_): pathlib.Path("saved").touch(); sys.exit(0)
        signal.signal(signal.SIGTERM, end)
        pathlib.Path("ready").touch()
        threading.Event().wait()"""
    run = started(tmp_path, code.replace('Path("', f'Path("{tmp_path}/'))
    while not (tmp_path / "ready").exists():
        assert run.wait(0.05).state != "failed"
    run.stop()
    assert (tmp_path / "saved").exists() and run.wait().state == "starting"


def test_a_run_outlives_the_thread_that_began_it(tmp_path: Path) -> None:
    """The kernel ends a child with the thread that started it; a web page's or an executor's is a
    short one."""
    begun: list[api.TrainingRun] = []
    code = (
        f"import pathlib, time; time.sleep(0.5); pathlib.Path({str(tmp_path / 'done')!r}).touch()"
    )
    thread = threading.Thread(target=lambda: begun.append(started(tmp_path, code)))
    thread.start()
    thread.join()
    begun[0].wait()
    assert (tmp_path / "done").exists()


def test_the_driver_says_its_last_words_also_when_the_caller_is_gone(tmp_path: Path) -> None:
    """As a script does that gets SIGTERM, a notebook whose kernel is restarted, a host that is
    short of memory."""
    driver = """if True:
        import pathlib, signal, sys, threading
        def end(*_):
            signal.signal(signal.SIGTERM, signal.SIG_IGN)  # a second one may follow at once
            print("saving", flush=True); print("saved", file=sys.stderr, flush=True)
            pathlib.Path("saved").touch(); sys.exit(0)
        signal.signal(signal.SIGTERM, end)
        pathlib.Path("ready").touch()
        threading.Event().wait()""".replace('Path("', f'Path("{tmp_path}/')
    caller = f"""if True:
        import sys, threading
        from pathlib import Path
        from slime.run import api
        run = api.TrainingRun({str(tmp_path)!r})
        run._start([sys.executable, "-c", {driver!r}], Path({str(tmp_path / "driver.log")!r}))
        threading.Event().wait()"""
    script = subprocess.Popen([sys.executable, "-c", caller])
    wait_until((tmp_path / "ready").exists, "the driver is up")
    script.kill()
    script.wait()
    wait_until((tmp_path / "saved").exists, "the driver has saved")
    assert (tmp_path / "driver.log").read_text() == "saving\nsaved\n"
