"""Patterns of paths: what is filled in is found again, whatever the format; what cannot be is
refused by name."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from slime.errors import UserError
from slime.paths import Evaluation, check, fill, fixed_folder, found, literal

FORMATS = [
    "",
    ":d",
    ":04d",
    ":+d",
    ":,",
    ":_d",
    ":*>6d",
    ":<4d",
    "!s:>5",
    "!r",
    ":x",
    ":#06X",
    ":o",
    ":012b",
    ":.0f",
]


@pytest.mark.parametrize("form", FORMATS)
@pytest.mark.parametrize("around", ["./d/data_{}.pt", "{}/model", "a{{{{b}}}}[*]/{}_7_{}.pt"])
def test_what_was_written_is_found_again(
    form: str, around: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    pattern = around.format(*["{rollout_id" + form + "}"] * 2)
    check(pattern, "--flag", num_rollout=2000)
    assert found(pattern) == []
    for rollout_id in (1234, 0, 17, Evaluation(3), Evaluation(None)):
        path = fill(pattern, rollout_id)
        path.parent.mkdir(parents=True, exist_ok=True)
        path.touch()
    assert found(pattern) == [(fill(pattern, i), i) for i in (0, 17, 1234)]


@given(st.integers(0, 10**9), st.sampled_from(FORMATS))
@settings(max_examples=50)
def test_no_two_rollouts_share_a_path(number: int, form: str) -> None:
    pattern = "{rollout_id" + form + "}"
    assert (
        fill(pattern, number) != fill(pattern, number + 1) != fill(pattern, Evaluation(number + 1))
    )


def test_a_path_without_the_rollout_is_found_without_a_number(tmp_path: Path) -> None:
    (tmp_path / "hf{1}").mkdir()
    (tmp_path / "hf{12}").mkdir()
    assert found(literal(str(tmp_path / "hf{1}"))) == [(tmp_path / "hf{1}", None)]


@pytest.mark.parametrize(
    ("pattern", "folder"),
    [
        ("dumps/{rollout_id}.pt", "dumps"),
        ("exports/run_{rollout_id}/model", "exports"),
        ("{rollout_id}.pt", "."),
        ("/a/b{{c}}/{rollout_id:04d}", "/a/b{c}"),
        ("exports/newest", "exports/newest"),
    ],
)
def test_the_folder_that_all_share(pattern: str, folder: str) -> None:
    assert str(fixed_folder(pattern)) == folder


@pytest.mark.parametrize(
    ("pattern", "why"),
    [
        ("{step}", "no {step}"),
        ("{}", "no {}"),
        ("{rollout_id.real}", "no {rollout_id.real}"),
        ("{rollout_id", "expected '}'"),
        ("a}", "Single '}'"),
        ("{rollout_id:04z}", "format code 'z'"),
        ("{rollout_id:{rank}}", "no {rank}"),
        ("{rollout_id:c}", "a null character"),
    ],
)
def test_what_cannot_be_filled_in_is_named(pattern: str, why: str) -> None:
    with pytest.raises(UserError, match=r"--flag .* cannot be filled in") as caught:
        check(pattern, "--flag")
    assert why in caught.value.why and "{rollout_id:04d}" in caught.value.fix
