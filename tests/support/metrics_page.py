"""What docs/metrics.md promises."""

from __future__ import annotations

import re

from tests.support.processes import ROOT


def documented_names() -> set[str]:
    """Names in docs/metrics.md; ``/median`` after ``rollout/reward/mean`` is short for its
    sibling."""
    names: set[str] = set()
    for line in (ROOT / "docs" / "metrics.md").read_text(encoding="utf-8").splitlines():
        first = ""
        for name in re.findall(r"`([^`]+)`", line.split(" | ")[0]):
            first = name if not name.startswith("/") else first
            full = name if not name.startswith("/") else first.rsplit("/", 1)[0] + name
            names.add(re.sub(r"<[^>]*>", "<>", full))
    return names
