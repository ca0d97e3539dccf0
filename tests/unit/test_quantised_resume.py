"""Conversions that were killed go on where they were, wherever that was; what others left is not
taken."""

from __future__ import annotations

import itertools
import os
import shutil
import signal
from collections.abc import Callable, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from slime.checkpoints import quantised_files
from slime.checkpoints.quantised_files import dequantise_directory, quantise_directory
from slime.models import read_hf_config
from slime.models.quantised import Fp8, Int4, Quantisation
from tests.support.quantised_models import INT4, make_plain, verify

pytest.importorskip("compressed_tensors", reason="the quantised extra is not installed")


def _dies_at(
    number: int,
    work: Callable[[], object],
    module: ModuleType = os,
    names: Sequence[str] = ("replace", "rename", "unlink", "mkdir", "rmdir"),
) -> bool:
    """Work in a process of its own, which is killed at its ``number``-th call of one of these
    functions; whether there were so many."""
    child = os.fork()
    if child:
        return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == -signal.SIGKILL
    left = itertools.count(1)

    def ending(original: Callable[..., Any]) -> Callable[..., Any]:
        def called(*arguments: Any, **more: Any) -> Any:
            if next(left) == number:
                os.kill(os.getpid(), signal.SIGKILL)
            return original(*arguments, **more)

        return called

    try:
        for name in names:
            setattr(module, name, ending(getattr(module, name)))
        work()
    finally:
        os._exit(0)


@pytest.mark.parametrize("way", ["there", pytest.param("back", marks=pytest.mark.full)])
def test_a_conversion_that_was_killed_goes_on(way: str, tmp_path: Path) -> None:
    plain, small = make_plain(tmp_path / "plain", "llama", shards=4), tmp_path / "small"
    source, target = plain, small
    if way == "back":
        quantise_directory(plain, small, INT4)
        source, target = small, tmp_path / "back"

    def convert(into: Path) -> Any:
        if way == "there":
            return quantise_directory(source, into, INT4)
        return dequantise_directory(source, into)

    called = "quantise" if way == "there" else "dequantise"
    assert _dies_at(9, lambda: convert(target), quantised_files, [called])
    partial = tmp_path / f".{target.name}.partial"
    left = {path.name: path.stat().st_mtime_ns for path in partial.glob("*.safetensors")}
    assert 1 <= len(left) < 4 and not target.exists() and list(partial.glob(".*.tmp"))
    done = convert(target)
    assert done.kept == len(left) and f"{len(left)} of them from an earlier attempt" in str(done)
    assert {name: (target / name).stat().st_mtime_ns for name in left} == left
    again = tmp_path / "again"
    convert(again)
    for path in again.iterdir():
        assert path.read_bytes() == (target / path.name).read_bytes(), path.name
    assert {path.name for path in target.iterdir()} == {path.name for path in again.iterdir()}


@pytest.mark.parametrize(
    "has_older",
    [
        pytest.param(False, id="alone", marks=pytest.mark.full),
        pytest.param(True, id="over an older one"),
    ],
)
def test_a_conversion_may_be_killed_between_any_two_steps(has_older: bool, tmp_path: Path) -> None:
    names = ("older", "plain", "small", "whole")
    older, plain, small, whole = (tmp_path / name for name in names)
    make_plain(plain, "llama", shards=2)
    fp8 = Quantisation("fp8", Fp8((16, 16)), ("lm_head",))
    quantise_directory(plain, whole, fp8)
    expected = {path.name: path.read_bytes() for path in whole.iterdir()}
    quantise_directory(plain, older, Quantisation("fp8", Fp8((8, 8)), ("lm_head",)))
    for number in itertools.count(1):
        shutil.rmtree(small, ignore_errors=True)
        if has_older:
            shutil.copytree(older, small)
        died = _dies_at(number, lambda: quantise_directory(plain, small, fp8))
        if small.exists():
            verify(small)  # the older one, or the new one
        quantise_directory(plain, small, fp8)
        assert {path.name: path.read_bytes() for path in small.iterdir()} == expected
        assert sorted(path.name for path in tmp_path.iterdir()) == [*names]
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
