"""A run in a notebook is one output that is updated, with a stand-in of IPython's display and in a
real kernel."""

from __future__ import annotations

import io
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import nbformat
import pytest
from nbclient import NotebookClient

from slime.observe import notebook
from slime.observe.notebook import LinePrinter, can_move_cursor
from slime.run import api
from tests.support.processes import ROOT


class FakeIPython:
    """IPython's display with ids: outputs of the cell by id, in order of appearance."""

    def __init__(self, has_kernel: bool = True) -> None:
        self.outputs: dict[str, str] = {}
        self.updates = 0
        self.display = SimpleNamespace(display=self._display)
        self._shell = SimpleNamespace(kernel=object()) if has_kernel else SimpleNamespace()

    def get_ipython(self) -> Any:
        return self._shell

    def _display(self, data: dict[str, str], *, raw: bool, display_id: bool) -> Any:
        assert raw and display_id
        name = f"output {len(self.outputs)}"
        self.outputs[name] = data["text/plain"]

        def update(data: dict[str, str], *, raw: bool) -> None:
            assert raw and name in self.outputs
            self.outputs[name] = data["text/plain"]
            self.updates += 1

        return SimpleNamespace(update=update)


class Clock:
    seconds = 0.0

    def __call__(self) -> float:
        return self.seconds


@pytest.fixture
def kernel(monkeypatch: pytest.MonkeyPatch) -> FakeIPython:
    fake = FakeIPython()
    monkeypatch.setitem(sys.modules, "IPython", fake)
    return fake


def test_many_lines_are_one_output_with_the_last_of_them(kernel: FakeIPython) -> None:
    clock = Clock()
    printer = LinePrinter(clock)
    for number in range(1000):
        clock.seconds += 0.01
        printer.add(f"step {number}\n")
        printer.refresh()
    printer.refresh(at_once=True)
    (shown,) = kernel.outputs.values()
    assert shown.splitlines()[-1] == "step 999" and len(shown.splitlines()) == notebook._SHOWN_LINES
    assert kernel.updates <= 10 / notebook._SECONDS_BETWEEN_UPDATES + 1


def test_nothing_new_is_no_update(kernel: FakeIPython) -> None:
    printer = LinePrinter()
    printer.add("step 1\n")
    for _ in range(3):
        printer.refresh(at_once=True)
    assert kernel.updates == 1


@pytest.mark.parametrize(
    "fake", [None, FakeIPython(has_kernel=False)], ids=["no IPython", "a shell"]
)
def test_elsewhere_lines_are_printed(
    fake: FakeIPython | None, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.delitem(sys.modules, "IPython", raising=False)
    if fake is not None:
        monkeypatch.setitem(sys.modules, "IPython", fake)
    printer = LinePrinter()
    printer.add("step 1\n")
    printer.refresh(at_once=True)
    assert capsys.readouterr().out == "step 1\n" and (fake is None or fake.outputs == {})


def test_a_run_in_a_kernel_is_one_output(kernel: FakeIPython, tmp_path: Path) -> None:
    run = api.TrainingRun(tmp_path / "run")
    run._start([sys.executable, "-c", "for i in range(300): print('step', i)"], tmp_path / "log")
    run.wait()
    (shown,) = kernel.outputs.values()
    assert shown.endswith("step 299\n")


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


OF_A_KERNEL = {"TERM": "xterm-color", "FORCE_COLOR": "1", "PAGER": "cat", "GIT_PAGER": "cat"}


@pytest.mark.parametrize(
    ("stream", "environ", "expected"),
    [
        (Terminal(), {"TERM": "xterm-256color"}, True),
        (Terminal(), {"TERM": "xterm-color"}, True),
        (Terminal(), {"TERM": "screen", "GIT_PAGER": "cat"}, True),
        (Terminal(), OF_A_KERNEL, False),
        (io.StringIO(), {"FORCE_COLOR": "1"}, False),
    ],
)
def test_what_can_move_its_cursor(
    stream: io.StringIO, environ: dict[str, str], expected: bool
) -> None:
    assert can_move_cursor(stream, environ) is expected


@pytest.mark.slow
def test_a_real_kernel(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """``slime.train``'s handle and ``!slime train``'s console, 200 steps each, in a cell each."""
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    steps = (
        "from slime.observe.console import ConsoleSink\n"
        "sink = ConsoleSink('sums', 200)\n"
        "for step in range(200):\n"
        "    sink.log(step + 1, {'rollout/raw_reward': 0.5, 'perf/step_time': 1.0})\n"
        "sink.close()\n"
    )
    (tmp_path / "steps.py").write_text(steps)
    cells = [
        "import sys\nfrom slime.run.api import TrainingRun\nfrom pathlib import Path\n"
        "run = TrainingRun(Path('run'))\n"
        "run._start([sys.executable, 'steps.py'], Path('log'))\nrun.wait();",
        "!{sys.executable} steps.py",
    ]
    book = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(cell) for cell in cells])
    resources = {"metadata": {"path": str(tmp_path)}}
    client = NotebookClient(book, timeout=120, kernel_name="python3", resources=resources)
    client.coalesce_streams = True  # as notebooks show them
    client.execute()
    for cell in book.cells:
        (output,) = cell.outputs
        text = output.get("text") or output["data"]["text/plain"]
        assert "step 200/200" in text and "\x1b" not in text
        assert text.count("step 200/200") == 1
    assert book.cells[0].outputs[0].output_type == "display_data"
