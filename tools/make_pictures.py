"""The pictures of docs/images, made anew.

    python tools/make_pictures.py console                     # console.svg: the live table over a recorded run
    python tools/make_pictures.py report outputs/<run>        # report.png: the first screen of its report.html
    python tools/make_pictures.py chat session.txt            # chat.svg: a terminal session

A session is recorded by ``script --quiet --command 'slime chat outputs/<run>' session.txt`` (without the first and last
line that `script` adds). report.png needs Chromium (``apt-get install chromium``) and Pillow; elsewhere open the report
in a window of 1280 × 915 and take the picture by hand.
"""

from __future__ import annotations

import argparse
import io
import json
import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

from rich.console import Console, RenderableType
from rich.text import Text

from slime.observe.console import ConsoleSink
from slime.observe.report import write_report

ROOT = Path(__file__).parents[1]
IMAGES = ROOT / "docs" / "images"
#: The second stage of a `make demo` on two CPU cores, without the metrics that no picture shows.
RECORDED = ROOT / "docs" / "measurements" / "demo.jsonl"
_COLUMNS, _STEPS_SHOWN = 92, 27
_WINDOW = (1280, 915)
_BROWSERS = ("chromium", "chromium-browser", "google-chrome", "chrome")
_SECONDS = 120


def terminal_svg(content: RenderableType, title: str) -> str:
    """What a terminal would show, as an SVG that loads no font from elsewhere."""
    console = Console(file=io.StringIO(), record=True, width=_COLUMNS, force_terminal=True, color_system="truecolor")
    console.print(content)
    text = console.export_svg(title=title, unique_id="terminal")
    return re.sub(r"\s*@font-face \{.*?\}", "", text, flags=re.DOTALL).replace(
        "font-family: Fira Code, monospace", "font-family: ui-monospace, Menlo, Consolas, DejaVu Sans Mono, monospace"
    )


def console_svg(recorded: Path = RECORDED) -> str:
    """The live table in the middle of a recorded run, while it generates."""
    rows = [json.loads(line) for line in recorded.read_text(encoding="utf-8").splitlines()]
    now = 0.0
    sink = ConsoleSink("demo/grpo", rows[-1]["step"], Console(file=io.StringIO()), clock=lambda: now)
    for row in rows[:_STEPS_SHOWN]:
        sink.log(row["step"], {name: value for name, value in row.items() if name != "step"})
    sink.phase_changed("rollout")
    sink.progress({"done": 17, "target": 32, "tokens": 412})
    now = 0.4
    return terminal_svg(sink.render(), "make demo")


def report_png(run_dir: Path, picture: Path) -> None:
    """The first screen of a run's report, in few colours.

    Raises:
        SystemExit: there is no Chromium.
    """
    from PIL import Image

    browser = next(filter(None, map(shutil.which, _BROWSERS)), None)
    if browser is None:
        sys.exit(
            f"none of {', '.join(_BROWSERS)} is installed; open {run_dir}/report.html and take the picture by hand"
        )
    with tempfile.TemporaryDirectory() as folder:
        page, shot = Path(folder) / "report.html", Path(folder) / "report.png"
        write_report(run_dir, page)
        options = [
            "--headless",
            "--no-sandbox",
            "--disable-gpu",
            "--hide-scrollbars",
            f"--user-data-dir={folder}/profile",
        ]
        size = f"--window-size={_WINDOW[0]},{_WINDOW[1]}"
        command = [browser, *options, size, f"--screenshot={shot}", page.as_uri()]
        subprocess.run(command, check=True, timeout=_SECONDS, capture_output=True)
        Image.open(shot).convert("RGB").quantize(64).save(picture, optimize=True)


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("picture", choices=["console", "report", "chat"])
    parser.add_argument("source", nargs="?", type=Path, help="the run folder, or the recorded session")
    options = parser.parse_args(argv)
    if options.source is None and options.picture != "console":
        parser.error(f"{options.picture} needs a source")
    picture = IMAGES / f"{options.picture}.{'png' if options.picture == 'report' else 'svg'}"
    if options.picture == "report":
        report_png(options.source, picture)
    elif options.picture == "console":
        picture.write_text(console_svg(options.source or RECORDED), encoding="utf-8")
    else:
        session = Text.from_ansi(options.source.read_text(encoding="utf-8").strip("\n"))
        picture.write_text(terminal_svg(session, "slime chat"), encoding="utf-8")
    print(f"{picture}: {picture.stat().st_size / 1000:.0f} kB")
    return 0


if __name__ == "__main__":
    sys.exit(main())
