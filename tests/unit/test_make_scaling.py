"""The table of docs/scaling.md is what its tool writes."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def tool() -> ModuleType:
    path = ROOT / "tools" / "make_scaling.py"
    spec = importlib.util.spec_from_file_location("make_scaling", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_rows_of_eight_gpus_are_those_of_the_page(
    tool: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    page = tool.PAGE.read_text()
    table = page.partition(tool.BEGIN)[2].partition(tool.END)[0]
    assert table.startswith(tool.HEAD)
    assert len(table.splitlines()) == 2 + 2 * len(tool.MODELS) * len(tool.SIZES)
    monkeypatch.setattr(tool, "MODELS", {"Qwen3-8B": tool.MODELS["Qwen3-8B"]})
    for row in tool.rows((8,)):
        assert row in table
