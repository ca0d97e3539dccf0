r"""Normalise spellings of a formula to one notation, a subset of LaTeX, and split it.

`plain_latex` maps Unicode to LaTeX, drops commands that only change the look (sizes, fonts, spaces,
dollars) and keeps every blank that can carry meaning: ``1 1/2`` is not ``11/2``.
"""

from __future__ import annotations

import re
import unicodedata

_SUPERSCRIPTS = str.maketrans("⁰¹²³⁴⁵⁶⁷⁸⁹⁺⁻⁼⁽⁾ⁿⁱ", "0123456789+-=()ni")
_SUBSCRIPTS = str.maketrans("₀₁₂₃₄₅₆₇₈₉₊₋₌₍₎ₙ", "0123456789+-=()n")
_SUPERSCRIPT = re.compile("[⁰¹²³⁴⁵⁶⁷⁸⁹⁺⁻⁼⁽⁾ⁿⁱ]+")
_SUBSCRIPT = re.compile("[₀₁₂₃₄₅₆₇₈₉₊₋₌₍₎ₙ]+")
_VULGAR = re.compile("[¼½¾⅐-⅞]")

_UNICODE = {
    "−": "-", "‒": "-", "–": "-", "—": "-", "‐": "-", "‑": "-", "﹣": "-", "－": "-",
    "×": r"\times ", "✕": r"\times ", "✖": r"\times ", "·": r"\cdot ", "⋅": r"\cdot ",
    "∙": r"\cdot ", "•": r"\cdot ", "∗": "*", "÷": r"\div ", "∕": "/", "⁄": "/", "／": "/",
    "√": r"\sqrt ", "∛": r"\sqrt[3]", "∜": r"\sqrt[4]",
    "π": r"\pi ", "∞": r"\infty ", "°": r"^\circ ", "º": r"^\circ ", "˚": r"^\circ ",
    "±": r"\pm ", "∓": r"\mp ", "≤": r"\le ", "⩽": r"\le ", "≦": r"\le ", "≥": r"\ge ",
    "⩾": r"\ge ", "≧": r"\ge ", "≠": r"\ne ", "≈": r"\approx ", "≅": r"\approx ", "≃": r"\approx ",
    "∼": r"\approx ", "≡": r"\equiv ", "∪": r"\cup ", "∩": r"\cap ", "∈": r"\in ",
    "∅": r"\emptyset ",
    "ℝ": r"\R ", "ℤ": r"\Z ", "ℕ": r"\N ", "ℚ": r"\Q ", "ℂ": r"\C ", "∖": r"\setminus ",
    "→": r"\to ", "⇒": r"\to ", "⟨": r"\langle ", "⟩": r"\rangle ", "〈": r"\langle ",
    "〉": r"\rangle ", "⌊": r"\lfloor ", "⌋": r"\rfloor ", "⌈": r"\lceil ", "⌉": r"\rceil ",
    "∣": "|", "∶": ":",
    "…": r"\ldots ", "⋯": r"\ldots ", "′": "'", "’": "'", "‘": "'", "“": '"', "”": '"',
    "α": r"\alpha ", "β": r"\beta ", "γ": r"\gamma ", "δ": r"\delta ", "ε": r"\epsilon ",
    "θ": r"\theta ", "λ": r"\lambda ", "σ": r"\sigma ", "φ": r"\phi ", "ω": r"\omega ",
    "ρ": r"\rho ", "τ": r"\tau ", "Δ": r"\Delta ", "Ω": r"\Omega ", "△": r"\triangle ",
    "∠": r"\angle ", "∑": r"\sum ", "∫": r"\int ", "∧": r"\land ", "∨": r"\lor ", "㎝": "cm",
    "、": ",", "。": ".", "\u200b": "", "\ufeff": "", "\u2060": "", "\u2061": "",
}  # fmt: skip
_TABLE = str.maketrans(_UNICODE)

_SPACES = re.compile(
    r"\\(?:[,;:>\s]|quad\b|qquad\b|enspace\b|enskip\b|thinspace\b|medspace\b|thickspace\b|"
    r"hspace\*?\{[^}]*\}|"
    r"hfill\b|hskip\b|space\b)|(?<!\\)~"
)
_LOOK = re.compile(
    r"\\(?:displaystyle|textstyle|scriptstyle|limits|nolimits|left(?![a-z])|right(?![a-z])|"
    r"[bB]igg?[lrm]?(?![a-z])|"
    r"middle|boxed(?=\s*$)|mathstrut|strut|checkmark|blacksquare|qed(?:here)?|,|!|/)\.?"
    r"|\\(?:phantom|vphantom|hphantom|label|tag\*?|color)\{[^{}]*\}"
)
_DELIMITERS = re.compile(r"\$\$?|\\\(|\\\)|\\\[|\\\](?!\w)")
_TEXT = re.compile(
    r"\\(?:text|textbf|textit|textrm|textsf|texttt|textup|textnormal|textsc|emph|mbox|hbox|mathrm|"
    r"mathbf|mathit|"
    r"mathsf|mathtt|mathnormal|boldsymbol|bm|bold|operatorname\*?|underline|underbrace|fbox|boxed|"
    r"pmb|rm|bf|it)"
    r"\s*\{([^{}]*)\}"
)
_OLD_FONT = re.compile(r"\\(?:rm|bf|it|sf|tt|bfseries|itshape|mathrm|mathbf|text)\b\s*")
_SETS = re.compile(r"\\(?:mathbb|mathbf|Bbb)\s*\{?\s*([RZNQC])\s*\}?")
_RENAMED = {
    "dfrac": "frac", "tfrac": "frac", "cfrac": "frac", "nicefrac": "frac", "sfrac": "frac",
    "dbinom": "binom", "tbinom": "binom", "leq": "le", "leqslant": "le", "geq": "ge",
    "geqslant": "ge", "neq": "ne", "nless": "ge", "ngtr": "le",
    "nleq": ">", "ngeq": "<", "lt": "<", "gt": ">", "varnothing": "emptyset", "lbrace": r"\{",
    "rbrace": r"\}", "lbrack": "[", "rbrack": "]", "lparen": "(", "rparen": ")", "lvert": "|",
    "rvert": "|", "vert": "|", "mid": "|",
    "degree": r"^\circ ", "degrees": r"^\circ ", "textdegree": r"^\circ ", "celsius": r"^\circ C",
    "dots": "ldots", "cdots": "ldots", "dotsc": "ldots", "ast": "*", "star": "*", "colon": ":",
    "simeq": "approx", "sim": "approx", "cong": "approx", "thickapprox": "approx",
    "approxeq": "approx", "rightarrow": "to", "Rightarrow": "to", "implies": "to",
    "varepsilon": "epsilon", "varphi": "phi", "vartheta": "theta", "bmod": "mod", "lor": " or ",
    "vee": " or ", "land": " and ", "wedge": " and ", "imath": "i", "jmath": "j",
    "backslash": r"\setminus ", "smallsetminus": r"\setminus ", "textdollar": r"\$ ",
    "overrightarrow": "vec", "pounds": "£", "euro": "€", "arcsin": "arcsin", "reals": "R",
    "complement": "c",
}  # fmt: skip
#: A colon in braces, and a LaTeX space written as the colon of a ratio: 3\:2.
_COLON = re.compile(r"\{:\}|\\(?:math(?:bin|rel|punct)|text)\{ ?: ?\}|(?<=\d)\\:(?=\d{1,2}(?!\d))")
_COLOUR = re.compile(r"\\(?:text)?color(?:box)?\s*\{[^{}]*\}")
_SHAPE = re.compile(r"\\(triangle|angle)\s*\{\s*([A-Z]{1,4})\s*\}")
#: "All reals but" written with a minus.
_MINUS_SET = re.compile(r"(\\R|[)\]]) *- *(?=\\\{)")
_ROOT_OF = re.compile(r"\\root\s*(?:\{([^{}]*)\}|(\w))\s*\\of(?![A-Za-z])")
_CHOOSE = re.compile(r"\{ ?([^{}\\]{1,40}?) ?\\choose(?![A-Za-z]) ?([^{}\\]{1,40}?) ?\}")
_OVER = re.compile(r"\{ ?([^{}]{1,80}?) ?\\over(?![A-Za-z]) ?([^{}]{1,80}?) ?\}")
#: The letter o in place of the degree sign.
_DEGREE_LETTER = re.compile(r"(?<=\d)\s?\^\s?(?:\{\s?o\s?\}|o(?![A-Za-z]))")
_OPPOSITES = {
    "=": r"\ne", "<": r"\ge", ">": r"\le", r"\le": ">", r"\leq": ">", r"\ge": "<", r"\geq": "<",
}  # fmt: skip
_NEGATED = re.compile(r"\\not\s*(=|<|>|\\[lg]eq?)(?![A-Za-z])")
_COMMAND = re.compile(r"\\([A-Za-z]+)")
_ONLY_LETTERS = re.compile(r"[A-Za-z]+")


def plain_latex(text: str) -> str:
    r"""Return the formula in the common notation.

    Example:
        >>> plain_latex(r"$\dfrac{1}{2}\,\text{cm}^{3}$.")
        '\\frac{1}{2} cm^{3}'
        >>> plain_latex("3½ × 10⁻²")
        '3\\frac{1}{2} \\times 10^{-2}'
    """
    if not text.isascii():
        text = _ascii(text)
    if "\\" in text or "$" in text or "~" in text:
        text = _without_looks(text)
    text = text.replace("{:}", ":") if "{:}" in text else text
    text = _DEGREE_LETTER.sub(r"^\\circ", text)
    text = re.sub(r"^\*\*|\*\*$|(?<=[.:,])\*\*", "", text.strip(" \t\n`")).strip(" \t\n`")
    text = re.sub(r"(?<=\d)\.{3,4}$", r"\\ldots", text)
    text = re.sub(r"(?<=\d)['_](?=\d{3}(?!\d))", "", text)  # 1'000, 1_000
    text = re.sub(r"\{,\}", ",,", text)  # a comma that cannot separate: `\d,,\d` is taken out below
    text = re.sub(r"(?<=\d),,(?=\d)", "", text).replace(",,", ",")
    text = re.sub(r"\s+", " ", text).strip()
    text = re.sub(r" *([_^]) *", r"\1", text)
    text = text.rstrip(".,;:? ").removesuffix("\\\\").removesuffix("\\").rstrip()
    return re.sub(r"(?<=[A-Za-z]{2})!+$", "", text).rstrip(".,;: ")


def _ascii(text: str) -> str:
    text = text.replace("\u2009", " ").replace("\u202f", " ").replace("\u00a0", " ")
    text = _VULGAR.sub(lambda found: _fraction_of(found[0]), text)
    text = _SUPERSCRIPT.sub(lambda found: "^{" + found[0].translate(_SUPERSCRIPTS) + "}", text)
    text = _SUBSCRIPT.sub(lambda found: "_{" + found[0].translate(_SUBSCRIPTS) + "}", text)
    text = re.sub("̅|̄", "", text) if not re.search("\\d[̅̄]", text) else _overlined(text)
    text = text.translate(_TABLE)
    return unicodedata.normalize("NFKC", text).replace("−", "-")


def _fraction_of(sign: str) -> str:
    top, _, bottom = unicodedata.normalize("NFKC", sign).partition("⁄")
    return rf"\frac{{{top}}}{{{bottom}}}"


def _overlined(text: str) -> str:
    return re.sub(
        r"((?:\d[̅̄])+)", lambda found: r"\overline{" + re.sub("[̅̄]", "", found[0]) + "}", text
    )


def _without_looks(text: str) -> str:
    if text.count("$") == 1:
        text = re.sub(r"(?<!\\)\$(?= ?[\d.])", r"\\$", text)  # an amount, not a formula
    text = text.replace(r"\$", "\x00").replace("\\\\", "\x01")
    text = re.sub(
        r"\\begin\{(?:equation|align|aligned|gathered|split)\*?\}|"
        r"\\end\{(?:equation|align|aligned|gathered|split)\*?\}",
        " ",
        text,
    )
    text = _DELIMITERS.sub("", text)
    text = _COLON.sub(":", text)
    text = _COLOUR.sub("", text)
    text = _SHAPE.sub(r"\\\1 \2", text)
    text = _CHOOSE.sub(r"\\binom{\1}{\2}", text)
    text = _OVER.sub(r"\\frac{\1}{\2}", text)
    text = _ROOT_OF.sub(lambda found: rf"\sqrt[{found[1] or found[2]}]", text)
    text = re.sub(r",\s*\\[!,]\s*(?=\d{3}(?!\d))", "{,}", text)  # 1,\!000
    text = re.sub(r"(?<=\d)\\[,!;: ](?=\d{3}(?!\d))", "{,}", text)  # 1\,000
    text = text.replace(r"\!", "")
    text = _SPACES.sub(" ", text)
    text = _LOOK.sub("", text)
    text = _SETS.sub(r"\\\1 ", text)
    for _ in range(4):  # fonts in fonts
        text, count = _TEXT.subn(_words, text)
        if not count:
            break
    text = _OLD_FONT.sub(" ", text)
    text = _NEGATED.sub(lambda found: _OPPOSITES[found[1]] + " ", text)
    text = _COMMAND.sub(_renamed, text)
    text = text.replace(r"\%", "%").replace(r"\#", "#").replace(r"\&", " and ").replace(r"\_", "_")
    text = _MINUS_SET.sub(r"\1 \\setminus ", text)
    return text.replace("\x01", r"\\").replace("\x00", r"\$")


def _words(found: re.Match[str]) -> str:
    return f" {found[1]} " if found[1] else ""


def _renamed(found: re.Match[str]) -> str:
    new = _RENAMED.get(found[1])
    if new is None:
        return found[0]
    return "\\" + new if _ONLY_LETTERS.fullmatch(new) and new not in "cij" else new


_PAIRS = {"(": ")", "[": "]", "{": "}"}


def split_top(text: str, separator: re.Pattern[str]) -> tuple[list[str], list[str]]:
    r"""Split where ``separator`` matches outside of all brackets.

    Returns:
        The parts, and the separators between them.

    Example:
        >>> split_top(r"(1,2),\frac{1,5}{2}", re.compile(","))
        (['(1,2)', '\\frac{1,5}{2}'], [','])
    """
    if not separator.search(text):
        return [text], []
    parts = []
    separators = []
    depth = 0
    start = position = 0
    while position < len(text):
        found = separator.match(text, position) if depth == 0 else None
        if found and found.end() > position:
            parts.append(text[start:position])
            separators.append(found[0])
            start = position = found.end()
            continue
        character = text[position]
        if character == "\\":
            step = re.compile(r"\\(?:[A-Za-z]+|.|$)", re.S).match(text, position)
            assert step is not None
            depth += _NESTING.get(step[0], 0)
            position = step.end()
            continue
        depth += 1 if character in "([{" else -1 if character in ")]}" else 0
        depth = max(depth, 0)
        position += 1
    parts.append(text[start:])
    return parts, separators


_NESTING = {
    r"\{": 1, r"\}": -1, r"\langle": 1, r"\rangle": -1, r"\lfloor": 1, r"\rfloor": -1,
    r"\lceil": 1, r"\rceil": -1, r"\begin": 1, r"\end": -1,
}  # fmt: skip


def enclosed(text: str) -> tuple[str, str, str] | None:
    r"""Return (opening bracket, content, closing bracket) if one pair of brackets encloses the
    whole text; else None.

    Example:
        >>> enclosed(r"\{1, 2\}"), enclosed("(1)(2)"), enclosed("[1, 2)")
        (('\\{', '1, 2', '\\}'), None, ('[', '1, 2', ')'))
    """
    opening = re.match(r"\\\{|\\langle\b|[(\[{\]]", text)
    closing = re.search(r"(\\\}|\\rangle|[)\]}\[])$", text)
    if not opening or not closing or closing.start() < opening.end():
        return None
    left = opening[0]
    right = closing[0]
    families = ((r"\{", r"\}"), (r"\langle", r"\rangle"), ("{", "}"))
    if not ((left, right) in families or (left in "([]" and right in ")][")):
        return None
    inner = text[opening.end() : closing.start()]
    depth = 0
    for step in re.finditer(r"\\[A-Za-z]+|\\.|[()\[\]{}]", inner):
        depth += _NESTING.get(step[0], 1 if step[0] in "([{" else -1 if step[0] in ")]}" else 0)
        if depth < 0:
            return None
    return (left, inner.strip(), right) if depth == 0 else None
