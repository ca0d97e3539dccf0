r"""Parse the final answer of a mathematical problem into its structure, and compare it with a
label.

An answer is a number (with a unit, a percent sign, a base), an expression, a list, a set, a tuple,
an interval, a union, a matrix, an equation or inequality, a ratio, a time, a date or words.
`same_answer` decides by that structure; docs/rewards.md has the rules. It returns None for notation
that it cannot read.
"""

from __future__ import annotations

import functools
import math
import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from decimal import Decimal
from fractions import Fraction
from typing import Any

from slime.rollout.rewards.math_notation import enclosed, plain_latex, split_top
from slime.rollout.rewards.math_values import (
    Node,
    NotMath,
    TooBig,
    Undefined,
    as_float,
    contains,
    equal,
    number_of,
    proportional,
    ratio_at,
    read_expression,
    replaced,
    symbols_of,
)
from slime.rollout.rewards.measures import UNSPACED, Unit, read_unit

#: Longer answers are compared as text.
_MAX_ANSWER = 3000
_MAX_ITEMS = 200
#: Digits from which a decimal counts as an approximation of the exact label …
_APPROXIMATE_DIGITS = 6
#: … and digits from which an exact answer matches a decimal label.
_LABEL_DIGITS = 3


# -- what an answer may be -------------------------------------------------------------------------


@dataclass(frozen=True)
class Quantity:
    """A number or expression, perhaps with a unit.

    Attributes:
        decimal: (value, size of the last digit, significant digits) of a written decimal.
        glued: the reading of "12m" as 12 metres; the node is then 12 · m.
    """

    text: str
    node: Node
    unit: Unit | None = None
    percent: bool = False
    decimal: tuple[Fraction, Fraction, int] | None = None
    glued: Quantity | None = field(default=None, compare=False)


@dataclass(frozen=True)
class Sequence_:
    r"""Several answers. Brackets: "" for a plain list, ``\{`` for a set, else as in tuples and
    intervals."""

    opening: str
    items: tuple[Any, ...]
    closing: str


@dataclass(frozen=True)
class Union_:
    parts: tuple[Any, ...]
    operator: str


@dataclass(frozen=True)
class MathMatrix:
    rows: tuple[tuple[Any, ...], ...]
    kind: str


@dataclass(frozen=True)
class Relation:
    r"""A chain such as a < b <= c; there is one sign fewer than sides. ``is_bare``: it began with
    its sign, and its first side is `_ANYTHING`."""

    sides: tuple[Any, ...]
    signs: tuple[str, ...]
    text: str
    is_bare: bool = field(default=False, compare=False)


@dataclass(frozen=True)
class Ratio:
    parts: tuple[Any, ...]
    clock: ClockTime | None


@dataclass(frozen=True)
class ClockTime:
    """A time of day; ``has_half`` if it says a.m. or p.m."""

    seconds: int
    has_half: bool


@dataclass(frozen=True)
class Date:
    month: int
    day: int | None
    year: int | None


@dataclass(frozen=True)
class Based:
    """Digits in a base; ``is_literal`` for 0x2A, a number whose base needs no words."""

    digits: str
    base: int
    is_literal: bool = False


@dataclass(frozen=True)
class Congruence:
    """Numbers that leave ``residue`` (perhaps a list) on division by ``modulus``. ``name`` may be
    empty."""

    name: str
    residue: Any
    modulus: Any


@dataclass(frozen=True)
class Family:
    """One answer for every integer k: π/4 + kπ. ``body`` calls the parameter `_PARAMETER`."""

    body: Any
    parameter: str


@dataclass(frozen=True)
class Choice:
    """A letter followed by the text of the choice: "(C) 12"."""

    letter: str
    rest: Any


@dataclass(frozen=True)
class Words:
    text: str
    words: str


@dataclass(frozen=True)
class Opaque:
    """Mathematics that this module does not read (sums, integrals, conditions)."""

    text: str


# -- reading ---------------------------------------------------------------------------------------

_COMMAS = re.compile(
    r"\s*[,;]\s*(?:\\ )?(?:and\b|or\b)?\s*|\s+(?:and|or)\s+|\s*\\text\{\s*(?:and|or)\s*\}\s*"
)
_ONLY_COMMA = re.compile(r"\s*[,;]\s*")
_CUPS = re.compile(
    r"\s*\\(?:cup|cap|setminus)(?![A-Za-z])\s*|\s+U\s+|(?<=[)\]}])\s*U\s*(?=[(\[\\])"
)
_SIGNS = re.compile(
    r"\s*(\\le(?![A-Za-z])|\\ge(?![A-Za-z])|\\ne(?![A-Za-z])|\\approx(?![A-Za-z])|"
    r"\\equiv(?![A-Za-z])|\\in(?![A-Za-z])|"
    r"\\to(?![A-Za-z])|<=|>=|!=|==|=|<|>)\s*"
)
_SIGN_NAMES = {"<=": r"\le", ">=": r"\ge", "!=": r"\ne", "==": "="}
_COLON = re.compile(r"\s*:\s*")
_MATRIX = re.compile(
    r"\\begin\{([pbBvV]?matrix|smallmatrix|array|cases)\}(?:\{[^}]*\})?(.*)\\end\{\1\}", re.S
)
_THOUSANDS = re.compile(r"[-+]?[1-9]\d{0,2}(?:,\d{3})+(?:\.\d+)?")
_SET_BUILDER = re.compile(r"[A-Za-z]+ ?(?:\\in ?\\R ?)?(?:\||:)(.+)", re.S)
_COMPOUND = re.compile(
    r"(\d+(?:\.\d*)?) ?([A-Za-z]+)\.?(?:,? and|,)? +(\d+(?:\.\d*)?) ?([A-Za-z]+)\.?"
    r"(?:(?:,? and|,)? +(\d+(?:\.\d*)?) ?([A-Za-z]+)\.?)?"
)
_HEDGE = re.compile(
    r"(?i)\A(?:~|(?:the )?(?:final |correct )?answer(?: "
    r"is|:)|approximately|approx\.?|about|around|roughly|exactly|"
    r"nearly|either|=|\\approx) *(?=[-+\d\\.$])"
)
_HEDGED = re.compile(
    r"(?i) *\((?:approx(?:imately|\.)?|exact(?:ly)?|about|rounded[^()]{0,40}|"
    r"to [^()]{0,40}(?:places?|figures?|digits?)|"
    r"nearest [^()]{0,30})\)\Z"
)
#: What makes a number a bound or denies it: the sign, words before the number, words behind it.
_LIMITS = (
    (
        r"\ge",
        r"at (?:the )?least|(?:no|not) (?:less|fewer|smaller|lower) than|a minimum of|"
        r"(?:greater|more|larger|bigger|higher) than or equal to",
        r"(?:or|and) (?:more|greater|larger|higher|above|over)",
    ),
    (
        r"\le",
        r"at (?:the )?most|(?:no|not) (?:more|greater|larger|bigger|higher) than|a maximum of|"
        r"(?<!round )(?<!rounds )(?<!rounded )(?<!add )(?<!adds )(?<!sums )(?<!comes )up to|"
        r"(?:less|fewer|smaller|lower) than or equal to",
        r"(?:or|and) (?:less|fewer|smaller|lower|below|under)",
    ),
    (">", r"(?:more|greater|larger|bigger|higher) than|(?<![\d)}] )over|above|exceeding", "(?!)"),
    ("<", r"(?:less|fewer|smaller|lower) than|under|below", "(?!)"),
    (r"\ne", r"not(?: equal to)?|anything (?:but|except)|other than", "(?!)"),
)
_BEFORE = "|".join(before for _, before, _ in _LIMITS)
_BEHIND = "|".join(behind for *_, behind in _LIMITS)
_VALUE = r"(?P<value>[-+\d\\.$(].*?)"
_LIMIT = re.compile(
    rf"(?i)(?:(?P<name>[a-z]) (?:is|are|(?:must|can|should) be) )?(?P<before>{_BEFORE}) {_VALUE}"
    rf"|(?P<value2>[-+\d\\.$(].*?) (?P<behind>{_BEHIND})",
    re.S,
)
#: Text that ends with words or a sign before a number, and text that begins with words behind it.
LIMIT_BEFORE = re.compile(
    rf"(?i)(?:\b(?:{_BEFORE}|negative|(?<![\d)$] )minus) +|"
    r"(?:[≤≥≠]|(?<!\S)[<>]|\\(?:[lg]eq?|neq?)\b) *)\Z"
)
LIMIT_BEHIND = re.compile(rf"(?i) +(?:{_BEHIND})\b")
_MINUS = re.compile(r"(?i)\A(?:minus|negative) +(?=[\d.\\$])")
#: What an answer is not: "not 5 but" before it, "rather than 5" behind it.
_CONTRAST = re.compile(
    r"(?i)\Anot .{1,60}?,? but (?:rather |instead )?(?=[-+\d\\.$(])"
    r"|(?<=[\d)}]),? (?:rather than|instead of) [^ ]{1,30}\Z"
)
_UNIT_IN_BRACKETS = re.compile(r"([-+]?[\d.,]*\d) *\( *([A-Za-z]{2}[^()]{0,30})\)")
_LITERAL = re.compile(r"0(?:[xX]([0-9A-Fa-f]+)|[bB]([01]+)|[oO]([0-7]+))")
_MINUTES_OF_ARC = re.compile(
    r"([-+]?)(\d+)\^ ?\{? ?\\circ ?\}? ?(\d+(?:\.\d+)?) ?(?:'|\^ ?\{? ?\\prime ?\}?) ?"
    r"(?:(\d+(?:\.\d+)?) ?(?:''|\"|\^ ?\{? ?\\prime ?\\prime ?\}?))?"
)
_MODULO = re.compile(
    r"\A(?:(?P<name>[^=]{1,40}?) ?\\equiv ?)?(?P<residue>(?:(?!mod|\\equiv)[^()]){1,200}?) ?"
    r"(?:\( ?\\?p?mod(?:ulo)? ?(?P<m1>[^()]{1,40})\)|\\pmod "
    r"?(?:\{(?P<m2>[^{}]{1,40})\}|(?P<m3>\w))|"
    r"(?P<operator>\\mod|,? ?mod) ?(?:\{(?P<m4>[^{}]{1,40})\}|(?P<m5>\w+)))\Z"
)
_INTEGERS = r"(?:any |all |every |some |an |arbitrary |each )*(?:integers?|whole numbers?)"
_FOR_INTEGERS = re.compile(
    rf"\A(?P<body>.{{1,400}}?) ?[,;]? ?\(? ?(?:(?:where|for|with|and) "
    r")?(?:(?:any|all|every|some|each) )?"
    r"(?:(?P<p1>[a-zA-Z]) ?\\in ?\\Z|(?P<p2>[a-zA-Z]) (?:is|are|being|=) "
    rf"{_INTEGERS}|(?P<p3>[a-zA-Z]) an integer|"
    rf"{_INTEGERS} (?P<p4>[a-zA-Z])) ?\)?\Z"
)
#: The common name for the parameter of a family.
_PARAMETER = "k_{Z}"
_POINT = re.compile(r"[A-Z]'? ?(\(.+\))", re.S)
_EXCEPT = re.compile(
    r"(?i)(?:[a-z] ?(?:\\in|is|can be) )?(?:all|any|every) (?:real "
    r")?(?:numbers?|reals?|values?)(?: of)?(?: [a-z])?"
    r"(?: (?:except|but|other than|excluding)(?: for)?|, ?[a-z] ?\\ne) (?:[a-z] ?= ?)?(.+)"
)
_CHOICE = re.compile(r"(?:\(([A-J])\)|([A-J])[.):]) +(.+)", re.S)
_CURRENCY = re.compile(
    r"([-+]?)\s*(?:(?:US|USD|A|C)?\s*(\\\$|[$€£¥₹])|(USD|EUR|GBP|Rs\.?)(?=\s*\d))\s*(.+)", re.S
)
_PERCENT = re.compile(
    r"(.+?)\s*(?:\\?%|\bpercent(?:age)?s?\b(?: points?\b)?|\bpct\b|\bper cent\b)", re.S | re.I
)
_BASE = re.compile(
    r"\(?\s*([0-9A-Fa-f]+(?:\.[0-9A-Fa-f]+)?)\s*\)?_\s*(?:\{?\s*\(?\s*(?:(\d{1,2})|"
    r"([a-z]+))\s*\)?\s*\}?)"
)
_IN_BASE = re.compile(r"([0-9A-Fa-f]+)\s*(?:\(?\s*(?:in\s+)?base\s*[- ]?\s*(\d{1,2}|[a-z]+)\s*\)?)")
_BASES = {
    "two": 2, "three": 3, "four": 4, "five": 5, "six": 6, "seven": 7, "eight": 8, "nine": 9,
    "ten": 10, "eleven": 11, "twelve": 12, "sixteen": 16, "hex": 16, "binary": 2, "octal": 8,
}  # fmt: skip
_CLOCK = re.compile(
    r"(\d{1,2})(?::(\d{2})(?::(\d{2}))?)?\s*([ap])\.?\s?m\.?|"
    r"(\d{1,2}):(\d{2})(?::(\d{2}))?(?:\s*o'clock)?",
    re.I,
)
_MONTHS = [
    "january", "february", "march", "april", "may", "june", "july", "august", "september",
    "october", "november", "december"
]  # fmt: skip
_DATE = re.compile(
    r"(?:\w+day,? )?(?:(?P<m1>[A-Za-z]{3,9})\.? (?P<d1>\d{1,2})(?:st|nd|rd|th)?(?:,? "
    r"(?P<y1>\d{4}))?|"
    r"(?:the )?(?P<d2>\d{1,2})(?:st|nd|rd|th)?(?: of)? (?P<m2>[A-Za-z]{3,9})\.?(?:,? "
    r"(?P<y2>\d{4}))?|"
    r"(?P<m3>[A-Za-z]{3,9})\.?,? (?P<y3>\d{4})|(?P<y4>\d{4})[-/](?P<m4>\d{1,2})[-/](?P<d4>\d{1,2}))"
)
_ORDINAL = re.compile(r"(\d+)(?:\^?\{?\s*\\?(?:st|nd|rd|th)\s*\}?)")
_MULTIPLES = {
    "hundred": 100, "thousand": 1000, "million": 10**6, "billion": 10**9, "trillion": 10**12,
    "dozen": 12,
}  # fmt: skip
_MULTIPLE = re.compile(
    r"(.*[\d})])\s*(hundred|thousand|million|billion|trillion|dozen)\b(.*)", re.S
)
_NUMBER_WORDS = {word: number for number, word in enumerate([
    "zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten",
    "eleven", "twelve", "thirteen", "fourteen", "fifteen", "sixteen", "seventeen", "eighteen",
    "nineteen", "twenty",
])}  # fmt: skip
_TENS = {word: 10 * number for number, word in enumerate([
    "twenty", "thirty", "forty", "fifty", "sixty", "seventy", "eighty", "ninety",
], 2)}  # fmt: skip
_SPELLED = "|".join([*_NUMBER_WORDS, *_TENS, "hundred", "thousand", "million", "billion"])
#: A number in words within prose; "one" alone is rarely a number.
SPELLED_NUMBER = re.compile(
    rf"(?i)\b(?!(?:one|zero)\b(?![ -](?:hundred|thousand|million)))"
    rf"(?:{_SPELLED})(?:(?:[ -]|,? and )(?:{_SPELLED}))*\b"
)
_PARTS = {
    "half": 2, "third": 3, "quarter": 4, "fourth": 4, "fifth": 5, "sixth": 6, "seventh": 7,
    "eighth": 8, "ninth": 9, "tenth": 10,
}  # fmt: skip
_SAME_WORDS = (
    ("no solution", "no solutions", "no real solution", "no real solutions", "empty set",
     "\\emptyset", "none", "no such number exists", "nosolution"),
    ("does not exist", "dne", "doesn't exist", "limit does not exist"),
    ("all real numbers", "all reals", "\\r", "(-\\infty,\\infty)", "real numbers",
     "any real number", "all real number", "every real number"),
    ("undefined", "not defined"),
    ("yes", "true"), ("no", "false"),
)  # fmt: skip
_CANONICAL_WORDS = {word: words[0] for words in _SAME_WORDS for word in words}
_DECIMAL = re.compile(
    r"([-+]?)(\d{1,3}(?:,\d{3})+|\d*)\.(\d+)(?: ?(?:\\times|\\cdot|\*|[xX]) ?10\^ ?\{? "
    r"?\(?([-+]?\d+)\)? ?\}?|"
    r"[eE]([-+]?\d+))?"
)
_MEASURE = re.compile(
    r"(?P<number>[-+]?(?:\\pm ?)?(?:[\d.,]|\\frac ?(?:\{[^{}]*\}|\d) ?(?:\{[^{}]*\}|\d)|\\pi|"
    r"\\sqrt(?:\[\d+\])? ?(?:\{[^{}]*\}|\d+)|"
    r"\\times|\\cdot|\*|/|\+|-|\^ ?(?:\{[-+ \d]*\}|-?\d+)|[()]|\\overline\{\d+\}| "
    r"(?=[\d\\(+*/-])(?!\\circ))++)"
    rf"(?P<gap> *)(?P<unit>(?:\^ ?\{{? ?)?\\circ.*|[A-Za-zµμΩ\\$€£¥₹¢°{UNSPACED}].*)",
    re.S,
)


@functools.lru_cache(maxsize=4096)
def read_answer(text: str) -> Any:
    r"""Parse an answer into one of the classes above; None for an answer without content.

    Example:
        >>> read_answer(r"\boxed{}"), read_answer("yes").words
        (None, 'yes')
    """
    text = _HEDGE.sub("", plain_latex(text[:_MAX_ANSWER]), count=1) if text else ""
    text = _MINUS.sub("-", _CONTRAST.sub("", text))
    if text.endswith(")"):
        text = _HEDGED.sub("", text)
    return _read(text, 0) if text else None


def _read(text: str, depth: int) -> Any:
    text = text.strip()
    if not text:
        return None
    if depth > 20:
        return Opaque(text)
    for reader in _READERS:
        answer = reader(text, depth)
        if answer is not None:
            return answer
    return _words(text) if _is_wordy(text) else Opaque(_squeezed(text))


def _read_choice(text: str, depth: int) -> Any:
    found = _CHOICE.fullmatch(text) if depth == 0 else None
    if not found:
        return None
    if found[1] is None and _SIGNS.search(text):
        return None
    return Choice(found[1] or found[2], _read(found[3], depth + 1))


def _read_special(text: str, _: int) -> Any:
    found = _CLOCK.fullmatch(text)
    if found and (clock := _clock(found)):
        return clock
    found = _DATE.fullmatch(text.replace("^", "").replace("{", "").replace("}", ""))
    if found and (date := _date(found)):
        return date
    if found := _ORDINAL.fullmatch(text):
        return _quantity(found[1], ("n", Fraction(int(found[1]))))
    if (found := _COMPOUND.fullmatch(text)) and (compound := _compound(found)):
        return compound
    if ("'" in text or "prime" in text) and (found := _MINUTES_OF_ARC.fullmatch(text)):
        degrees = Fraction(found[2]) + Fraction(found[3]) / 60 + Fraction(found[4] or 0) / 3600
        return Quantity(text, ("n", -degrees if found[1] == "-" else degrees), read_unit("°"))
    if found := _LITERAL.fullmatch(text):
        digits = found[1] or found[2] or found[3]
        return Based(
            digits.upper().lstrip("0") or "0",
            16 if found[1] else 2 if found[2] else 8,
            is_literal=True,
        )
    found = _BASE.fullmatch(text)
    if found is None and (found := _IN_BASE.fullmatch(text)):
        return _based(found[1], found[2])
    return _based(found[1], found[2] or found[3]) if found else None


def _compound(found: re.Match[str]) -> Quantity | None:
    """5 ft 3 in, 2 hours and 30 minutes."""
    numbers = [Fraction(found[n].rstrip(".")) for n in (1, 3, 5) if found[n]]
    units = [read_unit(found[n], allow_words=False) for n in (2, 4, 6) if found[n]]
    first = units[0]
    if first is None or not first.dimension:
        return None
    factors = [unit.factor for unit in units if unit and unit.dimension == first.dimension]
    if len(factors) < len(units) or factors != sorted(set(factors), reverse=True):
        return None
    total = sum((n * factor for n, factor in zip(numbers, factors)), Fraction(0)) / first.factor
    return Quantity(found[0], ("n", total), first)


def _based(digits: str, base: str) -> Based | None:
    number = int(base) if base.isdigit() else _BASES.get(base, 0)
    if not 2 <= number <= 36 or any(int(digit, 36) >= number for digit in digits if digit != "."):
        return None
    return Based(digits.upper().lstrip("0") or "0", number)


def _clock(found: re.Match[str]) -> Any:
    half = (found[4] or "").lower()
    hour = int(found[1] or found[5])
    minute = int(found[2] or found[6] or 0)
    second = int(found[3] or found[7] or 0)
    if half:
        if not 1 <= hour <= 12 or minute > 59:
            return None
        hour = hour % 12 + (12 if half == "p" else 0)
    elif found[7] is None and "clock" not in found[0]:
        return None  # perhaps a ratio: `_read_ratio` considers both
    return ClockTime(hour * 3600 + minute * 60 + second, has_half=bool(half))


def _date(found: re.Match[str]) -> Date | None:
    name = found["m1"] or found["m2"] or found["m3"]
    if name:
        months = [n for n, month in enumerate(_MONTHS, 1) if month.startswith(name.lower())]
        if len(months) != 1 or (len(name) > 4 and name.lower() != _MONTHS[months[0] - 1]):
            return None
        month = months[0]
    else:
        month = int(found["m4"])
    day = found["d1"] or found["d2"] or found["d4"]
    year = found["y1"] or found["y2"] or found["y3"] or found["y4"]
    if not 1 <= month <= 12 or (day and not 1 <= int(day) <= 31):
        return None
    return Date(month, int(day) if day else None, int(year) if year else None)


def _read_congruence(text: str, depth: int) -> Any:
    found = _MODULO.match(text) if "mod" in text else None
    if not found or (found["operator"] and not found["name"]):
        return None
    modulus = found["m1"] or found["m2"] or found["m3"] or found["m4"] or found["m5"]
    residue = _read(found["residue"], depth + 1)
    return Congruence(_squeezed(found["name"] or ""), residue, _read(modulus, depth + 1))


def _read_family(text: str, depth: int) -> Any:
    has_words = any(word in text for word in (r"\Z", "integer", "whole"))
    found = _FOR_INTEGERS.match(text) if has_words else None
    if not found or re.search(r"\\[lg]e\b|[<>]", found["body"]):
        return None
    parameter = found["p1"] or found["p2"] or found["p3"] or found["p4"]
    body = _with_parameter(found["body"], parameter)
    return Family(_read(body, depth + 1), parameter) if _PARAMETER in body else None


def _with_parameter(text: str, parameter: str) -> str:
    return re.sub(rf"(?<![A-Za-z\\]){parameter}(?![A-Za-z_])", _PARAMETER, text)


def _read_scaled_matrix(text: str, depth: int) -> Any:
    """Read a number before a matrix."""
    at = text.find(r"\begin")
    prefix = re.sub(r"(?:\(|\\cdot|\\times|\*) ?$", "", text[: max(at, 0)]).strip()
    if at < 1 or not prefix:
        return None
    rest = text[at:].removesuffix(")") if text[:at].rstrip().endswith("(") else text[at:]
    matrix = _read_matrix(rest.strip(), depth + 1) if _MATRIX.fullmatch(rest.strip()) else None
    if not isinstance(matrix, MathMatrix) or matrix.kind != "matrix":
        return None
    if not all(isinstance(cell, Quantity) for row in matrix.rows for cell in row):
        return None
    try:
        factor = read_expression("-1" if prefix == "-" else prefix)
    except NotMath:
        return None
    rows = (tuple(Quantity("", ("*", factor, cell.node)) for cell in row) for row in matrix.rows)
    return MathMatrix(tuple(rows), matrix.kind)


def _read_limit(text: str, depth: int) -> Any:
    """Read at least 5, 5 or more, not 5."""
    found = _LIMIT.fullmatch(text)
    if not found:
        return None
    words = found["before"] or found["behind"]
    sign = next(
        sign for sign, *said in _LIMITS if any(re.fullmatch(f"(?i:{one})", words) for one in said)
    )
    value = _read(found["value"] or found["value2"], depth + 1)
    if not isinstance(value, Quantity):
        return None
    name = _read(found["name"], depth + 1) if found["name"] else _ANYTHING
    return Relation((name, value), (sign,), text, is_bare=not found["name"])


def _read_matrix(text: str, depth: int) -> Any:
    found = _MATRIX.fullmatch(text)
    if found:
        if r"\begin" in found[2]:
            return None
        rows = re.split(r"\\\\(?:\[[^\]]*\])?", found[2].replace(r"\hline", ""))
        cells = [[cell.strip(" ,.") for cell in row.split(r"&")] for row in rows if row.strip()]
        if found[1] == "cases":
            return _cases(cells, depth)
        return _matrix_of(cells, depth, "det" if found[1] in ("vmatrix", "Vmatrix") else "matrix")
    whole = enclosed(text)
    if whole and whole[0] == "[" and re.match(r"\[", whole[1]):
        rows, _ = split_top(whole[1], _ONLY_COMMA)
        inner = [enclosed(row.strip()) for row in rows]
        if all(row and row[0] == "[" and row[2] == "]" for row in inner):
            cells = [split_top(row[1], _ONLY_COMMA)[0] for row in inner if row]
            if len({len(row) for row in cells}) == 1:
                return _matrix_of(cells, depth)
    if whole and r"\begin" in whole[1] and _MATRIX.fullmatch(whole[1]):
        return _read_matrix(whole[1], depth)
    return _read_scaled_matrix(text, depth) if r"\begin" in text else None


def _matrix_of(cells: list[list[str]], depth: int, kind: str = "matrix") -> MathMatrix:
    return MathMatrix(tuple(_read_all(row, depth) for row in cells), kind)


def _read_all(texts: Iterable[str], depth: int) -> tuple[Any, ...]:
    return tuple(_read(text, depth + 1) for text in texts)


def _cases(cells: list[list[str]], depth: int) -> Any:
    if all(len([cell for cell in row if cell]) == 1 for row in cells):
        return Sequence_("", _read_all(map("".join, cells), depth), "")
    condition = re.compile(r"^(?:if|for|when|where)\b\s*")
    plain = ([condition.sub("", cell) for cell in row] for row in cells)
    pairs = tuple(Sequence_("(", _read_all(row, depth), ")") for row in plain)
    return Sequence_(r"\{", pairs, r"\}")


def _read_union(text: str, depth: int) -> Any:
    parts, separators = split_top(text, _CUPS)
    if not separators:
        return None
    kinds = {re.sub(r"\s", "", separator).replace("U", r"\cup") for separator in separators}
    if len(kinds) > 1:
        return None
    head = re.match(r"[A-Za-z]\w* ?(?:\\in|=) ?", parts[0])
    if head:
        parts[0] = parts[0][head.end() :]
    return Union_(_read_all(parts, depth), kinds.pop())


def _read_list(text: str, depth: int) -> Any:
    if _THOUSANDS.fullmatch(text) or (text.startswith("]") and enclosed(text)):
        return None
    if _HUNDRED_AND.search(text) and _number_in_words(text.lower()) is not None:
        return None
    parts, separators = split_top(text, _COMMAS)
    parts = [part for part in (part.strip() for part in parts) if part]
    if not separators or len(parts) < 2:
        return None
    if len(parts) > _MAX_ITEMS:
        return Opaque(_squeezed(text))
    if _is_sentence(text, parts):
        return _words(text)
    amount = _CURRENCY.fullmatch(text)
    if amount and _THOUSANDS.fullmatch(amount[4]):
        return None
    if all(_ONLY_COMMA.fullmatch(separator) for separator in separators) and (
        joined := _measured_thousands(text)
    ):
        return _read(joined, depth + 1)
    items = _read_all(parts, depth)
    is_contrast = (
        isinstance(items[1], Relation) and items[1].is_bare and items[1].signs == (r"\ne",)
    )
    if len(items) == 2 and isinstance(items[0], Quantity) and is_contrast:
        return items[0]  # "6, not 5"
    if len(items) == 2 and not re.search(r"\bor\b", separators[0]):
        return _between(*items) or Sequence_("", items, "")
    if len(items) == 2 and all(map(_is_constant, items)) and _same(*items):
        return items[0]  # "1/2 or 0.5"
    return Sequence_("", items, "")


def _between(first: Any, second: Any) -> Relation | None:
    """Read "x >= 1 and x <= 2" as 1 <= x <= 2; None for anything else."""
    if not isinstance(first, Relation) or not isinstance(second, Relation):
        return None
    x = _bounds(first)
    y = _bounds(second)
    if x is None or y is None or x[0] != y[0] or (x[1][0] is None) == (y[1][0] is None):
        return None
    lower, upper = (x[1], y[1]) if x[1][0] is not None else (y[1], x[1])
    if lower[2] is not None or upper[2] is None:
        return None
    try:
        low, high = (as_float(number_of(end.node)).real for end in (lower[0], upper[2]))
    except (NotMath, Undefined, TooBig):
        return None
    name = next(side for side in first.sides if not _is_constant(side))
    signs = tuple(r"\le" if is_closed else "<" for is_closed in (lower[1], upper[3]))
    text = f"{first.text}, {second.text}"
    return Relation((lower[0], name, upper[2]), signs, text) if low < high else None


def _measured_thousands(text: str) -> str | None:
    r"""1,000 cm, or 12,345 \times 2: grouped digits that are not followed by another number."""
    found = re.match(r"([-+]?(?:\\\$ ?)?[1-9]\d{0,2}(?:,\d{3})+(?:\.\d+)?)(?![\d,])([^,;]*)$", text)
    if not found or re.search(r"\b(?:and|or)\b", found[2]):
        return None
    return found[1].replace(",", "") + found[2]


def _is_sentence(text: str, parts: Sequence[str]) -> bool:
    """Tell whether commas and "and" are those of prose."""
    words = re.findall(r"[A-Za-z']+", text)
    return len(words) >= 3 * len(parts) + 2 and not re.search(r"[=<>\\]", text)


def _read_brackets(text: str, depth: int) -> Any:
    whole = enclosed(text)
    if not whole:
        return None
    opening, inner, closing = whole
    if not inner:
        return Words(r"\emptyset", "no solution") if opening == r"\{" else None
    if opening == r"\{" and (found := _SET_BUILDER.fullmatch(inner)):
        condition = _read(found[1], depth + 1)
        return condition if _intervals(condition) is not None else Opaque(_squeezed(text))
    if opening == r"\langle":
        opening = "("
        closing = ")"
    parts, separators = split_top(inner, _ONLY_COMMA)
    parts = [part.strip() for part in parts]
    if separators and all(parts) and len(parts) <= _MAX_ITEMS:
        if set(parts) == {r"\ldots"}:
            return None
        return Sequence_(opening, _read_all(parts, depth), closing)
    if opening == r"\{":
        return Sequence_(opening, (_read(inner, depth + 1),), closing)
    if (opening, closing) in (("(", ")"), ("{", "}"), ("[", "]")):
        return _read(inner, depth + 1)
    return None


def _read_relation(text: str, depth: int) -> Any:
    parts, separators = split_top(text, _SIGNS)
    if not separators:
        return None
    parts = [part.strip() for part in parts]
    if not parts[-1] or len(parts) > 6:
        return None
    signs = tuple(_SIGN_NAMES.get(sign.strip(), sign.strip()) for sign in separators)
    if not parts[0] and len(parts) == 2:  # "= 5", or ">= 5"
        value = _read(parts[1], depth + 1)
        is_limit = signs[0] in (*_MIRROR, r"\ne")
        return Relation((_ANYTHING, value), signs, text, is_bare=True) if is_limit else value
    if not parts[0]:
        return None
    return Relation(_read_all(parts, depth), signs, text)


def _read_ratio(text: str, depth: int) -> Any:
    parts, separators = split_top(re.sub(r"(?<=\d) to (?=\d)", ":", text), _COLON)
    if not separators or len(parts) > 6 or not all(parts):
        return None
    clock = None
    found = _CLOCK.fullmatch(text)
    if found and found[5] and int(found[5]) < 24 and int(found[6]) < 60:
        clock = ClockTime(int(found[5]) * 3600 + int(found[6]) * 60, has_half=False)
    items = _read_all(parts, depth)
    if not all(isinstance(item, Quantity) for item in items):
        name = parts[0].strip()  # "Answer: 5", "Area: 12 cm"
        if len(parts) == 2 and re.fullmatch(r"[A-Za-z][A-Za-z ]*", name):
            return items[1]
        return None
    return Ratio(items, clock)


def _read_quantity(text: str, depth: int) -> Quantity | None:
    return _number(text) or _measured(text, depth)


def _number(text: str) -> Quantity | None:
    if _NUMBER_IN_WORDS.fullmatch(text) and (number := _number_in_words(text.lower())) is not None:
        return _quantity(text, ("n", number))
    if _PROPER_NAME.fullmatch(text) and text.lower() not in _SYMBOL_NAMES:
        return None  # ABC is a triangle or a word, not a product
    if (found := _UNIT_IN_BRACKETS.fullmatch(text)) and (
        unit := read_unit(found[2].strip(), allow_words=False)
    ):
        plain = _number(found[1])
        return Quantity(text, plain.node, unit, False, plain.decimal) if plain else None
    try:
        node = read_expression(text)
    except NotMath:
        return None
    glued = _before_unit(text)
    if glued is not None:
        return glued
    if found := _GLUED.fullmatch(text):
        unit = read_unit(found[3], allow_words=False)
        if unit is not None:
            plain = _quantity(found[1], read_expression(found[1]))
            glued = Quantity(text, plain.node, unit, False, plain.decimal)
            if found[2] or re.match(r"[A-Za-z]{2}|\^", found[3]):
                return glued
    found = re.fullmatch(r"(.*?[^\\^{ ])(?:\^ ?\{? ?)\\circ ?\}?", text)
    if found and not re.search("cis|sin|cos|tan|sec|csc|cot", text):
        try:
            inner = read_expression(found[1])
        except NotMath:
            inner = None
        if inner is not None and not contains(inner, "f", "degree"):
            return Quantity(text, inner, read_unit("°"), False, _decimal(found[1]))
    return _quantity(text, node, glued)


_UNIT_BEGINS = re.compile(r"(?<=[\w})\]]) +(?=[A-Za-zΩµ\\{])")


def _before_unit(text: str) -> Quantity | None:
    r"""5\sqrt{2} cm: a number without variables, a blank, a known unit."""
    for blank in _UNIT_BEGINS.finditer(text):
        unit = read_unit(text[blank.end() :], allow_words=False)
        if unit is None or text[: blank.start()].endswith((r"\circ", r"\circ}")):
            continue
        try:
            node = read_expression(text[: blank.start()])
        except NotMath:
            continue
        if not symbols_of(node):
            return Quantity(text, node, unit, False, _decimal(text[: blank.start()]))
    return None


_GLUED = re.compile(
    r"([-+]?(?:[\d.]*\d|\\frac ?\{\d+\} ?\{\d+\})(?: ?(?:\\times|\\cdot) ?10\^ "
    r"?(?:\{-?\d+\}|\d+))?)"
    r"( *)((?:[A-Za-zΩµ\\]|\^ ?\{? ?\\circ).*)"
)
_HUNDRED_AND = re.compile(r"(?i)[a-z] (?:hundred|thousand|million|billion) and [a-z]")
_NUMBER_IN_WORDS = re.compile(r"[A-Za-z]{3,10}(?:[ -][A-Za-z]{3,10}){0,6}")


def _number_in_words(text: str) -> Fraction | None:
    """forty-two, one hundred and five, three quarters; None for other words."""
    words = [word for word in re.split("[ -]", text) if word != "and"]
    if not words:
        return None
    *before, last = words
    part = _PARTS.get("half" if last == "halves" else last.removesuffix("s"))
    if part is not None:
        if last == "half" and not before:
            return Fraction(1, 2)
        top = _NUMBER_WORDS.get(before[0]) if len(before) == 1 else None
        return None if top is None else Fraction(top, part)
    total = group = 0
    room = 10**12  # the next word must be worth less
    for word in words:
        if word in _TENS and room > 10:
            group += _TENS[word]
            room = 10
        elif word in _NUMBER_WORDS and _NUMBER_WORDS[word] < room:
            group += _NUMBER_WORDS[word]
            room = 0
        elif word == "hundred" and 0 < group < 10:
            group *= 100
            room = 100
        elif (
            word in ("thousand", "million", "billion")
            and group
            and (not total or total >= 1000 * _MULTIPLES[word])
        ):
            total += group * _MULTIPLES[word]
            group = 0
            room = 1000
        else:
            return None
    return Fraction(total + group)


_SYMBOL_NAMES = ("pi", "infinity", "inf", "theta", "alpha", "beta")
_PROPER_NAME = re.compile(
    r"[A-Z]{2,}|(?!(?:[xyzw]{2,4}|[abc]{2,3}|[mnk]{2,3}|[pqrst]{2,3}|[uvw]{2,3})$)[A-Za-z]{2,}"
)


def _quantity(text: str, node: Node, glued: Quantity | None = None) -> Quantity:
    return Quantity(text, node, decimal=_decimal(text), glued=glued)


def _decimal(text: str) -> tuple[Fraction, Fraction, int] | None:
    found = _DECIMAL.fullmatch(text)
    if not found:
        return None
    power = int(found[4] or found[5] or 0)
    if abs(power) > 5000:
        return None
    whole = found[2].replace(",", "")
    digits = found[3]
    scale = Fraction(10) ** (power - len(digits))
    value = int(whole + digits) * scale
    return (-value if found[1] == "-" else value, scale, len((whole + digits).lstrip("0")))


def _measured(text: str, depth: int) -> Quantity | None:
    """Read a number after a currency sign, or before a percent sign, a multiple or a unit."""
    if depth > 12:
        return None
    if found := _CURRENCY.fullmatch(text):
        signed = (found[1] + found[4]).replace(" ", "", 1) if found[1] else found[4]
        amount = _read_quantity(signed, depth + 1)
        unit = read_unit((found[2] or found[3]).rstrip("."), allow_words=False)
        if amount is None or amount.percent or unit is None:
            return None
        if amount.unit and amount.unit != unit and not amount.unit.words:
            unit = unit.times(amount.unit)
        return Quantity(text, amount.node, unit, False, amount.decimal)
    if found := _PERCENT.fullmatch(text):
        number = _read_quantity(found[1], depth + 1)
        if number is None or number.unit or number.percent:
            return None
        return Quantity(text, number.node, None, True, number.decimal)
    if found := _MULTIPLE.fullmatch(text):
        number = _read_quantity(found[1], depth + 1)
        unit = read_unit(found[3]) if found[3].strip() else None
        if number and number.unit is None and (unit or not found[3].strip()):
            times = _MULTIPLES[found[2]]
            decimal = _scaled(number.decimal, Fraction(times))
            return Quantity(text, ("*", number.node, ("n", Fraction(times))), unit, False, decimal)
    return _with_unit(text)


def _scaled(
    decimal: tuple[Fraction, Fraction, int] | None, by: Fraction
) -> tuple[Fraction, Fraction, int] | None:
    return None if decimal is None else (decimal[0] * by, decimal[1] * by, decimal[2])


_PER = re.compile(r"([-+]?[\d.,]*\d) *(\\frac *\{ *[A-Za-z][^{}]*\} *\{[^{}]*\})")


def _with_unit(text: str) -> Quantity | None:
    found = _MEASURE.fullmatch(text)
    if found is None and (found := _PER.fullmatch(text)):
        before = _number(found[1].strip())
        unit = read_unit(found[2], allow_words=False)
        return Quantity(text, before.node, unit, False, before.decimal) if before and unit else None
    if found is None:
        word = re.match(r"([A-Za-z]+)[ -](.+)", text, re.S)  # "three apples"
        if word and word[1].lower() in _NUMBER_WORDS and (unit := read_unit(word[2])):
            return Quantity(text, ("n", Fraction(_NUMBER_WORDS[word[1].lower()])), unit)
        return None
    for number, unit_text in _cuts(found[0], found.end("number")):
        unit = read_unit(unit_text, allow_words=number.endswith(" "))
        if unit is None:
            continue
        number = number.strip()
        try:
            node = read_expression(number)
        except NotMath:
            continue
        return Quantity(text, node, unit, False, _decimal(number))
    return None


def _cuts(text: str, end: int) -> Iterable[tuple[str, str]]:
    r"""Yield the places where the unit may begin: where letters begin, and before a \frac of
    units."""
    while end < len(text) and text[end] == " ":
        end += 1
    yield text[:end], text[end:]
    for found in re.finditer(r"\\frac", text[:end]):
        yield text[: found.start()] + " ", text[found.start() :]


def _is_wordy(text: str) -> bool:
    has_words = re.search(r"[^\W\d_]{2,}", re.sub(r"\\[A-Za-z]+", "", text)) is not None
    return has_words or not re.search(r"[\\^_{}]", text)


def _words(text: str) -> Words:
    squeezed = re.sub(r"[\s\"'`.,;:!?]+", " ", text).strip().lower()
    squeezed = re.sub(r"\b(?:the|a|an)\b ?", "", squeezed).strip() or squeezed
    return Words(text, _CANONICAL_WORDS.get(squeezed, squeezed))


def _squeezed(text: str) -> str:
    return re.sub(r"(?<![A-Za-z\d]) +| +(?![A-Za-z\d])", "", text)


_BOUND = re.compile(r"\\(?:sum|prod)_\{ ?([a-z]) ?=")


def _bare(text: str) -> str:
    r"""Return the text without blanks and braces around one character; the variable of a sum is
    always k."""
    found = _BOUND.search(text)
    if found and (found[1] == "k" or not re.search(r"(?<![A-Za-z\\])k(?![A-Za-z])", text)):
        text = re.sub(rf"(?<![A-Za-z\\]){found[1]}(?![A-Za-z])", "k", text)
    return re.sub(r"\{ ?(\w) ?\}", r"\1", _squeezed(text)).replace(" ", "")


def _read_named(text: str, _: int) -> Any:
    name = _CANONICAL_WORDS.get(re.sub(r"\s+", " ", text.lower()).replace(", ", ","))
    return Words(text, name) if name else None


_READERS: tuple[Callable[[str, int], Any], ...] = (
    _read_named,
    _read_choice,
    _read_special,
    _read_congruence,
    _read_family,
    _read_matrix,
    _read_union,
    _read_limit,
    _read_list,
    _read_brackets,
    _read_relation,
    _read_ratio,
    _read_quantity,
)


# -- comparing -------------------------------------------------------------------------------------


def same_answer(label: str, answer: str) -> bool | None:
    r"""Tell whether an answer equals a label.

    Returns:
        None if one of the two is mathematics that this module does not read.

    Example:
        >>> same_answer("1,2", r"\{2, 1\}"), same_answer("1,2", "12"), same_answer("50%", "0.5")
        (True, False, True)
    """
    if max(len(label), len(answer)) > _MAX_ANSWER:
        return label.split() == answer.split()
    wanted = read_answer(label)
    given = read_answer(answer)
    if wanted is None or given is None:
        return False
    plain_label = plain_latex(label)
    plain_answer = plain_latex(answer)
    if plain_label == plain_answer:
        return True
    verdict = _same(wanted, given)
    if verdict is not True:
        x = _POINT.fullmatch(plain_label)
        y = _POINT.fullmatch(plain_answer)
        if (x and isinstance(given, Sequence_)) or (y and isinstance(wanted, Sequence_)):
            verdict = _same(read_answer(x[1]) if x else wanted, read_answer(y[1]) if y else given)
    plain_label = _squeezed(plain_label)
    plain_answer = _squeezed(plain_answer)
    bare_label = _undecorated(plain_label)
    bare_answer = _undecorated(plain_answer)
    is_one_decorated = (bare_label == plain_label) != (bare_answer == plain_answer)
    if is_one_decorated and _bare(bare_label) == _bare(bare_answer):
        return True
    if plain_label == plain_answer and not re.search(r"\d \\?[\d.f]", plain_label + plain_answer):
        return True
    return verdict


_DECORATED = re.compile(
    r"\\(?:vec|hat|angle|triangle|widehat)\s*\{?\s*([A-Za-z]{1,4})\s*\}?"
    r"|\\overline\s*\{\s*([A-Z]{2})\s*\}"
)


def _undecorated(text: str) -> str:
    return _DECORATED.sub(lambda found: f" {found[1] or found[2]} ", text) if "\\" in text else text


def is_text(answer: str) -> bool:
    """Tell whether an answer is words, not mathematics."""
    return isinstance(read_answer(answer), Words)


def _same(g: Any, a: Any) -> bool | None:
    if g is None or a is None:
        return g is a
    if g == a:
        return True
    if isinstance(g, _MAY_EXCLUDE) and isinstance(a, _MAY_EXCLUDE):
        x = _excluded(g)
        y = _excluded(a)
        if x and y:
            return _same_unordered(x, y)
    for kind, compare in _COMPARISONS:
        if isinstance(g, kind):
            return compare(g, a)
        if isinstance(a, kind):
            return compare(g, a) if kind in _DIRECTED else compare(a, g)
    return None


_MAY_EXCLUDE = (Words, Union_, Relation, Sequence_)


def _excluded(answer: Any) -> list[Any] | None:
    r"""Return the numbers that "all reals but …" leaves out, in any form: x \ne 2, ℝ \ {2}, two
    intervals that meet at 2."""
    if isinstance(answer, Words):
        found = _EXCEPT.fullmatch(answer.text)
        return _listed(_read(found[1], 2)) if found else None
    if isinstance(answer, Relation):
        sign = answer.signs[0] if len(answer.signs) == 1 and _name(answer.sides[0]) else ""
        if sign == r"\in":
            return _excluded(answer.sides[1])
        return _listed(answer.sides[1]) if sign == r"\ne" else None
    if isinstance(answer, Sequence_):
        first = answer.items[0] if answer.items else None  # cases may have no row
        if answer.opening or not isinstance(first, Relation) or first.signs != (r"\ne",):
            return None
        names = {
            _squeezed(item.sides[0].text)
            for item in answer.items
            if isinstance(item, Relation)
            if hasattr(item.sides[0], "text")
        }
        values = [
            item.sides[1] if isinstance(item, Relation) and item.signs == (r"\ne",) else item
            for item in answer.items
        ]
        return values if len(names) == 1 and all(_is_constant(value) for value in values) else None
    if not isinstance(answer, Union_):
        return None
    if answer.operator == r"\setminus":
        whole = answer.parts[0]
        is_all = isinstance(whole, Words) and whole.words == "all real numbers"
        return _listed(answer.parts[1]) if is_all and len(answer.parts) == 2 else None
    ends: list[Any] = []
    for part in answer.parts:
        if not isinstance(part, Sequence_) or (part.opening, part.closing) != ("(", ")"):
            return None
        if len(part.items) != 2 or not all(isinstance(item, Quantity) for item in part.items):
            return None
        ends += part.items
    if len(ends) < 4 or not (_is_infinite(ends[0]) and _is_infinite(ends[-1])):
        return None
    highs = ends[1:-1:2]
    lows = ends[2:-1:2]
    return highs if all(_same(*pair) is True for pair in zip(highs, lows)) else None


def _listed(answer: Any) -> list[Any] | None:
    is_list = isinstance(answer, Sequence_) and _is_unordered(answer)
    items = _expanded(answer.items if is_list else [answer])
    return items if all(_is_constant(item) for item in items) else None


def _same_congruence(congruence: Congruence, other: Any) -> bool | None:
    if isinstance(other, Congruence):
        if congruence.name and other.name and congruence.name != other.name:
            return False
        if _same(congruence.modulus, other.modulus) is not True:
            return False
        other = other.residue
    elif isinstance(other, Family):
        step = _step(other.body)
        if step is None or step[1] == 0:
            return False
        if _same(congruence.modulus, _of_number(abs(step[1]))) is not True:
            return False
        other = _of_number(step[0])
    elif isinstance(other, Relation):
        value = _assigned_value(other)
        if value is None or congruence.name not in ("", _name(other.sides[0])):
            return False
        other = value
    if _same(congruence.residue, other):
        return True
    residues = congruence.residue, other, congruence.modulus
    try:
        x, y, n = (
            number_of(part.node) if isinstance(part, Quantity) else Fraction(1, 2)
            for part in residues
        )
    except (NotMath, Undefined):
        return False
    are_whole = all(isinstance(one, Fraction) and one.denominator == 1 for one in (x, y, n))
    return are_whole and n != 0 and (x - y) % n == 0


def _of_number(number: Any) -> Quantity:
    return Quantity(str(number), ("n", number))


def _step(body: Any) -> tuple[Any, Any] | None:
    """Return (a, b) of a family a + b·k: the value at k = 0 and the step per k; None if it is not
    linear."""
    body = _assigned_value(body) if isinstance(body, Relation) else body
    if not isinstance(body, Quantity) or symbols_of(body.node) != {"k_Z"}:
        return None
    try:
        zero, one, two, three = (
            number_of(replaced(body.node, ("x", "k_Z"), ("n", Fraction(n)))) for n in range(4)
        )
    except (NotMath, Undefined):
        return None
    if not all(isinstance(value, Fraction) for value in (zero, one, two, three)):
        zero, one, two, three = map(as_float, (zero, one, two, three))
        steps = (one - zero, two - one, three - two)
        return None if any(abs(step - steps[0]) > 1e-30 for step in steps) else (zero, steps[0])
    return (zero, one - zero) if two - one == three - two == one - zero else None


def _same_family(family: Family, other: Any) -> bool | None:
    if isinstance(other, Family):
        other = other.body
    elif isinstance(other, (Quantity, Relation)):
        other = _read(_with_parameter(other.text, family.parameter), 2)
    else:
        return False
    verdict = _same(family.body, other)
    x = _step(family.body)
    y = _step(other)
    if verdict or x is None or y is None or x[1] == 0:
        return verdict
    numbers = (*x, *y)
    if not all(isinstance(number, Fraction) for number in numbers):
        numbers = tuple(map(as_float, numbers))
    start, step, other_start, other_step = numbers
    shift = (start - other_start) / step
    try:
        near = round(float(shift.real))
    except OverflowError:  # infinitely far apart
        return False
    return bool(abs(abs(step) - abs(other_step)) <= 1e-30 and abs(shift - near) <= 1e-30)


def _same_choice(choice: Choice, other: Any) -> bool | None:
    if isinstance(other, Choice):
        return choice.letter == other.letter
    letter = _letter(other)
    return _same(choice.rest, other) if letter is None else choice.letter == letter


def _letter(answer: Any) -> str | None:
    text = answer.text.strip("() ") if isinstance(answer, (Quantity, Words)) else ""
    return text if re.fullmatch("[A-J]", text) else None


def _same_words(words: Words, other: Any) -> bool | None:
    if isinstance(other, Words):
        return words.words == other.words
    if isinstance(other, Relation):
        last = other.sides[-1]
        return other.signs == ("=",) and isinstance(last, Words) and last.words == words.words
    if isinstance(other, Opaque):
        return None if "\\" in words.text else False
    if isinstance(other, Sequence_) and words.words == "all real numbers":
        return _is_all_reals(other)
    return False


def _is_all_reals(answer: Sequence_) -> bool:
    texts = [item.text for item in answer.items if isinstance(item, Quantity)]
    is_open = (answer.opening, answer.closing) == ("(", ")")
    return is_open and texts in ([r"-\infty", r"\infty"], [r"-\infty", r"+\infty"])


def _same_date(date: Date, other: Any) -> bool | None:
    if not isinstance(other, Date):
        return False
    is_same_year = date.year == other.year or None in (date.year, other.year)
    return is_same_year and (date.month, date.day) == (other.month, other.day)


def _same_clock(clock: ClockTime, other: Any) -> bool | None:
    if isinstance(other, Ratio) and other.clock:
        other = other.clock
    if not isinstance(other, ClockTime):
        return False
    if clock.has_half and other.has_half:
        return clock.seconds == other.seconds
    return (clock.seconds - other.seconds) % 43200 == 0


def _same_based(based: Based, other: Any) -> bool | None:
    if isinstance(other, Based):
        if based.base == other.base:
            return based.digits == other.digits
        if "." in based.digits + other.digits:
            return False
        return int(based.digits, based.base) == int(other.digits, other.base)
    if isinstance(other, Relation) and other.signs == ("=",):
        return _same_based(based, other.sides[-1])
    if based.is_literal and isinstance(other, Quantity):
        number = ("n", Fraction(int(based.digits, based.base)))
        return other.unit is None and bool(equal(other.node, number))
    if isinstance(other, (Quantity, Words)):
        return (other.text.strip().replace(" ", "").upper().lstrip("0") or "0") == based.digits
    return False


def _same_ratio(ratio: Ratio, other: Any) -> bool | None:
    if isinstance(other, Ratio):
        if len(ratio.parts) != len(other.parts):
            return False
        if ratio.clock and other.clock and ratio.clock != other.clock:
            return False
        return _all(
            equal(("*", ratio.parts[0].node, y.node), ("*", other.parts[0].node, x.node))
            for x, y in zip(ratio.parts, other.parts)
        )
    is_number = isinstance(other, Quantity) and other.unit is None and not other.percent
    if is_number and len(ratio.parts) == 2:
        return equal(("/", ratio.parts[0].node, ratio.parts[1].node), other.node)
    if isinstance(other, Relation) and other.signs == ("=",):
        return _same_ratio(ratio, other.sides[-1])
    return False


def _same_matrix(matrix: MathMatrix, other: Any) -> bool | None:
    if isinstance(other, Relation) and other.signs == ("=",):
        return _same_matrix(matrix, other.sides[-1])
    if isinstance(other, MathMatrix):
        if matrix.kind != other.kind or [*map(len, matrix.rows)] != [*map(len, other.rows)]:
            return False
        return _all(_same(x, y) for r, s in zip(matrix.rows, other.rows) for x, y in zip(r, s))
    if matrix.kind == "det":
        return None
    if isinstance(other, Sequence_) and (other.opening, other.closing) in (("(", ")"), ("[", "]")):
        cells = [cell for row in matrix.rows for cell in row]
        is_line = len(matrix.rows) == 1 or all(len(row) == 1 for row in matrix.rows)
        if is_line and len(cells) == len(other.items):
            return _all(_same(x, y) for x, y in zip(cells, other.items))
    if isinstance(other, Quantity) and len(matrix.rows) == 1 and len(matrix.rows[0]) == 1:
        return _same(matrix.rows[0][0], other)
    return None if isinstance(other, Opaque) else False


def _same_union(union: Union_, other: Any) -> bool | None:
    if isinstance(other, Union_):
        if union.operator != other.operator:
            x = _intervals(union)
            y = _intervals(other)
            return bool(x and y and _same_unordered(x, y))
        if union.operator == r"\setminus":
            return _all(_same(x, y) for x, y in zip(union.parts, other.parts))
        return _same_unordered(union.parts, other.parts)
    if isinstance(other, (Relation, Sequence_)):
        own = _intervals(union)
        parts = _intervals(other)
        if own is not None and parts is not None:
            return _same_unordered(own, parts)
    return None if isinstance(other, Opaque) else False


def _same_sequence(g: Any, a: Any) -> bool | None:
    if not isinstance(g, Sequence_) or not isinstance(a, Sequence_):
        return _same_single(g, a)
    g_plain = _is_unordered(g)
    a_plain = _is_unordered(a)
    if g_plain and a_plain:
        return _same_lists(g, a)
    for one, other in ((g, a), (a, g)):
        if one.opening == r"\{" and len(one.items) == 1 and not _is_unordered(other):
            return _same(one.items[0], other)  # the set of one point
    if len(g.items) != len(a.items):
        return False
    if g_plain or a_plain:
        if r"\{" in (g.opening, a.opening):
            return False
        if {g.opening + g.closing, a.opening + a.closing} & {"[)", "(]", "]["}:
            return False
        return _all(_same(*pair) for pair in zip(_values_in_order(g), _values_in_order(a)))
    if len(g.items) == 2 and _brackets(g) != _brackets(a):
        return False
    return _all(_same(x, y) for x, y in zip(g.items, a.items))


def _brackets(sequence: Sequence_) -> tuple[str, str]:
    """Return the brackets; French ]a, b[ counts as (a, b)."""
    opening = "(" if sequence.opening == "]" else sequence.opening
    return opening, ")" if sequence.closing == "[" else sequence.closing


def _is_unordered(sequence: Sequence_) -> bool:
    return sequence.opening in ("", r"\{", "{")


def _same_lists(g: Sequence_, a: Sequence_) -> bool | None:
    named_g = _assigned(g.items)
    named_a = _assigned(a.items)
    if named_g and named_a is None and len(g.items) == len(a.items):
        return _all(_same(x, y) for x, y in zip(named_g, a.items))
    if named_a and named_g is None and len(g.items) == len(a.items):
        return _all(_same(x, y) for x, y in zip(g.items, named_a))
    items_g = _expanded(g.items)
    items_a = _expanded(a.items)
    if r"\{" in (g.opening, a.opening):
        items_g = _without_doubles(items_g)
        items_a = _without_doubles(items_a)
    return _same_unordered(items_g, items_a)


def _assigned(items: Sequence[Any]) -> list[Any] | None:
    """Return the values of "x = 1, y = 2" if each has a different variable; else None."""
    if not all(
        isinstance(item, Relation) and item.signs == ("=",) and _name(item.sides[0])
        for item in items
    ):
        return None
    names = [str(getattr(item.sides[0], "text", "")) for item in items]
    return [item.sides[1] for item in items] if len(set(names)) == len(names) else None


def _values_in_order(sequence: Sequence_) -> Sequence[Any]:
    return _assigned(sequence.items) or sequence.items


def _name(side: Any) -> str:
    """Return the name on one side of a relation, "" if it is something else."""
    if isinstance(side, Sequence_):  # (x, y) = (1, 2)
        names = [_name(item) for item in side.items] if side.opening == "(" else [""]
        return f"({','.join(names)})" if all(names) else ""
    text = _squeezed(side.text) if isinstance(side, (Quantity, Words, Opaque)) else ""
    return text if _NAME.fullmatch(text) else ""


_NAME = re.compile(
    r"\\?[A-Za-z]+(?:_(?:\{[^{}]*\}|\w))?'*(?:\([^()=]*\))?|[A-Za-z]+\^\{?(?:-1|\\circ|\\prime|\*|"
    r"')\}?(?:\([^()=]*\))?|"
    r"\|\\?[A-Za-z]+ ?\||(?:m ?)?\\angle "
    r"?[A-Z]+|\\(?:overline|vec|hat|overrightarrow)\{[A-Za-z]+\}|[A-Za-z][A-Za-z ]+|"
    r"\\frac\{d[a-z]\}\{d[a-z]\}"
)


def _expanded(items: Iterable[Any]) -> list[Any]:
    r"""Take out "x =" before the first or each item, and make two items of ``\pm 2``."""
    out = []
    for item in items:
        is_named = isinstance(item, Relation) and item.signs in (("=",), (r"\in",))
        if is_named and _name(item.sides[0]):
            sides = [one.sides[0] for one in items if isinstance(one, Relation)]
            if len({side.text for side in sides if isinstance(side, Quantity)}) <= 1:
                item = item.sides[1]
        if isinstance(item, Sequence_) and _is_unordered(item):
            out += _expanded(item.items)
        else:
            out += _both_signs(item)
    return out


def _both_signs(item: Any) -> list[Any]:
    if isinstance(item, Quantity) and contains(item.node, "±"):
        return [
            Quantity(f"{item.text} ({sign})", signed, item.unit, item.percent)
            for sign in (1, -1)
            for signed in [replaced(item.node, ("±",), ("n", Fraction(sign)))]
        ]
    return [item]


def _without_doubles(items: Sequence[Any]) -> list[Any]:
    out: list[Any] = []
    for item in items:
        if not any(_same(other, item) is True for other in out):
            out.append(item)
    return out


def _same_unordered(g: Sequence[Any], a: Sequence[Any]) -> bool | None:
    if len(g) != len(a):
        return False
    left = list(a)
    unknown = False
    for item in g:
        verdicts = [_same(item, other) for other in left]
        if True in verdicts:
            left.pop(verdicts.index(True))
        elif None in verdicts:
            unknown = True
        else:
            return False
    return None if unknown else True


def _same_single(g: Any, a: Any) -> bool | None:
    """Compare where one of the two is not a sequence."""
    sequence, other = (g, a) if isinstance(g, Sequence_) else (a, g)
    if isinstance(other, Words):
        return _same_words(other, sequence)
    if isinstance(other, Relation):
        intervals = _intervals(other)
        if intervals is not None and not _is_unordered(sequence):
            return _same_unordered([sequence], intervals)
        value = _assigned_value(other)
        if value is not None and len(sequence.items) > 1:
            return _same(sequence, value) if sequence is g else _same(value, sequence)
    if _is_unordered(sequence):
        if isinstance(other, Relation) and _is_ordering(other):
            x = _intervals(sequence)
            y = _intervals(other)
            if x and y:
                return _same_unordered(x, y)
        items = _expanded(sequence.items)
        others = _expanded([other])
        if len(items) != len(sequence.items) or len(others) > 1 or len(items) == 1:
            if sequence.opening == r"\{":
                items = _without_doubles(items)
                others = _without_doubles(others)
            return _same_unordered(items, others)
        if isinstance(other, Quantity) and _THOUSANDS.fullmatch(other.text):
            return _same_thousands(sequence, other)
    return None if isinstance(other, Opaque) else False


def _same_thousands(sequence: Sequence_, number: Quantity) -> bool | None:
    """Compare "100,200" with the list "100, 200"."""
    parts = number.text.split(",")
    if any(part.startswith("0") for part in parts):
        return False
    items = [_quantity(part, ("n", Fraction(part))) for part in parts]
    return _same_unordered(sequence.items, items)


def _assigned_value(relation: Relation) -> Any:
    if set(relation.signs) <= {"=", r"\in", r"\approx"} and _name(relation.sides[0]):
        return relation.sides[-1]
    return None


def _same_relation(g: Any, a: Any) -> bool | None:
    if isinstance(g, Relation) and isinstance(a, Relation):
        return _same_relations(g, a)
    if isinstance(g, Relation):
        value = _assigned_value(g)
        if value is not None:
            return _same(value, a)
        if g.signs == (r"\approx",):
            return _any(_same(side, a) for side in g.sides)
        return _mirror_interval(g, a)
    return _same_value_of(g, a)


def _mirror_interval(relation: Relation, other: Any) -> bool | None:
    intervals = _intervals(relation)
    if intervals is not None and isinstance(other, (Sequence_, Union_)):
        return _same_unordered(intervals, other.parts if isinstance(other, Union_) else [other])
    return None if isinstance(other, Opaque) else False


def _same_value_of(g: Any, a: Relation) -> bool | None:
    """Tell whether the equation ``a`` states the label ``g``: "x = 5", "AB = 5", "3 + 2 = 5", "a +
    b = 5"."""
    signs = set(a.signs)
    if signs == {r"\approx"} or signs == {"=", r"\approx"}:
        if not all(map(_may_be_near, a.sides, a.sides[1:])):
            return False
        return _any(_same(g, side) for side in a.sides[0 if len(a.sides) == 2 else 1 :])
    if signs <= {"=", r"\to"}:
        first = a.sides[0]
        if _name(first) or isinstance(first, (Words, Opaque)):
            return _same(g, a.sides[-1])
        if isinstance(first, Quantity):
            variables = symbols_of(first.node)
            last = a.sides[-1]
            is_name = len(a.sides) == 2 and _name(last) and not _is_constant(last)
            if not variables and is_name:
                return _same(g, first)  # "5 = x"
            if not variables and not (isinstance(g, Quantity) and symbols_of(g.node)):
                return _same(g, last)
            if len(variables) >= 2 and _is_constant(last):
                return _same(g, last)
            is_formula = isinstance(last, Quantity) and not _is_constant(last)
            if len(a.sides) > 2 or (isinstance(g, Quantity) and is_formula):
                is_true = equal(first.node, getattr(last, "node", first.node))
                return _same(g, last) if is_true else False
        return _mirror_interval(a, g)
    if signs == {r"\in"} and _name(a.sides[0]):
        return _same(g, a.sides[-1])
    return _mirror_interval(a, g)


def _may_be_near(side: Any, other: Any) -> bool:
    """Tell whether two sides of an approximation may be meant as one value: numbers that differ
    widely are not."""
    numbers = [one for one in (side, other) if _is_constant(one)]
    if len(numbers) < 2 or numbers[0].unit != numbers[1].unit or side.percent != other.percent:
        return True
    try:
        x, y = (as_float(number_of(number.node)) for number in numbers)
    except (TooBig, Undefined):
        return True
    is_rounded = y == y.real and abs(x - y) * 2 <= _unit_of_last_digit(float(y.real))
    return bool(x == y or is_rounded or abs(x - y) * 20 <= max(abs(x), abs(y)))


def _unit_of_last_digit(value: float) -> float:
    """Return the place value of the last significant digit: 0.1 for 0.2, 1000 for 2000."""
    if not math.isfinite(value) or value == 0:
        return 0.0
    return 10.0 ** int(Decimal(f"{value:.10g}").normalize().as_tuple().exponent)


def _same_relations(g: Relation, a: Relation) -> bool | None:
    named = _with_name(g, a)
    a = _short(_with_name(a, g))
    g = _short(named)
    if g.signs == a.signs == ("=",):
        heads = sorted(str(getattr(side, "text", "")) for side in (g.sides[0], a.sides[0]))
        if re.fullmatch(r"[fgh]\(x\)", heads[0]) and heads[1] == "y":
            return _same(g.sides[-1], a.sides[-1])
    if _is_ordering(g) and _is_ordering(a):
        wanted = _bounds(g)
        given = _bounds(a)
        if wanted is not None and given is not None:
            return wanted[0] == given[0] and bool(_same_bounds(wanted[1], given[1]))
        return _same_chain(g, a) or _same_inequality(g, a)
    if g.signs != a.signs:
        if {g.signs, a.signs} == {("=",), (r"\approx",)}:
            return _same_chain(Relation(g.sides, ("=",), g.text), Relation(a.sides, ("=",), a.text))
        are_values = _assigned_value(g) is not None and _assigned_value(a) is not None
        if are_values and _same(g.sides[0], a.sides[0]):
            return _same(g.sides[-1], a.sides[-1])
        x = _intervals(g)
        y = _intervals(a)
        return _same_unordered(x, y) if x is not None and y is not None else False
    if _same_chain(g, a):
        return True
    return _same_equation(g, a) if g.signs in (("=",), (r"\ne",)) else False


def _with_name(relation: Relation, other: Relation) -> Relation:
    """Give a relation without a first side that of another relation."""
    name = next((side for side in other.sides if _name(side) and not _is_constant(side)), None)
    if not relation.is_bare or name is None:
        return relation
    return Relation((name, *relation.sides[1:]), relation.signs, relation.text)


def _short(relation: Relation) -> Relation:
    """x = 2 + 3 = 5 as x = 5."""
    if len(relation.signs) == 1 or not set(relation.signs) <= {"=", r"\approx"}:
        return relation
    return Relation((relation.sides[0], relation.sides[-1]), relation.signs[-1:], relation.text)


def _same_chain(g: Relation, a: Relation) -> bool:
    if g.signs == a.signs and _all(map(_same, g.sides, a.sides)):
        return True
    mirrored = tuple(_MIRROR.get(sign, sign) for sign in reversed(a.signs))
    if r"\in" in mirrored or r"\to" in mirrored or g.signs != mirrored:
        return False
    return _all(map(_same, g.sides, reversed(a.sides))) is True


_MIRROR = {"<": ">", ">": "<", r"\le": r"\ge", r"\ge": r"\le"}
#: What a relation without a first side is about.
_ANYTHING = Quantity("x", ("x", "x"))


def _difference(relation: Relation) -> Node | None:
    left = relation.sides[0]
    right = relation.sides[-1]
    if not isinstance(left, Quantity) or not isinstance(right, Quantity):
        return None
    return ("+", left.node, ("-", right.node))


def _same_equation(g: Relation, a: Relation) -> bool | None:
    x = _difference(g)
    y = _difference(a)
    if x is None or y is None:
        if (name := _name(g.sides[0])) and (other := _name(a.sides[0])):
            return _same(g.sides[-1], a.sides[-1]) if name == other else False
        is_unread = any(isinstance(side, Opaque) for side in (*g.sides, *a.sides))
        return None if is_unread else False
    if not symbols_of(x) or not symbols_of(y):
        return None if not symbols_of(x) and not symbols_of(y) else False
    if symbols_of(x) != symbols_of(y):
        return False
    return bool(proportional(x, y))


def _same_inequality(g: Relation, a: Relation) -> bool:
    """One-sided inequalities: c · (left - right), c > 0, with the same sign of comparison."""
    if len(g.signs) != 1 or len(a.signs) != 1:
        return False
    x = _upward(g)
    y = _upward(a)
    if x is None or y is None or x[1] != y[1]:
        return False
    ratio = ratio_at(x[0], y[0]) if proportional(x[0], y[0]) else None
    return ratio is not None and ratio > 0


def _upward(relation: Relation) -> tuple[Node, bool] | None:
    """Return (f, strict) of the inequality f > 0 or f >= 0."""
    difference = _difference(relation)
    if difference is None or relation.signs[0] not in _MIRROR:
        return None
    up = relation.signs[0] in (">", r"\ge")
    return (difference if up else ("-", difference)), relation.signs[0] in "<>"


def _is_ordering(relation: Relation) -> bool:
    return set(relation.signs) <= set(_MIRROR)


#: (low, closed, high, closed); None stands for infinity.
_Bounds = tuple[Any, bool, Any, bool]


def _bounds(relation: Relation) -> tuple[str, _Bounds] | None:
    """Return the variable of an inequality and its interval; None for other relations."""
    if not _is_ordering(relation) or len(relation.signs) > 2:
        return None
    sides = list(relation.sides)
    signs = list(relation.signs)
    if signs[0] in (">", r"\ge"):
        sides.reverse()
        signs = [_MIRROR[sign] for sign in reversed(signs)]
    if any(sign in (">", r"\ge") for sign in signs):
        return None
    names = [n for n, side in enumerate(sides) if _name(side) and not _is_constant(side)]
    if len(names) != 1 or (len(sides) == 3 and names != [1]):
        return None
    name = _name(sides[names[0]])
    if len(sides) == 2 and names == [0] and name.startswith("|"):  # |x| < 2
        bound = sides[1]
        if not _is_constant(bound):
            return None
        is_closed = signs[0] == r"\le"
        lowest = Quantity(f"-({bound.text})", ("-", bound.node))
        return name.strip("|"), (lowest, is_closed, bound, is_closed)
    if name.startswith("|"):
        return None
    at = names[0]
    others = [side for n, side in enumerate(sides) if n != at]
    if not all(map(_is_constant, others)):
        return None
    low = (sides[at - 1], signs[at - 1] == r"\le") if at > 0 else (None, False)
    high = (sides[at + 1], signs[at] == r"\le") if at < len(signs) else (None, False)
    return name, (*_endpoint(low), *_endpoint(high))


def _endpoint(end: tuple[Any, bool]) -> tuple[Any, bool]:
    return (None, False) if end[0] is not None and _is_infinite(end[0]) else end


def _is_infinite(number: Quantity) -> bool:
    return number.text.strip("+-") == r"\infty"


def _is_constant(side: Any) -> bool:
    return isinstance(side, Quantity) and not symbols_of(side.node)


def _same_bounds(x: _Bounds, y: _Bounds) -> bool | None:
    if x[1] != y[1] or x[3] != y[3]:
        return False
    pairs = ((x[0], y[0]), (x[2], y[2]))
    if any((p is None) != (q is None) for p, q in pairs):
        return False
    return _all(_same(p, q) for p, q in pairs if p is not None)


def _intervals(answer: Any) -> list[Sequence_] | None:
    r"""Read an inequality in one variable (or several with "or") as intervals."""
    if isinstance(answer, Sequence_):
        if not _is_unordered(answer):
            return [answer]
        if len(answer.items) == 2 and (pierced := _pierced(*answer.items)):
            return pierced
        parts = [_intervals(item) for item in answer.items]
        return None if None in parts else [one for part in parts for one in part or ()]
    if isinstance(answer, Union_):
        if answer.operator == r"\setminus" and len(answer.parts) == 2:
            return _without(answer.parts[0], _listed(answer.parts[1]))
        return list(answer.parts) if answer.operator == r"\cup" else None
    if isinstance(answer, Relation):
        sign = answer.signs[0] if len(answer.signs) == 1 and _name(answer.sides[0]) else ""
        end = answer.sides[1]
        if sign == r"\in":
            return _intervals(end)
        if sign == r"\ne" and isinstance(end, Quantity):
            return [_interval((None, False, end, False)), _interval((end, False, None, False))]
        if len(answer.signs) == 1 and (outside := _outside(answer)):
            return outside
        found = _bounds(answer)
        return None if found is None else [_interval(found[1])]
    return None


def _pierced(first: Any, second: Any) -> list[Sequence_] | None:
    r"""x \ge 2 and x \ne 5: an interval without a number."""
    if not isinstance(first, Relation) or not isinstance(second, Relation):
        return None
    found = _bounds(first)
    if found is None or second.signs != (r"\ne",) or _name(second.sides[0]) != found[0]:
        return None
    return _without(_interval(found[1]), _listed(second.sides[1]))


def _without(interval: Any, numbers: list[Any] | None) -> list[Sequence_] | None:
    """Return the intervals that remain without ``numbers``; None if that cannot be decided."""
    if not isinstance(interval, Sequence_) or len(interval.items) != 2:
        return None
    if not numbers or len(numbers) > 9:
        return None
    try:
        at = {number: as_float(number_of(number.node)).real for number in numbers}
        low, high = (as_float(number_of(item.node)).real for item in interval.items)
    except (NotMath, Undefined, AttributeError):
        return None
    inside = sorted((number for number in numbers if low < at[number] < high), key=at.__getitem__)
    if len(inside) != len(numbers):
        return None
    ends = [interval.items[0], *(number for number in inside for _ in "12"), interval.items[1]]
    pieces = [Sequence_("(", (ends[n], ends[n + 1]), ")") for n in range(0, len(ends), 2)]
    pieces[0] = Sequence_(interval.opening, pieces[0].items, ")")
    pieces[-1] = Sequence_(pieces[-1].opening, pieces[-1].items, interval.closing)
    return pieces


def _outside(relation: Relation) -> list[Sequence_] | None:
    """|x| > 2 as two intervals."""
    sign = relation.signs[0]
    sides = relation.sides
    if sign in ("<", r"\le"):
        sign = _MIRROR[sign]
        sides = sides[::-1]
    left, right = sides
    if sign not in (">", r"\ge") or not isinstance(left, Quantity) or not _is_constant(right):
        return None
    if not re.fullmatch(r"\|\\?[A-Za-z]+ ?\|", left.text):
        return None
    is_closed = sign == r"\ge"
    low = Quantity(f"-({right.text})", ("-", right.node))
    return [_interval((None, False, low, is_closed)), _interval((right, is_closed, None, False))]


def _interval(bounds: _Bounds) -> Sequence_:
    low = bounds[0] or Quantity(r"-\infty", ("-", ("x", "oo")))
    high = bounds[2] or Quantity(r"\infty", ("x", "oo"))
    return Sequence_("[" if bounds[1] else "(", (low, high), "]" if bounds[3] else ")")


# -- numbers ---------------------------------------------------------------------------------------


def _same_quantity(g: Quantity, a: Any) -> bool | None:
    if isinstance(a, Opaque):
        return None
    if not isinstance(a, Quantity):
        return False
    if g.glued and not symbols_of(a.node):
        return False if a.unit is None else _same_quantity(g.glued, a)
    if a.glued and not symbols_of(g.node):
        a = a.glued
    if contains(g.node, "±") or contains(a.node, "±"):
        return _same_unordered(_both_signs(g), _both_signs(a))
    if g.percent or a.percent:
        return _same_percent(g, a)
    if g.unit and a.unit:
        return _same_measure(g, a)
    if g.unit or a.unit:
        angle = (g.unit or a.unit).dimension == (("degree", 1),)
        return _same_value(g, a) or (angle and equal(_in_radians(g), _in_radians(a)))
    return _same_value(g, a)


def _in_radians(quantity: Quantity) -> Node:
    if quantity.unit and quantity.unit.dimension == (("degree", 1),):
        return ("*", quantity.node, ("f", "degree"))
    return quantity.node


def _same_measure(g: Quantity, a: Quantity) -> bool | None:
    assert g.unit and a.unit
    if g.unit.words or a.unit.words:
        is_same = g.unit.words.split()[-1:] == a.unit.words.split()[-1:]
        return _same_value(g, a) if is_same or Unit(()) in (g.unit, a.unit) else False
    if g.unit == a.unit or () in (g.unit.dimension, a.unit.dimension):
        return _same_value(g, a)
    if {g.unit, a.unit} == {read_unit("£"), read_unit("pounds")}:
        return _same_value(g, a)
    if {g.unit.dimension, a.unit.dimension} == {(("degree", 1),), (("rad", 1),)}:
        return equal(_in_radians(g), _in_radians(a))
    if g.unit.dimension != a.unit.dimension:
        return False
    return _same_value(_times(g, g.unit.factor), _times(a, a.unit.factor))


def _times(quantity: Quantity, by: Fraction) -> Quantity:
    """Return the number without its unit, multiplied."""
    node = ("*", quantity.node, ("n", by))
    return Quantity(quantity.text, node, decimal=_scaled(quantity.decimal, by))


def _same_percent(g: Quantity, a: Quantity) -> bool | None:
    if g.percent and a.percent:
        return _same_value(g, a)
    if _same_value(_as_share(g), _as_share(a)):
        return True
    if (g.unit or a.unit) is not None:
        return False
    try:
        plain = as_float(number_of(g.node))
    except (NotMath, Undefined):
        return _same_value(g, a)
    # answers to "what percent" omit the sign: 50 for 50 %; up to 1 it would be a share
    return _same_value(g, a) if not abs(plain) <= 1 or g.percent else False


def _as_share(quantity: Quantity) -> Quantity:
    return _times(quantity, Fraction(1, 100)) if quantity.percent else quantity


def _same_value(g: Quantity, a: Quantity) -> bool | None:
    if g.decimal is None and a.decimal is None:
        return equal(g.node, a.node)
    verdict = equal(g.node, a.node)
    if verdict or symbols_of(g.node) or symbols_of(a.node):
        return verdict
    try:
        return _is_approximation(g, a)
    except (TooBig, Undefined):
        return False


def _is_approximation(g: Quantity, a: Quantity) -> bool:
    """Tell whether a written decimal is the other value, rounded to the written digits."""
    if g.decimal and a.decimal:
        coarse, fine = sorted((g.decimal, a.decimal), key=lambda decimal: -decimal[1])
        if coarse[2] >= _APPROXIMATE_DIGITS and coarse[1] != fine[1]:
            return abs(coarse[0] - fine[0]) * 2 <= coarse[1]
        off = abs(g.decimal[0] - a.decimal[0])
        return max(g.decimal[2], a.decimal[2]) >= 15 and off * 10**14 <= abs(g.decimal[0])
    decimal, exact = (g.decimal, a) if g.decimal else (a.decimal, g)
    assert decimal
    if decimal[2] < (_LABEL_DIGITS if g.decimal else _APPROXIMATE_DIGITS):
        return False
    if not g.decimal and decimal[1] > Fraction(1, 10**6) * max(Fraction(1), abs(decimal[0])):
        return False
    value = number_of(exact.node)
    if isinstance(value, Fraction):
        if value.denominator == 1 or _is_terminating(value):
            return decimal[2] >= 15 and abs(value - decimal[0]) * 10**14 <= abs(value)
        written, step, digits = decimal
    else:
        value = as_float(value)
        written, step = map(as_float, decimal[:2])
        digits = decimal[2]
    off = value - written
    if off.imag:
        return False
    toward = off.real if value.real > 0 else -off.real
    is_truncated = 0 <= toward < step and digits >= _APPROXIMATE_DIGITS
    return bool(abs(off) * 2 <= step or is_truncated)


def _is_terminating(value: Fraction) -> bool:
    bottom = value.denominator
    for prime in (2, 5):
        while bottom % prime == 0:
            bottom //= prime
    return bottom == 1 and math.log10(value.denominator) < 12


def _same_opaque(g: Opaque, a: Any) -> bool | None:
    if isinstance(a, Opaque) and _bare(g.text) == _bare(a.text):
        return True
    return False if isinstance(a, Words) and "\\" not in a.text else None


def _all(verdicts: Iterable[bool | None]) -> bool | None:
    """Return True if all verdicts are True, None if some are unknown and none is False."""
    is_known = True
    for verdict in verdicts:
        if verdict is False:
            return False
        is_known &= verdict is not None
    return True if is_known else None


def _any(verdicts: Iterable[bool | None]) -> bool | None:
    verdict = _all(None if verdict is None else not verdict for verdict in verdicts)
    return None if verdict is None else not verdict


#: The first class that either of the two has decides. Classes in `_DIRECTED` need the label first.
_COMPARISONS: tuple[tuple[type, Callable[[Any, Any], bool | None]], ...] = (
    (Choice, _same_choice),
    (Congruence, _same_congruence),
    (Family, _same_family),
    (MathMatrix, _same_matrix),
    (Union_, _same_union),
    (Based, _same_based),
    (ClockTime, _same_clock),
    (Date, _same_date),
    (Sequence_, _same_sequence),
    (Ratio, _same_ratio),
    (Relation, _same_relation),
    (Words, _same_words),
    (Quantity, _same_quantity),
    (Opaque, _same_opaque),
)
_DIRECTED = (Sequence_, Relation)
