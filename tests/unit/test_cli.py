"""The `slime` command: dispatch, help, and how errors end."""

from __future__ import annotations

import errno
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from slime.__main__ import COMMANDS, guarded, main
from slime.config import make_config, parse_args
from slime.errors import RunFailed, UserError

ROOT = Path(__file__).parents[2]


def slime(*words: str, **env: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "slime", *words]
    environment = {**os.environ, "SLIME_DEBUG": "0", **env}
    return subprocess.run(
        command, capture_output=True, text=True, timeout=120, cwd=ROOT, env=environment
    )


def test_usage_lists_the_commands(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--help"]) == 0
    text = capsys.readouterr().out
    assert all(name in text for name in [*COMMANDS, "version"])
    assert main([]) == 2


@pytest.mark.parametrize("word", ["version", "--version"])
def test_version(word: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([word]) == 0
    told = capsys.readouterr().out
    assert told.startswith("slime ") and "torch " in told and "sglang " in told
    assert (
        main([word, "extra"]) == 2 and "slime version takes no 'extra'" in capsys.readouterr().err
    )


@pytest.mark.parametrize("name", ["chat", "serve", "export", "push", "report", "reward", "convert"])
def test_a_command_without_arguments_says_how_it_is_called(
    name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([name]) == 2
    told = capsys.readouterr().err
    assert told.startswith(f"error: slime {name}: the following arguments are required: ")
    assert f"why: it is called as slime {name} " in told and f"fix: slime {name} --help" in told


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (
            ["chat", "--temprature", "0", "model"],
            "there is no flag --temprature; did you mean --temperature?",
        ),
        (
            ["chat", "model", "--max-tokens", "0"],
            "argument --max-tokens: must be a whole number, at least 1, not '0'",
        ),
    ],
)
def test_a_wrong_flag_alone_is_blamed(
    words: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(words) == 2
    told = capsys.readouterr().err.splitlines()[0]
    assert said in told and "path" not in told


def test_unknown_command_names_the_nearest(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["trian"]) == 2
    assert "did you mean `slime train`?" in capsys.readouterr().err


@pytest.mark.parametrize("name", ["train", "train-async", "train_async"])
def test_help_of_training(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([name, "--help"]) == 0
    text = capsys.readouterr().out
    assert text.startswith("usage: slime train") and len(text.splitlines()) < 40
    assert main([name, "--help", "all"]) == 0
    text = capsys.readouterr().out
    for expected in (
        "usage: slime train",
        "rollout: Generation",
        "--rollout-batch-size INT",
        "--moe-permute-fusion",
    ):
        assert expected in text
    assert "[no effect: it is about speed" in " ".join(text.split())
    assert "--teacher-port" not in text  # refused flags are in docs/flags.md


def test_help_of_one_topic(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["train", "--help", "reward"]) == 0
    text = capsys.readouterr().out
    assert "--rm-timeout FLOAT" in text and "--rollout-batch-size" not in text
    for topic, flag in (
        ("router", "--router-policy"),
        ("fault-tolerance", "--use-fault-tolerance"),
    ):
        assert main(["train", "--help", topic]) == 0
        assert flag in capsys.readouterr().out
    assert main(["train", "--help", "rewrd"]) == 2
    assert "did you mean --help reward?" in capsys.readouterr().err


@pytest.mark.parametrize(("entry", "name"), [("train", "train"), ("train_async", "train-async")])
def test_the_help_opens_with_an_example_that_is_accepted(
    entry: str, name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """And which says no more than the flags that stand above it: everything else is a default."""
    assert main([name, "--help"]) == 0
    text = capsys.readouterr().out
    command = text.split("For example:\n\n")[1].split("\n\n")[0].replace("\\\n", " ")
    usage, entry_word, *words = shlex.split(command)
    assert (usage, entry_word) == ("slime", name)
    example = {word for word in words if word.startswith("--")}
    shown = set(re.findall(r"^  (--[\w-]+) ", text.split("For example:")[0], re.MULTILINE))
    assert example <= shown and len(shown) <= 12 and ("--colocate" in shown) == (entry == "train")
    config = parse_args(words, entry)
    rollout = config.rollout
    assert (
        rollout.rollout_batch_size,
        rollout.n_samples_per_prompt,
        config.train.global_batch_size,
    ) == (32, 8, 256)
    assert config.data.rollout_shuffle and not config.warnings


def test_what_the_help_says_of_defaults(capsys: pytest.CaptureFixture[str]) -> None:
    main(["train", "--help"])
    values = parse_args(
        ["--hf-checkpoint", "m", "--prompt-data", "p.jsonl", "--num-rollout", "1"]
    ).values()
    said = re.findall(r"--([\w-]+) .*\(default: (.*)\)", capsys.readouterr().out)
    assert len(said) == 3
    for option, default in said:
        value = values[option.replace("-", "_")]
        assert value == type(value)(default), option


@pytest.mark.parametrize(
    ("word", "named"),
    [("rewrd", "--reward-key"), ("shufle", "--rollout-shuffle"), ("kl-cof", "--kl-coef")],
)
def test_a_misspelt_word_of_a_flag_is_answered_with_the_nearest(
    word: str, named: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["flags", word]) == 2
    assert f"did you mean {named}" in capsys.readouterr().err


def test_scripts_in_the_checkout() -> None:
    for script in ("train.py", "train_async.py"):
        command = [sys.executable, script, "--help"]
        done = subprocess.run(command, capture_output=True, text=True, timeout=120, cwd=ROOT)
        assert done.returncode == 0 and "--rollout-batch-size" in done.stdout


def test_a_user_error_is_a_few_lines_and_status_2() -> None:
    done = slime("flags", "rollout-batch-sise")
    assert done.returncode == 2 and done.stdout == ""
    assert done.stderr.startswith("error: no flag has") and "Traceback" not in done.stderr
    assert "did you mean --rollout-batch-size?" in done.stderr


def test_slime_debug_shows_the_traceback() -> None:
    done = slime("flags", "rollout-batch-sise", SLIME_DEBUG="1")
    assert done.returncode != 0 and "Traceback" in done.stderr and "UserError" in done.stderr


def test_defects_keep_their_traceback() -> None:
    def fail() -> int:
        raise ValueError("a defect")

    with pytest.raises(ValueError, match="a defect"):
        guarded(fail)


@pytest.mark.parametrize("words", [["train.py"], ["train_async.py"], ["-m", "slime", "train"]])
def test_a_python_without_the_requirements_is_told_what_to_install(words: list[str]) -> None:
    env = {
        name: value
        for name, value in os.environ.items()
        if name not in ("PYTHONPATH", "SLIME_DEBUG")
    }
    command = [sys.executable, "-S", *words, "--help"]  # -S: nothing of site-packages
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, cwd=ROOT, env=env)
    assert done.returncode == UserError.exit_status and done.stdout == ""
    what, why, fix = done.stderr.splitlines()
    assert what == f"error: the module psutil is not installed for {sys.executable}"
    assert why.startswith("  why: ") and re.match(
        r"  fix: (\. |in a virtual environment: pip install -e )/", fix
    )


def test_what_to_do_about_a_missing_package(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """In an installation, in a checkout, in a checkout that has an environment; and only of slime's
    own imports."""
    package = tmp_path / "slime"
    monkeypatch.setattr("slime.__main__.__file__", str(package / "__main__.py"))

    def fix(file: Path = package / "cli" / "x.py", name: str = "absent_package") -> str:
        assert guarded(lambda: exec(compile(f"import {name}.part", str(file), "exec"))) == 2
        return capsys.readouterr().err.splitlines()[-1].removeprefix("  fix: ")

    assert fix() == "in a virtual environment: pip install slime-rl"
    (tmp_path / "pyproject.toml").touch()
    assert fix() == f"in a virtual environment: pip install -e {tmp_path}"
    (tmp_path / ".venv" / "bin").mkdir(parents=True)
    (tmp_path / ".venv" / "bin" / "activate").touch()
    assert fix() == f". {tmp_path}/.venv/bin/activate"
    monkeypatch.setattr(sys, "prefix", str(tmp_path / ".venv"))
    assert fix() == f"in a virtual environment: pip install -e {tmp_path}"
    for file, name in (
        (tmp_path / "theirs.py", "absent_package"),
        (package / "cli" / "x.py", "slime.absent"),
    ):
        with pytest.raises(ModuleNotFoundError):  # a defect, of whoever wrote it
            fix(file, name)


def test_error_of_a_remote_process_shows_its_own_lines(capsys: pytest.CaptureFixture[str]) -> None:
    class Remote(UserError):
        """As Ray makes them: the class of the cause, with the remote traceback as text."""

        def __str__(self) -> str:
            return "Traceback (most recent call last): …"

    def fail() -> int:
        raise Remote("no such file", fix="check it")

    assert guarded(fail) == 2
    assert capsys.readouterr().err == "error: no such file\n  fix: check it\n"


def test_notes_are_shown_and_failures_of_the_run_give_1(capsys: pytest.CaptureFixture[str]) -> None:
    def fail() -> int:
        error = RunFailed("engine-0 was killed")
        error.add_note("details: outputs/run/crash/1")
        raise error

    assert guarded(fail) == 1
    assert capsys.readouterr().err == "error: engine-0 was killed\n  details: outputs/run/crash/1\n"


def test_a_full_disk_is_no_defect(capsys: pytest.CaptureFixture[str]) -> None:
    def fail(number: int) -> int:
        raise OSError(number, os.strerror(number), "outputs/run/config.json")

    assert guarded(lambda: fail(errno.ENOSPC)) == 2
    assert "the disk is full" in capsys.readouterr().err
    assert guarded(lambda: fail(errno.EROFS)) == 2
    told = capsys.readouterr().err
    assert "a file system has become read-only" in told and "outputs/run/config.json" in told
    assert guarded(lambda: fail(errno.EACCES)) == 2
    assert "a file is not for this user" in capsys.readouterr().err
    with pytest.raises(ConnectionRefusedError):
        guarded(lambda: fail(errno.ECONNREFUSED))


def test_interrupt_and_closed_pipe(capsys: pytest.CaptureFixture[str]) -> None:
    def interrupt() -> int:
        raise KeyboardInterrupt

    assert guarded(interrupt) == 130
    assert "interrupted" in capsys.readouterr().err
    done = subprocess.run(
        f"'{sys.executable}' -m slime flags | head -n 1",
        shell=True,
        capture_output=True,
        text=True,
        timeout=60,
        cwd=ROOT,
    )
    assert done.stdout.startswith("# Flags") and done.stderr == ""


def test_flags_command(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["flags", "kl-loss-coef"]) == 0
    assert "Coefficient of the KL loss." in capsys.readouterr().out


def test_a_flag_is_shown_with_its_declaration_and_its_value_in_a_run(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["flags", "--opsm-delta"]) == 0
    lines = [line.strip() for line in capsys.readouterr().out.splitlines()]
    assert lines == [
        "--opsm-delta FLOAT",
        "Sequence KL above which a sample with negative advantage is masked.",
        "default: 0.0001",
        "range: at least 0",
        "status: works; refused without --use-opsm",
        "read by: the trainer's processes, as they take steps and save",
        "of: slime",
    ]
    flags = {"use_opsm": True, "opsm_delta": 0.5, "use_wandb": True, "wandb_key": "hidden"}
    make_config(rollout_batch_size=2, **flags).save(tmp_path / "config.json")
    assert main(["flags", "opsm-delta", str(tmp_path)]) == 0
    assert capsys.readouterr().out.endswith("    value: 0.5\n    origin: flag\n")
    assert main(["flags", "global-batch-size", str(tmp_path)]) == 0
    assert "origin: derived: rollout_batch_size × n_samples_per_prompt" in capsys.readouterr().out
    assert (
        main(["flags", "num-layers", str(tmp_path)])
        == main(["flags", "wandb-key", str(tmp_path)])
        == 0
    )
    shown = capsys.readouterr().out
    assert "value: not set" in shown and "hidden" not in shown
    assert main(["flags", "lr", str(tmp_path / "none")]) == UserError.exit_status


def test_a_flag_of_a_run_with_stages_is_that_of_the_newest(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for age, (stage, rate) in enumerate([("grpo", 2e-6), ("sft", 1e-5)]):
        file = tmp_path / f"config.{stage}.json"
        make_config(lr=rate).save(file)
        os.utime(file, (2000 - age, 2000 - age))
    assert main(["flags", "lr", str(tmp_path)]) == 0
    assert "value: 2e-06" in capsys.readouterr().out
