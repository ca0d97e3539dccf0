"""docs/coming-from.md names flags that there are."""

from __future__ import annotations

import re
from pathlib import Path

from slime.config.flags import spellings

PAGE = Path(__file__).parents[2] / "docs" / "coming-from.md"


def test_every_flag_of_the_page_exists() -> None:
    text = re.sub(r"`ray [^`]*`", "", PAGE.read_text(encoding="utf-8"))  # Ray's own
    named = set(re.findall(r"(?<![\w/])--([a-z][\w-]+)", text))
    assert len(named) > 40 and not sorted(named - set(spellings()))
