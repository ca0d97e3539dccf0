"""The pictures of a run in docs/images, made anew; behind `make demo`:

    python tools/make_pictures.py all outputs/<run>        # the three below
    python tools/make_pictures.py console                  # console.svg: table of a recorded run
    python tools/make_pictures.py chat outputs/<run>       # chat.svg: a conversation with its model
    python tools/make_pictures.py report outputs/<run>     # report.png: top of its report.html
    python tools/make_pictures.py watch TOY SMOLLM2 AGENT  # watch*.png: pages of three run folders

The .png need Chromium (``apt-get install chromium``) and Pillow; elsewhere open the report in a
window of 1280 × 915 and take the picture by hand.
"""

from __future__ import annotations

import argparse
import asyncio
import io
import json
import os
import pty
import re
import select
import subprocess
import sys
import tempfile
import termios
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console, RenderableType
from rich.text import Text

from slime.observe.console import ConsoleSink
from slime.page.report import write_report

ROOT = Path(__file__).parents[1]
IMAGES = ROOT / "docs" / "images"
#: The second stage of a `make demo` on two CPU cores, without the metrics that no picture shows.
RECORDED = ROOT / "docs" / "measurements" / "demo.jsonl"
_COLUMNS = 92
_STEPS_SHOWN = 27
_WINDOW = (1280, 915)
_COLORS = 128
_SECONDS = 120
#: What the demo's model is asked. It knows no more than one question, so each begins anew.
QUESTIONS = ("31+6=", "/reset", "87+4=", "/reset", "52+7=")
_PROMPT = "\n> "


def terminal_svg(content: RenderableType, title: str) -> str:
    """What a terminal would show, as an SVG that loads no font from elsewhere."""
    console = Console(
        file=io.StringIO(),
        record=True,
        width=_COLUMNS,
        force_terminal=True,
        color_system="truecolor",
    )
    console.print(content)
    text = console.export_svg(title=title, unique_id="terminal")
    return re.sub(r"\s*@font-face \{.*?\}", "", text, flags=re.DOTALL).replace(
        "font-family: Fira Code, monospace",
        "font-family: ui-monospace, Menlo, Consolas, DejaVu Sans Mono, monospace",
    )


def console_svg(recorded: Path = RECORDED) -> str:
    """The live table in the middle of a recorded run, while it generates."""
    rows = [json.loads(line) for line in recorded.read_text(encoding="utf-8").splitlines()]
    now = 0.0
    sink = ConsoleSink(
        "demo/grpo", rows[-1]["step"], Console(file=io.StringIO()), clock=lambda: now
    )
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
    sys.path.insert(0, str(ROOT))  # for tests.support
    from benchmarks.browser import NAMES, chromium

    if chromium() is None:
        sys.exit(
            f"none of {', '.join(NAMES)} is installed; open {run_dir}/report.html and take the "
            "picture by hand"
        )
    with tempfile.TemporaryDirectory() as folder:
        page = write_report(run_dir, Path(folder) / "report.html")
        asyncio.run(_photograph({picture: (page.as_uri(), *_WINDOW, False)}))


async def _photograph(pictures: dict[Path, tuple[str, int, int, bool]]) -> None:
    """Picture → address, width and height of the window, whether it is dark; in a browser of its
    own each."""
    from PIL import Image

    from benchmarks.browser import tab

    for picture, (address, width, height, dark) in pictures.items():
        async with tab() as page:
            await page.open(address, width, height, dark)
            await page.until("document.querySelector('figure, .response-text, .group')")
            await page.run(_UNFOLD)
            await asyncio.sleep(1.5)
            await page.picture(picture)
        Image.open(picture).convert("RGB").quantize(_COLORS).save(picture, optimize=True)


def held(command: Sequence[str], questions: Sequence[str], seconds: float = _SECONDS) -> str:
    """What a terminal shows while someone types ``questions`` into ``command``, each at a prompt,
    and leaves.

    Args:
        seconds: of silence, after which the command is killed.
    Raises:
        SystemExit: it was silent for so long, or ended before it was asked everything.
    """
    ours, theirs = pty.openpty()
    settings = termios.tcgetattr(theirs)
    settings[3] &= ~termios.ECHO  # lines that are typed are added below, where they belong
    termios.tcsetattr(theirs, termios.TCSANOW, settings)
    environment = {**os.environ, "TERM": "dumb", "PYTHONPATH": str(ROOT)}
    process = subprocess.Popen(command, stdin=theirs, stdout=theirs, stderr=theirs, env=environment)
    os.close(theirs)
    shown = ""
    left = list(questions)
    said = b""
    try:
        while True:
            if not select.select([ours], [], [], seconds)[0]:
                sys.exit(f"{command[0]} was silent for {seconds:.0f} s; it had shown:\n{shown}")
            try:
                piece = os.read(ours, 4096)
            except OSError:  # a terminal that nobody holds any more
                break
            said += piece
            shown = said.decode("utf-8", "ignore").replace("\r", "")
            if not shown.endswith(_PROMPT):
                continue
            if not left:
                return shown.removesuffix(_PROMPT).rstrip("\n")
            line = left.pop(0)
            os.write(ours, f"{line}\n".encode())
            said += f"{line}\n".encode()
        sys.exit(f"{' '.join(command)} ended too early; it had shown:\n{shown}")
    finally:
        process.terminate()
        process.wait(seconds)
        os.close(ours)


def chat_svg(run_dir: Path) -> str:
    """A conversation with a run's model, as the terminal shows it."""
    command = [sys.executable, "-m", "slime", "chat", str(run_dir), "--temperature", "0"]
    typed = f"$ slime chat {run_dir}\n"
    return terminal_svg(Text.from_ansi(typed + held(command, QUESTIONS)), "slime chat")


#: Picture → which of the three runs, the address after #, width and height of the window, whether
#: it is dark.
WATCHED = {
    "watch": (0, "smooth=0.8", 1400, 900, False),
    "watch-samples": (1, "view=samples&sort=spread", 1400, 620, False),
    "watch-sample": (2, "view=samples&sample=1409", 1400, 760, True),
    "watch-timeline": (2, "view=timeline&step=12", 1400, 900, False),
    "watch-phone": (2, "view=overview", 420, 860, False),
    "watch-phone-samples": (1, "view=samples&sort=spread", 420, 860, False),
}
#: Unfolds the first group of the samples list.
_UNFOLD = "document.querySelector('details.group:not([open])')?.setAttribute('open', '')"


def watch_pngs(folders: Sequence[Path]) -> None:
    """`slime watch` over a toy run, a run of SmolLM2, and an agent's run, in few colors."""
    sys.path.insert(0, str(ROOT))  # for tests.support
    from aiohttp import web

    from slime.page.server import Runs, application
    from slime.processes.host import bind

    async def take() -> None:
        runs = Runs(list(folders))
        runs.look()
        runner = web.AppRunner(application(runs, None))
        await runner.setup()
        listener = bind("127.0.0.1", 0)
        await web.SockSite(runner, listener).start()
        place = f"http://127.0.0.1:{listener.getsockname()[1]}/#"
        newest = {
            watch.path: f"{watch.key}.{watch.stages()[-1].name}" for watch, _ in runs.all().values()
        }
        shots = {
            IMAGES / f"{name}.png": (f"{place}runs={newest[folders[which]]}&{shown}", *rest)
            for name, (which, shown, *rest) in WATCHED.items()
        }
        await _photograph(shots)
        await runner.cleanup()

    asyncio.run(take())


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("picture", choices=["all", "console", "chat", "report", "watch"])
    parser.add_argument(
        "run", nargs="*", type=Path, help="run folders: none for the console, which is recorded"
    )
    options = parser.parse_args(argv)
    if len(options.run) != {"console": 0, "watch": 3}.get(options.picture, 1):
        parser.error(f"{options.picture} takes another number of run folders; see above")
    if options.picture == "watch":
        watch_pngs(options.run)
        return 0
    for name in ("console", "chat", "report") if options.picture == "all" else (options.picture,):
        picture = IMAGES / f"{name}.{'png' if name == 'report' else 'svg'}"
        if name == "report":
            report_png(options.run[0], picture)
        else:
            picture.write_text(
                console_svg() if name == "console" else chat_svg(options.run[0]), encoding="utf-8"
            )
        print(f"{picture}: {picture.stat().st_size / 1000:.0f} kB")
    return 0


if __name__ == "__main__":
    sys.exit(main())
