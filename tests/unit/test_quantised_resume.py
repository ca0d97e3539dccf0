"""Conversions that were killed go on where they were, wherever that was; what others left is not
taken."""

from __future__ import annotations

import itertools
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from slime.checkpoints import quantised_files
from slime.checkpoints.quantised_files import dequantise_directory, quantise_directory
from slime.models import read_hf_config
from slime.models.quantised import Fp8, Int4, Quantisation
from tests.support.processes import ROOT
from tests.support.quantised_models import INT4, make_plain, verify

pytest.importorskip("compressed_tensors", reason="the quantised extra is not installed")

_KILLED = """
import os, signal, sys
from pathlib import Path
from slime.checkpoints import quantised_files
from slime.checkpoints.quantised_files import dequantise_directory, quantise_directory
from tests.support.quantised_models import INT4
source, target, at, way = Path(sys.argv[1]), Path(sys.argv[2]), int(sys.argv[3]), sys.argv[4]
calls = 0
def counted(*arguments):
    global calls
    calls += 1
    if calls == at:
        os.kill(os.getpid(), signal.SIGKILL)
    return original(*arguments)
name = "quantise" if way == "there" else "dequantise"
original = getattr(quantised_files, name)
setattr(quantised_files, name, counted)
quantise_directory(source, target, INT4) if way == "there" else dequantise_directory(source, target)
"""


@pytest.mark.slow
@pytest.mark.parametrize("way", ["there", pytest.param("back", marks=pytest.mark.full)])
def test_a_conversion_that_was_killed_goes_on(
    way: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plain, small = make_plain(tmp_path / "plain", "llama", shards=4), tmp_path / "small"
    source, target = plain, small
    if way == "back":
        quantise_directory(plain, small, INT4)
        source, target = small, tmp_path / "back"
    child = subprocess.run(
        [sys.executable, "-c", _KILLED, source, target, "9", way], cwd=ROOT, capture_output=True
    )
    assert child.returncode == -signal.SIGKILL, child.stderr.decode()
    partial = tmp_path / f".{target.name}.partial"
    left = {path.name: path.stat().st_mtime_ns for path in partial.glob("*.safetensors")}
    assert 1 <= len(left) < 4 and not target.exists() and list(partial.glob(".*.tmp"))
    done = (
        quantise_directory(source, target, INT4)
        if way == "there"
        else dequantise_directory(source, target)
    )
    assert done.kept == len(left) and f"{len(left)} of them from an earlier attempt" in str(done)
    assert {name: (target / name).stat().st_mtime_ns for name in left} == left
    again = tmp_path / "again"
    quantise_directory(source, again, INT4) if way == "there" else dequantise_directory(
        source, again
    )
    for path in again.iterdir():
        assert path.read_bytes() == (target / path.name).read_bytes(), path.name
    assert {path.name for path in target.iterdir()} == {path.name for path in again.iterdir()}


def _dies_at(number: int, work: Callable[[], object]) -> bool:
    """Work in a process of its own, which ends without a word at its ``number``-th change of a
    directory; whether there were so many."""
    child = os.fork()
    if child:
        return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 9
    left = itertools.count(1)

    def ending(original: Callable[..., Any]) -> Callable[..., Any]:
        def called(*arguments: Any, **more: Any) -> Any:
            if next(left) == number:
                os._exit(9)
            return original(*arguments, **more)

        return called

    try:
        for name in ("replace", "rename", "unlink", "mkdir", "rmdir"):
            setattr(os, name, ending(getattr(os, name)))
        work()
    finally:
        os._exit(0)


@pytest.mark.parametrize(
    "has_older",
    [
        pytest.param(False, id="alone", marks=pytest.mark.full),
        pytest.param(True, id="over an older one"),
    ],
)
def test_a_conversion_may_be_killed_between_any_two_steps(has_older: bool, tmp_path: Path) -> None:
    plain, small, whole = (
        make_plain(tmp_path / "plain", "llama", shards=2),
        tmp_path / "small",
        tmp_path / "whole",
    )
    fp8 = Quantisation("fp8", Fp8((16, 16)), ("lm_head",))
    quantise_directory(plain, whole, fp8)
    expected = {path.name: path.read_bytes() for path in whole.iterdir()}
    older = Quantisation("fp8", Fp8((8, 8)), ("lm_head",))
    for number in itertools.count(1):
        shutil.rmtree(small, ignore_errors=True)
        if has_older:
            quantise_directory(plain, small, older)
        died = _dies_at(number, lambda: quantise_directory(plain, small, fp8))
        if small.exists():
            verify(small)  # the older one, or the new one
        quantise_directory(plain, small, fp8)
        assert {path.name: path.read_bytes() for path in small.iterdir()} == expected
        assert sorted(path.name for path in tmp_path.iterdir()) == ["plain", "small", "whole"]
        if not died:
            break
    assert number > 12


def test_what_another_conversion_left_is_not_taken(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plain, small = make_plain(tmp_path / "plain", "llama", shards=3), tmp_path / "small"

    def stops(*arguments: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(quantised_files, "copy_assets", stops)
        quantise_directory(plain, small, INT4)
    assert len(list((tmp_path / ".small.partial").glob("*.safetensors"))) == 3
    other = Quantisation("compressed-tensors", Int4(16), INT4.ignore)
    assert quantise_directory(plain, small, other).kept == 0
    assert Quantisation.read(read_hf_config(small)) == other
    verify(small)
