"""Pictures of the documentation: made from what is recorded, small, and without anything from elsewhere."""

from __future__ import annotations

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


def test_a_chat_is_made_of_a_recorded_session(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(make_pictures, "IMAGES", tmp_path)
    (tmp_path / "session.txt").write_text("\x1b[1myou:\x1b[0m 2+3=\n5\n")
    assert make_pictures.main(["chat", str(tmp_path / "session.txt")]) == 0
    assert "you: 2+3=" in words((tmp_path / "chat.svg").read_text())
    with pytest.raises(SystemExit):
        make_pictures.main(["chat"])
