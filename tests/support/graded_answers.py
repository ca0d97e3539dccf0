r"""Graded answers whose truth is known by construction, for the math, DAPO and multiple-choice
graders.

A template draws its parameters, writes one value in several spellings (right) and changes the value
(wrong). Nothing here asks a grader. The value is changed, never the spelling alone, so a wrong
answer is wrong under every reading of its notation.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import Any


@dataclass(frozen=True)
class GradedAnswer:
    """A response with what a grader ought to say.

    Attributes:
        kind: the template, for messages.
        right: the truth, by construction.
    """

    kind: str
    response: str
    label: Any
    right: bool
    metadata: dict[str, Any] | None = None


@dataclass(frozen=True)
class Spelled:
    """One value in several spellings, and spellings of other values."""

    kind: str
    labels: Sequence[str]
    right: Sequence[str]
    wrong: Sequence[str]


_TEMPLATES: list[Callable[[random.Random], Spelled]] = []


def _template(function: Callable[[random.Random], Spelled]) -> Callable[[random.Random], Spelled]:
    _TEMPLATES.append(function)
    return function


def _signed(number: int) -> str:
    return f"+ {number}" if number >= 0 else f"- {-number}"


def _frac(value: Fraction, name: str = "frac") -> str:
    sign = "-" if value < 0 else ""
    return rf"{sign}\{name}{{{abs(value.numerator)}}}{{{value.denominator}}}"


def _proper(rng: random.Random) -> Fraction:
    while True:
        value = Fraction(rng.randint(1, 12), rng.randint(3, 13))
        if value.denominator > 2 and value < 1:
            return value


# -- numbers ---------------------------------------------------------------------------------------


@_template
def integers(rng: random.Random) -> Spelled:
    n = rng.randint(13, 999)
    wide = "".join(chr(ord("０") + int(digit)) for digit in str(n))
    return Spelled(
        "integers",
        [str(n), f"${n}$", f"{n}.0"],
        [
            f"{n}",
            f"{n}.",
            f"${n}$",
            rf"\text{{{n}}}",
            f"+{n}",
            f"{n}.0",
            f" {n} ",
            wide,
            rf"\mathbf{{{n}}}",
            f"({n})",
        ],
        [
            f"-{n}",
            f"{n + 1}",
            f"{n}0",
            f"{n}.1",
            f"{n},{n}",
            f"1/{n}",
            f"{n}!",
            rf"\sqrt{{{n}}}",
            f"{n}x",
            f"{n}^2",
        ],
    )


@_template
def negatives(rng: random.Random) -> Spelled:
    n = rng.randint(2, 99)
    return Spelled(
        "negatives",
        [f"-{n}", f"−{n}"],
        [f"-{n}", f"−{n}", f"- {n}", f"–{n}", f"-{n}.0", f"(-{n})"],
        [f"{n}", f"-{n + 1}", f"-{n}i", f"1-{n}"],
    )


@_template
def zeros(rng: random.Random) -> Spelled:
    return Spelled(
        "zeros",
        ["0"],
        ["-0", "0.0", "0.00", "+0", rf"0 \cdot {rng.randint(2, 9)}"],
        ["1", "0.01", r"\emptyset", "O(1)"],
    )


@_template
def thousands(rng: random.Random) -> Spelled:
    a, b = rng.randint(1, 999), rng.randint(0, 999)
    n = 1000 * a + b
    latex = f"{a}{{,}}{b:03d}"
    return Spelled(
        "thousands",
        [str(n), f"{n:,}"],
        [
            str(n),
            f"{n:,}",
            latex,
            rf"{a},\!{b:03d}",
            rf"{a}\,{b:03d}",
            f"{a} {b:03d}",
            f"{n:,}.00",
            f"{n:,} people",
        ],
        [f"{n + 1:,}", f"{a}.{b:03d}1", f"{a + 1}{{,}}{b:03d}", f"{a}, {b + 1}", f"{a}"],
    )


@_template
def fractions(rng: random.Random) -> Spelled:
    value = _proper(rng) * rng.choice((1, -1))
    p, q = value.numerator, value.denominator
    k = rng.randint(2, 5)
    return Spelled(
        "fractions",
        [_frac(value), f"{p}/{q}", _frac(value, "dfrac")],
        [
            _frac(value),
            _frac(value, "dfrac"),
            _frac(value, "tfrac"),
            f"{p}/{q}",
            f"{p} / {q}",
            f"{k * p}/{k * q}",
            rf"\left({p}/{q}\right)",
            rf"{p} \div {q}",
            rf"\frac{{{-p}}}{{-{q}}}",
            rf"\frac{{{p}}}{{{q}}}.",
        ],
        [
            f"{q}/{p}",
            _frac(-value),
            f"{p}/{q + 1}",
            f"{p}{q}",
            f"{p},{q}",
            f"({p},{q})",
            f"{p + q}/{q}",
            rf"\frac{{{p}}}{{{q}}}x",
        ],
    )


@_template
def short_fractions(rng: random.Random) -> Spelled:
    p, q = rng.choice([(1, 2), (1, 3), (2, 3), (3, 4), (1, 4), (1, 5), (1, 6), (3, 8), (5, 8)])
    sign = {
        (1, 2): "½",
        (1, 3): "⅓",
        (2, 3): "⅔",
        (3, 4): "¾",
        (1, 4): "¼",
        (1, 5): "⅕",
        (1, 6): "⅙",
        (3, 8): "⅜",
        (5, 8): "⅝",
    }
    return Spelled(
        "short fractions",
        [f"{p}/{q}", rf"\frac{p}{q}"],
        [
            rf"\frac{p}{q}",
            rf"\frac{p}{{{q}}}",
            rf"\frac{{{p}}}{q}",
            rf"\dfrac {p} {q}",
            sign[p, q],
            f"{p}⁄{q}",
        ],
        [rf"\frac{q}{p}", f"{p}{sign[p, q]}", f"{p}{q}", f"{p}.{q}"],
    )


@_template
def decimals(rng: random.Random) -> Spelled:
    hundredths = rng.choice([n for n in range(1, 400) if n % 10 and n % 100])
    value = Fraction(hundredths, 100)
    text = f"{hundredths // 100}.{hundredths % 100:02d}"
    bare = [text[1:]] if hundredths < 100 else []
    return Spelled(
        "decimals",
        [text, _frac(value)],
        [
            text,
            f"{text}0",
            f"{text}000",
            _frac(value),
            f"{hundredths}/100",
            *bare,
            f"${text}$",
            f"{text}.",
        ],
        [
            f"{hundredths}",
            f"{hundredths / 1000}",
            f"{text}1",
            text[:-1],
            f"-{text}",
            f"{text[:-1]}{(int(text[-1]) + 1) % 10}",
        ],
    )


@_template
def mixed_numbers(rng: random.Random) -> Spelled:
    whole, part = rng.randint(1, 9), _proper(rng)
    value = whole + part
    p, q = part.numerator, part.denominator
    # 9 1/10 is 91/10
    glued = [f"{whole}{p}/{q}"] if Fraction(int(f"{whole}{p}"), q) != value else []
    return Spelled(
        "mixed numbers",
        [
            f"{value.numerator}/{value.denominator}",
            rf"{whole}\frac{{{p}}}{{{q}}}",
            f"{whole} {p}/{q}",
        ],
        [
            f"{whole} {p}/{q}",
            rf"{whole}\frac{{{p}}}{{{q}}}",
            rf"{whole} \frac{{{p}}}{{{q}}}",
            rf"{whole}\dfrac{{{p}}}{{{q}}}",
            rf"{whole}\,\frac{{{p}}}{{{q}}}",
            f"{value.numerator}/{value.denominator}",
            rf"{whole}+\frac{{{p}}}{{{q}}}",
        ],
        [
            *glued,
            rf"{whole}\cdot\frac{{{p}}}{{{q}}}",
            f"{whole + 1} {p}/{q}",
            f"{p}/{q}",
            f"-{whole} {p}/{q}",
        ],
    )


@_template
def vulgar_mixed(rng: random.Random) -> Spelled:
    n = rng.randint(1, 30)
    return Spelled(
        "vulgar mixed",
        [f"{2 * n + 1}/2", f"{n}.5"],
        [f"{n}½", rf"{n}\tfrac12", f"{n} 1/2", f"{n} ½"],
        [f"{n}¼", "½", f"{n}/2", f"{n}12"],
    )


@_template
def repeating(rng: random.Random) -> Spelled:
    period = str(rng.choice([n for n in range(12, 98) if n % 11]))
    value = Fraction(int(period), 99)
    return Spelled(
        "repeating",
        [_frac(value), rf"0.\overline{{{period}}}"],
        [
            rf"0.\overline{{{period}}}",
            rf"0.\bar{{{period}}}",
            f"0.({period})",
            f"{value.numerator}/{value.denominator}",
            rf"0.\dot{{{period[0]}}}\dot{{{period[1]}}}",
            f"0.{period * 3}...",
            rf"0.{period * 3}\ldots",
            rf".\overline{{{period}}}",
        ],
        [
            f"0.{period}",
            rf"0.\overline{{{int(period) + 1}}}",
            rf"0.0\overline{{{period}}}",
            f"0.{period * 2}1",
            rf"1.\overline{{{period}}}",
        ],
    )


@_template
def repeating_behind(rng: random.Random) -> Spelled:
    first, digit = rng.randint(1, 9), rng.choice((1, 2, 3, 4, 5, 6, 7, 8))
    value = Fraction(first, 10) + Fraction(digit, 90)
    return Spelled(
        "repeating behind",
        [_frac(value)],
        [
            rf"0.{first}\overline{{{digit}}}",
            f"0.{first}({digit})",
            rf"0.{first}\dot{{{digit}}}",
            rf"0.{first}\overline{digit}",
        ],
        [
            f"0.{first}{digit}",
            rf"0.\overline{{{first}{(digit + 1) % 9}}}",
            rf"0.{first}0\overline{{{digit}}}",
        ],
    )


@_template
def scientific(rng: random.Random) -> Spelled:
    a, n = rng.randint(11, 98), rng.randint(2, 6)
    value = a * 10 ** (n - 1)
    text = f"{a // 10}.{a % 10}"
    return Spelled(
        "scientific",
        [str(value), rf"{text} \times 10^{{{n}}}"],
        [
            f"{text}e{n}",
            f"{text}E+{n}",
            rf"{text} \times 10^{n}",
            rf"{text}\cdot 10^{{{n}}}",
            f"{text} × 10^{n}",
            f"{text}*10^{n}",
            f"{text} x 10^{n}",
            f"{value:,}",
        ],
        [
            f"{text}e{n + 1}",
            rf"{text} \times 10^{{{-n}}}",
            rf"{text}1 \times 10^{n}",
            text,
            f"10^{n}",
        ],
    )


@_template
def small(rng: random.Random) -> Spelled:
    a, n = rng.randint(101, 998), rng.randint(7, 40)
    text = f"{a // 100}.{a % 100:02d}"
    return Spelled(
        "small",
        [rf"{text} \times 10^{{-{n}}}", f"{text}e-{n}"],
        [
            rf"{text} \times 10^{{-{n}}}",
            f"{text}e-{n}",
            rf"\frac{{{text}}}{{10^{{{n}}}}}",
            f"{text} × 10^(-{n})",
            rf"{a} \cdot 10^{{-{n + 2}}}",
            f"{text} × 10⁻{str(n).translate(str.maketrans('0123456789', '⁰¹²³⁴⁵⁶⁷⁸⁹'))}",
        ],
        [
            "0",
            f"{text}e-{n + 1}",
            rf"{a // 100}.{(a + 1) % 100:02d} \times 10^{{-{n}}}",
            f"-{text}e-{n}",
        ],
    )


@_template
def small_decimals(rng: random.Random) -> Spelled:
    a, zeros = rng.randint(12, 98), rng.randint(5, 10)
    return Spelled(
        "small decimals",
        [f"0.{'0' * zeros}{a}"],
        [f".{'0' * zeros}{a}", f"{a / 10}e-{zeros + 1}"],
        [f"0.{'0' * zeros}{a + 1}", f"0.{'0' * zeros}{a - 1}", f"0.{'0' * (zeros + 1)}{a}", "0"],
    )


@_template
def powers(rng: random.Random) -> Spelled:
    b, n = rng.randint(2, 9), rng.randint(60, 3000)
    return Spelled(
        "powers",
        [rf"\frac{{1}}{{{b}^{{{n}}}}}", f"1/{b}^{n}"],
        [f"{b}^{{-{n}}}", rf"\frac1{{{b}^{{{n}}}}}", rf"\left(\frac{{1}}{{{b}}}\right)^{{{n}}}"],
        [rf"\frac{{1}}{{{b}^{{{n - 1}}}}}", f"{b}^{{{n}}}", "0", rf"\frac{{1}}{{{b + 1}^{{{n}}}}}"],
    )


@_template
def factorials(rng: random.Random) -> Spelled:
    n = rng.randint(30, 2500)
    return Spelled(
        "factorials",
        [rf"\frac{{1}}{{{n}!}}"],
        [f"1/{n}!", rf"\frac{{1}}{{{n} \cdot {n - 1}!}}"],
        [rf"\frac{{1}}{{{n + 2}!}}", rf"\frac{{1}}{{{n - 1}!}}", f"{n}!", "0"],
    )


@_template
def factorial_values(rng: random.Random) -> Spelled:
    n, value = rng.choice([(4, 24), (5, 120), (6, 720), (7, 5040)])
    return Spelled(
        "factorial values",
        [str(value)],
        [f"{n}!", rf"{n} \times {n - 1}!", rf"\binom{{{value}}}{{1}}"],
        [f"{n + 1}!", f"{n}", rf"{n}!!"[:-1] + "+1", f"{n}^2"],
    )


@_template
def huge(rng: random.Random) -> Spelled:
    a, b = rng.randint(2, 9), rng.randint(8, 12)
    return Spelled(
        "huge",
        [f"{a}^{{10^{{{b}}}}}"],
        [f"{a}^{{10^{b}}}", f"{a}^{{{10**b}}}"],
        [
            f"{a}^{{10^{{{b + 1}}}}}",
            f"{a + 1}^{{10^{{{b}}}}}",
            f"{a}^{{10^{{{b}}}}}+1",
            f"{10**5}!",
        ],
    )


@_template
def big_integers(rng: random.Random) -> Spelled:
    n = rng.randint(10**25, 10**40)
    return Spelled(
        "big integers",
        [str(n)],
        [f"{n:,}", f"${n}$", f"{n:,}".replace(",", "{,}"), f"{n}.0"],
        [str(n + 1), str(n * 10), f"{n:.6e}", str(n - 2)],
    )


@_template
def roots(rng: random.Random) -> Spelled:
    a, r = rng.randint(2, 9), rng.choice((2, 3, 5, 6, 7))
    return Spelled(
        "roots",
        [rf"{a}\sqrt{{{r}}}"],
        [
            rf"{a}\sqrt {r}",
            rf"{a}\sqrt{r}",
            f"{a}√{r}",
            rf"{a}\sqrt({r})",
            rf"{a} \cdot \sqrt{{{r}}}",
            f"{a}sqrt({r})",
            f"{a}*sqrt({r})",
            rf"\sqrt{{{a * a * r}}}",
            rf"{a}{{\sqrt{{{r}}}}}",
            rf"\sqrt{{{r}}}\cdot {a}",
            f"{a}√({r})",
        ],
        [
            f"{a}",
            rf"{a}\sqrt{{{r + 4}}}",
            rf"\sqrt{{{a * r}}}",
            f"{a * r}",
            rf"{a}\sqrt[3]{{{r}}}",
            rf"-{a}\sqrt{{{r}}}",
            rf"\sqrt{{{r}}}",
        ],
    )


@_template
def root_fractions(rng: random.Random) -> Spelled:
    r, q = rng.choice((2, 3, 5, 7)), rng.choice((4, 6, 8, 9))
    return Spelled(
        "root fractions",
        [rf"\frac{{\sqrt{{{r}}}}}{{{q}}}"],
        [
            rf"\sqrt{{{r}}}/{q}",
            rf"\frac{{1}}{{{q}}}\sqrt{{{r}}}",
            rf"\frac{{{r}}}{{{q}\sqrt{{{r}}}}}",
            rf"\dfrac{{\sqrt{r}}}{{{q}}}",
            f"√{r}/{q}",
        ],
        [
            rf"\frac{{\sqrt{{{r}}}}}{{{q + 1}}}",
            rf"\frac{{{r}}}{{{q}}}",
            rf"\sqrt{{\frac{{{r}}}{{{q}}}}}",
            rf"\frac{{{q}}}{{\sqrt{{{r}}}}}",
        ],
    )


@_template
def cube_roots(rng: random.Random) -> Spelled:
    n = rng.choice((2, 3, 5, 7, 10))
    return Spelled(
        "cube roots",
        [rf"\sqrt[3]{{{n}}}"],
        [f"{n}^{{1/3}}", rf"{n}^{{\frac13}}", f"∛{n}", f"{n}^(1/3)"],
        [rf"\sqrt{{{n}}}", f"{n}^3", rf"\sqrt[4]{{{n}}}", f"{n}"],
    )


@_template
def circles(rng: random.Random) -> Spelled:
    n = rng.randint(2, 60)
    return Spelled(
        "circles",
        [rf"{n}\pi"],
        [f"{n}π", rf"{n} \pi", f"{n}*pi", rf"\pi \cdot {n}", rf"{2 * n}\cdot\frac{{\pi}}{{2}}"],
        [f"{n}", rf"{n + 1}\pi", rf"{n}\pi^2", rf"\frac{{{n}}}{{\pi}}"],
    )


@_template
def constants(rng: random.Random) -> Spelled:
    n = rng.randint(2, 9)
    return Spelled(
        "constants",
        [f"e^{{{n}}}"],
        [f"e^{n}", rf"\exp({n})", f"e^{{{n}.0}}", rf"\mathrm{{e}}^{{{n}}}"],
        [f"e^{{-{n}}}", f"{n}e", f"{n}^e", f"e^{{{n + 1}}}"],
    )


@_template
def logarithms(rng: random.Random) -> Spelled:
    a, b = rng.choice([(2, 3), (3, 5), (2, 7), (5, 3)])
    return Spelled(
        "logarithms",
        [rf"\log_{{{a}}} {b}"],
        [rf"\log_{a}{b}", rf"\frac{{\ln {b}}}{{\ln {a}}}", rf"\log_{{{a}}}({b})"],
        [rf"\log_{{{b}}} {a}", rf"\ln \frac{{{b}}}{{{a}}}", rf"\log_{{{a}}} {b + 1}"],
    )


@_template
def approximations(rng: random.Random) -> Spelled:
    p, q = rng.choice([(1, 3), (2, 7), (5, 6), (4, 9), (5, 11), (7, 13), (22, 7)])
    digits = str(Fraction(p * 10**9, q).__floor__())
    whole = f"{int(digits) // 10**9}.{int(digits) % 10**9:09d}"
    return Spelled(
        "approximations",
        [f"{p}/{q}"],
        [whole, rf"\frac{{{p}}}{{{q}}} \approx {whole[:6]}"],
        [whole[:3], whole[:5] + "9" * 5 if whole[5] != "9" else whole[:4], f"{p}.{q}"],
    )


@_template
def rounded_labels(rng: random.Random) -> Spelled:
    p, q = rng.choice([(1, 3), (2, 3), (5, 7), (1, 7), (8, 9)])
    label = f"{p / q:.4f}"
    last = int(label[-1])
    other = label[:-1] + str((last + 3) % 10)
    return Spelled(
        "rounded labels",
        [label],
        [label, rf"\frac{{{p}}}{{{q}}}", f"x = {label}"],
        [other, label[:4], rf"\frac{{{p + 1}}}{{{q}}}"],
    )


# -- percentages, units, money ---------------------------------------------------------------------


@_template
def percentages(rng: random.Random) -> Spelled:
    n = rng.choice([n for n in range(2, 99) if n % 10])
    return Spelled(
        "percentages",
        [f"{n}\\%", f"{n}%"],
        [
            f"{n}%",
            f"{n}\\%",
            f"{n}",
            f"0.{n:02d}",
            f"{n} percent",
            rf"{n}\text{{ percent}}",
            rf"{n}\,\%",
            f"{n}/100",
            f"{n}.0\\%",
        ],
        [f"{n + 1}\\%", f"{n}.5%", f"0.{n:02d}%", f"{n * 100}", f"0.0{n:02d}", f"-{n}%"],
    )


@_template
def shares(rng: random.Random) -> Spelled:
    n = rng.choice([n for n in range(12, 99) if n % 10])
    return Spelled(
        "shares",
        [f"0.{n}", f"{n}/100"],
        [f"{n}\\%", f"{n}%", f"0.{n}", rf"\frac{{{n}}}{{100}}"],
        [f"0.{n}\\%", f"{n + 1}\\%", f"{n}", f"{n * 10}%"],
    )


_UNITS = [
    ("cm", ["centimeters", "centimetres"], "kg"),
    ("m", ["meters", "metres"], "s"),
    ("km", ["kilometers"], "km^2"),
    ("kg", ["kilograms"], "m"),
    ("cm^2", ["square centimeters", "cm²"], "cm^3"),
    ("m^3", ["cubic meters", "m³"], "m^2"),
    ("m/s", ["meters per second", r"\frac{m}{s}", "m s^{-1}"], "m/s^2"),
    ("km/h", ["kilometers per hour", "km/hr"], "m/s"),
    ("hours", ["hours", "hr"], "minutes"),
    ("inches", ["inches", "in"], "feet"),
    ("J", ["joules"], "W"),
    ("mph", ["miles per hour"], "miles"),
    ("N", ["newtons"], "J"),
    ("mL", ["milliliters", "ml"], "L"),
    ("m/s^2", ["meters per second squared", "m s^{-2}"], "m/s"),
    ("Hz", ["hertz"], "s"),
]


@_template
def units(rng: random.Random) -> Spelled:
    n = rng.randint(2, 400)
    unit, names, other = rng.choice(_UNITS)
    return Spelled(
        "units",
        [rf"{n}\text{{ {unit}}}", f"{n} {unit}", f"{n} {names[0]}"],
        [
            f"{n} {unit}",
            rf"{n}\text{{ {unit}}}",
            rf"{n}\,\text{{{unit}}}",
            rf"{n}~\mathrm{{{unit}}}",
            f"{n}",
            *(f"{n} {name}" for name in names),
        ],
        [f"{n + 1} {unit}", f"{n} {other}", rf"{n}\text{{ {other}}}", f"-{n} {unit}", f"{n}.5"],
    )


@_template
def unit_left_out(rng: random.Random) -> Spelled:
    n = rng.randint(2, 400)
    unit, names, _ = rng.choice(_UNITS)
    return Spelled(
        "unit left out",
        [str(n)],
        [
            f"{n} {unit}",
            rf"{n}\text{{ {unit}}}",
            rf"{n}\ \text{{{unit}}}",
            f"{n} {names[0]}",
            rf"{n} \mathrm{{~{unit}}}",
        ],
        [f"{n + 1} {unit}", rf"{n}0\text{{ {unit}}}", f"{n}/7 {unit}"],
    )


@_template
def powers_of_units(rng: random.Random) -> Spelled:
    n, power = rng.randint(2, 300), rng.choice((2, 3))
    unit = rng.choice(("cm", "m", "km", "in", "ft", "units"))
    word = {2: "square", 3: "cubic"}[power]
    return Spelled(
        "powers of units",
        [str(n), rf"{n}\text{{ {unit}}}^{power}"],
        [
            rf"{n}\text{{ {unit}}}^{power}",
            rf"{n} \text{{ {unit}}}^{{{power}}}",
            rf"{n}\ \mathrm{{{unit}}}^{power}",
            f"{n} {unit}^{power}",
            rf"{n}\text{{ {word} {unit}}}",
        ],
        [rf"{n + 1}\text{{ {unit}}}^{power}", rf"{n}^{power}", f"{n * n} {unit}"],
    )


@_template
def conversions(rng: random.Random) -> Spelled:
    n = rng.randint(2, 90)
    return Spelled(
        "conversions",
        [f"{n} m"],
        [f"{n * 100} cm", rf"{n * 1000}\text{{ mm}}"],
        [f"{n * 10} cm", f"{n} cm", f"{n} kg"],
    )


@_template
def things(rng: random.Random) -> Spelled:
    n = rng.randint(2, 300)
    thing = rng.choice(["apples", "students", "ways", "marbles", "pages"])
    return Spelled(
        "things",
        [str(n), f"{n} {thing}"],
        [f"{n} {thing}", rf"{n}\text{{ {thing}}}", rf"{n} \text{{{thing}}}", f"{n}"],
        [f"{n + 1} {thing}", rf"{n * 2}\text{{ {thing}}}", thing],
    )


@_template
def degrees(rng: random.Random) -> Spelled:
    n = rng.randint(10, 170)
    return Spelled(
        "degrees",
        [rf"{n}^\circ", f"{n}", f"{n}°"],
        [
            f"{n}°",
            rf"{n}^\circ",
            rf"{n}^{{\circ}}",
            f"{n} degrees",
            rf"{n}\text{{ degrees}}",
            f"{n}",
            rf"{n}\degree",
        ],
        [f"{n + 1}°", rf"{n}0^\circ", f"-{n}°", rf"{180 + n}^\circ"],
    )


@_template
def temperatures(rng: random.Random) -> Spelled:
    n = rng.randint(5, 95)
    return Spelled(
        "temperatures",
        [rf"{n}^\circ\text{{C}}", f"{n} °C"],
        [f"{n}°C", rf"{n}\,^\circ \mathrm{{C}}", f"{n} degrees Celsius", f"{n}"],
        [f"{n} °F", f"{n + 1} °C", rf"{n}\text{{ K}}"],
    )


@_template
def money(rng: random.Random) -> Spelled:
    n, cents = rng.randint(2, 900), rng.choice((0, 25, 40, 50))
    text = f"{n}.{cents:02d}"
    plain = text if cents else str(n)
    return Spelled(
        "money",
        [rf"\${plain}", plain, f"{plain} dollars"],
        [
            rf"\${text}",
            rf"\$ {text}",
            f"{text} dollars",
            rf"{text}\text{{ dollars}}",
            f"USD {text}",
            text,
            rf"\text{{\${text}}}",
            f"${text}",
        ],
        [rf"\${n + 1}", f"{n * 100}", rf"-\${text}", f"€{n + 2}"],
    )


@_template
def dollars_and_cents(rng: random.Random) -> Spelled:
    n = rng.randint(2, 90)
    return Spelled(
        "dollars and cents",
        [rf"\${n}", f"{n} dollars"],
        [f"{n * 100} cents", rf"{n}\text{{ dollars}}"],
        [f"{n} cents", f"{n} euros", f"{n * 100} dollars"],
    )


@_template
def large_money(rng: random.Random) -> Spelled:
    n = rng.randint(1, 80) * 1000 + rng.choice((0, 250, 500))
    return Spelled(
        "large money",
        [rf"\${n:,}", str(n)],
        [rf"\${n:,}.00", f"{n:,} dollars", rf"\${n // 1000}{{,}}{n % 1000:03d}", f"{n}"],
        [rf"\${n // 1000}", rf"\${n + 1000:,}", f"{n // 1000}.{n % 1000:03d}5"],
    )


@_template
def multiples(rng: random.Random) -> Spelled:
    n, word, factor = (
        rng.randint(2, 90),
        *rng.choice([("million", 10**6), ("thousand", 1000), ("billion", 10**9)]),
    )
    return Spelled(
        "multiples",
        [str(n * factor)],
        [f"{n} {word}", rf"{n}\text{{ {word}}}", f"{n * factor:,}", f"{n} {word} dollars"],
        [f"{n}", f"{n + 1} {word}", f"{n}.1 {word}"],
    )


@_template
def ordinals(rng: random.Random) -> Spelled:
    n = rng.randint(4, 20)
    return Spelled(
        "ordinals",
        [f"{n}th", f"{n}"],
        [f"{n}th", rf"{n}^{{\text{{th}}}}", rf"{n}\text{{th}}", rf"{n}^\text{{th}}"],
        [f"{n + 1}th", f"{n}0th", rf"{n}^{{2}}"],
    )


# -- bases, times, ratios --------------------------------------------------------------------------


def _in_base(value: int, base: int) -> str:
    digits = ""
    while value:
        value, digit = divmod(value, base)
        digits = "0123456789ABCDEF"[digit] + digits
    return digits


@_template
def bases(rng: random.Random) -> Spelled:
    base = rng.randint(2, 9)
    value = rng.randint(base**3, base**4)
    text, word = (
        _in_base(value, base),
        ["zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine"][base],
    )
    return Spelled(
        "bases",
        [f"{text}_{base}", f"{text}_{{{base}}}"],
        [
            f"{text}_{{{base}}}",
            f"{text}_{base}",
            f"({text})_{{{base}}}",
            rf"{text}_{{\text{{{word}}}}}",
            text,
            f"{text}_{{({base})}}",
            rf"\text{{{text}}}_{{{base}}}",
            f"{text} (base {base})",
        ],
        [
            f"{text}_{base + 1}",
            f"{_in_base(value + 1, base)}_{{{base}}}",
            f"{text}0_{{{base}}}",
            f"{_in_base(value * base + 1, base)}",
        ],
    )


@_template
def times(rng: random.Random) -> Spelled:
    hour, minute = rng.randint(1, 11), rng.choice((0, 15, 30, 45))
    half, other = rng.choice([("am", "pm"), ("pm", "am")])
    text = f"{hour}:{minute:02d}"
    dotted = f"{half[0]}.m."
    return Spelled(
        "times",
        [f"{text} {half}", rf"{text}\text{{ {half.upper()}}}"],
        [
            f"{text} {half}",
            f"{text} {half.upper()}",
            f"{text}{half}",
            rf"{text}\text{{ {dotted}}}",
            f"{text} {dotted}",
            rf"\text{{{text} {half}}}",
        ],
        [f"{text} {other}", f"{hour + 1}:{minute:02d} {half}", f"{hour}:{(minute + 5):02d} {half}"],
    )


@_template
def clock_times(rng: random.Random) -> Spelled:
    hour, minute = rng.randint(1, 11), rng.choice((10, 15, 20, 30, 45))
    return Spelled(
        "clock times",
        [f"{hour}:{minute}"],
        [rf"{hour}\!:\!{minute}", rf"\text{{{hour}:{minute}}}", f"{hour} : {minute}"],
        [f"{hour + 1}:{minute}", f"{hour}:{minute + 5}", f"{minute}:{hour:02d}", f"{hour}{minute}"],
    )


@_template
def ratios(rng: random.Random) -> Spelled:
    a, b = rng.choice([(3, 2), (5, 7), (4, 9), (11, 3), (8, 5)])
    return Spelled(
        "ratios",
        [f"{a}:{b}"],
        [f"{a} : {b}", rf"{a}\!:\!{b}", f"{a} to {b}", f"{2 * a}:{2 * b}", rf"{a}\colon {b}"],
        [f"{b}:{a}", f"{a}:{b + 1}", f"{a + b}:{b}", f"{a}", f"{a}:{b}:1"],
    )


@_template
def dates(rng: random.Random) -> Spelled:
    month, other = rng.choice([("March", "May"), ("July", "June"), ("October", "November")])
    day, year = rng.randint(1, 27), rng.randint(1900, 2030)
    return Spelled(
        "dates",
        [f"{month} {day}, {year}"],
        [f"{day} {month} {year}", f"{month} {day} {year}", rf"\text{{{month} {day}, {year}}}"],
        [f"{other} {day}, {year}", f"{month} {day + 1}, {year}", f"{month} {day}, {year + 1}"],
    )


# -- lists, sets, tuples, intervals ----------------------------------------------------------------


def _different(rng: random.Random, count: int) -> list[int]:
    return sorted(rng.sample([n for n in range(-20, 60) if n not in (0, 1)], count))


@_template
def lists(rng: random.Random) -> Spelled:
    numbers = _different(rng, rng.randint(2, 4))
    texts = list(map(str, numbers))
    other = [*texts[:-1], str(numbers[-1] + 1)]
    return Spelled(
        "lists",
        [",".join(texts), ", ".join(texts), rf"\{{{', '.join(texts)}\}}"],
        [
            ",".join(texts),
            ", ".join(reversed(texts)),
            rf"\{{{','.join(texts)}\}}",
            rf"\left\{{{', '.join(texts)}\right\}}",
            ", ".join(texts[:-1]) + " and " + texts[-1],
            ", ".join(texts[:-1]) + rf" \text{{ and }} {texts[-1]}",
            ", ".join(f"x = {text}" for text in texts),
            " or ".join(f"x={text}" for text in texts),
            "x = " + ", ".join(texts),
            ";".join(texts),
            rf"{{{','.join(texts)}}}",
        ],
        [
            ",".join(other),
            ",".join(texts[:-1]),
            ",".join([*texts, "99"]),
            "".join(texts),
            rf"\{{{', '.join(other)}\}}",
            texts[0],
            " and ".join(other),
        ],
    )


@_template
def pairs(rng: random.Random) -> Spelled:
    a, b = rng.sample(range(-9, 20), 2)
    return Spelled(
        "pairs",
        [f"({a},{b})", f"({a}, {b})"],
        [
            f"({a},{b})",
            f"( {a} , {b} )",
            rf"\left({a}, {b}\right)",
            rf"({a},\,{b})",
            rf"\left( {a},\ {b} \right)",
            f"({a}.0, {b})",
            f"(x, y) = ({a}, {b})",
            rf"x={a}, y={b}",
        ],
        [
            f"({b},{a})",
            f"[{a},{b}]",
            f"[{a},{b})",
            f"({a},{b + 1})",
            f"({a},{b},0)",
            f"{a}",
            rf"({a}{abs(b)})",
        ],
    )


@_template
def triples(rng: random.Random) -> Spelled:
    a, b, c = rng.sample(range(-9, 20), 3)
    return Spelled(
        "triples",
        [f"({a},{b},{c})"],
        [f"({a}, {b}, {c})", rf"\langle {a}, {b}, {c} \rangle", rf"\left({a},{b},{c}\right)"],
        [
            f"({a},{c},{b})",
            f"({c},{b},{a})",
            f"({a},{b})",
            f"({a},{b},{c + 1})",
            rf"\{{{a},{b},{c}\}}",
        ],
    )


@_template
def fraction_pairs(rng: random.Random) -> Spelled:
    value, n = _proper(rng), rng.randint(2, 9)
    p, q = value.numerator, value.denominator
    return Spelled(
        "fraction pairs",
        [rf"\left(\frac{{{p}}}{{{q}}}, {n}\right)"],
        [
            f"({p}/{q}, {n})",
            rf"(\dfrac{{{p}}}{{{q}}},{n})",
            rf"\left(\tfrac{{{p}}}{{{q}}},\, {n}\right)",
        ],
        [f"({n}, {p}/{q})", f"({q}/{p}, {n})", f"({p},{q},{n})"],
    )


@_template
def point_lists(rng: random.Random) -> Spelled:
    a, b, c, d = rng.sample(range(-9, 20), 4)
    return Spelled(
        "point lists",
        [f"({a},{b}), ({c},{d})", rf"\{{({a},{b}),({c},{d})\}}"],
        [
            f"({a},{b}),({c},{d})",
            f"({c},{d}), ({a},{b})",
            rf"\{{({c},{d}), ({a},{b})\}}",
            rf"({a},{b}) \text{{ and }} ({c},{d})",
        ],
        [f"({b},{a}), ({c},{d})", f"({a},{b})", f"({a},{d}), ({c},{b})", f"({a},{b},{c},{d})"],
    )


@_template
def intervals(rng: random.Random) -> Spelled:
    a = rng.randint(-9, 9)
    b = a + rng.randint(1, 9)
    left, right = rng.choice("(["), rng.choice(")]")
    less, less_b = (r"\le" if left == "[" else "<"), (r"\le" if right == "]" else "<")
    flipped = ("(" if left == "[" else "["), (")" if right == "]" else "]")
    return Spelled(
        "intervals",
        [f"{left}{a},{b}{right}"],
        [
            f"{left}{a}, {b}{right}",
            rf"\left{left}{a},{b}\right{right}",
            rf"x \in {left}{a},{b}{right}",
            f"{a} {less} x {less_b} {b}",
            f"{left}{a}.0,{b}{right}",
        ],
        [
            f"{flipped[0]}{a},{b}{right}",
            f"{left}{a},{b}{flipped[1]}",
            f"{left}{a},{b + 1}{right}",
            f"{left}{a - 1},{b}{right}",
        ],
    )


@_template
def rays(rng: random.Random) -> Spelled:
    a = rng.randint(-9, 20)
    return Spelled(
        "rays",
        [rf"[{a},\infty)", rf"x \ge {a}"],
        [
            rf"[{a}, \infty)",
            rf"\left[{a},\infty\right)",
            f"[{a}, ∞)",
            rf"[{a}, +\infty)",
            rf"x \geq {a}",
            rf"{a} \le x",
            f"x >= {a}",
            rf"x \in [{a},\infty)",
        ],
        [
            rf"({a},\infty)",
            rf"(-\infty,{a}]",
            f"x > {a}",
            rf"x \le {a}",
            rf"[{a + 1},\infty)",
            f"{a}",
        ],
    )


@_template
def unions(rng: random.Random) -> Spelled:
    a = rng.randint(-9, 5)
    b = a + rng.randint(1, 9)
    return Spelled(
        "unions",
        [rf"(-\infty,{a})\cup({b},\infty)"],
        [
            rf"(-\infty, {a}) \cup ({b}, \infty)",
            rf"({b},\infty)\cup(-\infty,{a})",
            f"(-∞,{a}) ∪ ({b},∞)",
            rf"x<{a} \text{{ or }} x>{b}",
            f"x < {a} or x > {b}",
            rf"x \in \left(-\infty,{a}\right) \cup \left({b},\infty\right)",
        ],
        [
            rf"(-\infty,{a}]\cup({b},\infty)",
            rf"({a},{b})",
            rf"(-\infty,{b})\cup({a},\infty)",
            rf"(-\infty,{a})",
            rf"(-\infty,{a})\cup({b + 1},\infty)",
        ],
    )


@_template
def plus_minus(rng: random.Random) -> Spelled:
    a = rng.randint(2, 30)
    return Spelled(
        "plus-minus",
        [rf"\pm {a}", f"{a}, -{a}"],
        [
            rf"\pm{a}",
            f"±{a}",
            f"{a},-{a}",
            f"-{a}, {a}",
            rf"\{{-{a},{a}\}}",
            rf"x = \pm {a}",
            f"x={a} or x=-{a}",
            f"+{a}, -{a}",
        ],
        [f"{a}", f"-{a}", rf"\pm {a + 1}", f"{a},-{a + 1}", rf"\{{{a}\}}"],
    )


@_template
def quadratic_roots(rng: random.Random) -> Spelled:
    a, r = rng.randint(1, 9), rng.choice((2, 3, 5, 7))
    return Spelled(
        "quadratic roots",
        [rf"{a} \pm \sqrt{{{r}}}"],
        [
            rf"{a}+\sqrt{{{r}}}, {a}-\sqrt{{{r}}}",
            rf"{a}\pm\sqrt{r}",
            rf"x={a}\pm\sqrt{{{r}}}",
            f"{a} ± √{r}",
        ],
        [rf"{a}+\sqrt{{{r}}}", rf"-{a}\pm\sqrt{{{r}}}", rf"{a}\pm {r}"],
    )


@_template
def matrices(rng: random.Random) -> Spelled:
    a, b, c, d = rng.sample(range(-9, 20), 4)
    name, other = rng.sample(["pmatrix", "bmatrix"], 2)
    body = rf"{a} & {b} \\ {c} & {d}"
    return Spelled(
        "matrices",
        [rf"\begin{{{name}}}{body}\end{{{name}}}"],
        [
            rf"\begin{{{name}}} {body} \end{{{name}}}",
            rf"\begin{{{other}}}{a}&{b}\\{c}&{d}\end{{{other}}}",
            rf"\left(\begin{{array}}{{cc}}{body}\end{{array}}\right)",
            rf"A = \begin{{{name}}}{body}\end{{{name}}}",
            f"[[{a}, {b}], [{c}, {d}]]",
        ],
        [
            rf"\begin{{{name}}}{a} & {c} \\ {b} & {d}\end{{{name}}}",
            rf"\begin{{{name}}}{a} & {b}\end{{{name}}}",
            rf"\begin{{{name}}}{a} & {b} \\ {c} & {d + 1}\end{{{name}}}",
            f"{a}, {b}, {c}, {d}",
        ],
    )


@_template
def vectors(rng: random.Random) -> Spelled:
    a, b, c = rng.sample(range(-9, 20), 3)
    return Spelled(
        "vectors",
        [rf"\begin{{pmatrix}}{a}\\{b}\\{c}\end{{pmatrix}}"],
        [
            rf"\begin{{bmatrix}} {a} \\ {b} \\ {c} \end{{bmatrix}}",
            rf"\begin{{pmatrix}}{a} \\[4pt] {b} \\ {c}\end{{pmatrix}}",
            rf"\mathbf{{v}} = \begin{{pmatrix}}{a}\\{b}\\{c}\end{{pmatrix}}",
        ],
        [
            rf"\begin{{pmatrix}}{b}\\{a}\\{c}\end{{pmatrix}}",
            rf"\begin{{pmatrix}}{a}\\{b}\end{{pmatrix}}",
            rf"\begin{{pmatrix}}{a}\\{b}\\{c + 1}\end{{pmatrix}}",
        ],
    )


# -- expressions -----------------------------------------------------------------------------------


@_template
def assignments(rng: random.Random) -> Spelled:
    n = rng.randint(2, 90)
    return Spelled(
        "assignments",
        [f"x = {n}", str(n)],
        [f"x={n}", f"x = {n}", f"{n}", f"x = {2 * n}/2 = {n}", rf"x \approx {n}", f"{n} = x"],
        [f"x = {n + 1}", f"x + 1 = {n}", f"2x = {n}", f"x = -{n}"],
    )


@_template
def named_values(rng: random.Random) -> Spelled:
    n = rng.randint(2, 90)
    return Spelled(
        "named values",
        [str(n)],
        [
            f"AB = {n}",
            f"f(3) = {n}",
            f"m+n={n}",
            rf"\text{{Area}} = {n}",
            rf"\angle ABC = {n}^\circ",
            f"P(2) = {n}",
            f"a_1 = {n}",
            f"= {n}",
        ],
        [f"AB = {n + 1}", f"f({n}) = 1", f"x - 1 = {n}"],
    )


@_template
def polynomials(rng: random.Random) -> Spelled:
    a, b = rng.randint(2, 9), rng.randint(1, 9)
    return Spelled(
        "polynomials",
        [f"x^2 - {a + b}x + {a * b}"],
        [
            f"x^{{2}} - {a + b}x + {a * b}",
            f"(x-{a})(x-{b})",
            f"(x - {a}) \\cdot (x - {b})",
            f"{a * b} - {a + b}x + x^2",
            f"x(x-{a + b})+{a * b}",
            f"x**2 - {a + b}*x + {a * b}",
            f"x² − {a + b}x + {a * b}",
        ],
        [
            f"x^2 + {a + b}x + {a * b}",
            f"x^2 - {a + b}x - {a * b}",
            f"(x-{a})(x+{b})",
            f"y^2 - {a + b}y + {a * b}",
            f"x^2 - {a + b}x",
        ],
    )


@_template
def rational_functions(rng: random.Random) -> Spelled:
    a = rng.randint(2, 9)
    return Spelled(
        "rational functions",
        [rf"\frac{{x+{a}}}{{x-{a}}}"],
        [
            f"(x+{a})/(x-{a})",
            rf"\dfrac{{{a}+x}}{{x-{a}}}",
            rf"1+\frac{{{2 * a}}}{{x-{a}}}",
            rf"-\frac{{x+{a}}}{{{a}-x}}",
        ],
        [rf"\frac{{x-{a}}}{{x+{a}}}", f"x+{a}/x-{a}", rf"\frac{{x+{a}}}{{x-{a + 1}}}"],
    )


@_template
def lines(rng: random.Random) -> Spelled:
    a, b = rng.randint(2, 9), rng.randint(1, 9)
    return Spelled(
        "lines",
        [f"y = {a}x + {b}"],
        [
            f"y={a}x+{b}",
            f"y = {b} + {a}x",
            f"{a}x - y + {b} = 0",
            f"{a}x + {b}",
            f"y - {a}x = {b}",
            f"2y = {2 * a}x + {2 * b}",
        ],
        [
            f"y = {a}x - {b}",
            f"y = {b}x + {a}" if a != b else "y = 0",
            f"y = -{a}x + {b}",
            f"x = {a}y + {b}",
            f"{a}x",
        ],
    )


@_template
def circles_equations(rng: random.Random) -> Spelled:
    a, b, r = rng.randint(1, 9), rng.randint(1, 9), rng.randint(2, 9)
    return Spelled(
        "circle equations",
        [f"(x-{a})^2 + (y+{b})^2 = {r * r}"],
        [
            f"(y+{b})^2+(x-{a})^2={r * r}",
            f"(x - {a})^{{2}} + (y + {b})^{{2}} = {r}^2",
            f"{r * r} = (x-{a})^2 + (y+{b})^2",
        ],
        [
            f"(x+{a})^2 + (y-{b})^2 = {r * r}",
            f"(x-{a})^2 + (y+{b})^2 = {r * r + 1}",
            f"(x-{a})^2 - (y+{b})^2 = {r * r}",
        ],
    )


@_template
def inequalities(rng: random.Random) -> Spelled:
    a = rng.randint(-9, 20)
    return Spelled(
        "inequalities",
        [f"x > {a}"],
        [f"{a} < x", f"x>{a}", rf"x \gt {a}", rf"({a}, \infty)", f"2x > {2 * a}"],
        [f"x < {a}", rf"x \ge {a}", f"x > {a + 1}", f"{a} > x", f"x = {a}"],
    )


@_template
def complex_numbers(rng: random.Random) -> Spelled:
    a, b = rng.randint(2, 9), rng.randint(2, 9)
    return Spelled(
        "complex numbers",
        [f"{a}+{b}i"],
        [f"{a} + {b}i", f"{b}i + {a}", rf"{a}+{b}\mathrm{{i}}", f"{a}+i{b}", f"z = {a}+{b}i"],
        [f"{a}-{b}i", f"{a + b}i", f"{b}+{a}i" if a != b else "i", f"{a}+{b}", f"-{a}+{b}i"],
    )


@_template
def trigonometry(rng: random.Random) -> Spelled:
    n = rng.choice((30, 45, 60))
    value = {30: r"\frac{1}{2}", 45: r"\frac{\sqrt{2}}{2}", 60: r"\frac{\sqrt{3}}{2}"}[n]
    return Spelled(
        "trigonometry",
        [value],
        [
            rf"\sin {n}^\circ",
            rf"\cos({90 - n}^\circ)",
            rf"\sin\left(\frac{{\pi}}{{{180 // n}}}\right)",
        ],
        [rf"-\sin {n}^\circ", rf"\tan {n}^\circ", rf"\sin {n}"],
    )


@_template
def variables(rng: random.Random) -> Spelled:
    a, b = rng.sample("abkmnpqrst", 2)
    n = rng.randint(2, 9)
    return Spelled(
        "variables",
        [f"{n}{a} + {b}"],
        [f"{b} + {n}{a}", rf"{n} \cdot {a} + {b}", f"{a}*{n} + {b}"],
        [f"{n}{b} + {a}", f"{n}{a} - {b}", f"{n}{a}{b}", f"{n}({a}+{b})"],
    )


@_template
def indexed(rng: random.Random) -> Spelled:
    n = rng.randint(2, 9)
    return Spelled(
        "indexed",
        [rf"\frac{{n(n+{n})}}{{2}}"],
        [
            rf"\frac12 n(n+{n})",
            rf"\frac{{n^2+{n}n}}{{2}}",
            rf"\frac{{n^{{2}}}}{{2}}+\frac{{{n}n}}{{2}}",
        ],
        [rf"\frac{{n(n-{n})}}{{2}}", rf"n(n+{n})", rf"\frac{{k(k+{n})}}{{2}}"],
    )


@_template
def congruences(rng: random.Random) -> Spelled:
    n = rng.randint(5, 12)
    r = rng.randint(1, n - 2)
    return Spelled(
        "congruences",
        [rf"x \equiv {r} \pmod{{{n}}}", rf"x\equiv {r}\ (\text{{mod }} {n})"],
        [
            rf"{r} \pmod{{{n}}}", rf"x \equiv {r + n} \pmod {{{n}}}", rf"x\equiv {r} \bmod {n}",
            rf"x\equiv {r}\ (\mathrm{{mod}}\ {n})", rf"x={n}k+{r}, k\in\mathbb{{Z}}",
        ],
        [
            rf"x \equiv {r + 1} \pmod{{{n}}}", rf"x \equiv {r} \pmod{{{n + 1}}}", rf"y \equiv {r} \pmod{{{n}}}",
            rf"x={n}k+{r + 1}, k\in\mathbb{{Z}}",
        ],
    )  # fmt: skip


@_template
def families(rng: random.Random) -> Spelled:
    d = rng.choice((3, 4, 5, 6))
    x = rf"\frac{{\pi}}{{{d}}}"
    return Spelled(
        "families",
        [rf"x = {x} + k\pi, k \in \mathbb{{Z}}", rf"{x}+k\pi\ (k\in\mathbb{{Z}})"],
        [
            rf"x={x}+n\pi,\ n\in\mathbb{{Z}}", rf"{x} + \pi k, \text{{ where }} k \text{{ is an integer}}",
            rf"{x} + \pi n \text{{ for any integer }} n", rf"{x}+(k-1)\pi, k\in\mathbb Z",
        ],
        [
            rf"x={x}+2k\pi, k\in\mathbb{{Z}}", rf"x=-{x}+k\pi, k\in\mathbb{{Z}}", x,
            rf"x=\frac{{\pi}}{{{d + 1}}}+k\pi, k\in\mathbb{{Z}}",
        ],
    )  # fmt: skip


@_template
def combinations(rng: random.Random) -> Spelled:
    n = rng.randint(8, 14)
    k = rng.randint(2, 3)
    value = math.comb(n, k)
    return Spelled(
        "combinations",
        [str(value), rf"\binom{{{n}}}{{{k}}}"],
        [
            f"C({n},{k})", rf"_{{{n}}}C_{{{k}}}", rf"{{}}_{{{n}}}C_{k}", rf"C_{{{n}}}^{k}", rf"{{{n} \choose {k}}}",
            rf"^{{{n}}}C_{k}", rf"\frac{{{n}!}}{{{k}!{n - k}!}}", str(value),
        ],
        [f"C({n + 1},{k})", rf"_{{{n}}}C_{{{k + 1}}}", rf"_{{{n}}}P_{{{k}}}", f"({n},{k})", rf"\frac{{{n}!}}{{{k}!}}"],
    )  # fmt: skip


@_template
def alternating(rng: random.Random) -> Spelled:
    a = rng.randint(2, 9)
    return Spelled(
        "alternating",
        [rf"(-1)^n {a}^n", rf"(-{a})^n"],
        [rf"(-{a})^n", rf"(-1)^{{n}} \cdot {a}^{{n}}", rf"(-1)^{{n+2}} {a}^n"],
        [rf"{a}^n", rf"(-1)^{{n+1}} {a}^n", "(-1)^n", rf"-{a}^n"],
    )


@_template
def series(rng: random.Random) -> Spelled:
    a = rng.randint(2, 7)
    return Spelled(
        "series",
        [rf"\sum_{{k=1}}^{{n}} {a}k", rf"\frac{{{a}n(n+1)}}{{2}}"],
        [
            rf"\sum_{{i=1}}^n {a}i",
            rf"\sum\limits_{{j=1}}^{{n}} {a} j",
            rf"\frac{{{a}(n^2+n)}}{{2}}",
        ],
        [
            rf"\sum_{{k=1}}^{{n-1}} {a}k",
            rf"\sum_{{k=1}}^{{n}} {a + 1}k",
            rf"\frac{{{a}n(n-1)}}{{2}}",
        ],
    )


@_template
def integrals(rng: random.Random) -> Spelled:
    n = rng.randint(2, 6)
    return Spelled(
        "integrals",
        [rf"\int_0^1 x^{n}\,dx", rf"\frac{{1}}{{{n + 1}}}"],
        [rf"\int_0^1 t^{n} dt", rf"\int_{{0}}^{{1}} x^{{{n}}}\,\mathrm{{d}}x", rf"\frac1{n + 1}"],
        [rf"\int_0^2 x^{n} dx", rf"\int_0^1 x^{n + 1} dx", rf"\frac1{n}"],
    )


@_template
def arcs(rng: random.Random) -> Spelled:
    d = rng.randint(10, 80)
    return Spelled(
        "arcs",
        [rf"{d}^\circ 30'", rf"{d}.5^\circ"],
        [
            f"{d}° 30'",
            rf"{d}^{{\circ}}30^\prime",
            rf"{d}^\circ 30' 0''",
            rf"{d}.5^\circ",
            f"{d}.5 degrees",
        ],
        [rf"{d}^\circ", rf"{d}.3^\circ", rf"{d + 1}^\circ 30'", rf"{d}^\circ 20'"],
    )


@_template
def literals(rng: random.Random) -> Spelled:
    n = rng.randint(170, 250)
    return Spelled(
        "literals",
        [f"{n:X}_{{16}}"],
        [f"0x{n:X}", f"0x{n:x}"],
        [f"0x{n + 1:X}", f"0b{n:b}1", f"0x{n}"],
    )


@_template
def punctured(rng: random.Random) -> Spelled:
    a = rng.randint(1, 5)
    b = a + rng.randint(1, 5)
    return Spelled(
        "punctured",
        [rf"\mathbb{{R}} \setminus \{{{a}\}}", rf"(-\infty,{a})\cup({a},\infty)", rf"x \ne {a}"],
        [
            rf"x \neq {a}", rf"\mathbb{{R}} - \{{{a}\}}", rf"(-\infty, {a}) \cup ({a}, \infty)",
            rf"\{{x \in \mathbb{{R}} \mid x \neq {a}\}}", rf"\text{{all real numbers except }} {a}",
        ],
        [
            rf"x \neq {b}", r"\mathbb{R}", rf"({a},\infty)", rf"(-\infty,{a}]\cup({a},\infty)",
            rf"\mathbb{{R}} \setminus \{{{a},{b}\}}",
        ],
    )  # fmt: skip


@_template
def pierced(rng: random.Random) -> Spelled:
    a = rng.randint(1, 5)
    b = a + rng.randint(1, 5)
    return Spelled(
        "pierced",
        [rf"[{a},{b})\cup({b},\infty)"],
        [
            rf"x\ge {a}, x\ne {b}",
            rf"x \geq {a} \text{{ and }} x \neq {b}",
            rf"[{a},\infty)\setminus\{{{b}\}}",
        ],
        [
            rf"x\ge {a}",
            rf"x>{a}, x\ne {b}",
            rf"[{a},\infty)\setminus\{{{b + 1}\}}",
            rf"({b},\infty)",
        ],
    )


@_template
def absolute_bounds(rng: random.Random) -> Spelled:
    a = rng.randint(2, 9)
    return Spelled(
        "absolute bounds",
        [f"|x| > {a}", rf"x < -{a} \text{{ or }} x > {a}"],
        [rf"(-\infty,-{a})\cup({a},\infty)", f"|x|>{a}", rf"x>{a} \text{{ or }} x<-{a}"],
        [rf"|x| \ge {a}", f"x > {a}", f"(-{a},{a})", f"|x| < {a}"],
    )


@_template
def scaled_matrices(rng: random.Random) -> Spelled:
    a, b = rng.sample(range(1, 9), 2)
    return Spelled(
        "scaled matrices",
        [rf"\begin{{pmatrix}} -\frac{{{a}}}{{2}} \\ \frac{{{b}}}{{2}} \end{{pmatrix}}"],
        [
            rf"\frac12\begin{{pmatrix}} -{a} \\ {b} \end{{pmatrix}}",
            rf"-\frac{{1}}{{2}}\begin{{bmatrix}} {a} \\ -{b} \end{{bmatrix}}",
        ],
        [
            rf"-\frac12\begin{{pmatrix}} -{a} \\ {b} \end{{pmatrix}}",
            rf"\frac13\begin{{pmatrix}} -{a} \\ {b} \end{{pmatrix}}",
        ],
    )


@_template
def in_words(rng: random.Random) -> Spelled:
    tens, units = (
        rng.choice([("twenty", 20), ("forty", 40), ("ninety", 90)]),
        rng.choice([("three", 3), ("eight", 8)]),
    )
    n = tens[1] + units[1]
    return Spelled(
        "in words",
        [str(n)],
        [
            f"{tens[0]}-{units[0]}",
            rf"\text{{{tens[0]} {units[0]}}}",
            f"{n} (approximately)",
            f"{n} (units)",
        ],
        [tens[0], f"{tens[0]}-four", f"{units[0]} hundred", f"one hundred {tens[0]}-{units[0]}"],
    )


@_template
def sums_by_library(rng: random.Random) -> Spelled:
    n = rng.randint(3, 9)
    value = sum(k * k for k in range(1, n + 1))
    return Spelled(
        "sums", [str(value)], [rf"\sum_{{k=1}}^{{{n}}} k^2"], [rf"\sum_{{k=1}}^{{{n + 1}}} k^2"]
    )


# -- words -----------------------------------------------------------------------------------------


@_template
def points_of_figures(rng: random.Random) -> Spelled:
    a, b, c = rng.sample("ABCDEFGHKLMNPQRST", 3)
    return Spelled(
        "figures",
        [f"{a}{b}{c}", rf"\triangle {a}{b}{c}"][:1],
        [f"{a}{b}{c}", rf"\text{{{a}{b}{c}}}", f"${a}{b}{c}$"],
        [f"{a}{c}{b}", f"{b}{a}{c}", f"{a}{b}", f"{c}{b}{a}"],
    )


_PEOPLE = [
    "Alice",
    "Robert",
    "Charlotte",
    "Dmitri",
    "Evelyn",
    "Mr. Jones",
    "Angela",
    "Evelyn and Ray"[:6],
]


@_template
def words(rng: random.Random) -> Spelled:
    word, other = rng.sample(
        [
            "even",
            "odd",
            "east",
            "seat",
            "blue",
            "Monday",
            "Friday",
            "parabola",
            "hyperbola",
            "ellipse",
            "convergent",
            "divergent",
            "cat",
            "act",
        ],
        2,
    )
    return Spelled(
        "words",
        [word, rf"\text{{{word}}}"],
        [
            word,
            word.capitalize(),
            rf"\text{{{word}}}",
            rf"\textbf{{{word}}}",
            f"{word}.",
            rf"\mathrm{{{word}}}",
            rf"\text{{{word.upper()}}}",
        ],
        [other, f"not {word}", rf"\text{{{other}}}", "5", word[::-1]],
    )


@_template
def names(rng: random.Random) -> Spelled:
    name, other = rng.sample(_PEOPLE[:7], 2)
    return Spelled(
        "names",
        [name],
        [name, rf"\text{{{name}}}", rf"\textbf{{{name}}}", f"{name}.", name.lower()],
        [other, rf"\text{{{other}}}", name[1:] + name[0], "0"],
    )


@_template
def yes_and_no(rng: random.Random) -> Spelled:
    word, other = rng.choice(
        [("yes", "no"), ("no", "yes"), ("true", "false"), ("Yes", "No"), ("False", "True")]
    )
    return Spelled(
        "yes and no",
        [word, rf"\text{{{word}}}"],
        [word, word.capitalize(), word.upper(), rf"\text{{{word}.}}", f"{word}!"],
        [other, rf"\text{{{other}}}", f"not {word}", "1"],
    )


@_template
def no_solution(rng: random.Random) -> Spelled:
    return Spelled(
        "no solution",
        [r"\emptyset", r"\text{no solution}"],
        [r"\varnothing", "∅", r"\text{No solution}", r"\{\}", "no solutions"],
        ["0", r"\{0\}", r"\infty", r"\R", str(rng.randint(1, 9))],
    )


@_template
def everything(rng: random.Random) -> Spelled:
    return Spelled(
        "everything",
        [r"(-\infty,\infty)", r"\mathbb{R}"],
        [
            r"\mathbb{R}",
            "ℝ",
            r"(-\infty, \infty)",
            r"\text{all real numbers}",
            r"\left(-\infty,\infty\right)",
        ],
        [r"(0,\infty)", r"\emptyset", f"(-{rng.randint(2, 9)},\\infty)", r"\mathbb{Z}"],
    )


@_template
def infinities(rng: random.Random) -> Spelled:
    return Spelled(
        "infinities",
        [r"\infty"],
        ["∞", r"+\infty", r"\text{infinity}", "infinity"],
        [r"-\infty", str(rng.randint(1, 99)), "0"],
    )


@_template
def empty(rng: random.Random) -> Spelled:
    return Spelled("empty", [str(rng.randint(2, 99))], [], ["", " ", "$ $", r"\text{}", "?", r"\,"])


# -- math and DAPO responses -----------------------------------------------------------------------

_BOXES = (
    "We get the result.\n\n\\boxed{%s}",
    "So the final answer is $\\boxed{%s}$.",
    "First \\boxed{7777}, but that was wrong. In the end: $$\\boxed{ %s }$$",
    "Therefore, \\[\n\\boxed{%s}\n\\]",
    "<think>Maybe \\boxed{7777}? No.</think>\nThe answer: \\(\\boxed{%s}\\). Done.",
    "\\fbox{%s}",
    "Since 3 + 4 = 7, we have\n\\boxed{%s}. This is what was asked for.",
)


def spelled(seed: int, rounds: int) -> Iterator[tuple[random.Random, Spelled]]:
    """Each template's values, drawn ``rounds`` times."""
    rng = random.Random(seed)
    for _ in range(rounds):
        for template in _TEMPLATES:
            yield rng, template(rng)


def math_answers(seed: int = 1, rounds: int = 2) -> list[GradedAnswer]:
    r"""Boxed answers: each spelling once a round, under labels and in surroundings that are
    drawn."""
    cases = []
    for rng, case in spelled(seed, rounds):
        for right, answers in ((True, case.right), (False, case.wrong)):
            for answer in answers:
                response = rng.choice(_BOXES).replace("%s", answer)
                cases.append(GradedAnswer(case.kind, response, rng.choice(case.labels), right))
    return cases


def math_answers_in_prose(seed: int = 2) -> list[GradedAnswer]:
    """Numbers without a box."""
    rng = random.Random(seed)
    cases = []
    for _ in range(40):
        n = rng.randint(12, 5000)
        spellings = (
            str(n),
            f"{n:,}",
            f"**{n}**",
            f"{n}.0",
            rf"\({n}\)",
            f"{n} apples",
            f"\\${n}",
            f"x = {n}",
        )
        others = (
            str(n + 1),
            f"{n + 10:,}",
            f"-{n}",
            f"{n}.5",
            f"{n}/7",
            rf"\(\sqrt{{{n}}}\)",
            f"{n}0",
        )
        for right, answers in ((True, spellings), (False, others)):
            answer = rng.choice(answers)
            template = rng.choice(
                (
                    "The answer is %s.",
                    "It took 3 steps.\nAnswer: %s",
                    "Therefore, the final answer is: %s",
                )
            )
            cases.append(GradedAnswer("prose", template.replace("%s", answer), str(n), right))
    return cases + _lists_in_prose(rng)


_LISTS_IN_PROSE = (
    "The solutions are x = %s and x = %s.", "The solutions are $x = %s$ and $x = %s$.", "So the roots are %s and %s.",
    r"\boxed{x = %s} and \boxed{x = %s}", r"Answers: \boxed{%s}, \boxed{%s}", r"$\boxed{%s}$ or $\boxed{%s}$.",
    "Therefore, x = %s or x = %s.", "Thus the possible values are $%s$ and $%s$.",
)  # fmt: skip


def _lists_in_prose(rng: random.Random) -> list[GradedAnswer]:
    cases = []
    for template in _LISTS_IN_PROSE:
        a, b = rng.sample(range(2, 50), 2)
        response = template % (a, b)
        labels = (
            (f"{a}, {b}", True),
            (rf"\{{{b}, {a}\}}", True),
            (str(b), False),
            (f"{a}, {b + 1}", False),
        )
        cases += [GradedAnswer("lists in prose", response, label, right) for label, right in labels]
    return cases


_ANSWER_LINES = (
    "We compute.\nAnswer: %s",
    "Step 1: 3 + 4 = 7\n\nAnswer: $%s$",
    "Answer: 7777\nNo, wait.\nAnswer: %s",
    "**Answer:** %s",
    "Answer: \\boxed{%s}",
    "answer : $%s$.",
    "Answer: %s\n\nThat is all.",
    "x" * 400 + "\nAnswer: %s",
)
#: Kinds whose spellings hold what an answer line cannot: dollars, line breaks.
_NOT_ON_A_LINE = frozenset({"empty"})


def dapo_answers(seed: int = 3, rounds: int = 2) -> list[GradedAnswer]:
    """Answers on the last line "Answer: …"."""
    cases = []
    for rng, case in spelled(seed, rounds):
        if case.kind in _NOT_ON_A_LINE or case.kind == "sums":
            continue
        for right, answers in ((True, case.right), (False, case.wrong)):
            for answer in answers:
                line = rng.choice(
                    _ANSWER_LINES if "$" not in answer.replace(r"\$", "") else _ANSWER_LINES[:1]
                )
                cases.append(
                    GradedAnswer(
                        case.kind, line.replace("%s", answer), rng.choice(case.labels), right
                    )
                )
    return cases


# -- multiple choice -------------------------------------------------------------------------------

_CHOSEN = (
    "The answer is X.",
    "The answer is (X).",
    "Answer: X",
    "Answer: **X**",
    "**Answer: X**",
    "Final Answer: (X)",
    r"\boxed{X}",
    r"$\boxed{X}$",
    r"\boxed{(X)}",
    r"\boxed{\text{X}}",
    r"\boxed{\mathbf{X}}",
    r"\boxed{\textbf{(X)}}",
    r"\boxed{\mathrm{X}}",
    r"\boxed{\text{(X)}}",
    r"\boxed{X. §}",
    r"\boxed{(X) §}",
    r"\boxed{X) §}",
    r"\boxed{\text{X. §}}",
    "The correct option is X",
    "The correct answer is X.",
    "I choose (X).",
    "I would pick option X.",
    "X",
    "(X)",
    "**X**",
    "X. §",
    "(X) §",
    "Option X is correct.",
    "The correct choice is therefore **(X)**.",
    "Hence, the answer is $X$.",
    "So the answer must be X: §",
    r"The answer is \(X\)",
    "The best answer is “X”.",
    "X is the correct answer.",
    r"Final answer: $\mathbf{X}$",
    "answer: X) §",
    "### Answer\nX",
    "After elimination, I'm going with X.",
    r"\boxed{\text{Option X}}",
    "The answer should be X because Y fails.",
    "The answer is Y. Wait, that is wrong: the answer is X.",
    r"At first \boxed{Y}, but then \boxed{X}",
    "The answer is not Y. The answer is X.",
    "(Y) looks good, but it is wrong. The answer: (X)",
    "<think>It might be (Y). The answer is Y.</think>The answer is X.",
    "<think>Y?</think>\n\n**X**",
)
_UNCHOSEN = (
    "I can't answer a question about that.",
    "To answer a question like this, a physicist is needed.",
    "This is a hard question and I do not know.",
    "<think>the answer is X",
    "<think>So it is \\boxed{X}, and",
    "The answer is X and Y.",
    "The answer is either X or Y.",
    r"\boxed{X, Y}",
    r"\boxed{X \text{ and } Y}",
    "The answer is not X.",
    "X is wrong.",
    "I rule out (X).",
    "",
    "Both X and Y are correct.",
    "The answer isn't X.",
    "There is no answer.",
    "<think>X</think>",
    "We need an answer. A student I know said so.",
)
_TEXTS = (
    "5 m/s", "12 J", "a proton", "twice as large", "the enzyme is inhibited", r"\frac{1}{2}",
    "3.2 eV", "red", "10^{-3} mol", "none of these",
)  # fmt: skip


def choice_answers(seed: int = 4) -> list[GradedAnswer]:
    """Statements of one letter (right under its label, wrong under another one), and those of
    none."""
    rng = random.Random(seed)
    cases = []
    for template in _CHOSEN:
        for letters in ("ABCD", "ABCDEFGHIJ"):
            chosen, other = rng.sample(letters, 2)
            response = (
                template.replace("X", chosen)
                .replace("Y", other)
                .replace("§", rng.choice(_TEXTS[:2]))
            )
            cases.append(GradedAnswer(template, response, chosen, True))
            for wrong in sorted(set(letters) - {chosen})[:4]:
                cases.append(GradedAnswer(template, response, wrong, False))
    for template in _UNCHOSEN:
        first, second = rng.sample("ABCDEFGHIJ", 2)
        response = template.replace("X", first).replace("Y", second)
        cases += [
            GradedAnswer(template, response, letter, False) for letter in ("A", "I", first, second)
        ]
    for template in ("The answer is §.", r"\boxed{§}", "Answer: §", r"\boxed{\text{§}}", "§"):
        texts = rng.sample(_TEXTS, 4)
        for right in (0, 1, 2, 3):
            response = template.replace("§", texts[right])
            metadata = {"choices": texts}
            cases.append(
                GradedAnswer(f"by text: {template}", response, "ABCD"[right], True, metadata)
            )
            cases.append(
                GradedAnswer(f"by text: {template}", response, texts[right], True, metadata)
            )
            cases.append(
                GradedAnswer(f"by text: {template}", response, "ABCD"[right - 1], False, metadata)
            )
    return cases
