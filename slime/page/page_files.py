"""The page's files: separate files for the server of `slime watch`, or one self-contained file for
a report."""

from __future__ import annotations

import base64
import functools
import hashlib
import html
import importlib.resources
import re

PAGE = importlib.resources.files("slime.page").joinpath("static")

#: The scripts; each imports only earlier ones.
_MODULES = (
    "dom", "frozen", "store", "charts", "timeline", "engines", "tokens", "samples", "settings",
    "overview", "main",
)  # fmt: skip
_IMPORT = re.compile(r'^import \{ (.+) \} from "/(\w+)\.js";$', re.MULTILINE)
_EXPORT = re.compile(r"^export ((?:async function|function|const|class) (\w+))", re.MULTILINE)


def one_file(title: str, words: str, data: bytes, *, is_live: bool = False) -> str:
    """Return the page with its data, as a file that needs no server and no network.

    The policy allows the script by its digest, and nothing else can run: base64 of ``data`` has no
    ``<``, and the page inserts data only as text.

    Args:
        title: title of the window.
        words: HTML that is shown if the script does not run.
        data: what `frozen.js` reads: JSON, compressed with gzip.
        is_live: the file will be rewritten, and the page reloads itself.
    """
    script, style, frame = _parts()
    policy = (
        f"default-src 'none'; script-src {_digest(script)}; style-src {_digest(style)}; img-src "
        "data:"
    )
    policy += "; base-uri 'none'; form-action 'none'"
    for place, text in (
        ('<html lang="en">', '<html lang="en" data-live>' if is_live else '<html lang="en">'),
        ("<!-- policy -->", f'<meta http-equiv="Content-Security-Policy" content="{policy}">'),
        ("<title>slime watch</title>", f"<title>{html.escape(title)} · slime</title>"),
        ("<strong>slime watch</strong>", "<strong>slime report</strong>"),
        ("<!-- style -->", f"<style>{style}</style>"),
        ("<!-- script -->", f'<script type="module">{script}</script>'),
        ("<!-- words -->", words),
        (
            "<!-- data -->",
            f'<script type="text/plain" id="data">{base64.b64encode(data).decode()}</script>',
        ),
    ):
        before, found, after = frame.partition(place)
        assert found, place
        frame = f"{before}{text}{after}"
    return frame


def _digest(text: str) -> str:
    return f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'"


def _read(name: str) -> str:
    return PAGE.joinpath(name).read_text(encoding="utf-8")


@functools.cache
def _parts() -> tuple[str, str, str]:
    """Return the modules as one script, the styles, and index.html with places to put them in."""
    script = "\n".join(_as_value(name, _read(f"{name}.js")) for name in _MODULES)
    frame = _read("index.html")
    assert not re.search(r"</?script|<!--", script, re.IGNORECASE)
    styles = re.findall(r'<link rel="stylesheet" href="/(\w+\.css)">\n?', frame)
    frame = re.sub(r'<link rel="stylesheet".*?>\n?', "", frame)
    frame = frame.replace(
        '<script type="module" src="/main.js"></script>',
        "<!-- policy --><!-- style --><!-- script -->",
    )
    frame = frame.replace('<p class="none">Loading …</p>', "<!-- words -->")
    return script, "".join(map(_read, styles)), frame.replace("</body>", "<!-- data --></body>")


def _as_value(name: str, module: str) -> str:
    """Wrap a module into a constant with its exports, so that its private names do not collide with
    those of other modules."""
    exported = ", ".join(match[2] for match in _EXPORT.finditer(module))
    inner = _EXPORT.sub(r"\1", _IMPORT.sub(r"const { \1 } = $\2;", module))
    assert not re.search(r"^(?:import|export)\b", inner, re.MULTILINE), (
        f"{name}.js imports or exports in another way"
    )
    return f"const ${name} = (() => {{\n{inner}\nreturn {{ {exported} }};\n}})();"
