"""Pictures of the documentation: made from what is recorded, small, and without anything from
elsewhere."""

from __future__ import annotations

import sys
import xml.etree.ElementTree as ElementTree
from pathlib import Path

import pytest
from rich.text import Text

from tools import make_pictures


def words(svg: str) -> str:
    return " ".join("".join(ElementTree.fromstring(svg).itertext()).replace("\xa0", " ").split())


def test_the_console_in_the_documentation_is_what_the_console_is_now() -> None:
    svg = make_pictures.console_svg()
    shown = words((make_pictures.IMAGES / "console.svg").read_text(encoding="utf-8"))
    assert words(svg) == shown, "python tools/make_pictures.py console"
    for part in ("demo/grpo", "step 26/40", "entropy", "held-out", "generating 17/32 prompts"):
        assert part in shown


def test_a_terminal_picture_loads_nothing_and_keeps_hostile_text() -> None:
    svg = make_pictures.terminal_svg(Text.from_ansi("\x1b[31m<script>&\x1b[0m"), "a <b>")
    assert "@font-face" not in svg and "https://cdn" not in svg
    assert "<script>&" in words(svg)


CHAT = """\
import readline
print("loading …")
while True:
    print(eval(input("\\n> ")))
"""


def test_a_conversation_is_held_in_a_terminal() -> None:
    command = [sys.executable, "-c", CHAT]
    assert (
        make_pictures.held(command, ["2+3", "'a' * 3"]) == "loading …\n\n> 2+3\n5\n\n> 'a' * 3\naaa"
    )
    with pytest.raises(SystemExit, match=r"ended too early; it had shown:(.|\n)*ZeroDivisionError"):
        make_pictures.held(command, ["1/0", "2+3"])


def test_all_pictures_are_made_by_one_command(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(make_pictures, "IMAGES", tmp_path)
    monkeypatch.setattr(make_pictures, "held", lambda command, questions: f"talks to {command[4]}")
    monkeypatch.setattr(
        make_pictures, "report_png", lambda run, picture: picture.write_text(str(run))
    )
    assert make_pictures.main(["all", "outputs/demo"]) == 0
    assert {file.name for file in tmp_path.iterdir()} == {"console.svg", "chat.svg", "report.png"}
    assert "$ slime chat outputs/demo talks to outputs/demo" in words(
        (tmp_path / "chat.svg").read_text()
    )
    assert (tmp_path / "report.png").read_text() == "outputs/demo"
    with pytest.raises(SystemExit):
        make_pictures.main(["all"])
