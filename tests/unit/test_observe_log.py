"""Logs: one format, the process's role in every line, files in the run folder."""

from __future__ import annotations

import logging
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from slime.errors import UserError
from slime.log import get_logger, log_level, setup_logging, tell, untold


@pytest.fixture(autouse=True)
def restored_logger(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.delenv("SLIME_DEBUG", raising=False)
    logger = logging.getLogger("slime")
    handlers, level, propagate = list(logger.handlers), logger.level, logger.propagate
    logger.handlers = []
    yield
    for handler in logger.handlers:
        handler.close()
    logger.handlers, logger.propagate = handlers, propagate
    logger.setLevel(level)


def test_lines_carry_role_and_short_name(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    setup_logging("trainer 0", "INFO", tmp_path / "logs")
    get_logger("slime.weights.sync").info("version %d pushed", 7)
    get_logger("slime.weights.sync").debug("not shown")
    line = (tmp_path / "logs" / "trainer-0.log").read_text()
    assert "INFO    trainer 0  weights.sync: version 7 pushed" in line
    assert "not shown" not in line
    assert "trainer 0  weights.sync: version 7 pushed" in capsys.readouterr().err


def test_setting_up_again_replaces_handlers(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    setup_logging("driver")
    setup_logging("driver")
    get_logger("rewards").warning("once")
    assert capsys.readouterr().err.count("once") == 1


def test_levels(monkeypatch: pytest.MonkeyPatch) -> None:
    assert log_level(None) == logging.INFO
    assert log_level("warning") == logging.WARNING
    with pytest.raises(UserError, match="LOUD"):
        log_level("LOUD")
    monkeypatch.setenv("SLIME_DEBUG", "1")
    assert log_level("ERROR") == logging.DEBUG
    monkeypatch.setenv("SLIME_DEBUG", "0")
    assert log_level("ERROR") == logging.ERROR


def test_observe_imports_no_heavy_library() -> None:
    code = (
        "import sys, pkgutil, importlib, slime.observe\n"
        "for m in pkgutil.walk_packages(slime.observe.__path__, 'slime.observe.'): "
        "importlib.import_module(m.name)\n"
        "print([m for m in ('torch', 'ray', 'transformers', 'megatron', 'wandb', 'tensorflow') if "
        "m in sys.modules])\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True
    )
    assert done.stdout.strip() == "[]"


def test_what_is_told_waits_for_whoever_has_a_terminal(capsys: pytest.CaptureFixture[str]) -> None:
    setup_logging("rollout")
    logger = get_logger("prompts.prepare")
    for rollout in range(3):
        tell(logger, "%d prompts are left out", 7, once="left out")
        tell(logger, "of each rollout: %d", rollout)
    assert untold() == [
        "7 prompts are left out",
        *(f"of each rollout: {rollout}" for rollout in range(3)),
    ]
    assert not untold() and capsys.readouterr().err.count("7 prompts are left out") == 1
    setup_logging("rollout")
    tell(logger, "100 %", once="left out")
    assert untold() == ["100 %"], (
        "another run says it again, and text without arguments is no format"
    )


def test_code_that_closes_stderr_does_not_make_log_lines_errors(tmp_path: Path) -> None:
    script = """
import sys
from pathlib import Path
from slime.log import get_logger, log_to_file_only
log_to_file_only("rollout", Path(sys.argv[1]))
sys.stdout.close()
sys.stderr.close()
print("printed later")
get_logger("rewards").warning("logged later")
"""
    subprocess.run([sys.executable, "-c", script, str(tmp_path)], check=True, timeout=60)
    said = (tmp_path / "rollout.log").read_text()
    assert "printed later" in said and "rewards: logged later" in said
